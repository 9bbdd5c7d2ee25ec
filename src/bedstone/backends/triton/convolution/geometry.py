"""From a ConvolutionProblem to the numbers that the convolution kernels take.

Every problem becomes three spatial axes (d, h, w); filter axes are reversed by strides for mode
"convolution". What the compiler may assume (a channel stride of 1, sizes that 16-byte words
divide, a missing depth axis) becomes constants and divisors, the same few for every problem.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bedstone.backends.triton.launch import ALIGNMENT, Scalar
from bedstone.spec.convolution import ConvolutionProblem
from bedstone.spec.tensor import TensorDesc

INT32_ELEMENTS = 2**31 - 1  # offsets in a tensor of a larger extent take 64 bits


@dataclass(frozen=True)
class Axis:
    """One spatial axis: image size, window, output size, low padding, stride u, dilation."""

    size: int = 1
    taps: int = 1
    out: int = 1
    pad: int = 0
    u: int = 1
    dil: int = 1


@dataclass(frozen=True)
class Strides:
    """Element strides of a tensor's dims: batch (or filters), channels, d, h, w; and `first`, the
    offset of its first element (not 0 for a filter whose axes are reversed)."""

    batch: int
    channel: int
    space: tuple[int, int, int]
    wide: bool
    first: int = 0


@dataclass(frozen=True)
class Geometry:
    """A problem in three spatial axes. `channels` and `filters` count one group's."""

    axes: tuple[Axis, Axis, Axis]
    images: int
    channels: int
    filters: int
    groups: int
    x: Strides
    w: Strides
    y: Strides

    @property
    def flat_depth(self) -> bool:
        """True if the d axis does nothing (1-D and 2-D problems)."""
        return self.axes[0] == Axis()

    @property
    def taps(self) -> int:
        """Number of filter taps."""
        return math.prod(axis.taps for axis in self.axes)

    @property
    def pixels(self) -> int:
        """Output pixels of all images."""
        return self.images * math.prod(axis.out for axis in self.axes)


def strides_of(desc: TensorDesc, reverse: bool = False) -> Strides:
    """The strides in three spatial axes; `reverse` flips the spatial axes."""
    missing = 5 - desc.rank
    space = (0,) * missing + desc.strides[2:]
    first = 0
    if reverse:
        first = sum((d - 1) * s for d, s in zip(desc.dims[2:], desc.strides[2:]))
        space = tuple(-s for s in space)
    low, high = desc.offset_range()
    wide = high - low > INT32_ELEMENTS
    return Strides(desc.strides[0], desc.strides[1], space, wide, first)  # type: ignore[arg-type]


def geometry_of(problem: ConvolutionProblem) -> Geometry:
    """The geometry of a convolution in any direction."""
    conv, spatial = problem.conv, problem.conv.axes
    axes = [
        Axis(h, r, p, pad[0], u, dil)
        for h, r, p, pad, u, dil in zip(
            problem.x.dims[2:], problem.w.dims[2:], problem.y.dims[2:],
            conv.padding, conv.stride, conv.dilation,
        )
    ]  # fmt: skip
    return Geometry(
        axes=(*(Axis(),) * (3 - spatial), *axes),  # type: ignore[arg-type]
        images=problem.x.dims[0],
        channels=problem.w.dims[1],
        filters=problem.w.dims[0] // conv.groups,
        groups=conv.groups,
        x=strides_of(problem.x),
        w=strides_of(problem.w, reverse=conv.mode == "convolution"),
        y=strides_of(problem.y),
    )


@dataclass
class Numbers:
    """Integer arguments being collected: runtime scalars and constants."""

    scalars: dict[str, Scalar]
    constants: dict[str, Any]

    def add(self, values: Mapping[str, int], wide: bool = False, divisor: int = 1) -> None:
        """Runtime integers, 64-bit if `wide`, all promised to be multiples of `divisor`."""
        kind = "i64" if wide else "i32"
        self.scalars.update({k: Scalar(v, kind, divisor) for k, v in values.items()})

    def fix(self, values: Mapping[str, Any]) -> None:
        """Values baked into the kernel."""
        for name, value in values.items():
            self.scalars.pop(name, None)
            self.constants[name] = value


def per_axis(prefix: str, values: tuple[int, int, int]) -> dict[str, int]:
    """{"mul_": (1, 2, 3)} -> mul_d, mul_h, mul_w."""
    return {prefix + axis: value for axis, value in zip("dhw", values)}


def word(itemsize: int) -> int:
    """Elements in the widest word that a thread loads."""
    return ALIGNMENT // itemsize


def all_divisible(values: tuple[int, ...], divisor: int) -> bool:
    """True if the divisor divides every value."""
    return all(v % divisor == 0 for v in values)
