"""What the replaced operators share: understanding a call, running it, and its gradient.

A subclass of `Call` understands one operator's arguments and says how to compute it and its
gradients. `replacement` makes the function that stands in the operator's place: it runs bedstone's
kernel, or the native operator and notes why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import paddle
from paddle import Tensor
from paddle.base import core
from paddle.base.framework import _dygraph_tracer
from paddle.jit.sot.opcode_translator.skip_files import skip_file_names

import bedstone
from bedstone.frameworks.paddle import report
from bedstone.frameworks.paddle.gradients import Record, connect, refusal
from bedstone.frameworks.paddle.plans import HALVES, Native, check

Operator = Callable[..., Any]


class Policy:
    """always: how many have asked for bedstone's kernels where PaddlePaddle's are as fast too."""

    always = 0


policy = Policy()


def untranslated(function: Operator, *arguments: Any) -> Any:
    """The call, out of sight of paddle.jit's translator, which may be tracing the caller: it would
    take our Python for a part of the model."""
    previous = core.set_eval_frame(None)
    try:
        return function(*arguments)
    finally:
        core.set_eval_frame(previous)


# This package's own frames, before `untranslated` has been reached.
core.eval_frame_skip_file_prefix((*skip_file_names, str(Path(bedstone.__file__).parent)))


class Call:
    """One call of an operator.

    names    the operators of paddle._C_ops that the class understands
    leading  how many of their arguments are tensors, which come first
    optional the indices of those tensors that may be None
    mixed    these tensors may be of several dtypes
    once     PaddlePaddle does not differentiate the operator's gradient
    keyword  the first argument after the tensors may be given by this name
    """

    names: ClassVar[tuple[str, ...]] = ()
    leading: ClassVar[int] = 1
    optional: ClassVar[tuple[int, ...]] = ()
    mixed: ClassVar[bool] = False
    once: ClassVar[bool] = False
    keyword: ClassVar[str] = ""

    def __init__(self, name: str, native: Operator, arguments: Sequence[Any]) -> None:
        self.name, self.native = name, native
        self.tensors = tuple(arguments[: self.leading])
        self.rest = tuple(arguments[self.leading :])
        tensors = enumerate(self.tensors)
        check([t for i, t in tensors if t is not None or i not in self.optional], self.mixed)
        self.understand(*self.rest)

    @classmethod
    def slower(cls, name: str, x: Tensor) -> str | None:
        """Why PaddlePaddle's own kernel is as fast for a first argument like this, if it is."""
        return None

    def understand(self, *attributes: Any) -> None:
        """Read the attributes. Raises Native for those that bedstone does not compute with."""

    def forward(self) -> tuple[Any, Sequence[Tensor]]:
        """(what the operator returns, the tensors that its gradients need)."""
        raise NotImplementedError

    def gradient(self, index: int, saved: Sequence[Tensor], dy: Tensor) -> Tensor:
        """The gradient of the tensor argument of that index. Raises Native."""
        raise NotImplementedError

    def native_gradient(self, index: int, saved: Sequence[Tensor], dy: Tensor) -> Tensor:
        """The same by PaddlePaddle's own gradient operator, which can be differentiated as far as
        PaddlePaddle does."""
        raise NotImplementedError

    def gradients(self, index: int, saved: Sequence[Tensor], dy: Tensor) -> dict[int, Tensor]:
        """`gradient`, with those of other arguments where one kernel makes them all."""
        return {index: self.gradient(index, saved, dy)}

    def native_gradients(
        self, index: int, saved: Sequence[Tensor], dy: Tensor
    ) -> dict[int, Tensor]:
        """`native_gradient`, likewise."""
        return {index: self.native_gradient(index, saved, dy)}

    def either_gradients(
        self, index: int, saved: Sequence[Tensor], dy: Tensor, again: bool
    ) -> dict[int, Tensor]:
        """By bedstone; by PaddlePaddle where it is to be differentiated again."""
        reason = "a gradient that is differentiated again"
        if again and self.once:
            raise refusal(f"{self.name}: its gradient cannot be differentiated again")
        if not again:
            try:
                check((dy,))
                return untranslated(self.gradients, index, saved, dy)
            except Native as why:
                reason = str(why)
        start = time.perf_counter()
        with paddle.set_grad_enabled(again):
            found = self.native_gradients(index, saved, dy)
        report.add(self.name, "backward", report.NATIVE, time.perf_counter() - start, reason)
        return found


def replacement(name: str, native: Operator, kind: type[Call]) -> Operator:
    """The function that stands in the place of the operator `name`."""

    def operator(*arguments: Any, **keywords: Any) -> Any:
        try:
            return untranslated(_run, name, native, kind, arguments, keywords)
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
    native: Operator,
    kind: type[Call],
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> Any:
    if not paddle.in_dynamic_mode():
        raise Native("a static graph is being built")
    for keyword, value in keywords.items():
        if keyword == kind.keyword and len(arguments) == kind.leading:
            arguments = (*arguments, value)
        elif value is not None:
            raise Native(f"the keyword argument {keyword}")
    if _dygraph_tracer()._amp_level.value:
        raise Native("automatic mixed precision chooses the dtype")
    if not policy.always and arguments and isinstance(arguments[0], Tensor):
        # (Of the half types PaddlePaddle's CPU kernels know next to none.)
        half = arguments[0].dtype in HALVES
        reason = None if half else kind.slower(name, arguments[0])
        if reason:
            raise Native(reason)
    while arguments and arguments[-1] is None:  # (a layer's name, handed on)
        arguments = arguments[:-1]
    try:
        call = kind(name, native, arguments)
    except (TypeError, ValueError) as error:  # the wrong number or kind of arguments
        raise Native(f"arguments not understood: {error}") from None
    tensors = call.tensors
    result, saved = call.forward()
    if not paddle.is_grad_enabled():
        return result
    wanted = [(i, t) for i, t in enumerate(tensors) if t is not None and not t.stop_gradient]
    if not wanted:
        return result
    call.tensors = ()  # from here on only what was saved stays alive
    record = Record(name, saved, call.either_gradients)
    if isinstance(result, tuple):  # (indices take part in the graph's flags, not in its values)
        for other in result[1:]:
            other.stop_gradient = False
        return (connect(record, result[0], wanted), *result[1:])
    return connect(record, result, wanted)
