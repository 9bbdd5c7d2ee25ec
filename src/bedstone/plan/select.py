"""Selection: ask every algorithm, keep the reasons, take the quickest."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from bedstone.plan import registry
from bedstone.plan.algorithm import Algorithm
from bedstone.plan.device import Device
from bedstone.spec.errors import InvalidDescriptor, NotSupported
from bedstone.spec.problem import PRIMITIVES, Problem


@dataclass(frozen=True)
class Choice:
    """The algorithm taken, why, and what was said of every other one."""

    algorithm: Algorithm
    workspace: int
    why: str
    estimates: Mapping[str, float] = field(default_factory=dict)  # seconds, candidates only
    reasons: Mapping[str, str] = field(default_factory=dict)  # name -> why not


@dataclass(frozen=True)
class Candidates:
    """The algorithms that take a problem, in order, and the reasons of those that do not."""

    accepted: tuple[Algorithm, ...]
    reasons: Mapping[str, str]


def survey(
    problem: Problem, device: Device, workspace_limit: int | None, forced: str | None = None
) -> Candidates:
    """Ask each algorithm. `workspace_limit` in bytes, None for no limit; `forced` names one
    algorithm, or several by a pattern such as "cpu:*"."""
    accepted: list[Algorithm] = []
    reasons: dict[str, str] = dict(registry.unavailable(device))
    asked = registry.candidates(problem.primitive, device)
    if forced and not names_of(problem.primitive, device, forced):
        known = tuple(a.name for a in asked)
        raise InvalidDescriptor("algorithm", forced, f"one of {known} for {problem.primitive}")
    for algorithm in asked:
        reason = _declines(algorithm, problem, device, workspace_limit, forced)
        if reason is None:
            accepted.append(algorithm)
        else:
            reasons[algorithm.name] = reason
    return Candidates(tuple(accepted), reasons)


def names_of(primitive: str, device: Device, pattern: str) -> list[str]:
    """Names of the primitive's algorithms that match a name or pattern."""
    return fnmatch.filter([a.name for a in registry.candidates(primitive, device)], pattern)


def names_anywhere(device: Device, pattern: str) -> bool:
    """True if some primitive has an algorithm of that name."""
    return any(names_of(primitive, device, pattern) for primitive in PRIMITIVES)


def _declines(
    algorithm: Algorithm,
    problem: Problem,
    device: Device,
    workspace_limit: int | None,
    forced: str | None,
) -> str | None:
    if forced and not fnmatch.fnmatchcase(algorithm.name, forced):
        return f"the caller asked for {forced}"
    if problem.deterministic and not algorithm.deterministic:
        return "its result may differ from run to run; deterministic=False would allow it"
    reason = algorithm.supports(problem, device)
    if reason is None and workspace_limit is not None:
        needed = algorithm.workspace(problem, device)
        if needed > workspace_limit:
            return f"needs {needed} bytes of workspace; the limit is {workspace_limit}"
    return reason


def choose(
    problem: Problem,
    device: Device,
    workspace_limit: int | None = 0,
    forced: str | None = None,
    measured: Mapping[str, float] | None = None,
) -> Choice:
    """The algorithm for the problem: the quickest measured where `measured` (seconds by name) is
    given, else the least estimate. The reference backend is taken only when all others decline.

    Raises NotSupported with every reason when none takes the problem.
    """
    found = survey(problem, device, workspace_limit, forced)
    if not found.accepted:
        raise NotSupported(problem, found.reasons)
    timed = {a.name: (measured or {})[a.name] for a in found.accepted if a.name in (measured or {})}
    seconds = {a.name: a.estimate(problem, device) for a in found.accepted}
    real = [a for a in found.accepted if a.backend != "reference"]
    pool = [a for a in found.accepted if a.name in timed] or real or list(found.accepted)
    best = min(pool, key=lambda a: timed.get(a.name, seconds[a.name]))
    if forced:
        why = f"asked for by name ({forced})"
    elif timed:
        why = f"the quickest of {len(timed)} measured"
    elif len(pool) > 1:
        why = f"the least estimated time of {len(pool)} candidates"
    elif best.backend == "reference":
        why = "fallback: every other algorithm declined"
    else:
        why = "the only algorithm besides the reference that takes the problem"
    reasons = dict(found.reasons)
    for other in found.accepted:
        if other is not best:
            reasons[other.name] = _outdone(other, best, timed, seconds)
    return Choice(best, best.workspace(problem, device), why, seconds, reasons)


def _outdone(
    other: Algorithm, best: Algorithm, timed: Mapping[str, float], seconds: Mapping[str, float]
) -> str:
    if other.name in timed:
        return f"measured {timed[other.name] * 1e3:.3g} ms against {timed[best.name] * 1e3:.3g}"
    if other.backend == "reference":
        return "takes the problem, but is the last resort"
    if math.isinf(seconds[other.name]):
        return "takes the problem, but only by name or by find: nothing vouches for its estimate"
    return f"estimated {seconds[other.name] * 1e3:.3g} ms against {seconds[best.name] * 1e3:.3g}"
