"""gluon:implicit_gemm_ws, the warp-specialised implicit GEMM: the host's side of image_kernels.

Forward and gradient by data for channels-last images, 16-bit or, with math="tf32", float32; without
workspace but for tf32's gradient by data, which reads a turned copy of the filter. Which tile,
which patch, which maps and numbers; the gradient by filter is in filter_gradient, tiles that
several programs share in image_split.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bedstone.backends import gluon
from bedstone.backends.gluon.convolution import images, tiles
from bedstone.backends.gluon.convolution.images import Image, Quad, image_map, image_of
from bedstone.backends.gluon.convolution.patches import Patch, choose_patch
from bedstone.backends.gluon.convolution.turned import (
    turn_launch,
    turned_bytes,
    turned_filter,
    turns,
)
from bedstone.backends.triton import driver, launch
from bedstone.backends.triton.convolution.geometry import Axis, Geometry, geometry_of, word
from bedstone.plan.algorithm import Algorithm, Kernel
from bedstone.plan.device import Device
from bedstone.spec.convolution import ConvolutionProblem
from bedstone.spec.dtypes import DType
from bedstone.spec.problem import Problem

HALVES = (DType.float16, DType.bfloat16)
WARPS = 4  # of a consumer
MAX_VIEWS = 4  # views of the output that the kernel takes
L2_GROUP = 8  # patches walked together through all output channels, as in ring
CHEAP_ACTIVATIONS = ("none", "relu", "leaky_relu", "clipped_relu", "clip")


@dataclass(frozen=True)
class Integers(launch.Integers):
    """A tuple of integers of which none is baked in: one binary serves them all."""

    @property
    def variable(self) -> tuple[int, ...]:
        return tuple(range(len(self.values)))


def multiprocessors(device: Device) -> int:
    """Of the device, or of the chip that is compiled for."""
    if device.index == launch.COMPILE_ONLY:
        return tiles.MULTIPROCESSORS
    return _multiprocessors(device.index)


@functools.cache
def _multiprocessors(index: int) -> int:
    return driver.attribute(index, driver.MULTIPROCESSORS)


@dataclass(frozen=True)
class ImageView:
    """A forward or backward_data problem as the kernel sees it: the image that is read, the one
    that is written, and the geometry (pixels of a 1x1 convolution merged into one row)."""

    source: Image
    target: Image
    geo: Geometry
    backward: bool
    flip: bool

    @property
    def unit(self) -> bool:
        """True if no axis has a stride or a dilation."""
        return all(a.u == a.dil == 1 for a in self.geo.axes)

    @property
    def residues(self) -> int:
        """Classes of output pixels that meet different taps."""
        return math.prod(a.u for a in self.geo.axes) if self.backward else 1

    @property
    def reduced(self) -> int:
        """Reduced channels of a group."""
        return self.geo.filters if self.backward else self.geo.channels

    @property
    def produced(self) -> int:
        """Output channels of a group."""
        return self.geo.channels if self.backward else self.geo.filters


def image_view(problem: ConvolutionProblem) -> ImageView:
    """The view of a forward or backward_data problem."""
    geo = geometry_of(problem)
    x, y = image_of(problem.x), image_of(problem.y)
    backward = problem.direction == "backward_data"
    flip = problem.conv.mode == "convolution"
    source, target = (y, x) if backward else (x, y)
    point = all(a.taps == a.u == 1 and a.out == a.size and a.pad == 0 for a in geo.axes)
    if point:
        merged = source.merged(), target.merged()
        if merged[0] is not None and merged[1] is not None:
            row = Axis(size=source.pixels, out=source.pixels)
            geo = replace(geo, axes=(Axis(), Axis(), row), images=1)
            source, target = merged[0], merged[1]
    return ImageView(source, target, geo, backward, flip)


def store_order(view: ImageView) -> str:
    """How tiles leave: "tma", or masked stores with channels ("rows") or pixels innermost."""
    if view.target.strides[4] != 1:
        return "columns"
    strided = view.backward and not view.unit
    if strided and (view.residues > MAX_VIEWS or any(a.size < a.u for a in view.geo.axes)):
        return "rows"
    return "rows" if images.refuses("y", view.target) else "tma"


def store_of(view: ImageView, tile: tiles.Tile) -> str:
    """How a tile leaves: as store_order says, but wide float32 tiles straight from registers,
    since shared memory has no room for them beside the ring."""
    store = store_order(view)
    wide = view.target.dtype is DType.float32 and tile.accumulators > tiles.LIGHT_ACCUMULATORS
    return "direct" if store == "tma" and wide else store


@dataclass(frozen=True)
class ImageChoice:
    """Tile and patch, and the seconds expected."""

    tile: tiles.Tile
    patch: Patch
    seconds: float


def fits(tile: tiles.Tile, view: ImageView, store: str, activation: str) -> bool:
    """True if the tile can be used: groups are cut by whole tiles, epilogues do not spill."""
    light = store == "tma" and activation in CHEAP_ACTIVATIONS
    if tile.accumulators > tiles.LIGHT_ACCUMULATORS and not light:
        return False
    return view.geo.groups == 1 or not (view.reduced % tile.bc or view.produced % tile.bk)


def image_seconds(tile: tiles.Tile, patch: Patch, view: ImageView, processors: int) -> float:
    """Cost model: rounds of tiles over the chip, each its steps and a tail; once more a tail to
    begin, and in one of the rounds a tile that no padding shortens. Programs that share a
    multiprocessor take as long as one after the other."""
    columns = view.geo.groups * -(-view.produced // tile.bk)
    blocks = -(-view.reduced // tile.bc)
    rounds = -(-patch.count * columns // processors)
    longest = math.prod(-(-a.taps // a.u) if view.backward else a.taps for a in view.geo.axes)
    steps = blocks * ((rounds - 1) * patch.taps / max(patch.count, 1) + longest)
    return steps * step_seconds(tile, processors) + (rounds + 1) * tile.tail * 1e-6


def step_seconds(tile: tiles.Tile, processors: int) -> float:
    """What a step takes of a multiprocessor, all of them busy."""
    return 2.0 * tile.bm * tile.bk * tile.bc / (tile.rate * 1e12 / processors)


def table_of(problem: ConvolutionProblem) -> tuple[tiles.Tile, ...]:
    """The tile table of the problem's dtype."""
    return tiles.IMAGE_HALF if problem.x.dtype in HALVES else tiles.IMAGE_TF32


