"""Convolution and Deconvolution: groups, dilation, any number of spatial axes.

Natively one image at a time is lowered to a matrix (im2col) and multiplied by the filters, in
groups, as Caffe does on the CPU; col2im is the way back. Deconvolution exchanges the roles of
forward and backward.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bedstone import (
    BiasGradientProblem,
    ConvolutionDesc,
    ConvolutionProblem,
    Epilogue,
    TensorOpProblem,
)
from bedstone.frameworks.caffe.blob import Blob
from bedstone.frameworks.caffe.engines import Kernel
from bedstone.frameworks.caffe.fillers import fill
from bedstone.frameworks.caffe.layer import Layer
from bedstone.frameworks.caffe.registry import register

MOST_AXES = 3  # of a plan; beyond it the native path serves


class Lowering:
    """im2col and col2im of one geometry, for one image at a time.

    image  (C, spatial...);  the matrix has C * taps rows and as many columns as output pixels
    """

    def __init__(
        self, channels: int, size: Sequence[int], window: Sequence[int], pad: Sequence[int],
        stride: Sequence[int], dilation: Sequence[int], out: Sequence[int], dtype: Any, xp: Any,
    ) -> None:  # fmt: skip
        self.channels, self.out = channels, tuple(out)
        self.size, self.pad = tuple(size), tuple(pad)
        self.window, self.stride, self.dilation = tuple(window), tuple(stride), tuple(dilation)
        plain = not any(pad) and all(u == 1 for u in stride)
        self.flat = plain and all(r == 1 for r in window)  # a 1x1 filter: the image is the matrix
        if not self.flat:
            padded = [n + 2 * p for n, p in zip(size, pad)]
            self.xp, self.image = xp, xp.zeros((channels, *padded), dtype)
            self.columns = xp.empty((channels, *window, *out), dtype)

    def _taps(self) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
        for tap in itertools.product(*map(range, self.window)):
            yield (
                tap,
                tuple(
                    slice(t * d, t * d + (q - 1) * u + 1, u)
                    for t, d, u, q in zip(tap, self.dilation, self.stride, self.out)
                ),
            )

    def _inside(self) -> tuple[slice, ...]:
        return tuple(slice(p, p + n) for p, n in zip(self.pad, self.size))

    def lower(self, image: np.ndarray) -> np.ndarray:
        """The matrix of an image (the buffer of this object, or the image itself)."""
        if self.flat:
            return image.reshape(self.channels, -1)
        self.image[(slice(None), *self._inside())] = image
        for tap, where in self._taps():
            self.columns[(slice(None), *tap)] = self.image[(slice(None), *where)]
        return self.columns.reshape(-1, math.prod(self.out))

    def matrix(self, image: np.ndarray) -> np.ndarray:
        """Where to write a matrix that `raise_to` is to add up: as for `lower`."""
        return (image if self.flat else self.columns).reshape(-1, math.prod(self.out))

    def raise_to(self, image: np.ndarray) -> None:
        """image = the sum of what the matrix holds of each of its elements."""
        if self.flat:
            return
        total = self.xp.zeros_like(self.image)
        for tap, where in self._taps():
            total[(slice(None), *where)] += self.columns[(slice(None), *tap)]
        image[...] = total[(slice(None), *self._inside())]


class Convolving(Layer):
    """What both layers share. `image` is the convolution's input side, `product` its output side:
    bottom and top of Convolution, top and bottom of Deconvolution."""

    bottoms = (1, None)
    tops = (1, None)
    host_only = None
    transposed = False

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        param = self.param.convolution_param
        if param.axis not in (1, 1 - len(bottom[0].shape)):
            raise self.wrong("axis", param.axis, "1: channels after the images")
        if len(bottom) != len(top):
            raise self.wrong("number of tops", len(top), f"{len(bottom)}, as many as bottoms")
        axes = len(bottom[0].shape) - 2
        if axes < 1:
            raise self.wrong("bottom's shape", bottom[0].shape, "N, C and spatial extents")
        self.axes = axes
        self.window = self._per_axis("kernel_size", "kernel_h", "kernel_w", None)
        self.stride = self._per_axis("stride", "stride_h", "stride_w", 1)
        self.pad = self._per_axis("pad", "pad_h", "pad_w", 0)
        self.dilation = self._per_axis("dilation", None, None, 1)
        for field, values, least in (("kernel_size", self.window, 1), ("stride", self.stride, 1),
                                     ("dilation", self.dilation, 1)):  # fmt: skip
            if min(values) < least:
                raise self.wrong(field, values, f"{least} or more")
        channels, self.outputs, self.group = bottom[0].shape[1], param.num_output, param.group
        if self.outputs < 1:
            raise self.wrong("num_output", self.outputs, "1 or more")
        if self.group < 1 or channels % self.group or self.outputs % self.group:
            expected = f"a divisor of {channels} channels and {self.outputs} outputs"
            raise self.wrong("group", self.group, expected)
        first, second = channels, self.outputs
        if not self.transposed:
            first, second = second, first
        weight = self.new_blob((first, second // self.group, *self.window))
        fill(weight.data, param.weight_filler, self.net.rng)
        self.blobs = [weight]
        self.bias = param.bias_term
        if self.bias:
            bias = self.new_blob((self.outputs,))
            fill(bias.data, param.bias_filler, self.net.rng)
            self.blobs.append(bias)
        self.on_bedstone = self.net.engines.wanted(self, param)
        if self.on_bedstone and axes > MOST_AXES:
            self.net.engines.fall_back(self, "all", f"{axes} spatial axes")
            self.on_bedstone = False

    def _per_axis(
        self, field: str, height: str | None, width: str | None, default: int | None
    ) -> tuple[int, ...]:
        param = self.param.convolution_param
        values = list(getattr(param, field))
        if height and width and (param.HasField(height) or param.HasField(width)):
            if values or self.axes != 2:
                raise self.wrong(field, values, f"either {field}, or {height} and {width} in 2-D")
            values = [getattr(param, height), getattr(param, width)]
        if not values and default is not None:
            values = [default]
        if len(values) not in (1, self.axes):
            raise self.wrong(field, values, f"one number, or {self.axes}")
        return tuple(values) * (self.axes if len(values) == 1 else 1)

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        self.same_shape(bottom)
        shape = bottom[0].shape
        wanted = (
            self.blobs[0].shape[0] if self.transposed else (self.blobs[0].shape[1] * self.group)
        )
        if len(shape) != self.axes + 2 or shape[1] != wanted:
            expected = f"(N, {wanted}, {self.axes} spatial extents)"
            raise self.wrong("bottom's shape", shape, expected)
        sizes = []
        for n, r, u, p, d in zip(shape[2:], self.window, self.stride, self.pad, self.dilation):
            reach = d * (r - 1) + 1
            size = u * (n - 1) + reach - 2 * p if self.transposed else (n + 2 * p - reach) // u + 1
            sizes.append(size)
        if min(sizes) < 1:
            expected = f"a window of {self.window} with pad {self.pad} that fits"
            raise self.wrong("bottom's shape", shape, expected)
        for blob in top:
            blob.reshape(shape[0], self.outputs, *sizes)
        self._kernels: dict[str, Kernel] = {}
        image, product = (top, bottom) if self.transposed else (bottom, top)
        self._image, self._product = image[0].shape, product[0].shape
        if self.on_bedstone:
            self._plan()
        if len(self._kernels) < 3 + self.bias:
            geometry = (self.window, self.pad, self.stride, self.dilation)
            sizes = (self._image[1], self._image[2:], *geometry, self._product[2:])
            self._lowering = Lowering(*sizes, self.dtype, self.xp)

    def _plan(self) -> None:
        conv = ConvolutionDesc.of(self.axes, self.pad, self.stride, self.dilation, self.group)
        x, y, w = (
            self.packed(shape) for shape in (self._image, self._product, self.blobs[0].shape)
        )
        bias = self.bias and not self.transposed
        mode = self.net.math
        problems: dict[str, Any] = {
            "forward": ConvolutionProblem("forward", x, w, y, conv, mode, epilogue=Epilogue(bias)),
            "data": ConvolutionProblem("backward_data", x, w, y, conv, mode),
            "filter": ConvolutionProblem("backward_filter", x, w, y, conv, mode),
        }
        if self.bias:
            top = x if self.transposed else y
            problems["bias"] = BiasGradientProblem(top, self.packed((top.dims[1],)))
        if self.bias and self.transposed:
            ones = (1,) * self.axes
            row = self.packed((1, self.outputs, *ones))
            problems["add"] = TensorOpProblem("add", x, row)
        for name, problem in problems.items():
            kernel = self.net.engines.kernel(self, name, problem)
            if kernel is not None:
                self._kernels[name] = kernel

    # The convolution's four products, on bedstone or natively -------------------------------------

    def _multiply(self, a: Any, b: Any, out: Any) -> None:
        """out = a b, natively."""
        self.space.matmul(a, b, out, self.net.math)

    def _convolve(self, image: np.ndarray, product: np.ndarray, bias: bool) -> None:
        """product = conv(image, w) [+ bias]."""
        weight = self.own[0].data
        if "forward" in self._kernels:
            given = [self.own[1].data] if self.bias and not self.transposed else []
            self._kernels["forward"](image, weight, *given, product)
            return
        groups = weight.reshape(self.group, -1, math.prod(weight.shape[1:]))
        for x, y in zip(image, product):
            columns = self._lowering.lower(x).reshape(self.group, groups.shape[2], -1)
            self._multiply(groups, columns, y.reshape(self.group, groups.shape[1], -1))
        if bias:
            product += self.own[1].data.reshape(-1, *(1,) * self.axes)

    def _convolve_back(self, product: np.ndarray, image: np.ndarray) -> None:
        """image = the transposed convolution of product by w."""
        weight = self.own[0].data
        if "data" in self._kernels:
            self._kernels["data"](weight, product, image)
            return
        groups = weight.reshape(self.group, -1, math.prod(weight.shape[1:]))
        for y, x in zip(product, image):
            rows = y.reshape(self.group, groups.shape[1], -1)
            columns = self._lowering.matrix(x).reshape(self.group, groups.shape[2], -1)
            self._multiply(self.xp.swapaxes(groups, 1, 2), rows, columns)
            self._lowering.raise_to(x)

    def _filter_gradient(self, image: np.ndarray, product: np.ndarray) -> None:
        """The weights' diff += sum over images and pixels of product * image."""
        diff = self.own[0].diff
        if "filter" in self._kernels:
            self._kernels["filter"](image, product, diff, beta=1.0)
            return
        groups = diff.reshape(self.group, -1, math.prod(diff.shape[1:]))
        part = self.xp.empty_like(groups)
        for x, y in zip(image, product):
            columns = self._lowering.lower(x).reshape(self.group, groups.shape[2], -1)
            rows = y.reshape(self.group, groups.shape[1], -1)
            self._multiply(rows, self.xp.swapaxes(columns, 1, 2), part)
            groups += part

    def _bias_gradient(self, dy: np.ndarray) -> None:
        diff = self.own[1].diff
        if "bias" in self._kernels:
            self._kernels["bias"](dy, diff, beta=1.0)
        else:
            diff += dy.sum((0, *range(2, dy.ndim)))


