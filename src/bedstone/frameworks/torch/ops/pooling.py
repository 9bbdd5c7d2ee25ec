"""Pooling and its gradients as operators of PyTorch.

Averages are linear: an average and its gradient differentiate each other. The gradient of a
maximum goes where the forward call's indices say, and its own gradient is gathered from there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bedstone import InvalidDescriptor, PoolingDesc, PoolingProblem, TensorDesc
from bedstone.frameworks.torch.ops.derivatives import differentiable, save
from bedstone.frameworks.torch.ops.launch import (
    empty,
    fold,
    launch,
    spatial_axes,
    spread,
    to_front,
    unfold,
)
from bedstone.spec.pooling import adaptive_average_problem

Ints = Sequence[int]
ROUNDINGS = ("floor", "ceil")  # by the operators' integer `ceil`


def _desc(mode: str, window: Ints, how: tuple[Any, ...]) -> PoolingDesc:
    stride, padding, dilation, ceil = how
    return PoolingDesc.of(mode, window, len(window), padding, stride, dilation, ROUNDINGS[ceil])


def _max(
    x: TensorDesc, y: TensorDesc, indices: TensorDesc, window: Ints, *how: Any
) -> PoolingProblem:
    return PoolingProblem("forward", x, y, _desc("max", window, how), indices)


def _max_backward(
    indices: TensorDesc, dy: TensorDesc, dx: TensorDesc, window: Ints, *how: Any
) -> PoolingProblem:
    return PoolingProblem("backward", dx, dy, _desc("max", window, how), indices)


def _average(x: TensorDesc, y: TensorDesc, mode: str, window: Ints, *how: Any) -> PoolingProblem:
    return PoolingProblem("forward", x, y, _desc(mode, window, how))


def _average_backward(
    dy: TensorDesc, dx: TensorDesc, mode: str, window: Ints, *how: Any
) -> PoolingProblem:
    return PoolingProblem("backward", dx, dy, _desc(mode, window, how))


def _mode(include_padding: int) -> str:
    return "average_include_padding" if include_padding else "average_exclude_padding"


def _settings(axes: int, ceil: int, window: Ints, stride: Ints, padding: Ints, dilation: Ints) -> (
    tuple[Any, ...]
):  # fmt: skip
    named = {"window": window, "stride": stride, "padding": padding, "dilation": dilation}
    return (*(tuple(spread(name, value, axes)) for name, value in named.items()), ceil)


def _pooled(
    x: Tensor, axes: int, ceil: int, window: Ints, stride: Ints, padding: Ints, dilation: Ints
) -> Tensor:
    """The result's memory: sizes as PoolingDesc.output_dims says, in numbers that may be symbols"""
    if x.dim() != axes + 2:
        expected = f"{axes + 2} dims: N, C and {axes} spatial"
        raise InvalidDescriptor("x", tuple(x.shape), expected)
    r, u, p, step, _ = _settings(axes, ceil, window, stride, padding, dilation)
    if min(*u, *step, *r) < 1:
        raise InvalidDescriptor("window, stride, dilation", (r, u, step), "1 or more")
    sizes = []
    for a in range(axes):
        room = x.shape[a + 2] + 2 * p[a] - (r[a] - 1) * step[a] - 1
        size = (room + (u[a] - 1 if ceil else 0)) // u[a] + 1
        if ceil and (size - 1) * u[a] >= x.shape[a + 2] + p[a]:
            size = size - 1
        sizes.append(size)
    if any(size < 1 for size in sizes):
        expected = f"no larger than the padded input, {tuple(x.shape[2:])} with {p}"
        raise InvalidDescriptor("window", r, expected)
    return empty((*x.shape[:2], *sizes), x)


# An int comes first after the tensors: see the same note in convolution.py.


