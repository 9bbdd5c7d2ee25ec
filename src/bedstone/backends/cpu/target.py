"""Target: the few numbers that describe a chip to the kernels.

One code path serves every instruction set: a kernel asks for vector length, registers and cache
sizes, LLVM does the rest. `BEDSTONE_CPU_TARGET` names a narrower target than the host's, so that
the AVX2 and SSE2 paths can be run (and tested) on an AVX-512 machine.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import llvmlite.binding as llvm

from bedstone.plan import config
from bedstone.spec.errors import InvalidDescriptor

KIB, MIB = 1024, 1024 * 1024
CACHE_FOLDER = Path("/sys/devices/system/cpu/cpu0/cache")
DEFAULT_CACHES = (32 * KIB, 512 * KIB, 8 * MIB)  # where the system does not tell
CACHE_LINE = 64
# Linux on x86-64: the system call, its request for a register state, and the tiles' number.
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18


@dataclass(frozen=True)
class Target:
    """A CPU to compile for.

    triple, cpu, features   as LLVM names them (features: a string "+avx2,-avx512f" or "")
    vector_bytes            of the widest vector register
    vector_registers        how many of them
    has_fma                 fused multiply-add
    has_masks               masked loads and stores cost what plain ones do (AVX-512)
    has_f16                 float16 <-> float32 conversion instructions
    has_matrix_unit         tiles of bfloat16 products (AMX), granted to this process
    l1_bytes ... l3_bytes   data caches: a core's first two levels, the shared third
    """

    triple: str
    cpu: str
    features: str
    vector_bytes: int
    vector_registers: int
    has_fma: bool
    has_masks: bool
    has_f16: bool
    l1_bytes: int = DEFAULT_CACHES[0]
    l2_bytes: int = DEFAULT_CACHES[1]
    l3_bytes: int = DEFAULT_CACHES[2]
    has_matrix_unit: bool = False

    @classmethod
    def named(cls, name: str) -> Target:
        """ "native", or one of NAMED ("haswell", "x86-64", "aarch64", ...).

        A name of this machine's architecture takes its triple and caches, any other the
        Linux triple: such a target can be compiled for, not run.
        """
        if name == "native":
            return _host()
        if name not in NAMED:
            raise InvalidDescriptor("cpu_target", name, f"native or one of {list(NAMED)}")
        target = NAMED[name]
        if target.triple.split("-")[0] == platform.machine():
            host = _host()
            caches = {f"l{i}_bytes": getattr(host, f"l{i}_bytes") for i in (1, 2, 3)}
            return replace(target, triple=host.triple, **caches)
        return target

    @classmethod
    def current(cls) -> Target:
        """The target that the setting cpu_target names; the host without it."""
        return cls.named(config.current().cpu_target or "native")

    @property
    def fingerprint(self) -> str:
        """Everything that decides the generated code, on one line."""
        return "|".join(str(getattr(self, f)) for f in self.__dataclass_fields__)

    def machine(self, jit: bool = True) -> llvm.TargetMachine:
        """LLVM's target machine. `jit=False` makes position-independent code for a linker."""
        initialize_llvm()
        return llvm.Target.from_triple(self.triple).create_target_machine(
            cpu=self.cpu,
            features=self.features,
            opt=2,
            reloc="default" if jit else "pic",
            codemodel="jitdefault" if jit else "default",
        )


@functools.cache
def initialize_llvm() -> None:
    """Register LLVM's code generators, once a process (all of them: objects for other chips)."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


def _x86(cpu: str, vector_bytes: int, registers: int, features: str = "") -> Target:
    wide = vector_bytes > 16
    triple = "x86_64-unknown-linux-gnu"
    return Target(triple, cpu, features, vector_bytes, registers, wide, registers == 32, wide)


def _aarch64(cpu: str) -> Target:
    return Target("aarch64-unknown-linux-gnu", cpu, "", 16, 32, True, False, True)


NAMED = {
    "x86-64": _x86("x86-64", 16, 16),
    "haswell": _x86("haswell", 32, 16),
    "x86-64-v3": _x86("x86-64-v3", 32, 16),
    "x86-64-v4": _x86("x86-64-v4", 64, 32),
    "skylake-avx512": _x86("skylake-avx512", 64, 32, "-prefer-256-bit"),
    "aarch64": _aarch64("generic"),
    "neoverse-n1": _aarch64("neoverse-n1"),
    "apple-m1": replace(_aarch64("apple-m1"), triple="arm64-apple-macosx11.0.0"),
}


@functools.cache
def _host() -> Target:
    initialize_llvm()
    triple, cpu = llvm.get_process_triple(), llvm.get_host_cpu_name()
    caches = _cache_sizes()
    if not triple.startswith(("x86_64", "amd64")):
        return Target(triple, cpu, "", 16, 32, True, False, True, *caches)
    flags = llvm.get_host_cpu_features()
    # AVX-512 needs byte and masked vector forms too; a chip without them is served as AVX2.
    full = all(flags.get(f) for f in ("avx512f", "avx512vl", "avx512bw", "avx512dq"))
    wide = bool(flags.get("avx2")) and bool(flags.get("fma"))
    vector_bytes, registers = (64, 32) if full else (32, 16) if wide else (16, 16)
    features = flags.flatten() + (",-prefer-256-bit" if full else "")
    f16 = bool(flags.get("f16c"))
    matrix = full and matrix_unit_refusal() is None
    return Target(triple, cpu, features, vector_bytes, registers, wide, full, f16, *caches, matrix)


@functools.cache
def matrix_unit_refusal() -> str | None:
    """None if code of this process may use the tiles of AMX, else why not.

    Their registers are 8 KiB that the system saves with a thread: Linux (5.16 on) grants them to
    a process that asks, for all its threads and the children it forks. It refuses where the stack
    that a thread set aside for signals is too small for them.
    """
    initialize_llvm()
    flags = llvm.get_host_cpu_features()
    if not all(flags.get(f) for f in ("amx-tile", "amx-bf16", "avx512bf16")):
        return "this processor has no matrix unit for bfloat16 (AMX)"
    if not sys.platform.startswith("linux"):
        return f"the matrix unit (AMX) is not used on {sys.platform}"
    return request_matrix_unit(ctypes.CDLL(None, use_errno=True))


def request_matrix_unit(libc: ctypes.CDLL) -> str | None:
    """Ask the system for the tile registers; None if it grants them, else its refusal."""
    if libc.syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0:
        return None
    reason = os.strerror(ctypes.get_errno())
    return f"the system refuses the matrix unit (AMX) to this process: {reason}"


def _cache_sizes() -> tuple[int, int, int]:
    """Bytes of this machine's L1 data, L2 and L3 caches (defaults for what it does not tell)."""
    sizes = list(DEFAULT_CACHES)
    for index in CACHE_FOLDER.glob("index*"):
        try:
            level = int((index / "level").read_text())
            kind = (index / "type").read_text().strip()
            size = (index / "size").read_text().strip()
        except (OSError, ValueError):
            continue
        if kind in ("Data", "Unified") and 1 <= level <= 3 and size.endswith("K"):
            sizes[level - 1] = int(size[:-1]) * KIB
    return sizes[0], sizes[1], sizes[2]
