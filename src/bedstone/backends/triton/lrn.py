"""Local response normalisation on the GPU, across channels and within them, both directions.

    y = x * base^-beta                       base = k + alpha / count * (window sum of x^2)
    dx = dy * base^-beta - 2 * alpha / count * beta * x * (window sum of dy * x * base^(-beta - 1))

Every element sums its own window, taps that other elements of the tile read too and that the
first-level cache holds; a sum that is carried along and lowered by what leaves would lose what
cancels. Backward first writes the terms of the outer sum to workspace. An element's index along a
window axis is its offset in a tensor with stride 1 there and 0 elsewhere, one more operand of the
walk. Source: Krizhevsky et al., NIPS 2012, section 3.3.
"""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl

from bedstone.backends.triton import chips, launch, pointwise, walk
from bedstone.backends.triton.walk import tile_mask, tile_offsets
from bedstone.plan.algorithm import Algorithm, Kernel
from bedstone.plan.device import Device
from bedstone.spec.normalization import LrnProblem
from bedstone.spec.problem import Problem
from bedstone.spec.tensor import TensorDesc

AXES = 3  # over which a window may lie
WARPS = 8  # 16 elements a thread of walk.TILE, with a window's taps in flight
UNROLLED_TAPS = 32  # windows up to here are straight code


@triton.jit
def tap_of(tap, spot, extent, steps, SIZE: tl.constexpr, LOW: tl.constexpr, AXES: tl.constexpr):
    """(offset from the centre, whether it is inside) of a tap of the windows around `spot`."""
    offset = 0
    ok = spot[0] == spot[0]
    for i in tl.static_range(AXES):
        away = tap % SIZE - LOW
        tap = tap // SIZE
        at = spot[i] + away
        ok = ok & (at >= 0) & (at < extent[i])
        offset += away * steps[i]
    return offset, ok


@triton.jit
def term(ptrs, root, mask, SQUARE: tl.constexpr, ACC: tl.constexpr):
    """What a tap adds: (root * x)^2, or the element itself."""
    value = tl.load(ptrs, mask=mask, other=0.0).to(ACC)
    if SQUARE:
        value = value * root  # before the square, which may overflow
        value = value * value
    return value


