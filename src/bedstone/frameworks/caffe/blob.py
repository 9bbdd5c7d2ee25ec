"""Blobs: the arrays that flow through a network, each with its gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from bedstone.frameworks.caffe import wire
from bedstone.spec.errors import InvalidDescriptor


class Blob:
    """`data` and `diff` (its gradient) of one shape and dtype, both C-contiguous.

    Memory comes with the first use of either. Several blobs may show the same memory: `share_data`
    and `share_diff`.
    """

    def __init__(self, shape: Sequence[int] = (), dtype: Any = np.float32) -> None:
        self.shape: tuple[int, ...] = tuple(shape)
        self.dtype = np.dtype(dtype)
        self._data: np.ndarray | None = None
        self._diff: np.ndarray | None = None

    def reshape(self, *shape: int) -> None:
        """Give the blob another shape; what it held is kept where the count stays the same."""
        dims = tuple(int(d) for d in shape)
        if any(d < 0 for d in dims):
            raise InvalidDescriptor("shape", dims, "extents of 0 or more")
        if dims == self.shape:
            return
        same = math.prod(dims) == self.count
        self.shape = dims
        self._data = self._data.reshape(dims) if same and self._data is not None else None
        self._diff = self._diff.reshape(dims) if same and self._diff is not None else None

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def data(self) -> np.ndarray:
        if self._data is None:
            self._data = np.zeros(self.shape, self.dtype)
        return self._data

    @data.setter
    def data(self, values: Any) -> None:
        self.data[...] = values

    @property
    def diff(self) -> np.ndarray:
        if self._diff is None:
            self._diff = np.zeros(self.shape, self.dtype)
        return self._diff

    @diff.setter
    def diff(self, values: Any) -> None:
        self.diff[...] = values

    @property
    def held_bytes(self) -> int:
        """Bytes of the memory that is there."""
        return sum(a.nbytes for a in (self._data, self._diff) if a is not None)

    def share_data(self, other: Blob) -> None:
        """Show the other blob's data (of as many elements) in this blob's shape."""
        self._data = other.data.reshape(self.shape)

    def share_diff(self, other: Blob) -> None:
        """Show the other blob's gradient in this blob's shape."""
        self._diff = other.diff.reshape(self.shape)

    def to_proto(self, write_diff: bool = False) -> Any:
        """A BlobProto of the data and, if asked for, the gradient."""
        from bedstone.frameworks.caffe import schema

        arrays = [self.data, self.diff] if write_diff else [self.data]
        # (Encoded and parsed: a repeated field takes elements one by one, its encoding whole.)
        parts = wire.blob_parts(arrays, self.shape)
        return schema.BlobProto.FromString(b"".join(bytes(part) for part in parts))


def array_of(proto: Any) -> np.ndarray:
    """The data of a BlobProto, in its shape (or the four extents of older files).

    Raises InvalidDescriptor where shape and number of elements disagree.
    """
    encoded = proto.SerializeToString()
    return wire.Reader(encoded, "blob").blob(0, len(encoded)).array()
