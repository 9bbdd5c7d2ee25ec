"""The matrix unit of x86 (AMX): tiles of bfloat16 products summed in float32.

A tile register holds 16 rows of 64 bytes. One instruction adds the product of 16 x 32 elements of
A and 32 x 16 of B to a tile of 16 x 16 sums; B lies in pairs along the reduction: row q holds
(B[2q, n], B[2q + 1, n]) for every column n. Subnormal numbers count as zero, as operands and as
sums. Tiles belong to a thread: `each_task` configures them for the length of a job and releases
them at its end. Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1,
chapter 18.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llvmlite import ir

from bedstone.backends.cpu.builder import Int, Job, KernelBuilder
from bedstone.backends.cpu.irtypes import I8, I16, I32, I64, VOID
from bedstone.backends.cpu.microkernels import TILE, Tile
from bedstone.backends.cpu.values import Float, IntLike

REGISTERS, ROWS, ROW_BYTES = 8, 16, 64
STEPS = 32  # of the reduction in one product
PALETTE, ROW_BYTES_AT, ROWS_AT = 1, 16, 48  # in the 64 bytes of a configuration
SIDE = 2 * ROWS  # of a tile of the micro-kernel: 2 x 2 registers of sums
LANES = ROW_BYTES // 4  # sums, or pairs of operands, in a row
SUMS, LEFT, RIGHT = 0, 4, 6  # first registers of the sums, of A and of B
LARGEST = 2.0**127 * (2 - 2.0**-7)  # finite bfloat16
# Which planes of A and B are multiplied, by the number of pieces; the small products first. A
# bfloat16 is one piece. A float32 is the sum of two or three: plane 0 is the first piece, 1 the
# same without what is not finite (an infinity times a zero piece would be NaN), then come the
# others. Three of four or six of nine products are made: those that weigh more than the error.
PRODUCTS = {
    1: ((0, 0),),
    2: ((2, 1), (1, 2), (0, 0)),
    3: ((3, 1), (2, 1), (2, 2), (1, 2), (1, 3), (0, 0)),
}


@dataclass(frozen=True)
class MatrixTile(Tile):
    """A tile of SIDE x SIDE sums and its packed operands.

    pieces   bfloat16 numbers that stand for an element, in planes of their own. An element of
             bfloat16 is one piece and packed as it is (`dtype` is "int16"); float32 elements are
             packed as such and then split.

    `depth` is a multiple of STEPS. A is packed row by row, B by pairs of steps.
    """

    pieces: int = 1

    @classmethod
    def of(cls, pieces: int, depth: int) -> MatrixTile:
        """A tile for so many pieces and at least that depth."""
        depth = padded(depth)
        if pieces == 1:
            return cls(SIDE, 1, SIDE, depth, "int16", pieces=1)
        return cls(SIDE, SIDE // LANES, LANES, depth, "float32", pieces=pieces)

    @property
    def sums(self) -> Tile:
        return Tile(SIDE, SIDE // LANES, LANES, self.depth, "float32")

    @property
    def plane_bytes(self) -> int:
        """One piece of a packed operand."""
        return SIDE * self.depth * 2

    @property
    def planes(self) -> int:
        return self.pieces + 1 if self.pieces > 1 else 1

    @property
    def raw_bytes(self) -> int:
        """An operand before it is split."""
        return SIDE * self.depth * self.item if self.pieces > 1 else 0

    @property
    def a_bytes(self) -> int:
        return self.planes * self.plane_bytes

    @property
    def b_bytes(self) -> int:
        return self.planes * self.plane_bytes

    @property
    def c_bytes(self) -> int:
        return self.sums.c_bytes


def padded(depth: IntLike) -> IntLike:
    """The depth up to the end of its last product."""
    return (depth + (STEPS - 1)) // STEPS * STEPS


@contextlib.contextmanager
def each_task(k: KernelBuilder, job: Job) -> Iterator[Int]:
    """job.each_task(), with the tile registers configured around it."""
    words = [0] * 64
    words[0] = PALETTE
    for register in range(REGISTERS):
        words[ROW_BYTES_AT + 2 * register] = ROW_BYTES
        words[ROWS_AT + register] = ROWS
    numbers = [int.from_bytes(bytes(words[i : i + 8]), "little") for i in range(0, 64, 8)]
    k.external("llvm.x86.ldtilecfg", VOID, k.pointer(k.table(numbers), I8))
    with job.each_task() as task:
        yield task
    k.external("llvm.x86.tilerelease", VOID)


def _move(k: KernelBuilder, which: str, number: int, at: IntLike, offset: int, pitch: int) -> None:
    pointer = k.pointer(at, I8, offset)
    k.external(f"llvm.x86.tile{which}", VOID, _register(number), pointer, ir.Constant(I64, pitch))


def _register(number: int) -> ir.Constant:
    return ir.Constant(I8, number)


QUARTERS = [(h, g) for h in range(2) for g in range(2)]  # of a tile's sums: rows, columns


def clear_sums(k: KernelBuilder) -> None:
    """Zeros in the registers of the sums."""
    for number in range(len(QUARTERS)):
        k.external("llvm.x86.tilezero", VOID, _register(SUMS + number))


def load_sums(k: KernelBuilder, c: IntLike, pitch: int) -> None:
    """SIDE x SIDE sums from memory, rows `pitch` bytes apart."""
    for number, (h, g) in enumerate(QUARTERS):
        _move(k, "loadd64", SUMS + number, c, h * ROWS * pitch + g * ROW_BYTES, pitch)


def store_sums(k: KernelBuilder, c: IntLike, pitch: int) -> None:
    """The inverse of load_sums."""
    for number, (h, g) in enumerate(QUARTERS):
        _move(k, "stored64", SUMS + number, c, h * ROWS * pitch + g * ROW_BYTES, pitch)


def multiply(
    k: KernelBuilder, a: IntLike, a_pitch: int, a_half: int, b: IntLike, b_pitch: int,
    planes: Sequence[tuple[int, int]] = ((0, 0),), plane_bytes: int = 0,
) -> None:  # fmt: skip
    """STEPS steps: sums += A B, of the planes named. Rows of A are a_pitch bytes apart, its second
    half a_half from the first; pairs of steps of B b_pitch."""
    held = (-1, -1)
    for i, j in planes:
        for half in range(2):
            if held[0] != i:
                _move(k, "loadd64", LEFT + half, a, i * plane_bytes + half * a_half, a_pitch)
        for half in range(2):
            if held[1] != j:
                _move(k, "loadd64", RIGHT + half, b, j * plane_bytes + half * ROW_BYTES, b_pitch)
        held = i, j
        for number, (h, g) in enumerate(QUARTERS):
            numbers = (SUMS + number, LEFT + h, RIGHT + g)
            k.external("llvm.x86.tdpbf16ps", VOID, *map(_register, numbers))


def emit_matrix_tile(k: KernelBuilder, tile: MatrixTile, name: str = TILE) -> None:
    """The function name(a, b, c, depth, add): c = a b, or c += a b if add is not 0. It runs inside
    `each_task`."""
    a_pitch, b_pitch, c_pitch = tile.depth * 2, SIDE * 4, tile.sums.step_bytes
    with k.function(name, I64, I64, I64, I64, I64) as (a, b, c, depth, add):
        with k.if_else(add.eq(0)) as (first, later):
            with first:
                clear_sums(k)
            with later:
                load_sums(k, c, c_pitch)
        with k.loop(0, padded(depth) // STEPS) as step:
            multiply(
                k, a + step * (STEPS * 2), a_pitch, ROWS * a_pitch,
                b + step * (STEPS // 2 * b_pitch), b_pitch,
                PRODUCTS[tile.pieces], tile.plane_bytes,
            )  # fmt: skip
        store_sums(k, c, c_pitch)


class _BFloat(ir.Type):
    """LLVM's own type of the numbers, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"


