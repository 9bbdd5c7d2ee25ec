"""`bedstone build-c`: write the C library for a CPU into a folder.

The kernels are emitted and compiled by the CPU backend; what is left to do here is to link one
object file, for which the system's linker is asked. Where there is none, the static library is
all that is written.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bedstone.compat.c.archive import archive
from bedstone.compat.c.header import header
from bedstone.plan import registry
from bedstone.spec.errors import InvalidDescriptor
from bedstone.version import __version__

CPUS = ("native", "x86-64-v3", "x86-64-v4", "aarch64")
NAME = "libbedstone"
# Worker threads stand in the library's code until the process ends: it must never be unloaded.
LINK_OPTIONS = ("nodelete", "noexecstack", "relro", "now")
EXPORTS = "{ global: bs_*; local: *; };\n"
LINK_SECONDS = 120

PKG_CONFIG = f"""\
prefix=${{pcfiledir}}

Name: bedstone
Description: Open deep-learning primitives for the CPU
Version: {__version__}
Cflags: -I${{prefix}}
Libs: -L${{prefix}} -lbedstone
Libs.private: -lpthread
"""


@dataclass(frozen=True)
class Built:
    """The files that were written; `linker` made the shared one, None if there was none to ask."""

    files: tuple[Path, ...]
    linker: str | None


def build(out: Path, cpu: str = "native") -> Built:
    """Write the library for `cpu` ("native", or a name that the CPU backend knows) into the
    folder `out`, which is made if need be.

    Raises InvalidDescriptor for an unknown CPU, for a folder that cannot be written, and where
    the backend's compiler is not installed.
    """
    library = _backend()
    code, triple = library.library_object(cpu)
    files = {
        f"{NAME}.a": archive({"bedstone.o": code}),
        "bedstone.h": header(library.interface).encode(),
        "bedstone.pc": PKG_CONFIG.encode(),
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (out / name).write_bytes(data)
        linker = link(code, triple, out / f"{NAME}.so")
    except OSError as error:
        raise InvalidDescriptor("out", str(out), f"a folder to write to ({error})") from None
    names = [*([f"{NAME}.so"] if linker else []), *files]
    return Built(tuple(out / name for name in names), linker)


def _backend() -> Any:
    reason = registry.backend_missing("cpu")
    if reason is not None:
        raise InvalidDescriptor("backend", "cpu", f"a compiler for its kernels: {reason}")
    open_library: Callable[[], Any] = registry.backend_attribute("cpu", "c_library")  # type: ignore
    return open_library()


def link(code: bytes, triple: str, target: Path) -> str | None:
    """Make a shared library of an object file; the linker's name, or None if none is installed.

    Raises InvalidDescriptor with what the linker said if it refused.
    """
    found = _linker(triple)
    if found is None:
        target.unlink(missing_ok=True)
        return None
    program, drives = found
    source, exports = target.with_suffix(".o"), target.with_suffix(".map")
    source.write_bytes(code)
    exports.write_text(EXPORTS, encoding="ascii")
    words = [word for option in LINK_OPTIONS for word in ("-z", option)]
    words += ["-soname", target.name, "--version-script", str(exports)]
    if drives:
        words = ["-nostartfiles", *(f"-Wl,{word}" for word in words), "-Wl,-z,defs"]
    libraries = ["-lpthread"] if drives else []
    command = [program, "-shared", "-o", str(target), str(source), *words, *libraries]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=LINK_SECONDS, check=False
        )
    finally:
        source.unlink()
        exports.unlink()
    if answer.returncode != 0:
        raise InvalidDescriptor("linker", program, f"a shared library; it says: {answer.stderr}")
    return program


def _linker(triple: str) -> tuple[str, bool] | None:
    """(program, whether it is a compiler that drives the linker) for a triple."""
    machine = triple.split("-")[0]
    cross = f"{machine}-linux-gnu-"
    drivers = [f"{cross}gcc"]
    linkers = [f"{cross}ld", "ld.lld"]
    if registry.backend_attribute("cpu", "is_native")(triple):  # type: ignore[operator]
        drivers, linkers = ["cc", "gcc", "clang", *drivers], ["ld", *linkers]
    for names, drives in ((drivers, True), (linkers, False)):
        for name in names:
            if shutil.which(name):
                return name, drives
    return None


# The command -------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bedstone build-c`."""
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write to")
    parser.add_argument("--cpu", default="native", choices=CPUS, help="CPU to compile for")


def main(args: argparse.Namespace) -> int:
    """Build, and say what was written."""
    built = build(args.out, args.cpu)
    for path in built.files:
        print(f"{path}  {path.stat().st_size} bytes")
    if built.linker is None:
        print(
            f"no linker for {args.cpu} is installed: {NAME}.so was not written. {NAME}.a holds "
            "the whole library; link it with -lpthread",
            file=sys.stderr,
        )
    return 0