@register("Convolution")
class Convolution(Convolving):
    """y = conv(x, w) + bias, for each pair of bottom and top."""

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        for x, y in zip(bottom, top):
            self._convolve(x.data, y.data, self.bias)

    def backward(
        self, top: Sequence[Blob], propagate_down: Sequence[bool], bottom: Sequence[Blob]
    ) -> None:
        for y, down, x in zip(top, propagate_down, bottom):
            if self.bias and self.param_propagate[1]:
                self._bias_gradient(y.diff)
            if self.param_propagate[0]:
                self._filter_gradient(x.data, y.diff)
            if down:
                self._convolve_back(y.diff, x.diff)


@register("Deconvolution")
class Deconvolution(Convolving):
    """The transposed convolution, with a bias."""

    transposed = True

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        for x, y in zip(bottom, top):
            self._convolve_back(x.data, y.data)
            if self.bias and "add" in self._kernels:
                self._kernels["add"](self.own[1].data, y.data, beta=1.0)
            elif self.bias:
                y.data[...] += self.own[1].data.reshape(-1, *(1,) * self.axes)

    def backward(
        self, top: Sequence[Blob], propagate_down: Sequence[bool], bottom: Sequence[Blob]
    ) -> None:
        for y, down, x in zip(top, propagate_down, bottom):
            if self.bias and self.param_propagate[1]:
                self._bias_gradient(y.diff)
            if self.param_propagate[0]:
                self._filter_gradient(y.diff, x.data)
            if down:
                self._convolve(y.diff, x.diff, False)
