"""The check before the clock: the very plan that is timed, on the very shape, against float64.

The float64 reference is slow, so a part of the result is checked, the last: images do not mix in
any of these problems, nor do the filters of a convolution (channels in backward_data). A filter
gradient sums over images: there all images but the last few are zero.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np

import bedstone
from bedstone.bench.operands import Array, Arrays, Operands
from bedstone.plan.runtime import runtime_of

CHECKED_FLOPS = 1e8  # of the part that is checked: the reference needs under a second
CHECKED_ELEMENTS = 1e7  # of the part's operands together
# The check finds wrong indices; the tests bound the errors themselves. A right result is far closer
# than this (relative to the largest element), a wrong tap or tail far off.
TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
LOOSE_MATH = 2e-2  # for the math modes that a caller asks for by name


class WrongResult(bedstone.BedstoneError):
    """A plan's result differs from the reference: nothing is timed."""


def check(problem: bedstone.Problem, plan: bedstone.Plan) -> float:
    """The relative RMS error of the part that is checked.

    Raises WrongResult.
    """
    part = part_of(problem)
    runtime = runtime_of(plan.device.kind)

    def only_the_last_images(arrays: Arrays) -> None:
        if problem.direction == "backward_filter":
            arrays["dy"][: arrays["dy"].shape[0] - part.operands[1].desc.dims[0]] = 0

    placed = Operands(problem, runtime, seed=1, prepare=only_the_last_images)
    inputs = {name: np.array(_last(a, part, name)) for name, a in placed.arrays().items()}
    workspace = runtime.empty(plan.workspace_size)
    plan(*placed.pointers, workspace=runtime.pointer(workspace))
    expected, got = part.reference(inputs), placed.arrays()
    errors = [
        _error(_last(got[o.name], part, o.name), expected[o.name], problem, plan, o.name)
        for o in part.outputs
    ]
    return max(errors)


def _error(got: Array, want: Array, problem: Any, plan: bedstone.Plan, name: str) -> float:
    complaint = WrongResult(f"{plan.algorithm} gives a wrong {name} for {problem}")
    if want.dtype.kind in "iub":
        if not np.array_equal(got, want):
            raise complaint
        return 0.0
    tolerance = TOLERANCE[str(problem.dtype)]
    if getattr(problem, "math", "ieee") != "ieee":
        tolerance = max(tolerance, LOOSE_MATH)
    difference = got.astype(np.float64) - want
    if not bool(np.max(np.abs(difference), initial=0.0) <= tolerance * np.max(np.abs(want))):
        raise complaint
    return float(np.sqrt(np.mean(difference**2) / max(np.mean(want**2), 1e-300)))


def _last(array: Array, part: bedstone.Problem, name: str) -> Array:
    """The end of the array along every axis, of the dims that the part's operand has."""
    (dims,) = (o.desc.dims for o in part.operands if o.name == name)
    return array[tuple(slice(full - d, full) for full, d in zip(array.shape, dims))]


def part_of(problem: bedstone.Problem) -> bedstone.Problem:
    """The same problem over as few images, and if one is too many still, over as few of a
    convolution's filters (channels in backward_data), as the check has time for."""
    if 0 in getattr(problem, "axes", ()):  # a softmax over images
        return problem
    tensors = {
        field.name: getattr(problem, field.name)
        for field in fields(problem)  # type: ignore[arg-type]
        if isinstance(getattr(problem, field.name), bedstone.TensorDesc)
    }
    elements = sum(operand.desc.size for operand in problem.operands)
    share = min(CHECKED_FLOPS / max(problem.flops, 1), CHECKED_ELEMENTS / max(elements, 1), 1.0)
    w = tensors.pop("w", None)
    images = max(1, tensors["y"].dims[0])
    part: dict[str, Any] = {
        name: _crop(desc, 0, max(1, int(share * images))) for name, desc in tensors.items()
    }
    if w is not None and share * images < 1 and problem.conv.groups == 1:  # type: ignore[attr-defined]
        side, w_axis = ("x", 1) if problem.direction == "backward_data" else ("y", 0)
        count = max(1, int(share * images * w.dims[w_axis]))
        part |= {side: _crop(part[side], 1, count), "w": _crop(w, w_axis, count)}
    return replace(problem, **part)  # type: ignore[type-var]


def _crop(desc: bedstone.TensorDesc, axis: int, size: int) -> bedstone.TensorDesc:
    dims = (*desc.dims[:axis], min(size, desc.dims[axis]), *desc.dims[axis + 1 :])
    return bedstone.TensorDesc(dims, desc.strides, desc.dtype)
