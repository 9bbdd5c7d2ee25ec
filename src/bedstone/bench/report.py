"""Tables on the terminal, CSV and JSON on disk. Every file says device, versions and commit."""

from __future__ import annotations

import csv
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import bedstone
from bedstone.bench.driver import Row


def environment() -> dict[str, str]:
    """What the numbers depend on."""
    found = {
        "device": bedstone.default_handle().device.name,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "bedstone": bedstone.__version__,
        "commit": _commit(),
    }
    for module in ("torch", "llvmlite", "triton"):
        if module in sys.modules:
            found[module] = str(getattr(sys.modules[module], "__version__", "?"))
    return found


def _commit() -> str:
    folder = Path(__file__).parent
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=folder, capture_output=True, text=True, check=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.stdout.strip()


HEADER = (
    f"{'problem':28} {'direction':16} {'dtype':8} {'layout':6} {'algorithm':26} "
    f"{'ms':>9} {'GFLOP/s':>8} {'roof':>5} {'peer':7} {'ms':>9} {'GFLOP/s':>8} {'ratio':>6}"
)


def line(row: Row) -> str:
    """One row of the table under HEADER."""
    ours = (
        f"{row.name[:28]:28} {row.direction:16} {row.dtype:8} {row.layout:6} "
        f"{row.algorithm[:26]:26} {row.ms:9.3f} {row.gflops:8.1f} {row.roofline:5.2f} "
    )
    if not row.peer:
        return ours + (row.note or "-")
    return ours + f"{row.peer:7} {row.peer_ms:9.3f} {row.peer_gflops:8.1f} {row.ratio:6.2f}"


def summary(rows: Sequence[Row]) -> list[str]:
    """A line for each peer: `geomean ratio R (min M at PROBLEM) over K problems`."""
    lines = []
    for peer in sorted({row.peer for row in rows if row.peer}):
        taken = [row for row in rows if row.peer == peer]
        mean = math.exp(sum(math.log(row.ratio) for row in taken) / len(taken))
        worst = min(taken, key=lambda row: row.ratio)
        where = f"{worst.name} {worst.direction} {worst.layout}"
        lines.append(
            f"{peer}: geomean ratio {mean:.2f} (min {worst.ratio:.2f} at {where}) "
            f"over {len(taken)} problems"
        )
    return lines


def write_csv(path: str, rows: Sequence[Row]) -> None:
    """Rows with the environment in comment lines above them; written whole or not at all."""
    temporary = f"{path}.tmp"
    with open(temporary, "w", newline="", encoding="utf-8") as file:
        for key, value in environment().items():
            file.write(f"# {key}: {value}\n")
        writer = csv.DictWriter(file, list(Row.__dataclass_fields__))
        writer.writeheader()
        for row in rows:
            writer.writerow({k: _short(v) for k, v in row.record().items()})
    os.replace(temporary, path)


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def write_json(path: str, rows: Sequence[Row]) -> None:
    """{"environment": {...}, "rows": [...]}; written whole or not at all."""
    temporary = f"{path}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(
            {"environment": environment(), "rows": [r.record() for r in rows]}, file, indent=1
        )
    os.replace(temporary, path)


def read_csv(path: str) -> tuple[dict[str, str], list[dict[str, str]]]:
    """(environment, rows) of a file that write_csv wrote."""
    with open(path, newline="", encoding="utf-8") as file:
        lines = file.readlines()
    head = dict(text[2:].strip().split(": ", 1) for text in lines if text.startswith("# "))
    return head, list(csv.DictReader(text for text in lines if not text.startswith("# ")))
