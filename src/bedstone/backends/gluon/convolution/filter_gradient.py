"""The gradient by filter on Hopper: the host's side of filter_kernels and halo_kernels.

`gluon:implicit_gemm_ws` takes each tile of dw in one run and needs no workspace;
`gluon:implicit_gemm_ws_split` cuts all the work evenly over the chip; `gluon:implicit_gemm_halo`
does so for windows three wide, sharing x between taps. Parts lie in workspace, added in order.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

from bedstone.backends.gluon.convolution import images, tiles
from bedstone.backends.gluon.convolution.images import Filter, Image, image_map, image_of
from bedstone.backends.gluon.convolution.implicit_gemm_ws import (
    HALVES,
    WARPS,
    Guarded,
    ImplicitGemmWs,
    Integers,
    declines,
    general_kernel,
    multiprocessors,
    per_axis,
    step_seconds,
)
from bedstone.backends.gluon.convolution.patches import Patch, choose_patch
from bedstone.backends.gluon.convolution.side import side_by_side, sides
from bedstone.backends.triton import launch
from bedstone.backends.triton.convolution.geometry import Axis, Geometry, geometry_of, word
from bedstone.plan.algorithm import Algorithm, Kernel
from bedstone.plan.device import Device
from bedstone.spec.convolution import ConvolutionProblem
from bedstone.spec.dtypes import DType
from bedstone.spec.problem import Problem

# The kernel that adds the slots: a program loads so many numbers, of so many slots, at once. Many
# slots of few elements are then read by enough programs (one tile of 9 x 64 x 64 in 132 slots took
# 20 us when a program added 512 elements, 8 slots at once).
SUM_LOADS, SUM_SLOTS, SUM_WARPS = 4096, 64, 4
MAX_STEPS = 2**31 - 1
# Runs may be fewer than multiprocessors by this share if that cuts every tile into equal parts:
# it saves partial tiles, and programs in step read the same pixels at the same time (a 128-channel
# 28x28 layer ran at 340 TFLOP/s with 132 unequal runs, at 585 with 126 equal ones).
WHOLE_CUTS = 0.9


@dataclass(frozen=True)
class FilterView:
    """A backward_filter problem as the kernels see it."""

    x: Image
    dy: Image
    geo: Geometry
    flip: bool


def filter_view(problem: ConvolutionProblem, side: int = 1) -> FilterView:
    """The view; the pixels of a 1x1 convolution are one row, `side` groups one group."""
    geo = side_by_side(geometry_of(problem), side)
    x, dy = image_of(problem.x), image_of(problem.y)
    flip = problem.conv.mode == "convolution"
    if all(a.taps == a.u == 1 and a.out == a.size and a.pad == 0 for a in geo.axes):
        merged = x.merged(), dy.merged()
        if merged[0] is not None and merged[1] is not None:
            row = Axis(size=x.pixels, out=x.pixels)
            geo = replace(geo, axes=(Axis(), Axis(), row), images=1)
            x, dy = merged[0], merged[1]
    return FilterView(x, dy, geo, flip)


def dw_strides(problem: ConvolutionProblem) -> tuple[int, int, int] | None:
    """Distances in dw of filters, taps and channels, None if the taps' distances differ."""
    found = images.filter_of(problem.w)
    return found.strides if isinstance(found, Filter) else None


def dw_word(dtype: DType, strides: tuple[int, int, int], channels: int) -> int:
    """Elements that may be written to dw at once: a 16-byte word of them, or 1."""
    unit = word(dtype.itemsize)
    whole = strides[2] == 1 and not any(n % unit for n in (*strides[:2], channels))
    return unit if whole else 1


@dataclass(frozen=True)
class FilterWork:
    """How a backward_filter is cut.

    tiles, steps    tiles of dw and the steps of each
    programs        runs into which tiles * steps is cut
    block           floats of a slot, `parts` blocks of rows x columns
    side            groups that a tile takes side by side; what it computes of a filter of one and
                    a channel of another is not kept
    """

    tiles: int
    steps: int
    programs: int
    rows: int
    columns: int
    parts: int
    seconds: float
    side: int = 1

    @property
    def workspace(self) -> int:
        """Bytes of the slots: a program has at most one more than it has whole tiles."""
        slots = self.programs + self.tiles
        return slots * self.parts * self.rows * self.columns * 4

    @property
    def cut(self) -> Integers:
        """The cut as the kernels take it: steps of a run, runs that have one more, steps of a
        tile."""
        return Integers((*divmod(self.tiles * self.steps, self.programs), self.steps))


