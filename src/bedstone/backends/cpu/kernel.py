"""A compiled kernel as a plan calls it.

`compiled` is how every algorithm's `build` ends: it names the kernel, says how to emit it, and
gets back something that takes pointers, workspace, alpha and beta.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from bedstone.backends.cpu import threads
from bedstone.backends.cpu.objects import Emit, LoadedObject, obtain
from bedstone.plan.algorithm import NativeEntry
from bedstone.plan.config import get_num_threads

ENTRY = "entry"


class CompiledKernel:
    """void entry(pointers..., workspace, alpha, beta, threads), with this process's threads."""

    def __init__(self, code: LoadedObject, pointers: int, description: str) -> None:
        argtypes = [ctypes.c_int64] * (pointers + 1) + [ctypes.c_double] * 2 + [ctypes.c_int64]
        self._entry = code.function(ENTRY, argtypes)
        self.native = NativeEntry(code.address(ENTRY), pointers, code)
        self.description = description

    def __call__(
        self,
        pointers: Sequence[int],
        workspace: int = 0,
        alpha: float = 1.0,
        beta: float = 0.0,
        stream: int = 0,
    ) -> None:
        self._entry(*pointers, workspace, alpha, beta, get_num_threads())


def compiled(key: str, emit: Emit, pointers: int, description: str = "") -> CompiledKernel:
    """The kernel whose module `emit(target)` builds, with an entry named ENTRY.

    `key` names everything that `emit` depends on besides the target: see objects.obtain. On a
    cache hit `emit` is not called.
    """
    threads.runtime()
    return CompiledKernel(obtain(key, emit), pointers, description)
