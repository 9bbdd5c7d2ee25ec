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
from collections.abc import Mapping

import numpy as np

from bedstone.spec.dtypes import DType
from bedstone.spec.problem import Array, Arrays, Problem, as_float64
from bedstone.testing import problems

# c = ROUNDINGS + WALK * sqrt(n), in unit roundoffs u. ROUNDINGS: alpha, beta, bias and the store.
# Measured with normal values: a plain float32 sum of n = 9 ... 4096 products is wrong by 3.4 to
# 5.8 u * sum|terms| at worst in 10^5 elements, whatever n; terms of one sign are worse, and grow
# like sqrt(n). Convolutions on a CPU: implicit GEMM 0.7 to 5.8, Winograd F(2x2,3x3) 0.8 to 9.6,
# F(4x4,3x3) 3.5 to 109 (its own scale is "tile", which is larger).
ROUNDINGS = 6.0
WALK = 2.0
# exp, log, tanh and erf of a vector library: 1 to 4 units; formulas made of several: twice that.
FUNCTION_ULPS = 8.0
# Unit roundoff at which the products of a math mode are made: "fast" allows larger Winograd tiles
# (F(4x4): 3 to 10 times the root mean square error of a direct sum), tf32 keeps 11 bits, bf16 8;
# splits into three or two bfloat16 keep 22 and 16 bits.
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
Wide = Mapping[str, Array]  # operands in float64, integers as they are


def unit_of(problem: Problem) -> float:
    """Unit roundoff of the arithmetic that the problem asks for (half an epsilon)."""
    types = [o.desc.dtype.accumulator for o in problem.operands if o.desc.dtype.is_floating]
    unit = max(t.epsilon for t in types) / 2
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


def smallest_normal(dtype: DType) -> float:
    """The smallest positive number of full precision."""
    return smallest(dtype) / dtype.epsilon


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
        wide = {name: largest_nearby(array) for name, array in absolute(wide).items()}
    computed = problems.hook(problem.primitive, "bounds") or linear
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


def absolute(wide: Wide) -> dict[str, Array]:
    """Floating operands without their signs."""
    return {k: np.abs(v) if v.dtype.kind == "f" else v for k, v in wide.items()}


def absolute_sum(problem: Problem, wide: Wide, alpha: float, beta: float) -> dict[str, Array]:
    """|alpha| * sum|terms| + |beta * out|, infinite where the sum may overflow on the way."""
    limit = OVERFLOW_SHARE * largest(problem.dtype.accumulator)
    found = {}
    for name, terms in problem.compute(absolute(wide)).items():
        if terms.dtype.kind in "iub":
            continue
        total = abs(alpha) * np.abs(terms)
        if beta != 0.0:
            total = total + np.abs(beta * wide[name])
        overflow = (np.abs(terms) > limit) | (total > limit)
        found[name] = np.where(overflow, np.inf, total)
    return found


def linear(problem: Problem, wide: Wide, alpha: float, beta: float) -> Bounds:
    """For sums of products of inputs: what holds for a primitive that says nothing else."""
    terms = int(getattr(problem, "reduction_length", 1))
    unit = unit_of(problem)
    tiny = smallest(problem.dtype.accumulator) * (abs(alpha) * terms + 1)
    return {
        name: growth(terms) * unit * total + tiny
        for name, total in absolute_sum(problem, wide, alpha, beta).items()
    }


def blended(
    problem: Problem, errors: Mapping[str, Array], wide: Wide, alpha: float, beta: float
) -> Bounds:
    """Bounds of alpha * op + beta * out from those of op."""
    unit = unit_of(problem)
    found = {}
    for name, error in errors.items():
        if name in problem.unblended:
            found[name] = error
            continue
        found[name] = abs(alpha) * error + smallest(problem.dtype.accumulator) * (abs(alpha) + 1)
        if beta != 0.0:
            found[name] = found[name] + ROUNDINGS * unit * np.abs(beta * wide[name])
    return found
