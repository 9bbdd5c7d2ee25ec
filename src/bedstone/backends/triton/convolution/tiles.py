"""Tile tables of the implicit-GEMM kernels: data, one table an architecture and kind of product.

A row is (BM, BN, BK, warps, stages, rate): output rows x columns a program, reduction a step, and
TFLOP/s of the whole chip on large layers, which ranks the rows and feeds `estimate`. How to
measure a table: bench/gpu_check_triton.py --tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bedstone.backends.triton import chips


@dataclass(frozen=True)
class Tile:
    """One row of a table. See the module's text."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    rate: float


# Kinds: "half" 16-bit products; "split" float32 as three tf32 (or six bfloat16) products; "tf32";
# "fma" float32 without splitting; "double". A kind followed by " gathered" has rows for operands
# that are read element by element (NCHW, odd channels), whose addresses take registers; it may be
# missing, and so may a kind that an architecture cannot compute.
Table = dict[str, Sequence["Tile"]]


def _rows(*rows: tuple[int, int, int, int, int, float]) -> tuple[Tile, ...]:
    return tuple(Tile(*row) for row in rows)


HOPPER: Table = {
    "half": _rows(
        (128, 256, 64, 8, 3, 500), (128, 128, 64, 8, 4, 430),
        (128, 64, 64, 4, 4, 330), (64, 128, 64, 4, 4, 300), (64, 64, 64, 4, 4, 230),
        (128, 32, 64, 4, 4, 200), (64, 32, 64, 4, 4, 140), (32, 32, 64, 2, 4, 80),
        (128, 16, 64, 4, 4, 110), (64, 16, 64, 4, 4, 80), (32, 16, 64, 2, 4, 45),
    ),
    "half gathered": _rows(
        (128, 128, 32, 8, 3, 150), (128, 64, 32, 8, 3, 120), (64, 128, 32, 8, 3, 110),
        (64, 64, 32, 4, 3, 90), (128, 32, 32, 4, 3, 60), (64, 32, 32, 4, 3, 45),
        (32, 32, 32, 4, 3, 30), (64, 16, 32, 4, 3, 25), (32, 16, 32, 4, 3, 15),
    ),
    "split gathered": _rows(
        (128, 64, 32, 8, 3, 60), (64, 128, 32, 8, 3, 55), (64, 64, 32, 8, 3, 50),
        (64, 64, 16, 4, 3, 45), (64, 32, 16, 4, 3, 30), (32, 32, 16, 4, 3, 20),
        (64, 16, 16, 4, 3, 18), (32, 16, 16, 4, 3, 10),
    ),
    "split": _rows(
        (128, 128, 32, 8, 3, 82), (128, 64, 32, 4, 3, 75), (64, 128, 32, 4, 3, 70),
        (64, 64, 32, 4, 3, 60), (128, 32, 32, 4, 3, 45), (64, 32, 32, 4, 3, 38),
        (32, 32, 32, 2, 3, 25), (64, 16, 32, 4, 3, 20), (32, 16, 32, 2, 3, 12),
    ),
    "tf32": _rows(
        (128, 128, 32, 8, 3, 220), (128, 64, 32, 4, 4, 180), (64, 128, 32, 4, 4, 170),
        (64, 64, 32, 4, 4, 130), (128, 32, 32, 4, 4, 100), (64, 32, 32, 4, 4, 75),
        (32, 32, 32, 2, 4, 45), (64, 16, 32, 4, 4, 40), (32, 16, 32, 2, 4, 25),
    ),
    "double": _rows(
        (128, 64, 16, 8, 3, 45), (64, 64, 16, 4, 4, 42), (64, 32, 16, 4, 4, 30),
        (32, 32, 16, 2, 4, 22), (32, 16, 16, 2, 4, 12),
    ),
}  # fmt: skip

