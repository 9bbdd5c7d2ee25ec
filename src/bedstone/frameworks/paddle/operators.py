"""What the replaced operators share: understanding a call, running it, and its gradient.

A subclass of `Call` understands one operator's arguments and says how to compute it and its
gradients. `replacement` makes the function that stands in the operator's place: it runs bedstone's
kernel, or the native operator and notes why.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import paddle
from paddle import Tensor
from paddle.base import core
from paddle.base.framework import _dygraph_tracer
from paddle.jit.sot.opcode_translator.skip_files import skip_file_names

import bedstone
from bedstone.frameworks.paddle import report, trial
from bedstone.frameworks.paddle.gradients import Record, connect, refusal
from bedstone.frameworks.paddle.plans import (
    HALF_BYTES,
    Layout,
    Maker,
    Native,
    Recipe,
    described,
    layout_of,
    run,
)

Operator = Callable[..., Any]
# What is known of an operator's kinds of calls, by layouts and attributes: a call that is copied
# for each of the kind (`Call.again`), or the reason to leave them to PaddlePaddle.
Known = dict[Any, "Call | str"]
KINDS_KEPT = 4096  # of an operator, as many as a handle keeps plans


class Policy:
    """asked: how many have asked for each operator; always: how many of them also where
    PaddlePaddle's are as fast."""

    asked: ClassVar[Counter[str]] = Counter()
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
    """One call of an operator. What is found out about its arguments is kept: `again` makes the
    next call of the same kind, which has the same layouts and attributes.

    names    the operators of paddle._C_ops that the class understands
    leading  how many of their arguments are tensors, which come first
    optional the indices of those tensors that may be None
    mixed    these tensors may be of several dtypes
    once     PaddlePaddle does not differentiate the operator's gradient
    keyword  the first argument after the tensors may be given by this name
    pure     a call changes nothing, so that it can be tried on both sides
    """

    names: ClassVar[tuple[str, ...]] = ()
    leading: ClassVar[int] = 1
    optional: ClassVar[tuple[int, ...]] = ()
    mixed: ClassVar[bool] = False
    once: ClassVar[bool] = False
    keyword: ClassVar[str] = ""
    pure: ClassVar[bool] = True

    tensors: Sequence[Any] = ()

    def __init__(self, name: str, native: Operator, layouts: Sequence[Layout | None],
                 rest: Sequence[Any]) -> None:  # fmt: skip
        self.name, self.native, self.rest = name, native, tuple(rest)
        self.recipes: dict[Maker, Recipe] = {}  # of `compute`
        # Of which tensors gradients are wanted -> why the call is PaddlePaddle's then, or None.
        self.verdicts: dict[tuple[int, ...], str | None] = {}
        there = [x is not None or i in self.optional for i, x in enumerate(layouts)]
        if len(there) < self.leading or not all(there):
            raise Native("an argument is no tensor")
        if not self.mixed and len({layout[2] for layout in layouts if layout}) > 1:
            raise Native("tensors of several dtypes")
        self.understand(*self.rest)

    def again(self, tensors: Sequence[Any]) -> Call:
        """The same on these tensors."""
        call = object.__new__(type(self))
        call.__dict__.update(self.__dict__)
        call.tensors = tensors
        return call

    def compute(
        self,
        make: Maker,
        inputs: Sequence[Tensor],
        settings: tuple[Any, ...],
        updated: Sequence[Tensor] = (),
    ) -> list[Tensor]:
        """`launch` in the direction forward. The inputs are arguments of the call, and the problem
        is the same whenever the kind of call is."""
        recipe = self.recipes.get(make)
        if recipe is None:
            recipe = self.recipes[make] = described(make, inputs, settings)
        return run((self.name, "forward"), recipe, inputs, updated)

    def natively(self, *tensors: Any) -> Any:
        """The same by PaddlePaddle."""
        return self.native(*tensors, *self.rest)

    @classmethod
    def slower(cls, name: str, x: Tensor, *rest: Any) -> str | None:
        """Why PaddlePaddle's own kernel is as fast for arguments like these, if it is."""
        return None

    def understand(self, *attributes: Any) -> None:
        """Read the attributes. Raises Native for those that bedstone does not compute with."""

    def forward(self) -> tuple[Any, Sequence[Tensor]]:
        """(what the operator returns, the tensors that its gradients need). Raises Native."""
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
    known: Known = {}

    def operator(*arguments: Any, **keywords: Any) -> Any:
        reason = slower(name, kind, arguments)
        if reason is None:
            try:
                return untranslated(run_call, name, native, kind, known, arguments, keywords)
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


