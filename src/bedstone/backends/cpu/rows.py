"""Reductions over some axes followed by a pass over the same elements: softmax, normalisation.

A row is what shares one set of statistics: one index of the outer axes, all of the reduced ones.
Lanes lie `along` the row where it is contiguous, or `across` rows where these are neighbours in
memory (softmax over C of NCHW, batch normalisation of NHWC); then a block of up to WIDEST_BLOCK
rows is done at once, its statistics kept in the first-level cache. A kernel is written once, for
both: `walk` calls its body for every vector of the rows, `Accumulator` and `PerRow` hold what
belongs to a row.

Long rows are cut into chunks, a function of the shape alone: partial statistics of all chunks,
then their merger, then the pass, as three parallel phases. So results do not depend on threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bedstone.backends.cpu.builder import Call, Int, KernelBuilder, itemsize
from bedstone.backends.cpu.elementwise import Nest, Stream, collapse
from bedstone.backends.cpu.irtypes import I32
from bedstone.backends.cpu.tasks import Output, unravel
from bedstone.backends.cpu.values import Float, IntLike, Mask
from bedstone.spec.tensor import TensorDesc

# Elements of rows that one unit of work keeps in the second-level cache between its passes.
UNIT_ELEMENTS = 64 * 1024
CHUNK_ELEMENTS = 32 * 1024  # of a long row or block; not more than MOST_CHUNKS of them
MOST_CHUNKS = 64
WIDEST_BLOCK = 1024  # rows side by side
WAYS = 4  # accumulators along a row: hide the latency of the additions
MOST_SLOTS = 16  # numbers that a row of a block may have at a time
LEAST_UNIT = 8 * 1024  # elements worth a unit of their own


def add(a: Float, b: Float) -> Float:
    """a + b."""
    return a + b


@dataclass
class Position:
    """One vector of elements: where each operand has it, and which lanes exist."""

    rows: Rows
    addresses: list[IntLike]  # of lane 0
    lane: IntLike  # number of lane 0 along the vector axis
    mask: Mask | None
    spot: IntLike  # place in a buffer that holds all elements of a unit, in elements
    way: int = 0
    streaming: bool = False

    def load(self, operand: int) -> Any:
        """The operand's values, in the type computed in; masked lanes read as 0."""
        rows = self.rows
        return rows.load(operand, self.addresses[operand], rows.vector_stride(operand), self.mask)

    def store(self, output: Output, operand: int, value: Float) -> None:
        """Blend values into an output."""
        stride = self.rows.vector_stride(operand)
        output.store(value, self.addresses[operand], stride, self.mask, self.streaming)


class PerRow:
    """A number for each row: in every lane of a vector (along), or in memory (across)."""

    def __init__(self, rows: Rows, value: Float | None = None, slot: int = 0) -> None:
        self.rows, self._value, self.slot = rows, value, slot

    def at(self, position: Position) -> Float:
        """The numbers that belong to the lanes of a position."""
        if self._value is not None:
            return self._value
        return self.rows.k.load(self.rows.place(self.slot, position.lane), self.rows.compute,
                                self.rows.lanes)  # fmt: skip


class Accumulator:
    """A running number for each row."""

    def __init__(self, rows: Rows, initial: float) -> None:
        self.rows, k = rows, rows.k
        vector = k.constant(initial, rows.compute, rows.lanes)
        if rows.along:
            self.ways = [k.variable(vector) for _ in range(WAYS)]
        else:
            self.slot = rows.new_slot()
            rows.each_column(lambda p: k.store(vector, rows.place(self.slot, p.lane), rows.compute))

    def get(self, position: Position) -> Float:
        """The values so far."""
        rows = self.rows
        if rows.along:
            return self.ways[position.way].value
        return rows.k.load(rows.place(self.slot, position.lane), rows.compute, rows.lanes)

    def set(self, position: Position, value: Float) -> None:
        """Replace them."""
        rows = self.rows
        if rows.along:
            self.ways[position.way].set(value)
        else:
            rows.k.store(value, rows.place(self.slot, position.lane), rows.compute)

    def finish(self, combine: Callable[[Float, Float], Float]) -> PerRow:
        """One number a row."""
        rows = self.rows
        if not rows.along:
            return PerRow(rows, slot=self.slot)
        values = [way.value for way in self.ways]
        while len(values) > 1:
            values = [combine(a, b) for a, b in zip(values[::2], values[1::2])]
        return PerRow(rows, rows.k.splat(rows.k.reduce(values[0], combine), rows.lanes))


