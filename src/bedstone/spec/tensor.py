"""TensorDesc: the shape, strides and element type of a tensor in the caller's memory.

Dims are kept in logical order (N, C, [D, [H,]] W) whatever the memory layout; strides count
elements and may be anything: zero (broadcast), negative (reversed), with gaps (sub-tensors) or
permuted (NHWC). The data pointer is the address of element [0, ..., 0].
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from bedstone.spec.dtypes import DType
from bedstone.spec.errors import InvalidDescriptor

MAX_RANK = 8
INT64_MAX = 2**63 - 1
DESCRIPTORS_KEPT = 4096  # of NumPy arrays; as many as a handle keeps plans

# Logical order of the letters, by rank. "NHWC" names a memory order over the same logical dims.
LOGICAL_ORDERS = {2: "NC", 3: "NCW", 4: "NCHW", 5: "NCDHW"}
CHANNELS_LAST = {2: "NC", 3: "NWC", 4: "NHWC", 5: "NDHWC"}


def integer_tuple(argument: str, value: object, expected: str = "integers") -> tuple[int, ...]:
    """`value` as a tuple of Python ints; InvalidDescriptor when an item is no integer, or one of
    more than 64 bits."""
    try:
        items: tuple[Any, ...] = tuple(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidDescriptor(argument, value, f"a sequence of {expected}") from None
    try:
        numbers = tuple(operator.index(item) for item in items)
    except TypeError:
        raise InvalidDescriptor(argument, value, f"{expected}, not another type") from None
    if any(abs(number) > INT64_MAX for number in numbers):
        raise InvalidDescriptor(argument, value, f"{expected} that fit 64 bits")
    return numbers


@dataclass(frozen=True)
class TensorDesc:
    """Dims (1 to 8 of them, each >= 0), strides in elements, and dtype.

    Raises InvalidDescriptor for a wrong rank, a negative size, strides of another length, or
    extents that do not fit 64-bit byte offsets.
    """

    dims: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType

    def __post_init__(self) -> None:
        dims = integer_tuple("dims", self.dims, "integers")
        strides = integer_tuple("strides", self.strides, "integers")
        object.__setattr__(self, "dims", dims)
        object.__setattr__(self, "strides", strides)
        object.__setattr__(self, "dtype", DType.of(self.dtype))
        if not 1 <= len(dims) <= MAX_RANK:
            raise InvalidDescriptor("dims", dims, f"1 to {MAX_RANK} dimensions")
        if any(d < 0 for d in dims):
            raise InvalidDescriptor("dims", dims, "sizes of 0 or more")
        if len(strides) != len(dims):
            raise InvalidDescriptor("strides", strides, f"{len(dims)} strides, one a dimension")
        low, high = self.offset_range()
        if max(self.size, high - low + 1, high + 1, -low) * self.dtype.itemsize > INT64_MAX:
            raise InvalidDescriptor(
                "dims", (dims, strides), "an extent that fits 64-bit byte offsets"
            )

    @classmethod
    def packed(
        cls, dims: Iterable[int], dtype: object = "float32", layout: str | None = None
    ) -> TensorDesc:
        """A dense tensor. `layout` names the memory order, outermost first: "NCHW", "NHWC",
        "NCDHW", ..., any permutation of the letters of that rank; None is row-major."""
        dims = integer_tuple("dims", dims)
        order = memory_order(len(dims), layout)
        strides = [0] * len(dims)
        step = 1
        for axis in reversed(order):
            strides[axis] = step
            step *= max(dims[axis], 1)
        return cls(tuple(dims), tuple(strides), DType.of(dtype))

    @classmethod
    def of(cls, array: np.ndarray[Any, Any]) -> TensorDesc:
        """The descriptor of a NumPy array. Byte strides must be whole elements."""
        return _of_numpy(array.shape, array.strides, array.dtype)

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.dims)

    @cached_property
    def size(self) -> int:
        """Number of elements (repeated ones of a zero stride counted each time)."""
        size = 1
        for d in self.dims:
            size *= d
        return size

    @property
    def nbytes(self) -> int:
        """size * itemsize."""
        return self.size * self.dtype.itemsize

    def offset_range(self) -> tuple[int, int]:
        """Lowest and highest element offset from element [0, ..., 0]; (0, -1) when empty."""
        if self.size == 0:
            return 0, -1
        spans = [(d - 1) * s for d, s in zip(self.dims, self.strides)]
        return sum(s for s in spans if s < 0), sum(s for s in spans if s > 0)

    def is_packed(self, layout: str | None = None) -> bool:
        """True if the memory is dense in that layout (strides of axes of size 1 do not matter)."""
        dense = TensorDesc.packed(self.dims, self.dtype, layout)
        return self.size == 0 or all(
            d == 1 or a == b for d, a, b in zip(self.dims, self.strides, dense.strides)
        )

    @cached_property
    def layout(self) -> str | None:
        """The conventional name of the memory order ("NCHW", "NHWC", ...), or None for others."""
        for table in (LOGICAL_ORDERS, CHANNELS_LAST):
            name = table.get(self.rank)
            if name is not None and self.is_packed(name):
                return name
        return None

    def self_overlaps(self) -> bool:
        """True if two different indices may share memory: such a tensor can only be an input.

        Exact for strides that nest (each axis steps over the extent of the finer ones); a
        descriptor whose strides do not nest is decided by enumeration when it is small, and is
        called overlapping when it is not.
        """
        axes = sorted((abs(s), d) for d, s in zip(self.dims, self.strides) if d > 1)
        if self.size <= 1:
            return False
        extent = 0
        for stride, dim in axes:
            if stride <= extent:
                return self._overlaps_by_enumeration()
            extent += stride * (dim - 1)
        return False

    def _overlaps_by_enumeration(self, limit: int = 1 << 22) -> bool:
        if any(s == 0 and d > 1 for d, s in zip(self.dims, self.strides)) or self.size > limit:
            return True
        offsets = np.zeros(1, np.int64)
        for d, s in zip(self.dims, self.strides):
            offsets = (offsets[:, None] + np.arange(d, dtype=np.int64) * s).ravel()
        return bool(np.unique(offsets).size != offsets.size)

    def sub(self, start: Sequence[int], dims: Sequence[int]) -> tuple[int, TensorDesc]:
        """The sub-tensor of `dims` elements from `start`: (element offset of its origin, desc)."""
        start = integer_tuple("start", start)
        dims = integer_tuple("dims", dims)
        if len(start) != self.rank or len(dims) != self.rank:
            raise InvalidDescriptor("start, dims", (start, dims), f"{self.rank} numbers each")
        for a, n, d in zip(start, dims, self.dims):
            if a < 0 or n < 0 or a + n > d:
                raise InvalidDescriptor("start, dims", (start, dims), f"a box inside {self.dims}")
        offset = sum(a * s for a, s in zip(start, self.strides))
        return offset, TensorDesc(dims, self.strides, self.dtype)

    def permuted(self, axes: Sequence[int]) -> TensorDesc:
        """The same memory with its axes in another logical order."""
        if sorted(axes) != list(range(self.rank)):
            raise InvalidDescriptor("axes", tuple(axes), f"a permutation of 0..{self.rank - 1}")
        return TensorDesc(
            tuple(self.dims[a] for a in axes), tuple(self.strides[a] for a in axes), self.dtype
        )

    def __str__(self) -> str:
        dims = "x".join(map(str, self.dims))
        if self.layout is not None:
            return f"{dims} {self.layout} {self.dtype}"
        if self.is_packed():
            return f"{dims} {self.dtype}"
        return f"{dims} strides {','.join(map(str, self.strides))} {self.dtype}"


def memory_order(rank: int, layout: str | None) -> tuple[int, ...]:
    """Axes from outermost to innermost in memory for a layout name of that rank."""
    if layout is None:
        return tuple(range(rank))
    letters = LOGICAL_ORDERS.get(rank)
    name = layout.upper()
    if letters is None or sorted(name) != sorted(letters):
        expected = f"a permutation of {letters!r}" if letters else "None (row-major) for this rank"
        raise InvalidDescriptor("layout", layout, expected)
    return tuple(letters.index(letter) for letter in name)


@lru_cache(DESCRIPTORS_KEPT)
def _of_numpy(dims: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]) -> TensorDesc:
    """The descriptor of an array with these byte strides; a call describes the same ones again."""
    itemsize = dtype.itemsize
    if not dims:
        return TensorDesc((1,), (1,), DType.of(dtype))
    if any(s % itemsize for s in strides):
        expected = f"multiples of the element size, {itemsize} bytes"
        raise InvalidDescriptor("strides", strides, expected)
    return TensorDesc(dims, tuple(s // itemsize for s in strides), DType.of(dtype))
