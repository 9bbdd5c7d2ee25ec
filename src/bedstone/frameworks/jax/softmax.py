"""Softmax and its logarithm with the signatures of jax.nn.

With y the result, softmax's derivative y * (t - sum(y * t)) is its own transpose; the logarithm's,
t - sum(exp(y) * t), and dy - exp(y) * sum(dy) are each other's, and only the second has a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from bedstone import SoftmaxProblem, TensorDesc
from bedstone.frameworks.jax import handler
from bedstone.frameworks.jax.rules import (
    Native,
    batched,
    bind,
    check_array,
    primitive,
    transposes,
)
from bedstone.frameworks.jax.sharding import Sharing


@dataclass(frozen=True)
class How:
    """The kind ("accurate" or "log") and the normalised axes, next to each other."""

    kind: str
    axes: tuple[int, ...]

    def batched(self) -> How:
        """The same with an axis in front."""
        return replace(self, axes=tuple(a + 1 for a in self.axes))


def _forward_by_jax(x: Any, how: How) -> Any:
    x = x - jax.lax.stop_gradient(x.max(how.axes, keepdims=True))
    power = jnp.exp(x)
    total = power.sum(how.axes, keepdims=True)
    return x - jnp.log(total) if how.kind == "log" else power / total


def _backward_by_jax(y: Any, dy: Any, how: How) -> Any:
    if how.kind == "log":
        return dy - jnp.exp(y) * dy.sum(how.axes, keepdims=True)
    return y * (dy - (y * dy).sum(how.axes, keepdims=True))


def _tangent_by_jax(y: Any, t: Any, how: How) -> Any:
    return t - (jnp.exp(y) * t).sum(how.axes, keepdims=True)


def _problem(direction: str, shape: Sequence[int], dtype: Any, how: How) -> SoftmaxProblem:
    first, last = how.axes[0], how.axes[-1] + 1
    parts = (shape[:first], shape[first:last], shape[last:])
    desc = TensorDesc.packed(tuple(math.prod(part) for part in parts), str(dtype))
    return SoftmaxProblem(direction, desc, desc, how.kind, (1,))


def _forward(x: Any, *, how: How, where: str) -> Any:
    y = handler.call(_problem("forward", x.shape, x.dtype, how), (x,), x.shape, where)
    return _forward_by_jax(x, how) if isinstance(y, str) else y


def _backward(y: Any, dy: Any, *, how: How, where: str) -> Any:
    dx = handler.call(_problem("backward", dy.shape, dy.dtype, how), (y, dy), dy.shape, where)
    return _backward_by_jax(y, dy, how) if isinstance(dx, str) else dx


def _log_tangent(y: Any, t: Any, *, how: How, where: str) -> Any:
    return _tangent_by_jax(y, t, how)


def _sharing(*shapes: Sequence[int], how: How) -> Sharing:
    axes = tuple((f"a{i}",) for i in range(len(shapes[0])))
    free = frozenset(label for i, (label,) in enumerate(axes) if i not in how.axes)
    return Sharing((axes,) * len(shapes), axes, free)


forward_p = primitive("softmax", _forward, lambda x, how: x, _sharing)
backward_p = primitive("softmax_backward", _backward, lambda y, dy, how: dy, _sharing)
log_backward_p = primitive("log_softmax_backward", _backward, lambda y, dy, how: dy, _sharing)
log_tangent_p = primitive("log_softmax_tangent", _log_tangent, lambda y, t, how: t, _sharing)


def _tangent(tangent: Any, y: Any, x: Any, *, how: How) -> Any:
    return bind(log_tangent_p if how.kind == "log" else backward_p, y, tangent, how=how)


ad.defjvp2(forward_p, _tangent)
transposes(backward_p, backward_p, _backward_by_jax, _backward_by_jax)
transposes(log_tangent_p, log_backward_p, _tangent_by_jax, _backward_by_jax)
for _made in (forward_p, backward_p, log_backward_p, log_tangent_p):
    batched(_made)


def _run(x: Any, axis: Any, kind: str) -> tuple[Any, str]:
    check_array(x)
    if not x.ndim:
        raise Native("a scalar")
    given = range(x.ndim) if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
    if any(not -x.ndim <= a < x.ndim for a in given):
        raise Native(f"the axis {axis} of {x.ndim}")
    axes = tuple(sorted({a % x.ndim for a in given}))
    if not axes or axes != tuple(range(axes[0], axes[0] + len(given))):
        raise Native("no axes, or some that are not next to each other")
    how = How(kind, axes)
    made = handler.target(_problem("forward", x.shape, x.dtype, how), handler.platform())
    if isinstance(made, str):
        raise Native(made)
    return forward_p.bind(jnp.asarray(x), how=how), made.algorithm


def take_softmax(x: Any, axis: Any = -1, where: Any = None) -> tuple[Any, str]:
    """(the result, the algorithm) of a call of jax.nn.softmax; raises Native where it is not
    ours."""
    if where is not None:
        raise Native("the argument where")
    return _run(x, axis, "accurate")


def take_log_softmax(x: Any, axis: Any = -1, where: Any = None) -> tuple[Any, str]:
    """The same of jax.nn.log_softmax."""
    if where is not None:
        raise Native("the argument where")
    return _run(x, axis, "log")


def _call(x: Any, axis: Any, kind: str) -> Any:
    try:
        return _run(jnp.asarray(x), axis, kind)[0]
    except Native as reason:
        raise NotImplementedError(f"bedstone: {reason}") from None


def softmax(x: Any, axis: int | Sequence[int] | None = -1) -> Any:
    """exp(x) / sum(exp(x)) over `axis` (one, several next to each other, None for all), on
    bedstone: under jit, grad, jvp and vmap, to any order. Raises NotImplementedError for what there
    is no compiled kernel for."""
    return _call(x, axis, "accurate")


def log_softmax(x: Any, axis: int | Sequence[int] | None = -1) -> Any:
    """The logarithm of `softmax(x, axis)`, by a formula that does not underflow."""
    return _call(x, axis, "log")
