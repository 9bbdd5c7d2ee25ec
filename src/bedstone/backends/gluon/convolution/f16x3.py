"""gluon:implicit_gemm_f16x3, float32 convolution from three float16 products.

The host's side of split_kernels, f16x3_kernels and careful_kernels. Forward and gradient by data,
channels last; the filter's planes lie in workspace. It keeps float32's accuracy and range, so it
serves math="ieee".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bedstone.backends.gluon.convolution import images, tiles
from bedstone.backends.gluon.convolution.implicit_gemm_ws import (
    Guarded,
    ImageChoice,
    ImageView,
    choose_image,
    common_arguments,
    declines,
    image_declines,
    image_view,
    multiprocessors,
)
from bedstone.backends.triton import launch
from bedstone.backends.triton.convolution.geometry import word
from bedstone.plan.algorithm import Algorithm, Kernel
from bedstone.plan.device import Device
from bedstone.spec.convolution import ConvolutionProblem
from bedstone.spec.dtypes import DType
from bedstone.spec.problem import Problem

PLANES = 2  # hi and lo
REGION = 256  # bytes to which parts of the workspace are aligned
MATH = ("ieee", "fast")
PRODUCTS_TEXT = {3: "from three float16 products", 1: "from a product of scaled float16"}
SPLIT_CHUNK = 2048  # elements that a program splits at once
SPLIT_COLUMNS_BACKWARD = 8  # adjacent channels: whole 32-byte sectors
SPLIT_WARPS = 8
WARPS = 4  # of each consumer


@dataclass(frozen=True)
class Layout:
    """Offsets in the workspace of the planes, the columns' info and the list; bytes of all."""

    info: int
    todo: int
    size: int


