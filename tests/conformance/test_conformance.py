"""Every algorithm of every backend on every curated problem that it takes.

The parameters come from the registry: a new algorithm, problem or backend is covered without a
change here. `pytest -m gpu` runs the part that needs a device.
"""

from __future__ import annotations

import functools

import pytest

from bedstone.plan import registry
from bedstone.plan.handle import Handle
from bedstone.plan.runtime import runtime_of
from bedstone.spec.errors import BedstoneError
from bedstone.testing import conformance, gaps

handle = functools.cache(Handle)
known_gaps = functools.cache(gaps.load)


def devices():
    """(backend, kind of device, the device or None, why there is none)."""
    for backend in registry.backends():
        for kind in registry.device_kinds(backend):
            reason = registry.backend_missing(backend)
            device = None
            if reason is None:
                try:
                    device = runtime_of(kind).device(0)
                except BedstoneError as error:
                    reason = str(error)
            yield backend, kind, device, reason


def marks(kind, reason=None):
    found = [] if kind == "cpu" else [pytest.mark.gpu]
    return found if reason is None else [*found, pytest.mark.skip(reason=reason)]


def parameters():
    for backend, kind, device, reason in devices():
        if device is None:
            yield pytest.param(backend, kind, None, id=backend, marks=marks(kind, reason))
            continue
        for job in conformance.jobs(backend, device):
            yield pytest.param(backend, kind, job, id=str(job), marks=marks(kind))


def algorithm_parameters():
    for backend, kind, device, _ in devices():
        if device is not None:
            for _, algorithm in conformance.algorithms(backend, device):
                yield pytest.param(backend, device, algorithm, id=algorithm.name, marks=marks(kind))


@pytest.mark.parametrize("backend, kind, job", list(parameters()))
def test_conformance(backend, kind, job):
    failures = conformance.run_job(job, handle(kind), known_gaps(backend))
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("backend, device, algorithm", list(algorithm_parameters()))
def test_every_algorithm_takes_some_problem(backend, device, algorithm):
    names = {job.algorithm for job in conformance.jobs(backend, device)}
    assert algorithm.name in names
    assert algorithm.name.startswith(f"{backend}:")
