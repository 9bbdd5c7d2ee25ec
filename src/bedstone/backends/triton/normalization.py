"""Normalisation on the GPU: batch, layer, group and RMS, in training, inference and backward (LRN
is in lrn.py).

Elements that share statistics are a row (the rows of softmax.py). Statistics are taken tile by
tile, first the mean, then the squares around it, and tiles are merged by the formula of Chan,
Golub and LeVeque, so a large mean costs no accuracy. Few long rows, as batch normalisation has,
do not fill the chip: with workspace each is cut into parts, whose statistics a second kernel
merges in a fixed order as it writes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bedstone.backends.triton import chips, launch
from bedstone.backends.triton import normalization_kernels as kernels
from bedstone.backends.triton.lrn import Window
from bedstone.backends.triton.softmax import Rows, rows_of
from bedstone.backends.triton.walk import MAX_PROGRAMS, OUTER, common_word, power_of_two
from bedstone.plan.algorithm import Algorithm, Kernel
from bedstone.plan.device import Device
from bedstone.spec.dtypes import DType
from bedstone.spec.normalization import NormalizationProblem, View
from bedstone.spec.problem import Problem
from bedstone.spec.tensor import MAX_RANK

TILE = 4096  # elements of a program's tile: 32 a thread of 128
ONE_TILE = 8192  # elements of a row that is read once and stays in registers
COLUMNS = 32  # rows side by side where the normalised axis is not the innermost one
PARTS = 128  # parts of a row at most: their statistics must fit a tile
WAVES = 4  # programs a multiprocessor that are worth splitting for
SUMS = {"training": 2, "backward": 4}  # numbers of a part
WARPS = 4
# The kernels' pointers and strides; under an alias goes the first of its operands that is there.
POINTERS = {
    "forward": ("x", "scale", "shift", "mean", "spread", "running_mean", "running_var", "y"),
    "backward": ("x", "scale", "mean", "inv_std", "dy", "dscale", "dshift", "dx"),
}
STRIDES = {
    "forward": ("x_rows", "x_columns", "scale_rows", "scale_columns", "shift_rows",
                "shift_columns", "y_rows", "y_columns", "statistics_rows"),
    "backward": ("x_rows", "x_columns", "scale_rows", "scale_columns", "statistics_rows",
                 "statistics_columns", "dy_rows", "dy_columns", "dx_rows", "dx_columns",
                 "parameter_rows"),
}  # fmt: skip
ALIASES = {
    "spread": ("variance", "inv_std"),
    "statistics": ("inv_std", "variance", "running_var"),
    "parameter": ("dscale", "dshift"),
}
NO_STRIDES = ((0,) * (OUTER + 1), (0,) * (OUTER + 1))


@dataclass(frozen=True)
class Pass:
    """One walk over the rows of a problem: the kernel's operands and its tile.

    number   name -> operand's number, of those that the problem has
    strides  name -> the operand's strides (over the rows, along them)
    """

    rows: Rows
    number: Mapping[str, int]
    strides: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]

    @property
    def tile(self) -> tuple[int, int]:
        """(rows, elements of a row) of a program."""
        length = power_of_two(self.rows.length)
        if not self.rows.innermost:
            ba = min(COLUMNS, power_of_two(self.rows.a))
            return ba, min(length, TILE // ba)
        bl = min(length, TILE)
        return min(power_of_two(self.rows.a), TILE // bl), bl

    @property
    def programs(self) -> int:
        """Programs that take all rows whole."""
        return math.prod(self.rows.outer) * -(-self.rows.a // self.tile[0])

    @property
    def count(self) -> int:
        """Rows in all."""
        return math.prod(self.rows.outer) * self.rows.a

    def split(self, device: Device) -> tuple[int, int]:
        """(parts of a row, elements of a part) that fill the chip."""
        chunks = max(1, -(-self.rows.length // self.tile[1]))
        wanted = WAVES * chips.chip_of(device.architecture).multiprocessors
        parts = max(1, min(chunks, PARTS, wanted // max(self.programs, 1)))
        span = -(-chunks // parts) * self.tile[1]
        return max(1, -(-self.rows.length // span)), span

    def a_row(self, name: str) -> bool:
        """Whether an operand has one element a row."""
        return not any(self.strides.get(name, NO_STRIDES)[1])


def passes(problem: NormalizationProblem) -> Iterator[tuple[Pass, tuple[str, ...]]]:
    """The walks that a problem needs, each with the outputs that it writes. Gradients by scale and
    shift come first, since dx may take the memory of dy."""
    view = View(problem)
    outputs = tuple(o.name for o in problem.outputs)
    if problem.direction != "backward":
        yield _pass(problem, view, view.axes, "y"), outputs
        return
    if view.shared == view.axes:
        yield _pass(problem, view, view.axes, "dx"), outputs
        return
    if len(outputs) > 1:
        gradients = tuple(name for name in outputs if name != "dx")
        yield _pass(problem, view, view.shared, "dx"), gradients
    yield _pass(problem, view, view.axes, "dx"), ("dx",)


def _pass(problem: NormalizationProblem, view: View, axes: tuple[int, ...], last: str) -> Pass:
    operands = [o.name for o in problem.operands]
    order = [name for name in operands if name != last] + [last]
    rows = rows_of([view.desc(name) for name in order], axes)
    strides = {name: (rows.row_strides[i], rows.strides[i]) for i, name in enumerate(order)}
    number = {name: operands.index(name) for name in order}
    for name, group in ALIASES.items():
        found = [operand for operand in group if operand in number]
        if found:
            number[name], strides[name] = number[found[0]], strides[found[0]]
    return Pass(rows, number, strides)


class RowsWhole(Algorithm):
    """A program takes whole rows: no workspace."""

    name = "triton:rows"
    splits = False

    def supports(self, problem: Problem, device: Device) -> str | None:
        if not isinstance(problem, NormalizationProblem):
            return "local response normalisation"
        if problem.norm.kind == "group" and problem.x.rank == MAX_RANK:
            return f"group normalisation of {MAX_RANK} dims"
        walks = [p for p, _ in passes(problem)]
        if any(p.programs > MAX_PROGRAMS for p in walks):
            return "needs more programs than a grid has"
        if self.splits and problem.direction == "inference":
            return "given statistics need no sums"
        if self.splits and all(p.split(device)[0] == 1 for p in walks):
            return "the rows alone fill the chip"
        return None

    def workspace(self, problem: Problem, device: Device) -> int:
        if not self.splits or not isinstance(problem, NormalizationProblem):
            return 0
        counts = [p.split(device)[0] * p.count for p, _ in passes(problem)]
        return max(counts) * SUMS[problem.direction] * problem.accumulator.itemsize

    def estimate(self, problem: Problem, device: Device) -> float:
        if not isinstance(problem, NormalizationProblem):
            raise TypeError(f"not a normalisation: {problem}")
        seconds = 0.0
        for walk, _ in passes(problem):
            splits = self.splits or problem.direction == "inference"
            busy = walk.programs * (walk.split(device)[0] if splits else 1)
            share = min(1.0, busy / chips.chip_of(device.architecture).multiprocessors)
            again = 1.0 if problem.direction == "inference" else 1.5
            moved = int(problem.bytes * again / max(share, 1e-3))
            seconds += chips.move_seconds(moved, device.architecture, 1 + self.splits)
        return seconds

    def build(self, problem: Problem, device: Device) -> Kernel:
        if not isinstance(problem, NormalizationProblem):
            raise TypeError(f"not a normalisation: {problem}")
        made = [
            _launch(problem, walk, outputs, stage, device)
            for walk, outputs in passes(problem)
            for stage in _stages(problem, walk, outputs, device, self.splits)
        ]
        return made[0] if len(made) == 1 else launch.Chain(made, f"{len(made)} kernels")


class RowsSplit(RowsWhole):
    """Rows cut into parts, whose sums lie in workspace."""

    name = "triton:rows_split"
    splits = True


def _shrink(compute: DType, length: int) -> float:
    """A power of two near the root of a row's length: squares of distances shrunk by it overflow
    in float32 only where the variance does."""
    return 2.0 ** -math.ceil(math.log2(max(length, 1)) / 2) if compute is DType.float32 else 1.0


@dataclass(frozen=True)
class Stage:
    """One launch of a walk: the kernels' STAGE, over `parts` of `span` elements of every row."""

    name: str
    parts: int
    span: int