def _max_results(
    x: Tensor,
    axes: int, ceil: int, window: Ints, stride: Ints, padding: Ints, dilation: Ints,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    y = _pooled(x, axes, ceil, window, stride, padding, dilation)
    return y, torch.empty_like(y, dtype=torch.int64)


def _max_gradient(
    dy: Tensor, indices: Tensor,
    axes: int, ceil: int, size: Ints, window: Ints, stride: Ints, padding: Ints, dilation: Ints,
) -> Tensor:  # fmt: skip
    return empty((*dy.shape[:2], *spread("size", size, axes)), dy)


def _average_result(
    x: Tensor,
    axes: int, ceil: int, include_padding: int, window: Ints, stride: Ints, padding: Ints,
) -> Tensor:  # fmt: skip
    return _pooled(x, axes, ceil, window, stride, padding, (1,))


def _average_gradient(
    dy: Tensor,
    axes: int, ceil: int, include_padding: int, size: Ints, window: Ints, stride: Ints,
    padding: Ints,
) -> Tensor:  # fmt: skip
    return empty((*dy.shape[:2], *spread("size", size, axes)), dy)


def _resized(x: Tensor, axes: int, size: Ints) -> Tensor:
    if x.dim() != axes + 2:
        expected = f"{axes + 2} dims: N, C and {axes} spatial"
        raise InvalidDescriptor("tensor", tuple(x.shape), expected)
    return empty((*x.shape[:2], *spread("size", size, axes)), x)


@torch.library.custom_op("bedstone::max_pool", mutates_args=())
def max_pool_op(
    x: Tensor,
    axes: int, ceil: int, window: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    how = (axes, ceil, window, stride, padding, dilation)
    y, indices = _max_results(x, *how)
    launch(_max, (x, y, indices), *_settings(*how))
    return y, indices


@torch.library.custom_op("bedstone::max_pool_backward", mutates_args=())
def max_pool_backward_op(
    dy: Tensor, indices: Tensor,
    axes: int, ceil: int, size: Sequence[int], window: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int],
) -> Tensor:  # fmt: skip
    how = (axes, ceil, window, stride, padding, dilation)
    dx = _resized(dy, axes, size)
    launch(_max_backward, (indices, dy, dx), *_settings(*how))
    return dx


@torch.library.custom_op("bedstone::average_pool", mutates_args=())
def average_pool_op(
    x: Tensor,
    axes: int, ceil: int, include_padding: int, window: Sequence[int], stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:  # fmt: skip
    how = (axes, ceil, window, stride, padding, (1,))
    y = _pooled(x, *how)
    launch(_average, (x, y), _mode(include_padding), *_settings(*how))
    return y


@torch.library.custom_op("bedstone::average_pool_backward", mutates_args=())
def average_pool_backward_op(
    dy: Tensor,
    axes: int, ceil: int, include_padding: int, size: Sequence[int], window: Sequence[int],
    stride: Sequence[int], padding: Sequence[int],
) -> Tensor:  # fmt: skip
    how = (axes, ceil, window, stride, padding, (1,))
    dx = _resized(dy, axes, size)
    launch(_average_backward, (dy, dx), _mode(include_padding), *_settings(*how))
    return dx


@torch.library.custom_op("bedstone::adaptive_average_pool", mutates_args=())
def adaptive_op(x: Tensor, axes: int, size: Sequence[int]) -> Tensor:
    y = _resized(x, axes, size)
    launch(_adaptive, (x, y))
    return y


@torch.library.custom_op("bedstone::adaptive_average_pool_backward", mutates_args=())
def adaptive_backward_op(dy: Tensor, axes: int, size: Sequence[int]) -> Tensor:
    dx = _resized(dy, axes, size)
    launch(_adaptive_backward, (dy, dx))
    return dx


def _adaptive(x: TensorDesc, y: TensorDesc) -> Any:
    return adaptive_average_problem("forward", x, y)


def _adaptive_backward(dy: TensorDesc, dx: TensorDesc) -> Any:
    return adaptive_average_problem("backward", dx, dy)


max_pool_op.register_fake(_max_results)
max_pool_backward_op.register_fake(_max_gradient)
average_pool_op.register_fake(_average_result)
average_pool_backward_op.register_fake(_average_gradient)
adaptive_op.register_fake(_resized)
adaptive_backward_op.register_fake(_resized)


def _keep_maxima(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, axes, ceil, *ctx.window = inputs
    ctx.how = (axes, ceil, x.shape[2:])
    save(ctx, output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate_max(ctx: Any, dy: Tensor | None, _: Any) -> tuple[Any, ...]:
    (indices,) = ctx.saved_tensors
    dx = None if dy is None else max_pool_backward_op(dy, indices, *ctx.how, *ctx.window)
    return dx, None, None, None, None, None, None


def _at(indices: Tensor, images: Tensor) -> Tensor:
    """The elements of images that the indices name; 0 where they name none."""
    where = indices.flatten(2)
    gathered = images.flatten(2).gather(2, where.clamp(min=0))
    return torch.where(where < 0, 0.0, gathered).view(indices.shape).to(images.dtype)


def _tangent_of_max(ctx: Any, x_t: Tensor) -> tuple[Tensor, None]:
    return _at(ctx.saved_tensors[0], x_t), None


def _keep_indices(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, indices, *ctx.how = inputs
    save(ctx, indices)


def _differentiate_max_backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    by_dy = _at(ctx.saved_tensors[0], g)
    return by_dy, None, None, None, None, None, None, None, None


def _tangent_of_max_backward(ctx: Any, dy_t: Tensor, _: None) -> Tensor:
    return max_pool_backward_op(dy_t, ctx.saved_tensors[0], *ctx.how)


def _keep_average(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *ctx.all = inputs
    ctx.how, ctx.window, ctx.size = ctx.all[:3], ctx.all[-3:], x.shape[2:]


def _differentiate_average(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    dx = average_pool_backward_op(dy, *ctx.how, ctx.size, *ctx.window)
    return dx, None, None, None, None, None, None


def _differentiate_average_backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    by_dy = average_pool_op(g, *ctx.how, *ctx.window)
    return by_dy, None, None, None, None, None, None, None


def _keep_size(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *ctx.all = inputs
    ctx.axes, ctx.size = inputs[1], x.shape[2:]


def _differentiate_adaptive(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return adaptive_backward_op(dy, ctx.axes, ctx.size), None, None


def _differentiate_adaptive_backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    return adaptive_op(g, ctx.axes, ctx.size), None, None


def _joined(op: Any, tensors: int, results: int = 1) -> Any:
    """The rule of vmap: a batch joins N, in the operator's tensors and results."""

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        size = info.batch_size
        joined = [fold(to_front(t, at, size), 0) for t, at in zip(arguments[:tensors], in_dims)]
        out = op(*joined, *arguments[tensors:])
        if results == 1:
            return unfold(out, 0, size), 0
        return tuple(unfold(t, 0, size) for t in out), (0,) * results

    return rule


differentiable(
    max_pool_op,
    keep=_keep_maxima,
    backward=_differentiate_max,
    tangent=_tangent_of_max,
    vmap=_joined(max_pool_op, 1, 2),
)
differentiable(
    max_pool_backward_op,
    keep=_keep_indices,
    backward=_differentiate_max_backward,
    tangent=_tangent_of_max_backward,
    vmap=_joined(max_pool_backward_op, 2),
)
for _op, _keep, _backward in (
    (average_pool_op, _keep_average, _differentiate_average),
    (average_pool_backward_op, _keep_average, _differentiate_average_backward),
    (adaptive_op, _keep_size, _differentiate_adaptive),
    (adaptive_backward_op, _keep_size, _differentiate_adaptive_backward),
):
    differentiable(
        _op,
        keep=_keep,
        backward=_backward,
        tangent=lambda ctx, t, op=_op: op(t, *ctx.all),  # they are linear
        vmap=_joined(_op, 1),
    )


def max_pool(
    x: Tensor,
    window: int | Ints,
    stride: int | Ints | None = None,
    padding: int | Ints = 0,
    dilation: int | Ints = 1,
    ceil: bool = False,
) -> tuple[Tensor, Tensor]:
    """(largest element of each window, its index in the flattened spatial extent).

    x (N, C, [D, [H,]] W); stride None is the window. A window on padding alone gives -inf and
    index -1. `ceil` lets the last window overrun the padded input.
    """
    axes = spatial_axes(x)
    r, u, p, step = _windows(axes, window, stride, padding, dilation)
    return max_pool_op(x, axes, int(ceil), r, u, p, step)


def average_pool(
    x: Tensor,
    window: int | Ints,
    stride: int | Ints | None = None,
    padding: int | Ints = 0,
    ceil: bool = False,
    include_padding: bool = True,
) -> Tensor:
    """The mean of each window of x (N, C, [D, [H,]] W), padding counted in the divisor or not."""
    axes = spatial_axes(x)
    r, u, p, _ = _windows(axes, window, stride, padding, 1)
    return average_pool_op(x, axes, int(ceil), int(include_padding), r, u, p)


def adaptive_average_pool(x: Tensor, size: int | Ints) -> Tensor:
    """Means over windows that cut x (N, C, [D, [H,]] W) to the spatial `size`: window i of P covers
    the elements floor(i*H/P) up to ceil((i+1)*H/P), end excluded."""
    axes = spatial_axes(x)
    return adaptive_op(x, axes, spread("size", size, axes))


def global_average_pool(x: Tensor) -> Tensor:
    """The mean over all the spatial extent: (N, C, 1, ...)."""
    if math.prod(x.shape[2:]) == 0:
        raise InvalidDescriptor("x", tuple(x.shape), "1 or more on every spatial axis")
    return adaptive_average_pool(x, 1)


def _windows(axes: int, window: Any, stride: Any, padding: Any, dilation: Any) -> list[list[int]]:
    stride = window if stride is None else stride
    named = {"window": window, "stride": stride, "padding": padding, "dilation": dilation}
    return [spread(name, value, axes) for name, value in named.items()]
