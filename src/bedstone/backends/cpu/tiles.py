"""Transposed tiles: how an operand that is contiguous along another axis than the loop's becomes
contiguous along it.

Blocks of the operand are loaded along its own axis, rearranged in registers, and laid row-major
into a small buffer that stays in the first-level cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bedstone.backends.cpu.builder import Int, KernelBuilder, itemsize
from bedstone.backends.cpu.shuffles import deinterleaved, interleaved, transposed
from bedstone.backends.cpu.values import Float, IntLike

# Elements of a transposed tile: 16 KiB of float32, a third of a first-level cache.
TILE_ELEMENTS = 4096
LONGEST_WHOLE_ROW = 256  # rows up to here lie in the tile whole, one after another
INTERLEAVED = 4  # up to so many rows or columns are interleaved, not transposed


class Tile:
    """A buffer into which column inputs are brought, row-major in the type computed in.

    It holds `columns` rows of `length` elements, `length` apart. `whole`: rows are complete and
    follow one another in every other operand too, so the tile is one long row.
    """

    def __init__(
        self,
        k: KernelBuilder,
        dims: Sequence[int],
        strides: Sequence[Sequence[int]],
        columns: Sequence[int],
        dtypes: Sequence[str],
        compute: str,
    ) -> None:
        self.k, self.compute, self.dtypes = k, compute, dtypes
        self.lanes, self.width = k.lanes(compute), itemsize(compute)
        others = [s for operand, s in enumerate(strides) if operand not in columns]
        across, along = dims[-2:]
        self.strides = [s[-1] for s in strides]
        self.across = across
        elements = TILE_ELEMENTS * itemsize("float32") // self.width
        self.whole = along <= LONGEST_WHOLE_ROW and all(s[-2] == s[-1] * along for s in others)
        if self.whole:
            self.length = along
            self.columns = max(1, elements // (along * self.lanes)) * self.lanes
            self.columns = min(self.columns, -(-across // self.lanes) * self.lanes)
        else:
            self.columns = min(self.lanes, across)
            pieces = -(-along * self.columns // elements)
            self.length = -(-along // (pieces * self.lanes)) * self.lanes
        # A whole vector of every row is written, past the last row's end too.
        self.bytes = (self.columns * self.length + self.lanes * INTERLEAVED) * self.width

    def fill(
        self, operand: int, address: IntLike, tile: Int, count: IntLike, columns: IntLike
    ) -> None:
        """Bring `count` row positions of `columns` columns of an input into the tile."""
        dense = self.strides[operand] == self.across
        if self.across <= INTERLEAVED and dense:
            self._deinterleave(operand, address, tile, count)
        elif self.whole and self.length <= INTERLEAVED:
            self._interleave(operand, address, tile, columns)
        else:
            self._transpose(operand, address, tile, count, columns)

    def _load(self, operand: int, address: IntLike, mask: Any) -> Float:
        k, dtype = self.k, self.dtypes[operand]
        model = k.constant(0.0, self.compute, self.lanes)
        return k.cast(k.load(address, dtype, self.lanes, mask=mask), model)

    def _transpose(
        self, operand: int, address: IntLike, tile: Int, count: IntLike, columns: IntLike
    ) -> None:
        k, lanes, pitch = self.k, self.lanes, self.length * self.width
        size = itemsize(self.dtypes[operand])
        step = self.strides[operand] * size
        with (
            k.loop(0, columns, lanes, at_least_once=True) as j,
            k.loop(0, count, lanes, at_least_once=True) as i,
        ):
            mask = k.first_lanes(columns - j, lanes)
            # Positions past the end read the last one again; their results are not used.
            positions = [k.min(i + r, count - 1) for r in range(lanes)]
            # The next tile: the processor does not foresee so many rows (1.5 to 2 times faster).
            for p in positions:
                k.prefetch(address + p * step, offset=j * size + self.columns * size)
            block = [self._load(operand, address + j * size + p * step, mask) for p in positions]
            tail = None if self.length % lanes == 0 else k.first_lanes(count - i, lanes)
            corner = tile + j * pitch + i * self.width
            for r, vector in enumerate(transposed(k, block)[: self.columns]):
                k.store(vector, corner, self.compute, r * pitch, tail)

    def _interleave(self, operand: int, address: IntLike, tile: Int, columns: IntLike) -> None:
        """Few rows: vectors of each, dealt out in turn."""
        k, lanes, n = self.k, self.lanes, self.length
        size = itemsize(self.dtypes[operand])
        with k.loop(0, columns, lanes, at_least_once=True) as j:
            mask = k.first_lanes(columns - j, lanes)
            rows = [
                self._load(operand, address + j * size + r * self.strides[operand] * size, mask)
                for r in range(n)
            ]
            for number, vector in enumerate(interleaved(k, rows)):
                k.store(
                    vector, tile + j * (n * self.width), self.compute, number * lanes * self.width
                )

    def _deinterleave(self, operand: int, address: IntLike, tile: Int, count: IntLike) -> None:
        """Few columns next to each other in memory: every n-th element is one column's."""
        k, lanes, n = self.k, self.lanes, self.across
        size = itemsize(self.dtypes[operand])
        with k.loop(0, count, lanes, at_least_once=True) as i:
            vectors = [
                self._load(
                    operand,
                    address + i * (n * size) + number * lanes * size,
                    k.first_lanes((count - i) * n - number * lanes, lanes),
                )
                for number in range(n)
            ]
            tail = None if self.length % lanes == 0 else k.first_lanes(count - i, lanes)
            for r, vector in enumerate(deinterleaved(k, vectors)):
                corner = tile + i * self.width
                k.store(vector, corner, self.compute, r * self.length * self.width, tail)
