"""What is remembered on disk: small JSON records, each in a file of its own, written atomically.

The key is hashed into the file's name and kept inside, so that a collision or a damaged file is
noticed and counts as nothing found. A cache that cannot be written is no error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bedstone.plan import config
from bedstone.plan.device import Device
from bedstone.version import __version__


def directory(kind: str) -> Path | None:
    """The folder of one kind of record ("find", "objects", ...), or None if caching is off."""
    root = config.current().cache_dir
    return Path(root) / kind if root else None


def key(problem: object, device: Device, *more: object) -> str:
    """The record's key: problem, device and the versions that could change the answer."""
    words = [str(problem), device.fingerprint, f"bedstone {__version__}", f"numpy {np.__version__}"]
    return " | ".join([*words, *map(str, more)])


def read(kind: str, record_key: str) -> dict[str, Any] | None:
    """The record of that key, or None."""
    folder = directory(kind)
    if folder is None:
        return None
    try:
        record = json.loads(_path(folder, record_key).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or record.get("key") != record_key:
        return None
    return record


def write(kind: str, record_key: str, record: dict[str, Any]) -> None:
    """Store the record; readers see the old one or the new one, never a half."""
    folder = directory(kind)
    if folder is None:
        return
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"key": record_key, **record}, file)
            os.replace(temporary, _path(folder, record_key))
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def _path(folder: Path, record_key: str) -> Path:
    return folder / (hashlib.sha256(record_key.encode()).hexdigest()[:32] + ".json")
