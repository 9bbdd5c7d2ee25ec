"""Pooling: maximum (with its indices as a second top), average, stochastic; sizes by Caffe's
ceiling rule.

Stochastic pooling draws an element of each window with the probability of its share of the sum;
in testing it takes the mean weighted by these shares (Zeiler and Fergus, arXiv 1301.3557). It is
computed natively, as in Caffe.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from bedstone import PoolingDesc, PoolingProblem
from bedstone.frameworks.caffe import schema
from bedstone.frameworks.caffe.blob import Blob
from bedstone.frameworks.caffe.layer import Layer
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
        self._out = out
        self.indices = np.zeros(top[0].shape, np.int64)
        self._forward = self._backward = None
        if self.on_bedstone:
            self._plan(shape, top[0].shape)

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
            {"MAX": self._maximum, "AVE": self._average, "STOCHASTIC": self._stochastic}[
                self.method
            ](x, y)
        if len(top) == 2:
            top[1].data[...] = self.indices

    def backward(
        self, top: Sequence[Blob], propagate_down: Sequence[bool], bottom: Sequence[Blob]
    ) -> None:
        if not propagate_down[0]:
            return
        dy, dx = top[0].diff, bottom[0].diff
        if self._backward is not None:
            self._backward(*([self.indices] if self.method == "MAX" else []), dy, dx)
        elif self.method == "AVE":
            self._spread_average(dy, dx)
        else:
            dx[...] = 0
            planes, flat = (
                self.indices.reshape(-1, self._out[0] * self._out[1]),
                dx.reshape(-1, dx.shape[2] * dx.shape[3]),
            )
            rows = np.arange(len(planes))[:, None]
            np.add.at(flat, (rows, planes), dy.reshape(planes.shape))

    # Natively ------------------------------------------------------------------------------------

    def _windows(self, x: np.ndarray, fill: float) -> np.ndarray:
        """(N, C, P, Q, R, S): every window of x, `fill` outside of it."""
        (r, s), (u, v), (p, q) = self.window, self.stride, self.pad
        high = [
            max(0, (o - 1) * step + k - n - a)
            for o, step, k, n, a in zip(self._out, self.stride, self.window, x.shape[2:], self.pad)
        ]
        padded = np.pad(x, ((0, 0), (0, 0), (p, high[0]), (q, high[1])), constant_values=fill)
        a, b, c, d = padded.strides
        return as_strided(
            padded, (*x.shape[:2], *self._out, r, s), (a, b, c * u, d * v, c, d), writeable=False
        )

    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows (P, R) and columns (Q, S) of the windows' elements."""
        return tuple(  # type: ignore[return-value]
            np.arange(o)[:, None] * u - p + np.arange(k)[None, :]
            for o, u, p, k in zip(self._out, self.stride, self.pad, self.window)
        )

    def _flat_place(self, where: np.ndarray, width: int) -> np.ndarray:
        """Indices within windows as indices within the plane."""
        rows, columns = self._places()
        h = rows[np.arange(self._out[0])[:, None], where // self.window[1]]
        w = columns[np.arange(self._out[1])[None, :], where % self.window[1]]
        return np.asarray(h * width + w)

    def _taps(self, x: np.ndarray, fill: float) -> Iterator[tuple[int, np.ndarray]]:
        """For every place in the window its number and, for all windows, the elements there."""
        (r, s), (u, v), (p, q) = self.window, self.stride, self.pad
        high = [
            max(0, (o - 1) * step + k - n - a)
            for o, step, k, n, a in zip(self._out, self.stride, self.window, x.shape[2:], self.pad)
        ]
        if any((p, q, *high)):
            x = np.pad(x, ((0, 0), (0, 0), (p, high[0]), (q, high[1])), constant_values=fill)
        for i, j in itertools.product(range(r), range(s)):
            rows = slice(i, i + (self._out[0] - 1) * u + 1, u)
            columns = slice(j, j + (self._out[1] - 1) * v + 1, v)
            yield i * s + j, x[:, :, rows, columns]

    def _maximum(self, x: np.ndarray, y: np.ndarray) -> None:
        where = np.zeros(y.shape, np.int16)
        y[...] = -np.inf
        for tap, part in self._taps(x, -np.inf):
            larger = part > y
            np.copyto(y, part, where=larger)
            np.copyto(where, np.int16(tap), where=larger)
        self.indices = self._flat_place(where, x.shape[3])

    def _counts(self, shape: tuple[int, ...]) -> np.ndarray:
        """Elements of each window, padding included up to the padded border."""
        sides = []
        for places, n, p in zip(self._places(), shape[2:], self.pad):
            sides.append((places < n + p).sum(1))
        return np.outer(*sides).astype(self.dtype)

    def _average(self, x: np.ndarray, y: np.ndarray) -> None:
        y[...] = 0
        for _, part in self._taps(x, 0.0):
            y += part
        y /= self._counts(x.shape)

    def _spread_average(self, dy: np.ndarray, dx: np.ndarray) -> None:
        share = dy / self._counts(dx.shape)
        dx[...] = 0
        rows, columns = self._places()
        for i in range(self.window[0]):
            for j in range(self.window[1]):
                h, w = rows[:, i], columns[:, j]
                h_in, w_in = (h >= 0) & (h < dx.shape[2]), (w >= 0) & (w < dx.shape[3])
                part = share[:, :, h_in][:, :, :, w_in]
                np.add.at(dx, np.ix_(*map(range, dx.shape[:2]), h[h_in], w[w_in]), part)

    def _stochastic(self, x: np.ndarray, y: np.ndarray) -> None:
        windows = self._windows(x, 0.0).reshape(*y.shape, -1)
        total = windows.sum(-1)
        if self.phase == "TEST":
            safe = np.where(total > 0, total, 1)
            y[...] = (windows * windows).sum(-1) / safe
            return
        threshold = self.net.rng.random(y.shape, np.float32) * total
        where = (windows.cumsum(-1) < threshold[..., None]).sum(-1)
        where = np.minimum(where, windows.shape[-1] - 1)
        y[...] = np.take_along_axis(windows, where[..., None], -1)[..., 0]
        self.indices = self._flat_place(where, x.shape[3])
