"""Error bounds, element by element, from what is summed.

A result is right if |result - reference| <= c * u * sum|terms| with u the unit roundoff of the
type summed in and c from the number of terms, plus the rounding to the output's type. sum|terms|
is the problem's own definition computed on absolute values, so a bound is as tight where a sum
is small as where it is large. A transcendental function adds a few units in its last place.

How c was found: rounding errors of n sequential additions are at most n*u*sum|terms| and in
practice grow like sqrt(n)*u (Higham and Mary, "A new approach to probabilistic rounding error
analysis", 2019). An index that is wrong by one changes a result by about sum|terms|/n: six orders
above the bound in float32 at n = 1, three at n = 1000.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from bedstone.spec.activation import ActivationDesc, ActivationProblem
from bedstone.spec.convolution import ConvolutionProblem
from bedstone.spec.dtypes import DType
from bedstone.spec.problem import Array, Arrays, Problem, as_float64

# c = ROUNDINGS + WALK * sqrt(n), in unit roundoffs. ROUNDINGS: alpha, beta, bias and the store.
# WALK: Higham and Mary's lambda; 4 is passed once in 10^3..10^7 elements by a plain float32 sum
# (measured: n = 9 ... 4096, normal values, worst quotient 3.2), 6 leaves room for Winograd F(2x2).
ROUNDINGS = 6.0
WALK = 6.0
# exp, log, tanh and erf of a vector library: 1 to 4 units; formulas made of several: twice that.
FUNCTION_ULPS = 8.0
# Unit roundoff at which the products of a math mode are made: "fast" allows larger Winograd tiles
# (F(4x4) measured at 5 times the error of a direct sum), tf32 keeps 11 bits, bf16 8; splits into
# three or two bfloat16 keep 22 and 16 bits.
MATH_UNIT = {
    "ieee": 2.0**-24, "fast": 2.0**-21, "bf16x6": 2.0**-22, "bf16x3": 2.0**-16,
    "tf32": 2.0**-11, "bf16": 2.0**-8,
}  # fmt: skip
# Elements apart that a tile's transform can mix: F(4x4,3x3) reads 6 pixels a side, F(6x6) 8.
TILE_REACH = 7
# Sums larger than this share of the accumulator's largest number may overflow on the way,
# depending on their order: such elements are not compared.
OVERFLOW_SHARE = 0.125

Bounds = dict[str, Array]


def unit_of(problem: Problem) -> float:
    """Unit roundoff of the arithmetic that the problem asks for (half an epsilon)."""
    accumulator = problem.dtype.accumulator
    unit = accumulator.epsilon / 2
    return max(unit, MATH_UNIT[getattr(problem, "math", "ieee")]) if unit > 2.0**-30 else unit


def growth(terms: int) -> float:
    """c for a sum of so many terms, in unit roundoffs."""
    return ROUNDINGS + WALK * math.sqrt(max(terms, 1))


def smallest(dtype: DType) -> float:
    """The smallest positive (denormal) number of a floating dtype."""
    return {
        DType.float64: 2.0**-1074, DType.float32: 2.0**-149, DType.bfloat16: 2.0**-133,
        DType.float16: 2.0**-24,
    }[dtype]  # fmt: skip


def largest(dtype: DType) -> float:
    """The largest finite number of a floating dtype."""
    return {
        DType.float64: float(np.finfo(np.float64).max),
        DType.float32: float(np.finfo(np.float32).max),
        DType.bfloat16: 2.0**127 * (2 - 2.0**-7), DType.float16: 65504.0,
    }[dtype]  # fmt: skip


def bounds(
    problem: Problem,
    arrays: Arrays,
    expected: Mapping[str, Array],
    alpha: float,
    beta: float,
    scale: str = "element",
) -> Bounds:
    """Largest allowed |result - expected| of every floating output, in float64, element by
    element. Infinite where the order of summation decides whether the sum overflows.

    `scale` is the algorithm's error_scale: for "tile", an element's terms are taken to be as
    large as any within TILE_REACH of it.
    """
    wide = {name: as_float64(array) for name, array in arrays.items()}
    if scale == "tile":
        wide = {name: largest_nearby(np.abs(array)) for name, array in wide.items()}
    computed = _COMPUTED.get(problem.primitive, _linear)
    with np.errstate(all="ignore"):
        found = computed(problem, wide, alpha, beta)
        for operand in problem.outputs:
            if operand.name in found:
                error, want = found[operand.name], np.abs(expected[operand.name])
                error = largest_nearby(error) if scale == "tile" else error
                found[operand.name] = _stored(error, want, operand.desc.dtype)
    return found


def largest_nearby(array: Array) -> Array:
    """Every element replaced by the largest within TILE_REACH of it along the spatial axes."""
    for axis in range(2, array.ndim):
        source = array
        for step in range(1, min(TILE_REACH + 1, array.shape[axis])):
            low = [slice(None)] * array.ndim
            high = [slice(None)] * array.ndim
            low[axis], high[axis] = slice(None, -step), slice(step, None)
            grown = array.copy()
            grown[tuple(low)] = np.fmax(grown[tuple(low)], source[tuple(high)])
            grown[tuple(high)] = np.fmax(grown[tuple(high)], source[tuple(low)])
            array = grown
    return array


def _stored(error: Array, want: Array, dtype: DType) -> Array:
    """The bound after rounding to the output's type."""
    rounded = error + dtype.epsilon / 2 * (want + error) + smallest(dtype)
    return np.where(np.isnan(rounded), np.inf, rounded)