def rounded(k: KernelBuilder, low: Float, high: Float) -> Int:
    """Two vectors of LANES float32 as SIDE bfloat16 bit patterns; subnormal numbers become 0."""
    name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
    raw = k.external(name, ir.VectorType(_BFloat(), SIDE), high.ir, low.ir)
    return Int(k, k.ir.bitcast(raw, ir.VectorType(I16, SIDE)))


# Operands -----------------------------------------------------------------------------------


def dwords(k: KernelBuilder, value: Int) -> Int:
    """SIDE lanes of 16 bits as LANES pairs."""
    return Int(k, k.ir.bitcast(value.ir, ir.VectorType(I32, LANES)))


def paired(k: KernelBuilder, even: Int, odd: Int) -> tuple[Int, Int]:
    """Two steps, SIDE lanes of 16 bits each, as pairs: of the first LANES columns, and the rest."""
    picks = [n for i in range(SIDE) for n in (i, SIDE + i)]
    return (
        dwords(k, k.shuffle(even, odd, picks[:SIDE])),
        dwords(k, k.shuffle(even, odd, picks[SIDE:])),
    )


def split(k: KernelBuilder, value: Float, pieces: int) -> list[Int]:
    """The planes of float32 lanes: each piece is the bfloat16 nearest to what is left."""
    finite = k.unary("fabs", value) < math.inf
    zero = k.constant(0, "int16", value.lanes)
    # What would round to an infinity becomes the largest number and a rest.
    near = k.select(value > LARGEST, LARGEST, k.select(value < -LARGEST, -LARGEST, value))
    first = k._narrow(k.select(finite, near, value), "bfloat16")
    rest = k.select(finite, value - k._widen(first, "bfloat16"), 0.0)
    planes = [Int(k, first), k.select(finite, Int(k, first), zero)]
    for _ in range(pieces - 1):
        raw = k._narrow(rest, "bfloat16")
        rest = rest - k._widen(raw, "bfloat16")
        planes.append(Int(k, raw))
    return planes
