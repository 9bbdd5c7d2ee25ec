"""Layers that feed a network from memory: Input, DummyData, MemoryData."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bedstone.frameworks.caffe import schema
from bedstone.frameworks.caffe.blob import Blob
from bedstone.frameworks.caffe.fillers import fill
from bedstone.frameworks.caffe.layer import Layer
from bedstone.frameworks.caffe.registry import register


class DataLayer(Layer):
    """The base: no bottoms, and nothing flows back."""

    bottoms: int | tuple[int, int | None] = 0
    tops: int | tuple[int, int | None] = (1, None)
    host_only = "data come from the host"

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        """The shapes are settled in `setup`, or come with the data."""


@register("Input")
class InputLayer(DataLayer):
    """Blobs that the caller fills: one shape for all tops, or one each."""

    shows_bottom = True  # (nothing is written here)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        shapes = self.param.input_param.shape
        if len(shapes) not in (0, 1, len(top)):
            raise self.wrong("shape", f"{len(shapes)} shapes", f"none, one, or {len(top)}")
        for i, blob in enumerate(top):
            if shapes:
                blob.reshape(*shapes[i if len(shapes) > 1 else 0].dim)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        """The caller has filled the blobs."""


@register("DummyData")
class DummyDataLayer(DataLayer):
    """Blobs filled by a filler: a constant once, random numbers anew at each pass."""

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        param, tops = self.param.dummy_data_param, len(top)
        if param.shape:
            shapes = [tuple(shape.dim) for shape in param.shape]
        else:
            old = (param.num, param.channels, param.height, param.width)
            if len({len(extents) for extents in old}) > 1 or not param.num:
                raise self.wrong("num, channels, height, width",
                                 [len(extents) for extents in old], "as many of each")  # fmt: skip
            shapes = list(zip(*old))
        fillers = list(param.data_filler) or [schema.FillerParameter()]  # (the constant 0)
        self._fillers = self._each(fillers, "data_filler", tops)
        for blob, shape in zip(top, self._each(shapes, "shape", tops)):
            blob.reshape(*shape)
        self._filled = False

    def _each(self, values: list[Any], field: str, tops: int) -> list[Any]:
        if len(values) not in (1, tops):
            raise self.wrong(field, f"{len(values)} of them", f"one, or one for each top ({tops})")
        return values * tops if len(values) == 1 else values

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        for blob, filler in zip(top, self._fillers):
            if not self._filled or filler.type != "constant":
                fill(blob.data, filler, self.net.rng)
        self._filled = True


@register("MemoryData")
class MemoryDataLayer(DataLayer):
    """Batches from arrays that `reset` gave, round and round."""

    tops = 2

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        param = self.param.memory_data_param
        self._shape = (param.channels, param.height, param.width)
        self._batch = param.batch_size
        if min(self._batch, *self._shape) < 1:
            expected = "batch_size, channels, height and width of 1 or more"
            raise self.wrong("memory_data_param", (self._batch, *self._shape), expected)
        self._data: np.ndarray | None = None
        self._position = 0
        top[0].reshape(self._batch, *self._shape)
        top[1].reshape(self._batch)

    def reset(self, data: np.ndarray, labels: np.ndarray) -> None:
        """Feed these arrays, (N, C, H, W) and (N,), from now on; N is a multiple of batch_size."""
        data, labels = np.asarray(data, self.dtype), np.asarray(labels, self.dtype).reshape(-1)
        if data.shape[1:] != self._shape or len(data) % self._batch or not len(data):
            expected = f"(a multiple of {self._batch}, {', '.join(map(str, self._shape))})"
            raise self.wrong("data", data.shape, expected)
        if len(labels) != len(data):
            raise self.wrong("labels", labels.shape, f"one for each of {len(data)} images")
        self._data, self._labels, self._position = data, labels, 0

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        if self._data is None:
            raise self.wrong("data", None, "arrays, by reset(data, labels), before a forward pass")
        here = slice(self._position, self._position + self._batch)
        top[0].data[...] = self._data[here]
        top[1].data[...] = self._labels[here]
        self._position = here.stop % len(self._data)

    def state(self) -> dict[str, Any]:
        return {"position": self._position}

    def restore(self, state: dict[str, Any]) -> None:
        self._position = state["position"]
