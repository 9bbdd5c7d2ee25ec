"""Pooling problems: windows that overrun, empty windows, ties, indices, adaptive sizes."""

from __future__ import annotations

import math

import numpy as np

from bedstone.spec.dtypes import DType
from bedstone.spec.errors import InvalidDescriptor
from bedstone.spec.pooling import (
    ADAPTIVE_DIRECTIONS,
    MODES,
    AdaptivePoolingProblem,
    PoolingDesc,
    PoolingProblem,
    find_maxima,
)
from bedstone.spec.problem import Array, Problem, parse_problem
from bedstone.spec.tensor import TensorDesc
from bedstone.testing.problems.strides import KINDS as STRIDES
from bedstone.testing.problems.strides import randomly_strided, with_strides
from bedstone.testing.tolerances import ROUNDINGS, Bounds, Wide, blended, growth, unit_of

DIRECTIONS = ("forward", "backward")
SHAPES = (
    "n1c1h1r1",
    "n2c3h8r2u2",
    "n1c16h9w7r3s2u2",
    "n2c17h8r3u2p1",
    "n1c33h13r3u2",  # AlexNet's overlapping windows
    "n1c5h7r3u1p1",
    "n1c4h10r2u3",  # pixels that no window reads
    "n2c3h6w9r3s4u2ph0_1pw2_0",
    "n1c2h12r3l2u2p1",
    "n1c64h7r7u1",  # global
    "n1c3h4r2u1p3",  # windows of padding only
    "n2c3h1w30r1s5u1",
    "n3c5w17s3u2p1",
    "n1c3d5h6w7t2r3s2u2p1",
    "n0c3h8r2u2",
    "n2c0h8r2u2",
)
# Channels last: few and many in a pixel, windows and strides short and long.
CHANNELS_LAST = (
    "n2c3h9w10r2u2",
    "n1c6h8w11r3s2u2ph1_0pw2_1",
    "n1c40h7w9r3u2p1",
    "n2c5h6w12r2s3lh1lw2u1",
    "n1c4h6w13r2s3uh2uw5",
    "n1c3h4w20r2s11u1",
)
ROUNDED = (
    "n1c3h8r3u2 {} rounding=ceil",
    "n1c2h7r2u2p1 {} rounding=ceil",
    "n1c2h9r3u2 {} output=4x5",
)
STRIDED_SHAPES = ("n2c5h7w6r3s2u2p1", "n1c16h8r3u2p1")
ADAPTIVE = ("n1c3h7w9 {} output=3x4", "n2c16h5 {} output=7x7", "n2c3w10 {} output=4")
DTYPES = ("float32", "float64", "float16", "bfloat16")


def curated() -> list[Problem]:
    """Every mode and direction of every shape; the rest in fewer combinations."""
    random = np.random.default_rng(0)
    options = [f"mode={mode}" for mode in MODES] + ["mode=max with_indices"]
    lines = [
        f"{direction} {shape} {dtype} {option}"
        for direction in DIRECTIONS
        for option in options
        for shape in SHAPES
        for dtype in DTYPES[:2]
    ]
    lines += [
        f"{direction} {shape} {dtype} {option}"
        for direction in DIRECTIONS
        for option in options
        for shape in SHAPES[2:4]
        for dtype in DTYPES[2:]
    ]
    lines += [
        f"{direction} {shape} float32 {option} x=NHWC y=NHWC"
        for direction in DIRECTIONS
        for option in options
        for shape in SHAPES
        if "h" in shape and "d" not in shape
    ]
    lines += [
        f"{direction} {shape} {dtype} {option} x=NHWC y=NHWC"
        for direction in DIRECTIONS
        for option in options
        for shape in CHANNELS_LAST
        for dtype in DTYPES[::2]
    ]
    lines += [
        f"{direction} {line.format('float32')} {option}"
        for direction in DIRECTIONS
        for line in ROUNDED
        for option in options
    ]
    lines += [
        f"{direction} {line.format(dtype)}"
        for direction in ADAPTIVE_DIRECTIONS
        for line in ADAPTIVE
        for dtype in DTYPES
    ]
    found = [parse_problem(f"pooling {line}") for line in lines]
    for shape in STRIDED_SHAPES:
        for direction in DIRECTIONS:
            for option in options:
                base = parse_problem(f"pooling {direction} {shape} float32 {option}")
                fields = ["x", "y"]
                fields += ["indices"] if "with_indices" in option else []
                fields += ["saved"] if option == "mode=max" and direction == "backward" else []
                found += [with_strides(base, f, kind, random) for f in fields for kind in STRIDES]
    return found


