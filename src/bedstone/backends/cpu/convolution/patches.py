"""Patches of the image as packed operands: the paper's lazily materialised matrix.

Two ways to vectorise the copying. With "pixel" lanes a vector holds one channel at consecutive
pixels (NCHW: neighbours in memory); with "channel" lanes, consecutive channels at one pixel
(NHWC). Depth runs over taps, then channels of the chunk. Padding becomes real zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bedstone.backends.cpu.builder import KernelBuilder
from bedstone.backends.cpu.convolution.geometry import Geometry
from bedstone.backends.cpu.irtypes import I32, itemsize
from bedstone.backends.cpu.packing import Lanes, Span, copy_vectors, place
from bedstone.backends.cpu.values import Int, IntLike


@dataclass(frozen=True)
class TapAt:
    """A tap whose numbers are known at run time; see geometry.Tap."""

    filter: IntLike
    image: IntLike
    shift: Sequence[IntLike]


@dataclass(frozen=True)
class PhaseAt:
    """A phase at run time: its number of taps and the number of its first one in the table."""

    out: IntLike
    start: Sequence[IntLike]
    first: IntLike
    count: IntLike


@dataclass(frozen=True)
class Chunk:
    """A piece of the depth: taps t0...t1-1 of a phase, inner channels i0...i1-1.

    Depth number of (tap, channel): (tap - t0) * (i1 - i0) + channel - i0.
    """

    t0: IntLike
    t1: IntLike
    i0: IntLike
    i1: IntLike

    @property
    def channels(self) -> IntLike:
        return self.i1 - self.i0

    @property
    def depth(self) -> IntLike:
        return (self.t1 - self.t0) * self.channels


class Taps:
    """The taps and phases of a geometry, as constants or as tables inside the kernel."""

    def __init__(self, k: KernelBuilder, geometry: Geometry) -> None:
        self.k, self.geometry = k, geometry
        self.taps = [tap for phase in geometry.phases for tap in phase.taps]
        self.tap_words = 2 + len(geometry.checked)
        self.phase_words = 3 + len(geometry.limited)
        words = [n for tap in self.taps for n in (tap.filter, tap.image, *tap.shift)]
        self.tap_table = words or [0]
        self.phase_table: list[int] = []
        first = 0
        for phase in geometry.phases:
            self.phase_table += [phase.out, first, len(phase.taps), *phase.start]
            first += len(phase.taps)

    def phase(self, number: IntLike) -> PhaseAt:
        """The phase of that number."""
        out, first, count, *start = self._row(self.phase_table, self.phase_words, number)
        return PhaseAt(out, start, first, count)

    def tap(self, number: IntLike) -> TapAt:
        """The tap of that number, counted over all phases."""
        filter_, image, *shift = self._row(self.tap_table, self.tap_words, number)
        return TapAt(filter_, image, shift)

    def _row(self, table: list[int], words: int, number: IntLike) -> list[IntLike]:
        if len(table) == words:
            return list(table)
        if isinstance(number, int):
            return list(table[number * words : (number + 1) * words])
        address = self.k.table(table) + number * (words * 8)
        return [self.k.load(address, "int64", offset=8 * i) for i in range(words)]


def image_spans(geometry: Geometry) -> list[Span]:
    """The pixel index as places in the image."""
    return [Span(axis.size, axis.image, axis.checked) for axis in geometry.axes] or [Span(1, 0)]


def pixel_lanes(
    k: KernelBuilder, geometry: Geometry, first: IntLike, lanes: int, ragged: bool, item: int
) -> Lanes:
    """Consecutive pixels as places in the image."""
    return Lanes(k, first, lanes, image_spans(geometry), geometry.pixels, ragged, item)


def _valid(geometry: Geometry, coordinates: Sequence[Any], tap: TapAt) -> Any:
    """Whether a tap of these pixels lies inside the image, along the axes where it may not."""
    valid: Any = None
    for axis, shift in zip(geometry.checked, tap.shift):
        line = geometry.axes[axis]
        at = coordinates[axis] * line.step
        if isinstance(at, Int) and at.lanes:
            shift = at.k.resize(at.k.as_int(shift), I32)
        inside = (at + shift).below(line.limit)
        valid = inside if valid is None else valid & inside
    return valid


def pack_pixel_lanes(
    k: KernelBuilder,
    taps: Taps,
    vectors: Sequence[Lanes],
    chunk: Chunk,
    first_tap: IntLike,
    image: IntLike,
    target: IntLike,
    depth_bytes: int,
    dtype: str,
    sum_dtype: str,
    channel_major: bool = False,
    taps_inside: bool = False,
) -> None:
    """Adjacent vectors of pixels for the whole chunk; depth number d goes to target +
    d * depth_bytes, the vectors side by side.

    channel_major  numbers the depth by channels, then taps of the chunk
    taps_inside    loops over the taps innermost where no tap needs a check: they read the same
                   cache lines, but write far apart
    """
    channel = taps.geometry.inner.tensor
    source = image + chunk.i0 * channel

    tap_bytes, channel_bytes = chunk.channels * depth_bytes, depth_bytes
    if channel_major:
        tap_bytes, channel_bytes = depth_bytes, (chunk.t1 - chunk.t0) * depth_bytes

    def copy_all(copy: Callable[[IntLike, IntLike], None]) -> None:
        with k.loop(0, chunk.channels) as c, k.loop(chunk.t0, chunk.t1) as t:
            at = source + c * channel + taps.tap(first_tap + t).image
            copy(at, target + (t - chunk.t0) * tap_bytes + c * channel_bytes)

    if taps_inside and not taps.geometry.checked:
        copy_vectors(k, vectors, [None] * len(vectors), copy_all, dtype, sum_dtype)
        return
    with k.loop(chunk.t0, chunk.t1) as t:
        tap = taps.tap(first_tap + t)
        valid = [_valid(taps.geometry, pixels.coordinates, tap) for pixels in vectors]

        def copy_tap(
            copy: Callable[[IntLike, IntLike], None], tap: TapAt = tap, t: IntLike = t
        ) -> None:
            row = target + (t - chunk.t0) * tap_bytes
            with k.loop(0, chunk.channels) as c:
                copy(source + tap.image + c * channel, row + c * channel_bytes)

        copy_vectors(k, vectors, valid, copy_tap, dtype, sum_dtype)


def pack_channel_lanes(
    k: KernelBuilder,
    taps: Taps,
    pixel: IntLike,
    chunk: Chunk,
    first_tap: IntLike,
    image: IntLike,
    target: Callable[[IntLike], IntLike],
    lanes: int,
    dtype: str,
    sum_dtype: str,
    padded_channels: IntLike | None = None,
) -> None:
    """One pixel for the whole chunk; depth numbers d, d + 1, ... go to target(d) by vectors.

    The last vector of a tap is masked, so that the next tap's place stays untouched; with
    `padded_channels`, which then takes the place of the chunk's channels in the numbering, it is
    filled up with zeros instead.
    """
    geometry = taps.geometry
    inner = geometry.inner
    offset, coordinates = place(k, pixel, image_spans(geometry))
    steps = None if inner.tensor == itemsize(dtype) else k.iota(lanes) * inner.tensor
    zero = k.constant(0.0, sum_dtype, lanes)
    pitch = chunk.channels if padded_channels is None else padded_channels
    with k.loop(chunk.t0, chunk.t1) as t:
        tap = taps.tap(first_tap + t)
        valid = _valid(geometry, coordinates, tap)
        source = image + offset + tap.image + chunk.i0 * inner.tensor
        with k.loop(0, chunk.channels, lanes) as c:
            mask = k.first_lanes(chunk.channels - c, lanes)
            value = k.variable(zero)
            with k.if_(True if valid is None else valid):
                at = source + c * inner.tensor
                if steps is None:
                    value.set(k.load(at, dtype, lanes, mask=mask))
                else:
                    value.set(k.gather(at, steps, dtype, mask))
            store_mask = mask if padded_channels is None else None
            to = target((t - chunk.t0) * pitch + c)
            k.store(value.value, to, sum_dtype, mask=store_mask)
