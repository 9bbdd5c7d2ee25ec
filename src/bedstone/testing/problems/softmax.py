"""Softmax problems: every algorithm, axes inside and outside, single elements, long rows."""

from __future__ import annotations

import numpy as np

from bedstone.spec.problem import Array, Problem, parse_problem
from bedstone.spec.softmax import ALGORITHMS, SoftmaxProblem
from bedstone.spec.tensor import TensorDesc
from bedstone.testing.problems.strides import KINDS as STRIDES
from bedstone.testing.problems.strides import randomly_strided, with_strides
from bedstone.testing.tolerances import (
    FUNCTION_ULPS,
    Bounds,
    Wide,
    blended,
    growth,
    smallest_normal,
    unit_of,
)

DIRECTIONS = ("forward", "backward")
SHAPES = (
    "1x1 {} axes=1",
    "3x10 {} axes=1",
    "2x17 {} axes=0",
    "5x1000 {} axes=1",
    "2x7x5x3 {} axes=1",
    "2x7x5x3 {} axes=1,2,3",
    "2x16x4x4 {} axes=1",
    "2x16x4x4 {} axes=3",
    "2x3x4x5x6 {} axes=2,4",
    "33 {} axes=0",
    "0x5 {} axes=1",
    "1x33x17 {} axes=1,2",
)
LONG = "2x33000 {} axes=1"  # rows that GPUs share among programs
DTYPES = ("float32", "float64", "float16", "bfloat16")
STRIDED = ("2x7x5x3 {} axes=1", "2x16x4x5 {} axes=1,2,3")


def curated() -> list[Problem]:
    """Every algorithm and direction of every shape and dtype; strides of two shapes; long
    rows forward."""
    random = np.random.default_rng(0)
    found = [
        parse_problem(f"softmax {direction} {shape.format(dtype)} algorithm={algorithm}")
        for direction in DIRECTIONS
        for algorithm in ALGORITHMS
        for shape in SHAPES
        for dtype in DTYPES
    ]
    for algorithm in ALGORITHMS:
        for dtype in DTYPES:
            line = f"softmax forward {LONG.format(dtype)} algorithm={algorithm}"
            found.append(parse_problem(line))
    for shape in STRIDED:
        for direction in DIRECTIONS:
            base = parse_problem(f"softmax {direction} {shape.format('float32')}")
            fields = ("x", "y", "saved") if direction == "backward" else ("x", "y")
            found += [with_strides(base, f, kind, random) for f in fields for kind in STRIDES]
    return found


def draw(random: np.random.Generator) -> Problem:
    """A random problem of up to some thousands of elements."""
    rank = int(random.integers(1, 6))
    dims = tuple(int(d) for d in random.integers(1, {1: 600, 2: 60}.get(rank, 9), rank))
    count = int(random.integers(1, rank + 1))
    axes = tuple(int(a) for a in random.permutation(rank)[:count])
    x = TensorDesc.packed(dims, str(random.choice(DTYPES, p=(0.6, 0.28, 0.06, 0.06))))
    direction, algorithm = str(random.choice(DIRECTIONS)), str(random.choice(ALGORITHMS))
    return randomly_strided(SoftmaxProblem(direction, x, x, algorithm, axes), random)


def meaning(problem: SoftmaxProblem, found: dict[str, Array], random: np.random.Generator) -> None:
    """Backward: y is a forward result."""
    if problem.direction == "backward":
        x = TensorDesc.packed(problem.x.dims, problem.x.dtype)
        forward = SoftmaxProblem("forward", x, x, problem.algorithm, problem.axes)
        y = forward.reference({"x": found["y"]})["y"]
        with np.errstate(all="ignore"):
            found["y"] = y.astype(found["y"].dtype)


def bounds(problem: SoftmaxProblem, wide: Wide, alpha: float, beta: float) -> Bounds:
    """A power's relative error grows with its exponent's size; the sums' with their length."""
    unit, count = unit_of(problem), problem.reduction_length
    units = (growth(count) + 2 * FUNCTION_ULPS) * unit
    tiny = smallest_normal(problem.dtype.accumulator)  # exp may flush what is denormal to zero
    if problem.direction == "forward":
        error = _forward(problem, wide["x"], units, unit) + tiny
        return blended(problem, {"y": error}, wide, alpha, beta)
    y, dy = wide["y"], np.abs(wide["dy"])
    if problem.algorithm == "log":
        total = dy.sum(axis=problem.axes, keepdims=True)
        power = np.exp(y)
        size = dy + power * (1 + np.where(power > 0, np.abs(y), 0.0)) * total
    else:
        y = np.abs(y)
        size = y * (dy + (y * dy).sum(axis=problem.axes, keepdims=True))
    return blended(problem, {"dx": units * size + tiny * (1 + dy)}, wide, alpha, beta)


def _forward(problem: SoftmaxProblem, x: Array, units: float, unit: float) -> Array:
    y = np.abs(problem.compute({"x": x})["y"])
    peak = x.max(axis=problem.axes, keepdims=True, initial=-np.inf)
    shifted = x - peak if problem.algorithm != "fast" else x
    spread = np.where(np.isfinite(shifted), np.abs(shifted), 0.0)
    if problem.algorithm == "log":
        return units * (spread + y + 1)
    # The sum's terms are wrong by their own exponents, but those that matter are near the peak.
    reach = np.abs(peak) if problem.algorithm == "fast" else 1.0
    error: Array = y * (units + 2 * unit * (spread + np.where(np.isfinite(reach), reach, 0.0)))
    return error
