"""Blobs: the arrays that flow through a network, each with its gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

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

        proto = schema.BlobProto()
        proto.shape.dim.extend(self.shape)
        proto.data.extend(self.data.reshape(-1))
        if write_diff:
            proto.diff.extend(self.diff.reshape(-1))
        return proto


def array_of(proto: Any) -> np.ndarray:
    """The data of a BlobProto, in its shape (or the four extents of older files).

    Raises InvalidDescriptor where shape and number of elements disagree.
    """
    values = np.asarray(proto.data or proto.double_data, np.float32)
    if proto.HasField("shape"):
        shape = tuple(proto.shape.dim)
    else:
        shape = (proto.num, proto.channels, proto.height, proto.width)
        if not any(proto.HasField(n) for n in ("num", "channels", "height", "width")):
            shape = values.shape
    if math.prod(shape) != values.size:
        raise InvalidDescriptor("blob", f"{values.size} elements", f"the shape {shape}'s")
    return values.reshape(shape)
