"""Batch, layer and group normalisation of PyTorch, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bedstone import DType, NormalizationProblem
from bedstone.frameworks.torch.calls import Call, Native, Operator, Result, Step
from bedstone.spec.normalization import NormDesc


def _parameters(call: Call, numbers: Sequence[int]) -> DType | None:
    """The one dtype of the packed parameters that are there, or None."""
    descs = [call.desc(i) for i in numbers if call.has(i)]
    if any(d.dtype != descs[0].dtype or d != type(d).packed(d.dims, d.dtype) for d in descs):
        raise Native("parameters of several dtypes, or with gaps")
    return descs[0].dtype if descs else None


def _check_statistics(call: Call, numbers: Sequence[int]) -> None:
    """Means and deviations must be as the problem wants them: packed, of the accumulator's type."""
    wanted = call.desc(0).dtype.accumulator
    for number in numbers:
        desc = call.desc(number)
        if desc.dtype is not wanted or desc != type(desc).packed(desc.dims, desc.dtype):
            raise Native("statistics of another dtype, or with gaps")


def _there(call: Call, *numbers: int) -> tuple[int, ...]:
    return tuple(i for i in numbers if call.has(i))


# native_batch_norm(x, scale, shift, running_mean, running_var, training, momentum, epsilon)


def _batch_results(arguments: Sequence[Any]) -> list[Result | int | None] | None:
    """Training writes the running statistics: its results cannot be had from PyTorch first."""
    x, scale, training = arguments[0], arguments[1], arguments[5]
    if not training:
        return None
    dtype = x.dtype if scale is None else scale.dtype  # PyTorch's choice
    mean = Result((x.shape[1],), (1,), dtype) if x.dim() > 1 else None
    return [Result.like(x), mean, mean]


def _batch(call: Call) -> list[Step]:
    x, y = call.desc(0), call.desc(~0)
    momentum, epsilon = call[6], call[7]
    norm = NormDesc("batch", epsilon, scale=call.has(1), shift=call.has(2))
    parameters = _parameters(call, (1, 2, 3, 4))
    affine = _there(call, 1, 2)
    if not call[5]:
        if not (call.has(3) and call.has(4)):
            raise Native("no running statistics")
        problem = NormalizationProblem("inference", x, y, norm, parameters)
        return [Step(problem, (0, *affine, 3, 4, ~0))]
    if not _dense(call[0]):
        raise Native("images that are neither row-major nor channels last")
    if x.size == x.dims[1]:
        raise Native("one value a channel, which PyTorch refuses")
    _check_statistics(call, (~1, ~2))
    running = _there(call, 3, 4)
    if len(running) == 1:
        raise Native("one of two running statistics")
    problem = NormalizationProblem(
        "training", x, y, norm, parameters, momentum=momentum if running else None
    )
    return [Step(problem, (0, *affine, ~0, ~1, ~2, *running))]


def _dense(x: torch.Tensor) -> bool:
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    return x.is_contiguous() or (last is not None and x.is_contiguous(memory_format=last))


def _batch_backward(call: Call) -> list[Step]:
    """native_batch_norm_backward(dy, x, scale, running_mean, running_var, mean, inv_std, training,
    epsilon, mask)"""
    if not call[7]:
        raise Native("the gradient of normalisation by given statistics")
    return _backward(call, 1, 2, 5, 6, NormDesc("batch", call[8]), call[9])


def _backward(
    call: Call, x: int, scale: int, mean: int, inv_std: int, norm: NormDesc, mask: Sequence[bool],
    shift: bool | None = None,
) -> list[Step]:  # fmt: skip
    """The problem of any kind's gradient; dy is argument 0. `shift`: whether forward had one,
    where PyTorch says so (else it is taken to have one with the scale)."""
    scaled = call.has(scale)
    shifted = scaled if shift is None else shift
    if list(mask) != [True, scaled, shifted]:
        raise Native("not all of the gradients are wanted")
    _check_statistics(call, (mean, inv_std))
    parameters = _parameters(call, (scale,))
    norm = NormDesc(norm.kind, norm.epsilon, norm.axis, norm.groups, scaled, shifted)
    problem = NormalizationProblem(
        "backward", call.desc(~0), call.desc(0), norm, parameters, saved=call.desc(x)
    )
    results = tuple(~i for i, there in enumerate((True, scaled, shifted)) if there)
    return [Step(problem, (x, *_there(call, scale), mean, inv_std, 0, *results))]


# native_layer_norm(x, normalized_shape, scale, shift, epsilon)


def _axis(call: Call, x: int, shape: int) -> int:
    axis = call[x].dim() - len(call[shape])
    if axis < 1:
        raise Native("a mean over the whole tensor")
    return int(axis)


def _layer(call: Call) -> list[Step]:
    norm = NormDesc("layer", call[4], _axis(call, 0, 1), 1, call.has(2), call.has(3))
    _check_statistics(call, (~1, ~2))
    problem = NormalizationProblem(
        "training", call.desc(0), call.desc(~0), norm, _parameters(call, (2, 3))
    )
    return [Step(problem, (0, *_there(call, 2, 3), ~0, ~1, ~2))]


def _layer_backward(call: Call) -> list[Step]:
    """native_layer_norm_backward(dy, x, normalized_shape, mean, inv_std, scale, shift, mask)"""
    norm = NormDesc("layer", 0.0, _axis(call, 1, 2))
    return _backward(call, 1, 5, 3, 4, norm, call[7], call.has(6))


# native_group_norm(x, scale, shift, N, C, HxW, groups, epsilon)


def _group(call: Call) -> list[Step]:
    norm = NormDesc("group", call[7], 1, call[6], call.has(1), call.has(2))
    _check_statistics(call, (~1, ~2))
    problem = NormalizationProblem(
        "training", call.desc(0), call.desc(~0), norm, _parameters(call, (1, 2))
    )
    return [Step(problem, (0, *_there(call, 1, 2), ~0, ~1, ~2))]


def _group_backward(call: Call) -> list[Step]:
    """native_group_norm_backward(dy, x, mean, inv_std, scale, N, C, HxW, groups, mask)"""
    norm = NormDesc("group", 0.0, 1, call[8])
    return _backward(call, 1, 4, 2, 3, norm, call[9])


OPERATORS = (
    Operator("native_batch_norm", _batch, _batch_results),
    Operator("native_batch_norm_backward", _batch_backward),
    Operator("native_layer_norm", _layer),
    Operator("native_layer_norm_backward", _layer_backward),
    Operator("native_group_norm", _group),
    Operator("native_group_norm_backward", _group_backward),
)
