"""Depthwise convolution (one filter a channel), forward and backward_data, straight from memory.

There is no sum over channels, so nothing is worth packing: the work is bound by memory. Channels
last: a vector holds channels, and a row of PIXELS outputs shares the image vectors that its taps
have in common. Channels first: a vector holds output pixels of a row, and ROWS output rows of one
plane share the image rows. Padding is real zeros: border tiles read masked or from a zero line.
Sums run over the taps in order, in float32 (float64 for float64): error (R*S + 1) roundings.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bedstone.backends.cpu import cost
from bedstone.backends.cpu.activation import emit_activation
from bedstone.backends.cpu.builder import KernelBuilder
from bedstone.backends.cpu.convolution.geometry import Axis, axis_line
from bedstone.backends.cpu.irtypes import itemsize
from bedstone.backends.cpu.kernel import ENTRY, CompiledKernel, compiled
from bedstone.backends.cpu.target import Target
from bedstone.plan.algorithm import Algorithm
from bedstone.plan.config import get_num_threads
from bedstone.plan.device import Device
from bedstone.spec.convolution import ConvolutionProblem
from bedstone.spec.problem import Problem

TAPS_MAX = 121  # 11x11: unrolled code stays small enough to compile quickly
PIXELS = 7  # channels last: outputs of a row in flight; 7 + 9 weights + loads fit 32 registers
ROWS = 8  # channels first: sums in flight; the multiply-add takes 4 cycles on 2 units
TASK_PIXELS = 16384  # outputs a task computes at least, against the cost of drawing a task
TASKS_PER_THREAD = 6
UNROLLED_TAPS = 9
ROW_FRAME = 16  # bytes: address of an image row, offset of its taps
ZERO_BYTES_MAX = 512 * 1024  # of zeros that stand in for padding rows, per thread
EFFICIENCY = 0.25  # of the FMA peak, where not bound by memory


@dataclass(frozen=True)
class Line:
    """A spatial axis: its pixels, per residue of the output its (tap, shift) list, the size of the
    window, and bytes per tap, per image coordinate and per output element."""

    axis: Axis
    residues: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    window: int
    filter: int
    image: int
    out: int

    def within(self, residue: int) -> int:
        """Pixels of one residue that exist."""
        axis = self.axis
        return -(-(axis.out_limit - residue) // axis.out_step) if axis.out_limit else axis.size


# The rows of a 1-D problem: one, with one tap.
ONE_ROW = Line(Axis(1, 0, 0, 1, 1), ((0, ((0, 0),)),), 1, 0, 0, 0)


def spatial_lines(problem: ConvolutionProblem) -> list[Line]:
    """The problem's spatial axes."""
    item = problem.x.dtype.itemsize
    descs = (problem.x, problem.w, problem.y)
    strides = [[stride * item for stride in desc.strides] for desc in descs]
    lines = []
    for a, window in enumerate(problem.w.dims[2:]):
        line = axis_line(problem, a, *strides, problem.direction == "backward_data")
        numbers = (line.filter_stride, line.image_stride, line.out_stride)
        lines.append(Line(line.axis, line.residues, window, *numbers))
    return lines


@dataclass(frozen=True)
class Shape:
    """The numbers of one kernel; strides in bytes."""

    batch: int
    channels: int
    image: tuple[int, int]  # strides of batch and channel
    out: tuple[int, int]
    filter: int  # stride of the channel
    rows: Line
    columns: Line
    dtype: str
    accumulator: str
    lanes: int

    @property
    def item(self) -> int:
        return itemsize(self.dtype)


