"""Handlers of XLA's typed foreign-function interface in machine code, made by llvmlite.

XLA calls a handler with a call frame: pointers to buffers, in and out. Asked for its metadata, a
handler answers with the version of the interface. Otherwise it takes the buffers' addresses: one
for the CPU calls a plan's machine code with them, so that no Python runs; one for a GPU asks XLA
for the stream and the device, and calls a function of Python that launches. The layout of the
structures is that of xla/ffi/api/c_api.h, which comes with jaxlib.
"""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path
from typing import Any

import jax
import llvmlite.binding as llvm

from bedstone import InvalidDescriptor

METADATA = 1  # type of the extension that asks for it
# Offsets in bytes: of the call frame, an extension, the metadata, a buffer, the table of functions.
FRAME_EXTENSION, FRAME_API, FRAME_CONTEXT, FRAME_ARGUMENTS, FRAME_RESULTS = 8, 16, 24, 72, 112
EXTENSION_TYPE, EXTENSION_METADATA = 8, 24
VERSION_MAJOR, VERSION_MINOR, TRAITS, STATE_TYPE = 24, 28, 32, 40
BUFFER_DATA = 24
API_ERROR_CREATE, API_STREAM_GET, API_DEVICE_ORDINAL_GET = 48, 80, 184
# Bytes of the arguments of those functions, which begin with their size and end with what they
# give: a pointer, an int32. (An error: its message, and a code.)
STREAM_BYTES, ORDINAL_BYTES, ERROR_BYTES, ARGUMENT_LAST = 32, 28, 28, 24
INTERNAL_ERROR = 13
# Traits: a call launches the same work whenever it is called, so XLA may put it in a CUDA graph.
NO_TRAITS, REPLAYABLE = 0, 1

# What a handler for a GPU calls: (number, addresses of the operands and the workspace, stream,
# device) -> the address of a message, or null if all went well.
Launch = ctypes.CFUNCTYPE(
    ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32
)


@functools.cache
def _header() -> str:
    path = Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h"
    return path.read_text(encoding="utf-8")


@functools.cache
def version() -> tuple[int, int]:
    """(major, minor) of the FFI of the jaxlib that is installed."""
    parts = [re.search(rf"#define XLA_FFI_API_{p} (\d+)", _header()) for p in ("MAJOR", "MINOR")]
    if None in parts:
        raise InvalidDescriptor("jaxlib", str(jax.ffi.include_dir()), "a known FFI header")
    return tuple(int(m.group(1)) for m in parts)  # type: ignore[union-attr, return-value]


def tells_the_device() -> bool:
    """Whether handlers can ask which device they are called for."""
    return "XLA_FFI_DeviceOrdinal_Get" in _header()


def cpu_handler(inputs: int, outputs: int, workspace: bool, entry: int, alpha: float,
                threads: int) -> str:  # fmt: skip
    """The module of a handler that calls a plan's machine code at `entry`.

    inputs, outputs  how many; workspace: whether the last result is one
    threads          the address of the number of threads
    """
    places = _places(inputs, outputs + workspace)
    words = [f"i64 %{_name(*place)}" for place in places]
    if not workspace:
        words.append("i64 0")
    kinds = ", ".join(["i64"] * len(words) + ["double", "double", "i64"])
    return _handler(NO_TRAITS, f"""{"".join(_data(*place) for place in places)}
  %threads_at = inttoptr i64 {threads} to ptr
  %threads = load i64, ptr %threads_at
  %entry = inttoptr i64 {entry} to ptr
  call void ({kinds}) %entry({", ".join(words)}, double {alpha!r}, double 0.0, i64 %threads)
  ret ptr null""")  # fmt: skip


