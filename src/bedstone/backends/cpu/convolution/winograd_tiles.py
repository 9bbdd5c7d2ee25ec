"""Reading and writing Winograd patches in either layout.

Transforms work on vectors of channels. Channels-last memory has them ready; channels-first memory
is read four pixels of a row at a time, for as many channels as a vector has lanes, and turned by
4x4 transposes in registers; results go back the same way. Patches inside the image take the plain
loads; those at its border masked ones, so that padding is real zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from bedstone.backends.cpu.activation import emit_epilogue
from bedstone.backends.cpu.builder import KernelBuilder
from bedstone.backends.cpu.convolution.packed_filter import Operands
from bedstone.backends.cpu.irtypes import F64, I64, itemsize
from bedstone.spec.convolution import Epilogue

if TYPE_CHECKING:
    from bedstone.backends.cpu.convolution.winograd import Geometry

QUAD = 4  # elements read at once from rows that are to be turned
TAPS = 9


def concatenate(k: KernelBuilder, parts: list[Any]) -> Any:
    """Short vectors joined to one (a power of two of them)."""
    while len(parts) > 1:
        lanes = range(2 * parts[0].lanes)
        parts = [k.shuffle(a, b, lanes) for a, b in zip(parts[::2], parts[1::2])]
    return parts[0]


def transpose_quads(k: KernelBuilder, rows: list[Any]) -> list[Any]:
    """Lane 4g+j of row q to lane 4g+q of row j: a 4x4 transpose in every group of four lanes."""
    lanes = rows[0].lanes
    groups = range(0, lanes, QUAD)

    def unpack(a: Any, b: Any, at: int) -> Any:
        picks = [p for g in groups for i in (at, at + 1) for p in (g + i, lanes + g + i)]
        return k.shuffle(a, b, picks)

    def pair(a: Any, b: Any, at: int) -> Any:
        picks = [
            p for g in groups for p in (g + at, g + at + 1, lanes + g + at, lanes + g + at + 1)
        ]
        return k.shuffle(a, b, picks)

    low, high = ([unpack(rows[0], rows[1], at), unpack(rows[2], rows[3], at)] for at in (0, 2))
    return [pair(*low, 0), pair(*low, 2), pair(*high, 0), pair(*high, 2)]


class FilterReader:
    """Filters as vectors of target channels, whatever axis is contiguous in memory."""

    def __init__(self, k: KernelBuilder, g: Geometry) -> None:
        self.k, self.g = k, g

    def read(self, corner: Any, count: int) -> Any:
        """The address of a stack block [count][tap] of vectors: the filters between `count` source
        channels and a vector of target channels; corner is (w, target channel, source channel)."""
        k, g = self.k, self.g
        size = itemsize(g.dtype)
        wk, wc, wr, ws = g.filter_strides
        block = k.alloca(count * TAPS * g.lanes * g.size)
        w, channel, start = corner
        if (wc, wr, ws) == (TAPS * size, 3 * size, size) and count * TAPS % QUAD == 0:
            order = [TAPS - 1 - t for t in range(TAPS)] if g.flip else list(range(TAPS))
            self._quads(w + start * wc, channel, range(0, count * TAPS, QUAD), block,
                        lambda e: e // TAPS * TAPS + order[e % TAPS])  # fmt: skip
        elif wc == size and wk != size and count % QUAD == 0:
            for t in range(TAPS):
                self._quads(w + start * wc + self._tap(t), channel, range(0, count, QUAD), block,
                            lambda e, t=t: e * TAPS + t)  # fmt: skip
        elif (wr, ws) == (3 * size, size):
            order = [TAPS - 1 - t for t in range(TAPS)] if g.flip else list(range(TAPS))
            for c in range(count):
                self._quads(w + (start + c) * wc, channel, (0, QUAD, TAPS - QUAD), block,
                            lambda e, c=c: c * TAPS + order[e])  # fmt: skip
        else:
            mask = k.first_lanes(g.target.channels - channel, g.lanes)
            lanes = k.iota(g.lanes) * wk
            with k.loop(0, count) as c:
                for t in range(TAPS):
                    base = w + channel * wk + (start + c) * wc + self._tap(t)
                    if wk == size:
                        value = k.load(base, g.dtype, g.lanes, mask=mask)
                    else:
                        value = k.gather(base, lanes, g.dtype, mask)
                    self._put(value, block + c * (TAPS * g.lanes * g.size), t)
        return block

    def _tap(self, t: int) -> int:
        _, _, wr, ws = self.g.filter_strides
        r, s = divmod(TAPS - 1 - t if self.g.flip else t, 3)
        return r * wr + s * ws

    def _put(self, value: Any, block: Any, place: int) -> None:
        self.k.store(value, block, self.g.accumulator, offset=place * self.g.lanes * self.g.size)

    def _quads(
        self, base: Any, channel: Any, starts: Iterable[int], block: Any, place: Any
    ) -> None:
        """The QUADs of elements at `starts` of each target channel's row, turned to vectors;
        element e goes to block[place(e)]. Rows past the last channel repeat it: nobody reads those
        lanes."""
        k, g = self.k, self.g
        wk = g.filter_strides[0]
        last = g.target.channels - 1
        rows = [base + k.min(channel + lane, last) * wk for lane in range(g.lanes)]
        for e in starts:
            quads = [k.load(row, g.dtype, QUAD, offset=e * itemsize(g.dtype)) for row in rows]
            turned = transpose_quads(k, [concatenate(k, quads[q::QUAD]) for q in range(QUAD)])
            for i, value in enumerate(turned):
                self._put(value, block, place(e + i))


class TileReader:
    """Patches of the source image as squares of channel vectors."""

    def __init__(self, k: KernelBuilder, g: Geometry, zeros: Any) -> None:
        self.k, self.g, self.zeros = k, g, zeros
        self.by_channel = g.source.strides[1] == itemsize(g.dtype)

    def each_block(
        self, source: Any, t: Any, shift: Any = (0, 0), farthest: tuple[int, int] = (0, 0)
    ) -> Iterator[tuple[Any, list[list[Any]]]]:
        """(first channel, patch) for every vector of channels of patch number t, once in code for
        patches inside the image and once for those at its border. The patch is moved down and
        right by `shift`, which is `farthest` at most."""
        k, g = self.k, self.g
        rows, columns = g.tiles
        inside_image = t % (rows * columns)
        i0 = k.as_int(inside_image // columns * g.m - g.pad[0] + shift[0])
        j0 = k.as_int(inside_image % columns * g.m - g.pad[1] + shift[1])
        sn, _, sh, sw = g.source.strides
        base = source + t // (rows * columns) * sn + i0 * sh + j0 * sw
        height, width = g.source.height, g.source.width
        # Channels-first rows are read by whole quads.
        reach = g.edge if self.by_channel else max(g.edge, QUAD)
        below = (rows - 1) * g.m + g.edge + farthest[0]
        right = (columns - 1) * g.m + reach + farthest[1]
        if not any(g.pad) and below <= height and right <= width:
            yield from self._blocks(base, i0, j0, border=False)
            return
        interior = (i0 >= 0) & (i0 + g.edge <= height) & (j0 >= 0) & (j0 + reach <= width)
        with k.if_else(interior) as (then, otherwise):
            with then:
                yield from self._blocks(base, i0, j0, border=False)
            with otherwise:
                yield from self._blocks(base, i0, j0, border=True)

    def _blocks(self, base: Any, i0: Any, j0: Any, border: bool) -> Iterator[Any]:
        k, g = self.k, self.g
        sc, whole = g.source.strides[1], g.source.channels // g.lanes
        read = self._channels_last if self.by_channel else self._channels_first
        if whole:
            with k.loop(0, whole) as block:
                yield block * g.lanes, read(base + block * (g.lanes * sc), i0, j0, g.lanes, border)
        rest = g.source.channels % g.lanes
        if rest:
            yield whole * g.lanes, read(base + whole * g.lanes * sc, i0, j0, rest, border)

    def _channels_last(self, base: Any, i0: Any, j0: Any, live: int, border: bool) -> Any:
        k, g = self.k, self.g
        mask = k.first_lanes(live, g.lanes)
        _, _, sh, sw = g.source.strides
        patch = []
        for i in range(g.edge):
            row = []
            for j in range(g.edge):
                address: Any = base + (i * sh + j * sw)
                if border:
                    inside = (i0 + i).below(g.source.height) & (j0 + j).below(g.source.width)
                    address = k.select(inside, address, self.zeros)
                row.append(k.load(address, g.dtype, g.lanes, mask=mask))
            patch.append(row)
        return patch

    def _channels_first(self, base: Any, i0: Any, j0: Any, live: int, border: bool) -> Any:
        k, g = self.k, self.g
        _, sc, sh, sw = g.source.strides
        starts = [0] if g.edge <= QUAD else [0, g.edge - QUAD]
        patch = []
        for i in range(g.edge):
            row: dict[int, Any] = {}
            for start in starts:
                address: Any = base + (i * sh + start * sw)
                step: Any = sc
                mask = None
                if border:
                    column = k.iota(QUAD) + k.splat(j0 + start, QUAD)
                    inside = (i0 + i).below(g.source.height)
                    mask = (column >= 0) & (column < g.source.width)
                    address = k.select(inside, address, self.zeros)
                    mask = mask & self._everywhere(inside)
                    step = k.select(inside, sc, 0)
                quads = [
                    k.load(address + c * step, g.dtype, QUAD, mask=mask)
                    if c < live
                    else k.constant(0.0, g.accumulator, QUAD)
                    for c in range(g.lanes)
                ]
                rows = [concatenate(k, quads[q::QUAD]) for q in range(QUAD)]
                row.update(zip(range(start, start + QUAD), transpose_quads(k, rows)))
            patch.append([row[j] for j in range(g.edge)])
        return patch

    def _everywhere(self, condition: Any) -> Any:
        return self.k.splat(condition, QUAD)


class TileWriter:
    """Squares of channel vectors to the target image, through alpha, beta and the epilogue."""

    def __init__(self, k: KernelBuilder, g: Geometry, epilogue: Epilogue, untransform: Any) -> None:
        self.k, self.g, self.epilogue, self.untransform = k, g, epilogue, untransform
        self.by_channel = g.target.strides[1] == itemsize(g.dtype)

    def emit_block(
        self, products: Any, start: Any, stop: Any, panel: Any, operands: Operands, call: Any
    ) -> None:
        """Output patches start..stop of one panel of channels."""
        k, g = self.k, self.g
        rest = g.target.channels - (g.panels - 1) * g.width
        if rest == g.width:
            self._panel(products, start, stop, panel, g.width, operands, call)
            return
        with k.if_else(panel < g.panels - 1) as (then, otherwise):
            with then:
                self._panel(products, start, stop, panel, g.width, operands, call)
            with otherwise:
                self._panel(products, start, stop, panel, rest, operands, call)

    def _panel(
        self,
        products: Any,
        start: Any,
        stop: Any,
        panel: Any,
        live: int,
        operands: Operands,
        call: Any,
    ) -> None:
        k, g = self.k, self.g
        source, filters = operands.image, operands.filter
        bias, out = operands.bias, operands.out
        sn, sc, sh, sw = g.target.strides
        rows, columns = g.tiles
        with k.loop(start, stop, at_least_once=True) as t:
            n, inside_image = t // (rows * columns), t % (rows * columns)
            i0, j0 = inside_image // columns * g.m, inside_image % columns * g.m
            row = products + (t - start) * g.product_row
            for j in range(g.vectors):
                lanes = min(live - j * g.lanes, g.lanes)
                if lanes <= 0:
                    continue
                square = [
                    [
                        k.load(
                            row, g.accumulator, g.lanes,
                            offset=(a * g.edge + b) * g.product_plane + j * g.lanes * g.size,
                        )
                        for b in range(g.edge)
                    ]
                    for a in range(g.edge)
                ]  # fmt: skip
                result = self.untransform(square)
                channel = panel * g.width + j * g.lanes
                with k.if_else(self._not_finite(result)) as (again, fine):
                    with again:
                        k.call(
                            "by_definition", source + n * g.source.strides[0], filters, bias,
                            out + n * sn, channel, i0, j0, call.alpha, call.beta,
                        )  # fmt: skip
                    with fine:
                        address = out + n * sn + i0 * sh + j0 * sw + channel * sc
                        self._store(
                            result, address, bias, channel, i0, j0, lanes, call.alpha, call.beta
                        )

    def _not_finite(self, square: list[list[Any]]) -> Any:
        """True if some lane of some vector is Inf or NaN (x - x is then NaN)."""
        total = None
        for value in (v for row in square for v in row):
            difference = value - value
            total = difference if total is None else total + difference
        return self.k.any(total.is_nan())

    def _store(
        self,
        square: list[list[Any]],
        address: Any,
        bias: Any,
        channel: Any,
        i0: Any,
        j0: Any,
        live: int,
        alpha: Any,
        beta: Any,
    ) -> None:
        """Blend and write one m x m patch of `live` channels."""
        k, g = self.k, self.g
        _, sc, sh, sw = g.target.strides
        even = g.target.height % g.m == 0 and g.target.width % g.m == 0
        mask = k.first_lanes(live, g.lanes)
        shift = None
        if self.epilogue.bias:
            shift = k.load(bias + channel * itemsize(g.dtype), g.dtype, g.lanes, mask=mask)
        for i in range(g.m):
            with k.if_(True if even else i0 + i < g.target.height):
                row = []
                for j in range(g.m):
                    inside = True if even else j0 + j < g.target.width
                    place = address + (i * sh + j * sw)
                    value = self._blend(square[i][j], place, shift, inside, live, alpha, beta)
                    if self.by_channel:
                        with k.if_(inside):
                            k.store(value, place, g.dtype, mask=mask)
                    row.append(value)
                if not self.by_channel:
                    self._store_row(row, address + i * sh, j0, live, even)

    def _blend(
        self, value: Any, place: Any, shift: Any, inside: Any, live: int, alpha: Any, beta: Any
    ) -> Any:
        k, g = self.k, self.g
        result = k.variable(value * k.cast(alpha, value))
        with k.if_(beta.ne(0.0) & inside):
            sc, mask = g.target.strides[1], k.first_lanes(live, g.lanes)
            if self.by_channel:
                old = k.load(place, g.dtype, g.lanes, mask=mask)
            else:
                old = k.gather(place, k.iota(g.lanes) * sc, g.dtype, mask)
            result.set(k.fma(old, k.cast(beta, value), result.value))
        value = result.value
        if shift is not None:
            value = value + shift
        return emit_epilogue(k, self.epilogue, value)

    def _store_row(self, row: list[Any], address: Any, j0: Any, live: int, even: bool) -> None:
        """m vectors of channels as m pixels of each channel's row."""
        k, g = self.k, self.g
        sc = g.target.strides[1]
        mask = None if even else k.first_lanes(g.target.width - j0, g.m)
        if g.m == QUAD:
            turned = transpose_quads(k, row)
            pieces = {QUAD * a + q: (turned[q], QUAD * a) for q in range(QUAD)
                      for a in range(g.lanes // QUAD)}  # fmt: skip
        else:
            halves = []
            for at in (0, QUAD // 2):
                picks = [p for s in range(0, g.lanes, QUAD) for i in (at, at + 1)
                         for p in (s + i, g.lanes + s + i)]  # fmt: skip
                halves.append(k.shuffle(row[0], row[1], picks))
            pieces = {QUAD * a + 2 * h + i: (halves[h], QUAD * a + 2 * i) for h in range(2)
                      for i in range(2) for a in range(g.lanes // QUAD)}  # fmt: skip
        for channel in range(live):
            vector, first = pieces[channel]
            piece = k.shuffle(vector, vector, range(first, first + g.m))
            k.store(piece, address + channel * sc, g.dtype, mask=mask)

    def emit_definition(self, name: str) -> None:
        """A function that computes one patch of a vector of channels by the definition, for
        patches whose transforms overflowed or met Inf or NaN."""
        k, g = self.k, self.g
        types = [I64] * 7 + [F64, F64]
        with k.function(name, *types) as (source, w, bias, out, channel, i0, j0, alpha, beta):
            zero = k.constant(0.0, g.accumulator, g.lanes)
            zeros = k.alloca(itemsize(g.dtype))
            k.store(k.constant(0.0, g.accumulator), zeros, g.dtype)
            sums = [[k.variable(zero) for _ in range(g.m)] for _ in range(g.m)]
            mask = k.first_lanes(g.target.channels - channel, g.lanes)
            self._sum_definition(source, w, channel, i0, j0, zeros, mask, sums)
            _, sc, sh, sw = g.target.strides
            shift = None
            if self.epilogue.bias:
                shift = k.load(bias + channel * itemsize(g.dtype), g.dtype, g.lanes, mask=mask)
            lanes = k.iota(g.lanes) * sc
            for i in range(g.m):
                for j in range(g.m):
                    inside = (i0 + i < g.target.height) & (j0 + j < g.target.width)
                    place = out + (i0 + i) * sh + (j0 + j) * sw + channel * sc
                    with k.if_(inside):
                        value = sums[i][j].value
                        result = k.variable(value * k.cast(alpha, value))
                        with k.if_(beta.ne(0.0)):
                            old = k.gather(place, lanes, g.dtype, mask)
                            result.set(k.fma(old, k.cast(beta, value), result.value))
                        value = result.value if shift is None else result.value + shift
                        value = emit_epilogue(k, self.epilogue, value)
                        k.scatter(value, place, lanes, g.dtype, mask)

    def _sum_definition(
        self,
        source: Any,
        w: Any,
        channel: Any,
        i0: Any,
        j0: Any,
        zeros: Any,
        mask: Any,
        sums: list[list[Any]],
    ) -> None:
        k, g = self.k, self.g
        wk, wc, wr, ws = g.filter_strides
        _, sc, sh, sw = g.source.strides
        height, width = g.window
        with (
            k.loop(0, g.source.channels) as c,
            k.loop(0, height) as r,
            k.loop(0, width) as s,
        ):
            rr, ss = (height - 1 - r, width - 1 - s) if g.flip else (r, s)
            address = w + channel * wk + c * wc + rr * wr + ss * ws
            tap = k.gather(address, k.iota(g.lanes) * wk, g.dtype, mask)
            for i in range(g.m):
                for j in range(g.m):
                    y, x = i0 + r + (i - g.pad[0]), j0 + s + (j - g.pad[1])
                    inside = y.below(g.source.height) & x.below(g.source.width)
                    pixel = k.select(inside, source + c * sc + y * sh + x * sw, zeros)
                    value = k.splat(k.load(pixel, g.dtype), g.lanes)
                    sums[i][j].set(k.fma(value, tap, sums[i][j].value))
