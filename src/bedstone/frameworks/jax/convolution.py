"""Convolution with the signature of jax.lax, and what of it bedstone takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from bedstone import InvalidDescriptor
from bedstone.frameworks.jax import handler, primitives
from bedstone.frameworks.jax.primitives import How

DTYPES = ("float32", "float64", "float16", "bfloat16")
AXES = (1, 2, 3)


class Native(Exception):
    """This convolution is left to JAX; the message says why."""


def convolution(
    x: Any,
    w: Any,
    stride: int | Sequence[int] = 1,
    padding: Any = "VALID",
    *,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    dimension_numbers: Any = None,
) -> Any:
    """y = conv(x, w), cross-correlation, on bedstone: under jit, grad, jvp and vmap, to any order.

    x        images, (N, C, spatial...) or as `dimension_numbers` say (as in jax.lax)
    w        filters, (K, C/groups, spatial...)
    stride, dilation  one number, or one an axis
    padding  "VALID", "SAME", a number, or a (low, high) pair an axis

    Raises InvalidDescriptor for shapes that do not fit, and NotImplementedError for what there is
    no compiled kernel for (see `jax.lax.conv_general_dilated`, which takes everything).
    """
    axes = x.ndim - 2
    numbers = lax.conv_dimension_numbers(x.shape, w.shape, dimension_numbers)
    strides = (stride,) * axes if isinstance(stride, int) else tuple(stride)
    steps = (dilation,) * axes if isinstance(dilation, int) else tuple(dilation)
    if isinstance(padding, int):
        padding = [(padding, padding)] * axes
    elif isinstance(padding, str):
        padding = _named(x, w, numbers, strides, steps, padding)
    pads = tuple((int(low), int(high)) for low, high in padding)
    how = How(strides, pads, steps, groups, *map(tuple, numbers))
    try:
        check(x, w, how)
    except Native as reason:
        raise NotImplementedError(f"bedstone: {reason}") from None
    return primitives.bind(primitives.forward_p, x, w, how, how.y_shape(x.shape, w.shape))


def _named(x: Any, w: Any, numbers: Any, strides: Any, steps: Any, name: str) -> Any:
    size = [x.shape[i] for i in numbers.lhs_spec[2:]]
    window = [(w.shape[i] - 1) * d + 1 for i, d in zip(numbers.rhs_spec[2:], steps)]
    return lax.padtype_to_pads(size, window, strides, name)


def check(x: Any, w: Any, how: How) -> str:
    """The algorithm of a convolution; raises Native where there is no kernel for it."""
    if jax.default_backend() != "cpu":
        raise Native(f"the backend {jax.default_backend()}")
    if x.dtype != w.dtype or str(x.dtype) not in DTYPES:
        raise Native(f"dtypes {x.dtype} and {w.dtype}")
    if len(how.stride) not in AXES:
        raise Native(f"{len(how.stride)} spatial axes")
    if 0 in x.shape or 0 in w.shape:
        raise Native("an empty array")
    shape = how.y_shape(tuple(x.shape), tuple(w.shape))
    made = handler.target(primitives.problem("forward", how, x.shape, w.shape, shape, x.dtype))
    if isinstance(made, str):
        raise Native(made)
    return made.algorithm


def take(
    x: Any, w: Any, window_strides: Any, padding: Any, lhs_dilation: Any, rhs_dilation: Any,
    dimension_numbers: Any, feature_group_count: int, batch_group_count: int, precision: Any,
    preferred_element_type: Any, rest: dict[str, Any],
) -> tuple[Any, str]:  # fmt: skip
    """(the result, the algorithm) of a call of conv_general_dilated; raises Native where it is not
    ours."""
    if not (hasattr(x, "ndim") and hasattr(w, "ndim")) or x.ndim < 3:
        raise Native("operands that are no images")
    given = [name for name, value in rest.items() if value is not None]
    if given:
        raise Native(f"the argument {given[0]}")
    if batch_group_count != 1:
        raise Native("batch groups")
    if lhs_dilation is not None and any(step != 1 for step in lhs_dilation):
        raise Native("a dilated image (a transposed convolution)")
    if preferred_element_type is not None and preferred_element_type != x.dtype:
        raise Native("another element type of the result")
    if precision not in (None, lax.Precision.DEFAULT, lax.Precision.HIGHEST):
        raise Native(f"precision {precision}")
    axes = x.ndim - 2
    numbers = lax.conv_dimension_numbers(x.shape, w.shape, dimension_numbers)
    steps = tuple(rhs_dilation) if rhs_dilation is not None else (1,) * axes
    if isinstance(padding, str):
        padding = _named(x, w, numbers, window_strides, steps, padding)
    pads = tuple((int(low), int(high)) for low, high in padding)
    if any(p < 0 for pair in pads for p in pair):
        raise Native("negative padding")
    strides = tuple(int(s) for s in window_strides)
    how = How(strides, pads, steps, feature_group_count, *map(tuple, numbers))
    try:
        algorithm = check(x, w, how)
    except InvalidDescriptor as error:
        raise Native(str(error)) from None
    shape = how.y_shape(x.shape, w.shape)
    return primitives.bind(primitives.forward_p, x, w, how, shape), algorithm
