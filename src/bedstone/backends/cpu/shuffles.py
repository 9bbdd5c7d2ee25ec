"""Rearranging vectors in registers: transposing, interleaving and taking them apart again.

All are chains of two-operand shuffles with constant patterns, for which every target has a few
instructions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bedstone.backends.cpu.builder import KernelBuilder


def transposed(k: KernelBuilder, rows: Sequence[Any]) -> list[Any]:
    """The transpose of n vectors of n lanes: blocks off the diagonal change places, halving."""
    rows, n = list(rows), len(rows)
    half = n // 2
    while half:
        low = [lane if not lane & half else n + lane - half for lane in range(n)]
        high = [lane + half if not lane & half else n + lane for lane in range(n)]
        for r in range(n):
            if not r & half:
                a, b = rows[r], rows[r + half]
                rows[r], rows[r + half] = k.shuffle(a, b, low), k.shuffle(a, b, high)
        half //= 2
    return rows


def interleaved(k: KernelBuilder, vectors: Sequence[Any]) -> list[Any]:
    """a0 b0 c0 a1 b1 c1 ...: n vectors dealt out in turn into n vectors."""
    n, lanes = len(vectors), vectors[0].lanes
    if n == 1:
        return list(vectors)
    return [
        _picked(k, vectors, [((start + i) % n, (start + i) // n) for i in range(lanes)])
        for start in range(0, n * lanes, lanes)
    ]


def deinterleaved(k: KernelBuilder, vectors: Sequence[Any]) -> list[Any]:
    """The inverse: result r has every n-th element of the run that the vectors form, from r on."""
    n, lanes = len(vectors), vectors[0].lanes
    if n == 1:
        return list(vectors)
    return [_picked(k, vectors, [divmod(r + n * i, lanes) for i in range(lanes)]) for r in range(n)]


def _picked(k: KernelBuilder, vectors: Sequence[Any], wanted: list[tuple[int, int]]) -> Any:
    """Lane i is lane wanted[i][1] of vector wanted[i][0]; one shuffle a further vector."""
    lanes = len(wanted)
    result = k.shuffle(
        vectors[0], vectors[1], [lane + lanes * min(v, 1) if v < 2 else 0 for v, lane in wanted]
    )
    for number in range(2, len(vectors)):
        pattern = [lanes + lane if v == number else i for i, (v, lane) in enumerate(wanted)]
        result = k.shuffle(result, vectors[number], pattern)
    return result
