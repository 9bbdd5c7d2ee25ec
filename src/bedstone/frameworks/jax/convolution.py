"""Convolution with the signature of jax.lax, and what of it bedstone takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bedstone import InvalidDescriptor
from bedstone.frameworks.jax import handler, primitives
from bedstone.frameworks.jax.primitives import How
from bedstone.frameworks.jax.rules import Native, bind, check_array

AXES = (1, 2, 3)

Ints = tuple[int, ...]


def convolution(
    x: Any,
    w: Any,
    stride: int | Sequence[int] = 1,
    padding: Any = "VALID",
    *,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    dimension_numbers: Any = None,
    precision: Any = None,
) -> Any:
    """y = conv(x, w), cross-correlation, on bedstone: under jit, grad, jvp and vmap, to any order.

    x        images, (N, C, spatial...) or as `dimension_numbers` say (as in jax.lax)
    w        filters, (K, C/groups, spatial...)
    stride, dilation  one number, or one an axis
    padding  "VALID", "SAME", a number, or a (low, high) pair an axis
    precision  as in jax.lax. It matters to float32 on a GPU, where "highest" rules out tf32

    Raises InvalidDescriptor for shapes that do not fit, and NotImplementedError for what there is
    no compiled kernel for (see `jax.lax.conv_general_dilated`, which takes everything).
    """
    axes = x.ndim - 2
    numbers = lax.conv_dimension_numbers(x.shape, w.shape, dimension_numbers)
    strides = (stride,) * axes if isinstance(stride, int) else tuple(stride)
    steps = (dilation,) * axes if isinstance(dilation, int) else tuple(dilation)
    pads = pads_of(x.shape, w.shape, numbers, strides, steps, padding)
    how = How(strides, pads, steps, groups, *map(tuple, numbers), reduced=reduced(precision))
    try:
        check(x, w, how)
    except Native as reason:
        raise NotImplementedError(f"bedstone: {reason}") from None
    return bind(primitives.forward_p, x, w, how=how, shape=how.y_shape(x.shape, w.shape))


def reduced(precision: Any) -> bool:
    """Whether a precision, in one of the ways in which jax.lax takes it, lets a GPU round the
    factors of float32 products to tf32. Raises ValueError, as JAX does, for what is none."""
    if precision is None:
        try:
            return reduced(jax.config.jax_default_matmul_precision or lax.Precision.DEFAULT)
        except ValueError:  # the name of an algorithm for products of matrices
            return False
    every = precision if isinstance(precision, tuple) else (precision,)
    return all(
        (lax.Precision.DEFAULT if p is None else lax.Precision(p)) is not lax.Precision.HIGHEST
        for p in every
    )


def pads_of(
    x: Sequence[int], w: Sequence[int], numbers: Any, strides: Ints, steps: Ints, padding: Any
) -> tuple[tuple[int, int], ...]:
    """(low, high) an axis, for shapes x and w; of padding by name, number or pairs."""
    if isinstance(padding, int):
        return ((padding, padding),) * len(strides)
    if isinstance(padding, str):
        size = [x[i] for i in numbers.lhs_spec[2:]]
        window = [(w[i] - 1) * d + 1 for i, d in zip(numbers.rhs_spec[2:], steps)]
        padding = lax.padtype_to_pads(size, window, strides, padding)
    return tuple((int(low), int(high)) for low, high in padding)


def check(x: Any, w: Any, how: How, transposed: Ints | None = None) -> str:
    """The algorithm of a convolution, or of a data gradient of shape `transposed` where x is what
    the convolution gives; raises Native where there is no kernel for it."""
    if x.dtype != w.dtype:
        raise Native(f"dtypes {x.dtype} and {w.dtype}")
    check_array(x)
    check_array(w)
    if len(how.stride) not in AXES:
        raise Native(f"{len(how.stride)} spatial axes")
    where = handler.platform()
    if transposed is None:
        shape = how.y_shape(tuple(x.shape), tuple(w.shape))
        asked = primitives.problem("forward", how, x.shape, w.shape, shape, x.dtype, where)
    else:
        shapes = transposed, w.shape, x.shape
        asked = primitives.problem("backward_data", how, *shapes, x.dtype, where)
    made = handler.target(asked, where)
    if isinstance(made, str):
        raise Native(made)
    return made.algorithm


def take_convolution(
    lhs: Any, rhs: Any, window_strides: Any, padding: Any, lhs_dilation: Any = None,
    rhs_dilation: Any = None, dimension_numbers: Any = None, feature_group_count: int = 1,
    batch_group_count: int = 1, precision: Any = None, preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> tuple[Any, str]:  # fmt: skip
    """(the result, the algorithm) of a call of conv_general_dilated; raises Native where it is not
    ours."""
    x, w = lhs, rhs
    if not (hasattr(x, "ndim") and hasattr(w, "ndim")) or x.ndim < 3:
        raise Native("operands that are no images")
    if out_sharding is not None:
        raise Native("the argument out_sharding")
    if batch_group_count != 1:
        raise Native("batch groups")
    if preferred_element_type is not None and preferred_element_type != x.dtype:
        raise Native("another element type of the result")
    rounded = reduced(precision)
    axes = x.ndim - 2
    numbers = lax.conv_dimension_numbers(x.shape, w.shape, dimension_numbers)
    strides = tuple(int(s) for s in window_strides)
    steps = tuple(rhs_dilation) if rhs_dilation is not None else (1,) * axes
    dilated = lhs_dilation is not None and any(step != 1 for step in lhs_dilation)
    if dilated and isinstance(padding, str):
        raise Native("named padding of a dilated image")
    pads = pads_of(x.shape, w.shape, numbers, strides, steps, padding)
    try:
        if dilated:
            if any(stride != 1 for stride in strides):
                raise Native("an image that is dilated, and strides")
            how = How(
                tuple(lhs_dilation), pads, steps, feature_group_count, *map(tuple, numbers),
                reduced=rounded,
            )  # fmt: skip
            return _transposed(x, w, how)
        if any(p < 0 for pair in pads for p in pair):
            raise Native("negative padding")
        how = How(strides, pads, steps, feature_group_count, *map(tuple, numbers), reduced=rounded)
        algorithm = check(x, w, how)
    except InvalidDescriptor as error:
        raise Native(str(error)) from None
    shape = how.y_shape(x.shape, w.shape)
    return bind(primitives.forward_p, x, w, how=how, shape=shape), algorithm


def _transposed(x: Any, w: Any, asked: How) -> tuple[Any, str]:
    """A convolution of an image dilated by `asked.stride` (a transposed convolution): the data
    gradient of a strided one with the filters reversed and their channels exchanged, whose y is
    `x`."""
    stride, pads, dilation, groups = asked.stride, asked.padding, asked.dilation, asked.groups
    out, into, *spatial = asked.w
    if w.shape[into] * groups != x.shape[asked.x[1]] or w.shape[out] % groups:
        raise Native("channels that do not fit")
    extents = [(w.shape[i] - 1) * d + 1 for i, d in zip(spatial, dilation)]
    sizes = [x.shape[i] for i in asked.x[2:]]
    rows = list(zip(sizes, stride, pads, extents))
    padding, result = [], []
    for size, u, (low, high), extent in rows:
        if low > extent - 1 or high - (extent - 1) >= u:
            raise Native("padding of a dilated image beyond the reach of the window")
        # What the last window of the strided convolution leaves over is padding in excess.
        padding.append((extent - 1 - low, max(extent - 1 - high, 0)))
        result.append((size - 1) * u + 2 + low + high - extent)
    shape = [0] * x.ndim
    for place, dim in zip(asked.y, (x.shape[asked.x[0]], w.shape[out], *result)):
        shape[place] = dim
    if groups > 1:  # strides cannot exchange the channels of groups
        w = _exchanged(w, out, into, groups)
        filters = asked.w
    else:
        filters = (into, out, *spatial)
    how = How(
        stride, tuple(padding), dilation, groups, asked.y, tuple(filters), asked.x, flipped=True,
        reduced=asked.reduced,
    )  # fmt: skip
    algorithm = check(x, w, how, tuple(shape))
    return bind(primitives.data_p, x, w, how=how, shape=tuple(shape)), algorithm


def _exchanged(w: Any, out: int, into: int, groups: int) -> Any:
    """Filters (K, C/groups) as (C, K/groups), in the same places."""
    w = jnp.moveaxis(w, (out, into), (0, 1))
    k, c, *window = w.shape
    w = w.reshape(groups, k // groups, c, *window).swapaxes(1, 2)
    return jnp.moveaxis(w.reshape(groups * c, k // groups, *window), (0, 1), (out, into))
