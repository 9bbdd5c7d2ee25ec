"""The Triton backend on a CUDA device: ways of calling a plan, and a sample of the conformance
suite. `pytest -m gpu tests/gpu`; all of the suite: python -m bedstone.testing.conformance --backend
triton --device cuda."""

import random
import time

import numpy as np
import pytest

pytest.importorskip("triton")
from bedstone.backends import triton as backend
from bedstone.plan.handle import Handle
from bedstone.plan.tune import Trial
from bedstone.spec.problem import parse_problem
from bedstone.testing.conformance import jobs, run_job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        backend.missing() is not None or backend.runtime.interpreting(),
        reason=f"no CUDA device: {backend.missing()}",
    ),
]

LINE = "convolution forward n8c128h28k128r3p1 bfloat16 layout=NHWC"
HOST_SECONDS = 12e-6  # of a planned call
SAMPLE = 60  # problems of the suite
CALLS = 200


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


def test_a_sample_of_the_conformance_suite(handle):
    todo = jobs("triton", handle.device)
    random.Random(0).shuffle(todo)
    wrong = [text for job in todo[:SAMPLE] for text in run_job(job, handle)]
    assert not wrong, "\n".join(wrong)
