"""PaddlePaddle's pooling: pool2d and pool3d (maximum, average, adaptive average, global), and
max_pool2d_with_index and max_pool3d_with_index."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import paddle
from paddle import Tensor

from bedstone import PoolingDesc, PoolingProblem, TensorDesc
from bedstone.frameworks.paddle.convolution import (
    Ints,
    channels_second,
    integers,
    is_channels_last,
    padding_pairs,
    paddle_dims,
    result_desc,
)
from bedstone.frameworks.paddle.operators import Call
from bedstone.frameworks.paddle.plans import Native, Recipe, launch
from bedstone.spec.pooling import adaptive_average_problem

# Elements from which bedstone's kernels are the faster ones, forward and backward together
# (measured against PaddlePaddle 3.3 with two threads on an AVX2 machine).
LEAST, LEAST_INDEXED = 1 << 16, 1 << 21
SMALL = "PaddlePaddle's kernel is as fast for a tensor so small"


@dataclass(frozen=True)
class Windows:
    """The attributes of a call. kind: "max", "avg" or "adaptive"; for the last,
    `window` is the size of the result."""

    kind: str
    window: Ints
    stride: Ints
    padding: Ints
    algorithm: str
    ceil: bool
    exclusive: bool
    whole: bool
    last: bool

    def pads(self, x: Ints) -> tuple[tuple[int, int], ...]:
        """(low, high) an axis."""
        if self.whole:
            return ((0, 0),) * len(x[2:])
        return padding_pairs(self.padding, self.algorithm, x[2:], self.window, self.stride)

    def desc(self, x: Ints) -> PoolingDesc:
        """For images of dims N, C, spatial."""
        window = x[2:] if self.whole else self.window
        if self.kind == "max":
            mode = "max"
        else:
            mode = f"average_{'exclude' if self.exclusive else 'include'}_padding"
        # PaddlePaddle's windows end at the low padding's width on both sides: it is the divisor's
        # limit; the high padding decides no more than the number of windows.
        low = tuple((pad[0], pad[0]) for pad in self.pads(x))
        return PoolingDesc.of(mode, window, len(window), low, self.stride, 1, "given")

    def sizes(self, x: Ints, pool: PoolingDesc) -> Ints:
        """The result's spatial sizes, rounded down or up."""
        sizes = []
        for h, r, pad, u in zip(x[2:], pool.window, self.pads(x), pool.stride):
            room = h + sum(pad) - r
            if room < 0:
                raise Native("a window larger than the padded input")
            sizes.append((room + (u - 1 if self.ceil else 0)) // u + 1)
        return tuple(sizes)


def _forward(x: TensorDesc, *attributes: Any) -> Recipe:
    how = Windows(*attributes)
    x = channels_second(x, how.last)
    if how.kind == "adaptive":
        dims = (*x.dims[:2], *how.window)
        problem = adaptive_average_problem("forward", x, result_desc(dims, x, how.last))
    else:
        pool = how.desc(x.dims)
        dims = (*x.dims[:2], *how.sizes(x.dims, pool))
        problem = PoolingProblem("forward", x, result_desc(dims, x, how.last), pool)
    return Recipe(problem, ((paddle_dims(dims, how.last), str(x.dtype)),))


def _backward(dy: TensorDesc, dims: Ints, *attributes: Any) -> Recipe:
    """Of an average; dims: of dx, in PaddlePaddle's order."""
    how = Windows(*attributes)
    dx = channels_second(TensorDesc.packed(dims, dy.dtype), how.last)
    dy = channels_second(dy, how.last)
    if how.kind == "adaptive":
        problem = adaptive_average_problem("backward", dx, dy)
    else:
        problem = PoolingProblem("backward", dx, dy, how.desc(dx.dims))
    return Recipe(problem, ((dims, str(dy.dtype)),))


def _max_backward(x: TensorDesc, dy: TensorDesc, *attributes: Any) -> Recipe:
    how = Windows(*attributes)
    dims = x.dims
    dx = channels_second(TensorDesc.packed(dims, dy.dtype), how.last)
    x, dy = channels_second(x, how.last), channels_second(dy, how.last)
    problem = PoolingProblem("backward", dx, dy, how.desc(dx.dims), saved=x)
    return Recipe(problem, ((dims, str(dy.dtype)),))


class Pooling(Call):
    """kernel_size, strides, paddings, ceil_mode, exclusive, data_format, pooling_type,
    global_pooling, adaptive, padding_algorithm."""

    names = ("pool2d", "pool3d")

    def understand(self, *attributes: Any) -> None:
        (window, stride, padding, ceil, exclusive, data_format, kind, whole, adaptive,
         algorithm) = attributes  # fmt: skip
        if kind not in ("max", "avg"):
            raise Native(f"pooling_type {kind}")
        if adaptive and (kind == "max" or whole):
            raise Native("adaptive maximum, or adaptive and global at once")
        self.how = (
            "adaptive" if adaptive else kind,
            integers("kernel_size", window),
            integers("strides", stride),
            integers("paddings", padding),
            algorithm,
            bool(ceil),
            bool(exclusive),
            bool(whole),
            is_channels_last(data_format),
        )

    @classmethod
    def slower(cls, name: str, x: Tensor, *rest: Any) -> str | None:
        return SMALL if math.prod(x.shape) < LEAST else None

    def forward(self) -> tuple[Any, Sequence[Tensor]]:
        (y,) = self.compute(_forward, self.tensors, self.how)
        return y, self.tensors

    def gradient(self, index: int, saved: Sequence[Tensor], dy: Tensor) -> Tensor:
        (x,), label = saved, (self.name, "backward")
        if self.how[0] == "max":
            return launch(label, _max_backward, (x, dy), self.how)[0]
        return launch(label, _backward, (dy,), (tuple(x.shape), *self.how))[0]

    def native_gradient(self, index: int, saved: Sequence[Tensor], dy: Tensor) -> Tensor:
        (x,) = saved
        y = self.native(x, *self.rest)
        return getattr(paddle._C_ops, f"{self.name}_grad")(x, y, dy, *self.rest)


def _indexed(x: TensorDesc, *attributes: Any) -> Recipe:
    how = Windows(*attributes)
    pool = how.desc(x.dims)
    dims = (*x.dims[:2], *how.sizes(x.dims, pool))
    y, indices = TensorDesc.packed(dims, x.dtype), TensorDesc.packed(dims, "int64")
    problem = PoolingProblem("forward", x, y, pool, indices)
    return Recipe(problem, ((dims, str(x.dtype)), (dims, "int64")))


class IndexedPooling(Call):
    """kernel_size, strides, paddings, global_pooling, adaptive, ceil_mode; the maxima and where
    they are (int32, flat over the spatial extent)."""

    names = ("max_pool2d_with_index", "max_pool3d_with_index")
    once = True

    def understand(self, *attributes: Any) -> None:
        window, stride, padding, whole, adaptive, ceil = attributes
        if adaptive:
            raise Native("adaptive maximum")
        if len(padding) != len(window):
            raise Native("padding given per side, which the operator does not take")
        self.how = (
            "max",
            integers("kernel_size", window),
            integers("strides", stride),
            integers("paddings", padding),
            "EXPLICIT",
            bool(ceil),
            True,
            bool(whole),
            False,
        )

    @classmethod
    def slower(cls, name: str, x: Tensor, *rest: Any) -> str | None:
        return SMALL if math.prod(x.shape) < LEAST_INDEXED else None

    def forward(self) -> tuple[Any, Sequence[Tensor]]:
        y, indices = self.compute(_indexed, self.tensors, self.how)
        return (y, paddle._C_ops.cast(indices, paddle.int32)), self.tensors

    def gradient(self, index: int, saved: Sequence[Tensor], dy: Tensor) -> Tensor:
        # The maxima are found again: reading the input is cheaper than scattering by index.
        return launch((self.name, "backward"), _max_backward, (*saved, dy), self.how)[0]

    def native_gradient(self, index: int, saved: Sequence[Tensor], dy: Tensor) -> Tensor:
        (x,) = saved
        _, mask = self.native(x, *self.rest)
        return getattr(paddle._C_ops, f"{self.name}_grad")(x, mask, dy, *self.rest)
