"""Depthwise backward_filter: dw[c, r, s] = sum over images and pixels of dy * shifted x.

Every tap is one sum per channel. The rows (n, p) of dy are cut into a fixed number of parts; each
part keeps its own sums, and the parts are added in order: the result does not depend on which
thread did what. Channels last: vectors of channels, all taps of a row of the filter beside each
other. Channels first: vectors of pixels, folded to one number at the end of a plane.
"""

from __future__ import annotations

import itertools
from typing import Any

from bedstone.backends.cpu import cost
from bedstone.backends.cpu.builder import KernelBuilder
from bedstone.backends.cpu.convolution.depthwise import EFFICIENCY, TAPS_MAX, ZERO_BYTES_MAX
from bedstone.backends.cpu.convolution.depthwise_emitter import Emitter, shape_of
from bedstone.backends.cpu.convolution.depthwise_first import ChannelsFirst
from bedstone.backends.cpu.convolution.depthwise_last import ChannelsLast
from bedstone.backends.cpu.irtypes import itemsize
from bedstone.backends.cpu.kernel import ENTRY, CompiledKernel, compiled
from bedstone.backends.cpu.target import MIB, Target
from bedstone.plan.algorithm import Algorithm
from bedstone.plan.device import Device
from bedstone.spec.convolution import ConvolutionProblem
from bedstone.spec.problem import Problem

PARTS = 16  # parts of the sum: enough for dynamic scheduling, few enough to add up quickly
PARTIAL_BYTES_MAX = MIB
SUMS_MAX = 25  # vectors of sums in flight: the rest of 32 registers holds dy and x


