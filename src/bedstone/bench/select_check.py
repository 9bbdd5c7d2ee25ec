"""How good the choice is: the chosen algorithm's time against the best measured one's.

A problem counts as well chosen where the chosen algorithm takes at most NEAR of the best one's
time. A problem that only one algorithm takes (the reference apart) is well chosen and not timed:
the line of a suite says how many were contested.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import bedstone
from bedstone.bench.driver import side_of
from bedstone.bench.operands import Operands
from bedstone.bench.timing import in_turns, interleaved
from bedstone.plan.runtime import runtime_of
from bedstone.plan.select import survey

NEAR = 1.10  # the chosen algorithm may take so much of the best one's time
ROUNDS = 5

Problems = Sequence[tuple[str, bedstone.Problem]]


@dataclass(frozen=True)
class Score:
    """Problems of a suite: all, those that several algorithms take, those whose choice is near the
    best. Scores add up."""

    problems: int = 0
    contested: int = 0
    near: int = 0

    def __add__(self, other: Score) -> Score:
        return Score(
            self.problems + other.problems,
            self.contested + other.contested,
            self.near + other.near,
        )

    def __str__(self) -> str:
        missed = self.problems - self.near
        share = 100 * self.near / max(1, self.problems)
        among = 100 * (self.contested - missed) / max(1, self.contested)
        return (
            f"the choice is within 10% of the best on {share:.0f}% of {self.problems} problems "
            f"({among:.0f}% of the {self.contested} that have more than one candidate)"
        )


def candidates(
    problem: bedstone.Problem, handle: bedstone.Handle, workspace_limit: int
) -> list[str]:
    """Names of the algorithms that take the problem, the reference apart."""
    found = survey(problem, handle.device, workspace_limit)
    return [a.name for a in found.accepted if a.backend != "reference"]


def seconds_of(
    problem: bedstone.Problem, handle: bedstone.Handle, names: Sequence[str], workspace_limit: int
) -> dict[str, float]:
    """Measured seconds of each of the algorithms."""
    runtime = runtime_of(handle.device.kind)
    operands = Operands(problem, runtime)
    plans = [handle.plan(problem, name, workspace_limit) for name in names]
    memory = [runtime.empty(plan.workspace_size) for plan in plans]
    sides = [side_of(p, [operands], runtime.pointer(w)) for p, w in zip(plans, memory)]
    clocks = [side.clock for side in sides if side.clock is not None]
    times = in_turns(clocks) if clocks else interleaved([s.call for s in sides], ROUNDS)
    return {name: measured.median for name, measured in zip(names, times)}


def main(suites: Mapping[str, Problems], device: str, workspace_limit: int) -> int:
    """Print every miss, each suite's score and, after several suites, the total."""
    handle, total = bedstone.Handle(device), Score()
    for suite, problems in suites.items():
        score = Score()
        for name, problem in problems:
            score += _judge(name, problem, handle, workspace_limit)
        print(f"{suite}: {score}", flush=True)
        total += score
    if len(suites) > 1:
        print(f"in all: {total}")
    return 0


def _judge(
    name: str, problem: bedstone.Problem, handle: bedstone.Handle, workspace_limit: int
) -> Score:
    """The score of one problem; a miss is printed with what every candidate takes."""
    names = candidates(problem, handle, workspace_limit)
    if len(names) < 2:
        return Score(problems=1, near=1)
    plan = handle.plan(problem, workspace_limit=workspace_limit)
    times = seconds_of(problem, handle, names, workspace_limit)
    score = Score(problems=1, contested=1)
    if times[plan.algorithm] <= NEAR * min(times.values()):
        return replace(score, near=1)
    estimates = plan.choice.estimates
    table = ", ".join(
        f"{other} {1e3 * seconds:.3f} ms (estimated {1e3 * estimates[other]:.3f})"
        for other, seconds in sorted(times.items(), key=lambda item: item[1])
    )
    print(f"{name}: {problem}: chose {plan.algorithm}; {table}", flush=True)
    return score
