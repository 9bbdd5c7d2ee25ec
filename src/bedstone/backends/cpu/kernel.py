"""A compiled kernel as a plan calls it.

`compiled` is how every algorithm's `build` ends: it names the kernel, says how to emit it, and
gets back something that takes pointers, workspace, alpha and beta. A kernel that packs a filter
can be had in halves as well, in a module that is compiled when somebody asks for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Protocol

from bedstone.backends.cpu import threads
from bedstone.backends.cpu.builder import KernelBuilder
from bedstone.backends.cpu.objects import Emit, LoadedObject, obtain
from bedstone.backends.cpu.target import Target
from bedstone.plan.algorithm import NativeEntry, Preparation
from bedstone.plan.config import get_num_threads

ENTRY = "entry"
PACK = "pack"


class Emitter(Protocol):
    """Emits a kernel that may pack a filter: see convolution/packed_filter.py."""

    packed_bytes: int

    def emit(self) -> KernelBuilder: ...

    def emit_prepared(self) -> KernelBuilder: ...


class CompiledKernel:
    """void entry(pointers..., workspace, alpha, beta, threads), with this process's threads."""

    def __init__(
        self,
        code: LoadedObject,
        pointers: int,
        description: str,
        prepare: Callable[[], Preparation | None] | None = None,
    ) -> None:
        self._entry = _function(code, ENTRY, pointers)
        self.native = NativeEntry(code.address(ENTRY), pointers, code)
        self.description = description
        self._prepare = prepare

    def __call__(
        self,
        pointers: Sequence[int],
        workspace: int = 0,
        alpha: float = 1.0,
        beta: float = 0.0,
        stream: int = 0,
    ) -> None:
        self._entry(*pointers, workspace, alpha, beta, get_num_threads())

    def preparation(self) -> Preparation | None:
        """The kernel in two halves; None if it packs no filter."""
        return self._prepare() if self._prepare else None


def _function(code: LoadedObject, name: str, pointers: int) -> Callable[..., None]:
    words, numbers = [ctypes.c_int64] * (pointers + 1), [ctypes.c_double] * 2
    return code.function(name, [*words, *numbers, ctypes.c_int64])


def compiled(key: str, emit: Emit, pointers: int, description: str = "") -> CompiledKernel:
    """The kernel whose module `emit(target)` builds, with an entry named ENTRY.

    `key` names everything that `emit` depends on besides the target: see objects.obtain. On a
    cache hit `emit` is not called.
    """
    threads.runtime()
    return CompiledKernel(obtain(key, emit), pointers, description)


def compiled_in_halves(
    key: str, emitter: Callable[[Target], Emitter], pointers: int, description: str = ""
) -> CompiledKernel:
    """As `compiled`, for `emitter(target)` that can emit the two halves apart."""

    target = Target.current()

    def prepare() -> Preparation | None:
        nbytes = emitter(target).packed_bytes
        if not nbytes:
            return None
        code = obtain(f"{key} prepared", lambda target: emitter(target).emit_prepared(), target)
        pack = _function(code, PACK, 1)
        return Preparation(
            nbytes,
            lambda w, memory: pack(w, memory, 1.0, 0.0, get_num_threads()),
            CompiledKernel(code, pointers, description),
        )

    threads.runtime()
    code = obtain(key, lambda target: emitter(target).emit(), target)
    return CompiledKernel(code, pointers, description, prepare)
