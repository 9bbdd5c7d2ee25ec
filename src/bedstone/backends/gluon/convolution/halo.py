"""gluon:implicit_gemm_halo, the gradient by filter for windows three wide: the host's side of
halo_kernels. Images are taken eight at a time, so a batch wants eight or more of them."""

from __future__ import annotations

import functools
from typing import Any

from bedstone.backends.gluon.convolution import images, tiles
from bedstone.backends.gluon.convolution.filter_gradient import (
    FilterGradient,
    FilterWork,
    filter_view,
    part_bytes,
    runs_for,
    sum_launch,
    work_seconds,
)
from bedstone.backends.gluon.convolution.images import Image
from bedstone.backends.gluon.convolution.implicit_gemm_ws import Guarded, multiprocessors
from bedstone.backends.gluon.convolution.side import sides
from bedstone.backends.triton import launch
from bedstone.backends.triton.convolution.geometry import Axis
from bedstone.plan.algorithm import Kernel
from bedstone.plan.device import Device
from bedstone.spec.convolution import ConvolutionProblem
from bedstone.spec.dtypes import DType
from bedstone.spec.problem import Problem

ROWS, WINDOW, IMAGES, BLOCK = 3, 3, 8, 64  # as in halo_kernels
PARTS = ROWS * WINDOW
WIDTHS = (14, 12, 10, 8, 6, 4)  # patch columns; the halo of two makes 16 at most
NARROW = 8  # columns of a box that holds a whole row of a small image
WARPS = 4


def choose_width(out: int) -> int:
    """The patch width that covers `out` columns with the fewest products; of equals the widest."""
    return min(WIDTHS, key=lambda width: (-(-out // width) * (width + 1), -width))


@functools.lru_cache(maxsize=1024)
def halo_work(problem: ConvolutionProblem, processors: int) -> FilterWork:
    """How the problem is cut."""
    side = sides(problem)
    geo = filter_view(problem, side).geo
    _, h, w = geo.axes
    width = choose_width(w.out)
    across = -(-w.out // width)
    steps = -(-geo.images // IMAGES) * h.out * across
    row_tiles = -(-h.taps // ROWS)
    count = geo.groups * row_tiles * -(-geo.filters // BLOCK) * -(-geo.channels // BLOCK)
    programs = runs_for(count, steps, processors)
    products = 2.0 * PARTS * BLOCK * BLOCK * IMAGES * width
    step = products / (tiles.HALO_RATE * 1e12 / processors)
    traffic = part_bytes(count, programs, PARTS * BLOCK * BLOCK)
    seconds = work_seconds(-(-count * steps // programs), step, tiles.HALO_TAIL, traffic)
    return FilterWork(count, steps, programs, BLOCK, BLOCK, PARTS, seconds, side)


class FilterHalo(FilterGradient):
    """The gradient by filter that loads x once for three taps."""

    name = "gluon:implicit_gemm_halo"
    merges = True

    def untried(self, problem: ConvolutionProblem) -> bool:
        return problem.conv.groups > 1

    def supports(self, problem: Problem, device: Device) -> str | None:
        reason = super().supports(problem, device)
        if reason is not None or not isinstance(problem, ConvolutionProblem):
            return reason
        geo = filter_view(problem).geo
        if geo.axes[0] != Axis() or geo.axes[2].taps != WINDOW:
            return f"windows are {WINDOW} wide, in two dimensions or fewer"
        if any(a.u != 1 or a.dil != 1 for a in geo.axes):
            return "unit strides and no dilation"
        return None

    def work(self, problem: ConvolutionProblem, device: Device) -> FilterWork:
        return halo_work(problem, multiprocessors(device))

    def build(self, problem: Problem, device: Device) -> Kernel:
        if not isinstance(problem, ConvolutionProblem):
            raise TypeError(f"not a convolution: {problem}")
        work = self.work(problem, device)
        view = filter_view(problem, work.side)
        main = halo_launch(problem, device, work)
        taps = view.geo.taps
        total = sum_launch(problem, device, work, view.geo, taps, view.flip)
        return Guarded((main, total), problem, device, "parts added in order")


def halo_map(operand: int, image: Image, columns: int) -> launch.TensorMap:
    """A map (h, w, n, c) of boxes 1 x columns x 8 images x 64 channels."""
    image = images.word_strides(image)
    box = (1, columns, IMAGES, BLOCK)
    return launch.TensorMap(
        operand, image.dtype, tuple(image.dims[i] for i in (2, 3, 0, 4)),
        tuple(image.strides[i] for i in (2, 3, 0, 4)), box, images.layout_of(box, image.dtype),
    )  # fmt: skip


def halo_launch(
    problem: ConvolutionProblem, device: Device, work: FilterWork, skip: bool = False
) -> Kernel:
    """The kernel that writes the parts. `skip`: leave out rows in the padding."""
    from bedstone.backends.gluon.convolution.halo_kernels import convolution_filter_halo_kernel

    view = filter_view(problem, work.side)
    geo = view.geo
    _, h, w = geo.axes
    width = choose_width(w.out)
    across = -(-w.out // width)
    # Then every column that a tap reads lies in the first box, or is padding.
    narrow = across == 1 and w.size + w.pad <= NARROW
    scalars = {
        "filter_tiles": -(-geo.filters // BLOCK), "channel_tiles": -(-geo.channels // BLOCK),
        "row_tiles": -(-h.taps // ROWS), "filters": geo.filters, "channels": geo.channels,
        "out_rows": h.out, "in_rows": h.size, "across": across, "pad_h": h.pad, "pad_w": w.pad,
    }  # fmt: skip
    arguments: dict[str, launch.Argument] = {
        "x_desc": halo_map(0, view.x, NARROW if narrow else 2 * NARROW),
        "dy_desc": halo_map(1, view.dy, NARROW if width <= NARROW else 2 * NARROW),
        "part_ptr": launch.Scratch(DType.float32),
        "cut": work.cut,
        **{name: launch.Scalar(value) for name, value in scalars.items()},
    }
    constants: dict[str, Any] = {
        "WIDTH": width, "STAGES": tiles.HALO_STAGES, "SKIP": skip, "NARROW": narrow,
    }  # fmt: skip
    return launch.prepare(
        device, convolution_filter_halo_kernel, (work.programs,), arguments, constants,
        overlaps=True, num_warps=WARPS,
    )  # fmt: skip
