"""The micro-kernel: a tile of a matrix product held in registers.

C[m, n] (+)= sum_k A[m, k] * B[k, n] for `rows` by `vectors * lanes` elements: each step broadcasts
`rows` elements of A against `vectors` vectors of B, so that rows * vectors multiply-adds share
rows + vectors loads. Operands are packed: A row by row, B step by step, C tile by tile. A tile is
always computed whole; whoever packs fills what lies past the end with zeros. Source: Goto and van
de Geijn, "Anatomy of high-performance matrix multiplication", 2008; Van Zee, BLIS.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from bedstone.backends.cpu.builder import KernelBuilder
from bedstone.backends.cpu.irtypes import I64, itemsize
from bedstone.backends.cpu.target import Target
from bedstone.backends.cpu.values import IntLike

TILE = "tile"
UNROLL = 4
# Tiles (rows, vectors) by number of vector registers, all within 3 % of the FMA peak on Zen 5 and
# Sapphire Rapids (32) or on Zen 3 (16); narrower ones for matrices of few rows or columns. rows *
# vectors sums, the vectors of a step and one broadcast must fit: (3, 4) needs 17 registers, and
# ran at 45 % of (6, 2) on Zen 3.
SHAPES = {
    32: ((8, 3), (12, 2), (14, 2), (6, 4), (9, 3), (5, 5), (4, 6), (3, 8), (2, 12), (24, 1)),
    16: ((6, 2), (4, 3), (2, 5), (12, 1)),
}
# Time of a wide but shallow tile against the best: its loads no longer hide behind its products.
SHALLOW = {(3, 8): 1.02, (2, 12): 1.08, (24, 1): 1.1, (2, 5): 1.05, (12, 1): 1.25}


@dataclass(frozen=True)
class Tile:
    """Shape of the micro-kernel and of its packed operands, all counted in elements.

    rows, vectors, lanes   of the tile; `dtype` is the type summed in
    depth                  the longest run of k that the packed operands hold
    by_steps               A is packed step by step too: one stream, however short the depth
    a_row_bytes            A is read where it lies, its rows so far apart; 0: A is packed
    """

    rows: int
    vectors: int
    lanes: int
    depth: int
    dtype: str
    by_steps: bool = False
    a_row_bytes: int = 0

    @property
    def columns(self) -> int:
        return self.vectors * self.lanes

    @property
    def sums(self) -> Tile:
        """The tile of C, where it has another form than the operands."""
        return self

    @property
    def item(self) -> int:
        return itemsize(self.dtype)

    @property
    def row_bytes(self) -> int:
        """From one row of A to the next."""
        if self.a_row_bytes or self.by_steps:
            return self.a_row_bytes or self.item
        return -(-self.depth // self.lanes) * self.lanes * self.item

    @property
    def a_step_bytes(self) -> int:
        """From one k of a packed A to the next."""
        return self.rows * self.item if self.by_steps else self.item

    @property
    def a_bytes(self) -> int:
        return self.depth * self.a_step_bytes if self.by_steps else self.rows * self.row_bytes

    @property
    def step_bytes(self) -> int:
        """From one k of a packed B (or row of a C tile) to the next."""
        return self.columns * self.item

    @property
    def b_bytes(self) -> int:
        return self.depth * self.step_bytes

    @property
    def c_bytes(self) -> int:
        return self.rows * self.step_bytes


def choose_shape(target: Target, dtype: str, rows: int, columns: int) -> tuple[int, int]:
    """The (rows, vectors) that spends the least time on a rows x columns matrix."""
    lanes = target.vector_bytes // itemsize(dtype)
    shapes = SHAPES[target.vector_registers]
    return min(shapes, key=lambda shape: computed_size(shape, lanes, rows, columns))


def computed_size(shape: tuple[int, int], lanes: int, rows: int, columns: int) -> float:
    """Elements that whole tiles compute for a rows x columns matrix, a slow tile's counted more."""
    height, width = shape[0], shape[1] * lanes
    computed = math.ceil(rows / height) * height * math.ceil(columns / width) * width
    return computed * SHALLOW.get(shape, 1.0)


def unrolled(
    k: KernelBuilder, length: IntLike, unroll: int, step: Callable[[IntLike, int], None]
) -> None:
    """step(i, count) for `count` steps from i on, all `length` of them: `unroll` at a time, then
    the rest, at once where its number is known."""
    even = length - length % unroll
    with k.loop(0, even, unroll) as i:
        step(i, unroll)
    if isinstance(length, int):
        step(even, length - even)  # type: ignore[arg-type]
    else:
        with k.loop(even, length) as i:
            step(i, 1)


def emit_tile(k: KernelBuilder, tile: Tile, name: str = TILE) -> None:
    """The function name(a, b, c, depth, add): c = a b, or c += a b if add is not 0."""
    with k.function(name, I64, I64, I64, I64, I64) as (a, b, c, depth, add):
        zero = k.constant(0.0, tile.dtype, tile.lanes)
        sums = [[k.variable(zero) for _ in range(tile.vectors)] for _ in range(tile.rows)]
        step = tile.lanes * tile.item

        def products(i: IntLike, unroll: int) -> None:
            a_at, b_at = a + i * tile.a_step_bytes, b + i * tile.step_bytes
            for u in range(unroll):
                base = u * tile.step_bytes
                right = [
                    k.load(b_at, tile.dtype, tile.lanes, base + j * step)
                    for j in range(tile.vectors)
                ]
                for m, row in enumerate(sums):
                    left = k.load(
                        a_at, tile.dtype, None, m * tile.row_bytes + u * tile.a_step_bytes
                    )
                    left = k.splat(left, tile.lanes)
                    for total, vector in zip(row, right):
                        total.set(k.fma(left, vector, total.value))

        unrolled(k, depth, UNROLL, products)
        places = [
            (total, (m * tile.vectors + j) * step)
            for m, row in enumerate(sums)
            for j, total in enumerate(row)
        ]
        with k.if_else(add.eq(0)) as (first, later):
            with first:
                for total, at in places:
                    k.store(total.value, c, tile.dtype, at)
            with later:
                for total, at in places:
                    old = k.load(c, tile.dtype, tile.lanes, at)
                    k.store(old + total.value, c, tile.dtype, at)
