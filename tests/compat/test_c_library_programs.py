"""Programs in C and C++ on the library: every function against the reference under valgrind (or
with the address sanitizer), a network that learns, and both on a processor of another kind."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from c_cases import write_cases
from c_fixtures import library_folder

from bedstone.backends.cpu.library import interface
from bedstone.backends.cpu.target import Target

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SECONDS = 240
# Valgrind 3.19 knows no AVX-512: programs that it watches use the library for AVX2.
WATCHED = "x86-64-v3"
FLAGS = ["-O1", "-g", "-Wall", "-Wextra", "-Werror"]


def run(*words, **options):
    """A command's stdout; fails with all that it said."""
    words = [str(word) for word in words]
    answer = subprocess.run(
        words, capture_output=True, text=True, timeout=SECONDS, check=False, **options
    )
    assert answer.returncode == 0, f"{' '.join(words)}\n{answer.stdout}\n{answer.stderr}"
    return answer.stdout


def compiler(*names):
    """The first of the compilers that is installed."""
    for name in names:
        if shutil.which(name):
            return name
    pytest.skip(f"none of the compilers {names} is installed")


def can_run_avx2():
    """Whether this machine runs what is built for WATCHED."""
    return platform.machine() == "x86_64" and Target.named("native").vector_bytes >= 32


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    path = tmp_path_factory.mktemp("cases") / "cases"
    assert write_cases(path) > 300
    return path


def compiled(program, source, folder, tmp_path, *flags):
    out = tmp_path / Path(source).stem
    words = [program, *FLAGS, *flags, source, "-I", folder, "-o", out, "-L", folder]
    run(*words, "-lbedstone", "-lm", f"-Wl,-rpath,{folder}")
    return out


def assert_every_function(output):
    assert set(output.split()) == set(interface.FUNCTIONS)


def test_every_function_from_c(cases, tmp_path):
    folder = library_folder("native")
    cc = compiler("cc", "gcc", "clang")
    program = compiled(cc, HERE / "c" / "check.c", folder, tmp_path, "-std=c99", "-pedantic")
    assert_every_function(run(program, cases))


def test_no_memory_error(cases, tmp_path):
    cc = compiler("cc", "gcc", "clang")
    if shutil.which("valgrind") and can_run_avx2():
        program = compiled(cc, HERE / "c" / "check.c", library_folder(WATCHED), tmp_path)
        # (It translates blocks of few instructions: long ones of masked loads fill its memory.)
        watch = ["valgrind", "--quiet", "--vex-guest-max-insns=16", "--error-exitcode=9",
                 "--leak-check=full", "--errors-for-leak-kinds=definite"]  # fmt: skip
        assert_every_function(run(*watch, program, cases))
        return
    program = compiled(
        cc, HERE / "c" / "check.c", library_folder("native"), tmp_path, "-fsanitize=address"
    )
    assert_every_function(run(program, cases))


def test_a_wrong_expectation_is_noticed(cases, tmp_path):
    cc = compiler("cc", "gcc", "clang")
    program = compiled(cc, HERE / "c" / "check.c", library_folder("native"), tmp_path)
    data = bytearray(cases.read_bytes())
    data[-40:-32] = b"\0\0\0\0\0\0\x59\x40"  # 100.0 among the last values expected
    (tmp_path / "wrong").write_bytes(data)
    answer = subprocess.run([program, tmp_path / "wrong"], capture_output=True, text=True)
    assert answer.returncode == 1
    assert "expected 100" in answer.stderr


def losses(output):
    return [float(number) for number in re.findall(r"loss (\S+)", output)]


def assert_learns(output):
    values = losses(output)
    assert len(values) >= 5
    assert values[-1] < 0.3 * values[0]
    accuracy = float(re.search(r"accuracy (\S+)", output).group(1))
    assert accuracy > 0.9


def test_a_network_learns(tmp_path):
    program = compiled(
        compiler("c++", "g++", "clang++"), ROOT / "examples" / "c" / "train.cpp",
        library_folder("native"), tmp_path, "-std=c++17",
    )  # fmt: skip
    assert_learns(run(program))


def test_the_program_of_the_documents(tmp_path):
    page = (ROOT / "docs" / "c_library.md").read_text(encoding="utf-8")
    source = tmp_path / "first.c"
    source.write_text(re.search(r"```c\n(.*?)```", page, re.DOTALL).group(1))
    cc = compiler("cc", "gcc", "clang")
    program = compiled(cc, source, library_folder("native"), tmp_path, "-std=c99")
    assert run(program) == "no error\n"


def test_static_library(cases, tmp_path):
    folder, cc = library_folder("native"), compiler("cc", "gcc", "clang")
    out = tmp_path / "static"
    source = HERE / "c" / "check.c"
    run(cc, *FLAGS, source, folder / "libbedstone.a", "-I", folder, "-o", out, "-lm", "-lpthread")
    assert_every_function(run(out, cases))


def test_pkg_config(tmp_path):
    if not shutil.which("pkg-config"):
        pytest.skip("pkg-config is not installed")
    folder = library_folder("native")
    words = run("pkg-config", "--cflags", "--libs", folder / "bedstone.pc").split()
    assert words == [f"-I{folder}", f"-L{folder}", "-lbedstone"]


def test_aarch64(cases, tmp_path):
    if not shutil.which("qemu-aarch64") or not shutil.which("aarch64-linux-gnu-gcc"):
        pytest.skip("qemu-aarch64 and aarch64-linux-gnu-gcc are not installed")
    folder = library_folder("aarch64")
    source = HERE / "c" / "check.c"
    program = compiled("aarch64-linux-gnu-gcc", source, folder, tmp_path)
    output = run("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", program, cases)
    assert_every_function(output)
