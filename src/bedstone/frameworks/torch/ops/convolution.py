"""Convolution and its gradients as operators of PyTorch.

A convolution is linear in the image and in the filter, and so are its two gradients: each of the
three is differentiated by the other two, to any order. The gradients are told only the spatial
sizes that their operands do not show, so that every operator may run on a shard of its batch or
channels as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bedstone import (
    BiasGradientProblem,
    ConvolutionDesc,
    ConvolutionProblem,
    Epilogue,
    InvalidDescriptor,
    TensorDesc,
)
from bedstone.frameworks.torch.ops.derivatives import differentiable, save, total
from bedstone.frameworks.torch.ops.launch import (
    empty,
    fold,
    launch,
    spatial_axes,
    spread,
    to_front,
    unfold,
)

Ints = Sequence[int]


def _forward(x: TensorDesc, w: TensorDesc, *rest: Any) -> ConvolutionProblem:
    *bias, y, groups, stride, padding, dilation = rest
    conv = ConvolutionDesc.of(len(stride), padding, stride, dilation, groups)
    return ConvolutionProblem("forward", x, w, y, conv, epilogue=Epilogue(bool(bias)))


def _data(w: TensorDesc, dy: TensorDesc, dx: TensorDesc, *how: Any) -> ConvolutionProblem:
    groups, stride, padding, dilation = how
    conv = ConvolutionDesc.of(len(stride), padding, stride, dilation, groups)
    return ConvolutionProblem("backward_data", dx, w, dy, conv)


def _filter(x: TensorDesc, dy: TensorDesc, dw: TensorDesc, *how: Any) -> ConvolutionProblem:
    groups, stride, padding, dilation = how
    conv = ConvolutionDesc.of(len(stride), padding, stride, dilation, groups)
    return ConvolutionProblem("backward_filter", x, dw, dy, conv)


def _settings(
    axes: int, groups: int, stride: Ints, padding: Ints, dilation: Ints
) -> tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    return (
        groups,
        tuple(spread("stride", stride, axes)),
        tuple(spread("padding", padding, axes)),
        tuple(spread("dilation", dilation, axes)),
    )


def _check(
    axes: int, groups: int, stride: Ints, dilation: Ints, first: Tensor, second: Tensor
) -> None:
    """What an allocation needs to be true; the problem checks the rest."""
    for tensor in (first, second):
        if tensor.dim() != axes + 2:
            expected = f"{axes + 2} dims: two and {axes} spatial"
            raise InvalidDescriptor("tensor", tuple(tensor.shape), expected)
    for name, values in (("groups", [groups]), ("stride", stride), ("dilation", dilation)):
        if min(values) < 1:
            raise InvalidDescriptor(name, list(values), "1 or more")


def _result(
    x: Tensor, w: Tensor, bias: Tensor | None,
    axes: int, groups: int, stride: Ints, padding: Ints, dilation: Ints,
) -> Tensor:  # fmt: skip
    _check(axes, groups, stride, dilation, x, w)
    _, u, p, step = _settings(axes, groups, stride, padding, dilation)
    sizes = [
        (x.shape[a + 2] + 2 * p[a] - (w.shape[a + 2] - 1) * step[a] - 1) // u[a] + 1
        for a in range(axes)
    ]
    if bias is not None and (bias.shape != w.shape[:1] or bias.dtype != w.dtype):
        expected = f"dims {(w.shape[0],)} and the dtype of w, {w.dtype}"
        raise InvalidDescriptor("bias", (tuple(bias.shape), bias.dtype), expected)
    if any(size < 1 for size in sizes):
        expected = f"a window no larger than the padded input, {tuple(x.shape[2:])} with {p}"
        raise InvalidDescriptor("w", tuple(w.shape), expected)
    return empty((x.shape[0], w.shape[0], *sizes), x)


def _data_result(
    dy: Tensor, w: Tensor,
    axes: int, groups: int, size: Ints, stride: Ints, padding: Ints, dilation: Ints,
) -> Tensor:  # fmt: skip
    _check(axes, groups, stride, dilation, dy, w)
    return empty((dy.shape[0], w.shape[1] * groups, *spread("size", size, axes)), dy)


def _filter_result(
    x: Tensor, dy: Tensor,
    axes: int, groups: int, window: Ints, stride: Ints, padding: Ints, dilation: Ints,
) -> Tensor:  # fmt: skip
    _check(axes, groups, stride, dilation, x, dy)
    return empty((dy.shape[1], x.shape[1] // groups, *spread("window", window, axes)), x)


# The first argument that is no tensor is an int, and what decides a result's shape comes after it:
# DTensor remembers a sharding by the arguments from the first int on.


@torch.library.custom_op("bedstone::convolution", mutates_args=())
def convolution_op(
    x: Tensor, w: Tensor, bias: Tensor | None,
    axes: int, groups: int, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
) -> Tensor:  # fmt: skip
    y = _result(x, w, bias, axes, groups, stride, padding, dilation)
    tensors = (x, w, y) if bias is None else (x, w, bias.contiguous(), y)
    launch(_forward, tensors, *_settings(axes, groups, stride, padding, dilation))
    return y


@torch.library.custom_op("bedstone::convolution_backward_data", mutates_args=())
def backward_data_op(
    dy: Tensor, w: Tensor,
    axes: int, groups: int, size: Sequence[int],
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
) -> Tensor:  # fmt: skip
    dx = _data_result(dy, w, axes, groups, size, stride, padding, dilation)
    launch(_data, (w, dy, dx), *_settings(axes, groups, stride, padding, dilation))
    return dx


@torch.library.custom_op("bedstone::convolution_backward_filter", mutates_args=())
def backward_filter_op(
    x: Tensor, dy: Tensor,
    axes: int, groups: int, window: Sequence[int],
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
) -> Tensor:  # fmt: skip
    dw = _filter_result(x, dy, axes, groups, window, stride, padding, dilation)
    launch(_filter, (x, dy, dw), *_settings(axes, groups, stride, padding, dilation))
    return dw


@torch.library.custom_op("bedstone::convolution_backward_bias", mutates_args=())
def backward_bias_op(dy: Tensor) -> Tensor:
    dbias = _bias_result(dy)
    launch(BiasGradientProblem, (dy, dbias))
    return dbias


def _bias_result(dy: Tensor) -> Tensor:
    return dy.new_empty((dy.shape[1],))


convolution_op.register_fake(_result)
backward_data_op.register_fake(_data_result)
backward_filter_op.register_fake(_filter_result)
backward_bias_op.register_fake(_bias_result)


def _keep_convolution(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, _, axes, groups, *ctx.window = inputs
    ctx.how = (axes, groups)
    save(ctx, x, w)


def _differentiate_convolution(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, w = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    dx = backward_data_op(dy, w, *ctx.how, x.shape[2:], *ctx.window) if wanted[0] else None
    dw = backward_filter_op(x, dy, *ctx.how, w.shape[2:], *ctx.window) if wanted[1] else None
    dbias = backward_bias_op(dy) if wanted[2] else None
    return dx, dw, dbias, None, None, None, None, None


def _tangent_of_convolution(
    ctx: Any, x_t: Tensor | None, w_t: Tensor | None, bias_t: Tensor | None
) -> Tensor:
    x, w = ctx.saved_tensors
    by_x = None if x_t is None else convolution_op(x_t, w, None, *ctx.how, *ctx.window)
    by_w = None if w_t is None else convolution_op(x, w_t, None, *ctx.how, *ctx.window)
    by_bias = None
    if bias_t is not None:
        by_bias = bias_t.reshape(-1, *(1,) * ctx.how[0])
        if by_x is None and by_w is None:
            sizes = _result(x, w, None, *ctx.how, *ctx.window).shape
            return by_bias.expand(sizes).contiguous()
    return total(by_x, by_w, by_bias)


def _keep_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    first, second, axes, groups, ctx.size, *ctx.window = inputs
    ctx.how = (axes, groups)
    save(ctx, first, second)


def _differentiate_data(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    dy, w = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    by_dy = convolution_op(g, w, None, *ctx.how, *ctx.window) if wanted[0] else None
    by_w = backward_filter_op(g, dy, *ctx.how, w.shape[2:], *ctx.window) if wanted[1] else None
    return by_dy, by_w, None, None, None, None, None, None


def _differentiate_filter(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    x, dy = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    by_x = backward_data_op(dy, g, *ctx.how, x.shape[2:], *ctx.window) if wanted[0] else None
    by_dy = convolution_op(x, g, None, *ctx.how, *ctx.window) if wanted[1] else None
    return by_x, by_dy, None, None, None, None, None, None


def _tangent_of(op: Any) -> Any:
    """Of an operator that is linear in each of two tensors."""

    def tangent(ctx: Any, first_t: Tensor | None, second_t: Tensor | None) -> Tensor:
        first, second = ctx.saved_tensors
        how = (*ctx.how, ctx.size, *ctx.window)
        return total(
            None if first_t is None else op(first_t, second, *how),
            None if second_t is None else op(first, second_t, *how),
        )

    return tangent


def _keep_shape(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.shape = inputs[0].shape


def _differentiate_bias(ctx: Any, g: Tensor) -> tuple[Tensor]:
    return (g.reshape(1, -1, *(1,) * (len(ctx.shape) - 2)).expand(ctx.shape),)


# Under vmap a batch of images joins N; with a filter each, images and filters become groups.


def _vmap_convolution(info, in_dims, x, w, bias, axes, groups, *window):  # type: ignore[no-untyped-def]
    size, (x_at, w_at, bias_at, *_) = info.batch_size, in_dims
    if w_at is None and bias_at is None:
        y = convolution_op(fold(to_front(x, x_at, size), 0), w, bias, axes, groups, *window)
        return unfold(y, 0, size), 0
    x, w = fold(to_front(x, x_at, size), 1), fold(to_front(w, w_at, size), 0)
    bias = None if bias is None else fold(to_front(bias, bias_at, size), 0)
    return unfold(convolution_op(x, w, bias, axes, groups * size, *window), 1, size), 0


def _vmap_data(info, in_dims, dy, w, axes, groups, *rest):  # type: ignore[no-untyped-def]
    size, (dy_at, w_at, *_) = info.batch_size, in_dims
    if w_at is None:
        dx = backward_data_op(fold(to_front(dy, dy_at, size), 0), w, axes, groups, *rest)
        return unfold(dx, 0, size), 0
    dy, w = fold(to_front(dy, dy_at, size), 1), fold(to_front(w, w_at, size), 0)
    return unfold(backward_data_op(dy, w, axes, groups * size, *rest), 1, size), 0


def _vmap_filter(info, in_dims, x, dy, axes, groups, *rest):  # type: ignore[no-untyped-def]
    size, (x_at, dy_at, *_) = info.batch_size, in_dims
    x, dy = fold(to_front(x, x_at, size), 1), fold(to_front(dy, dy_at, size), 1)
    return unfold(backward_filter_op(x, dy, axes, groups * size, *rest), 0, size), 0


def _vmap_bias(info, in_dims, dy):  # type: ignore[no-untyped-def]
    dbias = backward_bias_op(fold(to_front(dy, in_dims[0], info.batch_size), 1))
    return unfold(dbias, 0, info.batch_size), 0


differentiable(
    convolution_op,
    keep=_keep_convolution,
    backward=_differentiate_convolution,
    tangent=_tangent_of_convolution,
    vmap=_vmap_convolution,
)
differentiable(
    backward_data_op,
    keep=_keep_gradient,
    backward=_differentiate_data,
    tangent=_tangent_of(backward_data_op),
    vmap=_vmap_data,
)
differentiable(
    backward_filter_op,
    keep=_keep_gradient,
    backward=_differentiate_filter,
    tangent=_tangent_of(backward_filter_op),
    vmap=_vmap_filter,
)
differentiable(
    backward_bias_op,
    keep=_keep_shape,
    backward=_differentiate_bias,
    tangent=lambda ctx, dy_t: backward_bias_op(dy_t),
    vmap=_vmap_bias,
)


def convolution(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    stride: int | Ints = 1,
    padding: int | Ints = 0,
    dilation: int | Ints = 1,
    groups: int = 1,
) -> Tensor:
    """y = conv(x, w) + bias, cross-correlation, in 1, 2 or 3 spatial dimensions.

    x        images (N, C, [D, [H,]] W), any strides
    w        filters (K, C/groups, [T, [R,]] S); bias (K,) or None
    returns  (N, K, [O, [P,]] Q), P = floor((H + 2*padding - dilation*(R-1) - 1) / stride) + 1,
             channels last if x is

    Raises InvalidDescriptor for shapes that do not fit. Source: arXiv 1410.0759, equations 1-3.
    """
    axes = spatial_axes(x)
    window = (spread(n, v, axes) for n, v in
              (("stride", stride), ("padding", padding), ("dilation", dilation)))  # fmt: skip
    return convolution_op(x, w, bias, axes, groups, *window)


def convolution_transpose(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    stride: int | Ints = 1,
    padding: int | Ints = 0,
    output_padding: int | Ints = 0,
    groups: int = 1,
    dilation: int | Ints = 1,
) -> Tensor:
    """The gradient of a convolution by its image, as a layer of its own.

    x        (N, C, spatial...); w (C, K/groups, spatial...); bias (K,) or None
    returns  (N, K, spatial...), of size
             (H - 1)*stride - 2*padding + dilation*(R-1) + output_padding + 1 on each axis

    Raises InvalidDescriptor for shapes that do not fit, among them an output_padding that is not
    below the stride or the dilation.
    """
    axes = spatial_axes(x)
    u, p, extra, step = (
        spread(n, v, axes)
        for n, v in (("stride", stride), ("padding", padding),
                     ("output_padding", output_padding), ("dilation", dilation))
    )  # fmt: skip
    if w.dim() != axes + 2:
        raise InvalidDescriptor("w", tuple(w.shape), f"{axes + 2} dims: C, K/groups, spatial")
    for a in range(axes):
        if not 0 <= extra[a] < max(u[a], step[a]):
            expected = f"0 or more, below the larger of stride {u} and dilation {step}"
            raise InvalidDescriptor("output_padding", extra, expected)
    size = [
        (x.shape[a + 2] - 1) * u[a] - 2 * p[a] + step[a] * (w.shape[a + 2] - 1) + extra[a] + 1
        for a in range(axes)
    ]
    if any(s < 1 for s in size):
        raise InvalidDescriptor("padding", p, f"a result with no empty axis; its size is {size}")
    if extra != [0] * axes and any(e >= s for e, s in zip(extra, u)):
        # Such a result is the gradient of a convolution with one more row than x: zeros join x.
        x = torch.nn.functional.pad(x, [s for e, v in zip(reversed(extra), reversed(u))
                                        for s in (0, e // v)])  # fmt: skip
    y = backward_data_op(x, w, axes, groups, size, u, p, step)
    return y if bias is None else y + bias.reshape(-1, *(1,) * axes)


def convolution_backward_data(
    dy: Tensor,
    w: Tensor,
    size: int | Ints,
    stride: int | Ints = 1,
    padding: int | Ints = 0,
    dilation: int | Ints = 1,
    groups: int = 1,
) -> Tensor:
    """dx of a convolution whose image had the spatial `size`: (N, C, size...)."""
    axes = spatial_axes(dy, "dy")
    numbers = (spread(n, v, axes) for n, v in (("size", size), ("stride", stride),
               ("padding", padding), ("dilation", dilation)))  # fmt: skip
    return backward_data_op(dy, w, axes, groups, *numbers)


def convolution_backward_filter(
    x: Tensor,
    dy: Tensor,
    window: int | Ints,
    stride: int | Ints = 1,
    padding: int | Ints = 0,
    dilation: int | Ints = 1,
    groups: int = 1,
) -> Tensor:
    """dw of a convolution whose filters have the spatial `window`: (K, C/groups, window...)."""
    axes = spatial_axes(x)
    numbers = (spread(n, v, axes) for n, v in (("window", window), ("stride", stride),
               ("padding", padding), ("dilation", dilation)))  # fmt: skip
    return backward_filter_op(x, dy, axes, groups, *numbers)


def convolution_backward_bias(dy: Tensor) -> Tensor:
    """dbias of a convolution: dy (N, K, spatial...) summed over everything but K."""
    if dy.dim() < 2:
        raise InvalidDescriptor("dy", tuple(dy.shape), "2 or more dims: N, K, spatial")
    return backward_bias_op(dy)
