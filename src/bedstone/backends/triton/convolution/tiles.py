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


# Kinds: "half" 16-bit products; "split" float32 as three tf32 products, "bf16x6" and "bf16x3" as
# six and three of bfloat16; "tf32"; "fma" float32 unsplit; "double". A kind followed by
# " gathered" has rows for operands that are read element by element (NCHW, odd channels), whose
# addresses take registers; it may be missing, and so may a kind that is not computed.
Table = dict[str, Sequence["Tile"]]


def _rows(*rows: tuple[int, int, int, int, int, float]) -> tuple[Tile, ...]:
    return tuple(Tile(*row) for row in rows)


# Measured on an H200, forward, 64 x 256 x 28 x 28 images and 256 filters of 3 x 3.
HOPPER: Table = {
    "half": _rows(
        (128, 256, 64, 8, 3, 690), (128, 128, 64, 4, 3, 525), (64, 128, 64, 4, 4, 470),
        (128, 64, 64, 4, 4, 410), (64, 64, 64, 4, 4, 330), (64, 32, 64, 4, 4, 230),
        (128, 32, 64, 4, 4, 230), (32, 32, 64, 2, 4, 175), (128, 16, 64, 4, 4, 143),
        (64, 16, 64, 4, 4, 140), (32, 16, 64, 2, 4, 126),
    ),
    "half gathered": _rows(
        (128, 128, 32, 8, 3, 70), (64, 128, 32, 4, 2, 60), (64, 64, 32, 4, 3, 52),
        (128, 64, 32, 8, 3, 51), (64, 32, 32, 4, 3, 36), (32, 32, 32, 4, 3, 28),
        (64, 16, 32, 4, 3, 25), (32, 16, 32, 4, 3, 21),
    ),
    "split": _rows(
        (128, 128, 32, 8, 3, 75), (64, 128, 32, 4, 3, 70), (128, 64, 32, 4, 3, 68),
        (64, 64, 32, 4, 3, 56), (64, 32, 32, 4, 3, 51), (32, 32, 32, 2, 3, 35),
        (64, 16, 32, 4, 3, 34), (32, 16, 32, 2, 3, 30),
    ),
    "split gathered": _rows(
        (128, 64, 16, 4, 3, 21), (64, 128, 16, 4, 3, 20), (32, 64, 32, 4, 3, 20),
        (64, 64, 16, 4, 3, 14), (64, 32, 16, 4, 3, 13), (32, 32, 16, 4, 3, 13),
        (64, 16, 16, 4, 3, 13), (32, 16, 16, 4, 3, 10),
    ),
    "bf16x6": _rows(
        (128, 128, 32, 8, 3, 64), (64, 128, 32, 4, 3, 60), (128, 64, 32, 4, 3, 58),
        (64, 64, 32, 4, 3, 50), (64, 32, 32, 4, 3, 44), (64, 16, 32, 4, 3, 30),
        (32, 32, 32, 2, 3, 28), (32, 16, 32, 2, 3, 22),
    ),
    "bf16x3": _rows(
        (128, 128, 32, 8, 3, 92), (64, 128, 32, 4, 3, 86), (128, 64, 32, 4, 3, 83),
        (64, 64, 32, 4, 3, 81), (64, 32, 32, 4, 3, 63), (32, 32, 32, 2, 3, 46),
        (64, 16, 32, 4, 3, 43), (32, 16, 32, 2, 3, 35),
    ),
    "tf32": _rows(
        (128, 128, 32, 8, 3, 260), (64, 128, 32, 4, 4, 225), (128, 64, 32, 4, 4, 210),
        (64, 64, 32, 4, 4, 175), (64, 32, 32, 4, 4, 118), (128, 32, 32, 4, 4, 118),
        (32, 32, 32, 2, 4, 84), (64, 16, 32, 4, 4, 70), (32, 16, 32, 2, 4, 57),
    ),
    # Not measured one by one: the shapes of split products, whose loads cost more than these.
    "tf32 gathered": _rows(
        (128, 64, 16, 4, 3, 24), (64, 128, 16, 4, 3, 23), (32, 64, 32, 4, 3, 23),
        (64, 64, 16, 4, 3, 17), (64, 32, 16, 4, 3, 16), (32, 32, 16, 4, 3, 16),
        (64, 16, 16, 4, 3, 15), (32, 16, 16, 4, 3, 12),
    ),
    "double": _rows(
        (64, 64, 16, 4, 4, 50), (64, 32, 16, 4, 4, 47), (128, 64, 16, 8, 3, 44),
        (32, 32, 16, 2, 4, 42), (32, 16, 16, 2, 4, 28),
    ),
}  # fmt: skip

