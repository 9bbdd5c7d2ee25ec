"""Softmax of any shape: over the channels of each position, or over everything of an image.

The axes are parted into those that are normalised and the others, and each part is collapsed as a
nest of its own. A line is one position, or a vector of neighbouring ones, with all that it is
normalised over. Three line functions each: vectors along the line where it is contiguous, vectors
of neighbouring positions, and one position with any strides. The exponentials are computed twice,
so that no memory is needed for them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir

from bedstone.backends.cpu import vectormath as vm
from bedstone.backends.cpu.builder import F64, I64, Int
from bedstone.backends.cpu.irtypes import VOID, itemsize
from bedstone.backends.cpu.library import checks
from bedstone.backends.cpu.library.interface import DTYPES, ENUMS
from bedstone.backends.cpu.library.language import LibraryBuilder, Tensor, all_of, ceil_div
from bedstone.backends.cpu.library.pointwise import (
    NEST_BYTES,
    OPERANDS,
    UNIT_ELEMENTS,
    Nest,
    function_address,
)
from bedstone.backends.cpu.softmax import larger

ALGORITHMS, AXES = ENUMS["bs_softmax_algorithm"], ENUMS["bs_softmax_axes"]
ALONG, ACROSS, SINGLE = "along", "across", "single"  # the three kinds of line functions
BLOCK = 128  # terms of a running sum: the sums of blocks are summed, so that rounding grows slowly
# Arguments: addresses of y, p, q; the normalised nest; valid lanes; alpha, beta.
LINE_TYPES = [I64] * (OPERANDS + 2) + [F64] * 2


class Line:
    """Emits one line function."""

    def __init__(self, k: LibraryBuilder, dtype: str, kind: str, arguments: list[Any]) -> None:
        self.k, self.dtype, self.kind = k, dtype, kind
        self.item = itemsize(dtype)
        *self.bases, nest, self.valid, alpha, beta = arguments
        self.nest = Nest(k, nest)
        self.lanes = None if kind == SINGLE else k.lanes(dtype)
        self.model = k.constant(0.0, dtype, self.lanes)
        self.alpha, self.beta = k.cast(alpha, self.model), k.cast(beta, self.model)
        self.inner = self.nest.rank - 1
        self.rows = k.variable(1)
        with k.loop(0, self.inner) as axis:
            self.rows.set(self.rows.value * self.nest.dim(axis))

    @contextlib.contextmanager
    def walk(self) -> Iterator[tuple[list[Int], Any]]:
        """Loop over the line: (addresses of the operands, mask of the lanes that exist)."""
        k, inner, length = self.k, self.inner, self.nest.dim(self.inner)
        step = self.lanes if self.kind == ALONG else 1
        with k.loop(0, self.rows.value) as row:
            left, places = k.variable(row), [k.variable(b) for b in self.bases]
            with k.loop(0, inner) as i:
                axis = inner - 1 - i
                index = left.value % self.nest.dim(axis)
                left.set(left.value // self.nest.dim(axis))
                for operand, place in enumerate(places):
                    offset = index * self.nest.stride(operand, axis) * self.item
                    place.set(place.value + offset)
            with k.loop(0, length, step) as i:
                at = [
                    p.value + i * self.nest.stride(o, inner) * self.item
                    for o, p in enumerate(places)
                ]
                mask = None
                if self.kind == ALONG:
                    mask = k.first_lanes(length - i, self.lanes)
                elif self.kind == ACROSS:
                    mask = k.first_lanes(self.valid, self.lanes)
                yield at, mask

    def load(self, address: Int, mask: Any) -> Any:
        """An operand's values; 0 where there are none."""
        return self.k.load(address, self.dtype, self.lanes, mask=mask)

    def largest(self, value: Callable[[list[Int], Any], Any]) -> Any:
        """The largest value of the line (a NaN may get lost: the sum that follows has it)."""
        k = self.k
        top = k.variable(k.constant(-math.inf, self.dtype, self.lanes))
        with self.walk() as (at, mask):
            found = value(at, mask)
            if self.kind == ALONG:
                found = k.select(mask, found, -math.inf)
            top.set(larger(top.value, found))
        return self._of_all_lanes(top.value, larger)

    def sum(self, value: Callable[[list[Int], Any], Any]) -> Any:
        """The sum of the line's values."""
        k = self.k
        zero = k.constant(0.0, self.dtype, self.lanes)
        total, block, left = k.variable(zero), k.variable(zero), k.variable(BLOCK)
        with self.walk() as (at, mask):
            found = value(at, mask)
            if self.kind == ALONG:
                found = k.select(mask, found, 0.0)
            block.set(block.value + found)
            left.set(left.value - 1)
            with k.if_(left.value.eq(0)):
                total.set(total.value + block.value)
                block.set(zero)
                left.set(k.as_int(BLOCK))
        return self._of_all_lanes(total.value + block.value, lambda a, b: a + b)

    def _of_all_lanes(self, value: Any, combine: Any) -> Any:
        """What the lanes hold combined, in every lane, where vectors run along the line."""
        if self.kind != ALONG:
            return value
        return self.k.splat(self.k.reduce(value, combine), self.lanes)

    def write(self, value: Callable[[list[Int], Any], Any]) -> None:
        """alpha * value + beta * old, everywhere."""
        k = self.k
        with self.walk() as (at, mask):
            result = k.variable(value(at, mask) * self.alpha)
            reads = self.beta if self.lanes is None else k.extract(self.beta, 0)
            with k.if_(reads.ne(0.0)):
                result.set(k.fma(self.load(at[0], mask), self.beta, result.value))
            k.store(result.value, at[0], self.dtype, mask=mask)

    def forward(self, algorithm: str) -> None:
        """y from p = x."""
        top: Any = None
        if algorithm != "fast":
            top = self.largest(lambda at, mask: self.load(at[1], mask))

        def shifted(at: list[Int], mask: Any) -> Any:
            x = self.load(at[1], mask)
            return x if top is None else x - top

        total = self.sum(lambda at, mask: vm.exp(shifted(at, mask)))
        if algorithm == "log":
            logarithm = vm.log(total)
            self.write(lambda at, mask: shifted(at, mask) - logarithm)
        else:
            factor = 1.0 / total
            self.write(lambda at, mask: vm.exp(shifted(at, mask)) * factor)

    def backward(self, algorithm: str) -> None:
        """dx from p = y and q = dy."""

        def term(at: list[Int], mask: Any) -> Any:
            dy = self.load(at[2], mask)
            return dy if algorithm == "log" else dy * self.load(at[1], mask)

        total = self.sum(term)

        def result(at: list[Int], mask: Any) -> Any:
            y, dy = self.load(at[1], mask), self.load(at[2], mask)
            return dy - vm.exp(y) * total if algorithm == "log" else y * (dy - total)

        self.write(result)


