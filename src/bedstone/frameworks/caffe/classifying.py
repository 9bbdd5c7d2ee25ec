"""Images in, scores out, with pycaffe's habits: Transformer, Classifier, load_image.

A Transformer turns an image as people hold it - (height, width, channels), red first, from 0 to 1 -
into what a network's input blob takes: resized, transposed, channels swapped, scaled, less the
mean. Sizes change by bilinear interpolation between pixel centres without smoothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bedstone.frameworks.caffe.data_images import read_image
from bedstone.frameworks.caffe.net import Net
from bedstone.spec.errors import InvalidDescriptor

LARGEST = 255.0  # of a pixel in a file


def load_image(path: str | Path, color: bool = True) -> np.ndarray:
    """An image file as float32 from 0 to 1, (height, width, 3) red first, or (height, width, 1)."""
    pixels = read_image(path, color)
    return np.ascontiguousarray(pixels[::-1].transpose(1, 2, 0), np.float32) / np.float32(LARGEST)


def resize_image(image: np.ndarray, size: Sequence[int]) -> np.ndarray:
    """An image (height, width, channels) in another (height, width)."""
    return _resized(_resized(image, 0, size[0]), 1, size[1])


def _resized(image: np.ndarray, axis: int, length: int) -> np.ndarray:
    old = image.shape[axis]
    if old == length:
        return image
    at = np.clip((np.arange(length) + 0.5) * (old / length) - 0.5, 0, old - 1)
    low = at.astype(int)
    share = (at - low).astype(image.dtype).reshape(-1, *(1,) * (image.ndim - 1 - axis))
    a, b = (np.take(image, places, axis) for places in (low, np.minimum(low + 1, old - 1)))
    return a + share * (b - a)


def ten_crops(images: Sequence[np.ndarray], crop: Sequence[int]) -> np.ndarray:
    """Crops (height, width) of each image: corners and centre, then these mirrored (pycaffe's
    `oversample`)."""
    found = []
    for image in images:
        room = [n - c for n, c in zip(image.shape, crop)]
        if min(room) < 0:
            raise InvalidDescriptor("crop", tuple(crop), f"at most the image's {image.shape[:2]}")
        corners = [(r, s) for r in (0, room[0]) for s in (0, room[1])]
        five = [image[r : r + crop[0], s : s + crop[1]]
                for r, s in (*corners, (room[0] // 2, room[1] // 2))]  # fmt: skip
        found += five + [each[:, ::-1] for each in five]
    return np.stack(found)


class Transformer:
    """What is done to images for each input: `preprocess` does it, `deprocess` undoes it.

    inputs  the shapes of input blobs by name, (N, C, H, W)

    In this order: resize to (H, W), transpose, swap channels, times raw_scale, less the mean, times
    input_scale; what was not set is left out. Every call raises InvalidDescriptor for an unknown
    input or a setting that does not fit it.
    """

    def __init__(self, inputs: Mapping[str, Sequence[int]]) -> None:
        self.inputs = {name: tuple(shape) for name, shape in inputs.items()}
        for name, shape in self.inputs.items():
            if len(shape) != 4:
                raise InvalidDescriptor(f"shape of {name}", shape, "(N, C, H, W)")
        self._set: dict[str, dict[str, Any]] = {name: {} for name in self.inputs}

    def _of(self, name: str) -> dict[str, Any]:
        if name not in self._set:
            raise InvalidDescriptor("input", name, f"one of {', '.join(self.inputs)}")
        return self._set[name]

    def set_transpose(self, name: str, order: Sequence[int]) -> None:
        """The image's axes in the blob's order: (2, 0, 1) for (height, width, channels)."""
        if sorted(order) != [0, 1, 2]:
            raise InvalidDescriptor("order", tuple(order), "0, 1 and 2 in some order")
        self._of(name)["transpose"] = tuple(order)

    def set_channel_swap(self, name: str, order: Sequence[int]) -> None:
        """The channels in the network's order: (2, 1, 0) for blue first."""
        settings, channels = self._of(name), self.inputs[name][1]
        if sorted(order) != list(range(channels)):
            raise InvalidDescriptor("order", tuple(order), f"each of {channels} channels once")
        settings["channel_swap"] = tuple(order)

    def set_raw_scale(self, name: str, scale: float) -> None:
        """A factor before the mean: 255 for images from 0 to 1."""
        self._of(name)["raw_scale"] = float(scale)

    def set_mean(self, name: str, mean: np.ndarray) -> None:
        """What to subtract: one number a channel, or an image (C, H, W), in the network's order."""
        settings, shape = self._of(name), self.inputs[name][1:]
        mean = np.asarray(mean, np.float32)
        if mean.shape == shape[:1]:
            mean = mean.reshape(-1, 1, 1)
        elif mean.shape != shape:
            raise InvalidDescriptor("mean's shape", mean.shape, f"{shape[:1]} or {shape}")
        settings["mean"] = mean

    def set_input_scale(self, name: str, scale: float) -> None:
        """A factor after the mean."""
        self._of(name)["input_scale"] = float(scale)

    def preprocess(self, name: str, image: np.ndarray) -> np.ndarray:
        """An image as the blob takes it: float32 (C, H, W)."""
        settings, shape = self._of(name), self.inputs[name][1:]
        values = np.asarray(image, np.float32)
        if values.ndim != 3:
            raise InvalidDescriptor("image's shape", values.shape, "three extents")
        order = settings.get("transpose", (0, 1, 2))
        for axis, length in zip(order[1:], shape[1:]):
            values = _resized(values, axis, length)
        values = values.transpose(order)
        if values.shape != shape:
            raise InvalidDescriptor("image's shape", np.shape(image), f"one that becomes {shape}")
        if "channel_swap" in settings:
            values = values[list(settings["channel_swap"])]
        values = values * np.float32(settings.get("raw_scale", 1.0))
        values -= settings.get("mean", np.float32(0))
        values *= np.float32(settings.get("input_scale", 1.0))
        return values

    def deprocess(self, name: str, values: np.ndarray) -> np.ndarray:
        """The image of a blob's values: the way back, but for the size."""
        settings = self._of(name)
        image = np.array(values, np.float32).reshape(np.shape(values)[-3:])
        image /= np.float32(settings.get("input_scale", 1.0))
        image += settings.get("mean", np.float32(0))
        image /= np.float32(settings.get("raw_scale", 1.0))
        if "channel_swap" in settings:
            image = image[np.argsort(settings["channel_swap"])]
        return image.transpose(np.argsort(settings.get("transpose", (0, 1, 2))))


