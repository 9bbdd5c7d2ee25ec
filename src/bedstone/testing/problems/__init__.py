"""Problems to test with: one file a primitive, each with `curated()` and `draw(random)`."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

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


def curated(primitive: str) -> list[Problem]:
    """The hand-picked problems of a primitive, each once."""
    return list(dict.fromkeys(_module(primitive).curated()))


def draw(primitive: str, random: np.random.Generator) -> Problem:
    """A problem drawn at random."""
    problem: Problem = _module(primitive).draw(random)
    return problem


def draw_distinct(primitive: str, count: int, seed: int) -> list[Problem]:
    """So many different problems, the same ones for the same seed."""
    random = np.random.default_rng(seed)
    found: dict[Problem, None] = {}
    while len(found) < count:
        found[draw(primitive, random)] = None
    return list(found)
