"""Dropout problems: probabilities to both ends, masks given and taken, tails, strides."""

from __future__ import annotations

import numpy as np

from bedstone.spec.dropout import DropoutProblem
from bedstone.spec.dtypes import DType
from bedstone.spec.problem import Array, Problem, parse_problem
from bedstone.spec.tensor import TensorDesc
from bedstone.testing.problems.strides import KINDS as STRIDES
from bedstone.testing.problems.strides import randomly_strided, with_strides

DIRECTIONS = ("forward", "backward")
DTYPES = ("float32", "float64", "float16", "bfloat16")
DIMS = ("1", "3", "17", "0x4", "5x33", "2x3x5x7", "2x3x4x5x6")
PROBABILITIES = (0.0, 0.1, 0.5, 0.999, 1.0)


def curated() -> list[Problem]:
    """Shapes by dtype, probabilities, masks, strides."""
    random = np.random.default_rng(0)
    lines = [f"{dims} {dtype} p=0.5{m}" for dims in DIMS for dtype in DTYPES for m in _MASKS]
    lines += [f"2x3x5x7 float32 p={p}{m}" for p in PROBABILITIES for m in _MASKS]
    found = [parse_problem(f"dropout {d} {line}") for line in lines for d in DIRECTIONS]
    for direction in DIRECTIONS:
        for mask in _MASKS:
            base = parse_problem(f"dropout {direction} 2x5x6x7 float32 p=0.3{mask}")
            fields = ("x", "y", "mask") if mask else ("x", "y")
            found += [with_strides(base, f, kind, random) for f in fields for kind in STRIDES]
    return found


_MASKS = ("", " with_mask")


def draw(random: np.random.Generator) -> Problem:
    """A random problem of up to some thousands of elements."""
    rank = int(random.integers(1, 6))
    dims = tuple(int(d) for d in random.integers(1, {1: 600, 2: 50}.get(rank, 9), rank))
    x = TensorDesc.packed(dims, str(random.choice(DTYPES, p=(0.6, 0.26, 0.07, 0.07))))
    mask = TensorDesc.packed(dims, DType.uint8) if random.random() < 0.5 else None
    p = float(random.choice((0.0, 0.1, 0.25, 0.5, 0.9, 1.0)))
    return randomly_strided(DropoutProblem(str(random.choice(DIRECTIONS)), x, x, p, mask), random)


def meaning(problem: Problem, found: dict[str, Array], random: np.random.Generator) -> None:
    """The generator's seed may be any 64 bits; its offset counts up from 0."""
    if "state" in found:
        info = np.iinfo(np.int64)
        seed = random.integers(info.min, info.max, endpoint=True)
        found["state"] = np.array([seed, random.integers(0, 2**40)], np.int64)
