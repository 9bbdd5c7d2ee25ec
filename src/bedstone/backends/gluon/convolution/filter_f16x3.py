"""gluon:implicit_gemm_f16x3_split, float32 gradient by filter from three float16 products.

The host's side of filter_f16x3_kernels: channels last; planes, channels' ranges and parts of sums
lie in workspace. It keeps float32's accuracy and range, so it serves math="ieee".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bedstone.backends.gluon.convolution import tiles
from bedstone.backends.gluon.convolution.f16x3 import MATH, PRODUCTS_TEXT, aligned
from bedstone.backends.gluon.convolution.filter_gradient import (
    FilterChoice,
    FilterGradient,
    FilterView,
    FilterWork,
    cut_arguments,
    dw_strides,
    filter_view,
    geometry_arguments,
)
from bedstone.backends.gluon.convolution.images import Image, image_map
from bedstone.backends.gluon.convolution.implicit_gemm_ws import (
    WARPS,
    Guarded,
    Integers,
    multiprocessors,
    per_axis,
)
from bedstone.backends.triton import launch
from bedstone.backends.triton.convolution.geometry import word
from bedstone.plan.algorithm import Kernel
from bedstone.plan.device import Device
from bedstone.spec.convolution import ConvolutionProblem
from bedstone.spec.dtypes import DType
from bedstone.spec.problem import Problem

LAUNCHES = 8
PASSES = 4.5  # over an image, of its float32 size: read twice, planes written at half the speed
SCAN_PIXELS, SCAN_CHANNELS, SCAN_WARPS = 64, 64, 4
SCAN_PROGRAMS = 16  # a multiprocessor
CLEAR_BLOCK = 1024
SUM_ROWS, SUM_WARPS = 2, 4
SUM_LOADS, MAX_SUM_SLOTS = 8192, 32
CAREFUL_HEIGHT, CAREFUL_PIXELS, CAREFUL_WARPS = 16, 16, 8  # a product has 16 rows or more


@dataclass(frozen=True)
class Layout:
    """Offsets in the workspace, and bytes of all. `info` holds, for every channel of x and then of
    dy, the largest magnitude's bits, then for all of them the mark of small elements."""

    dy: int
    info: int
    todo: int
    parts: int
    size: int


