"""Depthwise convolution in channels-last memory: vectors hold channels.

A row of PIXELS outputs shares the image vectors that its taps have in common.
"""

from __future__ import annotations

from typing import Any

from bedstone.backends.cpu.builder import Call
from bedstone.backends.cpu.convolution.depthwise_emitter import ROW_FRAME, Emitter, Shape
from bedstone.backends.cpu.convolution.packed_filter import Operands, Packed
from bedstone.backends.cpu.irtypes import itemsize
from bedstone.backends.cpu.target import Target
from bedstone.plan.config import get_num_threads
from bedstone.spec.convolution import ConvolutionProblem

PIXELS = 7  # outputs of a row in flight; 7 + 9 weights + loads fit 32 registers
TASKS_PER_THREAD = 6


class ChannelsLast(Emitter):
    """Vectors of channels; a task is a run of output rows of one image.

    The innermost loop runs over channels, so that memory is read in order.
    """

    def __init__(self, target: Target, problem: ConvolutionProblem, s: Shape) -> None:
        super().__init__(target, problem, s)
        self.vectors = -(-s.channels // s.lanes)
        self.tap_bytes = self.vectors * s.lanes * itemsize(s.accumulator)
        self.part_bytes = s.rows.window * s.columns.window * self.tap_bytes
        self.packed_bytes = self.part_bytes

    def body(self, call: Call, operands: Operands, packed: Packed) -> None:
        self.take(call, operands)
        self.table = packed.address
        if packed.packs:
            self._turn_filter(operands.filter)
        if packed.multiplies:
            self._convolve()

    def _turn_filter(self, w: Any) -> None:
        """The table of taps: of each, all channels."""
        k, s = self.k, self.s
        size = itemsize(s.accumulator)
        taps = [(r, c) for r in range(s.rows.window) for c in range(s.columns.window)]
        with k.loop(0, self.vectors) as v:
            channel = v * s.lanes
            mask = k.first_lanes(s.channels - channel, s.lanes)
            for i, (r, c) in enumerate(taps):
                address = w + channel * s.filter + (r * s.rows.filter + c * s.columns.filter)
                value = k.gather(address, k.iota(s.lanes) * s.filter, s.dtype, mask)
                k.store(value, self.table + channel * size, s.accumulator,
                        offset=i * self.tap_bytes)  # fmt: skip

    def _convolve(self) -> None:
        """A parallel phase over blocks of rows."""
        k, s = self.k, self.s
        height = s.rows.axis.size
        # Neighbouring blocks of rows read some rows twice: as few blocks as keep the threads busy.
        blocks = min(height, -(-TASKS_PER_THREAD * get_num_threads() // s.batch))
        block = -(-height // blocks)
        blocks = -(-height // block)
        with k.parallel(s.batch * blocks, self.call.threads, self.zero_bytes(s)) as job:
            self.fill_zeros(job.scratch)
            with job.each_task() as task:
                n, first = task // blocks, task % blocks * block
                source = self.source + n * s.image[0]
                out = self.out + n * s.out[0]
                for (r0, row_taps), (c0, column_taps) in self.phases():
                    last = k.min(first + block, s.rows.within(r0))
                    place = out + (r0 * s.rows.out + c0 * s.columns.out)
                    with k.loop(first, last) as p:
                        row = (source, place + p * s.rows.axis.out, p, row_taps, column_taps)
                        self._row(row, s.columns.within(c0))

    @staticmethod
    def _reach(s: Shape) -> tuple[int, int]:
        """Lowest and highest column, from a tile's first, that a row of outputs reads."""
        shifts = [shift for _, taps in s.columns.residues for _, shift in taps] or [0]
        return min(shifts), max(shifts) + (PIXELS - 1) * s.columns.axis.step

    @classmethod
    def zero_bytes(cls, s: Shape) -> int:
        """A stretch of zeros as long as what a tile reads of a row that is padding."""
        low, high = cls._reach(s)
        pixels = (max(0, high) - min(0, low)) * abs(s.columns.image)
        vector = s.lanes * s.item
        return -(-(pixels + s.channels * s.item) // vector) * vector + vector

    def fill_zeros(self, scratch: Any) -> None:
        """`self.zeros`: the first pixel of a stretch of zeros in scratch."""
        k, s = self.k, self.s
        self.zeros = scratch - min(0, *self._reach(s)) * s.columns.image
        with k.loop(0, self.zero_bytes(s), s.lanes * s.item) as at:
            k.store(k.constant(0.0, s.accumulator, s.lanes), scratch + at, s.dtype)

    def _row(self, row: tuple[Any, ...], width: int) -> None:
        """One row of outputs of one phase: the tiles at its ends one by one, those between."""
        k, axis = self.k, self.s.columns.axis
        shifts = [shift for _, shift in row[4]] or [0]
        starts = range(0, width, PIXELS)
        inner = [
            q
            for q in starts
            if q + PIXELS <= width
            and q * axis.step + min(shifts) >= 0
            and (q + PIXELS - 1) * axis.step + max(shifts) < axis.limit
        ]
        low, high = (inner[0], inner[-1] + PIXELS) if inner else (width, width)
        bases = self._bases(row)
        for q in starts:
            if q < low or q >= high:
                self._channels(row, bases, q, min(PIXELS, width - q))
        if inner:
            with k.loop(low, high, PIXELS) as q:
                self._channels(row, bases, q, PIXELS)

    def _bases(self, row: tuple[Any, ...]) -> dict[int, tuple[Any, Any]]:
        """Row shift -> (address of the image row, bytes per column of it); the zeros and 0 for a
        row of padding."""
        k, rows = self.k, self.s.rows
        source, _, p, row_taps, _ = row
        bases = {}
        for _, shift in row_taps:
            y = p * rows.axis.step + shift
            address, stride = source + y * rows.image, self.s.columns.axis.image
            if rows.axis.checked:
                valid = 0 <= y < rows.axis.limit if isinstance(y, int) else y.below(rows.axis.limit)
                address = k.select(valid, address, self.zeros)
                stride = k.select(valid, stride, 0)
            bases[shift] = address, stride
        return bases

    def _channels(self, row: tuple[Any, ...], bases: Any, q: Any, count: int) -> None:
        """`count` outputs of a row, all channels."""
        k, s = self.k, self.s
        frame = k.alloca(ROW_FRAME * max(1, len(row[3])))
        for j, (t, shift) in enumerate(row[3]):
            base, stride = bases[shift]
            k.store(base + q * stride, frame, "int64", offset=ROW_FRAME * j)
            taps = k.constant(t * s.columns.window * self.tap_bytes, "int64")
            k.store(taps, frame, "int64", offset=ROW_FRAME * j + 8)
        whole = s.channels // s.lanes * s.lanes
        with k.loop(0, whole, s.lanes) as channel:
            self._tile(row, frame, q, count, channel, s.lanes)
        if s.channels > whole:
            self._tile(row, frame, q, count, whole, s.channels - whole)

    def _tile(
        self, row: tuple[Any, ...], frame: Any, q: Any, count: int, channel: Any, live: int
    ) -> None:
        k, s = self.k, self.s
        _, place, _, row_taps, column_taps = row  # frame: address and taps of every image row
        mask = k.first_lanes(live, s.lanes)
        weights = self.table + channel * itemsize(s.accumulator)
        zero = k.constant(0.0, s.accumulator, s.lanes)
        sums = [k.variable(zero) for _ in range(count)]
        for j in self.tap_rows(row_taps, column_taps):
            base = k.load(frame + j * ROW_FRAME, "int64") + channel * s.image[1]
            taps = weights + k.load(frame + j * ROW_FRAME, "int64", offset=8)
            pixels: dict[int, Any] = {}
            for u, column_shift in column_taps:
                tap = k.load(taps, s.accumulator, s.lanes, offset=u * self.tap_bytes)
                for i in range(count):
                    at = i * s.columns.axis.step + column_shift
                    if at not in pixels:
                        pixels[at] = self._pixel(base, q, at, mask)
                    sums[i].set(k.fma(pixels[at], tap, sums[i].value))
        shift = None
        if self.epilogue.bias:
            shift = k.load(self.bias + channel * s.item, s.dtype, s.lanes, mask=mask)
        for i, total in enumerate(sums):
            address = place + (q + i) * s.columns.axis.out + channel * s.out[1]

            def old(address: Any = address) -> Any:
                return k.load(address, s.dtype, s.lanes, mask=mask)

            k.store(self.finish(total.value, old, shift), address, s.dtype, mask=mask)

    def _pixel(self, base: Any, q: Any, at: int, mask: Any) -> Any:
        """The channels of the pixel `at` columns from base; zeros if it is known to be padding."""
        k, s = self.k, self.s
        axis = s.columns.axis
        if isinstance(q, int) and axis.checked and not 0 <= q * axis.step + at < axis.limit:
            return k.constant(0.0, s.accumulator, s.lanes)
        return k.load(base, s.dtype, s.lanes, offset=at * s.columns.image, mask=mask)
