"""PaddlePaddle's softmax, log_softmax and activations."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import paddle
from paddle import Tensor

from bedstone import ActivationDesc, ActivationProblem, SoftmaxProblem, TensorDesc
from bedstone.frameworks.paddle.operators import Call, Gradients
from bedstone.frameworks.paddle.plans import Native, Recipe, launch


def _softmax(x: TensorDesc, kind: str, axis: int) -> Recipe:
    y = TensorDesc.packed(x.dims, x.dtype)
    return Recipe(SoftmaxProblem("forward", x, y, kind, (axis,)), ((x.dims, str(x.dtype)),))


def _softmax_backward(y: TensorDesc, dy: TensorDesc, kind: str, axis: int) -> Recipe:
    dx = TensorDesc.packed(y.dims, y.dtype)
    problem = SoftmaxProblem("backward", dx, dy, kind, (axis,), saved=y)
    return Recipe(problem, ((y.dims, str(y.dtype)),))


class Softmax(Call):
    """softmax and log_softmax: axis."""

    names = ("softmax", "log_softmax")
    kinds: ClassVar[dict[str, str]] = {"softmax": "accurate", "log_softmax": "log"}

    def understand(self, *attributes: Any) -> None:
        (axis,) = attributes
        if type(axis) is not int:
            raise Native("an axis that is no integer")
        self.how = (self.kinds[self.name], axis)

    def forward(self) -> tuple[Any, Sequence[Tensor]]:
        (y,) = launch((self.name, "forward"), _softmax, self.tensors, self.how)
        # Detached: a graph node that holds its own result would never be freed.
        return y, (y.detach(),)

    def backward(self, saved: Sequence[Tensor], dy: Tensor) -> Gradients:
        return launch((self.name, "backward"), _softmax_backward, (*saved, dy), self.how)

    def native_backward(self, saved: Sequence[Tensor], dy: Tensor) -> Gradients:
        """(PaddlePaddle differentiates softmax once only.)"""
        gradient = getattr(paddle._C_ops, f"{self.name}_grad")
        return (gradient(*saved, dy, *self.rest),)


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


class Activation(Call):
    """Elementwise functions without attributes: the input is saved, and the result where the
    derivative is made from it."""

    names = ("sigmoid", "tanh", "silu")

    def understand(self, *attributes: Any) -> None:
        if any(attribute is not None for attribute in attributes):  # (a layer's name, if any)
            raise Native(f"arguments not understood: {attributes}")
        self.how = (self.name,)

    def forward(self) -> tuple[Any, Sequence[Tensor]]:
        (y,) = launch((self.name, "forward"), _activation, self.tensors, self.how)
        # Detached: a graph node that holds its own result would never be freed.
        return y, (*self.tensors, y.detach()) if _from_y(self.how[0]) else self.tensors

    def backward(self, saved: Sequence[Tensor], dy: Tensor) -> Gradients:
        operands = (saved[-1], dy)
        return launch((self.name, "backward"), _activation_backward, operands, self.how)


class Relu(Activation):
    """Saves its result alone, as PaddlePaddle's does: the sign is all that any derivative needs."""

    names = ("relu",)

    def forward(self) -> tuple[Any, Sequence[Tensor]]:
        y, saved = super().forward()
        return y, saved[-1:]

    def native_backward(self, saved: Sequence[Tensor], dy: Tensor) -> Gradients:
        return (paddle._C_ops.relu_grad(*saved, dy),)


class Gelu(Activation):
    """gelu: approximate."""

    names = ("gelu",)

    def understand(self, *attributes: Any) -> None:
        (approximate,) = attributes
        self.how = ("gelu_tanh" if approximate else "gelu",)


class Sloped(Activation):
    """leaky_relu and elu: their coefficient."""

    names = ("leaky_relu", "elu")

    def understand(self, *attributes: Any) -> None:
        (alpha,) = attributes
        if not isinstance(alpha, (int, float)):
            raise Native("a coefficient that is no number")
        self.how = (self.name, float(alpha))
