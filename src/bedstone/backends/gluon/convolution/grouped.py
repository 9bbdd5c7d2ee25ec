"""gluon:implicit_gemm_grouped, forward and gradient by data of many narrow groups: the host's side
of grouped_kernels.

Channels last, 16-bit or, with math="tf32", float32; no workspace. As many groups lie side by side
as fill a tile; the window has as many taps as fit into shared memory.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from bedstone.backends.gluon.convolution import images, tiles
from bedstone.backends.gluon.convolution.images import image_map
from bedstone.backends.gluon.convolution.implicit_gemm_ws import (
    HALVES,
    L2_GROUP,
    MAX_VIEWS,
    WARPS,
    ImageView,
    Integers,
    declines,
    general_kernel,
    halved,
    image_declines,
    image_view,
    inverses,
    multiprocessors,
    per_axis,
    residue_maps,
    step_seconds,
    store_order,
)
from bedstone.backends.gluon.convolution.patches import Patch, choose_patch
from bedstone.backends.triton import launch
from bedstone.backends.triton.convolution.geometry import word
from bedstone.plan.algorithm import Algorithm, Kernel
from bedstone.plan.device import Device
from bedstone.spec.convolution import ConvolutionProblem
from bedstone.spec.dtypes import DType
from bedstone.spec.problem import Problem

TOGETHER = 3  # taps of the filter that are read at once, as in grouped_kernels
BARRIER_BYTES = 1024  # what the barriers and alignment of shared memory take at most


@dataclass(frozen=True)
class Columns:
    """How channels are cut: groups side by side in a column, columns in all, reduced and output
    channels of a column."""

    side: int
    count: int
    reduced: int
    produced: int


def columns_of(view: ImageView, tile: tiles.Tile) -> Columns | None:
    """The columns of a tile's width, None if groups do not fill it exactly."""
    groups, width = view.geo.groups, tile.bk
    side = min(groups, width // view.produced)
    if side < 1 or groups % side or (side < groups and side * view.produced != width):
        return None
    reduced = side * view.reduced
    if reduced > tile.bc or (side < groups and reduced % word(DType.float16.itemsize)):
        return None
    return Columns(side, groups // side, reduced, side * view.produced)


def taps_held(view: ImageView) -> int:
    """Taps that the kernel has room for."""
    return -(-view.geo.taps // TOGETHER) * TOGETHER


def shared_bytes(view: ImageView, tile: tiles.Tile) -> int:
    """Shared memory of the filter, the ring and the output."""
    ring = tile.stages * tile.bm * tile.bc
    held = taps_held(view) * tile.bk * tile.bc + ring + tile.bm * tile.bk
    return held * view.source.dtype.itemsize + BARRIER_BYTES


def tile_of(problem: ConvolutionProblem) -> tiles.Tile:
    """The tile of the problem's dtype."""
    return tiles.GROUPED_HALF if problem.x.dtype in HALVES else tiles.GROUPED_TF32


@dataclass(frozen=True)
class GroupedChoice:
    """View, columns and patch, and the seconds expected."""

    view: ImageView
    columns: Columns
    patch: Patch
    seconds: float


@functools.lru_cache(maxsize=1024)
def choose_grouped(problem: ConvolutionProblem, processors: int) -> GroupedChoice | str:
    """How the problem is cut, or why it is not."""
    view, tile = image_view(problem), tile_of(problem)
    columns = columns_of(view, tile)
    if columns is None:
        return f"groups side by side do not make {tile.bk} output and {tile.bc} reduced channels"
    if shared_bytes(view, tile) > tiles.SHARED_BYTES:
        return f"a window of {view.geo.taps} taps does not fit into shared memory"
    patch = choose_patch(view.geo.images, view.geo.axes, tile.bm, view.backward)
    per_column = max(1, processors // columns.count)
    rounds = -(-patch.count // per_column) * -(-columns.count // processors)
    taps = max(1.0, patch.taps / max(patch.count, 1))
    seconds = rounds * taps * step_seconds(tile, processors) + (rounds + 1) * tile.tail * 1e-6
    return GroupedChoice(view, columns, patch, tiles.GROUPED_SECONDS + seconds)


class Grouped(Algorithm):
    """Forward and backward_data of narrow groups, side by side."""

    name = "gluon:implicit_gemm_grouped"

    def supports(self, problem: Problem, device: Device) -> str | None:
        side = problem.conv.groups if isinstance(problem, ConvolutionProblem) else 1
        reason = declines(problem, device, (*HALVES, DType.float32), side)
        if reason is not None or not isinstance(problem, ConvolutionProblem):
            return reason
        if problem.conv.groups == 1 or problem.direction == "backward_filter":
            return "takes forward and backward_data of two groups or more"
        if problem.x.dtype is DType.float32 and problem.math != "tf32":
            return f'float32 only with math="tf32"; the problem asks for {problem.math}'
        reason = image_declines(problem)
        if reason is not None:
            return reason
        if images.filter_of(problem.w) is None:
            return "w: its taps do not lie at equal distances"
        if store_order(image_view(problem)) != "tma":
            return "its output is none that TMA writes in four views or fewer"
        found = choose_grouped(problem, multiprocessors(device))
        return found if isinstance(found, str) else None

    def workspace(self, problem: Problem, device: Device) -> int:
        return 0

    def estimate(self, problem: Problem, device: Device) -> float:
        seconds = self.choice(problem, device).seconds
        seconds = max(seconds, problem.bytes / tiles.BANDWIDTH)
        return tiles.LAUNCH_SECONDS + seconds + tiles.UNTRIED_SECONDS

    def build(self, problem: Problem, device: Device) -> Kernel:
        if not isinstance(problem, ConvolutionProblem):
            raise TypeError(f"not a convolution: {problem}")
        return grouped_launch(problem, device, self.choice(problem, device))

    def choice(self, problem: Problem, device: Device) -> GroupedChoice:
        """How the problem is cut."""
        if not isinstance(problem, ConvolutionProblem):
            raise TypeError(f"not a convolution: {problem}")
        found = choose_grouped(problem, multiprocessors(device))
        if isinstance(found, str):
            raise ValueError(found)
        return found


def grouped_launch(problem: ConvolutionProblem, device: Device, choice: GroupedChoice) -> Kernel:
    """The kernel for a choice."""
    from bedstone.backends.gluon.convolution.grouped_kernels import convolution_grouped_kernel

    columns, patch = choice.columns, choice.patch
    per_column = max(1, multiprocessors(device) // columns.count)
    grid = columns.count * min(patch.count, per_column)
    arguments, constants = grouped_arguments(problem, choice)
    return launch.prepare(
        device, convolution_grouped_kernel, (grid,), arguments, constants,
        fallback=lambda: general_kernel(problem, device), overlaps=True, num_warps=WARPS,
    )  # fmt: skip


def grouped_arguments(
    problem: ConvolutionProblem, choice: GroupedChoice
) -> tuple[dict[str, launch.Argument], dict[str, Any]]:
    """Arguments and constants of the kernel, by name."""
    view, columns, patch, tile = choice.view, choice.columns, choice.patch, tile_of(problem)
    geo, dtype, act = view.geo, problem.x.dtype, problem.epilogue.activation
    last, half = len(problem.operands) - 1, halved(patch.box)
    found = images.filter_of(problem.w)
    if found is None:
        raise ValueError(f"the filter {problem.w} has no single axis of taps")
    k_step, tap_step, c_step = found.strides
    out_step, reduced_step = (c_step, k_step) if view.backward else (k_step, c_step)
    steps = (1, 1, 1) if view.backward else per_axis(geo, "u")
    source = 1 if view.backward else 0
    arguments: dict[str, launch.Argument] = {
        "x_desc": image_map(source, view.source, patch.box, tile.bc, steps),
        "x_ptr": launch.Pointer(source, dtype),
        "w_ptr": launch.Pointer(1 - source, dtype),
        "bias_ptr": launch.Pointer(2 if problem.epilogue.bias else last, dtype),
        **launch.factors(dtype),
        **launch.activation_arguments(act, dtype),
        "count": launch.Scalar(patch.count),
        "columns": launch.Scalar(columns.count),
        "tiles": Integers(patch.tiles),
        "inverse": inverses(L2_GROUP, *patch.tiles[:0:-1]),
        "box": Integers(patch.box),
        "half": Integers(tuple(b if b < whole else 0 for b, whole in zip(half, patch.box))),
        "logs": Integers(patch.logs),
        "size": Integers(view.source.dims[1:4]),
        "images": launch.Scalar(view.source.dims[0]),
        "taps": Integers(per_axis(geo, "taps")),
        "pad": Integers(per_axis(geo, "pad")),
        "stride": Integers(per_axis(geo, "u")),
        "dilation": Integers(per_axis(geo, "dil")),
        "x_strides": Integers(view.source.strides[:4], "i64"),
        "reduced": launch.Scalar(columns.reduced),
        "out_group": launch.Scalar(view.produced),
        "reduced_group": launch.Scalar(view.reduced),
        "out_count": launch.Scalar(columns.count * columns.produced),
        "reduced_count": launch.Scalar(columns.count * columns.reduced),
        "stride_tap": launch.Scalar(tap_step, "i64"),
        "stride_out": launch.Scalar(out_step, "i64"),
        "stride_reduced": launch.Scalar(reduced_step, "i64"),
    }
    constants: dict[str, Any] = {
        "BM": tile.bm, "BK": tile.bk, "BC": tile.bc, "STAGES": tile.stages,
        "CONSUMERS": tile.consumers, "TAPS": taps_held(view), "MIXED": columns.side > 1,
        "BACKWARD": view.backward, "UNIT": view.unit, "FLIP": view.flip,
        "DEPTH": view.source.depth, "BIAS": problem.epilogue.bias,
        "ACTIVATION": act.kind if act is not None else "none",
    }  # fmt: skip
    maps = residue_maps(view, last, half, tile.bk)
    if view.backward and not view.unit:  # stand-ins
        maps += maps[:1] * (MAX_VIEWS - len(maps))
    for i, name in enumerate(("y_desc", "y1_desc", "y2_desc", "y3_desc")):
        if i < len(maps):
            arguments[name] = maps[i]
        else:
            constants[name] = None
    return arguments, constants