def absolute_sum(
    problem: Problem, wide: Mapping[str, Array], alpha: float, beta: float
) -> dict[str, Array]:
    """|alpha| * sum|terms| + |beta * out|, infinite where the sum may overflow on the way."""
    limit = OVERFLOW_SHARE * largest(problem.dtype.accumulator)
    found = {}
    for name, terms in problem.compute({k: np.abs(v) for k, v in wide.items()}).items():
        if terms.dtype.kind in "iub":
            continue
        total = abs(alpha) * np.abs(terms)
        if beta != 0.0:
            total = total + np.abs(beta * wide[name])
        overflow = (np.abs(terms) > limit) | (total > limit)
        found[name] = np.where(overflow, np.inf, total)
    return found


def _linear(problem: Problem, wide: Mapping[str, Array], alpha: float, beta: float) -> Bounds:
    """Sums of products of inputs."""
    terms = int(getattr(problem, "reduction_length", 1))
    unit = unit_of(problem)
    tiny = smallest(problem.dtype.accumulator) * (abs(alpha) * terms + 1)
    return {
        name: growth(terms) * unit * total + tiny
        for name, total in absolute_sum(problem, wide, alpha, beta).items()
    }


def _convolution(problem: Problem, wide: Mapping[str, Array], alpha: float, beta: float) -> Bounds:
    found = _linear(problem, wide, alpha, beta)
    if isinstance(problem, ConvolutionProblem) and problem.epilogue:
        unit = unit_of(problem)
        if problem.epilogue.bias:
            shape = (1, -1, *(1,) * problem.conv.axes)
            found["y"] = found["y"] + 2 * unit * np.abs(wide["bias"]).reshape(shape)
        act = problem.epilogue.activation
        if act is not None:
            before = {k: np.abs(v) for k, v in wide.items()}
            size = problem.reference(before, abs(alpha), abs(beta))["y"]
            error = FUNCTION_ULPS * 2 * unit * (np.abs(size) + absolute_scale(act))
            found["y"] = slope_limit(act) * found["y"] + error
    return found


def slope_limit(act: ActivationDesc) -> float:
    """An upper bound of |f'|."""
    if act.kind in ("leaky_relu", "elu"):
        return max(1.0, act.alpha)
    if act.kind in ("hard_sigmoid", "hard_swish"):
        return max(1.0, 2 * abs(act.alpha) + abs(act.beta) + 1)
    return 1.2  # gelu and silu overshoot 1 by up to 0.13


def absolute_scale(act: ActivationDesc) -> float:
    """Size of the intermediate values of f that its result does not show (alpha of elu, ...)."""
    return max(1.0, *(abs(c) for c in (act.alpha, act.beta) if math.isfinite(c)))


# Kinds whose value or derivative is a difference: near its zeros, only the size of its terms
# bounds the error. The others keep full relative accuracy.
_CANCELLING = ("gelu", "gelu_tanh", "silu", "hard_swish", "hard_sigmoid", "softplus", "elu")


def _activation(problem: Problem, wide: Mapping[str, Array], alpha: float, beta: float) -> Bounds:
    if not isinstance(problem, ActivationProblem):
        return {}
    act, unit = problem.activation, problem.dtype.accumulator.epsilon / 2
    (name, value), *_ = problem.compute(wide).items()
    size = np.abs(value)
    if problem.direction == "backward":
        rest = np.abs(wide["dy"])
    else:
        rest = np.abs(wide["x"])
    if act.kind in _CANCELLING:
        size = size + np.minimum(rest, absolute_scale(act) * (1 + rest))
    total = FUNCTION_ULPS * 2 * unit * abs(alpha) * size
    if beta != 0.0:
        total = total + ROUNDINGS * unit * np.abs(beta * wide[name])
    if act.kind == "hard_swish" and problem.direction == "backward":
        total = np.where(_at_a_jump(act, wide["x"], unit), np.inf, total)
    return {name: total + smallest(problem.dtype.accumulator) * (abs(alpha) + 1) * FUNCTION_ULPS}


def _at_a_jump(act: ActivationDesc, x: Array, unit: float) -> Array:
    """Where rounding decides on which side of a jump of hard_swish's derivative x lies."""
    inner = act.alpha * x + act.beta
    distance = np.minimum(np.abs(inner), np.abs(inner - 1))
    return distance <= 4 * unit * (np.abs(act.alpha * x) + abs(act.beta))


def is_exact(problem: Problem) -> bool:
    """True if small integers go through without rounding: sums of products, maxima, copies."""
    if isinstance(problem, ConvolutionProblem):
        return problem.epilogue.activation is None
    if problem.primitive == "pooling":
        return getattr(problem, "mode", "") == "max"
    return problem.primitive in ("convolution", "tensor_ops")


Computed = Callable[[Problem, Mapping[str, Array], float, float], Bounds]
_COMPUTED: dict[str, Computed] = {"convolution": _convolution, "activation": _activation}
