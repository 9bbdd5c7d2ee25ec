"""The C library: kernels of run-time shapes, compiled ahead of time into one object file.

A plan's kernel has its shapes baked in; a library's caller brings them along. The emitters here
speak the same kernel language, on the same micro-kernels, vector mathematics and thread pool,
but keep sizes and strides as `Int`s and index by tables that they fill in the caller's workspace.
`interface` says what is exported; bedstone.compat.c writes header and library.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from bedstone.backends.cpu import objects
from bedstone.backends.cpu.library import interface
from bedstone.backends.cpu.library.checks import emit_checks
from bedstone.backends.cpu.library.convolution_entries import emit_convolution
from bedstone.backends.cpu.library.language import LibraryBuilder
from bedstone.backends.cpu.library.pointwise import (
    emit_activations,
    emit_nest,
    emit_run,
    emit_tensor_operations,
)
from bedstone.backends.cpu.library.pool import emit_pool
from bedstone.backends.cpu.library.pooling import emit_pooling
from bedstone.backends.cpu.library.softmax import emit_softmax
from bedstone.backends.cpu.library.strings import emit_strings
from bedstone.backends.cpu.target import Target

__all__ = ["emit", "interface", "library_object"]


def emit(target: Target) -> LibraryBuilder:
    """The whole module."""
    k = LibraryBuilder(target, "bedstone")
    emit_pool(k)
    emit_checks(k)
    emit_strings(k)
    emit_nest(k)
    emit_run(k)
    emit_tensor_operations(k)
    emit_activations(k)
    emit_convolution(k)
    emit_pooling(k)
    emit_softmax(k)
    return k


def library_object(cpu: str) -> tuple[bytes, str]:
    """(position-independent object file, LLVM's triple) for "native" or a name of Target.named."""
    target = Target.named(cpu)
    name = objects.file_name(f"C library {_sources_digest()}", target)
    code = objects.read(name)
    if code is None:
        code = objects.compile_object(emit(target), target, jit=False)
        objects.write(name, code)
    return code, target.triple


def _sources_digest() -> str:
    """A hash of the emitters here, which that of the backend's kernels leaves out."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
