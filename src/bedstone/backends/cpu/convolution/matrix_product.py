"""Forward and backward_data of cpu:implicit_gemm_amx: image_product.py on the matrix unit.

The same product in the same order, of packed patches and the packed filter; the micro-kernel is
matrix_unit.py's, and the operands are packed as it takes them. Sums stay in tiles for DEPTH
products, then are added up in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from bedstone.backends.cpu import matrix_unit
from bedstone.backends.cpu.builder import Int, Job
from bedstone.backends.cpu.convolution.filter_rows import rows_of_filter
from bedstone.backends.cpu.convolution.geometry import Geometry, geometry
from bedstone.backends.cpu.convolution.image_product import (
    FEW_CHANNELS,
    FILTER_BYTES_MAX,
    L2_SHARE,
    TASK_BYTES_MAX,
    TASKS_WANTED,
    Blocking,
    ImageProduct,
    even_pieces,
)
from bedstone.backends.cpu.convolution.matrix_packing import (
    finish_left,
    finish_right,
)
from bedstone.backends.cpu.convolution.patches import Chunk, PhaseAt
from bedstone.backends.cpu.cost import MATRIX_RATE
from bedstone.backends.cpu.irtypes import itemsize
from bedstone.backends.cpu.matrix_unit import PRODUCTS, SIDE, MatrixTile
from bedstone.backends.cpu.target import Target
from bedstone.backends.cpu.values import IntLike
from bedstone.spec.convolution import ConvolutionProblem
from bedstone.spec.dtypes import DType

DEPTH = 512  # products summed in a tile before they are added to the sums in memory
# Flops of the peak float32 rate: per element of a patch whose neighbours are neighbours in the
# image, along channels and along pixels; every second one; gathered; to split it. Of the filter,
# of the output.
CHANNEL_FLOPS, PIXEL_FLOPS, SECOND_FLOPS, GATHER_FLOPS = 40.0, 15.0, 60.0, 250.0
SPLIT_FLOPS, FILTER_FLOPS, FINISH_FLOPS = 150.0, 100.0, 60.0
# bfloat16 numbers that stand for an operand in float32, by math mode.
PIECES = {"bf16x3": 2, "bf16x6": 3}


def pieces_of(problem: ConvolutionProblem) -> int:
    """How many bfloat16 numbers stand for an operand; 0 if the problem asks for other products."""
    if problem.x.dtype == DType.bfloat16:
        return 1
    if problem.x.dtype == DType.float32 and problem.direction != "backward_filter":
        return PIECES.get(problem.math, 0)
    return 0


def blocking(g: Geometry, dtype: str, pieces: int, target: Target) -> Blocking:
    """Cut the problem for the tile and the caches."""
    item = itemsize(dtype)
    pixel_contiguous = bool(g.axes) and g.axes[-1].image == item
    lanes_are_pixels = pixel_contiguous or g.inner.tensor != item or g.inner.size < FEW_CHANNELS
    channel_major = lanes_are_pixels and rows_of_filter(g, item, DEPTH) == "channel, tap"
    if channel_major:
        tap_chunk, tap_chunks = g.taps, 1
        channel_chunk, channel_chunks = even_pieces(g.inner.size, max(1, DEPTH // max(1, g.taps)))
    else:
        channel_chunk, channel_chunks = even_pieces(g.inner.size, DEPTH)
        tap_chunk, tap_chunks = even_pieces(g.taps, max(1, DEPTH // channel_chunk))
    tile = MatrixTile.of(pieces, tap_chunk * channel_chunk)
    pixel_panels, filter_panels = -(-g.pixels // SIDE), -(-g.outer.size // SIDE)
    pairs = len(g.phases) * g.groups
    panel_bytes = tap_chunks * channel_chunks * tile.a_bytes
    pairs_per_part = max(1, min(pairs, FILTER_BYTES_MAX // (filter_panels * panel_bytes)))
    panels_per_part, _ = even_pieces(filter_panels, max(1, FILTER_BYTES_MAX // panel_bytes))
    sums = panels_per_part * tile.c_bytes if tap_chunks * channel_chunks > 1 else 0
    room = min(int(target.l2_bytes * L2_SHARE), TASK_BYTES_MAX)
    most = max(1, room // (tile.a_bytes + sums))
    most = min(most, max(1, pixel_panels * pairs_per_part // TASKS_WANTED))
    block, blocks = even_pieces(pixel_panels, most)
    splits = max(1, TASKS_WANTED // (blocks * pairs_per_part))
    split, _ = even_pieces(panels_per_part, max(1, -(-panels_per_part // splits)))
    return Blocking(
        tile, lanes_are_pixels, tap_chunk, channel_chunk, tap_chunks, channel_chunks,
        pixel_panels, filter_panels, block, split, pairs, pairs_per_part, panels_per_part,
        channel_major,
    )  # fmt: skip


def work(problem: ConvolutionProblem, target: Target) -> float:
    """Flops of the peak float32 rate that the kernel spends."""
    g = geometry(problem)
    item, pieces = problem.x.dtype.itemsize, pieces_of(problem)
    plan = blocking(g, str(problem.x.dtype), pieces, target)
    pixels, outer = plan.pixel_panels * SIDE, plan.filter_panels * SIDE
    depth = sum(len(phase.taps) for phase in g.phases) * g.inner.size * g.groups
    passes = -(-plan.filter_panels // plan.split)
    packing = pixels * passes * (_pack_flops(g, plan, item) + SPLIT_FLOPS * (pieces > 1))
    products = 2.0 * pixels * outer * len(PRODUCTS[pieces]) / MATRIX_RATE
    stores = len(g.phases) * g.groups * pixels * outer * plan.chunks * FINISH_FLOPS
    return depth * (products + packing + outer * FILTER_FLOPS) + stores


def _pack_flops(g: Geometry, plan: Blocking, item: int) -> float:
    """Of an element of a patch."""
    if not plan.lanes_are_pixels:
        return CHANNEL_FLOPS
    step = g.axes[-1].image if g.axes else 0
    return {item: PIXEL_FLOPS, 2 * item: SECOND_FLOPS}.get(step, GATHER_FLOPS)


class MatrixProduct(ImageProduct):
    """Emits the kernel."""

    def __init__(self, problem: ConvolutionProblem, target: Target) -> None:
        pieces = self.pieces = pieces_of(problem)
        super().__init__(problem, target)
        self.tile: MatrixTile = self.plan.tile  # type: ignore[assignment]
        self.source_dtype = "int16" if pieces == 1 else self.dtype
        self.panel_scratch = self.filter_scratch = self.tile.raw_bytes

    @staticmethod
    def describe(problem: ConvolutionProblem, target: Target) -> str:
        """One line for explain()."""
        dtype = str(problem.x.dtype)
        plan = blocking(geometry(problem), dtype, pieces_of(problem), target)
        along = "pixels" if plan.lanes_are_pixels else "channels"
        return (
            f"gathers patches; tiles of {SIDE} x {SIDE}, rows of sums along {along}; {plan.chunks} "
            f"chunks of depth {plan.tile.depth}; tasks of {plan.block * SIDE} pixels"
        )

    def cut(self, target: Target) -> Blocking:
        return blocking(self.geometry, self.dtype, self.pieces, target)

    def emit_functions(self) -> None:
        matrix_unit.emit_matrix_tile(self.k, self.tile)
        self.emit_finish()

    def each_task(self, job: Job) -> contextlib.AbstractContextManager[Int]:
        return matrix_unit.each_task(self.k, job)

    # Packing ---------------------------------------------------------------------------------

    def pack_panel(
        self, panel: IntLike, chunk: Chunk, first_tap: IntLike, source: IntLike, target: IntLike,
        scratch: IntLike,
    ) -> None:  # fmt: skip
        raw = scratch if self.pieces > 1 else target
        super().pack_panel(panel, chunk, first_tap, source, raw, scratch)
        finish = finish_right if self.plan.lanes_are_pixels else finish_left
        finish(self.k, self.tile, raw, target, chunk.depth)

    def pack_filter_panel(
        self,
        source: IntLike,
        phase: PhaseAt,
        first: IntLike,
        to: Callable[[IntLike], IntLike],
        scratch: IntLike,
    ) -> None:
        k, plan = self.k, self.plan
        finish = finish_left if plan.lanes_are_pixels else finish_right
        pack = self._filter_rows if plan.lanes_are_pixels else self._filter_columns
        if plan.channel_major:
            pack = self._filter_runs
        with k.loop(0, plan.chunks) as number:
            chunk, target = self._chunk(phase, phase.count, number), to(number)
            raw = scratch if self.pieces > 1 else target
            pack(source, raw, chunk, phase.first, first)
            finish(k, self.tile, raw, target, chunk.depth)

    def _filter_runs(
        self, source: IntLike, target: IntLike, chunk: Chunk, first_tap: IntLike, first: IntLike
    ) -> None:
        """Rows are outer channels, whose inner channels and taps are one run."""
        k, tile, g = self.k, self.tile, self.geometry
        with k.loop(0, k.min(g.outer.size - first, tile.rows)) as m:
            row = source + (first + m) * g.outer.filter + chunk.i0 * g.inner.filter
            with k.loop(0, chunk.depth, tile.lanes) as d:
                mask = k.first_lanes(chunk.depth - d, tile.lanes)
                value = k.load(row + d * self.item, self.source_dtype, tile.lanes, mask=mask)
                k.store(value, target + m * tile.row_bytes + d * tile.item, tile.dtype, mask=mask)