# Not measured here: Hopper's rows within this chip's 164 KiB (and consumer chips' 100 KiB).
AMPERE: Table = {
    "half": _rows(
        (128, 128, 32, 8, 4, 180), (128, 64, 32, 4, 4, 150), (64, 128, 32, 4, 4, 140),
        (64, 64, 32, 4, 4, 110), (128, 32, 32, 4, 4, 80), (64, 32, 32, 4, 4, 60),
        (32, 32, 32, 2, 4, 35), (64, 16, 32, 4, 4, 30), (32, 16, 32, 2, 4, 18),
    ),
    "half gathered": _rows(
        (128, 64, 32, 8, 3, 30), (64, 128, 32, 8, 3, 30), (64, 64, 32, 4, 3, 25),
        (64, 32, 32, 4, 3, 18), (32, 32, 32, 4, 3, 14), (64, 16, 32, 4, 3, 12),
        (32, 16, 32, 4, 3, 10),
    ),
    "split gathered": _rows(
        (128, 64, 16, 8, 3, 9), (64, 64, 16, 4, 3, 8), (64, 32, 16, 4, 3, 7),
        (32, 32, 16, 4, 3, 6), (64, 16, 16, 4, 3, 6), (32, 16, 16, 4, 3, 5),
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
# new matrix unit, which has no float64, and aborts. Six bfloat16 products keep to 64 columns: their
# accumulators would not fit its memory, and Triton then makes a kernel that only traps.
BLACKWELL: Table = {
    **HOPPER,
    "bf16x6": tuple(tile for tile in HOPPER["bf16x6"] if tile.bn <= 64),
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


# Kinds whose rows serve where one is missing.
SAME_ROWS = {"bf16x6": ("split gathered", "split", "fma"), "bf16x3": ("split", "fma")}
TABLES = {"hopper": HOPPER, "ampere": AMPERE, "blackwell": BLACKWELL, "cdna3": CDNA3}


def rows(architecture: str, kind: str, gathered: bool) -> Sequence[Tile]:
    """The rows of a kind, those for gathered operands if there are any; none if the architecture
    cannot compute the kind."""
    table = TABLES[chips.family(architecture)]
    names = (kind + " gathered", kind) if gathered else (kind,)
    names += SAME_ROWS.get(kind, ())
    return next((table[name] for name in names if name in table), ())


def resident(tile: Tile) -> int:
    """Programs that share a multiprocessor."""
    return max(1, min(4, 128 * 128 // (tile.bm * tile.bn)))


def seconds(
    tile: Tile, architecture: str, rows: int, columns: int, depth: int, copies: int
) -> float:
    """Cost model: `copies` matrix products of rows x columns x depth run in waves of one program a
    multiprocessor, of small tiles up to four; a wave takes its tiles' work over its rate."""
    programs = -(-rows // tile.bm) * -(-columns // tile.bn) * copies
    slots = chips.chip_of(architecture).multiprocessors * resident(tile)
    waves = programs / slots if programs > 4 * slots else -(-programs // slots)
    steps = -(-depth // tile.bk) + tile.stages
    return waves * slots * 2.0 * tile.bm * tile.bn * tile.bk * steps / (tile.rate * 1e12)
