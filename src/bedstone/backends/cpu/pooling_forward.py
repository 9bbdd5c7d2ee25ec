"""Forward pooling: y = alpha * (max or mean of the taps) + beta * y, and where the maxima are.

Each unit of work is some windows (lanes along channels) or some rows of windows (lanes along
columns); see pooling_reader. Sums are float32 (float64 for itself) in row-major order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from bedstone.backends.cpu.builder import Call, KernelBuilder
from bedstone.backends.cpu.irtypes import I64
from bedstone.backends.cpu.pooling_reader import (
    LocatedMaximum,
    Maximum,
    QuietMaximum,
    Total,
    WindowReader,
)
from bedstone.backends.cpu.pooling_windows import lanes_along_channels
from bedstone.backends.cpu.tasks import Output, each_unit, unravel
from bedstone.backends.cpu.values import Int, IntLike, Mask
from bedstone.spec.pooling import PoolingProblem

UNIT_TAPS = 16 * 1024  # taps read by a unit of work: some microseconds


class Forward(WindowReader):
    """Emits the kernel's parallel phase."""

    def __init__(self, k: KernelBuilder, problem: PoolingProblem, call: Call) -> None:
        channels = lanes_along_channels(problem.x, problem.y)
        super().__init__(k, problem, call, problem.x, channels)
        self.y = problem.y
        n, c, *spatial = self.y.dims
        self.rows = (n, *spatial) if channels else (n, c, *spatial[:-1])

    def accumulator(self, first: Callable[[], Int]) -> Any:
        if self.pool.mode != "max":
            return Total(self.k, self.compute, self.lanes)
        if self.problem.indices is not None:
            return LocatedMaximum(self.k, self.compute, first())
        kind = QuietMaximum if self.channels else Maximum
        return kind(self.k, self.compute, self.lanes)

    def emit(self) -> None:
        k, rows = self.k, math.prod(self.rows)
        taps = self.problem.reduction_length * self.y.dims[1 if self.channels else -1]
        per_unit = max(1, UNIT_TAPS // taps)
        units = -(-rows // per_unit)
        large = self.problem.bytes > k.target.l3_bytes
        with each_unit(k, self.call.threads, units, large=large) as (unit, _):
            self.output = Output(k, self.call, self.dtype, self.lanes)
            first = unit * per_unit
            with k.loop(first, k.min(first + per_unit, rows), at_least_once=True) as row:
                n, *rest = unravel(row, self.rows)
                if self.channels:
                    self._window(n, rest)
                else:
                    self._row(n, rest[0], rest[1:])

    def _window(self, n: IntLike, windows: list[IntLike]) -> None:
        """All channels of one window."""
        k, lanes, channels = self.k, self.lanes, self.source.dims[1]
        factor = None
        if self.pool.mode != "max":
            factor = self.reciprocal(self.count(self.axes, windows))

        def block(c: IntLike, masks: list[Mask | None]) -> None:
            found = self.channel_block(n, c, windows, masks)
            for number, mask in enumerate(masks):
                self._finish(found[number], factor, (n, c + number * lanes, *windows), mask)

        share = (
            4 if self.problem.indices is not None else 2
        )  # a maximum's place takes a register too
        vectors = min(k.target.vector_registers // share, -(-channels // lanes))
        step = vectors * lanes
        whole = channels - channels % step
        if whole:
            with k.loop(0, whole, step) as c:
                block(c, [None] * vectors)
        if channels > whole:
            vectors = -(-(channels - whole) // lanes)
            tail = k.first_lanes(channels - whole - (vectors - 1) * lanes, lanes)
            block(whole, [None] * (vectors - 1) + [tail])

    def _row(self, n: IntLike, c: IntLike, windows: list[IntLike]) -> None:
        """All windows of one row."""
        k, last = self.k, self.axes[-1]
        count = 1 if self.pool.mode == "max" else self.count(self.axes[:-1], windows)

        def block(q: IntLike, whole: bool) -> None:
            found = self.column_block(n, c, windows, q, whole)
            factor = None
            if self.pool.mode != "max":
                factor = self.column_reciprocal(count, q, whole)
            mask = None if whole else k.first_lanes(last.windows - q, self.lanes)
            self._finish(found, factor, (n, c, *windows, q), mask)

        self.each_column_block(block)

    def _finish(
        self, found: Any, factor: Any, indices: tuple[IntLike, ...], mask: Mask | None
    ) -> None:
        """Scale, blend and store the lanes that start at one element of y."""
        k, axis = self.k, 1 if self.channels else self.y.rank - 1
        value = found.value if factor is None else found.value * factor
        address = self.corner("y", self.y, *indices)
        self.output.store(value, address, self.y.strides[axis], mask)
        desc = self.problem.indices
        if desc is not None:
            address, stride = self.corner("indices", desc, *indices), desc.strides[axis]
            where = k.resize(found.position.value, I64)
            if stride == 1:
                k.store(where, address, "int64", mask=mask)
            else:
                k.scatter(where, address, k.iota(self.lanes) * (8 * stride), "int64", mask)
