"""Where batches come from: an LMDB, a list of image files, a list of HDF5 files.

A source hands out batches in an endless round over its data and can say at any time where it
stands: `state()` is a dictionary of numbers that JSON can hold, and after `restore(state)` the same
batches follow, bit for bit. Orders are drawn from (seed, epoch), so a state stays small however
long the list is.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bedstone.frameworks.caffe.data_images import read_image
from bedstone.frameworks.caffe.data_transform import DataTransformer
from bedstone.frameworks.caffe.hdf5_files import hdf5_file
from bedstone.spec.errors import InvalidDescriptor

Batch = list[np.ndarray]


class Source:
    """The base: a position in a round of `count` records, an epoch, a generator for transforms."""

    def __init__(self, count: int, batch_size: int, seed: int, shuffle: bool = False) -> None:
        if batch_size < 1:
            raise InvalidDescriptor("batch_size", batch_size, "1 or more")
        if count < 1:
            raise InvalidDescriptor("source", f"{count} records", "at least one record")
        self.count, self.batch_size, self.seed, self.shuffle = count, batch_size, seed, shuffle
        self.rng = np.random.default_rng(seed)
        self.epoch = self.position = 0
        self._order: np.ndarray | None = None

    def next_batch(self) -> Batch:
        """The arrays of the next batch, one for each top."""
        raise NotImplementedError

    def take(self) -> int:
        """The number of the next record; moves on, into the next epoch after the last."""
        if self._order is None and self.shuffle:
            self._order = self.permutation(self.count)
        record = int(self._order[self.position]) if self._order is not None else self.position
        self.position += 1
        if self.position >= self.count:
            self.epoch, self.position, self._order = self.epoch + 1, 0, None
        return record

    def permutation(self, count: int, *more: int) -> np.ndarray:
        """The order of `count` things in this epoch."""
        return np.random.default_rng([self.seed, self.epoch, *more]).permutation(count)

    def skip_at_random(self, limit: int) -> None:
        """Start up to `limit` records further on (`rand_skip`)."""
        if limit:
            for _ in range(int(self.rng.integers(limit))):
                self.take()

    def state(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self.position,
            "rng": self.rng.bit_generator.state,
        }

    def restore(self, state: dict[str, Any]) -> None:
        if not 0 <= state["position"] < self.count:
            expected = f"a position among {self.count} records: other data than the snapshot's?"
            raise InvalidDescriptor("data position", state["position"], expected)
        self.seed, self.epoch = state["seed"], state["epoch"]
        self.position, self._order = state["position"], None
        self.rng.bit_generator.state = state["rng"]


class ImageSource(Source):
    """A batch of images and their labels; `load(record)` gives an image (C, H, W) and a label."""

    def __init__(
        self,
        load: Callable[[int], tuple[np.ndarray, float]],
        transformer: DataTransformer,
        *,
        count: int,
        batch_size: int,
        seed: int,
        shuffle: bool = False,
    ) -> None:
        super().__init__(count, batch_size, seed, shuffle)
        self._load, self._transformer = load, transformer

    def next_batch(self) -> Batch:
        labels = np.empty(self.batch_size, np.float32)
        images = None
        for i in range(self.batch_size):
            record = self.take()
            image, labels[i] = self._load(record)
            shape = self._transformer.output_shape(image.shape)
            if images is None:
                images = np.empty((self.batch_size, *shape), np.float32)
            if shape != images.shape[1:]:
                expected = f"{images.shape[1:]} as the batch's first (see crop_size, new_height)"
                raise InvalidDescriptor(f"image {record}", shape, expected)
            self._transformer(image, self.rng, images[i])
        return [images, labels]  # type: ignore[list-item]


def image_list(path: str | Path) -> list[tuple[str, float]]:
    """The lines `file label` of a list of images; the label is what follows the last space."""
    lines: list[tuple[str, float]] = []
    for number, line in enumerate(read_lines(path), 1):
        name, _, label = line.rpartition(" ")
        try:
            lines.append((name, float(int(label))))
        except ValueError:
            expected = "a file name, a space and a whole number as label"
            raise InvalidDescriptor(f"{path}:{number}", line, expected) from None
    return lines


def read_lines(path: str | Path) -> list[str]:
    """The lines of a text file that are not empty."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidDescriptor("source", str(path), f"a list file ({error.strerror})") from None
    return [line.strip() for line in text.splitlines() if line.strip()]