# Not measured here: Hopper's rows within this chip's 164 KiB (and consumer chips' 100 KiB).
AMPERE: Table = {
    "half": _rows(
        (128, 128, 32, 4, 4, 180), (128, 64, 32, 4, 4, 150), (64, 128, 32, 4, 4, 140),
        (64, 64, 32, 4, 4, 110), (128, 32, 32, 4, 4, 80), (64, 32, 32, 4, 4, 60),
        (32, 32, 32, 2, 4, 35), (64, 16, 32, 4, 4, 30), (32, 16, 32, 2, 4, 18),
    ),
    "split": _rows(
        (128, 64, 32, 8, 3, 30), (64, 64, 32, 4, 3, 26), (64, 32, 32, 4, 3, 18),
        (32, 32, 32, 2, 3, 12), (64, 16, 32, 4, 3, 10), (32, 16, 32, 2, 3, 6),
    ),
    "tf32": _rows(
        (128, 128, 32, 8, 3, 90), (128, 64, 32, 4, 3, 80), (64, 64, 32, 4, 4, 60),
        (64, 32, 32, 4, 4, 40), (32, 32, 32, 2, 4, 25), (32, 16, 32, 2, 4, 12),
    ),
    "double": _rows(
        (64, 64, 16, 4, 4, 14), (64, 32, 16, 4, 4, 11), (32, 32, 16, 2, 4, 8),
        (32, 16, 16, 2, 4, 5),
    ),
}  # fmt: skip

# Not measured: Hopper's rows. float64 tiles keep below 64 rows: from there on Triton 3.6 tries the
# new matrix unit, which has no float64, and aborts.
BLACKWELL: Table = {
    **HOPPER,
    "double": _rows(
        (32, 64, 16, 4, 3, 20), (32, 32, 16, 2, 3, 15), (32, 16, 16, 2, 3, 8),
    ),
}  # fmt: skip

# Compiled for, not measured: 64 KiB of shared memory, 64-wide waves, float32 on its own units.
# Triton 3.6 does not lower float64 products here, so there are no rows for them.
CDNA3: Table = {
    "half": _rows(
        (128, 128, 32, 4, 2, 300), (128, 64, 32, 4, 2, 240), (64, 64, 32, 4, 2, 160),
        (64, 32, 32, 2, 2, 90), (32, 32, 32, 2, 2, 60), (32, 16, 32, 1, 2, 25),
    ),
    "fma": _rows(
        (128, 64, 32, 4, 2, 60), (64, 64, 32, 4, 2, 50), (64, 32, 32, 2, 2, 35),
        (32, 32, 32, 2, 2, 20), (32, 16, 32, 1, 2, 10),
    ),
    "tf32": _rows(
        (128, 64, 32, 4, 2, 90), (64, 64, 32, 4, 2, 70), (32, 32, 32, 2, 2, 30),
        (32, 16, 32, 1, 2, 12),
    ),
}  # fmt: skip


TABLES = {"hopper": HOPPER, "ampere": AMPERE, "blackwell": BLACKWELL, "cdna3": CDNA3}


def rows(architecture: str, kind: str, gathered: bool) -> Sequence[Tile]:
    """The rows of a kind, those for gathered operands if there are any; none if the architecture
    cannot compute the kind."""
    table = TABLES[chips.family(architecture)]
    found = table.get(kind + " gathered") if gathered else None
    return found or table.get(kind, ())


def seconds(
    tile: Tile, architecture: str, rows: int, columns: int, depth: int, copies: int
) -> float:
    """Cost model: `copies` matrix products of rows x columns x depth run in waves of one program a
    multiprocessor, of small tiles up to four; a wave takes its tiles' work over its rate."""
    programs = -(-rows // tile.bm) * -(-columns // tile.bn) * copies
    resident = max(1, min(4, 128 * 128 // (tile.bm * tile.bn)))
    slots = chips.chip_of(architecture).multiprocessors * resident
    waves = programs / slots if programs > 4 * slots else -(-programs // slots)
    steps = -(-depth // tile.bk) + tile.stages
    return waves * slots * 2.0 * tile.bm * tile.bn * tile.bk * steps / (tile.rate * 1e12)
