"""Convolution and its two gradients as primitives of JAX.

Each is bilinear, and the derivatives of each by its operands are the other two: that gives jvp,
grad and any order. Batches (vmap) are folded into N, or into groups where filters differ. Arrays
stay as JAX has them: dimension numbers become strides of the descriptors, nothing is transposed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching

from bedstone import ConvolutionDesc, ConvolutionProblem, TensorDesc
from bedstone.frameworks.jax import halo, handler
from bedstone.frameworks.jax.rules import bind, primitive
from bedstone.frameworks.jax.sharding import Cuts, Sharing

Shape = tuple[int, ...]
_conv_general_dilated = lax.conv_general_dilated  # as it is before anybody replaces it


@dataclass(frozen=True)
class How:
    """Everything about a convolution but the shapes.

    x, w, y   places of (N, C, spatial...), (K, C, spatial...) and (N, K, spatial...) in the arrays'
              shapes, as jax.lax.ConvDimensionNumbers has them
    flipped   whether filters are reversed along every spatial axis
    reduced   whether a GPU may round the factors of float32 products to tf32
    """

    stride: Shape
    padding: tuple[tuple[int, int], ...]
    dilation: Shape
    groups: int
    x: Shape
    w: Shape
    y: Shape
    flipped: bool = False
    reduced: bool = False

    @property
    def conv(self) -> ConvolutionDesc:
        axes = len(self.stride)
        return ConvolutionDesc.of(
            axes, list(self.padding), list(self.stride), list(self.dilation), self.groups,
            "convolution" if self.flipped else "cross_correlation",
        )  # fmt: skip

    def with_groups(self, groups: int) -> How:
        """The same with another number of groups."""
        return replace(self, groups=groups)

    def y_shape(self, x: Shape, w: Shape) -> Shape:
        """The shape of the result, in its own order."""
        dims = self.conv.output_dims(_logical(x, self.x), _logical(w, self.w))
        return _placed(dims, self.y)


def _logical(shape: Shape, places: Shape) -> Shape:
    return tuple(shape[place] for place in places)


def _placed(dims: Sequence[Any], places: Shape) -> tuple[Any, ...]:
    shape: list[Any] = [0] * len(dims)
    for dim, place in zip(dims, places):
        shape[place] = dim
    return tuple(shape)


def _desc(shape: Shape, places: Shape, dtype: Any) -> TensorDesc:
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return TensorDesc(_logical(shape, places), _logical(tuple(strides), places), str(dtype))


def problem(direction: str, how: How, x: Shape, w: Shape, y: Shape, dtype: Any, where: str) -> Any:
    """The problem of one direction on arrays of these shapes, on a platform."""
    descs = (_desc(s, p, dtype) for s, p in ((x, how.x), (w, how.w), (y, how.y)))
    tf32 = how.reduced and where == "cuda" and str(dtype) == "float32"
    return ConvolutionProblem(direction, *descs, how.conv, math="tf32" if tf32 else "ieee")


def _shapes(
    direction: str, how: How, a: Shape, b: Shape, shape: Shape
) -> tuple[Shape, Shape, Shape]:
    """The shapes of x, w and y, from those of the two operands and of the result."""
    if direction == "forward":
        return a, b, shape
    if direction == "backward_data":  # (dy, w) -> dx
        return shape, b, a
    return a, shape, b  # (x, dy) -> dw


def _run(direction: str, a: Any, b: Any, *, how: How, shape: Shape, where: str) -> Any:
    """The custom call. Plans want (x, w), (w, dy) and (x, dy)."""
    asked = problem(
        direction, how, *_shapes(direction, how, a.shape, b.shape, shape), a.dtype, where
    )
    operands = (b, a) if direction == "backward_data" else (a, b)
    result = handler.call(asked, operands, shape, where)
    # (No kernel: for a gradient, or a batch, of a convolution that was ours.)
    return _native(direction, a, b, how, shape) if isinstance(result, str) else result


def _native(direction: str, a: Any, b: Any, how: How, shape: Shape) -> Any:
    """The same by JAX's convolution; a gradient is its transpose."""

    def convolve(x: Any, w: Any) -> Any:
        w = jnp.flip(w, how.w[2:]) if how.flipped else w
        return _conv_general_dilated(
            x, w, how.stride, how.padding, rhs_dilation=how.dilation,
            dimension_numbers=lax.ConvDimensionNumbers(how.x, how.w, how.y),
            feature_group_count=how.groups,
            precision=None if how.reduced else lax.Precision.HIGHEST,
        )  # fmt: skip

    if direction == "forward":
        return convolve(a, b)
    result = jax.ShapeDtypeStruct(shape, a.dtype)
    if direction == "backward_data":
        return jax.linear_transpose(lambda x: convolve(x, b), result)(a)[0]
    return jax.linear_transpose(lambda w: convolve(a, w), result)(b)[0]


