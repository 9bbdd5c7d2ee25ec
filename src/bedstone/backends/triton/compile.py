"""Ahead-of-time compilation of Triton and Gluon kernels, with a cache of binaries on disk.

A `Source` names everything that determines a binary: the kernel, the types of its arguments, its
constants and its options. Triton compiles for any architecture on any machine, so the same
function serves plans, `bedstone compile` and the tests that read what the compiler made.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bedstone.plan import cache, log
from bedstone.spec.dtypes import DType
from bedstone.spec.errors import BedstoneError

CACHE_KIND = "triton"

# Triton's names of the element types.
ELEMENT = {
    DType.float32: "fp32", DType.float64: "fp64", DType.float16: "fp16", DType.bfloat16: "bf16",
    DType.int64: "i64", DType.int32: "i32", DType.uint8: "u8",
}  # fmt: skip

_compiling = threading.Lock()  # Triton's settings, changed while it compiles, are global


class CompileError(BedstoneError, RuntimeError):
    """The compiler refused a kernel; the message carries the innermost reason."""


@dataclass(frozen=True)
class Source:
    """One kernel to compile.

    signature   argument name -> Triton's type ("*fp32", "i32", "tensordesc<...>", a tuple of
                these), for every argument that is not a constant
    constants   argument name -> value baked in; (name, i) for element i of a tuple
    divisors    argument name, or (name, i) -> a number that divides its value
    options     num_warps, num_stages, num_ctas, maxnreg, ...
    """

    function: Any
    signature: Mapping[str, Any]
    constants: Mapping[Any, Any]
    divisors: Mapping[Any, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The kernel's function name."""
        return str(self.function.__name__)

    def key(self, architecture: str) -> str:
        """Equal for sources that give the same binary."""
        import triton

        words = [
            self.name,
            hashlib.sha256(self.function.cache_key.encode()).hexdigest()[:24],
            ",".join(f"{k}:{v}" for k, v in self.signature.items()),
            ",".join(f"{k}={_constant_text(v)}" for k, v in _sorted(self.constants)),
            ",".join(f"{k}%{v}" for k, v in _sorted(self.divisors)),
            ",".join(f"{k}={v}" for k, v in sorted(self.options.items())),
            architecture,
            f"triton {triton.__version__}",
        ]
        return " | ".join(words)


