"""Guarded memory: an operand between bytes that must not change, or against a page that traps.

An operand's image is its span with a guard before and behind. Guards, the gaps of a strided
tensor and outputs that must not be read are all bytes of 0xFF: a NaN in every floating dtype, so
that a stray read shows in the result and a stray write in the comparison. On the host an operand
can also lie flush against an unmapped page: there a read past its end, however harmless its
value, ends the process.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np

from bedstone.plan.runtime import HostRuntime, Runtime
from bedstone.plan.tune import view
from bedstone.spec.problem import Array
from bedstone.spec.tensor import TensorDesc

POISON = 0xFF
GUARD_BYTES = 256  # on each side: four of the widest vectors
# middle: guards on both sides, aligned to an element only; start, end: against a fence on the host
PLACEMENTS = ("middle", "start", "end")

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Image:
    """The bytes of an operand with its guards; `before` bytes lie ahead of its lowest element."""

    desc: TensorDesc
    data: Bytes
    before: int
    placement: str

    @classmethod
    def of(cls, desc: TensorDesc, placement: str, values: Array | None, shift: int = 0) -> Image:
        """`values` None leaves the elements poisoned; `shift` elements spoil the alignment."""
        low, high = desc.offset_range()
        span = (high - low + 1) * desc.dtype.itemsize
        before = 0 if placement == "start" else GUARD_BYTES + shift * desc.dtype.itemsize
        after = 0 if placement == "end" else GUARD_BYTES
        image = cls(desc, np.full(before + span + after, POISON, np.uint8), before, placement)
        if values is not None:
            image.elements[...] = values
        return image

    @property
    def elements(self) -> Array:
        """The tensor, as a view of the image."""
        return elements_of(self.data, self.desc, self.before)

    @property
    def origin(self) -> int:
        """Byte offset of element [0, ..., 0] in the image."""
        return self.before - self.desc.offset_range()[0] * self.desc.dtype.itemsize

    def guards_unchanged(self, after: Bytes) -> bool:
        """True if `after` differs from the image in nothing but the tensor's own elements."""
        rest = after.copy()
        elements_of(rest, self.desc, self.before)[...] = self.elements
        return bool(np.array_equal(rest, self.data))


def elements_of(data: Bytes, desc: TensorDesc, before: int) -> Array:
    """The tensor that lies `before` bytes into the data."""
    return view(data[before:], desc)


class FencedMemory(HostRuntime):
    """Host memory with an unmapped page on either side of every buffer."""

    def place(self, data: Bytes, placement: str) -> Bytes:
        """A copy of the bytes: flush with the fence before ("start") or behind ("end") it."""
        page = mmap.PAGESIZE
        pages = -(-max(data.nbytes, 1) // page)
        region = np.frombuffer(mmap.mmap(-1, (pages + 2) * page), np.uint8)
        address = region.ctypes.data
        for fence in (address, address + (pages + 1) * page):
            if _libc().mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(page), 0) != 0:
                raise OSError(ctypes.get_errno(), "mprotect")
        start = page if placement == "start" else (pages + 1) * page - data.nbytes
        inner = region[start : start + data.nbytes]
        inner[:] = data
        return inner


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def place(runtime: Runtime, image: Image) -> Any:
    """The image in the device's memory: a buffer of that runtime."""
    if isinstance(runtime, FencedMemory) and image.placement != "middle":
        return runtime.place(image.data, image.placement)
    return runtime.upload(image.data)
