"""Writes the file of cases that c/check.c runs: operands and what the reference expects of them."""

from __future__ import annotations

import struct

import c_binding as c
import numpy as np
from c_algorithm import describe

from bedstone.spec.convolution import BiasGradientProblem, ConvolutionProblem
from bedstone.spec.problem import parse_problem
from bedstone.spec.softmax import channel_axes

HEADER = struct.Struct("<48sddd2qqq128s")
TOLERANCE = {"float32": 2e-5, "float64": 1e-13}

CONVOLUTIONS = (
    "n2c3h7w6k5r3p1", "n1c16h9k8r3p1u2", "n2c8h6k12r1", "n1c4h9k4r3p2l2g2", "n1c3h11k7r5u2p2",
    "n1c6h8k4r3 mode=convolution", "n2c4w17k6s5p2", "n1c2d5h4w6k3t2r3s2p1",
    "n2c16h6k16r3p1 x=NHWC w=NHWC y=NHWC", "n1c16h9k8r3u2 x=NHWC w=NHWC y=NHWC",
    "n2c300h4k5r3p1", "n1c20h20k3r7", "n2c64h12k64r3p1",
)  # fmt: skip
LINES = (
    *(f"convolution {d} {line}" for line in CONVOLUTIONS
      for d in ("forward", "backward_data", "backward_filter")),
    "convolution forward n2c3h7w6k5r3p1 bias",
    "convolution forward n2c16h6k16r3p1 bias x=NHWC w=NHWC y=NHWC",
    "convolution backward_bias 3x5x4x7",
    "convolution backward_bias 2x19x3x3 y=NHWC",
    *(f"pooling {d} {shape} mode={mode}" for d in ("forward", "backward")
      for shape in ("n2c3h13w12r3p1u2", "n2c9h8r2u2 x=NHWC y=NHWC", "n1c2d5h6w7t2r3s2")
      for mode in ("max", "average_include_padding", "average_exclude_padding")),
    *(f"softmax {d} {shape} algorithm={algorithm}" for d in ("forward", "backward")
      for shape in ("3x10x4x5", "5x37", "2x9x3x3 x=NHWC y=NHWC saved=NHWC", "2x5x3x7 axes=1,2,3")
      for algorithm in ("fast", "accurate", "log")),
    *(f"activation {d} 3x11x5 kind={kind}" for d in ("forward", "backward")
      for kind in ("relu", "sigmoid", "tanh", "clipped_relu", "elu", "gelu", "silu", "softplus")),
    "tensor_ops transform 2x5x7x6 y=NHWC",
    "tensor_ops add 3x4x5x6 b=1x4x1x1",
    "tensor_ops set 4x33",
    "tensor_ops scale 3x5x9",
)  # fmt: skip
FACTORS = ((1.0, 0.0), (0.5, -1.5))


def write_cases(path, threads=2):
    """Every line, in both dtypes, with each of FACTORS; returns how many cases there are."""
    random = np.random.default_rng(11)
    records = []
    for line in LINES:
        for dtype in TOLERANCE:
            words = line.split(" ", 3)
            text = " ".join([*words[:3], dtype, *words[3:]])
            for alpha, beta in FACTORS:
                records.append(_record(parse_problem(text), alpha, beta, threads, random))
    path.write_bytes(struct.pack("<q", len(records)) + b"".join(records))
    return len(records)


def _record(problem, alpha, beta, threads, random):
    memories, views = {}, {}
    for operand in problem.operands:
        desc = operand.desc
        low, high = desc.offset_range()
        memory = random.uniform(-1, 1, high - low + 3).astype(str(desc.dtype))  # a gap at the end
        view = np.lib.stride_tricks.as_strided(
            memory[-low:], desc.dims, [s * memory.itemsize for s in desc.strides]
        )
        memories[operand.name], views[operand.name] = (memory, -low), view
    name = problem.operands[-1].name
    expected, origin = memories[name][0].astype(np.float64), memories[name][1]
    arrays = {n: v.astype(np.float64) for n, v in views.items()}
    result = problem.reference(arrays, alpha, beta)[name]
    desc = problem.operands[-1].desc
    np.lib.stride_tricks.as_strided(
        expected[origin:], desc.dims, [s * 8 for s in desc.strides]
    )[...] = result  # fmt: skip
    numbers, setting, prefix = _setting(problem)
    tolerance = TOLERANCE[str(desc.dtype)] * max(1.0, float(np.abs(result).max()))
    head = HEADER.pack(
        f"bs_{prefix}_{problem.direction}".encode(), alpha, beta, tolerance, *numbers, threads,
        len(memories), bytes(setting),
    )  # fmt: skip
    parts = [head]
    for operand in problem.operands:
        memory, first = memories[operand.name]
        parts += [bytes(describe(operand.desc)), struct.pack("<2q", memory.size, first)]
        parts.append(memory.tobytes())
    return b"".join([*parts, expected.tobytes()])


def _setting(problem):
    """(enumerations, struct, what the function's name begins with)."""
    if isinstance(problem, (ConvolutionProblem, BiasGradientProblem)):
        conv = getattr(problem, "conv", None)
        return (0, 0), c.convolution(conv) if conv else b"", "convolution"
    if problem.primitive == "pooling":
        return (0, 0), c.pooling(problem.pool), "pooling"
    if problem.primitive == "softmax":
        algorithm = c.NUMBER["bs_softmax_algorithm"][problem.algorithm]
        return (algorithm, int(problem.axes != channel_axes(problem.x.rank))), b"", "softmax"
    if problem.primitive == "activation":
        return (0, 0), c.activation(problem.activation), "activation"
    return (0, 0), b"", "tensor"
