"""The Triton backend on a CUDA device: ways of calling a plan, every kernel under NVIDIA's
checkers, and the fuzzer. `pytest -m gpu` also runs the conformance suite (tests/conformance)."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton")
from bedstone.backends import triton as backend
from bedstone.plan.handle import Handle
from bedstone.plan.tune import Trial
from bedstone.spec.problem import parse_problem
from bedstone.testing import fuzz

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        backend.missing() is not None or backend.runtime.interpreting(),
        reason=f"no CUDA device: {backend.missing()}",
    ),
]

LINE = "convolution forward n8c128h28k128r3p1 bfloat16 layout=NHWC"
HOST_SECONDS = 12e-6  # of a planned call
FUZZ_SECONDS = 60
SANITIZER_SECONDS = 400  # at most; small problems of every kernel take a quarter of it
SMALL = {
    "triton": Path(__file__).parents[1] / "backends" / "test_triton_kernels.py",
    "gluon": Path(__file__).with_name("gluon_small_test.py"),
}
REPORT = "BEDSTONE_SANITIZER_REPORT"  # names a file that the verdicts are added to
CALLS = 200
RACE = re.compile(r"between Write access at (\S+) in .*\n=+\s+and Write access at (\S+) in ")
# Where one number a row is stored, Triton passes it through shared memory, and every lane that
# holds the row's number writes it to the same word, by one instruction and before a barrier.
REPLICATED = ("normalization_forward_kernel", "normalization_backward_kernel")


@pytest.fixture(scope="module")
def handle():
    return Handle("cuda")


def trial_of(handle):
    problem = parse_problem(LINE)
    plan = handle.plan(problem, "triton:implicit_gemm")
    return plan, Trial(problem, backend.RUNTIME)


def test_a_planned_call_costs_the_host_little(handle):
    plan, trial = trial_of(handle)
    plan(*trial.pointers)
    backend.RUNTIME.synchronize()
    times = []
    for _ in range(7):
        start = time.perf_counter()
        for _ in range(CALLS):
            plan(*trial.pointers)
        times.append((time.perf_counter() - start) / CALLS)
        backend.RUNTIME.synchronize()
    assert sorted(times)[3] < HOST_SECONDS


def test_a_call_can_be_captured_into_a_graph(handle):
    plan, trial = trial_of(handle)
    plan(*trial.pointers)
    (want,) = trial.outputs()
    assert backend.RUNTIME.time(lambda: plan(*trial.pointers), 0.01) > 0
    np.testing.assert_array_equal(trial.outputs()[0], want)


def test_an_unaligned_address_gives_the_same_result(handle):
    plan, trial = trial_of(handle)
    plan(*trial.pointers)
    (want,) = trial.outputs()
    operand = plan.problem.operands[0]
    data = backend.RUNTIME.download(trial._buffers[0])
    moved = backend.RUNTIME.upload(np.concatenate([np.zeros(2, np.uint8), data]))
    assert operand.desc.dtype.itemsize == 2
    plan(backend.RUNTIME.pointer(moved) + 2, *trial.pointers[1:])
    np.testing.assert_array_equal(trial.outputs()[0], want)


@pytest.mark.parametrize(
    ("tool", "backend_name"),
    [
        ("memcheck", "triton"),
        ("racecheck", "triton"),
        ("memcheck", "gluon"),
        pytest.param("racecheck", "gluon", marks=pytest.mark.xfail(
            reason="racecheck reports the hand-over to the partitions of gl.warp_specialize")),
    ],
)  # fmt: skip
def test_every_kernel_under_the_sanitizer(tool, backend_name):
    """Small problems of every algorithm of a backend, every access checked."""
    sanitizer = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    # An API error is how a launch finds that its thread has no context yet: it then tries again.
    quiet = ["--report-api-errors", "no", "--target-processes", "application-only"]
    tests = ["-m", "pytest", "-o", "addopts=-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [sanitizer, "--tool", tool, *quiet, "--error-exitcode", "9",
         sys.executable, *tests, str(SMALL[backend_name])],
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")},
        capture_output=True, text=True, timeout=SANITIZER_SECONDS,
    )  # fmt: skip
    said = done.stdout[-4000:] + done.stderr[-1000:]
    keep(tool, backend_name, done.stdout)
    assert " passed" in done.stdout and " failed" not in done.stdout, said
    pairs = RACE.findall(done.stdout)
    if tool == "racecheck" and pairs and all(one == other for one, other in pairs):
        # One instruction only, in its own kernels: see REPLICATED.
        assert all(one.startswith(REPLICATED) for one, _ in pairs), said
        return
    assert done.returncode == 0 and "SUMMARY: 0 " in done.stdout, said


def keep(tool, backend_name, said):
    """Print the verdicts of a run, and add them to the file that the environment names."""
    lines = [n for n in said.splitlines() if "SUMMARY" in n or " passed" in n or " failed" in n]
    text = f"{tool} {backend_name}: " + "; ".join(n.strip("= ") for n in lines)
    print(text)
    if os.environ.get(REPORT):
        with open(os.environ[REPORT], "a") as file:
            file.write(text + "\n")


def test_a_minute_of_the_fuzzer():
    tried, failures = fuzz.fuzz("cuda", seed=int(time.time()), budget=fuzz.Budget(FUZZ_SECONDS))
    assert tried > 0
    assert not failures, "\n".join(failures)
