"""PaddlePaddle's softmax, log_softmax and activations."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import paddle
from paddle import Tensor

from bedstone import ActivationDesc, ActivationProblem, SoftmaxProblem, TensorDesc
from bedstone.frameworks.paddle.operators import Call
from bedstone.frameworks.paddle.plans import Native, Recipe, launch

# Elements from which bedstone's kernels are the faster ones, forward and backward together
# (measured against PaddlePaddle 3.3 with two threads on an AVX2 machine). PaddlePaddle writes most
# gradients over the memory of dy, which a node written in Python must not.
LEAST = {
    "softmax": 1 << 15, "log_softmax": 1 << 12, "relu": 1 << 20, "leaky_relu": 1 << 20,
    "sigmoid": 1 << 18, "silu": 1 << 18, "tanh": 1 << 22, "gelu": 1 << 17, "elu": 1 << 17,
}  # fmt: skip
# What PaddlePaddle's gradient operators take beside dy: x, or y, or both.
FROM_RESULT = ("sigmoid", "tanh")
NEEDS_RESULT = ("sigmoid", "tanh", "silu", "elu")
SMALL = "PaddlePaddle's kernel is as fast for a tensor so small"


class Sized(Call):
    """A call that pays from a number of elements on."""

    @classmethod
    def slower(cls, name: str, x: Tensor, *rest: Any) -> str | None:
        return SMALL if math.prod(x.shape) < LEAST[name] else None


def _softmax(x: TensorDesc, kind: str, axis: int) -> Recipe:
    y = TensorDesc.packed(x.dims, x.dtype)
    return Recipe(SoftmaxProblem("forward", x, y, kind, (axis,)), ((x.dims, str(x.dtype)),))


def _softmax_backward(y: TensorDesc, dy: TensorDesc, kind: str, axis: int) -> Recipe:
    dx = TensorDesc.packed(y.dims, y.dtype)
    problem = SoftmaxProblem("backward", dx, dy, kind, (axis,), saved=y)
    return Recipe(problem, ((y.dims, str(y.dtype)),))


class Softmax(Sized):
    """axis"""

    names = ("softmax", "log_softmax")
    once = True
    kinds: ClassVar[dict[str, str]] = {"softmax": "accurate", "log_softmax": "log"}

    def understand(self, *attributes: Any) -> None:
        (axis,) = attributes
        if type(axis) is not int:
            raise Native("an axis that is no integer")
        self.how = (self.kinds[self.name], axis)

    def forward(self) -> tuple[Any, Sequence[Tensor]]:
        (y,) = self.compute(_softmax, self.tensors, self.how)
        # Detached: a node of the graph that holds its own result would never be freed.
        return y, (y.detach(),)

    def gradient(self, index: int, saved: Sequence[Tensor], dy: Tensor) -> Tensor:
        return launch((self.name, "backward"), _softmax_backward, (*saved, dy), self.how)[0]

    def native_gradient(self, index: int, saved: Sequence[Tensor], dy: Tensor) -> Tensor:
        gradient = getattr(paddle._C_ops, f"{self.name}_grad")
        return gradient(*saved, dy, *self.rest)


@functools.cache
def _from_y(kind: str) -> bool:
    return ActivationDesc(kind).backward_from_y


def _activation(x: TensorDesc, *how: Any) -> Recipe:
    y = TensorDesc.packed(x.dims, x.dtype)
    return Recipe(
        ActivationProblem("forward", x, y, ActivationDesc(*how)), ((x.dims, str(x.dtype)),)
    )


def _activation_backward(saved: TensorDesc, dy: TensorDesc, *how: Any) -> Recipe:
    dx = TensorDesc.packed(dy.dims, dy.dtype)
    problem = ActivationProblem("backward", dx, dy, ActivationDesc(*how), saved=saved)
    return Recipe(problem, ((dy.dims, str(dy.dtype)),))


class Activation(Sized):
    """No attributes. Saves the input, and the result where the derivative is made from it."""

    names = ("sigmoid", "tanh", "silu")

    def understand(self, *attributes: Any) -> None:
        () = attributes
        self.how = (self.name,)

    def forward(self) -> tuple[Any, Sequence[Tensor]]:
        (y,) = self.compute(_activation, self.tensors, self.how)
        # Detached: a node of the graph that holds its own result would never be freed.
        return y, (*self.tensors, y.detach()) if _from_y(self.how[0]) else self.tensors

    def gradient(self, index: int, saved: Sequence[Tensor], dy: Tensor) -> Tensor:
        operands = (saved[-1], dy)
        return launch((self.name, "backward"), _activation_backward, operands, self.how)[0]

    def native_gradient(self, index: int, saved: Sequence[Tensor], dy: Tensor) -> Tensor:
        gradient = getattr(paddle._C_ops, f"{self.name}_grad")
        operands = [saved[0]] if self.name not in FROM_RESULT else []
        if self.name in NEEDS_RESULT:  # (computed again: it is to be part of the graph)
            operands.append(self.native(saved[0], *self.rest))
        return gradient(*operands, dy, *self.rest)


class Relu(Activation):
    """No attributes. Saves its result alone: the sign is all that any derivative needs."""

    names = ("relu",)

    def forward(self) -> tuple[Any, Sequence[Tensor]]:
        y, saved = super().forward()
        return y, saved[-1:]

    def native_gradient(self, index: int, saved: Sequence[Tensor], dy: Tensor) -> Tensor:
        return paddle._C_ops.relu_grad(*saved, dy)


class Gelu(Activation):
    """approximate"""

    names = ("gelu",)
    once = True
    keyword = "approximate"

    def understand(self, *attributes: Any) -> None:
        (approximate,) = attributes or (False,)
        self.rest = (bool(approximate),)
        self.how = ("gelu_tanh" if approximate else "gelu",)


class Sloped(Activation):
    """The coefficient."""

    names = ("leaky_relu", "elu")

    def understand(self, *attributes: Any) -> None:
        (alpha,) = attributes
        if not isinstance(alpha, (int, float)):
            raise Native("a coefficient that is no number")
        self.how = (self.name, float(alpha))
