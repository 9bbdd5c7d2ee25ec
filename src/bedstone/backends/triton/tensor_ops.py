"""Transform, add, set and scale on the GPU: one kernel over the walk of `walk.py`.

Between layouts with different innermost axes (NCHW and NHWC) the walk's tile is transposed on
chip, so both sides move whole cache lines.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton
import triton.language as tl

from bedstone.backends.triton import chips, launch, walk
from bedstone.backends.triton.walk import tile_mask, tile_offsets
from bedstone.plan.algorithm import Algorithm, Kernel
from bedstone.plan.device import Device
from bedstone.spec.dtypes import DType
from bedstone.spec.problem import Problem
from bedstone.spec.tensor import TensorDesc
from bedstone.spec.tensor_ops import TensorOpProblem


@triton.jit
def tensor_op_kernel(
    x_ptr, y_ptr, alpha, beta, dims, A, B, x_strides, y_strides,
    SOURCE: tl.constexpr, BLEND: tl.constexpr, ACC: tl.constexpr,
    BA: tl.constexpr, BB: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """y = alpha * s + beta * y on the tile [BA, BB] of a walk; s is x (SOURCE "x") or 1 ("one").

    The tile of x is loaded only where x varies: its strides are 0 along axes that it broadcasts.
    y is read if beta is not 0 (and never without BLEND).
    """
    mask = tile_mask(A, B, BA, BB, WIDE)
    y_ptrs = y_ptr + tile_offsets(dims, A, B, y_strides, BA, BB, WIDE)
    out = tl.zeros((BA, BB), ACC) + alpha
    if SOURCE == "x":
        x_offs = tile_offsets(dims, A, B, x_strides, BA, BB, WIDE)
        out *= tl.load(x_ptr + x_offs, mask=mask).to(ACC)
    if BLEND and beta != 0:
        out += beta * tl.load(y_ptrs, mask=mask).to(ACC)
    tl.store(y_ptrs, out.to(y_ptr.dtype.element_ty), mask=mask)


def broadcast(x: TensorDesc, dims: tuple[int, ...]) -> TensorDesc:
    """x seen with those dims: stride 0 along the axes where it has size 1."""
    strides = tuple(0 if d != n else s for d, n, s in zip(x.dims, dims, x.strides))
    return replace(x, dims=dims, strides=strides)


class Pointwise(Algorithm):
    """Tensor operations over tiles of any strides."""

    name = "triton:pointwise"

    def supports(self, problem: Problem, device: Device) -> str | None:
        if not isinstance(problem, TensorOpProblem):
            return "it computes tensor operations"
        return walk.too_many(_walk(problem))

    def estimate(self, problem: Problem, device: Device) -> float:
        return chips.move_seconds(problem.bytes, device.architecture)

    def build(self, problem: Problem, device: Device) -> Kernel:
        if not isinstance(problem, TensorOpProblem):
            raise TypeError(f"not a tensor operation: {problem}")
        over = _walk(problem)
        last = len(problem.operands) - 1
        source = problem.x if problem.x is not None else problem.y
        both = {source.dtype.accumulator, problem.y.dtype.accumulator}
        acc = DType.float64 if DType.float64 in both else DType.float32
        arguments: dict[str, Any] = {
            "x_ptr": launch.Pointer(0, source.dtype),
            "y_ptr": launch.Pointer(last, problem.y.dtype),
            **launch.factors(acc),
            **over.arguments("x_strides", "y_strides"),
        }
        constants = {
            **over.constants(),
            "SOURCE": "one" if problem.direction == "set" else "x",
            "BLEND": problem.direction != "scale",
            "ACC": launch.accumulator(acc),
        }
        return launch.prepare(
            device, tensor_op_kernel, (over.programs,), arguments, constants,
            num_warps=walk.WARPS,
        )  # fmt: skip


def _walk(problem: TensorOpProblem) -> walk.Walk:
    """Over (x or b, y); set and scale see y as both."""
    x = broadcast(problem.x, problem.y.dims) if problem.x is not None else problem.y
    return walk.walk([x, problem.y])


ALGORITHMS = (Pointwise(),)
