"""Layers that read data sets, Data (LMDB), ImageData, HDF5Data; HDF5Output, which writes one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bedstone.frameworks.caffe import io, schema
from bedstone.frameworks.caffe.blob import Blob
from bedstone.frameworks.caffe.data_layers import DataLayer
from bedstone.frameworks.caffe.data_sources import (
    Hdf5Source,
    ImageListSource,
    ImageSource,
    Prefetcher,
    Source,
)
from bedstone.frameworks.caffe.data_transform import DataTransformer
from bedstone.frameworks.caffe.hdf5_files import append_rows, hdf5_file
from bedstone.frameworks.caffe.layer import Layer
from bedstone.frameworks.caffe.lmdb_data import LmdbReader
from bedstone.frameworks.caffe.registry import register
from bedstone.spec.errors import InvalidDescriptor

SEED_LIMIT = 2**31


class SourceLayer(DataLayer):
    """A layer over a source, whose batches a thread prepares one ahead."""

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        # A seed of its own, so that what one layer draws does not depend on the others.
        seed = int(self.net.rng.integers(SEED_LIMIT))
        self._source = Prefetcher(self.source(seed, len(top)))
        # The shapes of the tops are those of a first batch, which is not used up.
        start = self._source.state()
        self._give(self._source.source.next_batch(), top)
        self._source.restore(start)

    def source(self, seed: int, tops: int) -> Source:
        """The source of the batches."""
        raise NotImplementedError

    def _give(self, batch: list[np.ndarray], top: Sequence[Blob]) -> None:
        for blob, array in zip(top, batch):
            if blob.data.shape != array.shape:
                blob.reshape(*array.shape)
            blob.data[...] = array

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        self._give(self._source.next_batch(), top)

    def state(self) -> dict[str, Any]:
        return self._source.state()

    def restore(self, state: dict[str, Any]) -> None:
        self._source.restore(state)

    def transformer(self) -> DataTransformer:
        """The layer's transform, its mean image read."""
        param = self.param.transform_param
        mean = io.read_mean(param.mean_file) if param.mean_file else None
        return DataTransformer(param, self.phase == "TRAIN", mean)

    def colour(self) -> bool | None:
        param = self.param.transform_param
        if param.force_color and param.force_gray:
            raise self.wrong("force_color and force_gray", "both", "one of the two")
        return True if param.force_color else False if param.force_gray else None


@register("Data")
class DataLmdbLayer(SourceLayer):
    """Records of an LMDB database, in their order."""

    tops = (1, 2)

    def source(self, seed: int, tops: int) -> Source:
        param = self.param.data_param
        if schema.enum_name(param, "backend") != "LMDB":
            expected = "LMDB (convert a LevelDB first; `backend: LMDB` must be written out)"
            raise InvalidDescriptor("backend", "LEVELDB", expected)
        reader = LmdbReader(param.source)
        colour = True if param.force_encoded_color else self.colour()
        source = ImageSource(
            lambda record: reader.datum(record, colour), self.transformer(),
            count=reader.count, batch_size=param.batch_size, seed=seed,
        )  # fmt: skip
        source.skip_at_random(param.rand_skip)
        return source


@register("ImageData")
class ImageDataLayer(SourceLayer):
    """Image files named in a list with their labels."""

    tops = 2

    def source(self, seed: int, tops: int) -> Source:
        param = self.param.image_data_param
        if bool(param.new_height) != bool(param.new_width):
            given = (param.new_height, param.new_width)
            raise InvalidDescriptor("new_height, new_width", given, "both or neither")
        source = ImageListSource(
            param.source, self.transformer(), root=param.root_folder, colour=param.is_color,
            size=(param.new_height, param.new_width) if param.new_height else None,
            batch_size=param.batch_size, seed=seed, shuffle=param.shuffle,
        )  # fmt: skip
        source.skip_at_random(param.rand_skip)
        return source


@register("HDF5Data")
class Hdf5DataLayer(SourceLayer):
    """Rows of HDF5 files named in a list; a top is the data set of its name."""

    def source(self, seed: int, tops: int) -> Source:
        param = self.param.hdf5_data_param
        if self.param.HasField("transform_param"):
            raise InvalidDescriptor("transform_param", "given", "none: HDF5Data does not transform")
        return Hdf5Source(
            param.source, list(self.param.top), batch_size=param.batch_size, seed=seed,
            shuffle=param.shuffle,
        )  # fmt: skip


@register("HDF5Output")
class Hdf5OutputLayer(Layer):
    """Appends its bottoms to the data sets `data` and `label` of a file, batch by batch."""

    bottoms, tops = 2, 0
    NAMES = ("data", "label")

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        self._path = Path(self.param.hdf5_output_param.file_name)
        if not self._path.name:
            raise self.wrong("file_name", "", "a file to write")
        with hdf5_file(self._path, "w"):
            pass  # an older file of that name goes

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        lengths = [blob.data.shape[:1] for blob in bottom]
        if len(set(lengths)) > 1 or lengths[0] == ():
            raise self.wrong("bottom", lengths, "as many rows in both bottoms")

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        with hdf5_file(self._path, "a") as file:
            for name, blob in zip(self.NAMES, bottom):
                append_rows(file, name, blob.data)
