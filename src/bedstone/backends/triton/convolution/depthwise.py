"""triton:direct_depthwise: one filter a channel, 2-D (and 1-D), all directions and strides.

The host side of depthwise_kernels. backward_data runs as a forward convolution of dy by the
mirrored filter whose fractional stride is the convolution's; backward_filter leaves one sum a
program in workspace, and the kernel that adds parts in order finishes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bedstone.backends.triton import chips, launch
from bedstone.backends.triton.convolution import depthwise_kernels as kernels
from bedstone.backends.triton.convolution.geometry import (
    Geometry,
    Numbers,
    Strides,
    all_divisible,
    geometry_of,
    word,
)
from bedstone.backends.triton.convolution.implicit_gemm import (
    sum_launch,
)
from bedstone.backends.triton.walk import power_of_two
from bedstone.plan.algorithm import Algorithm, Kernel
from bedstone.plan.device import Device
from bedstone.spec.convolution import ConvolutionProblem
from bedstone.spec.dtypes import DType
from bedstone.spec.problem import Problem

MAX_TAPS = 81  # unrolled: 9 x 9; larger filters belong to the matrix units
MAX_ROWS = 32  # output rows a program walks down: a long walk, but programs enough
PROGRAMS_WANTED = 16  # programs a multiprocessor, so that loads of many are in flight
FILTER_PROGRAMS = 8  # the same for backward_filter, whose programs hold R * S sums
FILTER_RESIDENT = 4  # those that fit at once where channels are innermost
FILTER_ROWS = 4  # that such a program takes at a time, so that all get about as many
PATCH_TAPS = 9  # filters up to which rows of dy are held, unrolled, while rows of x pass:
PATCH_ROWS = (7, 4)  # as many of them as divide the output's, or else the last
FILTER_REGISTERS = 128  # of a thread's 255, for those sums
ROLL_TAPS = 9  # backward_filter keeps that many tiles of x beside its sums
FILTER_TILE = 256  # elements of a backward_filter strip at most, channels not innermost
FILTER_WARPS = 4
CHANNELS = 64  # side by side where they are innermost: whole 128-byte lines of 16-bit data
# Channels innermost: (taps up to, channels a thread, columns a thread, warps). Taps and sums of all
# a thread's channels stay in registers.
RUNS = ((9, 4, 4, 2), (25, 2, 4, 2), (49, 2, 2, 2), (MAX_TAPS, 1, 2, 2))
FILTER_RUNS = ((9, 4, 4, 4), (25, 2, 4, 4), (49, 2, 2, 4), (MAX_TAPS, 1, 2, 4))


@dataclass(frozen=True)
class Strip:
    """Tile of a program (see depthwise_kernels), columns of a run, rows that it walks, warps, and
    rows of dy that are held (backward_filter; 0: none)."""

    ba: int
    bb: int
    qc: int
    rows: int
    warps: int
    patch: int = 0


def run_of(
    table: tuple[tuple[int, int, int, int], ...], geo: Geometry, dtype: DType, columns: int
) -> tuple[int, int, int, int]:
    """(BA, BB, QC, warps) where channels are innermost."""
    _, channels, qc, warps = next(row for row in table if geo.taps <= row[0])
    if dtype is DType.float64:
        channels = max(1, channels // 2)
    axis = geo.axes[2]
    qc = min(qc, power_of_two(columns)) if axis.u % axis.dil == 0 else 1
    bb = min(CHANNELS, power_of_two(geo.groups))
    return max(1, 32 * warps * channels // bb), bb, qc, warps


class Depthwise(Algorithm):
    """Direct depthwise convolution with rolling sums."""

    name = "triton:direct_depthwise"

    def supports(self, problem: Problem, device: Device) -> str | None:
        if not isinstance(problem, ConvolutionProblem):
            return "it computes convolutions and their gradients by data and filter"
        if problem.epilogue.shift:
            return "adds nothing after the activation"
        geo = geometry_of(problem)
        if geo.channels != 1 or geo.filters != 1 or geo.groups == 1:
            return "takes one filter a channel: groups = C = K, more than one"
        if not geo.flat_depth:
            return "takes 1 or 2 spatial axes"
        if geo.taps > MAX_TAPS:
            return f"unrolls filters of at most {MAX_TAPS} taps"
        if any(t.wide for t in (geo.x, geo.w, geo.y)) or geo.pixels * geo.groups >= 2**31:
            return "takes tensors of less than 2^31 elements"
        return None

    def workspace(self, problem: Problem, device: Device) -> int:
        if problem.direction != "backward_filter":
            return 0
        geo = geometry_of(problem)  # type: ignore[arg-type]
        _, split = filter_strip(problem, geo, device)  # type: ignore[arg-type]
        return split * geo.groups * geo.taps * problem.dtype.accumulator.itemsize

    def estimate(self, problem: Problem, device: Device) -> float:
        launches = 2 if problem.direction == "backward_filter" else 1
        return chips.move_seconds(problem.bytes, device.architecture, launches)

    def build(self, problem: Problem, device: Device) -> Kernel:
        if not isinstance(problem, ConvolutionProblem):
            raise TypeError(f"not a convolution: {problem}")
        if problem.direction == "backward_filter":
            return _filter_kernel(problem, device)
        return _image_launch(problem, device)


def image_strip(
    geo: Geometry, rows: int, columns: int, last: bool, dtype: DType, device: Device, up: int = 1
) -> Strip:
    """The strip for an output of rows x columns; `last`: channels are innermost; `up`: the columns
    of the output a column of the input."""
    if last:
        ba, bb, qc, warps = run_of(RUNS, geo, dtype, columns)
        qc = qc if up == 1 else 1
        strips = -(-geo.images * -(-columns // qc) // ba) * -(-geo.groups // bb)
    else:
        qc, warps = 1, 2
        bb = min(64, power_of_two(columns))
        ba = max(1, min(256 // bb, power_of_two(geo.images * geo.groups)))
        strips = -(-geo.images * geo.groups // ba) * -(-columns // bb)
    wanted = PROGRAMS_WANTED * chips.chip_of(device.architecture).multiprocessors
    cuts = max(1, min(wanted // max(strips, 1), -(-rows // 4)))
    return Strip(ba, bb, qc, max(1, min(MAX_ROWS, -(-rows // cuts))), warps)


def filter_strip(problem: ConvolutionProblem, geo: Geometry, device: Device) -> tuple[Strip, int]:
    """The strip of backward_filter and the number of programs that share a channel's pixels."""
    columns, rows = geo.axes[2].out, geo.axes[1].out
    patch = 0
    elements = max(1, FILTER_REGISTERS // geo.taps) * 32 * FILTER_WARPS
    if problem.dtype is DType.float64:
        elements //= 2
    elements = min(FILTER_TILE, 1 << elements.bit_length() - 1)
    if geo.y.channel == 1:
        ba, bb, qc, warps = run_of(FILTER_RUNS, geo, problem.dtype, columns)
        programs = -(-geo.groups // bb)
        pieces = -(-geo.images * -(-columns // qc) // ba)
        walk, resident = min(FILTER_ROWS, rows), FILTER_RESIDENT
        vertical = geo.axes[1]
        if qc > 1 and geo.taps <= PATCH_TAPS and vertical.dil == 1 and vertical.u <= 2:
            patch = next((n for n in PATCH_ROWS if rows % n == 0), PATCH_ROWS[-1])
            walk = patch
    else:
        qc, warps = 1, FILTER_WARPS
        walk, resident = min(MAX_ROWS, rows), FILTER_PROGRAMS
        bb = min(64, power_of_two(columns), elements)
        ba = max(1, min(elements // bb, power_of_two(geo.images)))
        programs = geo.groups
        pieces = -(-geo.images // ba) * -(-columns // bb)
    pieces *= -(-rows // walk)
    wanted = resident * chips.chip_of(device.architecture).multiprocessors
    return Strip(ba, bb, qc, walk, warps, patch), max(1, min(pieces, wanted // programs))


def _sizes(geo: Geometry, forward: bool) -> tuple[Numbers, Any, Any]:
    """Sizes and the index map; forward False: of the mirrored convolution over dy."""
    _, vertical, horizontal = geo.axes
    numbers = Numbers({}, {})
    numbers.add({"N": geo.images, "C": geo.groups})
    for axis, letters, low in ((vertical, "HP", "h"), (horizontal, "WQ", "w")):
        read, written, pad, u = axis.size, axis.out, axis.pad, axis.u
        if not forward:
            read, written, u = written, read, 1
            pad = (axis.taps - 1) * axis.dil - pad
        numbers.add({letters[0]: read, letters[1]: written})
        numbers.add({f"pad_{low}": pad, f"u_{low}": u, f"dil_{low}": axis.dil})
    return numbers, vertical, horizontal


def _strides(numbers: Numbers, prefix: str, t: Strides, channels: int, unit: int) -> None:
    """Strides of an image; where channels are innermost and words fit, the compiler is told."""
    words = t.channel == 1 and all_divisible((t.batch, *t.space[1:], channels), unit)
    _, h, w = t.space
    values = {prefix + "n": t.batch, prefix + "h": h, prefix + "w": w}
    numbers.add(values, divisor=unit if words else 1)
    numbers.add({prefix + "c": t.channel})
    if t.channel == 1:
        numbers.fix({prefix + "c": 1})
    elif w == 1:
        numbers.fix({prefix + "w": 1})
    if words:
        numbers.add({"C": channels}, divisor=unit)


def _image_launch(problem: ConvolutionProblem, device: Device) -> Kernel:
    geo, dtype = geometry_of(problem), problem.x.dtype
    forward = problem.direction == "forward"
    numbers, vertical, horizontal = _sizes(geo, forward)
    src, out = (geo.x, geo.y) if forward else (geo.y, geo.x)
    unit = word(dtype.itemsize)
    _strides(numbers, "x_", src, geo.groups, unit)
    _strides(numbers, "y_", out, geo.groups, unit)
    _, w_h, w_w = geo.w.space
    first = geo.w.first
    if not forward:
        first += (vertical.taps - 1) * w_h + (horizontal.taps - 1) * w_w
        w_h, w_w = -w_h, -w_w
    numbers.add({"w_k": geo.w.batch, "w_h": w_h, "w_w": w_w})
    rows, columns = (vertical.out, horizontal.out) if forward else (vertical.size, horizontal.size)
    last = out.channel == 1
    up = (1, 1) if forward else (vertical.u, horizontal.u)
    cut = image_strip(geo, rows, columns, last, dtype, device, up[1])
    numbers.add({"ROWS": cut.rows})
    index = len(problem.operands) - 1
    act, has_bias = problem.epilogue.activation, problem.epilogue.bias
    arguments: dict[str, launch.Argument] = {
        "x_ptr": launch.Pointer(0 if forward else 1, dtype),
        "w_ptr": launch.Pointer(1 if forward else 0, dtype, first * dtype.itemsize),
        "y_ptr": launch.Pointer(index, dtype),
        "bias_ptr": launch.Pointer(2 if has_bias else index, dtype),
        **launch.factors(dtype),
        **launch.activation_arguments(act, dtype),
        **numbers.scalars,
    }
    constants = {
        **numbers.constants, "R": vertical.taps, "S": horizontal.taps, "UP_H": up[0],
        "UP_W": up[1], "CHANNELS_LAST": last, "BIAS": has_bias, "BA": cut.ba, "BB": cut.bb,
        "ROLL": vertical.dil == 1 and vertical.u == 1, "QC": cut.qc,
        "STEP": max(1, horizontal.u // horizontal.dil) if forward else 1,
        "ACTIVATION": act.kind if act is not None else "none", "ACC": launch.accumulator(dtype),
    }  # fmt: skip
    if last:
        strips = -(-geo.images * -(-columns // cut.qc) // cut.ba) * -(-geo.groups // cut.bb)
    else:
        strips = -(-geo.images * geo.groups // cut.ba) * -(-columns // cut.bb)
    return launch.prepare(
        device, kernels.convolution_image_depthwise_kernel, (strips * -(-rows // cut.rows),),
        arguments, constants, num_warps=cut.warps,
    )  # fmt: skip


def _filter_kernel(problem: ConvolutionProblem, device: Device) -> Kernel:
    geo, dtype = geometry_of(problem), problem.x.dtype
    numbers, vertical, horizontal = _sizes(geo, forward=True)
    unit = word(dtype.itemsize)
    _strides(numbers, "x_", geo.x, geo.groups, unit)
    _strides(numbers, "y_", geo.y, geo.groups, unit)
    cut, split = filter_strip(problem, geo, device)
    numbers.add({"ROWS": cut.rows, "SPLIT": split})
    last = geo.y.channel == 1
    constants = {
        **numbers.constants, "R": vertical.taps, "S": horizontal.taps, "CHANNELS_LAST": last,
        "ROLL": vertical.dil == 1 and vertical.u == 1 and geo.taps <= ROLL_TAPS,
        "ACC": launch.accumulator(dtype), "BA": cut.ba, "BB": cut.bb, "QC": cut.qc,
        "STEP": max(1, horizontal.u // horizontal.dil),
        "PATCH": cut.patch, "PATCH_U": vertical.u if cut.patch else 0,
        "RAGGED": horizontal.out % cut.qc != 0 or cut.patch > 0 and vertical.out % cut.patch != 0,
    }  # fmt: skip
    arguments: dict[str, launch.Argument] = {
        "x_ptr": launch.Pointer(0, dtype),
        "dy_ptr": launch.Pointer(1, dtype),
        "part_ptr": launch.Scratch(dtype.accumulator),
        **numbers.scalars,
    }
    programs = -(-geo.groups // cut.bb) if last else geo.groups
    main = launch.prepare(
        device, kernels.convolution_filter_depthwise_kernel, (programs, split),
        arguments, constants, num_warps=cut.warps,
    )  # fmt: skip
    what = f"{getattr(main, 'description', '')}; {split} parts added in order"
    return launch.Chain((main, sum_launch(problem, geo, split, device)), what)
