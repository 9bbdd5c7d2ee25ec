"""Packed operands of the matrix unit, from rows along the reduction or across it.

Operands are first brought together as 16-bit numbers (or as float32, to be split) the way any
micro-kernel's are: A row by row, B step by step. Here that becomes what matrix_unit.py's tile
takes: the reduction filled up with zeros to whole products, B's steps in pairs. Seen as pairs, the
tiles of A and of B are each other's transpose, so rows along the reduction serve for B too.
"""

from __future__ import annotations

from collections.abc import Sequence

from bedstone.backends.cpu.builder import KernelBuilder
from bedstone.backends.cpu.matrix_unit import (
    LANES,
    SIDE,
    STEPS,
    MatrixTile,
    dwords,
    padded,
    paired,
    split,
)
from bedstone.backends.cpu.packing import fill_zero
from bedstone.backends.cpu.shuffles import transposed
from bedstone.backends.cpu.values import Int, IntLike

PAIR_ROW = SIDE * 4  # bytes of a pair of steps of B


def finish_left(
    k: KernelBuilder, tile: MatrixTile, raw: IntLike, target: IntLike, depth: IntLike
) -> None:
    """A, its rows of `depth` elements at `raw`: filled up, and split to `target`."""
    end = padded(depth)
    if not (isinstance(depth, int) and depth == end):
        with k.loop(0, tile.rows) as m:
            row = raw + m * tile.row_bytes + depth * tile.item
            fill_zero(k, row, end - depth, tile.dtype, tile.lanes)
    if tile.pieces == 1:
        return
    with k.loop(0, tile.rows) as m, k.loop(0, end, STEPS) as d:
        at = raw + m * tile.row_bytes + d * tile.item
        halves = [
            split(k, k.load(at, tile.dtype, tile.lanes, 4 * j), tile.pieces) for j in (0, LANES)
        ]
        to = target + m * (tile.depth * 2) + d * 2
        for piece, pair in enumerate(zip(*halves)):
            for j, value in enumerate(pair):
                k.store(value, to, "int16", piece * tile.plane_bytes + j * (2 * LANES))


def finish_right(
    k: KernelBuilder, tile: MatrixTile, raw: IntLike, target: IntLike, depth: IntLike
) -> None:
    """B, its `depth` steps of SIDE columns at `raw`: filled up, and paired to `target` (one piece:
    where they are)."""
    end = padded(depth)
    if not (isinstance(depth, int) and depth == end):
        rest = raw + depth * tile.step_bytes
        fill_zero(k, rest, (end - depth) * SIDE, tile.dtype, tile.lanes)
    with k.loop(0, end, 2) as d:
        at, to = raw + d * tile.step_bytes, target + d * (PAIR_ROW // 2)
        even = _pieces(k, tile, at)
        odd = _pieces(k, tile, at + tile.step_bytes)
        for piece, pair in enumerate(zip(even, odd)):
            for j, value in enumerate(paired(k, *pair)):
                k.store(value, to, "int32", piece * tile.plane_bytes + j * (PAIR_ROW // 2))


def _pieces(k: KernelBuilder, tile: MatrixTile, at: IntLike) -> list[Int]:
    """One step of B."""
    if tile.pieces == 1:
        return [k.load(at, "int16", SIDE)]
    halves = [split(k, k.load(at, tile.dtype, LANES, 4 * j), tile.pieces) for j in (0, LANES)]
    return [k.shuffle(low, high, range(SIDE)) for low, high in zip(*halves)]


def turn_to_right(k: KernelBuilder, rows: Sequence[Int], target: IntLike) -> None:
    """LANES columns of B from their rows along the reduction (STEPS lanes of 16 bits each);
    `target` is where the first step of the first column lies."""
    for q, value in enumerate(transposed(k, [dwords(k, row) for row in rows])):
        k.store(value, target, "int32", q * PAIR_ROW)


def turn_to_left(k: KernelBuilder, steps: Sequence[Int]) -> list[Int]:
    """SIDE rows of A (STEPS // 2 pairs each) from STEPS steps of SIDE lanes of 16 bits."""
    halves: tuple[list[Int], list[Int]] = [], []
    for even, odd in zip(steps[::2], steps[1::2]):
        for half, value in zip(halves, paired(k, even, odd)):
            half.append(value)
    return [*transposed(k, halves[0]), *transposed(k, halves[1])]
