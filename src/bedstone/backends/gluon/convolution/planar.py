"""gluon:implicit_gemm_planar, 1x1 convolution straight from channels-first memory: the host's side
of planar_kernels.

All three directions, 16-bit, one group, unit strides, no padding, where TMA can view the images:
their pixels a whole number of 16-byte words. Forward and gradient by data want no workspace.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from bedstone.backends.gluon.convolution import images, tiles
from bedstone.backends.gluon.convolution.filter_gradient import (
    ByDirection,
    FilterWork,
    part_bytes,
    runs_for,
    sum_launch,
    work_seconds,
)
from bedstone.backends.gluon.convolution.images import image_of
from bedstone.backends.gluon.convolution.implicit_gemm_ws import (
    HALVES,
    WARPS,
    Guarded,
    declines,
    general_kernel,
    multiprocessors,
    step_seconds,
)
from bedstone.backends.triton import launch
from bedstone.backends.triton.convolution.geometry import Axis, geometry_of, word
from bedstone.plan.algorithm import Algorithm, Kernel
from bedstone.plan.device import Device
from bedstone.spec.convolution import ConvolutionProblem
from bedstone.spec.dtypes import DType
from bedstone.spec.problem import Problem
from bedstone.spec.tensor import TensorDesc


@dataclass(frozen=True)
class Plane:
    """An image tensor as (n, c, p), pixels adjacent: dims, and distances of images and channels."""

    dims: tuple[int, int, int]
    steps: tuple[int, int]
    dtype: DType


def plane_of(desc: TensorDesc) -> Plane | None:
    """The planes of a channels-first descriptor, None if pixels are not adjacent."""
    image = image_of(desc)
    one = replace(image, dims=(1, *image.dims[1:])).merged()
    if one is None or one.strides[3] != 1 or one.pixels == 1:
        return None
    unit = word(desc.dtype.itemsize)
    pixels, (batch, channel) = one.pixels, (image.strides[0], image.strides[4])
    if image.dims[4] == 1:
        channel = -(-pixels // unit) * unit
    if image.dims[0] == 1:
        batch = -(-channel * image.dims[4] // unit) * unit
    return Plane((image.dims[0], image.dims[4], pixels), (batch, channel), desc.dtype)


def plane_map(operand: int, plane: Plane, rows: int, pixels: int) -> launch.TensorMap:
    """A map of boxes of an image's rows x pixels."""
    box = (1, rows, pixels)
    return launch.TensorMap(
        operand, plane.dtype, plane.dims, (*plane.steps, 1), box,
        images.layout_of(box, plane.dtype),
    )  # fmt: skip


def planar_declines(problem: Problem, device: Device) -> str | None:
    """What all directions ask."""
    reason = declines(problem, device, HALVES)
    if reason is not None or not isinstance(problem, ConvolutionProblem):
        return reason
    geo = geometry_of(problem)
    if any(a != Axis(size=a.size, out=a.size) for a in geo.axes) or geo.groups != 1:
        return "takes windows of one pixel, unit strides, no padding, one group"
    unit = word(problem.x.dtype.itemsize)
    x, y = ("x", "dy" if problem.direction != "forward" else "y")
    for name, desc in ((x, problem.x), (y, problem.y)):
        plane = plane_of(desc)
        if plane is None:
            return f"{name}: its pixels are not adjacent"
        if any(s <= 0 or s % unit for s in plane.steps):
            return (
                f"{name}: images or channels are {plane.steps} elements apart, "
                f"not multiples of {unit}"
            )
    return None


@dataclass(frozen=True)
class PlanarChoice:
    """The tile (BM rows x BK pixels, BC channels), how many there are, and the seconds expected."""

    tile: tiles.Tile
    row_tiles: int
    across: int
    count: int
    seconds: float


