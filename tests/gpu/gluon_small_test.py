"""The smallest curated problems of every Gluon algorithm and direction, for NVIDIA's checkers
(`triton_test.py` runs this file under them) and, quickly, without."""

import itertools

import pytest

pytest.importorskip("triton")
from bedstone.backends import gluon as backend
from bedstone.plan.handle import Handle
from bedstone.testing import conformance
from bedstone.testing.harness import Case, run_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(backend.missing() is not None, reason=str(backend.missing())),
]


@pytest.fixture(scope="module")
def handle():
    return Handle("cuda")


def test_the_smallest_problems_of_every_algorithm(handle):
    def kernel(job):
        return job.algorithm, job.problem.direction, job.problem.dtype.itemsize

    jobs = sorted(
        conformance.jobs("gluon", handle.device), key=lambda j: (*kernel(j), j.problem.flops)
    )
    assert jobs
    for _, same in itertools.groupby(jobs, key=kernel):
        job = next(same)
        ran = run_case(Case(job.problem, job.algorithm, "random", 1.0, 0.0, "end"), handle)
        assert ran in (job.algorithm, "plan:nothing")
