"""Winograd convolution F(m x m, 3x3), m = 2 or 4: stride 1, forward and backward_data.

An (m+2)^2 patch d of the input gives m x m outputs as A^T [ sum_c (B^T d B) * (G w G^T) ] A: the
sum over channels is (m+2)^2 small matrix products, with 4/9 (m = 2) or 1/4 (m = 4) of the
multiplications of the definition. One task takes T patches through all three steps
inside the core's L2 cache; nothing of the transformed input ever reaches memory. The filters are
transformed once a call, in groups of channels that stay on the chip: no workspace is needed.

Accuracy, relative RMS against float64 for float32 data: m = 2 about 3e-7..6e-7, as direct; m = 4
about 1e-6..1.6e-6, so that m = 4 is offered for float64, 16-bit data, and math="fast" only.
Inf, NaN and overflow in the transforms would reach outputs that do not depend on them: a patch
with any output that is not finite is computed again by the definition.

Source: Lavin and Gray, "Fast algorithms for convolutional neural networks", arXiv 1509.09308; the
points 0, +-5/8, +-3/2, infinity of m = 4 were found by search over small fractions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from bedstone.backends.cpu import cost
from bedstone.backends.cpu.builder import Call, KernelBuilder
from bedstone.backends.cpu.convolution.packed_filter import FilterKernel, Operands, Packed
from bedstone.backends.cpu.convolution.winograd_tiles import (
    QUAD,
    FilterReader,
    TileReader,
    TileWriter,
)
from bedstone.backends.cpu.irtypes import I64, itemsize
from bedstone.backends.cpu.kernel import CompiledKernel, compiled_in_halves
from bedstone.backends.cpu.target import KIB, MIB, Target
from bedstone.plan.algorithm import Algorithm
from bedstone.plan.config import get_num_threads
from bedstone.plan.device import Device
from bedstone.spec.convolution import ConvolutionProblem
from bedstone.spec.problem import Problem

FILTER = 3
# Interpolation points besides infinity, by patch edge m + 2.
POINTS = {4: (0, 1, -1), 6: (0, Fraction(5, 8), Fraction(-5, 8), Fraction(3, 2), Fraction(-3, 2))}

# Scratch: transformed patches of one task (per thread), transformed filters of a group (per call).
PATCH_BYTES_MAX = 1024 * KIB
FILTER_BYTES_MAX = 2 * MIB
TILE_ROWS_MAX = 8  # micro-tiles of patches per task: beyond, filters are reused enough
# Cost of moving one channel of one patch through its transform, and one filter, for 16 transform
# points, in flops of the peak rate; keyed by "channels contiguous". Fitted to measurements.
READ_FLOPS = {True: 250.0, False: 480.0}
WRITE_FLOPS = {True: 330.0, False: 720.0}
FILTER_FLOPS, FAR_FILTER_FLOPS = 400.0, 1200.0  # the second for more filters than FAR_BYTES
FAR_BYTES = 4 * MIB
PRODUCT_EFFICIENCY = 0.9
FILTER_BLOCK = 4  # source channels a filter task takes: neighbours in memory share cache lines
TASKS_PER_THREAD = 4  # fewer tasks than this leave threads idle at the end
ODD_LINE = 64  # bytes added to strides that are powers of two, against cache-set conflicts


def matrices(m: int, r: int = FILTER) -> tuple[list[list[Fraction]], ...]:
    """B^T, G and A^T of F(m, r) by Cook-Toom on the points for m + r - 1 and infinity, exact.

    Rows of B^T are polynomials in the points, so that B^T d is short; G carries the divisions.
    """
    size = m + r - 1
    points = [Fraction(p) for p in POINTS[size]]
    at = [[p**i for p in points] + [Fraction(int(i == m - 1))] for i in range(m)]
    g, bt = [], []
    for j, p in enumerate(points):
        others = [q for i, q in enumerate(points) if i != j]
        scale = Fraction(1)
        for q in others:
            scale *= p - q
        g.append([p**i / scale for i in range(r)])
        bt.append(_from_roots(others, size))
    g.append([Fraction(int(i == r - 1)) for i in range(r)])
    bt.append(_from_roots(points, size))
    return bt, g, at


def _from_roots(roots: Sequence[Fraction], size: int) -> list[Fraction]:
    """Coefficients of prod (x - root), lowest power first, padded to `size`."""
    poly = [Fraction(1)]
    for root in roots:
        shifted, scaled = [Fraction(0), *poly], [-root * c for c in poly] + [Fraction(0)]
        poly = [a + b for a, b in zip(shifted, scaled)]
    return poly + [Fraction(0)] * (size - len(poly))


def combine(k: KernelBuilder, coefficients: Sequence[Fraction], values: Sequence[Any]) -> Any:
    """sum of coefficient * value, with nothing spent on 0 and +-1."""
    total = None
    for c, v in zip(coefficients, values):
        if c == 0:
            continue
        if total is None:
            total = v if c == 1 else (-v if c == -1 else v * float(c))
        elif abs(c) == 1:
            total = total + v if c == 1 else total - v
        else:
            total = k.fma(v, float(c), total)
    return total


def transform(
    k: KernelBuilder, matrix: list[list[Fraction]], d: list[list[Any]]
) -> list[list[Any]]:
    """matrix @ d @ matrix^T on a square of vectors."""
    columns = list(zip(*d))
    half = [[combine(k, row, column) for column in columns] for row in matrix]
    return [[combine(k, row, line) for row in matrix] for line in half]


@dataclass(frozen=True)
class Image:
    """An image-shaped tensor in one of the two roles; strides in bytes."""

    channels: int
    height: int
    width: int
    strides: tuple[int, int, int, int]  # n, c, h, w

    def narrowed(self, channels: int) -> Image:
        """The same image with fewer channels."""
        return Image(channels, self.height, self.width, self.strides)


@dataclass(frozen=True)
class Geometry:
    """All the numbers of one kernel: the correlation it amounts to, and its blocking."""

    m: int
    batch: int
    source: Image
    target: Image
    pad: tuple[int, int]
    filter_strides: tuple[int, int, int, int]  # bytes: target channel, source channel, r, s
    flip: bool  # w[2-r][2-s] in place of w[r][s]
    dtype: str
    accumulator: str
    lanes: int
    vectors: int  # NV: vectors of target channels in a micro-tile
    rows: int  # MR: patches in a micro-tile
    block: int  # T: patches in a task
    panels: int  # NV-wide panels of target channels
    group: int  # panels whose transformed filters exist at one time
    splits: int  # tasks that share a block of patches, each with its own panels
    groups: int = 1  # all else describes one of them
    group_filter: int = 0  # bytes between their filters
    window: tuple[int, int] = (FILTER, FILTER)
    chunk: int = 1  # 3x3 pieces of a larger window whose channels one product sums

    @property
    def pieces(self) -> tuple[int, int]:
        """3x3 pieces of the window, down and across."""
        return -(-self.window[0] // FILTER), -(-self.window[1] // FILTER)

    @property
    def chunks(self) -> int:
        return self.pieces[0] * self.pieces[1] // self.chunk

    @property
    def depth(self) -> int:
        """Products that one call of the micro-kernel sums."""
        return self.chunk * self.source.channels

    @property
    def edge(self) -> int:
        return self.m + FILTER - 1

    @property
    def points(self) -> int:
        return self.edge**2

    @property
    def tiles(self) -> tuple[int, int]:
        return -(-self.target.height // self.m), -(-self.target.width // self.m)

    @property
    def rounds(self) -> int:
        """Times that the transformed filters of some panels take turns on the chip."""
        return -(-self.panels // self.group)

    @property
    def patches(self) -> int:
        return self.batch * self.tiles[0] * self.tiles[1]

    @property
    def size(self) -> int:
        """Bytes of an accumulator element."""
        return itemsize(self.accumulator)

    @property
    def width(self) -> int:
        """Target channels in a panel."""
        return self.vectors * self.lanes

    @property
    def patch_row(self) -> int:
        """Bytes between patches in scratch: the source channels, and a line more."""
        return (-(-self.depth // self.lanes) + 1) * self.lanes * self.size

    @property
    def patch_plane(self) -> int:
        return self.block * self.patch_row + ODD_LINE

    @property
    def product_row(self) -> int:
        return self.width * self.size

    @property
    def product_plane(self) -> int:
        return self.block * self.product_row + ODD_LINE

    @property
    def panel_plane(self) -> int:
        """Bytes of one transform point of one panel of filters."""
        return self.depth * self.width * self.size + ODD_LINE

    @property
    def panel_bytes(self) -> int:
        return self.chunks * self.points * self.panel_plane

    @property
    def scratch(self) -> int:
        return self.points * (self.patch_plane + self.product_plane) + ODD_LINE


def micro_tile(target: Target, channels: int, lanes: int, patches: int) -> tuple[int, int]:
    """(NV, MR): two vectors of channels, and as many rows as the registers hold; fewer where
    that leaves fewer rows empty."""
    vectors = min(2, -(-channels // lanes))
    most = (14 if vectors == 2 else 24) if target.vector_registers >= 32 else 12 // vectors
    candidates = range(most, max(most // 2, 1) - 1, -1)
    return vectors, min(candidates, key=lambda r: (-(-patches // r) * r * (1 + 1 / r), -r))


def geometry(problem: ConvolutionProblem, m: int, target: Target) -> Geometry:
    """The blocking of a problem on a target."""
    dtype, accumulator = str(problem.x.dtype), str(problem.x.dtype.accumulator)
    lanes, size = target.vector_bytes // itemsize(accumulator), itemsize(dtype)

    groups = problem.conv.groups

    def image(desc: Any) -> Image:
        n, c, h, w = (s * size for s in desc.strides)
        return Image(desc.dims[1] // groups, desc.dims[2], desc.dims[3], (n, c, h, w))

    wk, wc, wr, ws = (s * size for s in problem.w.strides)
    group_filter = problem.w.dims[0] // groups * wk
    flip = problem.conv.mode == "convolution"
    pad = (problem.conv.padding[0][0], problem.conv.padding[1][0])
    source, destination = image(problem.x), image(problem.y)
    if problem.direction == "backward_data":
        source, destination, flip, wk, wc = destination, source, not flip, wc, wk
        window = problem.w.dims[2:]
        pad = (window[0] - 1 - pad[0], window[1] - 1 - pad[1])
    tiles = -(-destination.height // m) * -(-destination.width // m)
    patches = problem.x.dims[0] * tiles
    vectors, rows = micro_tile(target, destination.channels, lanes, patches)
    panels = -(-destination.channels // (vectors * lanes))
    acc = itemsize(accumulator)
    per_patch = (m + 2) ** 2 * (source.channels + 2 * lanes) * acc
    budget = min(PATCH_BYTES_MAX, max(target.l2_bytes * 3 // 4, 256 * KIB))
    blocks = max(1, min(TILE_ROWS_MAX, budget // (per_patch * rows), -(-patches // rows)))
    panel = (m + 2) ** 2 * source.channels * vectors * lanes * acc
    group = max(1, min(panels, FILTER_BYTES_MAX // panel))
    tasks, splits = -(-patches // (blocks * rows)), 1
    while tasks * splits < TASKS_PER_THREAD * get_num_threads() and 2 * splits <= group:
        splits *= 2
    return Geometry(
        m, problem.x.dims[0], source, destination, pad, (wk, wc, wr, ws), flip, dtype,
        accumulator, lanes, vectors, rows, blocks * rows, panels, group, splits,
        groups, group_filter,
    )  # fmt: skip


class Emitter(FilterKernel):
    """Builds the kernel of one geometry."""

    def __init__(self, target: Target, problem: ConvolutionProblem, g: Geometry) -> None:
        self.k, self.g, self.problem = KernelBuilder(target), g, problem
        self.bt, self.gm, self.at = matrices(g.m)
        self.writer = TileWriter(
            self.k, g, problem.epilogue, lambda m: transform(self.k, self.at, m)
        )
        self.part_bytes = g.group * g.panel_bytes
        self.packed_bytes = g.groups * g.rounds * self.part_bytes

    def emit_functions(self) -> None:
        self._product("product")
        self.writer.emit_definition("by_definition")

    def body(self, call: Call, operands: Operands, packed: Packed) -> None:
        k, g = self.k, self.g
        with k.loop(0, g.groups) as number, k.loop(0, g.rounds) as part:
            first = part * g.group
            here = self._of_group(number, operands)
            live = k.min(g.panels - first, g.group)
            u = packed.part(number * g.rounds + part, self.part_bytes)
            if packed.packs:
                self._filters(here.filter, u, first, live, call.threads)
            if packed.multiplies:
                self._multiply(call, here, u, first, live)

    def _multiply(self, call: Call, operands: Operands, u: Any, first: Any, live: Any) -> None:
        """A parallel phase: patches times the `live` panels from `first`."""
        k, g = self.k, self.g
        blocks = -(-g.patches // g.block)
        with k.parallel(blocks * g.splits, call.threads, g.scratch) as job:
            v = job.scratch
            products = v + g.points * g.patch_plane
            zeros = products + g.points * g.product_plane
            k.store(k.constant(0.0, g.accumulator, g.lanes), zeros, g.accumulator)
            with job.each_task() as task:
                start = task // g.splits * g.block
                stop = k.min(start + g.block, g.patches)
                self._patches(operands.image, v, zeros, start, stop)
                part = task % g.splits
                low, high = part * live // g.splits, (part + 1) * live // g.splits
                with k.loop(low, high) as p:
                    self._products(v, u + p * g.panel_bytes, products, stop - start)
                    self.writer.emit_block(products, start, stop, first + p, operands, call)

    def _of_group(self, number: Any, whole: Operands) -> Operands:
        """The operands of one group."""
        g = self.g
        if g.groups == 1:
            return whole
        bias = whole.bias
        if self.problem.epilogue.bias:
            bias = bias + number * (g.target.channels * itemsize(g.dtype))
        return Operands(
            whole.image + number * (g.source.channels * g.source.strides[1]),
            whole.filter + number * g.group_filter,
            bias,
            whole.out + number * (g.target.channels * g.target.strides[1]),
        )

    def _filters(self, w: Any, u: Any, first: Any, live: Any, threads: Any) -> None:
        """u[panel][point][c][width] = G w G^T for the `live` panels from `first`."""
        k, g = self.k, self.g
        channels = g.source.channels
        blocks = -(-channels // FILTER_BLOCK)
        with k.parallel(live * blocks, threads) as job, job.each_task() as task:
            p, start = task // blocks, task % blocks * FILTER_BLOCK
            out = u + p * g.panel_bytes + start * g.product_row
            with k.loop(0, g.vectors) as j:
                corner = (w, (first + p) * g.width + j * g.lanes, start)
                place = out + j * (g.lanes * g.size)
                if channels % FILTER_BLOCK == 0:
                    self._filter_block(corner, place, FILTER_BLOCK)
                else:
                    with k.if_else(start + FILTER_BLOCK <= channels) as (whole, rest):
                        with whole:
                            self._filter_block(corner, place, FILTER_BLOCK)
                        with rest:
                            self._filter_block(corner, place, channels % FILTER_BLOCK)

    def _filter_block(self, corner: Any, out: Any, count: int) -> None:
        """The filters of `count` source channels for one vector of target channels."""
        k, g = self.k, self.g
        taps = FilterReader(k, g).read(corner, count)
        with k.loop(0, count) as c:
            rows = [
                [k.load(taps + c * (FILTER * FILTER * g.lanes * g.size), g.accumulator, g.lanes,
                        offset=(r * FILTER + s) * g.lanes * g.size) for s in range(FILTER)]
                for r in range(FILTER)
            ]  # fmt: skip
            for xi, value in enumerate(itertools.chain(*transform(k, self.gm, rows))):
                place = out + c * g.product_row
                k.store(value, place, g.accumulator, offset=xi * g.panel_plane)

    def _patches(self, source: Any, v: Any, zeros: Any, start: Any, stop: Any) -> None:
        """v[point][patch][c] = B^T d B for the patches of a task."""
        k, g = self.k, self.g
        reader = TileReader(k, g, zeros)
        with k.loop(start, stop, at_least_once=True) as t:
            row = v + (t - start) * g.patch_row
            for channel, d in reader.each_block(source, t):
                square = transform(k, self.bt, d)
                for xi, value in enumerate(itertools.chain(*square)):
                    k.store(value, row + channel * g.size, g.accumulator, offset=xi * g.patch_plane)

    def _products(self, v: Any, u: Any, products: Any, count: Any, add: Any = 0) -> None:
        """products[point][patch][width] = (or += where `add`) v[point] @ u[point] for a panel."""
        k, g = self.k, self.g
        blocks = (count + (g.rows - 1)) // g.rows
        with k.loop(0, g.points) as xi, k.loop(0, blocks, at_least_once=True) as q:
            k.call(
                "product",
                v + xi * g.patch_plane + q * (g.rows * g.patch_row),
                u + xi * g.panel_plane,
                products + xi * g.product_plane + q * (g.rows * g.product_row),
                add,
            )

    def _product(self, name: str) -> None:
        """The micro-kernel: `rows` patches by `vectors` vectors of channels, over all channels."""
        k, g = self.k, self.g
        with k.function(name, I64, I64, I64, I64) as (a, b, out, add):
            zero = k.constant(0.0, g.accumulator, g.lanes)
            sums = [[k.variable(zero) for _ in range(g.vectors)] for _ in range(g.rows)]

            def step(c: Any, unrolled: int) -> None:
                for u in range(unrolled):
                    wide = [
                        k.load(
                            b + c * g.product_row, g.accumulator, g.lanes,
                            offset=(u * g.vectors + j) * g.lanes * g.size,
                        )
                        for j in range(g.vectors)
                    ]  # fmt: skip
                    for i in range(g.rows):
                        x = k.load(
                            a + c * g.size, g.accumulator, offset=i * g.patch_row + u * g.size
                        )
                        x = k.splat(x, g.lanes)
                        for j in range(g.vectors):
                            sums[i][j].set(k.fma(x, wide[j], sums[i][j].value))

            unroll = 4
            whole = g.depth // unroll * unroll
            if whole:
                with k.loop(0, whole, unroll) as c:
                    step(c, unroll)
            for c in range(whole, g.depth):
                step(c, 1)
            places = [
                (sums[i][j], i * g.product_row + j * g.lanes * g.size)
                for i in range(g.rows)
                for j in range(g.vectors)
            ]
            if g.chunks > 1:
                with k.if_(add.ne(0)):
                    for total, offset in places:
                        old = k.load(out, g.accumulator, g.lanes, offset=offset)
                        total.set(old + total.value)
            for total, offset in places:
                k.store(total.value, out, g.accumulator, offset=offset)


def filter_flops(problem: ConvolutionProblem, filters: int) -> float:
    """Cost of transforming so many filters of 3x3."""
    far = problem.w.nbytes > FAR_BYTES
    return filters * (FAR_FILTER_FLOPS if far else FILTER_FLOPS)


class Winograd(Algorithm):
    """cpu:winograd_MxM_3x3."""

    error_scale = "tile"

    def __init__(self, m: int) -> None:
        self.m = m
        self.name = f"cpu:winograd_{m}x{m}_3x3"  # type: ignore[misc]
        self.exact = m == 2  # type: ignore[misc]  # the points of F(4x4) are no powers of two

    def supports(self, problem: Problem, device: Device) -> str | None:
        if not isinstance(problem, ConvolutionProblem) or problem.direction == "backward_filter":
            return "computes forward and backward_data only"
        if problem.w.dims[2:] != (FILTER, FILTER):
            return f"the filter is {'x'.join(map(str, problem.w.dims[2:]))}, not 3x3"
        conv = problem.conv
        if conv.stride != (1, 1) or conv.dilation != (1, 1):
            return f"stride {conv.stride} and dilation {conv.dilation} must be 1"
        if self.m == 4 and problem.x.dtype == "float32" and problem.math == "ieee":
            return "its error in float32 is above float32 level; math='fast' allows it"
        for name in ("x", "y"):
            desc = getattr(problem, name)
            if desc.strides[1] != 1 and desc.strides[3] != 1:
                return f"{name} has unit stride neither along channels nor along width"
        if problem.x.size == 0 or problem.w.size == 0:
            return "an empty tensor"
        target = Target.current()
        lanes = target.vector_bytes // problem.x.dtype.accumulator.itemsize
        if lanes < QUAD:
            return f"vectors of {lanes} elements are too short for its transforms"
        fewest = min(problem.w.dims[0] // conv.groups, problem.w.dims[1])
        if conv.groups > 1 and fewest < lanes:
            return f"groups of {fewest} channels do not fill its vectors of {lanes}"
        if geometry(problem, self.m, target).panel_bytes > FILTER_BYTES_MAX:
            return "so many channels that its transformed filters do not fit on the chip"
        return None

    def estimate(self, problem: Problem, device: Device) -> float:
        if not isinstance(problem, ConvolutionProblem):
            return float("inf")
        g = geometry(problem, self.m, Target.current())
        blocks = -(-g.patches // g.block)
        patches = blocks * g.block if g.patches < g.block else g.patches
        rounds = g.rounds
        inputs, outputs = g.source.channels, g.panels * g.width
        products = 2 * g.points * patches * inputs * outputs / PRODUCT_EFFICIENCY
        moved = rounds * g.splits * inputs * READ_FLOPS[self._by_channel(g.source, g)]
        moved += outputs * WRITE_FLOPS[self._by_channel(g.target, g)]
        filters = filter_flops(problem, inputs * outputs)
        flops = products + (patches * moved + filters) * g.points / 16
        busy = min(1.0, blocks * g.splits / get_num_threads())
        launches = 2 * rounds * g.groups
        return cost.seconds(g.groups * flops / busy, problem.bytes, g.accumulator, launches)

    @staticmethod
    def _by_channel(image: Image, g: Geometry) -> bool:
        return image.strides[1] == itemsize(g.dtype)

    def build(self, problem: Problem, device: Device) -> CompiledKernel:
        if not isinstance(problem, ConvolutionProblem):
            raise TypeError(f"{self.name} was asked to build {problem}")
        g = geometry(problem, self.m, Target.current())
        description = (
            f"tasks of {g.block} patches; micro-tile {g.rows} patches x {g.width} channels; "
            f"filters transformed {g.group} of {g.panels} panels at a time"
        )
        return compiled_in_halves(
            f"{self.name}|{problem}|{g}",
            lambda target: Emitter(target, problem, g),
            len(problem.operands),
            description,
        )


ALGORITHMS = (Winograd(2), Winograd(4))