def plane(image: Image) -> Image:
    """One float16 plane of an image, packed, channels rounded up to what TMA takes."""
    unit = word(DType.float16.itemsize)
    pitch = -(-image.dims[4] // unit) * unit
    steps = [1, pitch]
    for dim in reversed(image.dims[1:4]):
        steps.append(steps[-1] * dim)
    strides = (*reversed(steps[1:]), 1)
    return Image(image.dims, strides, image.depth, DType.float16)  # type: ignore[arg-type]


def plane_size(image: Image) -> int:
    """Elements of a plane."""
    return image.pixels * plane(image).strides[3]


def layout_of(view: FilterView, work: FilterWork, planes: int) -> Layout:
    """Where things lie in the workspace."""
    nbytes = planes * DType.float16.itemsize
    dy = aligned(nbytes * plane_size(view.x))
    info = dy + aligned(nbytes * plane_size(view.dy))
    todo = info + aligned(4 * 2 * (view.x.dims[4] + view.dy.dims[4]))
    parts = todo + aligned(4 * (1 + sum_blocks(work)))
    return Layout(dy, info, todo, parts, parts + work.workspace)


def sum_blocks(work: FilterWork) -> int:
    """Blocks in which the parts are added."""
    return work.tiles * (work.rows // SUM_ROWS)


class FilterF16x3(FilterGradient):
    """float32 on the float16 matrix units, with float32's accuracy and range."""

    name = "gluon:implicit_gemm_f16x3_split"
    dtypes = (DType.float32,)
    math = MATH
    planes = 2
    table = tiles.FILTER_F16X3

    def workspace(self, problem: Problem, device: Device) -> int:
        if not isinstance(problem, ConvolutionProblem):
            return 0
        return layout_of(filter_view(problem), self.work(problem, device), self.planes).size

    def estimate(self, problem: Problem, device: Device) -> float:
        if not isinstance(problem, ConvolutionProblem):
            raise TypeError(f"not a convolution: {problem}")
        moved = PASSES * (problem.x.nbytes + problem.y.nbytes) / tiles.BANDWIDTH
        return LAUNCHES * tiles.LAUNCH_SECONDS + moved + self.work(problem, device).seconds

    def build(self, problem: Problem, device: Device) -> Kernel:
        if not isinstance(problem, ConvolutionProblem):
            raise TypeError(f"not a convolution: {problem}")
        view, choice = filter_view(problem), self.choice(problem, device)
        where = layout_of(view, choice.work, self.planes)
        launches = (
            clear_launch(device, view, where),
            *scan_launches(device, view, where, 0, self.planes),
            *scan_launches(device, view, where, 1, self.planes),
            main_launch(device, view, choice, where, self.planes),
            sum_launch(problem, device, choice, where),
            careful_launch(problem, device, choice, where),
        )
        what = PRODUCTS_TEXT[3 if self.planes == 2 else 1]
        return Guarded(launches, problem, device, what)


class FilterF16(FilterF16x3):
    """What tf32 promises, by one product of scaled float16."""

    name = "gluon:implicit_gemm_f16_split"
    math = ("tf32",)
    planes = 1
    table = tiles.FILTER_F16


def tops(view: FilterView, where: Layout) -> tuple[int, int]:
    """Offsets of the ranges of x's and dy's channels; their marks lie `marks` bytes further."""
    return where.info, where.info + 4 * view.x.dims[4]


def marks(view: FilterView) -> int:
    """Bytes from a channel's range to its mark."""
    return 4 * (view.x.dims[4] + view.dy.dims[4])


def clear_launch(device: Device, view: FilterView, where: Layout) -> Kernel:
    """The kernel that sets ranges and marks to 0."""
    from bedstone.backends.gluon.convolution.filter_f16x3_kernels import convolution_clear_kernel

    length = 2 * (view.x.dims[4] + view.dy.dims[4])
    arguments: dict[str, launch.Argument] = {
        "info_ptr": launch.Scratch(DType.int32, where.info),
        "list_ptr": launch.Scratch(DType.int32, where.todo),
        "length": launch.Scalar(length),
    }
    grid = (-(-length // CLEAR_BLOCK),)
    constants = {"BLOCK": CLEAR_BLOCK}
    return launch.prepare(
        device, convolution_clear_kernel, grid, arguments, constants, overlaps=True, num_warps=4
    )


def scan_launches(
    device: Device, view: FilterView, where: Layout, operand: int, planes: int
) -> tuple[Kernel, Kernel]:
    """The kernels that find the ranges of x (operand 0) or dy (1), and split it."""
    from bedstone.backends.gluon.convolution.filter_f16x3_kernels import (
        convolution_channel_range_kernel,
        convolution_split_image_kernel,
    )

    image, top = (view.x, view.dy)[operand], tops(view, where)[operand]
    image = image.merged() or image
    blocks = -(-image.pixels // SCAN_PIXELS)
    columns = -(-image.dims[4] // SCAN_CHANNELS)
    programs = max(1, min(blocks, multiprocessors(device) * SCAN_PROGRAMS // columns))
    unit = word(4)
    whole = all(s % unit == 0 for s in image.strides[:4])
    common: dict[str, launch.Argument] = {
        "x_ptr": launch.Pointer(operand, DType.float32),
        "top_ptr": launch.Scratch(DType.int32, top),
        "pixels": launch.Scalar(image.pixels),
        "channels": launch.Scalar(image.dims[4]),
        "dims": launch.Integers(image.dims[:4]),
        "strides": launch.Integers(image.strides[:4], "i64", unit if whole else 1),
        "columns": launch.Scalar(columns),
    }
    split = common | {
        "planes_ptr": launch.Scratch(DType.float16, where.dy if operand else 0),
        "small_ptr": launch.Scratch(DType.int32, top + marks(view)),
        "pitch": launch.Scalar(plane(image).strides[3], divisor=word(2)),
        "plane": launch.Scalar(plane_size(image), "i64", word(2)),
    }
    grid = (programs * columns,)
    constants = {"PIXELS": SCAN_PIXELS, "CHANNELS": SCAN_CHANNELS}
    splitting = constants | {"PLANES": planes}
    return tuple(  # type: ignore[return-value]
        launch.prepare(
            device, kernel, grid, arguments, numbers, overlaps=True, num_warps=SCAN_WARPS
        )
        for kernel, arguments, numbers in (
            (convolution_channel_range_kernel, common, constants),
            (convolution_split_image_kernel, split, splitting),
        )
    )


def main_launch(
    device: Device, view: FilterView, choice: FilterChoice, where: Layout, planes: int
) -> Kernel:
    """The kernel that writes the parts."""
    from bedstone.backends.gluon.convolution.filter_f16x3_kernels import (
        convolution_filter_f16x3_kernel,
    )

    geo, tile, patch, work = view.geo, choice.tile, choice.patch, choice.work
    maps = {}
    for name, image, start, width, steps in (
        ("x", view.x, 0, tile.bk, per_axis(geo, "u")),
        ("d", view.dy, where.dy, tile.bm, (1, 1, 1)),
    ):
        for part, number in (("h", 0), ("l", planes - 1)):
            offset = start + number * DType.float16.itemsize * plane_size(image)
            maps[f"{name}{part}_desc"] = image_map(
                None, plane(image), patch.box, width, steps, offset
            )
    arguments: dict[str, launch.Argument] = {
        **maps,
        "part_ptr": launch.Scratch(DType.float32, where.parts),
        **cut_arguments(geo, choice),
    }
    constants: dict[str, Any] = {
        "BK": tile.bm, "BC": tile.bk, "BP": tile.bc, "STAGES": tile.stages,
        "CONSUMERS": tile.consumers, "DEPTH": view.x.depth, "PLANES": planes,
    }  # fmt: skip
    return launch.prepare(
        device, convolution_filter_f16x3_kernel, (work.programs,), arguments, constants,
        overlaps=True, num_warps=WARPS,
    )  # fmt: skip


def dw_arguments(
    problem: ConvolutionProblem, view: FilterView, choice: FilterChoice
) -> dict[str, launch.Argument]:
    """What the kernels that write dw share."""
    geo, tile, strides = view.geo, choice.tile, dw_strides(problem)
    if strides is None:
        raise ValueError(f"the filter {problem.w} has no single axis of taps")
    return {
        "dw_ptr": launch.Pointer(2, DType.float32),
        **launch.factors(DType.float32),
        "filter_tiles": launch.Scalar(-(-geo.filters // tile.bm)),
        "channel_tiles": launch.Scalar(-(-geo.channels // tile.bk)),
        "taps": launch.Scalar(geo.taps),
        "pixels": launch.Scalar(view.dy.pixels),
        "filters": launch.Scalar(geo.filters),
        "channels": launch.Scalar(geo.channels),
        **{f"stride_{n}": launch.Scalar(s, "i64") for n, s in zip(("k", "tap", "c"), strides)},
        "flip": launch.Scalar(int(view.flip)),
    }


def sum_launch(
    problem: ConvolutionProblem, device: Device, choice: FilterChoice, where: Layout
) -> Kernel:
    """The kernel that adds the parts and undoes the scales."""
    from bedstone.backends.gluon.convolution.filter_f16x3_kernels import (
        convolution_filter_f16x3_sum_kernel,
    )

    view, work = filter_view(problem), choice.work
    sharers = -(-work.programs // work.tiles) + 1
    slots = min(MAX_SUM_SLOTS, SUM_LOADS // (SUM_ROWS * work.columns))
    x_top, dy_top = tops(view, where)
    arguments: dict[str, launch.Argument] = {
        "part_ptr": launch.Scratch(DType.float32, where.parts),
        "x_top_ptr": launch.Scratch(DType.int32, x_top),
        "x_small_ptr": launch.Scratch(DType.int32, x_top + marks(view)),
        "dy_top_ptr": launch.Scratch(DType.int32, dy_top),
        "dy_small_ptr": launch.Scratch(DType.int32, dy_top + marks(view)),
        "list_ptr": launch.Scratch(DType.int32, where.todo),
        "cut": work.cut,
        "programs": launch.Scalar(work.programs),
        **dw_arguments(problem, view, choice),
    }
    constants = {
        "BK": work.rows, "BC": work.columns, "ROWS": SUM_ROWS,
        "SLOTS": min(slots, 1 << (sharers - 1).bit_length()),
    }  # fmt: skip
    return launch.prepare(
        device, convolution_filter_f16x3_sum_kernel, (sum_blocks(work),), arguments, constants,
        overlaps=True, num_warps=SUM_WARPS,
    )  # fmt: skip


def careful_launch(
    problem: ConvolutionProblem, device: Device, choice: FilterChoice, where: Layout
) -> Kernel:
    """The kernel that works off the list."""
    from bedstone.backends.gluon.convolution.filter_f16x3_kernels import (
        convolution_filter_careful_kernel,
    )

    view, work = filter_view(problem), choice.work
    arguments: dict[str, launch.Argument] = {
        "x_ptr": launch.Pointer(0, DType.float32),
        "dy_ptr": launch.Pointer(1, DType.float32),
        "list_ptr": launch.Scratch(DType.int32, where.todo),
        "size": Integers(view.x.dims[:4]),
        "out": Integers(view.dy.dims[:4]),
        "x_strides": Integers(view.x.strides[:4], "i64"),
        "dy_strides": Integers(view.dy.strides[:4], "i64"),
        **geometry_arguments(view.geo, ("window", "pad", "stride", "dilation")),
        **dw_arguments(problem, view, choice),
    }
    constants = {
        "BK": work.rows, "BC": work.columns, "ROWS": SUM_ROWS, "HEIGHT": CAREFUL_HEIGHT,
        "PIXELS": CAREFUL_PIXELS,
    }  # fmt: skip
    grid = (min(sum_blocks(work), 4 * multiprocessors(device)),)
    return launch.prepare(
        device, convolution_filter_careful_kernel, grid, arguments, constants,
        overlaps=True, num_warps=CAREFUL_WARPS,
    )  # fmt: skip
