"""Pointwise activations, forward and backward.

Each kind is a formula f(x) and its derivative. The derivative is written in terms of y wherever
y determines it, so that a network may overwrite x by y (the paper's in-place layers); the kinds
for which it does not (gelu, silu, hard_swish) need x in backward. NaN passes through all of them.
Source: the paper's section 2.2; clipped ReLU and ELU after Clevert et al., arXiv 1511.07289;
GELU (exact, by erf) after Hendrycks and Gimpel, arXiv 1606.08415.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from bedstone.spec.errors import InvalidDescriptor
from bedstone.spec.problem import Array, Arrays, Fields, Operand, Problem, desc_option, parse_dims
from bedstone.spec.tensor import LOGICAL_ORDERS, TensorDesc

# kind -> (defaults of alpha and beta, whether backward can work from y alone)
KINDS: dict[str, tuple[tuple[float, float], bool]] = {
    "relu": ((0.0, 0.0), True),  # max(x, 0)
    "leaky_relu": ((0.01, 0.0), True),  # x if x > 0 else alpha*x
    "clipped_relu": ((6.0, 0.0), True),  # min(max(x, 0), alpha)
    "clip": ((-1.0, 1.0), True),  # min(max(x, alpha), beta)
    "elu": ((1.0, 0.0), True),  # x if x > 0 else alpha*(exp(x) - 1)
    "sigmoid": ((0.0, 0.0), True),  # 1 / (1 + exp(-x))
    "tanh": ((0.0, 0.0), True),
    "hard_sigmoid": ((1 / 6, 0.5), True),  # min(max(alpha*x + beta, 0), 1)
    "hard_swish": ((1 / 6, 0.5), False),  # x * hard_sigmoid(x)
    "silu": ((0.0, 0.0), False),  # x * sigmoid(x)
    "gelu": ((0.0, 0.0), False),  # x/2 * (1 + erf(x/sqrt(2)))
    "gelu_tanh": ((0.0, 0.0), False),  # x/2 * (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
    "softplus": ((0.0, 0.0), True),  # log(1 + exp(x))
}

GELU_CUBIC = 0.044715
GELU_SCALE = math.sqrt(2 / math.pi)

_erf = np.vectorize(math.erf, otypes=[np.float64])


@dataclass(frozen=True)
class ActivationDesc:
    """A kind of activation with its two coefficients (see KINDS for what they mean).

    Coefficients left at None take the kind's defaults. Raises InvalidDescriptor for an unknown
    kind, a coefficient that is not finite, or bounds in the wrong order.
    """

    kind: str
    alpha: float = None  # type: ignore[assignment]
    beta: float = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidDescriptor("kind", self.kind, f"one of {tuple(KINDS)}")
        defaults = KINDS[self.kind][0]
        for name, default in zip(("alpha", "beta"), defaults):
            value = getattr(self, name)
            value = default if value is None else value
            try:
                value = float(value)
            except (TypeError, ValueError):
                raise InvalidDescriptor(name, value, "a number") from None
            unbounded = self.kind in ("clip", "clipped_relu") and math.isinf(value)
            if not math.isfinite(value) and not unbounded:
                raise InvalidDescriptor(name, value, "a finite number")
            object.__setattr__(self, name, value)
        if self.kind == "clip" and self.alpha > self.beta:
            raise InvalidDescriptor("alpha, beta", (self.alpha, self.beta), "alpha <= beta")
        if self.kind == "clipped_relu" and self.alpha < 0:
            raise InvalidDescriptor("alpha", self.alpha, "0 or more")
        if self.kind in ("leaky_relu", "elu") and self.alpha < 0:
            # The derivative could not be told from y: its sign would not give that of x.
            raise InvalidDescriptor("alpha", self.alpha, "0 or more")

    @property
    def backward_from_y(self) -> bool:
        """True if y and dy suffice for dx."""
        return KINDS[self.kind][1]

    def apply(self, x: Array) -> Array:
        """f(x), elementwise, in the dtype of x (the reference uses float64)."""
        with np.errstate(all="ignore"):
            return _FORWARD[self.kind](x, self.alpha, self.beta)  # type: ignore[no-any-return]

    def derivative(self, saved: Array) -> Array:
        """f'(x), elementwise, from y where `backward_from_y`, else from x."""
        with np.errstate(all="ignore"):
            return _DERIVATIVE[self.kind](saved, self.alpha, self.beta)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        if (self.alpha, self.beta) == KINDS[self.kind][0]:
            return self.kind
        return f"{self.kind}:{self.alpha!r}:{self.beta!r}"


