"""Plans as XLA custom calls: a typed FFI handler in machine code for every plan, made by llvmlite.

XLA calls a handler with a call frame: pointers to buffers, in and out. The handler takes their data
pointers, calls the plan's machine code with the process's number of threads as it then is, and
returns; no Python runs. Asked for its metadata, it answers with the version of the interface. The
layout of the structures is that of xla/ffi/api/c_api.h, which comes with jaxlib. Targets are
registered under a name made from the problem, so no address enters a compiled program: one that is
loaded from JAX's persistent cache finds its target by that name, which tracing has registered.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import llvmlite.binding as llvm

from bedstone import InvalidDescriptor, Plan, Problem, num_threads_address
from bedstone.frameworks.planning import compiled_plan

METADATA = 1  # type of the extension that asks for it
# Offsets in bytes: of the call frame, an extension, the metadata, a buffer.
FRAME_EXTENSION, FRAME_ARGUMENTS, FRAME_RESULTS = 8, 72, 112
EXTENSION_TYPE, EXTENSION_METADATA = 8, 24
VERSION_MAJOR, VERSION_MINOR, TRAITS, STATE_TYPE = 24, 28, 32, 40
BUFFER_DATA = 24

_kept: list[Any] = []  # code that XLA may call until the process ends
_lock = threading.Lock()
# Never emptied: XLA keeps what is registered until the process ends.
_found: dict[tuple[Problem, float], Target | str] = {}
_named: dict[str, Target] = {}


@functools.cache
def interface_version() -> tuple[int, int]:
    """(major, minor) of the FFI of the jaxlib that is installed."""
    text = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text(encoding="utf-8")
    found = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    if None in found:
        raise InvalidDescriptor("jaxlib", str(jax.ffi.include_dir()), "a known FFI header")
    return tuple(int(m.group(1)) for m in found)  # type: ignore[union-attr, return-value]


def _data(source: int, number: int) -> str:
    """IR: %pN = the data pointer of buffer `number` of the list at %frame + source."""
    name = f"p{source}_{number}"
    return f"""
  %a{name} = getelementptr i8, ptr %frame, i64 {source}
  %l{name} = load ptr, ptr %a{name}
  %e{name} = getelementptr ptr, ptr %l{name}, i64 {number}
  %b{name} = load ptr, ptr %e{name}
  %d{name} = getelementptr i8, ptr %b{name}, i64 {BUFFER_DATA}
  %{name} = load i64, ptr %d{name}"""


def handler_ir(
    inputs: int, outputs: int, workspace: bool, entry: int, alpha: float, threads: int,
    version: tuple[int, int],
) -> str:  # fmt: skip
    """The handler's module. Operands are the inputs, then the outputs; the workspace is the last
    result."""
    places = [(FRAME_ARGUMENTS, i) for i in range(inputs)]
    places += [(FRAME_RESULTS, i) for i in range(outputs + workspace)]
    loads = "".join(_data(*place) for place in places)
    words = [f"i64 %p{source}_{number}" for source, number in places]
    if not workspace:
        words.append("i64 0")
    kinds = ", ".join(["i64"] * len(words) + ["double", "double", "i64"])
    return f"""
define ptr @handler(ptr %frame) {{
  %extension_at = getelementptr i8, ptr %frame, i64 {FRAME_EXTENSION}
  %extension = load ptr, ptr %extension_at
  %none = icmp eq ptr %extension, null
  br i1 %none, label %run, label %asked
asked:
  %type_at = getelementptr i8, ptr %extension, i64 {EXTENSION_TYPE}
  %type = load i32, ptr %type_at
  %is_metadata = icmp eq i32 %type, {METADATA}
  br i1 %is_metadata, label %answer, label %run
answer:
  %metadata_at = getelementptr i8, ptr %extension, i64 {EXTENSION_METADATA}
  %metadata = load ptr, ptr %metadata_at
  %major = getelementptr i8, ptr %metadata, i64 {VERSION_MAJOR}
  store i32 {version[0]}, ptr %major
  %minor = getelementptr i8, ptr %metadata, i64 {VERSION_MINOR}
  store i32 {version[1]}, ptr %minor
  %traits = getelementptr i8, ptr %metadata, i64 {TRAITS}
  store i32 0, ptr %traits
  %state = getelementptr i8, ptr %metadata, i64 {STATE_TYPE}
  store i64 0, ptr %state
  ret ptr null
run:{loads}
  %threads_at = inttoptr i64 {threads} to ptr
  %threads = load i64, ptr %threads_at
  %entry = inttoptr i64 {entry} to ptr
  call void ({kinds}) %entry({", ".join(words)}, double {alpha!r}, double 0.0, i64 %threads)
  ret ptr null
}}
"""


class Target:
    """A registered plan: the name for `jax.ffi.ffi_call`, and the bytes of workspace it wants."""

    def __init__(self, name: str, workspace: int, algorithm: str) -> None:
        self.name, self.workspace, self.algorithm = name, workspace, algorithm


def call(
    problem: Problem, operands: Sequence[Any], shape: Sequence[int], alpha: float = 1.0
) -> Any:
    """The custom call of alpha * problem: an array of `shape` (the problem's dims, as JAX orders
    them), of the operands' dtype; or the reason why there is none, a string."""
    found = target(problem, alpha)
    if isinstance(found, str):
        return found
    results = [jax.ShapeDtypeStruct(tuple(shape), operands[0].dtype)]
    if found.workspace:
        results.append(jax.ShapeDtypeStruct((found.workspace,), jnp.uint8))
    return jax.ffi.ffi_call(found.name, results)(*operands)[0]


def target(problem: Problem, alpha: float = 1.0) -> Target | str:
    """The target that runs a problem on the CPU, registered; or why there is none."""
    key = (problem, alpha)
    with _lock:  # a name can be registered only once, whichever thread asks first
        if key not in _found:
            _found[key] = _find(problem, alpha)
        return _found[key]


def _find(problem: Problem, alpha: float) -> Target | str:
    plan = compiled_plan(problem)
    if isinstance(plan, str):
        return plan
    entry = plan.native_entry
    if entry is None:
        return "no machine code to call"
    word = hashlib.sha256(f"{plan.algorithm} {alpha!r} {problem}".encode()).hexdigest()[:24]
    name = f"bedstone_{word}"
    if name not in _named:  # problems that differ in strides of no effect share a name
        _named[name] = _register(name, problem, alpha, plan, entry)
    return _named[name]


def _register(name: str, problem: Problem, alpha: float, plan: Plan, entry: Any) -> Target:
    ir = handler_ir(
        len(problem.inputs), len(problem.outputs), plan.workspace_size > 0, entry.address,
        alpha, num_threads_address(), interface_version(),
    )  # fmt: skip
    module = llvm.parse_assembly(ir)
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(codemodel="jitdefault")
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(
        engine.get_function_address("handler")
    )
    _kept.append((engine, function, entry.owner))
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform="cpu")
    return Target(name, plan.workspace_size, plan.algorithm)
