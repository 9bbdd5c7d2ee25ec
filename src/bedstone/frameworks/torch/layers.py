"""Which calls happen inside given modules: hooks around their forward and backward passes."""

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
                module.register_full_backward_pre_hook(self._enter),
                module.register_full_backward_hook(self._leave),
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

    def _leave(self, *_: Any) -> None:
        self._depth.value = max(0, self._depth.value - 1)
