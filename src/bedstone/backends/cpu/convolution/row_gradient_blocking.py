"""How row_gradient.py sees a problem and cuts it: chunks of pixels, blocks of dw, slices.

The cut is the one of least estimated time among a few: which operand the vectors run along, how
much of dw a task owns, into how many slices the pixels go. It depends on the problem and on the
kind of processor, never on the number of threads, so that results do not either.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from bedstone.backends.cpu.convolution.geometry import axis_line
from bedstone.backends.cpu.convolution.image_product import DEPTH, even_pieces
from bedstone.backends.cpu.irtypes import itemsize
from bedstone.backends.cpu.microkernels import SHALLOW, SHAPES
from bedstone.backends.cpu.target import KIB, MIB, Target
from bedstone.spec.convolution import ConvolutionProblem

SCRATCH_BYTES_MAX = 1536 * KIB
SLICE_BYTES_MAX = 2 * MIB  # for the sums of all slices
L1_SHARE = 0.6  # of the first-level cache for the panel that a run of tiles reads
SLICES = (1, 2, 4, 8, 16)
THREADS_THOUGHT_OF = 4  # tasks are to come out even on so many
TASKS_WANTED = 8
FMA_LATENCY = 4  # cycles, about
# Cycles on Zen 3: around the products of a tile, around a row of pixels inside it, of a vector
# packed as it lies, and turned from pixels to channels; of a vector of dw written from registers,
# from sums in memory (more for each slice of them), and to elements that are no neighbours.
TILE_CYCLES, ROW_CYCLES, PACK_CYCLES, TURN_CYCLES = 30.0, 6.0, 2.5, 6.0
DIRECT_CYCLES, FINISH_CYCLES, SLICE_CYCLES, SCATTER_CYCLES = 4.0, 20.0, 12.0, 40.0
BEYOND_L1 = 1.06  # time of tiles whose rows come from the second-level cache


@dataclass(frozen=True)
class Line:
    """One spatial axis of the image: `pixels` outputs, `step` coordinates (of `size`) apart; taps
    reach the coordinates `shifts` (ascending) and lie `filters` bytes from the filter's origin.

    An axis of one tap is packed without the coordinates between its pixels.
    """

    size: int
    pixels: int
    step: int = 1
    shifts: tuple[int, ...] = (0,)
    filters: tuple[int, ...] = (0,)

    @property
    def span(self) -> int:
        return self.shifts[-1] - self.shifts[0] + 1

    @property
    def walk(self) -> int:
        """Coordinates of the image from one packed place to the next."""
        return self.step if self.span == 1 else 1

    @property
    def stride(self) -> int:
        """Packed places from one pixel to the next."""
        return 1 if self.span == 1 else self.step

    @property
    def inside(self) -> bool:
        """Whether no tap leaves the image."""
        return self.shifts[0] >= 0 and (self.pixels - 1) * self.step + self.shifts[-1] < self.size

    @property
    def plain(self) -> bool:
        """Whether each pixel meets the coordinate of its own number and no other."""
        return self.shifts == (0,) and self.step == 1 and self.size == self.pixels

    def reach(self, pixels: int) -> int:
        """Packed places that so many pixels need."""
        return (pixels - 1) * self.stride + self.span


@dataclass(frozen=True)
class View:
    """The problem as the kernel sees it: `image` and `out` are strides in bytes of (batch, row,
    column, channel) of x and dy, in which channels or columns are neighbours; `*_filter` are
    strides of dw; `item` is an element's size; `group_*` go from one group to the next."""

    batch: int
    rows: Line
    columns: Line
    image: tuple[int, int, int, int]
    out: tuple[int, int, int, int]
    channels: int
    filters: int
    channel_filter: int
    filter_filter: int
    item: int
    groups: int
    group_image: int
    group_out: int
    group_filter: int

    @property
    def pixels(self) -> int:
        return self.batch * self.rows.pixels * self.columns.pixels

    @property
    def image_turned(self) -> bool:
        """Whether columns of x are neighbours, and channels are not."""
        return self.channels > 1 and self.image[3] != self.item

    @property
    def out_turned(self) -> bool:
        return self.filters > 1 and self.out[3] != self.item


