"""Convolutions of images that are cut along spatial axes: what neighbours send each other at the
cuts, and the convolution that is left for each device.

Every device has as many positions of y, and their stride's multiple of x. Zeros, which stand where
no neighbour sends, are the padding at the borders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
    from bedstone.frameworks.jax.primitives import How, Shape


def reach(how: How, axis: int, window: int) -> tuple[int, int]:
    """How far the windows of y's positions on a device reach before its first element of x and
    beyond its last one (less than 0: not so far)."""
    low = how.padding[axis][0]
    return low, how.dilation[axis] * (window - 1) + 1 - how.stride[axis] - low


def reach_back(how: How, axis: int, window: int) -> tuple[int, int]:
    """How many of y's positions before its own, and beyond them, see a device's elements of x."""
    low, stride = how.padding[axis][0], how.stride[axis]
    return (how.dilation[axis] * (window - 1) - low) // stride, -(-low // stride)


def least(direction: str, how: How, axis: int, x: int, window: int, y: int) -> int | None:
    """How many of y's positions each device must have at least, for sizes x and y in all; None
    where an axis cannot be cut."""
    stride, low = how.stride[axis], how.padding[axis][0]
    extent = how.dilation[axis] * (window - 1) + 1
    if x != y * stride or low >= extent:
        return None
    sent = max(reach_back(how, axis, window))
    if direction != "backward_data":
        sent = -(-max(reach(how, axis, window)) // stride)
    return max(sent, 1)


def exchange(array: Any, axis: int, before: int, after: int, names: Any, devices: int) -> Any:
    """The array with the last elements of the device before, and the first of the one after; less
    than 0 after: without its own last ones."""
    size = array.shape[axis]
    ahead = [(i, i + 1) for i in range(devices - 1)]
    parts = [lax.slice_in_dim(array, 0, size + min(after, 0), axis=axis)]
    if before:
        sent = lax.slice_in_dim(array, size - before, size, axis=axis)
        parts.insert(0, lax.ppermute(sent, names, ahead))
    if after > 0:
        sent = lax.slice_in_dim(array, 0, after, axis=axis)
        parts.append(lax.ppermute(sent, names, [(b, a) for a, b in ahead]))
    return jnp.concatenate(parts, axis) if len(parts) > 1 else parts[0]


def share(
    direction: str, how: How, parts: Sequence[Any], window: Shape, cuts: Mapping[int, Any]
) -> tuple[How, list[Any]]:
    """The convolution, and its operands, that a device is left with.

    parts  the two operands of the direction;  window  sizes of the filters
    cuts   spatial axis -> (the mesh's axes over which it is cut, how many devices those are)
    """
    first, second = parts
    padding = list(how.padding)
    for axis, (names, devices) in cuts.items():
        if direction == "backward_data":
            before, after = reach_back(how, axis, window[axis])
            first = exchange(first, how.y[2 + axis], before, after, names, devices)
            low, stride = how.padding[axis][0], how.stride[axis]
            extent = how.dilation[axis] * (window[axis] - 1) + 1
            high = stride * (after - 1) + extent - low  # (less than 0: rows that no window sees)
            padding[axis] = (low + before * stride, max(high, 0))
        else:
            before, after = reach(how, axis, window[axis])
            first = exchange(first, how.x[2 + axis], before, after, names, devices)
            padding[axis] = (0, 0)
    return replace(how, padding=tuple(padding)), [first, second]
