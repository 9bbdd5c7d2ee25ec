"""Maximum, average and adaptive average pooling of PyTorch, in two and three dimensions (those of
one dimension come here as two), and their gradients."""

from __future__ import annotations

from collections.abc import Sequence

from bedstone import PoolingDesc, PoolingProblem
from bedstone.frameworks.torch.calls import Call, Describe, Native, Operator, Step
from bedstone.spec.pooling import adaptive_average_problem


def _desc(
    mode: str, axes: int, window: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], ceil: bool,
) -> PoolingDesc:  # fmt: skip
    """PyTorch's numbers, each one for all axes or one an axis; no stride means the window."""
    r, u, p, step = (
        list(values) * (axes if len(values) == 1 else 1)
        for values in (window, stride or window, padding, dilation)
    )
    return PoolingDesc.of(mode, r, axes, p, u, step, "ceil" if ceil else "floor")


def _average(axes: int, call: Call, first: int) -> PoolingDesc:
    window, stride, padding, ceil, include, divisor = call.arguments[first : first + 6]
    if divisor is not None:
        raise Native("a divisor of the caller's")
    mode = "average_include_padding" if include else "average_exclude_padding"
    return _desc(mode, axes, window, stride, padding, [1], ceil)


def _max_forward(axes: int) -> Describe:
    """max_pool_with_indices(x, window, stride, padding, dilation, ceil)"""

    def describe(call: Call) -> list[Step]:
        x, y, indices = (call.desc(i, axes + 2) for i in (0, ~0, ~1))
        pool = _desc("max", axes, *call.arguments[1:6])
        return [Step(PoolingProblem("forward", x, y, pool, indices), (0, ~0, ~1))]

    return describe


def _max_backward(axes: int) -> Describe:
    """max_pool_with_indices_backward(dy, x, window, stride, padding, dilation, ceil, indices)"""

    def describe(call: Call) -> list[Step]:
        dy, indices, dx = (call.desc(i, axes + 2) for i in (0, 7, ~0))
        pool = _desc("max", axes, *call.arguments[2:7])
        return [Step(PoolingProblem("backward", dx, dy, pool, indices), (7, 0, ~0))]

    return describe


def _average_forward(axes: int) -> Describe:
    """avg_pool(x, window, stride, padding, ceil, count_include_pad, divisor_override)"""

    def describe(call: Call) -> list[Step]:
        x, y = call.desc(0, axes + 2), call.desc(~0, axes + 2)
        return [Step(PoolingProblem("forward", x, y, _average(axes, call, 1)), (0, ~0))]

    return describe


def _average_backward(axes: int) -> Describe:
    """avg_pool_backward(dy, x, window, stride, padding, ceil, count_include_pad, divisor)"""

    def describe(call: Call) -> list[Step]:
        dy, dx = call.desc(0, axes + 2), call.desc(~0, axes + 2)
        return [Step(PoolingProblem("backward", dx, dy, _average(axes, call, 2)), (0, ~0))]

    return describe


def _adaptive(axes: int, direction: str) -> Describe:
    """_adaptive_avg_pool(x, size), _adaptive_avg_pool_backward(dy, x)"""

    def describe(call: Call) -> list[Step]:
        first, result = call.desc(0, axes + 2), call.desc(~0, axes + 2)
        x, y = (first, result) if direction == "forward" else (result, first)
        return [Step(adaptive_average_problem(direction, x, y), (0, ~0))]

    return describe


# Fewer are over sooner, on PyTorch's kernel, than Python has looked the call up.
LEAST = 1 << 12

OPERATORS = tuple(
    operator
    for axes, d in ((2, "2d"), (3, "3d"))
    for operator in (
        Operator(f"max_pool{d}_with_indices", _max_forward(axes), least=LEAST),
        Operator(f"max_pool{d}_with_indices_backward", _max_backward(axes), least=LEAST),
        Operator(f"avg_pool{d}", _average_forward(axes), least=LEAST),
        Operator(f"avg_pool{d}_backward", _average_backward(axes), least=LEAST),
        Operator(f"_adaptive_avg_pool{d}", _adaptive(axes, "forward"), least=LEAST),
        Operator(f"_adaptive_avg_pool{d}_backward", _adaptive(axes, "backward"), least=LEAST),
    )
)
