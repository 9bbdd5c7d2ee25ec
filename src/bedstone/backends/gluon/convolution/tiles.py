"""Tile tables of the Hopper kernels: data, one table a kind of product.

A row is (BM, BK, BC, stages, consumers, resident, rate, tail): output pixels x output channels a
tile and reduced channels a step (backward_filter: filters x channels a tile and pixels a step),
stages of the ring, consumers of four warps, programs that share a multiprocessor, TFLOP/s of the
whole chip inside the main loop, and microseconds that a tile spends outside of it. The 16-bit rows
were fitted to the timings in bench/results/h200-tiles-bfloat16.csv, the others to
bench/gpu_check_gluon.py --tiles. The rates of GROUPED, BF16 and PLANAR tables are guesses: no
device has run their kernels yet (UNTRIED_SECONDS).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MULTIPROCESSORS = 132  # of an H100 SXM or H200; what is compiled for when no device is there
SHARED_BYTES = 232448  # that a program may have
BANDWIDTH = 4.0e12  # bytes/s of device memory, read and written
LAUNCH_SECONDS = 2e-6
# Added to the estimates of kernels that compile but that no device has run yet: they are taken by
# name, or by find, which compares their results with others'. 0 once a device has checked them.
UNTRIED_SECONDS = math.inf
WARPGROUP = 128  # threads of a consumer
# Accumulators a thread, beyond which an epilogue that is more than a conversion spills.
LIGHT_ACCUMULATORS = 64


@dataclass(frozen=True)
class Tile:
    """One row of a table. See the module's text."""

    bm: int
    bk: int
    bc: int
    stages: int
    consumers: int
    resident: int
    rate: float
    tail: float

    @property
    def accumulators(self) -> int:
        """Float32 accumulators a thread."""
        return self.bm * self.bk // (WARPGROUP * self.consumers)


def _rows(*rows: tuple[int, int, int, int, int, int, float, float]) -> tuple[Tile, ...]:
    return tuple(Tile(*row) for row in rows)


# forward and backward_data, 16-bit. Narrow steps (BC 32 and 16) are for few reduced channels.
IMAGE_HALF = _rows(
    (256, 128, 64, 3, 2, 1, 834, 1.8), (128, 256, 64, 3, 2, 1, 880, 1.85),
    (128, 128, 64, 5, 2, 1, 880, 1.15), (128, 128, 64, 4, 1, 1, 844, 1.05),
    (256, 64, 64, 4, 2, 1, 590, 1.05), (128, 64, 64, 6, 1, 1, 640, 0.75),
    (64, 128, 64, 6, 1, 1, 660, 0.6), (64, 64, 64, 6, 1, 2, 380, 0.6),
    (128, 32, 64, 8, 1, 1, 345, 0.7), (64, 32, 64, 8, 1, 2, 247, 0.6),
    (256, 128, 32, 4, 2, 1, 766, 1.7), (128, 128, 32, 8, 2, 1, 595, 1.0),
    (256, 64, 32, 6, 2, 1, 500, 1.05), (128, 64, 32, 8, 1, 1, 415, 0.45),
    (128, 32, 32, 8, 1, 2, 300, 1.0), (128, 128, 16, 8, 2, 1, 300, 0.9),
    (128, 64, 16, 8, 1, 2, 283, 1.1), (128, 32, 16, 8, 1, 2, 154, 1.1),
)  # fmt: skip

# forward and backward_data, tf32 (whose operands must lie reduced channels innermost).
IMAGE_TF32 = _rows(
    (256, 128, 32, 4, 2, 1, 390, 2.0), (128, 256, 32, 4, 2, 1, 390, 2.0),
    (256, 64, 32, 4, 2, 1, 340, 1.2), (128, 128, 32, 4, 2, 1, 350, 1.2),
    (128, 64, 32, 6, 1, 1, 280, 1.0), (64, 64, 32, 6, 1, 1, 200, 0.9),
    (128, 32, 32, 6, 1, 1, 150, 0.8),
)  # fmt: skip

# forward and backward_data, groups side by side: output channels and reduced channels are the
# elements of 128 bytes, all taps of the filter stay in shared memory.
GROUPED_HALF = Tile(128, 64, 64, 6, 2, 1, 560, 0.8)
GROUPED_TF32 = Tile(128, 32, 32, 6, 2, 1, 150, 0.6)
GROUPED_SECONDS = 3e-6  # that reading the filter takes before the first tile

