"""Batch, layer and group normalisation as operators of PyTorch.

One operator serves all kinds and gives the statistics out for its gradient. The gradient's own
derivative is taken from the formula written in PyTorch's operators: it serves second and higher
orders, where speed matters least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bedstone import InvalidDescriptor, NormalizationProblem
from bedstone.frameworks.torch.ops.derivatives import differentiable, save, total
from bedstone.frameworks.torch.ops.launch import fold, launch, to_front, unfold
from bedstone.spec.normalization import NormDesc


def _norm(how: tuple[Any, ...], scale: bool, shift: bool) -> NormDesc:
    axis, groups, kind, epsilon = how
    return NormDesc(kind, epsilon, axis, groups, scale, shift)


def _forward(*operands: Any) -> NormalizationProblem:
    *descs, scale, shift, axis, groups, kind, epsilon = operands
    x, y = descs[0], descs[-3]
    parameters = descs[1].dtype if scale or shift else None
    norm = _norm((axis, groups, kind, epsilon), scale, shift)
    return NormalizationProblem("training", x, y, norm, parameters)


def _backward(*operands: Any) -> NormalizationProblem:
    *descs, scale, axis, groups, kind, epsilon = operands
    x = descs[0]
    dy, dx = (descs[-4], descs[-3]) if scale else (descs[-2], descs[-1])
    parameters = descs[1].dtype if scale else None
    norm = _norm((axis, groups, kind, epsilon), scale, scale)
    return NormalizationProblem("backward", dx, dy, norm, parameters, saved=x)


def _statistics_dims(x: Tensor, axis: int, groups: int, kind: str) -> Sequence[Any]:
    return {"batch": x.shape[1:2], "layer": x.shape[:axis], "group": (x.shape[0], groups)}[kind]


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _results(
    x: Tensor, scale: Tensor | None, shift: Tensor | None,
    axis: int, groups: int, kind: str, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    mean = x.new_empty(_statistics_dims(x, axis, groups, kind), dtype=_accumulator(x))
    return torch.empty_like(x), mean, torch.empty_like(mean)


def _gradients(
    x: Tensor, scale: Tensor | None, mean: Tensor, inv_std: Tensor, dy: Tensor,
    axis: int, groups: int, kind: str, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dx = torch.empty_like(x)
    if scale is None:
        return dx, x.new_empty((0,)), x.new_empty((0,))
    dscale = torch.empty_like(scale, memory_format=torch.contiguous_format)
    return dx, dscale, torch.empty_like(dscale)


@torch.library.custom_op("bedstone::normalize", mutates_args=())
def normalize_op(
    x: Tensor, scale: Tensor | None, shift: Tensor | None,
    axis: int, groups: int, kind: str, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    y, mean, inv_std = _results(x, scale, shift, axis, groups, kind, epsilon)
    affine = [t.contiguous() for t in (scale, shift) if t is not None]
    given = (scale is not None, shift is not None)
    launch(_forward, (x, *affine, y, mean, inv_std), *given, axis, groups, kind, epsilon)
    return y, mean, inv_std


@torch.library.custom_op("bedstone::normalize_backward", mutates_args=())
def normalize_backward_op(
    x: Tensor, scale: Tensor | None, mean: Tensor, inv_std: Tensor, dy: Tensor,
    axis: int, groups: int, kind: str, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dx, dscale, dshift = _gradients(x, scale, mean, inv_std, dy, axis, groups, kind, epsilon)
    statistics = (mean.contiguous(), inv_std.contiguous())
    how = (scale is not None, axis, groups, kind, epsilon)
    if scale is None:
        launch(_backward, (x, *statistics, dy, dx), *how)
    else:
        launch(_backward, (x, scale.contiguous(), *statistics, dy, dx, dscale, dshift), *how)
    return dx, dscale, dshift


normalize_op.register_fake(_results)
normalize_backward_op.register_fake(_gradients)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, scale, shift, *ctx.how = inputs
    save(ctx, x, scale, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.has_shift = shift is not None


def _differentiate(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
    x, scale, mean, inv_std = ctx.saved_tensors
    dx, dscale, dshift = normalize_backward_op(x, scale, mean, inv_std, dy, *ctx.how)
    none = (None,) * len(ctx.how)
    if scale is None:
        return dx, None, None, *none
    return dx, dscale, dshift if ctx.has_shift else None, *none


def _tangent(
    ctx: Any, x_t: Tensor | None, scale_t: Tensor | None, shift_t: Tensor | None
) -> tuple[Tensor, None, None]:
    x, scale, mean, inv_std = ctx.saved_tensors
    geometry = _norm(tuple(ctx.how), False, False).geometry(tuple(x.shape))

    def spread_out(parameter: Tensor) -> Tensor:
        return parameter.reshape(geometry.broadcast).expand(geometry.view).reshape(x.shape)

    by_x = by_scale = by_shift = None
    if x_t is not None:  # the Jacobian of what is not scaled yet is symmetric
        by_x = normalize_backward_op(x, None, mean, inv_std, x_t, *ctx.how)[0]
        by_x = by_x if scale is None else (by_x * spread_out(scale)).to(x.dtype)
    if scale_t is not None:
        normal = normalize_op(x, None, None, *ctx.how)[0]
        by_scale = (normal * spread_out(scale_t)).to(x.dtype)
    if shift_t is not None:
        by_shift = spread_out(shift_t).to(x.dtype)
    return total(by_x, by_scale, by_shift), None, None


def _keep_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, scale, _, _, dy, *ctx.how = inputs
    save(ctx, x, scale, dy)
    if scale is None:
        ctx.mark_non_differentiable(*output[1:])


def _written_out(
    x: Tensor, scale: Tensor | None, dy: Tensor, axis: int, groups: int, kind: str, epsilon: float
) -> tuple[Tensor, ...]:
    """(dx, dscale, dshift) from x alone, in PyTorch's operators."""
    geometry = _norm((axis, groups, kind, epsilon), scale is not None, scale is not None).geometry(
        tuple(x.shape)
    )
    view, over = x.reshape(geometry.view), geometry.axes
    wide = _accumulator(x)
    view, slope = view.to(wide), dy.reshape(geometry.view).to(wide)
    centred = view - view.mean(over, keepdim=True)
    inv_std = (centred.square().mean(over, keepdim=True) + epsilon).rsqrt()
    normal = centred * inv_std
    dscale, dshift = (slope * normal).sum(geometry.shared), slope.sum(geometry.shared)
    if scale is not None:
        slope = slope * scale.reshape(geometry.broadcast).to(wide)
    mean, product = slope.mean(over, keepdim=True), (slope * normal).mean(over, keepdim=True)
    dx = (inv_std * (slope - mean - normal * product)).reshape(x.shape).to(x.dtype)
    if scale is None:
        return (dx,)
    return (
        dx,
        dscale.reshape(scale.shape).to(scale.dtype),
        dshift.reshape(scale.shape).to(scale.dtype),
    )


