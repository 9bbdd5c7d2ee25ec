"""Every computing function against bedstone's float64 references, over random descriptors.

The harness of the conformance suite runs them: guarded memory, poisoned outputs, results within
their error bounds, gaps and inputs untouched, a second run equal bit by bit. Problems are drawn
with any dims, strides, paddings and modes that the interface can express. Most run on the
reference backend, which shows wrong wiring as well as the kernels do; some on the CPU's.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from cudnn_cases import convolution, filters, tensor
from cudnn_driver import Through, through_v1, through_v2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import bedstone
from bedstone.compat import cudnn_v1, cudnn_v2
from bedstone.spec.tensor_ops import ADD_MODES, add_dims
from bedstone.testing.harness import Case, Trial, in_place_names, memory_of
from bedstone.testing.problems.strides import KINDS, tensor_fields, with_strides

FUNCTIONS = {
    "convolution": ("forward", "backward_data", "backward_filter", "backward_bias"),
    "pooling": ("forward", "backward"),
    "softmax": ("forward", "backward"),
    "activation": ("forward", "backward"),
    "tensor_ops": ("transform", "add", "set", "scale"),
}
V2 = [pytest.param(p, d, id=f"{p}-{d}") for p, all_ in FUNCTIONS.items() for d in all_]
V1 = [p for p in V2 if p.values[1] != "scale"]
FACTORS = (1.0, -0.5, 2.0, 0.0)  # all exact in float32
V1_BETA = {"convolution": (0.0, 1.0), "add": (1.0,)}
EXAMPLES = {"reference": 40, "cpu": 4}
HANDLES = {1: cudnn_v1.cudnnCreate(), 2: cudnn_v2.cudnnCreate()}
BACKENDS = pytest.mark.parametrize("backend", EXAMPLES)

few = st.integers(1, 5)
dtypes = st.sampled_from(("float32", "float64"))


@st.composite
def problems(draw, primitive, direction, axes=None, v1=False):
    """A problem that the interface can express, with strides of any kind."""
    make = {
        "convolution": convolutions,
        "pooling": poolings,
        "softmax": softmaxes,
        "activation": activations,
        "tensor_ops": operations,
    }[primitive]
    problem = make(draw, direction, axes or draw(st.integers(1, 3)), v1)
    random = np.random.default_rng(draw(st.integers(0, 99)))
    for field in tensor_fields(problem):
        if field == "w" or (field == "bias"):  # filters are contiguous
            continue
        problem = with_strides(problem, field, draw(st.sampled_from(KINDS)), random)
    return problem


def convolutions(draw, direction, axes, v1):
    window = tuple(draw(st.lists(st.integers(1, 3), min_size=axes, max_size=axes)))
    padding = tuple(draw(st.lists(st.integers(0, 2), min_size=axes, max_size=axes)))
    stride = tuple(draw(st.lists(st.integers(1, 3), min_size=axes, max_size=axes)))
    space = tuple(draw(st.integers(max(r - 2 * p, 1), 6)) for r, p in zip(window, padding))
    n, c, k, dtype = draw(st.integers(0, 3)), draw(few), draw(few), draw(dtypes)
    if direction == "backward_bias":
        y = bedstone.TensorDesc.packed((n, k, *space), dtype)
        return bedstone.BiasGradientProblem(y, bedstone.TensorDesc((k,), (draw(few),), dtype))
    mode = draw(st.sampled_from(("convolution", "cross_correlation")))
    return bedstone.convolution_problem(
        direction, (n, c, *space), (k, c, *window),
        dtype=dtype, padding=padding, stride=stride, mode=mode,
    )  # fmt: skip


def poolings(draw, direction, axes, v1):
    window = tuple(draw(st.lists(st.integers(1, 3), min_size=axes, max_size=axes)))
    padding = tuple(0 if v1 else draw(st.integers(0, r - 1)) for r in window)
    stride = tuple(draw(st.lists(st.integers(1, 3), min_size=axes, max_size=axes)))
    space = tuple(draw(st.integers(r, 7)) for r in window)
    modes = ("max", "average_include_padding", "average_exclude_padding")[: 2 if v1 else 3]
    rounding = draw(st.sampled_from(("floor", "ceil")))  # either is a size the caller may have
    pool = bedstone.PoolingDesc.of(
        draw(st.sampled_from(modes)), window, axes, padding, stride, rounding=rounding
    )
    dims = (draw(st.integers(1, 3)), draw(few), *space)
    dtype = draw(dtypes)
    x = bedstone.TensorDesc.packed(dims, dtype)
    y = bedstone.TensorDesc.packed(pool.output_dims(dims), dtype)
    return bedstone.PoolingProblem(direction, x, y, pool)


def plain_dims(draw, axes):
    return tuple(draw(st.lists(few, min_size=axes + 2, max_size=axes + 2)))


def softmaxes(draw, direction, axes, v1):
    x = bedstone.TensorDesc.packed(plain_dims(draw, axes), draw(dtypes))
    over = draw(st.sampled_from(((1,), tuple(range(1, x.rank)))))
    return bedstone.SoftmaxProblem(
        direction, x, x, draw(st.sampled_from(("fast", "accurate"))), over
    )


def activations(draw, direction, axes, v1):
    x = bedstone.TensorDesc.packed(plain_dims(draw, axes), draw(dtypes))
    kind = draw(st.sampled_from(("sigmoid", "relu", "tanh")))
    return bedstone.ActivationProblem(direction, x, x, bedstone.ActivationDesc(kind))


def operations(draw, direction, axes, v1):
    y = bedstone.TensorDesc.packed(plain_dims(draw, axes), draw(dtypes))
    if direction in ("set", "scale"):
        return bedstone.TensorOpProblem(direction, y)
    if direction == "transform":
        return bedstone.TensorOpProblem(direction, y, y)
    dims = add_dims(draw(st.sampled_from(sorted(ADD_MODES))), y.dims)
    return bedstone.TensorOpProblem(direction, y, bedstone.TensorDesc.packed(dims, y.dtype))


def check(problem, call, backend, fill, alpha, beta, alias=""):
    """Run it through the interface in the harness; raises Mismatch."""
    with bedstone.config(backend=backend):
        plan = bedstone.Handle().plan(problem)
        case = Case(problem, plan.algorithm, fill, alpha, beta, "end", alias)
        Trial(case, Through(plan, call), memory_of("cpu")).check()


def drawn(backend, test):
    """The test over so many examples, the same ones every time."""
    decorate = settings(
        max_examples=EXAMPLES[backend],
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    return decorate(given(st.data())(test))


@BACKENDS
@pytest.mark.parametrize(("primitive", "direction"), V2)
def test_v2(primitive, direction, backend):
    def one(data):
        problem = data.draw(problems(primitive, direction))
        beta = 0.0 if direction == "set" else data.draw(st.sampled_from(FACTORS))
        alpha = data.draw(st.sampled_from(FACTORS))
        fill = data.draw(st.sampled_from(("integers", "random", "special")))
        check(problem, through_v2(problem, HANDLES[2]), backend, fill, alpha, beta)

    drawn(backend, one)()


@BACKENDS
@pytest.mark.parametrize(("primitive", "direction"), V1)
def test_v1(primitive, direction, backend):
    def one(data):
        problem = data.draw(problems(primitive, direction, axes=2, v1=True))
        betas = V1_BETA.get(direction, V1_BETA.get(primitive, (0.0,)))
        factors = FACTORS if direction in ("add", "set") else (1.0,)
        alpha, beta = data.draw(st.sampled_from(factors)), data.draw(st.sampled_from(betas))
        fill = data.draw(st.sampled_from(("integers", "random", "special")))
        check(problem, through_v1(problem, HANDLES[1]), backend, fill, alpha, beta)

    drawn(backend, one)()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("primitive", ["activation", "softmax"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_in_place(version, primitive, direction):
    """Results over inputs, as Caffe's layers have them, in strided memory too."""

    def one(data):
        problem = data.draw(problems(primitive, direction, axes=2))
        for alias in in_place_names(problem):
            through = through_v1 if version == 1 else through_v2
            check(problem, through(problem, HANDLES[version]), "reference", "random", 1, 0, alias)
            tried.append(alias)

    tried = []
    drawn("reference", one)()
    assert set(tried) == ({"x"} if direction == "forward" else {"y", "dy"})


