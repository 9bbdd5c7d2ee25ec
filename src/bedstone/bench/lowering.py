"""The peer `im2col`: lower one image at a time, then one BLAS product, as Caffe did.

The column buffer is made once; the product is NumPy's BLAS. A 1x1 convolution of stride 1 needs no
lowering, and no border is copied where there is no padding.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

import bedstone
from bedstone.bench.operands import Array, Arrays


def reason_against(problem: bedstone.Problem, device: str) -> str | None:
    """Why this peer does not compute the problem, or None."""
    if device != "cpu":
        return "runs on the CPU only"
    if not isinstance(problem, bedstone.ConvolutionProblem) or problem.conv.axes != 2:
        return "lowers two-dimensional convolutions only"
    if not all(desc.is_packed("NCHW") for desc in (problem.x, problem.w, problem.y)):
        return "lowers NCHW only, as Caffe did"
    if problem.dtype not in ("float32", "float64"):
        return "BLAS knows float32 and float64 only"
    return _limit_blas(bedstone.get_num_threads())


def _limit_blas(threads: int) -> str | None:
    """Give NumPy's BLAS that many threads; why that cannot be done, or None."""
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        cores = len(os.sched_getaffinity(0))
        return None if threads == cores else f"needs threadpoolctl to run on {threads} threads"
    threadpool_limits(threads, "blas")
    return None


def call(problem: Any, arrays: Arrays) -> Callable[[], None]:
    """The call that computes the problem into its output array."""
    return getattr(_Lowering(problem, arrays), problem.direction)  # type: ignore[no-any-return]


class _Lowering:
    def __init__(self, problem: bedstone.ConvolutionProblem, arrays: Arrays) -> None:
        self.problem, self.arrays = problem, arrays
        _, channels, height, width = problem.x.dims
        _, _, r, s = problem.w.dims
        (top, bottom), (left, right) = problem.conv.padding
        dtype = problem.dtype.numpy
        self.padded = np.zeros((channels, height + top + bottom, width + left + right), dtype)
        self.bordered = self.padded.shape != problem.x.dims[1:]
        self.inside = (slice(None), slice(top, top + height), slice(left, left + width))
        _, _, p, q = problem.y.dims
        self.columns = np.empty((channels, r, s, p, q), dtype)
        self.plain = (r, s) == (1, 1) and problem.y.dims[2:] == self.padded.shape[1:]
        self.matrix = (problem.conv.groups, channels // problem.conv.groups * r * s, p * q)

    def _lower(self, image: Array) -> Array:
        if self.bordered:
            self.padded[self.inside] = image
            image = self.padded
        if self.plain:
            return image.reshape(self.matrix)
        for (r, s), box in self.problem.taps():
            self.columns[:, r, s] = image[(slice(None), *box)]
        return self.columns.reshape(self.matrix)

    def _grouped(self, array: Array) -> Array:
        """(filters, ...) -> (groups, filters/groups, everything else)."""
        groups = self.problem.conv.groups
        return array.reshape(groups, array.shape[0] // groups, -1)

    def forward(self) -> None:
        w = self._grouped(self.arrays["w"])
        for image, y in zip(self.arrays["x"], self.arrays["y"]):
            np.matmul(w, self._lower(image), out=self._grouped(y))

    def backward_filter(self) -> None:
        dw = self._grouped(self.arrays["dw"])
        dw[...] = 0
        for image, dy in zip(self.arrays["x"], self.arrays["dy"]):
            dw += self._grouped(dy) @ self._lower(image).transpose(0, 2, 1)

    def backward_data(self) -> None:
        w = self._grouped(self.arrays["w"]).transpose(0, 2, 1)
        for dx, dy in zip(self.arrays["dx"], self.arrays["dy"]):
            if self.plain and not self.bordered:
                np.matmul(w, self._grouped(dy), out=dx.reshape(self.matrix))
                continue
            np.matmul(w, self._grouped(dy), out=self.columns.reshape(self.matrix))
            image = self.padded if self.bordered else dx
            image[...] = 0
            for (r, s), box in self.problem.taps():
                image[(slice(None), *box)] += self.columns[:, r, s]
            if self.bordered:
                dx[...] = self.padded[self.inside]
