"""Random problems, the same ones every time: 2,000 convolutions and some hundreds of the rest.

More on demand: `python -m bedstone.testing.fuzz --seconds 600 --seed 7`.
"""

from __future__ import annotations

import functools

import pytest

from bedstone.plan.handle import Handle
from bedstone.testing import fuzz, problems
from bedstone.testing.conformance import usable

SEED = 20141003  # the date of arXiv 1410.0759
CHUNK = 25  # problems a test, so that two workers share them evenly
COUNTS = dict.fromkeys(problems.primitives(), 300) | {"convolution": 2000}

drawn = functools.cache(problems.draw_distinct)

CHUNKS = [
    pytest.param(primitive, start, id=f"{primitive}-{start}")
    for primitive, count in COUNTS.items()
    for start in range(0, count, CHUNK)
]


@pytest.mark.parametrize("primitive, start", CHUNKS)
def test_random_problems(primitive, start):
    handle = Handle("cpu")
    failures = []
    for problem in drawn(primitive, COUNTS[primitive], SEED)[start : start + CHUNK]:
        if usable(problem):
            failures += fuzz.check(problem, handle)
    assert not failures, "\n".join(map(str, failures))


def test_problems_are_distinct():
    for primitive, count in COUNTS.items():
        assert len({str(p) for p in drawn(primitive, count, SEED)}) == count


GPU_COUNTS = dict.fromkeys(problems.primitives(), 100) | {"convolution": 400}
GPU_CHUNKS = [
    pytest.param(primitive, start, id=f"{primitive}-{start}")
    for primitive, count in GPU_COUNTS.items()
    for start in range(0, count, CHUNK)
]


@pytest.mark.gpu
@pytest.mark.parametrize("primitive, start", GPU_CHUNKS)
def test_random_problems_on_the_gpu(primitive, start):
    handle = Handle("cuda")
    failures = []
    for problem in drawn(primitive, GPU_COUNTS[primitive], SEED)[start : start + CHUNK]:
        if fuzz.takers(problem, handle.device):
            failures += fuzz.check(problem, handle)
    assert not failures, "\n".join(map(str, failures))