def view(problem: ConvolutionProblem) -> View | None:
    """The problem's rows; None where they do not lie as this kernel needs them."""
    conv, item = problem.conv, problem.x.dtype.itemsize
    if conv.axes > 2:
        return None
    x, w, y = ([s * item for s in desc.strides] for desc in (problem.x, problem.w, problem.y))
    channels, filters = problem.w.dims[1], problem.w.dims[0] // conv.groups
    if not all(n == 1 or item in (s[1], s[-1]) for n, s in ((channels, x), (filters, y))):
        return None
    lines = []
    for a in range(conv.axes):
        found = axis_line(problem, a, x, w, y, False)
        taps = sorted((shift, t * w[2 + a]) for t, shift in found.residues[0][1])
        shifts, offsets = zip(*taps)
        lines.append(Line(found.axis.limit, found.axis.size, found.axis.step, shifts, offsets))
    if conv.axes == 1:
        lines.insert(0, Line(1, 1))
        x, y = [*x[:2], 0, x[2]], [*y[:2], 0, y[2]]
    image, out = ((s[0], s[2], s[3], s[1]) for s in (x, y))
    return _merged(
        View(
            problem.x.dims[0], *lines, image, out, channels, filters, w[1], w[0], item,
            conv.groups, channels * x[1], filters * y[1], filters * w[0],
        )
    )  # fmt: skip


def _merged(v: View) -> View:
    """One long row, where one tap meets every pixel and rows (then images) follow one another."""
    rows, columns = v.rows, v.columns
    if not (rows.plain and columns.plain):
        return v
    if rows.size > 1 and any(s[1] != columns.size * s[2] for s in (v.image, v.out)):
        return v
    size, filters = rows.size * columns.size, columns.filters
    if v.batch == 1 or all(s[0] == size * s[2] for s in (v.image, v.out)):
        size, v = size * v.batch, replace(v, batch=1)
    return replace(v, rows=Line(1, 1), columns=Line(size, size, filters=filters))


