"""Convolution in 1, 2 and 3 spatial dimensions, forward and its three gradients.

    y[n,k,p,q] = sum_{c,r,s} w[k,c,r,s] * x[n, c, p*u + r*l - pad, q*v + s*l - pad]

for cross-correlation; `convolution` mode flips the filter. Source: Chetlur et al., "cuDNN:
Efficient Primitives for Deep Learning", arXiv 1410.0759, equations 1-3, extended by groups,
dilation and padding given per side. One index map serves all directions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from bedstone.spec import activation
from bedstone.spec.errors import InvalidDescriptor
from bedstone.spec.problem import (
    Array,
    Arrays,
    Fields,
    Operand,
    Problem,
    as_float64,
    desc_option,
    parse_dims,
    parse_shape,
)
from bedstone.spec.tensor import INT64_MAX, LOGICAL_ORDERS, TensorDesc, integer_tuple

DIRECTIONS = ("forward", "backward_data", "backward_filter", "backward_bias")
MODES = ("cross_correlation", "convolution")
MATH_MODES = ("ieee", "fast", "tf32", "bf16", "bf16x6", "bf16x3")
SPATIAL_RANKS = (1, 2, 3)

Pair = tuple[int, int]


def output_size(size: int, window: int, pad: Pair, stride: int, dilation: int) -> int:
    """Output length along one axis (the paper's f): floor((size + pads - extent) / stride) + 1."""
    extent = (window - 1) * dilation + 1
    return (size + pad[0] + pad[1] - extent) // stride + 1


def per_axis(argument: str, value: object, axes: int) -> tuple[int, ...]:
    """An int for all axes, or one int an axis."""
    if isinstance(value, (int, np.integer)):
        return (int(value),) * axes
    items = integer_tuple(argument, value)
    if len(items) == 1:
        return items * axes
    if len(items) != axes:
        raise InvalidDescriptor(argument, value, f"an integer, or {axes} of them")
    return items


def padding_pairs(argument: str, value: object, axes: int) -> tuple[Pair, ...]:
    """An int for all sides, one int an axis, or one (low, high) pair an axis."""
    if isinstance(value, (list, tuple)) and any(isinstance(v, (list, tuple)) for v in value):
        pairs = tuple(
            integer_tuple(argument, v) if isinstance(v, (list, tuple)) else per_axis(argument, v, 2)
            for v in value
        )
        if len(pairs) != axes or any(len(p) != 2 for p in pairs):
            raise InvalidDescriptor(argument, value, f"{axes} (low, high) pairs, one an axis")
        return tuple((p[0], p[1]) for p in pairs)
    return tuple((p, p) for p in per_axis(argument, value, axes))


def check_padded(x: tuple[int, ...], padding: tuple[Pair, ...]) -> None:
    """Raises InvalidDescriptor where positions in the padded input do not fit 64 bits."""
    if any(h + sum(pad) > INT64_MAX for h, pad in zip(x[2:], padding)):
        raise InvalidDescriptor("padding", padding, f"a padded input (x is {x}) that fits 64 bits")


@dataclass(frozen=True)
class ConvolutionDesc:
    """Padding, stride and dilation per spatial axis, groups and mode.

    padding  an int, one int an axis, or one (low, high) pair an axis; in elements, >= 0
    stride   an int or one an axis, >= 1 (the paper's u, v)
    dilation an int or one an axis, >= 1 (1 means none)
    groups   >= 1; depthwise is groups == C
    mode     "cross_correlation" (what networks call convolution) or "convolution" (flipped filter)
    axes     number of spatial axes, 1 to 3
    """

    padding: tuple[Pair, ...] = ((0, 0), (0, 0))
    stride: tuple[int, ...] = (1, 1)
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1
    mode: str = "cross_correlation"

    @classmethod
    def of(
        cls,
        axes: int,
        padding: object = 0,
        stride: object = 1,
        dilation: object = 1,
        groups: int = 1,
        mode: str = "cross_correlation",
    ) -> ConvolutionDesc:
        """The descriptor for `axes` spatial axes; single numbers are spread over the axes."""
        return cls(
            padding_pairs("padding", padding, axes),
            per_axis("stride", stride, axes),
            per_axis("dilation", dilation, axes),
            groups,
            mode,
        )

    def __post_init__(self) -> None:
        axes = len(self.stride)
        object.__setattr__(self, "stride", integer_tuple("stride", self.stride))
        object.__setattr__(self, "dilation", integer_tuple("dilation", self.dilation))
        object.__setattr__(self, "padding", padding_pairs("padding", self.padding, axes))
        if axes not in SPATIAL_RANKS:
            raise InvalidDescriptor("stride", self.stride, "1, 2 or 3 spatial axes")
        if len(self.dilation) != axes:
            raise InvalidDescriptor("dilation", self.dilation, f"{axes} values, as stride has")
        if any(p < 0 for pair in self.padding for p in pair):
            raise InvalidDescriptor("padding", self.padding, "0 or more on every side")
        if any(s < 1 for s in self.stride):
            raise InvalidDescriptor("stride", self.stride, "1 or more on every axis")
        if any(d < 1 for d in self.dilation):
            raise InvalidDescriptor("dilation", self.dilation, "1 or more on every axis")
        if not isinstance(self.groups, int) or self.groups < 1:
            raise InvalidDescriptor("groups", self.groups, "an integer of 1 or more")
        if self.mode not in MODES:
            raise InvalidDescriptor("mode", self.mode, f"one of {MODES}")

    @property
    def axes(self) -> int:
        """Number of spatial axes."""
        return len(self.stride)

    def output_dims(self, x: tuple[int, ...], w: tuple[int, ...]) -> tuple[int, ...]:
        """Dims of y for images x (N, C, spatial...) and filters w (K, C/groups, spatial...).

        Raises InvalidDescriptor where ranks, channels or groups do not match or the window is
        larger than the padded input.
        """
        rank = self.axes + 2
        if len(x) != rank:
            raise InvalidDescriptor("x", x, f"{rank} dims: N, C and {self.axes} spatial")
        if len(w) != rank:
            raise InvalidDescriptor("w", w, f"{rank} dims: K, C/groups and {self.axes} spatial")
        if x[1] % self.groups or w[0] % self.groups:
            raise InvalidDescriptor(
                "groups", self.groups, f"a divisor of C = {x[1]} and of K = {w[0]}"
            )
        if w[1] != x[1] // self.groups:
            raise InvalidDescriptor(
                "w", w, f"C/groups = {x[1] // self.groups} channels in its second dim (x is {x})"
            )
        if any(r < 1 for r in w[2:]):
            raise InvalidDescriptor("w", w, "a window of 1 or more on every axis")
        check_padded(x, self.padding)
        sizes = []
        for h, r, pad, u, step in zip(x[2:], w[2:], self.padding, self.stride, self.dilation):
            if h + sum(pad) < (r - 1) * step + 1:
                raise InvalidDescriptor(
                    "w", w, f"a window (dilated: {(r - 1) * step + 1}) no larger than the padded "
                    f"input, {h} + {pad[0]} + {pad[1]}"
                )  # fmt: skip
            sizes.append(output_size(h, r, pad, u, step))
        return (x[0], w[0], *sizes)


@dataclass(frozen=True)
class Epilogue:
    """What is done to alpha * conv + beta * y before it is stored: add bias[k], activate, then add
    `shift`, one number for all elements."""

    bias: bool = False
    activation: activation.ActivationDesc | None = None
    shift: float = 0.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.shift):
            raise InvalidDescriptor("shift", self.shift, "a finite number")

    def __bool__(self) -> bool:
        return self.bias or self.activation is not None or self.shift != 0.0


