"""Weights in Caffe's binary files, read and written without taking them apart.

A .caffemodel is a protobuf message whose bulk are runs of packed floats. To go through it element
by element would take minutes and several times the memory: here only the fields around the runs are
decoded, the runs are read from the file straight into arrays, and writing sends arrays' own memory.
Source: the protobuf encoding, https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import io
import math
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from bedstone.frameworks.caffe.spaces import HOST
from bedstone.spec.errors import InvalidDescriptor

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
# Fields of a BlobProto, and those of a layer that writing needs.
OLDER_DIMS, SHAPE, DIM = (1, 2, 3, 4), 7, 1
DATA, DIFF, DOUBLE_DATA, DOUBLE_DIFF = 5, 6, 8, 9
NET_NAME, LAYER, LAYER_BLOBS = 1, 100, 7
DTYPES = {DATA: "<f4", DOUBLE_DATA: "<f8"}


@dataclass(frozen=True)
class Form:
    """Fields of a layer's message: its name, its blobs, and one that holds an older layer."""

    name: int
    blobs: int
    older: int | None = None


V0 = Form(name=1, blobs=50)
# NetParameter's fields that hold layers: today's, and V1's, in which V0's are wrapped.
LAYERS = {LAYER: Form(1, LAYER_BLOBS), 2: Form(4, 6, older=1)}


@dataclass(frozen=True)
class Stored:
    """An array in a file (or in `content`): runs of (first byte, number, dtype of elements)."""

    path: str
    shape: tuple[int, ...]
    runs: tuple[tuple[int, int, str], ...]
    content: bytes | None = None

    def read_into(self, out: np.ndarray) -> None:
        """Fill an array of as many elements, contiguous, from the file."""
        flat, at = out.reshape(-1), 0
        held = self.content
        with open(self.path, "rb") if held is None else io.BytesIO(held) as file:
            for first, count, dtype in self.runs:
                part = flat[at : at + count]
                same = part.dtype == np.dtype(dtype)
                given = part if same else np.empty(count, dtype)
                file.seek(first)
                if file.readinto(given.view(np.uint8)) != given.nbytes:
                    raise InvalidDescriptor("file", self.path, "a file that nobody is writing to")
                if not same:
                    part[...] = given
                at += count

    def array(self) -> np.ndarray:
        """The array, in the precision of the file."""
        found = np.empty(self.shape, np.result_type("f4", *{d for _, _, d in self.runs}))
        self.read_into(found)
        return found


def copy_into(source: Stored | np.ndarray, out: np.ndarray) -> None:
    """Fill `out` with as many elements from a file or an array."""
    if isinstance(source, Stored):
        source.read_into(out)
    else:
        out[...] = source.reshape(out.shape)


