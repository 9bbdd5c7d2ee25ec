"""Forward and backward_data of cpu:implicit_gemm_amx on rows of the image, channels last.

The tiles of A are read straight from the image's rows: for one tap and 32 channels, 16 neighbouring
pixels are 16 rows of a tile, one pixel apart. A task copies the rows that its pixels need once,
with real zeros around them, or reads them where they are if one tap meets every pixel. The copy is
one long line of pixels: tiles run on from row to row, and what they compute between rows is not
stored. No patch is gathered, however many taps overlap. Stride 1; backward_data with a stride
falls into phases of stride 1 (row_blocking.py).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from bedstone.backends.cpu import matrix_unit
from bedstone.backends.cpu.activation import emit_epilogue
from bedstone.backends.cpu.builder import F64, I64, KernelBuilder
from bedstone.backends.cpu.convolution.image_product import (
    FILTER_BYTES_MAX,
    L2_SHARE,
    TASK_BYTES_MAX,
    TASKS_WANTED,
    even_pieces,
)
from bedstone.backends.cpu.convolution.matrix_packing import PAIR_ROW, turn_to_right
from bedstone.backends.cpu.convolution.packed_filter import Operands, Packed
from bedstone.backends.cpu.convolution.row_blocking import View, views
from bedstone.backends.cpu.convolution.row_product import RowProduct
from bedstone.backends.cpu.cost import MATRIX_RATE
from bedstone.backends.cpu.matrix_unit import LANES, ROWS, SIDE, STEPS, paired
from bedstone.backends.cpu.packing import fill_zero, load_strided
from bedstone.backends.cpu.target import Target
from bedstone.backends.cpu.values import Int, IntLike
from bedstone.spec.convolution import ConvolutionProblem

ITEM = 2  # bytes of bfloat16
DEPTH = 640  # products summed in a tile before they are added to the sums in memory
SUM_ROW = SIDE * 4  # bytes of a row of sums
SUM_BYTES = SIDE * SUM_ROW
# Flops of the peak float32 rate: per element of the image, of the filter, and of the output.
COPY_FLOPS, FILTER_FLOPS, FINISH_FLOPS = 6.0, 60.0, 30.0


@dataclass(frozen=True)
class Blocking:
    """How a phase is cut.

    in_place        the image is read where it is: one line of pixels
    width           pixels from a row of the line to the next
    images, band    images and rows of a task (in place: one, and tiles of the line)
    tiles           of a task's band (in place: of the line)
    runs, run       of the depth: rows of taps by elements
    cuts, piece     pieces of a run, and their length, where it is longer than DEPTH
    group           runs of a chunk, where it is not
    panels, part, split   of outer channels: of the phase, packed at a time, of a task
    """

    in_place: bool
    width: int
    images: int
    band: int
    tiles: int
    runs: int
    run: int
    cuts: int
    piece: int
    group: int
    panels: int
    part: int
    split: int

    @property
    def chunks(self) -> int:
        return self.runs * self.cuts if self.cuts > 1 else -(-self.runs // self.group)

    @property
    def chunk_depth(self) -> int:
        return self.piece if self.cuts > 1 else self.group * self.run

    @property
    def panel_bytes(self) -> int:
        """A panel of the filter, of one chunk."""
        return self.chunk_depth * SIDE * ITEM


def fits(problem: ConvolutionProblem) -> bool:
    """Whether the problem is one for this kernel."""
    found = [v for v in views(problem) if not v.empty]
    return bool(found) and all(
        v.rows.step == v.columns.step == 1
        and v.inner % STEPS == 0
        and v.image[2] == v.inner * ITEM
        and v.columns.shifts[-1] - v.columns.shifts[0] == len(v.columns.shifts) - 1
        for v in found
    )


@functools.lru_cache(maxsize=256)
def blocking(v: View, target: Target) -> Blocking:
    """Cut a phase for the tile and the caches."""
    pixels = v.columns.pixels
    in_place = (
        v.rows.pixels == v.batch == 1
        and v.columns.shifts == v.rows.shifts == (0,)
        and v.columns.size == pixels >= SIDE
    )
    runs, run = len(v.rows.shifts), len(v.columns.shifts) * v.inner
    pieces, cuts = even_pieces(run // STEPS, DEPTH // STEPS)
    group, groups = even_pieces(runs, max(1, DEPTH // run))
    chunks = runs * cuts if cuts > 1 else groups
    depth = pieces * STEPS if cuts > 1 else group * run
    panels = -(-v.outer // SIDE)
    part, _ = even_pieces(panels, max(1, FILTER_BYTES_MAX // (chunks * depth * SIDE * ITEM)))
    room = min(int(target.l2_bytes * L2_SHARE), TASK_BYTES_MAX)
    sums = SUM_BYTES * part if chunks > 1 else 0
    if in_place:
        tiles = -(-pixels // SIDE)
        most = max(1, room // (SIDE * v.inner * ITEM + sums))
        band, bands = even_pieces(tiles, min(most, max(1, tiles // TASKS_WANTED)))
        width, images, units = pixels, 1, bands
    else:
        width = v.columns.reach(pixels)

        def nbytes(rows: int) -> int:
            tiles = -(-((rows - 1) * width + pixels) // SIDE)
            return v.rows.reach(rows) * width * v.inner * ITEM + tiles * sums

        band = 1
        while band < v.rows.pixels and nbytes(band + 1) <= room:
            band += 1
        band, bands = even_pieces(v.rows.pixels, band)
        images = 1
        if bands == 1:
            images = max(1, min(room // nbytes(band), v.batch * bands // TASKS_WANTED))
        images, blocks = even_pieces(v.batch, images)
        tiles = -(-((band - 1) * width + pixels) // SIDE)
        units = bands * blocks
    split, _ = even_pieces(part, max(1, part * units // TASKS_WANTED))
    return Blocking(
        in_place, width, images, band, tiles, runs, run, cuts, pieces * STEPS, group, panels, part,
        split,
    )  # fmt: skip


def work(problem: ConvolutionProblem, target: Target) -> float:
    """Flops of the peak float32 rate that the kernel spends; infinite where it cannot do it."""
    if not fits(problem):
        return float("inf")
    total = 0.0
    for v in views(problem):
        outputs = v.batch * v.rows.pixels * v.columns.pixels * v.outer
        total += outputs * FINISH_FLOPS
        if v.empty:
            continue
        plan = blocking(v, target)
        depth, outer = plan.runs * plan.run, plan.panels * SIDE
        lines = 1 if plan.in_place else v.batch * -(-v.rows.pixels // plan.band)
        total += lines * plan.tiles * SIDE * outer * depth * 2.0 / MATRIX_RATE
        total += outputs * (plan.chunks - 1) * FINISH_FLOPS + depth * outer * FILTER_FLOPS
        if not plan.in_place:
            copied = lines * v.rows.reach(plan.band) * plan.width * v.inner
            total += copied * COPY_FLOPS * -(-plan.part // plan.split)
    return total


class MatrixRows(RowProduct):
    """Emits the kernel: one phase of the output's pixels after the other."""

    def phase(self, v: View, name: str) -> MatrixPhase:
        return MatrixPhase(self.k, self.problem, v, name)

    @staticmethod
    def describe(problem: ConvolutionProblem, target: Target) -> str:
        """One line for explain()."""
        found = [v for v in views(problem) if not v.empty]
        plan = blocking(found[-1], target)
        how = "reads rows in place" if plan.in_place else "copies rows"
        phases = f"{len(found)} phases, the last: " if len(found) > 1 else ""
        return (
            f"{how}; {phases}tiles of {SIDE} x {SIDE}, rows of sums along channels; {plan.chunks} "
            f"chunks of depth {plan.chunk_depth}; tasks of {plan.images} x {plan.band} "
            f"{'tiles' if plan.in_place else 'rows'} by {plan.split * SIDE} channels"
        )