class ImageListSource(ImageSource):
    """Image files named in a list."""

    def __init__(
        self,
        path: str | Path,
        transformer: DataTransformer,
        *,
        root: str = "",
        colour: bool = True,
        size: tuple[int, int] | None = None,
        **options: Any,
    ) -> None:
        lines = image_list(path)

        def load(record: int) -> tuple[np.ndarray, float]:
            name, label = lines[record]
            return read_image(root + name, colour, size), label

        super().__init__(load, transformer, count=len(lines), **options)


class Hdf5Source(Source):
    """Rows of the named data sets of a list of HDF5 files, read one file at a time."""

    def __init__(
        self, path: str | Path, names: list[str], *, batch_size: int, seed: int, shuffle: bool
    ) -> None:
        self.files = read_lines(path)
        if not self.files:
            raise InvalidDescriptor("source", str(path), "a list of at least one HDF5 file")
        self.names = names
        super().__init__(len(self.files), batch_size, seed, shuffle)
        self._row = 0
        self._file = self._rows = None
        self._data: Batch = []

    def next_batch(self) -> Batch:
        parts: list[Batch] = []
        wanted = self.batch_size
        while wanted:
            rows = self._current()
            here = rows[self._row : self._row + wanted]
            parts.append([data[here] for data in self._data])
            wanted -= len(here)
            self._row += len(here)
            if self._row >= len(rows):
                self._file, self._row = None, 0
                self.take()
        return [np.concatenate(arrays) for arrays in zip(*parts)]

    def _current(self) -> np.ndarray:
        """The order of rows of the file at hand, which is read if it is not yet."""
        if self._file is None:
            order = self.permutation(self.count) if self.shuffle else range(self.count)
            self._file = int(order[self.position])
            self._data = read_hdf5(self.files[self._file], self.names)
            count = len(self._data[0])
            more = self._file + 1  # (so that no file shares the order of the files)
            self._rows = self.permutation(count, more) if self.shuffle else np.arange(count)
        return self._rows

    def state(self) -> dict[str, Any]:
        return super().state() | {"row": self._row}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._file, self._row = None, state["row"]
        if not 0 <= self._row < len(self._current()):
            expected = f"a row of {self.files[self._file]}: other data than the snapshot's?"
            raise InvalidDescriptor("data row", self._row, expected)


def read_hdf5(path: str, names: list[str]) -> Batch:
    """The named data sets of a file, float32, equally long."""
    with hdf5_file(path, "r") as file:
        missing = [name for name in names if name not in file]
        if missing:
            expected = f"a data set of that name; the file has {', '.join(file) or 'none'}"
            raise InvalidDescriptor(f"{path}: top", missing[0], expected)
        arrays = [np.asarray(file[name], np.float32) for name in names]
    lengths = [array.shape[:1] for array in arrays]
    if not arrays or lengths[0] in ((), (0,)) or len(set(lengths)) > 1:
        raise InvalidDescriptor(path, lengths, "data sets with one number of rows, at least 1")
    return arrays


class Prefetcher:
    """One batch ahead, in a thread. `state()` is that of the last batch taken, not of that ahead.

    The source is touched only by the thread, or while no batch is under way.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bedstone-data")
        self._ahead: Future[tuple[Batch, dict[str, Any]]] | None = None
        self._state = source.state()

    def _work(self) -> tuple[Batch, dict[str, Any]]:
        return self.source.next_batch(), self.source.state()

    def next_batch(self) -> Batch:
        ahead = self._ahead or self._thread.submit(self._work)
        self._ahead = None
        batch, self._state = ahead.result()
        self._ahead = self._thread.submit(self._work)
        return batch

    def state(self) -> dict[str, Any]:
        return self._state

    def restore(self, state: dict[str, Any]) -> None:
        if self._ahead is not None:
            self._ahead.exception()  # (waits; a failure there is no matter any more)
            self._ahead = None
        self.source.restore(state)
        self._state = self.source.state()