def slower(name: str, kind: type[Call], arguments: tuple[Any, ...]) -> str | None:
    """Why the call cannot pay, if it cannot. (Of the half types PaddlePaddle's CPU kernels know
    next to none.)"""
    if trial.side.name is not None:
        return None if trial.side.name == "ours" else trial.QUICKER
    if policy.always:
        return None
    x = arguments[0] if arguments else None
    if not isinstance(x, Tensor) or x.element_size() == HALF_BYTES:
        return None
    return kind.slower(name, *arguments)


def run_call(
    name: str,
    native: Operator,
    kind: type[Call],
    known: Known,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> Any:
    """The call on bedstone's kernels. Raises Native: why it is left to PaddlePaddle."""
    if not paddle.in_dynamic_mode():
        raise Native("a static graph is being built")
    for keyword, value in keywords.items():
        if keyword == kind.keyword and len(arguments) == kind.leading:
            arguments = (*arguments, value)
        elif value is not None:
            raise Native(f"the keyword argument {keyword}")
    if _dygraph_tracer()._amp_level.value:
        raise Native("automatic mixed precision chooses the dtype")
    while arguments and arguments[-1] is None:  # (a layer's name, handed on)
        arguments = arguments[:-1]
    tensors = arguments[: kind.leading]
    call = _understood(name, native, kind, known, tensors, arguments[kind.leading :])
    wanted: tuple[int, ...] = ()
    if paddle.is_grad_enabled():
        wanted = tuple([i for i, t in enumerate(tensors) if t is not None and not t.stop_gradient])
    reason = None if policy.always or trial.side.name else _verdict(call, wanted)
    if reason is not None:
        raise Native(reason)
    return _computed(call, wanted)


def _verdict(call: Call, wanted: tuple[int, ...]) -> str | None:
    """Why calls of this kind are PaddlePaddle's, found in a trial now or before."""
    if wanted not in call.verdicts:
        tensors = call.tensors
        # (Of the half types PaddlePaddle's CPU kernels know next to none.)
        tried = call.pure and tensors[0].element_size() != HALF_BYTES
        ours = lambda *copies: _computed(call.again(copies), wanted)  # noqa: E731
        call.verdicts[wanted] = (
            trial.reason_for_native(ours, call.natively, tensors, wanted) if tried else None
        )
    return call.verdicts[wanted]


def _computed(call: Call, wanted: Sequence[int]) -> Any:
    """The result, below those tensors in the graph."""
    tensors = call.tensors
    result, saved = call.forward()
    if not wanted:
        return result
    call.tensors = ()  # from here on only what was saved stays alive
    record = Record(call.name, saved, call.either_gradients)
    above = [(i, tensors[i]) for i in wanted]
    if isinstance(result, tuple):  # (indices take part in the graph's flags, not in its values)
        for other in result[1:]:
            other.stop_gradient = False
        return (connect(record, result[0], above), *result[1:])
    return connect(record, result, above)


def _understood(
    name: str,
    native: Operator,
    kind: type[Call],
    known: Known,
    tensors: Sequence[Any],
    rest: Sequence[Any],
) -> Call:
    """The call, understood now or before. Raises Native, with the reason found now or before."""
    layouts = tuple([None if t is None else layout_of(t) for t in tensors])
    key = (layouts, tuple([tuple(a) if type(a) is list else a for a in rest]))
    try:
        found = known.get(key)
    except TypeError:
        raise Native("arguments not understood: neither numbers nor names") from None
    if found is None:
        try:
            found = kind(name, native, layouts, rest)
        except (TypeError, ValueError) as error:  # the wrong number or kind of arguments
            raise Native(f"arguments not understood: {error}") from None
        except Native as why:
            if not _is_plain(key[1]):  # (a key must keep no tensor alive)
                raise
            found = str(why)
        if len(known) >= KINDS_KEPT:
            known.clear()
        known[key] = found
    if isinstance(found, str):
        raise Native(found)
    return found.again(tensors)


def _is_plain(values: Sequence[Any]) -> bool:
    return all(
        value is None
        or isinstance(value, (bool, int, float, str))
        or (isinstance(value, tuple) and _is_plain(value))
        for value in values
    )
