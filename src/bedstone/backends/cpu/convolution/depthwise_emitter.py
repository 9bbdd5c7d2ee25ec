"""What the depthwise emitters share: a problem's numbers, the entry, blending, borders."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bedstone.backends.cpu.activation import emit_epilogue
from bedstone.backends.cpu.builder import Call, KernelBuilder
from bedstone.backends.cpu.convolution.geometry import Axis, axis_line
from bedstone.backends.cpu.convolution.packed_filter import FilterKernel, Operands
from bedstone.backends.cpu.irtypes import itemsize
from bedstone.backends.cpu.target import Target
from bedstone.spec.convolution import ConvolutionProblem

UNROLLED_TAPS = 9  # taps in one block of code; more are walked row by row in a loop
ROW_FRAME = 16  # bytes: address of an image row, offset of its taps


@dataclass(frozen=True)
class Line:
    """A spatial axis: its pixels, per residue of the output its (tap, shift) list, the size of the
    window, and bytes per tap, per image coordinate and per output element."""

    axis: Axis
    residues: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    window: int
    filter: int
    image: int
    out: int

    def within(self, residue: int) -> int:
        """Pixels of one residue that exist."""
        axis = self.axis
        return -(-(axis.out_limit - residue) // axis.out_step) if axis.out_limit else axis.size


# The rows of a 1-D problem: one, with one tap.
ONE_ROW = Line(Axis(1, 0, 0, 1, 1), ((0, ((0, 0),)),), 1, 0, 0, 0)


def spatial_lines(problem: ConvolutionProblem) -> list[Line]:
    """The problem's spatial axes."""
    item = problem.x.dtype.itemsize
    descs = (problem.x, problem.w, problem.y)
    strides = [[stride * item for stride in desc.strides] for desc in descs]
    lines = []
    for a, window in enumerate(problem.w.dims[2:]):
        line = axis_line(problem, a, *strides, problem.direction == "backward_data")
        numbers = (line.filter_stride, line.image_stride, line.out_stride)
        lines.append(Line(line.axis, line.residues, window, *numbers))
    return lines


@dataclass(frozen=True)
class Shape:
    """The numbers of one kernel; strides in bytes."""

    batch: int
    channels: int
    image: tuple[int, int]  # strides of batch and channel
    out: tuple[int, int]
    filter: int  # stride of the channel
    rows: Line
    columns: Line
    dtype: str
    accumulator: str
    lanes: int

    @property
    def item(self) -> int:
        return itemsize(self.dtype)


def shape_of(problem: ConvolutionProblem, target: Target) -> Shape:
    """The problem as one correlation per phase (see geometry.py), 1-D as one row."""
    item = problem.x.dtype.itemsize
    backward = problem.direction == "backward_data"
    image, out = (problem.y, problem.x) if backward else (problem.x, problem.y)
    lines = spatial_lines(problem)
    accumulator = str(problem.x.dtype.accumulator)
    return Shape(
        problem.x.dims[0],
        problem.x.dims[1],
        (image.strides[0] * item, image.strides[1] * item),
        (out.strides[0] * item, out.strides[1] * item),
        problem.w.strides[0] * item,
        lines[0] if len(lines) == 2 else ONE_ROW,
        lines[-1],
        str(problem.x.dtype),
        accumulator,
        target.vector_bytes // itemsize(accumulator),
    )


def both(a: Any, b: Any) -> Any:
    """a and b, where either may be known already."""
    if isinstance(a, bool):
        return b if a else False
    return a if b is True else (False if b is False else a & b)


class Emitter(FilterKernel):
    """What the two layouts share: operands, phases, blending."""

    def __init__(self, target: Target, problem: ConvolutionProblem, s: Shape) -> None:
        self.k, self.s, self.problem = KernelBuilder(target), s, problem
        self.epilogue = problem.epilogue

    def take(self, call: Call, operands: Operands) -> None:
        """Remember an entry's arguments."""
        self.call = call
        self.source, self.bias, self.out = operands.image, operands.bias, operands.out

    def phases(self) -> list[tuple[Any, Any]]:
        """((row residue, its taps), (column residue, its taps)) of every phase."""
        return list(itertools.product(self.s.rows.residues, self.s.columns.residues))

    def finish(self, total: Any, old: Any, shift: Any) -> Any:
        """alpha * total + beta * old, bias, activation; `old()` loads the output where needed."""
        k = self.k
        result = k.variable(total * k.cast(self.call.alpha, total))
        with k.if_(self.call.beta.ne(0.0)):
            result.set(k.fma(old(), k.cast(self.call.beta, total), result.value))
        value = result.value if shift is None else result.value + shift
        return emit_epilogue(k, self.epilogue, value)

    def row_inside(self, p: Any, taps: Any) -> Any:
        """True if output row p needs no image row outside the image."""
        rows = self.s.rows
        if not rows.axis.checked or not taps:
            return True
        shifts = [shift for _, shift in taps]
        first = p * rows.axis.step
        return both(first + min(shifts) >= 0, first + max(shifts) < rows.axis.limit)

    def tap_rows(self, row_taps: Any, column_taps: Any) -> Iterator[Any]:
        """Numbers of the rows of taps: unrolled for few taps, else a loop. The loop keeps the sums
        side by side; in one long block LLVM follows one sum through all its taps, waiting."""
        if len(row_taps) * len(column_taps) <= UNROLLED_TAPS:
            yield from range(len(row_taps))
            return
        with self.k.loop(0, len(row_taps)) as j:
            yield j

    def versions(self, inside: Any) -> Iterator[bool]:
        """Whether to check the border, once for each version of the code that is reached."""
        if isinstance(inside, bool):
            yield not inside
            return
        with self.k.if_else(inside) as (then, otherwise):
            with then:
                yield False
            with otherwise:
                yield True