@triton.jit
def window_sum(
    ptrs, mask, root, spot, extent, steps, SQUARE: tl.constexpr,
    SIZE: tl.constexpr, LOW: tl.constexpr, TAPS: tl.constexpr, AXES: tl.constexpr,
    UNROLL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The sum over the windows around the elements at ptrs, zeros outside."""
    total = tl.zeros(ptrs.shape, ACC)
    if UNROLL:
        for tap in tl.static_range(TAPS):
            offset, ok = tap_of(tap, spot, extent, steps, SIZE, LOW, AXES)
            total += term(ptrs + offset, root, mask & ok, SQUARE, ACC)
    else:
        for tap in range(TAPS):
            offset, ok = tap_of(tap, spot, extent, steps, SIZE, LOW, AXES)
            total += term(ptrs + offset, root, mask & ok, SQUARE, ACC)
    return total


@triton.jit
def negative_power(base, power, POWER: tl.constexpr):
    """base^-power; by square roots for the usual exponent."""
    if POWER == 0.75:
        root = tl.sqrt_rn(base) if base.dtype == tl.float32 else tl.sqrt(base)
        other = tl.sqrt_rn(root) if base.dtype == tl.float32 else tl.sqrt(root)
        return 1 / (root * other)
    elif POWER == 0:
        return base * 0 + 1
    else:
        positive = tl.where(base > 0, base, 1.0)
        found = pointwise.exp(-power * pointwise.log(positive))
        at_zero = float("inf") if POWER > 0 else 0.0
        return tl.where(base > 0, found, tl.where(base == 0, at_zero, float("nan")))


@triton.jit
def spots(
    dims, A, B, first, second, third, BA: tl.constexpr, BB: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The indices along the window's axes of a tile's elements."""
    return (
        tile_offsets(dims, A, B, first, BA, BB, WIDE),
        tile_offsets(dims, A, B, second, BA, BB, WIDE),
        tile_offsets(dims, A, B, third, BA, BB, WIDE),
    )


@triton.jit
def lrn_forward_kernel(
    x_ptr, y_ptr, alpha, beta, k, root, power, dims, A, B, first, second, third, extent, x_steps,
    x_strides, y_strides,
    POWER: tl.constexpr, SIGN: tl.constexpr, SIZE: tl.constexpr, LOW: tl.constexpr,
    TAPS: tl.constexpr, AXES: tl.constexpr, UNROLL: tl.constexpr,
    ACC: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """y = alpha * x * base^-power + beta * y on the tile [BA, BB] of a walk, base = k + SIGN * the
    window sum of (root * x)^2. Accumulates in ACC; y is read if beta is not 0."""
    mask = tile_mask(A, B, BA, BB, WIDE)
    spot = spots(dims, A, B, first, second, third, BA, BB, WIDE)
    x_ptrs = x_ptr + tile_offsets(dims, A, B, x_strides, BA, BB, WIDE)
    y_ptrs = y_ptr + tile_offsets(dims, A, B, y_strides, BA, BB, WIDE)
    base = k + SIGN * window_sum(
        x_ptrs, mask, root, spot, extent, x_steps, True, SIZE, LOW, TAPS, AXES, UNROLL, ACC
    )
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(ACC)
    out = alpha * (x * negative_power(base, power, POWER))
    if beta != 0:
        out += beta * tl.load(y_ptrs, mask=mask, other=0.0).to(ACC)
    tl.store(y_ptrs, out.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def lrn_backward_kernel(
    x_ptr, dy_ptr, inner_ptr, dx_ptr, alpha, beta, k, root, power, through,
    dims, A, B, first, second, third, extent, x_steps, inner_steps,
    x_strides, dy_strides, inner_strides, dx_strides,
    STAGE: tl.constexpr, POWER: tl.constexpr, SIGN: tl.constexpr, SIZE: tl.constexpr,
    LOW: tl.constexpr, TAPS: tl.constexpr, AXES: tl.constexpr, UNROLL: tl.constexpr,
    ACC: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """On the tile [BA, BB] of a walk, with p = base^-power:

    STAGE "inner"  inner = dy * p * x / base
    STAGE "apply"  dx = alpha * (dy * p - through * x * the sum of inner over the elements whose
                   windows hold this one) + beta * dx
    """
    mask = tile_mask(A, B, BA, BB, WIDE)
    spot = spots(dims, A, B, first, second, third, BA, BB, WIDE)
    x_ptrs = x_ptr + tile_offsets(dims, A, B, x_strides, BA, BB, WIDE)
    inner_ptrs = inner_ptr + tile_offsets(dims, A, B, inner_strides, BA, BB, WIDE)
    base = k + SIGN * window_sum(
        x_ptrs, mask, root, spot, extent, x_steps, True, SIZE, LOW, TAPS, AXES, UNROLL, ACC
    )
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(ACC)
    dy_ptrs = dy_ptr + tile_offsets(dims, A, B, dy_strides, BA, BB, WIDE)
    slope = tl.load(dy_ptrs, mask=mask, other=0.0).to(ACC) * negative_power(base, power, POWER)
    if STAGE == "inner":
        # In this order no factor leaves the type's range where the product is in it.
        tl.store(inner_ptrs, slope * (x / base), mask=mask)
    else:
        total = window_sum(
            inner_ptrs, mask, root, spot, extent, inner_steps, False,
            SIZE, SIZE - 1 - LOW, TAPS, AXES, UNROLL, ACC,
        )  # fmt: skip
        out = alpha * (slope - (total * x) * through)
        dx_ptrs = dx_ptr + tile_offsets(dims, A, B, dx_strides, BA, BB, WIDE)
        if beta != 0:
            out += beta * tl.load(dx_ptrs, mask=mask, other=0.0).to(ACC)
        tl.store(dx_ptrs, out.to(dx_ptr.dtype.element_ty), mask=mask)


class Window(Algorithm):
    """LRN in both regions and directions, any strides. Backward has workspace of the size of x."""

    name = "triton:window"

    def supports(self, problem: Problem, device: Device) -> str | None:
        if not isinstance(problem, LrnProblem):
            return "computes local response normalisation only"
        axes = len(problem.lrn.axes(problem.x.rank))
        if axes > AXES:
            return f"a window over {axes} axes; at most {AXES}"
        return walk.too_many(_walk(problem))

    def workspace(self, problem: Problem, device: Device) -> int:
        if not isinstance(problem, LrnProblem) or problem.direction == "lrn_forward":
            return 0
        return problem.x.size * problem.x.dtype.accumulator.itemsize

    def estimate(self, problem: Problem, device: Device) -> float:
        moved = problem.bytes
        if problem.direction == "lrn_backward":  # x and dy twice, and the terms between
            moved = 2 * problem.bytes + self.workspace(problem, device)
        launches = 1 if problem.direction == "lrn_forward" else 2
        return chips.move_seconds(moved, device.architecture, launches)

    def build(self, problem: Problem, device: Device) -> Kernel:
        if not isinstance(problem, LrnProblem):
            raise TypeError(f"not a local response normalisation: {problem}")
        if problem.direction == "lrn_forward":
            return _launch(problem, device, "")
        return launch.Chain([_launch(problem, device, s) for s in ("inner", "apply")], "2 kernels")


def _terms(problem: LrnProblem) -> TensorDesc:
    """What lies in workspace."""
    return TensorDesc.packed(problem.x.dims, problem.x.dtype.accumulator)


def _tensors(problem: LrnProblem) -> dict[str, TensorDesc]:
    """The operands by name, the output last."""
    found = {o.name: o.desc for o in problem.operands}
    if problem.direction == "lrn_forward":
        return found
    return {"x": found["x"], "dy": found["dy"], "inner": _terms(problem), "dx": found["dx"]}


def _walk(problem: LrnProblem) -> walk.Walk:
    """Over three tensors whose offsets are indices along the window's axes, and the operands."""
    x, window = problem.x, problem.lrn.axes(problem.x.rank)
    strides = [tuple(int(a == axis) for a in range(x.rank)) for axis in window]
    strides += [(0,) * x.rank] * (AXES - len(strides))
    indices = [TensorDesc(x.dims, each, x.dtype) for each in strides]
    return walk.walk([*indices, *_tensors(problem).values()])


def _launch(problem: LrnProblem, device: Device, stage: str) -> Kernel:
    lrn, dtype, over = problem.lrn, problem.x.dtype, _walk(problem)
    tensors, window = _tensors(problem), problem.lrn.axes(problem.x.rank)
    kind = "i64" if over.wide else "i32"
    number = "fp64" if dtype.accumulator.value == "float64" else "fp32"
    share = lrn.alpha / problem.reduction_length
    count = lrn.size ** len(window)
    arguments: dict[str, Any] = {
        **launch.factors(dtype),
        "k": launch.Scalar(lrn.k, number),
        "root": launch.Scalar(math.sqrt(abs(share)), number),
        "power": launch.Scalar(lrn.beta, number),
        **over.arguments("first", "second", "third", *(f"{name}_strides" for name in tensors)),
        "extent": launch.Integers(_padded(problem.x.dims, window), kind),
        "x_steps": launch.Integers(_padded(tensors["x"].strides, window), kind),
    }
    names = [operand.name for operand in problem.operands]
    for name, desc in tensors.items():
        arguments[f"{name}_ptr"] = (
            launch.Pointer(names.index(name), desc.dtype)
            if name in names
            else launch.Scratch(desc.dtype)
        )
    if stage:
        arguments["through"] = launch.Scalar(2.0 * share * lrn.beta, number)
        arguments["inner_steps"] = launch.Integers(_padded(tensors["inner"].strides, window), kind)
    constants: dict[str, Any] = {
        **over.constants(),
        "POWER": lrn.beta, "SIGN": math.copysign(1.0, lrn.alpha), "SIZE": lrn.size,
        "LOW": (lrn.size - 1) // 2, "TAPS": count, "AXES": len(window),
        "UNROLL": count <= UNROLLED_TAPS, "ACC": launch.accumulator(dtype),
    }  # fmt: skip
    if stage:
        constants["STAGE"] = stage
    kernel = lrn_backward_kernel if stage else lrn_forward_kernel
    return launch.prepare(device, kernel, (over.programs,), arguments, constants, num_warps=WARPS)


def _padded(values: tuple[int, ...], window: tuple[int, ...]) -> tuple[int, ...]:
    """A value for each axis of the window, and ones for the axes that it has not."""
    return (*(values[axis] for axis in window), *(1,) * (AXES - len(window)))
