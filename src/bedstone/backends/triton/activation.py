"""Activations on the GPU, forward and backward, in place where the caller's memory is so.

One kernel each, over the walk of `walk.py`: every element is read once and written once, whatever
the strides, so the speed is the memory's.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from bedstone.backends.triton import chips, launch, walk
from bedstone.backends.triton.pointwise import activate, derivative
from bedstone.backends.triton.walk import tile_mask, tile_offsets
from bedstone.plan.algorithm import Algorithm, Kernel
from bedstone.plan.device import Device
from bedstone.spec.activation import ActivationProblem
from bedstone.spec.problem import Problem


@triton.jit
def activation_forward_kernel(
    x_ptr, y_ptr, alpha, beta, act_a, act_b, dims, A, B, x_strides, y_strides,
    KIND: tl.constexpr, ACC: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """y = alpha * f(x) + beta * y on the tile [BA, BB] of a walk; y is read if beta is not 0."""
    mask = tile_mask(A, B, BA, BB, WIDE)
    x_offs = tile_offsets(dims, A, B, x_strides, BA, BB, WIDE)
    y_ptrs = y_ptr + tile_offsets(dims, A, B, y_strides, BA, BB, WIDE)
    x = tl.load(x_ptr + x_offs, mask=mask).to(ACC)
    rough: tl.constexpr = y_ptr.dtype.element_ty.primitive_bitwidth == 16
    out = alpha * activate(x, KIND, act_a, act_b, rough)
    if beta != 0:
        out += beta * tl.load(y_ptrs, mask=mask).to(ACC)
    tl.store(y_ptrs, out.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def activation_backward_kernel(
    saved_ptr, dy_ptr, dx_ptr, alpha, beta, act_a, act_b, dims, A, B,
    saved_strides, dy_strides, dx_strides,
    KIND: tl.constexpr, ACC: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """dx = alpha * dy * f'(x) + beta * dx, f' from the saved y (or x), on the tile [BA, BB]."""
    mask = tile_mask(A, B, BA, BB, WIDE)
    saved_offs = tile_offsets(dims, A, B, saved_strides, BA, BB, WIDE)
    dy_offs = tile_offsets(dims, A, B, dy_strides, BA, BB, WIDE)
    dx_ptrs = dx_ptr + tile_offsets(dims, A, B, dx_strides, BA, BB, WIDE)
    saved = tl.load(saved_ptr + saved_offs, mask=mask).to(ACC)
    dy = tl.load(dy_ptr + dy_offs, mask=mask).to(ACC)
    out = alpha * (dy * derivative(saved, KIND, act_a, act_b))
    if beta != 0:
        out += beta * tl.load(dx_ptrs, mask=mask).to(ACC)
    tl.store(dx_ptrs, out.to(dx_ptr.dtype.element_ty), mask=mask)


class Pointwise(Algorithm):
    """The activation kernels over tiles of any strides."""

    name = "triton:pointwise"

    def supports(self, problem: Problem, device: Device) -> str | None:
        if not isinstance(problem, ActivationProblem):
            return "it computes activations"
        return walk.too_many(walk.walk([o.desc for o in problem.operands]))

    def estimate(self, problem: Problem, device: Device) -> float:
        return chips.move_seconds(problem.bytes, device.architecture)

    def build(self, problem: Problem, device: Device) -> Kernel:
        if not isinstance(problem, ActivationProblem):
            raise TypeError(f"not an activation: {problem}")
        dtype = problem.x.dtype
        forward = problem.direction == "forward"
        names = ("x", "y") if forward else ("saved", "dy", "dx")
        over = walk.walk([o.desc for o in problem.operands])
        arguments: dict[str, Any] = {
            **{f"{name}_ptr": launch.Pointer(i, dtype) for i, name in enumerate(names)},
            **launch.factors(dtype),
            **launch.activation_arguments(problem.activation, dtype),
            **over.arguments(*(f"{name}_strides" for name in names)),
        }
        constants = {
            **over.constants(),
            "KIND": problem.activation.kind,
            "ACC": launch.accumulator(dtype),
        }
        kernel = activation_forward_kernel if forward else activation_backward_kernel
        return launch.prepare(
            device, kernel, (over.programs,), arguments, constants, num_warps=walk.WARPS
        )


ALGORITHMS = (Pointwise(),)
