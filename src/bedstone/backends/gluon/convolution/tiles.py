"""Tile tables of the Hopper kernels: data, one table a kind of product.

A row is (BM, BK, BC, stages, warps, resident, rate, tail): output pixels x output channels a tile
and reduced channels a step (backward_filter: filters x channels a tile and pixels a step), stages
of the ring, consumer warps, programs that share a multiprocessor, TFLOP/s of the whole chip inside
the main loop, and microseconds that a tile spends outside of it. Rates and tails were fitted to
bench/gpu_check_gluon.py --tiles on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass

MULTIPROCESSORS = 132  # of an H100 SXM or H200; what is compiled for when no device is there
BANDWIDTH = 4.0e12  # bytes/s of device memory, read and written
LAUNCH_SECONDS = 3e-6
# Accumulators a thread, beyond which an epilogue that is more than a conversion spills.
LIGHT_ACCUMULATORS = 64


@dataclass(frozen=True)
class Tile:
    """One row of a table. See the module's text."""

    bm: int
    bk: int
    bc: int
    stages: int
    warps: int
    resident: int
    rate: float
    tail: float

    @property
    def accumulators(self) -> int:
        """Float32 accumulators a thread."""
        return self.bm * self.bk // (32 * self.warps)


def _rows(*rows: tuple[int, int, int, int, int, int, float, float]) -> tuple[Tile, ...]:
    return tuple(Tile(*row) for row in rows)


# forward and backward_data, 16-bit. Narrow steps (BC 32 and 16) are for few reduced channels.
IMAGE_HALF = _rows(
    (256, 128, 64, 3, 8, 1, 760, 1.6), (128, 256, 64, 3, 8, 1, 760, 1.6),
    (128, 128, 64, 5, 8, 1, 690, 1.0), (128, 128, 64, 4, 4, 1, 660, 1.2),
    (256, 64, 64, 4, 8, 1, 600, 1.0), (128, 64, 64, 6, 4, 1, 500, 0.8),
    (64, 128, 64, 6, 4, 1, 480, 0.8), (64, 64, 64, 6, 4, 2, 400, 0.8),
    (128, 32, 64, 8, 4, 1, 300, 0.7), (64, 32, 64, 8, 4, 2, 250, 0.7),
    (256, 128, 32, 4, 8, 1, 560, 1.6), (128, 128, 32, 8, 8, 1, 480, 1.0),
    (256, 64, 32, 6, 8, 1, 420, 1.0), (128, 64, 32, 8, 4, 1, 380, 0.8),
    (128, 32, 32, 8, 4, 2, 250, 0.7), (128, 128, 16, 8, 8, 1, 300, 1.0),
    (128, 64, 16, 8, 4, 2, 250, 0.8), (128, 32, 16, 8, 4, 2, 180, 0.7),
)  # fmt: skip

# forward, tf32 (whose operands must lie reduced channels innermost).
IMAGE_TF32 = _rows(
    (128, 128, 32, 4, 8, 1, 350, 1.2), (128, 64, 32, 6, 4, 1, 280, 1.0),
    (64, 64, 32, 6, 4, 1, 200, 0.9), (128, 32, 32, 6, 4, 1, 150, 0.8),
)  # fmt: skip

# forward and backward_data, float32 from three float16 products: two consumers of 64 pixels.
IMAGE_F16X3 = _rows(
    (128, 128, 64, 3, 8, 1, 215, 2.0), (128, 64, 64, 4, 8, 1, 150, 1.6),
)  # fmt: skip
CAREFUL_STAGES = 2

# backward_filter, 16-bit, general: BM filters x BK channels, BC pixels.
FILTER_HALF = _rows(
    (128, 256, 64, 4, 8, 1, 700, 2.5), (128, 128, 64, 6, 8, 1, 640, 2.0),
    (64, 256, 64, 5, 4, 1, 560, 2.0), (64, 128, 64, 8, 4, 1, 450, 1.5),
    (64, 64, 64, 8, 4, 1, 330, 1.5), (128, 64, 64, 8, 8, 1, 450, 1.5),
    (64, 32, 64, 8, 4, 1, 200, 1.2),
)  # fmt: skip

# backward_filter, windows three wide.
HALO_RATE, HALO_TAIL = 760.0, 3.0
HALO_STAGES = 3
