"""Layers that work element by element: activations, powers, logarithms, dropout.

ReLU, ELU, Sigmoid and TanH run on bedstone (their gradients need only the top, so that they may
work in place), and so does dropout; the rest is NumPy, or what has its names on a device. A layer
that needs its bottom in backward keeps a copy where it works in place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from bedstone import ActivationDesc, ActivationProblem, DropoutProblem
from bedstone.frameworks.caffe.blob import Blob
from bedstone.frameworks.caffe.fillers import fill
from bedstone.frameworks.caffe.layer import Layer
from bedstone.frameworks.caffe.registry import register
from bedstone.spec.dropout import PHILOX_WORDS, keep_mask


class Elementwise(Layer):
    """The base: top of the bottom's shape."""

    in_place = True
    host_only = None
    keeps_bottom = False  # whether backward reads the bottom

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        if top[0] is not bottom[0]:
            top[0].reshape(*bottom[0].shape)
        self._kept: Any = None

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        x = bottom[0].data
        if self.keeps_bottom and top[0] is bottom[0]:
            self._kept = self.xp.copy(x)
            x = self._kept
        self.apply(x, top[0].data)

    def backward(
        self, top: Sequence[Blob], propagate_down: Sequence[bool], bottom: Sequence[Blob]
    ) -> None:
        x = bottom[0].data if self._kept is None else self._kept
        self.parameter_gradients(x, top[0].diff)
        if propagate_down[0]:
            self.gradient(x, top[0].data, top[0].diff, bottom[0].diff)

    def apply(self, x: np.ndarray, y: np.ndarray) -> None:
        """y = f(x)."""
        raise NotImplementedError

    def gradient(self, x: np.ndarray, y: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
        """dx = f'(x) * dy; dx may be dy's memory. x is right only with `keeps_bottom`."""
        raise NotImplementedError

    def parameter_gradients(self, x: np.ndarray, dy: np.ndarray) -> None:
        """Add the gradients of the layer's own blobs."""


class Activation(Elementwise):
    """An activation of bedstone; natively by the reference's formula."""

    native_host_only: str | None = "engine: CAFFE, and NumPy computes it"

    def desc(self) -> ActivationDesc:
        """Which one."""
        raise NotImplementedError

    def engine_param(self) -> Any:
        """The message with the `engine` field, or None."""
        return None

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        self.activation = self.desc()
        self.on_bedstone = self.net.engines.wanted(self, self.engine_param())
        if not self.on_bedstone:
            self.host_only = self.native_host_only

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        super().reshape(bottom, top)
        self._forward = self._backward = None
        if self.on_bedstone:
            x = self.packed((max(bottom[0].count, 1),))
            engines, kind = self.net.engines, self.activation
            self._forward = engines.kernel(
                self, "forward", ActivationProblem("forward", x, x, kind)
            )
            self._backward = engines.kernel(
                self, "backward", ActivationProblem("backward", x, x, kind)
            )

    def apply(self, x: np.ndarray, y: np.ndarray) -> None:
        if self._forward is not None:
            self._forward(x, y)
        else:
            y[...] = self.activation.apply(x)

    def gradient(self, x: np.ndarray, y: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
        if self._backward is not None:
            self._backward(y, dy, dx)
        else:
            np.multiply(dy, self.activation.derivative(y), out=dx, casting="unsafe")


@register("ReLU")
class ReLU(Activation):
    """max(x, 0) + negative_slope * min(x, 0)."""

    native_host_only = None

    def desc(self) -> ActivationDesc:
        slope = self.param.relu_param.negative_slope
        if slope < 0:
            raise self.wrong("negative_slope", slope, "0 or more")
        return ActivationDesc("leaky_relu", slope) if slope else ActivationDesc("relu")

    def engine_param(self) -> Any:
        return self.param.relu_param

    def apply(self, x: np.ndarray, y: np.ndarray) -> None:
        if self._forward is not None:
            super().apply(x, y)
            return
        slope = self.param.relu_param.negative_slope
        self.xp.maximum(x, slope * x if slope else 0.0, out=y)

    def gradient(self, x: np.ndarray, y: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
        if self._backward is not None:
            super().gradient(x, y, dy, dx)
            return
        slope = self.dtype.type(self.param.relu_param.negative_slope)
        one = self.dtype.type(1)
        self.xp.multiply(dy, (y > 0) if slope == 0 else self.xp.where(y > 0, one, slope), out=dx)


@register("Sigmoid")
class Sigmoid(Activation):
    """1 / (1 + e^-x)."""

    def desc(self) -> ActivationDesc:
        return ActivationDesc("sigmoid")

    def engine_param(self) -> Any:
        return self.param.sigmoid_param


@register("TanH")
class TanH(Activation):
    """The hyperbolic tangent."""

    def desc(self) -> ActivationDesc:
        return ActivationDesc("tanh")

    def engine_param(self) -> Any:
        return self.param.tanh_param


@register("ELU")
class ELU(Activation):
    """x where positive, else alpha * (e^x - 1)."""

    def desc(self) -> ActivationDesc:
        alpha = self.param.elu_param.alpha
        if alpha < 0:
            raise self.wrong("alpha", alpha, "0 or more")
        return ActivationDesc("elu", alpha)


@register("PReLU")
class PReLU(Elementwise):
    """A ReLU whose negative slope is learned, one a channel or one for all."""

    keeps_bottom = True

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        param = self.param.prelu_param
        if len(bottom[0].shape) < 2:
            raise self.wrong("bottom's shape", bottom[0].shape, "2 or more extents: N, C")
        slope = self.new_blob(() if param.channel_shared else (bottom[0].shape[1],))
        if param.HasField("filler"):
            array = slope.data.reshape(-1)
            fill(array, param.filler, self.net.rng)
        else:
            slope.data[...] = 0.25
        self.blobs = [slope]

    def _slope(self, x: np.ndarray) -> np.ndarray:
        return self.own[0].data.reshape(-1, *(1,) * (x.ndim - 2))

    def apply(self, x: np.ndarray, y: np.ndarray) -> None:
        y[...] = self.xp.where(x > 0, x, self._slope(x) * x)

    def parameter_gradients(self, x: np.ndarray, dy: np.ndarray) -> None:
        if self.param_propagate[0]:
            terms = dy * self.xp.minimum(x, 0)
            axes = None if self.blobs[0].count == 1 else (0, *range(2, x.ndim))
            self.own[0].diff[...] += terms.sum(axes).reshape(self.blobs[0].shape)

    def gradient(self, x: np.ndarray, y: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
        self.xp.multiply(dy, self.xp.where(x > 0, self.dtype.type(1), self._slope(x)), out=dx)


@register("AbsVal")
class AbsVal(Elementwise):
    """|x|."""

    keeps_bottom = True

    def apply(self, x: np.ndarray, y: np.ndarray) -> None:
        self.xp.abs(x, out=y)

    def gradient(self, x: np.ndarray, y: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
        self.xp.multiply(dy, self.xp.sign(x), out=dx)


@register("Power")
class Power(Elementwise):
    """(shift + scale * x) ^ power."""

    keeps_bottom = True

    def apply(self, x: np.ndarray, y: np.ndarray) -> None:
        p = self.param.power_param
        y[...] = self.xp.power(p.shift + p.scale * x, p.power)

    def gradient(self, x: np.ndarray, y: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
        p = self.param.power_param
        factor = p.power * p.scale
        if p.power == 1 or not factor:
            self.xp.multiply(dy, factor, out=dx)
            return
        inner = p.shift + p.scale * x
        self.xp.multiply(dy, factor * self.xp.power(inner, p.power - 1), out=dx)


class Based(Elementwise):
    """Exp and Log: a base, a scale and a shift."""

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        param = self.numbers()
        if param.base != -1 and param.base <= 0:
            raise self.wrong("base", param.base, "positive, or -1 for e")
        self.log_base = 1.0 if param.base == -1 else math.log(param.base)

    def numbers(self) -> Any:
        """The message with base, scale and shift."""
        raise NotImplementedError


@register("Exp")
class Exp(Based):
    """base ^ (shift + scale * x)."""

    def numbers(self) -> Any:
        return self.param.exp_param

    def apply(self, x: np.ndarray, y: np.ndarray) -> None:
        p = self.numbers()
        y[...] = self.xp.exp(self.log_base * (p.shift + p.scale * x))

    def gradient(self, x: np.ndarray, y: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
        self.xp.multiply(dy, y * (self.log_base * self.numbers().scale), out=dx)


@register("Log")
class Log(Based):
    """log_base(shift + scale * x)."""

    keeps_bottom = True

    def numbers(self) -> Any:
        return self.param.log_param

    def apply(self, x: np.ndarray, y: np.ndarray) -> None:
        p = self.numbers()
        with np.errstate(divide="ignore", invalid="ignore"):
            y[...] = self.xp.log(p.shift + p.scale * x) / self.log_base

    def gradient(self, x: np.ndarray, y: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
        p = self.numbers()
        inner = p.shift + p.scale * x
        with np.errstate(divide="ignore", invalid="ignore"):
            self.xp.multiply(dy, (p.scale / self.log_base) / inner, out=dx)


@register("BNLL")
class BNLL(Elementwise):
    """log(1 + e^x)."""

    keeps_bottom = True

    def apply(self, x: np.ndarray, y: np.ndarray) -> None:
        self.xp.logaddexp(x, self.xp.zeros_like(x), out=y)

    def gradient(self, x: np.ndarray, y: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
        e = self.xp.exp(-self.xp.abs(x))
        slope = self.xp.where(x > 0, 1.0 / (1.0 + e), e / (1.0 + e))
        self.xp.multiply(dy, slope, out=dx)


@register("Threshold")
class Threshold(Elementwise):
    """1 where x > threshold, else 0; no gradient."""

    def apply(self, x: np.ndarray, y: np.ndarray) -> None:
        y[...] = x > self.param.threshold_param.threshold

    def gradient(self, x: np.ndarray, y: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
        raise self.wrong("backward", "Threshold", "no gradient asked of it")


@register("Dropout")
class Dropout(Elementwise):
    """In training, elements are set to 0 with probability dropout_ratio and the others scaled by
    1 / (1 - ratio); in testing the bottom as it is.

    The mask is a function of a seed, drawn with the fillers, and of how much was drawn before: the
    same on every device and engine.
    """

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        self.ratio = self.param.dropout_param.dropout_ratio
        if not 0 < self.ratio < 1:
            raise self.wrong("dropout_ratio", self.ratio, "above 0 and below 1")
        self._seed, self._drawn = int(self.net.rng.integers(2**63)), 0
        self.on_bedstone = self.phase == "TRAIN" and self.net.engines.wanted(self)

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        super().reshape(bottom, top)
        self._forward = self._backward = None
        if self.on_bedstone:
            x = self.packed((max(bottom[0].count, 1),))
            engines, ratio = self.net.engines, self.ratio
            self._forward = engines.kernel(self, "forward", DropoutProblem("forward", x, x, ratio))
            self._backward = engines.kernel(
                self, "backward", DropoutProblem("backward", x, x, ratio)
            )
            self._state = self.xp.asarray(np.array([self._seed, self._drawn], np.int64))

    def apply(self, x: np.ndarray, y: np.ndarray) -> None:
        if self.phase == "TEST":
            if y is not x:
                y[...] = x
            return
        blocks = -(-math.prod(x.shape) // PHILOX_WORDS)
        self._drawn += blocks
        if self._forward is not None and self._backward is not None:
            self._state[1] += blocks
            self._forward(x, self._state, y)
        else:
            self._mask = self.xp.asarray(self.mask(tuple(x.shape)))
            self.xp.multiply(x, self._mask, out=y)

    def gradient(self, x: np.ndarray, y: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
        if self.phase == "TEST":
            dx[...] = dy
        elif self._forward is not None and self._backward is not None:
            self._backward(self._state, dy, dx)
        else:
            self.xp.multiply(dy, self._mask, out=dx)

    def mask(self, shape: tuple[int, ...]) -> np.ndarray:
        """What the last forward pass multiplied by: 0, or 1 / (1 - ratio)."""
        kept = keep_mask(shape, self.ratio, self._seed, self._drawn)
        return kept * self.dtype.type(1 / (1 - self.ratio))

    def state(self) -> dict[str, Any]:
        return {"seed": self._seed, "drawn": self._drawn}

    def restore(self, state: dict[str, Any]) -> None:
        self._seed, self._drawn = state["seed"], state["drawn"]
        if self.on_bedstone:
            self._state = self.xp.asarray(np.array([self._seed, self._drawn], np.int64))