def shape_of(problem: ConvolutionProblem, target: Target) -> Shape:
    """The problem as one correlation per phase (see geometry.py), 1-D as one row."""
    item = problem.x.dtype.itemsize
    backward = problem.direction == "backward_data"
    image, out = (problem.y, problem.x) if backward else (problem.x, problem.y)
    lines = spatial_lines(problem)
    accumulator = str(problem.x.dtype.accumulator)
    return Shape(
        problem.x.dims[0],
        problem.x.dims[1],
        (image.strides[0] * item, image.strides[1] * item),
        (out.strides[0] * item, out.strides[1] * item),
        problem.w.strides[0] * item,
        lines[0] if len(lines) == 2 else ONE_ROW,
        lines[-1],
        str(problem.x.dtype),
        accumulator,
        target.vector_bytes // itemsize(accumulator),
    )


def both(a: Any, b: Any) -> Any:
    """a and b, where either may be known already."""
    if isinstance(a, bool):
        return b if a else False
    return a if b is True else (False if b is False else a & b)


class Emitter:
    """What the two layouts share: entry, phases, blending."""

    def __init__(self, target: Target, problem: ConvolutionProblem, s: Shape) -> None:
        self.k, self.s, self.problem = KernelBuilder(target), s, problem
        self.epilogue = problem.epilogue

    def emit(self) -> KernelBuilder:
        k = self.k
        names = [operand.name for operand in self.problem.operands]
        with k.entry(ENTRY, len(names)) as call:
            arrays = dict(zip(names, call.pointers))
            self.source = arrays.get("x", arrays.get("dy"))
            self.dy = arrays.get("dy", 0)
            self.bias = arrays.get("bias", 0)
            self.out, self.call = call.pointers[-1], call
            self.body(arrays.get("w", 0))
        return k

    def body(self, w: Any) -> None:
        raise NotImplementedError

    def phases(self) -> list[tuple[Any, Any]]:
        """((row residue, its taps), (column residue, its taps)) of every phase."""
        return list(itertools.product(self.s.rows.residues, self.s.columns.residues))

    def finish(self, total: Any, old: Any, shift: Any) -> Any:
        """alpha * total + beta * old, bias, activation; `old()` loads the output where needed."""
        k = self.k
        result = k.variable(total * k.cast(self.call.alpha, total))
        with k.if_(self.call.beta.ne(0.0)):
            result.set(k.fma(old(), k.cast(self.call.beta, total), result.value))
        value = result.value if shift is None else result.value + shift
        if self.epilogue.activation is not None:
            value = emit_activation(k, self.epilogue.activation, value)
        return value

    def row_inside(self, p: Any, taps: Any) -> Any:
        """True if output row p needs no image row outside the image."""
        rows = self.s.rows
        if not rows.axis.checked or not taps:
            return True
        shifts = [shift for _, shift in taps]
        first = p * rows.axis.step
        return both(first + min(shifts) >= 0, first + max(shifts) < rows.axis.limit)

    def tap_rows(self, row_taps: Any, column_taps: Any) -> Iterator[Any]:
        """Numbers of the rows of taps: unrolled for few taps, else a loop. The loop keeps the sums
        side by side; in one long block LLVM follows one sum through all its taps, waiting."""
        if len(row_taps) * len(column_taps) <= UNROLLED_TAPS:
            yield from range(len(row_taps))
            return
        with self.k.loop(0, len(row_taps)) as j:
            yield j

    def versions(self, inside: Any) -> Iterator[bool]:
        """Whether to check the border, once for each version of the code that is reached."""
        if isinstance(inside, bool):
            yield not inside
            return
        with self.k.if_else(inside) as (then, otherwise):
            with then:
                yield False
            with otherwise:
                yield True


