"""The CPU backend: kernels emitted as LLVM IR from Python and compiled for the machine at hand.

`builder` is the language the kernels are written in, `vectormath` its exp, log, tanh and erf,
`target` the numbers that describe a chip, `objects` compiles and caches, `threads` is the worker
pool, `kernel` the compiled kernel as a plan calls it. Every other file is a primitive.
"""

from __future__ import annotations

import importlib.util
from types import ModuleType

DEVICE_KINDS = ("cpu",)


def missing() -> str | None:
    """None if kernels can be compiled here, else why not."""
    if importlib.util.find_spec("llvmlite") is None:
        return "the package llvmlite is not installed"
    return None


def describe() -> str:
    """What kernels are compiled for, in words."""
    from bedstone.backends.cpu.target import KIB, Target

    target = Target.current()
    caches = " / ".join(f"{n // KIB}" for n in (target.l1_bytes, target.l2_bytes, target.l3_bytes))
    return (
        f"{target.cpu}: {target.vector_registers} registers of {8 * target.vector_bytes} bits, "
        f"caches {caches} KiB"
    )


def ceilings() -> tuple[dict[str, float], float]:
    """Measured peaks of this CPU: flops per second by dtype, bytes per second of a copy."""
    from bedstone.backends.cpu import peak
    from bedstone.backends.cpu.target import Target

    rates = {dtype: peak.flops_per_second(dtype) for dtype in ("float32", "float64")}
    if Target.current().has_matrix_unit:
        rates["bfloat16"] = peak.matrix_flops_per_second()
    return rates, peak.bytes_per_second()


def c_library() -> ModuleType:
    """What compiles the C library: `library_object(cpu)` and the tables in `interface`."""
    from bedstone.backends.cpu import library

    return library


def is_native(triple: str) -> bool:
    """Whether code of that triple runs on this machine's kind of processor."""
    from bedstone.backends.cpu.target import Target

    return triple.split("-")[0] == Target.named("native").triple.split("-")[0]
