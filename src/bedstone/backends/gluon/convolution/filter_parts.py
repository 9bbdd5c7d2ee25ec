"""gluon:implicit_gemm_bf16x6_split and _bf16x3_split, float32 gradients by filter that read their
operands once: the host's side of filter_parts_kernels.

The first is to keep float32's accuracy and range, the second what tf32 promises. They are meant for
problems where the operands' bytes are what takes time (1x1 windows, few channels): the kernels that
first write scaled float16 planes move more of them. No device has run them yet.
"""

from __future__ import annotations

from typing import Any

from bedstone.backends.gluon.convolution import tiles
from bedstone.backends.gluon.convolution.f16x3 import MATH
from bedstone.backends.gluon.convolution.filter_gradient import (
    FilterChoice,
    FilterGradient,
    cut_arguments,
    filter_view,
    sum_launch,
)
from bedstone.backends.gluon.convolution.images import image_map
from bedstone.backends.gluon.convolution.implicit_gemm_ws import (
    WARPS,
    Guarded,
    per_axis,
)
from bedstone.backends.triton import launch
from bedstone.plan.algorithm import Kernel
from bedstone.plan.device import Device
from bedstone.spec.convolution import ConvolutionProblem
from bedstone.spec.dtypes import DType
from bedstone.spec.problem import Problem


class FilterBf16x6(FilterGradient):
    """float32 from six products of three bfloat16 parts."""

    name = "gluon:implicit_gemm_bf16x6_split"
    dtypes = (DType.float32,)
    math = (*MATH, "bf16x6")
    parts = 3
    table = tiles.FILTER_BF16X6
    merges = True

    def untried(self, problem: ConvolutionProblem) -> bool:
        return True

    def build(self, problem: Problem, device: Device) -> Kernel:
        if not isinstance(problem, ConvolutionProblem):
            raise TypeError(f"not a convolution: {problem}")
        choice = self.choice(problem, device)
        view = filter_view(problem, choice.work.side)
        total = sum_launch(problem, device, choice.work, view.geo, view.geo.taps, view.flip)
        launches = (parts_launch(problem, device, choice, self.parts), total)
        return Guarded(launches, problem, device, f"from {self.parts} bfloat16 parts of an element")


class FilterBf16x3(FilterBf16x6):
    """What tf32 promises and more, from three products of two bfloat16 parts."""

    name = "gluon:implicit_gemm_bf16x3_split"
    math = ("tf32", "bf16x3")
    parts = 2
    table = tiles.FILTER_BF16X3


def parts_launch(
    problem: ConvolutionProblem, device: Device, choice: FilterChoice, parts: int
) -> Kernel:
    """The kernel that writes the parts of sums."""
    from bedstone.backends.gluon.convolution.filter_parts_kernels import (
        convolution_filter_parts_kernel,
    )

    tile, patch, work = choice.tile, choice.patch, choice.work
    view = filter_view(problem, work.side)
    geo = view.geo
    arguments: dict[str, launch.Argument] = {
        "x_desc": image_map(0, view.x, patch.box, tile.bk, per_axis(geo, "u")),
        "dy_desc": image_map(1, view.dy, patch.box, tile.bm),
        "part_ptr": launch.Scratch(DType.float32),
        **cut_arguments(geo, choice),
    }
    constants: dict[str, Any] = {
        "BK": tile.bm, "BC": tile.bk, "BP": tile.bc, "STAGES": tile.stages,
        "CONSUMERS": tile.consumers, "DEPTH": view.x.depth, "PARTS": parts,
    }  # fmt: skip
    return launch.prepare(
        device, convolution_filter_parts_kernel, (work.programs,), arguments, constants,
        overlaps=True, num_warps=WARPS,
    )  # fmt: skip
