"""Forward and backward_data of cpu:implicit_gemm on rows of the image, where channels are
neighbours.

With channels last, all that a row of taps reads for one pixel is a single run of memory: columns
times channels. A task therefore copies the rows of the image that its pixels need once, with real
zeros around them (or reads them where they are, if nothing leaves the image), and the micro-kernel
broadcasts straight from there. A patch is never copied, however many taps overlap, and a run stays
long with one channel or three. Sums run over chunks of at most DEPTH products, then over chunks;
the last chunk goes from registers to the output.
"""

from __future__ import annotations

from typing import Any

from bedstone.backends.cpu.activation import emit_epilogue
from bedstone.backends.cpu.builder import F64, I64, Call, KernelBuilder, itemsize
from bedstone.backends.cpu.convolution.packed_filter import FilterKernel, Operands, Packed
from bedstone.backends.cpu.convolution.row_blocking import View, blocking_of, views
from bedstone.backends.cpu.microkernels import unrolled
from bedstone.backends.cpu.packing import fill_zero, load_strided
from bedstone.backends.cpu.shuffles import transposed
from bedstone.backends.cpu.target import CACHE_LINE, Target
from bedstone.backends.cpu.values import Int, IntLike, Mask
from bedstone.spec.convolution import ConvolutionProblem

UNROLL = 4
FETCH_DEPTH = 160  # of a tile that asks for the lines of its results before it multiplies
L1_SHARE = 0.5  # of the first-level cache for a chunk of the filter that stays there


class RowProduct(FilterKernel):
    """Emits the kernel: one phase of the output's pixels after the other."""

    def __init__(self, problem: ConvolutionProblem, target: Target) -> None:
        found = views(problem)
        if not found:
            raise TypeError(f"rows of {problem} do not lie as this kernel needs them")
        self.problem = problem
        self.k = KernelBuilder(target)
        self.phases = [
            self.phase(v, f"tile{number}x") for number, v in enumerate(found) if not v.empty
        ]
        self.untouched = [v for v in found if v.empty]
        self.part_bytes = max((phase.part_bytes for phase in self.phases), default=0)
        self.packed_bytes = sum(phase.parts for phase in self.phases) * self.part_bytes

    def phase(self, v: View, name: str) -> Any:
        """What emits the pixels of one phase."""
        return _Phase(self.k, self.problem, v, name)

    @staticmethod
    def describe(problem: ConvolutionProblem, target: Target) -> str:
        """One line for explain()."""
        found = [v for v in views(problem) if not v.empty]
        if not found:
            return ""
        plan = blocking_of(problem, found[-1], target)
        how = "reads rows in place" if plan.in_place else "copies rows"
        phases = f"{len(found)} phases, the last: " if len(found) > 1 else ""
        return (
            f"{how}; {phases}tile {plan.rows} x {plan.columns}, vectors along channels; "
            f"{plan.chunks} chunks of depth {plan.chunk_depth}; tasks of {plan.band} rows of "
            f"{plan.block * plan.rows} pixels"
        )

    def emit_functions(self) -> None:
        for phase in self.phases:
            phase.emit_tiles()

    def body(self, call: Call, operands: Operands, packed: Packed) -> None:
        first = 0
        for phase in self.phases:
            phase.emit(call, operands, packed, first, self.part_bytes)
            first += phase.parts
        if packed.multiplies:
            for v in self.untouched:
                self._scale(call, v, operands.out)

    def _scale(self, call: Any, v: View, out: IntLike) -> None:
        """out = beta * out for pixels that no tap reaches."""
        k, dtype = self.k, str(self.problem.x.dtype)
        sum_dtype = str(self.problem.x.dtype.accumulator)
        item, lanes = itemsize(dtype), k.target.vector_bytes // itemsize(sum_dtype)
        if 0 in (v.batch, v.rows.pixels, v.columns.pixels):
            return
        with k.parallel(v.batch * v.rows.pixels, call.threads) as job, job.each_task() as task:
            n, p = task // v.rows.pixels, task % v.rows.pixels
            row = out + v.start + n * v.out[0] + p * v.out[1]
            with k.loop(0, v.columns.pixels) as q, k.loop(0, v.outer, lanes) as c:
                mask = k.first_lanes(v.outer - c, lanes)
                at = row + q * v.out[2] + c * item
                value = k.variable(k.constant(0.0, sum_dtype, lanes))
                with k.if_(call.beta.ne(0.0)):
                    old = k.load(at, dtype, lanes, mask=mask)
                    value.set(old * k.cast(call.beta, old))
                k.store(value.value, at, dtype, mask=mask)


