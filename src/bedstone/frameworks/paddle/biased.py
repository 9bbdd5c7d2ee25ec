"""Convolutions with a bias: one kernel in the place of PaddlePaddle's convolution and sum.

nn.Conv2D and nn.Conv3D call `paddle.nn.functional.conv._conv_nd`, which computes the operator and
then adds the bias with a broadcast sum. That sum alone takes longer than bedstone's convolution in
many layers, so a call with a bias is taken as a whole; what is declined goes the native way, where
the operator may still be bedstone's.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

from paddle import Tensor
from paddle.nn.functional import conv as functional

from bedstone import BiasGradientProblem, Epilogue, TensorDesc
from bedstone.frameworks.paddle import convolution
from bedstone.frameworks.paddle.convolution import Convolution, GroupsFirst, channels_second
from bedstone.frameworks.paddle.operators import Known, policy, run_call, slower, untranslated
from bedstone.frameworks.paddle.plans import Native, Recipe, launch

native = functional._conv_nd
OPERATORS = (*Convolution.names, *GroupsFirst.names)
_known: dict[str, Known] = {name: {} for name in OPERATORS}


def _forward(x: TensorDesc, w: TensorDesc, bias: TensorDesc, *attributes: Any) -> Recipe:
    recipe = convolution._forward(x, w, *attributes)
    problem = dataclasses.replace(recipe.problem, epilogue=Epilogue(bias=True))
    if bias != problem.bias:
        raise Native("a bias that is no vector of the channels")
    return dataclasses.replace(recipe, problem=problem)


def _bias_gradient(dy: TensorDesc, last: bool) -> Recipe:
    dy = channels_second(dy, last)
    bias = TensorDesc.packed(dy.dims[1:2], dy.dtype)
    return Recipe(BiasGradientProblem(dy, bias), ((bias.dims, str(dy.dtype)),))


class Biased(Convolution):
    """x, w and the bias (K), and conv2d's attributes in its order, whatever the operator."""

    leading = 3

    def understand(self, *attributes: Any) -> None:
        super().understand(*attributes)
        self.given = attributes
        if self.name in GroupsFirst.names:  # (as PaddlePaddle's gradient operator takes them)
            *others, dilation, groups, data_format = attributes
            self.rest = (*others, groups, dilation, data_format)

    def natively(self, *tensors: Any) -> Any:
        channels = -1 if self.how[-1] else 1
        return native(*tensors, *self.given, channels, self.name)

    def forward(self) -> tuple[Any, Sequence[Tensor]]:
        (y,) = self.compute(_forward, self.tensors, self.how)
        return y, self.tensors[:2]

    def gradient(self, index: int, saved: Sequence[Tensor], dy: Tensor) -> Tensor:
        if index < len(saved):
            return super().gradient(index, saved, dy)
        return launch((self.name, "backward_bias"), _bias_gradient, (dy,), self.how[-1:])[0]

    def native_gradient(self, index: int, saved: Sequence[Tensor], dy: Tensor) -> Tensor:
        if index < len(saved):
            return super().native_gradient(index, saved, dy)
        channels = len(dy.shape) - 1 if self.how[-1] else 1
        return dy.sum([axis for axis in range(len(dy.shape)) if axis != channels])


def conv_nd(
    x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
    padding_algorithm: Any = None, dilation: Any = 1, groups: Any = 1, data_format: Any = "NCHW",
    channel_dim: Any = 1, op_type: str = "conv2d", *rest: Any, **named: Any,
) -> Any:  # fmt: skip
    if bias is not None and op_type in OPERATORS and policy.asked[op_type]:
        how = (stride, padding, padding_algorithm, dilation, groups, data_format)
        call = (x, weight, bias, *how)
        if slower(op_type, Biased, call) is None:
            with contextlib.suppress(Native):  # (the operator inside says why)
                return untranslated(run_call, op_type, native, Biased, _known[op_type], call, {})
    return native(
        x, weight, bias, stride, padding, padding_algorithm, dilation, groups, data_format,
        channel_dim, op_type, *rest, **named,
    )  # fmt: skip
