"""PaddlePaddle's normalisations: batch_norm, layer_norm, group_norm and instance_norm.

One problem normalises and gives out the mean and 1 / standard deviation; another makes all
gradients from them. An instance normalisation is a group normalisation of as many groups as
channels. Numbers are rounded to float32, as PaddlePaddle's kernels take them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from paddle import Tensor, _C_ops

from bedstone import NormalizationProblem, TensorDesc
from bedstone.frameworks.paddle.convolution import (
    channels_second,
    is_channels_last,
    paddle_dims,
    result_desc,
)
from bedstone.frameworks.paddle.operators import Call
from bedstone.frameworks.paddle.plans import CPU, DTYPES, RESULTS, Native, Recipe, launch
from bedstone.spec.normalization import NormDesc

# Elements from which bedstone's kernels are the faster ones, forward and backward together
# (measured against PaddlePaddle 3.3 with two threads on an AVX2 machine).
LEAST = {
    "batch_norm": 1 << 20, "layer_norm": 1 << 15, "group_norm": 1 << 18, "instance_norm": 1 << 18,
}  # fmt: skip
SMALL = "PaddlePaddle's kernel is as fast for a tensor so small"

How = tuple[str, float, int, int]  # kind, epsilon, axis, groups (0: as many as channels)
Affine = tuple[bool, bool]  # whether there is a scale, and a shift


def number(name: str, value: Any) -> float:
    """Rounded to float32. Raises Native for what is no number."""
    if not isinstance(value, (int, float)):
        raise Native(f"{name} given as something other than a number")
    return float(np.float32(value))


def _problem(
    direction: str, x: TensorDesc, y: TensorDesc, vectors: Sequence[TensorDesc],
    how: How, affine: Affine, parameters: str | None, **more: Any,
) -> NormalizationProblem:  # fmt: skip
    """Raises Native for vectors that the problem would read in another way than they lie."""
    kind, epsilon, axis, groups = how
    norm = NormDesc(kind, epsilon, axis, groups or x.dims[1], *affine)
    problem = NormalizationProblem(direction, x, y, norm, parameters, **more)  # type: ignore[arg-type]
    if problem.reduction_length == 1:
        raise Native("a mean of one element")
    expected = TensorDesc.packed((math.prod(problem.geometry.parameters),), problem.parameters)
    for vector in vectors:
        if vector != expected:
            raise Native(f"a scale, shift or statistic that is no vector of {expected.size}")
    return problem


def _training(x: TensorDesc, *rest: Any) -> Recipe:
    """rest: scale and shift, where there are such, and the settings."""
    *vectors, how, affine, parameters, momentum, last = rest
    x = channels_second(x, last)
    y = result_desc(x.dims, x, last)
    more = {"momentum": momentum, "unbiased": False}
    problem = _problem("training", x, y, vectors, how, affine, parameters, **more)
    statistic = (problem.geometry.statistics, str(x.dtype.accumulator))
    return Recipe(problem, ((paddle_dims(x.dims, last), str(x.dtype)), statistic, statistic))


def _inference(x: TensorDesc, *rest: Any) -> Recipe:
    """rest: scale and shift, where there are such, mean, variance, and the settings."""
    *vectors, how, affine, parameters, last = rest
    x = channels_second(x, last)
    y = result_desc(x.dims, x, last)
    problem = _problem("inference", x, y, vectors, how, affine, parameters)
    return Recipe(problem, ((paddle_dims(x.dims, last), str(x.dtype)),))


def _backward(x: TensorDesc, *rest: Any) -> Recipe:
    """rest: scale, where there is one, mean, 1 / standard deviation, dy, and the settings."""
    *scale, _, _, dy, how, affine, parameters, last = rest
    x, dy = channels_second(x, last), channels_second(dy, last)
    dx = result_desc(x.dims, x, last)
    problem = _problem("backward", dx, dy, scale, how, affine, parameters, saved=x)
    vector = ((math.prod(problem.geometry.parameters),), str(problem.parameters))
    dims = paddle_dims(x.dims, last)
    return Recipe(problem, ((dims, str(x.dtype)), *(vector,) * sum(affine)))


class Normalization(Call):
    """x, then scale and shift at `affine_at`, which may be None. A subclass's `understand` says
    `how`, and whether channels come `last`."""

    affine_at: ClassVar[tuple[int, int]] = (1, 2)
    leading = 3
    optional = (1, 2)
    mixed = True
    once = True
    pure = False  # (the running statistics)
    last = False
    how: How

    @classmethod
    def slower(cls, name: str, x: Tensor, *rest: Any) -> str | None:
        return SMALL if math.prod(x.shape) < LEAST[name] else None

    def given(self) -> list[Tensor]:
        """Scale and shift, where there are such. (Notes which, for the gradients.)"""
        affine = [self.tensors[i] for i in self.affine_at]
        self.affine = tuple(t is not None for t in affine)
        there = [t for t in affine if t is not None]
        self.parameters = DTYPES[there[0].dtype] if there else None
        return there

    def normalize(
        self, momentum: float | None = None, running: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """(y, what the gradients need: x, scale where there is one, mean, 1 / deviation)."""
        x, vectors = self.tensors[0], self.given()
        if running:
            self.parameters = DTYPES[running[0].dtype]
        settings = (self.how, self.affine, self.parameters, momentum, self.last)
        y, *statistics = self.compute(_training, (x, *vectors), settings, running)
        return y, (x, *vectors[: self.affine[0]], *statistics)

    def forward(self) -> tuple[Any, Sequence[Tensor]]:
        self.kept = self.tensors[1:]  # parameters, for PaddlePaddle's gradients
        return self.normalize()

    def statistics(self, saved: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and variance as vectors, which PaddlePaddle saves for some gradients."""
        mean, inv_std = (t.reshape([-1]) for t in saved[-2:])
        return mean, inv_std**-2 - self.how[1]

    def gradients(self, index: int, saved: Sequence[Tensor], dy: Tensor) -> dict[int, Tensor]:
        settings = (self.how, self.affine, self.parameters, self.last)
        made = launch((self.name, "backward"), _backward, (*saved, dy), settings)
        places = [i for i, there in zip(self.affine_at, self.affine) if there]
        return dict(zip((0, *places), made, strict=True))


