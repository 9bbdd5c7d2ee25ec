"""Tensor operations: transform (copy between layouts and types), add, set and scale.

    transform  y = alpha * x + beta * y        x and y of equal dims; floating dtypes may differ
    add        y = alpha * b + beta * y        b broadcast along its dims of size 1
    set        y = alpha + beta * y
    scale      y = alpha * y                   in place; beta is not used

Source: the paper's section 2.2. Its four ways to add a bias b to y of dims (N, C, H, W) are
shapes of b: see `ADD_MODES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from bedstone.spec.dtypes import DType
from bedstone.spec.errors import InvalidDescriptor
from bedstone.spec.problem import Array, Arrays, Fields, Operand, Problem, desc_option, parse_dims
from bedstone.spec.tensor import LOGICAL_ORDERS, TensorDesc

DIRECTIONS = ("transform", "add", "set", "scale")

# The paper's modes -> which axes of y the bias has (N, C, then all the spatial ones).
ADD_MODES = {
    "same_hw": (False, False, True),  # (1, 1, H, W): one map for every channel of every image
    "same_chw": (False, True, True),  # (1, C, H, W): one image for every image
    "same_c": (False, True, False),  # (1, C, 1, 1): one number a channel
    "full": (True, True, True),  # (N, C, H, W)
}


def add_dims(mode: str, y: tuple[int, ...]) -> tuple[int, ...]:
    """The dims that a bias must have for a mode of ADD_MODES and y dims (N, C, spatial...)."""
    if mode not in ADD_MODES:
        raise InvalidDescriptor("mode", mode, f"one of {tuple(ADD_MODES)}")
    if len(y) < 2:
        raise InvalidDescriptor("y", y, "2 or more dims: N, C, spatial")
    images, channels, spatial = ADD_MODES[mode]
    kept = (images, channels, *(spatial,) * (len(y) - 2))
    return tuple(d if keep else 1 for d, keep in zip(y, kept))


@dataclass(frozen=True)
class TensorOpProblem(Problem):
    """One tensor operation; `direction` is its name.

    transform  operands x, y       add  operands b, y (b is described by x)
    set        operand y           scale  operand y

    x is None for set and scale. transform and add need memory of their own for y.
    """

    primitive: ClassVar[str] = "tensor_ops"
    direction: str
    y: TensorDesc
    x: TensorDesc | None = None
    deterministic: bool = True

    def __post_init__(self) -> None:
        if self.direction not in DIRECTIONS:
            raise InvalidDescriptor("direction", self.direction, f"one of {DIRECTIONS}")
        if not self.y.dtype.is_floating:
            raise InvalidDescriptor("y", str(self.y.dtype), "a floating-point dtype")
        needs_x = self.direction in ("transform", "add")
        if (self.x is not None) is not needs_x:
            expected = "a tensor" if needs_x else f"None, since {self.direction} has no input"
            raise InvalidDescriptor("x", self.x, expected)
        if self.x is not None:
            self._check_input("b" if self.direction == "add" else "x", self.x)
        self.check_outputs()

    def _check_input(self, name: str, x: TensorDesc) -> None:
        if not x.dtype.is_floating:
            raise InvalidDescriptor(name, str(x.dtype), "a floating-point dtype")
        if self.direction == "transform" and x.dims != self.y.dims:
            raise InvalidDescriptor(name, x.dims, f"the dims of y, {self.y.dims}")
        if self.direction == "add":
            if x.rank != self.y.rank or any(b not in (1, d) for b, d in zip(x.dims, self.y.dims)):
                raise InvalidDescriptor(name, x.dims, f"dims of 1, or those of y, {self.y.dims}")
            if x.dtype is not self.y.dtype:
                raise InvalidDescriptor(name, str(x.dtype), f"the dtype of y, {self.y.dtype}")

    @property
    def operands(self) -> tuple[Operand, ...]:
        if self.x is None:
            return (Operand("y", self.y, "inout" if self.direction == "scale" else "out"),)
        name = "b" if self.direction == "add" else "x"
        return (Operand(name, self.x), Operand("y", self.y, "out"))

    @property
    def flops(self) -> int:
        return self.y.size

    def compute(self, arrays: Arrays) -> dict[str, Array]:
        if self.direction == "set":
            return {"y": np.ones(self.y.dims)}
        if self.direction == "add":
            return {"y": np.broadcast_to(arrays["b"], self.y.dims)}
        return {"y": arrays["x" if self.direction == "transform" else "y"]}

    def reference(self, arrays: Arrays, alpha: float = 1.0, beta: float = 0.0) -> dict[str, Array]:
        """As Problem.reference; scale reads y whatever beta is, and ignores beta."""
        return super().reference(arrays, alpha, 0.0 if self.direction == "scale" else beta)

    def fields(self) -> str:
        default = LOGICAL_ORDERS.get(self.y.rank)
        line = "x".join(map(str, self.y.dims)) + f" {self.y.dtype}"
        if self.x is not None:
            if self.x.dims != self.y.dims:
                line += " b=" + "x".join(map(str, self.x.dims))
            if self.x.dtype is not self.y.dtype:
                line += f" from={self.x.dtype}"
            line += desc_option("x", self.x, default)
        return line + desc_option("y", self.y, default)

    @classmethod
    def from_fields(cls, direction: str, fields: Fields) -> TensorOpProblem:
        dims, dtype = parse_dims(fields.shape), fields.dtype()
        layout = fields.layout(len(dims))
        x = None
        if direction in ("transform", "add"):
            x_dims = parse_dims(fields.get("b", fields.shape))
            x_dtype = DType.of(fields.get("from", dtype))
            x = fields.desc("x", x_dims, x_dtype, layout)
        return cls(direction, fields.desc("y", dims, dtype, layout), x)


def problem_from_fields(direction: str, fields: Fields) -> TensorOpProblem:
    """The problem of a `tensor_ops OPERATION ...` line."""
    return TensorOpProblem.from_fields(direction, fields)
