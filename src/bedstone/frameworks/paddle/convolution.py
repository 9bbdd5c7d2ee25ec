"""PaddlePaddle's convolutions: conv2d, depthwise_conv2d, conv3d and their transposes.

A transposed convolution is the data gradient of a convolution, and its own data gradient is the
forward one; the filter gradient serves both with the two images exchanged. Channels-last images
are described by their strides; filters are (K, C/groups, ...) in either layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import paddle
from paddle import Tensor

from bedstone import ConvolutionDesc, ConvolutionProblem, TensorDesc
from bedstone.frameworks.paddle.operators import Call
from bedstone.frameworks.paddle.plans import Native, Recipe, launch

# Elements of the image from which bedstone's kernels are the faster ones (measured against
# PaddlePaddle 3.3 with two threads on an AVX2 machine); its depthwise kernel has no overhead.
LEAST, LEAST_DEPTHWISE = 1 << 12, 1 << 14
SMALL = "PaddlePaddle's kernel is as fast for a tensor so small"

LAST = ("NHWC", "NDHWC")
FIRST = ("NCHW", "NCDHW", "AnyLayout")

Ints = tuple[int, ...]


def integers(name: str, values: Any) -> Ints:
    """`values` as a tuple of integers. Raises Native for anything else (such as tensors)."""
    numbers = tuple(values)
    if not all(type(v) is int for v in numbers):
        raise Native(f"{name} given as something other than integers")
    return numbers


def is_channels_last(data_format: str) -> bool:
    """Raises Native for a name that is no layout."""
    if data_format not in (*LAST, *FIRST):
        raise Native(f"data_format {data_format}")
    return data_format in LAST


def channels_second(desc: TensorDesc, last: bool) -> TensorDesc:
    """The descriptor as N, C, spatial, of a tensor that PaddlePaddle may order N, spatial, C."""
    if not last:
        return desc
    order = (0, desc.rank - 1, *range(1, desc.rank - 1))
    return TensorDesc(
        tuple(desc.dims[a] for a in order), tuple(desc.strides[a] for a in order), desc.dtype
    )


def paddle_dims(dims: Ints, last: bool) -> Ints:
    """N, C, spatial in PaddlePaddle's order."""
    return (dims[0], *dims[2:], dims[1]) if last else dims


def result_desc(dims: Ints, like: TensorDesc, last: bool) -> TensorDesc:
    """A new tensor of dims N, C, spatial: row-major in PaddlePaddle's order."""
    return channels_second(TensorDesc.packed(paddle_dims(dims, last), like.dtype), last)


