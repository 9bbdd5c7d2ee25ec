"""InnerProduct and Embed: layers that multiply by a learned matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from bedstone.frameworks.caffe.blob import Blob
from bedstone.frameworks.caffe.fillers import fill
from bedstone.frameworks.caffe.layer import Layer
from bedstone.frameworks.caffe.registry import register


@register("InnerProduct")
class InnerProduct(Layer):
    """y = x W^T + bias over everything from `axis` on: (..., num_output)."""

    host_only = None

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        param = self.param.inner_product_param
        if param.num_output < 1:
            raise self.wrong("num_output", param.num_output, "1 or more")
        self.axis = self.axis_of(param.axis, len(bottom[0].shape))
        self.inputs = math.prod(bottom[0].shape[self.axis :])
        self.transposed = param.transpose
        shape = (param.num_output, self.inputs)
        weight = self.new_blob(shape[::-1] if self.transposed else shape)
        fill(weight.data, param.weight_filler, self.net.rng)
        self.blobs = [weight]
        if param.bias_term:
            bias = self.new_blob((param.num_output,))
            fill(bias.data, param.bias_filler, self.net.rng)
            self.blobs.append(bias)

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        shape = bottom[0].shape
        if math.prod(shape[self.axis :]) != self.inputs:
            expected = f"{self.inputs} elements from axis {self.axis} on"
            raise self.wrong("bottom's shape", shape, expected)
        top[0].reshape(*shape[: self.axis], self.param.inner_product_param.num_output)

    def _weight(self) -> np.ndarray:
        """(inputs, outputs)."""
        data = self.own[0].data
        return data if self.transposed else data.T

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        y = top[0].data.reshape(-1, top[0].shape[-1])
        x = bottom[0].data.reshape(len(y), -1)
        self.space.matmul(x, self._weight(), y, self.net.math)
        if len(self.blobs) > 1:
            y += self.own[1].data

    def backward(
        self, top: Sequence[Blob], propagate_down: Sequence[bool], bottom: Sequence[Blob]
    ) -> None:
        dy = top[0].diff.reshape(-1, top[0].shape[-1])
        x = bottom[0].data.reshape(len(dy), -1)
        if self.param_propagate[0]:
            first, second = (x, dy) if self.transposed else (dy, x)
            self.space.add_product(first.T, second, self.own[0].diff, self.net.math)
        if len(self.blobs) > 1 and self.param_propagate[1]:
            self.own[1].diff[...] += dy.sum(0)
        if propagate_down[0]:
            dx = bottom[0].diff.reshape(len(dy), -1)
            self.space.matmul(dy, self._weight().T, dx, self.net.math)


@register("Embed")
class Embed(Layer):
    """The row of a learned table that each (integer) element of the bottom names, plus a bias."""

    no_gradient = (0,)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        param = self.param.embed_param
        if param.num_output < 1 or param.input_dim < 1:
            given = (param.num_output, param.input_dim)
            raise self.wrong("num_output, input_dim", given, "1 or more")
        table = self.new_blob((param.input_dim, param.num_output))
        fill(table.data, param.weight_filler, self.net.rng)
        self.blobs = [table]
        if param.bias_term:
            bias = self.new_blob((param.num_output,))
            fill(bias.data, param.bias_filler, self.net.rng)
            self.blobs.append(bias)

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        top[0].reshape(*bottom[0].shape, self.param.embed_param.num_output)

    def _rows(self, bottom: Blob) -> np.ndarray:
        rows = bottom.data.astype(np.int64)
        size = self.blobs[0].shape[0]
        wrong = (rows != bottom.data) | (rows < 0) | (rows >= size)
        if wrong.any():
            value = float(bottom.data[wrong][0])
            raise self.wrong("bottom", value, f"whole numbers from 0 to {size - 1}")
        return rows

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        top[0].data[...] = self.blobs[0].data[self._rows(bottom[0])]
        if len(self.blobs) > 1:
            top[0].data[...] += self.blobs[1].data

    def backward(
        self, top: Sequence[Blob], propagate_down: Sequence[bool], bottom: Sequence[Blob]
    ) -> None:
        dy = top[0].diff
        if self.param_propagate[0]:
            np.add.at(self.blobs[0].diff, self._rows(bottom[0]), dy)
        if len(self.blobs) > 1 and self.param_propagate[1]:
            self.blobs[1].diff[...] += dy.reshape(-1, dy.shape[-1]).sum(0)
