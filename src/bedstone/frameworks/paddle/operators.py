"""What the replaced operators share: understanding a call, running it, and its gradient.

A subclass of `Call` understands one operator's arguments and says how to compute it and its
gradient. `replacement` makes the function that stands in the operator's place: it runs bedstone's
kernel, or the native operator and notes why. Gradients go through one `PyLayer`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer
from paddle.base.framework import _dygraph_tracer

from bedstone.frameworks.paddle import report
from bedstone.frameworks.paddle.plans import Native, check


class Policy:
    """always: how many have asked for bedstone's kernels where PaddlePaddle's are as fast too."""

    always = 0


policy = Policy()

Native_ = Callable[..., Any]
Gradients = Sequence[Tensor | None]


class Call:
    """One call of an operator.

    name       the operator's name in paddle._C_ops
    tensors    the arguments that may need a gradient, in the order of the native arguments
    native     the native operator, and `rest` its arguments after the tensors
    """

    names: ClassVar[tuple[str, ...]] = ()
    # How many of the leading arguments are tensors.
    leading: ClassVar[int] = 1

    def __init__(self, name: str, native: Native_, arguments: Sequence[Any]) -> None:
        self.name, self.native = name, native
        self.tensors = tuple(arguments[: self.leading])
        self.rest = tuple(arguments[self.leading :])
        self.needs: tuple[bool, ...] = ()
        check(self.tensors)
        self.understand(*self.rest)

    @classmethod
    def slower(cls, name: str, x: Tensor) -> str | None:
        """Why PaddlePaddle's own kernel is as fast for a first argument like this, if it is."""
        return None

    def understand(self, *attributes: Any) -> None:
        """Read the attributes. Raises Native for those that bedstone does not compute with."""

    def forward(self) -> tuple[Any, Sequence[Tensor]]:
        """(what the operator returns, the tensors that its gradient needs)."""
        raise NotImplementedError

    def backward(self, saved: Sequence[Tensor], dy: Tensor) -> Gradients:
        """A gradient for each of `tensors`; None where `needs` says that none is wanted."""
        raise NotImplementedError

    def native_backward(self, saved: Sequence[Tensor], dy: Tensor) -> Gradients:
        """The same by PaddlePaddle, differentiable in its turn: the saved inputs go through the
        native operator again."""
        create = paddle.is_grad_enabled()
        with paddle.enable_grad():
            inputs = list(self.inputs(saved))
            if not create:
                inputs = [t.detach() for t in inputs]
                for tensor, needed in zip(inputs, self.needs):
                    tensor.stop_gradient = not needed
            y = self.native(*inputs, *self.rest)
        y = y[0] if isinstance(y, (tuple, list)) else y
        wanted = [t for t, needed in zip(inputs, self.needs) if needed]
        found = iter(paddle.grad([y], wanted, [dy], create_graph=create, allow_unused=True))
        return [next(found) if needed else None for needed in self.needs]

    def inputs(self, saved: Sequence[Tensor]) -> Sequence[Tensor]:
        """The operator's tensors among the saved ones."""
        return saved[: self.leading]


class _Record:
    """What passes from a forward call to its node in the graph (hidden from PyLayer, which would
    take a bare tensor for an input)."""

    def __init__(self, call: Call, result: Any, saved: Sequence[Tensor]) -> None:
        self.call, self.result, self.saved = call, result, saved


class Differentiable(PyLayer):  # type: ignore[misc]
    """The node in PaddlePaddle's graph of a call that bedstone has already computed."""

    @staticmethod
    def forward(ctx: Any, record: _Record, *tensors: Tensor) -> Any:
        """Keep what the gradient needs."""
        ctx.call = record.call
        ctx.call.tensors = ()  # the saved tensors are all that may stay alive
        ctx.versions = [t.inplace_version for t in record.saved]
        ctx.save_for_backward(*record.saved)
        return record.result

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> Any:
        """By bedstone; by PaddlePaddle where the gradient is to be differentiated again."""
        call, saved = ctx.call, ctx.saved_tensor()
        for tensor, version in zip(saved, ctx.versions):
            if tensor.inplace_version != version:
                raise RuntimeError(
                    f"{call.name}: a tensor that its gradient needs was changed in place after "
                    f"the forward call (version {tensor.inplace_version}, expected {version})"
                )
        reason = "a gradient that is differentiated again"
        start = time.perf_counter()
        gradients = None
        if not paddle.is_grad_enabled():
            try:
                check((dy,))
                gradients = call.backward(saved, dy)
            except Native as why:
                reason = str(why)
        if gradients is None:
            gradients = call.native_backward(saved, dy)
            seconds = time.perf_counter() - start
            report.add(call.name, "backward", report.NATIVE, seconds, reason)
        return gradients[0] if len(gradients) == 1 else tuple(gradients)


def replacement(name: str, native: Native_, kind: type[Call]) -> Native_:
    """The function that stands in the place of the operator `name`."""

    def operator(*arguments: Any, **keywords: Any) -> Any:
        try:
            return _run(name, native, kind, arguments, keywords)
        except Native as why:
            reason = str(why)
        start = time.perf_counter()
        result = native(*arguments, **keywords)
        report.add(name, "forward", report.NATIVE, time.perf_counter() - start, reason)
        return result

    operator.__name__ = operator.__qualname__ = name
    operator.__doc__ = native.__doc__
    operator.__wrapped__ = native  # type: ignore[attr-defined]
    return operator


def _run(
    name: str,
    native: Native_,
    kind: type[Call],
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> Any:
    if not paddle.in_dynamic_mode():
        raise Native("a static graph is being built")
    for keyword, value in keywords.items():
        if value is not None:
            raise Native(f"the keyword argument {keyword}")
    if _dygraph_tracer()._amp_level.value:
        raise Native("automatic mixed precision chooses the dtype")
    if not policy.always and arguments and isinstance(arguments[0], Tensor):
        reason = kind.slower(name, arguments[0])
        if reason:
            raise Native(reason)
    try:
        call = kind(name, native, arguments)
    except (TypeError, ValueError) as error:  # the wrong number or kind of arguments
        raise Native(f"arguments not understood: {error}") from None
    result, saved = call.forward()
    if paddle.is_grad_enabled():
        call.needs = tuple(not t.stop_gradient for t in call.tensors)
        if any(call.needs):
            return Differentiable.apply(_Record(call, result, saved), *call.tensors)
    return result
