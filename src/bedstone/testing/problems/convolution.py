"""Convolution problems: the cases that break kernels, by name, and a generator."""

from __future__ import annotations

import numpy as np

from bedstone.spec.activation import KINDS as ACTIVATIONS
from bedstone.spec.activation import ActivationDesc
from bedstone.spec.convolution import (
    DIRECTIONS,
    BiasGradientProblem,
    ConvolutionDesc,
    ConvolutionProblem,
    Epilogue,
)
from bedstone.spec.problem import Problem, parse_problem
from bedstone.spec.tensor import TensorDesc
from bedstone.testing.problems.activation import absolute_scale, slope_limit
from bedstone.testing.problems.strides import randomly_strided, with_strides
from bedstone.testing.tolerances import (
    FUNCTION_ULPS,
    Bounds,
    Wide,
    absolute,
    linear,
    unit_of,
)

# Shape words, each with what it is there for; every direction is made of each.
SHAPES = (
    "n1c1h1k1r1",  # a single multiplication
    "n1c3h8k4r3",
    "n2c4h9w7k6r3p1",
    "n2c3h12w11k5r5p2",
    "n1c2h7k3r7p3",  # a window as large as the image
    "n2c16h10k32r3p1",  # whole vectors
    "n1c17h9k33r3p1",  # whole vectors and one more
    "n1c15h6k31r3p1",  # one short
    "n1c64h7k48r1",  # 1x1
    "n3c20h5k24r1u2",  # 1x1 with stride
    "n1c8h14k8r3u2p1",
    "n1c3h23k8r7u2p3",  # the stem of a residual network
    "n1c3h19k6r11u4p2",  # the first layer of AlexNet
    "n1c4h9k4r3u3",  # stride equal to the window
    "n1c4h9k4r2u3",  # stride larger than the window: unread pixels
    "n2c5h13w10k7r3s2phAwB",  # asymmetric padding; filled in below
    "n1c4h12k6r3p2l2",  # dilation
    "n1c3h15w13k4r3p0l3",
    "n1c4h14k4r3s5lh2lw1uh1uw2ph2pw1",  # everything different by axis
    "n2c8h7k12r3p1g4",  # groups
    "n1c44h5w8k38r3p1g2",  # groups of whole vectors and some more channels
    "n2c6h9k6r3p1g6",  # depthwise
    "n1c32h8k32r3p1g32",
    "n1c5h9k10r5p2u2g5",  # depthwise with two filters a channel and stride
    "n1c33h6k33r3p1g33",
    "n2c3w17k3s3u2g3",  # output rows of one whole vector
    "n1c6h5k4r3p3",  # padding beyond the window's reach: outputs of zeros
    "n1c2h3k2r3p2u5",  # a single window position
    "n1c2h1w30k3r1s5pw2",  # one row
    "n1c2h30w1k3r5s1ph2",  # one column
    "n2c300h3k5r3p1",  # a long reduction over channels
    "n1c5h4k300r1",  # many filters
    "n40c3h4k3r3p1",  # many images
    "n2c3w17k5s3p1",  # one axis
    "n1c16w40k16s5pA",
    "n2c3w9k4s3l2u2g1",
    "n1c1w12k1s4p1u2l2",  # whole vectors of results under a stride, one channel
    "n1c32h7w9k33r5s4p2",  # windows that nested transforms cut into pieces
    "n1c34h6k36r7p3",
    "n1c3d5h6w7k4t3r3s3p1",  # three axes
    "n2c4d4h4w4k6t2r2s2u2g2",
    "n1c2d6h5w4k3t1r3s2lh2",
)
_WORDS = {"phAwB": "ph2_1pw0_3", "pA": "p1_3"}

# Results without elements, and sums of nothing.
EMPTY = (
    "n0c3h8k4r3",
    "n2c0h8k4r3",
    "n2c3h8k0r3",
    "n0c3w8k4s3p1",
)

FLIPPED = ("n1c3h8k4r3p1", "n2c4h7w9k6r2s3uh2uw1g2", "n1c2d4h5w6k3t2r3s2")

# One tensor at a time is given each kind of strides.
STRIDED_SHAPES = ("n2c5h7w6k4r3s2p1", "n1c16h8k16r3p1", "n2c6h6k6r3p1u2g6", "n2c3w9k4s3p1")
STRIDED_KINDS = (
    "channels_last", "permuted", "gaps", "gaps", "reversed", "reversed", "broadcast", "overlapping",
)  # fmt: skip

