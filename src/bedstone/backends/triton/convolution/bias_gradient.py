"""triton:reduce_bias: dbias[k], the sum of dy over images and pixels.

A program adds BB channels (channels innermost) or one (pixels innermost) over its share of the
pixels. With workspace the shares are many, enough to draw the memory's full speed, and are added
in a fixed order afterwards; without it one program takes all pixels of its channels.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from bedstone.backends.triton import chips, launch
from bedstone.backends.triton.convolution import gemm_kernels
from bedstone.backends.triton.convolution.implicit_gemm import sum_shape
from bedstone.backends.triton.walk import OUTER, common_word, merged, power_of_two
from bedstone.plan.algorithm import Algorithm, Kernel
from bedstone.plan.device import Device
from bedstone.spec.convolution import BiasGradientProblem
from bedstone.spec.problem import Problem

TILE = 8192  # elements a program adds at a time
CHANNELS = 64  # channels of a tile, where they are innermost
SECTOR = 32  # bytes that memory moves at least: the narrowest tile worth taking
PROGRAMS = 4  # programs a multiprocessor
WARPS = 4


@triton.jit
def convolution_backward_bias_kernel(
    dy_ptr, out_ptr, alpha, beta, K, M, axes, strides, stride_k, out_stride, SPLIT,
    PARTIAL: tl.constexpr, ACC: tl.constexpr, WIDE: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[k] = alpha * sum over the M pixels of dy + beta * out[k], for BK channels.

    A pixel is an index over seven axes (images and spatial ones, merged). BM pixels are read at a
    time; [BM, BK] partial sums stay in registers until the end. PARTIAL: program (x, y) sums every
    SPLIT-th block of pixels, from the y-th on, into part[y, k], unscaled.
    """
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    ok_k = k < K
    split = tl.program_id(1)
    if WIDE:
        split = split.to(tl.int64)
    total = tl.zeros((BM, BK), ACC)
    for start in range(split * BM, M, BM * SPLIT):
        m = start + tl.arange(0, BM)
        ok = m < M
        offs = m * 0
        for i in tl.static_range(6):
            offs += (m % axes[6 - i]) * strides[6 - i]
            m = m // axes[6 - i]
        offs += m * strides[0]
        ptrs = dy_ptr + (offs[:, None] + (k * stride_k)[None, :])
        total += tl.load(ptrs, mask=ok[:, None] & ok_k[None, :], other=0.0).to(ACC)
    result = tl.sum(total, axis=0)
    if PARTIAL:
        tl.store(out_ptr + split * K + k, result, mask=ok_k)
    else:
        result *= alpha
        ptrs = out_ptr + k * out_stride
        if beta != 0:
            result += beta * tl.load(ptrs, mask=ok_k, other=0.0).to(ACC)
        tl.store(ptrs, result.to(out_ptr.dtype.element_ty), mask=ok_k)