LARGEST_SIZE = {1: 40, 2: 12, 3: 7}
CHANNELS = (1, 2, 3, 5, 8, 15, 16, 17, 33)


def draw(random: np.random.Generator) -> Problem:
    """A random problem of some thousands of elements."""
    while True:
        try:
            return randomly_strided(_draw(random), random)
        except InvalidDescriptor:  # a window larger than its input
            continue


def _draw(random: np.random.Generator) -> Problem:
    axes = int(random.choice((1, 2, 3), p=(0.15, 0.7, 0.15)))
    dtype = DType.of(str(random.choice(DTYPES, p=(0.6, 0.28, 0.06, 0.06))))
    sizes = [int(v) for v in random.integers(1, LARGEST_SIZE[axes] + 1, axes)]
    dims = (int(random.integers(1, 4)), int(random.choice(CHANNELS)), *sizes)
    x = TensorDesc.packed(dims, dtype)
    if random.random() < 0.08:
        out = [int(v) for v in random.integers(1, 8, axes)]
        y = TensorDesc.packed((*dims[:2], *out), dtype)
        return AdaptivePoolingProblem(str(random.choice(ADAPTIVE_DIRECTIONS)), x, y)
    mode = str(random.choice(MODES, p=(0.5, 0.25, 0.25)))
    window = tuple(int(v) for v in random.integers(1, 5, axes))
    pads = tuple((int(a), int(b)) for a, b in random.integers(0, 3, (axes, 2)))
    if random.random() < 0.3:
        pads = ((0, 0),) * axes
    strides = tuple(int(v) for v in random.integers(1, 4, axes))
    dilation = tuple(int(v) for v in random.choice((1, 1, 1, 2), axes))
    rounding = "ceil" if random.random() < 0.3 else "floor"
    pool = PoolingDesc(mode, window, pads, strides, dilation, rounding)
    y = TensorDesc.packed(pool.output_dims(dims), dtype)
    indices = None
    if mode == "max" and random.random() < 0.4:
        indices = TensorDesc.packed(y.dims, DType.int64)
    return PoolingProblem(str(random.choice(DIRECTIONS)), x, y, pool, indices)


def meaning(problem: Problem, found: dict[str, Array], random: np.random.Generator) -> None:
    """Backward from indices: they are those of some image's maxima."""
    if problem.direction == "backward" and "indices" in found:
        pooling: PoolingProblem = problem  # type: ignore[assignment]
        image = random.integers(-9, 10, pooling.x.dims).astype(np.float64)  # (with ties)
        found["indices"] = find_maxima(image, pooling.maps)[1]


def exact(problem: Problem) -> bool:
    """Maxima are copies, and their gradients sums."""
    return isinstance(problem, PoolingProblem) and problem.pool.mode == "max"


def bounds(problem: Problem, wide: Wide, alpha: float, beta: float) -> Bounds:
    """Maxima are exact; means and gradients are sums."""
    unit = unit_of(problem)
    forward = problem.direction.endswith("forward")
    if exact(problem) and forward:
        terms = np.abs(problem.compute(wide)["y"])
        terms = np.where(np.isinf(terms), 0.0, terms)  # (a window of padding)
        return blended(problem, {"y": ROUNDINGS * unit * terms}, wide, alpha, beta)
    name = "y" if forward else "dx"
    data = "x" if forward else "dy"
    sizes = problem.compute({**wide, data: np.abs(wide[data])})[name]
    count = math.prod(problem.x.dims[2:]) if isinstance(problem, AdaptivePoolingProblem) else 0
    count = count or int(getattr(problem, "reduction_length", 1))
    return blended(problem, {name: growth(count) * unit * sizes}, wide, alpha, beta)