def _sorted(values: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    return sorted(values.items(), key=lambda item: str(item[0]))


def _constant_text(value: Any) -> str:
    """A constant in a key: kernels passed as constants count with their whole source."""
    return str(getattr(value, "cache_key", value))


@dataclass(frozen=True)
class Binary:
    """What the compiler made.

    code      the cubin (hsaco on AMD)
    shared    bytes of dynamic shared memory
    scratch   bytes of global memory a program that the kernel wants besides
    maps      for each "tensordesc" argument: swizzle, elem_size, elem_type, block_size
    assembly  texts by kind ("ptx", "amdgcn", "ttgir"); empty when it came from the cache
    """

    name: str
    code: bytes
    architecture: str
    shared: int
    num_warps: int
    num_ctas: int
    scratch: int
    maps: tuple[Mapping[str, Any], ...]
    assembly: Mapping[str, str] = field(default_factory=dict)


def binary(source: Source, architecture: str) -> Binary:
    """The source compiled for an architecture ("sm_90", "gfx942"), from the disk cache if it is
    there. Raises CompileError."""
    key = source.key(architecture)
    record = cache.read(CACHE_KIND, key)
    if record is not None:
        try:
            return _from_record(record)
        except (KeyError, TypeError, ValueError):
            log.debug("the cached binary of %s cannot be read; compiling again", source.name)
    made = compile_source(source, architecture)
    cache.write(CACHE_KIND, key, _to_record(made))
    log.debug("compiled %s for %s", source.name, architecture)
    return made


def _to_record(made: Binary) -> dict[str, Any]:
    record = {k: getattr(made, k) for k in Binary.__dataclass_fields__ if k != "assembly"}
    return {**record, "code": base64.b64encode(made.code).decode()}


def _from_record(record: Mapping[str, Any]) -> Binary:
    values = {k: record[k] for k in Binary.__dataclass_fields__ if k != "assembly"}
    values["code"] = base64.b64decode(values["code"])
    values["maps"] = tuple(values["maps"])
    return Binary(**values)


def gpu_target(architecture: str) -> Any:
    """Triton's GPUTarget for "sm_90" or "gfx942"."""
    from triton.backends.compiler import GPUTarget

    match = re.fullmatch(r"sm_(\d+)a?", architecture)
    if match:
        return GPUTarget("cuda", int(match.group(1)), 32)
    return GPUTarget("hip", architecture, 64)


def compile_source(source: Source, architecture: str) -> Binary:
    """Compile, whatever the cache holds; the result carries the assembly."""
    import triton

    with _private_cache():
        try:
            made = triton.compile(
                _ast_source(source), target=gpu_target(architecture), options=dict(source.options)
            )
        except Exception as error:
            raise CompileError(f"{source.name} for {architecture}: {_innermost(error)}") from error
    meta = made.metadata
    return Binary(
        name=meta.name,
        code=made.kernel,
        architecture=architecture,
        shared=meta.shared,
        num_warps=meta.num_warps,
        num_ctas=getattr(meta, "num_ctas", 1),
        scratch=getattr(meta, "global_scratch_size", 0) or 0,
        maps=tuple(dict(m) for m in getattr(meta, "tensordesc_meta", None) or ()),
        assembly={k: v for k, v in made.asm.items() if isinstance(v, str)},
    )


def _ast_source(source: Source) -> Any:
    """Triton's own form of a source: every argument in order, constants marked as such."""
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    function = source.function
    signature = {
        name: "constexpr" if name in source.constants else source.signature[name]
        for name in function.arg_names
    }
    names = function.arg_names

    def path(key: Any) -> tuple[int, ...]:
        return (names.index(key[0]), key[1]) if isinstance(key, tuple) else (names.index(key),)

    attributes = {
        path(key): [["tt.divisibility", divisor]]
        for key, divisor in source.divisors.items()
        if divisor > 1 and key not in source.constants
    }
    constants = {path(key): value for key, value in source.constants.items()}
    kind = GluonASTSource if getattr(function, "is_gluon", bool)() else ASTSource
    return kind(fn=function, signature=signature, constexprs=constants, attrs=attributes)


@contextmanager
def _private_cache() -> Iterator[None]:
    """Triton's own cache in a folder that vanishes: what is worth keeping is kept by `binary`."""
    import triton

    with _compiling, tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        yield


def _innermost(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error)[-800:]}"


@dataclass(frozen=True)
class Report:
    """What a binary uses: registers a thread, bytes spilled, shared memory, and its assembly."""

    registers: int
    spilled_bytes: int
    shared: int
    assembly: str
    warnings: tuple[str, ...] = ()

    def count(self, instruction: str) -> int:
        """How often a regular expression occurs in the assembly."""
        return len(re.findall(instruction, self.assembly))


def inspect(source: Source, architecture: str, made: Binary | None = None) -> Report:
    """What the assembler says of a source, compiled here unless `made` still has its assembly."""
    if made is None or not made.assembly:
        made = compile_source(source, architecture)
    if architecture.startswith("gfx"):
        text = made.assembly["amdgcn"]
        registers = re.search(r"\.vgpr_count:\s*(\d+)", text)
        spills = re.search(r"\.vgpr_spill_count:\s*(\d+)", text)
        return Report(
            int(registers.group(1)) if registers else 0,
            4 * int(spills.group(1)) if spills else 0,
            made.shared,
            text,
        )
    text = made.assembly["ptx"]
    said = _ptxas(text, architecture)
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.search(r"(\d+) bytes spill stores", said)
    return Report(
        int(registers.group(1)) if registers else 0,
        int(spills.group(1)) if spills else 0,
        made.shared,
        text,
        tuple(sorted(set(re.findall(r"\(C75\d\d\)[^\n]*", said)))),
    )


@functools.cache
def _assembler(architecture: str) -> Path:
    import triton

    name = "ptxas-blackwell" if int(architecture[3:]) >= 100 else "ptxas"
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


def _ptxas(ptx: str, architecture: str) -> str:
    """What `ptxas -v` says about a PTX text."""
    suffix = "a" if int(architecture[3:]) >= 90 else ""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [_assembler(architecture), "-v", f"-arch={architecture}{suffix}", file.name]
        done = subprocess.run([*command, "-o", "/dev/null"], capture_output=True, text=True)
    if done.returncode:
        raise CompileError(f"ptxas: {done.stderr[-800:]}")
    return done.stderr