EPILOGUES = (
    "n1c3h8k5r3p1 float32 bias",
    "n2c16h6k20r1 float32 bias activation=relu shift=0.5",
    "n1c8h9k16r3p1 float32 activation=leaky_relu:0.1:0.0 shift=-2.25 x=NHWC w=NHWC y=NHWC",
    "n1c4h6k4r3p1g4 float32 bias activation=clipped_relu shift=0.1",
    "n1c32h5k36r3p1g2 float32 bias activation=relu",
)
MATH = ("tf32", "bf16", "bf16x3", "bf16x6", "fast")
HALF_SHAPES = (
    "n2c4h9w7k6r3p1", "n1c17h9k33r3p1", "n1c8h14k8r3u2p1", "n1c64h7k48r1", "n2c6h9k6r3p1g6",
    "n2c5h13w10k7r3s2phAwB", "n2c300h3k5r3p1", "n3c72h12k136r1",
)  # fmt: skip
HALVES = ("float16", "bfloat16")
# Channels innermost, in counts that whole words and the tiles of matrix units divide.
CHANNELS_LAST_SHAPES = (
    "n9c64h7k64r3p1", "n2c72h9w11k136r3p1", "n3c64h12k128r1", "n2c32h15k64r3p1u2",
    "n1c64h12k64r5p2", "n2c64h9k64r3p2l2", "n2c128h8k128r3p1g2", "n2c64w40k64s3p1",
    "n1c64d4h6w5k64t3r3s3p1", "n2c32h9k32r3p1g4", "n2c72h9w11k72r3p1g72", "n1c40h15k40r5p2u2g40",
    "n1c64h13k64r7p3g64",
)  # fmt: skip


def _word(shape: str) -> str:
    for name, word in _WORDS.items():
        shape = shape.replace(name, word)
    return shape


def _of(direction: str, shape: str, options: str = "float32") -> Problem:
    """The problem of a shape; backward_bias takes the output's dims of it."""
    word = _word(shape)
    if direction != "backward_bias":
        return parse_problem(f"convolution {direction} {word} {options}")
    whole = parse_problem(f"convolution forward {word} {options}")
    y: TensorDesc = whole.y  # type: ignore[attr-defined]
    return BiasGradientProblem(y, TensorDesc.packed(y.dims[1:2], y.dtype))


def curated() -> list[Problem]:
    """Every direction of every shape, in float32 and float64, then the special ones."""
    random = np.random.default_rng(0)
    found = [
        _of(direction, shape, dtype)
        for shape in SHAPES + EMPTY
        for direction in DIRECTIONS
        for dtype in ("float32", "float64")
    ]
    for shape in SHAPES:
        layout = "x=NHWC w=NHWC y=NHWC"
        if "d" not in shape and "h" in shape:
            found += [_of(direction, shape, f"float32 {layout}") for direction in DIRECTIONS]
    for shape in FLIPPED:
        found += [_of(direction, shape, "float32 mode=convolution") for direction in DIRECTIONS[:3]]
    for shape in STRIDED_SHAPES:
        for direction in DIRECTIONS[:3]:
            base = _of(direction, shape)
            for kind in STRIDED_KINDS:
                found += [with_strides(base, field, kind, random) for field in ("x", "w", "y")]
        bias = _of("backward_bias", shape)
        for kind in STRIDED_KINDS:
            found += [with_strides(bias, field, kind, random) for field in ("y", "bias")]
    found.append(parse_problem("convolution backward_bias 2x5x80x80 float32"))  # a sum cut in parts
    found += [parse_problem(f"convolution forward {line}") for line in EPILOGUES]
    found += [
        _of(direction, "n1c20h6k18r3p1", f"float32 math={math}")
        for math in MATH
        for direction in DIRECTIONS[:3]
    ]
    found += [
        _of(direction, shape, dtype)
        for shape in HALF_SHAPES
        for direction in DIRECTIONS
        for dtype in HALVES
    ]
    found += [
        _of(direction, shape, f"{dtype} layout=NHWC")
        for shape in CHANNELS_LAST_SHAPES
        for direction in DIRECTIONS[:3]
        for dtype in (*HALVES, "float32", "float32 math=tf32")
    ]
    # A small filter and many pixels: sums of many parts.
    found += [
        _of("backward_filter", "n8c3h64k8r3p1", f"{dtype} layout=NHWC")
        for dtype in ("bfloat16", "float32")
    ]
    return found


# The generator's budget: multiply-adds of one problem, so that the reference takes milliseconds.
LARGEST_WORK = 1_500_000
LARGEST_SIZE = {1: 40, 2: 14, 3: 7}  # of a spatial axis, by number of axes
CHANNELS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 64, 65)
DTYPES = ("float32", "float64", "float16", "bfloat16")
DTYPE_WEIGHTS = (0.62, 0.28, 0.05, 0.05)


def draw(random: np.random.Generator) -> Problem:
    """A random problem of any direction, within LARGEST_WORK multiply-adds."""
    while True:
        problem = _draw(random)
        if problem.flops <= 2 * LARGEST_WORK:
            return randomly_strided(problem, random)


