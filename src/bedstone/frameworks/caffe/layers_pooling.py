"""Pooling: maximum (with its indices as a second top), average, stochastic; sizes by Caffe's
ceiling rule.

Stochastic pooling draws an element of each window with the probability of its share of the sum;
in testing it takes the mean weighted by these shares (Zeiler and Fergus, arXiv 1301.3557). It is
computed natively, as in Caffe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bedstone import PoolingDesc, PoolingProblem
from bedstone.frameworks.caffe import schema
from bedstone.frameworks.caffe.blob import Blob
from bedstone.frameworks.caffe.layer import Layer
from bedstone.frameworks.caffe.native_pooling import Windows
from bedstone.frameworks.caffe.registry import register


def pooled_size(n: int, window: int, stride: int, pad: int, ceil: bool) -> int:
    """Caffe's rule: the last window may overrun the input, but must not begin beyond it."""
    room = n + 2 * pad - window
    size = (room + (stride - 1 if ceil else 0)) // stride + 1
    if ceil and (size - 1) * stride >= n + pad:
        size -= 1
    return size


@register("Pooling")
class Pooling(Layer):
    """Two spatial axes."""

    tops = (1, 2)
    host_only = None

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        param = self.param.pooling_param
        self.method = schema.enum_name(param, "pool")
        self.ceil = schema.enum_name(param, "round_mode") == "CEIL"
        if param.global_pooling:
            if param.HasField("kernel_size") or param.HasField("kernel_h"):
                raise self.wrong("kernel_size", param.kernel_size, "none, with global_pooling")
            self.window = (0, 0)
        else:
            self.window = self._pair("kernel_size", "kernel_h", "kernel_w", param)
        self.stride = self._pair("stride", "stride_h", "stride_w", param)
        self.pad = self._pair("pad", "pad_h", "pad_w", param)
        if min(self.stride) < 1 or (not param.global_pooling and min(self.window) < 1):
            raise self.wrong("kernel_size, stride", (self.window, self.stride), "1 or more")
        if param.global_pooling and (any(self.pad) or self.stride != (1, 1)):
            raise self.wrong("pad, stride", (self.pad, self.stride), "0 and 1 with global_pooling")
        if not param.global_pooling and any(p >= r for p, r in zip(self.pad, self.window)):
            raise self.wrong("pad", self.pad, f"less than the window, {self.window}")
        if self.method == "STOCHASTIC" and any(self.pad):
            raise self.wrong("pad", self.pad, "0 with stochastic pooling")
        if len(top) == 2 and self.method != "MAX":
            raise self.wrong("number of tops", 2, f"1 with {self.method}: indices are of maxima")
        self.on_bedstone = self.net.engines.wanted(self, param)
        if self.on_bedstone and self.method == "STOCHASTIC":
            self.net.engines.fall_back(self, "all", "stochastic pooling")
            self.on_bedstone = False
        if not self.on_bedstone:
            self.host_only = "NumPy pools natively"

    def _pair(self, field: str, height: str, width: str, param: Any) -> tuple[int, int]:
        if param.HasField(height) or param.HasField(width):
            if param.HasField(field):
                raise self.wrong(field, getattr(param, field), f"none beside {height}, {width}")
            default = 1 if field == "stride" else 0
            found = [getattr(param, n) if param.HasField(n) else default for n in (height, width)]
            return found[0], found[1]
        return getattr(param, field), getattr(param, field)

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        shape = bottom[0].shape
        if len(shape) != 4:
            raise self.wrong("bottom's shape", shape, "(N, C, H, W)")
        if self.param.pooling_param.global_pooling:
            self.window = (shape[2], shape[3])
        geometry = zip(shape[2:], self.window, self.stride, self.pad)
        out = tuple(pooled_size(*numbers, self.ceil) for numbers in geometry)
        if min(out) < 1:
            raise self.wrong("bottom's shape", shape, f"room for a window of {self.window}")
        for blob in top:
            blob.reshape(*shape[:2], *out)
        self.indices = self.xp.zeros(top[0].shape, np.int64)
        self._forward = self._backward = None
        if self.on_bedstone:
            self._plan(shape, top[0].shape)
        if self._forward is None or self._backward is None:
            self._windows = Windows(shape[2:], out, self.window, self.stride, self.pad)

    def _plan(self, shape: tuple[int, ...], out: tuple[int, ...]) -> None:
        mode = "max" if self.method == "MAX" else "average_include_padding"
        pool = PoolingDesc.of(
            mode, self.window, 2, self.pad, self.stride, 1, "ceil" if self.ceil else "floor"
        )
        x, y = self.packed(shape), self.packed(out)
        indices = self.packed(out, "int64") if self.method == "MAX" else None
        engines = self.net.engines
        self._forward = engines.kernel(
            self, "forward", PoolingProblem("forward", x, y, pool, indices)
        )
        self._backward = engines.kernel(
            self, "backward", PoolingProblem("backward", x, y, pool, indices)
        )

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        x, y = bottom[0].data, top[0].data
        if self._forward is not None:
            self._forward(x, y, *([self.indices] if self.method == "MAX" else []))
        else:
            self._native(x, y, len(top) == 2)
        if len(top) == 2:
            top[1].data[...] = self.indices

    def _native(self, x: np.ndarray, y: np.ndarray, with_indices: bool) -> None:
        windows = self._windows
        if self.method == "AVE":
            windows.average(x, y)
        elif self.method == "STOCHASTIC" and self.phase == "TEST":
            windows.mean_by_share(x, y)
        elif self.method == "STOCHASTIC":
            windows.draw(x, y, self.net.rng.random(y.shape, np.float32), self.indices)
        else:
            self._located = self.phase == "TRAIN" or with_indices
            windows.maximum(x, y, self.indices if self._located else None)

    def backward(
        self, top: Sequence[Blob], propagate_down: Sequence[bool], bottom: Sequence[Blob]
    ) -> None:
        if not propagate_down[0]:
            return
        dy, dx = top[0].diff, bottom[0].diff
        if self._backward is not None:
            self._backward(*([self.indices] if self.method == "MAX" else []), dy, dx)
        elif self.method == "AVE":
            self._windows.spread_average(dy, dx)
        else:
            if self.method == "MAX" and not self._located:  # (rare: a gradient of a test network)
                self._windows.maximum(bottom[0].data, np.empty_like(dy), self.indices)
            self._windows.spread_maximum(self.indices, dy, dx)