class MatrixPhase:
    """Emits the pixels of one phase; `name` begins those of its functions."""

    def __init__(self, k: KernelBuilder, problem: ConvolutionProblem, v: View, name: str) -> None:
        self.k, self.problem, self.view, self.name = k, problem, v, name
        plan = self.plan = blocking(v, k.target)
        self.pixel = v.inner * ITEM
        self.pitch = plan.width * self.pixel
        self.image_bytes = v.rows.reach(plan.band) * self.pitch
        self.parts = -(-plan.panels // plan.part)
        self.part_bytes = plan.part * plan.chunks * plan.panel_bytes
        self.stays = plan.part * plan.panel_bytes <= k.target.l2_bytes * L2_SHARE

    def emit_tiles(self) -> None:
        """The functions that `emit` calls."""
        self._emit_tile()
        self._emit_finish()

    def emit(
        self, call: Any, operands: Operands, packed: Packed, first: int, part_bytes: int
    ) -> None:
        """Pack the filter, multiply; in parts where the filter is large. `first` is the number of
        this phase's first part."""
        k, plan = self.k, self.plan
        self.alpha, self.beta, self.bias = call.alpha, call.beta, operands.bias
        with k.loop(0, self.parts) as part:
            panel0, at = part * plan.part, packed.part(first + part, part_bytes)
            panels = k.min(plan.panels - panel0, plan.part)
            if packed.packs:
                with (
                    k.parallel(panels * plan.runs, call.threads) as job,
                    job.each_task() as task,
                ):
                    panel, run = task // plan.runs, task % plan.runs
                    to = at + panel * plan.panel_bytes
                    self._pack_filter(operands.filter, to, panel0 + panel, run)
            if packed.multiplies:
                out = operands.out + self.view.start
                self._multiply(call.threads, operands.image, out, at, panel0, panels)

    # Filter ------------------------------------------------------------------------------------

    def _pack_filter(self, filter_: IntLike, to: IntLike, panel: IntLike, run: IntLike) -> None:
        """A row of taps of one panel of outer channels."""
        k, v = self.k, self.view
        outer = panel * SIDE
        left = v.outer - outer
        source = filter_ + outer * v.outer_filter + self._number(list(v.rows.filters), run)
        pack = self._turned if v.inner_filter == ITEM else self._stepped
        with k.loop(0, len(v.columns.filters)) as s:
            tap = source + self._number(list(v.columns.filters), s)
            with k.loop(0, v.inner, STEPS) as c:
                pack(tap + c * v.inner_filter, left, to + self._packed(run, s * v.inner + c))

    def _turned(self, at: IntLike, left: IntLike, target: IntLike) -> None:
        """STEPS inner channels, neighbours in the filter, of a panel's outer ones."""
        k, v = self.k, self.view
        with k.loop(0, SIDE, LANES) as o:
            # Channels past the end read the last one again; nobody stores them.
            rows = [
                k.load(at + k.min(o + r, left - 1) * v.outer_filter, "int16", STEPS)
                for r in range(LANES)
            ]
            turn_to_right(k, rows, target + o * 4)

    def _stepped(self, at: IntLike, left: IntLike, target: IntLike) -> None:
        """The same, where they are no neighbours."""
        k, v = self.k, self.view
        mask = k.first_lanes(left, SIDE)
        with k.loop(0, STEPS, 2) as step:
            even, odd = (
                load_strided(
                    k, at + (step + i) * v.inner_filter, v.outer_filter, SIDE, "int16", mask
                )
                for i in range(2)
            )
            to = target + step * (PAIR_ROW // 2)
            for j, value in enumerate(paired(k, even, odd)):
                k.store(value, to, "int32", j * (PAIR_ROW // 2))

    def _packed(self, run: IntLike, number: IntLike) -> IntLike:
        """Bytes to an element of a run in a packed panel."""
        plan = self.plan
        if plan.cuts > 1:
            chunk, step = run * plan.cuts + number // plan.piece, number % plan.piece
        else:
            chunk, step = run // plan.group, run % plan.group * plan.run + number
        return chunk * (plan.part * plan.panel_bytes) + step * (SIDE * ITEM)

    def _number(self, table: list[int], number: IntLike) -> IntLike:
        """An entry of a table of constants."""
        if isinstance(number, int):
            return table[number]
        return self.k.load(self.k.table(table) + number * 8, "int64")

    # Products ----------------------------------------------------------------------------------

    def _multiply(
        self,
        threads: Int,
        image: IntLike,
        out: IntLike,
        packed: IntLike,
        panel0: IntLike,
        panels: IntLike,
    ) -> None:
        """A parallel phase: one task some images' bands against a run of filter panels."""
        k, plan, v = self.k, self.plan, self.view
        bands = -(-(plan.tiles if plan.in_place else v.rows.pixels) // plan.band)
        blocks = -(-v.batch // plan.images)
        splits = (panels + (plan.split - 1)) // plan.split
        # Tiles read past the last pixel of a copy: at most a tile's pixels.
        copied = 0 if plan.in_place else plan.images * self.image_bytes + SIDE * self.pixel
        most = plan.band if plan.in_place else plan.images * plan.tiles
        sums = SUM_BYTES * (most * plan.split if plan.chunks > 1 else 1)
        with (
            k.parallel(blocks * bands * splits, threads, copied + sums) as job,
            matrix_unit.each_task(k, job) as task,
        ):
            split, rest = task % splits, task // splits
            band, n0 = rest % bands, rest // bands * plan.images
            first, begin = band * plan.band, split * plan.split
            filters = k.min(panels - begin, plan.split)
            self.copy, self.sums = job.scratch, job.scratch + copied
            if plan.in_place:
                count = k.min(plan.tiles - first, plan.band)

                def tile_of(t: IntLike) -> tuple[IntLike, IntLike, IntLike, IntLike, IntLike]:
                    """(A, pixels before it, those of them that are done, pixels, output)."""
                    pixel = (first + t) * SIDE
                    start = k.min(pixel, v.columns.pixels - SIDE)
                    return image + start * self.pixel, start, pixel - start, v.columns.pixels, out

            else:
                images = k.min(v.batch - n0, plan.images)
                rows = k.min(v.rows.pixels - first, plan.band)
                self._copy(image + n0 * v.image[0], images, first, rows)
                line = (rows - 1) * plan.width + v.columns.pixels
                tiles = (line + (SIDE - 1)) // SIDE
                count = images * tiles

                def tile_of(t: IntLike) -> tuple[IntLike, IntLike, IntLike, IntLike, IntLike]:
                    n, pixel = t // tiles, t % tiles * SIDE
                    a = self.copy + n * self.image_bytes + pixel * self.pixel
                    return a, pixel, 0, line, out + (n0 + n) * v.out[0] + first * v.out[1]

            def multiply(chunk: IntLike, t: IntLike, f: IntLike) -> None:
                a, pixel, done, end, to = tile_of(t)
                c = self.sums
                if plan.chunks > 1:
                    c = c + (t * plan.split + f) * SUM_BYTES
                b = packed + (chunk * plan.part + begin + f) * plan.panel_bytes
                k.call(f"{self.name}product", a, b, c, chunk)
                with k.if_(True if plan.chunks == 1 else k.as_int(chunk).eq(plan.chunks - 1)):
                    outer = (panel0 + begin + f) * SIDE
                    bias = self.bias + outer * ITEM if self.problem.epilogue.bias else 0
                    k.call(
                        f"{self.name}finish", c, to + outer * ITEM, bias, pixel, done, end,
                        v.outer - outer, self.alpha, self.beta,
                    )  # fmt: skip

            with k.loop(0, plan.chunks) as chunk:
                if self.stays:
                    with k.loop(0, count) as t, k.loop(0, filters) as f:
                        multiply(chunk, t, f)
                else:
                    with k.loop(0, filters) as f, k.loop(0, count) as t:
                        multiply(chunk, t, f)

    def _copy(self, source: IntLike, images: IntLike, row0: IntLike, rows: IntLike) -> None:
        """The rows that some images' pixels need, zeros where they leave them."""
        k, plan, v = self.k, self.plan, self.view
        down, across = v.rows, v.columns
        before = max(0, -across.shifts[0])
        begin = max(0, across.shifts[0])
        width = max(0, min(across.size, across.shifts[0] + plan.width) - begin)
        after = plan.width - before - width
        reach = down.shifts[-1] - down.shifts[0]
        with k.loop(0, images) as n, k.loop(0, rows + reach) as i:
            to, h = self.copy + n * self.image_bytes + i * self.pitch, row0 + down.shifts[0] + i
            with k.if_else(k.as_int(h).below(down.size)) as (exists, none):
                with exists:
                    fill_zero(k, to, before * v.inner, "int16", STEPS)
                    at, to_row = source + n * v.image[0] + h * v.image[1], to + before * self.pixel
                    with k.loop(0, width * v.inner, STEPS) as e:
                        value = k.load(at + begin * v.image[2] + e * ITEM, "int16", STEPS)
                        k.store(value, to_row + e * ITEM, "int16")
                    rest = to_row + width * self.pixel
                    fill_zero(k, rest, after * v.inner, "int16", STEPS)
                with none:
                    fill_zero(k, to, plan.width * v.inner, "int16", STEPS)

    # The tile ----------------------------------------------------------------------------------

    def _emit_tile(self) -> None:
        """product(a, b, c, chunk): c = or += the products of a chunk for SIDE pixels from a on."""
        k, plan, v = self.k, self.plan, self.view
        starts = [(r - v.rows.shifts[0]) * self.pitch for r in v.rows.shifts]
        with k.function(f"{self.name}product", *[I64] * 4) as (a, b, c, chunk):
            if plan.chunks == 1:
                matrix_unit.clear_sums(k)
            else:
                with k.if_else(chunk.eq(0)) as (first, later):
                    with first:
                        matrix_unit.clear_sums(k)
                    with later:
                        matrix_unit.load_sums(k, c, SUM_ROW)

            def products(left: Int, right: Int, length: IntLike) -> None:
                with k.loop(0, length // STEPS) as step:
                    matrix_unit.multiply(
                        k, left + step * (STEPS * ITEM), self.pixel, ROWS * self.pixel,
                        right + step * (STEPS // 2 * PAIR_ROW), PAIR_ROW,
                    )  # fmt: skip

            if plan.cuts > 1:
                run, cut = chunk // plan.cuts, chunk % plan.cuts
                start = cut * plan.piece
                length = k.min(plan.run - start, plan.piece)
                products(a + self._number(starts, run) + start * ITEM, b, length)
            else:
                begin: IntLike = chunk * plan.group if plan.chunks > 1 else 0
                with k.loop(begin, k.min(begin + plan.group, plan.runs)) as run:
                    at = b + (run - begin) * (plan.run * SIDE * ITEM)
                    products(a + self._number(starts, run), at, plan.run)
            matrix_unit.store_sums(k, c, SUM_ROW)

    def _emit_finish(self) -> None:
        """finish(sums, out, bias, first pixel, pixels done, pixels, outer channels left, alpha,
        beta): out = act(alpha * sum + beta * out + bias) for the pixels of a tile that exist."""
        k, plan, v = self.k, self.plan, self.view
        with k.function(f"{self.name}finish", *[I64] * 7, F64, F64) as arguments:
            sums, out, bias, pixel, done, end, left, alpha, beta = arguments
            epilogue, whole = self.problem.epilogue, v.outer % SIDE == 0
            mask = None if whole else k.first_lanes(left, SIDE)
            masks = [None if whole else k.first_lanes(left - j, LANES) for j in (0, LANES)]
            added = [
                k.load(bias, "bfloat16", LANES, j * LANES * ITEM, masks[j])
                for j in range(2)
                if epilogue.bias
            ]
            scale = k.cast(alpha, k.constant(0.0, "float32", LANES))
            factor = k.cast(beta, scale)

            def rows(blend: bool) -> None:
                with k.loop(done, k.min(end - pixel, SIDE)) as m:
                    number = pixel + m
                    row, column = (0, number)
                    if not plan.in_place:
                        row, column = number // plan.width, number % plan.width
                    to = out + row * v.out[1] + column * v.out[2]
                    exists = True if plan.in_place else column < v.columns.pixels
                    with k.if_(exists):
                        values = []
                        for j in range(2):
                            value = k.load(sums + m * SUM_ROW, "float32", LANES, j * LANES * 4)
                            value = value * scale
                            if blend:
                                old = k.load(to, "bfloat16", LANES, j * LANES * ITEM, masks[j])
                                value = k.fma(old, factor, value)
                            if epilogue.bias:
                                value = value + added[j]
                            values.append(emit_epilogue(k, epilogue, value))
                        k.store(matrix_unit.rounded(k, *values), to, "int16", mask=mask)

            with k.if_else(beta.eq(0.0)) as (write, add):
                with write:
                    rows(False)
                with add:
                    rows(True)
