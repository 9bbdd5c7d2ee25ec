"""Filters turned so that their reduced channels lie innermost: (c, tap, k) in workspace.

tf32 products want both operands that way. A gradient by data reduces over the filters k, which a
channels-last filter (k, tap, c) has outermost; so it is copied once a call, at copy speed.
"""

from __future__ import annotations

from bedstone.backends.gluon.convolution import images
from bedstone.backends.gluon.convolution.images import Filter
from bedstone.backends.triton import launch
from bedstone.plan.algorithm import Kernel
from bedstone.plan.device import Device
from bedstone.spec.convolution import ConvolutionProblem
from bedstone.spec.dtypes import DType

BLOCK = 64  # filters and channels that a program moves


def turns(problem: ConvolutionProblem) -> bool:
    """True if the problem's matrix product wants the filter turned."""
    return problem.direction == "backward_data" and problem.x.dtype is DType.float32


def turned_bytes(problem: ConvolutionProblem) -> int:
    """Of the turned filter, 0 if there is none."""
    return problem.w.size * problem.w.dtype.itemsize if turns(problem) else 0


def turned_filter(problem: ConvolutionProblem) -> Filter:
    """The turned filter, packed."""
    k, taps, c = source_filter(problem).dims
    return Filter((c, taps, k), (taps * k, k, 1), problem.w.dtype)


def source_filter(problem: ConvolutionProblem) -> Filter:
    """The caller's filter as (k, tap, c)."""
    found = images.filter_of(problem.w)
    if found is None:
        raise ValueError(f"the filter {problem.w} has no single axis of taps")
    return found


def turn_launch(problem: ConvolutionProblem, device: Device) -> Kernel:
    """The kernel that turns w, operand 0, into the start of the workspace."""
    from bedstone.backends.gluon.convolution.transform_kernels import convolution_transform_kernel

    found, turned = source_filter(problem), turned_filter(problem)
    k, taps, c = found.dims
    arguments: dict[str, launch.Argument] = {
        "x_ptr": launch.Pointer(0, problem.w.dtype),
        "y_ptr": launch.Scratch(problem.w.dtype),
        "batch": launch.Scalar(taps),
        "channels": launch.Scalar(k),
        "pixels": launch.Scalar(c),
        "x_batch": launch.Scalar(found.strides[1], "i64"),
        "x_step": launch.Scalar(found.strides[0], "i64"),
        "y_batch": launch.Scalar(turned.strides[1], "i64"),
        "y_step": launch.Scalar(turned.strides[0], "i64"),
    }
    constants = {"TO_CHANNELS_LAST": True, "BC": BLOCK, "BP": BLOCK}
    grid = (-(-k // BLOCK) * -(-c // BLOCK) * taps,)
    return launch.prepare(
        device, convolution_transform_kernel, grid, arguments, constants, overlaps=True, num_warps=4
    )
