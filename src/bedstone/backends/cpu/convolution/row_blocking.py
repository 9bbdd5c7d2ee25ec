"""How row_product.py sees a problem and cuts it: lines of pixels, runs of the depth, tasks.

Backward_data with a stride falls into phases: the pixels of dx of one residue are a convolution of
stride 1 with those taps that meet dy. A row of taps reads one run of memory for a pixel. The tile
of the micro-kernel is the one that takes the fewest cycles for a line of pixels: a line is cut
into tiles that differ by one pixel at most, so that none is half empty.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bedstone.backends.cpu.convolution.geometry import Axis, axis_line
from bedstone.backends.cpu.convolution.image_product import (
    DEPTH,
    FILTER_BYTES_MAX,
    L2_SHARE,
    TASK_BYTES_MAX,
    TASKS_WANTED,
    even_pieces,
)
from bedstone.backends.cpu.irtypes import itemsize
from bedstone.backends.cpu.target import KIB, Target
from bedstone.spec.convolution import ConvolutionProblem

SCRATCH_BYTES_MAX = 1536 * KIB
MOST_VECTORS = 6  # of a tile; more rows share a load better
FMA_LATENCY = 4  # cycles, about
TILE_CYCLES = 30.0  # around the products of a tile: call, zeros, results
COPY_FLOPS, PACK_FLOPS = 6.0, 150.0  # of the peak rate, per element of the image, of the filter


@dataclass(frozen=True)
class Line:
    """One spatial axis: `pixels` outputs, `step` coordinates of the image (of `size`) apart; taps
    reach the coordinates `shifts` (ascending) and lie `filters` bytes from the filter's origin."""

    size: int
    pixels: int
    step: int
    shifts: tuple[int, ...]
    filters: tuple[int, ...]

    @property
    def inside(self) -> bool:
        """Whether no tap leaves the image."""
        last = (self.pixels - 1) * self.step + self.shifts[-1]
        return self.shifts[0] >= 0 and last < self.size

    def reach(self, pixels: int) -> int:
        """Coordinates of the image that so many pixels need."""
        return (pixels - 1) * self.step + self.shifts[-1] - self.shifts[0] + 1


@dataclass(frozen=True)
class View:
    """A phase as the kernel sees it: `image` and `out` are strides in bytes of (batch, row,
    column); inner channels are summed over, outer ones are the output's; both next to each other
    in their tensors. `inner_filter`, `outer_filter`: their strides in the filter. `start`: bytes
    from the output's origin to the phase's first pixel."""

    batch: int
    rows: Line
    columns: Line
    image: tuple[int, int, int]
    out: tuple[int, int, int]
    inner: int
    outer: int
    inner_filter: int
    outer_filter: int
    start: int = 0

    @property
    def empty(self) -> bool:
        """Whether no tap reaches these pixels."""
        return not (self.rows.shifts and self.columns.shifts)


NOTHING = Line(1, 1, 1, (0,), (0,))


