"""Activation problems: every kind, both directions, tails, strides; and a generator."""

from __future__ import annotations

import numpy as np

from bedstone.spec.activation import KINDS, ActivationDesc, ActivationProblem
from bedstone.spec.problem import Problem, parse_problem
from bedstone.spec.tensor import TensorDesc
from bedstone.testing.problems.strides import KINDS as STRIDES
from bedstone.testing.problems.strides import randomly_strided, with_strides

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