class Rows:
    """The geometry of a kernel, and the loops over it.

    streams   operands of equal dims; what is constant along axes has strides of 0 there
    axes      the reduced axes
    lead      number of the operand (an output, or the main input) whose memory order is followed
    """

    def __init__(
        self,
        k: KernelBuilder,
        call: Call,
        streams: Sequence[Stream],
        axes: Sequence[int],
        lead: int,
        compute: str,
    ) -> None:
        self.k, self.call, self.streams = k, call, list(streams)
        self.compute, self.lanes = compute, k.lanes(compute)
        self.width = itemsize(compute)
        self.dtypes = [s.desc.dtype.value for s in streams]
        self.sizes = [itemsize(d) for d in self.dtypes]
        rank = streams[0].desc.rank
        outer = [a for a in range(rank) if a not in axes]
        self.inner, self.outer = self._nest(list(axes), lead), self._nest(outer, lead)
        self.length = math.prod(self.inner.dims)
        self.count = math.prod(self.outer.dims)
        self.along = self._runs_along(lead)
        self._choose_block()
        self.scratch: Int = None  # type: ignore[assignment]
        self.slots = 0
        self.total_bytes = sum(s.desc.nbytes for s in streams)
        self.large = self.total_bytes > k.target.l3_bytes

    # Geometry ------------------------------------------------------------------------------------

    def _nest(self, axes: list[int], lead: int) -> Nest:
        """Collapsed axes in the order of the lead's memory."""
        if not axes:
            return Nest((1,), tuple((0,) for _ in self.streams), (0,) * len(self.streams))
        parts = [
            TensorDesc(
                tuple(s.desc.dims[a] for a in axes),
                tuple(s.desc.strides[a] for a in axes),
                s.desc.dtype,
            )
            for s in self.streams
        ]
        order = [*range(len(parts))]
        order.append(order.pop(lead))
        nest = collapse([parts[i] for i in order])
        back = [order.index(i) for i in range(len(parts))]
        return Nest(
            nest.dims,
            tuple(nest.strides[i] for i in back),
            tuple(nest.offsets[i] for i in back),
        )

    def _runs_along(self, lead: int) -> bool:
        across = self.outer.strides[lead][-1] == 1 and self.outer.dims[-1] > 1
        along = self.inner.strides[lead][-1] == 1 and self.inner.dims[-1] > 1
        return along or not across

    def _choose_block(self) -> None:
        """Rows of a unit, and chunks of a row."""
        columns = 1 if self.along else self.outer.dims[-1]
        rounded = -(-columns // self.lanes) * self.lanes if not self.along else 1
        least = 1 if self.along else self.lanes
        self.chunk_axis = max(range(len(self.inner.dims)), key=lambda a: self.inner.dims[a])
        self.chunk = self.inner.dims[self.chunk_axis]
        self.chunks = 1
        if self.length * least <= UNIT_ELEMENTS:
            width = UNIT_ELEMENTS // max(self.length, 1) // least * least
            self.block = 1 if self.along else max(least, min(width, rounded, WIDEST_BLOCK))
        else:
            self.block = 1 if self.along else min(rounded, WIDEST_BLOCK)
            wanted = min(self.length * self.block // CHUNK_ELEMENTS, MOST_CHUNKS)
            self.chunk = -(-self.chunk // max(wanted, 1))
            if self.along and self.chunk_axis == len(self.inner.dims) - 1:
                self.chunk = -(-self.chunk // self.lanes) * self.lanes
            self.chunks = -(-self.inner.dims[self.chunk_axis] // self.chunk)
        self.blocks = -(-columns // self.block)
        self.unit_dims = self.outer.dims if self.along else (*self.outer.dims[:-1], self.blocks)

    @property
    def units(self) -> int:
        """Rows, or blocks of rows."""
        return math.prod(self.unit_dims)

    @property
    def buffer_elements(self) -> int:
        """Elements of a buffer with a spot for every element of an (uncut) unit."""
        if not self.along:
            return self.length * self.block
        last = -(-self.inner.dims[-1] // self.lanes) * self.lanes
        return self.length // self.inner.dims[-1] * last

    def vector_stride(self, operand: int) -> int:
        """The operand's stride from lane to lane."""
        nest = self.inner if self.along else self.outer
        return nest.strides[operand][-1]

    # Units ---------------------------------------------------------------------------------------

    def scratch_bytes(self, buffer: bool) -> int:
        """Scratch of a thread: the slots, and a buffer of elements."""
        bytes_ = 0 if self.along else MOST_SLOTS * self.block * self.width
        if buffer:
            bytes_ += self.buffer_elements * self.width
        return bytes_

    def enter(self, unit: IntLike, scratch: Int) -> None:
        """Begin a unit: find its corner. Slots are counted anew."""
        k = self.k
        self.scratch, self.slots = scratch, 0
        indices = unravel(unit, self.unit_dims)
        self.first_column: IntLike = 0
        self.columns: IntLike = 1
        if not self.along:
            self.first_column = indices[-1] * self.block
            total = self.outer.dims[-1]
            even = total % self.block == 0
            self.columns = self.block if even else k.min(total - self.first_column, self.block)
            indices[-1] = self.first_column
        self.corner: list[IntLike] = []
        for operand, stream in enumerate(self.streams):
            offset = self.outer.offsets[operand] + self.inner.offsets[operand]
            address: IntLike = stream.address + offset * self.sizes[operand]
            for index, stride in zip(indices, self.outer.strides[operand]):
                address = address + index * (stride * self.sizes[operand])
            self.corner.append(address)

    def new_slot(self) -> int:
        """Memory for one more number a row (across)."""
        if self.slots == MOST_SLOTS:
            raise RuntimeError(f"a row kernel holds more than {MOST_SLOTS} numbers a row")
        self.slots += 1
        return self.slots - 1

    def place(self, slot: int, lane: IntLike) -> IntLike:
        """Where a slot keeps the number of a row of the block."""
        return self.scratch + (slot * self.block * self.width) + lane * self.width

    def load(self, operand: int, address: IntLike, stride: int, mask: Mask | None) -> Any:
        """Lanes of an operand at a stride."""
        k, dtype = self.k, self.dtypes[operand]
        model = k.constant(0.0, self.compute, self.lanes)
        if stride == 0:
            return k.cast(k.load(address, dtype), model)
        if stride == 1:
            return k.cast(k.load(address, dtype, self.lanes, mask=mask), model)
        offsets = k.iota(self.lanes, I32) * (stride * self.sizes[operand])
        return k.cast(k.gather(address, offsets, dtype, mask), model)

    # Loops ---------------------------------------------------------------------------------------

    def each_column(self, body: Callable[[Position], None]) -> None:
        """body(position) for the vectors of a block of rows (across), once (along). Masks there
        are only for memory of the caller's: slots have room for whole vectors."""
        if self.along:
            body(Position(self, list(self.corner), 0, None, 0))
            return
        k, lanes = self.k, self.lanes
        with k.loop(0, self.columns, lanes, at_least_once=True) as w:
            mask = None
            if self.outer.dims[-1] % lanes:
                mask = k.first_lanes(self.columns - w, lanes)
            addresses = self._step(self.corner, self.outer, -1, w)
            body(Position(self, addresses, w, mask, 0))

    def walk(
        self,
        body: Callable[[Position], None],
        chunk: IntLike | None = None,
        ways: int = 1,
        written: int | None = None,
    ) -> None:
        """body(position) for every vector of the unit, or of one of its chunks; with `ways` > 1
        along the row in turns for each way of the accumulators. Loops are aligned to the operand
        `written`, so that a large one can be streamed."""
        streamed = written is not None and self.vector_stride(written) == 1
        self.written = written if streamed else None
        bounds: list[tuple[IntLike, IntLike]] = [(0, d) for d in self.inner.dims]
        if chunk is not None:
            first = chunk * self.chunk
            stop = self.inner.dims[self.chunk_axis]
            even = stop % self.chunk == 0
            last = first + self.chunk if even else self.k.min(first + self.chunk, stop)
            bounds[self.chunk_axis] = first, last
        self._axes(self.corner, 0, 0, bounds, body, ways)

    def _step(
        self, addresses: Sequence[IntLike], nest: Nest, axis: int, index: IntLike
    ) -> list[IntLike]:
        return [
            a + index * (s[axis] * size) for a, s, size in zip(addresses, nest.strides, self.sizes)
        ]

    def _axes(
        self, addresses: Sequence[IntLike], axis: int, spot: IntLike, bounds: Any, body: Any,
        ways: int,
    ) -> None:  # fmt: skip
        k, dims = self.k, self.inner.dims
        if self.along and axis == len(dims) - 1:
            pitch = -(-dims[-1] // self.lanes) * self.lanes
            self._vectors(addresses, spot * pitch, *bounds[axis], body, ways)
            return
        if axis == len(dims):
            self._columns(addresses, spot * self.block, body)
            return
        with k.loop(*bounds[axis]) as i:
            at = self._step(addresses, self.inner, axis, i)
            self._axes(at, axis + 1, spot * dims[axis] + i, bounds, body, ways)

    def _vectors(
        self, addresses: Sequence[IntLike], spot: IntLike, first: IntLike, last: IntLike,
        body: Any, ways: int,
    ) -> None:  # fmt: skip
        """Along a row: `ways` vectors a turn, then single ones, then a masked one."""
        k, lanes = self.k, self.lanes

        def at(i: IntLike, mask: Any, way: int, streaming: bool = False) -> None:
            moved = self._step(addresses, self.inner, -1, i)
            body(Position(self, moved, i, mask, spot + i, way, streaming))

        if self.written is not None and not self._is_short(last - first):
            head = self._to_alignment(addresses, first, last)
            with k.if_(head > 0):
                at(first, k.first_lanes(head, lanes), 0)
            first = first + head
        count = last - first
        turns = first + (count - count % (lanes * ways))
        whole = first + (count - count % lanes)
        if ways > 1 and not self._is_short(count):
            with k.loop(first, turns, lanes * ways) as i:
                for way in range(ways):
                    at(i + way * lanes, None, way)
        else:
            turns = first

        def plain() -> None:
            if not (isinstance(whole, int) and isinstance(turns, int) and whole == turns):
                with k.loop(turns, whole, lanes) as i:
                    at(i, None, 0)

        def streaming() -> None:
            with k.loop(turns, whole, lanes) as i:
                at(i, None, 0, True)

        self._stream(self.written is not None and not self._is_short(last - first), True,
                     streaming, plain)  # fmt: skip
        rest = count % lanes
        if not (isinstance(rest, int) and rest == 0):
            with k.if_(k.as_int(rest) > 0):
                at(whole, k.first_lanes(rest, lanes), 0)

    def _is_short(self, count: IntLike) -> bool:
        """Too short a piece of row for turns and alignment."""
        return isinstance(count, int) and count < self.lanes * WAYS

    def _to_alignment(self, addresses: Sequence[IntLike], first: IntLike, last: IntLike) -> Int:
        """Elements until the written operand is aligned."""
        size = self.sizes[self.written]
        address = self._step(addresses, self.inner, -1, first)[self.written]
        return self.k.min((0 - address // size) % self.lanes, last - first)

    def _stream(
        self, possible: bool, aligned: Any, streaming: Callable[[], None],
        plain: Callable[[], None],
    ) -> None:  # fmt: skip
        """The streaming loop where it is allowed: large outputs, aligned, and beta 0."""
        if not (possible and self.large):
            plain()
            return
        allowed = self.call.beta.eq(0.0)
        if aligned is not True:
            allowed = allowed & aligned
        with self.k.if_else(allowed) as (yes, no):
            with yes:
                streaming()
            with no:
                plain()

    def _columns(self, addresses: Sequence[IntLike], spot: IntLike, body: Any) -> None:
        """Across rows: the vectors of one element of each row of the block."""
        k, lanes, count = self.k, self.lanes, self.columns

        def at(w: IntLike, mask: Any, streaming: bool = False) -> None:
            moved = self._step(addresses, self.outer, -1, w)
            body(Position(self, moved, w, mask, spot + w, 0, streaming))

        whole = count - count % lanes

        def plain() -> None:
            if not (isinstance(whole, int) and whole == 0):
                with k.loop(0, whole, lanes) as w:
                    at(w, None)

        def streaming() -> None:
            with k.loop(0, whole, lanes) as w:
                at(w, None, True)

        aligned: Any = True
        if self.written is not None:
            vector = lanes * self.sizes[self.written]
            aligned = (addresses[self.written] % vector).eq(0)
        self._stream(self.written is not None, aligned, streaming, plain)
        rest = count % lanes
        if not (isinstance(rest, int) and rest == 0):
            with k.if_(k.as_int(rest) > 0):
                at(whole, k.first_lanes(rest, lanes))

    # Numbers of rows ------------------------------------------------------------------------------

    def derive(self, function: Callable[..., Float], *numbers: PerRow) -> PerRow:
        """function(numbers of a row), for every row."""
        if self.along:
            position = Position(self, [], 0, None, 0)
            return PerRow(self, function(*(n.at(position) for n in numbers)))
        slot = self.new_slot()

        def body(position: Position) -> None:
            value = function(*(n.at(position) for n in numbers))
            self.k.store(value, self.place(slot, position.lane), self.compute)

        self.each_column(body)
        return PerRow(self, slot=slot)

    def save(self, numbers: Sequence[PerRow], address: IntLike) -> None:
        """Put the numbers of this unit's rows into memory (`saved_bytes` of them)."""
        k = self.k

        def body(position: Position) -> None:
            for i, number in enumerate(numbers):
                place = address + (i * self.block * self.width) + position.lane * self.width
                value = number.at(position)
                if self.along:
                    k.store(k.extract(value, 0), place, self.compute)
                else:
                    k.store(value, place, self.compute)

        self.each_column(body)

    def saved_bytes(self, count: int) -> int:
        """Bytes that `save` needs for `count` numbers a row."""
        return count * self.block * self.width

    def saved(self, address: IntLike, count: int) -> list[PerRow]:
        """Numbers that `save` put away."""
        k = self.k
        found = []
        for i in range(count):
            start = address + i * self.block * self.width
            if self.along:
                found.append(PerRow(self, k.splat(k.load(start, self.compute), self.lanes)))
                continue
            slot = self.new_slot()

            def body(position: Position, start: IntLike = start, slot: int = slot) -> None:
                value = k.load(start + position.lane * self.width, self.compute, self.lanes)
                k.store(value, self.place(slot, position.lane), self.compute)

            self.each_column(body)
            found.append(PerRow(self, slot=slot))
        return found

    def total(
        self,
        value: Callable[[Position], Float],
        chunk: IntLike | None,
        combine: Callable[[Float, Float], Float] = add,
        initial: float = 0.0,
    ) -> PerRow:
        """The sum (or another combination) of value(position) over each row of the unit or chunk;
        `initial` is the combination's neutral element."""
        return self.totals(lambda p: [value(p)], 1, chunk, combine, initial)[0]

    def totals(
        self,
        values: Callable[[Position], Sequence[Float]],
        count: int,
        chunk: IntLike | None,
        combine: Callable[[Float, Float], Float] = add,
        initial: float = 0.0,
    ) -> list[PerRow]:
        """Several such sums in one pass."""
        accumulators = [Accumulator(self, initial) for _ in range(count)]

        def body(position: Position) -> None:
            for accumulator, new in zip(accumulators, values(position)):
                if self.along and position.mask is not None:
                    new = self.k.select(position.mask, new, initial)
                accumulator.set(position, combine(accumulator.get(position), new))

        self.walk(body, chunk, ways=WAYS)
        return [accumulator.finish(combine) for accumulator in accumulators]

    def each_row(self, body: Callable[[Position], None]) -> None:
        """body(position) for the operands that have one element a row: its addresses and mask are
        those of this element in neighbouring rows, `row_stride` apart."""
        if self.along:
            body(Position(self, list(self.corner), 0, self.k.first_lanes(1, self.lanes), 0))
        else:
            self.each_column(body)

    def row_stride(self, operand: int) -> int:
        """The stride of such an operand from row to row."""
        return 1 if self.along else self.outer.strides[operand][-1]
