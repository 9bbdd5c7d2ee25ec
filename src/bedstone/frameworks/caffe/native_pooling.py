"""Pooling by NumPy alone, for `engine: CAFFE` and where bedstone has no kernel.

A maximum or a sum over windows is one over their rows and then one over columns: a few passes over
slices of the image, each tap of the window one slice. Blocks of images stay in the cache meanwhile.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

# Elements of a block of images: half a MiB of floats, and what is made of them, stay in a
# second-level cache; fewer images at a time cost LeNet more calls than the cache saves.
BLOCK = 1 << 17

Taps = list[tuple[slice, slice]]


def axis_taps(n: int, out: int, window: int, stride: int, pad: int) -> Taps:
    """For each tap of a window along an axis of n elements: the outputs whose tap lies inside the
    axis, and where it lies."""
    found = []
    for tap in range(window):
        first = max(0, -((tap - pad) // stride))
        end = max(first, min(out, (n - 1 + pad - tap) // stride + 1))
        begin = first * stride + tap - pad
        found.append((slice(first, end), slice(begin, begin + (end - first) * stride, stride)))
    return found


def blocks(*arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """The arrays, a few images at a time: as many as stay in the cache."""
    step = max(1, BLOCK // max(math.prod(arrays[0].shape[1:]), 1))
    for i in range(0, len(arrays[0]), step):
        yield tuple(array[i : i + step] for array in arrays)


class Windows:
    """The windows of one geometry over planes of one size.

    size, out, window, stride, pad   (height, width) each
    """

    def __init__(
        self, size: Sequence[int], out: Sequence[int], window: Sequence[int],
        stride: Sequence[int], pad: Sequence[int],
    ) -> None:  # fmt: skip
        self.size, self.out = tuple(size), tuple(out)
        self.rows, self.columns = map(axis_taps, size, out, window, stride, pad)
        # One window that holds every element once is a reduction that NumPy has.
        self.whole = self.out == (1, 1) and all(
            p == 0 and r >= n for p, r, n in zip(pad, window, size)
        )
        corners = [np.arange(o) * u - p for o, u, p in zip(out, stride, pad)]
        width = self.size[1]
        self._corners = corners[0][:, None] * width + corners[1]
        places = [r * width + s for r in range(window[0]) for s in range(window[1])]
        self._places = np.array(places)
        # Elements of each window, padding included up to the padded border.
        ends = [np.minimum(c + r, n + p) for c, r, n, p in zip(corners, window, size, pad)]
        self.counts = np.outer(*(end - c for end, c in zip(ends, corners)))

    def _taps(self, x: np.ndarray) -> Iterator[tuple[int, np.ndarray, tuple[slice, ...]]]:
        """For each tap its number, the elements of x there, and the outputs that have them."""
        both = slice(None), slice(None)
        pairs = itertools.product(self.rows, self.columns)
        for number, ((p, h), (q, w)) in enumerate(pairs):
            yield number, x[:, :, h, w], (*both, p, q)

    def _planes(self, x: np.ndarray) -> np.ndarray:
        """Where each channel's plane begins in an image."""
        return np.arange(x.shape[1])[:, None, None] * math.prod(self.size)

    def _reduce(self, combine: np.ufunc, start: float, x: np.ndarray, y: np.ndarray) -> None:
        """y = combine over each window of x, (images, C, H, W)."""
        if self.whole:
            combine.reduce(x.reshape(*x.shape[:2], -1), 2, out=y.reshape(x.shape[:2]))
            return
        lines = np.full((*x.shape[:2], self.out[0], self.size[1]), start, x.dtype)
        for outputs, inputs in self.rows:
            part = lines[:, :, outputs]
            combine(part, x[:, :, inputs], out=part)
        y[...] = start
        for outputs, inputs in self.columns:
            part = y[..., outputs]
            combine(part, lines[..., inputs], out=part)

    def maximum(self, x: np.ndarray, y: np.ndarray, places: np.ndarray | None = None) -> None:
        """y = the maximum of each window, NaN where it holds one; places (intp) = the index of its
        first place in the plane, if given."""
        if places is None:
            for images, tops in blocks(x, y):
                self._reduce(np.maximum, -np.inf, images, tops)
            return
        for images, tops, found in blocks(x, y, places):
            self._reduce(np.maximum, -np.inf, images, tops)
            if self.whole:
                taps = images.reshape(*images.shape[:2], -1).argmax(2)
                found[...] = taps.reshape(tops.shape)
            else:
                np.add(self._corners, self._places[self._first(images, tops)], out=found)

    def _first(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """The number of the first tap of each window that holds its maximum, y: how many taps had
        gone by without it."""
        tap = np.zeros(y.shape, np.min_scalar_type(len(self._places)))
        missing = np.ones(y.shape, bool)
        nan = bool(np.isnan(y).any())
        for _, part, at in self._taps(x):
            other = part != y[at]
            if nan:
                other &= part == part
            missing[at] &= other
            tap += missing
        return tap

    def draw(self, x: np.ndarray, y: np.ndarray, uniform: np.ndarray, places: np.ndarray) -> None:
        """y = an element of each window, drawn with the probability of its share of the sum by
        numbers of [0, 1); places as in `maximum`."""
        total, running = np.zeros_like(y), np.zeros_like(y)
        for _, part, at in self._taps(x):
            total[at] += part
        threshold = uniform * total
        tap = np.zeros(y.shape, np.min_scalar_type(len(self._places)))
        missing = np.ones(y.shape, bool)
        for number, part, at in self._taps(x):
            running[at] += part
            np.copyto(tap[at], tap.dtype.type(number), where=missing[at])
            missing[at] &= running[at] < threshold[at]
        np.add(self._corners, self._places[tap], out=places)
        for image, at, top in zip(x, places, y):
            np.take(image.reshape(-1), at + self._planes(x), out=top)

    def mean_by_share(self, x: np.ndarray, y: np.ndarray) -> None:
        """y = the mean of each window, every element weighted by its share of the sum."""
        total = np.zeros_like(y)
        self._reduce(np.add, 0.0, x, total)
        self._reduce(np.add, 0.0, x * x, y)
        y /= np.where(total > 0, total, 1)

    def spread_maximum(self, places: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
        """dx = the sum of dy over the windows whose maximum was at each place."""
        dx[...] = 0
        planes = self._planes(dx)
        for image, at, slopes in zip(dx, places, dy):
            np.add.at(image.reshape(-1), (at + planes).reshape(-1), slopes.reshape(-1))

    def average(self, x: np.ndarray, y: np.ndarray) -> None:
        """y = the sum of each window over its count."""
        counts = self.counts.astype(x.dtype)
        for images, tops in blocks(x, y):
            self._reduce(np.add, 0.0, images, tops)
            tops /= counts

    def spread_average(self, dy: np.ndarray, dx: np.ndarray) -> None:
        """dx = the sum over the windows that hold an element of their dy over their count."""
        counts = self.counts.astype(dy.dtype)
        if self.whole:
            dx[...] = dy / counts
            return
        for slopes, images in blocks(dy, dx):
            shares = slopes / counts
            lines = np.zeros((*slopes.shape[:3], self.size[1]), dy.dtype)
            for outputs, inputs in self.columns:
                lines[..., inputs] += shares[..., outputs]
            images[...] = 0
            for outputs, inputs in self.rows:
                images[:, :, inputs] += lines[:, :, outputs]
