"""Backward_filter of cpu:implicit_gemm by rows of x and dy, channels last or planes.

    dw[k, r, s, c] = sum over pixels of dy[pixel, k] * x[pixel * step + (r, s), c]

The rows of x that a chunk of pixels needs are copied once, channels last, with real zeros around
them, and every tap multiplies from there: no patch is ever gathered. Vectors run along the
channels of x, one panel of them at a time, which stays in the first-level cache while it meets all
filters and taps; with few channels they run along the filters, and a tile's rows along a row of
taps, which is one run of memory. A task owns a block of dw and adds up chunk after chunk in its
scratch; where blocks are few, the chunks are also cut into slices, whose sums are added in order
at the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from bedstone.backends.cpu.builder import F64, I64, KernelBuilder, itemsize
from bedstone.backends.cpu.convolution.row_gradient_blocking import (
    Line,
    block_counts,
    blocking_of,
    chunk_counts,
    scratch_bytes,
)
from bedstone.backends.cpu.convolution.row_gradient_packing import Chunk, Operand, Packer
from bedstone.backends.cpu.kernel import ENTRY
from bedstone.backends.cpu.microkernels import unrolled
from bedstone.backends.cpu.packing import blend_strided
from bedstone.backends.cpu.target import Target
from bedstone.backends.cpu.values import Int, IntLike
from bedstone.spec.convolution import ConvolutionProblem

UNROLL = 4
STRAIGHT = 8  # rows of pixels up to here are no loop
AHEAD_LEVEL = 2  # of the caches, into which is fetched what is packed next


@dataclass(frozen=True)
class Block:
    """A block of dw at run time: its first channel and filter, how many there are from them to
    the end of the block, and the addresses of its group."""

    channel: IntLike
    filter: IntLike
    channels: IntLike
    filters: IntLike
    x: IntLike
    dy: IntLike
    dw: IntLike


class RowGradient:
    """Emits the kernel."""

    def __init__(self, problem: ConvolutionProblem, target: Target) -> None:
        found = blocking_of(problem, target)
        if found is None:
            raise TypeError(f"rows of {problem} do not lie as this kernel needs them")
        v, plan = self.view, self.plan = found
        self.k = KernelBuilder(target)
        self.dtype, self.sum_dtype = str(problem.x.dtype), str(problem.x.dtype.accumulator)
        self.size = itemsize(self.dtype)
        self.vector = plan.lanes * plan.item
        self.packer = Packer(self.k, v, plan, self.dtype, self.sum_dtype)
        self.image, self.out = self.packer.image, self.packer.out
        self.vector_bytes, self.other_bytes, self.own_sum_bytes = scratch_bytes(v, plan)
        taps = v.columns if plan.runs > len(v.rows.shifts) else Line(1, 1)
        self.run_table = [
            (r - v.rows.shifts[0]) * self.image.row + (s - taps.shifts[0]) * self.image.place
            for r in v.rows.shifts
            for s in taps.shifts
        ]
        self.filter_table = [r + s for r in v.rows.filters for s in taps.filters]
        # Rows of pixels that follow one another in both operands are one row, images too.
        follow = self.image.row == plan.piece * v.columns.stride * self.image.place
        self.rows_join = follow and v.rows.stride == 1
        self.images_join = self.rows_join and v.rows.span == 1
        # Bytes from a pixel, a row, an image to the next: of a tile's two operands, as packed, and
        # of what the panel of vectors is packed from.
        x = [v.columns.stride * self.image.place, v.rows.stride * self.image.row, self.image.image]
        dy = [self.out.place, self.out.row, self.out.image]
        operand = self.packer.x if plan.by_channels else self.packer.dy
        batch, row, column, _ = operand.strides
        self.ahead_steps = [column * operand.columns.step, row * operand.rows.step, batch]
        if (
            operand.turned
            or self.rows_join
            and self.ahead_steps[1] != plan.piece * self.ahead_steps[0]
        ):
            self.ahead_steps = [0, 0, 0]
        # Where neighbouring pixels share elements, steps side by side would share their loads too,
        # and keep more values than there are registers (30 % slower): one at a time.
        shared = not plan.by_channels and x[0] < plan.rows * plan.item
        self.unroll = 1 if shared else UNROLL
        self.steps = (*((dy, x) if plan.by_channels else (x, dy)), self.ahead_steps)

    @staticmethod
    def describe(problem: ConvolutionProblem, target: Target) -> str:
        """One line for explain()."""
        found = blocking_of(problem, target)
        if found is None:
            return ""
        v, plan = found
        along = "channels" if plan.by_channels else "filters"
        return (
            f"multiplies rows; tile {plan.rows} x {plan.width}, vectors along {along}; chunks of "
            f"{plan.images} x {plan.band} x {plan.piece} pixels; blocks of {plan.channel_chunk} "
            f"channels x {plan.filter_chunk} filters; {plan.slices} slices of the pixels"
        )

    def emit(self) -> KernelBuilder:
        """The whole module."""
        k, plan, v = self.k, self.plan, self.view
        for rows in self._sizes():
            self._emit_tile(rows)
        with k.entry(ENTRY, pointers=3) as call:
            self.x, self.dy, self.dw = call.pointers
            self.alpha, self.beta = call.alpha, call.beta
            blocks = v.groups * math.prod(block_counts(v, plan))
            partial = k.scratch(blocks * plan.slices * plan.sum_bytes) if plan.slices > 1 else None
            self._accumulate(call.threads, blocks, partial)
            if partial is not None:
                parts = plan.tiles if plan.by_channels else plan.panels
                with k.parallel(blocks * parts, call.threads) as job, job.each_task() as task:
                    block = task // parts
                    sums = partial + block * (plan.slices * plan.sum_bytes)
                    self._finish(self._block(block), sums, task % parts)
        return k

    def _sizes(self) -> list[int]:
        """Rows of the tiles."""
        plan = self.plan
        return [plan.rows] + ([plan.rows - 1] if plan.long_tiles < plan.tiles else [])

    def _block(self, number: IntLike) -> Block:
        k, plan, v = self.k, self.plan, self.view
        across, down = block_counts(v, plan)
        channel, rest = number % across * plan.channel_chunk, number // across
        filter_, group = rest % down * plan.filter_chunk, rest // down
        return Block(
            channel, filter_,
            k.min(v.channels - channel, plan.channel_chunk),
            k.min(v.filters - filter_, plan.filter_chunk),
            self.x + group * v.group_image + channel * v.image[3],
            self.dy + group * v.group_out + filter_ * v.out[3],
            self.dw + group * v.group_filter,
        )  # fmt: skip

    def _chunk(self, number: IntLike) -> Chunk:
        k, plan, v = self.k, self.plan, self.view
        _, bands, pieces = chunk_counts(v, plan)
        q, rest = number % pieces * plan.piece, number // pieces
        p, n = rest % bands * plan.band, rest // bands * plan.images
        return Chunk(
            (n, p, q),
            (
                k.min(v.batch - n, plan.images),
                k.min(v.rows.pixels - p, plan.band),
                k.min(v.columns.pixels - q, plan.piece),
            ),
        )

    # Products ----------------------------------------------------------------------------------

    def _accumulate(self, threads: Int, blocks: int, partial: Int | None) -> None:
        """One task a block and slice of the chunks."""
        k, plan, v = self.k, self.plan, self.view
        chunks = math.prod(chunk_counts(v, plan))
        scratch = self.vector_bytes + self.other_bytes + self.own_sum_bytes
        with (
            k.parallel(blocks * plan.slices, threads, scratch) as job,
            job.each_task() as task,
        ):
            block, piece = self._block(task // plan.slices), task % plan.slices
            own = job.scratch + self.vector_bytes + self.other_bytes
            sums = own if partial is None else partial + task * plan.sum_bytes
            first = piece * chunks // plan.slices
            last = (piece + 1) * chunks // plan.slices
            with k.loop(first, last, at_least_once=True) as number:
                self._multiply(block, number, first, last, job.scratch, sums)
            if partial is None and not plan.direct:
                parts = plan.tiles if plan.by_channels else plan.panels
                with k.loop(0, parts) as part:
                    self._finish(block, sums, part)

    def _multiply(
        self,
        block: Block,
        number: IntLike,
        first_chunk: IntLike,
        end: IntLike,
        scratch: Int,
        sums: Int,
    ) -> None:
        """Bring a chunk into scratch and add its products to a block's sums."""
        k, plan, v = self.k, self.plan, self.view
        chunk, following = self._chunk(number), self._chunk(number + 1)
        others = scratch + self.vector_bytes
        images, rows, columns = chunk.count
        if self.rows_join:
            rows, columns = 1, rows * columns
        if self.images_join:
            images, columns = 1, images * columns
        if plan.by_channels:
            self.packer.filters(block.dy, v.filters - block.filter, chunk, others)
            source, operand, layout, along = block.x, self.packer.x, self.image, block.channels
        else:
            self.packer.rows(block.x, chunk, others)
            source, operand, layout, along = block.dy, self.packer.dy, self.out, block.filters
        panels = (along + (plan.width - 1)) // plan.width
        with k.loop(0, panels) as panel:
            first = panel * plan.width
            self.packer.panel(
                source + first * operand.strides[3], operand, chunk, scratch, layout, along - first
            )
            # What is packed next comes closer while this panel is multiplied.
            more = k.as_int(panel + 1) < panels
            ahead = k.select(
                more,
                self._middle(operand, chunk) + (first + plan.width) * operand.strides[3],
                self._middle(operand, following),
            )
            ahead = source + ahead
            with k.loop(0, plan.runs) as run, k.loop(0, plan.tiles) as tile:
                offset = self._number(self.run_table, run)
                if plan.by_channels:
                    a, b = others + tile * self.packer.filter_panel, scratch + offset
                else:
                    a, b = others + offset + self.packer.start(tile) * plan.item, scratch
                c = sums + ((panel * plan.runs + run) * plan.tiles + tile) * plan.tile_bytes
                turn = k.min(run * plan.tiles + tile, self.unroll - 1)
                rest = [a, b, c, images, rows, columns, ahead + turn * self.ahead_steps[0]]
                rest.append(k.as_int(number) - first_chunk)
                if plan.direct:
                    filter_ = self.packer.start(tile)
                    dw = block.dw + (block.filter + filter_) * v.filter_filter
                    dw = dw + (block.channel + first) * v.channel_filter
                    dw = dw + self._number(self.filter_table, run)
                    rest += [end - k.as_int(number), dw, along - first, block.filters - filter_]
                    rest += [self.alpha, self.beta]
                self._call_tile(tile, *rest)

    def _middle(self, operand: Operand, chunk: Chunk) -> IntLike:
        """Where the middle tap of a chunk's first pixel lies."""
        place: IntLike = chunk.first[0] * operand.strides[0]
        for line, first, stride in zip(
            (operand.rows, operand.columns), chunk.first[1:], operand.strides[1:3]
        ):
            middle = line.shifts[len(line.shifts) // 2]
            place = (first * line.step + middle) * stride + place
        return place

    def _call_tile(self, tile: IntLike, *rest: Any) -> None:
        k, plan, sizes = self.k, self.plan, self._sizes()
        if len(sizes) == 1:
            k.call(f"tile{sizes[0]}", *rest)
            return
        with k.if_else(k.as_int(tile) < plan.long_tiles) as (long, short):
            with long:
                k.call(f"tile{sizes[0]}", *rest)
            with short:
                k.call(f"tile{sizes[1]}", *rest)

    def _number(self, table: list[int], number: IntLike) -> IntLike:
        """An entry of a table of constants."""
        if isinstance(number, int):
            return table[number]
        return self.k.load(self.k.table(table) + number * 8, "int64")

    def _emit_tile(self, rows: int) -> None:
        """tileN(a, b, c, images, rows of pixels, pixels of a row, ahead, chunks before): c = or +=
        the sum over pixels of N elements of `a` times the vectors of `b`; `ahead` is fetched
        meanwhile. Where sums go to dw at once, also: (chunks left, dw, channels left, filters
        left, alpha, beta)."""
        k, plan = self.k, self.plan
        types = [I64] * 8 + ([I64] * 4 + [F64, F64] if plan.direct else [])
        with k.function(f"tile{rows}", *types) as arguments:
            a, b, c, images, lines, columns, ahead, before, *rest = arguments
            zero = k.constant(0.0, self.sum_dtype, plan.lanes)
            self.sums = [[k.variable(zero) for _ in range(plan.vectors)] for _ in range(rows)]
            image_loop = images if plan.images > 1 and not self.images_join else 1
            row_loop = lines if plan.band > 1 and not self.rows_join else 1
            with k.loop(0, image_loop) as n, k.loop(0, row_loop) as p:
                at = [
                    start + n * steps[2] + p * steps[1]
                    for start, steps in zip((a, b, ahead), self.steps)
                ]
                self._row_of_pixels(at, columns)
            places = [
                (total, m, j) for m, row in enumerate(self.sums) for j, total in enumerate(row)
            ]
            with k.if_(before.ne(0)):
                for total, m, j in places:
                    at = m * plan.step_bytes + j * self.vector
                    total.set(k.load(c, self.sum_dtype, plan.lanes, at) + total.value)

            def keep() -> None:
                for total, m, j in places:
                    at = m * plan.step_bytes + j * self.vector
                    k.store(total.value, c, self.sum_dtype, at)

            if not plan.direct:
                keep()
                return
            with k.if_else(rest[0].eq(1)) as (last, more):
                with last:
                    self._finish_tile(places, *rest[1:])
                with more:
                    keep()

    def _row_of_pixels(self, at: list[Any], columns: Int) -> None:
        """Add up a row's products; at: of a, b, and what is fetched ahead."""
        k, plan, v = self.k, self.plan, self.view
        a_step, b_step, ahead_step = (steps[0] for steps in self.steps)

        def products(a: IntLike, b: IntLike, ahead: IntLike, unroll: int) -> None:
            if ahead_step:
                k.prefetch(ahead, level=AHEAD_LEVEL)
            for u in range(unroll):
                right = [
                    k.load(b, self.sum_dtype, plan.lanes, u * b_step + j * self.vector)
                    for j in range(plan.vectors)
                ]
                for m, row in enumerate(self.sums):
                    left = k.load(a, self.sum_dtype, None, u * a_step + m * plan.item)
                    left = k.splat(left, plan.lanes)
                    for total, one in zip(row, right):
                        total.set(k.fma(left, one, total.value))

        def step(q: IntLike, unroll: int) -> None:
            a, b, ahead = (start + q * steps[0] for start, steps in zip(at, self.steps))
            products(a, b, ahead, unroll)

        length: IntLike = columns
        if not self.rows_join and plan.piece == v.columns.pixels:
            length = plan.piece
        unroll = self.unroll
        if isinstance(length, int) and length <= STRAIGHT and unroll > 1:
            step(0, length)
            return
        unrolled(k, length, unroll, step)

    def _finish_tile(
        self, places: list[Any], dw: Int, channels: Int, filters: Int, alpha: Any, beta: Any
    ) -> None:
        """From registers to dw = alpha * sum + beta * dw."""
        k, plan, v = self.k, self.plan, self.view
        count = len(self.sums)
        all_filters = v.filters % plan.filter_chunk == 0
        all_channels = v.channels % plan.width == 0

        def blend(ragged: bool) -> None:
            for total, m, j in places:
                mask = None
                if ragged and not all_channels:
                    mask = k.first_lanes(channels - j * plan.lanes, plan.lanes)
                at = dw + (m * v.filter_filter + j * plan.lanes * v.channel_filter)
                with k.if_(filters > m if ragged and not all_filters else True):
                    blend_strided(
                        k, total.value, alpha, beta, at, v.channel_filter, self.dtype, mask
                    )

        if all_filters and all_channels:
            blend(False)
            return
        with k.if_else((filters >= count) & (channels >= plan.width)) as (full, part):
            with full:
                blend(False)
            with part:
                blend(True)

    # Results -----------------------------------------------------------------------------------

    def _finish(self, block: Block, sums: IntLike, part: IntLike) -> None:
        """dw = alpha * sum + beta * dw for one tile of filters, or one vector panel of them."""
        k, plan, v = self.k, self.plan, self.view

        def blend(panel: IntLike, run: IntLike, tile: IntLike, m: IntLike, at: Any) -> None:
            number = (panel * plan.runs + run) * plan.tiles + tile
            source = sums + number * plan.tile_bytes + m * plan.step_bytes
            for j in range(plan.vectors):
                total = k.load(source, self.sum_dtype, plan.lanes, j * self.vector)
                for s in range(1, plan.slices):
                    at_slice = s * plan.sum_bytes + j * self.vector
                    total = total + k.load(source, self.sum_dtype, plan.lanes, at_slice)
                address, step, left = at(panel, j)
                mask = k.first_lanes(left, plan.lanes)
                blend_strided(k, total, self.alpha, self.beta, address, step, self.dtype, mask)

        corner = block.dw + block.filter * v.filter_filter + block.channel * v.channel_filter
        if plan.by_channels:
            first = self.packer.start(part)
            count = k.min(self.packer.start(part + 1), block.filters) - first
            panels = (block.channels + (plan.width - 1)) // plan.width
            with k.loop(0, count) as m, k.loop(0, plan.runs) as run, k.loop(0, panels) as panel:
                row = corner + (first + m) * v.filter_filter
                row = row + self._number(self.filter_table, run)

                def along(panel: IntLike, j: int, row: Any = row) -> tuple[Any, int, IntLike]:
                    channel = panel * plan.width + j * plan.lanes
                    step = v.channel_filter
                    return row + channel * step, step, block.channels - channel

                blend(panel, run, part, m, along)
            return
        with k.loop(0, plan.runs) as run, k.loop(0, plan.tiles) as tile:
            first = self.packer.start(tile)
            with k.loop(0, self.packer.start(tile + 1) - first) as m:
                element = first + m
                tap = self._number(list(v.columns.filters), element // v.channels)
                if plan.runs > len(v.rows.shifts):
                    tap = 0
                row = corner + self._number(self.filter_table, run) + tap
                row = row + element % v.channels * v.channel_filter

                def down(panel: IntLike, j: int, row: Any = row) -> tuple[Any, int, IntLike]:
                    filter_ = panel * plan.width + j * plan.lanes
                    step = v.filter_filter
                    return row + filter_ * step, step, block.filters - filter_

                blend(part, run, tile, m, down)
