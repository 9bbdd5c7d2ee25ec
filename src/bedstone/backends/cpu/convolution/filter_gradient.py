"""Backward_filter of cpu:implicit_gemm: dw[o, (tap, i)] = sum over pixels of dy * patches.

The sum runs over all pixels of the batch, in chunks. A task owns a block of dw and adds up chunk
after chunk in its scratch: the patches of the block's taps and channels and the chunk of dy are
packed there too. Where dw is too small to keep the threads busy, the pixels are also cut into
slices, each with a dw of its own, added in order at the end. The cut depends on the problem alone,
so results do not depend on the number of threads.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from bedstone.backends.cpu.builder import F64, I64, Job, KernelBuilder, itemsize
from bedstone.backends.cpu.convolution.geometry import Geometry, geometry
from bedstone.backends.cpu.convolution.image_product import (
    DEPTH,
    FEW_CHANNELS,
    TASKS_WANTED,
    even_pieces,
)
from bedstone.backends.cpu.convolution.patches import (
    Chunk,
    Taps,
    pack_channel_lanes,
    pack_pixel_lanes,
    pixel_lanes,
)
from bedstone.backends.cpu.kernel import ENTRY
from bedstone.backends.cpu.microkernels import TILE, Tile, choose_shape, emit_tile
from bedstone.backends.cpu.packing import (
    Lanes,
    Span,
    blend_strided,
    joined,
    load_strided,
    place,
)
from bedstone.backends.cpu.shuffles import transposed
from bedstone.backends.cpu.target import KIB, MIB, Target
from bedstone.backends.cpu.values import Int, IntLike, Mask
from bedstone.spec.convolution import ConvolutionProblem

FINISH = "finish"
BLOCK_ROWS_LEAST = 256  # fewer (tap, channel) pairs make packing dy weigh, even beyond the cache
BLOCK_FILTERS = 256  # outer channels of a task's block of dw, at most
L2_SHARE = 0.75  # of the second-level cache for a task's patches, piece of dy and sums
TASK_BYTES_MAX = 1280 * KIB
SLICE_BYTES_MAX = 2 * MIB  # for the sums of all slices
# With fewer pixels than this, storing dw weighs: whole runs of it, from transposed tiles.
FEW_PIXELS = 8192
VECTORS_AT_ONCE = 4  # of pixels, packed side by side
# Of the peak rate, per packed element: with vectors along pixels, and along channels.
PACK_FLOPS, PACK_CHANNEL_FLOPS = 40.0, 60.0
FINISH_FLOPS = 100.0  # of the peak rate, per element of dw
EFFICIENCY = 0.87  # of products


@dataclass(frozen=True)
class Blocking:
    """How a problem is cut. A block is tap_chunk taps by channel_chunk inner channels by
    filter_chunk outer ones; its tiles are row_panels by column_panels.

    channel_major  rows are numbered as dw lies in memory, by channels, then taps
    """

    tile: Tile
    lanes_are_pixels: bool
    tap_chunk: int
    tap_chunks: int
    channel_chunk: int
    channel_chunks: int
    filter_chunk: int
    filter_chunks: int
    row_panels: int
    column_panels: int
    chunks: int
    slices: int
    chunks_per_slice: int
    channel_major: bool

    @property
    def blocks(self) -> int:
        """Blocks of one group."""
        return self.tap_chunks * self.channel_chunks * self.filter_chunks

    @property
    def sum_bytes(self) -> int:
        return self.row_panels * self.column_panels * self.tile.c_bytes


def taps_then_channels(g: Geometry, item: int) -> bool:
    """Whether taps, then channels, are neighbours in dw."""
    taps = [tap.filter for tap in g.phases[0].taps]
    return taps == [t * item for t in range(len(taps))] and g.inner.filter == len(taps) * item


def blocking(g: Geometry, dtype: str, sum_dtype: str, target: Target) -> Blocking:
    """Cut the problem for the target's registers and caches."""
    item = itemsize(dtype)
    lanes = target.vector_bytes // itemsize(sum_dtype)
    pixel_contiguous = bool(g.axes) and g.axes[-1].image == item
    lanes_are_pixels = pixel_contiguous or g.inner.tensor != item or g.inner.size < FEW_CHANNELS
    filter_chunk, filter_chunks = even_pieces(g.outer.size, BLOCK_FILTERS)
    # As many (tap, channel) pairs as fit: each pass over them packs all of dy once more.
    room = min(int(target.l2_bytes * L2_SHARE), TASK_BYTES_MAX) // itemsize(sum_dtype)
    most = max(BLOCK_ROWS_LEAST, (room - filter_chunk * DEPTH) // (DEPTH + filter_chunk))
    channel_major = lanes_are_pixels and g.pixels < FEW_PIXELS and taps_then_channels(g, item)
    channel_major = channel_major and g.taps <= most
    channel_chunk, channel_chunks = even_pieces(
        g.inner.size, most // g.taps if channel_major else most
    )
    if not lanes_are_pixels:  # every tap's channels start a vector
        channel_chunk = -(-channel_chunk // lanes) * lanes
    tap_chunk, tap_chunks = even_pieces(g.taps, max(1, most // channel_chunk))
    rows, columns = tap_chunk * channel_chunk, filter_chunk
    if not lanes_are_pixels:
        rows, columns = columns, rows
    height, vectors = choose_shape(target, sum_dtype, rows, columns)
    tile = Tile(height, vectors, lanes, DEPTH, sum_dtype)
    row_panels, column_panels = -(-rows // tile.rows), -(-columns // tile.columns)
    chunks = max(1, -(-g.pixels // DEPTH))
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
    """Flops of the peak rate that the kernel spends: products, padding of tiles, packing."""
    g = geometry(problem)
    plan = blocking(g, str(problem.x.dtype), str(problem.x.dtype.accumulator), target)
    rows, columns = plan.row_panels * plan.tile.rows, plan.column_panels * plan.tile.columns
    blocks = plan.blocks * g.groups
    packing = PACK_FLOPS if plan.lanes_are_pixels else PACK_CHANNEL_FLOPS
    a_pixel = 2 * rows * columns / EFFICIENCY + packing * (rows + columns)
    return blocks * (g.pixels * a_pixel + rows * columns * FINISH_FLOPS)


@dataclass(frozen=True)
class Block:
    """A block of dw at run time: its taps and channels, its outer channels from `outer` on, and
    the group's addresses."""

    chunk: Chunk
    outer: IntLike
    outer_end: IntLike
    image: IntLike
    dy: IntLike
    dw: IntLike


class FilterGradient:
    """Emits the kernel of backward_filter.

    source_dtype   what operands are read as to be packed
    """

    def __init__(self, problem: ConvolutionProblem, target: Target) -> None:
        self.k = KernelBuilder(target)
        self.geometry = geometry(problem)
        self.dtype = str(problem.x.dtype)
        self.sum_dtype = str(problem.x.dtype.accumulator)
        self.item = itemsize(self.dtype)
        self.source_dtype = self.dtype
        self.plan = self.cut(target)
        self.taps = Taps(self.k, self.geometry)
        self.dy_spans = joined([Span(axis.size, axis.out) for axis in self.geometry.axes])

    @staticmethod
    def describe(problem: ConvolutionProblem, target: Target) -> str:
        """One line for explain()."""
        dtype, sum_dtype = str(problem.x.dtype), str(problem.x.dtype.accumulator)
        plan = blocking(geometry(problem), dtype, sum_dtype, target)
        along = "filters" if plan.lanes_are_pixels else "channels"
        return (
            f"gathers patches; tile {plan.tile.rows} x {plan.tile.columns}, vectors along {along}; "
            f"blocks of {plan.tap_chunk} taps x {plan.channel_chunk} channels x "
            f"{plan.filter_chunk} filters; {plan.slices} slices of the pixels"
        )

    def cut(self, target: Target) -> Blocking:
        """How the problem is cut."""
        return blocking(self.geometry, self.dtype, self.sum_dtype, target)

    def emit_product(self) -> None:
        """The micro-kernel."""
        emit_tile(self.k, self.plan.tile)

    def emit(self) -> KernelBuilder:
        """The whole module."""
        k, plan, g = self.k, self.plan, self.geometry
        self.emit_product()
        self.emit_finish()
        with k.entry(ENTRY, pointers=3) as call:
            self.x, self.dy, self.dw = call.pointers
            self.alpha, self.beta = call.alpha, call.beta
            blocks = g.groups * plan.blocks
            partial = k.scratch(blocks * plan.slices * plan.sum_bytes) if plan.slices > 1 else None
            self._accumulate(call.threads, blocks, partial)
            if partial is not None:
                self._add_slices(call.threads, blocks, partial)
        return k

    def _block(self, number: IntLike) -> Block:
        """The block of that number: filters innermost, then channels, taps, groups."""
        k, plan, g = self.k, self.plan, self.geometry
        outer, rest = number % plan.filter_chunks * plan.filter_chunk, number // plan.filter_chunks
        i0 = rest % plan.channel_chunks * plan.channel_chunk
        rest = rest // plan.channel_chunks
        t0 = rest % plan.tap_chunks * plan.tap_chunk
        group = rest // plan.tap_chunks
        chunk = Chunk(
            t0, k.min(t0 + plan.tap_chunk, g.taps), i0, k.min(i0 + plan.channel_chunk, g.inner.size)
        )
        end = k.min(outer + plan.filter_chunk, g.outer.size)
        dy = self.dy + group * g.group_out + outer * g.outer.tensor
        dw = self.dw + group * g.group_filter
        return Block(chunk, outer, end, self.x + group * g.group_image, dy, dw)

    # Phases ----------------------------------------------------------------------------------

    def each_task(self, job: Job) -> contextlib.AbstractContextManager[Int]:
        """The tasks of a job that multiplies."""
        return job.each_task()

    def _accumulate(self, threads: Int, blocks: int, partial: Int | None) -> None:
        """One task a block and slice of the pixels."""
        k, plan, g, tile = self.k, self.plan, self.geometry, self.plan.tile
        a_bytes, b_bytes = plan.row_panels * tile.a_bytes, plan.column_panels * tile.b_bytes
        sums = plan.sum_bytes if partial is None else 0
        with (
            k.parallel(blocks * plan.slices, threads, a_bytes + b_bytes + sums) as job,
            self.each_task(job) as task,
        ):
            block = self._block(task // plan.slices)
            a, b = job.scratch, job.scratch + a_bytes
            c = b + b_bytes if partial is None else partial + task * plan.sum_bytes
            first = task % plan.slices * plan.chunks_per_slice
            last = k.min(first + plan.chunks_per_slice, plan.chunks)
            with k.loop(first, last) as number:
                pixel = number * tile.depth
                depth = k.min(g.pixels - pixel, tile.depth)
                if plan.lanes_are_pixels:
                    self.patch_rows(block, pixel, depth, a)
                    self.dy_columns(block, pixel, depth, b)
                else:
                    self.dy_rows(block, pixel, depth, a)
                    self.patch_columns(block, pixel, depth, b)
                with k.loop(0, plan.column_panels) as j, k.loop(0, plan.row_panels) as i:
                    at = c + (j * plan.row_panels + i) * tile.c_bytes
                    k.call(
                        TILE, a + i * tile.a_bytes, b + j * tile.b_bytes, at, depth, number - first
                    )
            if partial is None:
                self._finish_block(block, c)

    def _add_slices(self, threads: Int, blocks: int, partial: Int) -> None:
        """One task a block: the slices' sums, in order, onto the first's."""
        k, plan, tile = self.k, self.plan, self.plan.tile.sums
        step = tile.lanes * tile.item
        with k.parallel(blocks, threads) as job, job.each_task() as task:
            c = partial + task * (plan.slices * plan.sum_bytes)
            with k.loop(0, plan.sum_bytes, step) as at:
                total = k.variable(k.load(c + at, self.sum_dtype, tile.lanes))
                with k.loop(1, plan.slices) as s:
                    more = k.load(c + at + s * plan.sum_bytes, self.sum_dtype, tile.lanes)
                    total.set(total.value + more)
                k.store(total.value, c + at, self.sum_dtype)
            self._finish_block(self._block(task), c)

    def _finish_block(self, block: Block, c: IntLike) -> None:
        k, plan, tile = self.k, self.plan, self.plan.tile.sums
        chunk = block.chunk
        if plan.channel_major:
            with k.loop(0, plan.column_panels * tile.vectors) as vector:
                self._finish_runs(block, c, vector)
            return
        with k.loop(0, plan.column_panels) as j, k.loop(0, plan.row_panels) as i:
            k.call(
                FINISH, c + (j * plan.row_panels + i) * tile.c_bytes, block.dw,
                i * tile.rows, j * tile.vectors, chunk.t0, chunk.t1, chunk.i0, chunk.i1,
                block.outer, block.outer_end, self.alpha, self.beta,
            )  # fmt: skip

    # Packing ---------------------------------------------------------------------------------

    def patch_rows(self, block: Block, pixel: IntLike, depth: IntLike, a: IntLike) -> None:
        """Rows (tap, channel), vectors along pixels."""
        k, g, tile = self.k, self.geometry, self.plan.tile
        width = VECTORS_AT_ONCE * tile.lanes
        with k.loop(0, depth, width) as d:
            vectors = [
                pixel_lanes(
                    k, g, pixel + d + j * tile.lanes, tile.lanes, g.pixels % width != 0, self.item
                )
                for j in range(VECTORS_AT_ONCE)
            ]
            pack_pixel_lanes(
                k, self.taps, vectors, block.chunk, 0, block.image, a + d * tile.item,
                tile.row_bytes, self.source_dtype, self.plan.tile.dtype, self.plan.channel_major,
            )  # fmt: skip

    def patch_columns(self, block: Block, pixel: IntLike, depth: IntLike, b: IntLike) -> None:
        """Steps are pixels, vectors run along the channels of a tap."""
        k, plan, tile = self.k, self.plan, self.plan.tile
        with k.loop(0, depth) as d:
            row = b + d * tile.step_bytes

            def target(number: IntLike, row: Any = row) -> IntLike:
                vector = number // tile.lanes
                panel, j = vector // tile.vectors, vector % tile.vectors
                return row + panel * tile.b_bytes + j * (tile.lanes * tile.item)

            pack_channel_lanes(
                k, self.taps, pixel + d, block.chunk, 0, block.image, target, tile.lanes,
                self.source_dtype, self.plan.tile.dtype, padded_channels=plan.channel_chunk,
            )  # fmt: skip

    def dy_columns(self, block: Block, pixel: IntLike, depth: IntLike, b: IntLike) -> None:
        """Steps are pixels, vectors run along outer channels."""
        k, g, plan, tile = self.k, self.geometry, self.plan, self.plan.tile
        channel, lanes = g.outer.tensor, tile.lanes
        vectors = plan.column_panels * tile.vectors

        def place_of(vector: IntLike, step: IntLike) -> IntLike:
            panel, j = vector // tile.vectors, vector % tile.vectors
            return b + panel * tile.b_bytes + step * tile.step_bytes + j * (lanes * tile.item)

        def pixel_by_pixel(first: IntLike, last: IntLike) -> None:
            with k.loop(first, last) as d:
                offset, _ = place(k, pixel + d, self.dy_spans)
                with k.loop(0, vectors) as v:
                    mask = self._outer_mask(block, v)
                    at = block.dy + offset + v * (lanes * channel)
                    value = load_strided(k, at, channel, lanes, self.source_dtype, mask)
                    k.store(value, place_of(v, d), self.plan.tile.dtype)

        if channel == self.item or self.dy_spans[-1].stride != self.item:
            pixel_by_pixel(0, depth)
            return
        with k.loop(0, depth, lanes) as d:
            pixels = Lanes(k, pixel + d, lanes, self.dy_spans, g.pixels, True, self.item)
            with k.if_else(pixels.whole) as (whole, ragged):
                with whole, k.loop(0, vectors) as v:
                    rows = []
                    for r in range(lanes):
                        # Channels past the end read the last one again; nobody stores them.
                        o = k.min(v * lanes + r, block.outer_end - block.outer - 1)
                        rows.append(pixels.load_whole(block.dy + o * channel, self.source_dtype))
                    for r, value in enumerate(transposed(k, rows)):
                        k.store(value, place_of(v, d + r), self.plan.tile.dtype)
                with ragged:
                    pixel_by_pixel(d, k.min(d + lanes, depth))

    def dy_rows(self, block: Block, pixel: IntLike, depth: IntLike, a: IntLike) -> None:
        """Rows are outer channels, vectors run along pixels."""
        k, g, tile = self.k, self.geometry, self.plan.tile
        channel, lanes = g.outer.tensor, tile.lanes
        count = block.outer_end - block.outer
        with k.loop(0, depth, lanes) as d:
            column = a + d * tile.item
            if channel == self.item:
                self._dy_transposed(block, pixel + d, depth - d, count, column)
            else:
                pixels = Lanes(k, pixel + d, lanes, self.dy_spans, g.pixels, True, self.item)
                read = pixels.reader(self.source_dtype)
                with k.loop(0, count) as o:
                    value = read(block.dy + o * channel)
                    k.store(value, column + o * tile.row_bytes, self.plan.tile.dtype)

    def _dy_transposed(
        self, block: Block, pixel: IntLike, left: IntLike, count: IntLike, column: IntLike
    ) -> None:
        """A vector of pixels from channels that are neighbours; pixels past the end are junk."""
        k, plan, tile = self.k, self.plan, self.plan.tile
        lanes = tile.lanes
        offsets = [place(k, pixel + k.min(r, left - 1), self.dy_spans)[0] for r in range(lanes)]
        with k.loop(0, count, lanes) as o:
            mask = k.first_lanes(count - o, lanes)
            at = block.dy + o * self.item
            rows = [k.load(at + offset, self.source_dtype, lanes, mask=mask) for offset in offsets]
            for r, value in enumerate(transposed(k, rows)):
                with k.if_(o + r < plan.row_panels * tile.rows):
                    k.store(value, column + (o + r) * tile.row_bytes, self.plan.tile.dtype)

    def _outer_mask(self, block: Block, vector: IntLike) -> Mask | None:
        """Lanes of a vector of outer channels that exist in the block."""
        lanes = self.plan.tile.lanes
        if self.geometry.outer.size % (self.plan.column_panels * self.plan.tile.columns) == 0:
            return None
        return self.k.first_lanes(block.outer_end - block.outer - vector * lanes, lanes)

    # Results ---------------------------------------------------------------------------------

    def emit_finish(self) -> None:
        """FINISH(sums, dw, first row, first vector, t0, t1, i0, i1, outer, outer_end, alpha,
        beta): one tile of dw = alpha * sum + beta * dw."""
        k, tile, g = self.k, self.plan.tile.sums, self.geometry
        with k.function(FINISH, *[I64] * 10, F64, F64) as arguments:
            sums, dw, row, vector, t0, t1, i0, i1, outer, outer_end, alpha, beta = arguments
            chunk = Chunk(t0, t1, i0, i1)
            if self.plan.lanes_are_pixels:
                count = k.min(chunk.depth - row, tile.rows)
                step = g.outer.filter
            else:
                count = k.min(outer_end - outer - row, tile.rows)
                step = g.inner.filter
            with k.loop(0, count) as m:
                for j in range(tile.vectors):
                    if self.plan.lanes_are_pixels:
                        tap, channel = (row + m) // chunk.channels, (row + m) % chunk.channels
                        o = outer + (vector + j) * tile.lanes
                        mask = k.iota(tile.lanes) < k.splat(outer_end - o, tile.lanes)
                    else:
                        per_tap = self.plan.channel_chunk // tile.lanes
                        tap, channel = (vector + j) // per_tap, (vector + j) % per_tap * tile.lanes
                        o = outer + row + m
                        left = k.select(t0 + tap < t1, chunk.channels - channel, 0)
                        mask = k.iota(tile.lanes) < k.splat(left, tile.lanes)
                    at = dw + self.taps.tap(k.min(t0 + tap, t1 - 1)).filter
                    at = at + (i0 + channel) * g.inner.filter + o * g.outer.filter
                    value = k.load(
                        sums + m * tile.step_bytes, self.sum_dtype, tile.lanes,
                        offset=j * tile.lanes * tile.item,
                    )  # fmt: skip
                    blend_strided(k, value, alpha, beta, at, step, self.dtype, mask)

    def _finish_runs(self, block: Block, c: IntLike, vector: IntLike) -> None:
        """One vector of outer channels of a block: transposed, its rows are runs of dw."""
        k, g, plan, tile = self.k, self.geometry, self.plan, self.plan.tile.sums
        lanes, rows = tile.lanes, block.chunk.depth
        panel, j = vector // tile.vectors, vector % tile.vectors
        column = c + panel * (plan.row_panels * tile.c_bytes) + j * (lanes * tile.item)
        left = block.outer_end - block.outer - vector * lanes
        first = block.dw + block.chunk.i0 * g.inner.filter
        first = first + (block.outer + vector * lanes) * g.outer.filter
        with k.loop(0, rows, lanes) as row:
            tiles = []
            for r in range(lanes):
                number = k.min(row + r, rows - 1)
                at = number // tile.rows * tile.c_bytes + number % tile.rows * tile.step_bytes
                tiles.append(k.load(column + at, self.sum_dtype, lanes))
            mask = k.first_lanes(rows - row, lanes)
            for r, value in enumerate(transposed(k, tiles)):
                with k.if_(left > r):
                    at = first + r * g.outer.filter + row * self.item
                    k.store_blended(value, self.alpha, self.beta, at, self.dtype, mask=mask)