def _name(direction: str, algorithm: str, kind: str, dtype: str) -> str:
    return f"softmax_{direction}_{algorithm}_{kind}_{dtype}"


def emit_softmax(k: LibraryBuilder) -> None:
    """bs_softmax_forward and _backward."""
    for direction in ("forward", "backward"):
        for algorithm in ALGORITHMS:
            for dtype in DTYPES:
                for kind in (ALONG, ACROSS, SINGLE):
                    with k.function(_name(direction, algorithm, kind, dtype), *LINE_TYPES) as given:
                        getattr(Line(k, dtype, kind, given), direction)(algorithm)
    _emit_run(k)
    for direction in ("forward", "backward"):
        _emit_entry(k, direction)


def _emit_run(k: LibraryBuilder) -> None:
    """run_lines(line functions along, across, single; bytes of an element; lanes; axes that are
    normalised, as bits; tensors y, p, q; their data; threads; alpha, beta)."""
    with k.function("run_lines", *[I64] * 13, F64, F64) as arguments:
        *lines, item, lanes, axes = arguments[:6]
        tensors, data, (threads, alpha, beta) = arguments[6:9], arguments[9:12], arguments[12:]
        inside, outside = k.alloca(NEST_BYTES), k.alloca(NEST_BYTES)
        k.ask("collapse", inside, *tensors, axes)
        k.ask("collapse", outside, *tensors, axes ^ -1)
        line, outer = Nest(k, inside), Nest(k, outside)
        last, end = outer.rank - 1, line.rank - 1
        operands = range(OPERANDS)
        along = line.rank.eq(1) & all_of([line.stride(o, end).eq(1) for o in operands])
        along = along & (line.dim(end) >= lanes)
        across = ~along & all_of([outer.stride(o, last).eq(1) for o in operands])
        function = k.select(along, lines[0], k.select(across, lines[1], lines[2]))
        width = k.select(across, lanes, 1)
        rows, length = k.variable(1), k.variable(1)
        with k.loop(0, last) as axis:
            rows.set(rows.value * outer.dim(axis))
        with k.loop(0, line.rank) as axis:
            length.set(length.value * line.dim(axis))
        bases = [d + (outer.offset(o) + line.offset(o)) * item for o, d in enumerate(data)]
        inner = outer.dim(last)
        vectors = ceil_div(inner, width)
        total = rows.value * vectors
        # A task is about UNIT_ELEMENTS of the tensor.
        each = k.max(k.as_int(UNIT_ELEMENTS) // k.max(length.value * width, 1), 1)
        with k.job(ceil_div(total, each), threads) as job, job.each_task() as task:
            first = task * each
            with k.loop(first, k.min(first + each, total)) as number:
                position = number % vectors * width
                left = k.variable(number // vectors)
                places = [
                    k.variable(b + position * outer.stride(o, last) * item)
                    for o, b in enumerate(bases)
                ]
                with k.loop(0, last) as i:
                    axis = last - 1 - i
                    index = left.value % outer.dim(axis)
                    left.set(left.value // outer.dim(axis))
                    for operand, place in enumerate(places):
                        place.set(place.value + index * outer.stride(operand, axis) * item)
                call = k.ir.inttoptr(function.ir, ir.FunctionType(VOID, LINE_TYPES).as_pointer())
                valid = k.min(inner - position, width)
                values = [*(p.value for p in places), line.address, valid, alpha, beta]
                k.ir.call(call, [v.ir for v in values])


def _emit_entry(k: LibraryBuilder, direction: str) -> None:
    names = ("y", "x") if direction == "forward" else ("dx", "y", "dy")
    with k.api(f"bs_softmax_{direction}") as call:
        k.require(call["algorithm"].below(len(ALGORITHMS)), "bad_enum")
        k.require(call["axes"].below(len(AXES)), "bad_enum")
        tensors, data = [call[n] for n in names], [call[f"{n}_data"] for n in names]
        checks.check_tensors(k, tensors[1:], tensors[0], least=2)
        for tensor in tensors[1:]:
            checks.require_same_dims(k, tensor, tensors[0])
        checks.check_data(k, *zip(tensors, data))
        threads = checks.check_threads(k, call["threads"])
        with k.if_(k.ask("size_of", tensors[0]).eq(0)):
            k.give(0)
        single = Tensor(k, tensors[0]).dtype.eq(0)
        channel = call["axes"].eq(AXES.index("channel"))
        axes = k.select(channel, k.as_int(1 << 1), k.as_int(-1 << 1))
        operands = [*tensors, tensors[0]][:OPERANDS], [*data, data[0]][:OPERANDS]
        lanes = k.select(single, k.as_int(k.lanes("float32")), k.as_int(k.lanes("float64")))
        for number, algorithm in enumerate(ALGORITHMS):
            with k.if_(call["algorithm"].eq(number)):
                lines = []
                for kind in (ALONG, ACROSS, SINGLE):
                    found = (
                        function_address(k, _name(direction, algorithm, kind, dtype))
                        for dtype in DTYPES
                    )
                    lines.append(k.select(single, *found))
                size = k.select(single, k.as_int(4), k.as_int(8))
                k.call(
                    "run_lines", *lines, size, lanes, axes, *operands[0], *operands[1], threads,
                    call["alpha"], call["beta"],
                )  # fmt: skip