class ChannelsLast(Emitter):
    """Vectors of channels; a task is a run of output rows of one image.

    The innermost loop runs over channels, so that memory is read in order.
    """

    def body(self, w: Any) -> None:
        k, s = self.k, self.s
        vectors = -(-s.channels // s.lanes)
        size = itemsize(s.accumulator)
        taps = [(r, c) for r in range(s.rows.window) for c in range(s.columns.window)]
        self.tap_bytes = vectors * s.lanes * size
        self.table = k.scratch(len(taps) * self.tap_bytes)
        with k.loop(0, vectors) as v:
            channel = v * s.lanes
            mask = k.first_lanes(s.channels - channel, s.lanes)
            for i, (r, c) in enumerate(taps):
                address = w + channel * s.filter + (r * s.rows.filter + c * s.columns.filter)
                value = k.gather(address, k.iota(s.lanes) * s.filter, s.dtype, mask)
                k.store(value, self.table + channel * size, s.accumulator,
                        offset=i * self.tap_bytes)  # fmt: skip
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


class ChannelsFirst(Emitter):
    """Vectors of pixels of a row; a task is a run of planes, or a run of rows of one plane.

    The innermost loop runs down the rows: the masks of a column of vectors are made once.
    """

    def body(self, w: Any) -> None:
        k, s = self.k, self.s
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
        return min(range(most, max(1, most // 2), -1), key=lambda c: (-(-height // c) * c, -c))

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
            width = max(s.columns.within(c0) for c0, _ in group)
            place = out + r0 * s.rows.out
            with k.loop(0, width, s.lanes) as q:
                column = (source, place, q, row_taps, group, taps, shift)
                for border in self.versions(self._column_inside(q, group)):
                    masks = self._masks(q, group) if border else {}
                    with k.loop(start, even, self.count) as p:
                        self._tile(column, p, self.count, masks, border)
                    with k.loop(even, last) as p:
                        self._tile(column, p, 1, masks, border)

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


class Depthwise(Algorithm):
    """cpu:direct_depthwise."""

    name = "cpu:direct_depthwise"

    def supports(self, problem: Problem, device: Device) -> str | None:
        if not isinstance(problem, ConvolutionProblem) or problem.direction == "backward_filter":
            return "computes forward and backward_data only"
        if problem.conv.axes > 2:
            return "1 and 2 spatial dimensions only"
        if problem.x.size == 0 or problem.w.size == 0 or problem.y.size == 0:
            return "an empty tensor"
        if problem.w.dims[1] != 1 or problem.w.dims[0] != problem.conv.groups:
            return "not depthwise with one filter a channel"
        taps = problem.w.size // problem.w.dims[0]
        if taps > TAPS_MAX:
            return f"{taps} taps are more than {TAPS_MAX}, which it unrolls"
        return None if self._layout(problem) else self._layout_reason(problem)

    @staticmethod
    def _layout(problem: ConvolutionProblem) -> type[Emitter] | None:
        x, y = problem.x.strides, problem.y.strides
        if x[1] == 1 and y[1] == 1:
            shape = shape_of(problem, Target.current())
            return ChannelsLast if ChannelsLast.zero_bytes(shape) <= ZERO_BYTES_MAX else None
        source = y if problem.direction == "backward_data" else x
        step = problem.conv.stride[-1] if problem.direction == "forward" else 1
        if source[-1] == 1 and step in (1, 2):
            return ChannelsFirst
        return None

    @staticmethod
    def _layout_reason(problem: ConvolutionProblem) -> str:
        return (
            "needs unit stride along channels in x and y (and pixels that lie close), or along the "
            "width of the tensor read with a convolution stride of 1 or 2"
        )

    def estimate(self, problem: Problem, device: Device) -> float:
        accumulator = str(problem.dtype.accumulator)
        return cost.seconds(problem.flops / EFFICIENCY, problem.bytes, accumulator)

    def build(self, problem: Problem, device: Device) -> CompiledKernel:
        if not isinstance(problem, ConvolutionProblem):
            raise TypeError(f"{self.name} was asked to build {problem}")
        emitter = self._layout(problem)
        if emitter is None:
            raise TypeError(f"{self.name} was asked to build {problem}")
        words = "vectors of channels" if emitter is ChannelsLast else "vectors of pixels"
        return compiled(
            f"{self.name}|{problem}",
            lambda target: emitter(target, problem, shape_of(problem, target)).emit(),
            len(problem.operands),
            f"{words}, straight from memory",
        )
