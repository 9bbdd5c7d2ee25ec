"""Activations and softmax as operators of PyTorch.

The gradients are operators too. Their own derivatives are written in PyTorch's operators: they
serve second and higher orders, where speed matters least.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bedstone import ActivationDesc, ActivationProblem, InvalidDescriptor, SoftmaxProblem
from bedstone.frameworks.torch.ops.derivatives import differentiable, save, total
from bedstone.frameworks.torch.ops.launch import launch, to_front
from bedstone.spec.tensor import TensorDesc

GELU_CUBIC = 0.044715
GELU_SCALE = math.sqrt(2 / math.pi)


def _result(x: Tensor) -> Tensor:
    """Memory in x's own order where x is dense."""
    return torch.empty_like(x)


def _desc(kind: str, alpha: float | None, beta: float | None) -> ActivationDesc:
    return ActivationDesc(kind, alpha, beta)  # type: ignore[arg-type]


def _from_y(desc: ActivationDesc) -> bool:
    """Whether backward is given y. The formula of a clip serves x too, and y will not do: a bound
    that is no number of the dtype is rounded, maybe to the inside."""
    return desc.backward_from_y and desc.kind not in ("clip", "clipped_relu")


def _activate(
    x: TensorDesc, y: TensorDesc, kind: str, alpha: float | None, beta: float | None
) -> ActivationProblem:
    return ActivationProblem("forward", x, y, _desc(kind, alpha, beta))


def _activate_backward(
    saved: TensorDesc,
    dy: TensorDesc,
    dx: TensorDesc,
    kind: str,
    alpha: float | None,
    beta: float | None,
) -> ActivationProblem:
    desc = _desc(kind, alpha, beta)
    return ActivationProblem("backward", dx, dy, desc, saved)


@torch.library.custom_op("bedstone::activation", mutates_args=())
def activation_op(x: Tensor, kind: str, alpha: float | None, beta: float | None) -> Tensor:
    y = _result(x)
    launch(_activate, (x, y), kind, alpha, beta)
    return y


@torch.library.custom_op("bedstone::activation_backward", mutates_args=())
def activation_backward_op(
    saved: Tensor, dy: Tensor, kind: str, alpha: float | None, beta: float | None
) -> Tensor:
    dx = _result(dy)
    launch(_activate_backward, (saved, dy, dx), kind, alpha, beta)
    return dx


@activation_op.register_fake
def _activation_fake(x: Tensor, kind: str, alpha: float | None, beta: float | None) -> Tensor:
    return _result(x)


@activation_backward_op.register_fake
def _activation_backward_fake(
    saved: Tensor, dy: Tensor, kind: str, alpha: float | None, beta: float | None
) -> Tensor:
    return _result(dy)


