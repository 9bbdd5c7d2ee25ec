"""Walking the taps of pooling windows: the part that forward pooling and the search for maxima in
backward share.

Lanes along channels: for each window, some vectors of channels stay in registers while the taps
go by. Lanes along columns: vectors of neighbouring windows of a row; the taps of the last axis
are unrolled. A NaN is the maximum; of equal maxima the first in row-major order is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bedstone.backends.cpu.builder import Call, KernelBuilder, itemsize
from bedstone.backends.cpu.irtypes import I32
from bedstone.backends.cpu.pooling_windows import (
    PREFETCH_BYTES,
    UNROLLED_TAPS,
    Axis,
    Columns,
    axes_of,
    nested,
)
from bedstone.backends.cpu.target import CACHE_LINE
from bedstone.backends.cpu.values import Float, Int, IntLike, Mask
from bedstone.spec.pooling import PoolingProblem
from bedstone.spec.tensor import TensorDesc


@dataclass(frozen=True)
class Tap:
    """What the lanes read at one tap: the values, which lanes are on the input (None: all), and
    where they are in the image (made by a call, if needed)."""

    value: Float
    inside: Mask | None
    position: Callable[[], Int]


class Maximum:
    """The largest value seen; NaN if there was one. For few vectors in flight: what is not a
    number is remembered apart, so that the chain of maxima stays short."""

    def __init__(self, k: KernelBuilder, dtype: str, lanes: int) -> None:
        self.k = k
        self.best = k.variable(k.constant(-math.inf, dtype, lanes))
        self.nan = k.variable(k.lane_mask([False] * lanes))

    def take(self, taps: Sequence[Tap]) -> None:
        """A few taps at once."""
        k, best, nan = self.k, self.best.value, self.nan.value
        values = [
            t.value if t.inside is None else k.select(t.inside, t.value, -math.inf) for t in taps
        ]
        for value in values:
            best = k.select(value > best, value, best)
        for first, second in zip(values[::2], [*values[1::2], values[-1]]):
            nan = nan | first.unordered(second)
        self.best.set(best)
        self.nan.set(nan)

    @property
    def value(self) -> Float:
        """The result."""
        return self.k.select(self.nan.value, math.nan, self.best.value)


class QuietMaximum:
    """The same for many vectors in flight, which leave no room to remember masks."""

    def __init__(self, k: KernelBuilder, dtype: str, lanes: int) -> None:
        self.k = k
        self.best = k.variable(k.constant(-math.inf, dtype, lanes))

    def take(self, taps: Sequence[Tap]) -> None:
        """A few taps at once, all on the input."""
        for tap in taps:
            self.best.set(self.k.fmax(self.best.value, tap.value))

    @property
    def value(self) -> Float:
        """The result."""
        return self.best.value


class LocatedMaximum:
    """The largest value seen and its position in the image.

    `first` is the position of the first tap on the input, which wins while all are -infinity;
    -1 where there is none.
    """

    def __init__(self, k: KernelBuilder, dtype: str, first: Int) -> None:
        self.k = k
        self.best = k.variable(k.constant(-math.inf, dtype, first.lanes))
        self.position = k.variable(first)

    def take(self, taps: Sequence[Tap]) -> None:
        """A few taps, in row-major order."""
        k = self.k
        for tap in taps:
            value, best = tap.value, self.best.value
            # Larger, or NaN, unless the best is NaN already.
            larger = ~(value <= best) & ~best.is_nan()
            if tap.inside is not None:
                larger = larger & tap.inside
            self.best.set(k.select(larger, value, best))
            self.position.set(k.select(larger, tap.position(), self.position.value))

    @property
    def value(self) -> Float:
        """The result."""
        return self.best.value


class Total:
    """The sum of the taps; lanes outside the input must read as 0."""

    def __init__(self, k: KernelBuilder, dtype: str, lanes: int) -> None:
        self.sum = k.variable(k.constant(0.0, dtype, lanes))

    def take(self, taps: Sequence[Tap]) -> None:
        """A few taps."""
        for tap in taps:
            self.sum.set(self.sum.value + tap.value)

    @property
    def value(self) -> Float:
        """The result."""
        return self.sum.value


class WindowReader:
    """The base of the pooling kernels: geometry, addresses, and the loops over taps."""

    def __init__(
        self,
        k: KernelBuilder,
        problem: PoolingProblem,
        call: Call,
        source: TensorDesc,
        channels: bool,
    ) -> None:
        """`source` describes operand "x", the tensor whose taps are read."""
        self.k, self.problem, self.call = k, problem, call
        self.pool, self.axes = problem.pool, axes_of(problem)
        self.dtype = problem.x.dtype.value
        self.compute = problem.x.dtype.accumulator.value
        self.lanes, self.size = k.lanes(self.compute), itemsize(self.dtype)
        self.pointers = dict(zip((o.name for o in problem.operands), call.pointers))
        self.source, self.channels = source, channels
        self.columns = Columns(k, self.axes[-1], self.dtype, source.strides[-1], self.lanes)
        self.model = k.constant(0.0, self.compute, self.lanes)

    def corner(self, name: str, desc: TensorDesc, *indices: IntLike) -> IntLike:
        """The address of an element; missing trailing indices are 0."""
        address: IntLike = self.pointers[name]
        size = itemsize(desc.dtype.value)
        for index, stride in zip(indices, desc.strides):
            address = address + index * (stride * size)
        return address

    def accumulator(self, first: Callable[[], Int]) -> Any:
        """What a window's taps are gathered in; see LocatedMaximum for `first`."""
        raise NotImplementedError

    def tap_ranges(
        self, axes: Sequence[Axis], windows: Sequence[IntLike]
    ) -> list[tuple[IntLike, IntLike]]:
        """The taps on the input, axis by axis."""
        return [axis.inside(self.k, window) for axis, window in zip(axes, windows)]

    def _tap(
        self, address: IntLike, axes: Sequence[Axis], windows: Sequence[IntLike], taps: Any
    ) -> tuple[IntLike, IntLike]:
        """(address, linear position in the image) of a tap over the leading spatial axes."""
        position: IntLike = 0
        for axis, window, tap, stride in zip(axes, windows, taps, self.source.strides[2:]):
            at = axis.start(window) + tap * axis.dilation
            address = address + at * (stride * self.size)
            position = position * axis.size + at
        return address, position

    def _spread_int(self, value: IntLike) -> Int:
        return self.k.splat(self.k.resize(self.k.as_int(value), I32), self.lanes)

    def _unless_empty(
        self, ranges: Sequence[tuple[IntLike, IntLike]], position: IntLike
    ) -> IntLike:
        """The position, or -1 if a range has nothing in it."""
        for begin, end in ranges:
            position = self.k.select(self.k.as_int(begin) < end, position, -1)
        return position

    def _first_column(self, row: IntLike, q: IntLike, whole: bool) -> Int:
        """The position of each lane's first tap on a row that starts at `row` (-1: no row)."""
        k, last = self.k, self.axes[-1]
        start = self.columns.positions(last.start(q))
        rows = self._spread_int(row)
        if not whole:
            # Steps of the dilation from before the row onto it; past the row there is no tap.
            steps = self._ceil(k.select(start < 0, 0 - start, 0), last.dilation)
            start = start + steps * last.dilation
            nowhere = ~(steps < last.taps) | ~(start < last.size)
            rows = k.select(nowhere, -1, rows)
        return k.select(rows < 0, -1, rows + start)

    def channel_block(
        self,
        n: IntLike,
        c: IntLike,
        windows: Sequence[IntLike],
        masks: Sequence[Mask | None],
    ) -> list[Any]:
        """One window: an accumulator for each vector of channels from c on."""
        k = self.k
        ranges = self.tap_ranges(self.axes, windows)
        corner = self.corner("x", self.source, n, c)

        def first() -> Int:
            firsts = [begin for begin, _ in ranges]
            _, position = self._tap(corner, self.axes, windows, firsts)
            return self._spread_int(self._unless_empty(ranges, position))

        found = [self.accumulator(first) for _ in masks]
        with nested(k, ranges) as taps:
            address, position = self._tap(corner, self.axes, windows, taps)
            for number, mask in enumerate(masks):
                offset = number * self.lanes * self.size
                value = k.load(address, self.dtype, self.lanes, offset, mask)
                found[number].take([Tap(value, None, lambda: self._spread_int(position))])
        return found

    def column_block(
        self,
        n: IntLike,
        c: IntLike,
        windows: Sequence[IntLike],
        q: IntLike,
        whole: bool,
    ) -> Any:
        """The windows q, q + 1, ... of a row; `whole`: all taps of all lanes are inside."""
        k, columns = self.k, self.columns
        *outer, last = self.axes
        ranges = self.tap_ranges(outer, windows)
        corner = self.corner("x", self.source, n, c)

        def first() -> Int:
            firsts = [begin for begin, _ in ranges]
            _, row = self._tap(corner, outer, windows, firsts)
            return self._first_column(self._unless_empty(ranges, row * last.size), q, whole)

        found = self.accumulator(first)
        with nested(k, ranges) as taps:
            row, start = self._tap(corner, outer, windows, taps)
            if self.source.strides[-1] == 1:
                for offset in range(0, last.stride * self.lanes * self.size, CACHE_LINE):
                    ahead = last.start(q) * self.size + (offset + PREFETCH_BYTES)
                    k.prefetch(row, ahead)

            def tap_of(tap: IntLike, loaded: dict[int, list[Any]]) -> Tap:
                base = last.start(q) + tap * last.dilation
                inside = None if whole else columns.inside(base)
                value = columns.load(row, last.start(q), tap, inside, loaded)

                def position() -> Int:
                    return columns.positions(base) + self._spread_int(start * last.size)

                return Tap(value, inside, position)

            if last.taps <= UNROLLED_TAPS:
                loaded: dict[int, list[Any]] = {}
                found.take([tap_of(tap, loaded) for tap in range(last.taps)])
            else:
                with k.loop(0, last.taps) as tap:
                    found.take([tap_of(tap, {})])
        return found

    def each_column_block(self, block: Callable[[IntLike, bool], None]) -> None:
        """block(q, whole) for the windows of a row, a vector at a time. Interior vectors get
        code without masks."""
        k, lanes, last = self.k, self.lanes, self.axes[-1]
        begin, end = last.interior(self.columns.slack)
        with k.loop(0, last.windows, lanes) as q:
            if end - begin < lanes:
                block(q, False)
            elif isinstance(q, int):
                block(q, q >= begin and q + lanes <= end)
            elif begin == 0 and end == last.windows and end % lanes == 0:
                block(q, True)
            else:
                is_interior = (q + lanes <= end) & (q >= begin)
                with k.if_else(is_interior) as (interior, border):
                    with interior:
                        block(q, True)
                    with border:
                        block(q, False)

    # Divisors of averages ------------------------------------------------------------------------

    @property
    def padded(self) -> bool:
        """True if taps on the padding count."""
        return self.pool.mode == "average_include_padding"

    def count(self, axes: Sequence[Axis], windows: Sequence[IntLike]) -> IntLike:
        """The product of the taps counted on some axes."""
        total: IntLike = 1
        for axis, window in zip(axes, windows):
            if self.padded:
                total = total * axis.counted(self.k, window)
            else:
                first, last = axis.inside(self.k, window)
                total = total * (last - first)
        return total

    def reciprocal(self, count: IntLike) -> Float:
        """1 / count in every lane, 1 where it is none."""
        k = self.k
        if isinstance(count, int):
            return k.constant(1.0 / max(count, 1), self.compute, self.lanes)
        scalar = k.cast(k.max(count, 1), k.constant(0.0, self.compute))
        return k.splat(1.0 / scalar, self.lanes)

    def column_reciprocal(self, count: IntLike, q: IntLike, whole: bool) -> Float:
        """1 / taps of the windows q, q + 1, ...; `count` is that of the outer axes."""
        k, last = self.k, self.axes[-1]
        limit = last.size + (last.high if self.padded else 0)
        reach = (last.windows - 1) * last.stride - last.low + last.extent
        if whole or (reach <= limit and (self.padded or not last.low)):
            return self.reciprocal(count * last.taps)
        # Taps from `stop` on lie beyond the end, those before `first` in the low padding.
        start = self.columns.positions(last.start(q))
        stop = self._ceil(limit - start, last.dilation)
        lanes = k.select(stop < last.taps, stop, last.taps)
        if not self.padded:
            lanes = lanes - self._ceil(k.select(start < 0, 0 - start, 0), last.dilation)
        lanes_count = k.cast(lanes, self.model)
        if not (isinstance(count, int) and count == 1):
            lanes_count = lanes_count * k.cast(k.as_int(count), self.model)
        return 1.0 / k.select(lanes_count < 1.0, 1.0, lanes_count)

    @staticmethod
    def _ceil(value: Int, divisor: int) -> Int:
        return value if divisor == 1 else (value + (divisor - 1)) // divisor
