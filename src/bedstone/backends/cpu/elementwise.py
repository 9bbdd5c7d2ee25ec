"""The one loop nest of every pointwise kernel: out = alpha * body(inputs) + beta * out.

The axes of all operands are collapsed first: neighbours that every operand steps through alike
become one, and the finest axis of the output is innermost. A row of that axis is a loop over
whole vectors, aligned to the output, with one masked vector at each end. Inputs may be
contiguous along the row, constant (a broadcast, loaded once a row) or strided (gathered). An input
that is contiguous along another axis, as NCHW data is to an NHWC output, first goes through a
tile that is transposed in registers into a small buffer; to the rows it then looks contiguous.

Outputs too large for the caches are written with non-temporal stores, which spare the read of
each line before it is overwritten (1.3 times faster), except in place, where the line was read
anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from bedstone.backends.cpu.builder import Call, Int, KernelBuilder, itemsize
from bedstone.backends.cpu.kernel import CompiledKernel, compiled
from bedstone.backends.cpu.target import Target
from bedstone.backends.cpu.tasks import each_unit, store_streaming
from bedstone.backends.cpu.tiles import Tile
from bedstone.backends.cpu.values import Float, IntLike, MaskLike
from bedstone.plan.algorithm import Algorithm
from bedstone.plan.config import get_num_threads
from bedstone.plan.device import Device
from bedstone.spec.problem import Problem
from bedstone.spec.tensor import TensorDesc

# A tensor is cut into units of about 16 Ki elements, small ones finer, down to what is worth
# waking a thread for.
UNIT_ELEMENTS = 16 * 1024
LEAST_UNIT_ELEMENTS = 4 * 1024
UNITS_WANTED = 32
SHORT_ROW = 4  # vectors; a shorter row is not worth aligning
# The time model: what a core copies (EPYC, 2 threads: 50 GB/s together), and a call's start.
BYTES_PER_SECOND = 25e9
SATURATING_THREADS = 8
CALL_SECONDS = 3e-6

Body = Callable[[KernelBuilder, list[Any]], Sequence[Any]]


@dataclass(frozen=True)
class Stream:
    """One operand of the nest: where element [0, ..., 0] lies, and its strides over the dims.

    A stream without an address is the number of the element itself: body gets the sum of
    index * stride as int64 values instead of memory contents.
    """

    address: Int | None
    desc: TensorDesc


@dataclass(frozen=True)
class Nest:
    """Collapsed axes, outermost first: dims[axis], strides[operand][axis] and, for the axes that
    were turned round, offsets[operand], all in elements."""

    dims: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]


def collapse(descs: Sequence[TensorDesc]) -> Nest:
    """The fewest axes that all operands (of equal dims) share, in the order of the last one's
    memory. Axes along which that one runs backwards are turned round."""
    lead = descs[-1]
    axes = [a for a in range(lead.rank) if lead.dims[a] != 1]
    strides = {a: [d.strides[a] for d in descs] for a in axes}
    offsets = [0] * len(descs)
    for a in axes:
        if strides[a][-1] < 0:
            offsets = [o + s * (lead.dims[a] - 1) for o, s in zip(offsets, strides[a])]
            strides[a] = [-s for s in strides[a]]
    axes.sort(key=lambda a: ([abs(s) for s in reversed(strides[a])], lead.dims[a]), reverse=True)
    dims: list[int] = []
    merged: list[list[int]] = []
    for a in axes:
        if merged and all(s == t * lead.dims[a] for s, t in zip(merged[-1], strides[a])):
            dims[-1] *= lead.dims[a]
            merged[-1] = strides[a]
        else:
            dims.append(lead.dims[a])
            merged.append(strides[a])
    if not dims:
        dims, merged = [1], [[1] * len(descs)]
    return Nest(tuple(dims), tuple(zip(*merged)), tuple(offsets))


def column_inputs(nest: Nest, inputs: Iterable[int]) -> tuple[int, list[int]]:
    """(axis, those of the inputs that are contiguous along this axis and neither contiguous nor
    constant along the row). The axis that most of them share is taken."""
    wanted: dict[int, list[int]] = {}
    for operand in inputs:
        *outer, row = nest.strides[operand]
        for axis, stride in enumerate(outer):
            if stride == 1 and row not in (0, 1):
                wanted.setdefault(axis, []).append(operand)
    if not wanted:
        return 0, []
    axis = max(wanted, key=lambda a: (len(wanted[a]), nest.dims[a]))
    return axis, wanted[axis]


def emit_map(
    k: KernelBuilder,
    call: Call,
    inputs: Sequence[Stream],
    outputs: Sequence[Stream],
    body: Body,
    blend: str = "alpha beta",
    abreast: int = 1,
) -> None:
    """Emit the parallel phase that computes every output from the inputs.

    `body(k, values)` gets one value an input (vectors in the registers' type of the widest
    dtype) and returns one an output. All operands have the same dims. `blend` names the factors
    that apply: "alpha beta", "alpha" or ""; integer outputs are stored as they are. `abreast`:
    vectors that rows go through at a time, for bodies that are long chains of dependent operations.
    """
    if outputs[0].desc.size == 0:
        return
    _Map(k, call, inputs, outputs, body, blend, abreast).emit()


class _Map:
    """One call of emit_map. Methods run from the whole tensor down to one vector."""

    def __init__(
        self,
        k: KernelBuilder,
        call: Call,
        inputs: Sequence[Stream],
        outputs: Sequence[Stream],
        body: Body,
        blend: str,
        abreast: int,
    ) -> None:
        self.k, self.call, self.body, self.abreast = k, call, body, abreast
        self.scaled, self.blended = "alpha" in blend, "beta" in blend
        self.streams = [*inputs, *outputs]
        self.ins = len(inputs)
        self.dtypes = [s.desc.dtype.value for s in self.streams]
        self.sizes = [itemsize(d) if s.address else 1 for d, s in zip(self.dtypes, self.streams)]
        self.compute = "float64" if "float64" in self.dtypes else "float32"
        self.lanes = k.lanes(self.compute)
        self.nest = collapse([s.desc for s in self.streams])
        self.columns: list[int] = []  # the inputs that go through a transposed tile
        self._find_columns()
        self.inner = len(self.nest.dims) - 1
        if self.columns:
            self.tile = Tile(
                k, self.nest.dims, self.nest.strides, self.columns, self.dtypes, self.compute
            )
        self.split, self.chunk = self._choose_units()
        self.contiguous = self.nest.strides[-1][-1] == 1  # the last output, along the row
        total = sum(s.desc.nbytes for s in self.streams if s.address)
        self.large = total > k.target.l3_bytes and self.contiguous

    # Plan --------------------------------------------------------------------------------------

    def _find_columns(self) -> None:
        """Inputs contiguous along another axis than the row; that axis goes next to the row."""
        dims = self.nest.dims
        inputs = [i for i in range(self.ins) if self.streams[i].address is not None]
        axis, columns = column_inputs(self.nest, inputs)
        if not columns or dims[-1] * dims[axis] < self.lanes:
            return
        order = [a for a in range(len(dims) - 1) if a != axis] + [axis, len(dims) - 1]
        self.columns = columns
        self.nest = replace(
            self.nest,
            dims=tuple(dims[a] for a in order),
            strides=tuple(tuple(s[a] for a in order) for s in self.nest.strides),
        )

    def _choose_units(self) -> tuple[int, int]:
        """The axis that is cut into ranges, one a unit, and the length of a range."""
        dims, inner = self.nest.dims, self.inner
        target = math.prod(dims) // UNITS_WANTED
        target = min(max(target, LEAST_UNIT_ELEMENTS), UNIT_ELEMENTS)
        order = list(reversed(range(len(dims))))
        if self.columns and dims[inner - 1] <= self.lanes:  # a thin tile: cut along the row
            order[:2] = [inner - 1, inner]
        elif self.columns:  # never a single column: the axis next to the row is cut
            order = order[1:]
        inside = math.prod(dims[a] for a in range(len(dims)) if a not in order)
        for axis in order:
            if inside * dims[axis] >= target or axis == order[-1]:
                break
            inside *= dims[axis]
        chunk = max(1, target // inside)
        if axis == inner or (self.columns and axis == inner - 1):
            chunk = -(-chunk // self.lanes) * self.lanes
            if self.columns:
                step = self.tile.length if axis == inner else self.tile.columns
                chunk = -(-chunk // step) * step
        return axis, min(chunk, dims[axis])

    @property
    def outer(self) -> int:
        """How many axes a unit's number enumerates, besides the ranges of the split axis."""
        return min(self.split, self.inner - 1) if self.columns else self.split

    # Tasks -------------------------------------------------------------------------------------

    def emit(self) -> None:
        dims = self.nest.dims
        self.ranges = -(-dims[self.split] // self.chunk)
        units = math.prod(dims[: self.outer]) * self.ranges
        scratch = self.tile.bytes * len(self.columns) if self.columns else 0
        with each_unit(self.k, self.call.threads, units, scratch, self.large) as (unit, memory):
            self.tiles = memory
            self._factors()
            self._unit(unit)

    def _unit(self, number: IntLike) -> None:
        """Find the unit's corner and run its loops."""
        k, dims = self.k, self.nest.dims
        addresses: list[IntLike] = [
            k.as_int(o) if s.address is None else s.address + o * size
            for s, o, size in zip(self.streams, self.nest.offsets, self.sizes)
        ]
        bounds = [(0, d) for d in dims]
        if self.ranges > 1:
            first = number % self.ranges * self.chunk
            bounds[self.split] = first, k.min(first + self.chunk, dims[self.split])
        number = number // self.ranges
        for axis in reversed(range(self.outer)):
            index = number % dims[axis] if axis else number
            number = number // dims[axis]
            addresses = self._step(addresses, axis, index)
        self._versions(addresses, bounds)

    def _factors(self) -> None:
        """alpha and beta in the type computed in."""
        model = self.k.constant(0.0, self.compute)
        if self.scaled:
            self.alpha = self.k.cast(self.call.alpha, model)
        if self.blended:
            self.beta = self.k.cast(self.call.beta, model)

    def _versions(self, addresses: list[IntLike], bounds: list[Any]) -> None:
        """Branch, outside all loops, to the code that blends, streams or does neither."""
        k = self.k

        def fresh() -> None:
            in_place = self._in_place()
            if not self.large or in_place is False:
                self._axes(addresses, self.outer, bounds, streaming=self.large)
                return
            with k.if_else(in_place) as (in_place, apart):
                with in_place:
                    self._axes(addresses, self.outer, bounds)
                with apart:
                    self._axes(addresses, self.outer, bounds, streaming=True)

        if not self.blended:
            fresh()
            return
        with k.if_else(self.call.beta.eq(0.0)) as (new, old):
            with new:
                fresh()
            with old:
                self._axes(addresses, self.outer, bounds, blending=True)

    def _in_place(self) -> MaskLike:
        found: MaskLike = False
        for output in self.streams[self.ins :]:
            for source in self.streams[: self.ins]:
                if source.address is not None and source.desc == output.desc:
                    found = source.address.eq(output.address) | found
        return found

    def _step(self, addresses: Sequence[IntLike], axis: int, index: IntLike) -> list[IntLike]:
        return [
            a + index * (s[axis] * size)
            for a, s, size in zip(addresses, self.nest.strides, self.sizes)
        ]

    # Axes --------------------------------------------------------------------------------------

    def _axes(
        self,
        addresses: Sequence[IntLike],
        axis: int,
        bounds: Sequence[tuple[IntLike, IntLike]],
        blending: bool = False,
        streaming: bool = False,
    ) -> None:
        """The loops of one unit, from `axis` inwards, each within its bounds."""
        how = (blending, streaming)
        if axis == self.inner:
            first, last = bounds[axis]
            self._row(self._step(addresses, axis, first), last - first, *how)
        elif self.columns and axis == self.inner - 1:
            self._tiles(addresses, bounds[axis], bounds[self.inner], *how)
        else:
            with self.k.loop(*bounds[axis], at_least_once=True) as i:
                self._axes(self._step(addresses, axis, i), axis + 1, bounds, *how)

    def _tiles(
        self,
        addresses: Sequence[IntLike],
        column_bounds: tuple[IntLike, IntLike],
        row_bounds: tuple[IntLike, IntLike],
        blending: bool,
        streaming: bool,
    ) -> None:
        """Blocks of columns by pieces of row: transpose the column inputs, then row by row (or,
        where the rows of a block lie one after another everywhere, as one long row)."""
        k, inner, tile = self.k, self.inner, self.tile
        with (
            k.loop(*row_bounds, tile.length, at_least_once=True) as i,
            k.loop(*column_bounds, tile.columns, at_least_once=True) as j,
        ):
            count = self._piece(inner, i, row_bounds[1], tile.length)
            columns = self._piece(inner - 1, j, column_bounds[1], tile.columns)
            corner = self._step(self._step(addresses, inner, i), inner - 1, j)
            tiles = [self.tiles + n * tile.bytes for n in range(len(self.columns))]
            for operand, address in zip(self.columns, tiles):
                tile.fill(operand, corner[operand], address, count, columns)
                corner[operand] = address
            if tile.whole:
                self._row(corner, columns * tile.length, blending, streaming)
                return
            with k.loop(0, columns, at_least_once=True) as column:
                row = self._step(corner, inner - 1, column)
                for operand, address in zip(self.columns, tiles):
                    row[operand] = address + column * (tile.length * tile.width)
                self._row(row, count, blending, streaming)

    def _piece(self, axis: int, start: IntLike, stop: IntLike, step: int) -> IntLike:
        """The length of a block: `step`, or what is left."""
        even = self.nest.dims[axis] % step == 0
        if even and (self.split != axis or self.chunk % step == 0):
            return step
        return self.k.min(stop - start, step)

    def _row(
        self, addresses: Sequence[IntLike], count: IntLike, blending: bool, streaming: bool
    ) -> None:
        """One row: whole vectors from where the output is aligned, one masked vector each end."""
        k, lanes = self.k, self.lanes
        sources = [self._source(i, addresses[i]) for i in range(self.ins)]
        short = isinstance(count, int) and count < SHORT_ROW * lanes
        if short or not self.contiguous:  # not worth aligning: no streaming
            whole = count - count % lanes
            if not isinstance(whole, int) or whole:
                with k.loop(0, whole, lanes) as i:
                    self._vector(addresses, sources, i, None, blending, False)
            if not isinstance(count, int) or count % lanes:
                with k.if_(count % lanes > 0):
                    mask = k.first_lanes(count % lanes, lanes)
                    self._vector(addresses, sources, whole, mask, blending, False)
            return
        size = self.sizes[-1]
        head = k.min((0 - addresses[-1] // size) % lanes, count)
        tail = (count - head) % lanes
        first = head
        if self.abreast > 1 and not blending:
            wide = self.abreast * lanes
            first = count - tail - (count - tail - head) % wide
            with k.loop(head, first, wide) as i:
                self._vector(addresses, sources, i, None, False, streaming, wide)
        with k.loop(first, count - tail, lanes) as i:
            self._vector(addresses, sources, i, None, blending, streaming)
        with k.loop(0, 2) as end:
            length = k.select(end.eq(0), head, tail)
            with k.if_(length > 0):
                start = k.select(end.eq(0), 0, count - tail)
                mask = k.first_lanes(length, lanes)
                self._vector(addresses, sources, start, mask, blending, False)

    # Vectors -----------------------------------------------------------------------------------

    def _source(self, operand: int, address: IntLike) -> Callable[[IntLike, Any, int], Any]:
        """How vector i of an input comes: a function of position, mask and lanes. What does not
        change along the row is loaded here, before it."""
        k = self.k
        dtype, size = self.dtypes[operand], self.sizes[operand]
        stride = self.nest.strides[operand][-1]

        def as_computed(value: Any) -> Any:
            if isinstance(value, Int):
                return value
            return k.cast(value, k.constant(0.0, self.compute, value.lanes))

        if self.streams[operand].address is None:
            return lambda i, mask, lanes: (
                k.splat(address + i * stride, lanes) + k.iota(lanes) * stride
            )
        if operand in self.columns:
            width = itemsize(self.compute)
            return lambda i, mask, lanes: k.load(address, self.compute, lanes, i * width, mask)
        if stride == 0:
            value = as_computed(k.load(address, dtype))
            return lambda i, mask, lanes: k.splat(value, lanes)
        if stride == 1:
            return lambda i, mask, lanes: as_computed(k.load(address, dtype, lanes, i * size, mask))
        return lambda i, mask, lanes: as_computed(
            k.gather(address + i * (stride * size), k.iota(lanes) * (stride * size), dtype, mask)
        )

    def _vector(
        self,
        addresses: Sequence[IntLike],
        sources: Sequence[Callable[[IntLike, Any, int], Any]],
        i: IntLike,
        mask: Any,
        blending: bool,
        streaming: bool,
        lanes: int = 0,
    ) -> None:
        k, lanes = self.k, lanes or self.lanes
        results = self.body(k, [source(i, mask, lanes) for source in sources])
        for operand, value in enumerate(results, self.ins):
            dtype, size = self.dtypes[operand], self.sizes[operand]
            stride = self.nest.strides[operand][-1]
            address = addresses[operand] + i * (stride * size)
            offsets = None if stride == 1 else k.iota(lanes) * (stride * size)
            if self.scaled and isinstance(value, Float):
                value = value * self.alpha
                if blending:
                    old = self._load_output(address, offsets, dtype, mask)
                    value = k.fma(old, self.beta, value)
            if isinstance(value, Float):
                value = k.cast(value, k.constant(0.0, self._register_type(dtype), lanes))
            if offsets is not None:
                k.scatter(value, address, offsets, dtype, mask)
            elif streaming and operand == len(self.streams) - 1:
                store_streaming(k, value, address, dtype)
            else:
                k.store(value, address, dtype, mask=mask)

    def _load_output(self, address: IntLike, offsets: Any, dtype: str, mask: Any) -> Float:
        k = self.k
        if offsets is None:
            value = k.load(address, dtype, self.lanes, mask=mask)
        else:
            value = k.gather(address, offsets, dtype, mask)
        return k.cast(value, k.constant(0.0, self.compute, self.lanes))

    @staticmethod
    def _register_type(dtype: str) -> str:
        return "float64" if dtype == "float64" else "float32"


class PointwiseAlgorithm(Algorithm):
    """An algorithm that is one pass over its operands: `emit(target, problem)` makes its kernel."""

    emit: ClassVar[Callable[[Target, Any], KernelBuilder]]

    def supports(self, problem: Problem, device: Device) -> str | None:
        return None

    def estimate(self, problem: Problem, device: Device) -> float:
        return seconds_to_move(problem.bytes)

    def build(self, problem: Problem, device: Device) -> CompiledKernel:
        emit = type(self).emit
        key = f"{self.name} {problem}"
        return compiled(key, lambda target: emit(target, problem), len(problem.operands))


def seconds_to_move(nbytes: int) -> float:
    """The least time of a call that moves so many bytes, by the model of a plain copy."""
    threads = min(get_num_threads(), SATURATING_THREADS)
    return CALL_SECONDS + nbytes / (threads * BYTES_PER_SECOND)
