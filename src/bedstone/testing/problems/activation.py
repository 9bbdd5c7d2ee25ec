"""Activation problems: every kind, both directions, tails, strides; and a generator."""

from __future__ import annotations

import math

import numpy as np

from bedstone.spec.activation import KINDS, ActivationDesc, ActivationProblem
from bedstone.spec.problem import Array, Problem, parse_problem
from bedstone.spec.tensor import TensorDesc
from bedstone.testing.problems.strides import KINDS as STRIDES
from bedstone.testing.problems.strides import randomly_strided, with_strides
from bedstone.testing.tolerances import FUNCTION_ULPS, Bounds, Wide, blended

DIRECTIONS = ("forward", "backward")
DTYPES = ("float32", "float64", "float16", "bfloat16")
DIMS = ("1", "0x3", "17", "2x3x5x7", "1x16x8x8", "3x33", "2x3x4x5x6", "2x1x3x1x2x1x3x2")
COEFFICIENTS = (
    "leaky_relu:0.2:0.0", "clipped_relu:1.5:0.0", "clip:-0.5:2.0", "elu:0.5:0.0",
    "hard_sigmoid:0.2:0.5",
)  # fmt: skip
STRIDED_DIMS = ("2x3x5x7", "1x16x8x9")


def curated() -> list[Problem]:
    """Every kind on one shape in every dtype, every shape with one kind, every kind of strides."""
    random = np.random.default_rng(0)
    lines = [f"2x5x3x7 {dtype} kind={kind}" for kind in (*KINDS, *COEFFICIENTS) for dtype in DTYPES]
    lines += [f"{dims} {dtype} kind=relu" for dims in DIMS for dtype in DTYPES[:2]]
    lines += [f"{dims} float32 kind=tanh" for dims in DIMS]
    found = [parse_problem(f"activation {d} {line}") for line in lines for d in DIRECTIONS]
    for dims in STRIDED_DIMS:
        for direction in DIRECTIONS:
            base = parse_problem(f"activation {direction} {dims} float32 kind=sigmoid")
            fields = ("x", "y", "saved") if direction == "backward" else ("x", "y")
            found += [with_strides(base, f, kind, random) for f in fields for kind in STRIDES]
    return found


def draw(random: np.random.Generator) -> Problem:
    """A random problem of up to a few thousand elements."""
    rank = int(random.integers(1, 6))
    dims = tuple(int(d) for d in random.integers(1, {1: 400, 2: 40}.get(rank, 9), rank))
    x = TensorDesc.packed(dims, str(random.choice(DTYPES, p=(0.5, 0.3, 0.1, 0.1))))
    desc = ActivationDesc(str(random.choice(tuple(KINDS))))
    direction = str(random.choice(DIRECTIONS))
    return randomly_strided(ActivationProblem(direction, x, x, desc, x), random)


def meaning(
    problem: ActivationProblem, found: dict[str, Array], random: np.random.Generator
) -> None:
    """Backward from y: y is a value of the function."""
    if problem.direction == "backward" and "y" in found:
        saved = found["y"]
        with np.errstate(all="ignore"):
            value = problem.activation.apply(saved.astype(np.float64))
            found["y"] = value.astype(saved.dtype)


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


def bounds(problem: ActivationProblem, wide: Wide, alpha: float, beta: float) -> Bounds:
    """FUNCTION_ULPS units of the value, or of the terms it is the difference of."""
    act, unit = problem.activation, problem.dtype.accumulator.epsilon / 2
    (name, value), *_ = problem.compute(wide).items()
    size = np.abs(value)
    if problem.direction == "backward":
        rest = np.abs(wide["dy"])
    else:
        rest = np.abs(wide["x"])
    if act.kind in _CANCELLING:
        size = size + np.minimum(rest, absolute_scale(act) * (1 + rest))
    total = FUNCTION_ULPS * 2 * unit * size
    if act.kind == "hard_swish" and problem.direction == "backward":
        total = np.where(_at_a_jump(act, wide["x"], unit), np.inf, total)
    return blended(problem, {name: total}, wide, alpha, beta)


def _at_a_jump(act: ActivationDesc, x: Array, unit: float) -> Array:
    """Where rounding decides on which side of a jump of hard_swish's derivative x lies."""
    inner = act.alpha * x + act.beta
    distance = np.minimum(np.abs(inner), np.abs(inner - 1))
    return distance <= 4 * unit * (np.abs(act.alpha * x) + abs(act.beta))