def _draw(random: np.random.Generator) -> Problem:
    direction = str(random.choice(DIRECTIONS, p=(0.42, 0.26, 0.26, 0.06)))
    dtype = str(random.choice(DTYPES, p=DTYPE_WEIGHTS))
    axes = int(random.choice((1, 2, 3), p=(0.14, 0.72, 0.14)))
    batch = int(random.choice((0, 1, 2, 3, 5), p=(0.01, 0.5, 0.3, 0.12, 0.07)))
    conv, window = _window(axes, random)
    groups, c, k = _channels(random)
    sizes = []
    for r, pad, step in zip(window, conv.padding, conv.dilation):
        least = max(1, (r - 1) * step + 1 - sum(pad))
        sizes.append(least + int(random.integers(0, LARGEST_SIZE[axes])))
    conv = ConvolutionDesc(conv.padding, conv.stride, conv.dilation, groups, conv.mode)
    x, w = (batch, c * groups, *sizes), (k * groups, c, *window)
    xd, wd, yd = (TensorDesc.packed(dims, dtype) for dims in (x, w, conv.output_dims(x, w)))
    if direction == "backward_bias":
        return BiasGradientProblem(yd, TensorDesc.packed(yd.dims[1:2], dtype))
    math = "ieee"
    if dtype == "float32" and random.random() < 0.06:
        math = str(random.choice(MATH))
    epilogue = _epilogue(random) if direction == "forward" else Epilogue()
    deterministic = bool(random.random() < 0.96)
    return ConvolutionProblem(direction, xd, wd, yd, conv, math, deterministic, epilogue)


def _window(axes: int, random: np.random.Generator) -> tuple[ConvolutionDesc, tuple[int, ...]]:
    """Half of the windows are the ones of known networks (1x1, 3x3), half are anything."""
    mode = "convolution" if random.random() < 0.12 else "cross_correlation"
    if random.random() < 0.5:
        size = int(random.choice((1, 3, 5, 7), p=(0.28, 0.57, 0.1, 0.05)))
        pad = size // 2 if random.random() < 0.7 else 0
        stride = 1 if random.random() < 0.75 else 2
        return ConvolutionDesc.of(axes, pad, stride, 1, 1, mode), (size,) * axes
    window = tuple(int(v) for v in random.integers(1, 6 if axes < 3 else 4, axes))
    pads = [[int(p) for p in random.integers(0, 4, 2)] for _ in range(axes)]
    strides = tuple(int(v) for v in random.integers(1, 5, axes))
    dilation = tuple(int(v) for v in random.choice((1, 1, 1, 2, 3), axes))
    return ConvolutionDesc.of(axes, pads, strides, dilation, 1, mode), window


def _channels(random: np.random.Generator) -> tuple[int, int, int]:
    """(groups, channels a group, filters a group)."""
    draw = random.random()
    if draw < 0.6:
        return 1, int(random.choice(CHANNELS)), int(random.choice(CHANNELS))
    if draw < 0.8:
        return int(random.choice(CHANNELS)), 1, int(random.choice((1, 1, 1, 2, 3)))
    groups, c, k = (int(v) for v in random.integers(1, 7, 3))
    return groups, c, k


def _epilogue(random: np.random.Generator) -> Epilogue:
    act = None
    if random.random() < 0.15:
        act = ActivationDesc(str(random.choice(tuple(ACTIVATIONS))))
    shift = float(random.choice((-1.5, 0.25))) if random.random() < 0.1 else 0.0
    return Epilogue(bool(random.random() < 0.3), act, shift)


def exact(problem: Problem) -> bool:
    """Sums of products, with a bias perhaps."""
    if not isinstance(problem, ConvolutionProblem):
        return True
    return problem.epilogue.activation is None and not problem.epilogue.shift


def bounds(problem: Problem, wide: Wide, alpha: float, beta: float) -> Bounds:
    """Of the sum, then through bias and activation."""
    found = linear(problem, wide, alpha, beta)
    if not isinstance(problem, ConvolutionProblem) or not problem.epilogue:
        return found
    unit = unit_of(problem)
    if problem.epilogue.bias:
        shape = (1, -1, *(1,) * problem.conv.axes)
        found["y"] = found["y"] + 2 * unit * np.abs(wide["bias"]).reshape(shape)
    act = problem.epilogue.activation
    if act is not None:
        size = np.abs(problem.reference(absolute(wide), abs(alpha), abs(beta))["y"])
        error = FUNCTION_ULPS * 2 * unit * (size + absolute_scale(act))
        found["y"] = slope_limit(act) * found["y"] + error
    found["y"] = found["y"] + 2 * unit * abs(problem.epilogue.shift)
    return found
