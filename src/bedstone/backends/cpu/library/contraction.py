"""Sums of products over offset tables: the one matrix product behind every convolution.

    C[m, n] = sum_k A[m, k] * B[k, n]

Each operand is a tensor in which element [i, j] lies at base + rows[i] + columns[j]: two tables of
byte offsets say everything about layout, window, stride, dilation, groups and direction. Panels are
packed for the micro-kernel of microkernels.py by looking offsets up: where a vector of them is a
run of neighbours it is loaded whole, where it is two runs (the end of an image row and the
beginning of the next) by two masked loads, else element by element. Sums run over chunks of at
most DEPTH products, then over chunks, as in a plan's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bedstone.backends.cpu.builder import F64, I64
from bedstone.backends.cpu.irtypes import itemsize
from bedstone.backends.cpu.library.language import WORD, LibraryBuilder
from bedstone.backends.cpu.microkernels import SHAPES, Tile, emit_tile
from bedstone.backends.cpu.values import Float, Int, IntLike, Mask

DEPTH = 256  # products summed in registers before they are added to the tile in memory


@dataclass(frozen=True)
class Matrix:
    """Where a matrix lies: element [i, j] at base + rows[i] + columns[j]; tables of int64 bytes."""

    base: IntLike
    rows: Int
    columns: Int

    @property
    def turned(self) -> Matrix:
        """The transposed matrix."""
        return Matrix(self.base, self.columns, self.rows)

    def at(self, base: IntLike) -> Matrix:
        """The same tables over other memory."""
        return Matrix(base, self.rows, self.columns)


@dataclass(frozen=True)
class Run:
    """A vector of offsets from a table: all of them, and what is known about them."""

    offsets: Int
    first: Int
    last: Int
    is_whole: Mask
    is_split: Mask
    mask: Mask  # of two runs: the lanes of the first


class Product:
    """Emits packing, products and stores for one dtype, with one tile."""

    def __init__(self, k: LibraryBuilder, dtype: str) -> None:
        self.k, self.dtype, self.item = k, dtype, itemsize(dtype)
        self.lanes = k.lanes(dtype)
        rows, vectors = SHAPES[k.target.vector_registers][0]
        self.tile = Tile(rows, vectors, self.lanes, DEPTH, dtype)
        self.can_mask = k.target.vector_bytes >= 32  # masked loads are one instruction

    # Functions: each is emitted once and called -------------------------------------------------

    def emit(self) -> None:
        """The tile, both packings and both ways to store a tile."""
        emit_tile(self.k, self.tile, self._name("tile"))
        self._emit_pack_rows()
        self._emit_pack_columns()
        self._emit_finish("store", self._blend)
        self._emit_finish("add", self._add)

    def _name(self, function: str) -> str:
        return f"{function}_{self.dtype}"

    def tile_product(self, a: IntLike, b: IntLike, c: IntLike, depth: Int, add: IntLike) -> None:
        """c (+)= a b, packed panels of `depth` steps."""
        self.k.call(self._name("tile"), a, b, c, depth, add)

    def pack_rows(
        self, a: Matrix, first: IntLike, count: IntLike, k0: IntLike, depth: IntLike, to: IntLike
    ) -> None:
        """Rows first ... of A (of `count` rows), columns k0 ... k0 + depth - 1, as a left panel.
        Rows past the end repeat the last one; nobody looks at their products."""
        self.k.call(self._name("pack_rows"), a.base, a.rows, first, count, a.columns, k0, depth, to)

    def pack_columns(
        self, b: Matrix, first: IntLike, count: IntLike, k0: IntLike, depth: IntLike, to: IntLike
    ) -> None:
        """Columns first ... of B (of `count`), rows k0 ... k0 + depth - 1, as a right panel."""
        self.k.call(
            self._name("pack_columns"), b.base, b.columns, first, count, b.rows, k0, depth, to
        )

    def store(
        self, sums: IntLike, c: Matrix, row: IntLike, rows: IntLike, column: IntLike,
        columns: IntLike, biases: Sequence[IntLike], alpha: Float, beta: Float,
    ) -> None:  # fmt: skip
        """C = alpha * sums + beta * C (+ bias), one tile; biases: an address by row and one by
        column, 0 for none."""
        self._finish("store", sums, c, row, rows, column, columns, biases, alpha, beta)

    def add(
        self, sums: IntLike, c: Matrix, row: IntLike, rows: IntLike, column: IntLike,
        columns: IntLike,
    ) -> None:  # fmt: skip
        """C += sums, one tile."""
        one = self.k.constant(1.0, "float64")
        self._finish("add", sums, c, row, rows, column, columns, (0, 0), one, one)

    def _finish(
        self, name: str, sums: IntLike, c: Matrix, row: IntLike, rows: IntLike, column: IntLike,
        columns: IntLike, biases: Sequence[IntLike], alpha: Float, beta: Float,
    ) -> None:  # fmt: skip
        self.k.call(
            self._name(name), sums, c.base, c.rows, row, rows, c.columns, column, columns,
            *biases, alpha, beta,
        )  # fmt: skip

    # Packing -----------------------------------------------------------------------------------

    def run_of(self, table: Int, first: IntLike, end: IntLike) -> Run:
        """Offsets number first, first + 1, ...; from `end` on the last one again."""
        k, lanes = self.k, self.lanes
        inside = k.iota(lanes) < k.splat(k.as_int(end) - first, lanes)
        final = k.splat(k.word(table, k.as_int(end) - 1), lanes)
        at = table + first * WORD
        offsets = k.load(at, "int64", lanes, mask=inside, otherwise=final)
        steps = k.iota(lanes) * self.item
        head, tail = k.extract(offsets, 0), k.extract(offsets, lanes - 1)
        from_head = offsets.eq(k.splat(head, lanes) + steps)
        to_tail = offsets.eq(k.splat(tail - (lanes - 1) * self.item, lanes) + steps)
        return Run(offsets, head, tail, k.all(from_head), k.all(from_head | to_tail), from_head)

    def _whole(self, base: IntLike, run: Run) -> Any:
        return self.k.load(base + run.first, self.dtype, self.lanes)

    def _split(self, base: IntLike, run: Run) -> Any:
        k, lanes = self.k, self.lanes
        head = k.load(base + run.first, self.dtype, lanes, mask=run.mask)
        at = base + run.last - (lanes - 1) * self.item
        return k.load(at, self.dtype, lanes, mask=~run.mask, otherwise=head)

    def _apart(self, base: IntLike, run: Run) -> Any:
        return self.k.gather(base, run.offsets, self.dtype)

    def by_kind(self, run: Run, emit: Callable[[Callable[[IntLike, Run], Any]], None]) -> None:
        """Code for each way in which the vector may lie."""
        k = self.k
        with k.if_else(run.is_whole) as (whole, other):
            with whole:
                emit(self._whole)
            with other:
                if not self.can_mask:
                    emit(self._apart)
                    return
                with k.if_else(run.is_split) as (split, apart):
                    with split:
                        emit(self._split)
                    with apart:
                        emit(self._apart)

    def _emit_pack_rows(self) -> None:
        k, tile = self.k, self.tile
        with k.function(self._name("pack_rows"), *[I64] * 8) as arguments:
            base, rows, first, count, columns, k0, depth, to = arguments
            with k.loop(0, depth, self.lanes) as i:
                run = self.run_of(columns, k0 + i, k0 + depth)

                def copy(read: Any, i: Any = i, run: Run = run) -> None:
                    with k.loop(0, tile.rows) as m:
                        at = base + k.word(rows, k.min(first + m, count - 1))
                        k.store(read(at, run), to + m * tile.row_bytes + i * tile.item, self.dtype)

                self.by_kind(run, copy)

    def _emit_pack_columns(self) -> None:
        k, tile = self.k, self.tile
        with k.function(self._name("pack_columns"), *[I64] * 8) as arguments:
            base, columns, first, count, rows, k0, depth, to = arguments
            # (A vector past the end of the columns repeats the last one.)
            runs = [
                self.run_of(columns, k.min(first + j * self.lanes, count - 1), count)
                for j in range(tile.vectors)
            ]

            def copy(read: Any, numbers: Sequence[int]) -> None:
                with k.loop(0, depth) as i:
                    at, target = base + k.word(rows, k0 + i), to + i * tile.step_bytes
                    for j in numbers:
                        offset = j * self.lanes * tile.item
                        k.store(read(at, runs[j]), target, self.dtype, offset=offset)

            every: Any = True
            for run in runs:
                every = run.is_whole & every
            with k.if_else(every) as (together, single):
                with together:
                    copy(self._whole, range(tile.vectors))
                with single:
                    for j, run in enumerate(runs):
                        self.by_kind(run, lambda read, j=j: copy(read, [j]))

    # Results -----------------------------------------------------------------------------------

    def _blend(self, value: Any, at: Int, alpha: Float, beta: Float, added: Any) -> Any:
        k = self.k
        result = k.variable(value * k.cast(alpha, value))
        with k.if_(beta.ne(0.0)):
            old = k.load(at, self.dtype, value.lanes)
            result.set(k.fma(old, k.cast(beta, value), result.value))
        return result.value + added

    def _add(self, value: Any, at: Int, alpha: Float, beta: Float, added: Any) -> Any:
        return self.k.load(at, self.dtype, value.lanes) + value

    def _emit_finish(self, name: str, combine: Callable[..., Any]) -> None:
        k, tile, lanes = self.k, self.tile, self.lanes
        with k.function(self._name(name), *[I64] * 10, F64, F64) as arguments:
            sums, base, row_table, row, rows, column_table, column, columns = arguments[:8]
            row_bias, column_bias, alpha, beta = arguments[8:]
            count = k.min(rows - row, tile.rows)

            def bias(m: IntLike, n: IntLike, width: int | None) -> Any:
                zero = k.constant(0.0, self.dtype, width)
                total = k.variable(zero)
                with k.if_(row_bias.ne(0)):
                    one = k.load(row_bias + (row + m) * self.item, self.dtype)
                    total.set(k.splat(one, width))
                with k.if_(column_bias.ne(0)):
                    total.set(k.load(column_bias + n * self.item, self.dtype, width))
                return total.value

            def place(m: IntLike) -> Int:
                return base + k.word(row_table, row + m)

            with k.loop(0, tile.vectors) as j:
                n = column + j * lanes
                with k.if_(n < columns):
                    run = self.run_of(column_table, n, columns)
                    source = sums + j * (lanes * tile.item)
                    with k.if_else(run.is_whole) as (whole, apart):
                        with whole:
                            plain = beta.eq(0.0) & row_bias.eq(0) & column_bias.eq(0)
                            with k.if_else(plain) as (scaled, combined):
                                with scaled, k.loop(0, count) as m:
                                    value = k.load(source + m * tile.step_bytes, self.dtype, lanes)
                                    value = value * k.cast(alpha, value)
                                    k.store(value, place(m) + run.first, self.dtype)
                                with combined, k.loop(0, count) as m:
                                    at = place(m) + run.first
                                    value = k.load(source + m * tile.step_bytes, self.dtype, lanes)
                                    added = bias(m, n, lanes)
                                    result = combine(value, at, alpha, beta, added)
                                    k.store(result, at, self.dtype)
                        with (
                            apart,
                            k.loop(0, count) as m,
                            k.loop(0, k.min(columns - n, lanes)) as i,
                        ):
                            at = place(m) + k.word(column_table, n + i)
                            value = k.load(source + m * tile.step_bytes + i * tile.item, self.dtype)
                            added = bias(m, n + i, None)
                            result = combine(value, at, alpha, beta, added)
                            k.store(result, at, self.dtype)