@functools.lru_cache(maxsize=256)
def views(problem: ConvolutionProblem) -> tuple[View, ...]:
    """The problem's phases, one where nothing is strided backwards; none where rows do not lie as
    this kernel needs them."""
    backward = problem.direction == "backward_data"
    conv, item = problem.conv, problem.x.dtype.itemsize
    if conv.axes > 2 or conv.groups > 1:
        return ()
    x, w, y = ([s * item for s in desc.strides] for desc in (problem.x, problem.w, problem.y))
    image, out, image_dims = (y, x, problem.y.dims) if backward else (x, y, problem.x.dims)
    inner, outer = (image_dims[1], problem.w.dims[1] if backward else problem.w.dims[0])
    if not (inner == 1 or image[1] == item) or image[-1] != inner * item or out[1] != item:
        return ()
    axes = []
    for a in range(conv.axes):
        found = axis_line(problem, a, x, w, y, backward)
        steps = len(found.residues)
        size = problem.x.dims[2 + a] if backward else found.axis.size
        # (bytes to the first pixel, line) of each residue.
        axes.append([
            (r * out[2 + a], _line(found.axis, -(-(size - r) // steps), taps, w[2 + a]))
            for r, taps in found.residues
        ])  # fmt: skip
        out[2 + a] = found.axis.out
    if conv.axes == 1:
        axes.insert(0, [(0, NOTHING)])
        image, out = [*image[:2], 0, image[2]], [*out[:2], 0, out[2]]
    channels = (w[0], w[1]) if backward else (w[1], w[0])
    sides = [(s[0], s[2], s[3]) for s in (image, out)]
    return tuple(
        _merged(View(image_dims[0], down, across, *sides, inner, outer, *channels, i + j))
        for i, down in axes[0]
        for j, across in axes[1]
    )


def _line(axis: Axis, pixels: int, taps: Sequence[tuple[int, int]], stride: int) -> Line:
    """A line from its (number, shift) of taps and the filter's stride."""
    pairs = sorted((shift, t * stride) for t, shift in taps)
    shifts, filters = zip(*pairs) if pairs else ((), ())
    return Line(axis.limit, pixels, axis.step, shifts, filters)


def _merged(v: View) -> View:
    """One long row, where one tap meets every pixel and rows follow one another."""
    lines = (v.rows, v.columns)
    if any(ln.shifts != (0,) or ln.step != 1 or ln.size != ln.pixels for ln in lines):
        return v
    size = v.columns.size
    for _, row, column in (v.image, v.out):
        if v.rows.size > 1 and row != size * column:
            return v
    size *= v.rows.size
    for batch, _, column in (v.image, v.out):
        if v.batch > 1 and batch != size * column:
            return v
    size *= v.batch
    filters = (v.rows.filters[0] + v.columns.filters[0],)
    return View(
        1, NOTHING, Line(size, size, 1, (0,), filters), (0, 0, v.image[2]), (0, 0, v.out[2]),
        v.inner, v.outer, v.inner_filter, v.outer_filter, v.start,
    )  # fmt: skip


@dataclass(frozen=True)
class Blocking:
    """How a problem is cut.

    rows, vectors, lanes   of a tile: pixels by vectors of outer channels
    tiles, long_tiles      of a line of pixels; the first `long_tiles` have `rows` pixels, the rest
                           one less
    in_place               the image is read where it is
    runs, run              of the depth: row-of-taps by elements
    cuts, piece            pieces of a run, and their length, where it is longer than DEPTH
    group                  runs of a chunk, where it is not
    panels, part, split    of outer channels: of the problem, packed at a time, of a task
    band, block            lines, and tiles along them, of a task
    """

    rows: int
    vectors: int
    lanes: int
    item: int
    tiles: int
    long_tiles: int
    in_place: bool
    runs: int
    run: int
    cuts: int
    piece: int
    group: int
    panels: int
    part: int = 1
    split: int = 1
    band: int = 1
    block: int = 1

    @property
    def chunks(self) -> int:
        return self.runs * self.cuts if self.cuts > 1 else -(-self.runs // self.group)

    @property
    def chunk_depth(self) -> int:
        return self.piece if self.cuts > 1 else self.group * self.run

    @property
    def step_bytes(self) -> int:
        """From one step of the depth to the next in a packed panel."""
        return self.vectors * self.lanes * self.item

    @property
    def panel_bytes(self) -> int:
        return self.chunk_depth * self.step_bytes

    @property
    def tile_bytes(self) -> int:
        return self.rows * self.step_bytes

    @property
    def columns(self) -> int:
        return self.vectors * self.lanes


def tile_cycles(rows: int, vectors: int, depth: int) -> float:
    """Cycles of a tile: two multiply-adds and two loads a cycle."""
    step = max(rows * vectors / 2, (rows + vectors) / 2, FMA_LATENCY)
    return depth * step + TILE_CYCLES if rows else 0.0


def line_cycles(
    pixels: int, outer: int, depth: int, rows: int, vectors: int, lanes: int
) -> tuple[float, int, int]:
    """(cycles, tiles, long tiles) of a line of pixels against all outer channels."""
    tiles = -(-pixels // rows)
    rows = -(-pixels // tiles)
    long_tiles = pixels - tiles * (rows - 1)
    cycles = long_tiles * tile_cycles(rows, vectors, depth)
    cycles += (tiles - long_tiles) * tile_cycles(rows - 1, vectors, depth)
    return cycles * -(-outer // (vectors * lanes)), tiles, long_tiles


def task_bytes(v: View, plan: Blocking, band: int, block: int, split: int) -> int:
    """What a task reads of the image, and its sums between chunks."""
    read = v.rows.reach(band) * v.columns.reach(block * plan.rows) * v.inner * plan.item
    return read + (band * block * split * plan.tile_bytes if plan.chunks > 1 else 0)


@functools.lru_cache(maxsize=256)
def blocking(v: View, dtype: str, sum_dtype: str, target: Target) -> Blocking:
    """Cut the problem for the target's registers and caches."""
    item = itemsize(sum_dtype)
    lanes = target.vector_bytes // item
    dense = all(b - a == 1 for a, b in zip(v.columns.shifts, v.columns.shifts[1:]))
    run = len(v.columns.shifts) * v.inner if dense else v.inner
    runs = len(v.rows.shifts) * (1 if dense else len(v.columns.shifts))
    depth = run * runs
    # Sums, the vectors of a step and one broadcast fill the registers.
    shapes = [
        (rows, vectors)
        for vectors in range(1, MOST_VECTORS + 1)
        for rows in range(1, target.vector_registers)
        if rows * vectors + vectors + 1 <= target.vector_registers
    ]
    pixels = v.columns.pixels
    cycles = {s: line_cycles(pixels, v.outer, min(depth, DEPTH), *s, lanes) for s in shapes}
    rows, vectors = min(shapes, key=lambda s: (cycles[s][0], -s[0]))
    _, tiles, long_tiles = cycles[rows, vectors]
    piece, cuts = even_pieces(run, DEPTH)
    group, _ = even_pieces(runs, max(1, DEPTH // run))
    in_place = v.rows.inside and v.columns.inside and dtype == sum_dtype
    panels = -(-v.outer // (vectors * lanes))
    draft = Blocking(
        -(-pixels // tiles), vectors, lanes, item, tiles, long_tiles, in_place, runs, run, cuts,
        piece, group, panels,
    )  # fmt: skip
    part, _ = even_pieces(panels, max(1, FILTER_BYTES_MAX // (draft.chunks * draft.panel_bytes)))
    room = min(int(target.l2_bytes * L2_SHARE), TASK_BYTES_MAX)

    block = tiles
    while block > 1 and task_bytes(v, draft, 1, block, part) > room:
        block = -(-block // 2)
    lines = v.batch * v.rows.pixels
    if block < tiles or lines < TASKS_WANTED:
        block = min(block, max(1, lines * tiles // TASKS_WANTED))
    block, blocks = even_pieces(tiles, block)
    band = 1
    while band < v.rows.pixels and task_bytes(v, draft, band + 1, block, part) <= room:
        band += 1
    band = min(band, max(1, lines * blocks // TASKS_WANTED))
    band, bands = even_pieces(v.rows.pixels, band)
    splits = max(1, TASKS_WANTED // (blocks * bands * v.batch))
    split, _ = even_pieces(part, max(1, -(-part // splits)))
    return replace(draft, part=part, split=split, band=band, block=block)


def blocking_of(problem: ConvolutionProblem, v: View, target: Target) -> Blocking:
    return blocking(v, str(problem.x.dtype), str(problem.x.dtype.accumulator), target)


def work(problem: ConvolutionProblem, target: Target) -> float:
    """Flops of the peak rate that the kernel spends; infinite where it cannot do the problem."""
    phases = views(problem)
    if not phases or problem.flops == 0:
        return float("inf")
    return sum(_phase_work(problem, v, target) for v in phases)


def _phase_work(problem: ConvolutionProblem, v: View, target: Target) -> float:
    pixels = v.columns.pixels
    if v.empty:
        return v.batch * v.rows.pixels * pixels * v.outer * COPY_FLOPS
    plan = blocking_of(problem, v, target)
    if task_bytes(v, plan, plan.band, plan.block, plan.split) > SCRATCH_BYTES_MAX:
        return float("inf")
    cycles, _, _ = line_cycles(
        pixels, v.outer, plan.chunk_depth, plan.rows, plan.vectors, plan.lanes
    )
    # Two multiply-adds a cycle.
    total = v.batch * v.rows.pixels * plan.chunks * cycles * 4 * plan.lanes
    if not plan.in_place:
        copied = v.rows.reach(plan.band) / plan.band * v.rows.pixels * v.columns.reach(pixels)
        total += copied * v.batch * v.inner * COPY_FLOPS * -(-plan.part // plan.split)
    return total + plan.runs * plan.run * v.outer * PACK_FLOPS
