"""Pooling by patches: `triton:patches`, for windows of few taps, and `triton:whole`, for one.

A thread takes a patch of output rows and columns, so that what it reads serves all the windows
that share it: each row of the input is reduced along its taps once, and then goes into all the
windows that have it. The gradient of a maximum does not look for it again in every window that
covers an element: the windows that meet a patch of dx are each searched once. No workspace, nothing
is added to the same place twice, so results repeat bitwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from bedstone.backends.triton import chips, launch
from bedstone.backends.triton import pooling_patch_kernels as kernels
from bedstone.backends.triton.softmax import rows_of
from bedstone.backends.triton.walk import MAX_PROGRAMS, common_word, power_of_two
from bedstone.plan.algorithm import Algorithm, Kernel
from bedstone.plan.device import Device
from bedstone.spec.dtypes import DType
from bedstone.spec.pooling import PoolingProblem
from bedstone.spec.problem import Problem
from bedstone.spec.tensor import TensorDesc

WARPS = 4
MAX_TAPS = 49  # of a window, unrolled: 7 x 7
MAX_STRIDE = 4
ROWS = 4  # rows of windows a patch, where that is at most LOADS loads
LOADS = 96
VECTOR = 4  # channels of a thread where they are innermost, forward and gradients of averages,
VECTOR_MAXIMA = 2  # and gradients of maxima, whose windows' maxima and positions are held
CHANNELS = 64  # side by side where they are innermost
WORD = 4  # columns a run where memory is innermost along them: 16 bytes of float32
TILE = 4096  # elements of a program's tile of whole images


@dataclass(frozen=True)
class Patch:
    """What one tile computes: `h` rows of `w` windows (forward), or the h * u x w * u elements of
    dx that they start from (backward); the tile's sides; the words read and written."""

    h: int
    w: int
    ba: int
    bb: int
    last: bool
    block: int
    block_out: int

    def programs(self, images: int, channels: int, rows: int, columns: int) -> int:
        """For an output of so many rows and columns of windows."""
        runs = -(-columns // self.w)
        if self.last:
            tiles = -(-images * runs // self.ba) * -(-channels // self.bb)
        else:
            tiles = -(-images * channels // self.ba) * -(-runs // self.bb)
        return tiles * -(-rows // self.h)


def _pair(values: Any, missing: Any) -> tuple[Any, Any]:
    """Values of one or two spatial axes as two."""
    values = tuple(values)
    return (*(missing,) * (2 - len(values)), *values)  # type: ignore[return-value]


@dataclass(frozen=True)
class Windows:
    """A problem's numbers on two axes (h, w)."""

    size: tuple[int, int]
    out: tuple[int, int]
    window: tuple[int, int]
    stride: tuple[int, int]
    low: tuple[int, int]
    high: tuple[int, int]

    @classmethod
    def of(cls, problem: PoolingProblem) -> Windows:
        pool = problem.pool
        low, high = zip(*pool.padding)
        return cls(
            _pair(problem.x.dims[2:], 1), _pair(problem.y.dims[2:], 1), _pair(pool.window, 1),
            _pair(pool.stride, 1), _pair(low, 0), _pair(high, 0),
        )  # fmt: skip

    @property
    def before(self) -> tuple[int, int]:
        """The first window that meets a patch of dx, less the window that starts it."""
        rows = zip(self.low, self.window, self.stride)
        return tuple(-((r - 1 - low) // u) for low, r, u in rows)  # type: ignore[return-value]

    def count(self, patch: Patch) -> tuple[int, int]:
        """How many windows meet a patch of dx."""
        found = []
        for n, low, u, begin in zip((patch.h, patch.w), self.low, self.stride, self.before):
            found.append(n - 1 + (u - 1 + low) // u - begin + 1)
        return found[0], found[1]


def patch_of(problem: PoolingProblem, windows: Windows) -> Patch:
    """The patch, chosen so that all loads of a row of it are in flight at once."""
    forward = problem.direction == "forward"
    read, written = (problem.x, problem.y) if forward else (problem.y, problem.x)
    u = windows.stride[1]
    n, c = problem.x.dims[:2]
    last = written.strides[1] == 1 and c > 1
    width = 1 if last else WORD
    w = max(1, width // u)
    vector = 1
    if last:
        w = 2 if forward else max(1, 2 // u)
        vector = VECTOR if forward or problem.pool.mode != "max" else VECTOR_MAXIMA
        vector = vector if problem.dtype is not DType.float64 else vector // 2
    columns = (w - 1) * u + windows.window[1]
    h = ROWS
    while h > 1 and ((h - 1) * windows.stride[0] + windows.window[0]) * columns > LOADS:
        h //= 2
    elements = 32 * WARPS * vector
    block = block_out = 1
    if last:
        bb = min(CHANNELS, power_of_two(c))
        runs = n * -(-(windows.out if forward else windows.size)[1] // w)
        ba = min(power_of_two(runs), max(1, elements // bb))
    else:
        whole = w * u == WORD
        wide = whole and (problem.x if forward else problem.x).strides[-1] == 1
        if forward:
            block, block_out = WORD if wide else 1, w if problem.y.strides[-1] == 1 else 1
        else:
            block, block_out = w if read.strides[-1] == 1 else 1, WORD if wide else 1
        block, block_out = (b if b in (2, 4) else 1 for b in (block, block_out))
        runs = -(-windows.out[1] // w) if forward else -(-windows.size[1] // (w * u))
        bb = min(32, power_of_two(runs))
        ba = min(power_of_two(n * c), max(1, elements // bb))
    return Patch(h, w, ba, bb, last, block, block_out)


def _strides(desc: TensorDesc) -> launch.Integers:
    """(n, c, h, w) strides, told to be whole words where they are."""
    values = (desc.strides[0], desc.strides[1], *_pair(desc.strides[2:], 0))
    low, high = desc.offset_range()
    word = common_word(values, launch.ALIGNMENT // desc.dtype.itemsize)
    return launch.Integers(values, "i64" if high - low >= 2**31 else "i32", word)


class Patches(Algorithm):
    """Windows of few taps, forward and backward, 1-D and 2-D."""

    name = "triton:patches"

    def supports(self, problem: Problem, device: Device) -> str | None:
        if not isinstance(problem, PoolingProblem):
            return "it computes pooling by sliding windows"
        if problem.indices is not None:
            return "neither makes nor takes indices"
        pool = problem.pool
        if pool.axes > 2 or any(d > 1 for d in pool.dilation):
            return "takes 1 or 2 spatial axes, without dilation"
        if math.prod(pool.window) > MAX_TAPS or max(pool.stride) > MAX_STRIDE:
            return f"unrolls windows of at most {MAX_TAPS} taps and strides up to {MAX_STRIDE}"
        if any(pad[0] >= r for pad, r in zip(pool.padding, pool.window)):
            return "takes windows that each hold an element"
        if math.prod(problem.x.dims[2:]) >= 2**31:
            return "takes images of less than 2^31 pixels"
        if problem.outputs[0].desc.size > MAX_PROGRAMS:
            return f"takes outputs of at most {MAX_PROGRAMS} elements"
        return None

    def estimate(self, problem: Problem, device: Device) -> float:
        return chips.move_seconds(problem.bytes, device.architecture)

    def build(self, problem: Problem, device: Device) -> Kernel:
        if not isinstance(problem, PoolingProblem):
            raise TypeError(f"not a pooling: {problem}")
        windows = Windows.of(problem)
        patch = patch_of(problem, windows)
        n, c = problem.x.dims[:2]
        forward = problem.direction == "forward"
        maxima = problem.pool.mode == "max"
        unit = launch.ALIGNMENT // problem.dtype.itemsize
        operands = [
            (name, i, desc)
            for i, (name, desc) in enumerate((o.name, o.desc) for o in problem.operands)
        ]
        arguments: dict[str, Any] = {
            **{f"{name}_ptr": launch.Pointer(i, problem.dtype) for name, i, _ in operands},
            **launch.factors(problem.dtype),
            "N": launch.Scalar(n),
            "C": launch.Scalar(c, "i32", common_word([c], unit)),
            **{
                name: launch.Scalar(value, "i32", common_word([value], unit))
                for name, value in zip("HWPQ", (*windows.size, *windows.out))
            },
            **{f"{name}_strides": _strides(desc) for name, _, desc in operands},
        }
        constants: dict[str, Any] = {
            "R": windows.window[0], "S": windows.window[1], "U_H": windows.stride[0],
            "U_W": windows.stride[1], "low": windows.low, "ACC": launch.accumulator(problem.dtype),
            "CHANNELS_LAST": patch.last, "BLOCK": patch.block, "PH": patch.h, "PW": patch.w,
            "BA": patch.ba, "BB": patch.bb,
        }  # fmt: skip
        rows, columns = windows.out
        if not forward:
            rows, columns = (-(-h // u) for h, u in zip(windows.size, windows.stride))
            constants |= dict(zip(("NH", "NW"), windows.count(patch)), before=windows.before)
        if maxima and not forward:
            kernel = kernels.pooling_patch_maxima_kernel
            constants["BLOCK"] = patch.block_out
        else:
            kernel = kernels.pooling_patch_averages_kernel
            constants |= {"high": windows.high, "MODE": problem.pool.mode}
            constants["BLOCK_OUT"] = patch.block_out
        if forward:
            kernel = kernels.pooling_patch_forward_kernel
        return launch.prepare(
            device, kernel, (patch.programs(n, c, rows, columns),), arguments, constants,
            num_warps=WARPS,
        )  # fmt: skip


class Whole(Algorithm):
    """One window over the whole image: a reduction of rows."""

    name = "triton:whole"

    def supports(self, problem: Problem, device: Device) -> str | None:
        if not isinstance(problem, PoolingProblem) or problem.direction != "forward":
            return "it computes pooling forward"
        if problem.indices is not None:
            return "makes no indices"
        pool = problem.pool
        covered = zip(problem.x.dims[2:], problem.y.dims[2:], pool.window, pool.padding)
        if any(p != 1 or pad[0] or r < h for h, p, r, pad in covered):
            return "takes one window that covers the image"
        if any(d > 1 for d in pool.dilation):
            return "takes no dilation"
        if problem.x.dims[0] * problem.x.dims[1] > MAX_PROGRAMS:
            return f"takes at most {MAX_PROGRAMS} images and channels"
        return None

    def estimate(self, problem: Problem, device: Device) -> float:
        return chips.move_seconds(problem.bytes, device.architecture)

    def build(self, problem: Problem, device: Device) -> Kernel:
        if not isinstance(problem, PoolingProblem):
            raise TypeError(f"not a pooling: {problem}")
        x, dtype = problem.x, problem.dtype
        spread = TensorDesc(x.dims, (*problem.y.strides[:2], *(0,) * (x.rank - 2)), dtype)
        rows = rows_of([x, spread], tuple(range(2, x.rank)))
        contiguous = abs(rows.strides[0][0]) == 1
        length = power_of_two(rows.length)
        ba = 1 if contiguous else min(CHANNELS, power_of_two(rows.a))
        bl = min(length, TILE // ba)
        ba = min(power_of_two(rows.a), max(ba, TILE // bl))
        kind = "i64" if rows.wide else "i32"
        unit = launch.ALIGNMENT // dtype.itemsize
        strides = [v for row in (*rows.row_strides, *rows.strides) for v in row]
        whole = common_word(strides, unit)
        include = problem.pool.mode == "average_include_padding"
        taps = math.prod(
            min(r, h + pad[1] if include else h)
            for r, h, pad in zip(problem.pool.window, x.dims[2:], problem.pool.padding)
        )
        arguments: dict[str, Any] = {
            "x_ptr": launch.Pointer(0, dtype),
            "y_ptr": launch.Pointer(1, dtype),
            **launch.factors(dtype),
            "divisor": launch.Scalar(float(taps), launch.factors(dtype)["alpha"].type),
            "outer": launch.Integers(rows.outer, kind),
            "A": launch.Scalar(rows.a, kind, common_word([rows.a], unit)),
            "L": launch.Scalar(rows.length, kind, common_word([rows.length], unit)),
            "axes": launch.Integers(rows.normalised, kind, common_word(rows.normalised, unit)),
            "x_rows": launch.Integers(rows.row_strides[0], kind, whole),
            "x_columns": launch.Integers(rows.strides[0], kind, whole),
            "y_rows": launch.Integers(rows.row_strides[1], kind, whole),
        }
        constants = {
            "MAX": problem.pool.mode == "max", "ACC": launch.accumulator(dtype),
            "WIDE": rows.wide, "BA": ba, "BL": bl,
        }  # fmt: skip
        programs = math.prod(rows.outer) * -(-rows.a // ba)
        return launch.prepare(
            device, kernels.pooling_whole_forward_kernel, (programs,), arguments, constants,
            num_warps=WARPS,
        )  # fmt: skip