@dataclass(frozen=True)
class ConvolutionProblem(Problem):
    """One convolution call. x, w and y describe the image-, filter- and output-shaped tensors in
    every direction: in backward_data x is dx's descriptor and y is dy's.

    forward          y  = act(alpha * conv(x, w) + beta * y + bias) + shift
                                                                   operands x, w, [bias,] y
    backward_data    dx = alpha * conv^T(w, dy) + beta * dx           operands w, dy, dx
    backward_filter  dw = alpha * sum_{n,p,q} dy * x + beta * dw      operands x, dy, dw
    (backward_bias is `BiasGradientProblem`, which needs no x and no w.)
    """

    primitive: ClassVar[str] = "convolution"
    direction: str
    x: TensorDesc
    w: TensorDesc
    y: TensorDesc
    conv: ConvolutionDesc
    math: str = "ieee"
    deterministic: bool = True
    epilogue: Epilogue = field(default_factory=Epilogue)

    def __post_init__(self) -> None:
        if self.direction not in DIRECTIONS[:3]:
            raise InvalidDescriptor("direction", self.direction, f"one of {DIRECTIONS[:3]}")
        if self.math not in MATH_MODES:
            raise InvalidDescriptor("math", self.math, f"one of {MATH_MODES}")
        for name in ("w", "y"):
            if getattr(self, name).dtype is not self.x.dtype:
                raise InvalidDescriptor(
                    name, str(getattr(self, name).dtype), f"the dtype of x, {self.x.dtype}"
                )
        if not self.x.dtype.is_floating:
            raise InvalidDescriptor("x", str(self.x.dtype), "a floating-point dtype")
        expected = self.conv.output_dims(self.x.dims, self.w.dims)
        if self.y.dims != expected:
            raise InvalidDescriptor("y", self.y.dims, f"dims {expected} (from x, w and the conv)")
        if self.epilogue and self.direction != "forward":
            raise InvalidDescriptor("epilogue", self.epilogue, f"none in {self.direction}")
        self.check_outputs()

    @property
    def bias(self) -> TensorDesc:
        """The bias vector's descriptor: K packed elements."""
        return TensorDesc.packed((self.w.dims[0],), self.x.dtype)

    @property
    def operands(self) -> tuple[Operand, ...]:
        if self.direction == "forward":
            bias = (Operand("bias", self.bias),) if self.epilogue.bias else ()
            return (Operand("x", self.x), Operand("w", self.w), *bias, Operand("y", self.y, "out"))
        if self.direction == "backward_data":
            return (Operand("w", self.w), Operand("dy", self.y), Operand("dx", self.x, "out"))
        return (Operand("x", self.x), Operand("dy", self.y), Operand("dw", self.w, "out"))

    @property
    def flops(self) -> int:
        per_output = 2
        for d in self.w.dims[1:]:
            per_output *= d
        return self.y.size * per_output

    @property
    def reduction_length(self) -> int:
        """Number of products summed into one output element (padding counted)."""
        spatial = 1
        for d in self.w.dims[2:]:
            spatial *= d
        if self.direction == "forward":
            return self.w.dims[1] * spatial
        if self.direction == "backward_data":
            return self.w.dims[0] // self.conv.groups * spatial
        length = self.y.dims[0]
        for d in self.y.dims[2:]:
            length *= d
        return length

    def compute(self, arrays: Arrays) -> dict[str, Array]:
        return getattr(self, f"_{self.direction}")(arrays)  # type: ignore[no-any-return]

    def reference(self, arrays: Arrays, alpha: float = 1.0, beta: float = 0.0) -> dict[str, Array]:
        """As Problem.reference; forward then applies the epilogue."""
        out = super().reference(arrays, alpha, beta)
        if self.epilogue.bias:
            bias = as_float64(arrays["bias"]).reshape(1, -1, *(1,) * self.conv.axes)
            with np.errstate(all="ignore"):
                out["y"] = out["y"] + bias
        if self.epilogue.activation is not None:
            out["y"] = self.epilogue.activation.apply(out["y"])
        if self.epilogue.shift:
            out["y"] = out["y"] + self.epilogue.shift
        return out

    def taps(self) -> Iterator[tuple[tuple[int, ...], Any]]:
        """Every filter tap with the index of the padded image's pixels that it multiplies."""
        for tap in itertools.product(*(range(r) for r in self.w.dims[2:])):
            slices = []
            for t, r, p, u, step in zip(
                tap, self.w.dims[2:], self.y.dims[2:], self.conv.stride, self.conv.dilation
            ):
                first = (t if self.conv.mode == "cross_correlation" else r - 1 - t) * step
                slices.append(slice(first, first + (p - 1) * u + 1, u))
            yield tap, (..., *slices)

    def _padded(self, image: Array) -> Array:
        return np.pad(image, ((0, 0), (0, 0), *self.conv.padding))

    def _grouped(self, image: Array) -> Array:
        """(N, channels, ...) -> (N, groups, channels/groups, ...)."""
        g = self.conv.groups
        return image.reshape(image.shape[0], g, image.shape[1] // g, *image.shape[2:])

    def _grouped_filter(self, tap: tuple[int, ...], w: Array) -> Array:
        g = self.conv.groups
        index: Any = (slice(None), slice(None), *tap)
        taps: Array = w[index].reshape(g, w.shape[0] // g, w.shape[1])
        return taps

    def _forward(self, arrays: Arrays) -> dict[str, Array]:
        x, w = self._grouped(self._padded(arrays["x"])), arrays["w"]
        y = np.zeros(self._grouped(np.empty(self.y.dims)).shape)
        with np.errstate(all="ignore"):
            for tap, box in self.taps():
                y += np.einsum("gkc,ngc...->ngk...", self._grouped_filter(tap, w), x[box])
        return {"y": y.reshape(self.y.dims)}

    def _backward_data(self, arrays: Arrays) -> dict[str, Array]:
        dy, w = self._grouped(arrays["dy"]), arrays["w"]
        padded = [h + sum(pad) for h, pad in zip(self.x.dims[2:], self.conv.padding)]
        dx = self._grouped(np.zeros((*self.x.dims[:2], *padded)))
        with np.errstate(all="ignore"):
            for tap, box in self.taps():
                product = np.einsum("gkc,ngk...->ngc...", self._grouped_filter(tap, w), dy)
                dx[box] += product
        inside: Any = (
            ...,
            *(slice(pad[0], pad[0] + h) for h, pad in zip(self.x.dims[2:], self.conv.padding)),
        )
        return {"dx": dx.reshape(*self.x.dims[:2], *padded)[inside]}

    def _backward_filter(self, arrays: Arrays) -> dict[str, Array]:
        x, dy = self._grouped(self._padded(arrays["x"])), self._grouped(arrays["dy"])
        n, g, k = dy.shape[:3]
        dw = np.zeros((g, k, x.shape[2], *self.w.dims[2:]))
        points = int(np.prod(dy.shape[3:]))
        dy = dy.reshape(n, g, k, points)
        with np.errstate(all="ignore"):
            for tap, box in self.taps():
                pixels = x[box].reshape(n, g, x.shape[2], points)
                index: Any = (..., *tap)
                dw[index] = np.einsum("ngkp,ngcp->gkc", dy, pixels, optimize=True)
        return {"dw": dw.reshape(self.w.dims)}

    def fields(self) -> str:
        conv, default = self.conv, LOGICAL_ORDERS[self.x.rank]
        words = [shape_text(self.x.dims, self.w.dims, conv), str(self.x.dtype)]
        line = " ".join(words)
        for name in ("x", "w", "y"):
            line += desc_option(name, getattr(self, name), default)
        if conv.mode != "cross_correlation":
            line += f" mode={conv.mode}"
        if self.math != "ieee":
            line += f" math={self.math}"
        if not self.deterministic:
            line += " nondeterministic"
        if self.epilogue.bias:
            line += " bias"
        if self.epilogue.activation is not None:
            line += f" activation={self.epilogue.activation}"
        if self.epilogue.shift:
            line += f" shift={self.epilogue.shift!r}"
        return line

    @classmethod
    def from_fields(cls, direction: str, fields: Fields) -> ConvolutionProblem:
        x, w, conv = parse_convolution_shape(fields.shape, fields.get("mode", "cross_correlation"))
        default = fields.layout(len(x))
        dtype = fields.dtype()
        act = fields.options.get("activation")
        epilogue = Epilogue(
            "bias" in fields.flags,
            activation.parse_desc(act) if act else None,
            fields.number("shift", 0.0),
        )
        return cls(
            direction,
            fields.desc("x", x, dtype, default),
            fields.desc("w", w, dtype, default),
            fields.desc("y", conv.output_dims(x, w), dtype, default),
            conv,
            fields.get("math", "ieee"),
            "nondeterministic" not in fields.flags,
            epilogue,
        )


@dataclass(frozen=True)
class BiasGradientProblem(Problem):
    """dbias[k] = alpha * sum_{n,p,q} dy[n,k,p,q] + beta * dbias[k]; operands dy, dbias (K,)."""

    primitive: ClassVar[str] = "convolution"
    y: TensorDesc
    bias: TensorDesc
    direction: str = "backward_bias"
    deterministic: bool = True

    def __post_init__(self) -> None:
        if self.direction != "backward_bias":
            raise InvalidDescriptor("direction", self.direction, "'backward_bias'")
        if self.y.rank < 2:
            raise InvalidDescriptor("dy", self.y.dims, "2 or more dims: N, K, spatial")
        if self.bias.dims != (self.y.dims[1],):
            raise InvalidDescriptor("dbias", self.bias.dims, f"dims {(self.y.dims[1],)}")
        if self.bias.dtype is not self.y.dtype or not self.y.dtype.is_floating:
            raise InvalidDescriptor(
                "dbias", str(self.bias.dtype), f"the dtype of dy, {self.y.dtype}"
            )
        self.check_outputs()

    @property
    def operands(self) -> tuple[Operand, ...]:
        return (Operand("dy", self.y), Operand("dbias", self.bias, "out"))

    @property
    def flops(self) -> int:
        return self.y.size

    @property
    def reduction_length(self) -> int:
        """Number of terms summed into one output element."""
        return self.y.size // max(self.y.dims[1], 1)

    def compute(self, arrays: Arrays) -> dict[str, Array]:
        dy = arrays["dy"]
        return {"dbias": dy.sum(axis=tuple(a for a in range(dy.ndim) if a != 1))}

    def fields(self) -> str:
        line = "x".join(map(str, self.y.dims)) + f" {self.y.dtype}"
        line += desc_option("y", self.y, LOGICAL_ORDERS.get(self.y.rank))
        line += desc_option("bias", self.bias, None)
        return line if self.deterministic else line + " nondeterministic"

    @classmethod
    def from_fields(cls, direction: str, fields: Fields) -> BiasGradientProblem:
        dims = parse_dims(fields.shape)
        dtype = fields.dtype()
        y = fields.desc("y", dims, dtype, LOGICAL_ORDERS.get(len(dims)))
        bias = fields.desc("bias", dims[1:2], dtype, None)
        return cls(y, bias, deterministic="nondeterministic" not in fields.flags)


def convolution_problem(
    direction: str,
    x: tuple[int, ...],
    w: tuple[int, ...],
    *,
    dtype: object = "float32",
    layout: str | None = None,
    padding: object = 0,
    stride: object = 1,
    dilation: object = 1,
    groups: int = 1,
    mode: str = "cross_correlation",
    math: str = "ieee",
    deterministic: bool = True,
    epilogue: Epilogue | None = None,
) -> ConvolutionProblem:
    """The problem over packed tensors of x dims (N, C, spatial...) and w dims (K, C/groups,
    spatial...), all in one layout ("NCHW", "NHWC", ... or None for row-major)."""
    conv = ConvolutionDesc.of(len(x) - 2, padding, stride, dilation, groups, mode)
    y = conv.output_dims(tuple(x), tuple(w))
    xd, wd, yd = (TensorDesc.packed(dims, dtype, layout) for dims in (x, w, y))
    return ConvolutionProblem(
        direction, xd, wd, yd, conv, math, deterministic, epilogue or Epilogue()
    )


def _collapsed(prefix: str, axes: str, values: list[str], default: str) -> str:
    if all(v == default for v in values):
        return ""
    if len(set(values)) == 1:
        return prefix + values[0]
    return "".join(prefix + a + v for a, v in zip(axes, values))


def windows_text(
    window: tuple[int, ...],
    padding: tuple[Pair, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
) -> str:
    """The part of a shape word that describes a sliding window: [t] [r] s, then p(ad) u (stride)
    l (dilation) per axis (suffix d, h, w; none when all axes agree)."""
    axes = "dhw"[-len(window) :]
    text = "".join(a + str(d) for a, d in zip("trs"[-len(window) :], window))
    text += _collapsed("p", axes, [str(a) if a == b else f"{a}_{b}" for a, b in padding], "0")
    text += _collapsed("u", axes, [str(v) for v in stride], "1")
    return text + _collapsed("l", axes, [str(v) for v in dilation], "1")


def image_text(x: tuple[int, ...]) -> str:
    """The part of a shape word that describes images: n c [d] [h] w."""
    return f"n{x[0]}c{x[1]}" + "".join(a + str(d) for a, d in zip("dhw"[2 - len(x) :], x[2:]))


def shape_text(x: tuple[int, ...], w: tuple[int, ...], conv: ConvolutionDesc) -> str:
    """The shape word of a problem line: images, k, the filter's window and g(roups)."""
    window = windows_text(w[2:], conv.padding, conv.stride, conv.dilation)
    return f"{image_text(x)}k{w[0]}{window}" + (f"g{conv.groups}" if conv.groups != 1 else "")


WINDOW_KEYS = set("ncdhwtrs") | {prefix + axis for prefix in "pul" for axis in ("", *"dhw")}


@dataclass(frozen=True)
class WindowShape:
    """What the letters of a shape word say of images and of the window that slides over them."""

    x: tuple[int, ...]
    window: tuple[int, ...]
    padding: tuple[Pair, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]


def parse_windows(text: str, found: dict[str, str]) -> WindowShape:
    """h alone means h = w, r alone r = s, d and t make it 3-D, w without h 1-D."""
    if "c" not in found:
        raise InvalidDescriptor("problem", text, "a number for 'c'")
    spatial = "dhw" if "d" in found else ("hw" if "h" in found else "w")
    sizes = []
    for keys in (spatial, "trs"[-len(spatial) :]):
        row: list[int] = []
        for i, key in enumerate(keys):
            value = found.get(key, str(row[i - 1]) if i else None)
            if value is None:
                raise InvalidDescriptor("problem", text, f"a number for {key!r}")
            row.append(int(value))
        sizes.append(tuple(row))

    def values(prefix: str, default: str) -> list[str]:
        return [found.get(prefix + a, found.get(prefix, default)) for a in spatial]

    sides = [value.partition("_") for value in values("p", "0")]
    return WindowShape(
        (int(found.get("n", "1")), int(found["c"]), *sizes[0]),
        sizes[1],
        tuple((int(low), int(high or low)) for low, _, high in sides),
        tuple(int(v) for v in values("u", "1")),
        tuple(int(v) for v in values("l", "1")),
    )


def parse_convolution_shape(
    text: str, mode: str = "cross_correlation"
) -> tuple[tuple[int, ...], tuple[int, ...], ConvolutionDesc]:
    """(x dims, w dims, descriptor) of a shape word."""
    found = parse_shape(text, WINDOW_KEYS | {"k", "g"})
    if "k" not in found:
        raise InvalidDescriptor("problem", text, "a number for 'k'")
    shape, groups = parse_windows(text, found), int(found.get("g", "1"))
    conv = ConvolutionDesc(shape.padding, shape.stride, shape.dilation, groups, mode)
    return shape.x, (int(found["k"]), shape.x[1] // max(groups, 1), *shape.window), conv


def problem_from_fields(direction: str, fields: Fields) -> Problem:
    """The problem of a `convolution DIRECTION ...` line."""
    kind = BiasGradientProblem if direction == "backward_bias" else ConvolutionProblem
    return kind.from_fields(direction, fields)
