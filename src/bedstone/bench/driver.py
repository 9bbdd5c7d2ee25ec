"""Runs problems: plan, check against the reference, time against peers, one row each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

import bedstone
from bedstone.bench.machine import Ceilings
from bedstone.bench.peers import PEERS, Declined
from bedstone.bench.timing import interleaved
from bedstone.plan.runtime import runtime_of
from bedstone.plan.tune import Trial

CHECKED_FLOPS = 5e8  # the reference takes about a second for this many
# The check is against wrong indices, not for accuracy (the tests bound that): a right result of
# any dtype is far closer than this to the reference, a wrong tap or tail far off.
TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}


class WrongResult(bedstone.BedstoneError):
    """A plan's result differs from the reference: nothing is timed."""


@dataclass(frozen=True)
class Row:
    """One measurement. Times in milliseconds; ratio = peer time / bedstone time."""

    name: str
    problem: str
    primitive: str
    direction: str
    dtype: str
    layout: str
    threads: int
    algorithm: str
    ms: float
    ms_lower: float
    ms_upper: float
    gflops: float
    gbytes: float
    roofline: float
    workspace_bytes: int
    peer: str = ""
    peer_ms: float = 0.0
    peer_gflops: float = 0.0
    ratio: float = 0.0
    note: str = ""

    def record(self) -> dict[str, Any]:
        """As a flat dictionary, for CSV and JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Options:
    """How to plan and what to compare with."""

    peers: tuple[str, ...] = ()
    algorithm: str | None = None
    find: bool = False
    workspace_limit: int | None = 0
    device: str = "cpu"
    check: bool = True


def run(
    problems: Iterable[tuple[str, bedstone.Problem]], options: Options, ceilings: Ceilings
) -> Iterator[Row]:
    """A row for every problem and peer."""
    handle = bedstone.Handle(options.device)
    runtime = runtime_of(handle.device.kind)
    for name, problem in problems:
        plan = handle.plan(problem, options.algorithm, options.workspace_limit, options.find)
        if options.check:
            check(problem, plan, options)
        yield from _time(name, problem, plan, options, ceilings, runtime)


def _time(
    name: str, problem: bedstone.Problem, plan: bedstone.Plan, options: Options,
    ceilings: Ceilings, runtime: Any,
) -> Iterator[Row]:  # fmt: skip
    trial = Trial(problem, runtime)
    workspace = runtime.empty(plan.workspace_size)
    address = runtime.pointer(workspace)
    kernel, pointers = plan.kernel, trial.pointers

    def ours() -> None:
        kernel(pointers, address, 1.0, 0.0, 0)

    arrays = trial.arrays()
    calls: list[Callable[[], object]] = [ours]
    taking, notes = [], []
    for peer in options.peers:
        try:
            calls.append(PEERS[peer](problem, arrays))
            taking.append(peer)
        except Declined as reason:
            notes.append(f"{peer}: {reason}")
    times = interleaved(calls)
    common = _common(name, problem, plan, ceilings, times[0].median)
    common |= {"ms": times[0].median * 1e3, "ms_lower": times[0].lower * 1e3,
               "ms_upper": times[0].upper * 1e3, "note": "; ".join(notes)}  # fmt: skip
    if not taking:
        yield Row(**common)
    for peer, peer_times in zip(taking, times[1:]):
        yield Row(
            **common,
            peer=peer,
            peer_ms=peer_times.median * 1e3,
            peer_gflops=problem.flops / peer_times.median / 1e9,
            ratio=peer_times.median / times[0].median,
        )


def _common(
    name: str, problem: bedstone.Problem, plan: bedstone.Plan, ceilings: Ceilings, seconds: float
) -> dict[str, Any]:
    descs = [operand.desc for operand in problem.operands]
    layout = next((d.layout for d in descs if d.layout), "strided")
    floor = ceilings.floor(problem)
    return {
        "name": name,
        "problem": str(problem),
        "primitive": problem.primitive,
        "direction": problem.direction,
        "dtype": str(problem.dtype),
        "layout": layout,
        "threads": bedstone.get_num_threads(),
        "algorithm": plan.algorithm,
        "gflops": problem.flops / seconds / 1e9,
        "gbytes": problem.bytes / seconds / 1e9,
        "roofline": floor / seconds,
        "workspace_bytes": plan.workspace_size,
    }


def check(problem: bedstone.Problem, plan: bedstone.Plan, options: Options) -> None:
    """Compare a plan with the float64 reference; a large problem by a smaller one of its kind
    (fewer images), computed by the same algorithm.

    Raises WrongResult.
    """
    if problem.flops > CHECKED_FLOPS:
        small = _smaller(problem)
        if small is None:
            return
        handle = bedstone.Handle(options.device)
        try:
            plan = handle.plan(small, plan.algorithm, None)
        except (bedstone.NotSupported, bedstone.InvalidDescriptor):
            plan = handle.plan(small, options.algorithm, None)
        problem = small
    runtime = runtime_of(plan.device.kind)
    trial = Trial(problem, runtime, seed=1)
    workspace = runtime.empty(plan.workspace_size)
    arrays = {name: np.array(array) for name, array in trial.arrays().items()}
    plan(*trial.pointers, workspace=runtime.pointer(workspace))
    expected = problem.reference(arrays)
    for operand, got in zip(problem.outputs, trial.outputs()):
        want = expected[operand.name]
        if want.dtype.kind in "iub":
            wrong = not np.array_equal(got, want)
        else:
            scale = float(np.max(np.abs(want), initial=1e-30))
            wrong = not bool(np.max(np.abs(got - want)) <= TOLERANCE[str(problem.dtype)] * scale)
        if wrong:
            raise WrongResult(f"{plan.algorithm} gives a wrong {operand.name} for {problem}")


def _smaller(problem: bedstone.Problem) -> bedstone.Problem | None:
    from bedstone.bench.suites import with_batch

    if isinstance(problem, bedstone.ConvolutionProblem) and problem.x.dims[0] > 1:
        per_image = problem.flops / problem.x.dims[0]
        return with_batch(problem, max(1, int(CHECKED_FLOPS / per_image)))
    return None


__all__ = ["Options", "Row", "WrongResult", "check", "run"]
