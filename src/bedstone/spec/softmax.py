"""Softmax over any axes, forward and backward.

    y = exp(x - m) / sum exp(x - m)            dx = y * (dy - sum(y * dy))
    y = x - m - log(sum exp(x - m))   (log)    dx = dy - exp(y) * sum(dy)

with sums over the normalised axes. m is the maximum, which keeps exp from overflowing; the
algorithm `fast` takes m = 0. Source: the paper's section 2.2; log after cuDNN's third release.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from bedstone.spec.errors import InvalidDescriptor
from bedstone.spec.problem import (
    Array,
    Arrays,
    Fields,
    Operand,
    Problem,
    check_same_data,
    desc_option,
    parse_dims,
)
from bedstone.spec.tensor import LOGICAL_ORDERS, TensorDesc, integer_tuple

# fast      exp(x) / sum exp(x): saves the search for the maximum; overflows where exp(x) does
# accurate  scaled by the maximum
# log       the logarithm of accurate, by a formula that does not underflow
ALGORITHMS = ("fast", "accurate", "log")

# Operations an element (exp and log count as one): scale, exp, sum, divide; multiply, sum,
# subtract, multiply.
FLOPS_PER_ELEMENT = 4


def instance_axes(rank: int) -> tuple[int, ...]:
    """The axes of the paper's per-image softmax: all but N."""
    return tuple(range(1, rank))


def channel_axes(rank: int) -> tuple[int, ...]:
    """The axis of the paper's per-pixel softmax: C."""
    return (1,)


@dataclass(frozen=True)
class SoftmaxProblem(Problem):
    """One softmax call; all operands have the same dims and dtype. x and y describe the input-
    and the output-shaped tensor in both directions: in backward x is dx's descriptor, y is dy's.

    forward   y  = alpha * softmax(x) + beta * y          operands x, y
    backward  dx = alpha * softmax'(y, dy) + beta * dx    operands y, dy, dx

    algorithm  one of ALGORITHMS
    axes       the normalised axes, any of them, negative ones counted from the end; kept sorted
    saved      backward: the strides of y, the forward result (default: those of dy)

    y may be the memory of x, and dx that of dy or y.
    """

    primitive: ClassVar[str] = "softmax"
    direction: str
    x: TensorDesc
    y: TensorDesc
    algorithm: str = "accurate"
    axes: tuple[int, ...] = (1,)
    saved: TensorDesc = None  # type: ignore[assignment]
    deterministic: bool = True

    def __post_init__(self) -> None:
        if self.direction not in ("forward", "backward"):
            raise InvalidDescriptor("direction", self.direction, "'forward' or 'backward'")
        if self.algorithm not in ALGORITHMS:
            raise InvalidDescriptor("algorithm", self.algorithm, f"one of {ALGORITHMS}")
        if self.saved is None or self.direction == "forward":
            object.__setattr__(self, "saved", self.y)
        rank, given = self.x.rank, integer_tuple("axes", self.axes)
        axes = tuple(sorted({a % rank for a in given}))
        if not axes or len(axes) != len(given) or any(not -rank <= a < rank for a in given):
            raise InvalidDescriptor("axes", self.axes, f"different axes of the {rank} of x")
        object.__setattr__(self, "axes", axes)
        check_same_data(self.x, {"y": self.y, "saved": self.saved})
        self.check_outputs()

    @property
    def operands(self) -> tuple[Operand, ...]:
        if self.direction == "forward":
            return (Operand("x", self.x), Operand("y", self.y, "out"))
        return (Operand("y", self.saved), Operand("dy", self.y), Operand("dx", self.x, "out"))

    @property
    def in_place(self) -> tuple[str, ...]:
        return ("x", "y", "dy")

    @property
    def flops(self) -> int:
        return self.x.size * FLOPS_PER_ELEMENT

    @property
    def reduction_length(self) -> int:
        """Number of terms of each sum."""
        length = 1
        for axis in self.axes:
            length *= self.x.dims[axis]
        return length

    def compute(self, arrays: Arrays) -> dict[str, Array]:
        with np.errstate(all="ignore"):
            if self.direction == "forward":
                return {"y": self._forward(arrays["x"])}
            y, dy = arrays["y"], arrays["dy"]
            if self.algorithm == "log":
                return {"dx": dy - np.exp(y) * dy.sum(axis=self.axes, keepdims=True)}
            return {"dx": y * (dy - (y * dy).sum(axis=self.axes, keepdims=True))}

    def _forward(self, x: Array) -> Array:
        if self.algorithm != "fast":
            x = x - x.max(axis=self.axes, keepdims=True, initial=-np.inf)
        power = np.exp(x)
        total = power.sum(axis=self.axes, keepdims=True)
        result: Array = x - np.log(total) if self.algorithm == "log" else power / total
        return result

    def fields(self) -> str:
        line = "x".join(map(str, self.x.dims)) + f" {self.x.dtype} algorithm={self.algorithm}"
        line += " axes=" + ",".join(map(str, self.axes))
        for name in ("x", "y") if self.direction == "forward" else ("x", "y", "saved"):
            line += desc_option(name, getattr(self, name), LOGICAL_ORDERS.get(self.x.rank))
        return line

    @classmethod
    def from_fields(cls, direction: str, fields: Fields) -> SoftmaxProblem:
        dims, dtype = parse_dims(fields.shape), fields.dtype()
        layout = fields.layout(len(dims))
        x, y, saved = (fields.desc(k, dims, dtype, layout) for k in ("x", "y", "saved"))
        axes = fields.integers("axes", (1,))
        return cls(direction, x, y, fields.get("algorithm", "accurate"), axes, saved)


def problem_from_fields(direction: str, fields: Fields) -> SoftmaxProblem:
    """The problem of a `softmax DIRECTION ...` line."""
    return SoftmaxProblem.from_fields(direction, fields)
