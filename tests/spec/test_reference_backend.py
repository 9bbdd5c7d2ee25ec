"""`reference:direct`: the definition on the caller's memory, any strides, every primitive."""

import numpy as np
import pytest
from hypothesis import given
from spec_cases import law, problems, seeds

from bedstone.backends.reference.direct import ALGORITHMS, view
from bedstone.plan.config import config
from bedstone.plan.device import Device
from bedstone.plan.handle import Handle
from bedstone.spec.activation import ActivationDesc, ActivationProblem
from bedstone.spec.problem import parse_problem
from bedstone.spec.tensor import TensorDesc

GUARD = 3  # elements around the memory of an operand


def plan_of(problem):
    with config(backend="reference"):
        plan = Handle().plan(problem)
    assert plan.algorithm == "reference:direct" and plan.workspace_size == 0
    return plan


class Memory:
    """A block of memory that holds one operand between guards: `elements` is a view of it."""

    def __init__(self, desc, random):
        low, high = desc.offset_range()
        size = high - low + 1 + 2 * GUARD
        if desc.dtype.is_floating:
            self.block = random.standard_normal(size).astype(desc.dtype.numpy)
        else:
            self.block = random.integers(0, 2, size).astype(desc.dtype.numpy)
        itemsize = desc.dtype.itemsize
        self.pointer = self.block.ctypes.data + (GUARD - low) * itemsize
        self.elements = np.lib.stride_tricks.as_strided(
            self.block[GUARD - low :], desc.dims, [s * itemsize for s in desc.strides]
        )


@law
@given(problems(), seeds)
def test_writes_the_reference_and_nothing_else(problem, seed):
    """Any strides, against Problem.reference on dense copies (whose sums NumPy may take in another
    order: one rounding of float64, two units after the store); what lies around is untouched."""
    random = np.random.default_rng(seed)
    alpha, beta = (1.0, 0.0) if seed % 2 else (-2.0, 0.5)
    memory = {o.name: Memory(o.desc, random) for o in problem.operands}
    dense = {name: m.elements.copy() for name, m in memory.items()}
    expected = problem.reference(dense, alpha, beta)
    after = {name: m.block.copy() for name, m in memory.items()}
    for operand in problem.outputs:
        if operand.role == "out" and beta == 0.0 and operand.desc.dtype.is_floating:
            memory[operand.name].elements[...] = np.nan
        place = Memory(operand.desc, random)
        place.block[...] = after[operand.name]
        with np.errstate(all="ignore"):
            place.elements[...] = expected[operand.name].astype(place.elements.dtype)
        after[operand.name] = place.block
    plan_of(problem)(*(m.pointer for m in memory.values()), alpha=alpha, beta=beta)
    for operand in problem.operands:
        got, want = memory[operand.name].block, after[operand.name]
        if operand.is_output and operand.desc.dtype.is_floating:
            got, want = got.astype(np.float64), want.astype(np.float64)
            tolerance = 2 * max(operand.desc.dtype.epsilon, 2.0**-40)
            np.testing.assert_allclose(got, want, tolerance, 2.0**-40, err_msg=operand.name)
        else:
            np.testing.assert_array_equal(got, want, err_msg=operand.name)


def test_in_place():
    x = np.array([[-1.0, 2.0], [3.0, -4.0]], np.float32)
    desc = TensorDesc.of(x)
    plan = plan_of(ActivationProblem("forward", desc, desc, ActivationDesc("relu")))
    plan.execute(x, x, alpha=2.0)
    assert x.tolist() == [[0, 4], [6, 0]]


def test_rounds_once():
    """Sums are exact in float64 and rounded to the output's type at the end."""
    x = np.array([[2048.0, 1.0, 1.0]], np.float16)[..., None]
    w = np.ones((1, 3, 1), np.float16)
    y = np.empty((1, 1, 1), np.float16)
    plan_of(parse_problem("convolution forward n1c3w1k1s1 float16")).execute(x, w, y)
    assert y.item() == 2050.0  # 2048 + 1 is 2048 in float16


def test_view_reaches_below_its_pointer():
    block = np.arange(6.0)
    desc = TensorDesc((2, 3), (-3, -1), "float64")
    assert view(block.ctypes.data + 5 * 8, desc).tolist() == [[5, 4, 3], [2, 1, 0]]
    assert view(0, TensorDesc.packed((0, 3))).shape == (0, 3)


def test_takes_cpu_problems_only():
    problem = parse_problem("softmax forward 2x3 float32")
    assert ALGORITHMS[0].supports(problem, Device("cpu")) is None
    assert "cuda" in ALGORITHMS[0].supports(problem, Device("cuda"))


@pytest.mark.parametrize("batch", [0, 1])
def test_empty_batch_still_writes_the_filter_gradient(batch):
    problem = parse_problem(f"convolution backward_filter n{batch}c2h3k1r2 float32")
    x, dy, dw = (np.ones(o.desc.dims, np.float32) for o in problem.operands)
    plan_of(problem).execute(x, dy, dw, beta=0.5)
    assert np.all(dw == 4 * batch + 0.5)