def runs_for(tile_count: int, steps: int, slots: int) -> int:
    """Into how many runs tile_count * steps steps are cut."""
    if tile_count < slots:
        whole = tile_count * (slots // tile_count)
        if whole >= WHOLE_CUTS * slots:
            slots = whole
    return max(1, min(slots, tile_count * steps))


def part_bytes(tile_count: int, programs: int, elements: int) -> float:
    """Of the partial tiles that the sum reads: every run begins one, and every tile that no run
    begins with."""
    return 4.0 * elements * (tile_count + programs - math.gcd(tile_count, programs))


def work_seconds(work_steps: float, step: float, tail: float, bytes_moved: float) -> float:
    """Steps of the longest run, the tail, and the traffic of partial sums."""
    return work_steps * step + tail * 1e-6 + bytes_moved / tiles.BANDWIDTH


@dataclass(frozen=True)
class FilterChoice:
    """Tile, patch and cut of the general kernel."""

    tile: tiles.Tile
    patch: Patch
    work: FilterWork


def filter_choice(
    problem: ConvolutionProblem, tile: tiles.Tile, processors: int, split: bool, side: int = 1
) -> FilterChoice:
    """The patch and the cut for a tile."""
    geo = filter_view(problem, side).geo
    patch = filter_patch(geo, tile.bc)
    count = geo.groups * geo.taps * -(-geo.filters // tile.bm) * -(-geo.channels // tile.bk)
    programs = runs_for(count, patch.count, processors) if split else count
    rounds = -(-programs // processors)
    steps = rounds * -(-count * patch.count // programs)
    traffic = part_bytes(count, programs, tile.bm * tile.bk) if split else 0.0
    step = step_seconds(tile, processors)
    seconds = work_seconds(steps, step, tile.tail * rounds, traffic)
    work = FilterWork(count, patch.count, programs, tile.bm, tile.bk, 1, seconds, side)
    return FilterChoice(tile, patch, work)


@functools.lru_cache(maxsize=1024)
def choose_filter(
    problem: ConvolutionProblem, processors: int, split: bool,
    table: tuple[tiles.Tile, ...], side: int = 1,
) -> FilterChoice:  # fmt: skip
    """The tile of the least modelled time."""
    choices = [filter_choice(problem, tile, processors, split, side) for tile in table]
    return min(choices, key=lambda choice: choice.work.seconds)


def filter_patch(geo: Geometry, pixels: int) -> Patch:
    """The patch of dy that covers it with the fewest boxes. One tap stands for all; the strides
    stay, since they bound a box of x."""
    axes = tuple(Axis(size=a.out * a.u, out=a.out, u=a.u) for a in geo.axes)
    return choose_patch(geo.images, axes, pixels, False)  # type: ignore[arg-type]


class FilterGradient(Algorithm):
    """Base of the algorithms here: what all of them ask of the memory."""

    split = True
    dtypes: tuple[DType, ...] = HALVES
    math: tuple[str, ...] = ()  # the math modes it takes; none: all
    table: tuple[tiles.Tile, ...] = tiles.FILTER_HALF
    merges = False  # takes narrow groups side by side

    def side(self, problem: ConvolutionProblem) -> int:
        """Groups that a tile takes side by side."""
        return sides(problem) if self.merges else 1

    def untried(self, problem: ConvolutionProblem) -> bool:
        """True where its kernel has run on no device yet."""
        return self.side(problem) > 1

    def supports(self, problem: Problem, device: Device) -> str | None:
        side = self.side(problem) if isinstance(problem, ConvolutionProblem) else 1
        reason = declines(problem, device, self.dtypes, side)
        if reason is not None or not isinstance(problem, ConvolutionProblem):
            return reason
        if problem.direction != "backward_filter":
            return "takes backward_filter"
        if self.math and problem.math not in self.math:
            return f'takes math {" and ".join(self.math)}; the problem asks for "{problem.math}"'
        view = filter_view(problem)
        reason = images.refuses("x", view.x) or images.refuses("dy", view.dy)
        if reason is None and dw_strides(problem) is None:
            reason = "dw: its taps do not lie at equal distances"
        if reason is None:
            work = self.work(problem, device)
            if work.tiles * work.steps > MAX_STEPS:
                reason = f"needs {work.tiles * work.steps} steps; it counts to {MAX_STEPS}"
        return reason

    def work(self, problem: ConvolutionProblem, device: Device) -> FilterWork:
        """How the problem is cut."""
        return self.choice(problem, device).work

    def choice(self, problem: ConvolutionProblem, device: Device) -> FilterChoice:
        """Tile, patch and cut."""
        side = self.side(problem)
        return choose_filter(problem, multiprocessors(device), self.split, self.table, side)

    def workspace(self, problem: Problem, device: Device) -> int:
        if not self.split or not isinstance(problem, ConvolutionProblem):
            return 0
        return self.work(problem, device).workspace

    def estimate(self, problem: Problem, device: Device) -> float:
        if not isinstance(problem, ConvolutionProblem):
            raise TypeError(f"not a convolution: {problem}")
        launches = 2 if self.split else 1
        seconds = max(self.work(problem, device).seconds, problem.bytes / tiles.BANDWIDTH)
        untried = tiles.UNTRIED_SECONDS if self.untried(problem) else 0.0
        return launches * tiles.LAUNCH_SECONDS + seconds + untried

    def build(self, problem: Problem, device: Device) -> Kernel:
        if not isinstance(problem, ConvolutionProblem):
            raise TypeError(f"not a convolution: {problem}")
        return filter_launch(problem, device, self.choice(problem, device), self.split)


class FilterSplit(FilterGradient):
    """The general gradient by filter with its work cut evenly over the chip."""

    name = "gluon:implicit_gemm_ws_split"
    merges = True


class FilterWhole(FilterGradient):
    """The general gradient by filter, a tile of dw in one run."""

    name = "gluon:implicit_gemm_ws"
    split = False
    table = tiles.FILTER_HALF_WHOLE


class ByDirection(Algorithm):
    """Base of what is one algorithm to its users and two inside."""

    images: Algorithm  # for forward and backward_data
    filters: Algorithm  # for backward_filter

    def _of(self, problem: Problem) -> Algorithm:
        return self.filters if problem.direction == "backward_filter" else self.images

    def supports(self, problem: Problem, device: Device) -> str | None:
        return self._of(problem).supports(problem, device)

    def workspace(self, problem: Problem, device: Device) -> int:
        return self._of(problem).workspace(problem, device)

    def estimate(self, problem: Problem, device: Device) -> float:
        return self._of(problem).estimate(problem, device)

    def build(self, problem: Problem, device: Device) -> Kernel:
        return self._of(problem).build(problem, device)


class ImplicitGemm(ByDirection):
    """All three directions, each tile of the result in one run."""

    name = "gluon:implicit_gemm_ws"
    images = ImplicitGemmWs()
    filters = FilterWhole()


def geometry_arguments(geo: Geometry, names: tuple[str, ...]) -> dict[str, launch.Argument]:
    """The window's numbers, one a spatial axis, under these names."""
    fields = {"taps": "taps", "window": "taps", "pad": "pad", "stride": "u", "dilation": "dil"}
    return {name: Integers(per_axis(geo, fields[name])) for name in names}


def cut_arguments(geo: Geometry, choice: FilterChoice) -> dict[str, launch.Argument]:
    """The arguments by which a kernel that sums over patches finds its tiles, steps and window."""
    tile, patch = choice.tile, choice.patch
    return {
        "cut": choice.work.cut,
        "filter_tiles": launch.Scalar(-(-geo.filters // tile.bm)),
        "channel_tiles": launch.Scalar(-(-geo.channels // tile.bk)),
        "patches": Integers(patch.tiles),
        "box": Integers(patch.box),
        **geometry_arguments(geo, ("taps", "pad", "stride", "dilation")),
        "filters": launch.Scalar(geo.filters),
        "channels": launch.Scalar(geo.channels),
    }


def filter_launch(
    problem: ConvolutionProblem, device: Device, choice: FilterChoice, split: bool
) -> Kernel:
    """The general kernel and, if the work is split, the sum."""
    from bedstone.backends.gluon.convolution.filter_kernels import convolution_filter_ws_kernel

    tile, patch, work = choice.tile, choice.patch, choice.work
    view = filter_view(problem, work.side)
    geo, strides = view.geo, dw_strides(problem)
    if strides is None:
        raise ValueError(f"the filter {problem.w} has no single axis of taps")
    part = launch.Scratch(DType.float32) if split else launch.Pointer(2, problem.x.dtype)
    arguments: dict[str, launch.Argument] = {
        "x_desc": image_map(0, view.x, patch.box, tile.bk, per_axis(geo, "u")),
        "dy_desc": image_map(1, view.dy, patch.box, tile.bm),
        "dw_ptr": launch.Pointer(2, problem.x.dtype),
        "part_ptr": part,
        **launch.factors(problem.x.dtype),
        **cut_arguments(geo, choice),
        "dw_strides": Integers(strides, "i64"),
        "flip": launch.Scalar(int(view.flip)),
    }  # fmt: skip
    constants: dict[str, Any] = {
        "BK": tile.bm, "BC": tile.bk, "BP": tile.bc, "STAGES": tile.stages,
        "CONSUMERS": tile.consumers, "DEPTH": view.x.depth, "PARTIAL": split,
        "WORD": 1 if split else dw_word(problem.w.dtype, strides, geo.channels),
    }  # fmt: skip
    main = launch.prepare(
        device, convolution_filter_ws_kernel, (work.programs,), arguments, constants,
        fallback=lambda: general_kernel(problem, device), overlaps=True, num_warps=WARPS,
    )  # fmt: skip
    if not split:
        return main
    total = sum_launch(problem, device, work, geo, geo.taps, view.flip)
    return Guarded((main, total), problem, device, "parts added in order")


def sum_launch(
    problem: ConvolutionProblem, device: Device, work: FilterWork, geo: Geometry, taps: int,
    flip: bool,
) -> Kernel:  # fmt: skip
    """The kernel that adds the parts into dw; a tile holds `work.parts` taps of `taps`."""
    from bedstone.backends.gluon.convolution.filter_kernels import convolution_filter_sum_kernel

    strides = dw_strides(problem)
    if strides is None:
        raise ValueError(f"the filter {problem.w} has no single axis of taps")
    arguments: dict[str, launch.Argument] = {
        "part_ptr": launch.Scratch(DType.float32),
        "dw_ptr": launch.Pointer(2, problem.x.dtype),
        **launch.factors(problem.x.dtype),
        "cut": work.cut,
        "programs": launch.Scalar(work.programs),
        "filter_tiles": launch.Scalar(-(-geo.filters // work.rows)),
        "tap_groups": launch.Scalar(-(-taps // work.parts)),
        "channel_tiles": launch.Scalar(-(-geo.channels // work.columns)),
        "taps": launch.Scalar(taps),
        "filters": launch.Scalar(geo.filters),
        "channels": launch.Scalar(geo.channels),
        **{f"stride_{n}": launch.Scalar(s, "i64") for n, s in zip(("k", "tap", "c"), strides)},
        "flip": launch.Scalar(int(flip)),
    }
    constants: dict[str, Any] = {
        "BK": work.rows, "BC": work.columns, "PARTS": work.parts, "SIDE": work.side,
        **sum_shape(work),
    }  # fmt: skip
    unit = dw_word(problem.x.dtype, strides, geo.channels)
    if unit > 1:
        constants["stride_c"] = 1
        del arguments["stride_c"]
        for name in ("stride_k", "stride_tap", "channels"):
            arguments[name] = replace(arguments[name], divisor=unit)  # type: ignore[type-var]
    grid = work.tiles * work.parts * (work.rows * work.columns // constants["BLOCK"])
    return launch.prepare(
        device, convolution_filter_sum_kernel, (grid,), arguments, constants, overlaps=True,
        num_warps=SUM_WARPS,
    )  # fmt: skip


def sum_shape(work: FilterWork) -> dict[str, int]:
    """How many elements, of how many slots at once, a program of the sum adds."""
    sharers = -(-work.programs // work.tiles) + 1
    slots = min(SUM_SLOTS, 1 << (sharers - 1).bit_length())
    return {"BLOCK": min(SUM_LOADS // slots, work.rows * work.columns), "SLOTS": slots}
