"""Backward pooling: dx = alpha * (what each dy gives to the taps of its window) + beta * dx.

Every thread owns the part of dx that it works on, so results do not depend on their number.

Maximum: a unit is a band of the first spatial axis of one plane (or of some vectors of channels).
All windows that reach into the band are searched again, and their dy is added, in row-major
order, to the maxima that lie in the band, in a buffer of the type computed in. Windows across a
border of bands are searched twice.

Average: dx gathers. A row first sums the rows of dy whose windows hold it (scaled by their taps)
into a padded buffer; along the last axis the elements of each rest modulo the stride then read
neighbouring elements of that buffer. Lanes along columns: the rests are interleaved. Lanes along
channels: a pixel's vectors are stored one after another; where the last of them is not full and
rows are packed, whole into a second buffer, so that what one pixel writes too much the next one
puts right, and only the end of the row needs a mask.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

from bedstone.backends.cpu.builder import Call, KernelBuilder, itemsize
from bedstone.backends.cpu.irtypes import I32
from bedstone.backends.cpu.pooling_reader import LocatedMaximum, WindowReader
from bedstone.backends.cpu.pooling_windows import (
    LONGEST_STRIDED_LOAD,
    UNROLLED_TAPS,
    Axis,
    lanes_along_channels,
    nested,
)
from bedstone.backends.cpu.shuffles import interleaved
from bedstone.backends.cpu.tasks import Output, each_unit, unravel
from bedstone.backends.cpu.values import Float, Int, IntLike, Mask
from bedstone.spec.pooling import PoolingProblem

BAND_BYTES = 64 * 1024  # of the buffer of a band: half of a small second-level cache
EXTENTS_A_BAND = 2  # at least so many window extents, so that few are searched twice
CHANNEL_VECTORS = 4  # vectors of channels in flight
MOST_COMPARED_TAPS = 16  # of a window whose lanes are channels; beyond it lanes go one by one
# Vectors of channels of a unit that searches for maxima: what lies together in memory is read
# together (2 times faster than 4).
BLOCK_VECTORS = 16
UNIT_ELEMENTS = 8 * 1024


def windows_over(
    k: KernelBuilder, axis: Axis, first: IntLike, last: IntLike
) -> tuple[IntLike, IntLike]:
    """The range of windows that reach from before `last` to `first` or beyond (inclusive)."""
    before = k.max(first + (axis.low - axis.extent + axis.stride), 0) // axis.stride
    after = (last + axis.low) // axis.stride + 1
    return before, k.min(after, axis.windows)


class Backward(WindowReader):
    """What both gradients share."""

    def __init__(self, k: KernelBuilder, problem: PoolingProblem, call: Call) -> None:
        tensors = [o.desc for o in problem.operands]
        super().__init__(k, problem, call, problem.saved, lanes_along_channels(*tensors))
        self.dx, self.dy = problem.x, problem.y
        self.width = itemsize(self.compute)
        self.vectors = 1
        if self.channels:
            self.vectors = min(CHANNEL_VECTORS, -(-self.dx.dims[1] // self.lanes))
        self.group = self.vectors * self.lanes  # channels in flight
        self.block = self.group  # channels of a unit
        self.large = problem.bytes > k.target.l3_bytes

    @property
    def planes(self) -> tuple[int, int]:
        """Images, and planes or blocks of channels in each."""
        n, c = self.dx.dims[:2]
        return n, -(-c // self.block) if self.channels else c

    def _masks(self, c: IntLike) -> list[Mask | None]:
        """Which lanes of the vectors from channel c on are there."""
        k, channels = self.k, self.dx.dims[1]
        if channels % self.group == 0:
            return [None] * self.vectors
        return [
            k.first_lanes(channels - c - number * self.lanes, self.lanes)
            for number in range(self.vectors)
        ]


class MaximumBackward(Backward):
    """Emits the kernel's parallel phase."""

    def __init__(self, k: KernelBuilder, problem: PoolingProblem, call: Call) -> None:
        super().__init__(k, problem, call)
        if self.channels:
            groups = -(-self.dx.dims[1] // self.group)
            self.block = min(BLOCK_VECTORS // self.vectors, groups) * self.group
        first = self.axes[0]
        self.inner = math.prod(a.size for a in self.axes[1:])  # elements of a band's row
        row_bytes = self.inner * self.width * (self.block if self.channels else 1)
        band = max(BAND_BYTES // row_bytes, EXTENTS_A_BAND * first.extent, self._lanes_of_axis())
        self.band = min(band, first.size)
        self.bands = -(-first.size // self.band)

    def _lanes_of_axis(self) -> int:
        """In one dimension a band is a range of columns: some vectors of them."""
        return 1 if len(self.axes) > 1 or self.channels else CHANNEL_VECTORS * self.lanes

    def accumulator(self, first: Callable[[], Int]) -> Any:
        return LocatedMaximum(self.k, self.compute, first())

    def emit(self) -> None:
        k = self.k
        slots = self.band * self.inner + 1  # the last takes what belongs to other bands
        lanes_of_slot = self.block if self.channels else 1
        self.buffer_bytes = -(-slots * lanes_of_slot * self.width // 64) * 64
        vector_bytes = self.lanes * self.width
        scratch = self.buffer_bytes + 2 * self.vectors * vector_bytes
        n, c = self.planes
        units = n * c * self.bands
        with each_unit(k, self.call.threads, units, scratch, self.large) as (unit, buffer):
            self.output = Output(k, self.call, self.dtype, self.lanes)
            self.buffer = buffer
            zero = k.constant(0.0, self.compute, 64 // self.width)
            with k.loop(0, self.buffer_bytes, 64) as offset:
                k.store(zero, buffer + offset, self.compute)
            image, plane, band = unravel(unit, (n, c, self.bands))
            first = band * self.band
            last = k.min(first + self.band, self.axes[0].size)
            channel = plane * self.block if self.channels else plane
            self._search(image, channel, first, last)
            self._write(image, channel, first, last)

    def _search(self, n: IntLike, c: IntLike, first: IntLike, last: IntLike) -> None:
        """Add the dy of every window that reaches into the band."""
        k = self.k
        reach = windows_over(k, self.axes[0], first, last - 1)
        others = [(0, a.windows) for a in self.axes[1:]]
        if self.channels:
            with nested(k, [reach, *others]) as windows, self._each_group(c) as group:
                self._search_channels(n, c + group, windows, group, first, last)
            return
        if len(self.axes) == 1:  # the windows of the last axis are the band's own
            begin = reach[0] // self.lanes * self.lanes
            with k.loop(begin, reach[1], self.lanes) as q:
                self._columns(n, c, [], q, first, last, False)
            return
        with nested(k, [reach, *others[:-1]]) as windows:
            self.each_column_block(
                lambda q, whole: self._columns(n, c, windows, q, first, last, whole)
            )

    @contextlib.contextmanager
    def _each_group(self, c: IntLike) -> Iterator[IntLike]:
        """Loop over the unit's channels, a group at a time: from which on, counted from c."""
        channels, group = self.dx.dims[1], self.group
        count: IntLike = self.block
        if channels % self.block:
            count = self.k.min(channels - c, self.block)
        with self.k.loop(0, count, group, at_least_once=True) as at:
            yield at

    def _search_channels(
        self, n: IntLike, c: IntLike, windows: Any, group: IntLike, first: IntLike, last: IntLike
    ) -> None:
        """One window of some vectors of channels."""
        k, masks = self.k, self._masks(c)
        positions = self._channel_positions(n, c, windows, masks)
        values = []
        for number, mask in enumerate(masks):
            address = self.corner("dy", self.dy, n, c + number * self.lanes, *windows)
            values.append(k.load(address, self.dtype, self.lanes, mask=mask))
        buffer = self.buffer + group * self.width
        if self.problem.reduction_length <= MOST_COMPARED_TAPS:
            self._add_where(positions, values, windows, buffer, first, last)
            return
        for number, mask in enumerate(masks):
            self._add(positions[number], values[number], number, buffer, first, last, mask)

    def _channel_positions(
        self, n: IntLike, c: IntLike, windows: Any, masks: list[Mask | None]
    ) -> list[Int]:
        """Where the maxima of one window are, for each vector of channels."""
        if self.problem.indices is None:
            return [f.position.value for f in self.channel_block(n, c, windows, masks)]
        return [
            self._given(mask, n, c + number * self.lanes, *windows)
            for number, mask in enumerate(masks)
        ]

    def _given(self, mask: Mask | None, *indices: IntLike) -> Int:
        """Positions from the operand `indices`; of masked lanes, anything."""
        k, desc = self.k, self.problem.indices
        address = self.corner("indices", desc, *indices)
        stride = desc.strides[1 if self.channels else desc.rank - 1]
        if stride == 1:
            found = k.load(address, "int64", self.lanes, mask=mask)
        else:
            found = k.gather(address, k.iota(self.lanes) * (8 * stride), "int64", mask)
        return k.resize(found, I32)

    def _columns(
        self, n: IntLike, c: IntLike, windows: Any, q: IntLike,
        first: IntLike, last: IntLike, whole: bool,
    ) -> None:  # fmt: skip
        """The windows q, q + 1, ... of a row."""
        k, lanes = self.k, self.lanes
        mask = None if whole else k.first_lanes(self.axes[-1].windows - q, lanes)
        if self.problem.indices is None:
            position = self.column_block(n, c, windows, q, whole).position.value
        else:
            position = self._given(mask, n, c, *windows, q)
        address = self.corner("dy", self.dy, n, c, *windows, q)
        stride = self.dy.strides[-1]
        if stride == 1:
            value = k.load(address, self.dtype, lanes, mask=mask)
        else:
            value = k.gather(address, k.iota(lanes) * (stride * self.size), self.dtype, mask)
        self._add(position, value, 0, self.buffer, first, last, mask)

    def _add_where(
        self, positions: list[Int], values: list[Float], windows: Any,
        buffer: IntLike, first: IntLike, last: IntLike,
    ) -> None:  # fmt: skip
        """Channels of one window: at each of its taps in the band, add the lanes whose maximum it
        is. (What masked lanes add goes to channels that are not there.)"""
        k, axis, step = self.k, self.axes[0], self.lanes * self.width
        (begin, end), *others = self.tap_ranges(self.axes, windows)
        start = axis.start(windows[0])
        begin = k.max(begin, (k.max(first - start, 0) + (axis.dilation - 1)) // axis.dilation)
        # (The window starts before the band's end, or no window of this range reaches into it.)
        end = k.min(end, (k.max(last - start, 0) + (axis.dilation - 1)) // axis.dilation)
        with nested(k, [(begin, end), *others]) as taps:
            position: IntLike = 0
            for along, window, tap in zip(self.axes, windows, taps):
                position = position * along.size + along.start(window) + tap * along.dilation
            place = buffer + (position - first * self.inner) * (self.block * self.width)
            here = self._spread_int(position)
            for number, (found, value) in enumerate(zip(positions, values)):
                old = k.load(place, self.compute, self.lanes, number * step)
                added = old + k.select(found.eq(here), value, 0.0)
                k.store(added, place, self.compute, number * step)

    def _add(
        self, position: Int, value: Float, number: int, buffer: IntLike,
        first: IntLike, last: IntLike, mask: Mask | None,
    ) -> None:  # fmt: skip
        """Add each lane to its slot, one after another: lanes may share one."""
        k, lanes, width = self.k, self.lanes, self.width
        start = k.splat(k.resize(k.as_int(first * self.inner), I32), lanes)
        slots = k.splat(k.resize(k.as_int((last - first) * self.inner), I32), lanes)
        slot = position - start
        here = slot.below(slots)
        if mask is not None:
            here = here & mask
        slot = k.select(here, slot, self.band * self.inner)
        places = self.buffer + self.buffer_bytes + 2 * number * lanes * width
        values = places + lanes * width
        k.store(slot, places, "int32")
        k.store(value, values, self.compute)
        pitch = self.block * width if self.channels else width
        for lane in range(lanes):
            at = k.resize(k.load(places, "int32", offset=4 * lane), self._i64)
            address = buffer + at * pitch
            offset = (number * lanes + lane) * width if self.channels else 0
            added = k.load(values, self.compute, offset=lane * width)
            old = k.load(address, self.compute, offset=offset)
            k.store(old + added, address, self.compute, offset=offset)

    @property
    def _i64(self) -> Any:
        return self.k.as_int(0).type

    def _write(self, n: IntLike, c: IntLike, first: IntLike, last: IntLike) -> None:
        """Blend the band into dx; a large one that need not be read goes past the caches."""
        k = self.k
        vector = self.lanes * self.size
        steps = [s * self.size for s in self.dx.strides]
        run = steps.pop(1 if self.channels else -1) // self.size
        length = self.dx.dims[1 if self.channels else -1]
        whole = run == 1 and length % self.lanes == 0 and all(s % vector == 0 for s in steps)
        if not (self.large and whole):
            self._write_band(n, c, first, last, False)
            return
        aligned = (self.pointers["dx"] % vector).eq(0)
        with k.if_else(self.call.beta.eq(0.0) & aligned) as (new, old):
            with new:
                self._write_band(n, c, first, last, True)
            with old:
                self._write_band(n, c, first, last, False)

    def _write_band(
        self, n: IntLike, c: IntLike, first: IntLike, last: IntLike, streaming: bool
    ) -> None:
        k, lanes, width = self.k, self.lanes, self.width
        others = [(0, a.size) for a in self.axes[1:]]
        sizes = [a.size for a in self.axes]

        def slot_of(indices: list[IntLike]) -> IntLike:
            slot: IntLike = indices[0] - first
            for index, size in zip(indices[1:], sizes[1:]):
                slot = slot * size + index
            return slot

        if self.channels:
            with nested(k, [(first, last), *others]) as indices, self._each_group(c) as group:
                source = self.buffer + (slot_of(indices) * self.block + group) * width
                for number, mask in enumerate(self._masks(c + group)):
                    value = k.load(source, self.compute, lanes, number * lanes * width)
                    channel = c + group + number * lanes
                    address = self.corner("dx", self.dx, n, channel, *indices)
                    self._put(value, address, 1, mask, streaming)
            return
        *outer, (begin, end) = [(first, last), *others]
        with nested(k, outer) as indices, k.loop(begin, end, lanes) as w:
            mask = None
            if len(outer) == 0 or sizes[-1] % lanes:
                mask = k.first_lanes(end - w, lanes)
            source = self.buffer + slot_of([*indices, w]) * width
            value = k.load(source, self.compute, lanes, mask=mask)
            address = self.corner("dx", self.dx, n, c, *indices, w)
            self._put(value, address, self.dx.strides[-1], mask, streaming)

    def _put(
        self, value: Float, address: IntLike, stride: int, mask: Mask | None, streaming: bool
    ) -> None:
        """A vector of dx. A partly masked block of channels has whole vectors too."""
        if not streaming:
            self.output.store(value, address, stride, mask)
            return
        if mask is None:
            self.output.store(value, address, streaming=True)
            return
        with self.k.if_(self.k.any(mask)):
            self.output.store(value, address, streaming=True)


class AverageBackward(Backward):
    """Emits the kernel's parallel phase."""

    def __init__(self, k: KernelBuilder, problem: PoolingProblem, call: Call) -> None:
        super().__init__(k, problem, call)
        sizes, last, channels = [a.size for a in self.axes], self.axes[-1], self.dx.dims[1]
        # Rows pay where a pixel is soon done (2 to 4 times quicker up to 16 channels). In one
        # dimension pixels are shared out to threads, not rows.
        unrolled = last.stride <= LONGEST_STRIDED_LOAD and last.taps <= UNROLLED_TAPS
        few = channels <= self.block
        self.pixels = self.channels and not (few and unrolled and len(self.axes) > 1)
        n, c = self.planes
        # Blocks of a pixel's channels follow one another: memory is read and written in order.
        self.rows = (n, *sizes, c) if self.pixels else (n, c, *sizes[:-1])
        packed = self.dx.strides[-1] == channels  # the pixels of a row
        self.joined = packed and channels % self.lanes != 0
        self.pitch = channels if self.joined else self.block  # elements of a pixel in buffers

    def emit(self) -> None:
        k, rows = self.k, math.prod(self.rows)
        per_row = 1 if self.pixels else self.axes[-1].size
        per_unit = max(1, UNIT_ELEMENTS // (per_row * (self.block if self.channels else 1)))
        units = -(-rows // per_unit)
        scratch = 0 if self.pixels else self._scratch_elements() * self.width
        with each_unit(k, self.call.threads, units, scratch, self.large) as (unit, buffer):
            self.output = Output(k, self.call, self.dtype, self.lanes)
            self.buffer = buffer
            if not self.pixels:
                self._clear()
            first = unit * per_unit
            with k.loop(first, k.min(first + per_unit, rows), at_least_once=True) as row:
                n, c, *indices = unravel(row, self.rows)
                if self.pixels:
                    *indices, block = (c, *indices)
                    self._pixel(n, block * self.block, indices)
                elif self.channels:
                    self._sum_pixels(n, c * self.block, indices)
                    self._spread_pixels(n, c * self.block, indices)
                else:
                    self._sum_rows(n, c, indices)
                    self._spread_row(n, c, indices)

    def _each_window(self, axes: Any, indices: Any, body: Any, windows: Any = ()) -> None:
        """body(windows) for the windows of the leading axes that hold an element."""
        k, depth = self.k, len(windows)
        if depth == len(indices):
            body(list(windows))
            return
        axis, index = axes[depth], indices[depth]
        with k.loop(*windows_over(k, axis, index, index)) as window:
            step = index - axis.start(window)
            present = True if axis.dilation == 1 else k.as_int(step % axis.dilation).eq(0)
            with k.if_(present):
                self._each_window(axes, indices, body, (*windows, window))

    # Lanes along channels ----------------------------------------------------------------------

    def _pixel(self, n: IntLike, c: IntLike, indices: list[IntLike]) -> None:
        """A block of channels of one element of dx."""
        k, lanes, masks = self.k, self.lanes, self._masks(c)
        totals = [k.variable(k.constant(0.0, self.compute, lanes)) for _ in masks]

        def add(windows: list[IntLike]) -> None:
            factor = self.reciprocal(self.count(self.axes, windows))
            for number, (total, mask) in enumerate(zip(totals, masks)):
                address = self.corner("dy", self.dy, n, c + number * lanes, *windows)
                value = k.load(address, self.dtype, lanes, mask=mask)
                total.set(k.fma(value, factor, total.value))

        self._each_window(self.axes, indices, add)
        for number, (total, mask) in enumerate(zip(totals, masks)):
            address = self.corner("dx", self.dx, n, c + number * lanes, *indices)
            self.output.store(total.value, address, 1, mask)

    def _sum_pixels(self, n: IntLike, c: IntLike, indices: list[IntLike]) -> None:
        """The buffer takes, a pixel of dy after another, the sums of the rows of dy whose windows
        hold this row of dx."""
        k, lanes, last, masks = self.k, self.lanes, self.axes[-1], self._masks(c)
        with k.loop(0, last.windows) as q:
            totals = [k.variable(k.constant(0.0, self.compute, lanes)) for _ in masks]

            def add(windows: list[IntLike]) -> None:
                factor = self.reciprocal(self.count(self.axes, [*windows, q]))
                for number, (total, mask) in enumerate(zip(totals, masks)):
                    address = self.corner("dy", self.dy, n, c + number * lanes, *windows, q)
                    value = k.load(address, self.dtype, lanes, mask=mask)
                    total.set(k.fma(value, factor, total.value))

            self._each_window(self.axes[:-1], indices, add)
            place = self.buffer + (self._padding() + q) * (self.pitch * self.width)
            for number, total in enumerate(totals):
                k.store(total.value, place, self.compute, number * lanes * self.width)

    def _spread_pixels(self, n: IntLike, c: IntLike, indices: list[IntLike]) -> None:
        """Every pixel adds up the windows along the row that hold it."""
        k, lanes, last, masks = self.k, self.lanes, self.axes[-1], self._masks(c)
        line = self.buffer + self._buffer_elements() * self.width
        steps = self._steps()
        with k.loop(0, steps) as step:
            for rest in range(last.stride):
                at = step * last.stride + rest
                sums = [self._rest(step, rest, number) for number in range(self.vectors)]
                if self.joined:
                    for number, value in enumerate(sums):
                        place = (at * self.pitch + number * lanes) * self.width
                        k.store(value, line + place, self.compute)
                    continue
                with k.if_(self._on_row(at - last.low, rest)):
                    for number, (value, mask) in enumerate(zip(sums, masks)):
                        at_channel = c + number * lanes
                        address = self.corner("dx", self.dx, n, at_channel, *indices, at - last.low)
                        self.output.store(value, address, 1, mask)
        if self.joined:
            length = last.size * self.pitch
            address = self.corner("dx", self.dx, n, c, *indices)
            with k.loop(0, length, lanes) as j:
                value = k.load(line + (last.low * self.pitch + j) * self.width, self.compute, lanes)
                mask = k.first_lanes(length - j, lanes) if length % lanes else None
                self.output.store(value, address + j * self.size, 1, mask)

    def _on_row(self, at: IntLike, rest: int) -> Mask | bool:
        """Whether positions of this rest are on dx."""
        last = self.axes[-1]
        if not last.low and (self._steps() - 1) * last.stride + rest < last.size:
            return True
        at = self.k.as_int(at)
        return (at >= 0) & (at < last.size)

    def _scratch_elements(self) -> int:
        """Of the buffer, and of the second one where pixels are joined."""
        line = self._steps() * self.axes[-1].stride * self.pitch + self.block if self.joined else 0
        return self._buffer_elements() + line

    # Lanes along columns -----------------------------------------------------------------------

    def _padding(self) -> int:
        """Zeros before the buffer's first window: the farthest that an element looks back."""
        last = self.axes[-1]
        return -(-(last.extent - 1 + last.stride) // last.stride)

    def _steps(self) -> int:
        """Strides from the row's low padding to its end."""
        return -(-(self.axes[-1].size + self.axes[-1].low) // self.axes[-1].stride)

    def _buffer_elements(self) -> int:
        places = self._padding() + max(self._steps(), self.axes[-1].windows)
        return places * self.pitch + self.block if self.channels else places + 2 * self.lanes

    def _clear(self) -> None:
        k, lanes = self.k, self.lanes
        with k.loop(0, self._buffer_elements(), lanes) as i:
            rest = self._buffer_elements() - i
            zero = k.constant(0.0, self.compute, lanes)
            mask = k.first_lanes(rest, lanes)
            k.store(zero, self.buffer + i * self.width, self.compute, mask=mask)

    def _sum_rows(self, n: IntLike, c: IntLike, indices: list[IntLike]) -> None:
        """The buffer takes the sum of the rows of dy whose windows hold this row of dx."""
        k, lanes, last = self.k, self.lanes, self.axes[-1]
        outer, stride = self.axes[:-1], self.dy.strides[-1]
        with k.loop(0, last.windows, lanes) as q:
            mask = None
            if last.windows % lanes:
                mask = k.first_lanes(last.windows - q, lanes)
            total = k.variable(k.constant(0.0, self.compute, lanes))

            def add(windows: list[IntLike]) -> None:
                factor = self.reciprocal(self.count(outer, windows))
                address = self.corner("dy", self.dy, n, c, *windows, q)
                if stride == 1:
                    value = k.load(address, self.dtype, lanes, mask=mask)
                else:
                    offsets = k.iota(lanes) * (stride * self.size)
                    value = k.gather(address, offsets, self.dtype, mask)
                total.set(k.fma(value, factor, total.value))

            self._each_window(outer, indices, add)
            factor = self.column_reciprocal(1, q, False)
            place = self.buffer + (self._padding() + q) * self.width
            value = total.value * factor
            if mask is not None:
                value = k.select(mask, value, 0.0)
            k.store(value, place, self.compute)

    def _spread_row(self, n: IntLike, c: IntLike, indices: list[IntLike]) -> None:
        """Every element adds up the windows along the row that hold it."""
        k, lanes, last = self.k, self.lanes, self.axes[-1]
        with k.loop(0, self._steps(), lanes) as step:
            if last.stride <= LONGEST_STRIDED_LOAD:
                sums = [self._rest(step, rest) for rest in range(last.stride)]
                for number, value in enumerate(interleaved(k, sums)):
                    at = step * last.stride + (number * lanes - last.low)
                    self._store(n, c, indices, at, 1, value)
            else:
                with k.loop(0, last.stride) as rest:
                    at = step * last.stride + rest - last.low
                    self._store(n, c, indices, at, last.stride, self._any_rest(step, rest))

    def _rest(self, step: IntLike, rest: int, number: int = 0) -> Float:
        """The sums of the elements (step + lane) * stride + rest - low; or, lanes along channels,
        of vector `number` of the pixel step * stride + rest - low."""
        k, last = self.k, self.axes[-1]
        total: Any = k.constant(0.0, self.compute, self.lanes)
        for tap in range(last.taps):
            back, remainder = divmod(tap * last.dilation - rest, last.stride)
            if remainder == 0:
                at = self._padding() + step - back
                at = at * self.pitch + number * self.lanes if self.channels else at
                total = total + k.load(self.buffer + at * self.width, self.compute, self.lanes)
        return total

    def _any_rest(self, step: IntLike, rest: Int) -> Float:
        """The same for a rest known at run time (long strides)."""
        k, last = self.k, self.axes[-1]
        total = k.variable(k.constant(0.0, self.compute, self.lanes))
        with k.loop(0, last.taps) as tap:
            back = tap * last.dilation + last.stride - rest
            with k.if_((k.as_int(back) % last.stride).eq(0)):
                back = k.as_int(back) // last.stride - 1
                place = self.buffer + (self._padding() + step - back) * self.width
                total.set(total.value + k.load(place, self.compute, self.lanes))
        return total.value

    def _store(
        self, n: IntLike, c: IntLike, indices: list[IntLike], at: IntLike, step: int, value: Float
    ) -> None:
        """Blend lanes into dx from position `at` of the row on; those outside do not exist."""
        k = self.k
        first = k.splat(k.resize(k.as_int(at), I32), self.lanes)
        mask = (k.iota(self.lanes, I32) * step + first).below(self.axes[-1].size)
        address = self.corner("dx", self.dx, n, c, *indices, at)
        self.output.store(value, address, self.dx.strides[-1] * step, mask)
