"""Pooling by one window that covers the whole image, where space is contiguous (NCHW).

Lanes lie along the image. A vector of partial results is made for each of as many planes as a
vector has lanes; these vectors are transposed and combined, which gives one result a lane.
"""

from __future__ import annotations

import math

from bedstone.backends.cpu.builder import Call, KernelBuilder, itemsize
from bedstone.backends.cpu.elementwise import Stream, collapse, emit_map
from bedstone.backends.cpu.pooling_windows import axes_of
from bedstone.backends.cpu.shuffles import transposed
from bedstone.backends.cpu.tasks import Output, each_unit, unravel
from bedstone.backends.cpu.values import Float, Int, IntLike
from bedstone.spec.pooling import PoolingProblem
from bedstone.spec.tensor import TensorDesc

UNIT_ELEMENTS = 16 * 1024


def covers(problem: PoolingProblem) -> bool:
    """True if there is one window an image and every element is a tap of it."""
    return all(
        a.windows == 1 and a.dilation == 1 and a.low + a.size <= a.extent for a in axes_of(problem)
    )


def divisor(problem: PoolingProblem) -> int:
    """The taps that count in the mean."""
    axes = axes_of(problem)
    if problem.pool.mode == "average_exclude_padding":
        return math.prod(a.size for a in axes)
    return math.prod(min(a.taps, a.low + a.size + a.high) for a in axes)


def plane(problem: PoolingProblem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The image's collapsed dims and strides."""
    x = problem.x
    nest = collapse([TensorDesc(x.dims[2:], x.strides[2:], x.dtype)])
    return nest.dims, nest.strides[0]


def refuse(problem: PoolingProblem) -> str | None:
    """Why the forward kernel does not take a problem that `covers`."""
    x, y = problem.x, problem.y
    if problem.indices is not None:
        return "positions of the maxima are asked for"
    if plane(problem)[1][-1] != 1 or any(s < 0 for s in x.strides[2:]):
        return "x is not contiguous along the image"
    if x.dims[0] > 1 and x.dims[1] > 1 and y.strides[0] != x.dims[1] * y.strides[1]:
        return "the results of neighbouring images are not evenly spaced"
    return None


class GlobalForward:
    """Emits the kernel's parallel phase."""

    def __init__(self, k: KernelBuilder, problem: PoolingProblem, call: Call) -> None:
        self.k, self.problem, self.call = k, problem, call
        self.x, self.y = problem.x, problem.y
        self.dtype, self.compute = problem.x.dtype.value, problem.x.dtype.accumulator.value
        self.lanes, self.size = k.lanes(self.compute), itemsize(problem.x.dtype.value)
        self.dims, self.strides = plane(problem)
        self.maximum = problem.pool.mode == "max"
        self.identity = -math.inf if self.maximum else 0.0

    def emit(self) -> None:
        k, lanes, width = self.k, self.lanes, itemsize(self.compute)
        planes = self.x.dims[0] * self.x.dims[1]
        groups = -(-planes // lanes)
        per_unit = max(1, UNIT_ELEMENTS // (lanes * math.prod(self.dims)))
        scratch = lanes * lanes * width
        units, large = -(-groups // per_unit), self.x.nbytes > k.target.l3_bytes
        with each_unit(k, self.call.threads, units, scratch, large) as (unit, partials):
            output = Output(k, self.call, self.dtype, lanes)
            last = k.min((unit + 1) * per_unit, groups)
            with k.loop(unit * per_unit, last, at_least_once=True) as group:
                first = group * lanes
                count = lanes if planes % lanes == 0 else k.min(planes - first, lanes)
                with k.loop(0, count, at_least_once=True) as i:
                    k.store(self._partial(first + i), partials + i * (lanes * width), self.compute)
                rows = [
                    k.load(partials, self.compute, lanes, r * lanes * width) for r in range(lanes)
                ]
                result = self._combine(transposed(k, rows))
                if not self.maximum:
                    result = result * (1.0 / divisor(self.problem))
                stride = self.y.strides[1] if self.x.dims[1] > 1 else self.y.strides[0]
                address = self.call.pointers[-1] + first * (stride * self.size)
                output.store(result, address, stride, k.first_lanes(count, lanes))

    def _merge(self, a: Float, b: Float) -> Float:
        return self.k.fmax(a, b) if self.maximum else a + b

    def _combine(self, values: list[Float]) -> Float:
        while len(values) > 1:
            values = [self._merge(a, b) for a, b in zip(values[::2], values[1::2])]
        return values[0]

    def _partial(self, number: IntLike) -> Float:
        """A vector whose lanes together are the maximum or sum of plane `number`."""
        k, lanes = self.k, self.lanes
        n, c = unravel(number, self.x.dims[:2])
        address = self.call.pointers[0] + n * (self.x.strides[0] * self.size)
        address = address + c * (self.x.strides[1] * self.size)
        total = k.variable(k.constant(self.identity, self.compute, lanes))

        def axis(depth: int, address: Int) -> None:
            length = self.dims[depth]
            if depth < len(self.dims) - 1:
                with k.loop(0, length) as i:
                    axis(depth + 1, address + i * (self.strides[depth] * self.size))
                return
            whole = length - length % lanes
            if whole:
                with k.loop(0, whole, lanes) as i:
                    value = k.load(address, self.dtype, lanes, i * self.size)
                    total.set(self._merge(total.value, value))
            if length % lanes:
                mask = k.first_lanes(length % lanes, lanes)
                value = k.load(address, self.dtype, lanes, whole * self.size, mask)
                if self.maximum:
                    value = k.select(mask, value, self.identity)
                total.set(self._merge(total.value, value))

        axis(0, address)
        return total.value


def emit_average_backward(k: KernelBuilder, problem: PoolingProblem, call: Call) -> None:
    """dx = alpha * dy / taps + beta * dx, dy repeated over each image: a pointwise loop."""
    dims, dy = problem.x.dims, problem.y
    spread = TensorDesc(dims, dy.strides[:2] + (0,) * (len(dims) - 2), dy.dtype)
    streams = [Stream(call.pointers[0], spread)], [Stream(call.pointers[-1], problem.x)]
    factor = 1.0 / divisor(problem)
    emit_map(k, call, *streams, lambda k, v: [v[0] * factor])
