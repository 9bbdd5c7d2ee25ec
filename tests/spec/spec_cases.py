"""Small problems drawn by hypothesis, and what the tests of the specification share."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from bedstone.spec.activation import KINDS, ActivationDesc, ActivationProblem
from bedstone.spec.convolution import (
    DIRECTIONS,
    BiasGradientProblem,
    ConvolutionDesc,
    ConvolutionProblem,
    Epilogue,
)
from bedstone.spec.dropout import DropoutProblem
from bedstone.spec.normalization import KINDS as NORM_KINDS
from bedstone.spec.normalization import (
    LRN_DIRECTIONS,
    LRN_REGIONS,
    LrnDesc,
    LrnProblem,
    NormalizationProblem,
    NormDesc,
)
from bedstone.spec.pooling import (
    ADAPTIVE_DIRECTIONS,
    MODES,
    AdaptivePoolingProblem,
    PoolingDesc,
    PoolingProblem,
)
from bedstone.spec.softmax import ALGORITHMS, SoftmaxProblem
from bedstone.spec.tensor import TensorDesc
from bedstone.spec.tensor_ops import TensorOpProblem

# Laws are checked on the same draws every time.
law = settings(max_examples=40, deadline=None, derandomize=True)

seeds = st.integers(0, 2**32 - 1)


def packed(dims, dtype="float64"):
    """A row-major descriptor."""
    return TensorDesc.packed(dims, dtype)


def normal(seed, *shapes):
    """Arrays of normal values, one a shape."""
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape) for shape in shapes]


def dot(a, b):
    """Sum of the products of all elements."""
    return float(np.vdot(a, b))


def close(a, b):
    """Equal up to a few hundred roundings of float64, relative to the largest element."""
    a, b = np.asarray(a), np.asarray(b)
    scale = max(1.0, float(np.max(np.abs(b), initial=0.0)))
    return a.shape == b.shape and np.allclose(a, b, rtol=0, atol=1e-11 * scale)


def gradient(function, at, step=1e-6):
    """d function / d at, by central differences."""
    slope = np.zeros_like(at)
    for index in np.ndindex(at.shape):
        moved = at.copy()
        moved[index] += step
        above = function(moved)
        moved[index] -= 2 * step
        slope[index] = (above - function(moved)) / (2 * step)
    return slope


@st.composite
def windows(draw, axes, sides=2, dilated=True):
    """(input sizes, window, padding, stride, dilation) with at least one window that fits."""
    rows = []
    for _ in range(axes):
        r, step = draw(st.integers(1, 3)), draw(st.integers(1, 2 if dilated else 1))
        pad = (draw(st.integers(0, sides)), draw(st.integers(0, sides)))
        extent = (r - 1) * step + 1
        h = max(1, extent - sum(pad)) + draw(st.integers(0, 4 if axes < 3 else 2))
        rows.append((h, r, pad, draw(st.integers(1, 3)), step))
    return tuple(zip(*rows))


@st.composite
def convolutions(draw, direction="forward"):
    """A convolution problem of 1 to 3 spatial axes, packed, float64."""
    axes = draw(st.integers(1, 3))
    size, window, padding, stride, dilation = draw(windows(axes))
    groups = draw(st.integers(1, 3))
    c, k = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    mode = draw(st.sampled_from(("cross_correlation", "convolution")))
    conv = ConvolutionDesc(padding, stride, dilation, groups, mode)
    x, w = (draw(st.integers(1, 2)), c, *size), (k, c // groups, *window)
    return ConvolutionProblem(
        direction, packed(x), packed(w), packed(conv.output_dims(x, w)), conv
    )  # fmt: skip


@st.composite
def poolings(draw, modes=MODES, direction="forward"):
    """A pooling problem of 1 to 3 spatial axes, packed, float64."""
    axes = draw(st.integers(1, 3))
    size, window, padding, stride, dilation = draw(windows(axes))
    rounding = draw(st.sampled_from(("floor", "ceil", "given")))
    pool = PoolingDesc(draw(st.sampled_from(modes)), window, padding, stride, dilation, rounding)
    x = (draw(st.integers(1, 2)), draw(st.integers(1, 2)), *size)
    y = pool.output_dims(x)
    if rounding == "given":
        y = (*x[:2], *(draw(st.integers(1, most)) for most in pool.most_windows(x)))
    return PoolingProblem(direction, packed(x), packed(y), pool)


@st.composite
def strided(draw, dims, dtype="float64", repeats=False):
    """A descriptor with its axes in any order, gaps, negative strides and, if asked for, zero
    ones."""
    strides, step = [0] * len(dims), draw(st.integers(1, 2))
    for axis in draw(st.permutations(range(len(dims)))):
        if repeats and draw(st.integers(0, 5)) == 0:
            continue
        strides[axis] = step * draw(st.sampled_from((1, 1, -1)))
        step = step * max(dims[axis], 1) + draw(st.integers(0, 2))
    return TensorDesc(tuple(dims), tuple(strides), dtype)


def shapes(least=1, most=5, size=4):
    """Dims of a tensor."""
    return st.lists(st.integers(1, size), min_size=least, max_size=most).map(tuple)


FLOATING = ("float32", "float64", "float16", "bfloat16")


def restrided(draw, problem, names):
    """The problem with its named descriptors in any memory order and any data type."""
    dtype = draw(st.sampled_from(FLOATING))
    written = {o.name.lstrip("d") for o in problem.outputs}
    changes = {}
    for name in names:
        repeats = name not in written
        changes[name] = draw(strided(getattr(problem, name).dims, dtype, repeats))
    return dataclasses.replace(problem, **changes)


@st.composite
def problems(draw):
    """Any problem of any primitive: small dims, any strides, any dtype."""
    return draw(draw(st.sampled_from(FAMILIES))())


@st.composite
def any_convolution(draw):
    """With math modes and epilogues too."""
    direction = draw(st.sampled_from(DIRECTIONS))
    if direction == "backward_bias":
        y = draw(strided(draw(shapes(2)), repeats=True))
        return BiasGradientProblem(y, packed(y.dims[1:2], y.dtype))
    problem = restrided(draw, draw(convolutions(direction)), ("x", "w", "y"))
    epilogue = Epilogue()
    if direction == "forward":
        activation = draw(st.sampled_from((None, ActivationDesc("relu"), ActivationDesc("elu", 2))))
        shift = draw(st.sampled_from((0.0, -0.25, 1 / 3)))
        epilogue = Epilogue(draw(st.booleans()), activation, shift)
    return dataclasses.replace(problem, deterministic=draw(st.booleans()), epilogue=epilogue)


@st.composite
def any_pooling(draw):
    """Ordinary pooling, with or without indices, and adaptive."""
    direction = draw(st.sampled_from(("forward", "backward", *ADAPTIVE_DIRECTIONS)))
    if direction in ADAPTIVE_DIRECTIONS:
        dims = draw(shapes(3))
        y = tuple(draw(st.integers(1, 4)) for _ in dims[2:])
        problem = AdaptivePoolingProblem(direction, packed(dims), packed((*dims[:2], *y)))
        return restrided(draw, problem, ("x", "y"))
    problem = draw(poolings(direction=direction))
    if problem.pool.mode == "max" and draw(st.booleans()):
        indices = draw(strided(problem.y.dims, "int64"))
        problem = dataclasses.replace(problem, indices=indices)
    return restrided(draw, problem, ("x", "y", "saved"))


@st.composite
def any_softmax(draw):
    """Every algorithm over any axes."""
    desc = packed(draw(shapes()))
    axes = draw(st.sets(st.integers(0, desc.rank - 1), min_size=1).map(tuple))
    direction = draw(st.sampled_from(("forward", "backward")))
    algorithm = draw(st.sampled_from(ALGORITHMS))
    problem = SoftmaxProblem(direction, desc, desc, algorithm, axes)
    return restrided(draw, problem, ("x", "y", "saved"))


@st.composite
def any_activation(draw):
    """Every kind."""
    desc, direction = packed(draw(shapes())), draw(st.sampled_from(("forward", "backward")))
    kind = ActivationDesc(draw(st.sampled_from(tuple(KINDS))))
    return restrided(draw, ActivationProblem(direction, desc, desc, kind), ("x", "y", "saved"))


@st.composite
def any_tensor_op(draw):
    """Every operation."""
    operation, dims = draw(st.sampled_from(("transform", "add", "set", "scale"))), draw(shapes())
    y, x = draw(strided(dims, draw(st.sampled_from(FLOATING)))), None
    if operation == "transform":
        x = draw(strided(dims, draw(st.sampled_from(FLOATING)), repeats=True))
    if operation == "add":
        b = tuple(draw(st.sampled_from((1, d))) for d in dims)
        x = draw(strided(b, y.dtype, repeats=True))
    return TensorOpProblem(operation, y, x)


@st.composite
def any_normalization(draw):
    """Every kind of normalisation, and both of LRN."""
    desc = packed(draw(shapes(3)))
    if draw(st.booleans()):
        region = draw(st.sampled_from(LRN_REGIONS))
        lrn = LrnDesc(draw(st.integers(1, 4)), 0.1, 0.75, 1.5, region)
        problem = LrnProblem(draw(st.sampled_from(LRN_DIRECTIONS)), desc, desc, lrn)
        return restrided(draw, problem, ("x", "y", "saved"))
    kind = draw(st.sampled_from(NORM_KINDS))
    groups = draw(st.sampled_from([g for g in range(1, 5) if desc.dims[1] % g == 0]))
    norm = NormDesc(kind, 1e-3, draw(st.integers(1, 2)), groups, draw(st.booleans()),
                    draw(st.booleans()))  # fmt: skip
    direction = draw(st.sampled_from(("training", "backward", "inference")))
    if direction == "inference" and kind != "batch":
        direction = "training"
    momentum = None
    if direction == "training" and kind == "batch":
        momentum = draw(st.sampled_from((None, 0.1)))
    problem = NormalizationProblem(
        direction, desc, desc, norm, draw(st.sampled_from(FLOATING[:2])), draw(st.booleans()),
        momentum, draw(st.booleans()),
    )  # fmt: skip
    return restrided(draw, problem, ("x", "y", "saved"))


@st.composite
def any_dropout(draw):
    """With and without a mask."""
    desc, direction = packed(draw(shapes())), draw(st.sampled_from(("forward", "backward")))
    mask = draw(st.sampled_from((None, packed(desc.dims, "uint8"))))
    problem = DropoutProblem(direction, desc, desc, draw(st.sampled_from((0.0, 0.3, 0.5))), mask)
    return restrided(draw, problem, ("x", "y"))


FAMILIES = (any_convolution, any_pooling, any_softmax, any_activation, any_tensor_op,
            any_normalization, any_dropout)  # fmt: skip
