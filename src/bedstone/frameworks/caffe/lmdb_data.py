"""LMDB databases of Datum records, Caffe's usual form of a data set: reading and writing.

A record is an image's bytes (channels, height, width), or floats, or an encoded file such as a
JPEG, with a label of a whole number. Keys are eight digits, so their order is the order of writing.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bedstone.frameworks.caffe import schema
from bedstone.frameworks.caffe.data_images import read_image
from bedstone.spec.errors import InvalidDescriptor

# Room added each time that a database is full: LMDB reserves addresses, not disk.
GROWTH = 2**30


def _module(path: str | Path) -> Any:
    try:
        import lmdb
    except ImportError:
        raise InvalidDescriptor("LMDB", str(path), "the package lmdb installed") from None
    return lmdb


# One environment a database: LMDB forbids opening one twice in a process, and a training and a
# test network may well share theirs.
_open: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_opening = threading.Lock()


class _Environment:
    def __init__(self, path: str) -> None:
        lmdb = _module(path)
        try:
            self.lmdb = lmdb.open(path, readonly=True, lock=False, readahead=False, meminit=False)
        except lmdb.Error as error:
            raise InvalidDescriptor("source", path, f"an LMDB database ({error})") from None

    def __del__(self) -> None:
        if hasattr(self, "lmdb"):
            self.lmdb.close()


class LmdbReader:
    """The records of a database by number: cheap in their order, else a walk from the start."""

    def __init__(self, path: str | Path) -> None:
        name = os.path.realpath(path)
        if not (Path(name) / "data.mdb").is_file():
            maker = Path(name).parent / "make_data.py"
            hint = f"; {maker} makes it" if maker.is_file() else ""
            raise InvalidDescriptor("source", str(path), f"the folder of an LMDB database{hint}")
        with _opening:
            self._environment = _open.get(name) or _Environment(name)
            _open[name] = self._environment
        self.path = str(path)
        self._transaction = self._environment.lmdb.begin(buffers=True)
        self._cursor = self._transaction.cursor()
        self._at = -1
        self.count = int(self._environment.lmdb.stat()["entries"])
        if not self.count:
            raise InvalidDescriptor("source", str(path), "a database with at least one record")

    def record(self, number: int) -> memoryview:
        """The bytes of record `number`, valid until the next call."""
        if number != self._at + 1 or number == 0:
            self._cursor.first()
            self._at = 0
        while self._at < number:
            self._cursor.next()
            self._at += 1
        return self._cursor.value()

    def datum(self, number: int, colour: bool | None = None) -> tuple[np.ndarray, float]:
        """Image and label of a record; `colour` as for `read_image`, where it is encoded."""
        datum = schema.Datum()
        try:
            datum.ParseFromString(bytes(self.record(number)))
        except Exception as error:  # protobuf's DecodeError, of which there are several classes
            expected = f"a Datum ({type(error).__name__})"
            raise InvalidDescriptor(
                f"{self.path}: record {number}", "other bytes", expected
            ) from None
        return image_of(datum, f"{self.path}: record {number}", colour), float(datum.label)


def image_of(datum: Any, name: str, colour: bool | None = None) -> np.ndarray:
    """The image of a Datum: uint8, or float32 where it holds floats."""
    if datum.encoded:
        return read_image(datum.data, colour)
    shape = (datum.channels, datum.height, datum.width)
    if datum.data:
        values = np.frombuffer(datum.data, np.uint8)
    else:
        values = np.asarray(datum.float_data, np.float32)
    if values.size != np.prod(shape) or not values.size:
        raise InvalidDescriptor(name, f"{values.size} values", f"as many as its shape, {shape}")
    return values.reshape(shape)


def write_lmdb(
    path: str | Path, images: np.ndarray, labels: Sequence[int] | np.ndarray, *, start: int = 0
) -> None:
    """Write images (N, C, H, W) and labels as records `start`, `start` + 1, ... of a database.

    uint8 images are kept as bytes, all others as floats. An existing database is added to.
    """
    lmdb = _module(path)
    images = np.asarray(images)
    if images.ndim != 4 or len(images) != len(labels):
        expected = f"(N, C, H, W) with N = {len(labels)}, the number of labels"
        raise InvalidDescriptor("images", images.shape, expected)
    try:
        environment = lmdb.open(str(path), map_size=GROWTH + 2 * images.nbytes)
    except lmdb.Error as error:
        raise InvalidDescriptor("output", str(path), f"a place for a database ({error})") from None
    with environment:
        used = environment.info()["last_pgno"] * environment.stat()["psize"]
        environment.set_mapsize(used + GROWTH + 4 * images.nbytes)
        with environment.begin(write=True) as transaction:
            for i, (image, label) in enumerate(zip(images, labels), start):
                channels, height, width = image.shape
                datum = schema.Datum(
                    channels=channels, height=height, width=width, label=int(label)
                )
                if image.dtype == np.uint8:
                    datum.data = image.tobytes()
                else:
                    datum.float_data.extend(np.asarray(image, np.float32).ravel())
                transaction.put(b"%08d" % i, datum.SerializeToString())
