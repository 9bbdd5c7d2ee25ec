"""What all pooling kernels share: which taps of a window lie on the input, and loading them.

Lanes lie either along the channels (where these are contiguous, as in NHWC) or along the last
spatial axis. In the first case every tap is one load, and the taps on the input are a range on
each axis. In the second the lanes are neighbouring windows: what a tap reads is contiguous at
stride 1, every n-th element at stride n, and near the borders some lanes are masked off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bedstone.backends.cpu.builder import KernelBuilder, itemsize
from bedstone.backends.cpu.irtypes import I32
from bedstone.backends.cpu.shuffles import deinterleaved
from bedstone.backends.cpu.values import Int, IntLike, Mask
from bedstone.spec.pooling import PoolingProblem
from bedstone.spec.tensor import TensorDesc

INT32_MAX = 2**31 - 1
LONGEST_STRIDED_LOAD = 4  # strides up to here load everything and pick; beyond it, gather
# How far ahead of its rows a walk over windows asks for memory: the processor loses track of
# streams that take turns. Found on an EPYC: 4 times faster than without, 4 to 16 KiB alike.
PREFETCH_BYTES = 8192
UNROLLED_TAPS = 8  # taps of the last axis up to here are unrolled


@dataclass(frozen=True)
class Axis:
    """The windows along one spatial axis."""

    size: int
    windows: int
    taps: int
    low: int
    high: int
    stride: int
    dilation: int

    @property
    def extent(self) -> int:
        """Elements from a window's first tap to its last."""
        return (self.taps - 1) * self.dilation + 1

    def start(self, window: IntLike) -> IntLike:
        """The input position of a window's first tap."""
        return window * self.stride - self.low

    def inside(self, k: KernelBuilder, window: IntLike) -> tuple[IntLike, IntLike]:
        """The range of taps that lie on the input."""
        last_start = (self.windows - 1) * self.stride - self.low
        start = self.start(window)
        first: IntLike = 0
        if self.low:
            first = (k.max(0 - start, 0) + (self.dilation - 1)) // self.dilation
        last: IntLike = self.taps
        if last_start + self.extent > self.size:
            reach = self.size + (self.dilation - 1) - start
            last = k.min(reach // self.dilation, self.taps)
        return first, last

    def counted(self, k: KernelBuilder, window: IntLike) -> IntLike:
        """How many taps lie on the input or its padding."""
        last_start = (self.windows - 1) * self.stride - self.low
        if last_start + self.extent <= self.size + self.high:
            return self.taps
        reach = self.size + self.high + (self.dilation - 1) - self.start(window)
        return k.min(reach // self.dilation, self.taps)

    def interior(self, slack: int = 0) -> tuple[int, int]:
        """The range of windows that lie on the input whole, and `slack` elements beyond."""
        first = -(-self.low // self.stride)
        last = (self.size - slack - self.extent + self.low) // self.stride + 1
        return first, min(last, self.windows)


def axes_of(problem: PoolingProblem) -> tuple[Axis, ...]:
    """The spatial axes, outermost first."""
    pool = problem.pool
    return tuple(
        Axis(size, windows, taps, low, high, stride, dilation)
        for size, windows, taps, (low, high), stride, dilation in zip(
            problem.x.dims[2:],
            problem.y.dims[2:],
            pool.window,
            pool.padding,
            pool.stride,
            pool.dilation,
        )
    )


def lanes_along_channels(*descs: TensorDesc) -> bool:
    """True if every tensor is contiguous along its channels, and there is more than one."""
    return all(d.strides[1] == 1 and d.dims[1] > 1 for d in descs)


@contextlib.contextmanager
def nested(k: KernelBuilder, ranges: Sequence[tuple[IntLike, IntLike]]) -> Iterator[list[IntLike]]:
    """Loops over all index tuples of some ranges, the last fastest."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(k.loop(first, last)) for first, last in ranges]


@dataclass
class Columns:
    """Loads what the taps of neighbouring windows read: `lanes` windows from number q on."""

    k: KernelBuilder
    axis: Axis
    dtype: str
    stride: int  # of the input along the axis, in elements
    lanes: int

    def lane_numbers(self) -> Int:
        """0, 1, 2, ..."""
        return self.k.iota(self.lanes, I32)

    def positions(self, base: IntLike) -> Int:
        """The input position that each lane reads, if lane 0 reads `base`."""
        k = self.k
        start = k.splat(k.resize(k.as_int(base), I32), self.lanes)
        return self.lane_numbers() * self.axis.stride + start

    def inside(self, base: IntLike) -> Mask:
        """Which lanes read the input, not its padding."""
        return self.positions(base).below(self.axis.size)

    @property
    def slack(self) -> int:
        """How far an unmasked load reaches beyond the last lane's element."""
        return self.axis.stride - 1 if self._picks else 0

    @property
    def _picks(self) -> bool:
        return self.stride == 1 and 1 < self.axis.stride <= LONGEST_STRIDED_LOAD

    def load(
        self,
        row: IntLike,
        start: IntLike,
        tap: IntLike,
        inside: Mask | None,
        loaded: dict[int, list[Any]],
    ) -> Any:
        """What the lanes read at a tap of the row, if window q starts at `start`. What lies
        outside reads as 0 if `inside` masks it off. `loaded` keeps vectors from which another
        tap of the same row can pick."""
        k, lanes, size = self.k, self.lanes, itemsize(self.dtype)
        step = self.axis.stride * self.stride
        if step == 1:
            offset = (start + tap * self.axis.dilation) * size
            return k.load(row, self.dtype, lanes, offset, inside)
        if not self._picks:
            offsets = k.iota(lanes) * (step * size)
            base = (start + tap * self.axis.dilation) * (self.stride * size)
            return k.gather(row + base, offsets, self.dtype, inside)
        if not isinstance(tap, int):
            return self._run(row, start + tap * self.axis.dilation, inside)[0]
        group, rest = divmod(tap * self.axis.dilation, self.axis.stride)
        if group not in loaded:
            loaded[group] = self._run(row, start + group * self.axis.stride, inside)
        return loaded[group][rest]

    def _run(self, row: IntLike, first: IntLike, inside: Mask | None) -> list[Any]:
        """A run of stride * lanes elements from `first` on, dealt out by their rest modulo
        the stride."""
        k, lanes, size = self.k, self.lanes, itemsize(self.dtype)
        vectors = []
        for number in range(self.axis.stride):
            at, mask = first + number * lanes, None
            if inside is not None:
                spread = k.splat(k.resize(k.as_int(at), I32), lanes)
                mask = (self.lane_numbers() + spread).below(self.axis.size)
            vectors.append(k.load(row, self.dtype, lanes, at * size, mask))
        return deinterleaved(k, vectors)


def refuse_large(problem: PoolingProblem) -> str | None:
    """Positions are kept in 32 bits."""
    spatial = 1
    for size in problem.x.dims[2:]:
        spatial *= size
    return "an image has 2^31 elements or more" if spatial > INT32_MAX else None
