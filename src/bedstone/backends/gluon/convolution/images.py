"""Channels-last tensors as TMA sees them: which views a tiled map can take, and the maps.

A map wants the channels contiguous, the other strides positive multiples of 16 bytes, at most five
axes. Images become (n, d, h, w, c) whatever their rank; filters (k, tap, c).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from bedstone.backends.triton import launch
from bedstone.backends.triton.convolution.geometry import word
from bedstone.spec.dtypes import DType
from bedstone.spec.tensor import TensorDesc

MAX_STRIDE_BYTES = 2**40
MAX_DIM = 2**31 - 1  # coordinates are 32-bit
MAX_BOX = 256  # elements along one axis of a box
MAX_STEP = 8  # element stride
SWIZZLE_BYTES = 128

Quad = tuple[int, int, int, int]
Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Image:
    """Dims (n, d, h, w, c) and strides, in elements, of an image; `depth` if the d axis counts."""

    dims: tuple[int, int, int, int, int]
    strides: tuple[int, int, int, int, int]
    depth: bool
    dtype: DType

    @property
    def pixels(self) -> int:
        """n * d * h * w."""
        return math.prod(self.dims[:4])

    def merged(self) -> Image | None:
        """The same memory as one row of pixels, or None if their distances differ."""
        axes = [(n, s) for n, s in zip(self.dims[:4], self.strides[:4]) if n > 1]
        for (_, outer), (n, inner) in zip(axes, axes[1:]):
            if outer != n * inner:
                return None
        step = axes[-1][1] if axes else self.dims[4]
        pixels = self.pixels
        far = step * pixels
        return Image(
            (1, 1, 1, pixels, self.dims[4]), (far, far, far, step, self.strides[4]),
            False, self.dtype,
        )  # fmt: skip


def image_of(desc: TensorDesc) -> Image:
    """The image of an (N, C, spatial...) descriptor; strides of axes of size 1 made harmless."""
    missing = 5 - desc.rank
    dims = (desc.dims[0], *(1,) * missing, *desc.dims[2:], desc.dims[1])
    steps = [desc.strides[0], *(0,) * missing, *desc.strides[2:], desc.strides[1]]
    packed = 1
    for axis in (4, 3, 2, 1, 0):
        if dims[axis] == 1:
            steps[axis] = packed
        packed = steps[axis] * dims[axis]
    return Image(dims, tuple(steps), desc.rank == 5, desc.dtype)  # type: ignore[arg-type]


def refuses(name: str, image: Image) -> str | None:
    """Why TMA cannot view the image, or None."""
    unit = word(image.dtype.itemsize)
    if image.strides[4] != 1:
        return f"{name}: channels are {image.strides[4]} elements apart; TMA wants them adjacent"
    for axis, n, s in zip("ndhw", image.dims, image.strides):
        if n == 1:
            continue
        if s <= 0 or s % unit:
            return f"{name}: stride {s} of axis {axis} is no positive multiple of {unit} elements"
        if s * image.dtype.itemsize >= MAX_STRIDE_BYTES:
            return f"{name}: stride {s} of axis {axis} is too large for TMA"
    if max(image.dims) > MAX_DIM:
        return f"{name}: an axis is longer than {MAX_DIM}"
    return None


def word_strides(image: Image) -> Image:
    """The image with strides of axes of size 1 rounded up to what TMA takes."""
    unit = word(image.dtype.itemsize)
    steps = [s if n > 1 else -(-s // unit) * unit for n, s in zip(image.dims, image.strides)]
    return Image(image.dims, (*steps[:4], 1), image.depth, image.dtype)


def layout_of(box: tuple[int, ...], dtype: DType) -> Any:
    """Gluon's default swizzled shared-memory layout of a box."""
    from triton.experimental.gluon import language as gl

    element = {
        DType.float32: gl.float32, DType.float16: gl.float16, DType.bfloat16: gl.bfloat16,
    }[dtype]  # fmt: skip
    return gl.NVMMASharedLayout.get_default_for(list(box), element)


def image_map(
    operand: int | None, image: Image, box: Quad, channels: int, steps: Triple = (1, 1, 1),
    offset: int = 0,
) -> launch.TensorMap:  # fmt: skip
    """A map whose boxes are `box` pixels (n, d, h, w) x `channels`, taking every steps-th pixel.
    The kernel sees a row of pixels, so that one binary serves every patch of that size."""
    image = word_strides(image)
    keep = slice(None) if image.depth else [0, 2, 3, 4]

    def axes(values: tuple[int, ...]) -> tuple[int, ...]:
        return values if isinstance(keep, slice) else tuple(values[i] for i in keep)

    pixels = math.prod(box)
    seen = (1,) * (len(axes(image.dims)) - 2) + (pixels, channels)
    return launch.TensorMap(
        operand, image.dtype, axes(image.dims), axes(image.strides), axes((*box, channels)),
        layout_of(seen, image.dtype), axes((1, *steps, 1)), offset, seen,
    )  # fmt: skip


@dataclass(frozen=True)
class Filter:
    """A filter as (k, tap, c): dims and strides in elements."""

    dims: Triple
    strides: Triple
    dtype: DType


def filter_of(desc: TensorDesc) -> Filter | None:
    """The filter with its taps in one axis, or None if their distances differ."""
    taps = [(n, s) for n, s in zip(desc.dims[2:], desc.strides[2:]) if n > 1]
    for (_, outer), (n, inner) in zip(taps, taps[1:]):
        if outer != n * inner:
            return None
    count = math.prod(desc.dims[2:])
    step = taps[-1][1] if taps else desc.dims[1]
    k_step = desc.strides[0] if desc.dims[0] > 1 else max(count * step, desc.dims[1])
    c_step = desc.strides[1] if desc.dims[1] > 1 else 1
    return Filter((desc.dims[0], count, desc.dims[1]), (k_step, step, c_step), desc.dtype)


def filter_refuses(name: str, found: Filter | None) -> str | None:
    """Why TMA cannot view the filter, or None."""
    if found is None:
        return f"{name}: its taps do not lie at equal distances"
    unit = word(found.dtype.itemsize)
    if found.strides[2] != 1:
        return f"{name}: channels are {found.strides[2]} elements apart; TMA wants them adjacent"
    for axis, n, s in zip(("k", "tap"), found.dims, found.strides):
        if n > 1 and (s <= 0 or s % unit):
            return f"{name}: stride {s} of axis {axis} is no positive multiple of {unit} elements"
    return None


def filter_map(
    operand: int | None, found: Filter, box: Triple, offset: int = 0
) -> launch.TensorMap:
    """A map of filter boxes (k, tap, c)."""
    unit = word(found.dtype.itemsize)
    k_step, tap_step = (
        s if n > 1 else -(-s // unit) * unit for n, s in zip(found.dims, found.strides[:2])
    )
    return launch.TensorMap(
        operand, found.dtype, found.dims, (k_step, tap_step, 1), box, layout_of(box, found.dtype),
        offset=offset,
    )  # fmt: skip
