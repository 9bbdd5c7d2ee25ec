"""The library, built once a session for each CPU that a test asks for."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest

from bedstone.compat.c.build import build

_folder = functools.cache(lambda: tempfile.TemporaryDirectory(prefix="bedstone-c-"))


@functools.cache
def library_folder(cpu):
    """The folder with libbedstone.so, bedstone.h, ...; skips where there is no linker."""
    out = Path(_folder().name) / cpu
    if build(out, cpu).linker is None:
        pytest.skip(f"no linker for {cpu} is installed")
    return out
