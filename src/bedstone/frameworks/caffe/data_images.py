"""Image files as Caffe sees them: arrays (channels, height, width), blue first, 8 bits.

Sizes are changed by bilinear interpolation between pixel centres without smoothing, which is what
OpenCV's default does for Caffe.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from bedstone.spec.errors import InvalidDescriptor


def read_image(
    source: str | Path | bytes, colour: bool | None = True, size: tuple[int, int] | None = None
) -> np.ndarray:
    """An image file, or the bytes of one, as uint8.

    colour  True for 3 channels, False for 1, None for what the file has
    size    (height, width) to change it to
    Raises InvalidDescriptor when there is no such file or it is no image.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise InvalidDescriptor("image", str(source)[:80], "the package pillow installed") from None
    name = "an encoded image" if isinstance(source, bytes) else str(source)
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as opened:
            if colour is None:
                colour = opened.mode not in ("1", "L", "LA", "I", "F", "I;16")
            image = opened.convert("RGB" if colour else "L")
    except FileNotFoundError:
        raise InvalidDescriptor("image", name, "a file that exists") from None
    except (UnidentifiedImageError, OSError, ValueError) as error:
        raise InvalidDescriptor("image", name, f"an image that can be read ({error})") from None
    if size is not None and size != (image.height, image.width):
        height, width = size
        scale = (image.width / width, 0, 0, 0, image.height / height, 0)
        image = image.transform(
            (width, height), Image.Transform.AFFINE, scale, Image.Resampling.BILINEAR
        )
    pixels = np.asarray(image)
    if not colour:
        return pixels[None]
    return np.ascontiguousarray(pixels[:, :, ::-1].transpose(2, 0, 1))