def gpu_handler(inputs: int, results: int, launch: int, number: int) -> str:
    """The module of a handler that calls the `Launch` at address `launch` with `number` and the
    addresses of all inputs and results, in order. Errors, its own too, go back to XLA."""
    places = _places(inputs, results)
    stores = "".join(
        f"{_data(*place)}\n  %s{i} = getelementptr i64, ptr %all, i64 {i}"
        f"\n  store i64 %{_name(*place)}, ptr %s{i}"
        for i, place in enumerate(places)
    )
    return _handler(REPLAYABLE, f"""
  %api_at = getelementptr i8, ptr %frame, i64 {FRAME_API}
  %api = load ptr, ptr %api_at
  %context_at = getelementptr i8, ptr %frame, i64 {FRAME_CONTEXT}
  %context = load ptr, ptr %context_at{_ask("stream", API_STREAM_GET, STREAM_BYTES)}
  %stream = load ptr, ptr %stream_last{_ask("ordinal", API_DEVICE_ORDINAL_GET, ORDINAL_BYTES)}
  %ordinal = load i32, ptr %ordinal_last
  %all = alloca [{len(places)} x i64]{stores}
  %launch = inttoptr i64 {launch} to ptr
  %said = call ptr %launch(i64 {number}, ptr %all, ptr %stream, i32 %ordinal)
  %well = icmp eq ptr %said, null
  br i1 %well, label %done, label %failed
done:
  ret ptr null
failed:{_argument("error", "%said", ERROR_BYTES)}
  store i32 {INTERNAL_ERROR}, ptr %error_last
  %create_at = getelementptr i8, ptr %api, i64 {API_ERROR_CREATE}
  %create = load ptr, ptr %create_at
  %error = call ptr %create(ptr %error_arguments)
  ret ptr %error""")  # fmt: skip


def compiled(module: str) -> tuple[int, Any]:
    """The address of a module's handler, and what must live as long as it may be called."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    parsed = llvm.parse_assembly(module)
    parsed.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(codemodel="jitdefault")
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    return engine.get_function_address("handler"), engine


def _places(inputs: int, results: int) -> list[tuple[int, int]]:
    """(the list in the call frame, the number in it) of every buffer."""
    return [(FRAME_ARGUMENTS, i) for i in range(inputs)] + [
        (FRAME_RESULTS, i) for i in range(results)
    ]


def _name(source: int, number: int) -> str:
    return f"p{source}_{number}"


def _data(source: int, number: int) -> str:
    """IR: the data pointer of buffer `number` of the list at %frame + source, by its name."""
    name = _name(source, number)
    return f"""
  %a{name} = getelementptr i8, ptr %frame, i64 {source}
  %l{name} = load ptr, ptr %a{name}
  %e{name} = getelementptr ptr, ptr %l{name}, i64 {number}
  %b{name} = load ptr, ptr %e{name}
  %d{name} = getelementptr i8, ptr %b{name}, i64 {BUFFER_DATA}
  %{name} = load i64, ptr %d{name}"""


def _argument(name: str, value: str, nbytes: int) -> str:
    """IR: the argument of one of XLA's functions: its size, no extension, a pointer; and %..._last,
    where its last field is."""
    return f"""
  %{name}_arguments = alloca [4 x i64]
  store [4 x i64] zeroinitializer, ptr %{name}_arguments
  store i64 {nbytes}, ptr %{name}_arguments
  %{name}_pointer = getelementptr i8, ptr %{name}_arguments, i64 16
  store ptr {value}, ptr %{name}_pointer
  %{name}_last = getelementptr i8, ptr %{name}_arguments, i64 {ARGUMENT_LAST}"""


def _ask(name: str, function: int, nbytes: int) -> str:
    """IR: call one of XLA's functions, which writes to %..._last; return its error, if any."""
    return f"""{_argument(name, "%context", nbytes)}
  %{name}_get_at = getelementptr i8, ptr %api, i64 {function}
  %{name}_get = load ptr, ptr %{name}_get_at
  %{name}_error = call ptr %{name}_get(ptr %{name}_arguments)
  %{name}_well = icmp eq ptr %{name}_error, null
  br i1 %{name}_well, label %{name}_known, label %{name}_unknown
{name}_unknown:
  ret ptr %{name}_error
{name}_known:"""


def _handler(traits: int, body: str) -> str:
    """The module of a handler: the answer to the question for metadata, or the body."""
    major, minor = version()
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
  store i32 {major}, ptr %major
  %minor = getelementptr i8, ptr %metadata, i64 {VERSION_MINOR}
  store i32 {minor}, ptr %minor
  %traits = getelementptr i8, ptr %metadata, i64 {TRAITS}
  store i32 {traits}, ptr %traits
  %state = getelementptr i8, ptr %metadata, i64 {STATE_TYPE}
  store i64 0, ptr %state
  ret ptr null
run:{body}
}}
"""