def parse_desc(text: str) -> ActivationDesc:
    """The inverse of str(): `relu`, `clipped_relu:6.0:0.0`."""
    kind, *numbers = text.split(":")
    try:
        return ActivationDesc(kind, *(float(n) for n in numbers))
    except (TypeError, ValueError) as error:
        if isinstance(error, InvalidDescriptor):
            raise
        raise InvalidDescriptor("activation", text, "KIND or KIND:ALPHA:BETA") from None


def _sigmoid(x: Array, *_: float) -> Array:
    e = np.exp(-np.abs(x))
    y: Array = np.where(x >= 0, 1 / (1 + e), np.where(np.isnan(x), x, e / (1 + e)))
    return y


def _gelu_tanh_inner(x: Array) -> Array:
    return GELU_SCALE * (x + GELU_CUBIC * x * x * x)


def _gelu_tanh_derivative(x: Array, *_: float) -> Array:
    t = np.tanh(_gelu_tanh_inner(x))
    slope = GELU_SCALE * (1 + 3 * GELU_CUBIC * x * x)
    y: Array = np.where(np.isinf(x), x > 0, 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope)
    return y


def _silu_derivative(x: Array, *_: float) -> Array:
    s = _sigmoid(x)
    return np.where(np.isinf(x), x > 0, s * (1 + x * (1 - s)))


def _gelu_derivative(x: Array, *_: float) -> Array:
    density = np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    y: Array = np.where(np.isinf(x), x > 0, 0.5 * (1 + _erf(x / math.sqrt(2))) + x * density)
    return y


def _hard_swish_derivative(x: Array, a: float, b: float) -> Array:
    inner = a * x + b
    y: Array = np.where(inner <= 0, 0.0, np.where(inner >= 1, 1.0, 2 * a * x + b)) + _nan(x)
    return y


def _nan(x: Array) -> Array:
    """x's NaNs, and 0 elsewhere: keeps NaN alive in formulas made of comparisons."""
    return np.where(np.isnan(x), x, 0.0)


def _times_limit(x: Array, factor: Array) -> Array:
    """x * factor with the limit 0 where x = -inf meets factor 0."""
    return np.where(np.isneginf(x), 0.0, x * factor)


# np.maximum and np.minimum propagate NaN, as the primitives promise.
_FORWARD: dict[str, Any] = {
    "relu": lambda x, a, b: np.maximum(x, 0),
    "leaky_relu": lambda x, a, b: np.where(x > 0, x, a * x),
    "clipped_relu": lambda x, a, b: np.minimum(np.maximum(x, 0), a),
    "clip": lambda x, a, b: np.minimum(np.maximum(x, a), b),
    "elu": lambda x, a, b: np.where(x > 0, x, a * np.expm1(np.minimum(x, 0))),
    "sigmoid": _sigmoid,
    "tanh": lambda x, a, b: np.tanh(x),
    "hard_sigmoid": lambda x, a, b: np.minimum(np.maximum(a * x + b, 0), 1),
    "hard_swish": lambda x, a, b: _times_limit(x, np.minimum(np.maximum(a * x + b, 0), 1)),
    "silu": lambda x, a, b: _times_limit(x, _sigmoid(x)),
    "gelu": lambda x, a, b: _times_limit(x, 0.5 * (1 + _erf(x / math.sqrt(2)))),
    "gelu_tanh": lambda x, a, b: _times_limit(x, 0.5 * (1 + np.tanh(_gelu_tanh_inner(x)))),
    "softplus": lambda x, a, b: np.logaddexp(x, 0.0),
}

