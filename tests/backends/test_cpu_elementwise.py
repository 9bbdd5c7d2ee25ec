"""The pointwise loop nest: every kind of row and tile, in place, streamed, any strides."""

from __future__ import annotations

import random

import numpy as np
import pytest

pytest.importorskip("llvmlite")

import bedstone
from bedstone.backends.cpu.elementwise import collapse
from bedstone.backends.cpu.target import Target
from bedstone.plan.config import config
from bedstone.plan.handle import Handle
from bedstone.spec.activation import KINDS, ActivationDesc, ActivationProblem
from bedstone.spec.dtypes import DATA_DTYPES, DType
from bedstone.spec.tensor import TensorDesc
from bedstone.spec.tensor_ops import TensorOpProblem

GUARD = 64  # elements on either side of a tensor that must stay as they are
ULP = 32  # of the output, relative to 1 + |result|: operands are drawn up to about 8


class Guarded:
    """A tensor somewhere inside a larger buffer of random numbers, at a random alignment."""

    def __init__(self, desc, rng, poison=False):
        low, high = desc.offset_range()
        start = int(rng.integers(0, 17))
        count = max(high - low + 1, 0) + 2 * GUARD
        data = rng.standard_normal(start + count) * 2
        self.buffer = data.astype(desc.dtype.numpy)[start:]
        if poison:
            self.buffer[...] = np.nan
        self.desc, self.first = desc, GUARD - low
        self.before = self.buffer.copy()

    def of(self, buffer):
        strides = [s * self.desc.dtype.itemsize for s in self.desc.strides]
        return np.lib.stride_tricks.as_strided(buffer[self.first :], self.desc.dims, strides)

    @property
    def array(self):
        return self.of(self.buffer)

    def check_guards(self):
        before, after = self.before.copy(), self.buffer.copy()
        self.of(before)[...] = 0
        self.of(after)[...] = 0
        assert before.tobytes() == after.tobytes(), "wrote beside the tensor"


def run(problem, rng, alpha=1.0, beta=0.0, same=()):
    """Execute and compare; `same` are two operand names that share memory. Returns the plan."""
    tensors = {
        o.name: Guarded(o.desc, rng, o.is_output and beta == 0 and o.role == "out")
        for o in problem.operands
    }
    if same:
        tensors[same[1]] = tensors[same[0]]
    arrays = {name: t.array for name, t in tensors.items()}
    copies = {name: a.copy() for name, a in arrays.items()}
    want = problem.reference(copies, alpha, beta)
    plan = Handle().plan(problem, "cpu:*" if problem.outputs[0].desc.size else None)
    plan.execute(**arrays, alpha=alpha, beta=beta)
    for operand in problem.operands:
        if operand.is_output:
            got = arrays[operand.name].astype(np.float64)
            expected = want[operand.name]
            bound = ULP * operand.desc.dtype.epsilon * (1 + np.abs(expected))
            good = (np.abs(got - expected) <= bound) | (np.isnan(got) & np.isnan(expected))
            assert good.all(), f"{problem}: {got[~good][:4]} for {expected[~good][:4]}"
            tensors[operand.name].check_guards()
        elif operand.name not in same:
            assert tensors[operand.name].before.tobytes() == tensors[operand.name].buffer.tobytes()
    return plan


def draw_desc(draw, dims, dtype, output):
    """Strides in a random order of the axes: gaps, reversals and, for inputs, repeats."""
    order = list(range(len(dims)))
    if draw.random() < 0.6:
        draw.shuffle(order)
    strides, step = [0] * len(dims), draw.choice([1, 1, 1, 1, 2, 3])
    for axis in order:
        if not output and draw.random() < 0.12:
            continue
        strides[axis] = step * draw.choice([1, 1, 1, -1])
        step = step * max(1, dims[axis]) + draw.choice([0, 0, 0, 1, 5, 16])
    return TensorDesc(tuple(dims), tuple(strides), dtype)


def draw_dims(draw, most=30000):
    dims = [draw.choice([1, 2, 3, 4, 5, 7, 16, 17, 33, 70]) for _ in range(draw.randint(1, 5))]
    while np.prod(dims) > most:
        dims[dims.index(max(dims))] //= 2
    return dims


@pytest.mark.parametrize("seed", range(12))
def test_activation_on_any_strides(seed):
    draw, rng = random.Random(seed), np.random.default_rng(seed)
    for _ in range(8):
        dims, dtype = draw_dims(draw), draw.choice(DATA_DTYPES)
        kind = draw.choice(["relu", "leaky_relu", "hard_swish", draw.choice(list(KINDS))])
        direction = draw.choice(["forward", "backward"])
        y = draw_desc(draw, dims, dtype, direction == "forward")
        x = draw_desc(draw, dims, dtype, direction == "backward")
        saved = draw_desc(draw, dims, dtype, False) if direction == "backward" else y
        problem = ActivationProblem(direction, x, y, ActivationDesc(kind), saved)
        run(problem, rng, draw.choice([1.0, -1.5]), draw.choice([0.0, 0.5]))


@pytest.mark.parametrize("seed", range(12))
def test_tensor_operations_on_any_strides(seed):
    draw, rng = random.Random(seed), np.random.default_rng(seed)
    for _ in range(8):
        dims, dtype = draw_dims(draw), draw.choice(DATA_DTYPES)
        operation = draw.choice(["transform", "transform", "add", "set", "scale"])
        y, x = draw_desc(draw, dims, dtype, True), None
        if operation == "transform":
            x = draw_desc(draw, dims, draw.choice(DATA_DTYPES), False)
        if operation == "add":
            x = draw_desc(draw, [d if draw.random() < 0.5 else 1 for d in dims], dtype, False)
        problem = TensorOpProblem(operation, y, x)
        run(problem, rng, draw.choice([1.0, -1.5]), draw.choice([0.0, 0.5]))