def padding_pairs(
    padding: Ints, algorithm: str, sizes: Ints, window: Ints, stride: Ints
) -> tuple[tuple[int, int], ...]:
    """(low, high) an axis. SAME gives ceil(size / stride) outputs, the odd element at the end."""
    if algorithm == "VALID":
        return ((0, 0),) * len(sizes)
    if algorithm == "SAME":
        totals = [max((-(-h // u) - 1) * u + r - h, 0) for h, r, u in zip(sizes, window, stride)]
        return tuple((total // 2, total - total // 2) for total in totals)
    if algorithm != "EXPLICIT":
        raise Native(f"padding_algorithm {algorithm}")
    if len(padding) == len(sizes):
        return tuple((p, p) for p in padding)
    return tuple(zip(padding[0::2], padding[1::2]))


@dataclass(frozen=True)
class Windows:
    """The attributes of a call."""

    stride: Ints
    padding: Ints
    algorithm: str
    dilation: Ints
    groups: int
    last: bool

    def desc(self, sizes: Ints, window: Ints) -> ConvolutionDesc:
        """For images of these spatial sizes (a transposed convolution's are its input's)."""
        pads = padding_pairs(self.padding, self.algorithm, sizes, window, self.stride)
        # SAME padding takes no dilation: PaddlePaddle resets it.
        dilation = (1,) * len(sizes) if self.algorithm == "SAME" else self.dilation
        return ConvolutionDesc.of(len(sizes), pads, self.stride, dilation, self.groups)


def _forward(x: TensorDesc, w: TensorDesc, *attributes: Any) -> Recipe:
    how = Windows(*attributes)
    x = channels_second(x, how.last)
    conv = how.desc(x.dims[2:], w.dims[2:])
    dims = conv.output_dims(x.dims, w.dims)
    problem = ConvolutionProblem("forward", x, w, result_desc(dims, x, how.last), conv)
    return Recipe(problem, ((paddle_dims(dims, how.last), str(x.dtype)),))


def _data(w: TensorDesc, dy: TensorDesc, dims: Ints, *attributes: Any) -> Recipe:
    """dims: of dx, in PaddlePaddle's order."""
    how = Windows(*attributes)
    dx = channels_second(TensorDesc.packed(dims, dy.dtype), how.last)
    conv = how.desc(dx.dims[2:], w.dims[2:])
    problem = ConvolutionProblem("backward_data", dx, w, channels_second(dy, how.last), conv)
    return Recipe(problem, ((dims, str(dy.dtype)),))


def _filter(x: TensorDesc, dy: TensorDesc, dims: Ints, *attributes: Any) -> Recipe:
    how = Windows(*attributes)
    x, dw = channels_second(x, how.last), TensorDesc.packed(dims, dy.dtype)
    conv = how.desc(x.dims[2:], dims[2:])
    problem = ConvolutionProblem("backward_filter", x, dw, channels_second(dy, how.last), conv)
    return Recipe(problem, ((dims, str(dy.dtype)),))


class Convolution(Call):
    """strides, paddings, padding_algorithm, dilations, groups, data_format; with the bias of
    nn.Conv2D and nn.Conv3D in the same kernel"""

    names = ("conv2d",)
    leading = 2

    @classmethod
    def slower(cls, name: str, x: Tensor, *rest: Any) -> str | None:
        least = LEAST_DEPTHWISE if name == "depthwise_conv2d" else LEAST
        return SMALL if math.prod(x.shape) < least else None

    def understand(self, *attributes: Any) -> None:
        stride, padding, algorithm, dilation, groups, data_format = attributes
        self.how = (
            integers("strides", stride),
            integers("paddings", padding),
            algorithm,
            integers("dilations", dilation),
            groups,
            is_channels_last(data_format),
        )

    def forward(self) -> tuple[Any, Sequence[Tensor]]:
        x, w = self.tensors
        (y,) = self.compute(_forward, (x, w), self.how)
        return y, (x, w)

    def gradient(self, index: int, saved: Sequence[Tensor], dy: Tensor) -> Tensor:
        x, w = saved
        direction, make, operands = (
            ("backward_filter", _filter, (x, dy)) if index else ("backward_data", _data, (w, dy))
        )
        settings = (tuple(saved[index].shape), *self.how)
        return launch((self.name, direction), make, operands, settings)[0]

    def native_gradient(self, index: int, saved: Sequence[Tensor], dy: Tensor) -> Tensor:
        gradient = getattr(paddle._C_ops, f"{self.name}_grad")
        return gradient(*saved, dy, *self.rest)[index]


class GroupsFirst(Convolution):
    """The same with groups before dilations."""

    names = ("depthwise_conv2d", "conv3d")

    def understand(self, *attributes: Any) -> None:
        stride, padding, algorithm, groups, dilation, data_format = attributes
        super().understand(stride, padding, algorithm, dilation, groups, data_format)


def _transposed(w: TensorDesc, x: TensorDesc, extra: Ints, given: Ints, *attributes: Any) -> Recipe:
    """The result's size is the smallest that convolves to x's, plus `extra`; or it is `given`."""
    how = Windows(*attributes)
    x = channels_second(x, how.last)
    conv = how.desc(x.dims[2:], w.dims[2:])
    rows = zip(x.dims[2:], w.dims[2:], conv.padding, conv.stride, conv.dilation)
    sizes = tuple((h - 1) * u - sum(pad) + (r - 1) * step + 1 for h, r, pad, u, step in rows)
    if given:
        sizes = given
    elif extra:
        sizes = tuple(size + more for size, more in zip(sizes, extra))
    dims = (x.dims[0], w.dims[1] * how.groups, *sizes)
    y = result_desc(dims, x, how.last)
    problem = ConvolutionProblem("backward_data", y, w, x, conv)
    return Recipe(problem, ((paddle_dims(dims, how.last), str(x.dtype)),))


def _transposed_data(dy: TensorDesc, w: TensorDesc, dims: Ints, *attributes: Any) -> Recipe:
    """dims: of dx, the transposed convolution's input, in PaddlePaddle's order."""
    how = Windows(*attributes)
    dx = channels_second(TensorDesc.packed(dims, dy.dtype), how.last)
    conv = how.desc(dx.dims[2:], w.dims[2:])
    problem = ConvolutionProblem("forward", channels_second(dy, how.last), w, dx, conv)
    return Recipe(problem, ((dims, str(dy.dtype)),))


def _transposed_filter(dy: TensorDesc, x: TensorDesc, dims: Ints, *attributes: Any) -> Recipe:
    how = Windows(*attributes)
    dy, x = channels_second(dy, how.last), channels_second(x, how.last)
    conv, dw = how.desc(x.dims[2:], dims[2:]), TensorDesc.packed(dims, dy.dtype)
    problem = ConvolutionProblem("backward_filter", dy, dw, x, conv)
    return Recipe(problem, ((dims, str(dy.dtype)),))


class Transposed(Convolution):
    """strides, paddings, output_padding, output_size, padding_algorithm, groups, dilations,
    data_format"""

    names = ("conv2d_transpose", "depthwise_conv2d_transpose", "conv3d_transpose")

    def understand(self, *attributes: Any) -> None:
        stride, padding, extra, given, algorithm, groups, dilation, data_format = attributes
        self.extra = integers("output_padding", extra or ())
        self.given = () if given is None else integers("output_size", given)
        self.how = (
            integers("strides", stride),
            integers("paddings", padding),
            algorithm,
            integers("dilations", dilation),
            groups,
            is_channels_last(data_format),
        )

    def forward(self) -> tuple[Any, Sequence[Tensor]]:
        x, w = self.tensors
        settings = (self.extra, self.given, *self.how)
        (y,) = self.compute(_transposed, (w, x), settings)
        return y, (x, w)

    def gradient(self, index: int, saved: Sequence[Tensor], dy: Tensor) -> Tensor:
        x, w = saved
        direction, make, operands = (
            ("backward_filter", _transposed_filter, (dy, x))
            if index
            else ("backward_data", _transposed_data, (dy, w))
        )
        settings = (tuple(saved[index].shape), *self.how)
        return launch((self.name, direction), make, operands, settings)[0]