@functools.lru_cache(maxsize=1024)
def choose_image(
    problem: ConvolutionProblem, table: tuple[tiles.Tile, ...], processors: int
) -> ImageChoice | None:
    """The tile and patch of the least modelled time, None if none fits."""
    view, act = image_view(problem), problem.epilogue.activation
    store = store_order(view)
    best = None
    for tile in table:
        if not fits(tile, view, store, act.kind if act is not None else "none"):
            continue
        patch = choose_patch(view.geo.images, view.geo.axes, tile.bm, view.backward)
        seconds = image_seconds(tile, patch, view, processors)
        if best is None or seconds < best.seconds:
            best = ImageChoice(tile, patch, seconds)
    return best


def declines(
    problem: Problem, device: Device, dtypes: tuple[DType, ...], side: int = 1
) -> str | None:
    """What all algorithms here ask: the chip, the dtype, memory that TMA can view; `side` groups
    are taken side by side."""
    if not isinstance(problem, ConvolutionProblem):
        return "it computes convolutions and their gradients by data and filter"
    if device.architecture != gluon.ARCHITECTURE:
        return f"made for {gluon.ARCHITECTURE}; the device is {device.architecture}"
    if problem.x.dtype not in dtypes:
        return f"takes {', '.join(dtypes)}; the problem is {problem.x.dtype}"
    if problem.epilogue.shift:
        return "adds nothing after the activation"
    if 0 in problem.x.dims or 0 in problem.w.dims:
        return "the problem has a dimension of size 0"
    if any(u > images.MAX_STEP for u in problem.conv.stride):
        return f"a stride is above {images.MAX_STEP}"
    groups, least = problem.conv.groups // side, word(DType.float16.itemsize)
    if groups > 1 and any(n // groups % least for n in (problem.x.dims[1], problem.w.dims[0])):
        # Boxes that begin inside a 16-byte word stopped the chip with an illegal instruction.
        return f"the channels of a group are no multiple of {least}"
    return None


def image_declines(problem: ConvolutionProblem) -> str | None:
    """Why a forward or backward_data problem's images do not suit the kernels, or None."""
    view = image_view(problem)
    reason = images.refuses("dy" if view.backward else "x", view.source)
    if reason is None and view.backward and any(a.u > 1 and a.dil > 1 for a in view.geo.axes):
        reason = "backward_data with both stride and dilation on an axis"
    return reason


class ImplicitGemmWs(Algorithm):
    """Warp-specialised implicit GEMM, forward and backward_data."""

    name = "gluon:implicit_gemm_ws"

    def supports(self, problem: Problem, device: Device) -> str | None:
        reason = declines(problem, device, (*HALVES, DType.float32))
        if reason is not None or not isinstance(problem, ConvolutionProblem):
            return reason
        if problem.direction == "backward_filter":
            return "takes forward and backward_data"
        if problem.x.dtype is DType.float32:
            if problem.math != "tf32":
                return f'float32 only with math="tf32"; the problem asks for {problem.math}'
            if problem.conv.groups > 1 and turns(problem):
                return "tf32's backward_data takes one group"
        reason = image_declines(problem) or images.filter_refuses("w", images.filter_of(problem.w))
        if (
            reason is None
            and choose_image(problem, table_of(problem), multiprocessors(device)) is None
        ):
            reason = f"{problem.conv.groups} groups are too narrow for its tiles"
        return reason

    def workspace(self, problem: Problem, device: Device) -> int:
        if not isinstance(problem, ConvolutionProblem):
            return 0
        return turned_bytes(problem)

    def estimate(self, problem: Problem, device: Device) -> float:
        if not isinstance(problem, ConvolutionProblem):
            raise TypeError(f"not a convolution: {problem}")
        choice = choose_image(problem, table_of(problem), multiprocessors(device))
        seconds = choice.seconds if choice is not None else math.inf
        seconds = max(seconds, problem.bytes / tiles.BANDWIDTH)
        return turn_seconds(problem) + tiles.LAUNCH_SECONDS + seconds

    def build(self, problem: Problem, device: Device) -> Kernel:
        if not isinstance(problem, ConvolutionProblem):
            raise TypeError(f"not a convolution: {problem}")
        choice = choose_image(problem, table_of(problem), multiprocessors(device))
        if choice is None:
            raise ValueError(f"no tile fits {problem}")
        main = image_launch(problem, device, choice)
        if not turns(problem):
            return main
        return Guarded((turn_launch(problem, device), main), problem, device, "filter turned")


def turn_seconds(problem: ConvolutionProblem) -> float:
    """What turning the filter costs."""
    if not turns(problem):
        return 0.0
    return tiles.LAUNCH_SECONDS + 2 * problem.w.nbytes / tiles.BANDWIDTH


class Guarded(launch.Chain):
    """Several launches that hand results on in the workspace; the general kernel in place of all
    when a call brings an address that TMA cannot take."""

    def __init__(
        self, launches: Sequence[Kernel], problem: ConvolutionProblem, device: Device, what: str
    ) -> None:
        described = [getattr(kernel, "description", "") for kernel in launches]
        super().__init__(launches, f"{max(described, key=len)}; {what}")
        self._problem, self._device = problem, device
        self._general: Kernel | None = None

    def __call__(
        self, pointers: Sequence[int], workspace: int, alpha: float, beta: float, stream: int
    ) -> None:
        bits = workspace
        for pointer in pointers:
            bits |= pointer
        if bits % launch.ALIGNMENT == 0:
            super().__call__(pointers, workspace, alpha, beta, stream)
            return
        if self._general is None:
            self._general = general_kernel(self._problem, self._device)
        self._general(pointers, 0, alpha, beta, stream)


def general_kernel(problem: ConvolutionProblem, device: Device) -> Kernel:
    """What runs when a call brings an address that TMA cannot take."""
    from bedstone.backends.triton.convolution.implicit_gemm import ImplicitGemm

    return ImplicitGemm().build(problem, device)


def image_launch(problem: ConvolutionProblem, device: Device, choice: ImageChoice) -> Kernel:
    """The kernel for a choice of tile and patch."""
    from bedstone.backends.gluon.convolution.image_kernels import convolution_image_ws_kernel

    view, tile, patch = image_view(problem), choice.tile, choice.patch
    count = patch.count * view.geo.groups * -(-view.produced // tile.bk)
    grid = min(count, multiprocessors(device) * tile.resident)
    arguments, constants = image_arguments(problem, view, tile, patch, store_of(view, tile))
    return launch.prepare(
        device, convolution_image_ws_kernel, (grid,), arguments, constants,
        fallback=lambda: general_kernel(problem, device), overlaps=True, num_warps=WARPS,
    )  # fmt: skip


def image_arguments(
    problem: ConvolutionProblem, view: ImageView, tile: tiles.Tile, patch: Patch, store: str
) -> tuple[dict[str, launch.Argument], dict[str, Any]]:
    """Arguments and constants of the image kernel, by name."""
    last = len(problem.operands) - 1
    arguments, constants = common_arguments(problem, view, tile, patch)
    arguments["w_desc"], constants["K_MAJOR"] = filter_argument(problem, view, tile)
    arguments["parts"] = launch.Scalar(1)
    half = halved(patch.box) if tile.consumers == 2 else patch.box
    arguments["half"] = Integers(tuple(b if b < whole else 0 for b, whole in zip(half, patch.box)))
    constants |= {"CONSUMERS": tile.consumers, "STORE": store}
    maps = residue_maps(view, last, half, tile.bk) if store == "tma" else []
    if maps and view.backward and not view.unit:
        maps += maps[:1] * (MAX_VIEWS - len(maps))
    for i, name in enumerate(("y_desc", "y1_desc", "y2_desc", "y3_desc")):
        if i < len(maps):
            arguments[name] = maps[i]
        else:
            constants[name] = None
    return arguments, constants


def filter_argument(
    problem: ConvolutionProblem, view: ImageView, tile: tiles.Tile
) -> tuple[launch.TensorMap, bool]:
    """The map of the filter's boxes, and whether its reduced channels are innermost."""
    innermost = (tile.bk, 1, tile.bc)
    if turns(problem):
        return images.filter_map(None, turned_filter(problem), innermost), True
    found = images.filter_of(problem.w)
    if found is None:
        raise ValueError(f"the filter {problem.w} has no single axis of taps")
    if view.backward:
        return images.filter_map(0, found, (tile.bc, 1, tile.bk)), False
    return images.filter_map(1, found, innermost), True


def halved(box: Quad) -> Quad:
    """The first half of a box, cut along its outermost axis that has two."""
    axis = next(i for i, b in enumerate(box) if b > 1)
    return tuple(b // 2 if i == axis else b for i, b in enumerate(box))  # type: ignore[return-value]


def residue_maps(view: ImageView, operand: int, box: Quad, channels: int) -> list[launch.TensorMap]:
    """A view of the output for each residue of its pixels modulo the strides."""
    target = view.target
    if view.residues == 1:
        return [image_map(operand, target, box, channels)]
    maps, u = [], per_axis(view.geo, "u")
    for rho in itertools.product(*(range(n) for n in u)):
        space = tuple(-(-(n - r) // s) for n, r, s in zip(target.dims[1:4], rho, u))
        steps = tuple(a * s for a, s in zip(target.strides[1:4], u))
        first = sum(a * r for a, r in zip(target.strides[1:4], rho))
        part = replace(
            target,
            dims=(target.dims[0], *space, target.dims[4]),
            strides=(target.strides[0], *steps, 1),
        )
        offset = first * target.dtype.itemsize
        maps.append(image_map(operand, part, box, channels, offset=offset))
    return maps


def common_arguments(
    problem: ConvolutionProblem, view: ImageView, tile: tiles.Tile, patch: Patch
) -> tuple[dict[str, launch.Argument], dict[str, Any]]:
    """What all kernels that walk an image take."""
    geo, dtype, act = view.geo, problem.x.dtype, problem.epilogue.activation
    last = len(problem.operands) - 1
    steps = (1, 1, 1) if view.backward else per_axis(geo, "u")
    group_columns = -(-view.produced // tile.bk)
    arguments: dict[str, launch.Argument] = {
        "x_desc": image_map(1 if view.backward else 0, view.source, patch.box, tile.bc, steps),
        "y_ptr": launch.Pointer(last, dtype),
        "bias_ptr": launch.Pointer(2 if problem.epilogue.bias else last, dtype),
        **launch.factors(dtype),
        **launch.activation_arguments(act, dtype),
        "tiles": Integers(patch.tiles),
        "columns": launch.Scalar(geo.groups * group_columns),
        "group_columns": launch.Scalar(group_columns),
        "inverse": inverses(L2_GROUP * geo.groups * group_columns, *patch.tiles[:0:-1]),
        "box": Integers(patch.box),
        "size": Integers(view.source.dims[1:4]),
        "taps": Integers(per_axis(geo, "taps")),
        "pad": Integers(per_axis(geo, "pad")),
        "stride": Integers(per_axis(geo, "u")),
        "dilation": Integers(per_axis(geo, "dil")),
        "channels": launch.Scalar(view.reduced),
        **output_arguments(view.target, patch),
    }
    constants: dict[str, Any] = {
        "BM": tile.bm, "BK": tile.bk, "BC": tile.bc, "STAGES": tile.stages,
        "BACKWARD": view.backward, "UNIT": view.unit, "FLIP": view.flip,
        "DEPTH": view.source.depth, "BIAS": problem.epilogue.bias,
        "ACTIVATION": act.kind if act is not None else "none",
    }  # fmt: skip
    return arguments, constants


def inverse_of(divisor: int) -> tuple[int, int]:
    """(multiplier, shift) with n // divisor == n * multiplier >> shift for 0 <= n < 2^31, the
    multiplier below 2^32. It exceeds 2^shift / divisor by less than 1, the product its due by less
    than 2^31, which is no more than 2^shift / divisor (Granlund and Montgomery, 1994)."""
    shift = 31 + (divisor - 1).bit_length()
    return -(-(1 << shift) // divisor), shift


def inverses(*divisors: int) -> Integers:
    """What ring.quotient takes: multipliers as the 32-bit numbers of the same bits."""
    pairs = (inverse_of(divisor) for divisor in divisors)
    return Integers(tuple(n for m, shift in pairs for n in (m - (m >> 31 << 32), shift)))


def per_axis(geo: Geometry, name: str) -> tuple[int, int, int]:
    """An attribute of the three axes."""
    return tuple(getattr(axis, name) for axis in geo.axes)  # type: ignore[return-value]


def output_arguments(target: Image, patch: Patch) -> dict[str, launch.Argument]:
    """What an epilogue knows of the image that it writes."""
    unit = word(target.dtype.itemsize)
    whole = all(s % unit == 0 for s in target.strides[:4])
    channels = target.dims[4]
    return {
        "logs": Integers(patch.logs),
        "out": Integers(target.dims[:4]),
        "out_strides": Integers(target.strides[:4], "i64", unit if whole else 1),
        "channel_stride": launch.Scalar(target.strides[4], "i64"),
        "out_channels": launch.Scalar(channels, divisor=unit if channels % unit == 0 else 1),
    }
