"""Pooling: `max_pool`, `avg_pool`, and what of jax.lax.reduce_window is one of them.

Windows are given for every axis of an array, as jax.lax has them. The axes along which windows do
something are the spatial ones; those before them and behind them become N and C. Averages (and
sums) are linear, and each other's transposes; of a maximum, the gradient (dy scattered to where the
maxima are) has a kernel, and its transpose (the tangents gathered there) is JAX's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from bedstone import InvalidDescriptor, PoolingDesc, PoolingProblem, TensorDesc
from bedstone.frameworks.jax import handler
from bedstone.frameworks.jax.rules import (
    Native,
    Shape,
    batched,
    bind,
    check_array,
    primitive,
    transposes,
)
from bedstone.frameworks.jax.sharding import Sharing

Pairs = tuple[tuple[int, int], ...]
_reduce_window = lax.reduce_window  # as it is before anybody replaces it
SPATIAL_AXES = (1, 2, 3)


@dataclass(frozen=True)
class How:
    """mode "max", "sum", "average_include_padding" or "average_exclude_padding", and the windows,
    one number (of padding: a pair) for every axis of the array."""

    mode: str
    window: Shape
    stride: Shape
    padding: Pairs
    dilation: Shape

    def batched(self) -> How:
        """The same with an axis in front."""
        one = (1,)
        return How(
            self.mode, one + self.window, one + self.stride, ((0, 0), *self.padding),
            one + self.dilation,
        )  # fmt: skip

    @property
    def spatial(self) -> Shape:
        """The axes along which windows do something."""
        rows = enumerate(zip(self.window, self.stride, self.padding))
        return tuple(i for i, row in rows if row != (1, 1, (0, 0)))

    def result(self, shape: Shape) -> Shape:
        """The shape that an array of `shape` is pooled to."""
        rows = zip(shape, self.window, self.stride, self.padding, self.dilation)
        return tuple(
            (size + sum(pads) - (r - 1) * step - 1) // u + 1 for size, r, u, pads, step in rows
        )

    @property
    def alpha(self) -> float:
        """By what the mean is multiplied."""
        return float(math.prod(self.window)) if self.mode == "sum" else 1.0


def _grouped(shape: Shape, spatial: Shape) -> list[tuple[int, ...]]:
    """The axes that are N and those that are C."""
    runs: list[list[int]] = []
    for axis in range(len(shape)):
        if axis in spatial:
            continue
        if runs and runs[-1][-1] == axis - 1:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    if len(runs) == 1:  # NC.., or ..NC: the last is C
        runs = [runs[0][:-1], runs[0][-1:]]
    if len(runs) > 2:
        raise Native("axes between those of the windows")
    runs += [[]] * (2 - len(runs))
    return [tuple(run) for run in runs]


def _desc(shape: Shape, spatial: Shape, dtype: Any) -> TensorDesc:
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    groups = [*_grouped(shape, spatial), *((axis,) for axis in spatial)]
    dims = tuple(math.prod(shape[i] for i in group) for group in groups)
    return TensorDesc(dims, tuple(strides[g[-1]] if g else 1 for g in groups), str(dtype))


def problem(direction: str, x: Shape, dtype: Any, how: How) -> PoolingProblem:
    """The problem of one direction on an array of shape x. Raises Native, or InvalidDescriptor."""
    spatial = how.spatial
    if len(spatial) not in SPATIAL_AXES:
        raise Native(f"windows along {len(spatial)} axes")
    pool = PoolingDesc(
        "average_include_padding" if how.mode == "sum" else how.mode,
        *(tuple(values[i] for i in spatial) for values in (how.window, how.padding, how.stride)),
        tuple(how.dilation[i] for i in spatial),
    )
    descs = (_desc(shape, spatial, dtype) for shape in (x, how.result(x)))
    return PoolingProblem(direction, *descs, pool)


# By JAX, where there is no kernel and for what has none.


def _forward_by_jax(x: Any, how: How) -> Any:
    window = (how.window, how.stride, how.padding, None, how.dilation)
    if how.mode == "max":
        return _reduce_window(x, np.array(-np.inf, x.dtype), lax.max, *window)
    total = _reduce_window(x, np.array(0, x.dtype), lax.add, *window)
    if how.mode == "sum":
        return total
    if how.mode == "average_include_padding":
        return total / math.prod(how.window)
    ones = jnp.ones(x.shape, x.dtype)
    return total / jnp.maximum(_reduce_window(ones, np.array(0, x.dtype), lax.add, *window), 1)


def _gather_by_jax(x: Any, t: Any, how: How) -> Any:
    return jax.jvp(lambda x: _forward_by_jax(x, how), (x,), (t,))[1]


def _scatter_by_jax(x: Any, dy: Any, how: How) -> Any:
    return jax.vjp(lambda x: _forward_by_jax(x, how), x)[1](dy)[0]


# The primitives.


def _forward(x: Any, *, how: How, where: str) -> Any:
    asked = problem("forward", x.shape, x.dtype, how)
    y = handler.call(asked, (x,), how.result(x.shape), where, how.alpha)
    return _forward_by_jax(x, how) if isinstance(y, str) else y


def _gather(x: Any, t: Any, *, how: How, where: str) -> Any:
    return _gather_by_jax(x, t, how)


def _scatter(x: Any, dy: Any, *, how: How, where: str) -> Any:
    dx = handler.call(problem("backward", x.shape, x.dtype, how), (x, dy), x.shape, where)
    return _scatter_by_jax(x, dy, how) if isinstance(dx, str) else dx


def _spread(dy: Any, *, how: How, shape: Shape, where: str) -> Any:
    dx = handler.call(problem("backward", shape, dy.dtype, how), (dy,), shape, where, how.alpha)
    if not isinstance(dx, str):
        return dx
    whole = jax.ShapeDtypeStruct(shape, dy.dtype)
    return jax.linear_transpose(lambda x: _forward_by_jax(x, how), whole)(dy)[0]


def _sharing(x: Shape, *others: Shape, how: How, shape: Shape = ()) -> Sharing:
    """N and C may be cut, and a spatial axis of windows next to each other; of other spatial axes,
    those of x and y have nothing in common."""
    x = shape or x
    wide, narrow, sizes = [], [], {}
    for i, (size, result) in enumerate(zip(x, how.result(x))):
        apart = how.padding[i] == (0, 0) and size == result * how.stride[i]
        apart = apart and (how.window[i] - 1) * how.dilation[i] < how.stride[i]
        if i not in how.spatial:
            wide.append((f"n{i}",))
            narrow.append((f"n{i}",))
        elif apart and how.stride[i] > 1:
            wide.append((f"n{i}", f"u{i}"))
            narrow.append((f"n{i}",))
            sizes |= {f"n{i}": result, f"u{i}": how.stride[i]}
        else:
            wide.append((f"x{i}",))
            narrow.append((f"y{i}",))
    free = frozenset(axis[0] for axis in narrow if axis[0].startswith("n"))
    if shape:  # dy -> dx
        return Sharing((tuple(narrow),), tuple(wide), free, sizes)
    return Sharing((tuple(wide),), tuple(narrow), free, sizes)


def _sharing_gather(x: Shape, *others: Shape, how: How) -> Sharing:
    one = _sharing(x, how=how)
    return replace(one, operands=one.operands * 2)


def _sharing_scatter(x: Shape, *others: Shape, how: How) -> Sharing:
    one = _sharing(x, how=how)
    return replace(one, operands=(*one.operands, one.result), result=one.operands[0])


max_p = primitive("max_pool", _forward, lambda x, how: how.result(x), _sharing)
gather_p = primitive("max_pool_tangent", _gather, lambda x, t, how: how.result(x), _sharing_gather)
scatter_p = primitive("max_pool_backward", _scatter, lambda x, dy, how: x, _sharing_scatter)
mean_p = primitive("average_pool", _forward, lambda x, how: how.result(x), _sharing)
spread_p = primitive("average_pool_backward", _spread, lambda dy, how, shape: shape, _sharing)

ad.defjvp(max_p, lambda t, x, *, how: bind(gather_p, x, t, how=how))
transposes(gather_p, scatter_p, _gather_by_jax, _scatter_by_jax)
ad.deflinear2(
    mean_p, lambda ct, x, *, how: [bind(spread_p, ct, how=how, shape=tuple(x.aval.shape))]
)
ad.deflinear2(spread_p, lambda ct, dy, *, how, shape: [bind(mean_p, ct, how=how)])
for _made in (max_p, gather_p, scatter_p, mean_p, spread_p):
    batched(_made)


def _run(x: Any, how: How) -> tuple[Any, str]:
    check_array(x)
    asked = problem("forward", tuple(x.shape), x.dtype, how)
    made = handler.target(asked, handler.platform(), how.alpha)
    if isinstance(made, str):
        raise Native(made)
    return (max_p if how.mode == "max" else mean_p).bind(jnp.asarray(x), how=how), made.algorithm


def take_reduce_window(
    operand: Any, init_value: Any, computation: Any, window_dimensions: Any,
    window_strides: Any = None, padding: Any = "VALID", base_dilation: Any = None,
    window_dilation: Any = None,
) -> tuple[Any, str]:  # fmt: skip
    """(the result, the algorithm) of a call of jax.lax.reduce_window; raises Native where it is no
    maximum and no sum, or not ours."""
    x = operand
    if not hasattr(x, "dtype"):
        raise Native("an operand that is no array")
    mode = {lax.max: "max", lax.add: "sum"}.get(computation)
    if mode is None:
        raise Native(f"the computation {getattr(computation, '__name__', computation)}")
    if isinstance(init_value, jax.core.Tracer) or np.ndim(init_value):
        raise Native("an initial value that is not known")
    if init_value != (-np.inf if mode == "max" else 0):
        raise Native(f"the initial value {init_value}")
    if base_dilation is not None and any(step != 1 for step in base_dilation):
        raise Native("a dilated operand")
    window = tuple(int(r) for r in window_dimensions)
    if len(window) != x.ndim:
        raise Native("windows of another rank")
    ones = (1,) * x.ndim
    stride = ones if window_strides is None else tuple(int(u) for u in window_strides)
    dilation = ones if window_dilation is None else tuple(int(d) for d in window_dilation)
    if isinstance(padding, str):
        extents = [(r - 1) * d + 1 for r, d in zip(window, dilation)]
        padding = lax.padtype_to_pads(x.shape, extents, stride, padding)
    pads = tuple((int(low), int(high)) for low, high in padding)
    if not len(stride) == len(dilation) == len(pads) == x.ndim:
        raise Native("strides, dilation or padding of another rank")
    try:
        return _run(x, How(mode, window, stride, pads, dilation))
    except InvalidDescriptor as error:
        raise Native(str(error)) from None


def _pool(
    x: Any, mode: str, window: Any, stride: Any, padding: Any, dilation: Any, channels_last: bool
) -> Any:
    x = jnp.asarray(x)
    axes = x.ndim - 2
    if axes not in SPATIAL_AXES:
        raise InvalidDescriptor("x", tuple(x.shape), "3 to 5 dims: N, C and 1 to 3 spatial")
    first = 1 if channels_last else 2

    def whole(values: Any, rest: Any) -> Any:
        spread = (values,) * axes if isinstance(values, int) else tuple(values)
        return (*itertools.repeat(rest, first), *spread, *itertools.repeat(rest, 2 - first))

    sizes, steps = whole(window, 1), whole(dilation, 1)
    strides = sizes if stride is None else whole(stride, 1)
    for name, values in (("window", sizes), ("stride", strides), ("dilation", steps)):
        if len(values) != x.ndim:
            raise InvalidDescriptor(name, values, f"one number, or {axes} of them")
    if isinstance(padding, str):
        extents = [(r - 1) * d + 1 for r, d in zip(sizes, steps)]
        pads = lax.padtype_to_pads(x.shape, extents, strides, padding)
    elif isinstance(padding, int):
        pads = whole([(padding, padding)] * axes, (0, 0))
    else:
        pads = whole(padding, (0, 0))
    try:
        how = How(mode, sizes, strides, tuple((int(a), int(b)) for a, b in pads), steps)
        return _run(x, how)[0]
    except Native as reason:
        raise NotImplementedError(f"bedstone: {reason}") from None


def max_pool(
    x: Any,
    window: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: Any = "VALID",
    *,
    dilation: int | Sequence[int] = 1,
    channels_last: bool = False,
) -> Any:
    """The largest value of every window, on bedstone: under jit, grad, jvp and vmap, to any order.

    x        images, (N, C, spatial...), or (N, spatial..., C) with `channels_last`
    window, stride, dilation  one number, or one an axis; stride None: the window's size
    padding  "VALID", "SAME", a number, or a (low, high) pair an axis; it is never the largest

    Raises InvalidDescriptor for windows that do not fit, and NotImplementedError for what there is
    no compiled kernel for.
    """
    return _pool(x, "max", window, stride, padding, dilation, channels_last)


def avg_pool(
    x: Any,
    window: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: Any = "VALID",
    *,
    dilation: int | Sequence[int] = 1,
    channels_last: bool = False,
    count_include_pad: bool = True,
) -> Any:
    """The mean of every window, with the arguments of `max_pool`; `count_include_pad` says whether
    padding counts, as zeros."""
    mode = f"average_{'include' if count_include_pad else 'exclude'}_padding"
    return _pool(x, mode, window, stride, padding, dilation, channels_last)