def lowered(x, window, conv):
    """The lowering by its definition, element by element."""
    space = conv.output_dims(x.shape, (1, x.shape[1], *window))[2:]
    columns = np.zeros((x.shape[1], *window, x.shape[0], *space), x.dtype)
    for index in np.ndindex(columns.shape):
        c, tap = index[0], index[1 : 1 + len(window)]
        n, pixel = index[1 + len(window)], index[2 + len(window) :]
        if conv.mode == "convolution":
            tap = tuple(r - 1 - t for t, r in zip(tap, window))
        at = [p * u + t - pad[0] for p, u, t, pad in zip(pixel, conv.stride, tap, conv.padding)]
        if all(0 <= i < h for i, h in zip(at, x.shape[2:])):
            columns[index] = x[(n, c, *at)]
    return columns


@BACKENDS
def test_im2col(backend):
    """Bitwise the lowering, in guarded memory, NaN and all."""

    def one(data):
        problem = data.draw(problems("convolution", "forward"))
        random = np.random.default_rng(data.draw(st.integers(0, 99)))
        low, high = problem.x.offset_range()
        memory = np.full(high - low + 1, np.nan, problem.x.dtype.numpy)
        size = memory.itemsize
        origin = memory[-low:]  # reversed axes go below it
        x = np.lib.stride_tricks.as_strided(
            origin, problem.x.dims, [s * size for s in problem.x.strides]
        )
        x[...] = random.standard_normal(x.shape)
        if x.size:
            x[(0,) * x.ndim] = random.choice([np.inf, np.nan, -0.0])
        wanted = lowered(x, problem.w.dims[2:], problem.conv)
        columns = np.full(wanted.size + 64, 7.0, x.dtype)
        alpha = data.draw(st.sampled_from(FACTORS))
        with bedstone.config(backend=backend):
            cudnn_v2.cudnnIm2Col(
                HANDLES[2], alpha, tensor(problem.x), origin.ctypes.data,
                filters(*problem.w.dims, dtype=problem.w.dtype), convolution(problem.conv),
                columns,
            )  # fmt: skip
        assert (columns[wanted.size :] == 7.0).all()
        got = columns[: wanted.size].reshape(wanted.shape)
        if alpha == 1.0:
            assert got.tobytes() == wanted.tobytes()
        else:
            with np.errstate(invalid="ignore"):
                np.testing.assert_array_equal(got, wanted * x.dtype.type(alpha))

    drawn(backend, one)()


def test_the_lowered_matrix_times_the_filters_is_the_convolution():
    problem = bedstone.convolution_problem(
        "forward", (2, 3, 6, 5), (4, 3, 3, 2),
        dtype="float64", padding=(1, 2), stride=(2, 1), mode="convolution",
    )  # fmt: skip
    random = np.random.default_rng(0)
    x, w = random.standard_normal(problem.x.dims), random.standard_normal(problem.w.dims)
    n, k, p, q = problem.y.dims
    columns = np.empty((math.prod(problem.w.dims[1:]), n * p * q))
    cudnn_v2.cudnnIm2Col(
        HANDLES[2], 1.0, tensor(problem.x), x, filters(*problem.w.dims, dtype="float64"),
        convolution(problem.conv), columns,
    )  # fmt: skip
    y = (w.reshape(k, -1) @ columns).reshape(k, n, p, q).swapaxes(0, 1)
    np.testing.assert_allclose(y, problem.reference({"x": x, "w": w})["y"], rtol=1e-12)
