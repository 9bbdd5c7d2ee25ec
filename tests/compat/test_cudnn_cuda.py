"""The cuDNN names on a "cuda" handle: device addresses in, the same results as the reference.

`pytest -m gpu tests/compat` on a machine with a CUDA device; without one, test_cudnn_interpreter.py
runs this file in Triton's interpreter.
"""

from __future__ import annotations

import cudnn_driver
import numpy as np
import pytest
from cudnn_cases import BAD_PARAM, MAPPING_ERROR, convolution, filters, packed, refused, tensor
from cudnn_driver import LINES, ONLY_V2, Through, through_v1, through_v2

import bedstone
from bedstone.compat import cudnn_v2
from bedstone.plan.runtime import runtime_of
from bedstone.testing.harness import Case, Trial

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def handle():
    made = cudnn_v2.cudnnCreate(device="cuda")
    yield made
    cudnn_v2.cudnnDestroy(made)


@pytest.fixture
def device_nans(monkeypatch):
    """What the interface asks for and does not read is device memory too."""
    kept = []

    def upload(desc):
        values = np.full(desc.dims, np.nan, desc.dtype.numpy)
        kept.append(runtime_of("cuda").upload(values.reshape(-1).view(np.uint8)))
        return runtime_of("cuda").pointer(kept[-1])

    monkeypatch.setattr(cudnn_driver, "nans", upload)
    return kept


@pytest.mark.parametrize("line", LINES)
def test_results(handle, device_nans, line):
    problem = bedstone.parse_problem(line)
    plan = bedstone.Handle("cuda").plan(problem)
    calls = [(through_v2(problem, handle), (0.5, 0.0 if problem.direction == "set" else 2.0))]
    if problem.direction not in ONLY_V2:
        beta = {"convolution": 1.0, "tensor_ops": float(problem.direction == "add")}
        calls.append((through_v1(problem, handle), (1.0, beta.get(problem.primitive, 0.0))))
    for call, (alpha, beta) in calls:
        case = Case(problem, plan.algorithm, "integers", alpha, beta)
        Trial(case, Through(plan, call), runtime_of("cuda")).check()


def test_lowering(handle):
    runtime, random = runtime_of("cuda"), np.random.default_rng(0)
    problem = bedstone.convolution_problem("forward", (2, 3, 5, 4), (1, 3, 3, 2), padding=1)
    x = random.standard_normal(problem.x.dims).astype("f")
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    p, q = problem.y.dims[2:]
    wanted = np.empty((3, 3, 2, 2, p, q), "f")
    for r, s in np.ndindex(3, 2):
        wanted[:, r, s] = padded[:, :, r : r + p, s : s + q].swapaxes(0, 1)
    source, columns = runtime.upload(x.view(np.uint8)), runtime.empty(wanted.nbytes)
    cudnn_v2.cudnnIm2Col(
        handle, 1.0, tensor(problem.x), runtime.pointer(source), filters(1, 3, 3, 2),
        convolution(problem.conv), runtime.pointer(columns),
    )  # fmt: skip
    assert runtime.download(columns).tobytes() == wanted.tobytes()


def test_host_arrays_are_refused(handle):
    d, x = packed(1, 1, 2, 3), np.zeros(6, "f")
    call = cudnn_v2.cudnnScaleTensor
    refused(MAPPING_ERROR, "cpu:0.*of cuda:0", call, handle, d, x, 2.0)
    refused(BAD_PARAM, "not NULL", call, handle, d, None, 2.0)
