"""Other strides for the same problem: layouts, gaps, reversed axes, broadcasts, overlaps."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from bedstone.spec.errors import InvalidDescriptor
from bedstone.spec.problem import Problem
from bedstone.spec.tensor import CHANNELS_LAST, TensorDesc

# Kinds of memory order; the last two repeat elements, so only inputs can have them.
KINDS = ("packed", "channels_last", "permuted", "gaps", "reversed", "broadcast", "overlapping")
INPUT_ONLY = ("broadcast", "overlapping")
LARGEST_GAP = 3  # elements, on each axis of a sub-tensor


def strided(desc: TensorDesc, kind: str, random: np.random.Generator) -> TensorDesc:
    """The same dims and dtype with strides of that kind."""
    if kind == "channels_last" and desc.rank in CHANNELS_LAST:
        return TensorDesc.packed(desc.dims, desc.dtype, CHANNELS_LAST[desc.rank])
    order = [int(a) for a in random.permutation(desc.rank)]
    if kind == "permuted":
        return _nested(desc, order, [0] * desc.rank)
    gaps = [int(g) for g in random.integers(0, LARGEST_GAP + 1, desc.rank)]
    axis = int(random.integers(0, desc.rank))
    if kind == "gaps":
        return _nested(desc, order if random.random() < 0.5 else list(range(desc.rank)), gaps)
    base = _nested(desc, list(range(desc.rank)), gaps if random.random() < 0.3 else [0] * desc.rank)
    strides = list(base.strides)
    if kind == "reversed":
        strides[axis] = -strides[axis]
    elif kind == "broadcast":
        strides[axis] = 0
    elif kind == "overlapping":
        strides[axis] = max(1, strides[axis] // 2)
    return TensorDesc(desc.dims, tuple(strides), desc.dtype)


def _nested(desc: TensorDesc, order: list[int], gaps: list[int]) -> TensorDesc:
    """Axes from outermost to innermost, each row followed by so many unused places."""
    strides, step = [0] * desc.rank, 1
    for axis in reversed(order):
        strides[axis] = step
        step *= max(desc.dims[axis] + gaps[axis], 1)
    if gaps[order[-1]] and desc.dims[order[-1]] > 1:  # the innermost axis steps over gaps as well
        strides = [2 * s for s in strides]
    return TensorDesc(desc.dims, tuple(strides), desc.dtype)


def tensor_fields(problem: Problem) -> dict[str, TensorDesc]:
    """The problem's fields that are descriptors."""
    fields = dataclasses.fields(problem)  # type: ignore[arg-type]
    found = {f.name: getattr(problem, f.name) for f in fields if f.init}
    return {name: value for name, value in found.items() if isinstance(value, TensorDesc)}


def with_strides(problem: Problem, field: str, kind: str, random: np.random.Generator) -> Problem:
    """The problem with one tensor's strides changed; unchanged where that makes no sense."""
    desc = tensor_fields(problem)[field]
    # Indices of maxima are what a forward call wrote: each has memory of its own.
    written = any(o.desc is desc for o in problem.outputs) or field == "indices"
    if written and kind in INPUT_ONLY:
        return problem
    try:
        return replace(problem, **{field: strided(desc, kind, random)})
    except InvalidDescriptor:
        return problem


def replace(problem: Problem, **changes: Any) -> Problem:
    """dataclasses.replace for any problem."""
    return dataclasses.replace(problem, **changes)  # type: ignore[type-var]


# How often a drawn problem's tensor has each kind of strides (KINDS).
WEIGHTS = (0.56, 0.2, 0.07, 0.08, 0.04, 0.03, 0.02)


def randomly_strided(problem: Problem, random: np.random.Generator) -> Problem:
    """Every tensor with strides drawn at random: mostly one layout for all, as networks have."""
    draw = random.random()
    if draw < 0.35:
        return problem
    if draw < 0.55:
        for field in tensor_fields(problem):
            problem = with_strides(problem, field, "channels_last", random)
        return problem
    for field in tensor_fields(problem):
        kind = str(random.choice(KINDS, p=WEIGHTS))
        problem = with_strides(problem, field, kind, random)
    return problem
