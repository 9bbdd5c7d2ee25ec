"""Operand values: small integers (sums are exact), random, non-finite, and of extreme range.

Every fill is a function of the problem, the fill's name and a seed. An operand that only means
something together with others (indices of maxima, a saved mean) is computed from them by the
problem's own reference, as a caller would have got it from the forward call.
"""

from __future__ import annotations

import numpy as np

from bedstone.spec.convolution import ConvolutionProblem
from bedstone.spec.dtypes import DType
from bedstone.spec.problem import Array, Problem
from bedstone.testing import problems

# integers  -3 ... 3: sums of thousands of products are exact in float32, in any order
# random    normal, standard deviation 1
# special   random, with a few NaN, infinities and signed zeros
# extreme   random mantissas over the range of exponents that EXTREME_EXPONENT allows, denormals
FILLS = ("integers", "random", "special", "extreme")

LARGEST_INTEGER = 3
SPECIALS = (np.nan, np.inf, -np.inf, -0.0)
SPECIAL_SHARE = 0.02  # of the elements, but at least one: some results must stay finite
# Products of two values stay finite and products of two small ones reach the denormals.
EXTREME_EXPONENT = {
    DType.float32: 62, DType.float64: 510, DType.float16: 7, DType.bfloat16: 62,
}  # fmt: skip
EXTREME_SHARE = 0.1  # of the elements are huge, as many are tiny


def values(fill: str, dims: tuple[int, ...], dtype: DType, random: np.random.Generator) -> Array:
    """An array of those dims in the dtype (a fill's name is one of FILLS)."""
    if not dtype.is_floating:
        return random.integers(0, 2, dims).astype(dtype.numpy)
    if fill == "integers":
        whole = random.integers(-LARGEST_INTEGER, LARGEST_INTEGER + 1, dims)
        return whole.astype(np.float64).astype(dtype.numpy)
    found = random.standard_normal(dims)
    if fill == "special" and found.size:
        count = max(1, int(SPECIAL_SHARE * found.size))
        found.reshape(-1)[random.integers(0, found.size, count)] = random.choice(SPECIALS, count)
    if fill == "extreme" and found.size:
        draw = random.random(dims)
        exponent = EXTREME_EXPONENT[dtype]
        found = np.where(draw < EXTREME_SHARE, np.ldexp(found, exponent), found)
        found = np.where(draw > 1 - EXTREME_SHARE, np.ldexp(found, -exponent - 8), found)
    with np.errstate(all="ignore"):
        return found.astype(dtype.numpy)


def operands(problem: Problem, fill: str, seed: int = 0) -> dict[str, Array]:
    """Dense arrays of every operand's dims and dtype, outputs included (for beta != 0)."""
    random = np.random.default_rng(seed)
    calm = set(_finite_operands(problem))
    found = {
        operand.name: values(
            "random" if fill == "special" and operand.name in calm else fill,
            operand.desc.dims,
            operand.desc.dtype,
            random,
        )
        for operand in problem.operands
    }
    meaning = problems.hook(problem.primitive, "meaning")
    if meaning is not None:
        meaning(problem, found, random)
    return found


def _finite_operands(problem: Problem) -> tuple[str, ...]:
    """Operands that stay finite in the fill "special".

    A non-finite weight times the zero of a padding is NaN by arithmetic and nothing by the
    definition: algorithms may do either. So non-finite values go to the operand whose every
    element meets real partners only.
    """
    if isinstance(problem, ConvolutionProblem):
        if problem.direction == "backward_data":
            return ("w",)
        padded = any(p for pair in problem.conv.padding for p in pair)
        if padded:
            return ("w",) if problem.direction == "forward" else ("dy",)
    return ()
