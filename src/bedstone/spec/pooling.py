"""Max and average pooling in 1, 2 and 3 spatial dimensions, forward and backward.

    y[n,c,p,q] = max or mean over the taps (r, s) of x[n, c, p*u + r*l - pad, q*v + s*l - pad]

A `WindowMap` says, one axis at a time, which input element each tap of each window reads and
whether it is there; it serves maximum, average, both gradients and adaptive pooling alike.
Source: the paper's section 2.2; sizes and divisors as Caffe's, PyTorch's and ONNX's layers have
them (they agree).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from bedstone.spec.convolution import (
    SPATIAL_RANKS,
    WINDOW_KEYS,
    Pair,
    check_padded,
    image_text,
    padding_pairs,
    parse_windows,
    per_axis,
    windows_text,
)
from bedstone.spec.dtypes import DType
from bedstone.spec.errors import InvalidDescriptor
from bedstone.spec.problem import (
    Array,
    Arrays,
    Fields,
    Operand,
    Problem,
    check_same_data,
    desc_option,
    parse_dims,
    parse_shape,
)
from bedstone.spec.tensor import LOGICAL_ORDERS, TensorDesc, integer_tuple

MODES = ("max", "average_include_padding", "average_exclude_padding")
ROUNDINGS = ("floor", "ceil", "given")
NO_INDEX = -1  # of the maximum of a window that holds no input element


@dataclass(frozen=True)
class PoolingDesc:
    """Mode, window, padding, stride and dilation per spatial axis, and how sizes are rounded.

    mode      "max", or the mean "average_include_padding" (divides by the taps that fall on the
              input or its padding) or "average_exclude_padding" (by those that fall on the input)
    window    one size an axis, >= 1
    padding   an int, one an axis, or one (low, high) pair an axis; >= 0
    stride    >= 1; dilation >= 1
    rounding  of the output's size: "floor"; "ceil", where the last window may overrun the padded
              input, but windows that would start beyond the input and its low padding are dropped;
              "given", where the problem's y says it (anything up to what "ceil" with no high
              padding to stop at would allow)

    What a window overruns beyond the padding never counts in a divisor. A window that holds no
    input element gives -inf (max; its index is -1 and its gradient goes nowhere) or 0 (average).
    """

    mode: str
    window: tuple[int, ...]
    padding: tuple[Pair, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    rounding: str = "floor"

    @classmethod
    def of(
        cls,
        mode: str,
        window: object,
        axes: int = 2,
        padding: object = 0,
        stride: object = None,
        dilation: object = 1,
        rounding: str = "floor",
    ) -> PoolingDesc:
        """Single numbers are spread over the axes; stride None is the window's size."""
        sizes = per_axis("window", window, axes)
        return cls(
            mode,
            sizes,
            padding_pairs("padding", padding, axes),
            sizes if stride is None else per_axis("stride", stride, axes),
            per_axis("dilation", dilation, axes),
            rounding,
        )

    @classmethod
    def whole(cls, mode: str, x: tuple[int, ...]) -> PoolingDesc:
        """Global pooling: one window over all the spatial extent of x dims (N, C, spatial...)."""
        return cls.of(mode, x[2:], len(x) - 2, stride=1)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InvalidDescriptor("mode", self.mode, f"one of {MODES}")
        if self.rounding not in ROUNDINGS:
            raise InvalidDescriptor("rounding", self.rounding, f"one of {ROUNDINGS}")
        for name in ("window", "stride", "dilation"):
            values = integer_tuple(name, getattr(self, name))
            object.__setattr__(self, name, values)
            if len(values) != len(self.window):
                raise InvalidDescriptor(name, values, f"{len(self.window)} values, as window has")
            if any(v < 1 for v in values):
                raise InvalidDescriptor(name, values, "1 or more on every axis")
        if self.axes not in SPATIAL_RANKS:
            raise InvalidDescriptor("window", self.window, "1, 2 or 3 spatial axes")
        pairs = padding_pairs("padding", self.padding, self.axes)
        object.__setattr__(self, "padding", pairs)
        if any(p < 0 for pair in pairs for p in pair):
            raise InvalidDescriptor("padding", pairs, "0 or more on every side")

    @property
    def axes(self) -> int:
        """Number of spatial axes."""
        return len(self.window)

    @property
    def extent(self) -> tuple[int, ...]:
        """Window sizes with the gaps of the dilation."""
        return tuple((r - 1) * step + 1 for r, step in zip(self.window, self.dilation))

    def most_windows(self, x: tuple[int, ...]) -> tuple[int, ...]:
        """Per axis, how many windows start on the input or its low padding."""
        return tuple(-(-(h + p[0]) // u) for h, p, u in zip(x[2:], self.padding, self.stride))

    def output_dims(self, x: tuple[int, ...]) -> tuple[int, ...]:
        """Dims of y for x dims (N, C, spatial...) by floor, or by ceil where rounding is not floor.

        Raises InvalidDescriptor for a wrong rank, or a window larger than the padded input.
        """
        self.check_rank(x)
        sizes = []
        rows = zip(x[2:], self.padding, self.stride, self.extent, self.most_windows(x))
        for h, pad, u, extent, most in rows:
            room = h + sum(pad) - extent
            size = (room // u if self.rounding == "floor" else -(-room // u)) + 1
            size = size if self.rounding == "floor" else min(size, most)
            if size < 1:
                raise InvalidDescriptor(
                    "window", self.window, f"an extent (here {extent}) no larger than the padded "
                    f"input, {h} + {pad[0]} + {pad[1]}"
                )  # fmt: skip
            sizes.append(size)
        return (*x[:2], *sizes)

    def check_rank(self, x: tuple[int, ...]) -> None:
        """Raises InvalidDescriptor unless x has N, C and as many spatial dims as the window, and
        none of these is empty."""
        if len(x) != self.axes + 2:
            expected = f"{self.axes + 2} dims: N, C and {self.axes} spatial, as the window has"
            raise InvalidDescriptor("x", x, expected)
        if any(h < 1 for h in x[2:]):
            raise InvalidDescriptor("x", x, "1 or more on every spatial axis")
        check_padded(x, self.padding)

    def check_output(self, x: tuple[int, ...], y: tuple[int, ...]) -> None:
        """Raises InvalidDescriptor unless y may be the pooled x."""
        if self.rounding != "given":
            expected = self.output_dims(x)
            if y != expected:
                raise InvalidDescriptor("y", y, f"dims {expected} (from x and the window)")
            return
        self.check_rank(x)
        most = self.most_windows(x)
        if y[:2] != x[:2] or len(y) != len(x) or not all(1 <= p <= m for p, m in zip(y[2:], most)):
            raise InvalidDescriptor(
                "y", y, f"dims {x[:2]} and 1 to {most} windows, each starting inside the input"
            )


@dataclass(frozen=True)
class WindowMap:
    """The windows along one axis: `index`, `inside` and `counted` are (windows, taps) arrays.

    index    input position of a tap, clipped to the input
    inside   whether the tap falls on the input
    counted  whether it falls on the input or its padding
    """

    index: Array
    inside: Array
    counted: Array

    @classmethod
    def sliding(
        cls, size: int, windows: int, window: int, pad: Pair, stride: int, dilation: int
    ) -> WindowMap:
        """Equal windows at a stride over `size` elements."""
        at = np.arange(windows)[:, None] * stride + np.arange(window) * dilation - pad[0]
        return cls(np.clip(at, 0, size - 1), (at >= 0) & (at < size), at < size + pad[1])

    @classmethod
    def adaptive(cls, size: int, windows: int) -> WindowMap:
        """Window i covers floor(i*size/windows) up to ceil((i+1)*size/windows), end excluded."""
        start = np.arange(windows) * size // windows
        stop = -(-np.arange(1, windows + 1) * size // windows)
        at = start[:, None] + np.arange((stop - start).max())
        inside = at < stop[:, None]
        return cls(np.clip(at, 0, size - 1), inside, inside)


def outer(vectors: Iterable[Array]) -> tuple[Array, ...]:
    """Vectors turned so that each lies along its own axis (np.ix_, for booleans too)."""
    rows = tuple(vectors)
    return tuple(v.reshape(-1, *(1,) * (len(rows) - 1 - i)) for i, v in enumerate(rows))


def taps(maps: tuple[WindowMap, ...]) -> Iterator[tuple[tuple[Any, ...], Array]]:
    """For every tap in row-major order: the index that gathers it for all windows at once (N and
    C first), and the mask of the windows where it falls on the input."""
    for tap in itertools.product(*(range(m.index.shape[1]) for m in maps)):
        index = outer(m.index[:, t] for m, t in zip(maps, tap))
        inside = outer(m.inside[:, t] for m, t in zip(maps, tap))
        yield (slice(None), slice(None), *index), functools.reduce(np.logical_and, inside)


def divisor(maps: tuple[WindowMap, ...], include_padding: bool) -> Array:
    """The number of taps by which each window's sum is divided; 1 where that would be none."""
    counts = outer((m.counted if include_padding else m.inside).sum(axis=1) for m in maps)
    return np.maximum(functools.reduce(np.multiply, counts), 1)


def find_maxima(x: Array, maps: tuple[WindowMap, ...]) -> tuple[Array, Array]:
    """(largest value, its flat position in the spatial extent) of every window. The first maximum
    in row-major window order wins; NaN is larger than everything."""
    shape = (*x.shape[:2], *(m.index.shape[0] for m in maps))
    best, where = np.full(shape, -np.inf), np.full(shape, NO_INDEX, np.int64)
    with np.errstate(invalid="ignore"):
        for index, inside in taps(maps):
            value = x[index]
            larger = (value > best) | (np.isnan(value) & ~np.isnan(best)) | (where == NO_INDEX)
            take = larger & inside
            best = np.where(take, value, best)
            where = np.where(take, np.ravel_multi_index(index[2:], x.shape[2:]), where)
    return best, where


def scatter_maxima(dy: Array, where: Array, x: tuple[int, ...]) -> Array:
    """dx of dims x: every dy is added to the element that was its window's maximum."""
    dx = np.zeros((x[0], x[1], math.prod(x[2:])))
    n, c = np.ix_(range(x[0]), range(x[1]))
    flat = where.reshape(*x[:2], math.prod(where.shape[2:]))
    with np.errstate(all="ignore"):
        np.add.at(dx, (n[..., None], c[..., None], np.maximum(flat, 0)),
                  np.where(flat == NO_INDEX, 0.0, dy.reshape(flat.shape)))  # fmt: skip
    return dx.reshape(x)


def average(x: Array, maps: tuple[WindowMap, ...], include_padding: bool) -> Array:
    """The mean of every window."""
    total = np.zeros((*x.shape[:2], *(m.index.shape[0] for m in maps)))
    with np.errstate(all="ignore"):
        for index, inside in taps(maps):
            total += np.where(inside, x[index], 0.0)
        return total / divisor(maps, include_padding)


def spread_average(
    dy: Array, maps: tuple[WindowMap, ...], include_padding: bool, x: tuple[int, ...]
) -> Array:
    """dx of dims x: every dy is shared out evenly over its window."""
    dx = np.zeros(x)
    with np.errstate(all="ignore"):
        share = dy / divisor(maps, include_padding)
        for index, inside in taps(maps):
            np.add.at(dx, index, np.where(inside, share, 0.0))
    return dx


@dataclass(frozen=True)
class PoolingProblem(Problem):
    """One pooling call. x and y describe the image- and the output-shaped tensor in both
    directions: in backward x is dx's descriptor and y is dy's.

    forward   y  = alpha * pool(x) + beta * y              operands x, y [, indices]
    backward  dx = alpha * pool'(dy) + beta * dx
              max, finding the maxima again                operands x, dy, dx
              max, from the forward call's indices         operands indices, dy, dx
              average                                      operands dy, dx

    indices  int64, dims of y: where each window's maximum is, flat over the input's spatial
             extent (row-major); None for none
    saved    backward of max without indices: the forward input's own strides (default: x's)
    """

    primitive: ClassVar[str] = "pooling"
    direction: str
    x: TensorDesc
    y: TensorDesc
    pool: PoolingDesc
    indices: TensorDesc | None = None
    saved: TensorDesc = None  # type: ignore[assignment]
    deterministic: bool = True

    def __post_init__(self) -> None:
        if self.direction not in ("forward", "backward"):
            raise InvalidDescriptor("direction", self.direction, "'forward' or 'backward'")
        if self.saved is None or not self.finds_maxima:
            object.__setattr__(self, "saved", self.x)
        self.pool.check_output(self.x.dims, self.y.dims)
        if self.indices is not None:
            if self.pool.mode != "max":
                raise InvalidDescriptor("indices", str(self.indices), f"None for {self.pool.mode}")
            if self.indices.dims != self.y.dims or self.indices.dtype is not DType.int64:
                raise InvalidDescriptor("indices", str(self.indices), f"int64, dims {self.y.dims}")
        check_same_data(self.x, {"y": self.y}, dims=False)
        check_same_data(self.x, {"saved": self.saved})
        self.check_outputs()

    @property
    def finds_maxima(self) -> bool:
        """True where backward reads the forward input to find the maxima again."""
        return self.direction == "backward" and self.pool.mode == "max" and self.indices is None

    @property
    def operands(self) -> tuple[Operand, ...]:
        forward = self.direction == "forward"
        indices: tuple[Operand, ...] = ()
        if self.indices is not None:
            indices = (Operand("indices", self.indices, "out" if forward else "in"),)
        if forward:
            return (Operand("x", self.x), Operand("y", self.y, "out"), *indices)
        x = (Operand("x", self.saved),) if self.finds_maxima else ()
        return (*x, *indices, Operand("dy", self.y), Operand("dx", self.x, "out"))

    @property
    def dtype(self) -> DType:
        return self.x.dtype

    @property
    def flops(self) -> int:
        return self.y.size * self.reduction_length

    @property
    def reduction_length(self) -> int:
        """Taps of a window: the terms of a mean, the most windows that meet in one dx."""
        return math.prod(self.pool.window)

    @property
    def maps(self) -> tuple[WindowMap, ...]:
        """The windows along each spatial axis."""
        pool = self.pool
        rows = (self.x.dims[2:], self.y.dims[2:])
        return tuple(
            WindowMap.sliding(*row)
            for row in zip(*rows, pool.window, pool.padding, pool.stride, pool.dilation)
        )

    def compute(self, arrays: Arrays) -> dict[str, Array]:
        include = self.pool.mode == "average_include_padding"
        if self.direction == "forward":
            if self.pool.mode != "max":
                return {"y": average(arrays["x"], self.maps, include)}
            best, where = find_maxima(arrays["x"], self.maps)
            return {"y": best} if self.indices is None else {"y": best, "indices": where}
        if self.pool.mode != "max":
            return {"dx": spread_average(arrays["dy"], self.maps, include, self.x.dims)}
        where = arrays["indices"] if self.indices else find_maxima(arrays["x"], self.maps)[1]
        return {"dx": scatter_maxima(arrays["dy"], where, self.x.dims)}

    def fields(self) -> str:
        pool, default = self.pool, LOGICAL_ORDERS[self.x.rank]
        window = windows_text(pool.window, pool.padding, pool.stride, pool.dilation)
        line = f"{image_text(self.x.dims)}{window} {self.x.dtype} mode={pool.mode}"
        if pool.rounding == "ceil":
            line += " rounding=ceil"
        if pool.rounding == "given":
            line += " output=" + "x".join(map(str, self.y.dims[2:]))
        for name in ("x", "y", "saved") if self.finds_maxima else ("x", "y"):
            line += desc_option(name, getattr(self, name), default)
        if self.indices is not None:
            line += " with_indices" + desc_option("indices", self.indices, default)
        return line

    @classmethod
    def from_fields(cls, direction: str, fields: Fields) -> PoolingProblem:
        found = parse_shape(fields.shape, WINDOW_KEYS)
        shape = parse_windows(fields.shape, found)
        given = fields.options.get("output")
        pool = PoolingDesc(
            fields.get("mode", "max"),
            shape.window,
            shape.padding,
            shape.stride,
            shape.dilation,
            "given" if given else fields.get("rounding", "floor"),
        )
        y = (*shape.x[:2], *parse_dims(given)) if given else pool.output_dims(shape.x)
        layout = fields.layout(len(shape.x))
        indices = None
        if "with_indices" in fields.flags:
            indices = fields.desc("indices", y, DType.int64, layout)
        return cls(
            direction,
            fields.desc("x", shape.x, fields.dtype(), layout),
            fields.desc("y", y, fields.dtype(), layout),
            pool,
            indices,
            fields.desc("saved", shape.x, fields.dtype(), layout),
        )


@dataclass(frozen=True)
class AdaptivePoolingProblem(Problem):
    """Average pooling to a given output size by windows of unequal size: window i of P covers
    the elements floor(i*H/P) up to ceil((i+1)*H/P), end excluded. In text, direction
    `adaptive_forward` (operands x, y) or `adaptive_backward` (operands dy, dx).

    Where P divides H this is an ordinary pooling: see `adaptive_average_problem`.
    """

    primitive: ClassVar[str] = "pooling"
    direction: str
    x: TensorDesc
    y: TensorDesc
    deterministic: bool = True

    def __post_init__(self) -> None:
        if self.direction not in ADAPTIVE_DIRECTIONS:
            raise InvalidDescriptor("direction", self.direction, f"one of {ADAPTIVE_DIRECTIONS}")
        if self.x.rank - 2 not in SPATIAL_RANKS:
            raise InvalidDescriptor("x", self.x.dims, "3 to 5 dims: N, C and 1 to 3 spatial")
        if self.y.rank != self.x.rank or self.y.dims[:2] != self.x.dims[:2]:
            raise InvalidDescriptor("y", self.y.dims, f"dims {self.x.dims[:2]} and the windows")
        for name, desc in (("x", self.x), ("y", self.y)):
            if any(d < 1 for d in desc.dims[2:]):
                raise InvalidDescriptor(name, desc.dims, "1 or more on every spatial axis")
        check_same_data(self.x, {"y": self.y}, dims=False)
        self.check_outputs()

    @property
    def operands(self) -> tuple[Operand, ...]:
        if self.direction == "adaptive_forward":
            return (Operand("x", self.x), Operand("y", self.y, "out"))
        return (Operand("dy", self.y), Operand("dx", self.x, "out"))

    @property
    def flops(self) -> int:
        return self.y.size * self.reduction_length

    @property
    def reduction_length(self) -> int:
        """Elements of the largest window."""
        return math.prod(m.index.shape[1] for m in self.maps)

    @property
    def maps(self) -> tuple[WindowMap, ...]:
        """The windows along each spatial axis."""
        return tuple(WindowMap.adaptive(h, p) for h, p in zip(self.x.dims[2:], self.y.dims[2:]))

    def compute(self, arrays: Arrays) -> dict[str, Array]:
        if self.direction == "adaptive_forward":
            return {"y": average(arrays["x"], self.maps, include_padding=False)}
        return {"dx": spread_average(arrays["dy"], self.maps, False, self.x.dims)}

    def fields(self) -> str:
        default = LOGICAL_ORDERS[self.x.rank]
        line = f"{image_text(self.x.dims)} {self.x.dtype}"
        line += " output=" + "x".join(map(str, self.y.dims[2:]))
        return line + desc_option("x", self.x, default) + desc_option("y", self.y, default)

    @classmethod
    def from_fields(cls, direction: str, fields: Fields) -> AdaptivePoolingProblem:
        found = parse_shape(fields.shape, set("ncdhw"))
        # The shape names no window: its letters are filled in and not used.
        x = parse_windows(fields.shape, {"t": "1", "r": "1", "s": "1", **found}).x
        y = (*x[:2], *parse_dims(fields.get("output", "1")))
        layout, dtype = fields.layout(len(x)), fields.dtype()
        return cls(
            direction, fields.desc("x", x, dtype, layout), fields.desc("y", y, dtype, layout)
        )


ADAPTIVE_DIRECTIONS = ("adaptive_forward", "adaptive_backward")


def adaptive_average_problem(
    direction: str, x: TensorDesc, y: TensorDesc
) -> PoolingProblem | AdaptivePoolingProblem:
    """Adaptive average pooling ("forward" or "backward") of x to the size of y: an ordinary
    pooling where the windows come out equal, which every backend has kernels for."""
    problem = AdaptivePoolingProblem(f"adaptive_{direction}", x, y)
    sizes = tuple(zip(x.dims[2:], y.dims[2:]))
    if any(h % p for h, p in sizes):
        return problem
    window = tuple(h // p for h, p in sizes)
    pool = PoolingDesc.of("average_exclude_padding", window, len(window))
    return PoolingProblem(direction, x, y, pool)


def problem_from_fields(direction: str, fields: Fields) -> PoolingProblem | AdaptivePoolingProblem:
    """The problem of a `pooling DIRECTION ...` line."""
    kind = AdaptivePoolingProblem if direction in ADAPTIVE_DIRECTIONS else PoolingProblem
    return kind.from_fields(direction, fields)