def _stages(
    problem: NormalizationProblem, walk: Pass, outputs: tuple[str, ...], device: Device,
    splits: bool,
) -> list[Stage]:  # fmt: skip
    parts, span = walk.split(device)
    rows_alone = problem.direction == "backward" and "dx" not in outputs
    if problem.direction == "inference":
        return [Stage("inference", parts, span)]
    if splits and parts > 1:
        return [Stage("part", parts, span), Stage("apply", 1 if rows_alone else parts, span)]
    return [Stage("whole", 1, max(walk.rows.length, 1))]


def _launch(
    problem: NormalizationProblem, walk: Pass, outputs: tuple[str, ...], stage: Stage,
    device: Device,
) -> Kernel:  # fmt: skip
    compute, rows = problem.accumulator, walk.rows
    backward = problem.direction == "backward"
    kind = "i64" if rows.wide or problem.x.size >= 2**31 else "i32"
    word = launch.ALIGNMENT // min(o.desc.dtype.itemsize for o in problem.operands)
    parts, part = walk.split(device)
    ba, bl = walk.tile
    arguments: dict[str, Any] = {
        "part_ptr": launch.Scratch(compute),
        **launch.factors(compute),
        "outer": launch.Integers(rows.outer, kind),
        "A": launch.Scalar(rows.a, kind, common_word([rows.a], word)),
        "L": launch.Scalar(rows.length, kind, common_word([rows.length], word)),
        "SPAN": launch.Scalar(stage.span, kind, common_word([stage.span], word)),
        "ROWS": launch.Scalar(walk.count, kind),
        "SPLIT": launch.Scalar(parts),
        "axes": launch.Integers(rows.normalised, kind, common_word(rows.normalised, word)),
    }
    for name in POINTERS["backward" if backward else "forward"]:
        place = walk.number.get(name, len(problem.operands) - 1)  # a stand-in for what is missing
        arguments[f"{name}_ptr"] = launch.Pointer(place, problem.operands[place].desc.dtype)
    for name in STRIDES["backward" if backward else "forward"]:
        operand, side = name.split("_")
        values = walk.strides.get(operand, NO_STRIDES)[side == "columns"]
        arguments[name] = launch.Integers(values, kind, common_word(values, word))
    constants: dict[str, Any] = {
        "STAGE": stage.name, "CENTRED": problem.norm.kind != "rms",
        "SCALE": "scale" in walk.number, "SCALE_A_ROW": walk.a_row("scale"),
        "PARTS": power_of_two(parts), "ACC": launch.accumulator(compute),
        "WIDE": kind == "i64", "BA": ba, "BL": bl,
    }  # fmt: skip
    number = "fp64" if compute is DType.float64 else "fp32"
    if backward:
        arguments["share"] = launch.Scalar(1 / max(rows.length, 1), number)
        constants |= {
            "DX": "dx" in outputs, "DSCALE": "dscale" in outputs, "DSHIFT": "dshift" in outputs,
            "STATISTICS_A_ROW": walk.a_row("statistics"),
        }  # fmt: skip
        kernel = kernels.normalization_backward_kernel
    else:
        n = problem.reduction_length
        shrink = _shrink(compute, rows.length)
        arguments |= {
            "PART": launch.Scalar(part, kind),
            "epsilon": launch.Scalar(problem.norm.epsilon, number),
            "shrink": launch.Scalar(shrink, number),
            "share": launch.Scalar(1 / max(rows.length, 1) / shrink / shrink, number),
            "momentum": launch.Scalar(problem.momentum or 0.0, number),
            "drawn": launch.Scalar(n / max(n - 1, 1) if problem.unbiased else 1.0, number),
        }
        training = stage.name != "inference"
        constants |= {
            "SHIFT": "shift" in walk.number, "SHIFT_A_ROW": walk.a_row("shift"),
            "MEAN": training and "mean" in walk.number,
            "INV_STD": training and "inv_std" in walk.number,
            "RUNNING": problem.momentum is not None,
            "ONE": stage.name == "whole" and 0 < rows.length <= bl,
        }  # fmt: skip
        kernel = kernels.normalization_forward_kernel
    grid = (walk.programs, stage.parts)
    return launch.prepare(device, kernel, grid, arguments, constants, num_warps=WARPS)


ALGORITHMS = (RowsWhole(), RowsSplit(), Window())
