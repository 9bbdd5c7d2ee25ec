"""Compiling ahead of time: fill the disk cache for problems that a device elsewhere will be given.

No device is needed, nor the architecture of the one that is here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bedstone.backends.triton import compile, launch
from bedstone.plan import registry
from bedstone.plan.algorithm import Algorithm
from bedstone.plan.device import Device
from bedstone.spec.problem import Problem


@dataclass(frozen=True)
class Made:
    """A kernel that lies in the cache now."""

    algorithm: str
    launch: launch.Launch
    architecture: str

    def __str__(self) -> str:
        source, binary = self.launch.source, self.launch.binary
        if not binary.assembly:  # not compiled now
            return f"{self.algorithm} {source.name}: in the cache already"
        report = compile.inspect(source, self.architecture, binary)
        return (
            f"{self.algorithm} {source.name}: {report.registers} registers, "
            f"{report.spilled_bytes} bytes spilled, {report.shared} bytes shared"
        )


def compile_ahead(
    problem: Problem, architecture: str, workspace_limit: int | None = None, every: bool = False
) -> Iterator[Made]:
    """Compile what a device of the architecture would run: the algorithm of the least estimate
    within the workspace, or `every` one that takes the problem. None where no algorithm does.

    architecture  sm_80, sm_90, sm_100, gfx942, ...

    Raises compile.CompileError.
    """
    device = launch.target_device(architecture)
    candidates = candidates_ahead(problem, architecture, workspace_limit)
    for algorithm in candidates if every else candidates[:1]:
        for made in launch.launches_of(algorithm.build(problem, device)):
            yield Made(algorithm.name, made, architecture)


def candidates_ahead(
    problem: Problem, architecture: str, workspace_limit: int | None = None
) -> list[Algorithm]:
    """The algorithms that take the problem on a device of the architecture within the workspace,
    the one of the least estimate first."""
    device = launch.target_device(architecture)
    candidates = [
        algorithm
        for backend in registry.backends()
        if "cuda" in registry.device_kinds(backend)
        for algorithm in registry.every_algorithm(backend, problem.primitive)
        if _fits(algorithm, problem, device, workspace_limit)
    ]
    return sorted(candidates, key=lambda a: a.estimate(problem, device))


def _fits(algorithm: Algorithm, problem: Problem, device: Device, limit: int | None) -> bool:
    if algorithm.supports(problem, device) is not None:
        return False
    return limit is None or algorithm.workspace(problem, device) <= limit
