"""Softmax on the GPU: fast, accurate and log, forward and backward, over any axes and strides.

A program takes BA rows. A row of up to ONE_TILE elements is read once and stays in registers;
a longer one is read twice (the second time mostly from the cache): a first pass keeps a running
maximum and a sum that is rescaled whenever the maximum grows (Milakov and Gimelshein,
arXiv 1805.02867), a second one writes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from bedstone.backends.triton import chips, launch
from bedstone.backends.triton import softmax_kernels as kernels
from bedstone.backends.triton.walk import MAX_PROGRAMS, OUTER, common_word, merged, power_of_two
from bedstone.plan.algorithm import Algorithm, Kernel
from bedstone.plan.device import Device
from bedstone.spec.dtypes import DType
from bedstone.spec.problem import Problem
from bedstone.spec.softmax import SoftmaxProblem
from bedstone.spec.tensor import TensorDesc

ELEMENTS = 16  # a thread: 64 bytes of float32 in flight, and registers for many programs
ONE_TILE = 32768  # elements of a row that registers hold: 32 a thread of 1,024
ONE_TILE_BACKWARD = 16384  # where two operands are held
WARPS = 16  # at most, where rows are not as long as that
TILE = 2048  # elements of a program's tile of short rows: 16 a thread of 128
LINE = 128  # bytes of rows side by side where the normalised axis is not the innermost one,
ACROSS = 16384  # and elements that registers then hold
PART = 8192  # elements of a row that is shared among programs: 32 a thread of 256
MAX_PARTS = 1024  # that a program adds up
SHARED_CACHE = 24 << 20  # bytes that stay in the chip's cache while they are read again


@dataclass(frozen=True)
class Rows:
    """Rows of `length` elements: six outer axes, the axis A of rows side by side, and up to seven
    normalised axes, each with the operands' strides. `innermost`: the last normalised axis is
    contiguous in the output, or A is not."""

    outer: tuple[int, ...]
    a: int
    normalised: tuple[int, ...]
    row_strides: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]
    wide: bool
    innermost: bool

    @property
    def length(self) -> int:
        """Elements of a row."""
        return math.prod(self.normalised)


def rows_of(descs: list[TensorDesc], axes: tuple[int, ...]) -> Rows:
    """The rows of tensors of equal dims, the output last."""
    kept, normalised = [], []
    for axis, dim in enumerate(descs[-1].dims):
        row = (dim, tuple(t.strides[axis] for t in descs))
        if dim != 1:
            (normalised if axis in axes else kept).append(row)
    none = (1, (0,) * len(descs))
    kept, normalised = merged(kept), merged(normalised) or [none]
    a = kept.pop() if kept else none
    outer = [none] * (OUTER - len(kept)) + kept
    contiguous = abs(normalised[-1][1][-1]) == 1 or abs(a[1][-1]) != 1
    # Missing axes come last: the first one needs no modulo, and a single axis stays contiguous.
    normalised += [none] * (OUTER + 1 - len(normalised))
    count = range(len(descs))
    return Rows(
        tuple(d for d, _ in outer),
        a[0],
        tuple(d for d, _ in normalised),
        tuple(tuple(s[i] for _, s in [*outer, a]) for i in count),
        tuple(tuple(s[i] for _, s in normalised) for i in count),
        any(high - low >= 2**31 for low, high in (t.offset_range() for t in descs)),
        contiguous,
    )


def tile_of(rows: Rows, problem: SoftmaxProblem) -> tuple[int, int]:
    """(rows, elements of a row) of a program's tile."""
    length = power_of_two(rows.length)
    forward = problem.direction == "forward"
    if not rows.innermost:
        side = LINE // problem.x.dtype.itemsize if forward else LINE // 4
        ba = min(side, power_of_two(rows.a))
        whole = length * ba <= (ACROSS if forward else ACROSS // 2)
        return ba, length if whole else min(length, max(1, TILE // ba))
    bl = min(length, ONE_TILE if forward else ONE_TILE_BACKWARD)
    return min(power_of_two(rows.a), max(1, TILE // bl)), bl


def warps_of(elements: int) -> int:
    """Warps for a tile of so many elements."""
    return max(1, min(WARPS if elements < ONE_TILE else 2 * WARPS, elements // ELEMENTS // 32))


def arguments_of(problem: SoftmaxProblem, rows: Rows) -> dict[str, Any]:
    """What all the kernels take."""
    dtype = problem.x.dtype
    names = ("x", "y") if problem.direction == "forward" else ("y", "dy", "dx")
    kind = "i64" if rows.wide else "i32"
    unit = launch.ALIGNMENT // dtype.itemsize
    whole = common_word([v for row in (*rows.row_strides, *rows.strides) for v in row], unit)
    axes = common_word(rows.normalised, unit)
    arguments: dict[str, Any] = {
        **{f"{name}_ptr": launch.Pointer(i, dtype) for i, name in enumerate(names)},
        **launch.factors(dtype),
        "outer": launch.Integers(rows.outer, kind),
        "A": launch.Scalar(rows.a, kind, common_word([rows.a], unit)),
        "L": launch.Scalar(rows.length, kind, common_word([rows.length], unit)),
        "axes": launch.Integers(rows.normalised, kind, axes),
    }
    for name, row, column in zip(names, rows.row_strides, rows.strides):
        arguments[f"{name}_rows"] = launch.Integers(row, kind, whole)
        arguments[f"{name}_columns"] = launch.Integers(column, kind, whole)
    return arguments


def constants_of(problem: SoftmaxProblem, rows: Rows, ba: int, bl: int) -> dict[str, Any]:
    """Constants of the kernels."""
    dtype = problem.x.dtype
    constants = {
        "ALGORITHM": problem.algorithm, "ACC": launch.accumulator(dtype),
        "WIDE": rows.wide, "BA": ba, "BL": bl,
    }  # fmt: skip
    if problem.direction == "forward":
        constants["SHIFT"] = problem.algorithm != "fast" or dtype is DType.float16
        constants["ROUGH"] = dtype.itemsize < 4
    return constants


class Online(Algorithm):
    """Softmax in one pass over memory for short rows, two for long ones."""

    name = "triton:online"

    def supports(self, problem: Problem, device: Device) -> str | None:
        if not isinstance(problem, SoftmaxProblem):
            return "it computes softmax"
        if len(problem.axes) > OUTER + 1 or problem.x.rank - len(problem.axes) > OUTER + 1:
            return f"takes up to {OUTER + 1} normalised and as many other axes"
        if problem.x.size >= 2**31 * TILE or math.prod(problem.x.dims) > MAX_PROGRAMS * TILE:
            return "needs more programs than a grid has"
        return None

    def estimate(self, problem: Problem, device: Device) -> float:
        rows = rows_of([o.desc for o in problem.operands], problem.axes)  # type: ignore[attr-defined]
        moved: float = problem.bytes
        if rows.length > tile_of(rows, problem)[1]:  # type: ignore[arg-type]
            chip = chips.chip_of(device.architecture)
            row = rows.length * problem.operands[0].desc.dtype.itemsize
            moved *= 1.2 if chip.multiprocessors * row < SHARED_CACHE else 1.5
        rounds = _programs(rows, problem) / chips.chip_of(device.architecture).multiprocessors  # type: ignore[arg-type]
        busy = rounds / max(1, math.ceil(rounds))
        return chips.move_seconds(int(moved / busy), device.architecture)

    def build(self, problem: Problem, device: Device) -> Kernel:
        if not isinstance(problem, SoftmaxProblem):
            raise TypeError(f"not a softmax: {problem}")
        rows = rows_of([o.desc for o in problem.operands], problem.axes)
        ba, bl = tile_of(rows, problem)
        forward = problem.direction == "forward"
        constants = {**constants_of(problem, rows, ba, bl), "ONE": rows.length <= bl}
        kernel = kernels.softmax_forward_kernel if forward else kernels.softmax_backward_kernel
        return launch.prepare(
            device, kernel, (_programs(rows, problem),), arguments_of(problem, rows), constants,
            num_warps=warps_of(ba * bl),
        )  # fmt: skip


def _programs(rows: Rows, problem: SoftmaxProblem) -> int:
    return math.prod(rows.outer) * -(-rows.a // tile_of(rows, problem)[0])


class OnlineSplit(Online):
    """Long rows shared among programs: peak and sum of every part into workspace, then the rest."""

    name = "triton:online_split"

    def supports(self, problem: Problem, device: Device) -> str | None:
        reason = super().supports(problem, device)
        if reason is not None:
            return reason
        rows = rows_of([o.desc for o in problem.operands], problem.axes)  # type: ignore[attr-defined]
        if problem.direction != "forward" or rows.length <= ONE_TILE:
            return f"takes rows of more than {ONE_TILE} elements, forward"
        if rows.length > MAX_PARTS * PART:
            return f"takes rows of up to {MAX_PARTS * PART} elements"
        if problem.x.size == 0:  # type: ignore[attr-defined]
            return "takes no empty tensors"
        return None

    def workspace(self, problem: Problem, device: Device) -> int:
        rows = rows_of([o.desc for o in problem.operands], problem.axes)  # type: ignore[attr-defined]
        count = math.prod(rows.outer) * rows.a * -(-rows.length // PART)
        return 2 * count * problem.dtype.accumulator.itemsize  # type: ignore[attr-defined]

    def estimate(self, problem: Problem, device: Device) -> float:
        return chips.move_seconds(int(1.5 * problem.bytes), device.architecture, 2)

    def build(self, problem: Problem, device: Device) -> Kernel:
        if not isinstance(problem, SoftmaxProblem):
            raise TypeError(f"not a softmax: {problem}")
        rows = rows_of([o.desc for o in problem.operands], problem.axes)
        count, parts = math.prod(rows.outer) * rows.a, -(-rows.length // PART)
        arguments = arguments_of(problem, rows)
        arguments["part_ptr"] = launch.Scratch(problem.x.dtype.accumulator)
        arguments["SPLIT"] = launch.Scalar(parts)
        constants = {**constants_of(problem, rows, 1, PART), "PARTS": power_of_two(parts)}
        stages = (
            launch.prepare(
                device, kernels.softmax_part_kernel, (count * parts,), arguments,
                {**constants, "APPLY": apply}, num_warps=PART // 2 // ELEMENTS // 32,
            )
            for apply in (False, True)
        )  # fmt: skip
        return launch.Chain(tuple(stages), f"rows in {parts} parts")


ALGORITHMS = (Online(), OnlineSplit())
