"""Nodes in PaddlePaddle's graph for results that bedstone has computed.

A PyLayer would be the documented way, but it refuses `paddle.grad` for some of its inputs, and a
second backward over a kept graph crashes the process (PaddlePaddle 3.3). So a result is hung into
the graph by native operators that move no data, and hooks on the tensors between them replace the
gradients as they pass:

    x -> view -> x's branch [hook: returns dx]  \\
    w -> view -> w's branch [hook: returns dw]   + -> trunk [hook: keeps dy] -> view -> y

A branch's and the trunk's memory is exchanged for one number, and for y, once the view is made.
Where one tensor alone needs a gradient, its branch is the trunk.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from paddle import Tensor, _C_ops
from paddle.base import core

from bedstone.frameworks.paddle import threads
from bedstone.frameworks.paddle.plans import CPU, HALF_BYTES

# (index, saved tensors, dy, whether it is to be differentiated again) -> the gradient of the
# argument of that index, and of others where they come with it
Gradients = Callable[[int, Sequence[Tensor], Tensor, bool], dict[int, Tensor]]


class _Pass:
    """One run of PaddlePaddle's backward: what it was asked, and the records that it met."""

    def __init__(self, retain: bool, create: bool) -> None:
        self.retain, self.create = retain, create
        self.met: list[Record] = []
        self.error: RuntimeError | None = None

    def end(self) -> None:
        """Let go of what is not needed any more."""
        for record in self.met:
            record.dy, record.made = None, {}
            if not self.retain:
                record.saved = None


class _Running(threading.local):
    """The passes under way in this thread, the innermost last."""

    def __init__(self) -> None:
        self.passes: list[_Pass] = []


_running = _Running()


class Record:
    """What a call leaves for its gradients: `saved` tensors, and how to compute."""

    def __init__(self, name: str, saved: Sequence[Tensor], gradients: Gradients) -> None:
        self.name, self.gradients = name, gradients
        self.saved: Sequence[Tensor] | None = saved
        self.versions = [tensor.inplace_version for tensor in saved]
        self.dy: Tensor | None = None
        self.made: dict[int, Tensor] = {}  # and not yet sent

    def receive(self, dy: Tensor) -> None:
        """The trunk's hook: keep the result's gradient."""
        self.check()
        self.dy, self.made = dy, {}
        if _running.passes:
            _running.passes[-1].met.append(self)

    def send(self, index: int) -> Tensor:
        """A branch's hook: the gradient of the tensor of that index."""
        create = _running.passes[-1].create if _running.passes else False
        saved = self.check()
        if index not in self.made:
            self.made = self.gradients(index, saved, self.dy, create)
        gradient = self.made.pop(index)
        # What is differentiated again must have the view's dims; else the numbers are enough.
        return _C_ops.unsqueeze(gradient, [0]) if create else gradient

    def check(self) -> Sequence[Tensor]:
        """The saved tensors, there and unchanged."""
        if self.saved is None:
            raise refusal(
                f"{self.name}: backward a second time over a graph that was not kept "
                "(retain_graph=True keeps it)"
            )
        for tensor, version in zip(self.saved, self.versions):
            if tensor.inplace_version != version:
                raise refusal(
                    f"{self.name}: a tensor that its gradient needs was changed in place "
                    f"after the call (version {tensor.inplace_version}, expected {version})"
                )
        return self.saved


def refusal(message: str) -> RuntimeError:
    """The error to raise in a hook; the pass keeps it, since PaddlePaddle would turn it into an
    OSError on its way through compiled code."""
    error = RuntimeError(message)
    if _running.passes:
        _running.passes[-1].error = error
    return error


_numbers: dict[int, Tensor] = {}  # by dtype


def _number(like: Tensor) -> Tensor:
    """A tensor of one element, which nobody writes to or reads."""
    dtype = like.dtype
    number = _numbers.get(id(dtype))
    if number is None:
        number = _numbers[id(dtype)] = _C_ops.full([1], 0.0, dtype, CPU)
    return number


def connect(record: Record, result: Tensor, wanted: Sequence[tuple[int, Tensor]]) -> Tensor:
    """The result as a node of the graph below the tensors that need a gradient."""
    dims = result.shape
    if len(wanted) == 1:
        ((index, tensor),) = wanted
        trunk = _C_ops.unsqueeze(tensor, [0])

        def answer(dy: Tensor) -> Tensor:
            record.receive(dy)
            return record.send(index)
    else:
        trunk = _joined([_branch(record, *pair, result) for pair in wanted], result)

        def answer(dy: Tensor) -> Tensor:
            record.receive(dy)
            return _number(dy)

    result._share_underline_tensor_to(trunk)
    trunk._register_grad_hook(answer)
    return _C_ops.reshape(trunk, dims)


def _branch(record: Record, index: int, tensor: Tensor, result: Tensor) -> Tensor:
    branch = _C_ops.unsqueeze(tensor, [0])
    _number(result)._share_underline_tensor_to(branch)
    branch._register_grad_hook(lambda _: record.send(index))
    return branch


def _joined(branches: Sequence[Tensor], result: Tensor) -> Tensor:
    if result.element_size() == HALF_BYTES:  # (`add` knows no half types on the CPU)
        return _C_ops.add_n(branches)
    # Through `add` paddle.grad reaches those branches alone that it was asked for.
    return functools.reduce(_C_ops.add, branches)


_native_backward = core.eager.run_backward
_native_grad = core.eager.run_partial_grad


def _backward(tensors: Any, gradients: Any, retain: bool, *rest: Any) -> Any:
    return _within(_Pass(retain, False), _native_backward, tensors, gradients, retain, *rest)


def _grad(outputs: Any, inputs: Any, gradients: Any, retain: bool, create: bool, *rest: Any) -> Any:
    arguments = (outputs, inputs, gradients, retain, create, *rest)
    return _within(_Pass(retain, create), _native_grad, *arguments)


def _within(current: _Pass, function: Callable[..., Any], *arguments: Any) -> Any:
    _running.passes.append(current)
    taken = threads.take()  # (the pass may run after the block of `enable()`)
    try:
        return function(*arguments)
    except Exception:
        if current.error is not None:
            raise current.error from None
        raise
    finally:
        threads.give_back(taken)
        _running.passes.pop()
        current.end()


def watch() -> None:
    """From now on, know what each backward is asked. (It stays: graphs outlive their block.)"""
    core.eager.run_backward, core.eager.run_partial_grad = _backward, _grad
