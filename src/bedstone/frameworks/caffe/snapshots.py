"""Snapshots: weights and solver state on disk, whole or not at all, and back.

Weights are a .caffemodel, the solver's iteration and histories a .solverstate, both as protobuf or
(.h5) HDF5, in Caffe's layout, so either program can go on from the other's. Random generators and
the positions of data layers are kept too, as JSON in a field of our own of the solver state (1000,
`bedstone_state`; Caffe skips it): a training that was killed goes on to the same weights, bit for
bit. A file is written beside its final name and renamed when it is complete and on disk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from bedstone.frameworks.caffe import schema, wire
from bedstone.frameworks.caffe.hdf5_files import hdf5_file
from bedstone.frameworks.caffe.spaces import HOST
from bedstone.spec.errors import InvalidDescriptor

OURS = "bedstone_state"
HISTORY = schema.SolverState.DESCRIPTOR.fields_by_name["history"].number


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary name to write to; renamed to `path` at the end, removed after an error."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise InvalidDescriptor("file to write", str(path), f"a place to write ({error})") from None
    finally:
        with suppress(OSError):
            temporary.unlink()
    with suppress(OSError):  # the rename itself; some file systems have no such thing
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def net_state(net: Any) -> dict[str, Any]:
    """What a network's next iteration depends on besides its weights."""
    layers = {layer.name: layer.state() for layer in net.layers if hasattr(layer, "state")}
    return {"rng": net.rng.bit_generator.state, "layers": layers}


def restore_net_state(net: Any, state: dict[str, Any]) -> None:
    """Put a network where `net_state` found it."""
    net.rng.bit_generator.state = state["rng"]
    for layer in net.layers:
        if layer.name in state["layers"]:
            layer.restore(state["layers"][layer.name])


def write_model(path: str | Path, net: Any, write_diff: bool = False) -> None:
    """Write a network's weights: a .caffemodel (protobuf) or .caffemodel.h5."""
    with replacing(path) as temporary:
        if str(path).endswith(".h5"):
            _write_model_hdf5(temporary, net, write_diff)
            return
        with temporary.open("wb") as file:
            wire.write_weights(file, net, write_diff)


def _write_model_hdf5(path: Path, net: Any, write_diff: bool) -> None:
    with hdf5_file(path, "w") as file:
        kinds = ["data"] + (["diff"] if write_diff else [])
        for kind in kinds:
            group = file.create_group(kind)
            for layer in net.layers:
                inner = group.create_group(layer.name)
                for number, blob in enumerate(layer.blobs):
                    inner[str(number)] = getattr(blob.on(HOST), kind)


def write_state(
    path: str | Path,
    iteration: int,
    learned_net: str,
    current_step: int,
    history: list[np.ndarray],
    ours: dict[str, Any],
) -> None:
    """Write a .solverstate (protobuf) or .solverstate.h5."""
    kept = json.dumps(ours).encode()
    with replacing(path) as temporary:
        if str(path).endswith(".h5"):
            _write_state_hdf5(temporary, iteration, learned_net, current_step, history, kept)
            return
        state = schema.SolverState(
            iter=iteration, learned_net=learned_net, current_step=current_step, **{OURS: kept}
        )
        with temporary.open("wb") as file:
            file.write(state.SerializeToString())
            for array in history:  # (a message's fields may come in any order)
                wire.write_blob(file, HISTORY, array)


def _write_state_hdf5(
    path: Path, iteration: int, learned_net: str, step: int, history: list[np.ndarray], kept: bytes
) -> None:
    with hdf5_file(path, "w") as file:
        file["iter"], file["current_step"] = [iteration], [step]  # (arrays of one, as Caffe's)
        file["learned_net"] = np.bytes_(learned_net)
        file[OURS] = np.frombuffer(kept, np.uint8)
        group = file.create_group("history")
        for number, array in enumerate(history):
            group[str(number)] = array


def read_state(path: str | Path) -> tuple[int, str, list[Any], dict[str, Any] | None]:
    """(iteration, the weights' file, histories, our own state or None if another program wrote it)

    Histories are arrays, or still in the file (`wire.copy_into`).

    Raises InvalidDescriptor where the file is missing, cut short or no solver state.
    """
    read: Callable[[Path], Any] = _read_hdf5 if str(path).endswith(".h5") else _read_protobuf
    if not Path(path).is_file():
        raise InvalidDescriptor("snapshot", str(path), "a .solverstate file that exists")
    iteration, learned_net, history, kept = read(Path(path))
    try:
        return iteration, learned_net, history, json.loads(kept) if kept else None
    except ValueError:
        expected = f"JSON in the field {OURS}"
        raise InvalidDescriptor("snapshot", str(path), expected) from None


def _read_protobuf(path: Path) -> tuple[int, str, list[wire.Stored], bytes]:
    reader = wire.Reader.of(path)
    history, small = [], schema.SolverState()
    start = 0
    for number, _, at, end in reader.fields(0, len(reader.buffer)):
        if number == HISTORY:
            history.append(reader.blob(at, end))
        else:
            small.MergeFromString(bytes(reader.buffer[start:end]))
        start = end
    return small.iter, small.learned_net, history, small.bedstone_state


def _read_hdf5(path: Path) -> tuple[int, str, list[np.ndarray], bytes]:
    with hdf5_file(path, "r") as file:
        missing = {"iter", "history"} - set(file)
        if missing:
            expected = f"a solver state: no {', '.join(sorted(missing))} in it"
            raise InvalidDescriptor("snapshot", str(path), expected)
        group = file["history"]
        history = [np.asarray(group[str(i)]) for i in range(len(group))]
        learned = file["learned_net"][()] if "learned_net" in file else b""
        kept = bytes(np.asarray(file[OURS], np.uint8)) if OURS in file else b""
        return int(np.asarray(file["iter"]).reshape(-1)[0]), _text(learned), history, kept


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
