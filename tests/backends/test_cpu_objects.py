"""The object cache: a hit emits nothing, damage is noticed, the size is bounded."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from bedstone.backends.cpu import objects
from bedstone.backends.cpu.builder import KernelBuilder
from bedstone.backends.cpu.kernel import compiled
from bedstone.plan.config import config


def emit_constant(target):
    """A kernel that writes 42."""
    k = KernelBuilder(target)
    with k.entry("entry", pointers=1) as call:
        k.store(k.constant(42, "int64"), call.pointers[0], "int64")
    return k


def emit_nothing(target):
    raise AssertionError("emitted although the object is cached")


def result(emit):
    """What the kernel writes; nothing of it stays in memory."""
    out = np.zeros(1, np.int64)
    kernel = compiled("test objects", emit, 1)
    kernel([out.ctypes.data])
    del kernel
    gc.collect()
    return out[0]


@pytest.fixture
def folder(tmp_path):
    with config(cache_dir=str(tmp_path)):
        yield tmp_path / "objects"


def cached_files(folder):
    return sorted(folder.glob("*.o"))


def test_hit_emits_nothing(folder):
    assert result(emit_constant) == 42
    (file,) = cached_files(folder)
    assert result(emit_nothing) == 42
    assert cached_files(folder) == [file]


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_damaged_file_is_rebuilt(folder, damage):
    assert result(emit_constant) == 42
    (file,) = cached_files(folder)
    data = bytearray(file.read_bytes())
    good = bytes(data)
    if damage == "flip":
        data[-100] ^= 1
    file.write_bytes({"cut": data[:-10], "flip": data, "empty": b""}[damage])
    assert result(emit_constant) == 42
    assert file.read_bytes() == good


def test_another_target_is_another_object(folder):
    result(emit_constant)
    with config(cpu_target="x86-64"):
        compiled("test objects", emit_constant, 1)
    assert len(cached_files(folder)) == 2


def test_no_cache_and_unusable_folders(tmp_path):
    with config(cache_dir=""):
        assert result(emit_constant) == 42
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with config(cache_dir=str(blocked)):
        assert result(emit_constant) == 42
        assert result(emit_constant) == 42


def test_eviction_keeps_the_recently_used(tmp_path):
    for i in range(10):
        path = tmp_path / f"{i}.o"
        path.write_bytes(bytes(1000))
        os.utime(path, (1000 + i, 1000 + i))
    objects.evict(tmp_path, 10000)
    assert len(list(tmp_path.iterdir())) == 10
    objects.evict(tmp_path, 8000)
    assert sorted(p.stem for p in tmp_path.iterdir()) == ["4", "5", "6", "7", "8", "9"]
