"""Caffe's files: prototxt as text, .caffemodel, .binaryproto and .solverstate as protobuf.

Errors name the file and, in text, the line.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import text_format
from google.protobuf.message import DecodeError

from bedstone.frameworks.caffe import schema, text_places, upgrade, wire
from bedstone.frameworks.caffe.blob import array_of
from bedstone.spec.errors import InvalidDescriptor

BINARY = (".caffemodel", ".binaryproto", ".solverstate")
_PLACE = re.compile(r"(\d+):(\d+) : (?:'.*?': )?(.*)", re.DOTALL)


def parse_text(text: str, kind: Any, name: str = "text") -> Any:
    """A message of class `kind` from its text; `name` stands for the file in errors."""
    message = kind()
    try:
        text_format.Parse(text, message)
    except text_format.ParseError as error:
        place = _PLACE.match(str(error))
        where = f"{name}:{place.group(1)}" if place else name
        number = int(place.group(1)) if place else 0
        lines = text.splitlines()
        line = lines[number - 1].strip() if 0 < number <= len(lines) else ""
        what = place.group(3).strip() if place else str(error)
        layer = text_places.layer_at(text, number)
        where += f": layer {layer}" if layer else ""
        raise InvalidDescriptor(
            where, line, f"{kind.DESCRIPTOR.name} in prototxt ({what})"
        ) from None
    text_places.mark(message, text, name)
    return message


def read_text(path: str | Path, kind: Any) -> Any:
    """A message of class `kind` from a prototxt file."""
    return parse_text(_content(path).decode("utf-8", "replace"), kind, str(path))


def read_binary(path: str | Path, kind: Any) -> Any:
    """A message of class `kind` from a binary file."""
    return _parsed(_content(path), kind, path)


def _parsed(content: bytes, kind: Any, path: str | Path) -> Any:
    message = kind()
    try:
        message.ParseFromString(content)
    except DecodeError:
        expected = f"a whole {kind.DESCRIPTOR.name} file; this one is cut short or another kind"
        raise InvalidDescriptor("file", str(path), expected) from None
    return message


def read_net(path: str | Path) -> Any:
    """A NetParameter from a file, text or binary by its name, in today's form whatever the age of
    the file. A binary file's weights are left in it (`wire.read_weights`)."""
    if Path(path).suffix in BINARY:
        net = _parsed(wire.read_structure(_existing(path)), schema.NetParameter, path)
    else:
        net = read_text(path, schema.NetParameter)
    return upgrade.upgrade_net(net, str(path))


def read_mean(path: str | Path) -> np.ndarray:
    """The mean image (C, H, W) of a .binaryproto."""
    mean = array_of(read_binary(path, schema.BlobProto))
    if mean.ndim == 4 and mean.shape[0] == 1:
        mean = mean[0]
    if mean.ndim != 3:
        raise InvalidDescriptor("mean_file", f"{path}, {mean.shape}", "one image: (C, H, W)")
    return mean


def _existing(path: str | Path) -> Path:
    if not Path(path).is_file():
        raise InvalidDescriptor("file", str(path), "a file to read")
    return Path(path)


def _content(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidDescriptor("file", str(path), f"a file to read ({reason})") from None
