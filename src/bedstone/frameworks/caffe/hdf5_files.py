"""Opening HDF5 files with clear errors, and data sets that grow row by row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bedstone.spec.errors import InvalidDescriptor


@contextmanager
def hdf5_file(path: str | Path, mode: str) -> Iterator[Any]:
    """h5py's File; InvalidDescriptor where h5py is missing or the file is not sound."""
    try:
        import h5py
    except ImportError:
        raise InvalidDescriptor("HDF5", str(path), "the package h5py installed") from None
    try:
        with h5py.File(path, mode) as file:
            yield file
    except OSError as error:
        raise InvalidDescriptor("HDF5 file", str(path), f"a sound file ({error})") from None


def append_rows(file: Any, name: str, rows: np.ndarray) -> None:
    """Add rows to a data set, which is made if it is not there yet."""
    if name not in file:
        file.create_dataset(name, data=rows, maxshape=(None, *rows.shape[1:]), chunks=True)
        return
    before = len(file[name])
    file[name].resize(before + len(rows), axis=0)
    file[name][before:] = rows
