"""`explain(model, inputs)`: layer by layer, the algorithm that runs and what it costs both ways."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bedstone.frameworks.torch import calls
from bedstone.frameworks.torch.calls import Operator, Ready
from bedstone.frameworks.torch.patch import enable


@dataclass(frozen=True)
class Line:
    """One call: the module it was made in, and seconds on PyTorch's and on bedstone's kernel."""

    layer: str
    operator: str
    algorithm: str
    problem: str
    native_seconds: float
    own_seconds: float


@dataclass(frozen=True)
class Explanation:
    """The calls that bedstone takes of one run of a model, in order."""

    lines: tuple[Line, ...]

    def __str__(self) -> str:
        width = max([len(line.layer) for line in self.lines] + [5])
        rows = [
            f"{'layer':{width}}  {'operator':26} {'algorithm':28} {'native':>9} {'bedstone':>9}  ms"
        ]
        for line in self.lines:
            rows.append(
                f"{line.layer:{width}}  {line.operator:26} {line.algorithm:28} "
                f"{line.native_seconds * 1e3:9.3f} {line.own_seconds * 1e3:9.3f}"
            )
        native = sum(line.native_seconds for line in self.lines)
        own = sum(line.own_seconds for line in self.lines)
        rows.append(f"{len(self.lines)} calls: native {native * 1e3:.3f} ms, "
                    f"bedstone {own * 1e3:.3f} ms")  # fmt: skip
        return "\n".join(rows)


def explain(model: torch.nn.Module, *inputs: Any, **keywords: Any) -> Explanation:
    """Run the model once on the inputs; every call that bedstone takes is timed both ways.

    Operators that write over their input are run but not timed. No gradient is kept.
    """
    lines: list[Line] = []
    stack: list[str] = [""]

    def watch(
        operator: Operator, ready: Ready, own: Callable[[], float], native: Callable[[], float]
    ) -> None:
        seconds = native(), own()
        lines.append(Line(stack[-1], operator.name, ready.algorithms, ready.problems, *seconds))

    with _named(model, stack), enable(find=False, least=0), torch.no_grad():
        before, calls.settings.watch = calls.settings.watch, watch
        try:
            model(*inputs, **keywords)
        finally:
            calls.settings.watch = before
    return Explanation(tuple(lines))


@contextlib.contextmanager
def _named(model: torch.nn.Module, stack: list[str]) -> Iterator[None]:
    """Keep the names of the modules that are running on the stack."""
    hooks: list[Any] = []
    for name, module in model.named_modules():

        def enter(*_: Any, name: str = name) -> None:
            stack.append(name)

        def leave(*_: Any) -> None:
            stack.pop()

        if isinstance(module, torch.jit.ScriptModule):
            continue  # takes no hooks from Python
        hooks += [
            module.register_forward_pre_hook(enter),
            module.register_forward_hook(leave, always_call=True),
        ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
