"""Backward_filter of cpu:implicit_gemm_amx: filter_gradient.py on the matrix unit.

The same blocks of dw, chunks and slices of the pixels; the reduction runs along pixels, so they are
what comes in pairs. With channels first both operands lie along pixels, and dy is turned to be B;
with channels last both lie across, and dy is turned to be A.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from bedstone.backends.cpu import matrix_unit
from bedstone.backends.cpu.builder import Int, Job
from bedstone.backends.cpu.convolution.filter_gradient import (
    BLOCK_FILTERS,
    BLOCK_ROWS_LEAST,
    FEW_CHANNELS,
    L2_SHARE,
    SLICE_BYTES_MAX,
    TASK_BYTES_MAX,
    TASKS_WANTED,
    VECTORS_AT_ONCE,
    Block,
    Blocking,
    FilterGradient,
    even_pieces,
    taps_then_channels,
)
from bedstone.backends.cpu.convolution.geometry import Geometry, geometry
from bedstone.backends.cpu.convolution.matrix_packing import (
    finish_right,
    turn_to_left,
    turn_to_right,
)
from bedstone.backends.cpu.cost import MATRIX_RATE
from bedstone.backends.cpu.irtypes import itemsize
from bedstone.backends.cpu.matrix_unit import LANES, SIDE, STEPS, MatrixTile
from bedstone.backends.cpu.packing import Lanes, place
from bedstone.backends.cpu.target import Target
from bedstone.backends.cpu.values import IntLike
from bedstone.spec.convolution import ConvolutionProblem

DEPTH = 512  # pixels summed in a tile before they are added to the sums in memory
# Flops of the peak float32 rate: per element of a patch or dy, neighbours and gathered; of dw.
PACK_FLOPS, GATHER_FLOPS, FINISH_FLOPS = 45.0, 250.0, 200.0


def blocking(g: Geometry, dtype: str, target: Target) -> Blocking:
    """Cut the problem for the tile and the caches."""
    item = itemsize(dtype)
    pixel_contiguous = bool(g.axes) and g.axes[-1].image == item
    lanes_are_pixels = pixel_contiguous or g.inner.tensor != item or g.inner.size < FEW_CHANNELS
    width = VECTORS_AT_ONCE * SIDE  # of pixels that are packed together
    tile = MatrixTile.of(1, min(DEPTH, -(-g.pixels // width) * width))
    filter_chunk, filter_chunks = even_pieces(g.outer.size, BLOCK_FILTERS)
    room = min(int(target.l2_bytes * L2_SHARE), TASK_BYTES_MAX)
    # Bytes of a row of (tap, channel): its pixels and its sums.
    row_bytes = tile.depth * 2 + filter_chunk * 4
    most = max(BLOCK_ROWS_LEAST, (room - filter_chunk * tile.depth * 2) // row_bytes)
    channel_major = lanes_are_pixels and taps_then_channels(g, item) and g.taps <= most
    channel_chunk, channel_chunks = even_pieces(
        g.inner.size, most // g.taps if channel_major else most
    )
    if not lanes_are_pixels:  # every tap's channels start a panel
        channel_chunk = -(-channel_chunk // SIDE) * SIDE
    tap_chunk, tap_chunks = even_pieces(g.taps, max(1, most // channel_chunk))
    rows, columns = tap_chunk * channel_chunk, filter_chunk
    if not lanes_are_pixels:
        rows, columns = columns, rows
    row_panels, column_panels = -(-rows // SIDE), -(-columns // SIDE)
    chunks = max(1, -(-g.pixels // tile.depth))
    blocks = tap_chunks * channel_chunks * filter_chunks * g.groups
    slices_most = SLICE_BYTES_MAX // (row_panels * column_panels * tile.c_bytes * blocks)
    slices = max(1, min(-(-TASKS_WANTED // blocks), slices_most, chunks))
    chunks_per_slice, slices = even_pieces(chunks, -(-chunks // slices))
    return Blocking(
        tile, lanes_are_pixels, tap_chunk, tap_chunks, channel_chunk, channel_chunks,
        filter_chunk, filter_chunks, row_panels, column_panels, chunks, slices, chunks_per_slice,
        channel_major,
    )  # fmt: skip


def work(problem: ConvolutionProblem, target: Target) -> float:
    """Flops of the peak float32 rate that the kernel spends."""
    g = geometry(problem)
    plan = blocking(g, str(problem.x.dtype), target)
    rows, columns = plan.row_panels * SIDE, plan.column_panels * SIDE
    item = problem.x.dtype.itemsize
    packing = PACK_FLOPS
    if plan.lanes_are_pixels and not (g.axes and g.axes[-1].image in (item, 2 * item)):
        packing = GATHER_FLOPS
    a_pixel = 2.0 * rows * columns / MATRIX_RATE + packing * (rows + columns)
    return plan.blocks * g.groups * (g.pixels * a_pixel + rows * columns * FINISH_FLOPS)


class MatrixGradient(FilterGradient):
    """Emits the kernel."""

    def __init__(self, problem: ConvolutionProblem, target: Target) -> None:
        super().__init__(problem, target)
        self.source_dtype = "int16"

    @staticmethod
    def describe(problem: ConvolutionProblem, target: Target) -> str:
        """One line for explain()."""
        plan = blocking(geometry(problem), str(problem.x.dtype), target)
        along = "filters" if plan.lanes_are_pixels else "channels"
        return (
            f"gathers patches; tiles of {SIDE} x {SIDE}, rows of sums along {along}; blocks of "
            f"{plan.tap_chunk} taps x {plan.channel_chunk} channels x {plan.filter_chunk} filters; "
            f"{plan.slices} slices of the pixels"
        )

    def cut(self, target: Target) -> Blocking:
        return blocking(self.geometry, self.dtype, target)

    def emit_product(self) -> None:
        matrix_unit.emit_matrix_tile(self.k, self.plan.tile)  # type: ignore[arg-type]

    def each_task(self, job: Job) -> contextlib.AbstractContextManager[Int]:
        return matrix_unit.each_task(self.k, job)

    # Packing ---------------------------------------------------------------------------------

    def patch_columns(self, block: Block, pixel: IntLike, depth: IntLike, b: IntLike) -> None:
        """B: steps are pixels, columns the channels of taps."""
        k, plan = self.k, self.plan
        super().patch_columns(block, pixel, depth, b)
        with k.loop(0, plan.column_panels) as j:
            at = b + j * plan.tile.b_bytes
            finish_right(k, plan.tile, at, at, depth)  # type: ignore[arg-type]

    def dy_columns(self, block: Block, pixel: IntLike, depth: IntLike, b: IntLike) -> None:
        """B: steps are pixels, columns outer channels, from rows along the pixels."""
        k, g, plan, tile = self.k, self.geometry, self.plan, self.plan.tile
        last = block.outer_end - block.outer - 1
        with k.loop(0, depth, STEPS) as d:
            pixels = Lanes(k, pixel + d, STEPS, self.dy_spans, g.pixels, True, self.item)

            def turn(read: Callable[[IntLike], Any]) -> None:
                with k.loop(0, plan.column_panels) as j, k.loop(0, SIDE, LANES) as o:
                    # Channels past the end read the last one again; nobody stores them.
                    rows = [
                        read(block.dy + k.min(j * SIDE + o + r, last) * g.outer.tensor)
                        for r in range(LANES)
                    ]
                    turn_to_right(k, rows, b + j * tile.b_bytes + d * SIDE * 2 + o * 4)

            if pixels.whole is False:
                turn(pixels.reader(self.source_dtype))
            else:
                with k.if_else(pixels.whole) as (whole, ragged):
                    with whole:
                        turn(lambda at: pixels.load_whole(at, self.source_dtype))
                    with ragged:
                        turn(pixels.reader(self.source_dtype))

    def dy_rows(self, block: Block, pixel: IntLike, depth: IntLike, a: IntLike) -> None:
        """A: rows are outer channels, from steps across them where those are neighbours."""
        k, g, plan, tile = self.k, self.geometry, self.plan, self.plan.tile
        if g.outer.tensor != self.item:
            super().dy_rows(block, pixel, depth, a)
            return
        count = block.outer_end - block.outer
        with k.loop(0, depth, STEPS) as d:
            left = depth - d
            offsets = [
                place(k, pixel + d + k.min(r, left - 1), self.dy_spans)[0] for r in range(STEPS)
            ]
            with k.loop(0, plan.row_panels) as i:
                o = i * SIDE
                mask = k.first_lanes(count - o, SIDE)
                steps = []
                for r, offset in enumerate(offsets):
                    # Pixels past the end are zeros.
                    at = block.dy + o * self.item + offset
                    value = k.load(at, "int16", SIDE, mask=mask)
                    steps.append(k.select(k.as_int(left) > r, value, 0))
                for m, value in enumerate(turn_to_left(k, steps)):
                    k.store(value, a + i * tile.a_bytes + d * 2, "int32", m * tile.row_bytes)
