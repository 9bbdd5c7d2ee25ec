"""`bedstone caffe extract`: blobs of a network over many batches, to HDF5, npz or an LMDB."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from bedstone.frameworks.caffe.hdf5_files import append_rows, hdf5_file
from bedstone.frameworks.caffe.lmdb_data import write_lmdb
from bedstone.frameworks.caffe.net import Net
from bedstone.frameworks.caffe.snapshots import replacing
from bedstone.spec.errors import InvalidDescriptor

KINDS = (".h5", ".hdf5", ".npz", "_lmdb", ".lmdb")


def check(net: Net, blobs: Sequence[str], output: str) -> None:
    """Refuse unknown blobs and kinds of file before anything runs."""
    for name in blobs:
        if name not in net.blobs:
            raise InvalidDescriptor("blobs", name, f"blobs of the network: {', '.join(net.blobs)}")
    if not output.endswith(KINDS):
        raise InvalidDescriptor("output", output, f"a name that ends in {' or '.join(KINDS)}")
    if output.endswith("lmdb") and len(blobs) > 1:
        raise InvalidDescriptor("blobs", ",".join(blobs), "one blob where the output is an LMDB")


def extract(net: Net, blobs: Sequence[str], iterations: int, output: str) -> dict[str, tuple]:
    """Run so many batches and write the blobs' rows of all of them; returns the written shapes."""
    check(net, blobs, output)
    if iterations < 1:
        raise InvalidDescriptor("iterations", iterations, "1 or more")
    write = _write_npz if output.endswith(".npz") else _write_hdf5
    if output.endswith("lmdb"):
        write = _write_lmdb
    return write(_batches(net, blobs, iterations), output)


def _batches(net: Net, blobs: Sequence[str], iterations: int) -> Iterable[dict[str, np.ndarray]]:
    for _ in range(iterations):
        net.forward()
        # (A blob without axes, such as a loss, gives a row for each batch.)
        yield {name: np.atleast_1d(net.blobs[name].data).copy() for name in blobs}


def _write_npz(batches: Iterable[dict[str, np.ndarray]], output: str) -> dict[str, tuple]:
    parts = list(batches)
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    with replacing(output) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)
    return {name: array.shape for name, array in arrays.items()}


def _write_hdf5(batches: Iterable[dict[str, np.ndarray]], output: str) -> dict[str, tuple]:
    with replacing(output) as temporary, hdf5_file(temporary, "w") as file:
        for batch in batches:
            for name, rows in batch.items():
                append_rows(file, name, rows)
        return {name: file[name].shape for name in file}


def _write_lmdb(batches: Iterable[dict[str, np.ndarray]], output: str) -> dict[str, tuple]:
    if Path(output).exists():
        raise InvalidDescriptor("output", output, "a name that is not taken")
    shape: tuple = ()
    count = 0
    for batch in batches:
        (rows,) = batch.values()
        (name,) = batch
        shape = rows.shape[1:]
        channels, height = (*shape, 1, 1)[:2]
        planes = rows.reshape(len(rows), channels, height, -1)
        write_lmdb(output, planes, np.zeros(len(rows), int), start=count)
        count += len(rows)
    return {name: (count, *shape)}
