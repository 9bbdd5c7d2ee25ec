"""What row_gradient.py copies to scratch: panels of vectors, rows of x, filters of dy by tiles.

Padding becomes real zeros, 16-bit types are widened; nothing outside a tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bedstone.backends.cpu.builder import KernelBuilder, itemsize
from bedstone.backends.cpu.convolution.row_gradient_blocking import (
    Blocking,
    Layout,
    Line,
    View,
    block_counts,
    image_layout,
    out_layout,
)
from bedstone.backends.cpu.packing import fill_zero, load_strided
from bedstone.backends.cpu.shuffles import interleaved, transposed
from bedstone.backends.cpu.values import Float, IntLike, Mask

INTERLEAVED = 4  # up to so many channels are interleaved, not transposed


@dataclass(frozen=True)
class Chunk:
    """Pixels of dy at run time: the first of each axis, and how many."""

    first: tuple[IntLike, IntLike, IntLike]
    count: tuple[IntLike, IntLike, IntLike]


@dataclass(frozen=True)
class Operand:
    """x or dy as it is packed: its axes, its strides of (batch, row, column, channel), its
    channels; `turned` if they are no neighbours, but columns are."""

    rows: Line
    columns: Line
    strides: tuple[int, int, int, int]
    channels: int
    turned: bool

    @property
    def step(self) -> int:
        """From one packed place to the next."""
        return self.columns.walk * self.strides[2]


class Packer:
    """Emits the copying, chunk by chunk.

    x, dy         the operands
    image, out    how they lie when packed
    filter_panel  bytes of a tile's filters of dy
    """

    def __init__(
        self, k: KernelBuilder, v: View, plan: Blocking, dtype: str, sum_dtype: str
    ) -> None:
        self.k, self.view, self.plan = k, v, plan
        self.dtype, self.sum_dtype = dtype, sum_dtype
        self.size, self.vector = itemsize(dtype), plan.lanes * plan.item
        rows, columns = Line(v.rows.pixels, v.rows.pixels), Line(v.columns.pixels, v.columns.pixels)
        self.x = Operand(v.rows, v.columns, v.image, v.channels, v.image_turned)
        self.dy = Operand(rows, columns, v.out, v.filters, v.out_turned)
        self.image, self.out = image_layout(v, plan), out_layout(plan)
        self.filter_panel = self.out.total

    def start(self, tile: IntLike) -> IntLike:
        """The first filter (or element of a run) of a tile."""
        plan = self.plan
        start = tile * plan.rows
        if plan.long_tiles == plan.tiles:
            return start
        return start - self.k.max(tile - plan.long_tiles, 0)

    def _each_row(
        self,
        operand: Operand,
        chunk: Chunk,
        layout: Layout,
        to: IntLike,
        row: Callable[[IntLike, IntLike, IntLike, IntLike, IntLike], None],
    ) -> None:
        """row(source offset of the first place, target, places, first and end of those that
        exist) for every row of a chunk."""
        k = self.k
        down, across = operand.rows, operand.columns
        n0, p0, q0 = chunk.first
        images, rows, columns = chunk.count
        begin = q0 * across.step + across.shifts[0]
        places = (columns - 1) * across.stride + across.span
        left: IntLike = 0
        right: IntLike = places
        if not across.inside:
            ahead = across.walk - 1
            left = k.min((k.max(0 - begin, 0) + ahead) // across.walk, places)
            right = k.min(k.max(across.size - begin + ahead, 0) // across.walk, places)
            right = k.max(right, left)
        top = p0 * down.step + down.shifts[0]
        with (
            k.loop(0, images) as n,
            k.loop(0, (rows - 1) * down.stride + down.span) as h,
        ):
            target = to + n * layout.image + h * layout.row
            number = h * down.walk + top
            source = (n0 + n) * operand.strides[0] + number * operand.strides[1]
            source = source + begin * operand.strides[2]
            if down.inside:
                row(source, target, places, left, right)
            else:
                with k.if_else(k.as_int(number).below(down.size)) as (exists, none):
                    with exists:
                        row(source, target, places, left, right)
                    with none:
                        self._zeros(target, layout, 0, places)

    def panel(
        self,
        source: IntLike,
        operand: Operand,
        chunk: Chunk,
        to: IntLike,
        layout: Layout,
        left: IntLike,
    ) -> None:
        """A panel of vectors: `left` channels from `source` on, anything past them."""
        k, plan = self.k, self.plan
        step = operand.step

        def turn(
            at: IntLike, target: IntLike, places: IntLike, first: IntLike, end: IntLike
        ) -> None:
            self._zeros(target, layout, 0, first)
            here, to = source + at + first * step, target + first * layout.place
            ragged = operand.channels % plan.width != 0
            for q, block in self._turned(
                operand, here, end - first, plan.vectors, left if ragged else None
            ):
                for r, values in enumerate(zip(*block)):
                    for j, value in enumerate(values):
                        offset = r * layout.place + j * self.vector
                        k.store(value, to + q * layout.place, self.sum_dtype, offset)
            self._zeros(target, layout, end, places)

        if operand.turned:
            self._each_row(operand, chunk, layout, to, turn)
            return

        def pack(masks: list[Mask | None]) -> None:
            def row(
                at: IntLike, target: IntLike, places: IntLike, first: IntLike, end: IntLike
            ) -> None:
                self._zeros(target, layout, 0, first)
                with k.loop(first, end) as q:
                    for j, mask in enumerate(masks):
                        value = k.load(
                            source + at + q * step, self.dtype, plan.lanes,
                            j * plan.lanes * self.size, mask,
                        )  # fmt: skip
                        k.store(value, target + q * layout.place, self.sum_dtype, j * self.vector)
                self._zeros(target, layout, end, places)

            self._each_row(operand, chunk, layout, to, row)

        whole: list[Mask | None] = [None] * plan.vectors
        if operand.channels % plan.width == 0:
            pack(whole)
            return
        with k.if_else(k.as_int(left) >= plan.width) as (full, part):
            with full:
                pack(whole)
            with part:
                pack(
                    [k.first_lanes(left - j * plan.lanes, plan.lanes) for j in range(plan.vectors)]
                )

    def _zeros(self, target: IntLike, layout: Layout, first: IntLike, end: IntLike) -> None:
        """Zeros in places `first` up to `end` of a packed row."""
        elements = layout.place // self.plan.item
        if isinstance(first, int) and isinstance(end, int) and first == end:
            return
        fill_zero(
            self.k, target + first * layout.place, (end - first) * elements, self.sum_dtype,
            self.plan.lanes,
        )  # fmt: skip

    def rows(self, x: IntLike, chunk: Chunk, to: IntLike) -> None:
        """Rows of x with all channels, for tiles whose rows run along them."""
        k, plan, v = self.k, self.plan, self.view
        layout, step = self.image, self.x.step
        dense = step == v.channels * self.size

        def run(source: IntLike, target: IntLike, count: IntLike) -> None:
            even = count - count % plan.lanes
            with k.loop(0, even, plan.lanes) as e:
                value = k.load(source + e * self.size, self.dtype, plan.lanes)
                k.store(value, target + e * plan.item, self.sum_dtype)
            mask = k.first_lanes(count - even, plan.lanes)
            value = k.load(source + even * self.size, self.dtype, plan.lanes, mask=mask)
            k.store(value, target + even * plan.item, self.sum_dtype, mask=mask)

        def row(
            at: IntLike, target: IntLike, places: IntLike, first: IntLike, end: IntLike
        ) -> None:
            self._zeros(target, layout, 0, first)
            source = x + at
            if self.x.turned:
                here, place = source + first * step, target + first * layout.place
                self._turn_row(here, end - first, place)
            elif dense:
                run(source + first * step, target + first * layout.place,
                    (end - first) * v.channels)  # fmt: skip
            else:
                with k.loop(first, end) as q:
                    run(source + q * step, target + q * layout.place, v.channels)
            self._zeros(target, layout, end, places)

        self._each_row(self.x, chunk, layout, to, row)

    def _turn_row(self, source: IntLike, count: IntLike, to: IntLike) -> None:
        """A row of x whose channels are planes: brought together place by place."""
        k, plan, v, layout = self.k, self.plan, self.view, self.image
        if v.channels <= INTERLEAVED:
            for q, mask in self._blocks(count):
                at = source + q * self.x.step
                planes = [
                    load_strided(k, at + c * v.image[3], self.x.step, plan.lanes, self.dtype, mask)
                    for c in range(v.channels)
                ]
                for i, value in enumerate(interleaved(k, planes)):
                    k.store(value, to + q * layout.place, self.sum_dtype, i * self.vector)
            return
        vectors = -(-v.channels // plan.lanes)
        for q, block in self._turned(self.x, source, count, vectors, v.channels):
            for j, values in enumerate(block):
                mask = k.first_lanes(v.channels - j * plan.lanes, plan.lanes)
                for r, value in enumerate(values):
                    offset = r * layout.place + j * self.vector
                    k.store(value, to + q * layout.place, self.sum_dtype, offset, mask)

    def _blocks(self, count: IntLike) -> Iterator[tuple[IntLike, Mask | None]]:
        """Loops over `count` places by vectors of them: (first place, mask of the last vector)."""
        k, lanes = self.k, self.plan.lanes
        even = count - count % lanes
        with k.loop(0, even, lanes) as q:
            yield q, None
        with k.loop(even, count, lanes) as q:
            yield q, k.first_lanes(count - q, lanes)

    def _turned(
        self,
        operand: Operand,
        source: IntLike,
        count: IntLike,
        vectors: int,
        left: IntLike | None,
    ) -> Iterator[tuple[IntLike, list[list[Float]]]]:
        """Blocks of `count` places by channels: (first place, for each vector of channels the
        places' vectors), some past the last place. In place of a channel past the `left` first,
        the last is read; nobody stores what comes of it."""
        k, lanes = self.k, self.plan.lanes
        for q, mask in self._blocks(count):
            block = []
            for j in range(vectors):
                rows = []
                for r in range(lanes):
                    channel: IntLike = j * lanes + r
                    channel = channel if left is None else k.min(channel, left - 1)
                    at = source + q * operand.step + channel * operand.strides[3]
                    rows.append(load_strided(k, at, operand.step, lanes, self.dtype, mask))
                block.append(transposed(k, rows))
            yield q, block

    def filters(self, dy: IntLike, left: IntLike, chunk: Chunk, to: IntLike) -> None:
        """All filters of a block, of which `left` exist from `dy` on, for tiles whose rows run
        along them: tile by tile, pixel by pixel. A vector more than a pixel's filters is stored;
        the next pixel's overwrite it."""
        k, plan, v = self.k, self.plan, self.view
        vectors = -(-plan.rows // plan.lanes)

        def turn(
            at: IntLike, target: IntLike, places: IntLike, first: IntLike, end: IntLike
        ) -> None:
            with k.loop(0, plan.tiles) as tile:
                start, to = self.start(tile), target + tile * self.filter_panel
                source = dy + at + start * v.out[3]
                for q, block in self._turned(self.dy, source, places, vectors, left - start):
                    for r, values in enumerate(zip(*block)):
                        for j, value in enumerate(values):
                            offset = r * self.out.place + j * self.vector
                            k.store(value, to + q * self.out.place, self.sum_dtype, offset)

        if self.dy.turned:
            self._each_row(self.dy, chunk, self.out, to, turn)
            return

        def row(
            at: IntLike, target: IntLike, places: IntLike, first: IntLike, end: IntLike
        ) -> None:
            with k.loop(0, places) as q:
                pixel = dy + at + q * v.out[2]
                place = target + q * self.out.place

                def tiles(low: IntLike, high: IntLike, inside: bool) -> None:
                    with k.loop(low, high) as tile:
                        start = self.start(tile)
                        for j in range(vectors):
                            filter_ = start + j * plan.lanes
                            mask = None
                            if not inside:
                                mask = k.first_lanes(left - filter_, plan.lanes)
                                filter_ = k.min(filter_, left - 1)
                            value = k.load(
                                pixel + filter_ * self.size, self.dtype, plan.lanes, mask=mask
                            )
                            k.store(
                                value, place + tile * self.filter_panel, self.sum_dtype,
                                j * self.vector,
                            )  # fmt: skip

                whole = self._tiles_inside(vectors * plan.lanes)
                tiles(0, whole, True)
                tiles(whole, plan.tiles, False)

        self._each_row(self.dy, chunk, self.out, to, row)

    def _tiles_inside(self, width: int) -> int:
        """How many first tiles of every block can read `width` filters without leaving dy."""
        plan, v = self.plan, self.view
        _, blocks = block_counts(v, plan)
        last = v.filters - (blocks - 1) * plan.filter_chunk
        tile = 0
        while tile < plan.tiles:
            start = tile * plan.rows - max(tile - plan.long_tiles, 0)
            if start + width > last:
                break
            tile += 1
        return tile