def _written(ctx: Any) -> tuple[Callable[..., tuple[Tensor, ...]], list[Tensor]]:
    """The gradient's formula as a function of the tensors that are there."""
    x, scale, dy = ctx.saved_tensors

    def formula(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        return _written_out(x, None if scale is None else rest[0], rest[-1], *ctx.how)

    return formula, [t for t in (x, scale, dy) if t is not None]


def _differentiate_gradient(ctx: Any, *g: Tensor | None) -> tuple[Any, ...]:
    formula, inputs = _written(ctx)
    results, pull = torch.func.vjp(formula, *inputs)
    found = pull(tuple(torch.zeros_like(r) if t is None else t for r, t in zip(results, g)))
    by_scale = None if len(found) == 2 else found[1]
    return found[0], by_scale, None, None, found[-1], *(None,) * len(ctx.how)


def _tangent_of_gradient(
    ctx: Any, x_t: Tensor | None, scale_t: Tensor | None, mean_t: None, inv_std_t: None,
    dy_t: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    formula, inputs = _written(ctx)
    given = (x_t, scale_t, dy_t) if len(inputs) == 3 else (x_t, dy_t)
    tangents = tuple(torch.zeros_like(v) if t is None else t for v, t in zip(inputs, given))
    # The gradient's gradient is linear; its own, at any place, is what carries tangents on. (One
    # forward-mode derivative inside another is what PyTorch refuses.)
    results, pull = torch.func.vjp(formula, *inputs)
    _, push = torch.func.vjp(lambda *g: pull(g), *(torch.zeros_like(r) for r in results))
    return (*push(tangents), None, None)[:3]


def _vmapped(op: Any, tensors: int) -> Any:
    """The rule of vmap: a batch joins the channels, whose statistics are apart; layers, whose
    parameters serve every row, are taken one by one."""

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        size, how = info.batch_size, arguments[tensors:]
        given = [
            None if t is None else to_front(t, at, size)
            for t, at in zip(arguments[:tensors], in_dims)
        ]
        if how[2] == "layer":
            each = [op(*(None if t is None else t[i] for t in given), *how) for i in range(size)]
            return tuple(torch.stack(found) for found in zip(*each)), (0, 0, 0)
        axis, groups, *rest = how
        # (N, C, ...) and (N, groups) have channels as their axis 1, (C,) as axis 0
        joined = [None if t is None else fold(t, min(t.dim() - 2, 1)) for t in given]
        found = op(*joined, axis, groups * size if how[2] == "group" else groups, *rest)
        return tuple(unfold(t, min(t.dim() - 1, 1), size) for t in found), (0, 0, 0)

    return rule


differentiable(
    normalize_op,
    keep=_keep,
    backward=_differentiate,
    tangent=_tangent,
    vmap=_vmapped(normalize_op, 3),
)
differentiable(
    normalize_backward_op,
    keep=_keep_gradient,
    backward=_differentiate_gradient,
    tangent=_tangent_of_gradient,
    vmap=_vmapped(normalize_backward_op, 5),
)


def _checked(x: Tensor, scale: Tensor | None, shift: Tensor | None, dims: Sequence[int]) -> None:
    if scale is None and shift is not None:
        raise InvalidDescriptor("scale", None, "a tensor, since there is a shift")
    for name, tensor in (("scale", scale), ("shift", shift)):
        if tensor is not None and tuple(tensor.shape) != tuple(dims):
            raise InvalidDescriptor(name, tuple(tensor.shape), f"dims {tuple(dims)}")
    if scale is not None and shift is not None and scale.dtype != shift.dtype:
        raise InvalidDescriptor("shift", shift.dtype, f"the dtype of scale, {scale.dtype}")


def layer_norm(
    x: Tensor,
    axis: int,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    epsilon: float = 1e-5,
) -> Tensor:
    """x normalised over all axes from `axis` (1 or more, or counted from the end) on; scale and
    shift have the dims of these axes."""
    first = axis + x.dim() if axis < 0 else axis
    if not 1 <= first < x.dim():
        raise InvalidDescriptor("axis", axis, f"1 to {x.dim() - 1}, or counted from the end")
    _checked(x, scale, shift, x.shape[first:])
    return normalize_op(x, scale, shift, first, 1, "layer", epsilon)[0]


def group_norm(
    x: Tensor,
    groups: int,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    epsilon: float = 1e-5,
) -> Tensor:
    """x (N, C, ...) normalised over each image's groups of channels; scale and shift are (C,)."""
    if x.dim() < 2 or groups < 1 or x.shape[1] % groups:
        expected = f"a divisor of the channels of x, whose dims are {tuple(x.shape)}"
        raise InvalidDescriptor("groups", groups, expected)
    _checked(x, scale, shift, x.shape[1:2])
    return normalize_op(x, scale, shift, 1, groups, "group", epsilon)[0]


def batch_norm(
    x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None, epsilon: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """(x (N, C, ...) normalised over N and space, mean (C,), 1 / standard deviation (C,)).

    The statistics are of x, the variance biased; they carry no gradient.
    """
    if x.dim() < 2:
        raise InvalidDescriptor("x", tuple(x.shape), "2 or more dims: N, C, spatial")
    _checked(x, scale, shift, x.shape[1:2])
    return normalize_op(x, scale, shift, 1, 1, "batch", epsilon)
