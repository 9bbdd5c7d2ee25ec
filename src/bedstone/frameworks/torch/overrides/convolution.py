"""aten::convolution and its gradients, transposed ones too, in one to three dimensions."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from bedstone import (
    BiasGradientProblem,
    ConvolutionDesc,
    ConvolutionProblem,
    Epilogue,
    TensorDesc,
    TensorOpProblem,
)
from bedstone.frameworks.torch.calls import Call, Native, Operator, Step

AXES = (1, 2, 3)


def _window(call: Call, rank: int, first: int, groups: int) -> ConvolutionDesc:
    """From the arguments stride, padding and dilation, the first of which has that number."""
    axes = rank - 2
    if axes not in AXES:
        raise Native(f"a convolution of {axes} dimensions")
    stride, padding, dilation = (
        list(call[i]) * (axes if len(call[i]) == 1 else 1) for i in range(first, first + 3)
    )
    return ConvolutionDesc.of(axes, padding, stride, dilation, groups)


def _forward(call: Call) -> list[Step]:
    """convolution(x, w, bias, stride, padding, dilation, transposed, output_padding, groups)"""
    x, w, y = call.desc(0), call.desc(1), call.desc(~0)
    conv = _window(call, x.rank, 3, call[8])
    bias = call.has(2)
    if not call[6]:
        epilogue = Epilogue(bias)
        problem = ConvolutionProblem("forward", x, w, y, conv, call.math, epilogue=epilogue)
        if bias:
            _check_bias(call, problem)
        return [Step(problem, (0, 1, 2, ~0) if bias else (0, 1, ~0))]
    steps = [Step(ConvolutionProblem("backward_data", y, w, x, conv, call.math), (1, 0, ~0))]
    if bias:
        b = call.desc(2)
        ones = (1,) * (x.rank - 2)
        spread = TensorDesc((1, b.dims[0], *ones), (1, b.strides[0], *ones), b.dtype)
        steps.append(Step(TensorOpProblem("add", y, spread), (2, ~0), beta=1.0))
    return steps


def _check_bias(call: Call, problem: ConvolutionProblem) -> None:
    """A bias in other memory than the problem's own is left to PyTorch."""
    (wanted,) = (o.desc for o in problem.operands if o.name == "bias")
    if call.desc(2) != wanted:
        raise Native("a bias of another dtype, or with gaps")


def _backward(call: Call) -> list[Step]:
    """convolution_backward(dy, x, w, bias_sizes, stride, padding, dilation, transposed,
    output_padding, groups, output_mask)"""
    dy, x, w = call.desc(0), call.desc(1), call.desc(2)
    conv = _window(call, x.rank, 4, call[9])
    transposed, mask = call[7], call[10]
    steps = []
    if mask[0]:
        dx = call.desc(~0)
        if transposed:
            problem = ConvolutionProblem("forward", dy, w, dx, conv, call.math)
            steps.append(Step(problem, (0, 2, ~0)))
        else:
            problem = ConvolutionProblem("backward_data", dx, w, dy, conv, call.math)
            steps.append(Step(problem, (2, 0, ~0)))
    if mask[1]:
        dw = call.desc(~1)
        image, gradient = (dy, x) if transposed else (x, dy)
        problem = ConvolutionProblem("backward_filter", image, dw, gradient, conv, call.math)
        steps.append(Step(problem, (0, 1, ~1) if transposed else (1, 0, ~1)))
    if mask[2]:
        steps.append(Step(BiasGradientProblem(dy, call.desc(~2)), (0, ~2)))
    return steps


# Convolutions have the most arguments: what tells their kinds apart, with no loop over them.


def _forward_kind(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: list[int], padding: list[int],
    dilation: list[int], transposed: bool, output_padding: list[int], groups: int,
) -> Hashable:  # fmt: skip
    return (
        x.shape, x.stride(), x.dtype, w.shape, w.stride(), w.dtype,
        None if bias is None else (bias.shape, bias.stride(), bias.dtype),
        *stride, None, *padding, None, *dilation, transposed, *output_padding, groups,
    )  # fmt: skip


def _backward_kind(
    dy: Tensor, x: Tensor, w: Tensor, bias: list[int] | None, stride: list[int],
    padding: list[int], dilation: list[int], transposed: bool, output_padding: list[int],
    groups: int, mask: list[bool],
) -> Hashable:  # fmt: skip
    return (
        dy.shape, dy.stride(), dy.dtype, x.shape, x.stride(), x.dtype, w.shape, w.stride(), w.dtype,
        *stride, None, *padding, None, *dilation, transposed, *output_padding, groups, *mask,
        None if bias is None else tuple(bias),
    )  # fmt: skip


OPERATORS = (
    Operator("convolution", _forward, cpu_kind=_forward_kind, least=0),
    Operator("_convolution", _forward, least=0),
    Operator("convolution_backward", _backward, cpu_kind=_backward_kind, least=0),
)
