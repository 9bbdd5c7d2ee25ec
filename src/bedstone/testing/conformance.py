"""The conformance suite: every algorithm of a backend on every curated problem it takes.

    python -m bedstone.testing.conformance --backend cpu
    run_conformance(backend="mine", device="cpu").raise_for_failures()

Jobs come from the registry: an algorithm added to a backend's ALGORITHMS is covered by that alone.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bedstone.plan import registry
from bedstone.plan.algorithm import Algorithm
from bedstone.plan.device import Device
from bedstone.plan.handle import Handle
from bedstone.spec.dtypes import DType
from bedstone.spec.problem import Problem
from bedstone.testing import gaps as known
from bedstone.testing import problems
from bedstone.testing.harness import Case, Mismatch, in_place_names, run_case

# (fill, alpha, beta, placement) of the runs that every job makes.
VARIANTS = (
    ("integers", 1.0, 0.0, "end"),
    ("integers", 2.0, -1.0, "middle"),
    ("random", 1.0, 0.0, "start"),
    ("random", -0.5, 1.0, "end"),
    ("special", 1.0, 0.0, "middle"),
    ("special", 1.0, 2.0, "middle"),
    ("extreme", 1.0, 0.0, "end"),
)
SHOWN_FAILURES = 3  # of one job; the others would say the same
IN_PLACE_VARIANTS = (("random", 1.0, 0.0), ("integers", 2.0, 1.0))


@dataclass(frozen=True)
class Job:
    """One algorithm on one problem, in all variants."""

    algorithm: str
    problem: Problem

    def cases(self) -> Iterator[Case]:
        """The runs of the job."""
        for fill, alpha, beta, placement in VARIANTS:
            yield Case(self.problem, self.algorithm, fill, alpha, beta, placement)
        for alias in in_place_names(self.problem):
            for fill, alpha, beta in IN_PLACE_VARIANTS:
                yield Case(self.problem, self.algorithm, fill, alpha, beta, alias=alias)

    def __str__(self) -> str:
        return f"{self.algorithm} {self.problem}"


def algorithms(backend: str, device: Device) -> list[tuple[str, Algorithm]]:
    """(primitive, algorithm) of all that a backend has for a device."""
    if device.kind not in registry.device_kinds(backend):
        return []
    return [
        (primitive, algorithm)
        for primitive in problems.primitives()
        for algorithm in registry.algorithms_of(backend, primitive)
        if algorithm.missing(device) is None
    ]


def jobs(backend: str, device: Device) -> list[Job]:
    """Every job of a backend: what its algorithms do not take is not among them."""
    return [
        Job(algorithm.name, problem)
        for primitive, algorithm in algorithms(backend, device)
        for problem in problems.curated(primitive)
        if usable(problem) and algorithm.supports(problem, device) is None
    ]


def usable(problem: Problem) -> bool:
    """False where a dtype needs the package ml_dtypes and it is not installed."""
    return all(o.desc.dtype is not DType.bfloat16 for o in problem.operands) or _has_bfloat16()


def _has_bfloat16() -> bool:
    try:
        import ml_dtypes  # noqa: F401
    except ImportError:
        return False
    return True


def run_job(job: Job, handle: Handle, gaps: tuple[known.Gap, ...] = ()) -> list[str]:
    """What is wrong, one text a failure: mismatches outside the gaps, and gaps that are none."""
    wrong = []
    for case in job.cases():
        gap = known.gap_of(case, gaps)
        try:
            run_case(case, handle)
        except Mismatch as mismatch:
            if gap is None:
                wrong.append(str(mismatch))
            if mismatch.check == "build" or len(wrong) == SHOWN_FAILURES:
                break
        else:
            if gap is not None:
                wrong.append(f"unexpected pass, against the gap {gap.reason!r}\n  {case}")
    return wrong


@dataclass
class Report:
    """Jobs run by algorithm, and what failed."""

    jobs: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    uncovered: list[str] = field(default_factory=list)  # algorithms that took no problem

    def raise_for_failures(self) -> None:
        """Raises ConformanceError with every failure, if there is one."""
        lines = [*self.failures, *(f"{name} took no problem" for name in self.uncovered)]
        if lines:
            raise ConformanceError("\n".join(lines))

    def __str__(self) -> str:
        lines = [f"{count:6d} problems  {name}" for name, count in self.jobs.items()]
        lines += [f"     0 problems  {name}" for name in self.uncovered]
        return "\n".join([*lines, f"{len(self.failures)} failures", *self.failures])


class ConformanceError(Exception):
    """A backend that does not keep the promises."""


def run_conformance(
    backend: str,
    device: str = "cpu",
    gaps: Path | None = None,
    only: Iterable[str] = (),
) -> Report:
    """Run the whole suite on one backend.

    backend  its name in the registry (built in, or joined by an entry point)
    device   "cpu", "cuda", "cuda:1"
    gaps     a file of known gaps; by default the one of this package, if there is one
    only     primitives to run; all when empty
    """
    handle = Handle(device)
    expected = known.load(backend, gaps)
    wanted = tuple(only) or problems.primitives()
    report = Report()
    for job in jobs(backend, handle.device):
        if job.problem.primitive in wanted:
            report.jobs[job.algorithm] += 1
            report.failures += run_job(job, handle, expected)
    report.uncovered = [
        algorithm.name
        for primitive, algorithm in algorithms(backend, handle.device)
        if primitive in wanted and algorithm.name not in report.jobs
    ]
    return report


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit status is 1 when something failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", required=True, help="name in the registry: cpu, triton, ...")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default cpu)")
    parser.add_argument("--gaps", type=Path, help="a file of known gaps")
    parser.add_argument("--primitive", action="append", default=[], help="run only this one")
    options = parser.parse_args(arguments)
    report = run_conformance(options.backend, options.device, options.gaps, options.primitive)
    print(report)
    return 1 if report.failures or report.uncovered else 0


if __name__ == "__main__":
    sys.exit(main())
