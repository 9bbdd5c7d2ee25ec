"""Forward and backward_data of cpu:implicit_gemm: the product of the filter and the patches.

Both are one kernel over one index map (geometry.py). The filter is packed once a call, unless its
rows can be read where they lie, which at batch 1 halves the time of a large filter; then each task
takes a block of pixels, packs its patches chunk by chunk of the depth into the thread's scratch,
and multiplies them with the filter. Sums run over chunks of at most DEPTH products, then over
chunks: shorter sums, smaller errors. Loop order after Goto and van de Geijn 2008.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bedstone.backends.cpu.activation import emit_epilogue
from bedstone.backends.cpu.builder import F64, I64, Call, Job, KernelBuilder, itemsize
from bedstone.backends.cpu.convolution.filter_rows import rows_of_filter, turn_rows, turns
from bedstone.backends.cpu.convolution.geometry import Geometry, geometry
from bedstone.backends.cpu.convolution.packed_filter import FilterKernel, Operands, Packed
from bedstone.backends.cpu.convolution.patches import (
    Chunk,
    PhaseAt,
    Taps,
    pack_channel_lanes,
    pack_pixel_lanes,
    pixel_lanes,
)
from bedstone.backends.cpu.microkernels import TILE, Tile, choose_shape, emit_tile
from bedstone.backends.cpu.packing import (
    Lanes,
    Span,
    fill_zero,
    joined,
    load_strided,
    place,
    store_strided,
)
from bedstone.backends.cpu.target import CACHE_LINE, MIB, Target
from bedstone.backends.cpu.values import Float, Int, IntLike, MaskLike
from bedstone.spec.convolution import ConvolutionProblem

FINISH = "finish"
DEPTH = 256  # products summed in registers before they are added to the tile in memory
L2_SHARE = 0.5  # of the second-level cache for a task's patches and sums
TASK_BYTES_MAX = 1 * MIB
FILTER_BYTES_MAX = 8 * MIB  # of packed filter at a time; a larger one goes in parts
TASKS_WANTED = 16
FEW_CHANNELS = 8  # fewer than this in a row are not worth vectors over channels


@dataclass(frozen=True)
class Blocking:
    """How a problem is cut: see `blocking`. A "panel" is one tile's worth of pixels or of outer
    channels.

    lanes_are_pixels  vectors along pixels (else along channels)
    tap_chunk, channel_chunk, tap_chunks, channel_chunks   pieces of the depth
    pixel_panels, filter_panels   of the whole problem (of one phase and group)
    block, split      pixel panels and filter panels of one task
    part              filter panels packed at a time: whole groups and phases, or a piece of one
    channel_major     the depth is numbered by channels, then taps: as a filter in place lies
    """

    tile: Tile
    lanes_are_pixels: bool
    tap_chunk: int
    channel_chunk: int
    tap_chunks: int
    channel_chunks: int
    pixel_panels: int
    filter_panels: int
    block: int
    split: int
    pairs: int
    pairs_per_part: int
    panels_per_part: int
    channel_major: bool = False

    @property
    def in_place(self) -> bool:
        """Whether the filter is read where it lies."""
        return self.tile.a_row_bytes > 0

    @property
    def chunks(self) -> int:
        return self.tap_chunks * self.channel_chunks

    @property
    def pixel_width(self) -> int:
        """Pixels of a panel."""
        return self.tile.columns if self.lanes_are_pixels else self.tile.rows

    @property
    def filter_width(self) -> int:
        """Outer channels of a panel."""
        return self.tile.rows if self.lanes_are_pixels else self.tile.columns

    @property
    def pixel_panel_bytes(self) -> int:
        return self.tile.b_bytes if self.lanes_are_pixels else self.tile.a_bytes

    @property
    def filter_panel_bytes(self) -> int:
        return self.tile.a_bytes if self.lanes_are_pixels else self.tile.b_bytes


def even_pieces(total: int, most: int) -> tuple[int, int]:
    """(size, number) of the fewest pieces of `total`, none larger than `most`, sizes alike."""
    number = max(1, -(-total // most))
    return max(1, -(-total // number)), number


def blocking(g: Geometry, dtype: str, sum_dtype: str, target: Target) -> Blocking:
    """Cut the problem for the target's registers and caches."""
    item = itemsize(dtype)
    pixel_contiguous = bool(g.axes) and g.axes[-1].image == item
    lanes_are_pixels = pixel_contiguous or g.inner.tensor != item or g.inner.size < FEW_CHANNELS
    pixels, outer = g.pixels, g.outer.size
    size = (outer, pixels) if lanes_are_pixels else (pixels, outer)
    rows, vectors = choose_shape(target, sum_dtype, *size)
    readable = lanes_are_pixels and dtype == sum_dtype and rows <= outer and g.outer.filter > 0
    order = rows_of_filter(g, item, DEPTH) if readable else ""
    if order == "channel, tap":
        tap_chunk, tap_chunks = g.taps, 1
        channel_chunk, channel_chunks = even_pieces(g.inner.size, max(1, DEPTH // g.taps))
    else:
        channel_chunk, channel_chunks = even_pieces(g.inner.size, DEPTH)
        tap_chunk, tap_chunks = even_pieces(g.taps, max(1, DEPTH // channel_chunk))
    lanes = target.vector_bytes // itemsize(sum_dtype)
    row_bytes = g.outer.filter if order else 0
    tile = Tile(rows, vectors, lanes, tap_chunk * channel_chunk, sum_dtype, a_row_bytes=row_bytes)
    pairs = len(g.phases) * g.groups
    draft = Blocking(
        tile, lanes_are_pixels, tap_chunk, channel_chunk, tap_chunks, channel_chunks,
        0, 0, 1, 1, pairs, 1, 1,
    )  # fmt: skip
    pixel_panels = -(-pixels // draft.pixel_width)
    filter_panels = -(-outer // draft.filter_width)
    pairs_per_part, panels_per_part = pairs, filter_panels
    if not order:
        panel_bytes = draft.chunks * draft.filter_panel_bytes
        pairs_per_part = max(1, min(pairs, FILTER_BYTES_MAX // (filter_panels * panel_bytes)))
        panels_per_part, _ = even_pieces(filter_panels, max(1, FILTER_BYTES_MAX // panel_bytes))
    sums = panels_per_part * tile.c_bytes if draft.chunks > 1 else 0
    room = min(int(target.l2_bytes * L2_SHARE), TASK_BYTES_MAX)
    most = max(1, room // (draft.pixel_panel_bytes + sums))
    most = min(most, max(1, pixel_panels * pairs_per_part // TASKS_WANTED))
    block, blocks = even_pieces(pixel_panels, most)
    splits = max(1, TASKS_WANTED // (blocks * pairs_per_part))
    split, _ = even_pieces(panels_per_part, max(1, -(-panels_per_part // splits)))
    return Blocking(
        tile, lanes_are_pixels, tap_chunk, channel_chunk, tap_chunks, channel_chunks,
        pixel_panels, filter_panels, block, split, pairs, pairs_per_part, panels_per_part,
        order == "channel, tap",
    )  # fmt: skip


# Of the peak rate, packing a patch's element: from neighbours? gathered?
PACK_FLOPS = {True: 12.0, False: 100.0}
# Packing a filter's element: by transposing in registers? gathered?
FILTER_FLOPS = {True: 50.0, False: 200.0}
TILE_CYCLES = 100.0  # around the products of a tile and chunk: with 9 products they take 3/4


def work(problem: ConvolutionProblem, target: Target) -> float:
    """Flops of the peak rate that the kernel spends: products, padding of tiles, packing."""
    g = geometry(problem)
    plan = blocking(g, str(problem.x.dtype), str(problem.x.dtype.accumulator), target)
    pixels = plan.pixel_panels * plan.pixel_width
    outer = plan.filter_panels * plan.filter_width
    depth = sum(len(phase.taps) for phase in g.phases) * g.inner.size * g.groups
    item = itemsize(str(problem.x.dtype))
    step = g.axes[-1].image if plan.lanes_are_pixels and g.axes else g.inner.tensor
    passes = -(-plan.filter_panels // plan.split)
    phases = sum(1 for phase in g.phases if phase.taps)
    tiles = phases * g.groups * plan.pixel_panels * plan.filter_panels * plan.chunks
    around = tiles * TILE_CYCLES * 4 * plan.tile.lanes  # two multiply-adds a cycle
    packing = pixels * passes * PACK_FLOPS[step == item]
    packing += 0.0 if plan.in_place else outer * FILTER_FLOPS[turns(g, plan, item)]
    return around + depth * (2.0 * pixels * outer + packing)


class ImageProduct(FilterKernel):
    """Emits the kernel of forward or backward_data.

    source_dtype                   what operands are read as to be packed
    panel_scratch, filter_scratch  bytes that a task has for packing panels of pixels, of the filter
    """

    panel_scratch = 0
    filter_scratch = 0

    def __init__(self, problem: ConvolutionProblem, target: Target) -> None:
        self.problem = problem
        self.k = KernelBuilder(target)
        self.geometry = geometry(problem)
        self.dtype = str(problem.x.dtype)
        self.sum_dtype = str(problem.x.dtype.accumulator)
        self.item = itemsize(self.dtype)
        self.source_dtype = self.dtype
        self.plan = self.cut(target)
        self.taps = Taps(self.k, self.geometry)
        plan = self.plan
        self.parts = (
            -(-plan.pairs // plan.pairs_per_part),
            -(-plan.filter_panels // plan.panels_per_part),
        )
        if not plan.in_place:
            panels = plan.pairs_per_part * plan.panels_per_part
            self.part_bytes = panels * plan.chunks * plan.filter_panel_bytes
            self.packed_bytes = self.parts[0] * self.parts[1] * self.part_bytes

    @staticmethod
    def describe(problem: ConvolutionProblem, target: Target) -> str:
        """One line for explain()."""
        dtype, sum_dtype = str(problem.x.dtype), str(problem.x.dtype.accumulator)
        plan = blocking(geometry(problem), dtype, sum_dtype, target)
        along = "pixels" if plan.lanes_are_pixels else "channels"
        read = "reads the filter in place" if plan.in_place else "packs the filter"
        return (
            f"gathers patches, {read}; "
            f"tile {plan.tile.rows} x {plan.tile.columns}, vectors along {along}; "
            f"{plan.chunks} chunks of depth {plan.tile.depth}; tasks of "
            f"{plan.block * plan.pixel_width} pixels"
        )

    def cut(self, target: Target) -> Blocking:
        """How the problem is cut."""
        return blocking(self.geometry, self.dtype, self.sum_dtype, target)

    def emit_functions(self) -> None:
        emit_tile(self.k, self.plan.tile)
        self.emit_finish()

    def body(self, call: Call, operands: Operands, packed: Packed) -> None:
        k, plan = self.k, self.plan
        self.alpha, self.beta, self.bias = call.alpha, call.beta, operands.bias
        image, out = operands.image, operands.out
        if plan.in_place:
            whole = (0, plan.pairs, 0, plan.filter_panels)
            self._multiply(call.threads, image, out, operands.filter, *whole)
            return
        with k.loop(0, self.parts[0]) as i, k.loop(0, self.parts[1]) as j:
            pair0, panel0 = i * plan.pairs_per_part, j * plan.panels_per_part
            pairs = k.min(plan.pairs - pair0, plan.pairs_per_part)
            panels = k.min(plan.filter_panels - panel0, plan.panels_per_part)
            at = packed.part(i * self.parts[1] + j, self.part_bytes)
            part = (pair0, pairs, panel0, panels)
            if packed.packs:
                self._pack_filter(call.threads, operands.filter, at, *part)
            if packed.multiplies:
                self._multiply(call.threads, image, out, at, *part)

    # Shared index arithmetic -----------------------------------------------------------------

    def _pair(self, number: IntLike) -> tuple[PhaseAt, IntLike]:
        """The phase and group of a pair's number."""
        groups = self.geometry.groups
        return self.taps.phase(number // groups), number % groups

    def _chunk(self, phase: PhaseAt, number_of_taps: IntLike, number: IntLike) -> Chunk:
        """The chunk of that number; taps outermost."""
        k, plan = self.k, self.plan
        t0 = (number // plan.channel_chunks) * plan.tap_chunk
        i0 = (number % plan.channel_chunks) * plan.channel_chunk
        t1 = k.max(k.min(t0 + plan.tap_chunk, number_of_taps), t0)
        return Chunk(t0, t1, i0, k.min(i0 + plan.channel_chunk, self.geometry.inner.size))

    def _packed_panel(
        self, packed: IntLike, pair: IntLike, panel: IntLike, chunk: IntLike
    ) -> IntLike:
        plan = self.plan
        number = (pair * plan.chunks + chunk) * plan.panels_per_part + panel
        return packed + number * plan.filter_panel_bytes

    # Filter ----------------------------------------------------------------------------------

    def _pack_filter(
        self,
        threads: Int,
        filter_: IntLike,
        packed: IntLike,
        pair0: IntLike,
        pairs: IntLike,
        panel0: IntLike,
        panels: IntLike,
    ) -> None:
        """A parallel phase: one task a panel of outer channels."""
        k, plan, g = self.k, self.plan, self.geometry
        with (
            k.parallel(pairs * panels, threads, self.filter_scratch) as job,
            job.each_task() as task,
        ):
            pair, panel = task // panels, task % panels
            phase, group = self._pair(pair0 + pair)
            source = filter_ + group * g.group_filter
            first = (panel0 + panel) * plan.filter_width
            to = functools.partial(self._packed_panel, packed, pair, panel)
            self.pack_filter_panel(source, phase, first, to, job.scratch)

    def pack_filter_panel(
        self,
        source: IntLike,
        phase: PhaseAt,
        first: IntLike,
        to: Callable[[IntLike], IntLike],
        scratch: IntLike,
    ) -> None:
        """The outer channels from `first` on, of a group's filter: chunk n goes to to(n)."""
        k, plan, g = self.k, self.plan, self.geometry
        if turns(g, plan, self.item):
            turn_rows(k, g, plan, self.dtype, source, first, to)
            return
        pack = self._filter_rows if plan.lanes_are_pixels else self._filter_columns
        with k.loop(0, plan.chunks) as number:
            chunk = self._chunk(phase, phase.count, number)
            pack(source, to(number), chunk, phase.first, first)

    def _filter_rows(
        self, source: IntLike, target: IntLike, chunk: Chunk, first_tap: IntLike, first: IntLike
    ) -> None:
        """Rows are outer channels, vectors run along the inner channels of a tap."""
        k, tile, g = self.k, self.plan.tile, self.geometry
        count = k.min(g.outer.size - first, tile.rows)
        with k.loop(0, count) as m:
            row = source + (first + m) * g.outer.filter + chunk.i0 * g.inner.filter
            with k.loop(chunk.t0, chunk.t1) as t:
                tap = self.taps.tap(first_tap + t)
                depth = (t - chunk.t0) * chunk.channels
                with k.loop(0, chunk.channels, tile.lanes) as c:
                    mask = k.first_lanes(chunk.channels - c, tile.lanes)
                    at = row + tap.filter + c * g.inner.filter
                    value = load_strided(k, at, g.inner.filter, tile.lanes, self.source_dtype, mask)
                    to = target + m * tile.row_bytes + (depth + c) * tile.item
                    k.store(value, to, self.plan.tile.dtype, mask=mask)
        with k.loop(count, tile.rows) as m:
            fill_zero(k, target + m * tile.row_bytes, chunk.depth, self.plan.tile.dtype, tile.lanes)

    def _filter_columns(
        self, source: IntLike, target: IntLike, chunk: Chunk, first_tap: IntLike, first: IntLike
    ) -> None:
        """Vectors run along outer channels, steps are (tap, inner channel)."""
        k, tile, g = self.k, self.plan.tile, self.geometry
        with k.loop(chunk.t0, chunk.t1) as t:
            tap = self.taps.tap(first_tap + t)
            depth = (t - chunk.t0) * chunk.channels
            with k.loop(0, chunk.channels) as c:
                at = source + tap.filter + (chunk.i0 + c) * g.inner.filter
                for j in range(tile.vectors):
                    outer = first + j * tile.lanes
                    mask = k.first_lanes(g.outer.size - outer, tile.lanes)
                    value = load_strided(
                        k,
                        at + outer * g.outer.filter,
                        g.outer.filter,
                        tile.lanes,
                        self.source_dtype,
                        mask,
                    )
                    to = target + (depth + c) * tile.step_bytes
                    k.store(value, to, self.plan.tile.dtype, offset=j * tile.lanes * tile.item)

    # Products --------------------------------------------------------------------------------

    def each_task(self, job: Job) -> contextlib.AbstractContextManager[Int]:
        """The tasks of a job that multiplies."""
        return job.each_task()

    def _multiply(
        self,
        threads: Int,
        image: IntLike,
        out: IntLike,
        packed: IntLike,
        pair0: IntLike,
        pairs: IntLike,
        panel0: IntLike,
        panels: IntLike,
    ) -> None:
        """A parallel phase: one task a block of pixels against a run of filter panels; `packed`
        is the filter itself where that is read in place."""
        k, plan, g, tile = self.k, self.plan, self.geometry, self.plan.tile
        blocks = -(-plan.pixel_panels // plan.block)
        splits = (panels + (plan.split - 1)) // plan.split
        patches = plan.block * plan.pixel_panel_bytes
        sums = tile.c_bytes * (plan.block * plan.split if plan.chunks > 1 else 1)
        with (
            k.parallel(
                pairs * blocks * splits, threads, patches + sums + self.panel_scratch
            ) as job,
            self.each_task(job) as task,
        ):
            raw = job.scratch + patches + sums
            split, rest = task % splits, task // splits
            block, pair = rest % blocks, rest // blocks
            phase, group = self._pair(pair0 + pair)
            source = image + group * g.group_image
            result = out + group * g.group_out + phase.out
            first = block * plan.block
            count = k.min(plan.pixel_panels - first, plan.block)
            begin = split * plan.split
            end = k.min(begin + plan.split, panels)
            with k.loop(0, plan.chunks) as number:
                chunk = self._chunk(phase, phase.count, number)
                with k.loop(0, count) as p:
                    target = job.scratch + p * plan.pixel_panel_bytes
                    self.pack_panel(first + p, chunk, phase.first, source, target, raw)
                with k.loop(0, count) as p, k.loop(begin, end) as f:
                    sum_at = job.scratch + patches
                    if plan.chunks > 1:
                        sum_at = sum_at + (p * plan.split + (f - begin)) * tile.c_bytes
                    pixel_panel = job.scratch + p * plan.pixel_panel_bytes
                    outer, spare = (panel0 + f) * plan.filter_width, 0
                    if plan.in_place:
                        # The last panel starts early enough to be whole.
                        row = k.min(outer, g.outer.size - tile.rows)
                        spare = outer - row
                        filter_panel = packed + group * g.group_filter + self._row(row, chunk)
                    else:
                        filter_panel = self._packed_panel(packed, pair, f, number)
                    operands = (filter_panel, pixel_panel)
                    a, b = operands if plan.lanes_are_pixels else operands[::-1]
                    if plan.lanes_are_pixels and g.axes and g.axes[-1].out == self.item:
                        with k.if_(self._is_last(number)):
                            self._fetch_out(result, (first + p) * plan.pixel_width, outer)
                    k.call(TILE, a, b, sum_at, chunk.depth, number)
                    with k.if_(self._is_last(number)):
                        pixel = (first + p) * plan.pixel_width
                        bias = self.bias
                        if self.problem.epilogue.bias:
                            bias = bias + group * (g.outer.size * self.item)
                        k.call(
                            FINISH, sum_at + spare * tile.step_bytes, result, bias, pixel, outer,
                            *phase.start, self.alpha, self.beta,
                        )  # fmt: skip

    def _fetch_out(self, out: IntLike, pixel: IntLike, outer: IntLike) -> None:
        """Ask for the lines that a tile's results go to while it is computed: they lie in as many
        places as there are channels, too many for the hardware to foresee."""
        k, g, tile = self.k, self.geometry, self.plan.tile
        offset, _ = place(k, pixel, self._out_spans())
        with k.loop(0, tile.rows) as m:
            row = out + offset + (outer + m) * g.outer.tensor
            for line in range(0, tile.columns * self.item, CACHE_LINE):
                k.prefetch(row, line)

    def _row(self, row: IntLike, chunk: Chunk) -> IntLike:
        """From the start of a filter in place to a row's elements of a chunk."""
        g = self.geometry
        first_tap = chunk.t0 * (g.inner.size * self.item)
        return row * g.outer.filter + chunk.i0 * g.inner.filter + first_tap

    def _is_last(self, chunk: IntLike) -> MaskLike:
        last = self.plan.chunks - 1
        return chunk == last if isinstance(chunk, int) else chunk.eq(last)

    def pack_panel(
        self, panel: IntLike, chunk: Chunk, first_tap: IntLike, source: IntLike, target: IntLike,
        scratch: IntLike,
    ) -> None:  # fmt: skip
        """The patches of one panel of pixels."""
        k, plan, g, tile = self.k, self.plan, self.geometry, self.plan.tile
        types = (self.source_dtype, self.plan.tile.dtype)
        pixel0 = panel * plan.pixel_width
        ragged = g.pixels % plan.pixel_width != 0
        if plan.lanes_are_pixels:
            vectors = [
                pixel_lanes(k, g, pixel0 + j * tile.lanes, tile.lanes, ragged, self.item)
                for j in range(tile.vectors)
            ]
            pack_pixel_lanes(
                k, self.taps, vectors, chunk, first_tap, source, target, tile.step_bytes, *types,
                channel_major=plan.channel_major, taps_inside=True,
            )  # fmt: skip
            return
        count = k.min(g.pixels - pixel0, tile.rows)
        with k.loop(0, count) as m:
            row = target + m * tile.row_bytes
            pack_channel_lanes(
                k, self.taps, pixel0 + m, chunk, first_tap, source,
                lambda depth: row + depth * tile.item, tile.lanes, *types,
            )  # fmt: skip
        with k.loop(count, tile.rows) as m:
            fill_zero(k, target + m * tile.row_bytes, chunk.depth, self.plan.tile.dtype, tile.lanes)

    # Results ---------------------------------------------------------------------------------

    def emit_finish(self) -> None:
        """FINISH(sums, out, bias, pixel, outer, phase starts..., alpha, beta): store one tile.

        out = act(alpha * sum + beta * out + bias), for the pixels and channels that exist.
        """
        k, g = self.k, self.geometry
        types = [I64] * (5 + len(g.limited)) + [F64, F64]
        with k.function(FINISH, *types) as (sums, out, bias, pixel, outer, *start, alpha, beta):
            self.start, self.scale = start, (alpha, beta)
            if self.plan.lanes_are_pixels:
                self._finish_pixel_lanes(sums, out, bias, pixel, outer)
            else:
                self._finish_channel_lanes(sums, out, bias, pixel, outer)

    def _out_spans(self) -> list[Span]:
        return joined([Span(a.size, a.out, bool(a.out_limit)) for a in self.geometry.axes])

    def _exists(self, spans: Sequence[Span], coordinates: Sequence[Any]) -> Any:
        """Whether pixels of a phase exist, along the axes where they may not."""
        exists: Any = None
        axes = [self.geometry.axes[a] for a in self.geometry.limited]
        wanted = [c for s, c in zip(spans, coordinates) if s.wanted]
        for axis, start, at in zip(axes, self.start, wanted):
            position = at * axis.out_step
            if isinstance(position, Int):
                start = self.k.resize(start, position.element)
            inside = (start + position) < axis.out_limit
            exists = inside if exists is None else exists & inside
        return exists

    def _finish_pixel_lanes(self, sums: Int, out: Int, bias: Int, pixel: Int, outer: Int) -> None:
        k, g, tile = self.k, self.geometry, self.plan.tile.sums
        ragged = g.pixels % tile.columns != 0
        count, spans = k.min(g.outer.size - outer, tile.rows), self._out_spans()
        for j in range(tile.vectors):
            first = pixel + j * tile.lanes
            lanes = Lanes(k, first, tile.lanes, spans, g.pixels, ragged, self.item)
            exists = self._exists(lanes.spans, lanes.coordinates)

            def rows(load: Any, store: Any, column: int = j * tile.lanes * tile.item) -> None:
                with k.loop(0, count) as m:
                    value = k.load(
                        sums + m * tile.step_bytes, self.sum_dtype, tile.lanes, offset=column
                    )
                    at = out + (outer + m) * g.outer.tensor
                    added = None
                    if self.problem.epilogue.bias:
                        added = k.load(bias + (outer + m) * self.item, self.dtype)
                    store(self._epilogue(value, lambda: load(at), added), at)

            def masked(exists: Any = exists, lanes: Lanes = lanes) -> None:
                rows(
                    lambda at: lanes.load(at, self.dtype, exists),
                    lambda value, at: lanes.store(value, at, self.dtype, exists),
                )

            if lanes.whole is False or exists is not None:
                masked()
                continue
            with k.if_else(lanes.whole) as (plain, other):
                with plain:
                    rows(
                        lambda at, lanes=lanes: lanes.load_whole(at, self.dtype),
                        lambda value, at, lanes=lanes: lanes.store_whole(value, at, self.dtype),
                    )
                with other:
                    masked()

    def _finish_channel_lanes(self, sums: Int, out: Int, bias: Int, pixel: Int, outer: Int) -> None:
        k, g, tile = self.k, self.geometry, self.plan.tile.sums
        spans = self._out_spans()
        count = k.min(g.pixels - pixel, tile.rows)
        with k.loop(0, count) as m:
            offset, coordinates = place(k, pixel + m, spans)
            exists = self._exists(spans, coordinates)
            with k.if_(True if exists is None else exists):
                for j in range(tile.vectors):
                    self._finish_vector(sums + m * tile.step_bytes, j, out + offset, bias, outer)

    def _finish_vector(self, sums: IntLike, j: int, out: IntLike, bias: Int, outer: Int) -> None:
        """One pixel's vector of outer channels."""
        k, tile, stride = self.k, self.plan.tile.sums, self.geometry.outer.tensor
        first, size = outer + j * tile.lanes, self.geometry.outer.size
        mask = None if size % tile.columns == 0 else k.first_lanes(size - first, tile.lanes)
        at = out + first * stride
        value = k.load(sums, self.sum_dtype, tile.lanes, offset=j * tile.lanes * tile.item)
        added = None
        if self.problem.epilogue.bias:
            added = k.load(bias + first * self.item, self.dtype, tile.lanes, mask=mask)

        def old() -> Float:
            return load_strided(k, at, stride, tile.lanes, self.dtype, mask)

        value = self._epilogue(value, old, added)
        store_strided(k, value, at, stride, self.dtype, mask)

    def _epilogue(self, value: Float, old: Any, bias: Float | None) -> Float:
        """act(alpha * value + beta * old() + bias) + shift; `old` is not called for beta == 0."""
        k, (alpha, beta) = self.k, self.scale
        result = k.variable(value * k.cast(alpha, value))
        with k.if_(beta.ne(0.0)):
            result.set(k.fma(old(), k.cast(beta, value), result.value))
        value = result.value if bias is None else result.value + bias
        return emit_epilogue(k, self.problem.epilogue, value)
