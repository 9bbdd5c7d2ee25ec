"""Winograd backward_filter for 3x3 filters of stride 1: F(3x3, 2x2).

A 2x2 patch of dy against the 4x4 patch of x below it gives a 3x3 piece of dw by 16 products
instead of 36. The products of all patches are summed in the transform domain: 16 matrix products
V^T Y of [channels x patches] by [patches x filters], and one inverse transform at the end. A task
owns a block of channels and filters, whose 16 sums stay in its core's L2 cache, and reads the
patches chunk by chunk. Where blocks are fewer than threads, patches are cut into parts as well,
and the parts are added in order.

Accuracy: as F(2x2, 3x3) forward, relative RMS about 3e-7 for float32. An Inf or NaN in x or dy
reaches every tap of its channel pair (the transform mixes them): such a block is computed again by
the definition.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from bedstone.backends.cpu import cost
from bedstone.backends.cpu.builder import KernelBuilder
from bedstone.backends.cpu.convolution.winograd import (
    FILTER,
    ODD_LINE,
    READ_FLOPS,
    Image,
    matrices,
    transform,
)
from bedstone.backends.cpu.convolution.winograd_tiles import QUAD, TileReader
from bedstone.backends.cpu.irtypes import I64, itemsize
from bedstone.backends.cpu.kernel import ENTRY, CompiledKernel, compiled
from bedstone.backends.cpu.target import MIB, Target
from bedstone.plan.algorithm import Algorithm
from bedstone.plan.device import Device
from bedstone.spec.convolution import ConvolutionProblem
from bedstone.spec.problem import Problem

PATCH = 2  # of dy
EDGE = PATCH + FILTER - 1  # of x
POINTS = EDGE**2
BLOCK = 64  # channels and filters of a task, about: 16 * 64 * 64 float32 sums are 256 KiB
CHUNK = 48  # patches transformed at a time
TASKS_WANTED = 8
PARTIAL_BYTES_MAX = 2 * MIB
EFFICIENCY = 0.8
# Clearing the sums of one pair of channels, transforming them back and scattering the nine taps, in
# flops of the peak rate: what decides where patches are few and channels many.
FINISH_FLOPS = 1000.0


@dataclass(frozen=True)
class Grid:
    """The patches of one tensor as TileReader reads them: every 2 pixels, `edge` pixels wide."""

    source: Image
    tiles: tuple[int, int]
    edge: int
    pad: tuple[int, int]
    dtype: str
    accumulator: str
    lanes: int
    m: int = PATCH


@dataclass(frozen=True)
class Shape:
    """The blocking; counts of elements."""

    rows: int  # MR: channels of a micro-tile
    vectors: int  # NV: vectors of filters of a micro-tile
    channel_block: int
    filter_block: int
    channel_blocks: int
    filter_blocks: int
    parts: int


def blocks_of(total: int, step: int) -> tuple[int, int]:
    """(size, number) of even blocks near BLOCK, each a multiple of `step`."""
    number = max(1, round(total / BLOCK))
    size = -(-total // (number * step)) * step
    return size, -(-total // size)


def shape_of(problem: ConvolutionProblem, target: Target) -> Shape:
    """Cut channels and filters for the target's registers."""
    size = problem.x.dtype.accumulator.itemsize
    lanes = target.vector_bytes // size
    channels, filters = problem.w.dims[1], problem.w.dims[0]
    vectors = 2 if filters > lanes else 1
    most = (14 if vectors == 2 else 24) if target.vector_registers >= 32 else 12 // vectors
    block = -(-channels // max(1, round(channels / BLOCK)))
    rows = min(range(most, most // 2, -1), key=lambda r: (-(-block // r) * r * (1 + 1 / r), -r))
    channel_block, channel_blocks = blocks_of(channels, rows)
    filter_block, filter_blocks = blocks_of(filters, vectors * lanes)
    tasks = channel_blocks * filter_blocks
    bytes_ = POINTS * channel_block * filter_block * size * tasks
    parts = max(1, min(-(-TASKS_WANTED // tasks), PARTIAL_BYTES_MAX // bytes_))
    return Shape(rows, vectors, channel_block, filter_block, channel_blocks, filter_blocks, parts)


class Emitter:
    """Builds the kernel of one problem."""

    def __init__(self, target: Target, problem: ConvolutionProblem) -> None:
        self.k, self.problem = KernelBuilder(target), problem
        self.s = shape_of(problem, target)
        self.dtype, self.accumulator = str(problem.x.dtype), str(problem.x.dtype.accumulator)
        self.size = itemsize(self.accumulator)
        self.lanes = target.vector_bytes // self.size
        p, q = problem.y.dims[2:]
        tiles = (-(-p // PATCH), -(-q // PATCH))
        self.patches = problem.x.dims[0] * tiles[0] * tiles[1]
        common = (self.dtype, self.accumulator, self.lanes)
        pad = (problem.conv.padding[0][0], problem.conv.padding[1][0])
        self.x = Grid(self._image(problem.x), tiles, EDGE, pad, *common)
        self.dy = Grid(self._image(problem.y), tiles, PATCH, (0, 0), *common)
        self.bt, self.g, self.at = matrices(FILTER, PATCH)
        # Bytes: from patch to patch and point to point of the transformed tensors, and from channel
        # to channel and point to point of the sums.
        s = self.s
        self.v_row = (s.channel_block + self.lanes) * self.size
        self.y_row = (s.filter_block + self.lanes) * self.size
        self.v_plane, self.y_plane = CHUNK * self.v_row + ODD_LINE, CHUNK * self.y_row + ODD_LINE
        self.sum_row = s.filter_block * self.size
        self.sum_plane = s.channel_block * self.sum_row + ODD_LINE

    def _image(self, desc: Any) -> Image:
        n, c, h, w = (stride * itemsize(self.dtype) for stride in desc.strides)
        return Image(desc.dims[1], desc.dims[2], desc.dims[3], (n, c, h, w))

    def emit(self) -> KernelBuilder:
        k, s = self.k, self.s
        self._product("product")
        sum_bytes = POINTS * self.sum_plane
        blocks = s.channel_blocks * s.filter_blocks
        transformed = POINTS * (self.v_plane + self.y_plane) + ODD_LINE
        with k.entry(ENTRY, 3) as call:
            self.arrays, self.call = call.pointers, call
            table = k.scratch(s.parts * blocks * sum_bytes) if s.parts > 1 else 0
            scratch = transformed + (0 if s.parts > 1 else sum_bytes)
            with k.parallel(blocks * s.parts, call.threads, scratch) as job:
                zeros = job.scratch + POINTS * (self.v_plane + self.y_plane)
                k.store(k.constant(0.0, self.accumulator, self.lanes), zeros, self.accumulator)
                with job.each_task() as task:
                    block, part = task // s.parts, task % s.parts
                    own = job.scratch + transformed
                    sums = table + task * sum_bytes if s.parts > 1 else own
                    with k.loop(0, sum_bytes, self.lanes * self.size) as at:
                        zero = k.constant(0.0, self.accumulator, self.lanes)
                        k.store(zero, sums + at, self.accumulator)
                    first = part * self.patches // s.parts
                    last = (part + 1) * self.patches // s.parts
                    self._accumulate(block, first, last, job.scratch, zeros, sums)
                    if s.parts == 1:
                        self._finish(block, sums, sum_bytes)
            if s.parts > 1:
                with k.parallel(blocks, call.threads) as job, job.each_task() as block:
                    self._finish(block, table + block * (s.parts * sum_bytes), sum_bytes)
        return k

    def _accumulate(
        self, block: Any, first: Any, last: Any, scratch: Any, zeros: Any, sums: Any
    ) -> None:
        """Add the products of patches first..last to a block's sums."""
        k, s = self.k, self.s
        c0 = block // s.filter_blocks * s.channel_block
        k0 = block % s.filter_blocks * s.filter_block
        y_at = scratch + POINTS * self.v_plane
        x, dy, _ = self.arrays
        with k.loop(first, last, CHUNK) as start:
            stop = k.min(start + CHUNK, last)
            self._transform(self.x, x, c0, s.channel_block, self.bt, start, stop, zeros,
                            scratch, self.v_row, self.v_plane)  # fmt: skip
            self._transform(self.dy, dy, k0, s.filter_block, self.g, start, stop, zeros,
                            y_at, self.y_row, self.y_plane)  # fmt: skip
            width = s.vectors * self.lanes
            with (
                k.loop(0, POINTS) as xi,
                k.loop(0, s.filter_block, width) as j,
                k.loop(0, s.channel_block, s.rows) as i,
            ):
                k.call(
                    "product",
                    scratch + xi * self.v_plane + i * self.size,
                    y_at + xi * self.y_plane + j * self.size,
                    sums + xi * self.sum_plane + i * self.sum_row + j * self.size,
                    stop - start,
                )

    def _transform(
        self, grid: Grid, address: Any, first: Any, count: int, matrix: Any, start: Any, stop: Any,
        zeros: Any, out: Any, row: int, plane: int,
    ) -> None:  # fmt: skip
        """out[point][patch][channel] for `count` channels from `first`; zeros past the last."""
        k = self.k
        total = grid.source.channels
        origin = address + first * grid.source.strides[1]

        def patches(live: int) -> None:
            narrowed = Grid(**{**grid.__dict__, "source": grid.source.narrowed(live)})
            reader = TileReader(k, narrowed, zeros)
            with k.loop(start, stop) as t:
                here = out + (t - start) * row
                for channel, d in reader.each_block(origin, t):
                    for xi, value in enumerate(itertools.chain(*transform(k, matrix, d))):
                        k.store(value, here + channel * self.size, self.accumulator,
                                offset=xi * plane)  # fmt: skip
                padded = -(-live // self.lanes) * self.lanes
                for channel in range(padded, -(-count // self.lanes) * self.lanes, self.lanes):
                    for xi in range(POINTS):
                        zero = k.constant(0.0, self.accumulator, self.lanes)
                        k.store(
                            zero, here, self.accumulator, offset=xi * plane + channel * self.size
                        )

        rest = total % count
        if total < count or rest == 0:
            patches(min(total, count))
            return
        with k.if_else(first + count <= total) as (whole, ragged):
            with whole:
                patches(count)
            with ragged:
                patches(rest)

    def _product(self, name: str) -> None:
        """The micro-kernel: sums[rows x vectors] += sum over patches of v[patch, row] y[patch]."""
        k, s = self.k, self.s
        with k.function(name, I64, I64, I64, I64) as (v, y, sums, count):
            zero = k.constant(0.0, self.accumulator, self.lanes)
            totals = [[k.variable(zero) for _ in range(s.vectors)] for _ in range(s.rows)]
            with k.loop(0, count) as t:
                wide = [
                    k.load(y + t * self.y_row, self.accumulator, self.lanes,
                           offset=j * self.lanes * self.size)
                    for j in range(s.vectors)
                ]  # fmt: skip
                for i, row in enumerate(totals):
                    x = k.load(v + t * self.v_row, self.accumulator, offset=i * self.size)
                    x = k.splat(x, self.lanes)
                    for total, vector in zip(row, wide):
                        total.set(k.fma(x, vector, total.value))
            for i, row in enumerate(totals):
                for j, total in enumerate(row):
                    offset = i * self.sum_row + j * self.lanes * self.size
                    old = k.load(sums, self.accumulator, self.lanes, offset=offset)
                    k.store(old + total.value, sums, self.accumulator, offset=offset)

    def _finish(self, block: Any, sums: Any, sum_bytes: int) -> None:
        """Add up a block's parts, transform back, blend into dw."""
        k, s = self.k, self.s
        filters, channels = self.problem.w.dims[:2]
        c0 = block // s.filter_blocks * s.channel_block
        k0 = block % s.filter_blocks * s.filter_block
        with (
            k.loop(0, k.min(channels - c0, s.channel_block)) as c,
            k.loop(0, k.min(filters - k0, s.filter_block), self.lanes) as j,
        ):
            here = sums + c * self.sum_row + j * self.size
            square = []
            for a in range(EDGE):
                row = []
                for b in range(EDGE):
                    offset = (a * EDGE + b) * self.sum_plane
                    total = k.load(here, self.accumulator, self.lanes, offset=offset)
                    for part in range(1, s.parts):
                        at = offset + part * sum_bytes
                        total = total + k.load(here, self.accumulator, self.lanes, offset=at)
                    row.append(total)
                square.append(row)
            mask = k.first_lanes(filters - (k0 + j), self.lanes)
            self._store(transform(k, self.at, square), c0 + c, k0 + j, mask)

    def _store(self, taps: Any, c: Any, first: Any, mask: Any) -> None:
        """A vector of filters of one channel to dw; by the definition if one is not finite."""
        k = self.k
        item = itemsize(self.dtype)
        wk, wc, wr, ws = (stride * item for stride in self.problem.w.strides)
        total = None
        for value in itertools.chain(*taps):
            difference = value - value
            total = difference if total is None else total + difference
        values = [k.variable(value) for value in itertools.chain(*taps)]
        with k.if_(k.any(total.is_nan())):
            self._definition(values, c, first, mask)
        lanes = k.iota(self.lanes) * wk
        flip = self.problem.conv.mode == "convolution"
        for tap, value in enumerate(values):
            r, s = divmod(FILTER * FILTER - 1 - tap if flip else tap, FILTER)
            address = self.arrays[2] + c * wc + first * wk + (r * wr + s * ws)
            result = k.variable(value.value * k.cast(self.call.alpha, value.value))
            with k.if_(self.call.beta.ne(0.0)):
                old = k.gather(address, lanes, self.dtype, mask)
                result.set(k.fma(old, k.cast(self.call.beta, old), result.value))
            k.scatter(result.value, address, lanes, self.dtype, mask)

    def _definition(self, values: list[Any], c: Any, first: Any, mask: Any) -> None:
        """The nine sums of one channel and a vector of filters, product by product."""
        k, item = self.k, itemsize(self.dtype)
        x, dy, _ = self.arrays
        sn, sc, sh, sw = self.x.source.strides
        on, ok, oh, ow = self.dy.source.strides
        height, width = self.x.source.height, self.x.source.width
        zeros = k.alloca(item)
        k.store(k.constant(0.0, self.accumulator), zeros, self.dtype)
        for value in values:
            value.set(k.constant(0.0, self.accumulator, self.lanes))
        with (
            k.loop(0, self.problem.x.dims[0]) as n,
            k.loop(0, self.dy.source.height) as p,
            k.loop(0, self.dy.source.width) as q,
        ):
            address = dy + n * on + p * oh + q * ow + first * ok
            gradient = k.gather(address, k.iota(self.lanes) * ok, self.dtype, mask)
            for tap, value in enumerate(values):
                r, s = divmod(tap, FILTER)
                i, j = self._number(p, r - self.x.pad[0]), self._number(q, s - self.x.pad[1])
                inside = i.below(height) & j.below(width)
                pixel = k.select(inside, x + n * sn + c * sc + i * sh + j * sw, zeros)
                factor = k.splat(k.load(pixel, self.dtype), self.lanes)
                value.set(k.fma(gradient, factor, value.value))

    def _number(self, index: Any, shift: int) -> Any:
        """index + shift as a run-time integer."""
        total = index + shift
        return self.k.constant(total, "int64") if isinstance(total, int) else total


class WinogradFilter(Algorithm):
    """cpu:winograd_3x3_2x2."""

    name = "cpu:winograd_3x3_2x2"
    error_scale = "tile"

    def supports(self, problem: Problem, device: Device) -> str | None:
        if not isinstance(problem, ConvolutionProblem) or problem.direction != "backward_filter":
            return "computes backward_filter only"
        if problem.w.dims[2:] != (FILTER, FILTER):
            return f"the filter is {'x'.join(map(str, problem.w.dims[2:]))}, not 3x3"
        conv = problem.conv
        if conv.stride != (1, 1) or conv.dilation != (1, 1):
            return f"stride {conv.stride} and dilation {conv.dilation} must be 1"
        if conv.groups != 1:
            return "one group only"
        for name in ("x", "y"):
            desc = getattr(problem, name)
            if desc.strides[1] != 1 and desc.strides[3] != 1:
                return f"{name} has unit stride neither along channels nor along width"
        if problem.x.size == 0 or problem.y.size == 0 or problem.w.size == 0:
            return "an empty tensor"
        if Target.current().vector_bytes // problem.x.dtype.accumulator.itemsize < QUAD:
            return "vectors are too short for its transforms"
        return None

    def estimate(self, problem: Problem, device: Device) -> float:
        if not isinstance(problem, ConvolutionProblem):
            return float("inf")
        s = shape_of(problem, Target.current())
        p, q = problem.y.dims[2:]
        patches = problem.x.dims[0] * -(-p // PATCH) * -(-q // PATCH)
        channels = s.channel_block * s.channel_blocks
        filters = s.filter_block * s.filter_blocks
        products = 2 * POINTS * patches * channels * filters / EFFICIENCY
        by_channel = [problem.x.strides[1] == 1, problem.y.strides[1] == 1]
        moved = patches * channels * s.filter_blocks * READ_FLOPS[by_channel[0]]
        moved += patches * filters * s.channel_blocks * READ_FLOPS[by_channel[1]]
        accumulator = str(problem.x.dtype.accumulator)
        finish = channels * filters * s.parts * FINISH_FLOPS
        return cost.seconds(products + moved + finish, problem.bytes, accumulator, 2)

    def build(self, problem: Problem, device: Device) -> CompiledKernel:
        if not isinstance(problem, ConvolutionProblem):
            raise TypeError(f"{self.name} was asked to build {problem}")
        s = shape_of(problem, Target.current())
        return compiled(
            f"{self.name}|{problem}|{s}",
            lambda target: Emitter(target, problem).emit(),
            len(problem.operands),
            f"blocks of {s.channel_block} channels x {s.filter_block} filters; micro-tile {s.rows} "
            f"x {s.vectors} vectors; {s.parts} parts",
        )
