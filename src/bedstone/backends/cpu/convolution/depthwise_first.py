"""Depthwise convolution in channels-first memory: vectors hold output pixels of a row.

Several output rows of one plane share the image rows that they read.
"""

from __future__ import annotations

import itertools
from typing import Any

from bedstone.backends.cpu.builder import Call
from bedstone.backends.cpu.convolution.depthwise_emitter import (
    ROW_FRAME,
    UNROLLED_TAPS,
    Emitter,
    both,
)
from bedstone.backends.cpu.convolution.packed_filter import Operands, Packed

ROWS = 8  # sums in flight; the multiply-add takes 4 cycles on 2 units
TASK_PIXELS = 16384  # outputs a task computes at least, against the cost of drawing a task


class ChannelsFirst(Emitter):
    """Vectors of pixels of a row; a task is a run of planes, or a run of rows of one plane.

    The innermost loop runs down the rows: the masks of a column of vectors are made once.
    """

    def body(self, call: Call, operands: Operands, packed: Packed) -> None:
        k, s, w = self.k, self.s, operands.filter
        self.take(call, operands)
        planes, height = s.batch * s.channels, s.rows.axis.size
        area = max(1, height * s.columns.axis.size)
        run = max(1, min(planes, TASK_PIXELS // area))
        self.count = self._rows_in_flight(height)
        block = height if run > 1 else min(height, TASK_PIXELS // s.columns.axis.size)
        block = -(-block // self.count) * self.count
        blocks, runs = -(-height // block), -(-planes // run)
        zero_bytes, before = self.zero_line()
        with k.parallel(runs * blocks, self.call.threads, zero_bytes) as job:
            self.fill_zeros(job.scratch, zero_bytes, before)
            with job.each_task() as task:
                first, start = task // blocks * run, task % blocks * block
                stop = k.min(start + block, height)
                with k.loop(first, k.min(first + run, planes)) as plane:
                    self._plane(w, plane // s.channels, plane % s.channels, start, stop)

    def zero_line(self) -> tuple[int, int]:
        """Bytes of zeros that stand in for a row of padding, and where its first pixel lies."""
        s = self.s
        shifts = [c for _, taps in s.columns.residues for _, c in taps] or [0]
        before = max(0, -min(shifts)) * s.item
        reach = before + (max(0, max(shifts)) + s.columns.axis.step * s.lanes) * s.item
        return -(-reach // (s.lanes * s.item)) * s.lanes * s.item, before

    def fill_zeros(self, scratch: Any, zero_bytes: int, before: int) -> None:
        """`self.zeros`: the first pixel of a line of zeros in scratch."""
        k, s = self.k, self.s
        self.zeros = scratch + before
        for offset in range(0, zero_bytes, s.lanes * s.item):
            zero = k.constant(0.0, s.accumulator, s.lanes)
            k.store(zero, scratch, s.dtype, offset=offset)

    def _rows_in_flight(self, height: int) -> int:
        """Output rows computed together: as many sums as hide the latency, few left over."""
        most = ROWS // len(self._column_groups()[0])
        if height <= most:
            return max(1, height)
        return min(range(most, most // 2, -1), key=lambda c: (-(-height // c) * c, -c))

    def _plane(self, w: Any, n: Any, channel: Any, start: Any, stop: Any) -> None:
        k, s = self.k, self.s
        source = self.source + n * s.image[0] + channel * s.image[1]
        out = self.out + n * s.out[0] + channel * s.out[1]
        shift = None
        if self.epilogue.bias:
            shift = k.splat(k.load(self.bias + channel * s.item, s.dtype), s.lanes)
        weights = w + channel * s.filter
        for (r0, row_taps), group in itertools.product(s.rows.residues, self._column_groups()):
            taps = self._taps(weights, row_taps, group)
            last = k.min(stop, s.rows.within(r0))
            even = start + (last - start) // self.count * self.count
            rest = s.rows.within(r0) % self.count  # of the last block: the others are whole
            width = max(s.columns.within(c0) for c0, _ in group)
            place = out + r0 * s.rows.out
            with k.loop(0, width, s.lanes) as q:
                column = (source, place, q, row_taps, group, taps, shift)
                for border in self.versions(self._column_inside(q, group)):
                    masks = self._masks(q, group) if border else {}
                    with k.loop(start, even, self.count) as p:
                        self._tile(column, p, self.count, masks, border)
                    if rest:
                        with k.if_(even < last):
                            self._tile(column, even, rest, masks, border)

    def _unrolled(self, row_taps: Any, group: Any) -> bool:
        return len(row_taps) * sum(len(taps) for _, taps in group) <= UNROLLED_TAPS

    def _taps(self, weights: Any, row_taps: Any, group: Any) -> dict[Any, Any]:
        """The filter for _tile: every tap in a register, or a frame to loop over rows of taps."""
        k, s = self.k, self.s
        if self._unrolled(row_taps, group):
            columns = {u for _, column_taps in group for u, _ in column_taps}
            return {
                (t, u): k.splat(
                    k.load(weights + (t * s.rows.filter + u * s.columns.filter), s.dtype), s.lanes
                )
                for t, _ in row_taps
                for u in columns
            }
        frame = k.alloca(ROW_FRAME * len(row_taps))
        for j, (t, shift) in enumerate(row_taps):
            k.store(k.constant(shift, "int64"), frame, "int64", offset=ROW_FRAME * j)
            k.store(weights + t * s.rows.filter, frame, "int64", offset=ROW_FRAME * j + 8)
        return {"frame": frame}

    def _column_groups(self) -> list[tuple[Any, ...]]:
        """Column residues computed together: both of stride 2, so that stores are contiguous."""
        residues = self.s.columns.residues
        if len(residues) == 2 and self.s.columns.out == self.s.item:
            return [tuple(residues)]
        return [(residue,) for residue in residues]

    def _column_inside(self, q: Any, group: Any) -> Any:
        """True if the vectors from q on need no mask, in the image and in the output."""
        s, axis = self.s, self.s.columns.axis
        inside: Any = q + s.lanes <= min(s.columns.within(c0) for c0, _ in group)
        shifts = [c for _, column_taps in group for _, c in column_taps]
        if shifts:
            inside = both(inside, q * axis.step + min(shifts) >= 0)
            # A strided read touches `step` whole vectors.
            inside = both(inside, q * axis.step + max(shifts) + s.lanes * axis.step <= axis.limit)
        return inside

    def _masks(self, q: Any, group: Any, width: int | None = None) -> dict[int, Any]:
        """Distance from the first output's column -> the lanes of a vector there that exist (and,
        for a stride of 1, belong to one of `width` outputs)."""
        k, s = self.k, self.s
        step = s.columns.axis.step
        masks = {}
        for shift in {c for _, column_taps in group for _, c in column_taps}:
            for part in range(step):
                at = shift + part * s.lanes
                position = k.iota(s.lanes) + k.splat(self._int(q * step + at), s.lanes)
                masks[at] = (position >= 0) & (position < s.columns.axis.limit)
                if width is not None and step == 1:
                    masks[at] = both(k.first_lanes(width - q, s.lanes) or True, masks[at])
        return masks

    def _tile(
        self, column: tuple[Any, ...], p: Any, count: int, masks: dict[int, Any], border: bool
    ) -> None:
        """`count` output rows from p of one column of vectors."""
        k, s = self.k, self.s
        source, place, q, row_taps, group, taps, shift = column
        zero = k.constant(0.0, s.accumulator, s.lanes)
        step = s.rows.axis.step
        shifts = sorted({c for _, column_taps in group for _, c in column_taps})
        corner = source + p * (step * s.rows.image) + q * s.columns.axis.image
        sums = [[k.variable(zero) for _ in group] for _ in range(count)]

        def image_row(at: Any) -> dict[int, Any]:
            base = corner + at * s.rows.image
            if s.rows.axis.checked:
                y = self._int(p * step) + at
                base = k.select(y.below(s.rows.axis.limit), base, self.zeros)
            return {c: self._read(base, c, masks) for c in shifts}

        def add(i: int, vectors: dict[int, Any], tap: Any) -> None:
            for total, (_, column_taps) in zip(sums[i], group):
                for u, c in column_taps:
                    total.set(k.fma(vectors[c], tap(u), total.value))

        if self._unrolled(row_taps, group):
            for at in sorted({i * step + r for i in range(count) for _, r in row_taps}):
                vectors = image_row(at)
                for i in range(count):
                    for t, shift_t in row_taps:
                        if i * step + shift_t == at:
                            add(i, vectors, lambda u, t=t: taps[t, u])
        else:
            with k.loop(0, len(row_taps)) as j:
                at = k.load(taps["frame"] + j * ROW_FRAME, "int64")
                weights = k.load(taps["frame"] + j * ROW_FRAME, "int64", offset=8)
                wide = {
                    u: k.splat(k.load(weights + u * s.columns.filter, s.dtype), s.lanes)
                    for u in {u for _, column_taps in group for u, _ in column_taps}
                }
                for i in range(count):
                    add(i, image_row(at + i * step), wide.__getitem__)
        for i, row in enumerate(sums):
            values = [total.value for total in row]
            self._write(values, place + (p + i) * s.rows.axis.out, q, group, shift, border)

    def _read(self, base: Any, shift: int, masks: dict[int, Any]) -> Any:
        """The image elements at lane * step + shift columns from base."""
        k, s = self.k, self.s
        parts = []
        for part in range(s.columns.axis.step):
            at = shift + part * s.lanes
            parts.append(k.load(base + at * s.item, s.dtype, s.lanes, mask=masks.get(at)))
        if len(parts) == 2:
            return k.shuffle(parts[0], parts[1], range(0, 2 * s.lanes, 2))
        return parts[0]

    def _int(self, value: Any) -> Any:
        """A run-time integer, also of a number known now."""
        return self.k.constant(value, "int64") if isinstance(value, int) else value

    def _write(self, row: Any, place: Any, q: Any, group: Any, shift: Any, border: bool) -> None:
        k, s = self.k, self.s
        if len(group) == 2:
            width = sum(s.columns.within(c0) for c0, _ in group)
            halves = []
            for low in (0, s.lanes // 2):
                picks = [x for j in range(low, low + s.lanes // 2) for x in (j, s.lanes + j)]
                halves.append(k.shuffle(row[0], row[1], picks))
            first, step, pieces = 2 * q, s.item, halves
        else:
            c0 = group[0][0]
            width, first, pieces = s.columns.within(c0), q, row
            place, step = place + c0 * s.columns.out, s.columns.axis.out
        for j, value in enumerate(pieces):
            start = first + j * s.lanes
            mask = k.first_lanes(width - start, s.lanes) if border else None
            address = place + start * step
            offsets = k.iota(s.lanes) * step

            def old(address: Any = address, mask: Any = mask, offsets: Any = offsets) -> Any:
                if step == s.item:
                    return k.load(address, s.dtype, s.lanes, mask=mask)
                return k.gather(address, offsets, s.dtype, mask)

            result = self.finish(value, old, shift)
            if step == s.item:
                k.store(result, address, s.dtype, mask=mask)
            else:
                k.scatter(result, address, offsets, s.dtype, mask)
