"""Softmax, the losses and Accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from bedstone import SoftmaxProblem
from bedstone.frameworks.caffe import schema
from bedstone.frameworks.caffe.blob import Blob
from bedstone.frameworks.caffe.layer import Layer
from bedstone.frameworks.caffe.registry import register
from bedstone.frameworks.caffe.spaces import HOST

SMALLEST = float(np.finfo(np.float32).tiny)  # under a logarithm


class Softmaxing(Layer):
    """A layer that takes the softmax over an axis: its plans, and the native path."""

    host_only = None

    def choose(self, bottom: Blob) -> None:
        """Read the parameters."""
        self.axis = self.axis_of(self.param.softmax_param.axis, len(bottom.shape))
        self.on_bedstone = self.net.engines.wanted(self, self.param.softmax_param)

    def plan(self, shape: tuple[int, ...], backward: bool) -> None:
        """Make the kernels for a shape."""
        x = self.packed(shape)
        self._forward = self._backward = None
        if not self.on_bedstone or math.prod(shape) == 0:
            return
        engines, axes = self.net.engines, (self.axis,)
        problem = SoftmaxProblem("forward", x, x, "accurate", axes)
        self._forward = engines.kernel(self, "forward", problem)
        if backward:
            problem = SoftmaxProblem("backward", x, x, "accurate", axes)
            self._backward = engines.kernel(self, "backward", problem)

    def softmax(self, x: np.ndarray, y: np.ndarray) -> None:
        """y = softmax(x)."""
        if self._forward is not None:
            self._forward(x, y)
            return
        xp = self.xp
        e = xp.exp(x - xp.amax(x, self.axis, keepdims=True))
        xp.divide(e, e.sum(self.axis, keepdims=True), out=y)


@register("Softmax")
class Softmax(Softmaxing):
    """e^x over its sum along an axis."""

    in_place = True

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        self.choose(bottom[0])

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        top[0].reshape(*bottom[0].shape)
        self.plan(bottom[0].shape, True)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        self.softmax(bottom[0].data, top[0].data)

    def backward(
        self, top: Sequence[Blob], propagate_down: Sequence[bool], bottom: Sequence[Blob]
    ) -> None:
        if not propagate_down[0]:
            return
        y, dy = top[0].data, top[0].diff
        if self._backward is not None:
            self._backward(y, dy, bottom[0].diff)
        else:
            bottom[0].diff[...] = y * (dy - (y * dy).sum(self.axis, keepdims=True))


def normalizer(mode: str, outer: int, inner: int, valid: int) -> float:
    """What a loss is divided by, at least 1: FULL all labels, VALID those not ignored, BATCH_SIZE
    the images, NONE nothing."""
    counts = {"FULL": outer * inner, "VALID": valid, "BATCH_SIZE": outer, "NONE": 1}
    return max(1.0, float(counts[mode]))


def normalization(param: Any, default: str) -> str:
    """The mode that a LossParameter asks for; the older field `normalize` counts where the newer
    is not set."""
    if not param.HasField("normalization") and param.HasField("normalize"):
        return "VALID" if param.normalize else "BATCH_SIZE"
    return schema.enum_name(param, "normalization") if param.HasField("normalization") else default


class Labelled(Layer):
    """A layer whose second bottom is one integer label a place: checks, and the places."""

    def places(self, bottom: Sequence[Blob], axis: int) -> tuple[int, int, int]:
        """(outer, classes, inner) of the scores; raises where the labels are not as many."""
        shape = bottom[0].shape
        outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
        if bottom[1].count != outer * inner:
            expected = f"{outer * inner} labels, one a place of {shape} without axis {axis}"
            raise self.wrong("second bottom's shape", bottom[1].shape, expected)
        return outer, shape[axis], inner

    def labels(self, blob: Any, classes: int, ignored: int | None) -> tuple[Any, Any]:
        """(labels with 0 for the ignored ones, which are not ignored), flat; the host's arrays,
        where labels come from. Fractions are cut off, as in Caffe."""
        given = blob.on(HOST).data.reshape(-1)
        finite = np.isfinite(given)
        labels = np.where(finite, given, -1).astype(np.int64)
        valid = np.ones(labels.shape, bool) if ignored is None else labels != ignored
        wrong = (valid & ((labels < 0) | (labels >= classes))) | ~finite
        if wrong.any():
            value = float(given[wrong][0])
            raise self.wrong("label", value, f"a class from 0 to {classes - 1}")
        return np.where(valid, labels, 0), valid


@register("SoftmaxWithLoss")
class SoftmaxWithLoss(Softmaxing, Labelled):
    """The mean of -log(softmax(x)[label]); a second top gets the softmax."""

    bottoms = 2
    tops = (1, 2)
    loss = True
    no_gradient = (1,)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        self.choose(bottom[0])
        param = self.param.loss_param
        self.ignored = param.ignore_label if param.HasField("ignore_label") else None
        self.mode = normalization(param, "VALID")

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        self.outer, self.classes, self.inner = self.places(bottom, self.axis)
        top[0].reshape()
        if len(top) == 2:
            top[1].reshape(*bottom[0].shape)
        self.probability = self.xp.empty(bottom[0].shape, self.dtype)
        self.plan(bottom[0].shape, False)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        self.softmax(bottom[0].data, self.probability)
        xp = self.xp
        labels, valid = self.labels(bottom[1], self.classes, self.ignored)
        self._divisor = normalizer(self.mode, self.outer, self.inner, int(valid.sum()))
        self._labels, self._valid = xp.asarray(labels), xp.asarray(valid)
        p = xp.take_along_axis(self._view(self.probability), self._index(), 1)[:, 0]
        losses = -xp.log(xp.maximum(p, SMALLEST)).reshape(-1)
        losses = xp.where(self._valid, losses, self.dtype.type(0))
        top[0].data[...] = losses.sum(dtype=xp.float64) / self._divisor
        if len(top) == 2:
            top[1].data[...] = self.probability

    def _view(self, array: np.ndarray) -> np.ndarray:
        return array.reshape(self.outer, self.classes, self.inner)

    def _index(self) -> np.ndarray:
        return self._labels.reshape(self.outer, 1, self.inner)

    def backward(
        self, top: Sequence[Blob], propagate_down: Sequence[bool], bottom: Sequence[Blob]
    ) -> None:
        if not propagate_down[0]:
            return
        dx = self._view(bottom[0].diff)
        dx[...] = self._view(self.probability)
        at = self.xp.take_along_axis(dx, self._index(), 1) - 1
        self.xp.put_along_axis(dx, self._index(), at, 1)
        weight = float(top[0].on(HOST).diff) / self._divisor
        valid = self._valid.reshape(self.outer, 1, self.inner)
        dx *= self.xp.where(valid, self.dtype.type(weight), self.dtype.type(0))


@register("SigmoidCrossEntropyLoss")
class SigmoidCrossEntropyLoss(Layer):
    """-sum(t log s(x) + (1 - t) log(1 - s(x))) over the number of images, s the sigmoid."""

    bottoms = 2
    host_only = None
    loss = True
    no_gradient = (1,)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        param = self.param.loss_param
        self.ignored = param.ignore_label if param.HasField("ignore_label") else None
        self.mode = normalization(param, "BATCH_SIZE")

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        if bottom[0].count != bottom[1].count:
            expected = f"as many targets as scores: {bottom[0].count}"
            raise self.wrong("second bottom's shape", bottom[1].shape, expected)
        top[0].reshape()

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        x, t = bottom[0].data, bottom[1].data.reshape(bottom[0].shape)
        self._valid = (t == t) if self.ignored is None else t != self.ignored
        losses = self.xp.logaddexp(self.xp.zeros_like(x), x) - x * t
        images = bottom[0].shape[0] if bottom[0].shape else 1
        valid = int(self._valid.sum()) if self.mode == "VALID" else 0
        inner = bottom[0].count // max(images, 1)
        self._divisor = normalizer(self.mode, images, inner, valid)
        losses = self.xp.where(self._valid, losses, self.dtype.type(0))
        top[0].data[...] = losses.sum(dtype=self.xp.float64) / self._divisor

    def backward(
        self, top: Sequence[Blob], propagate_down: Sequence[bool], bottom: Sequence[Blob]
    ) -> None:
        if not propagate_down[0]:
            return
        x, t = bottom[0].data, bottom[1].data.reshape(bottom[0].shape)
        xp, weight = self.xp, float(top[0].on(HOST).diff) / self._divisor
        e = xp.exp(-xp.abs(x))
        s = xp.where(x >= 0, 1 / (1 + e), e / (1 + e))
        bottom[0].diff[...] = xp.where(self._valid, (s - t) * weight, self.dtype.type(0))


@register("EuclideanLoss")
class EuclideanLoss(Layer):
    """sum((a - b)^2) / (2 N); both bottoms have gradients."""

    bottoms = 2
    host_only = None
    loss = True

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        if bottom[0].count != bottom[1].count or bottom[0].shape[:1] != bottom[1].shape[:1]:
            expected = f"as many elements as the first, {bottom[0].shape}"
            raise self.wrong("second bottom's shape", bottom[1].shape, expected)
        top[0].reshape()
        self._images = bottom[0].shape[0] if bottom[0].shape else 1

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        self._difference = bottom[0].data - bottom[1].data.reshape(bottom[0].shape)
        flat = self._difference.reshape(-1)
        top[0].data[...] = (flat @ flat) / (2 * max(self._images, 1))

    def backward(
        self, top: Sequence[Blob], propagate_down: Sequence[bool], bottom: Sequence[Blob]
    ) -> None:
        weight = float(top[0].on(HOST).diff) / max(self._images, 1)
        for i, sign in enumerate((1, -1)):
            if propagate_down[i]:
                bottom[i].diff[...] = (self._difference * (sign * weight)).reshape(bottom[i].shape)


@register("HingeLoss")
class HingeLoss(Labelled):
    """The sum over classes of max(0, 1 - x) at the label and max(0, 1 + x) elsewhere, or of its
    squares (norm: L2), over the number of images."""

    bottoms = 2
    loss = True
    no_gradient = (1,)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        self.squared = schema.enum_name(self.param.hinge_loss_param, "norm") == "L2"

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        if len(bottom[0].shape) < 2 or bottom[1].count != bottom[0].shape[0]:
            expected = f"one label for each image of {bottom[0].shape}"
            raise self.wrong("second bottom's shape", bottom[1].shape, expected)
        top[0].reshape()

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        x = bottom[0].data.reshape(bottom[0].shape[0], -1)
        labels, _ = self.labels(bottom[1], x.shape[1], None)
        self._sign = np.ones_like(x)
        self._sign[np.arange(len(x)), labels] = -1
        self._margin = np.maximum(0, 1 + self._sign * x)
        terms = self._margin**2 if self.squared else self._margin
        top[0].data[...] = terms.sum(dtype=np.float64) / len(x)

    def backward(
        self, top: Sequence[Blob], propagate_down: Sequence[bool], bottom: Sequence[Blob]
    ) -> None:
        if not propagate_down[0]:
            return
        weight = float(top[0].diff) / len(self._sign)
        slope = 2 * self._margin if self.squared else np.sign(self._margin)
        bottom[0].diff[...] = (slope * self._sign * weight).reshape(bottom[0].shape)


@register("Accuracy")
class Accuracy(Labelled):
    """The share of places whose label is among the top_k scores; a second top gets it by class."""

    bottoms = 2
    host_only = None
    tops = (1, 2)
    no_gradient = (0, 1)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        param = self.param.accuracy_param
        self.ignored = param.ignore_label if param.HasField("ignore_label") else None
        self.axis = self.axis_of(param.axis, len(bottom[0].shape))
        self.top_k = param.top_k

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        self.outer, self.classes, self.inner = self.places(bottom, self.axis)
        if not 1 <= self.top_k <= self.classes:
            raise self.wrong("top_k", self.top_k, f"1 to {self.classes}, the classes")
        top[0].reshape()
        if len(top) == 2:
            top[1].reshape(self.classes)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        xp = self.xp
        scores = bottom[0].data.reshape(self.outer, self.classes, self.inner)
        scores = xp.swapaxes(scores, 1, 2).reshape(-1, self.classes)
        labels, valid = self.labels(bottom[1], self.classes, self.ignored)
        count = int(valid.sum())
        own = xp.take_along_axis(scores, xp.asarray(labels)[:, None], 1)
        # (Of equal scores all count before the label's own, as in Caffe.)
        better = (scores >= own).sum(1) - 1
        right = (better < self.top_k) & xp.asarray(valid)
        top[0].data[...] = right.sum() / count if count else 0.0
        if len(top) == 2:
            each = np.bincount(labels[valid], minlength=self.classes)
            hits = np.bincount(labels[self.space.on_host(right)], minlength=self.classes)
            shares = np.where(each > 0, hits / np.maximum(each, 1), 0)
            top[1].data[...] = xp.asarray(shares, self.dtype)