@functools.lru_cache(maxsize=1024)
def choose_planar(problem: ConvolutionProblem, processors: int) -> PlanarChoice:
    """The tile of the least modelled time."""
    reduced, produced = problem.w.dims[1], problem.w.dims[0]
    if problem.direction == "backward_data":
        reduced, produced = produced, reduced
    pixels, batch = problem.x.size // problem.x.dims[0] // problem.x.dims[1], problem.x.dims[0]
    choices = []
    for tile in tiles.PLANAR:
        row_tiles, across = -(-produced // tile.bm), -(-pixels // tile.bk)
        count = batch * row_tiles * across
        rounds = -(-count // processors)
        seconds = rounds * -(-reduced // tile.bc) * step_seconds(tile, processors)
        seconds += (rounds + 1) * tile.tail * 1e-6
        choices.append(PlanarChoice(tile, row_tiles, across, count, seconds))
    return min(choices, key=lambda choice: choice.seconds)


class PlanarImages(Algorithm):
    """Forward and backward_data."""

    name = "gluon:implicit_gemm_planar"

    def supports(self, problem: Problem, device: Device) -> str | None:
        reason = planar_declines(problem, device)
        if reason is not None or not isinstance(problem, ConvolutionProblem):
            return reason
        return images.filter_refuses("w", images.filter_of(problem.w))

    def workspace(self, problem: Problem, device: Device) -> int:
        return 0

    def estimate(self, problem: Problem, device: Device) -> float:
        if not isinstance(problem, ConvolutionProblem):
            raise TypeError(f"not a convolution: {problem}")
        seconds = choose_planar(problem, multiprocessors(device)).seconds
        seconds = max(seconds, problem.bytes / tiles.BANDWIDTH)
        return tiles.LAUNCH_SECONDS + seconds + tiles.UNTRIED_SECONDS

    def build(self, problem: Problem, device: Device) -> Kernel:
        if not isinstance(problem, ConvolutionProblem):
            raise TypeError(f"not a convolution: {problem}")
        return planar_launch(problem, device, choose_planar(problem, multiprocessors(device)))


def planar_launch(problem: ConvolutionProblem, device: Device, choice: PlanarChoice) -> Kernel:
    """The kernel of forward and backward_data."""
    from bedstone.backends.gluon.convolution.planar_kernels import convolution_planar_kernel

    tile, forward = choice.tile, problem.direction == "forward"
    source, target = plane_of(problem.x), plane_of(problem.y)
    found = images.filter_of(problem.w)
    if source is None or target is None or found is None:
        raise ValueError(f"{problem} has no planes")
    if not forward:
        source, target = target, source
    box = (tile.bm, 1, tile.bc) if forward else (tile.bc, 1, tile.bm)
    act, last, dtype = problem.epilogue.activation, len(problem.operands) - 1, problem.x.dtype
    _, rows, pixels = target.dims
    arguments: dict[str, launch.Argument] = {
        "x_desc": plane_map(0 if forward else 1, source, tile.bc, tile.bk),
        "w_desc": images.filter_map(1 if forward else 0, found, box),
        "y_desc": plane_map(last, target, tile.bm // tile.consumers, tile.bk),
        "y_ptr": launch.Pointer(last, dtype),
        "bias_ptr": launch.Pointer(2 if problem.epilogue.bias else last, dtype),
        **launch.factors(dtype),
        **launch.activation_arguments(act, dtype),
        "tiles": launch.Scalar(choice.count),
        "row_tiles": launch.Scalar(choice.row_tiles),
        "across": launch.Scalar(choice.across),
        "channels": launch.Scalar(source.dims[1]),
        "rows": launch.Scalar(rows),
        "pixels": launch.Scalar(pixels, divisor=2),
        "y_image": launch.Scalar(target.steps[0], "i64", 2),
        "y_row": launch.Scalar(target.steps[1], "i64", 2),
    }
    constants: dict[str, Any] = {
        "BM": tile.bm, "BP": tile.bk, "BC": tile.bc, "STAGES": tile.stages,
        "CONSUMERS": tile.consumers, "K_MAJOR": forward, "BIAS": problem.epilogue.bias,
        "ACTIVATION": act.kind if act is not None else "none",
    }  # fmt: skip
    return launch.prepare(
        device, convolution_planar_kernel,
        (min(choice.count, multiprocessors(device) * tile.resident),), arguments, constants,
        fallback=lambda: general_kernel(problem, device), overlaps=True, num_warps=WARPS,
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def choose_planar_filter(
    problem: ConvolutionProblem, processors: int
) -> tuple[tiles.Tile, FilterWork]:
    """The tile of the least modelled time, and how the work is cut."""
    filters, channels = problem.w.dims[:2]
    pixels, batch = problem.x.size // problem.x.dims[0] // problem.x.dims[1], problem.x.dims[0]
    choices = []
    for tile in tiles.FILTER_PLANAR:
        count = -(-filters // tile.bm) * -(-channels // tile.bk)
        steps = batch * -(-pixels // tile.bc)
        programs = runs_for(count, steps, processors)
        seconds = work_seconds(
            -(-count * steps // programs), step_seconds(tile, processors), tile.tail,
            part_bytes(count, programs, tile.bm * tile.bk),
        )  # fmt: skip
        work = FilterWork(count, steps, programs, tile.bm, tile.bk, 1, seconds)
        choices.append((tile, work))
    return min(choices, key=lambda choice: choice[1].seconds)


class PlanarFilter(Algorithm):
    """backward_filter, cut evenly over the chip; parts lie in workspace, added in order."""

    name = "gluon:implicit_gemm_planar"

    def supports(self, problem: Problem, device: Device) -> str | None:
        reason = planar_declines(problem, device)
        if reason is None and images.filter_of(problem.w) is None:  # type: ignore[attr-defined]
            reason = "dw: its taps do not lie at equal distances"
        return reason

    def work(self, problem: Problem, device: Device) -> tuple[tiles.Tile, FilterWork]:
        """The tile and the cut."""
        if not isinstance(problem, ConvolutionProblem):
            raise TypeError(f"not a convolution: {problem}")
        return choose_planar_filter(problem, multiprocessors(device))

    def workspace(self, problem: Problem, device: Device) -> int:
        return self.work(problem, device)[1].workspace

    def estimate(self, problem: Problem, device: Device) -> float:
        seconds = max(self.work(problem, device)[1].seconds, problem.bytes / tiles.BANDWIDTH)
        return 2 * tiles.LAUNCH_SECONDS + seconds + tiles.UNTRIED_SECONDS

    def build(self, problem: Problem, device: Device) -> Kernel:
        tile, work = self.work(problem, device)
        if not isinstance(problem, ConvolutionProblem):
            raise TypeError(f"not a convolution: {problem}")
        main = planar_filter_launch(problem, device, tile, work)
        total = sum_launch(problem, device, work, geometry_of(problem), 1, False)
        return Guarded((main, total), problem, device, "parts added in order")


def planar_filter_launch(
    problem: ConvolutionProblem, device: Device, tile: tiles.Tile, work: FilterWork
) -> Kernel:
    """The kernel that writes the parts."""
    from bedstone.backends.gluon.convolution.planar_kernels import convolution_planar_filter_kernel

    x, dy = plane_of(problem.x), plane_of(problem.y)
    if x is None or dy is None:
        raise ValueError(f"{problem} has no planes")
    arguments: dict[str, launch.Argument] = {
        "x_desc": plane_map(0, x, tile.bk, tile.bc),
        "dy_desc": plane_map(1, dy, tile.bm, tile.bc),
        "part_ptr": launch.Scratch(DType.float32),
        "cut": work.cut,
        "channel_tiles": launch.Scalar(-(-problem.w.dims[1] // tile.bk)),
        "across": launch.Scalar(-(-x.dims[2] // tile.bc)),
    }
    constants = {
        "BK": tile.bm, "BC": tile.bk, "BP": tile.bc, "STAGES": tile.stages,
        "CONSUMERS": tile.consumers,
    }  # fmt: skip
    return launch.prepare(
        device, convolution_planar_filter_kernel, (work.programs,), arguments, constants,
        overlaps=True, num_warps=WARPS,
    )  # fmt: skip


class Planar(ByDirection):
    """All three directions."""

    name = "gluon:implicit_gemm_planar"
    images = PlanarImages()
    filters = PlanarFilter()
