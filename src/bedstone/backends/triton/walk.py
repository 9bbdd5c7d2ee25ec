"""Walking tensors of any strides in tiles: the one way in which pointwise kernels address memory.

Axes that lie nested in all operands are merged; what remains is up to six outer axes, whose
indices are the program's (a few scalar divisions), and two inner axes that make a tile [A, B]: B
the innermost of the output, A the innermost of an input where that is another axis (the tile is
then transposed on its way through the chip). A packed tensor becomes one axis B.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from bedstone.backends.triton.launch import ALIGNMENT, Argument, Integers, Scalar
from bedstone.spec.tensor import TensorDesc

OUTER = 6  # outer axes: with the two of a tile, tensors of rank 8
TILE = 4096  # elements of a tile: 32 a thread of 128, in 16-byte words
SIDE = 64  # of a tile that is transposed: both sides read whole 128-byte lines of 16-bit data
WARPS = 4
MAX_PROGRAMS = 2**31 - 1


@dataclass(frozen=True)
class Walk:
    """Six outer sizes, the inner sizes A and B, and the strides of each operand over these eight
    axes, in elements. `words`: elements of a 16-byte word in the widest operand."""

    outer: tuple[int, ...]
    a: int
    b: int
    strides: tuple[tuple[int, ...], ...]
    tile: tuple[int, int]
    wide: bool
    words: int

    @property
    def programs(self) -> int:
        """Tiles in all."""
        return math.prod(self.outer) * -(-self.a // self.tile[0]) * -(-self.b // self.tile[1])

    def arguments(self, *names: str) -> dict[str, Argument]:
        """`dims`, `A`, `B` and, for each operand in order, the strides under its name."""
        kind = "i64" if self.wide else "i32"
        found: dict[str, Argument] = {"dims": Integers(self.outer, kind)}
        for name, size in (("A", self.a), ("B", self.b)):
            found[name] = Scalar(size, kind, self._divisor((size,)))
        for name, strides in zip(names, self.strides):
            found[name] = Integers(strides, kind, self._divisor(strides))
        return found

    def _divisor(self, values: tuple[int, ...]) -> int:
        """The widest word that divides all (but the unit strides), so that it can be used."""
        return common_word(values, self.words)

    def constants(self) -> dict[str, Any]:
        """BA, BB, WIDE."""
        return {"BA": self.tile[0], "BB": self.tile[1], "WIDE": self.wide}


def walk(descs: Sequence[TensorDesc]) -> Walk:
    """The walk over tensors of equal dims, the output last. Raises nothing: any strides do."""
    rows = [(d, tuple(t.strides[i] for t in descs)) for i, d in enumerate(descs[-1].dims) if d != 1]
    rows.sort(key=lambda row: -abs(row[1][-1]))
    axes = merged(rows)
    b = axes.pop() if axes else (1, (0,) * len(descs))
    a = axes.pop(_partner(axes, b)) if axes else (1, (0,) * len(descs))
    transposed = any(abs(s) == 1 and abs(t) != 1 for s, t in zip(a[1], b[1]))
    outer = [(1, (0,) * len(descs))] * (OUTER - len(axes)) + axes
    ordered = [*outer, a, b]
    wide = any(_extent(t) >= 2**31 for t in descs)
    return Walk(
        tuple(d for d, _ in outer),
        a[0],
        b[0],
        tuple(tuple(s[i] for _, s in ordered) for i in range(len(descs))),
        tile_sides(a[0], b[0], transposed),
        wide,
        ALIGNMENT // min(t.dtype.itemsize for t in descs),
    )


def too_many(over: Walk) -> str | None:
    """The reason to decline a walk of more programs than a grid has, or None."""
    if over.programs > MAX_PROGRAMS:
        return f"needs {over.programs} programs; a grid has at most {MAX_PROGRAMS}"
    return None


def _extent(desc: TensorDesc) -> int:
    low, high = desc.offset_range()
    return high - low


def merged(rows: list[tuple[int, tuple[int, ...]]]) -> list[tuple[int, tuple[int, ...]]]:
    """Neighbouring axes joined where in every operand the outer steps over the whole inner."""
    axes: list[tuple[int, tuple[int, ...]]] = []
    for dim, strides in rows:
        if axes and all(o == dim * s for o, s in zip(axes[-1][1], strides)):
            axes[-1] = (axes[-1][0] * dim, strides)
        else:
            axes.append((dim, strides))
    return axes


def _partner(axes: list[tuple[int, tuple[int, ...]]], b: tuple[int, tuple[int, ...]]) -> int:
    """Which outer axis shares the tile with B: one that is contiguous in an input where B is not,
    else the innermost."""
    for i, (_, strides) in enumerate(axes):
        if any(abs(s) == 1 and abs(t) != 1 for s, t in zip(strides, b[1])):
            return i
    return len(axes) - 1


def common_word(values: Iterable[int], widest: int) -> int:
    """The widest word of elements, up to `widest`, that divides all values but zeros and ones."""
    found = widest
    for value in values:
        while value not in (0, 1) and value % found:
            found //= 2
    return found


def power_of_two(n: int) -> int:
    """The least power of two not below n."""
    return 1 << max(n - 1, 0).bit_length()


def tile_sides(a: int, b: int, transposed: bool) -> tuple[int, int]:
    """Sides of a tile over axes of a and b elements."""
    side = SIDE if transposed else TILE
    bb = min(side, power_of_two(b))
    ba = min(power_of_two(a), SIDE if transposed else max(1, TILE // bb))
    return ba, bb


@triton.jit
def tile_indices(A, B, BA: tl.constexpr, BB: tl.constexpr, WIDE: tl.constexpr):
    """(outer index, a, b) of this program's tile."""
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    blocks = tl.cdiv(B, BB)
    b = (pid % blocks) * BB + tl.arange(0, BB)
    pid = pid // blocks
    blocks = tl.cdiv(A, BA)
    a = (pid % blocks) * BA + tl.arange(0, BA)
    return pid // blocks, a, b


