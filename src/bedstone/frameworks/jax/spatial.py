"""Convolution of images that are cut over devices, for use inside `jax.shard_map`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from bedstone import InvalidDescriptor
from bedstone.frameworks.jax import halo, primitives
from bedstone.frameworks.jax.convolution import AXES, pads_of, reduced
from bedstone.frameworks.jax.primitives import How
from bedstone.frameworks.jax.rules import bind


def spatial_convolution(
    x: Any,
    w: Any,
    axis_name: Any,
    stride: int | Sequence[int] = 1,
    padding: Any = "SAME",
    *,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    dimension_numbers: Any = None,
    precision: Any = None,
) -> Any:
    """The share of a convolution of images that are cut over the axes of a mesh.

    x          this device's part of the images; the devices in the order of the parts
    w          filters, the same on all
    axis_name  the mesh's axis over which the first spatial axis is cut, or a list of one name for
               each spatial axis (None: not cut)
    returns    this device's part of the result
    Other arguments as in `convolution`; padding is that of the whole images. They must be cut into
    parts as long as the stride times the parts of the result: "SAME" always fits where the stride
    divides the parts.

    Use inside jax.shard_map. Raises InvalidDescriptor for other paddings, and where a device has
    less than its neighbour needs.
    """
    axes = x.ndim - 2
    if axes not in AXES:
        raise InvalidDescriptor("x", tuple(x.shape), "3 to 5 dims: N, C and 1 to 3 spatial")
    over = list(axis_name) if isinstance(axis_name, (list, tuple)) else [axis_name]
    over += [None] * (axes - len(over))
    numbers = lax.conv_dimension_numbers(x.shape, w.shape, dimension_numbers)
    strides = (stride,) * axes if isinstance(stride, int) else tuple(stride)
    steps = (dilation,) * axes if isinstance(dilation, int) else tuple(dilation)
    devices = [1 if name is None else lax.axis_size(name) for name in over]
    whole = list(x.shape)
    for place, count in zip(numbers.lhs_spec[2:], devices):
        whole[place] *= count
    pads = pads_of(whole, w.shape, numbers, strides, steps, padding)
    how = How(strides, pads, steps, groups, *map(tuple, numbers), reduced=reduced(precision))
    y = how.y_shape(tuple(whole), tuple(w.shape))
    window = tuple(w.shape[i] for i in how.w[2:])
    cuts = {i: (name, n) for i, (name, n) in enumerate(zip(over, devices)) if name is not None}
    for axis in cuts:
        sizes = whole[how.x[2 + axis]], window[axis], y[how.y[2 + axis]]
        wanted = halo.least("forward", how, axis, *sizes)
        if wanted is None:
            raise InvalidDescriptor(
                "padding", pads[axis], f"a result of {sizes[0]} / {strides[axis]} positions, and "
                "less padding than the window is long"
            )  # fmt: skip
        if x.shape[how.x[2 + axis]] < wanted * strides[axis]:
            raise InvalidDescriptor(
                "x", tuple(x.shape), f"{wanted * strides[axis]} elements of axis {2 + axis} or more"
                " on each device"
            )  # fmt: skip
    local, (grown, _) = halo.share("forward", how, (x, w), window, cuts)
    result = local.y_shape(tuple(grown.shape), tuple(w.shape))
    return bind(primitives.forward_p, grown, w, how=local, shape=result)
