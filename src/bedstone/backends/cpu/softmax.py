"""Softmax on the CPU: fast, accurate and log, over any axes, forward and backward.

Forward finds the maximum, then exp(x - maximum) and its sum, then scales. While a row fits the
caches its exponentials are kept for the last pass; in longer rows, which are cut into chunks,
they are computed twice. Sums are float32 (float64 for itself).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from bedstone.backends.cpu import vectormath as vm
from bedstone.backends.cpu.builder import KernelBuilder
from bedstone.backends.cpu.elementwise import PointwiseAlgorithm, Stream
from bedstone.backends.cpu.kernel import ENTRY
from bedstone.backends.cpu.row_kernel import RowKernel
from bedstone.backends.cpu.rows import PerRow, Position, Rows
from bedstone.backends.cpu.target import Target
from bedstone.backends.cpu.tasks import Output
from bedstone.backends.cpu.values import Float, IntLike
from bedstone.spec.softmax import SoftmaxProblem

# Scaled by no more than this, float32 overflows where exp(x) does in float64, at 709.8.
FAST_LIMIT = 621.0


def larger(a: Float, b: Float) -> Float:
    """The larger; a NaN may get lost (the sum of the exponentials has it)."""
    return a.k.select(a < b, b, a)


class Softmax(RowKernel):
    """What both directions share."""

    def __init__(self, rows: Rows, problem: SoftmaxProblem) -> None:
        super().__init__(rows)
        self.algorithm, self.dtype = problem.algorithm, problem.x.dtype.value
        self.out = len(rows.streams) - 1

    def prepare(self) -> None:
        self.output = Output(self.k, self.rows.call, self.dtype, self.rows.lanes)


class Forward(Softmax):
    """Operands x, y. Numbers of a row: the maximum and the sum."""

    numbers = 2
    kept = 2

    def __init__(self, rows: Rows, problem: SoftmaxProblem) -> None:
        super().__init__(rows, problem)
        self.buffered = self.algorithm != "log" and rows.chunks == 1
        # float16 numbers whose exp overflows float32 are common: "fast" scales them too.
        self.scaled = self.algorithm != "fast" or self.dtype == "float16"

    def statistics(self, chunk: IntLike | None) -> list[PerRow]:
        rows = self.rows
        if self.scaled:
            maximum = self.rows.total(lambda p: p.load(0), chunk, larger, -math.inf)
        else:
            maximum = rows.derive(lambda: self.k.constant(0.0, rows.compute, rows.lanes))
        if self.scaled and self.algorithm == "fast":
            maximum = rows.derive(lambda m: vm.at_most(m, FAST_LIMIT), maximum)

        def power(position: Position) -> Float:
            value = self._power(position, maximum)
            if self.buffered:
                place = self.buffer + position.spot * rows.width
                self.k.store(value, place, rows.compute)
            return value

        return [maximum, self.rows.total(power, chunk)]

    def _power(self, position: Position, maximum: PerRow) -> Float:
        x = position.load(0)
        if self.algorithm == "fast":  # scaled, if at all, by no more than FAST_LIMIT
            return vm.exp(x - maximum.at(position) if self.scaled else x)
        # (Where a NaN hid the maximum this may be above 0, but then the whole row is NaN.)
        return vm.exp_of_negative(x - maximum.at(position))

    def merge(self, a: list[Float], b: list[Float]) -> list[Float]:
        (m, s), (n, t) = a, b
        if not self.scaled:
            return [m, s + t]
        top = larger(m, n)
        # A part that is all -infinity adds 0 (not the NaN of -inf - -inf) unless all parts are.
        return [top, self._rescaled(s, m, top) + self._rescaled(t, n, top)]

    def _rescaled(self, part: Float, maximum: Float, top: Float) -> Float:
        empty = maximum.eq(-math.inf) & (top > -math.inf)
        return self.k.select(empty, 0.0, part * vm.exp(maximum - top))

    def conclude(self, numbers: list[PerRow]) -> list[PerRow]:
        maximum, total = numbers
        last: Callable[[Float], Float] = vm.log if self.algorithm == "log" else lambda t: 1.0 / t
        return [maximum, self.rows.derive(last, total)]

    def write(self, numbers: list[PerRow], chunk: IntLike | None) -> None:
        maximum, last = numbers
        k, rows = self.k, self.rows

        def body(position: Position) -> None:
            factor = last.at(position)
            if self.algorithm == "log":
                value = position.load(0) - maximum.at(position) - factor
            elif self.buffered:
                place = self.buffer + position.spot * rows.width
                value = k.load(place, rows.compute, rows.lanes) * factor
            else:
                value = self._power(position, maximum) * factor
            position.store(self.output, self.out, value)

        rows.walk(body, chunk, written=self.out)


class Backward(Softmax):
    """Operands y, dy, dx. One number a row: the sum of y * dy, or of dy."""

    def statistics(self, chunk: IntLike | None) -> list[PerRow]:
        def term(position: Position) -> Float:
            dy = position.load(1)
            return dy if self.algorithm == "log" else dy * position.load(0)

        return [self.rows.total(term, chunk)]

    def merge(self, a: list[Float], b: list[Float]) -> list[Float]:
        return [a[0] + b[0]]

    def write(self, numbers: list[PerRow], chunk: IntLike | None) -> None:
        def body(position: Position) -> None:
            y, dy, total = position.load(0), position.load(1), numbers[0].at(position)
            value = dy - vm.exp(y) * total if self.algorithm == "log" else y * (dy - total)
            position.store(self.output, self.out, value)

        self.rows.walk(body, chunk, written=self.out)


def emit(target: Target, problem: SoftmaxProblem) -> KernelBuilder:
    """The kernel of either direction."""
    k = KernelBuilder(target)
    with k.entry(ENTRY, pointers=len(problem.operands)) as call:
        if problem.x.size:
            streams = [Stream(p, o.desc) for p, o in zip(call.pointers, problem.operands)]
            compute = problem.x.dtype.accumulator.value
            rows = Rows(k, call, streams, problem.axes, len(streams) - 1, compute)
            kind: Any = Forward if problem.direction == "forward" else Backward
            kind(rows, problem).emit()
    return k


class OnlineSoftmax(PointwiseAlgorithm):
    """All algorithms, both directions, any axes and strides."""

    name = "cpu:rows"
    emit = staticmethod(emit)


ALGORITHMS = (OnlineSoftmax(),)