@pytest.mark.parametrize("dtype", DATA_DTYPES)
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5, 16, 40, 300])
def test_layouts_change_by_blocked_transpose(dtype, channels):
    rng = np.random.default_rng(channels)
    dims = (2, channels, 5, 9)
    for source, target in (("NCHW", "NHWC"), ("NHWC", "NCHW")):
        x = TensorDesc.packed(dims, dtype, source)
        plan = run(TensorOpProblem("transform", TensorDesc.packed(dims, dtype, target), x), rng)
        wanted = "cpu:elementwise" if channels == 1 else "cpu:blocked_transpose"
        assert plan.algorithm == wanted


@pytest.mark.parametrize("cpu", ["haswell", "x86-64"])
def test_narrower_targets(cpu):
    if not Target.named("native").triple.startswith("x86_64"):
        pytest.skip("not an x86-64 machine")
    with config(cpu_target=cpu):
        test_activation_on_any_strides(100)
        test_tensor_operations_on_any_strides(101)


@pytest.mark.parametrize("dtype", DATA_DTYPES)
@pytest.mark.parametrize("operation", ["transform", "set", "scale", "add"])
def test_streamed_outputs(dtype, operation):
    """Large enough for non-temporal stores, at an odd alignment and with an odd tail."""
    size = Target.current().l3_bytes // dtype.itemsize + 1237
    rng = np.random.default_rng(3)
    values = rng.integers(-8, 8, size + 32).astype(np.int8)
    y = np.zeros(size + 32, dtype.numpy)[5 : 5 + size]
    b = values.astype(dtype.numpy)[3 : 3 + size]
    desc = TensorDesc.packed((size,), dtype)
    source = None if operation in ("set", "scale") else desc
    plan = Handle().plan(TensorOpProblem(operation, desc, source), "cpu:*")
    if operation == "scale":
        y[...] = b
    plan.execute(*([] if source is None else [b]), y, alpha=2.0)
    if operation == "set":
        assert (y == 2).all()
    else:
        assert np.array_equal(y, b * b.dtype.type(2))


@pytest.mark.parametrize("large", [False, True])
def test_in_place(large):
    size = Target.current().l3_bytes // 4 + 77 if large else 1001
    x = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    want = np.maximum(x, 0) * np.float32(3)
    desc = TensorDesc.of(x)
    problem = ActivationProblem("forward", desc, desc, ActivationDesc("relu"))
    Handle().plan(problem, "cpu:elementwise").execute(x, x, alpha=3.0)
    assert np.array_equal(x, want)


def test_one_element_tails_of_16_bit_types_leave_the_neighbour_alone():
    rng = np.random.default_rng(0)
    for dtype in (DType.bfloat16, DType.float16):
        desc = TensorDesc.packed((17,), dtype)
        run(TensorOpProblem("transform", desc, desc), rng)


def test_results_do_not_depend_on_the_number_of_threads():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((3, 40, 41, 43)).astype(np.float32)
    desc = TensorDesc.of(x)
    problem = ActivationProblem("forward", desc, desc, ActivationDesc("gelu"))
    results = []
    for threads in (1, 2, 5):
        y = np.full_like(x, np.nan)
        with config(num_threads=threads):
            Handle().plan(problem, "cpu:elementwise").execute(x, y)
        results.append(y)
    assert all(np.array_equal(results[0], r) for r in results)


def test_collapse_folds_what_all_operands_step_through_alike():
    dims = (2, 3, 4, 5)
    packed = TensorDesc.packed(dims)
    assert collapse([packed, packed]).dims == (120,)
    channel = TensorDesc(dims, (0, 1, 0, 0), "float32")
    assert collapse([channel, packed]).dims == (2, 3, 20)
    last = TensorDesc.packed(dims, layout="NHWC")
    assert collapse([last, packed]).dims == (2, 3, 20)
    backwards = TensorDesc(dims, (-60, -20, -5, -1), "float32")
    nest = collapse([backwards, backwards])
    assert (nest.dims, nest.offsets, nest.strides) == ((120,), (-119, -119), ((1,), (1,)))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["sigmoid", "tanh", "elu", "softplus"])
def test_exponentials_are_exact_to_a_few_units_in_both_tails(kind, dtype):
    """Relative errors, down to the subnormal numbers, where they are absolute."""
    spans = ((760, 15_001), (120, 24_001), (1, 4_001))
    wide = np.concatenate([np.linspace(-span, span, count) for span, count in spans])
    x = np.concatenate([wide, -np.logspace(-40, 2, 1_001), [0.0, -0.0, np.inf, -np.inf, np.nan]])
    x = x.astype(dtype)
    exact = x.astype(np.longdouble)
    with np.errstate(all="ignore"):
        want = {
            "sigmoid": lambda: np.exp(-np.logaddexp(0, -exact)),
            "tanh": lambda: np.tanh(exact),
            "elu": lambda: np.where(exact > 0, exact, np.expm1(exact)),
            "softplus": lambda: np.logaddexp(0, exact),
        }[kind]()
    got = bedstone.activation(x.reshape(1, -1), kind).ravel()
    number = np.isfinite(want)
    limits = np.finfo(x.dtype)
    bound = 6 * limits.eps * np.abs(want[number]) + 2 * limits.smallest_subnormal
    assert (np.abs(got[number] - want[number]) <= bound).all()
    assert np.array_equal(got[~number], want[~number].astype(dtype), equal_nan=True)
    assert np.array_equal(np.signbit(got[x == 0]), np.signbit(want[x == 0]))