def _keep_saved(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *ctx.how = inputs
    save(ctx, output if _from_y(_desc(*ctx.how)) else x)


def _differentiate_activation(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return activation_backward_op(ctx.saved_tensors[0], dy, *ctx.how), None, None, None


def _tangent_of_activation(ctx: Any, x_t: Tensor) -> Tensor:
    return activation_backward_op(ctx.saved_tensors[0], x_t, *ctx.how)


def _keep_both(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    saved, dy, *ctx.how = inputs
    save(ctx, saved, dy)


def _differentiate_activation_backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    saved, dy = ctx.saved_tensors
    by_saved = g * dy * _bend(saved, *ctx.how) if ctx.needs_input_grad[0] else None
    by_dy = activation_backward_op(saved, g, *ctx.how) if ctx.needs_input_grad[1] else None
    return by_saved, by_dy, None, None, None


def _tangent_of_activation_backward(
    ctx: Any, saved_t: Tensor | None, dy_t: Tensor | None
) -> Tensor:
    saved, dy = ctx.saved_tensors
    return total(
        None if saved_t is None else saved_t * dy * _bend(saved, *ctx.how),
        None if dy_t is None else activation_backward_op(saved, dy_t, *ctx.how),
    )


def _bend(saved: Tensor, kind: str, alpha: float | None, beta: float | None) -> Tensor:
    desc = _desc(kind, alpha, beta)
    return _BEND[kind](saved, desc.alpha, desc.beta)


def _flat(saved: Tensor, alpha: float, beta: float) -> Tensor:
    return torch.zeros_like(saved)


def _silu_bend(x: Tensor, alpha: float, beta: float) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 - s) * (2 + x * (1 - 2 * s))


def _gelu_bend(x: Tensor, alpha: float, beta: float) -> Tensor:
    return torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi) * (2 - x * x)


def _gelu_tanh_bend(x: Tensor, alpha: float, beta: float) -> Tensor:
    t = torch.tanh(GELU_SCALE * (x + GELU_CUBIC * x * x * x))
    slope = GELU_SCALE * (1 + 3 * GELU_CUBIC * x * x)
    bend = 6 * GELU_SCALE * GELU_CUBIC * x
    return (1 - t * t) * (slope + 0.5 * x * bend - x * t * slope * slope)


def _hard_swish_bend(x: Tensor, alpha: float, beta: float) -> Tensor:
    inner = alpha * x + beta
    return ((inner > 0) & (inner < 1)).to(x.dtype) * (2.0 * alpha)


# d f'(saved) / d saved, where saved is y for the kinds whose derivative y determines, else x.
_BEND: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "relu": _flat,
    "leaky_relu": _flat,
    "clipped_relu": _flat,
    "clip": _flat,
    "hard_sigmoid": _flat,
    "elu": lambda y, a, b: (y <= 0).to(y.dtype),
    "sigmoid": lambda y, a, b: 1 - 2 * y,
    "tanh": lambda y, a, b: -2 * y,
    "softplus": lambda y, a, b: torch.exp(-y),
    "hard_swish": _hard_swish_bend,
    "silu": _silu_bend,
    "gelu": _gelu_bend,
    "gelu_tanh": _gelu_tanh_bend,
}


def _vmap_activation(info, in_dims, x, *how):  # type: ignore[no-untyped-def]
    return activation_op(x, *how), in_dims[0]


def _vmap_activation_backward(info, in_dims, saved, dy, *how):  # type: ignore[no-untyped-def]
    saved, dy = (to_front(t, at, info.batch_size) for t, at in zip((saved, dy), in_dims))
    return activation_backward_op(saved, dy, *how), 0


differentiable(
    activation_op,
    keep=_keep_saved,
    backward=_differentiate_activation,
    tangent=_tangent_of_activation,
    vmap=_vmap_activation,
)
differentiable(
    activation_backward_op,
    keep=_keep_both,
    backward=_differentiate_activation_backward,
    tangent=_tangent_of_activation_backward,
    vmap=_vmap_activation_backward,
)


def _softmax(x: TensorDesc, y: TensorDesc, axis: int, log: bool) -> SoftmaxProblem:
    return SoftmaxProblem("forward", x, y, "log" if log else "accurate", (axis,))


def _softmax_backward(
    y: TensorDesc, dy: TensorDesc, dx: TensorDesc, axis: int, log: bool
) -> SoftmaxProblem:
    return SoftmaxProblem("backward", dx, dy, "log" if log else "accurate", (axis,), y)


@torch.library.custom_op("bedstone::softmax", mutates_args=())
def softmax_op(x: Tensor, axis: int, log: bool) -> Tensor:
    y = _result(x)
    launch(_softmax, (x, y), axis, log)
    return y


@torch.library.custom_op("bedstone::softmax_backward", mutates_args=())
def softmax_backward_op(y: Tensor, dy: Tensor, axis: int, log: bool) -> Tensor:
    dx = _result(dy)
    launch(_softmax_backward, (y, dy, dx), axis, log)
    return dx


@softmax_op.register_fake
def _softmax_fake(x: Tensor, axis: int, log: bool) -> Tensor:
    return _result(x)


