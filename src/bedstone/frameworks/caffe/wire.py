"""Weights in Caffe's binary files, read and written without taking them apart.

A .caffemodel is a protobuf message whose bulk are runs of packed floats. To go through it element
by element would take minutes and several times the memory: here only the fields around the runs
are decoded, the runs are NumPy views of the mapped file, and writing sends arrays' own memory.
Source: the protobuf encoding, https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from bedstone.spec.errors import InvalidDescriptor

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
# Numbers of fields: of NetParameter's layers, and in these the name and the blobs (new and V1).
LAYERS = {100: (1, 7), 2: (4, 6)}
SHAPE, DATA, DIFF, DOUBLE_DATA, DIM = 7, 5, 6, 8, 1
NET_NAME, LAYER, LAYER_NAME, LAYER_TYPE, LAYER_BLOBS = 1, 100, 1, 2, 7


class Reader:
    """Decodes fields of a buffer; raises InvalidDescriptor where it ends early."""

    def __init__(self, buffer: Any, name: str) -> None:
        self.buffer, self.name = buffer, name

    def cut(self) -> InvalidDescriptor:
        """The error for a file that is not what it should be."""
        return InvalidDescriptor("file", self.name, "a whole protobuf file; this one is cut short")

    def varint(self, at: int, end: int) -> tuple[int, int]:
        """(value, where it ends)."""
        value = shift = 0
        while at < end and shift < 70:
            byte = self.buffer[at]
            value |= (byte & 127) << shift
            at += 1
            if byte < 128:
                return value, at
            shift += 7
        raise self.cut()

    def fields(self, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """(field number, wire type, first byte of the value, its end) of a message; for a varint
        the value stands in place of the first byte."""
        while at < end:
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
                raise self.cut()
            if at + size > end:
                raise self.cut()
            yield number, kind, at, at + size
            at += size

    def blob(self, at: int, end: int) -> np.ndarray:
        """The array of a BlobProto: a view of the buffer."""
        dims: list[int] = []
        older = [0, 0, 0, 0]
        runs: list[np.ndarray] = []
        for number, kind, first, last in self.fields(at, end):
            if number == SHAPE and kind == BYTES:
                dims = self._dims(first, last)
            elif number <= 4 and kind == VARINT:
                older[number - 1] = first
            elif number == DATA and kind in (BYTES, FIXED32):
                runs.append(np.frombuffer(self.buffer, "<f4", (last - first) // 4, first))
            elif number == DOUBLE_DATA and kind in (BYTES, FIXED64):
                runs.append(np.frombuffer(self.buffer, "<f8", (last - first) // 8, first))
        values = runs[0] if len(runs) == 1 else np.concatenate([*runs, np.empty(0, np.float32)])
        shape = tuple(dims) if dims or not any(older) else tuple(older)
        if math.prod(shape) != values.size:
            raise InvalidDescriptor(
                "file",
                self.name,
                f"blobs of the sizes they name; {values.size} elements for {shape}",
            )
        return values.reshape(shape)

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


def read_weights(path: str | Path) -> list[tuple[str, list[np.ndarray]]]:
    """(layer's name, its arrays) of every layer with blobs; the arrays are read-only views of the
    file. Raises InvalidDescriptor for a file that is missing or cut short."""
    if not Path(path).is_file():
        raise InvalidDescriptor("weights", str(path), "a file that exists")
    with open(path, "rb") as file:
        try:
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # an empty file is an empty message
            return []
    reader = Reader(buffer, str(path))
    found = []
    for number, kind, at, end in reader.fields(0, len(buffer)):
        if number not in LAYERS or kind != BYTES:
            continue
        name_field, blobs_field = LAYERS[number]
        name, arrays = "", []
        for inner, how, first, last in reader.fields(at, end):
            if how != BYTES:
                continue
            if inner == name_field:
                name = bytes(buffer[first:last]).decode("utf-8", "replace")
            elif inner == blobs_field:
                arrays.append(reader.blob(first, last))
        if arrays:
            found.append((name, arrays))
    return found


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


def _field(number: int, size: int) -> bytes:
    return _varint(number << 3 | BYTES) + _varint(size)


def _text(number: int, text: str) -> bytes:
    raw = text.encode()
    return _field(number, len(raw)) + raw


def _blob_parts(arrays: Iterable[tuple[int, np.ndarray]], shape: tuple[int, ...]) -> list[Any]:
    dims = b"".join(_varint(d) for d in shape)
    packed = _field(DIM, len(dims)) + dims
    parts: list[Any] = [_field(SHAPE, len(packed)) + packed]
    for number, array in arrays:
        memory = np.ascontiguousarray(array, "<f4")
        parts += [_field(number, memory.nbytes), memory]
    return parts


def _size(parts: list[Any]) -> int:
    return sum(p.nbytes if isinstance(p, np.ndarray) else len(p) for p in parts)


def write_weights(file: BinaryIO, net: Any, write_diff: bool = False) -> None:
    """The network's name, and name, type and blobs of every layer, as a NetParameter."""
    file.write(_text(NET_NAME, net.name))
    for layer in net.layers:
        parts: list[Any] = [_text(LAYER_NAME, layer.name) + _text(LAYER_TYPE, layer.type)]
        for blob in layer.blobs:
            arrays = [(DATA, blob.data)] + ([(DIFF, blob.diff)] if write_diff else [])
            inner = _blob_parts(arrays, blob.shape)
            parts += [_field(LAYER_BLOBS, _size(inner)), *inner]
        _send(file, LAYER, parts)


def write_blob(file: BinaryIO, number: int, array: np.ndarray) -> None:
    """An array as a BlobProto, in field `number` of the message that the file holds."""
    _send(file, number, _blob_parts([(DATA, array)], array.shape))


def _send(file: BinaryIO, number: int, parts: list[Any]) -> None:
    file.write(_field(number, _size(parts)))
    for part in parts:
        file.write(memoryview(part).cast("B") if isinstance(part, np.ndarray) else part)