class ReduceBias(Algorithm):
    """The bias gradient without workspace."""

    name = "triton:reduce_bias"
    splits = False

    def supports(self, problem: Problem, device: Device) -> str | None:
        if not isinstance(problem, BiasGradientProblem):
            return "it computes the gradient by the bias"
        if self.splits and _split(problem, device) == 1:
            return "the channels alone fill the chip"
        return None

    def workspace(self, problem: Problem, device: Device) -> int:
        if not self.splits:
            return 0
        k = problem.outputs[0].desc.size
        return _split(problem, device) * k * problem.dtype.accumulator.itemsize

    def estimate(self, problem: Problem, device: Device) -> float:
        split = _split(problem, device) if self.splits else 1
        busy = -(-problem.outputs[0].desc.size // _tile(problem, self.splits)[1]) * split
        share = min(1.0, busy / chips.chip_of(device.architecture).multiprocessors)
        return chips.move_seconds(int(problem.bytes / share), device.architecture, 1 + self.splits)

    def build(self, problem: Problem, device: Device) -> Kernel:
        if not isinstance(problem, BiasGradientProblem):
            raise TypeError(f"not a bias gradient: {problem}")
        split = _split(problem, device) if self.splits else 1
        main = _launch(problem, split, device)
        if not self.splits:
            return main
        what = f"{getattr(main, 'description', '')}; {split} parts added in order"
        return launch.Chain((main, _sum(problem, split, device)), what)


class ReduceBiasSplit(ReduceBias):
    """The bias gradient by parts that lie in workspace."""

    name = "triton:reduce_bias_split"
    splits = True


def _tile(problem: Problem, splits: bool) -> tuple[int, int]:
    """(pixels, channels) of a tile; narrow where only the channels make programs."""
    dy = problem.operands[0].desc
    if dy.strides[1] != 1:
        return TILE, 1
    widest = CHANNELS if splits else SECTOR // dy.dtype.itemsize
    bk = min(widest, power_of_two(dy.dims[1]))
    return TILE // bk, bk


def _split(problem: Problem, device: Device) -> int:
    dy = problem.operands[0].desc
    bm, bk = _tile(problem, True)
    programs = -(-dy.dims[1] // bk)
    blocks = -(-dy.size // max(dy.dims[1], 1) // bm)
    wanted = PROGRAMS * chips.chip_of(device.architecture).multiprocessors // max(programs, 1)
    return max(1, min(blocks, wanted))


def _launch(problem: BiasGradientProblem, split: int, device: Device) -> Kernel:
    dy, bias, dtype = problem.y, problem.bias, problem.y.dtype
    pixels = [(d, (s,)) for i, (d, s) in enumerate(zip(dy.dims, dy.strides)) if i != 1 and d != 1]
    axes = merged(pixels)
    axes += [(1, (0,))] * (OUTER + 1 - len(axes))  # the first needs no modulo
    low, high = dy.offset_range()
    wide = high - low >= 2**31
    kind = "i64" if wide else "i32"
    unit = launch.ALIGNMENT // dtype.itemsize
    dims, strides = tuple(d for d, _ in axes), tuple(s[0] for _, s in axes)
    words = common_word((*strides, dy.strides[1]), unit)
    count = dy.size // max(dy.dims[1], 1)
    partial = split > 1
    bm, bk = _tile(problem, partial)
    arguments: dict[str, Any] = {
        "dy_ptr": launch.Pointer(0, dtype),
        "out_ptr": launch.Scratch(dtype.accumulator) if partial else launch.Pointer(1, dtype),
        **launch.factors(dtype),
        "K": launch.Scalar(dy.dims[1], divisor=common_word([dy.dims[1]], unit)),
        "M": launch.Scalar(count, kind, common_word([count], unit)),
        "axes": launch.Integers(dims, kind, common_word(dims, unit)),
        "strides": launch.Integers(strides, kind, words),
        "out_stride": launch.Scalar(bias.strides[0], "i64"),
        "SPLIT": launch.Scalar(split),
    }
    constants = {
        "PARTIAL": partial, "ACC": launch.accumulator(dtype), "WIDE": wide, "BM": bm, "BK": bk
    }  # fmt: skip
    if dy.strides[1] == 1:
        constants["stride_k"] = 1
    else:
        arguments["stride_k"] = launch.Scalar(dy.strides[1], kind, words)
    return launch.prepare(
        device, convolution_backward_bias_kernel, (-(-dy.dims[1] // bk), split),
        arguments, constants, num_warps=WARPS,
    )  # fmt: skip


def _sum(problem: BiasGradientProblem, split: int, device: Device) -> Kernel:
    dtype, k, shape = problem.y.dtype, problem.bias.dims[0], sum_shape(split)
    arguments: dict[str, Any] = {
        "part_ptr": launch.Scratch(dtype.accumulator),
        "out_ptr": launch.Pointer(1, dtype),
        "bias_ptr": launch.Pointer(1, dtype),
        **launch.factors(dtype),
        **launch.activation_arguments(None, dtype),
        "SPLIT": launch.Scalar(split),
        "TOTAL": launch.Scalar(k, "i64"),
        "o_n": launch.Scalar(problem.bias.strides[0], "i64"),
    }
    fixed = {"D": 1, "H": 1, "W": 1, "C": 1, "o_c": 0, "o_d": 0, "o_h": 0, "o_w": 0}
    constants = {**fixed, "BIAS": False, "ACTIVATION": "none"} | shape
    return launch.prepare(
        device, gemm_kernels.convolution_sum_parts_kernel, (-(-k // shape["BLOCK"]),),
        arguments, constants, num_warps=WARPS,
    )  # fmt: skip
