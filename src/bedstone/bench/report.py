"""Tables on the terminal, CSV and JSON on disk. Every file says device, versions and commit."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np

import bedstone
from bedstone.bench.driver import Row
from bedstone.bench.machine import Ceilings


def environment(device: bedstone.Device, ceilings: Ceilings) -> dict[str, str]:
    """What the numbers depend on, for the head of every file."""
    found = {
        "device": device.name,
        "architecture": device.architecture,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "bedstone": bedstone.__version__,
        "commit": _commit(),
    }
    for module in ("torch", "jax", "llvmlite", "triton"):
        if module in sys.modules:
            found[module] = str(getattr(sys.modules[module], "__version__", "?"))
    if device.kind == "cuda" and "torch" in sys.modules:
        found["cudnn"] = str(sys.modules["torch"].backends.cudnn.version())
    for name, rate in ceilings.flops.items():
        found[f"peak {name}"] = f"{rate / 1e9:.1f} GFLOP/s"
    if ceilings.bandwidth:
        found["bandwidth"] = f"{ceilings.bandwidth / 1e9:.1f} GB/s"
    return found


def _commit() -> str:
    """The commit the package was run from, with a + if its sources were changed since."""
    commit = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".")
    return "unknown" if commit is None else commit + ("+" if changed else "")


def _git(*words: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", *words], cwd=Path(bedstone.__file__).parent,
            capture_output=True, text=True, check=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def header(primitive: str) -> str:
    """The table's first line; rates are GFLOP/s for convolutions, GB/s for all else."""
    rate = "GFLOP/s" if primitive == "convolution" else "GB/s"
    return (
        f"{'problem':28} {'direction':16} {'dtype':8} {'layout':6} {'algorithm':26} "
        f"{'ms':>9} {rate:>8} {'roof':>5} {'peer':7} {'ms':>9} {rate:>8} {'ratio':>6}"
    )


def line(row: Row) -> str:
    """One row of the table under the header."""
    convolution = row.primitive == "convolution"
    rate = row.gflops if convolution else row.gbytes
    roof = f"{row.roofline:5.2f}" if row.roofline else f"{'-':>5}"
    ours = (
        f"{row.name[:28]:28} {row.direction:16} {row.dtype:8} {row.layout:6} "
        f"{row.algorithm[:26]:26} {row.ms:9.3f} {rate:8.1f} {roof} "
    )
    if not row.peer:
        return ours + (row.note or "-")
    theirs = row.peer_gflops if convolution else row.gbytes / row.ratio
    return ours + f"{row.peer:7} {row.peer_ms:9.3f} {theirs:8.1f} {row.ratio:6.2f}"


def under(row: Row, ceilings: Ceilings) -> Row:
    """The row with its part of these ceilings."""
    floor = ceilings.floor(bedstone.parse_problem(row.problem))
    return replace(row, roofline=floor / (row.ms * 1e-3))


def summary(rows: Sequence[Row]) -> list[str]:
    """What a suite of batch sizes says of their rates; the geometric mean of each direction and
    layout; and, last, a line for each peer."""
    lines = _flatness(rows)
    for peer in dict.fromkeys(row.peer for row in rows if row.peer):
        taken = [row for row in rows if row.peer == peer]
        parts = dict.fromkeys((row.direction, row.layout) for row in taken)
        if len(parts) > 1:
            for direction, layout in parts:
                part = [r for r in taken if (r.direction, r.layout) == (direction, layout)]
                lines.append(f"{direction} {layout}: {_mean(part)}")
        lines.append(f"{_mean(taken)}, against {peer}")
    return lines


def _mean(rows: Sequence[Row]) -> str:
    mean = math.exp(sum(math.log(row.ratio) for row in rows) / len(rows))
    worst = min(rows, key=lambda row: row.ratio)
    where = f"{worst.name} {worst.direction} {worst.layout}"
    count = len(rows)
    return f"geomean ratio {mean:.2f} (min {worst.ratio:.2f} at {where}) over {count} problems"


def batch_of(name: str) -> int | None:
    """The batch of a problem named `LAYER@BATCH`, or None."""
    layer, sign, batch = name.rpartition("@")
    return int(batch) if sign and layer and batch.isdigit() else None


def _flatness(rows: Sequence[Row]) -> list[str]:
    rates: dict[int, list[float]] = {}
    for row in rows:
        batch = batch_of(row.name)
        if batch is not None:
            rates.setdefault(batch, []).append(row.gflops)
    means = {batch: sum(found) / len(found) for batch, found in sorted(rates.items())}
    if len(means) < 2:
        return []
    most = max(means)
    shares = ", ".join(f"{b}: {100 * m / means[most]:.0f}%" for b, m in means.items())
    return [f"mean rate by batch, of batch {most}'s {means[most]:.0f} GFLOP/s: {shares}"]


def write_csv(path: str, rows: Sequence[Any], head: Mapping[str, str]) -> None:
    """Rows with the environment in comment lines above them; written whole or not at all."""
    with _whole(path) as file:
        for key, value in head.items():
            file.write(f"# {key}: {value}\n")
        names = list(rows[0].record() if rows else Row.__dataclass_fields__)
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: _short(v) for k, v in row.record().items()})


@contextlib.contextmanager
def _whole(path: str) -> Iterator[TextIO]:
    """A file that appears under its name when it is complete.

    Raises InvalidDescriptor where it cannot be written.
    """
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "w", newline="", encoding="utf-8") as file:
            yield file
        os.replace(temporary, path)
    except OSError as error:
        raise bedstone.InvalidDescriptor("file", path, f"a file to write: {error}") from None


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def write_json(path: str, rows: Sequence[Any], head: Mapping[str, str]) -> None:
    """{"environment": {...}, "rows": [...]}; written whole or not at all."""
    with _whole(path) as file:
        records = [row.record() for row in rows]
        json.dump({"environment": dict(head), "rows": records}, file, indent=1)


def read_csv(path: str) -> tuple[dict[str, str], list[dict[str, str]]]:
    """(environment, rows) of a file that write_csv wrote."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            lines = file.readlines()
    except OSError as error:
        raise bedstone.InvalidDescriptor("file", path, f"a CSV to read: {error}") from None
    head = dict(text[2:].strip().split(": ", 1) for text in lines if text.startswith("# "))
    return head, list(csv.DictReader(text for text in lines if not text.startswith("# ")))
