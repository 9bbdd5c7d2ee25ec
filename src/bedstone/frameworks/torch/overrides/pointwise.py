"""Softmax and activations of PyTorch, in place too, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bedstone import ActivationDesc, ActivationProblem, SoftmaxProblem
from bedstone.frameworks.torch.calls import Call, Describe, Native, Operator, Step


def _softmax(kind: str) -> Describe:
    """_softmax(x, dim, half_to_float)"""

    def describe(call: Call) -> list[Step]:
        return [Step(SoftmaxProblem("forward", call.desc(0), call.desc(~0), kind, (call[1],)),
                     (0, ~0))]  # fmt: skip

    return describe


def _softmax_backward(kind: str) -> Describe:
    """_softmax_backward_data(dy, y, dim, input_dtype)"""

    def describe(call: Call) -> list[Step]:
        dy, y, dx = call.desc(0), call.desc(1), call.desc(~0)
        problem = SoftmaxProblem("backward", dx, dy, kind, (call[2],), saved=y)
        return [Step(problem, (1, 0, ~0))]

    return describe


# What an activation's arguments after x (or those of its gradient) say of it.
Reader = Callable[[Call], ActivationDesc]


def _plain(kind: str) -> Reader:
    return lambda call: ActivationDesc(kind)


def _elu(first: int) -> Reader:
    def read(call: Call) -> ActivationDesc:
        alpha, scale, input_scale = call.arguments[first : first + 3]
        if scale != 1 or input_scale != 1:
            raise Native("an ELU with scales (SELU, CELU)")
        return ActivationDesc("elu", alpha)

    return read


def _clip(first: int) -> Reader:
    return lambda call: ActivationDesc("clip", *call.arguments[first : first + 2])


def _leaky(first: int) -> Reader:
    return lambda call: ActivationDesc("leaky_relu", call[first])


def _gelu(call: Call) -> ActivationDesc:
    kinds = {"none": "gelu", "tanh": "gelu_tanh"}
    return ActivationDesc(kinds[call.keywords["approximate"]])


def _forward(read: Reader) -> Describe:
    def describe(call: Call) -> list[Step]:
        return [Step(ActivationProblem("forward", call.desc(0), call.desc(~0), read(call)),
                     (0, ~0))]  # fmt: skip

    return describe


def _backward(read: Reader, saved: int = 1) -> Describe:
    """The gradient's first argument is dy; `saved` is the number of what forward kept."""

    def describe(call: Call) -> list[Step]:
        dy, dx = call.desc(0), call.desc(~0)
        problem = ActivationProblem("backward", dx, dy, read(call), call.desc(saved))
        return [Step(problem, (saved, 0, ~0))]

    return describe


def _relu_gradient(call: Call) -> ActivationDesc:
    """threshold_backward(dy, y, threshold)"""
    if call[2] != 0:
        raise Native("a threshold other than 0")
    return ActivationDesc("relu")


def _elu_gradient(call: Call) -> ActivationDesc:
    """elu_backward(dy, alpha, scale, input_scale, is_result, x or y)"""
    if not call[4]:
        raise Native("the gradient of an ELU from its input")
    return _elu(1)(call)


def _leaky_gradient(call: Call) -> ActivationDesc:
    """leaky_relu_backward(dy, x or y, slope, is_result)"""
    if call[2] <= 0:
        raise Native("a slope that is not positive")
    return ActivationDesc("leaky_relu", call[2])


def _first_argument(arguments: Sequence[Any]) -> list[Any]:
    """The result of an operator that works in place."""
    return [0]


FORWARD: dict[str, Reader] = {
    "relu": _plain("relu"), "sigmoid": _plain("sigmoid"), "tanh": _plain("tanh"),
    "silu": _plain("silu"), "hardswish": _plain("hard_swish"), "elu": _elu(1),
    "hardtanh": _clip(1), "leaky_relu": _leaky(1), "gelu": _gelu,
}  # fmt: skip
BACKWARD: dict[str, Describe] = {
    "threshold_backward": _backward(_relu_gradient),
    "sigmoid_backward": _backward(_plain("sigmoid")),
    "tanh_backward": _backward(_plain("tanh")),
    "silu_backward": _backward(_plain("silu")),
    "hardswish_backward": _backward(_plain("hard_swish")),
    "elu_backward": _backward(_elu_gradient, 5),
    "hardtanh_backward": _backward(_clip(2)),
    "leaky_relu_backward": _backward(_leaky_gradient),
    "gelu_backward": _backward(_gelu),
}

OPERATORS = (
    Operator("_softmax", _softmax("accurate")),
    Operator("_log_softmax", _softmax("log")),
    Operator("_softmax_backward_data", _softmax_backward("accurate")),
    Operator("_log_softmax_backward_data", _softmax_backward("log")),
    *(Operator(name, _forward(read)) for name, read in FORWARD.items()),
    *(Operator(f"{name}_", _forward(read), _first_argument) for name, read in FORWARD.items()),
    *(Operator(name, describe) for name, describe in BACKWARD.items()),
)
