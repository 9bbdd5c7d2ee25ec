"""Blobs: the arrays that flow through a network, each with its gradient.

A blob's elements lie on the host, on a device, or both: whoever asks for an array gets the newest
elements, copied over where they are on the other side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from bedstone.frameworks.caffe import wire
from bedstone.frameworks.caffe.spaces import HOST, Host
from bedstone.spec.errors import InvalidDescriptor


class Memory:
    """So many elements, zeros at first, in every space that has asked for them."""

    def __init__(self, count: int, dtype: np.dtype) -> None:
        self.count, self.dtype = count, dtype
        self._arrays: dict[Host, Any] = {}
        self._newest: set[Host] = set()

    def at(self, space: Host) -> Any:
        """The newest elements as a flat array of a space."""
        if space in self._newest:
            return self._arrays[space]
        if not self._newest:
            self._arrays[space] = space.zeros((self.count,), self.dtype)
        else:
            if space not in self._arrays:
                self._arrays[space] = space.empty((self.count,), self.dtype)
            if space is HOST:
                source = next(iter(self._newest))
                source.download(self._arrays[source], self._arrays[HOST])
            else:
                space.upload(self.at(HOST), self._arrays[space])
        self._newest.add(space)
        return self._arrays[space]

    def wrote(self, space: Host) -> None:
        """What a space has is newer than elsewhere, if it has got it at all."""
        if len(self._newest) > 1 and space in self._newest:
            self._newest = {space}

    @property
    def nbytes(self) -> int:
        """Bytes in all spaces."""
        return len(self._arrays) * self.count * self.dtype.itemsize


class Blob:
    """`data` and `diff` (its gradient) of one shape and dtype, both C-contiguous.

    Memory comes with the first use of either. Several blobs may show the same memory: `share_data`
    and `share_diff`. `data` and `diff` are the host's arrays, to read and to write: ask for them
    anew after the network has run on a device. `on(space)` is the blob for who computes there.
    """

    def __init__(self, shape: Sequence[int] = (), dtype: Any = np.float32) -> None:
        self.shape: tuple[int, ...] = tuple(shape)
        self.dtype = np.dtype(dtype)
        self._memories: dict[str, Memory] = {}
        self._shaped: dict[tuple[str, Host], tuple[Any, Any]] = {}
        self._views: dict[Host, View] = {}

    def reshape(self, *shape: int) -> None:
        """Give the blob another shape; what it held is kept where the count stays the same."""
        dims = tuple(int(d) for d in shape)
        if any(d < 0 for d in dims):
            raise InvalidDescriptor("shape", dims, "extents of 0 or more")
        if dims == self.shape:
            return
        if math.prod(dims) != self.count:
            self._memories.clear()
        self.shape = dims
        self._shaped.clear()

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def memory(self, kind: str) -> Memory:
        """Where the "data" or the "diff" is."""
        found = self._memories.get(kind)
        if found is None:
            found = self._memories[kind] = Memory(self.count, self.dtype)
        return found

    def array(self, kind: str, space: Host) -> Any:
        """The newest "data" or "diff" in a space."""
        flat = self.memory(kind).at(space)
        known = self._shaped.get((kind, space))
        if known is None or known[0] is not flat:
            known = self._shaped[kind, space] = (flat, flat.reshape(self.shape))
        return known[1]

    def wrote(self, kind: str, space: Host) -> None:
        """The "data" or "diff" was changed in a space."""
        self.memory(kind).wrote(space)

    @property
    def data(self) -> np.ndarray:
        found = self.array("data", HOST)
        self.wrote("data", HOST)
        return found

    @data.setter
    def data(self, values: Any) -> None:
        self.data[...] = values

    @property
    def diff(self) -> np.ndarray:
        found = self.array("diff", HOST)
        self.wrote("diff", HOST)
        return found

    @diff.setter
    def diff(self, values: Any) -> None:
        self.diff[...] = values

    def on(self, space: Host) -> View:
        """The blob as a layer sees it that computes in a space."""
        if space not in self._views:
            self._views[space] = View(self, space)
        return self._views[space]

    @property
    def held_bytes(self) -> int:
        """Bytes of the memory that is there."""
        return sum(memory.nbytes for memory in self._memories.values())

    def share_data(self, other: Blob | View) -> None:
        """Show the other blob's data (of as many elements) in this blob's shape."""
        self._memories["data"] = other.memory("data")

    def share_diff(self, other: Blob | View) -> None:
        """Show the other blob's gradient in this blob's shape."""
        self._memories["diff"] = other.memory("diff")

    def to_proto(self, write_diff: bool = False) -> Any:
        """A BlobProto of the data and, if asked for, the gradient."""
        from bedstone.frameworks.caffe import schema

        host = self.on(HOST)
        arrays = [host.data, host.diff] if write_diff else [host.data]
        # (Encoded and parsed: a repeated field takes elements one by one, its encoding whole.)
        parts = wire.blob_parts(arrays, self.shape)
        return schema.BlobProto.FromString(b"".join(bytes(part) for part in parts))


class View:
    """A blob whose `data` and `diff` are arrays of one space.

    Reading them fetches the newest elements. Who writes into them says so with `wrote`, or assigns:
    `view.data = values`.
    """

    def __init__(self, blob: Blob, space: Host) -> None:
        self.blob, self.space = blob, space
        self.on, self.memory = blob.on, blob.memory
        self.reshape, self.share_data, self.share_diff = (
            blob.reshape, blob.share_data, blob.share_diff,
        )  # fmt: skip

    @property
    def shape(self) -> tuple[int, ...]:
        return self.blob.shape

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.blob.count

    @property
    def data(self) -> Any:
        return self.blob.array("data", self.space)

    @data.setter
    def data(self, values: Any) -> None:
        self.data[...] = values
        self.wrote("data")

    @property
    def diff(self) -> Any:
        return self.blob.array("diff", self.space)

    @diff.setter
    def diff(self, values: Any) -> None:
        self.diff[...] = values
        self.wrote("diff")

    def wrote(self, kind: str) -> None:
        """The "data" or "diff" was changed here."""
        self.blob.wrote(kind, self.space)


def array_of(proto: Any) -> np.ndarray:
    """The data of a BlobProto, in its shape (or the four extents of older files).

    Raises InvalidDescriptor where shape and number of elements disagree.
    """
    encoded = proto.SerializeToString()
    return wire.Reader(encoded, "blob").blob(0, len(encoded)).array()