# forward and backward_data, float32 from three float16 products: two consumers of 64 pixels.
IMAGE_F16X3 = _rows(
    (128, 128, 64, 3, 2, 1, 155, 2.0), (128, 64, 64, 4, 2, 1, 100, 1.6),
)  # fmt: skip
# The same with tf32's promise, from one product.
IMAGE_F16 = _rows(
    (128, 128, 64, 4, 2, 1, 280, 2.0), (128, 64, 64, 5, 2, 1, 170, 1.6),
)  # fmt: skip
CAREFUL_STAGES = 2

# backward_filter, 16-bit, general: BM filters x BK channels, BC pixels; in parts ...
FILTER_HALF = _rows(
    (128, 256, 64, 4, 2, 1, 660, 6.0), (128, 128, 64, 6, 2, 1, 590, 2.9),
    (64, 256, 64, 5, 1, 1, 420, 2.6), (64, 128, 64, 8, 1, 1, 376, 1.2),
    (64, 64, 64, 8, 1, 1, 286, 0.7), (128, 64, 64, 8, 2, 1, 410, 1.35),
    (64, 32, 64, 8, 1, 1, 155, 0.5),
)  # fmt: skip
# ... and in whole tiles, whose programs read the same pixels at the same time.
FILTER_HALF_WHOLE = _rows(
    (128, 128, 64, 6, 2, 1, 800, 2.4), (64, 128, 64, 8, 1, 1, 469, 1.6),
    (64, 64, 64, 8, 1, 1, 290, 1.6), (128, 64, 64, 8, 2, 1, 458, 2.0),
    (64, 32, 64, 8, 1, 1, 158, 1.5),
)  # fmt: skip

# backward_filter, float32 from three float16 products.
FILTER_F16X3 = _rows(
    (128, 128, 64, 3, 2, 1, 200, 3.0), (128, 64, 64, 4, 2, 1, 150, 2.5),
    (64, 128, 64, 4, 1, 1, 130, 2.5), (64, 64, 64, 6, 1, 1, 90, 2.0),
)  # fmt: skip

# The same with tf32's promise, from one product.
FILTER_F16 = _rows(
    (128, 128, 64, 6, 2, 1, 400, 2.5), (128, 64, 64, 8, 2, 1, 300, 2.0),
    (64, 128, 64, 8, 1, 1, 280, 2.0), (64, 64, 64, 8, 1, 1, 180, 1.5),
)  # fmt: skip

# backward_filter, float32 from six products of three bfloat16 parts ...
FILTER_BF16X6 = _rows(
    (128, 128, 32, 4, 2, 1, 75, 3.0), (128, 64, 32, 5, 2, 1, 60, 2.5),
    (64, 128, 32, 5, 1, 1, 45, 2.5), (64, 64, 32, 6, 1, 1, 35, 2.0),
)  # fmt: skip
# ... and with tf32's promise from three products of two.
FILTER_BF16X3 = _rows(
    (128, 128, 32, 5, 2, 1, 140, 3.0), (128, 64, 32, 6, 2, 1, 100, 2.5),
    (64, 128, 32, 6, 1, 1, 80, 2.5), (64, 64, 32, 8, 1, 1, 60, 2.0),
)  # fmt: skip

# 1x1, 16-bit, channels first: forward and backward_data (BM output channels x BK pixels) ...
PLANAR = _rows(
    (128, 256, 64, 3, 2, 1, 750, 1.8), (128, 128, 64, 5, 2, 1, 600, 1.1),
    (64, 256, 64, 4, 1, 1, 450, 1.2), (64, 128, 64, 6, 1, 1, 400, 0.7),
)  # fmt: skip
# ... and backward_filter (BM filters x BK channels, BC pixels).
FILTER_PLANAR = _rows(
    (128, 256, 64, 4, 2, 1, 660, 6.0), (128, 128, 64, 6, 2, 1, 590, 2.9),
    (64, 256, 64, 5, 1, 1, 420, 2.6), (128, 64, 64, 8, 2, 1, 410, 1.35),
    (64, 128, 64, 8, 1, 1, 376, 1.2), (64, 64, 64, 8, 1, 1, 286, 0.7),
)  # fmt: skip

# backward_filter, windows three wide.
HALO_RATE, HALO_TAIL = 820.0, 6.6
HALO_STAGES = 3