@triton.jit
def outer_offset(index, dims, strides):
    """Element offset of an outer index."""
    offset = index * 0
    for i in tl.static_range(6):
        offset += (index % dims[5 - i]) * strides[5 - i]
        index = index // dims[5 - i]
    return offset


@triton.jit
def tile_offsets(
    dims, A, B, strides, BA: tl.constexpr, BB: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """[BA, BB] element offsets of this program's tile in one operand."""
    index, a, b = tile_indices(A, B, BA, BB, WIDE)
    inner = (a * strides[6])[:, None] + (b * strides[7])[None, :]
    return outer_offset(index, dims, strides) + inner


@triton.jit
def tile_mask(A, B, BA: tl.constexpr, BB: tl.constexpr, WIDE: tl.constexpr):
    """[BA, BB]: True inside the tensor."""
    _, a, b = tile_indices(A, B, BA, BB, WIDE)
    return (a < A)[:, None] & (b < B)[None, :]


@triton.jit
def strip(pid, C, W, N, CHANNELS_LAST: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr):
    """(image, channel, column, inside) of a program's strip, shaped to broadcast to [BA, BB]."""
    a = tl.arange(0, BA)[:, None]
    b = tl.arange(0, BB)[None, :]
    if CHANNELS_LAST:
        blocks = tl.cdiv(C, BB)
        channel = (pid % blocks) * BB + b
        pid = pid // blocks
        spans = tl.cdiv(W, BA)
        column = (pid % spans) * BA + a
        image = pid // spans
        return image, channel, column, (channel < C) & (column < W)
    else:
        spans = tl.cdiv(W, BB)
        column = (pid % spans) * BB + b
        plane = (pid // spans) * BA + a
        return plane // C, plane % C, column, (plane < N * C) & (column < W)
