"""Makes a failing case smaller: a simpler problem that still fails says more."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from bedstone.spec.errors import InvalidDescriptor
from bedstone.spec.problem import Problem, parse_problem
from bedstone.testing.harness import Case

TRIES = 60  # kernels compiled at most to make one failure smaller


class Failing(Protocol):
    """A failure knows its case."""

    @property
    def case(self) -> Case: ...

    @property
    def check(self) -> str: ...


F = TypeVar("F", bound=Failing)


def shrunk(failure: F, attempt: Callable[[Case], F | None]) -> F:
    """The failure of the smallest problem found that fails at the same check. `attempt` runs a
    case: its failure, or None."""
    tries = TRIES
    progress = True
    while progress and tries > 0:
        progress = False
        case = failure.case
        for problem in simpler(case.problem):
            tries -= 1
            found = attempt(dataclasses.replace(case, problem=problem))
            if found is not None and found.check == failure.check:
                failure, progress = found, True
                break
            if tries <= 0:
                break
    return failure


def simpler(problem: Problem) -> Iterator[Problem]:
    """Problems with one option fewer or one number smaller, the boldest steps first."""
    line = str(problem)
    words = line.split()
    for i in range(3, len(words)):
        if words[i] not in ("float32",):
            yield from _parsed([*words[:i], *words[i + 1 :]], problem)
    for match in re.finditer(r"\d+", words[2]):
        value = int(match.group())
        for less in dict.fromkeys((1, value // 2, value - 1)):
            if 0 < less < value:
                shape = words[2][: match.start()] + str(less) + words[2][match.end() :]
                yield from _parsed([*words[:2], shape, *words[3:]], problem)


def _parsed(words: list[str], original: Problem) -> Iterator[Problem]:
    try:
        found = parse_problem(" ".join(words))
    except (InvalidDescriptor, ValueError):
        return
    if found != original:
        yield found