class Classifier(Net):
    """A network of one input, and the preparation of its images.

    model, weights   a deploy .prototxt and a .caffemodel
    image_dims       (height, width) that images get before crops are taken (default: the input's)
    mean, input_scale, raw_scale, channel_swap   as for Transformer; images have their channels last
    """

    def __init__(
        self, model: str | Path, weights: str | Path | None = None,
        image_dims: Sequence[int] | None = None, mean: np.ndarray | None = None,
        input_scale: float | None = None, raw_scale: float | None = None,
        channel_swap: Sequence[int] | None = None, **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(model, "TEST", weights=weights, **more)
        if len(self.inputs) != 1:
            raise InvalidDescriptor("inputs", self.inputs, "a network of one input")
        (name,) = self.inputs
        self.transformer = Transformer({name: self.blobs[name].shape})
        self.transformer.set_transpose(name, (2, 0, 1))
        given = {"mean": mean, "input_scale": input_scale, "raw_scale": raw_scale,
                 "channel_swap": channel_swap}  # fmt: skip
        for setting, value in given.items():
            if value is not None:
                getattr(self.transformer, f"set_{setting}")(name, value)
        self.crop_dims = self.blobs[name].shape[2:]
        self.image_dims = tuple(image_dims or self.crop_dims)

    def predict(self, inputs: Sequence[np.ndarray], oversample: bool = True) -> np.ndarray:
        """The scores (images, classes) of images (height, width, channels): the mean over ten crops
        of each, or of the centre alone."""
        (name,) = self.inputs
        images = [resize_image(np.asarray(each, np.float32), self.image_dims) for each in inputs]
        crops = ten_crops(images, self.crop_dims)
        if not oversample:
            crops = crops[4::10]
        data = np.stack([self.transformer.preprocess(name, each) for each in crops])
        scores = self.forward(**{name: data})[self.outputs[-1]]
        return scores.reshape(len(images), -1, scores[0].size).mean(1)