@dataclass(frozen=True)
class Blocking:
    """How a problem is cut.

    by_channels   vectors run along channels, a tile's rows along filters; else vectors along
                  filters, rows along the channels of a row of taps
    rows, vectors, lanes, item   of a tile, and bytes of a sum
    images, band, piece   of a chunk: images by rows by columns of dy
    channel_chunk, filter_chunk  of a task's block of dw
    runs, run     of taps: each alone by channels; else rows of them and the elements of a row
    slices        of the chunks, each summed apart
    """

    by_channels: bool
    rows: int
    vectors: int
    lanes: int
    item: int
    images: int
    band: int
    piece: int
    channel_chunk: int
    filter_chunk: int
    runs: int
    run: int
    slices: int = 1

    @property
    def width(self) -> int:
        return self.vectors * self.lanes

    @property
    def panels(self) -> int:
        """Vector panels of a block."""
        return -(-(self.channel_chunk if self.by_channels else self.filter_chunk) // self.width)

    @property
    def across(self) -> int:
        """What the tiles of a run share among them: filters, or elements of a row of taps."""
        return self.filter_chunk if self.by_channels else self.run

    @property
    def tiles(self) -> int:
        return -(-self.across // self.rows)

    @property
    def long_tiles(self) -> int:
        """The first tiles have `rows` rows, the others one less, so that none is half empty."""
        return self.across - self.tiles * (self.rows - 1)

    @property
    def step_bytes(self) -> int:
        return self.width * self.item

    @property
    def tile_bytes(self) -> int:
        return self.rows * self.step_bytes

    @property
    def sum_bytes(self) -> int:
        return self.panels * self.runs * self.tiles * self.tile_bytes

    @property
    def direct(self) -> bool:
        """Whether the last chunk's sums go from registers to dw."""
        return self.by_channels and self.slices == 1


@dataclass(frozen=True)
class Layout:
    """Bytes in a packed operand: of a place, a row, an image, and all of it (a panel's), with
    room behind it for what is stored too much."""

    place: int
    row: int
    image: int
    total: int


def layout(plan: Blocking, place: int, columns: int, rows: int) -> Layout:
    row = columns * place
    spare = plan.lanes * (place + plan.item)
    return Layout(place, row, rows * row, plan.images * rows * row + spare)


def image_layout(v: View, plan: Blocking) -> Layout:
    """Of x: a panel of channels, or whole rows."""
    place = plan.step_bytes if plan.by_channels else v.channels * plan.item
    columns, rows = v.columns.reach(plan.piece), v.rows.reach(plan.band)
    return layout(plan, place, columns, rows)


def out_layout(plan: Blocking) -> Layout:
    """Of dy: a panel of filters, as vectors or as rows of a tile."""
    place = plan.rows * plan.item if plan.by_channels else plan.step_bytes
    return layout(plan, place, plan.piece, plan.band)


def scratch_bytes(v: View, plan: Blocking) -> tuple[int, int, int]:
    """(vector panel, the other operand, sums) of a task."""
    image, out = image_layout(v, plan).total, out_layout(plan).total
    if plan.by_channels:
        sizes = image, plan.tiles * out
    else:
        sizes = out, image
    # A tile's last rows may be past the end.
    vectors, others = (-(-(size + plan.rows * plan.item) // 64) * 64 for size in sizes)
    passing = plan.direct and math.prod(chunk_counts(v, plan)) == 1
    return vectors, others, 0 if passing or plan.slices > 1 else plan.sum_bytes


def chunk_counts(v: View, plan: Blocking) -> tuple[int, int, int]:
    """Chunks along the batch, the rows, the columns."""
    return (
        -(-v.batch // plan.images),
        -(-v.rows.pixels // plan.band),
        -(-v.columns.pixels // plan.piece),
    )


def block_counts(v: View, plan: Blocking) -> tuple[int, int]:
    """Blocks of one group along the channels, the filters."""
    return -(-v.channels // plan.channel_chunk), -(-v.filters // plan.filter_chunk)


def _chunk(v: View, depth: int) -> tuple[int, int, int]:
    """(images, band, piece) of about `depth` pixels."""
    piece, pieces = even_pieces(v.columns.pixels, depth)
    if pieces > 1:
        return 1, 1, piece
    band, bands = even_pieces(v.rows.pixels, max(1, depth // piece))
    if bands > 1:
        return 1, band, piece
    images, _ = even_pieces(v.batch, max(1, depth // (piece * band)))
    return images, band, piece


def tile_cycles(rows: int, vectors: int, depth: float) -> float:
    """Cycles of a tile: two multiply-adds and two loads a cycle, sums fetched and put back."""
    if rows == 0:
        return 0.0
    step = max(rows * vectors / 2, (rows + vectors) / 2, FMA_LATENCY)
    return depth * step * SHALLOW.get((rows, vectors), 1.0) + TILE_CYCLES + rows * vectors


def cycles(v: View, plan: Blocking, target: Target) -> float:
    """Cycles of a core that the whole problem takes, as if its tasks came out even."""
    images, bands, pieces = chunk_counts(v, plan)
    channel_blocks, filter_blocks = block_counts(v, plan)
    chunks, blocks = images * bands * pieces, channel_blocks * filter_blocks * v.groups
    depth = v.pixels / chunks
    a_run = _run_cycles(plan.rows, plan.vectors, plan.across, depth)
    rows = depth / plan.piece
    products = plan.panels * plan.runs * (a_run + plan.tiles * rows * ROW_CYCLES)
    image, out = image_layout(v, plan), out_layout(plan)
    if not plan.by_channels and image.total > target.l1_bytes:
        products *= BEYOND_L1
    vector = plan.lanes * plan.item
    x_cost, dy_cost = (
        TURN_CYCLES if turned else PACK_CYCLES for turned in (v.image_turned, v.out_turned)
    )
    x_cost *= v.columns.walk if v.image_turned else 1  # gathered
    if plan.by_channels:
        packing = plan.panels * image.total / vector * x_cost + plan.tiles * depth * dy_cost
    else:
        packing = image.total / vector * x_cost + plan.panels * out.total / vector * dy_cost
    step = v.channel_filter if plan.by_channels else v.filter_filter
    finish = DIRECT_CYCLES if plan.direct else FINISH_CYCLES + plan.slices * SLICE_CYCLES
    finish += 0.0 if step == v.item else SCATTER_CYCLES
    finish *= plan.sum_bytes / vector
    return blocks * (chunks * (products + packing) + finish)


def _uneven(v: View, plan: Blocking) -> float:
    """How much longer the tasks take because some threads end up with fewer."""
    channel_blocks, filter_blocks = block_counts(v, plan)
    tasks = channel_blocks * filter_blocks * v.groups * plan.slices
    chunks = math.prod(chunk_counts(v, plan))
    share = -(-chunks // plan.slices) * plan.slices / chunks
    threads = THREADS_THOUGHT_OF
    rounds = -(-tasks // threads) * threads / tasks
    return max(rounds, share if tasks < 2 * TASKS_WANTED else 1.0)


@functools.lru_cache(maxsize=256)
def blocking(v: View, sum_dtype: str, target: Target) -> Blocking | None:
    """Cut the problem for the target's registers and caches; None if no cut fits."""
    item = itemsize(sum_dtype)
    lanes = target.vector_bytes // item
    best: tuple[float, Blocking | None] = (math.inf, None)
    for by_channels in (True, False):
        for plan in _candidates(v, by_channels, lanes, item, target):
            if sum(scratch_bytes(v, plan)) > SCRATCH_BYTES_MAX:
                continue
            time = cycles(v, plan, target) * _uneven(v, plan)
            if time < best[0]:
                best = time, plan
    return best[1]


def _candidates(
    v: View, by_channels: bool, lanes: int, item: int, target: Target
) -> Iterator[Blocking]:
    """Cuts worth a look, all with the tile that suits the whole problem."""
    dense = all(b - a == 1 for a, b in zip(v.columns.shifts, v.columns.shifts[1:]))
    runs, run = len(v.rows.shifts) * len(v.columns.shifts), v.channels
    if not by_channels and dense:
        runs, run = len(v.rows.shifts), v.channels * len(v.columns.shifts)
    across, along = (v.filters, v.channels) if by_channels else (run, v.filters)
    rows, vectors = min(
        SHAPES[target.vector_registers],
        key=lambda shape: _run_cycles(*shape, across) * -(-along // (shape[1] * lanes)),
    )
    width = vectors * lanes
    most = int(target.l1_bytes * L1_SHARE) // (width * item)
    images, band, piece = _chunk(v, max(lanes, min(DEPTH, most)))
    for channel_chunk in _cuts(v.channels, width if by_channels else v.channels):
        for filter_chunk in _cuts(v.filters, rows if by_channels else width):
            height = filter_chunk if by_channels else run
            even = -(-height // -(-height // rows))
            plan = Blocking(
                by_channels, even, vectors, lanes, item, images, band, piece,
                channel_chunk, filter_chunk, runs, run,
            )  # fmt: skip
            blocks = math.prod(block_counts(v, plan)) * v.groups
            for slices in SLICES:
                if slices > 1 and slices > math.prod(chunk_counts(v, plan)):
                    break
                if slices > 1 and slices * blocks * plan.sum_bytes > SLICE_BYTES_MAX:
                    break
                yield replace(plan, slices=slices)


def _run_cycles(rows: int, vectors: int, across: int, depth: float = DEPTH) -> float:
    """Cycles of a run's tiles."""
    tiles = -(-across // rows)
    rows = -(-across // tiles)
    long_tiles = across - tiles * (rows - 1)
    total = long_tiles * tile_cycles(rows, vectors, depth)
    return total + (tiles - long_tiles) * tile_cycles(rows - 1, vectors, depth)


def _cuts(total: int, step: int) -> list[int]:
    """Pieces, by halving: multiples of `step` unless one piece is all."""
    sizes, number = [total], 2
    while -(-total // number) >= 2 * step:
        size = -(-total // (number * step)) * step
        if size != sizes[-1]:
            sizes.append(size)
        number *= 2
    if total > step and sizes[-1] != step:
        sizes.append(step)
    return sizes


def blocking_of(problem: ConvolutionProblem, target: Target) -> tuple[View, Blocking] | None:
    """The view and the cut; None where the kernel cannot do the problem."""
    if 0 in (problem.x.size, problem.w.size, problem.y.size):
        return None
    v = view(problem)
    plan = v and blocking(v, str(problem.x.dtype.accumulator), target)
    return (v, plan) if v and plan else None


def work(problem: ConvolutionProblem, target: Target) -> float:
    """Flops of the peak rate that the kernel spends; infinite where it cannot do the problem."""
    found = blocking_of(problem, target)
    if found is None:
        return math.inf
    v, plan = found
    # Two multiply-adds a cycle.
    return cycles(v, plan, target) * 4 * plan.lanes
