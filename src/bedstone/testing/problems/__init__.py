"""Problems to test with, and what testing must know of a primitive; one file each.

A file has `curated()`, the hand-picked problems, and `draw(random)`, the generator. It may have
`meaning(problem, arrays, random)`, which overwrites operands that only mean something together
(indices of maxima, statistics); `exact(problem)`, whether small integers go through unrounded; and
`bounds(problem, wide, alpha, beta)`, the error bounds where a result is no plain sum of products.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from bedstone.spec.errors import InvalidDescriptor
from bedstone.spec.problem import PRIMITIVES, Problem


def primitives() -> tuple[str, ...]:
    """The primitives for which there are problems."""
    return tuple(p for p in PRIMITIVES if importlib.util.find_spec(f"{__name__}.{p}") is not None)


def _module(primitive: str) -> ModuleType:
    if primitive not in primitives():
        raise InvalidDescriptor("primitive", primitive, f"one of {primitives()}")
    return importlib.import_module(f"{__name__}.{primitive}")


def hook(primitive: str, name: str) -> Callable[..., Any] | None:
    """A primitive's own function of that name, if it has one."""
    found: Callable[..., Any] | None = getattr(_module(primitive), name, None)
    return found


def curated(primitive: str) -> list[Problem]:
    """The hand-picked problems of a primitive, each line once."""
    found: list[Problem] = _module(primitive).curated()
    return list({str(problem): problem for problem in found}.values())


def draw(primitive: str, random: np.random.Generator) -> Problem:
    """A problem drawn at random."""
    problem: Problem = _module(primitive).draw(random)
    return problem


def draw_distinct(primitive: str, count: int, seed: int) -> list[Problem]:
    """So many problems of different lines, the same ones for the same seed."""
    random = np.random.default_rng(seed)
    found: dict[str, Problem] = {}
    while len(found) < count:
        problem = draw(primitive, random)
        found[str(problem)] = problem
    return list(found.values())
