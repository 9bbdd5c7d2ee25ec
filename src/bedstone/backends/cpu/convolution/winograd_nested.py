"""Winograd for windows larger than 3x3: the window is cut into 3x3 pieces.

A 9x9 filter is nine 3x3 filters, each applied to a shifted image. Their products are summed in the
transform domain, so that each piece costs one input transform, and the inverse transform is shared:
F(2x2, 3x3) saves 5/9 of the multiplications of a window whose sides are multiples of 3 (others are
filled up with zero taps). A task keeps the sums of all its patches in the core's L2 cache and goes
through the pieces one by one. The transformed filters need granted workspace.

Accuracy: that of F(2x2, 3x3). Source: the nesting is overlap-add applied to Lavin and Gray,
arXiv 1509.09308.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from bedstone.backends.cpu import cost
from bedstone.backends.cpu.builder import Call
from bedstone.backends.cpu.convolution.packed_filter import Operands, Packed
from bedstone.backends.cpu.convolution.winograd import (
    FILTER,
    FILTER_BLOCK,
    ODD_LINE,
    PATCH_BYTES_MAX,
    PRODUCT_EFFICIENCY,
    READ_FLOPS,
    TASKS_PER_THREAD,
    WRITE_FLOPS,
    Emitter,
    Geometry,
    geometry,
    transform,
)
from bedstone.backends.cpu.convolution.winograd_tiles import QUAD, TileReader
from bedstone.backends.cpu.irtypes import itemsize
from bedstone.backends.cpu.kernel import CompiledKernel, compiled_in_halves
from bedstone.backends.cpu.target import KIB, Target
from bedstone.plan.algorithm import Algorithm
from bedstone.plan.config import get_num_threads
from bedstone.plan.device import Device
from bedstone.spec.convolution import ConvolutionProblem
from bedstone.spec.problem import Problem

PATCH = 2
DEPTH = 256  # products summed in registers
CHANNELS_MIN = 16  # fewer do not fill the vectors of the input transform
WINDOW_MAX = 15
# Cost of transforming a 3x3 piece of a filter, in flops of the peak rate, keyed by "target channels
# contiguous"; and a core's share of what the transformed filters are read with by every task,
# bytes a second. Both fitted to measurements (0.8 to 17 MB of filters: 47 to 7 GB/s).
PIECE_FLOPS = {True: 600.0, False: 2000.0}
FILTER_BYTES_PER_SECOND = 15e9


def nested_geometry(problem: ConvolutionProblem, target: Target) -> Geometry:
    """The blocking: patches so few that the sums of all panels stay in L2."""
    g = replace(geometry(problem, PATCH, target), window=problem.w.dims[2:])
    pieces = g.pieces[0] * g.pieces[1]
    most = max(1, DEPTH // g.source.channels)
    chunk = max(c for c in range(1, pieces + 1) if pieces % c == 0 and c <= most)
    per_patch = g.points * (chunk * g.source.channels + g.lanes + g.panels * g.width) * g.size
    budget = min(PATCH_BYTES_MAX, max(target.l2_bytes * 3 // 4, 256 * KIB))
    tasks = TASKS_PER_THREAD * get_num_threads()
    most_blocks = max(1, min(budget // (per_patch * g.rows), g.patches // (g.rows * tasks)))
    return replace(g, chunk=chunk, block=most_blocks * g.rows, group=g.panels, splits=1)


class NestedEmitter(Emitter):
    """Builds the kernel of one geometry."""

    def memory(self, call: Call) -> Any:
        """The granted workspace."""
        return call.workspace

    def body(self, call: Call, operands: Operands, packed: Packed) -> None:
        if packed.packs:
            self._pieces(operands.filter, packed.address, call.threads)
        if packed.multiplies:
            self._sum_pieces(call, operands, packed.address)

    def _sum_pieces(self, call: Call, operands: Operands, filters: Any) -> None:
        """A parallel phase: patches times the transformed filters."""
        k, g = self.k, self.g
        sums_bytes = g.points * g.product_plane
        blocks = -(-g.patches // g.block)
        scratch = g.points * g.patch_plane + g.panels * sums_bytes + ODD_LINE
        with k.parallel(blocks, call.threads, scratch) as job:
            v = job.scratch
            sums = v + g.points * g.patch_plane
            zeros = sums + g.panels * sums_bytes
            k.store(k.constant(0.0, g.accumulator, g.lanes), zeros, g.accumulator)
            with job.each_task() as task:
                start = task * g.block
                stop = k.min(start + g.block, g.patches)
                with k.loop(0, g.chunks) as chunk:
                    self._shifted_patches(operands.image, v, zeros, start, stop, chunk)
                    u = filters + chunk * (g.points * g.panel_plane)
                    with k.loop(0, g.panels) as p:
                        self._products(v, u + p * g.panel_bytes, sums + p * sums_bytes,
                                       stop - start, chunk)  # fmt: skip
                with k.loop(0, g.panels) as p:
                    at = sums + p * sums_bytes
                    self.writer.emit_block(at, start, stop, p, operands, call)

    def _shifted_patches(
        self, source: Any, v: Any, zeros: Any, start: Any, stop: Any, chunk: Any
    ) -> None:
        """v[point][patch][piece, c]: the patches below each piece of a chunk."""
        k, g = self.k, self.g
        down, across = g.pieces
        farthest = ((down - 1) * FILTER, (across - 1) * FILTER)
        reader = TileReader(k, g, zeros)
        with (
            k.loop(0, g.chunk) as number,
            k.loop(start, stop, at_least_once=True) as t,
        ):
            piece = chunk * g.chunk + number
            shift = (piece // across * FILTER, piece % across * FILTER)
            row = v + (t - start) * g.patch_row + number * (g.source.channels * g.size)
            for channel, d in reader.each_block(source, t, shift, farthest):
                for xi, value in enumerate(itertools.chain(*transform(k, self.bt, d))):
                    k.store(value, row + channel * g.size, g.accumulator, offset=xi * g.patch_plane)

    def _pieces(self, w: Any, u: Any, threads: Any) -> None:
        """u[panel][chunk][point][piece, c][width] = G w G^T of every 3x3 piece."""
        k, g = self.k, self.g
        channels, pieces = g.source.channels, g.pieces[0] * g.pieces[1]
        blocks = -(-channels // FILTER_BLOCK)
        with k.parallel(g.panels * pieces * blocks, threads) as job, job.each_task() as task:
            start, rest = task % blocks * FILTER_BLOCK, task // blocks
            piece, p = rest % pieces, rest // pieces
            base = u + p * g.panel_bytes + piece // g.chunk * (g.points * g.panel_plane)
            first = piece % g.chunk * channels
            with (
                k.loop(start, k.min(start + FILTER_BLOCK, channels)) as c,
                k.loop(0, g.vectors) as j,
            ):
                channel = p * g.width + j * g.lanes
                square = transform(k, self.gm, self._piece_taps(w, channel, c, piece))
                place = base + (first + c) * g.product_row + j * (g.lanes * g.size)
                for xi, value in enumerate(itertools.chain(*square)):
                    k.store(value, place, g.accumulator, offset=xi * g.panel_plane)

    def _piece_taps(self, w: Any, channel: Any, c: Any, piece: Any) -> list[list[Any]]:
        """One 3x3 piece for a vector of target channels; taps past the window are zero."""
        k, g = self.k, self.g
        wk, wc, wr, ws = g.filter_strides
        height, width = g.window
        across = g.pieces[1]
        mask = k.first_lanes(g.target.channels - channel, g.lanes)
        base = w + channel * wk + c * wc
        square = []
        for i in range(FILTER):
            row = []
            for j in range(FILTER):
                r, s = piece // across * FILTER + i, piece % across * FILTER + j
                inside = (r < height) & (s < width)
                rr, ss = (height - 1 - r, width - 1 - s) if g.flip else (r, s)
                address = base + k.select(inside, rr * wr + ss * ws, 0)
                if wk == itemsize(g.dtype):
                    value = k.load(address, g.dtype, g.lanes, mask=mask)
                else:
                    value = k.gather(address, k.iota(g.lanes) * wk, g.dtype, mask)
                row.append(k.select(inside, value, 0.0))
            square.append(row)
        return square


class NestedWinograd(Algorithm):
    """cpu:winograd_2x2_nested."""

    name = "cpu:winograd_2x2_nested"
    error_scale = "tile"

    def supports(self, problem: Problem, device: Device) -> str | None:
        if not isinstance(problem, ConvolutionProblem) or problem.direction == "backward_filter":
            return "computes forward and backward_data only"
        window = problem.w.dims[2:]
        if len(window) != 2 or min(window) < FILTER or max(window) <= FILTER:
            return f"the filter is {'x'.join(map(str, window))}, not larger than 3x3"
        if max(window) > WINDOW_MAX:
            return f"the filter is {'x'.join(map(str, window))}, larger than {WINDOW_MAX} on a side"
        conv = problem.conv
        if conv.stride != (1, 1) or conv.dilation != (1, 1):
            return f"stride {conv.stride} and dilation {conv.dilation} must be 1"
        if conv.groups != 1:
            return "one group only"
        for name in ("x", "y"):
            desc = getattr(problem, name)
            if desc.strides[1] != 1 and desc.strides[3] != 1:
                return f"{name} has unit stride neither along channels nor along width"
        if problem.x.size == 0 or problem.w.size == 0:
            return "an empty tensor"
        target = Target.current()
        if target.vector_bytes // problem.x.dtype.accumulator.itemsize < QUAD:
            return "vectors are too short for its transforms"
        if min(problem.w.dims[:2]) < CHANNELS_MIN:
            return f"fewer than {CHANNELS_MIN} channels do not fill its vectors"
        return None

    def workspace(self, problem: Problem, device: Device) -> int:
        if not isinstance(problem, ConvolutionProblem):
            return 0
        g = nested_geometry(problem, Target.current())
        return g.panels * g.panel_bytes

    def estimate(self, problem: Problem, device: Device) -> float:
        if not isinstance(problem, ConvolutionProblem):
            return float("inf")
        g = nested_geometry(problem, Target.current())
        item, pieces = itemsize(g.dtype), g.pieces[0] * g.pieces[1]
        inputs, outputs = pieces * g.source.channels, g.panels * g.width
        products = 2 * g.points * g.patches * inputs * outputs / PRODUCT_EFFICIENCY
        moved = inputs * READ_FLOPS[g.source.strides[1] == item]
        moved += outputs * WRITE_FLOPS[g.target.strides[1] == item]
        pieces_flops = inputs * outputs * PIECE_FLOPS[g.filter_strides[0] == item]
        flops = products + g.patches * moved + pieces_flops
        read = -(-g.patches // g.block) * g.panels * g.panel_bytes
        threads = get_num_threads()
        streamed = read / (FILTER_BYTES_PER_SECOND * threads)
        return cost.seconds(flops, problem.bytes, g.accumulator, 2) + streamed

    def build(self, problem: Problem, device: Device) -> CompiledKernel:
        if not isinstance(problem, ConvolutionProblem):
            raise TypeError(f"{self.name} was asked to build {problem}")
        g = nested_geometry(problem, Target.current())
        return compiled_in_halves(
            f"{self.name}|{problem}|{g}",
            lambda target: NestedEmitter(target, problem, g),
            len(problem.operands),
            f"{g.pieces[0]}x{g.pieces[1]} pieces of 3x3; tasks of {g.block} patches; micro-tile "
            f"{g.rows} patches x {g.width} channels",
        )
