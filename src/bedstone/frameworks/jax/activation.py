"""Activations with the signatures of jax.nn.

The derivative is made from the result wherever that determines it, and is its own transpose: one
kernel serves jvp and grad.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from bedstone import ActivationDesc, ActivationProblem, InvalidDescriptor, TensorDesc
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
from bedstone.spec.activation import GELU_CUBIC, GELU_SCALE


@dataclass(frozen=True)
class How:
    """A kind of activation and its coefficient (None: the kind has none, or its usual one)."""

    kind: str
    alpha: float | None = None

    def batched(self) -> How:
        """The same for any dims."""
        return self

    @property
    def desc(self) -> ActivationDesc:
        return ActivationDesc(self.kind, self.alpha)  # type: ignore[arg-type]


def _gelu(x: Any) -> Any:
    return 0.5 * x * (1 + lax.erf(x * math.sqrt(0.5)))


def _gelu_tanh(x: Any) -> Any:
    return 0.5 * x * (1 + lax.tanh(GELU_SCALE * (x + GELU_CUBIC * x * x * x)))


def _hard_swish(x: Any) -> Any:
    return x * jnp.minimum(jnp.maximum(x + 3, 0), 6) / 6


# By JAX, where there is no kernel and for derivatives of derivatives: f(x, alpha) ...
FORWARD: dict[str, Callable[[Any, Any], Any]] = {
    "relu": lambda x, a: jnp.maximum(x, 0),
    "leaky_relu": lambda x, a: jnp.where(x > 0, x, a * x),
    "clipped_relu": lambda x, a: jnp.minimum(jnp.maximum(x, 0), a),
    "elu": lambda x, a: jnp.where(x > 0, x, a * jnp.expm1(jnp.minimum(x, 0))),
    "sigmoid": lambda x, a: lax.logistic(x),
    "tanh": lambda x, a: lax.tanh(x),
    "silu": lambda x, a: x * lax.logistic(x),
    "gelu": lambda x, a: _gelu(x),
    "gelu_tanh": lambda x, a: _gelu_tanh(x),
    "hard_swish": lambda x, a: _hard_swish(x),
}
# ... and f' by y. The kinds that are missing take it by x.
SLOPE: dict[str, Callable[[Any, Any], Any]] = {
    "relu": lambda y, a: jnp.where(y > 0, 1.0, 0.0),
    "leaky_relu": lambda y, a: jnp.where(y > 0, 1.0, a),
    "clipped_relu": lambda y, a: jnp.where((y > 0) & (y < a), 1.0, 0.0),
    "elu": lambda y, a: jnp.where(y > 0, 1.0, y + a),
    "sigmoid": lambda y, a: y * (1 - y),
    "tanh": lambda y, a: (1 - y) * (1 + y),
}


def _forward_by_jax(x: Any, how: How) -> Any:
    return FORWARD[how.kind](x, how.desc.alpha)


def _backward_by_jax(saved: Any, dy: Any, how: How) -> Any:
    if how.kind in SLOPE:
        return dy * SLOPE[how.kind](saved, how.desc.alpha).astype(dy.dtype)
    return jax.jvp(lambda x: _forward_by_jax(x, how), (saved,), (dy,))[1]


def _problem(direction: str, size: int, dtype: Any, how: How) -> ActivationProblem:
    flat = TensorDesc.packed((size,), str(dtype))
    return ActivationProblem(direction, flat, flat, how.desc)


def _forward(x: Any, *, how: How, where: str) -> Any:
    y = handler.call(_problem("forward", x.size, x.dtype, how), (x,), x.shape, where)
    return _forward_by_jax(x, how) if isinstance(y, str) else y


def _backward(saved: Any, dy: Any, *, how: How, where: str) -> Any:
    dx = handler.call(_problem("backward", dy.size, dy.dtype, how), (saved, dy), dy.shape, where)
    return _backward_by_jax(saved, dy, how) if isinstance(dx, str) else dx


def _sharing(*shapes: tuple[int, ...], how: How) -> Sharing:
    axes = tuple((f"a{i}",) for i in range(len(shapes[0])))
    return Sharing((axes,) * len(shapes), axes, frozenset(label for (label,) in axes))


forward_p = primitive("activation", _forward, lambda x, how: x, _sharing)
backward_p = primitive("activation_backward", _backward, lambda x, dy, how: dy, _sharing)


def _tangent(tangent: Any, y: Any, x: Any, *, how: How) -> Any:
    return bind(backward_p, y if how.desc.backward_from_y else x, tangent, how=how)


ad.defjvp2(forward_p, _tangent)
transposes(backward_p, backward_p, _backward_by_jax, _backward_by_jax)
batched(forward_p)
batched(backward_p)


def _alpha(name: str, value: Any) -> float:
    if not isinstance(value, (int, float)):
        raise Native(f"{name} that is no number")
    return float(value)


# What a call means. The names of arguments are those of jax.nn.
MEANINGS: dict[str, Callable[..., How]] = {
    "relu": lambda: How("relu"),
    "relu6": lambda: How("clipped_relu", 6.0),
    "leaky_relu": lambda negative_slope=0.01: How(
        "leaky_relu", _alpha("negative_slope", negative_slope)
    ),
    "elu": lambda alpha=1.0: How("elu", _alpha("alpha", alpha)),
    "sigmoid": lambda: How("sigmoid"),
    "tanh": lambda: How("tanh"),
    "silu": lambda: How("silu"),
    "gelu": lambda approximate=True: How("gelu_tanh" if approximate else "gelu"),
    "hard_swish": lambda: How("hard_swish"),
}
NAMES = tuple(MEANINGS)


def _run(x: Any, how: How) -> tuple[Any, str]:
    check_array(x)
    asked = _problem("forward", math.prod(x.shape), x.dtype, how)
    made = handler.target(asked, handler.platform())
    if isinstance(made, str):
        raise Native(made)
    return forward_p.bind(jnp.asarray(x), how=how), made.algorithm


def taker(name: str) -> Callable[..., tuple[Any, str]]:
    """What takes a call of an activation of jax.nn: (x, further arguments) -> (the result, the
    algorithm). It raises Native where the call is not ours."""

    def take(x: Any, *arguments: Any, **keywords: Any) -> tuple[Any, str]:
        try:
            return _run(x, MEANINGS[name](*arguments, **keywords))
        except InvalidDescriptor as error:
            raise Native(str(error)) from None

    return take


def _function(name: str, what: str) -> Callable[..., Any]:
    def function(x: Any, *arguments: Any, **keywords: Any) -> Any:
        try:
            return _run(jnp.asarray(x), MEANINGS[name](*arguments, **keywords))[0]
        except Native as reason:
            raise NotImplementedError(f"bedstone: {reason}") from None

    function.__name__ = function.__qualname__ = name
    function.__doc__ = (
        f"{what}, on bedstone: under jit, grad, jvp and vmap, to any order.\n\n"
        f"The arguments of jax.{'numpy' if name == 'tanh' else 'nn'}.{name}. Raises\n"
        "NotImplementedError for what there is no compiled kernel for, and InvalidDescriptor for\n"
        "a coefficient out of range."
    )
    return function


relu = _function("relu", "max(x, 0)")
relu6 = _function("relu6", "min(max(x, 0), 6)")
leaky_relu = _function("leaky_relu", "x where x > 0, else negative_slope * x")
elu = _function("elu", "x where x > 0, else alpha * (exp(x) - 1)")
sigmoid = _function("sigmoid", "1 / (1 + exp(-x))")
tanh = _function("tanh", "tanh(x)")
silu = _function("silu", "x * sigmoid(x)")
gelu = _function("gelu", "x * (the normal distribution's integral up to x)")
hard_swish = _function("hard_swish", "x * min(max(x + 3, 0), 6) / 6")
