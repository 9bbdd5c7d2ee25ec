"""triton:implicit_gemm, the general convolution: every legal problem, no workspace.

The host side of gemm_kernels: which tile, which constants, which arguments. The variant
`triton:implicit_gemm_split` cuts the reduction over programs when the output alone cannot fill the
chip; parts lie in workspace and are added in a fixed order.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from bedstone.backends.triton import chips, launch
from bedstone.backends.triton.convolution import gemm_kernels as kernels
from bedstone.backends.triton.convolution import tiles
from bedstone.backends.triton.convolution.geometry import (
    Axis,
    Geometry,
    Numbers,
    Strides,
    all_divisible,
    geometry_of,
    per_axis,
    word,
)
from bedstone.plan.algorithm import Algorithm, Kernel
from bedstone.plan.device import Device
from bedstone.spec.convolution import ConvolutionProblem
from bedstone.spec.dtypes import DType
from bedstone.spec.problem import Problem

MAX_PROGRAMS = 2**31 - 1
GROUP_M = 8  # rows of tiles walked together
# Fewer channels than this are reduced together with the taps, as one index.
FLAT_CHANNELS = 32
FLAT_BK = 32
MAX_SPLIT = 64  # parts of a reduction: the workspace is this many outputs at most ...
SMALL_PARTS = 4 << 20  # ... or this many bytes: a small filter's parts stay in the cache
MIN_SPLIT_STEPS = 8  # steps that a part must have to be worth its write and read
FILTER_RATE = 0.6  # of a tile's rate, which is measured forward, that backward_filter reaches
# The kernel that adds the parts: a program takes so many elements of all parts ...
SUM_BLOCKS = (64, 512)  # at least and at most
SUM_LOADS, SUM_SLOTS = 2048, 64  # ... and loads so many numbers, of so many parts, at once


def product_kind(problem: ConvolutionProblem, architecture: str) -> tuple[str, str]:
    """(kind of tile table, precision of tl.dot) for the dtype and the math mode.

    float32 is split: three tf32 products, or six of bfloat16 where an operand is not innermost in
    the reduced index, which tf32 matrix units cannot read; both keep float32's accuracy, and Triton
    zeroes the corrections that Inf and NaN would spoil. math="tf32" is likewise served better by
    three bfloat16 products there, whose error is smaller than tf32's.
    """
    if problem.x.dtype is DType.float64:
        return "double", "ieee"
    if problem.x.dtype is not DType.float32:
        return "half", "ieee"
    if problem.math in ("bf16x3", "bf16x6"):
        return problem.math, problem.math
    if problem.math == "bf16":
        return "tf32", "bf16"
    amd = architecture.startswith("gfx")
    turned = problem.direction != "forward" and not amd and not gathered(problem)
    if problem.math == "tf32":
        return ("bf16x3", "bf16x3") if turned else ("tf32", "tf32")
    if amd:
        return "fma", "ieee"
    return ("bf16x6", "bf16x6") if turned else ("split", "tf32x3")


@dataclass(frozen=True)
class Shape:
    """The matrix product behind a problem: rows x columns x depth, `copies` of it; `taps` of the
    reduction (image directions) or of the columns (backward_filter) are not blocked by channels
    unless `flat`, and `taps_inner` makes them the fastest part of that index. `narrow`: one block
    of FLAT_BK channels holds all that are reduced."""

    rows: int
    columns: int
    depth: int
    copies: int
    flat: bool
    narrow: bool = False
    residues: int = 1
    taps_inner: bool = False
    filter_gradient: bool = False


def shape_of(direction: str, geo: Geometry) -> Shape:
    """The matrix product of a direction. Work masked by partial blocks is counted."""
    if direction == "backward_filter":
        flat = geo.channels < FLAT_CHANNELS and geo.taps > 1
        columns, copies = geo.channels * geo.taps, geo.groups
        if not flat:
            columns, copies = geo.channels, geo.groups * geo.taps
        return Shape(geo.filters, columns, geo.pixels, copies, flat, filter_gradient=True)
    if direction == "forward":
        rows, columns, reduced, residues = geo.pixels, geo.filters, geo.channels, 1
    else:
        columns, reduced = geo.channels, geo.filters
        residues = math.prod(a.u for a in geo.axes)
        rows = geo.images * math.prod(-(-a.size // a.u) for a in geo.axes)
    # Filters whose taps are contiguous (NCHW) are read along them.
    taps_inner = geo.taps > 1 and abs(geo.w.space[2]) < min(abs(geo.w.channel), abs(geo.w.batch))
    flat = geo.taps > 1 and (reduced < FLAT_CHANNELS or taps_inner)
    padded = reduced if flat else -(-reduced // FLAT_BK) * FLAT_BK
    depth = -(-geo.taps // residues) * padded
    narrow = reduced <= FLAT_BK
    return Shape(rows, columns, depth, geo.groups * residues, flat, narrow, residues, taps_inner)


def split_of(shape: Shape, tile: tiles.Tile, architecture: str) -> int:
    """Parts of the reduction that fill the chip about twice; of a small output, whose parts cost
    little, as many as are resident at a time."""
    chip = chips.chip_of(architecture).multiprocessors
    programs = max(1, -(-shape.rows // tile.bm) * -(-shape.columns // tile.bn) * shape.copies)
    steps = -(-shape.depth // tile.bk)
    nbytes = 4 * shape.rows * shape.columns * shape.copies
    small = min(SMALL_PARTS // max(nbytes, 1), chip * tiles.resident(tile) // programs)
    wanted = max(small, min(2 * chip // programs, MAX_SPLIT))
    return max(1, min(wanted, steps // MIN_SPLIT_STEPS))


class ImplicitGemm(Algorithm):
    """Implicit GEMM in one pass, without workspace."""

    name = "triton:implicit_gemm"
    splits = False

    def supports(self, problem: Problem, device: Device) -> str | None:
        if not isinstance(problem, ConvolutionProblem):
            return "it computes convolutions and their gradients by data and filter"
        if problem.epilogue.shift:
            return "adds nothing after the activation"
        kind, _ = product_kind(problem, device.architecture)
        if not tiles.rows(device.architecture, kind, False):
            return f"Triton has no {problem.x.dtype} matrix products for {device.architecture}"
        choice = choose(problem, device.architecture, self.splits)
        if choice.programs > MAX_PROGRAMS:
            return f"needs {choice.programs} programs; a grid has at most {MAX_PROGRAMS}"
        if self.splits and choice.split == 1:
            return "its output fills the chip without splitting the reduction"
        return None

    def workspace(self, problem: Problem, device: Device) -> int:
        choice = choose(problem, device.architecture, self.splits)
        if choice.split == 1:
            return 0
        out = problem.outputs[0].desc
        return choice.split * out.size * out.dtype.accumulator.itemsize

    def estimate(self, problem: Problem, device: Device) -> float:
        choice = choose(problem, device.architecture, self.splits)
        moving = chips.move_seconds(problem.bytes, device.architecture, 1)
        seconds = max(choice.seconds + chips.LAUNCH_SECONDS, moving)
        if choice.split > 1:  # parts are written, then read, with nothing beside it
            parts = 2 * self.workspace(problem, device)
            seconds += chips.move_seconds(parts, device.architecture, 1)
        return seconds

    def build(self, problem: Problem, device: Device) -> Kernel:
        if not isinstance(problem, ConvolutionProblem):
            raise TypeError(f"not a convolution: {problem}")
        return build(problem, choose(problem, device.architecture, self.splits), device)


class ImplicitGemmSplit(ImplicitGemm):
    """Implicit GEMM with the reduction cut into parts that lie in workspace."""

    name = "triton:implicit_gemm_split"
    splits = True


@dataclass(frozen=True)
class Choice:
    """What `choose` decides."""

    geo: Geometry
    shape: Shape
    tile: tiles.Tile
    split: int
    precision: str
    architecture: str

    @property
    def programs(self) -> int:
        """Programs along x."""
        s, t = self.shape, self.tile
        return -(-s.rows // t.bm) * -(-s.columns // t.bn) * s.copies

    @property
    def seconds(self) -> float:
        """Modelled time of the products."""
        s = self.shape
        depth, copies = -(-s.depth // self.split), s.copies * self.split
        rate = FILTER_RATE if s.filter_gradient else 1.0
        return (
            1 / rate * tiles.seconds(self.tile, self.architecture, s.rows, s.columns, depth, copies)
        )

    def constants(self, dtype: DType, residues: bool) -> dict[str, Any]:
        """The constants that both matrix kernels take."""
        tile = self.tile
        short = residues and (self.shape.flat or self.shape.narrow)
        bk = min(tile.bk, FLAT_BK) if short else tile.bk
        return {
            "FLAT": self.shape.flat,
            "PRECISION": self.precision,
            "PARTIAL": self.split > 1,
            "BM": tile.bm, "BN": tile.bn, "BK": bk,
            "ACC": launch.accumulator(dtype),
        }  # fmt: skip


def build(problem: ConvolutionProblem, choice: Choice, device: Device) -> Kernel:
    """The kernel, or the two, that a choice stands for."""
    if problem.direction == "backward_filter":
        main = _filter_launch(problem, choice, device)
    else:
        main = _image_launch(problem, choice, device)
    if choice.split == 1:
        return main
    total = sum_launch(problem, choice.geo, choice.split, device)
    what = f"{getattr(main, 'description', '')}; {choice.split} parts added in order"
    return launch.Chain((main, total), what)


def gathered(problem: ConvolutionProblem) -> bool:
    """True if an image that the product reads cannot be read in 16-byte words. In float32 the
    channels that it makes count too: where they are few, six bfloat16 products (60 ms in the data
    gradient of a first layer on an H200) lose more than wide words gain (38 ms)."""
    geo, dtype = geometry_of(problem), problem.x.dtype
    unit = word(dtype.itemsize)
    x, y = (geo.x, geo.channels), (geo.y, geo.filters)
    read = {"forward": (x,), "backward_data": (y,), "backward_filter": (x, y)}
    if dtype is DType.float32 and not all_divisible((geo.channels, geo.filters), unit):
        return True
    return not all(
        image.channel == 1 and all_divisible((image.batch, *image.space, channels), unit)
        for image, channels in read[problem.direction]
    )


@functools.lru_cache(maxsize=1024)
def choose(problem: ConvolutionProblem, architecture: str, splits: bool) -> Choice:
    """The tile, and the split if `splits`, of least modelled time."""
    kind, precision = product_kind(problem, architecture)
    geo = geometry_of(problem)
    shape = shape_of(problem.direction, geo)
    choices = [
        Choice(
            geo,
            shape,
            tile,
            split_of(shape, tile, architecture) if splits else 1,
            precision,
            architecture,
        )
        for tile in tiles.rows(architecture, kind, gathered(problem))
    ]
    return min(choices, key=lambda choice: choice.seconds)


def _image_launch(problem: ConvolutionProblem, choice: Choice, device: Device) -> Kernel:
    """Forward or backward_data."""
    geo, dtype = choice.geo, problem.x.dtype
    forward = problem.direction == "forward"
    reduced, produced = (geo.channels, geo.filters) if forward else (geo.filters, geo.channels)
    src, out = (geo.x, geo.y) if forward else (geo.y, geo.x)
    numbers = _index_map(geo, forward)
    numbers.add({"N": geo.images, "GROUPS": geo.groups, "SPLIT": choice.split})
    unit = word(dtype.itemsize)
    src_t = _image_operand(numbers, "s_", src, "RC", reduced, unit)
    out_t = _image_operand(numbers, "o_", out, "OC", produced, unit)
    w_t = _filter_operand(numbers, geo, forward, unit, choice.shape.taps_inner)
    if geo.flat_depth:
        numbers.fix(_no_depth(("OD", "ID", "TD", "u_d", "dil_d", "jump_d", "mul_d"), 1))
        numbers.fix(_no_depth(("off_d", "step_d", "s_d", "w_d", "o_d"), 0))
    strided = not forward and choice.shape.residues > 1
    if choice.shape.flat and not strided:
        numbers.fix({"TD": geo.axes[0].taps, "TH": geo.axes[1].taps, "TW": geo.axes[2].taps})
    act = problem.epilogue.activation
    has_bias = problem.epilogue.bias
    last = len(problem.operands) - 1
    arguments: dict[str, launch.Argument] = {
        "src_ptr": launch.Pointer(0 if forward else 1, dtype),
        "w_ptr": launch.Pointer(1 if forward else 0, dtype, geo.w.first * dtype.itemsize),
        "out_ptr": launch.Pointer(last, dtype),
        "bias_ptr": launch.Pointer(2 if has_bias else last, dtype),
        "part_ptr": _part(problem, choice, last),
        **launch.factors(dtype),
        **launch.activation_arguments(act, dtype),
        **numbers.scalars,
    }
    constants = {
        **choice.constants(dtype, residues=True),
        **numbers.constants,
        "STRIDED": strided,
        "TAPS_INNER": choice.shape.taps_inner,
        "W_PACKED": forward and choice.shape.taps_inner and _packed_filter(geo),
        "WIDE": math.prod(a.out if forward else a.size for a in geo.axes) * geo.images >= 2**31,
        "BIAS": has_bias and choice.split == 1,
        "ACTIVATION": act.kind if act is not None and choice.split == 1 else "none",
        "SRC_T": src_t, "W_T": w_t, "OUT_T": out_t, "GROUP_M": GROUP_M,
    }  # fmt: skip
    return launch.prepare(
        device, kernels.convolution_image_implicit_gemm_kernel, (choice.programs, choice.split),
        arguments, constants, num_warps=choice.tile.warps, num_stages=choice.tile.stages,
    )  # fmt: skip


def _filter_launch(problem: ConvolutionProblem, choice: Choice, device: Device) -> Kernel:
    """backward_filter."""
    geo, dtype = choice.geo, problem.x.dtype
    numbers = _index_map(geo, forward=True)
    numbers.add({"N": geo.images, "GROUPS": geo.groups, "SPLIT": choice.split})
    unit = word(dtype.itemsize)
    x_t = _image_operand(numbers, "x_", geo.x, "C", geo.channels, unit)
    y_t = _image_operand(numbers, "y_", geo.y, "K", geo.filters, unit)
    numbers.add(
        {"w_g": geo.filters * geo.w.batch, "w_k": geo.w.batch, "w_c": geo.w.channel}
        | per_axis("w_", geo.w.space),
        geo.w.wide,
    )
    if geo.w.channel == 1:
        numbers.fix({"w_c": 1})
    for name in ("u_", "dil_", "jump_"):
        for axis in "dhw":
            del numbers.scalars[name + axis]
    if geo.flat_depth:
        numbers.fix(_no_depth(("OD", "ID", "TD", "mul_d"), 1))
        numbers.fix(_no_depth(("off_d", "step_d", "x_d", "y_d", "w_d"), 0))
    arguments: dict[str, launch.Argument] = {
        "x_ptr": launch.Pointer(0, dtype),
        "dy_ptr": launch.Pointer(1, dtype),
        "dw_ptr": launch.Pointer(2, dtype, geo.w.first * dtype.itemsize),
        "part_ptr": _part(problem, choice, 2),
        **launch.factors(dtype),
        **numbers.scalars,
    }
    constants = {
        **choice.constants(dtype, residues=False),
        **numbers.constants,
        "WIDE": geo.pixels >= 2**31,
        "X_T": x_t, "Y_T": y_t, "OUT_T": abs(geo.w.batch) < abs(geo.w.channel),
    }  # fmt: skip
    return launch.prepare(
        device, kernels.convolution_filter_implicit_gemm_kernel, (choice.programs, choice.split),
        arguments, constants, num_warps=choice.tile.warps, num_stages=choice.tile.stages,
    )  # fmt: skip


def sum_shape(split: int) -> dict[str, int]:
    """How many elements, of how many parts at once, a program of the sum adds."""
    slots = min(SUM_SLOTS, 1 << (split - 1).bit_length())
    return {"BLOCK": max(SUM_BLOCKS[0], min(SUM_BLOCKS[1], SUM_LOADS // slots)), "SLOTS": slots}


def sum_launch(problem: ConvolutionProblem, geo: Geometry, split: int, device: Device) -> Kernel:
    """Add the parts into the output."""
    out, dtype = problem.outputs[0].desc, problem.x.dtype
    reverse = problem.direction == "backward_filter" and problem.conv.mode == "convolution"
    strides = (
        geo.w
        if problem.direction == "backward_filter"
        else (geo.y if problem.direction == "forward" else geo.x)
    )
    d, h, w = (1,) * (5 - out.rank) + out.dims[2:]
    numbers = Numbers({}, {})
    numbers.add({"SPLIT": split, "D": d, "H": h, "W": w, "C": out.dims[1]})
    numbers.add({"TOTAL": out.size}, wide=True)
    numbers.add(
        {"o_n": strides.batch, "o_c": strides.channel} | per_axis("o_", strides.space), wide=True
    )
    act, last = problem.epilogue.activation, len(problem.operands) - 1
    shape = sum_shape(split)
    arguments: dict[str, launch.Argument] = {
        "part_ptr": launch.Scratch(dtype.accumulator),
        "out_ptr": launch.Pointer(last, dtype, strides.first * dtype.itemsize if reverse else 0),
        "bias_ptr": launch.Pointer(2 if problem.epilogue.bias else last, dtype),
        **launch.factors(dtype),
        **launch.activation_arguments(act, dtype),
        **numbers.scalars,
    }
    constants = {
        "BIAS": problem.epilogue.bias,
        "ACTIVATION": act.kind if act is not None else "none",
        **shape,
    }
    return launch.prepare(
        device, kernels.convolution_sum_parts_kernel, (-(-out.size // shape["BLOCK"]),),
        arguments, constants, num_warps=4,
    )  # fmt: skip


def _part(problem: ConvolutionProblem, choice: Choice, unused: int) -> launch.Argument:
    """Where parts go; some operand stands in where there are none."""
    if choice.split > 1:
        return launch.Scratch(problem.x.dtype.accumulator)
    return launch.Pointer(unused, problem.x.dtype)


def _no_depth(names: tuple[str, ...], value: int) -> dict[str, int]:
    return dict.fromkeys(names, value)


def _index_map(geo: Geometry, forward: bool) -> Numbers:
    """Sizes and the affine map from an output pixel and a tap to the pixel that is read."""

    def each(value: Any) -> tuple[int, int, int]:
        d, h, w = (value(axis) for axis in geo.axes)
        return d, h, w

    def divisor(axis: Axis) -> int:
        return math.gcd(axis.dil, axis.u)

    numbers = Numbers({}, {})
    target, source = (each(lambda a: a.out), each(lambda a: a.size))
    if not forward:
        target, source = source, target
    for letter, values in (("O", target), ("I", source), ("T", each(lambda a: a.taps))):
        numbers.add({letter + axis: v for axis, v in zip("DHW", values)})
    if forward:
        maps = {
            "mul_": each(lambda a: a.u), "off_": each(lambda a: -a.pad),
            "step_": each(lambda a: a.dil), "jump_": (1, 1, 1),
        }  # fmt: skip
    else:
        maps = {
            "mul_": (1, 1, 1), "off_": each(lambda a: a.pad),
            "step_": each(lambda a: -a.dil // divisor(a)),
            "jump_": each(lambda a: a.u // divisor(a)),
        }  # fmt: skip
    maps |= {"u_": each(lambda a: a.u), "dil_": each(lambda a: a.dil)}
    for prefix, values in maps.items():
        numbers.add(per_axis(prefix, values))
    return numbers


def _image_operand(
    numbers: Numbers, prefix: str, t: Strides, name: str, channels: int, unit: int
) -> bool:
    """Strides of an image and its channels a group. True if it is read with pixels innermost."""
    contiguous = t.channel == 1
    wide_words = contiguous and all_divisible((t.batch, *t.space, channels), unit)
    divisor = unit if wide_words else 1
    numbers.add({prefix + "n": t.batch} | per_axis(prefix, t.space), t.wide, divisor)
    numbers.add({prefix + "c": t.channel}, t.wide)
    if contiguous:
        numbers.fix({prefix + "c": 1})
    if name not in numbers.scalars or numbers.scalars[name].divisor == 1:
        numbers.add({name: channels}, divisor=divisor)
    return not contiguous and abs(t.space[2]) <= abs(t.channel)


def _packed_filter(geo: Geometry) -> bool:
    """True if a filter's channels and taps lie packed, taps innermost."""
    _, rows, columns = (axis.taps for axis in geo.axes)
    steps = (rows * columns, columns, 1)
    return geo.w.channel == geo.taps and all(
        axis.taps == 1 or stride == step for axis, stride, step in zip(geo.axes, geo.w.space, steps)
    )


def _filter_operand(
    numbers: Numbers, geo: Geometry, forward: bool, unit: int, taps_inner: bool
) -> bool:
    """Strides of w. True if it is read with the reduced channels innermost."""
    w = geo.w
    out, red = (w.batch, w.channel) if forward else (w.channel, w.batch)
    values = {"w_g": geo.filters * w.batch, "w_o": out, "w_c": red} | per_axis("w_", w.space)
    transposed = abs(red) < abs(out) or taps_inner
    inner, inner_channels = (
        ("w_c", geo.channels if forward else geo.filters)
        if transposed
        else ("w_o", geo.filters if forward else geo.channels)
    )
    others = tuple(v for k, v in values.items() if k != inner)
    wide_words = values[inner] == 1 and all_divisible((*others, inner_channels), unit)
    numbers.add(values, w.wide, unit if wide_words else 1)
    if taps_inner and w.batch % unit == 0:
        numbers.add({"w_o" if forward else "w_c": w.batch}, w.wide, unit)
    if values[inner] == 1:
        numbers.fix({inner: 1})
    return transposed
