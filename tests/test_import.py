"""`import bedstone` is quick and brings in no framework and no compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest

SECONDS_MAX = 0.3
ATTEMPTS = 10  # the machine may be busy: the best counts
HEAVY = ("torch", "jax", "paddle", "triton", "llvmlite", "onnx", "scipy")


def fresh(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_nothing_heavy_is_imported():
    program = f"import bedstone, sys; print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    assert fresh(program) == "[]"


@pytest.mark.parametrize("module", ["cli", "testing.conformance", "testing.fuzz"])
def test_nor_by_the_tools(module):
    program = f"import bedstone.{module}, sys; print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    assert fresh(program) == "[]"


def test_import_time():
    program = (
        "import time; start = time.perf_counter(); import bedstone;"
        "print(time.perf_counter() - start)"
    )
    best = float("inf")
    for _ in range(ATTEMPTS):
        best = min(best, float(fresh(program)))
        if best < SECONDS_MAX:
            break
    assert best < SECONDS_MAX


def test_every_public_name_is_there_and_documented():
    import bedstone

    for name in bedstone.__all__:
        thing = getattr(bedstone, name)
        assert name == "__version__" or thing.__doc__, name
    assert sorted(bedstone.__all__) == sorted(set(bedstone.__all__))


def test_a_typed_package():
    from importlib.resources import files

    assert files("bedstone").joinpath("py.typed").is_file()
