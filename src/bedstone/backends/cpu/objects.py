"""Compile a builder's module to an object file, keep it on disk, load it.

Building a kernel costs 50 to 600 ms, loading its object 3 ms: a cache hit builds no IR at all.
A file's name is the hash of everything that decides its contents; it opens with a digest of the
rest, so a damaged file counts as absent. Files appear by `os.replace`: a reader sees all or
nothing. Where the folder cannot be read or written, kernels are compiled every time.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import llvmlite
import llvmlite.binding as llvm

from bedstone.backends.cpu.builder import KernelBuilder
from bedstone.backends.cpu.target import Target, initialize_llvm
from bedstone.plan import cache, config
from bedstone.version import __version__

MAGIC = b"bedstone-object-1\n"
DIGEST_BYTES = hashlib.sha256().digest_size
EVICT_EVERY = 32  # writes of one process between two looks at the folder's size
EVICT_TO = 0.75  # of the bound
TOUCH_AFTER = 3600.0  # seconds: how stale a file's time of last use may be

Emit = Callable[[Target], KernelBuilder]

_loaded: WeakValueDictionary[str, LoadedObject] = WeakValueDictionary()
_writes = itertools.count()


class LoadedObject:
    """Machine code in memory, for as long as this object lives."""

    def __init__(self, code: bytes, triple: str) -> None:
        initialize_llvm()
        machine = llvm.Target.from_triple(triple).create_target_machine(codemodel="jitdefault")
        self.engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        self.engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self.engine.finalize_object()
        self.size = len(code)

    def address(self, name: str) -> int:
        """The address of an exported function."""
        return self.engine.get_function_address(name)

    def function(self, name: str, argtypes: list[Any], restype: Any = None) -> Any:
        """The function for ctypes (the GIL is released during a call); it keeps the code alive."""
        call = ctypes.CFUNCTYPE(restype, *argtypes)(self.address(name))
        call.code = self
        return call


def obtain(key: str, emit: Emit, target: Target | None = None) -> LoadedObject:
    """The object of a kernel: from memory, from the disk, or emitted and compiled now.

    `key` must name everything that `emit` depends on besides the target and the backend's
    sources: kind of kernel, problem, tile sizes.
    """
    target = target or Target.current()
    name = file_name(key, target)
    found = _loaded.get(name)
    if found is None:
        code = read(name)
        if code is None:
            code = compile_object(emit(target), target)
            write(name, code)
        found = _loaded[name] = LoadedObject(code, target.triple)
    return found


def compile_object(builder: KernelBuilder, target: Target, jit: bool = True) -> bytes:
    """The module as an object file. `jit=False` makes one for a linker."""
    machine = target.machine(jit)
    return machine.emit_object(optimized(builder, machine))


def assembly(builder: KernelBuilder, target: Target) -> str:
    """The module as assembly text, to look at."""
    machine = target.machine()
    return machine.emit_assembly(optimized(builder, machine))


def optimized(builder: KernelBuilder, machine: llvm.TargetMachine) -> llvm.ModuleRef:
    """The module after the passes that a hand-shaped loop nest needs: slots become registers."""
    module = llvm.parse_assembly(str(builder.module))
    module.verify()
    tuning = llvm.create_pipeline_tuning_options(speed_level=2)
    passes = llvm.create_pass_builder(machine, tuning)
    manager = llvm.create_new_function_pass_manager()
    manager.add_sroa_pass()
    manager.add_instruction_combine_pass()
    manager.add_simplify_cfg_pass()
    for function in module.functions:
        if not function.is_declaration:
            manager.run(function, passes)
    return module


def read(name: str) -> bytes | None:
    """The object file of that name from the cache; None if it is absent or damaged."""
    folder = cache.directory("objects")
    if folder is None:
        return None
    path = folder / name
    try:
        data = path.read_bytes()
    except OSError:
        return None
    code = data[len(MAGIC) + DIGEST_BYTES :]
    if data != MAGIC + hashlib.sha256(code).digest() + code:
        return None
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > TOUCH_AFTER:
            os.utime(path)
    return code


def write(name: str, code: bytes) -> None:
    """Put an object file into the cache; a folder that cannot be written is no error."""
    folder = cache.directory("objects")
    if folder is None:
        return
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(MAGIC + hashlib.sha256(code).digest() + code)
            os.replace(temporary, folder / name)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        if next(_writes) % EVICT_EVERY == 0:
            evict(folder, config.current().cache_mb << 20)


def evict(folder: Path, bound: int) -> None:
    """Delete the files unused for longest until the folder is well below `bound` bytes."""
    files = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            status = path.stat()
            files.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in files)
    if total <= bound:
        return
    for _, size, path in sorted(files):
        with contextlib.suppress(OSError):
            path.unlink()
        total -= size
        if total <= EVICT_TO * bound:
            return


def file_name(key: str, target: Target) -> str:
    """The cache's name for what `key` says, compiled for a target."""
    versions = f"bedstone {__version__} llvmlite {llvmlite.__version__}"
    words = "\n".join((key, target.fingerprint, versions, sources_digest()))
    return hashlib.sha256(words.encode()).hexdigest()[:40] + ".o"


@functools.cache
def sources_digest() -> str:
    """A hash of this backend's sources: an edited kernel is another kernel.

    (Without library/: it makes the C library and no kernel of a plan.)
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        if path.parent.name != "library":
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
