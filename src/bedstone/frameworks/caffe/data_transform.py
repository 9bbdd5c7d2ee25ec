"""From stored images to network input: subtract a mean, scale, crop, mirror (`transform_param`).

out = (pixel - mean) * scale, cut to crop_size (at random in TRAIN, centred in TEST) and mirrored
at random in either phase. A mean image is subtracted at the pixel's place in the whole image, so
it is cropped along; mean_value is one number, or one a channel. Images are (channels, height,
width), colours in the order blue, green, red, which is how Caffe's networks were trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bedstone.spec.errors import InvalidDescriptor


class DataTransformer:
    """`param` is a TransformationParameter; `mean` the mean image, where it names a file."""

    def __init__(self, param: Any, train: bool, mean: np.ndarray | None = None) -> None:
        self.crop, self.mirror = int(param.crop_size), bool(param.mirror)
        self.scale = np.float32(param.scale)
        self.train = train
        values = np.asarray(param.mean_value, np.float32)
        if mean is not None and values.size:
            raise InvalidDescriptor(
                "transform_param", "mean_file and mean_value", "one of the two, not both"
            )
        if mean is not None:
            self.mean = np.asarray(mean, np.float32)
        else:
            self.mean = values.reshape(-1, 1, 1) if values.size else None

    def output_shape(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """The shape that an image of this shape comes out with."""
        channels, height, width = shape
        if self.crop > min(height, width):
            raise InvalidDescriptor(
                "crop_size", self.crop, f"at most the image's height and width, {height}x{width}"
            )
        if self.mean is not None:
            allowed = {1, channels} if self.mean.shape[1:] == (1, 1) else set()
            if self.mean.shape != tuple(shape) and self.mean.shape[0] not in allowed:
                expected = f"one value, one a channel ({channels}), or a mean image of {shape}"
                raise InvalidDescriptor("mean", self.mean.shape, expected)
        return (channels, self.crop or height, self.crop or width)

    def __call__(
        self, image: np.ndarray, rng: np.random.Generator, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Transform one image, into `out` if given; draws from `rng` only what it needs."""
        channels, height, width = self.output_shape(image.shape)
        mirrored = self.mirror and bool(rng.integers(2))
        spare = (image.shape[1] - height, image.shape[2] - width)
        if self.crop and self.train:
            top, left = (int(rng.integers(extent + 1)) for extent in spare)
        else:
            top, left = (extent // 2 for extent in spare)
        rows, columns = slice(top, top + height), slice(left, left + width)
        if out is None:
            out = np.empty((channels, height, width), np.float32)
        mean = self.mean
        if mean is not None and mean.shape[1:] == image.shape[1:]:
            mean = mean[:, rows, columns]
        view = out[:, :, ::-1] if mirrored else out
        if mean is None:
            view[...] = image[:, rows, columns]
        else:
            np.subtract(image[:, rows, columns], mean, out=view, dtype=np.float32)
        if self.scale != 1:
            out *= self.scale
        return out