class FilterSums(Emitter):
    """What the two layouts share: the table of partial sums and how it is added up."""

    def emit(self) -> KernelBuilder:
        with self.k.entry(ENTRY, 3) as call:
            self.source, self.dy, self.out = call.pointers
            self.call = call
            self._sum_and_add()
        return self.k

    def _sum_and_add(self) -> None:
        k, s = self.k, self.s
        self.taps = [
            (t, u) for t, u in itertools.product(range(s.rows.window), range(s.columns.window))
        ]
        self.size = itemsize(s.accumulator)
        self.tap_bytes = -(-s.channels // s.lanes) * s.lanes * self.size
        self.part_bytes = len(self.taps) * self.tap_bytes
        parts = self.parts(max(1, PARTIAL_BYTES_MAX // self.part_bytes))
        table = k.scratch(parts * self.part_bytes)
        self.sums(table, parts)
        vectors = self.tap_bytes // (s.lanes * self.size)
        with k.parallel(vectors, self.call.threads) as job, job.each_task() as v:
            self._add_up(table, parts, v * s.lanes)

    def parts(self, most: int) -> int:
        raise NotImplementedError

    def sums(self, table: Any, parts: int) -> None:
        raise NotImplementedError

    def _add_up(self, table: Any, parts: int, channel: Any) -> None:
        """dw = alpha * (sum of the parts, in order) + beta * dw for one vector of channels."""
        k, s = self.k, self.s
        mask = k.first_lanes(s.channels - channel, s.lanes)
        lanes = k.iota(s.lanes) * s.filter
        for i, (t, u) in enumerate(self.taps):
            here = table + channel * self.size + i * self.tap_bytes
            total = k.variable(k.load(here, s.accumulator, s.lanes))
            with k.loop(1, parts) as part:
                more = k.load(here + part * self.part_bytes, s.accumulator, s.lanes)
                total.set(total.value + more)
            address = self.out + channel * s.filter + (t * s.rows.filter + u * s.columns.filter)

            def old(address: Any = address) -> Any:
                return k.gather(address, lanes, s.dtype, mask)

            k.scatter(self.finish(total.value, old, None), address, lanes, s.dtype, mask)

    def groups(self) -> list[Any]:
        """Rows of taps that are summed in one pass."""
        rows = self.s.rows.residues[0][1]
        count = max(1, SUMS_MAX // self.s.columns.window)
        return [rows[i : i + count] for i in range(0, len(rows), count)]


class FilterChannelsLast(FilterSums, ChannelsLast):
    """A task sums one part of the rows (n, p) for all channels."""

    def parts(self, most: int) -> int:
        return max(1, min(PARTS, most, self.s.batch * self.s.rows.axis.size))

    def sums(self, table: Any, parts: int) -> None:
        k, s = self.k, self.s
        height, total = s.rows.axis.size, s.batch * s.rows.axis.size
        with k.parallel(parts, self.call.threads, self.zero_bytes(s)) as job:
            self.fill_zeros(job.scratch)
            with job.each_task() as part:
                sums = table + part * self.part_bytes
                with k.loop(0, self.part_bytes, s.lanes * self.size) as at:
                    k.store(k.constant(0.0, s.accumulator, s.lanes), sums + at, s.accumulator)
                with k.loop(part * total // parts, (part + 1) * total // parts) as row:
                    n, p = row // height, row % height
                    source = self.source + n * s.image[0]
                    dy = self.dy + n * s.out[0] + p * s.rows.axis.out
                    for group in self.groups():
                        line = (source, dy, p, group, s.columns.residues[0][1])
                        self._line(line, sums)

    def _line(self, line: tuple[Any, ...], sums: Any) -> None:
        """One row of dy against the image rows of some rows of taps."""
        k, s = self.k, self.s
        bases = self._bases(line)
        whole = s.channels // s.lanes * s.lanes
        with k.loop(0, whole, s.lanes) as channel:
            self._pixels_of(line, bases, sums, channel, s.lanes)
        if s.channels > whole:
            self._pixels_of(line, bases, sums, whole, s.channels - whole)

    def _pixels_of(
        self, line: tuple[Any, ...], bases: Any, sums: Any, channel: Any, live: int
    ) -> None:
        k, s = self.k, self.s
        _, dy, _, row_taps, column_taps = line
        axis = s.columns.axis
        mask = k.first_lanes(live, s.lanes)
        places = {
            (t, u): sums + channel * self.size + (t * s.columns.window + u) * self.tap_bytes
            for t, _ in row_taps
            for u, _ in column_taps
        }
        totals = {
            tap: k.variable(k.load(place, s.accumulator, s.lanes)) for tap, place in places.items()
        }

        def pixel(q: Any) -> None:
            address = dy + q * axis.out + channel * s.out[1]
            gradient = k.load(address, s.dtype, s.lanes, mask=mask)
            for t, row_shift in row_taps:
                base, stride = bases[row_shift]
                here = base + q * stride + channel * s.image[1]
                for u, shift in column_taps:
                    value = self._pixel(here, q, shift, mask)
                    totals[t, u].set(k.fma(gradient, value, totals[t, u].value))

        inner = [q for q in range(axis.size) if self._inside(q, column_taps)]
        low, high = (inner[0], inner[-1] + 1) if inner else (axis.size, axis.size)
        for q in (*range(low), *range(high, axis.size)):
            pixel(q)
        with k.loop(low, high) as q:
            pixel(q)
        for tap, total in totals.items():
            k.store(total.value, places[tap], s.accumulator)

    def _inside(self, q: int, column_taps: Any) -> bool:
        axis = self.s.columns.axis
        return all(0 <= q * axis.step + shift < axis.limit for _, shift in column_taps)


class FilterChannelsFirst(FilterSums, ChannelsFirst):
    """A task sums one channel over one part of the images."""

    def parts(self, most: int) -> int:
        wanted = -(-PARTS // self.s.channels)
        return max(1, min(wanted, most, self.s.batch))

    def sums(self, table: Any, parts: int) -> None:
        k, s = self.k, self.s
        zero_bytes, before = self.zero_line()
        with k.parallel(parts * s.channels, self.call.threads, zero_bytes) as job:
            self.fill_zeros(job.scratch, zero_bytes, before)
            with job.each_task() as task:
                part, channel = task // s.channels, task % s.channels
                first, last = part * s.batch // parts, (part + 1) * s.batch // parts
                place = table + part * self.part_bytes + channel * self.size
                for group in self.groups():
                    self._channel(channel, first, last, group, place)

    def _channel(self, channel: Any, first: Any, last: Any, row_taps: Any, place: Any) -> None:
        """Sums of some rows of taps over images first..last, as single numbers."""
        k, s = self.k, self.s
        group = (s.columns.residues[0],)
        column_taps = group[0][1]
        zero = k.constant(0.0, s.accumulator, s.lanes)
        totals = {(t, u): k.variable(zero) for t, _ in row_taps for u, _ in column_taps}
        width, height = s.columns.axis.size, s.rows.axis.size
        with k.loop(first, last) as n:
            source = self.source + n * s.image[0] + channel * s.image[1]
            dy = self.dy + n * s.out[0] + channel * s.out[1]
            with k.loop(0, width, s.lanes) as q:
                for border in self.versions(self._column_inside(q, group)):
                    masks = self._masks(q, group, width) if border else {}
                    with k.loop(0, height) as p:
                        corner = source + q * s.columns.axis.image
                        self._row_of(corner, dy, p, q, row_taps, column_taps, masks, totals, border)
        for (t, u), total in totals.items():
            number = k.reduce(total.value, lambda a, b: a + b)
            offset = (t * s.columns.window + u) * self.tap_bytes
            k.store(number, place, s.accumulator, offset=offset)

    def _row_of(
        self, corner: Any, dy: Any, p: Any, q: Any, row_taps: Any, column_taps: Any,
        masks: dict[int, Any], totals: dict[Any, Any], border: bool,
    ) -> None:  # fmt: skip
        """One vector of dy against every tap."""
        k, s = self.k, self.s
        mask = k.first_lanes(s.columns.axis.size - q, s.lanes) if border else None
        address = dy + p * s.rows.axis.out + q * s.columns.axis.out
        gradient = k.load(address, s.dtype, s.lanes, mask=mask)
        for t, row_shift in row_taps:
            y = self._int(p * s.rows.axis.step + row_shift)
            base = corner + y * s.rows.image
            if s.rows.axis.checked:
                base = k.select(y.below(s.rows.axis.limit), base, self.zeros)
            for u, shift in column_taps:
                value = self._read(base, shift, masks)
                if mask is not None and s.columns.axis.step > 1:
                    value = k.select(mask, value, 0.0)
                totals[t, u].set(k.fma(gradient, value, totals[t, u].value))


class DepthwiseFilter(Algorithm):
    """cpu:direct_depthwise_filter."""

    name = "cpu:direct_depthwise_filter"

    def supports(self, problem: Problem, device: Device) -> str | None:
        if not isinstance(problem, ConvolutionProblem) or problem.direction != "backward_filter":
            return "computes backward_filter only"
        if problem.conv.axes > 2:
            return "1 and 2 spatial dimensions only"
        if problem.x.size == 0 or problem.w.size == 0 or problem.y.size == 0:
            return "an empty tensor"
        if problem.w.dims[1] != 1 or problem.w.dims[0] != problem.conv.groups:
            return "not depthwise with one filter a channel"
        taps = problem.w.size // problem.w.dims[0]
        if taps > TAPS_MAX:
            return f"{taps} taps are more than {TAPS_MAX}, which it unrolls"
        if self._layout(problem) is None:
            return (
                "needs unit stride along channels in x and dy (and pixels that lie close), or "
                "along the width of both with a convolution stride of 1 or 2"
            )
        return None

    @staticmethod
    def _layout(problem: ConvolutionProblem) -> type[FilterSums] | None:
        x, y = problem.x.strides, problem.y.strides
        if x[1] == 1 and y[1] == 1:
            shape = shape_of(problem, Target.current())
            return FilterChannelsLast if ChannelsLast.zero_bytes(shape) <= ZERO_BYTES_MAX else None
        if x[-1] == 1 and y[-1] == 1 and problem.conv.stride[-1] in (1, 2):
            return FilterChannelsFirst
        return None

    def estimate(self, problem: Problem, device: Device) -> float:
        accumulator = str(problem.dtype.accumulator)
        return cost.seconds(problem.flops / EFFICIENCY, problem.bytes, accumulator, 2)

    def build(self, problem: Problem, device: Device) -> CompiledKernel:
        layout = self._layout(problem) if isinstance(problem, ConvolutionProblem) else None
        if layout is None or not isinstance(problem, ConvolutionProblem):
            raise TypeError(f"{self.name} was asked to build {problem}")
        words = "channels" if layout is FilterChannelsLast else "pixels"
        return compiled(
            f"{self.name}|{problem}",
            lambda target: layout(target, problem, shape_of(problem, target)).emit(),
            len(problem.operands),
            f"vectors of {words}; sums in a fixed number of parts",
        )