def aligned(nbytes: int) -> int:
    """Bytes, rounded up to where the next part of the workspace may begin."""
    return -(-nbytes // REGION) * REGION


def layout_of(problem: ConvolutionProblem, choice: ImageChoice) -> Layout:
    """Where things lie in the workspace."""
    view = image_view(problem)
    columns = view.geo.groups * view.produced
    halves = 2 * choice.patch.count * view.geo.groups * -(-view.produced // choice.tile.bk)
    info = aligned(PLANES * 2 * plane_size(view))
    todo = info + aligned(4 * columns)
    return Layout(info, todo, todo + aligned(4 * (1 + halves)))


def pitch_of(view: ImageView) -> int:
    """Distance of taps in a plane: channels, rounded up to what TMA takes."""
    unit = word(DType.float16.itemsize)
    return -(-view.geo.channels // unit) * unit


def plane_size(view: ImageView) -> int:
    """Elements of a plane."""
    return view.geo.groups * view.geo.filters * view.geo.taps * pitch_of(view)


class ImplicitGemmF16x3(Algorithm):
    """float32 on the float16 matrix units, with float32's accuracy and range."""

    name = "gluon:implicit_gemm_f16x3"
    math = MATH
    products = 3
    table = tiles.IMAGE_F16X3

    def supports(self, problem: Problem, device: Device) -> str | None:
        reason = declines(problem, device, (DType.float32,))
        if reason is not None or not isinstance(problem, ConvolutionProblem):
            return reason
        if problem.direction == "backward_filter":
            return "takes forward and backward_data"
        if problem.math not in self.math:
            return f'takes math {" and ".join(self.math)}; the problem asks for "{problem.math}"'
        reason = image_declines(problem) or images.filter_refuses("w", images.filter_of(problem.w))
        if reason is None and self.choice(problem, device) is None:
            reason = f"{problem.conv.groups} groups are too narrow for its tiles"
        return reason

    def choice(self, problem: ConvolutionProblem, device: Device) -> ImageChoice | None:
        """Tile and patch."""
        return choose_image(problem, self.table, multiprocessors(device))

    def workspace(self, problem: Problem, device: Device) -> int:
        if not isinstance(problem, ConvolutionProblem):
            return 0
        choice = self.choice(problem, device)
        return layout_of(problem, choice).size if choice is not None else 0

    def estimate(self, problem: Problem, device: Device) -> float:
        if not isinstance(problem, ConvolutionProblem):
            raise TypeError(f"not a convolution: {problem}")
        choice = self.choice(problem, device)
        seconds = choice.seconds if choice is not None else math.inf
        split = (2 * problem.w.nbytes + 2 * PLANES * problem.w.size) / tiles.BANDWIDTH
        return 3 * tiles.LAUNCH_SECONDS + split + max(seconds, problem.bytes / tiles.BANDWIDTH)

    def build(self, problem: Problem, device: Device) -> Kernel:
        if not isinstance(problem, ConvolutionProblem):
            raise TypeError(f"not a convolution: {problem}")
        choice = self.choice(problem, device)
        if choice is None:
            raise ValueError(f"no tile fits {problem}")
        view, where = image_view(problem), layout_of(problem, choice)
        launches = (
            split_launch(problem, device, view, where),
            image_launch(problem, device, view, choice, where, self.products),
            careful_launch(problem, device, view, choice, where),
        )
        return Guarded(launches, problem, device, PRODUCTS_TEXT[self.products])


class ImplicitGemmF16(ImplicitGemmF16x3):
    """What tf32 promises, by one product of scaled float16: as many bits, twice the rate, and any
    order of the operands."""

    name = "gluon:implicit_gemm_f16"
    math = ("tf32",)
    products = 1
    table = tiles.IMAGE_F16


def filter_strides(problem: ConvolutionProblem) -> tuple[int, int, int]:
    """Distances in w of filters, taps and channels."""
    found = images.filter_of(problem.w)
    if found is None:
        raise ValueError(f"the filter {problem.w} has no single axis of taps")
    return found.strides


def split_launch(
    problem: ConvolutionProblem, device: Device, view: ImageView, where: Layout
) -> Kernel:
    """The kernel that writes the planes of w."""
    from bedstone.backends.gluon.convolution.split_kernels import convolution_split_filter_kernel

    geo, strides = view.geo, filter_strides(problem)
    columns = geo.groups * view.produced
    width = SPLIT_COLUMNS_BACKWARD if view.backward else 1
    scalars = {
        "columns": columns, "length": view.reduced * geo.taps, "taps": geo.taps,
        "filters": geo.filters, "channels": geo.channels, "pitch": pitch_of(view),
    }  # fmt: skip
    arguments: dict[str, launch.Argument] = {
        "w_ptr": launch.Pointer(0 if view.backward else 1, DType.float32),
        "planes_ptr": launch.Scratch(DType.float16),
        "info_ptr": launch.Scratch(DType.int32, where.info),
        "list_ptr": launch.Scratch(DType.int32, where.todo),
        **{name: launch.Scalar(value) for name, value in scalars.items()},
        **{f"stride_{n}": launch.Scalar(s, "i64") for n, s in zip(("k", "tap", "c"), strides)},
        "plane": launch.Scalar(plane_size(view), "i64"),
    }
    constants = {"BACKWARD": view.backward, "COLUMNS": width, "CHUNK": SPLIT_CHUNK // width}
    return launch.prepare(
        device, convolution_split_filter_kernel, (-(-columns // width),), arguments, constants,
        overlaps=True, num_warps=SPLIT_WARPS,
    )  # fmt: skip


def image_launch(
    problem: ConvolutionProblem, device: Device, view: ImageView, choice: ImageChoice,
    where: Layout, products: int,
) -> Kernel:  # fmt: skip
    """The fast kernel."""
    from bedstone.backends.gluon.convolution.f16x3_kernels import convolution_image_f16x3_kernel

    tile, geo = choice.tile, view.geo
    arguments, constants = common_arguments(problem, view, tile, choice.patch)
    k, taps, c, pitch = geo.groups * geo.filters, geo.taps, geo.channels, pitch_of(view)
    box = (1, tile.bc, 1, tile.bk) if view.backward else (1, tile.bk, 1, tile.bc)
    arguments |= {
        "w_desc": launch.TensorMap(
            None, DType.float16, (PLANES, k, taps, c),
            (k * taps * pitch, taps * pitch, pitch, 1), box,
            images.layout_of(box, DType.float16),
        ),
        "info_ptr": launch.Scratch(DType.int32, where.info),
        "list_ptr": launch.Scratch(DType.int32, where.todo),
    }  # fmt: skip
    constants["PRODUCTS"] = products
    count = choice.patch.count * geo.groups * -(-view.produced // tile.bk)
    grid = min(count, multiprocessors(device))
    return launch.prepare(
        device,
        convolution_image_f16x3_kernel,
        (grid,),
        arguments,
        constants,
        overlaps=True,
        num_warps=WARPS,
    )


def careful_launch(
    problem: ConvolutionProblem, device: Device, view: ImageView, choice: ImageChoice,
    where: Layout,
) -> Kernel:  # fmt: skip
    """The kernel that works off the list."""
    from bedstone.backends.gluon.convolution.careful_kernels import (
        convolution_image_careful_kernel,
    )

    tile, found = choice.tile, images.filter_of(problem.w)
    if found is None:
        raise ValueError(f"the filter {problem.w} has no single axis of taps")
    arguments, constants = common_arguments(problem, view, tile, choice.patch)
    box = (tile.bc, 1, tile.bk) if view.backward else (tile.bk, 1, tile.bc)
    arguments |= {
        "w_desc": images.filter_map(0 if view.backward else 1, found, box),
        "list_ptr": launch.Scratch(DType.int32, where.todo),
    }
    constants["STAGES"] = tiles.CAREFUL_STAGES
    return launch.prepare(
        device, convolution_image_careful_kernel, (multiprocessors(device),), arguments, constants,
        overlaps=True, num_warps=WARPS,
    )  # fmt: skip
