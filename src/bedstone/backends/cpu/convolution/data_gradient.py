"""Backward_data of cpu:implicit_gemm by scattering: each product is computed once.

    dx[n, c, pixel * stride + tap] += sum_k w[k, c, tap] * dy[n, k, pixel]

image_product.py computes dx as a convolution of dy, which meets padding wherever dy is smaller
than dx: most of its products are zeros when a large window shrinks the image, and with a stride or
few channels of dx each packed patch serves few results. Here a tile of the matrix product (taps
and channels by pixels of dy) is added straight to where it belongs, in a piece of dx that the task
owns in its scratch. No product is wasted, and sums are in an order that never changes.

With "pixel" lanes the columns of dx are kept apart by their residue modulo the stride, so that
neighbours of dy stay neighbours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from bedstone.backends.cpu.builder import Call, KernelBuilder, itemsize
from bedstone.backends.cpu.convolution.image_product import (
    DEPTH,
    FEW_CHANNELS,
    FILTER_BYTES_MAX,
    FILTER_FLOPS,
    TASKS_WANTED,
    TILE_CYCLES,
    even_pieces,
)
from bedstone.backends.cpu.convolution.packed_filter import FilterKernel, Operands, Packed
from bedstone.backends.cpu.microkernels import (
    TILE,
    Tile,
    choose_shape,
    computed_size,
    emit_tile,
)
from bedstone.backends.cpu.packing import (
    Lanes,
    Span,
    copy_vectors,
    fill_zero,
    joined,
    load_strided,
    place,
    store_strided,
)
from bedstone.backends.cpu.target import KIB, MIB, Target
from bedstone.backends.cpu.values import Float, Int, IntLike
from bedstone.spec.convolution import ConvolutionProblem

PIECE_SHARE = 0.65  # of the second-level cache for the piece of dx that a task adds to
PIECE_BYTES_MAX = 1 * MIB
SCRATCH_BYTES_MAX = 1536 * KIB
CHANNELS_MOST = 64  # of a piece: more do not make packing dy any cheaper
IMAGES_MOST = 8  # of a task
SHARING_GAIN = 0.98  # less is not worth the longer task
PACK_FLOPS, SCATTER_FLOPS = 20.0, 20.0  # of the peak rate, per element


@dataclass(frozen=True)
class Line:
    """One spatial axis.

    size, pixels      of dx and of dy
    stride, places    distance between pixels; where each tap falls from a pixel's start, moved
                      by `before` so that nothing is negative
    extent            length of a piece along the axis: dx and all that the taps reach
    """

    size: int
    pixels: int
    stride: int
    places: tuple[int, ...]
    before: int
    extent: int


def line(problem: ConvolutionProblem, a: int) -> Line:
    """Axis number a of the problem."""
    conv = problem.conv
    size, window, pixels = (desc.dims[2 + a] for desc in (problem.x, problem.w, problem.y))
    stride, dilation, pad = conv.stride[a], conv.dilation[a], conv.padding[a][0]
    order = range(window) if conv.mode == "cross_correlation" else range(window - 1, -1, -1)
    places = [t * dilation - pad for t in order]
    before = max(0, -min(places))
    reach = (pixels - 1) * stride + max(places) + 1
    return Line(
        size, pixels, stride, tuple(p + before for p in places), before, before + max(size, reach)
    )


@dataclass(frozen=True)
class Blocking:
    """How a problem is cut: a task has `images` images and `channels` channels of dx.

    rows (tap, channel) x columns (pixel) with pixel lanes; the other way round with channel lanes.
    `width` is the channels of a piece as stored: a multiple of the lanes with channel lanes.
    """

    tile: Tile
    lanes_are_pixels: bool
    images: int
    channels: int
    width: int
    filter_panels: int
    channel_blocks: int
    image_blocks: int
    blocks_per_part: int
    piece_bytes: int

    @property
    def filter_panel_bytes(self) -> int:
        return self.tile.a_bytes if self.lanes_are_pixels else self.tile.b_bytes

    @property
    def dy_panel_bytes(self) -> int:
        return self.tile.b_bytes if self.lanes_are_pixels else self.tile.a_bytes

    @property
    def dy_panel_width(self) -> int:
        return self.tile.columns if self.lanes_are_pixels else self.tile.rows

    @property
    def scratch_bytes(self) -> int:
        offsets = self.tile.rows * 8
        return self.piece_bytes + self.dy_panel_bytes + self.tile.c_bytes + offsets


def blocking(problem: ConvolutionProblem, target: Target) -> Blocking:
    """Cut the problem for the target's registers and caches."""
    sum_dtype = str(problem.x.dtype.accumulator)
    item, lanes = itemsize(sum_dtype), target.vector_bytes // itemsize(sum_dtype)
    lines = [line(problem, a) for a in range(problem.conv.axes)]
    depth, channels = problem.w.dims[0] // problem.conv.groups, problem.w.dims[1]
    taps, pixels = math.prod(problem.w.dims[2:]), math.prod(ln.pixels for ln in lines)
    # Channel lanes need neighbours in both tensors: dy's are copied, dx's written.
    lanes_are_pixels = (
        problem.y.strides[1] != 1 or problem.x.strides[1] != 1 or channels < FEW_CHANNELS
    )
    positions = math.prod(ln.extent for ln in lines)
    if lanes_are_pixels:  # columns apart by residue
        last = lines[-1]
        positions = positions // last.extent * -(-last.extent // last.stride) * last.stride
    grain = 1 if lanes_are_pixels else lanes
    room = min(int(target.l2_bytes * PIECE_SHARE), PIECE_BYTES_MAX)
    most = max(1, min(CHANNELS_MOST, room // (positions * item)) // grain) * grain
    batch, groups = problem.x.dims[0], problem.conv.groups
    wanted = max(1, TASKS_WANTED // (batch * groups))
    block, channel_blocks = even_pieces(channels, min(most, max(grain, -(-channels // wanted))))
    width = -(-block // grain) * grain
    # Several small images share a task where that fills the tiles better.
    images, rows, vectors = 1, 0, 0
    least = math.inf
    for several in range(1, IMAGES_MOST + 1):
        tasks = -(-batch // several) * channel_blocks * groups
        if several > 1 and (several * width * positions * item > room or tasks < TASKS_WANTED):
            break
        sizes = (taps * width, several * pixels)
        sizes = sizes if lanes_are_pixels else sizes[::-1]
        shape = choose_shape(target, sum_dtype, *sizes)
        padded = computed_size(shape, lanes, *sizes) * -(-batch // several)
        if padded < least * SHARING_GAIN:
            least, images, (rows, vectors) = padded, several, shape
    tile = Tile(rows, vectors, lanes, depth, sum_dtype)
    along = rows if lanes_are_pixels else tile.columns
    filter_panels = -(-taps * width // along)
    panel_bytes = tile.a_bytes if lanes_are_pixels else tile.b_bytes
    per_part = max(1, min(channel_blocks, FILTER_BYTES_MAX // (filter_panels * panel_bytes)))
    return Blocking(
        tile, lanes_are_pixels, images, block, width, filter_panels, channel_blocks,
        -(-batch // images), per_part, images * width * positions * item,
    )  # fmt: skip


def fits(problem: ConvolutionProblem, target: Target) -> bool:
    """Whether there is something to add up, and a piece of dx fits into scratch memory."""
    return problem.flops > 0 and blocking(problem, target).scratch_bytes <= SCRATCH_BYTES_MAX


def work(problem: ConvolutionProblem, target: Target) -> float:
    """Flops of the peak rate that the kernel spends: products, packing, scattering."""
    plan = blocking(problem, target)
    pixels = plan.images * math.prod(problem.y.dims[2:])
    computed = -(-pixels // plan.dy_panel_width) * plan.dy_panel_width
    depth = problem.w.dims[0] // problem.conv.groups
    rows = plan.filter_panels * plan.tile.rows
    if not plan.lanes_are_pixels:
        rows = plan.filter_panels * plan.tile.columns
    tasks = plan.image_blocks * plan.channel_blocks * problem.conv.groups
    dy = PACK_FLOPS * (1 if min(problem.y.strides[1], problem.y.strides[-1]) == 1 else 5)
    each = computed * (rows * (2.0 * depth + SCATTER_FLOPS) + depth * dy)
    tiles = computed // plan.dy_panel_width * plan.filter_panels * -(-depth // DEPTH)
    each += tiles * TILE_CYCLES * 4 * plan.tile.lanes  # two multiply-adds a cycle
    return tasks * each + problem.w.size * FILTER_FLOPS[False]


class DataGradient(FilterKernel):
    """Emits the kernel."""

    def __init__(self, problem: ConvolutionProblem, target: Target) -> None:
        self.problem = problem
        self.k = KernelBuilder(target)
        self.dtype, self.sum_dtype = str(problem.x.dtype), str(problem.x.dtype.accumulator)
        self.item = itemsize(self.dtype)
        self.plan = blocking(problem, target)
        self.lines = [line(problem, a) for a in range(problem.conv.axes)]
        self.x, self.w, self.y = (
            [s * self.item for s in desc.strides] for desc in (problem.x, problem.w, problem.y)
        )
        self.depth = problem.w.dims[0] // problem.conv.groups
        self.channels = problem.w.dims[1]
        self._lay_out_piece()
        windows = [range(len(ln.places)) for ln in self.lines]
        self.taps = list(itertools.product(*windows))
        words = [n for tap in self.taps for n in (self._filter_offset(tap), self._tap_offset(tap))]
        self.tap_words = words
        plan, self.blocks = self.plan, problem.conv.groups * self.plan.channel_blocks
        self.block_bytes = plan.filter_panels * plan.filter_panel_bytes
        self.part_bytes = plan.blocks_per_part * self.block_bytes
        self.packed_bytes = -(-self.blocks // plan.blocks_per_part) * self.part_bytes

    @staticmethod
    def describe(problem: ConvolutionProblem, target: Target) -> str:
        """One line for explain()."""
        plan = blocking(problem, target)
        along = "pixels" if plan.lanes_are_pixels else "channels"
        return (
            f"scatters products; tile {plan.tile.rows} x {plan.tile.columns}, vectors along "
            f"{along}; tasks of {plan.images} images by {plan.channels} channels"
        )

    # The piece of dx in scratch ----------------------------------------------------------------

    def _lay_out_piece(self) -> None:
        """Byte strides of a piece: images, channels, then positions (pixel lanes), or images,
        positions, then channels (channel lanes)."""
        plan, item = self.plan, self.plan.tile.item
        last = self.lines[-1]
        if plan.lanes_are_pixels:
            self.residue_bytes = -(-last.extent // last.stride) * item
            self.strides = [item]
            step = self.residue_bytes * last.stride
        else:
            self.residue_bytes = 0
            step = plan.width * item
            self.strides = [step]
            step *= last.extent
        for ln in reversed(self.lines[:-1]):
            self.strides.insert(0, step)
            step *= ln.extent
        self.channel_bytes = step if plan.lanes_are_pixels else item
        self.image_bytes = step * plan.width if plan.lanes_are_pixels else step

    def _column(self, position: int) -> int:
        """Bytes to a column of a row of the piece."""
        last = self.lines[-1]
        if not self.plan.lanes_are_pixels:
            return position * self.strides[-1]
        residue, quotient = position % last.stride, position // last.stride
        return residue * self.residue_bytes + quotient * self.strides[-1]

    def _tap_offset(self, tap: tuple[int, ...]) -> int:
        """Bytes from a pixel's origin in the piece to where the tap falls."""
        places = [ln.places[t] for ln, t in zip(self.lines, tap)]
        rows = sum(p * stride for p, stride in zip(places[:-1], self.strides))
        return rows + self._column(places[-1])

    def _filter_offset(self, tap: tuple[int, ...]) -> int:
        return sum(t * stride for t, stride in zip(tap, self.w[2:]))

    def _pixel_spans(self) -> list[Span]:
        """The pixel index of a task as places in the piece."""
        spans = [Span(self.plan.images, self.image_bytes)]
        for ln, stride in zip(self.lines[:-1], self.strides):
            spans.append(Span(ln.pixels, ln.stride * stride))
        last = self.lines[-1]
        step = self.strides[-1] * (1 if self.plan.lanes_are_pixels else last.stride)
        return joined([*spans, Span(last.pixels, step)])

    def _dy_spans(self) -> list[Span]:
        """The pixel index of a task as places in dy."""
        spans = [Span(self.plan.images, self.y[0])]
        spans += [Span(ln.pixels, stride) for ln, stride in zip(self.lines, self.y[2:])]
        return joined(spans)

    def _tap(self, number: IntLike) -> tuple[IntLike, IntLike]:
        """(bytes in the filter, bytes in the piece) of a tap."""
        if len(self.taps) == 1:
            return self.tap_words[0], self.tap_words[1]
        at = self.k.table(self.tap_words) + number * 16
        return self.k.load(at, "int64"), self.k.load(at, "int64", offset=8)

    # Kernel ------------------------------------------------------------------------------------

    def emit_functions(self) -> None:
        emit_tile(self.k, self.plan.tile)

    def body(self, call: Call, operands: Operands, packed: Packed) -> None:
        k, plan = self.k, self.plan
        self.alpha, self.beta = call.alpha, call.beta
        with k.loop(0, -(-self.blocks // plan.blocks_per_part)) as part:
            first, at = part * plan.blocks_per_part, packed.part(part, self.part_bytes)
            count = k.min(self.blocks - first, plan.blocks_per_part)
            if packed.packs:
                with (
                    k.parallel(count * plan.filter_panels, call.threads) as job,
                    job.each_task() as task,
                ):
                    block, panel = task // plan.filter_panels, task % plan.filter_panels
                    to = at + task * plan.filter_panel_bytes
                    self._pack_filter(operands.filter, first + block, panel, to)
            if packed.multiplies:
                tasks = count * plan.image_blocks
                with (
                    k.parallel(tasks, call.threads, plan.scratch_bytes) as job,
                    job.each_task() as task,
                ):
                    block, image = task // plan.image_blocks, task % plan.image_blocks
                    self._task(
                        at + block * self.block_bytes, operands, first + block,
                        image * plan.images, job.scratch,
                    )  # fmt: skip

    def _group_and_channel(self, block: IntLike) -> tuple[IntLike, IntLike]:
        """(group, first channel in it) of a block of channels."""
        blocks = self.plan.channel_blocks
        return block // blocks, block % blocks * self.plan.channels

    def _pack_filter(self, w: IntLike, block: IntLike, panel: IntLike, to: IntLike) -> None:
        """Rows (tap, channel) with vectors along k; or steps k with vectors along channels."""
        k, plan, tile = self.k, self.plan, self.plan.tile
        group, channel = self._group_and_channel(block)
        left = k.min(self.channels - channel, plan.channels)
        source = w + group * (self.depth * self.w[0]) + channel * self.w[1]
        if plan.lanes_are_pixels:
            with k.loop(0, tile.rows) as m:
                number = panel * tile.rows + m
                tap, c = number // plan.width, number % plan.width
                row = to + m * tile.row_bytes
                with k.if_else((k.as_int(c) < left) & (tap < len(self.taps))) as (real, none):
                    with real:
                        at = source + self._tap(tap)[0] + c * self.w[1]
                        with k.loop(0, self.depth, tile.lanes) as i:
                            mask = k.first_lanes(self.depth - i, tile.lanes)
                            value = load_strided(
                                k, at + i * self.w[0], self.w[0], tile.lanes, self.dtype, mask
                            )
                            k.store(value, row + i * tile.item, self.sum_dtype, mask=mask)
                    with none:
                        fill_zero(k, row, self.depth, self.sum_dtype, tile.lanes)
            return
        per_tap = plan.width // tile.lanes
        for j in range(tile.vectors):
            number = panel * tile.vectors + j
            tap, c = number // per_tap, number % per_tap * tile.lanes
            real_lanes = k.select(k.as_int(tap) < len(self.taps), left - c, 0)
            mask = k.iota(tile.lanes) < k.splat(k.as_int(real_lanes), tile.lanes)
            at = source + self._tap(k.min(tap, len(self.taps) - 1))[0] + c * self.w[1]
            column = to + j * (tile.lanes * tile.item)
            with k.loop(0, self.depth) as i:
                value = load_strided(k, at + i * self.w[0], self.w[1], tile.lanes, self.dtype, mask)
                k.store(value, column + i * tile.step_bytes, self.sum_dtype)

    def _task(
        self, packed: IntLike, operands: Operands, block: IntLike, image: IntLike, scratch: Int
    ) -> None:
        """A block of channels of some images: clear the piece, add all products, store it."""
        k, plan, tile = self.k, self.plan, self.plan.tile
        group, channel = self._group_and_channel(block)
        images = k.min(self.problem.x.dims[0] - image, plan.images)
        pixels = images * math.prod(ln.pixels for ln in self.lines)
        piece, panel = scratch, scratch + plan.piece_bytes
        sums = panel + plan.dy_panel_bytes
        source = operands.image + image * self.y[0] + group * (self.depth * self.y[1])
        fill_zero(k, piece, plan.piece_bytes // tile.item, self.sum_dtype, tile.lanes)
        scatter = self._pixel_lanes if plan.lanes_are_pixels else self._channel_lanes
        with k.loop(0, pixels, plan.dy_panel_width) as first:
            scatter(packed, source, first, pixels, piece, panel, sums)
        target = operands.out + image * self.x[0] + (group * self.channels + channel) * self.x[1]
        left = k.min(self.channels - channel, plan.channels)
        self._store_piece(piece, target, images, left)

    def _product(self, a: IntLike, b: IntLike, sums: IntLike) -> None:
        """One tile over the whole depth, in chunks."""
        k, tile = self.k, self.plan.tile
        with k.loop(0, self.depth, DEPTH, at_least_once=True) as i:
            depth = k.min(self.depth - i, DEPTH)
            k.call(TILE, a + i * tile.item, b + i * tile.step_bytes, sums, depth, i)

    def _pixel_lanes(
        self, packed: IntLike, dy: IntLike, first: IntLike, pixels: IntLike, piece: Int,
        panel: IntLike, sums: IntLike,
    ) -> None:  # fmt: skip
        """One panel of pixels of dy against all rows (tap, channel)."""
        k, plan, tile = self.k, self.plan, self.plan.tile
        starts = [first + j * tile.lanes for j in range(tile.vectors)]
        spans = self._dy_spans()
        sources = [Lanes(k, s, tile.lanes, spans, pixels, True, self.item) for s in starts]

        def walk(copy: Callable[[IntLike, IntLike], None]) -> None:
            with k.loop(0, self.depth) as i:
                copy(dy + i * self.y[1], panel + i * tile.step_bytes)

        copy_vectors(k, sources, [None] * tile.vectors, walk, self.dtype, self.sum_dtype)
        spans = self._pixel_spans()
        targets = [Lanes(k, s, tile.lanes, spans, pixels, True, tile.item) for s in starts]
        rows = len(self.taps) * plan.width
        with k.loop(0, plan.filter_panels) as f:
            self._product(packed + f * tile.a_bytes, panel, sums)
            count = k.min(rows - f * tile.rows, tile.rows)
            for j, lanes in enumerate(targets):
                self._add_rows(f, count, j, lanes, sums, piece)

    def _add_rows(
        self, f: IntLike, count: IntLike, j: int, lanes: Lanes, sums: IntLike, piece: Int
    ) -> None:
        """A tile's column of vectors. Its rows lie far apart in the piece: a row that read what
        its neighbour has just written in part would wait for it."""
        k, plan, tile = self.k, self.plan, self.plan.tile

        def rows(add: Callable[[Float, IntLike, str], None]) -> None:
            with k.loop(0, count) as m:
                number = f * tile.rows + m
                tap, c = number // plan.width, number % plan.width
                to = piece + self._tap(tap)[1] + c * self.channel_bytes
                at = sums + m * tile.step_bytes + j * tile.lanes * tile.item
                add(k.load(at, self.sum_dtype, tile.lanes), to, self.sum_dtype)

        if lanes.whole is False:
            rows(lanes.add)
            return
        with k.if_else(lanes.whole) as (whole, ragged):
            with whole:
                rows(lanes.add_whole)
            with ragged:
                rows(lanes.add)

    def _channel_lanes(
        self, packed: IntLike, dy: IntLike, first: IntLike, pixels: IntLike, piece: Int,
        panel: IntLike, sums: IntLike,
    ) -> None:  # fmt: skip
        """One panel of pixels of dy, as rows, against all columns (tap, channel)."""
        k, plan, tile = self.k, self.plan, self.plan.tile
        offsets = sums + tile.c_bytes
        count = k.min(pixels - first, tile.rows)
        with k.loop(0, count) as m:
            source, _ = place(k, first + m, self._dy_spans())
            with k.loop(0, self.depth, tile.lanes) as i:
                mask = k.first_lanes(self.depth - i, tile.lanes)
                value = k.load(dy + source + i * self.item, self.dtype, tile.lanes, mask=mask)
                k.store(
                    value, panel + m * tile.row_bytes + i * tile.item, self.sum_dtype, mask=mask
                )
            target, _ = place(k, first + m, self._pixel_spans())
            k.store(k.as_int(target), offsets + m * 8, "int64")
        with k.loop(count, tile.rows) as m:
            fill_zero(k, panel + m * tile.row_bytes, self.depth, self.sum_dtype, tile.lanes)
        per_tap = plan.width // tile.lanes
        vectors = len(self.taps) * per_tap
        with k.loop(0, plan.filter_panels) as f:
            self._product(panel, packed + f * tile.b_bytes, sums)
            for j in range(tile.vectors):
                number = f * tile.vectors + j
                with k.if_(k.as_int(number) < vectors):
                    tap, c = number // per_tap, number % per_tap
                    column = piece + self._tap(tap)[1] + c * (tile.lanes * tile.item)
                    with k.loop(0, count) as m:
                        to = column + k.load(offsets + m * 8, "int64")
                        value = k.load(
                            sums + m * tile.step_bytes, self.sum_dtype, tile.lanes,
                            offset=j * tile.lanes * tile.item,
                        )  # fmt: skip
                        old = k.load(to, self.sum_dtype, tile.lanes)
                        k.store(old + value, to, self.sum_dtype)

    # Results -----------------------------------------------------------------------------------

    def _store_piece(self, piece: IntLike, dx: IntLike, images: IntLike, channels: IntLike) -> None:
        """dx = alpha * piece + beta * dx, without what fell outside the image."""
        k, plan, tile = self.k, self.plan, self.plan.tile
        rows = self.lines[:-1]
        last = self.lines[-1]
        spans = [Span(ln.size, s) for ln, s in zip(rows, self.strides)]
        dx_spans = [Span(ln.size, s) for ln, s in zip(rows, self.x[2:])]
        corner = sum(ln.before * s for ln, s in zip(rows, self.strides))
        count = math.prod(ln.size for ln in rows)
        with k.loop(0, images) as n, k.loop(0, count) as r:
            source = piece + n * self.image_bytes + corner
            target = dx + n * self.x[0]
            if rows:
                source = source + place(k, r, spans)[0]
                target = target + place(k, r, dx_spans)[0]
            if plan.lanes_are_pixels:
                with k.loop(0, channels) as c:
                    self._store_row(source + c * self.channel_bytes, target + c * self.x[1])
            else:
                with k.loop(0, last.size) as p, k.loop(0, channels, tile.lanes) as c:
                    at = source + (p + last.before) * self.strides[-1] + c * tile.item
                    value = k.load(at, self.sum_dtype, tile.lanes)
                    mask = k.first_lanes(channels - c, tile.lanes)
                    to = target + p * self.x[-1] + c * self.x[1]
                    self._store(value, to, self.x[1], mask)

    def _store_row(self, source: IntLike, target: IntLike) -> None:
        """One row of one channel, from columns that lie apart by residue."""
        k, tile, last = self.k, self.plan.tile, self.lines[-1]
        with k.loop(0, last.size, tile.lanes) as p:
            mask = k.first_lanes(last.size - p, tile.lanes)
            column = p + last.before
            if last.stride == 1:
                value = k.load(source + column * tile.item, self.sum_dtype, tile.lanes, mask=mask)
            else:
                at = k.iota(tile.lanes) + column
                offsets = at % last.stride * self.residue_bytes + at // last.stride * tile.item
                value = k.gather(source, offsets, self.sum_dtype, mask)
            self._store(value, target + p * self.x[-1], self.x[-1], mask)

    def _store(self, value: Float, at: IntLike, stride: int, mask: object) -> None:
        k, lanes = self.k, self.plan.tile.lanes
        result = k.variable(value * k.cast(self.alpha, value))
        with k.if_(self.beta.ne(0.0)):
            old = load_strided(k, at, stride, lanes, self.dtype, mask)
            result.set(k.fma(old, k.cast(self.beta, value), result.value))
        store_strided(k, result.value, at, stride, self.dtype, mask)
