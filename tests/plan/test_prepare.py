"""Plan.prepare: a filter given once, checked once, and calls without it."""

from __future__ import annotations

import numpy as np
import pytest
from plan_fakes import Fake

from bedstone import Handle, InvalidDescriptor, parse_problem
from bedstone.plan.algorithm import Preparation

FORWARD = parse_problem("convolution forward n2c32h6w6k16r3p1 float32")
BACKWARD = parse_problem("convolution backward_data n2c32h6w6k16r3p1 float32")
WINOGRAD = "cpu:winograd_2x2_3x3"


def tensors(seed=0):
    random = np.random.default_rng(seed)
    return tuple(
        random.standard_normal(dims, np.float32)
        for dims in ((2, 32, 6, 6), (16, 32, 3, 3), (2, 16, 6, 6))
    )


@pytest.fixture
def made():
    return Handle("cpu").plan(FORWARD, WINOGRAD)


def test_calls_without_the_filter(made):
    x, w, y = tensors()
    made.execute(x, w, y)
    prepared = made.prepare(w)
    other = np.full_like(y, np.nan)
    prepared.execute(x, other)
    assert np.array_equal(other, y)
    prepared.execute(y=other, x=x, alpha=2.0, beta=1.0)
    np.testing.assert_allclose(other, 3 * y, rtol=1e-5)
    prepared(x.ctypes.data, other.ctypes.data)
    assert np.array_equal(other, y)
    assert prepared.algorithm == WINOGRAD and prepared.workspace_size == 0
    assert f"packed beforehand: {made.prepared_size} bytes" in prepared.explain()
    assert WINOGRAD in repr(prepared)


def test_backward_data_takes_dy_and_dx():
    dx, w, dy = tensors()
    plan = Handle("cpu").plan(BACKWARD)
    plan.execute(w, dy, dx)
    other = np.full_like(dx, np.nan)
    plan.prepare(w).execute(dy, other)
    assert np.array_equal(other, dx)


def test_the_filter_is_packed_once(made):
    """A prepared plan computes with the filter that it was made with, until the next one."""
    x, w, y = tensors()
    made.execute(x, w, y)
    prepared = made.prepare(w)
    kept, other = w.copy(), np.empty_like(y)
    w[:] = 0
    prepared.execute(x, other)
    assert np.array_equal(other, y)
    made.prepare(w).execute(x, other)
    assert not other.any()
    w[:] = kept


def test_memory_of_the_caller(made):
    x, w, y = tensors()
    made.execute(x, w, y)
    memory = np.zeros(made.prepared_size + 8, np.uint8)
    prepared, other = made.prepare(w, memory), np.empty_like(y)
    assert prepared.packed == memory.ctypes.data and memory[:-8].any() and not memory[-8:].any()
    prepared.execute(x, other)
    assert np.array_equal(other, y)
    for match, wrong in (
        ("memory: got '.* bytes', expected .* contiguous bytes", memory[:-9]),
        (
            "memory: got '.* bytes', expected .* contiguous bytes",
            np.zeros(2 * memory.size, "u1")[::2],
        ),
        ("memory: got 'int', expected an array", 64),
    ):
        with pytest.raises(InvalidDescriptor, match=match):
            made.prepare(w, wrong)
    memory.flags.writeable = False
    with pytest.raises(InvalidDescriptor, match="memory: got 'cpu', expected writable"):
        made.prepare(w, memory)


def test_memory_apart_from_filter_and_output(made):
    x, w, y = tensors()
    space = np.zeros(made.prepared_size, np.uint8)
    inside = space[: w.nbytes].view(np.float32).reshape(w.shape)
    with pytest.raises(InvalidDescriptor, match="memory: got 'memory that overlaps w'"):
        made.prepare(inside, space)
    prepared = made.prepare(w, space)
    out = space[: y.nbytes].view(np.float32).reshape(y.shape)
    with pytest.raises(InvalidDescriptor, match="y: got 'memory of the packed filter'"):
        prepared.execute(x, out)