def _factors(direction: str, how: How, x: Shape, w: Shape, y: Shape) -> Any:
    """The axes of x, w and y by their factors, as `Sharing` wants them; the factors that may be cut
    along, their sizes, and how much a share must hold."""
    apart = w[how.w[1]]  # channels of a group
    sizes: dict[str, int] = {}
    channels, filters, inner = ("c",), ("k",), ("c",)
    free = {"n", "c", "k"}
    if how.groups > 1:  # whole groups stay together
        sizes = {"g": how.groups, "c": apart, "k": w[how.w[0]] // how.groups}
        free = {"n", "g"}
        channels, filters = (tuple(f for f in ("g", n) if sizes[f] > 1) for n in ("c", "k"))
    least: dict[str, int] = {}
    images, windows, results = [], [], []
    for i in range(len(how.stride)):
        size, window, result = (a[p[2 + i]] for a, p in ((x, how.x), (w, how.w), (y, how.y)))
        wanted = halo.least(direction, how, i, size, window, result)
        windows.append((f"r{i}",))
        if wanted is None:
            images.append((f"x{i}",)), results.append((f"y{i}",))
            continue
        free.add(f"s{i}")
        least[f"s{i}"] = wanted
        results.append((f"s{i}",))
        images.append((f"s{i}", f"u{i}") if how.stride[i] > 1 else (f"s{i}",))
        if how.stride[i] > 1:
            sizes |= {f"s{i}": result, f"u{i}": how.stride[i]}
    axes = [
        _placed((("n",), channels, *images), how.x),
        _placed((filters, inner, *windows), how.w),
        _placed((("n",), filters, *results), how.y),
    ]
    used = {factor for part in axes for axis in part for factor in axis}
    sizes = {factor: size for factor, size in sizes.items() if factor in used}
    return axes, frozenset(free), sizes, least


def _sharing(direction: str, a: Shape, b: Shape, *, how: How, shape: Shape) -> Sharing:
    """Batch, channels (of whole groups) and filters may be cut, and spatial axes where a device's
    part of x is the stride times its part of y."""
    x, w, y = _shapes(direction, how, a, b, shape)
    (xs, ws, ys), free, sizes, least = _factors(direction, how, x, w, y)
    operands, result = {
        "forward": ((xs, ws), ys),
        "backward_data": ((ys, ws), xs),
        "backward_filter": ((xs, ys), ws),
    }[direction]
    return Sharing(operands, result, free, sizes, least, frozenset(least))


def _adapt(direction: str, cuts: Cuts, parts: Any, params: Any) -> Any:
    """A share's operands with the halos from the neighbours, and its own convolution."""
    how, shape = params["how"], params["shape"]
    x, w, _ = _shapes(direction, how, *(part.shape for part in parts), shape)
    how = how.with_groups(x[how.x[1]] // w[how.w[1]])
    window = tuple(w[i] for i in how.w[2:])
    over = {
        i: (cuts.names[f"s{i}"], cuts.counts[f"s{i}"])
        for i in range(len(window))
        if f"s{i}" in cuts.names
    }
    how, parts = halo.share(direction, how, parts, window, over)
    return parts, {"how": how, "shape": shape}


def _primitive(direction: str) -> Any:
    return primitive(
        f"convolution_{direction}",
        functools.partial(_run, direction),
        lambda *shapes, how, shape: shape,
        functools.partial(_sharing, direction),
        functools.partial(_adapt, direction),
    )


forward_p = _primitive("forward")
data_p = _primitive("backward_data")
filter_p = _primitive("backward_filter")


def _shape_of(primal: Any) -> Shape:
    return tuple(primal.aval.shape)


# Derivatives: a bilinear function's, by each operand, is the function with the other held.

ad.defbilinear(
    forward_p,
    lambda ct, x, w, how, shape: bind(data_p, ct, w, how=how, shape=_shape_of(x)),
    lambda ct, x, w, how, shape: bind(filter_p, x, ct, how=how, shape=_shape_of(w)),
)
ad.defbilinear(
    data_p,
    lambda ct, dy, w, how, shape: bind(forward_p, ct, w, how=how, shape=_shape_of(dy)),
    lambda ct, dy, w, how, shape: bind(filter_p, ct, dy, how=how, shape=_shape_of(w)),
)
ad.defbilinear(
    filter_p,
    lambda ct, x, dy, how, shape: bind(data_p, dy, ct, how=how, shape=_shape_of(x)),
    lambda ct, x, dy, how, shape: bind(forward_p, x, ct, how=how, shape=_shape_of(dy)),
)


# Batches.


def _fold(array: Any, at: int, axis: int) -> Any:
    """Batch axis `at` joined with `axis` (of the shape without it), slower than it."""
    array = jnp.moveaxis(array, at, axis)
    shape = array.shape
    return array.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


def _unfold(array: Any, axis: int, size: int) -> Any:
    """The batch taken out of `axis` again, to the front."""
    shape = array.shape
    split = array.reshape(*shape[:axis], size, shape[axis] // size, *shape[axis + 1 :])
    return jnp.moveaxis(split, axis, 0)


def _grown(shape: Shape, axis: int, size: int) -> Shape:
    return (*shape[:axis], shape[axis] * size, *shape[axis + 1 :])


def _spread(array: Any, at: int | None, size: int) -> tuple[Any, int]:
    if at is not None:
        return array, at
    return jnp.broadcast_to(array, (size, *array.shape)), 0


def _batch_images(made: Any, first: str, result: str) -> Any:
    """Rule of forward and data: images in batches go to N; filters in batches make groups."""

    def rule(arguments: Any, dims: Any, *, how: How, shape: Shape) -> tuple[Any, int]:
        (a, w), (a_at, w_at) = arguments, dims
        size = a.shape[a_at] if a_at is not None else w.shape[w_at]
        places, out = getattr(how, first), getattr(how, result)
        if w_at is None:
            y = bind(made, _fold(a, a_at, places[0]), w, how=how, shape=_grown(shape, out[0], size))
            return _unfold(y, out[0], size), 0
        a, w = _fold(*_spread(a, a_at, size), places[1]), _fold(w, w_at, how.w[0])
        grouped = how.with_groups(how.groups * size)
        y = bind(made, a, w, how=grouped, shape=_grown(shape, out[1], size))
        return _unfold(y, out[1], size), 0

    return rule


def _batch_filter(arguments: Any, dims: Any, *, how: How, shape: Shape) -> tuple[Any, int]:
    """Rule of the gradient by filter: each of the batch is a group."""
    (x, dy), (x_at, dy_at) = arguments, dims
    size = x.shape[x_at] if x_at is not None else dy.shape[dy_at]
    x = _fold(*_spread(x, x_at, size), how.x[1])
    dy = _fold(*_spread(dy, dy_at, size), how.y[1])
    grouped = how.with_groups(how.groups * size)
    dw = bind(filter_p, x, dy, how=grouped, shape=_grown(shape, how.w[0], size))
    return _unfold(dw, how.w[0], size), 0


batching.primitive_batchers[forward_p] = _batch_images(forward_p, "x", "y")
batching.primitive_batchers[data_p] = _batch_images(data_p, "y", "x")
batching.primitive_batchers[filter_p] = _batch_filter
