"""The Triton backend: portable GPU kernels, compiled ahead of their first call.

`driver` binds the CUDA driver, `runtime` is memory and clocks on the device, `compile` turns a
kernel into a binary (cached on disk), `launch` lays its parameters out once and launches it
through the driver; no C compiler and no framework is needed. With TRITON_INTERPRET=1 the same
algorithms run in Triton's interpreter over host memory, slowly, for tests without a GPU. Every
other file is a primitive. The gluon backend stands on the same four files.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from bedstone.backends.triton import driver, runtime

DEVICE_KINDS = ("cuda",)
TRITON_VERSIONS = "3.6"  # kernels and ahead-of-time interface were written against this release

RUNTIME = runtime.InterpreterRuntime() if runtime.interpreting() else runtime.CudaRuntime()


def missing() -> str | None:
    """None if kernels can be compiled and run here, else why not."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    found = version("triton")
    if not found.startswith(TRITON_VERSIONS):
        return f"triton {found} is installed; {TRITON_VERSIONS} is needed"
    return None if runtime.interpreting() else driver.missing()


def compile_ahead(*args: Any) -> Iterator[Any]:
    """See `ahead.compile_ahead`, which is imported where it is wanted."""
    from bedstone.backends.triton import ahead

    return ahead.compile_ahead(*args)
