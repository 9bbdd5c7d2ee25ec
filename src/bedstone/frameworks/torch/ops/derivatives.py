"""Derivatives of an operator, in every way that PyTorch asks for them.

`torch.library`'s own `register_autograd` serves backward passes alone: under `torch.func.grad` it
raises, and forward-mode derivatives it drops without a word. Here an operator's rules make an
`autograd.Function`, which has all of them, and two entries in the dispatcher lead to it: one at the
operator's autograd key, one in front of the transforms of `torch.func`, which call the function's
rules level by level.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

# Each goes before custom_op's own kernel at "Autograd", which older versions let nobody replace.
AUTOGRAD_KEYS = ("AutogradCPU", "AutogradCUDA", "AutogradMeta")
# Kept as long as the process: a library that is dropped takes its kernels with it.
_library = torch.library.Library("bedstone", "IMPL")


def differentiable(
    op: Any,
    *,
    keep: Callable[[Any, tuple[Any, ...], Any], None],
    backward: Callable[..., tuple[Any, ...]],
    tangent: Callable[..., Any],
    vmap: Callable[..., Any],
) -> None:
    """Give an operator of `torch.library.custom_op` its derivatives.

    keep      (ctx, arguments, result): what the others need of a call, on ctx; tensors by `save`
    backward  (ctx, gradient of each result): a gradient or None for each argument
    tangent   (ctx, tangents of the tensors, None where there is none): the result's tangents
    vmap      (info, in_dims, arguments): (result, its batch axes), as torch.library.register_vmap

    The rules may call operators that are differentiable themselves, and are not called when every
    gradient or tangent is None.
    """
    overload = op._opoverload
    tensors = sum("Tensor" in str(a.type) for a in overload._schema.arguments)  # they come first
    arguments = len(overload._schema.arguments)
    single = len(overload._schema.returns) == 1

    class Derivatives(torch.autograd.Function):
        """The operator, with its dispatch keys as a last argument: None before any dispatch."""

        @staticmethod
        def forward(*call: Any) -> Any:
            *given, keys = call
            with torch._C._AutoDispatchBelowAutograd():
                return overload(*given) if keys is None else _below(overload, keys, given)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.set_materialize_grads(False)
            keep(ctx, inputs[:-1], output)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
            if all(g is None for g in gradients):
                return (None,) * (arguments + 1)
            return (*backward(ctx, *gradients), None)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            given = tangents[:tensors]
            if all(t is None for t in given):
                return None if single else (None,) * len(overload._schema.returns)
            return tangent(ctx, *given)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], *call: Any) -> Any:
            return vmap(info, in_dims[:-1], *call[:-1])

    Derivatives.__name__ = f"{op._name}_derivatives"

    def at_autograd(keys: Any, *given: Any) -> Any:
        given_tensors = [a for a in given[:tensors] if isinstance(a, Tensor)]
        wanted = torch.is_grad_enabled() and any(a.requires_grad for a in given_tensors)
        if wanted or any(_is_dual(a) for a in given_tensors):
            return Derivatives.apply(*given, keys)
        with torch._C._AutoDispatchBelowAutograd():
            return _below(overload, keys, given)

    def in_front(*given: Any) -> Any:
        return Derivatives.apply(*given, None)

    for key in AUTOGRAD_KEYS:
        _library.impl(op._name, at_autograd, key, with_keyset=True)
    _library.impl(op._name, in_front, "FuncTorchDynamicLayerFrontMode")


def save(ctx: Any, *tensors: Tensor | None) -> None:
    """Tensors of a call, for `ctx.saved_tensors` in both kinds of rules."""
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def total(*terms: Tensor | None) -> Tensor:
    """The sum of the terms that are there."""
    given = [term for term in terms if term is not None]
    result = given[0]
    for term in given[1:]:
        result = result + term
    return result


def _below(overload: Any, keys: Any, given: Any) -> Any:
    return overload.redispatch(keys & torch._C._after_autograd_keyset, *given)


def _is_dual(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None