_DERIVATIVE: dict[str, Any] = {  # of y, or of x for the kinds that need it
    "relu": lambda y, a, b: np.where(y > 0, 1.0, 0.0) + _nan(y),
    "leaky_relu": lambda y, a, b: np.where(y > 0, 1.0, a) + _nan(y),
    "clipped_relu": lambda y, a, b: np.where((y > 0) & (y < a), 1.0, 0.0) + _nan(y),
    "clip": lambda y, a, b: np.where((y > a) & (y < b), 1.0, 0.0) + _nan(y),
    "elu": lambda y, a, b: np.where(y > 0, 1.0, y + a),
    "sigmoid": lambda y, a, b: y * (1 - y),
    "tanh": lambda y, a, b: (1 - y) * (1 + y),  # 1 - y*y would lose digits as y nears 1
    "hard_sigmoid": lambda y, a, b: np.where((y > 0) & (y < 1), a, 0.0) + _nan(y),
    "hard_swish": _hard_swish_derivative,
    "silu": _silu_derivative,
    "gelu": _gelu_derivative,
    "gelu_tanh": _gelu_tanh_derivative,
    "softplus": lambda y, a, b: -np.expm1(-y),
}


@dataclass(frozen=True)
class ActivationProblem(Problem):
    """One activation call; x and y have the same dims and may be the same memory.

    forward   y  = alpha * f(x) + beta * y           operands x, y
    backward  dx = alpha * dy * f'(x) + beta * dx    operands y, dy, dx (x, dy, dx for the kinds
              whose derivative y does not determine); dx may be dy's or the saved tensor's memory
    """

    primitive: ClassVar[str] = "activation"
    direction: str
    x: TensorDesc
    y: TensorDesc
    activation: ActivationDesc
    saved: TensorDesc = None  # type: ignore[assignment]  # backward: y's (or x's) own strides
    deterministic: bool = True

    def __post_init__(self) -> None:
        if self.direction not in ("forward", "backward"):
            raise InvalidDescriptor("direction", self.direction, "'forward' or 'backward'")
        if self.saved is None or self.direction == "forward":  # forward saves nothing
            object.__setattr__(self, "saved", self.y)
        if self.saved.dims != self.y.dims or self.saved.dtype is not self.y.dtype:
            raise InvalidDescriptor("saved", str(self.saved), f"dims and dtype of dy, {self.y}")
        if self.y.dims != self.x.dims:
            raise InvalidDescriptor("y", self.y.dims, f"the dims of x, {self.x.dims}")
        if self.y.dtype is not self.x.dtype or not self.x.dtype.is_floating:
            raise InvalidDescriptor("y", str(self.y.dtype), f"the dtype of x, {self.x.dtype}")
        for operand in self.outputs:
            if operand.desc.self_overlaps():
                raise InvalidDescriptor(
                    operand.name, operand.desc.strides, "an output whose elements do not overlap"
                )

    @property
    def operands(self) -> tuple[Operand, ...]:
        if self.direction == "forward":
            return (Operand("x", self.x), Operand("y", self.y, "out"))
        from_y = self.activation.backward_from_y
        return (
            Operand("y" if from_y else "x", self.saved),
            Operand("dy", self.y),
            Operand("dx", self.x, "out"),
        )

    @property
    def in_place(self) -> tuple[str, ...]:
        return ("x", "y", "dy")

    @property
    def flops(self) -> int:
        return self.x.size

    def compute(self, arrays: Arrays) -> dict[str, Array]:
        if self.direction == "forward":
            return {"y": self.activation.apply(arrays["x"])}
        saved = arrays["y" if self.activation.backward_from_y else "x"]
        with np.errstate(all="ignore"):
            return {"dx": arrays["dy"] * self.activation.derivative(saved)}

    def fields(self) -> str:
        default = LOGICAL_ORDERS.get(self.x.rank)
        line = "x".join(map(str, self.x.dims)) + f" {self.x.dtype} kind={self.activation}"
        for name in ("x", "y") if self.direction == "forward" else ("x", "y", "saved"):
            line += desc_option(name, getattr(self, name), default)
        return line

    @classmethod
    def from_fields(cls, direction: str, fields: Fields) -> ActivationProblem:
        dims = parse_dims(fields.shape)
        default = LOGICAL_ORDERS.get(len(dims))
        x, y, saved = (fields.desc(k, dims, fields.dtype(), default) for k in ("x", "y", "saved"))
        kind = parse_desc(fields.get("kind", "relu"))
        return cls(direction, x, y, kind, saved if direction == "backward" else y)


def problem_from_fields(direction: str, fields: Fields) -> ActivationProblem:
    """The problem of an `activation DIRECTION ...` line."""
    return ActivationProblem.from_fields(direction, fields)
