"""cpu:reduce_bias: dbias[k] = alpha * sum over batch and pixels of dy[n, k, pixel] + beta * dbias.

Vectors run along pixels, or along channels where these are the neighbours in memory. The pixels
are cut into slices whose sums are added in order, so the result does not depend on the number of
threads; within a slice, partial sums of at most CHUNK terms keep the rounding errors small.
"""

from __future__ import annotations

from typing import ClassVar

from bedstone.backends.cpu import cost
from bedstone.backends.cpu.builder import Call, KernelBuilder, itemsize
from bedstone.backends.cpu.kernel import ENTRY, CompiledKernel, compiled
from bedstone.backends.cpu.packing import Span, joined, load_strided, place
from bedstone.backends.cpu.target import Target
from bedstone.backends.cpu.values import Int, IntLike, Mask
from bedstone.plan.algorithm import Algorithm
from bedstone.plan.device import Device
from bedstone.spec.convolution import BiasGradientProblem
from bedstone.spec.problem import Problem

CHUNK = 128  # vectors summed before they are added to the slice's sum
TASKS_WANTED = 16
SLICE_TERMS_MIN = 4096  # a slice of less work is not worth a task
VECTORS = 4  # running sums side by side: an addition takes 3 to 4 cycles


class BiasGradient:
    """Emits the kernel: a phase of tasks (block of channels, slice), then one that adds up."""

    def __init__(self, problem: BiasGradientProblem, target: Target) -> None:
        self.k = KernelBuilder(target)
        self.dtype, self.sum_dtype = str(problem.y.dtype), str(problem.y.dtype.accumulator)
        self.item, self.sum_item = itemsize(self.dtype), itemsize(self.sum_dtype)
        self.lanes = self.k.lanes(self.dtype)
        dims, strides = problem.y.dims, problem.y.strides
        self.channels, self.channel_bytes = dims[1], strides[1] * self.item
        self.bias_bytes = problem.bias.strides[0] * self.item
        axes = [a for a in range(len(dims)) if a != 1]
        self.spans = joined([Span(dims[a], strides[a] * self.item) for a in axes])
        self.pixels = problem.y.size // max(1, self.channels)
        across = strides[1] == 1 and self.spans[-1].stride != self.item
        self.channel_lanes = across and self.channels > 1
        self.width = VECTORS * self.lanes if self.channel_lanes else 1  # channels of a block
        self.blocks = -(-self.channels // self.width)
        # A slice is a run of rows (of the finest span), or of single pixels with channel lanes.
        self.row = 1 if self.channel_lanes else self.spans[-1].size
        self.rows = self.pixels // max(1, self.row)
        least = -(-SLICE_TERMS_MIN // max(1, self.row * self.width))
        wanted = -(-TASKS_WANTED // max(1, self.blocks))
        self.slice_rows = max(1, least, -(-self.rows // wanted))
        self.slices = max(1, -(-self.rows // self.slice_rows))

    def emit(self) -> KernelBuilder:
        """The whole module."""
        k = self.k
        with k.entry(ENTRY, pointers=2) as call:
            sums = k.scratch(self.blocks * self.width * self.slices * self.sum_item)
            dy = call.pointers[0]
            with (
                k.parallel(self.blocks * self.slices, call.threads) as job,
                job.each_task() as task,
            ):
                block, number = task // self.slices, task % self.slices
                first = number * self.slice_rows
                last = k.min(first + self.slice_rows, self.rows)
                to = sums + task * (self.width * self.sum_item)
                source = dy + block * (self.width * self.channel_bytes)
                if self.channel_lanes:
                    self._sum_across(source, to, block, first, last)
                else:
                    self._sum_along(source, to, first, last)
            self._add_slices(call, sums)
        return k

    def _sum_along(self, source: IntLike, to: IntLike, first: IntLike, last: IntLike) -> None:
        """One channel, vectors along the rows' pixels."""
        k, lanes, zero = self.k, self.lanes, self.k.constant(0.0, self.sum_dtype, self.lanes)
        inner = self.spans[-1]
        width = VECTORS * lanes
        totals = [k.variable(zero) for _ in range(VECTORS)]
        with k.loop(first, last) as row:
            offset, _ = place(k, row, self.spans[:-1]) if len(self.spans) > 1 else (0, [])
            with k.loop(0, inner.size, CHUNK * width) as start:
                end = k.min(start + CHUNK * width, inner.size)
                parts = [k.variable(zero) for _ in range(VECTORS)]
                for part in parts:
                    part.set(zero)
                with k.loop(start, end, width) as i:
                    for j, part in enumerate(parts):
                        mask = self._tail(inner.size, i + j * lanes, width)
                        at = source + offset + (i + j * lanes) * inner.stride
                        more = load_strided(k, at, inner.stride, lanes, self.dtype, mask)
                        part.set(part.value + more)
                for total, part in zip(totals, parts):
                    total.set(total.value + part.value)
        folded = totals[0].value + totals[1].value + (totals[2].value + totals[3].value)
        k.store(k.reduce(folded, lambda a, b: a + b), to, self.sum_dtype)

    def _sum_across(
        self, source: IntLike, to: IntLike, block: IntLike, first: IntLike, last: IntLike
    ) -> None:
        """VECTORS vectors of channels, pixel by pixel."""
        k, lanes, zero = self.k, self.lanes, self.k.constant(0.0, self.sum_dtype, self.lanes)
        masks = [
            self._tail(self.channels, block * self.width + j * lanes, self.width)
            for j in range(VECTORS)
        ]
        totals = [k.variable(zero) for _ in range(VECTORS)]
        with k.loop(first, last, CHUNK) as start:
            parts = [k.variable(zero) for _ in range(VECTORS)]
            for part in parts:
                part.set(zero)
            with k.loop(start, k.min(start + CHUNK, last)) as pixel:
                offset, _ = place(k, pixel, self.spans)
                for j, part in enumerate(parts):
                    at = source + offset + j * lanes * self.item
                    part.set(part.value + k.load(at, self.dtype, lanes, mask=masks[j]))
            for total, part in zip(totals, parts):
                total.set(total.value + part.value)
        for j, total in enumerate(totals):
            k.store(total.value, to, self.sum_dtype, offset=j * lanes * self.sum_item)

    def _tail(self, size: int, at: IntLike, width: int) -> Mask | None:
        return None if size % width == 0 else self.k.first_lanes(size - at, self.lanes)

    def _add_slices(self, call: Call, sums: Int) -> None:
        """The slices' sums of each channel, in order; alpha, beta, store."""
        k, dbias = self.k, call.pointers[1]
        with k.loop(0, self.channels) as channel:
            block, place_in = channel // self.width, channel % self.width
            at = sums + (block * (self.slices * self.width) + place_in) * self.sum_item
            total = k.variable(k.constant(0.0, self.sum_dtype))
            total.set(k.constant(0.0, self.sum_dtype))
            with k.loop(0, self.slices) as s:
                part = k.load(at + s * (self.width * self.sum_item), self.sum_dtype)
                total.set(total.value + part)
            to = dbias + channel * self.bias_bytes
            k.store_blended(total.value, call.alpha, call.beta, to, self.dtype)


class ReduceBias(Algorithm):
    """cpu:reduce_bias."""

    name: ClassVar[str] = "cpu:reduce_bias"

    def supports(self, problem: Problem, device: Device) -> str | None:
        if not isinstance(problem, BiasGradientProblem):
            return "computes the gradient of a bias only"
        return None

    def estimate(self, problem: Problem, device: Device) -> float:
        return cost.seconds(0.0, problem.bytes, str(problem.dtype.accumulator), phases=1)

    def build(self, problem: Problem, device: Device) -> CompiledKernel:
        return compiled(
            f"{self.name} {problem}",
            lambda target: BiasGradient(problem, target).emit(),
            len(problem.operands),
        )
