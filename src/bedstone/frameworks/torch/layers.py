"""Which calls happen inside given modules: hooks around their forward passes, and around the nodes
of autograd's graph that these leave behind."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch

from bedstone import InvalidDescriptor


class _Depth(threading.local):
    value = 0


class Layers:
    """Hooks on modules; `active()` is true while one of them runs in this thread."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._depth = _Depth()
        self._hooks: list[Any] = []
        chosen = list(modules)
        for module in chosen:
            if not isinstance(module, torch.nn.Module):
                raise InvalidDescriptor("layers", type(module).__name__, "torch.nn.Module objects")
        for module in chosen:
            self._hooks += [
                module.register_forward_pre_hook(self._enter),
                module.register_forward_hook(self._leave, always_call=True),
            ]

    def active(self) -> bool:
        """Whether one of the modules is running."""
        return self._depth.value > 0

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def _enter(self, *_: Any) -> None:
        self._depth.value += 1

    def _leave(self, module: Any, inputs: Any, output: Any) -> None:
        self._exit()
        for node in _nodes_between(inputs, output):
            node.register_prehook(self._enter)
            node.register_hook(self._exit)

    def _exit(self, *_: Any) -> None:
        self._depth.value = max(0, self._depth.value - 1)


def _nodes_between(inputs: Any, output: Any) -> list[Any]:
    """The nodes of autograd's graph from the outputs back to the inputs, which are not among
    them, nor are those that add up gradients of parameters."""
    leaves = torch.utils._pytree.tree_leaves
    stop = {t.grad_fn for t in leaves(inputs) if isinstance(t, torch.Tensor)}
    todo = [t.grad_fn for t in leaves(output) if isinstance(t, torch.Tensor)]
    found: list[Any] = []
    while todo:
        node = todo.pop()
        if node is None or node in stop:
            continue
        stop.add(node)
        if type(node).__name__ != "AccumulateGrad":
            found.append(node)
            todo += [following for following, _ in node.next_functions]
    return found
