"""Winograd's F(2x2, 3x3) of any shape: windows of stride 1, forward and backward_data.

    y = A^T [ sum over channels of (B^T d B) * (G w G^T) ] A

for each patch d of 4x4 positions that gives 2x2 outputs: sixteen matrix products with 4/9 of the
multiplications. A window larger than 3x3 is the sum of pieces of 3x3, the last ones filled up with
zeros: pieces count as further channels. The image lies in a frame whose even and odd columns are
apart, so that the same position of neighbouring patches is a vector. A task takes some panels of
patches through all three steps in its own memory. Outputs that are not finite are computed again
by the definition: Inf, NaN and overflow in a transform would reach outputs that do not depend on
them. See convolution/winograd.py, whose matrices these are.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bedstone.backends.cpu.builder import F64, I64
from bedstone.backends.cpu.convolution.winograd import matrices, transform
from bedstone.backends.cpu.library.contraction import DEPTH, Product
from bedstone.backends.cpu.library.convolution import Arguments, Kernel, pieces
from bedstone.backends.cpu.library.language import WORD, LibraryBuilder, Workspace, ceil_div
from bedstone.backends.cpu.library.shape import Frame, fill_line, group_filter_bytes
from bedstone.backends.cpu.microkernels import emit_tile
from bedstone.backends.cpu.shuffles import interleaved
from bedstone.backends.cpu.target import CACHE_LINE
from bedstone.backends.cpu.values import Int, IntLike, Mask

EDGE, OUTPUTS, WINDOW = 4, 2, 3
POINTS = EDGE * EDGE
PATCH_SHARE = 0.5  # of the second-level cache for the patches and sums of a task
TASKS_WANTED = 16
BT, G, AT = matrices(OUTPUTS)


class Winograd(Kernel):
    """Emits the kernel of one dtype and direction."""

    def __init__(self, k: LibraryBuilder, product: Product, turned: bool) -> None:
        super().__init__(k, product)
        self.turned = turned
        self.tile = replace(self.tile, by_steps=True)
        self.name = "gather_winograd" if turned else "forward_winograd"

    def lay_out(self, space: Workspace, threads: Int) -> None:
        k, s, tile = self.k, self.shape, self.tile
        self.rows, self.columns = (ceil_div(n, OUTPUTS) for n in s.out[1:])
        self.pieces = [ceil_div(n, WINDOW) for n in s.window[1:]]
        counts = zip((self.rows, self.columns), self.pieces)
        extent = [1, *(n * OUTPUTS + pieces * WINDOW - 1 for n, pieces in counts)]
        self.frame = Frame(k, self.dtype, s, False, space, extent, OUTPUTS)
        self.patches = s.images * self.rows * self.columns
        self.image_patches = space.take(self.patches * WORD)
        self.out_patches = space.take(self.patches * WORD)
        self.channel_line = space.take(s.channels * WORD)
        self.filter_panels = self.panels(s.filters, tile.rows)
        self.patch_panels = self.panels(self.patches, tile.columns)
        # A chunk is some channels of a piece of the window.
        self.chunk, self.parts = pieces(k, s.channels, DEPTH)
        self.chunks = self.pieces[0] * self.pieces[1] * self.parts
        panels = s.groups * POINTS * self.chunks * self.filter_panels
        # (The last vector of channels may reach beyond the chunk.)
        self.filter_bytes = (self.chunk + tile.lanes) * tile.a_step_bytes
        self.packed = space.take(panels * self.filter_bytes)
        # Between the points' panels one line more: powers of two would share cache sets.
        self.point_bytes = self.chunk * tile.step_bytes + CACHE_LINE
        self.panel_bytes = self.point_bytes * POINTS
        self.sum_bytes = self.filter_panels * (POINTS * tile.c_bytes)
        room = k.as_int(int(k.target.l2_bytes * PATCH_SHARE))
        most = k.max(room // (self.panel_bytes + self.sum_bytes), 1)
        most = k.min(most, k.max(self.patch_panels * s.groups // TASKS_WANTED, 1))
        self.blocks = ceil_div(self.patch_panels, most)
        self.block = most
        self.share = self.block * (self.panel_bytes + self.sum_bytes)
        self.memory = space.take(self.share * threads)

    def compute(self, given: Arguments) -> None:
        k, s = self.k, self.shape
        image, filter_ = (given.second, given.first) if self.turned else (given.first, given.second)
        start = self.frame.fill(image, given.threads)
        frame, out = self.frame.strides, s.output
        k.call(
            "fill_offsets", self.image_patches, s.images, frame.outer, 1, 0, self.rows,
            frame.rows[1] * OUTPUTS, self.columns, OUTPUTS, frame.cut, frame.residue, frame.column,
            1, 0,
        )  # fmt: skip
        k.call(
            "fill_offsets", self.out_patches, s.images, out.outer, 1, 0, self.rows,
            out.rows[1] * OUTPUTS, self.columns, OUTPUTS, 1, 0, out.column, 1, 0,
        )  # fmt: skip
        fill_line(k, self.channel_line, s.channels, s.filter.channel)
        self._transform_filters(filter_ + s.filter_start, given.threads)
        self._multiply(start, filter_ + s.filter_start, given)

    def _panel(self, group: IntLike, point: IntLike, chunk: IntLike, panel: IntLike) -> Int:
        number = ((group * POINTS + point) * self.chunks + chunk) * self.filter_panels + panel
        return self.packed + number * self.filter_bytes

    def _chunk(self, number: Int) -> tuple[Int, Int, Int, Int]:
        """(first channel, channels, first row and first column of the window) of a chunk."""
        part, piece = number % self.parts, number // self.parts
        first = part * self.chunk
        depth = self.k.max(self.k.min(self.shape.channels - first, self.chunk), 0)
        down, across = piece // self.pieces[1], piece % self.pieces[1]
        return first, depth, down * WINDOW, across * WINDOW

    def _transform_filters(self, filters: Int, threads: Int) -> None:
        """One task a panel of filters: vectors run along the channels."""
        k, s, tile, product = self.k, self.shape, self.tile, self.product
        step = group_filter_bytes(s, self.turned)
        with k.job(s.groups * self.filter_panels, threads) as job, job.each_task() as task:
            group, panel = task // self.filter_panels, task % self.filter_panels
            with k.loop(0, self.chunks) as chunk, k.loop(0, tile.rows) as m:
                number = k.min(panel * tile.rows + m, s.filters - 1)
                base = filters + group * step + number * s.filter.outer
                c0, depth, down, across = self._chunk(chunk)
                with k.loop(0, depth, tile.lanes) as c:
                    run = product.run_of(self.channel_line, c0 + c, s.channels)

                    def tap(r: int, t: int) -> Any:
                        line, column = down + r, across + t
                        inside = (line < s.window[1]) & (column < s.window[2])
                        at = line * s.filter.rows[1] + column * s.filter.column
                        at = base + k.select(inside, at, 0)
                        value = k.gather(at, run.offsets, self.dtype)
                        return k.select(inside, value, k.constant(0.0, self.dtype, tile.lanes))

                    taps = [[tap(r, t) for t in range(WINDOW)] for r in range(WINDOW)]
                    at = m * tile.row_bytes + c * tile.a_step_bytes
                    for point, value in enumerate(itertools.chain(*transform(k, G, taps))):
                        to = self._panel(group, point, chunk, panel) + at
                        for lane in range(tile.lanes):
                            one = k.extract(value, lane)
                            k.store(one, to, self.dtype, lane * tile.a_step_bytes)

    def _multiply(self, start: Int, filters: Int, given: Arguments) -> None:
        k, s, tile = self.k, self.shape, self.tile
        frame = self.frame.strides
        tasks = s.groups * self.blocks
        with (
            k.job(tasks, given.threads, self.memory, self.share) as job,
            job.each_task() as task,
        ):
            group, block = task // self.blocks, task % self.blocks
            first = block * self.block
            count = k.min(self.patch_panels - first, self.block)
            image = start + group * (s.channels * frame.channel)
            sums = job.scratch + self.block * self.panel_bytes
            with k.loop(0, self.chunks) as chunk:
                c0, depth, down, across = self._chunk(chunk)
                corner = image + c0 * frame.channel + down * frame.rows[1]
                with k.loop(0, count) as p:
                    k.call(
                        f"winograd_read_{self.dtype}", corner, self.image_patches,
                        (first + p) * tile.columns, self.patches, depth, frame.channel,
                        frame.rows[1], frame.residue, across, job.scratch + p * self.panel_bytes,
                        self.point_bytes,
                    )  # fmt: skip
                with (
                    k.loop(0, self.filter_panels) as f,
                    k.loop(0, POINTS) as point,
                    k.loop(0, count) as p,
                ):
                    patches = job.scratch + p * self.panel_bytes + point * self.point_bytes
                    at = self._sums(sums, f, p) + point * tile.c_bytes
                    filters_at = self._panel(group, point, chunk, f)
                    k.call(
                        f"winograd_tile_{self.dtype}", filters_at, patches, at, depth, chunk
                    )  # fmt: skip
            out = given.out + group * (s.filters * s.output.channel)
            bias = k.select(given.bias.ne(0), given.bias + group * (s.filters * self.item), 0)
            weights = filters + group * group_filter_bytes(s, self.turned)
            with k.loop(0, self.filter_panels) as f, k.loop(0, count) as p:
                k.call(
                    f"winograd_write_{self.dtype}", self._sums(sums, f, p), f * tile.rows,
                    s.filters, (first + p) * tile.columns, self.patches, self.rows, self.columns,
                    s.out[1], s.out[2], self.out_patches, out, s.output.channel, s.output.rows[1],
                    s.output.column, bias, self.image_patches, image, frame.channel, frame.rows[1],
                    frame.residue, weights, s.filter.outer, s.filter.channel, s.filter.rows[1],
                    s.filter.column, s.channels, s.window[1], s.window[2], given.alpha, given.beta,
                )  # fmt: skip

    def _sums(self, sums: Int, f: Int, p: Int) -> Int:
        """Where the products of a panel of filters and one of patches add up, point by point."""
        return sums + p * self.sum_bytes + f * (POINTS * self.tile.c_bytes)


def emit_winograd(k: LibraryBuilder, product: Product) -> None:
    """The functions of one dtype that the kernels call."""
    emit_tile(k, replace(product.tile, by_steps=True), f"winograd_tile_{product.dtype}")
    _emit_read(k, product)
    _emit_again(k, product)
    _emit_write(k, product)


def _emit_read(k: LibraryBuilder, product: Product) -> None:
    """winograd_read(image, table, first patch, patches, channels, channel, row, residue, columns
    to the right, to, bytes of a point): a panel of transformed patches, for every point a right
    panel of the product."""
    tile, dtype, item = product.tile, product.dtype, product.item
    with k.function(f"winograd_read_{dtype}", *[I64] * 11) as arguments:
        image, table, first, patches, channels, channel, row, residue = arguments[:8]
        across, to, point_bytes = arguments[8:]
        columns = [(across + t) % 2 * residue + (across + t) // 2 * item for t in range(EDGE)]
        with k.loop(0, tile.vectors) as j:
            run = product.run_of(table, k.min(first + j * tile.lanes, patches - 1), patches)

            def channel_by_channel(read: Any, j: Int = j, run: Any = run) -> None:
                with k.loop(0, channels) as c:
                    base = image + c * channel
                    patch = [
                        [read(base + row * r + column, run) for column in columns]
                        for r in range(EDGE)
                    ]
                    target = to + c * tile.step_bytes + j * (tile.lanes * item)
                    for point, value in enumerate(itertools.chain(*transform(k, BT, patch))):
                        k.store(value, target + point_bytes * point, dtype)

            product.by_kind(run, channel_by_channel)


def _emit_again(k: LibraryBuilder, product: Product) -> None:
    """winograd_again(patch, row and column of the output in it, filter, channels, strides...,
    window, to): one output by the definition."""
    dtype, item = product.dtype, product.item
    with k.function(f"winograd_again_{dtype}", *[I64] * 14) as arguments:
        patch, a, b, filter_, channels, channel, row, residue = arguments[:8]
        filter_channel, filter_row, filter_column, height, width, to = arguments[8:]
        total = k.variable(k.constant(0.0, dtype))
        with (
            k.loop(0, channels) as c,
            k.loop(0, height) as r,
            k.loop(0, width) as t,
        ):
            column = b + t
            at = patch + c * channel + (a + r) * row + column % 2 * residue + column // 2 * item
            weight = filter_ + c * filter_channel + r * filter_row + t * filter_column
            product_ = k.load(at, dtype) * k.load(weight, dtype)
            total.set(total.value + product_)
        k.store(total.value, to, dtype)


def _emit_write(k: LibraryBuilder, product: Product) -> None:
    """winograd_write(...): a panel of filters by one of patches, transformed back and stored."""
    tile, dtype, item, lanes = product.tile, product.dtype, product.item, product.lanes
    with k.function(f"winograd_write_{dtype}", *[I64] * 28, F64, F64) as arguments:
        sums, filter0, filters, patch0, patches, rows, columns, height, width = arguments[:9]
        table, out, out_channel, out_row, out_column, bias = arguments[9:15]
        images, image, channel, row, residue = arguments[15:20]
        weights, w_outer, w_channel, w_row, w_column, channels = arguments[20:26]
        window_height, window_width, alpha, beta = arguments[26:]
        spill = k.alloca(OUTPUTS * OUTPUTS * lanes * item)
        lines, sides = k.alloca(lanes * WORD), k.alloca(lanes * WORD)
        count = k.min(filters - filter0, tile.rows)
        with k.loop(0, tile.vectors) as j:
            patch = patch0 + j * lanes
            with k.if_(patch < patches):
                column, line = patch % columns, patch // columns % rows
                with k.loop(0, lanes) as lane:  # rows and columns of the output that are left
                    number = patch + lane
                    k.put(height - number // columns % rows * OUTPUTS, lines, lane)
                    k.put(width - number % columns * OUTPUTS, sides, lane)
                near = out_column.eq(item) & (patch + lanes <= patches)
                near = near & (column * OUTPUTS + OUTPUTS * lanes <= width)
                near = near & (line * OUTPUTS + OUTPUTS <= height)
                with k.loop(0, count) as m:
                    at = sums + m * tile.step_bytes + j * (lanes * item)
                    points = [
                        [
                            k.load(at, dtype, lanes, (r * EDGE + t) * tile.c_bytes)
                            for t in range(EDGE)
                        ]
                        for r in range(EDGE)
                    ]
                    square = transform(k, AT, points)
                    added = k.variable(k.constant(0.0, dtype))
                    with k.if_(bias.ne(0)):
                        added.set(k.load(bias + (filter0 + m) * item, dtype))
                    to = out + (filter0 + m) * out_channel
                    weight = weights + (filter0 + m) * w_outer
                    finite = ~_any_not_finite(k, square)

                    def store(value: Any, address: Int, added: Any = added) -> None:
                        result = k.variable(value * k.cast(alpha, value))
                        with k.if_(beta.ne(0.0)):
                            old = k.load(address, dtype, value.lanes)
                            result.set(k.fma(old, k.cast(beta, value), result.value))
                        k.store(result.value + k.splat(added.value, value.lanes), address, dtype)

                    with k.if_else(near & finite) as (together, single):
                        with together:
                            place = to + k.word(table, patch)
                            for a, pair in enumerate(square):
                                for number, vector in enumerate(interleaved(k, pair)):
                                    store(vector, place + out_row * a + number * lanes * item)
                        with single:
                            for number, vector in enumerate(itertools.chain(*square)):
                                k.store(vector, spill, dtype, number * lanes * item)
                            with k.loop(0, k.min(patches - patch, lanes)) as lane:
                                place = to + k.word(table, patch + lane)
                                h, w = k.word(lines, lane), k.word(sides, lane)
                                for a, b in itertools.product(range(OUTPUTS), repeat=2):
                                    value_at = spill + lane * item
                                    value_at = value_at + (a * OUTPUTS + b) * lanes * item
                                    with k.if_((h > a) & (w > b)):
                                        with k.if_(~finite):
                                            k.call(
                                                f"winograd_again_{dtype}",
                                                image + k.word(images, patch + lane), a, b, weight,
                                                channels, channel, row, residue, w_channel, w_row,
                                                w_column, window_height, window_width, value_at,
                                            )  # fmt: skip
                                        to_ = place + out_row * a + out_column * b
                                        store(k.load(value_at, dtype), to_)


def _any_not_finite(k: LibraryBuilder, square: Sequence[Sequence[Any]]) -> Mask:
    """Whether some lane of some vector is Inf or NaN (x - x is then NaN)."""
    total: Any = None
    for value in itertools.chain(*square):
        nothing = value - value
        total = nothing if total is None else total + nothing
    return k.any(total.is_nan())