class Reader:
    """Decodes fields of a buffer, which holds a whole file (or a blob's message); raises
    InvalidDescriptor, naming the file and the layer at hand, where it ends early."""

    def __init__(self, buffer: Any, name: str) -> None:
        self.buffer, self.name = buffer, name
        self.layer = ""

    @classmethod
    def of(cls, path: str | Path) -> Reader:
        """A reader of a file, mapped: only what is looked at takes memory."""
        with open(path, "rb") as file:
            try:
                return cls(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), str(path))
            except ValueError:  # an empty file is an empty message
                return cls(b"", str(path))

    def wrong(self, value: object, expected: str) -> InvalidDescriptor:
        """The error to raise for what the file holds."""
        where = f"{self.name}: layer {self.layer}" if self.layer else self.name
        return InvalidDescriptor(where, value, expected)

    def cut(self, at: int) -> InvalidDescriptor:
        """The error for a file that is not what it should be."""
        expected = "a whole protobuf file; this one is cut short or of another kind"
        return self.wrong(f"{len(self.buffer)} bytes, unsound at {at}", expected)

    def varint(self, at: int, end: int) -> tuple[int, int]:
        """(value, where it ends)."""
        value = shift = 0
        start = at
        while at < end and shift < 70:
            byte = self.buffer[at]
            value |= (byte & 127) << shift
            at += 1
            if byte < 128:
                return value, at
            shift += 7
        raise self.cut(start)

    def fields(self, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """(field number, wire type, first byte of the value, its end) of a message; for a varint
        the value stands in place of the first byte."""
        while at < end:
            start = at
            tag, at = self.varint(at, end)
            number, kind = tag >> 3, tag & 7
            if kind == VARINT:
                value, at = self.varint(at, end)
                yield number, kind, value, at
                continue
            if kind == BYTES:
                size, at = self.varint(at, end)
            elif kind in (FIXED32, FIXED64):
                size = 4 if kind == FIXED32 else 8
            else:
                raise self.cut(start)
            if at + size > end:
                if end == len(self.buffer) and number in LAYERS and kind == BYTES:
                    self._name_layer(LAYERS[number], at, end)
                raise self.cut(start)
            yield number, kind, at, at + size
            at += size

    def _name_layer(self, form: Form, at: int, end: int) -> None:
        """Find the name of a layer that the file does not hold whole."""
        try:
            for number, kind, first, last in self.fields(at, end):
                if number == form.name and kind == BYTES:
                    self.layer = self.text(first, last)
        except InvalidDescriptor:
            pass  # that is where it ends

    def text(self, at: int, end: int) -> str:
        return bytes(self.buffer[at:end]).decode("utf-8", "replace")

    def blob(self, at: int, end: int) -> Stored:
        """The array of a BlobProto."""
        dims: list[int] = []
        older = [0, 0, 0, 0]
        runs: list[tuple[int, int, str]] = []
        for number, kind, first, last in self.fields(at, end):
            if number == SHAPE and kind == BYTES:
                dims = self._dims(first, last)
            elif number in OLDER_DIMS and kind == VARINT:
                older[number - 1] = first
            elif number in DTYPES and kind in (BYTES, FIXED32, FIXED64):
                dtype = DTYPES[number]
                count, rest = divmod(last - first, np.dtype(dtype).itemsize)
                if rest:
                    raise self.cut(first)
                runs.append((first, count, dtype))
        shape = tuple(dims) if dims or not any(older) else tuple(older)
        count = sum(number for _, number, _ in runs)
        if math.prod(shape) != count:
            raise self.wrong(f"{count} elements", f"as many as a blob's shape {shape} has")
        content = self.buffer if isinstance(self.buffer, bytes) else None
        return Stored(self.name, shape, tuple(runs), content)

    def _dims(self, at: int, end: int) -> list[int]:
        found = []
        for number, kind, first, last in self.fields(at, end):
            if number == DIM and kind == VARINT:
                found.append(first)
            elif number == DIM:
                while first < last:
                    value, first = self.varint(first, last)
                    found.append(value)
        return found

    def layers(self) -> Iterator[tuple[Form, int, int]]:
        """(form, first byte, end) of every layer of a NetParameter."""
        for number, kind, at, end in self.fields(0, len(self.buffer)):
            if number in LAYERS and kind == BYTES:
                yield LAYERS[number], at, end

    def weights(self, form: Form, at: int, end: int) -> tuple[str, list[Stored]]:
        """A layer's name and blobs."""
        name, arrays, self.layer = "", [], ""
        for number, kind, first, last in self.fields(at, end):
            if kind != BYTES:
                continue
            if number == form.name:
                name = self.layer = self.text(first, last)
            elif number == form.blobs:
                arrays.append(self.blob(first, last))
            elif number == form.older:
                name, arrays = self.weights(V0, first, last)
        return name, arrays

    def without(self, form: Form, at: int, end: int) -> bytes:
        """A layer's message less its blobs."""
        parts, start = [], at
        for number, kind, first, last in self.fields(at, end):
            if number == form.older and kind == BYTES:
                inner = self.without(V0, first, last)
                parts.append(_field(number, len(inner)) + inner)
            elif number != form.blobs:
                parts.append(bytes(self.buffer[start:last]))
            start = last
        return b"".join(parts)


def read_weights(path: str | Path) -> list[tuple[str, list[Stored]]]:
    """(layer's name, its arrays, still in the file) of every layer with blobs. Raises
    InvalidDescriptor, naming the layer, for a file that is missing or cut short."""
    if not Path(path).is_file():
        raise InvalidDescriptor("weights", str(path), "a file that exists")
    reader, found = Reader.of(path), []
    for form, at, end in reader.layers():
        name, arrays = reader.weights(form, at, end)
        reader.layer = ""
        if arrays:
            found.append((name, arrays))
    return found


def read_structure(path: str | Path) -> bytes:
    """The NetParameter of a file less all blobs, encoded."""
    reader = Reader.of(path)
    parts, start = [], 0
    for number, kind, at, end in reader.fields(0, len(reader.buffer)):
        if number in LAYERS and kind == BYTES:
            inner = reader.without(LAYERS[number], at, end)
            parts.append(_field(number, len(inner)) + inner)
        else:
            parts.append(bytes(reader.buffer[start:end]))
        start = end
    return b"".join(parts)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


def _field(number: int, size: int) -> bytes:
    return _varint(number << 3 | BYTES) + _varint(size)


def blob_parts(arrays: Iterable[np.ndarray], shape: tuple[int, ...]) -> list[Any]:
    """The encoded BlobProto of data and, if given, gradient: bytes, and the arrays themselves."""
    dims = b"".join(_varint(d) for d in shape)
    packed = _field(DIM, len(dims)) + dims
    parts: list[Any] = [_field(SHAPE, len(packed)) + packed]
    for array, single, double in zip(arrays, (DATA, DIFF), (DOUBLE_DATA, DOUBLE_DIFF)):
        is_double = array.dtype == np.float64
        memory = np.ascontiguousarray(array, "<f8" if is_double else "<f4")
        parts += [_field(double if is_double else single, memory.nbytes), memory]
    return parts


def _size(parts: list[Any]) -> int:
    return sum(p.nbytes if isinstance(p, np.ndarray) else len(p) for p in parts)


def write_weights(file: BinaryIO, net: Any, write_diff: bool = False) -> None:
    """A network with its weights, as a NetParameter."""
    name = net.name.encode()
    file.write(_field(NET_NAME, len(name)) + name)
    for layer in net.layers:
        parts: list[Any] = [net.layer_proto(layer).SerializeToString()]
        for blob in layer.blobs:
            host = blob.on(HOST)
            inner = blob_parts([host.data, host.diff] if write_diff else [host.data], blob.shape)
            parts += [_field(LAYER_BLOBS, _size(inner)), *inner]
        _send(file, LAYER, parts)


def write_blob(file: BinaryIO, number: int, array: np.ndarray) -> None:
    """An array as a BlobProto, in field `number` of the message that the file holds."""
    _send(file, number, blob_parts([array], array.shape))


def _send(file: BinaryIO, number: int, parts: list[Any]) -> None:
    file.write(_field(number, _size(parts)))
    for part in parts:
        file.write(part.reshape(-1).view(np.uint8) if isinstance(part, np.ndarray) else part)
