"""Which patch of pixels a tile's rows are.

A tile takes BM pixels as a box bn x bd x bh x bw of powers of two. A good box covers the output
with few tiles, and lets many taps fall wholly into the padding, where they are skipped.
`count_taps` counts exactly what the kernels' `tap_range` will walk.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from bedstone.backends.gluon.convolution.images import MAX_BOX, Quad, Triple
from bedstone.backends.triton.convolution.geometry import Axis


@functools.lru_cache(maxsize=4096)
def count_taps(axis: Axis, span: int, backward: bool) -> tuple[int, int]:
    """(tiles, taps of all these tiles) along an axis cut into pieces of `span` outputs; backward
    the outputs are the image's own pixels, one residue modulo the stride after the other."""
    u, dil = axis.u, axis.dil
    length = -(-axis.size // u) if backward else axis.out
    tiles = -(-length // span)
    total = 0
    for rho in range(u if backward else 1):
        for o in range(0, tiles * span, span):
            if backward:
                first = (rho + axis.pad) % u
                n = max(axis.taps - first + u - 1, 0) // u
                base = o + (rho + axis.pad) // u - (n - 1) * dil
                extent, size = span, axis.out
            else:
                n, base = axis.taps, o * u - axis.pad
                extent, size = (span - 1) * u + 1, axis.size
            begin = max(dil - base - extent, 0) // dil
            end = min(n, max(size - 1 - base + dil, 0) // dil)
            total += max(end - begin, 0)
    return tiles, total


@dataclass(frozen=True)
class Patch:
    """A box of pixels (n, d, h, w), how many of them cover the output along each axis (of one
    residue, backward), and the taps that all of them together take."""

    box: Quad
    tiles: Quad
    taps: int
    residues: int

    @property
    def count(self) -> int:
        """Patches in all."""
        n, d, h, w = self.tiles
        return n * d * h * w * self.residues

    @property
    def logs(self) -> Triple:
        """log2 of the box along d, h and w."""
        return tuple(b.bit_length() - 1 for b in self.box[1:])  # type: ignore[return-value]


def powers(limit: int) -> list[int]:
    """1, 2, 4, ... up to limit."""
    return [1 << i for i in range(limit.bit_length())]


@functools.lru_cache(maxsize=1024)
def choose_patch(images: int, axes: tuple[Axis, Axis, Axis], bm: int, backward: bool) -> Patch:
    """The box of bm pixels whose tiles take the fewest taps; of equals, the one that reads the
    smallest part of the image."""
    best: tuple[tuple[float, float], Patch] | None = None
    residues = axes[0].u * axes[1].u * axes[2].u if backward else 1
    steps = [1 if backward else axis.u for axis in axes]
    flat_depth = axes[0] == Axis()
    for bw in powers(min(bm, MAX_BOX // steps[2])):
        for bh in powers(min(bm // bw, MAX_BOX // steps[1])):
            for bd in powers(1 if flat_depth else min(bm // (bw * bh), MAX_BOX // steps[0])):
                bn = bm // (bw * bh * bd)
                if bn > MAX_BOX:
                    continue
                (dt, d), (ht, h), (wt, w) = (
                    count_taps(axis, b, backward) for axis, b in zip(axes, (bd, bh, bw))
                )
                nt = -(-images // bn)
                read = bn * (bd * steps[0] + axes[0].taps - 1)
                read *= (bh * steps[1] + axes[1].taps - 1) * (bw * steps[2] + axes[2].taps - 1)
                key = (nt * d * h * w, read)
                if best is None or key < best[0]:
                    patch = Patch((bn, bd, bh, bw), (nt, dt, ht, wt), nt * d * h * w, residues)
                    best = (key, patch)
    if best is None:
        raise ValueError(f"no patch of {bm} pixels with strides {steps}")
    return best[1]
