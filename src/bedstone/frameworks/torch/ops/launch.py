"""From torch tensors to a plan: what every operator of this folder does once its result is there.

An operator allocates its results (the same function serves as its fake, so that both have the same
strides) and calls `launch`. Problems are kept by shapes, strides, dtypes and settings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bedstone import InvalidDescriptor, Problem, TensorDesc, default_handle
from bedstone.frameworks.planning import WORKSPACE_LIMIT
from bedstone.frameworks.torch.calls import workspace_of

PROBLEMS_KEPT = 4096  # as many as a handle keeps plans

# A function of the operands' descriptors, then settings, that makes the problem.
Maker = Callable[..., Problem]


@functools.lru_cache(PROBLEMS_KEPT)
def _problem(make: Maker, operands: tuple[Any, ...], settings: tuple[Any, ...]) -> Problem:
    descs = [TensorDesc(tuple(s) or (1,), tuple(t) or (1,), d) for s, t, d in operands]
    return make(*descs, *settings)


def launch(make: Maker, tensors: Sequence[Tensor], *settings: Any) -> None:
    """Run the problem that `make` describes on these tensors: operands in the plan's order,
    results last. Raises InvalidDescriptor for tensors on different devices."""
    device = tensors[0].device
    for tensor in tensors:
        if tensor.device != device:
            raise InvalidDescriptor("device", str(tensor.device), f"{device}, as the first tensor")
    operands = tuple((t.shape, t.stride(), t.dtype) for t in tensors)
    problem = _problem(make, operands, settings)
    stream = 0
    if device.type == "cpu":
        handle = default_handle()
    else:
        handle = default_handle(f"{device.type}:{device.index or 0}")
        stream = torch.cuda.current_stream(device).cuda_stream
    plan = handle.plan(problem, workspace_limit=WORKSPACE_LIMIT)
    workspace = None
    if plan.workspace_size:
        workspace = workspace_of(plan.workspace_size, device)
    plan(
        *[t.data_ptr() for t in tensors],
        workspace=0 if workspace is None else workspace.data_ptr(),
        stream=stream,
    )


def empty(dims: Sequence[Any], like: Tensor) -> Tensor:
    """A new tensor of dims, channels last where `like` is (and is not row-major too)."""
    order = torch.contiguous_format
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(like.dim())
    if last is not None and len(dims) == like.dim() and not like.is_contiguous():  # noqa: SIM102
        if like.is_contiguous(memory_format=last):
            order = last
    return torch.empty(tuple(dims), dtype=like.dtype, device=like.device, memory_format=order)


def spread(argument: str, value: int | Sequence[int], axes: int) -> list[int]:
    """One number an axis, from a number for all or one an axis."""
    numbers = [value] * axes if isinstance(value, int) else list(value)
    if len(numbers) == 1:
        numbers = numbers * axes
    if len(numbers) != axes:
        raise InvalidDescriptor(argument, value, f"an integer, or {axes} of them")
    return numbers


def spatial_axes(x: Tensor, argument: str = "x") -> int:
    """The number of spatial axes of images (N, C, spatial...)."""
    if x.dim() not in (3, 4, 5):
        expected = "3, 4 or 5 dims: N, C and 1 to 3 spatial"
        raise InvalidDescriptor(argument, tuple(x.shape), expected)
    return x.dim() - 2


def to_front(tensor: Tensor, at: int | None, size: int) -> Tensor:
    """Under vmap: the tensor with its batch axis first; repeated where it has none."""
    return tensor.expand(size, *tensor.shape) if at is None else tensor.movedim(at, 0)


def fold(tensor: Tensor, axis: int) -> Tensor:
    """The leading axis folded into `axis` of what follows it."""
    return tensor.movedim(0, axis).flatten(axis, axis + 1)


def unfold(tensor: Tensor, axis: int, size: int) -> Tensor:
    """The inverse of `fold`, for a leading axis of that size."""
    return tensor.unflatten(axis, (size, tensor.shape[axis] // size)).movedim(axis, 0)
