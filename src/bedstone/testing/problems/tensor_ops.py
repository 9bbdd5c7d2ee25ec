"""Tensor operations: transforms between layouts and types, the broadcasts of add, set, scale."""

from __future__ import annotations

import itertools

import numpy as np

from bedstone.spec.problem import Problem, parse_problem
from bedstone.spec.tensor import TensorDesc
from bedstone.spec.tensor_ops import ADD_MODES, DIRECTIONS, TensorOpProblem, add_dims
from bedstone.testing.problems.strides import KINDS as STRIDES
from bedstone.testing.problems.strides import randomly_strided, with_strides

DTYPES = ("float32", "float64", "float16", "bfloat16")
DIMS = ("1", "0x3", "17", "5x33", "2x3x5x7", "1x16x8x9", "2x17x4x4", "2x3x4x5x6", "2x1x3x1x2x1x3x2")
LAYOUTS = ("NCHW", "NHWC", "CHWN", "HWCN", "WHCN")


def curated() -> list[Problem]:
    """Layout by layout, type by type, mode by mode; then every kind of strides."""
    random = np.random.default_rng(0)
    lines = [f"{op} {dims} {dtype}" for op in DIRECTIONS for dims in DIMS for dtype in DTYPES]
    lines += [
        f"transform 2x9x5x17 {dtype} x={a} y={b}"
        for a, b in itertools.permutations(LAYOUTS, 2)
        for dtype in DTYPES[:2]
    ]
    lines += [
        f"transform 2x9x5x17 {to} from={of} x=NHWC" for of, to in itertools.permutations(DTYPES, 2)
    ]
    for mode in ADD_MODES:
        for dims in ((2, 5, 4, 7), (3, 16, 8), (2, 3, 2, 4, 3), (4, 33)):
            b = "x".join(map(str, add_dims(mode, dims)))
            y = "x".join(map(str, dims))
            lines += [f"add {y} {dtype} b={b}" for dtype in DTYPES]
    lines += ["add 2x5x4x7 float32 b=1x5x4x7 x=NHWC y=NHWC", "add 2x5x4x7 float32 b=2x1x4x1"]
    found = [parse_problem(f"tensor_ops {line}") for line in lines]
    for line in (
        "transform 2x5x6x7",
        "add 2x5x6x7 float32 b=1x5x1x1",
        "set 2x5x6x7",
        "scale 2x5x6x7",
    ):
        base: TensorOpProblem = parse_problem(f"tensor_ops {line}")  # type: ignore[assignment]
        fields = ("y",) if base.x is None else ("x", "y")
        found += [with_strides(base, field, kind, random) for field in fields for kind in STRIDES]
    return found


def draw(random: np.random.Generator) -> Problem:
    """A random problem of up to some thousands of elements."""
    rank = int(random.integers(1, 7))
    sizes = {1: 600, 2: 50, 3: 14, 4: 9}.get(rank, 5)
    dims = tuple(int(d) for d in random.integers(1, sizes, rank))
    op = str(random.choice(DIRECTIONS, p=(0.5, 0.3, 0.1, 0.1)))
    dtype = str(random.choice(DTYPES, p=(0.6, 0.26, 0.07, 0.07)))
    x = None
    if op == "transform":
        other = str(random.choice(DTYPES)) if random.random() < 0.3 else dtype
        x = TensorDesc.packed(dims, other)
    if op == "add":
        kept = tuple(d if random.random() < 0.5 else 1 for d in dims)
        x = TensorDesc.packed(kept, dtype)
    return randomly_strided(TensorOpProblem(op, TensorDesc.packed(dims, dtype), x), random)


def exact(problem: Problem) -> bool:
    """Copies and small multiples."""
    return True
