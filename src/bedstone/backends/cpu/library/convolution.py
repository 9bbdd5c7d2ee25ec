"""Convolution of any shape: forward, backward_data and backward_filter as products over tables.

Forward, and backward_data of stride 1 as a convolution of dy, pack the filter once; each task then
packs the patches of a block of pixels and multiplies. Other backward_data scatter: a task owns a
piece of dx in its memory and adds every product where it belongs. Backward_filter cuts dw into
blocks and the pixels into slices; both depend on the problem alone, so results do not depend on
the number of threads. Blocking follows image_product.py, data_gradient.py and filter_gradient.py,
with sizes known at run time and the tile fixed.
"""

from __future__ import annotations

from dataclasses import dataclass

from bedstone.backends.cpu.builder import F64, I64
from bedstone.backends.cpu.convolution.data_gradient import (
    CHANNELS_MOST,
    PIECE_BYTES_MAX,
    PIECE_SHARE,
)
from bedstone.backends.cpu.convolution.filter_gradient import (
    BLOCK_FILTERS,
    BLOCK_ROWS_LEAST,
    SLICE_BYTES_MAX,
)
from bedstone.backends.cpu.convolution.filter_gradient import L2_SHARE as BLOCK_SHARE
from bedstone.backends.cpu.convolution.filter_gradient import TASK_BYTES_MAX as BLOCK_BYTES_MAX
from bedstone.backends.cpu.convolution.image_product import L2_SHARE, TASK_BYTES_MAX, TASKS_WANTED
from bedstone.backends.cpu.library.contraction import DEPTH, Matrix, Product
from bedstone.backends.cpu.library.language import WORD, LibraryBuilder, Workspace, ceil_div
from bedstone.backends.cpu.library.shape import (
    Frame,
    fill_line,
    fill_pixels,
    fill_taps,
    group_filter_bytes,
    read_shape,
)
from bedstone.backends.cpu.values import Float, Int, IntLike

KERNEL_TYPES = [I64] * 10 + [F64] * 2
SIZE_TYPES = 5  # conv, x, w, y, threads


def pieces(k: LibraryBuilder, total: IntLike, most: IntLike) -> tuple[Int, Int]:
    """(size, number) of the fewest pieces of `total`, none larger than `most`, sizes alike."""
    number = k.max(ceil_div(k.as_int(total), k.max(most, 1)), 1)
    return k.max(ceil_div(k.as_int(total), number), 1), number


@dataclass(frozen=True)
class Arguments:
    """What a kernel is given: addresses, threads and factors. `first` and `second` are the inputs
    in the interface's order."""

    conv: Int
    x: Int
    w: Int
    y: Int
    first: Int
    second: Int
    bias: Int
    out: Int
    workspace: Int
    threads: Int
    alpha: Float
    beta: Float


class Kernel:
    """One direction for one dtype: emits name_dtype, which computes, and size_name_dtype, which
    says how much workspace that takes. Both lay the memory out by the same method."""

    name: str
    turned = False
    by_channel = False

    def __init__(self, k: LibraryBuilder, product: Product) -> None:
        self.k, self.product, self.dtype = k, product, product.dtype
        self.tile, self.item = product.tile, product.item

    def emit(self) -> None:
        """Both functions."""
        k = self.k
        with k.function(f"{self.name}_{self.dtype}", *KERNEL_TYPES) as values:
            given = Arguments(*values)
            self.shape = read_shape(k, self.dtype, *values[:4], self.turned)
            self.lay_out(Workspace(k, given.workspace), given.threads)
            self.compute(given)
        with k.answering(f"size_{self.name}_{self.dtype}", SIZE_TYPES) as values:
            *tensors, threads = values
            self.shape = read_shape(k, self.dtype, *tensors, self.turned)
            space = Workspace(k, 0)
            self.lay_out(space, threads)
            k.give(space.size)

    def lay_out(self, space: Workspace, threads: Int) -> None:
        """Cut the problem and take memory for everything."""
        raise NotImplementedError

    def compute(self, given: Arguments) -> None:
        """The kernel's body."""
        raise NotImplementedError

    def panels(self, count: IntLike, width: int) -> Int:
        """How many panels hold `count` rows or columns."""
        return ceil_div(self.k.as_int(count), width)

    def take_tables(self, space: Workspace) -> None:
        """Room for the tables that forward and backward_filter share."""
        s = self.shape
        depth, pixels, filters = (n * WORD for n in (s.depth, s.pixels, s.filters))
        self.image_taps, self.filter_taps = space.take(depth), space.take(depth)
        self.image_pixels, self.out_pixels = space.take(pixels), space.take(pixels)
        self.filter_rows, self.out_channels = space.take(filters), space.take(filters)

    def fill_tables(self) -> None:
        """Their offsets."""
        k, s = self.k, self.shape
        fill_taps(k, self.image_taps, s, self.frame.strides, s.dilation, self.by_channel)
        fill_taps(k, self.filter_taps, s, s.filter, (1, 1, 1), self.by_channel)
        fill_pixels(k, self.image_pixels, s, self.frame.strides, s.stride)
        fill_pixels(k, self.out_pixels, s, s.output, (1, 1, 1))
        fill_line(k, self.filter_rows, s.filters, s.filter.outer)
        fill_line(k, self.out_channels, s.filters, s.output.channel)


