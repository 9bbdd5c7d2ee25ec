"""Tensor operations on the CPU: transform, add with broadcasting, set and scale.

All are the pointwise loops with next to no body. `cpu:blocked_transpose` is the case of a
transform whose input and output are contiguous along different axes, as between NCHW and NHWC:
blocks change sides in registers. Any pair of dtypes; converted by way of float32 (float64 where
one side is).
"""

from __future__ import annotations

from typing import Any

from bedstone.backends.cpu.builder import KernelBuilder
from bedstone.backends.cpu.elementwise import (
    PointwiseAlgorithm,
    Stream,
    collapse,
    column_inputs,
    emit_map,
)
from bedstone.backends.cpu.kernel import ENTRY
from bedstone.backends.cpu.target import Target
from bedstone.plan.device import Device
from bedstone.spec.tensor import TensorDesc
from bedstone.spec.tensor_ops import TensorOpProblem


def broadcast(desc: TensorDesc, dims: tuple[int, ...]) -> TensorDesc:
    """The tensor repeated along its axes of size 1 to fill `dims`."""
    strides = (s if a == b else 0 for s, a, b in zip(desc.strides, desc.dims, dims))
    return TensorDesc(dims, tuple(strides), desc.dtype)


def emit(target: Target, problem: TensorOpProblem) -> KernelBuilder:
    """The kernel of any of the operations."""
    k = KernelBuilder(target)

    def copy(k: KernelBuilder, values: list[Any]) -> list[Any]:
        return values

    def one(k: KernelBuilder, values: list[Any]) -> list[Any]:
        dtype = problem.y.dtype.accumulator.value
        return [k.constant(1.0, dtype, k.lanes(dtype))]

    with k.entry(ENTRY, pointers=len(problem.operands)) as call:
        y = Stream(call.pointers[-1], problem.y)
        if problem.direction == "set":
            emit_map(k, call, [], [y], one)
        elif problem.direction == "scale":
            emit_map(k, call, [y], [y], copy, blend="alpha")
        else:
            x = Stream(call.pointers[0], broadcast(problem.x, problem.y.dims))
            emit_map(k, call, [x], [y], copy)
    return k


def crosses(problem: TensorOpProblem) -> bool:
    """True for a transform between tensors that are contiguous along different axes."""
    if problem.direction != "transform" or problem.y.size == 0:
        return False
    return bool(column_inputs(collapse([problem.x, problem.y]), [0])[1])


class Pointwise(PointwiseAlgorithm):
    """Everything that runs along one contiguous axis, or gathers."""

    name = "cpu:elementwise"
    emit = staticmethod(emit)

    def supports(self, problem: TensorOpProblem, device: Device) -> str | None:
        if crosses(problem):
            return "x and y are contiguous along different axes: cpu:blocked_transpose"
        return None


class BlockedTranspose(PointwiseAlgorithm):
    """Transforms that exchange axes."""

    name = "cpu:blocked_transpose"
    emit = staticmethod(emit)

    def supports(self, problem: TensorOpProblem, device: Device) -> str | None:
        if not crosses(problem):
            return "no axes to exchange"
        return None


ALGORITHMS = (Pointwise(), BlockedTranspose())