class Layer(Normalization):
    """scale, shift, epsilon, begin_norm_axis"""

    names = ("layer_norm",)

    def understand(self, *attributes: Any) -> None:
        epsilon, axis = attributes
        self.how = ("layer", number("epsilon", epsilon), axis, 1)

    def native_gradients(
        self, index: int, saved: Sequence[Tensor], dy: Tensor
    ) -> dict[int, Tensor]:
        operands = (saved[0], *self.kept, *self.statistics(saved), dy)
        return dict(enumerate(_C_ops.layer_norm_grad(*operands, *self.rest)))


class Group(Normalization):
    """scale, shift, epsilon, groups, data_format"""

    names = ("group_norm",)

    def understand(self, *attributes: Any) -> None:
        epsilon, groups, data_format = attributes
        self.how = ("group", number("epsilon", epsilon), 1, groups)
        self.last = is_channels_last(data_format)

    def native_gradients(
        self, index: int, saved: Sequence[Tensor], dy: Tensor
    ) -> dict[int, Tensor]:
        y = self.native(saved[0], *self.kept, *self.rest)
        statistics = [t.reshape([saved[0].shape[0], -1]) for t in self.statistics(saved)]
        found = _C_ops.group_norm_grad(saved[0], *self.kept, y, *statistics, dy, *self.rest)
        return dict(enumerate(found))


class Instance(Normalization):
    """scale, shift, epsilon"""

    names = ("instance_norm",)
    once = False

    def understand(self, *attributes: Any) -> None:
        (epsilon,) = attributes
        self.how = ("group", number("epsilon", epsilon), 1, 0)

    def native_gradients(
        self, index: int, saved: Sequence[Tensor], dy: Tensor
    ) -> dict[int, Tensor]:
        statistics = [t.reshape([-1]) for t in saved[-2:]]  # (of 1 / deviation, here)
        found = _C_ops.instance_norm_grad(saved[0], *self.kept, *statistics, dy, *self.rest)
        return dict(enumerate(found))


class Batch(Normalization):
    """running mean and variance, scale, shift, is_test, momentum, epsilon, data_format,
    use_global_stats, trainable_statistics; updates the running statistics as PaddlePaddle does, by
    the biased variance. The gradient of a normalisation by running statistics is PaddlePaddle's.
    """

    names = ("batch_norm",)
    leading = 5
    affine_at = (3, 4)
    optional = (3, 4)
    once = False

    def understand(self, *attributes: Any) -> None:
        test, momentum, epsilon, data_format, use_global, trainable = attributes
        self.how = ("batch", number("epsilon", epsilon), 1, 1)
        self.momentum = 1 - number("momentum", momentum)
        self.last = is_channels_last(data_format)
        self.by_given = bool(use_global or (test and not trainable))
        # (PaddlePaddle's gradient takes the running statistics then, whatever `trainable` says.)
        self.testing = bool(test or use_global)

    def forward(self) -> tuple[Any, Sequence[Tensor]]:
        x, mean, variance = self.tensors[:3]
        if not (mean.stop_gradient and variance.stop_gradient):
            raise Native("running statistics that need a gradient")
        self.kept = self.tensors[1:]
        if self.by_given:
            vectors = (*self.given(), mean, variance)
            settings = (self.how, self.affine, DTYPES[mean.dtype], self.last)
            (y,) = self.compute(_inference, (x, *vectors), settings)
            statistics = [_C_ops.empty(mean.shape, mean.dtype, CPU) for _ in range(2)]
            saved: Sequence[Tensor] = (x, *statistics)
        else:
            for running in (mean, variance):
                same = running.dtype is mean.dtype and running.shape == mean.shape
                if not (same and running.is_contiguous()) or len(running.shape) != 1:
                    raise Native("running statistics that are no two vectors")
            y, saved = self.normalize(self.momentum, (mean, variance))
        others = (mean, variance, *saved[-2:])
        space = _C_ops.empty([0], RESULTS["uint8"], CPU)
        return (y, *(t.detach() for t in others), space), saved

    def gradients(self, index: int, saved: Sequence[Tensor], dy: Tensor) -> dict[int, Tensor]:
        if self.testing:
            raise Native("the gradient of a normalisation by running statistics")
        return super().gradients(index, saved, dy)

    def native_gradients(
        self, index: int, saved: Sequence[Tensor], dy: Tensor
    ) -> dict[int, Tensor]:
        mean, variance, *affine = self.kept
        test, momentum, epsilon, data_format, *flags = self.rest
        operands = (saved[0], *affine, mean, variance, *saved[-2:], None, dy)
        attributes = (momentum, epsilon, data_format, test, *flags)
        found = _C_ops.batch_norm_grad(*operands, *attributes)
        return dict(zip((0, *self.affine_at), found))