class Forward(Kernel):
    """out[filter, pixel] = sum over (channel, tap) of filter * patch. With `by_channel`, patches
    are the rows of the product and vectors run along the filters."""

    def __init__(self, k: LibraryBuilder, product: Product, by_channel: bool, turned: bool) -> None:
        super().__init__(k, product)
        self.by_channel, self.turned = by_channel, turned
        direction = "gather" if turned else "forward"
        self.name = f"{direction}_{'channels' if by_channel else 'pixels'}"
        tile = self.tile
        wide, high = (tile.columns, tile.b_bytes), (tile.rows, tile.a_bytes)
        (self.pixel_width, self.pixel_bytes) = high if by_channel else wide
        (self.filter_width, self.filter_bytes) = wide if by_channel else high

    def lay_out(self, space: Workspace, threads: Int) -> None:
        k, s = self.k, self.shape
        self.frame = Frame(k, self.dtype, s, self.by_channel, space)
        self.take_tables(space)
        self.chunk, self.chunks = pieces(k, s.depth, DEPTH)
        self.filter_panels = self.panels(s.filters, self.filter_width)
        self.pixel_panels = self.panels(s.pixels, self.pixel_width)
        several = self.chunks > 1
        room = min(int(k.target.l2_bytes * L2_SHARE), TASK_BYTES_MAX)
        sums = k.select(several, self.filter_panels * self.tile.c_bytes, 0)
        most = k.max(k.as_int(room) // (sums + self.pixel_bytes), 1)
        most = k.min(most, k.max(self.pixel_panels * s.groups // TASKS_WANTED, 1))
        self.block, self.blocks = pieces(k, self.pixel_panels, most)
        splits = k.max(k.as_int(TASKS_WANTED) // (self.blocks * s.groups), 1)
        self.split, self.splits = pieces(
            k, self.filter_panels, ceil_div(self.filter_panels, splits)
        )
        self.packed = space.take(s.groups * self.chunks * self.filter_panels * self.filter_bytes)
        self.patches = self.block * self.pixel_bytes
        self.share = self.patches + self.tile.c_bytes * k.select(
            several, self.block * self.split, 1
        )
        self.memory = space.take(self.share * threads)

    def compute(self, given: Arguments) -> None:
        s = self.shape
        image, filter_ = (given.second, given.first) if self.turned else (given.first, given.second)
        start = self.frame.fill(image, given.threads)
        self.fill_tables()
        self.weights = Matrix(filter_ + s.filter_start, self.filter_rows, self.filter_taps)
        self.patch = Matrix(start, self.image_taps, self.image_pixels)
        self.result = Matrix(given.out, self.out_channels, self.out_pixels)
        self._pack_filters(given.threads)
        self._multiply(given)

    def _packed(self, group: Int, chunk: Int, panel: Int) -> Int:
        number = (group * self.chunks + chunk) * self.filter_panels + panel
        return self.packed + number * self.filter_bytes

    def _depth(self, chunk: Int) -> tuple[Int, Int]:
        first = chunk * self.chunk
        return first, self.k.max(self.k.min(self.shape.depth - first, self.chunk), 0)

    def _pack_filters(self, threads: Int) -> None:
        k, s = self.k, self.shape
        step = group_filter_bytes(s, self.turned)
        with k.job(s.groups * self.filter_panels, threads) as job, job.each_task() as task:
            group, panel = task // self.filter_panels, task % self.filter_panels
            weights = self.weights.at(self.weights.base + group * step)
            first = panel * self.filter_width
            with k.loop(0, self.chunks) as chunk:
                where = (*self._depth(chunk), self._packed(group, chunk, panel))
                if self.by_channel:
                    self.product.pack_columns(weights.turned, first, s.filters, *where)
                else:
                    self.product.pack_rows(weights, first, s.filters, *where)

    def _multiply(self, given: Arguments) -> None:
        """One task a block of pixels against a run of filter panels."""
        k, s, tile = self.k, self.shape, self.tile
        frame, several = self.frame.strides, self.chunks > 1
        tasks = s.groups * self.blocks * self.splits
        with (
            k.job(tasks, given.threads, self.memory, self.share) as job,
            job.each_task() as task,
        ):
            number, rest = task % self.splits, task // self.splits
            block, group = rest % self.blocks, rest // self.blocks
            patch = self.patch.at(self.patch.base + group * (s.channels * frame.channel))
            out = self.result.at(given.out + group * (s.filters * s.output.channel))
            bias = k.select(given.bias.ne(0), given.bias + group * (s.filters * self.item), 0)
            first = block * self.block
            count = k.min(self.pixel_panels - first, self.block)
            begin = number * self.split
            end = k.min(begin + self.split, self.filter_panels)
            with k.loop(0, self.chunks) as chunk:
                k0, depth = self._depth(chunk)
                with k.loop(0, count) as p:
                    pixel = (first + p) * self.pixel_width
                    to = job.scratch + p * self.pixel_bytes
                    if self.by_channel:
                        self.product.pack_rows(patch.turned, pixel, s.pixels, k0, depth, to)
                    else:
                        self.product.pack_columns(patch, pixel, s.pixels, k0, depth, to)
                with k.loop(0, count) as p, k.loop(begin, end) as f:
                    at = k.select(several, p * self.split + (f - begin), 0) * tile.c_bytes
                    sums = job.scratch + self.patches + at
                    pixels = job.scratch + p * self.pixel_bytes
                    filters = self._packed(group, chunk, f)
                    a, b = (pixels, filters) if self.by_channel else (filters, pixels)
                    self.product.tile_product(a, b, sums, depth, chunk)
                    with k.if_(chunk.eq(self.chunks - 1)):
                        self._store(sums, out, first + p, f, bias, given)

    def _store(
        self, sums: Int, out: Matrix, p: Int, f: Int, bias: Int, given: Arguments
    ) -> None:  # fmt: skip
        s, filter_, pixel = self.shape, f * self.filter_width, p * self.pixel_width
        filters, pixels = (filter_, s.filters), (pixel, s.pixels)
        if self.by_channel:
            places, biases, out = (*pixels, *filters), (0, bias), out.turned
        else:
            places, biases = (*filters, *pixels), (bias, 0)
        self.product.store(sums, out, *places, biases, given.alpha, given.beta)


class Scatter(Kernel):
    """Backward_data: dx[channel, pixel + tap] += sum over filters of w * dy; vectors along pixels.

    A task owns an image and a block of channels; its piece of dx is a frame of one image.
    """

    name = "scatter_pixels"

    def lay_out(self, space: Workspace, threads: Int) -> None:
        k, s, tile = self.k, self.shape, self.tile
        reach = [k.max(s.reach(a), s.pad[a] + s.size[a]) for a in range(3)]
        self.cut = s.stride[2]
        self.residue = ceil_div(reach[2], self.cut) * self.item
        self.row = self.residue * self.cut
        self.plane = reach[0] * reach[1] * self.row
        self.rows = (reach[1] * self.row, self.row)
        room = min(int(k.target.l2_bytes * PIECE_SHARE), PIECE_BYTES_MAX)
        most = k.max(k.min(k.as_int(room) // k.max(self.plane, 1), CHANNELS_MOST), 1)
        wanted = k.max(k.as_int(TASKS_WANTED) // k.max(s.images * s.groups, 1), 1)
        most = k.min(most, k.max(ceil_div(s.channels, wanted), 1))
        self.block, self.blocks = pieces(k, s.channels, most)
        self.chunk, self.chunks = pieces(k, s.filters, DEPTH)
        self.filter_panels = self.panels(self.block * s.taps, tile.rows)
        taps, positions = self.block * s.taps * WORD, s.positions * WORD
        self.filter_taps = space.take(s.depth * WORD)
        self.piece_taps = space.take(taps)
        self.piece_pixels, self.out_pixels = space.take(positions), space.take(positions)
        self.filter_rows = space.take(s.filters * WORD)
        self.out_channels = space.take(s.filters * WORD)
        owners = s.groups * self.blocks
        self.packed = space.take(owners * self.chunks * self.filter_panels * tile.a_bytes)
        self.piece = (self.block * self.plane + 63) & -64
        self.share = self.piece + tile.b_bytes + tile.c_bytes
        self.memory = space.take(self.share * threads)

    def compute(self, given: Arguments) -> None:
        k, s = self.k, self.shape
        fill_taps(k, self.filter_taps, s, s.filter, (1, 1, 1), False)
        rows = [d * r for d, r in zip(s.dilation, self.rows)]
        windows = [n for pair in zip(s.window, (*rows, s.dilation[2])) for n in pair]
        columns = (self.cut, self.residue, self.item, 1, 0)
        k.call("fill_offsets", self.piece_taps, self.block, self.plane, *windows, *columns)
        rows = [u * r for u, r in zip(s.stride, self.rows)]
        pixels = [n for pair in zip(s.out, (*rows, s.stride[2])) for n in pair]
        k.call("fill_offsets", self.piece_pixels, 1, 0, *pixels, *columns)
        rows = [n for pair in zip(s.out, (*s.output.rows, 1)) for n in pair]
        k.call("fill_offsets", self.out_pixels, 1, 0, *rows, 1, 0, s.output.column, 1, 0)
        fill_line(k, self.filter_rows, s.filters, s.filter.outer)
        fill_line(k, self.out_channels, s.filters, s.output.channel)
        weights = Matrix(given.first + s.filter_start, self.filter_taps, self.filter_rows)
        self._pack_filters(weights, given.threads)
        self._scatter(given)

    def _packed(self, owner: Int, chunk: Int, panel: IntLike) -> Int:
        number = (owner * self.chunks + chunk) * self.filter_panels + panel
        return self.packed + number * self.tile.a_bytes

    def _depth(self, chunk: Int) -> tuple[Int, Int]:
        first = chunk * self.chunk
        return first, self.k.max(self.k.min(self.shape.filters - first, self.chunk), 0)

    def _rows_of(self, block: Int) -> Int:
        """(channel, tap) rows of a block of channels."""
        s = self.shape
        return self.k.min(s.channels - block * self.block, self.block) * s.taps

    def _pack_filters(self, weights: Matrix, threads: Int) -> None:
        k, s, tile = self.k, self.shape, self.tile
        tasks = s.groups * self.blocks * self.filter_panels
        with k.job(tasks, threads) as job, job.each_task() as task:
            panel, owner = task % self.filter_panels, task // self.filter_panels
            group, block = owner // self.blocks, owner % self.blocks
            first = block * self.block * s.taps
            rows = Matrix(
                weights.base + group * (s.filters * s.filter.outer),
                weights.rows + first * WORD, weights.columns,
            )  # fmt: skip
            count = self._rows_of(block)
            with k.if_((panel * tile.rows < count) & (count > 0)), k.loop(0, self.chunks) as chunk:
                k0, depth = self._depth(chunk)
                to = self._packed(owner, chunk, panel)
                self.product.pack_rows(rows, panel * tile.rows, count, k0, depth, to)

    def _scatter(self, given: Arguments) -> None:
        k, s, tile = self.k, self.shape, self.tile
        owners = s.groups * self.blocks
        with (
            k.job(s.images * owners, given.threads, self.memory, self.share) as job,
            job.each_task() as task,
        ):
            image, owner = task // owners, task % owners
            group, block = owner // self.blocks, owner % self.blocks
            piece, panel = job.scratch, job.scratch + self.piece
            sums = panel + tile.b_bytes
            count = self._rows_of(block)
            k.external("memset", I64, piece.ir, k.to_ir(0), self.piece.ir)
            dy = given.second + image * s.output.outer
            dy = Matrix(
                dy + group * (s.filters * s.output.channel), self.out_channels, self.out_pixels
            )
            target = Matrix(piece, self.piece_taps, self.piece_pixels)
            with (
                k.loop(0, s.positions, tile.columns) as pixel,
                k.loop(0, self.chunks) as chunk,
            ):
                k0, depth = self._depth(chunk)
                self.product.pack_columns(dy, pixel, s.positions, k0, depth, panel)
                with k.loop(0, count, tile.rows) as row:
                    packed = self._packed(owner, chunk, row // tile.rows)
                    self.product.tile_product(packed, panel, sums, depth, 0)
                    self.product.add(sums, target, row, count, pixel, s.positions)
            channel = group * s.channels + block * self.block
            out = given.out + image * s.image.outer + channel * s.image.channel
            with k.loop(0, k.min(s.channels - block * self.block, self.block)) as c:
                self._write(piece + c * self.plane, out + c * s.image.channel, given)

    def _write(self, plane: Int, out: Int, given: Arguments) -> None:
        """dx = alpha * piece + beta * dx for one channel of an image."""
        k, s = self.k, self.shape
        step = s.image.column * self.cut
        with k.loop(0, s.size[0]) as d, k.loop(0, s.size[1]) as h, k.loop(0, self.cut) as r:
            row = plane + (d + s.pad[0]) * self.rows[0] + (h + s.pad[1]) * self.rows[1]
            low = k.max(s.pad[2] - r + (self.cut - 1), 0) // self.cut
            high = k.max(s.pad[2] + s.size[2] - r + (self.cut - 1), 0) // self.cut
            at = out + d * s.image.rows[0] + h * s.image.rows[1]
            at = at + (low * self.cut + r - s.pad[2]) * s.image.column
            k.call(
                f"blend_run_{self.dtype}", row + r * self.residue + low * self.item, at, step,
                high - low, given.alpha, given.beta,
            )  # fmt: skip


class FilterGradient(Kernel):
    """dw[(channel, tap), filter] = sum over pixels of patch * dy, in blocks of dw and slices of
    the pixels; with `by_channel`, vectors run along the channels of a tap, else along filters."""

    def __init__(self, k: LibraryBuilder, product: Product, by_channel: bool) -> None:
        super().__init__(k, product)
        self.by_channel = by_channel
        self.name = f"filter_{'channels' if by_channel else 'pixels'}"

    def lay_out(self, space: Workspace, threads: Int) -> None:
        k, s, tile = self.k, self.shape, self.tile
        self.frame = Frame(k, self.dtype, s, self.by_channel, space)
        self.take_tables(space)
        filter_block, _ = pieces(k, s.filters, BLOCK_FILTERS)
        room = min(int(k.target.l2_bytes * BLOCK_SHARE), BLOCK_BYTES_MAX) // self.item
        left = k.max(room - filter_block * DEPTH, 0)
        tap_block, _ = pieces(k, s.depth, k.max(left // (filter_block + DEPTH), BLOCK_ROWS_LEAST))
        self.totals = (s.filters, s.depth) if self.by_channel else (s.depth, s.filters)
        cut = (filter_block, tap_block) if self.by_channel else (tap_block, filter_block)
        self.sizes = cut
        self.row_blocks, self.column_blocks = (
            ceil_div(total, size) for total, size in zip(self.totals, cut)
        )
        self.row_panels = self.panels(cut[0], tile.rows)
        self.column_panels = self.panels(cut[1], tile.columns)
        self.sum_bytes = self.row_panels * self.column_panels * tile.c_bytes
        self.blocks = s.groups * self.row_blocks * self.column_blocks
        chunks = k.max(ceil_div(s.pixels, DEPTH), 1)
        blocks = k.max(self.blocks, 1)
        slices = k.min(
            ceil_div(k.as_int(TASKS_WANTED), blocks),
            k.as_int(SLICE_BYTES_MAX) // (self.sum_bytes * blocks),
        )
        slices = k.max(k.min(slices, chunks), 1)
        self.chunks = chunks
        self.chunks_each, self.slices = pieces(k, chunks, ceil_div(chunks, slices))
        self.partial = space.take(self.blocks * self.slices * self.sum_bytes)
        self.a_bytes = self.row_panels * tile.a_bytes
        self.share = self.a_bytes + self.column_panels * tile.b_bytes
        self.memory = space.take(self.share * threads)

    def compute(self, given: Arguments) -> None:
        s = self.shape
        start = self.frame.fill(given.first, given.threads)
        self.fill_tables()
        patch = Matrix(start, self.image_taps, self.image_pixels)
        dy = Matrix(given.second, self.out_channels, self.out_pixels)
        dw = Matrix(given.out + s.filter_start, self.filter_taps, self.filter_rows)
        by_channel = self.by_channel
        self.a, self.b, self.c = (
            (dy, patch.turned, dw.turned) if by_channel else (patch, dy.turned, dw)
        )
        frame = s.channels * self.frame.strides.channel, s.filters * s.output.channel
        self.a_group, self.b_group = frame[::-1] if by_channel else frame
        self._accumulate(given)
        self._add_slices(given)

    def _block(self, number: Int) -> tuple[Int, Int, Int, Int, Int]:
        """(group, first row, rows' end, first column, columns' end) of a block."""
        k, (rows, columns) = self.k, self.sizes
        column = number % self.column_blocks * columns
        rest = number // self.column_blocks
        row = rest % self.row_blocks * rows
        ends = k.min(row + rows, self.totals[0]), k.min(column + columns, self.totals[1])
        return rest // self.row_blocks, row, ends[0], column, ends[1]

    def _accumulate(self, given: Arguments) -> None:
        k, s, tile = self.k, self.shape, self.tile
        with (
            k.job(self.blocks * self.slices, given.threads, self.memory, self.share) as job,
            job.each_task() as task,
        ):
            group, row, rows, column, columns = self._block(task // self.slices)
            a = self.a.at(self.a.base + group * self.a_group)
            b = self.b.at(self.b.base + group * self.b_group)
            c = self.partial + task * self.sum_bytes
            first = task % self.slices * self.chunks_each
            last = k.min(first + self.chunks_each, self.chunks)
            panels_a, panels_b = job.scratch, job.scratch + self.a_bytes
            with k.loop(first, last) as chunk:
                pixel = chunk * DEPTH
                depth = k.max(k.min(s.pixels - pixel, DEPTH), 0)
                with k.loop(row, rows, tile.rows) as m:
                    to = panels_a + (m - row) // tile.rows * tile.a_bytes
                    self.product.pack_rows(a, m, rows, pixel, depth, to)
                with k.loop(column, columns, tile.columns) as n:
                    to = panels_b + (n - column) // tile.columns * tile.b_bytes
                    self.product.pack_columns(b, n, columns, pixel, depth, to)
                with (
                    k.loop(0, ceil_div(columns - column, tile.columns)) as j,
                    k.loop(0, ceil_div(rows - row, tile.rows)) as i,
                ):
                    at = c + (j * self.row_panels + i) * tile.c_bytes
                    left, right = panels_a + i * tile.a_bytes, panels_b + j * tile.b_bytes
                    self.product.tile_product(left, right, at, depth, chunk - first)

    def _add_slices(self, given: Arguments) -> None:
        """The slices' sums of a block, in order, onto the first's; then dw."""
        k, s, tile = self.k, self.shape, self.tile
        step, lanes = tile.lanes * tile.item, tile.lanes
        with k.job(self.blocks, given.threads) as job, job.each_task() as task:
            group, row, rows, column, columns = self._block(task)
            c = self.c.at(self.c.base + group * (s.filters * s.filter.outer))
            sums = self.partial + task * self.slices * self.sum_bytes
            with (
                k.loop(0, ceil_div(columns - column, tile.columns)) as j,
                k.loop(0, ceil_div(rows - row, tile.rows)) as i,
            ):
                at = sums + (j * self.row_panels + i) * tile.c_bytes
                with k.loop(1, self.slices) as number, k.loop(0, tile.c_bytes, step) as v:
                    more = k.load(at + number * self.sum_bytes + v, self.dtype, lanes)
                    k.store(k.load(at + v, self.dtype, lanes) + more, at + v, self.dtype)
                self.product.store(
                    at, c, row + i * tile.rows, rows, column + j * tile.columns, columns, (0, 0),
                    given.alpha, given.beta,
                )  # fmt: skip
