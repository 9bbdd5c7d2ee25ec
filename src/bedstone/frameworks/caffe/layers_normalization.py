"""LRN, BatchNorm, Scale, Bias and MVN."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from bedstone import LrnProblem, NormalizationProblem
from bedstone.frameworks.caffe import schema
from bedstone.frameworks.caffe.blob import Blob
from bedstone.frameworks.caffe.fillers import fill
from bedstone.frameworks.caffe.layer import Layer
from bedstone.frameworks.caffe.layers_activation import Elementwise
from bedstone.frameworks.caffe.native_pooling import blocks
from bedstone.frameworks.caffe.registry import register
from bedstone.frameworks.caffe.spaces import HOST
from bedstone.spec.normalization import LrnDesc, NormDesc


@register("LRN")
class Lrn(Layer):
    """x * (k + alpha / count * sum x^2)^-beta over channels, or over a plane within each."""

    host_only = None

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        param = self.param.lrn_param
        if param.local_size % 2 == 0:
            raise self.wrong("local_size", param.local_size, "an odd number")
        if len(bottom[0].shape) != 4:
            raise self.wrong("bottom's shape", bottom[0].shape, "(N, C, H, W)")
        within = schema.enum_name(param, "norm_region") == "WITHIN_CHANNEL"
        self.lrn = LrnDesc(
            param.local_size, param.alpha, param.beta, 1.0 if within else param.k,
            "within" if within else "across",
        )  # fmt: skip
        self.on_bedstone = self.net.engines.wanted(self, param)
        if not self.on_bedstone:
            self.host_only = "engine: CAFFE, and NumPy normalises"

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        shape = bottom[0].shape
        top[0].reshape(*shape)
        self._forward = self._backward = None
        x = self.packed(shape)
        problem = LrnProblem("lrn_forward", x, x, self.lrn)
        self._share = self.lrn.alpha / problem.reduction_length
        if self.on_bedstone:
            engines = self.net.engines
            self._forward = engines.kernel(self, "forward", problem)
            problem = LrnProblem("lrn_backward", x, x, self.lrn)
            self._backward = engines.kernel(self, "backward", problem)
        if self._forward is None or self._backward is None:
            self._base = np.empty(shape, self.dtype)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        x = bottom[0].data
        if self._forward is not None:
            self._forward(x, top[0].data)
            return
        self._find_base(x)
        for images, base, y in blocks(x, self._base, top[0].data):
            np.multiply(images, self._power(base), out=y)

    def _find_base(self, x: np.ndarray) -> None:
        for images, base in blocks(x, self._base):
            base[...] = self._window_sum(images * images)
            base *= self._share
            base += self.lrn.k

    def _power(self, base: np.ndarray) -> np.ndarray:
        """base ^ -beta, by the vectorised exponential and logarithm."""
        logarithm = np.log(base)
        logarithm *= -self.lrn.beta
        return np.exp(logarithm, out=logarithm)

    def _window_sum(self, values: np.ndarray) -> np.ndarray:
        """The sum over the window around every element (of odd size: its own transpose)."""
        for axis in self.lrn.axes(values.ndim):
            lines = values.swapaxes(0, axis)
            total = values.copy()
            sums = total.swapaxes(0, axis)
            for d in range(1, min(self.lrn.size // 2 + 1, len(lines))):
                sums[:-d] += lines[d:]
                sums[d:] += lines[:-d]
            values = total
        return values

    def backward(
        self, top: Sequence[Blob], propagate_down: Sequence[bool], bottom: Sequence[Blob]
    ) -> None:
        if not propagate_down[0]:
            return
        x, dy, dx = bottom[0].data, top[0].diff, bottom[0].diff
        if self._backward is not None:
            self._backward(x, dy, dx)
            return
        if self._forward is not None:
            self._find_base(x)
        for images, base, slopes, out in blocks(x, self._base, dy, dx):
            direct = slopes * self._power(base)
            through = direct * images
            through /= base
            np.multiply(self._window_sum(through), images, out=out)
            out *= -2 * self.lrn.beta * self._share
            out += direct


@register("BatchNorm")
class BatchNorm(Layer):
    """(x - mean) / sqrt(variance + eps) by channel: of the batch in training, of the averages kept
    in the blobs in testing. Blobs: sum of means, sum of variances, and their common weight."""

    in_place = True
    host_only = None

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        param = self.param.batch_norm_param
        given = param.HasField("use_global_stats")
        self.given_statistics = param.use_global_stats if given else self.phase == "TEST"
        self.epsilon, self.fraction = param.eps, param.moving_average_fraction
        self.channels = bottom[0].shape[1] if len(bottom[0].shape) > 1 else 1
        self.blobs = [self.new_blob((n,)) for n in (self.channels, self.channels, 1)]
        for blob in self.blobs:
            blob.data[...] = 0
        # The averages are no parameters that a solver may change.
        del self.param.param[:]
        for _ in self.blobs:
            self.param.param.add(lr_mult=0, decay_mult=0)

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        shape = bottom[0].shape
        if (shape[1] if len(shape) > 1 else 1) != self.channels:
            raise self.wrong("bottom's shape", shape, f"{self.channels} channels")
        if top[0] is not bottom[0]:
            top[0].reshape(*shape)
        self._images = len(shape)
        dims = shape if len(shape) > 1 else (*shape, 1)
        x = self.packed(dims)
        norm = NormDesc("batch", self.epsilon, scale=False, shift=False)
        engines = self.net.engines
        self._mean, self._variance, self._inv_std = (
            self.xp.zeros((self.channels,), self.dtype) for _ in range(3)
        )
        self._batch_mean = self.xp.zeros((self.channels,), self.dtype)
        self._backward = None
        self._kept: Any = None
        on_bedstone = engines.wanted(self)
        if not on_bedstone:
            self._forward = None
            return
        if self.given_statistics:
            problem = NormalizationProblem("inference", x, x, norm)
            self._forward = engines.kernel(self, "forward", problem)
            return
        # With a momentum of 1 the running statistics are those of the batch.
        problem = NormalizationProblem("training", x, x, norm, momentum=1.0)
        self._forward = engines.kernel(self, "forward", problem)
        problem = NormalizationProblem("backward", x, x, norm)
        self._backward = engines.kernel(self, "backward", problem)

    def _spread(self, values: np.ndarray, rank: int) -> np.ndarray:
        return values.reshape(-1, *(1,) * (rank - 2)) if rank > 1 else values

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        x, y = bottom[0].data, top[0].data
        if self.given_statistics:
            self._by_averages(x, y)
            return
        if top[0] is bottom[0]:
            x = self._kept = self.xp.copy(x)
        count = bottom[0].count // self.channels
        if self._forward is not None:
            self._forward(x, y, self._batch_mean, self._inv_std, self._mean, self._variance)
        else:
            axes = (0, *range(2, x.ndim))
            self._mean[...] = self._batch_mean[...] = x.mean(axes)
            centred = x - self._spread(self._mean, x.ndim)
            biased = (centred * centred).mean(axes)
            self._inv_std[...] = 1 / self.xp.sqrt(biased + self.epsilon)
            self._variance[...] = biased * (count / max(count - 1, 1))
            y[...] = centred * self._spread(self._inv_std, x.ndim)
        sums, squares, weight = self.own
        fraction = self.fraction
        weight.data = weight.data * fraction + 1
        sums.data = sums.data * fraction + self._mean
        squares.data = squares.data * fraction + self._variance

    def _by_averages(self, x: np.ndarray, y: np.ndarray) -> None:
        weight = float(self.blobs[2].on(HOST).data[0])
        scale = 0.0 if weight == 0 else 1 / weight
        sums, squares, _ = self.own
        self.xp.multiply(sums.data, scale, out=self._mean)
        self.xp.multiply(squares.data, scale, out=self._variance)
        self._inv_std[...] = 1 / self.xp.sqrt(self._variance + self.epsilon)
        if self._forward is not None:
            self._forward(x, self._mean, self._variance, y)
        else:
            centred = x - self._spread(self._mean, x.ndim)
            self.xp.multiply(centred, self._spread(self._inv_std, x.ndim), out=y)

    def backward(
        self, top: Sequence[Blob], propagate_down: Sequence[bool], bottom: Sequence[Blob]
    ) -> None:
        if not propagate_down[0]:
            return
        dy, dx = top[0].diff, bottom[0].diff
        spread = self._spread(self._inv_std, dy.ndim)
        if self.given_statistics:
            self.xp.multiply(dy, spread, out=dx)
            return
        x = bottom[0].data if self._kept is None else self._kept
        if self._backward is not None:
            self._backward(x, self._batch_mean, self._inv_std, dy, dx)
            return
        axes = (0, *range(2, dy.ndim))
        normal = (x - self._spread(self._batch_mean, dy.ndim)) * spread
        centred = dy - dy.mean(axes, keepdims=True)
        dx[...] = spread * (centred - normal * (dy * normal).mean(axes, keepdims=True))


class Broadcast(Elementwise):
    """Scale and Bias: a factor or term of some of the bottom's axes, learned or a second bottom."""

    bottoms = (1, 2)
    keeps_bottom = True

    def place(
        self, bottom: Sequence[Blob], axis: int, axes: int, filler: object, default: float
    ) -> None:
        """Make the blob, unless a second bottom takes its place, and find where it lies."""
        shape = bottom[0].shape
        if len(bottom) == 2:
            self.axis = 0 if not bottom[1].shape else self.axis_of(axis, len(shape))
            return
        self.axis = self.axis_of(axis, len(shape))
        end = len(shape) if axes == -1 else self.axis + axes
        if axes < -1 or end > len(shape):
            raise self.wrong("num_axes", axes, f"-1 to {len(shape) - self.axis}")
        blob = self.new_blob(shape[self.axis : end])
        blob.data[...] = default
        if filler is not None:
            fill(blob.data, filler, self.net.rng)
        self.blobs = [blob]

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        super().reshape(bottom, top)
        operand = bottom[1].shape if len(bottom) == 2 else self.blobs[0].shape
        shape = bottom[0].shape
        if shape[self.axis : self.axis + len(operand)] != operand:
            raise self.wrong("bottom's shape", shape, f"{operand} from axis {self.axis} on")
        rest = len(shape) - self.axis - len(operand)
        self._view = (*(1,) * self.axis, *operand, *(1,) * rest)
        kept = range(self.axis, self.axis + len(operand))
        self._summed = tuple(a for a in range(len(shape)) if a not in kept)

    def total(self, terms: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Summed over the axes along which the operand is repeated."""
        if not self._summed:  # (PyTorch would sum over all axes)
            return terms.reshape(shape)
        return self.xp.asarray(terms.sum(self._summed)).reshape(shape)


@register("Scale")
class Scale(Broadcast):
    """y = x * scale [+ bias]."""

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        param = self.param.scale_param
        filler = param.filler if param.HasField("filler") else None
        self.place(bottom, param.axis, param.num_axes, filler, 1.0)
        self.bias: Blob | None = None
        if param.bias_term:
            self.bias = self.new_blob(bottom[1].shape if len(bottom) == 2 else self.blobs[0].shape)
            fill(self.bias.data, param.bias_filler, self.net.rng)
            self.blobs.append(self.bias)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        x = bottom[0].data
        if top[0] is bottom[0] and self.phase == "TRAIN":
            x = self._kept = self.xp.copy(x)
        factor = (bottom[1] if len(bottom) == 2 else self.own[0]).data
        self.xp.multiply(x, factor.reshape(self._view), out=top[0].data)
        if self.bias is not None:
            top[0].data[...] += self.own[-1].data.reshape(self._view)

    def backward(
        self, top: Sequence[Blob], propagate_down: Sequence[bool], bottom: Sequence[Blob]
    ) -> None:
        x, dy = bottom[0].data if self._kept is None else self._kept, top[0].diff
        two = len(bottom) == 2
        if self.bias is not None and self.param_propagate[-1]:
            self.own[-1].diff[...] += self.total(dy, self.bias.shape)
        factor = bottom[1] if two else self.own[0]
        if two and propagate_down[1]:
            factor.diff[...] = self.total(dy * x, factor.shape)
        elif not two and self.param_propagate[0]:
            factor.diff[...] += self.total(dy * x, factor.shape)
        if propagate_down[0]:
            self.xp.multiply(dy, factor.data.reshape(self._view), out=bottom[0].diff)


@register("Bias")
class Bias(Broadcast):
    """y = x + bias."""

    keeps_bottom = False

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        param = self.param.bias_param
        self.place(bottom, param.axis, param.num_axes, param.filler, 0.0)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        term = (bottom[1] if len(bottom) == 2 else self.own[0]).data
        self.xp.add(bottom[0].data, term.reshape(self._view), out=top[0].data)

    def backward(
        self, top: Sequence[Blob], propagate_down: Sequence[bool], bottom: Sequence[Blob]
    ) -> None:
        dy = top[0].diff
        if len(bottom) == 2:
            if propagate_down[1]:
                bottom[1].diff[...] = self.total(dy, bottom[1].shape)
        elif self.param_propagate[0]:
            self.own[0].diff[...] += self.total(dy, self.blobs[0].shape)
        if propagate_down[0] and top[0] is not bottom[0]:
            bottom[0].diff[...] = dy


@register("MVN")
class Mvn(Layer):
    """Each image's channel (or image) less its mean, over its standard deviation + eps."""

    in_place = True
    host_only = None

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        shape = bottom[0].shape
        if len(shape) < 2:
            raise self.wrong("bottom's shape", shape, "2 or more extents: N, C")
        top[0].reshape(*shape)
        rows = shape[0] if self.param.mvn_param.across_channels else shape[0] * shape[1]
        self._rows = (rows, math.prod(shape) // max(rows, 1))

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        param, x = self.param.mvn_param, bottom[0].data.reshape(self._rows)
        y = top[0].data.reshape(self._rows)
        self.xp.subtract(x, x.mean(1, keepdims=True), out=y)
        if param.normalize_variance:
            self._deviation = self.xp.sqrt((y * y).mean(1, keepdims=True))
            y /= self._deviation + param.eps

    def backward(
        self, top: Sequence[Blob], propagate_down: Sequence[bool], bottom: Sequence[Blob]
    ) -> None:
        if not propagate_down[0]:
            return
        param = self.param.mvn_param
        dy, dx = top[0].diff.reshape(self._rows), bottom[0].diff.reshape(self._rows)
        slope = dy - dy.mean(1, keepdims=True)
        if not param.normalize_variance:
            dx[...] = slope
            return
        y = top[0].data.reshape(self._rows)
        divisor = self._deviation + param.eps
        # y = c / (s + eps), ds = c / (n s): the second term has (s + eps) / s.
        ratio = divisor / self.xp.maximum(self._deviation, float(np.finfo(self.dtype).tiny))
        dx[...] = (slope - y * (dy * y).mean(1, keepdims=True) * ratio) / divisor