def test_what_is_checked(made):
    x, w, y = tensors()
    for wrong in (w[:8], w.astype("d"), np.asfortranarray(w)):
        with pytest.raises(InvalidDescriptor, match="w: got .*, expected the planned 16x32x3x3"):
            made.prepare(wrong)
    prepared = made.prepare(w)
    for match, arrays, named in (
        ("w: got 'ndarray', expected each of .'x', 'y'. once", (x, y), {"w": w}),
        ("arrays: got 3, expected 2 arrays: .'x', 'y'.", (x, w, y), {}),
        ("y: got None, expected an array for each of .'x', 'y'.", (x,), {}),
        ("x: got .*, expected the planned 2x32x6x6", (x[:1], y), {}),
        ("y: got 'memory that overlaps w'", (x, w.reshape(-1)[: y.size].reshape(y.shape)), {}),
    ):
        with pytest.raises(InvalidDescriptor, match=match):
            prepared.execute(*arrays, **named)


@pytest.mark.parametrize(
    "line",
    [
        "convolution backward_filter n2c32h6w6k16r3p1 float32",
        "pooling forward n2c3h6w6r2u2 float32",
        "activation forward 4x6 float32 kind=relu",
    ],
)
def test_no_filter_to_prepare(line):
    plan = Handle("cpu").plan(parse_problem(line))
    with pytest.raises(
        InvalidDescriptor, match="problem: .*expected one with the filter 'w' among"
    ):
        plan.prepare(np.ones((16, 32, 3, 3), np.float32))


@pytest.mark.parametrize("algorithm", ["reference:direct", "cpu:implicit_gemm"])
def test_a_kernel_that_packs_nothing(algorithm):
    """1x1 filters in rows are read where they lie, and so does the reference."""
    problem = parse_problem("convolution forward n1c8h4w4k64r1 float32")
    plan = Handle("cpu").plan(problem, algorithm)
    x, w = np.ones((1, 8, 4, 4), np.float32), np.ones((64, 8, 1, 1), np.float32)
    y = np.empty((1, 64, 4, 4), np.float32)
    prepared = plan.prepare(w)
    assert plan.prepared_size == 0 and prepared.packed == 0
    prepared.execute(x, y)
    assert (y == 8).all()
    assert "the filter is read as it lies" in prepared.explain()


def test_workspace_of_a_kernel_that_packs_nothing(use):
    fake = Fake("fake:a", workspace=64)
    use(fake)
    problem = parse_problem("convolution forward n2c32h6w6k16r3p1 float32")
    x, w, y = tensors()
    plan = Handle("cpu").plan(problem, workspace_limit=64)
    prepared, space = plan.prepare(w), np.zeros(64, np.uint8)
    assert prepared.workspace_size == 64
    with pytest.raises(InvalidDescriptor, match="workspace: got None"):
        prepared.execute(x, y)
    prepared.execute(x, y, workspace=space)
    assert fake.last_workspace == space.ctypes.data and prepared.native_entry is None


def test_an_algorithm_says_how_it_prepares(use):
    """Any backend's kernel may carry a preparation."""
    log = []

    class Packing(Fake):
        def build(self, problem, device):
            kernel = super().build(problem, device)

            def rest(pointers, workspace, alpha, beta, stream):
                log.append(("call", pointers[1], workspace))
                kernel(pointers, 0, alpha, beta, stream)

            kernel.preparation = lambda: Preparation(
                128, lambda w, memory: log.append(("pack", w, memory)), rest
            )
            return kernel

    use(Packing("fake:packing", workspace=32))
    x, w, y = tensors()
    problem = parse_problem("convolution forward n2c32h6w6k16r3p1 float32")
    prepared = Handle("cpu").plan(problem, workspace_limit=32).prepare(w)
    assert prepared.packed % 64 == 0 and prepared.workspace_size == 0
    prepared.execute(x, y)
    assert log == [
        ("pack", w.ctypes.data, prepared.packed),
        ("call", w.ctypes.data, prepared.packed),
    ]


def test_a_result_without_elements():
    problem = parse_problem("convolution forward n0c32h6w6k16r3p1 float32")
    prepared = Handle("cpu").plan(problem).prepare(tensors()[1])
    prepared.execute(np.empty((0, 32, 6, 6), np.float32), np.empty((0, 16, 6, 6), np.float32))