class _Phase:
    """Emits the pixels of one phase; `name` begins those of its functions."""

    def __init__(
        self, k: KernelBuilder, problem: ConvolutionProblem, found: View, name: str
    ) -> None:
        target = k.target
        self.k, self.problem, self.view, self.name = k, problem, found, name
        self.dtype, self.sum_dtype = str(problem.x.dtype), str(problem.x.dtype.accumulator)
        self.item = itemsize(self.dtype)
        plan = self.plan = blocking_of(problem, found, target)
        # Bytes from a pixel to the next, and from a row to the next, of what is multiplied.
        rows, columns = found.rows, found.columns
        self.pixel = found.inner * (self.item if plan.in_place else plan.item)
        copied = columns.reach(plan.block * plan.rows) * self.pixel
        self.pitch = found.image[1] if plan.in_place else copied
        corner = (0, 0) if plan.in_place else (rows.shifts[0], columns.shifts[0])
        dense = plan.runs == len(rows.shifts)
        self.run_table = [
            (r - corner[0]) * self.pitch + (s - corner[1]) * self.pixel
            for r in rows.shifts
            for s in (columns.shifts[:1] if dense else columns.shifts)
        ]
        self.filter_table = [r + s for r in rows.filters for s in columns.filters]
        stays = plan.panel_bytes * plan.split <= target.l1_bytes * L1_SHARE
        self.filters_inside = stays
        self.parts = -(-plan.panels // plan.part)
        self.part_bytes = plan.part * plan.chunks * plan.panel_bytes

    def emit_tiles(self) -> None:
        """The functions that `emit` calls."""
        for rows in self._sizes():
            self._emit_tile(rows)

    def emit(
        self, call: Call, operands: Operands, packed: Packed, first: int, part_bytes: int
    ) -> None:
        """Pack the filter, multiply; in parts where the filter is large. `first` is the number of
        this phase's first part."""
        k, plan = self.k, self.plan
        self.alpha, self.beta, self.bias = call.alpha, call.beta, operands.bias
        with k.loop(0, self.parts) as part:
            panel0, at = part * plan.part, packed.part(first + part, part_bytes)
            panels = k.min(plan.panels - panel0, plan.part)
            if packed.packs:
                with k.parallel(panels, call.threads) as job, job.each_task() as panel:
                    to = at + panel * plan.panel_bytes
                    self._pack_filter(operands.filter, to, panel0 + panel)
            if packed.multiplies:
                out = operands.out + self.view.start
                self._multiply(call.threads, operands.image, out, at, panel0, panels)

    def _sizes(self) -> list[int]:
        plan = self.plan
        return [plan.rows] + ([plan.rows - 1] if plan.long_tiles < plan.tiles else [])

    # Filter ------------------------------------------------------------------------------------

    def _pack_filter(self, filter_: IntLike, to: IntLike, panel: IntLike) -> None:
        """One panel of outer channels, chunk by chunk (`part` panels apart), step by step."""
        k, plan, v = self.k, self.plan, self.view
        taps = plan.run // v.inner
        # Vectors along inner channels, turned in registers, where those are the neighbours.
        turn = v.inner_filter == self.item != v.outer_filter and v.inner >= plan.lanes
        for j in range(plan.vectors):
            outer = panel * plan.columns + j * plan.lanes
            left = v.outer - outer
            source = filter_ + outer * v.outer_filter
            column = to + j * (plan.lanes * plan.item)
            with k.loop(0, plan.runs * taps) as t:
                tap = source + self._number(self.filter_table, t)
                run, first = t // taps, t % taps * v.inner
                if turn:
                    self._turn(tap, left, column, run, first)
                    continue
                mask = k.first_lanes(left, plan.lanes)
                with k.loop(0, v.inner) as c:
                    value = load_strided(
                        k, tap + c * v.inner_filter, v.outer_filter, plan.lanes, self.dtype, mask
                    )
                    k.store(value, column + self._packed(run, first + c), self.sum_dtype)

    def _turn(
        self, tap: IntLike, left: IntLike, column: IntLike, run: IntLike, first: IntLike
    ) -> None:
        """The inner channels of a tap for one vector of outer ones. In place of one past the
        last, the last is read (`left` may be negative): nobody stores what comes of it."""
        k, plan, v = self.k, self.plan, self.view
        with k.loop(0, v.inner, plan.lanes) as c:
            mask = k.first_lanes(v.inner - c, plan.lanes)
            loaded = []
            for r in range(plan.lanes):
                at = tap + k.min(r, left - 1) * v.outer_filter + c * self.item
                loaded.append(k.load(at, self.dtype, plan.lanes, mask=mask))
            for r, value in enumerate(transposed(k, loaded)):
                with k.if_(k.as_int(c) + r < v.inner):
                    k.store(value, column + self._packed(run, first + c + r), self.sum_dtype)

    def _packed(self, run: IntLike, number: IntLike) -> IntLike:
        """Bytes to an element of a run in a packed panel."""
        plan = self.plan
        if plan.cuts > 1:
            chunk, step = run * plan.cuts + number // plan.piece, number % plan.piece
        else:
            chunk, step = run // plan.group, run % plan.group * plan.run + number
        return chunk * (plan.part * plan.panel_bytes) + step * plan.step_bytes

    def _number(self, table: list[int], number: IntLike) -> IntLike:
        """An entry of a table of constants."""
        if isinstance(number, int):
            return table[number]
        steps = {b - a for a, b in zip(table, table[1:])}
        if len(steps) == 1:
            return number * steps.pop() + table[0]
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
        """A parallel phase: one task a block of pixels against a run of filter panels."""
        k, plan, v = self.k, self.plan, self.view
        blocks, bands = -(-plan.tiles // plan.block), -(-v.rows.pixels // plan.band)
        splits = (panels + (plan.split - 1)) // plan.split
        copied = 0 if plan.in_place else v.rows.reach(plan.band) * self.pitch
        copied = -(-copied // CACHE_LINE) * CACHE_LINE
        sums = plan.band * plan.block * plan.split * plan.tile_bytes if plan.chunks > 1 else 0
        with (
            k.parallel(v.batch * bands * blocks * splits, threads, copied + sums) as job,
            job.each_task() as task,
        ):
            split, rest = task % splits, task // splits
            block, rest = rest % blocks, rest // blocks
            band, n = rest % bands, rest // bands
            row0, tile0 = band * plan.band, block * plan.block
            rows = k.min(v.rows.pixels - row0, plan.band)
            tiles = k.min(plan.tiles - tile0, plan.block)
            begin = split * plan.split
            source, result = image + n * v.image[0], out + n * v.out[0]
            if plan.in_place:
                corner = source + row0 * (v.rows.step * v.image[1])
                corner = corner + self._pixel_of(tile0) * (v.columns.step * self.pixel)
            else:
                corner = job.scratch
                self._copy(source, row0, rows, tile0, tiles, corner)

            def multiply(chunk: IntLike, p: IntLike, t: IntLike, f: IntLike) -> None:
                pixel = self._pixel_of(tile0 + t)
                a = corner + p * (v.rows.step * self.pitch)
                a = a + (pixel - self._pixel_of(tile0)) * (v.columns.step * self.pixel)
                c = job.scratch + copied
                c = c + ((p * plan.block + t) * plan.split + f) * plan.tile_bytes
                b = packed + (chunk * plan.part + begin + f) * plan.panel_bytes
                outer = (panel0 + begin + f) * plan.columns
                to = result + (row0 + p) * v.out[1] + pixel * v.out[2] + outer * self.item
                bias = self.bias + outer * self.item if self.problem.epilogue.bias else 0
                rest = (a, b, c, chunk, to, bias, v.outer - outer, self.alpha, self.beta)
                sizes = self._sizes()
                if len(sizes) == 1:
                    k.call(f"{self.name}{sizes[0]}", *rest)
                    return
                with k.if_else(k.as_int(tile0 + t) < plan.long_tiles) as (long, short):
                    with long:
                        k.call(f"{self.name}{sizes[0]}", *rest)
                    with short:
                        k.call(f"{self.name}{sizes[1]}", *rest)

            filters = k.min(panels - begin, plan.split)
            with k.loop(0, plan.chunks) as chunk:
                if self.filters_inside:
                    with k.loop(0, rows) as p, k.loop(0, tiles) as t, k.loop(0, filters) as f:
                        multiply(chunk, p, t, f)
                else:
                    with k.loop(0, filters) as f, k.loop(0, rows) as p, k.loop(0, tiles) as t:
                        multiply(chunk, p, t, f)

    def _pixel_of(self, tile: IntLike) -> IntLike:
        """The first pixel of a tile of a line."""
        plan = self.plan
        pixel = tile * plan.rows
        if plan.long_tiles == plan.tiles:
            return pixel
        return pixel - self.k.max(tile - plan.long_tiles, 0)

    def _copy(
        self, source: IntLike, row0: IntLike, rows: IntLike, tile0: IntLike, tiles: IntLike, to: Int
    ) -> None:
        """The rows of the image that a block of pixels needs, zeros where they leave it."""
        k, plan, v = self.k, self.plan, self.view
        down, across = v.rows, v.columns
        first = self._pixel_of(tile0) * across.step + across.shifts[0]
        last = (self._pixel_of(tile0 + tiles) - 1) * across.step + across.shifts[-1] + 1
        left = k.min(k.max(first, 0), last)
        right = k.max(k.min(last, across.size), left)
        lanes, width = plan.lanes, (right - left) * v.inner
        before, after = (left - first) * v.inner, (last - right) * v.inner
        whole = width - width % lanes
        row = row0 * down.step + down.shifts[0]
        reach = down.shifts[-1] - down.shifts[0] + 1
        with k.loop(0, (rows - 1) * down.step + reach) as i:
            target, h = to + i * self.pitch, row + i
            with k.if_else(k.as_int(h).below(down.size)) as (exists, none):
                with exists:
                    at = source + h * v.image[1] + left * v.image[2]
                    fill_zero(k, target, before, self.sum_dtype, lanes)
                    middle = target + before * plan.item
                    with k.loop(0, whole, lanes) as e:
                        value = k.load(at + e * self.item, self.dtype, lanes)
                        k.store(value, middle + e * plan.item, self.sum_dtype)
                    mask = k.first_lanes(width - whole, lanes)
                    value = k.load(at + whole * self.item, self.dtype, lanes, mask=mask)
                    k.store(value, middle + whole * plan.item, self.sum_dtype, mask=mask)
                    fill_zero(k, middle + width * plan.item, after, self.sum_dtype, lanes)
                with none:
                    fill_zero(k, target, (last - first) * v.inner, self.sum_dtype, lanes)

    # The tile ----------------------------------------------------------------------------------

    def _emit_tile(self, rows: int) -> None:
        """tileN(a, b, c, chunk, out, bias, outer channels left, alpha, beta): the products of a
        chunk for N pixels; after the last chunk, out = act(alpha * sum + beta * out + bias)."""
        k, plan, v = self.k, self.plan, self.view
        with k.function(f"{self.name}{rows}", *[I64] * 7, F64, F64) as arguments:
            a, b, c, chunk, out, bias, left, alpha, beta = arguments
            zero = k.constant(0.0, self.sum_dtype, plan.lanes)
            self.sums = [[k.variable(zero) for _ in range(plan.vectors)] for _ in range(rows)]
            if plan.chunks == 1 and plan.run * plan.runs <= FETCH_DEPTH:
                for i in range(rows):
                    for line in range(0, plan.columns * self.item, CACHE_LINE):
                        k.prefetch(out, i * v.out[2] + line)
            self._products(a, b, chunk)
            places = [
                (total, i, j) for i, row in enumerate(self.sums) for j, total in enumerate(row)
            ]
            vector = plan.lanes * plan.item

            def finish() -> None:
                self._finish(places, out, bias, left, alpha, beta)

            if plan.chunks == 1:
                finish()
                return
            with k.if_(chunk.ne(0)):
                for total, i, j in places:
                    old = k.load(c, self.sum_dtype, plan.lanes, i * plan.step_bytes + j * vector)
                    total.set(total.value + old)
            with k.if_else(chunk.eq(plan.chunks - 1)) as (last, more):
                with last:
                    finish()
                with more:
                    for total, i, j in places:
                        at = i * plan.step_bytes + j * vector
                        k.store(total.value, c, self.sum_dtype, at)

    def _products(self, a: Int, b: Int, chunk: Int) -> None:
        """Add up a chunk: several whole runs, or a piece of one."""
        k, plan = self.k, self.plan
        if plan.cuts > 1:
            run, cut = chunk // plan.cuts, chunk % plan.cuts
            start = cut * plan.piece
            length = k.min(plan.run - start, plan.piece)
            self._run(a + self._number(self.run_table, run) + start * plan.item, b, length)
            return
        first: IntLike = chunk * plan.group if plan.chunks > 1 else 0
        with k.loop(first, k.min(first + plan.group, plan.runs)) as run:
            at = b + (run - first) * (plan.run * plan.step_bytes)
            self._run(a + self._number(self.run_table, run), at, plan.run)

    def _run(self, a: Int, b: Int, length: IntLike) -> None:
        k, plan, v = self.k, self.plan, self.view
        step = v.columns.step * self.pixel
        vector = plan.lanes * plan.item

        def products(at: IntLike, unroll: int) -> None:
            left, right = a + at * plan.item, b + at * plan.step_bytes
            for u in range(unroll):
                wide = [
                    k.load(right, self.sum_dtype, plan.lanes, u * plan.step_bytes + j * vector)
                    for j in range(plan.vectors)
                ]
                for i, row in enumerate(self.sums):
                    x = k.load(left, self.sum_dtype, None, i * step + u * plan.item)
                    x = k.splat(x, plan.lanes)
                    for total, one in zip(row, wide):
                        total.set(k.fma(x, one, total.value))

        # Where pixels overlap within the unrolled steps, each element would be loaded once and kept
        # for the next pixel: more than the registers hold.
        unrolled(k, length, min(UNROLL, step // plan.item), products)

    def _finish(
        self, places: list[Any], out: Int, bias: Int, left: Int, alpha: Any, beta: Any
    ) -> None:
        """From registers to the output."""
        k, plan, v = self.k, self.plan, self.view
        masks: list[Mask | None] = [
            k.first_lanes(left - j * plan.lanes, plan.lanes) for j in range(plan.vectors)
        ]
        whole = v.outer % plan.columns == 0

        def at(i: int, j: int) -> int:
            return i * v.out[2] + j * (plan.lanes * self.item)

        for total, _, _ in places:
            total.set(total.value * k.cast(alpha, total.value))
        with k.if_(beta.ne(0.0)):
            for total, i, j in places:
                mask = None if whole else masks[j]
                old = k.load(out, self.dtype, plan.lanes, at(i, j), mask)
                total.set(k.fma(old, k.cast(beta, old), total.value))
        if self.problem.epilogue.bias:
            for column in range(plan.vectors):
                mask = None if whole else masks[column]
                offset = column * plan.lanes * self.item
                added = k.load(bias, self.dtype, plan.lanes, offset, mask)
                for total, _, j in places:
                    if j == column:
                        total.set(total.value + added)
        for total, _, _ in places:
            total.set(emit_epilogue(k, self.problem.epilogue, total.value))

        def store(ragged: bool) -> None:
            for total, i, j in places:
                mask = masks[j] if ragged else None
                k.store(total.value, out, self.dtype, at(i, j), mask)

        if whole:
            store(False)
            return
        with k.if_else(left >= plan.columns) as (full, part):
            with full:
                store(False)
            with part:
                store(True)
