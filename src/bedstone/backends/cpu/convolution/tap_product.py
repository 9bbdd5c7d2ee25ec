"""Backward_data of cpu:implicit_gemm for images of few channels, channels last: a stem's.

    taps[q, (r, s, c)] = sum_k dy[q, k] * w[k, c, r, s]
    dx[q * stride + (r, s) - padding, c] += taps[q, (r, s, c)]

Three channels fill no vector. So taps and channels together are the columns of the product, dy is
read where it lies, and each product is computed once. A task owns a band of rows of dx in its
scratch; for each row of dy that reaches it, the products of the row are laid into a buffer from
where every pixel of dx collects those of its taps, a pixel's channels being one short vector. The
order of the sums never changes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from bedstone.backends.cpu.builder import Call, KernelBuilder, itemsize
from bedstone.backends.cpu.convolution.geometry import axis_line
from bedstone.backends.cpu.convolution.image_product import DEPTH, TASKS_WANTED, even_pieces
from bedstone.backends.cpu.convolution.packed_filter import FilterKernel, Operands, Packed
from bedstone.backends.cpu.convolution.row_blocking import line_cycles
from bedstone.backends.cpu.microkernels import Tile, emit_tile
from bedstone.backends.cpu.packing import fill_zero
from bedstone.backends.cpu.target import MIB, Target
from bedstone.backends.cpu.values import Float, Int, IntLike, Mask
from bedstone.spec.convolution import ConvolutionProblem

PIXEL = 4  # elements of a pixel of dx in scratch: more channels go elsewhere
MOST_TAPS = 128  # each is written out in the kernel
BAND_SHARE = 0.4  # of the second-level cache for a task's rows of dx
SCRATCH_BYTES_MAX = 1 * MIB
BAND_REACH = 4  # a band is so many windows high at least: its edges are computed twice


@dataclass(frozen=True)
class Line:
    """One spatial axis: `size` of dx, `pixels` of dy, `stride`; tap t of dy's pixel q falls on
    q * stride + places[t]. A pixel of dx is m * stride + residue; residues[residue] holds its
    (tap, shift): the tap's dy is at m + shift."""

    size: int
    pixels: int
    stride: int
    places: tuple[int, ...]
    residues: tuple[tuple[tuple[int, int], ...], ...]

    def count(self, residue: int) -> int:
        """Pixels of dx of a residue."""
        return -(-(self.size - residue) // self.stride)

    @property
    def before(self) -> int:
        """Pixels in front of dy's first that some tap asks for."""
        return max(0, -min((shift for taps in self.residues for _, shift in taps), default=0))

    @property
    def after(self) -> int:
        """Pixels behind dy's last."""
        last = [self.count(r) - 1 + s for r, taps in enumerate(self.residues) for _, s in taps]
        return max(0, max(last, default=0) - (self.pixels - 1))


NOTHING = Line(1, 1, 1, (0,), (((0, 0),),))


@dataclass(frozen=True)
class Pixels(Tile):
    """A tile whose rows are pixels of dy where they lie, `pitch` bytes apart."""

    pitch: int = 0

    @property
    def row_bytes(self) -> int:
        return self.pitch


@dataclass(frozen=True)
class Blocking:
    """How a problem is cut.

    rows, vectors, lanes  of a tile: pixels of dy by vectors of (tap, channel)
    tiles, long_tiles     of a row of dy; the first `long_tiles` have `rows` pixels, others one less
    taps, panels          of a panel of columns; panels
    chunk, chunks         of the depth
    band, bands           rows of dx of a task; tasks of an image
    row_cycles            spent on the products of a row of dy
    """

    rows: int
    vectors: int
    lanes: int
    tiles: int
    long_tiles: int
    taps: int
    panels: int
    chunk: int
    chunks: int
    band: int
    bands: int
    row_cycles: float
    panel_pixels: int
    item: int

    @property
    def step_bytes(self) -> int:
        """From one pixel to the next in a panel of products."""
        return self.vectors * self.lanes * self.item

    @property
    def panel_bytes(self) -> int:
        return self.panel_pixels * self.step_bytes


def lines(problem: ConvolutionProblem) -> tuple[Line, Line]:
    """Rows and columns."""
    conv, item = problem.conv, problem.x.dtype.itemsize
    x, w, y = ([s * item for s in desc.strides] for desc in (problem.x, problem.w, problem.y))
    found = []
    for a in range(conv.axes):
        size, window, pixels = (desc.dims[2 + a] for desc in (problem.x, problem.w, problem.y))
        order = range(window) if conv.mode == "cross_correlation" else range(window - 1, -1, -1)
        places = tuple(t * conv.dilation[a] - conv.padding[a][0] for t in order)
        residues = axis_line(problem, a, x, w, y, True).residues
        found.append(
            Line(size, pixels, conv.stride[a], places, tuple(taps for _, taps in residues))
        )
    return (NOTHING, found[0]) if len(found) == 1 else (found[0], found[1])


@functools.lru_cache(maxsize=256)
def blocking(problem: ConvolutionProblem, target: Target) -> Blocking:
    """Cut the problem for the target's registers and caches."""
    down, across = lines(problem)
    item = problem.x.dtype.itemsize
    lanes = target.vector_bytes // item
    channels, depth = problem.w.dims[1], problem.w.dims[0]
    chunk, chunks = even_pieces(depth, DEPTH)
    taps = len(down.places) * len(across.places)
    best: Any = None
    for vectors in range(1, 5):
        most = vectors * lanes // channels
        if not most:
            continue
        panels = -(-taps // most)
        for rows in range(1, (target.vector_registers - vectors - 1) // vectors + 1):
            outer = panels * vectors * lanes
            found = line_cycles(across.pixels, outer, chunk, rows, vectors, lanes)
            if best is None or found[0] < best[0][0]:
                best = found, vectors, most, panels
    (cycles, tiles, long_tiles), vectors, most, panels = best
    pitch = across.size * PIXEL * item
    reach = max(down.places) - min(down.places) + 1
    band = max(problem.x.dims[0] * down.size // TASKS_WANTED, BAND_REACH * reach)
    band = max(1, min(band, int(target.l2_bytes * BAND_SHARE) // pitch))
    band, bands = even_pieces(down.size, band)
    # A tap at the end of a panel is read as a whole PIXEL.
    pixels = across.before + across.pixels + across.after + 1
    return Blocking(
        -(-across.pixels // tiles), vectors, lanes, tiles, long_tiles, most, panels, chunk, chunks,
        band, bands, cycles * chunks, pixels, item,
    )  # fmt: skip


def scratch_bytes(problem: ConvolutionProblem, target: Target) -> int:
    """A task's rows of dx, and the products of a row of dy."""
    plan, across = blocking(problem, target), lines(problem)[1]
    return plan.band * across.size * PIXEL * plan.item + plan.panels * plan.panel_bytes


def fits(problem: ConvolutionProblem, target: Target) -> bool:
    """Whether the problem is one for this kernel."""
    x, w, y, conv = problem.x, problem.w, problem.y, problem.conv
    if problem.direction != "backward_data" or problem.flops == 0 or x.dtype != x.dtype.accumulator:
        return False
    if (
        conv.axes > 2
        or conv.groups > 1
        or w.dims[1] > PIXEL
        or w.size // w.dims[0] > PIXEL * MOST_TAPS
    ):
        return False
    taps = w.size // (w.dims[0] * w.dims[1])
    adjacent = y.strides[1] == 1 and (x.strides[1] == 1 or x.dims[1] == 1)
    return adjacent and taps <= MOST_TAPS and scratch_bytes(problem, target) <= SCRATCH_BYTES_MAX


def work(problem: ConvolutionProblem, target: Target) -> float:
    """Flops of the peak rate that the kernel spends."""
    plan = blocking(problem, target)
    down, across = lines(problem)
    reach = max(down.places) - min(down.places)
    rows = min(plan.bands * (plan.band + reach) / down.stride, plan.bands * down.pixels)
    window = len(across.places) / across.stride
    # Two loads a cycle: the taps' and the sum's; then dx is written.
    collect = len(down.places) * across.size * (window + 2) / 2
    cycles = rows * (plan.row_cycles + collect) + down.size * across.size * 6
    return problem.x.dims[0] * cycles * 4 * plan.lanes  # two multiply-adds a cycle


class TapProduct(FilterKernel):
    """Emits the kernel."""

    def __init__(self, problem: ConvolutionProblem, target: Target) -> None:
        self.problem, self.k = problem, KernelBuilder(target)
        self.dtype, self.item = str(problem.x.dtype), itemsize(str(problem.x.dtype))
        self.plan = blocking(problem, target)
        self.down, self.across = lines(problem)
        x, w, y = (
            [s * self.item for s in desc.strides] for desc in (problem.x, problem.w, problem.y)
        )
        if problem.conv.axes == 1:
            x, w, y = ([*s[:2], 0, s[2]] for s in (x, w, y))
        self.x, self.w, self.y = x, w, y
        self.channels, self.depth = problem.w.dims[1], problem.w.dims[0]
        self.width = len(self.across.places)
        self.taps = [
            r * w[2] + s * w[3] for r in range(len(self.down.places)) for s in range(self.width)
        ]
        self.pitch = self.across.size * PIXEL * self.item  # of a row of dx in scratch
        self.part_bytes = self.packed_bytes = self.plan.panels * self.depth * self.plan.step_bytes

    @staticmethod
    def describe(problem: ConvolutionProblem, target: Target) -> str:
        """One line for explain()."""
        plan = blocking(problem, target)
        return (
            f"collects products by pixel; tile {plan.rows} x {plan.vectors * plan.lanes}, vectors "
            f"along taps and channels; tasks of {plan.band} rows"
        )

    def emit_functions(self) -> None:
        plan = self.plan
        for rows in self._sizes():
            tile = Pixels(rows, plan.vectors, plan.lanes, plan.chunk, self.dtype, pitch=self.y[3])
            emit_tile(self.k, tile, f"tile{rows}")

    def body(self, call: Call, operands: Operands, packed: Packed) -> None:
        k, plan, batch = self.k, self.plan, self.problem.x.dims[0]
        self.alpha, self.beta = call.alpha, call.beta
        panel_bytes, panels = self.depth * plan.step_bytes, packed.address
        if packed.packs:
            with k.parallel(plan.panels, call.threads) as job, job.each_task() as panel:
                self._pack(operands.filter, panel, panels + panel * panel_bytes)
        if packed.multiplies:
            size = plan.band * self.pitch + plan.panels * plan.panel_bytes
            with (
                k.parallel(batch * plan.bands, call.threads, size) as job,
                job.each_task() as task,
            ):
                n, first = task // plan.bands, task % plan.bands * plan.band
                dy, dx = operands.image + n * self.y[0], operands.out + n * self.x[0]
                self._band(panels, dy, dx, first, job.scratch)

    def _sizes(self) -> list[int]:
        plan = self.plan
        return [plan.rows] + ([plan.rows - 1] if plan.long_tiles < plan.tiles else [])

    def _pack(self, w: IntLike, panel: IntLike, to: IntLike) -> None:
        """The columns of one panel, zeros behind its last."""
        k, plan = self.k, self.plan
        first = panel * plan.taps
        count = k.min(len(self.taps) - first, plan.taps)
        with k.loop(0, self.depth) as i:
            row, source = to + i * plan.step_bytes, w + i * self.w[0]
            fill_zero(k, row, plan.vectors * plan.lanes, self.dtype, plan.lanes)
            with k.loop(0, count) as t:
                at = source + k.load(k.table(self.taps) + (first + t) * 8, "int64")
                for c in range(self.channels):
                    value = k.load(at + c * self.w[1], self.dtype)
                    k.store(value, row + t * (self.channels * self.item), self.dtype, c * self.item)

    def _band(self, packed: IntLike, dy: Int, dx: Int, first: IntLike, scratch: Int) -> None:
        """The rows of dx from `first` on that a task owns."""
        k, plan, down = self.k, self.plan, self.down
        rows = k.min(down.size - first, plan.band)
        sums, products = scratch, scratch + plan.band * self.pitch
        fill_zero(k, sums, rows * (self.across.size * PIXEL), self.dtype, plan.lanes)
        self._clear_borders(products)
        # Integers are divided as non-negative ones.
        begin = k.max(first - max(down.places) + (down.stride - 1), 0) // down.stride
        end = k.max(first + rows - 1 - min(down.places) + down.stride, 0) // down.stride
        end = k.min(end, down.pixels)
        with k.loop(begin, end) as p:
            self._multiply(packed, dy + p * self.y[2], products)
            for r, place in enumerate(down.places):
                h = p * down.stride + place - first
                with k.if_(k.as_int(h).below(rows)):
                    self._collect(r, products, sums + h * self.pitch)
        with k.loop(0, rows) as i:
            self._write(sums + i * self.pitch, dx + (first + i) * self.x[2])

    def _clear_borders(self, products: Int) -> None:
        """Zeros for the pixels in front of dy and behind."""
        k, plan, across = self.k, self.plan, self.across
        behind = (across.before + across.pixels) * plan.step_bytes
        columns = plan.vectors * plan.lanes
        with k.loop(0, plan.panels) as panel:
            at = products + panel * plan.panel_bytes
            fill_zero(k, at, across.before * columns, self.dtype, plan.lanes)
            fill_zero(k, at + behind, (across.after + 1) * columns, self.dtype, plan.lanes)

    def _multiply(self, packed: IntLike, row: IntLike, products: Int) -> None:
        """All products of a row of dy."""
        k, plan, sizes = self.k, self.plan, self._sizes()
        start = products + self.across.before * plan.step_bytes
        with k.loop(0, plan.tiles) as t:
            pixel = t * plan.rows
            if len(sizes) > 1:
                pixel = pixel - k.max(t - plan.long_tiles, 0)
            source, to = row + pixel * self.y[3], start + pixel * plan.step_bytes
            with k.loop(0, plan.panels) as panel, k.loop(0, plan.chunks) as chunk:
                i = chunk * plan.chunk
                a, c = source + i * self.item, to + panel * plan.panel_bytes
                b = packed + (panel * self.depth + i) * plan.step_bytes
                rest = (a, b, c, k.min(self.depth - i, plan.chunk), chunk)
                long_tile = True if len(sizes) == 1 else k.as_int(t) < plan.long_tiles
                with k.if_else(long_tile) as (long, short):
                    with long:
                        k.call(f"tile{sizes[0]}", *rest)
                    with short:
                        k.call(f"tile{sizes[-1]}", *rest)

    def _collect(self, r: int, products: Int, sums: IntLike) -> None:
        """Add the products of a row of taps to a row of dx."""
        k, plan, across = self.k, self.plan, self.across
        for residue, taps in enumerate(across.residues):
            if not taps:
                continue
            places = []
            for s, shift in taps:
                panel, number = divmod(r * self.width + s, plan.taps)
                at = panel * plan.panel_bytes + (across.before + shift) * plan.step_bytes
                places.append(at + number * self.channels * self.item)
            with k.loop(0, across.count(residue)) as m:
                to = sums + (m * across.stride + residue) * (PIXEL * self.item)
                source = products + m * plan.step_bytes
                total = k.load(to, self.dtype, PIXEL)
                for place in places:
                    total = total + k.load(source, self.dtype, PIXEL, place)
                k.store(total, to, self.dtype)

    def _write(self, sums: IntLike, row: IntLike) -> None:
        """dx = alpha * sum + beta * dx for a row."""
        k, size, step = self.k, self.across.size, self.x[3]
        mask = k.first_lanes(self.channels, PIXEL)

        def pixel(j: IntLike, mask: Mask | None, add: bool) -> None:
            value = k.load(sums + j * (PIXEL * self.item), self.dtype, PIXEL)
            value = value * k.cast(self.alpha, value)
            at = row + j * step
            if add:
                old: Float = k.load(at, self.dtype, PIXEL, mask=mask)
                value = k.fma(old, k.cast(self.beta, old), value)
            k.store(value, at, self.dtype, mask=mask)

        # A whole vector reaches into the next pixels of the row, which are written later.
        whole = max(0, size - -(-PIXEL // self.channels) + 1)
        if step != self.channels * self.item:
            whole = 0
        with k.if_else(self.beta.eq(0.0)) as (write, add):
            with write:
                with k.loop(0, whole) as j:
                    pixel(j, None, False)
                with k.loop(whole, size) as j:
                    pixel(j, mask, False)
            with add, k.loop(0, size) as j:
                pixel(j, mask, True)