@softmax_backward_op.register_fake
def _softmax_backward_fake(y: Tensor, dy: Tensor, axis: int, log: bool) -> Tensor:
    return _result(dy)


def _keep_result(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.how = inputs
    save(ctx, output)


def _differentiate_softmax(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return softmax_backward_op(ctx.saved_tensors[0], dy, *ctx.how), None, None


def _differentiate_softmax_backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    y, dy = ctx.saved_tensors
    axis, log = ctx.how
    if log:
        power = y.exp()
        by_y = -g * power * dy.sum(axis, keepdim=True)
        by_dy = g - (g * power).sum(axis, keepdim=True)
    else:
        mean = (y * dy).sum(axis, keepdim=True)
        by_y = g * (dy - mean) - dy * (g * y).sum(axis, keepdim=True)
        by_dy = softmax_backward_op(y, g, axis, log)
    return by_y, by_dy, None, None


def _tangent_of_softmax(ctx: Any, x_t: Tensor) -> Tensor:
    (y,) = ctx.saved_tensors
    axis, log = ctx.how
    if log:
        return x_t - (y.exp() * x_t).sum(axis, keepdim=True)
    return softmax_backward_op(y, x_t, axis, log)  # its Jacobian is symmetric


def _tangent_of_softmax_backward(ctx: Any, y_t: Tensor | None, dy_t: Tensor | None) -> Tensor:
    y, dy = ctx.saved_tensors
    axis, log = ctx.how
    by_dy = None if dy_t is None else softmax_backward_op(y, dy_t, axis, log)
    by_y = None
    if y_t is not None and log:
        by_y = -y.exp() * y_t * dy.sum(axis, keepdim=True)
    elif y_t is not None:
        mean, mean_t = ((v * dy).sum(axis, keepdim=True) for v in (y, y_t))
        by_y = y_t * (dy - mean) - y * mean_t
    return total(by_y, by_dy)


def _vmap_softmax(info, in_dims, x, axis, log):  # type: ignore[no-untyped-def]
    axis = axis + 1 if axis >= 0 else axis  # counted from the end, it is the same one
    return softmax_op(to_front(x, in_dims[0], info.batch_size), axis, log), 0


def _vmap_softmax_backward(info, in_dims, y, dy, axis, log):  # type: ignore[no-untyped-def]
    y, dy = (to_front(t, at, info.batch_size) for t, at in zip((y, dy), in_dims))
    return softmax_backward_op(y, dy, axis + 1 if axis >= 0 else axis, log), 0


differentiable(
    softmax_op,
    keep=_keep_result,
    backward=_differentiate_softmax,
    tangent=_tangent_of_softmax,
    vmap=_vmap_softmax,
)
differentiable(
    softmax_backward_op,
    keep=_keep_both,
    backward=_differentiate_softmax_backward,
    tangent=_tangent_of_softmax_backward,
    vmap=_vmap_softmax_backward,
)


def activation(
    x: Tensor, kind: str, alpha: float | None = None, beta: float | None = None
) -> Tensor:
    """f(x), elementwise. `kind`, alpha and beta as bedstone.ActivationDesc has them: "relu",
    "leaky_relu", "clip", "elu", "sigmoid", "tanh", "silu", "gelu", "gelu_tanh", ...

    Raises InvalidDescriptor for a kind or a coefficient that is none.
    """
    return activation_op(x, kind, alpha, beta)


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """exp(x - max) / sum exp(x - max) along an axis."""
    return softmax_op(x, _checked(x, axis), False)


def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    """The logarithm of softmax, by a formula that does not underflow."""
    return softmax_op(x, _checked(x, axis), True)


def _checked(x: Tensor, axis: int) -> int:
    if not -x.dim() <= axis < max(x.dim(), 1):
        raise InvalidDescriptor("axis", axis, f"one of the {x.dim()} axes of x")
    return axis
