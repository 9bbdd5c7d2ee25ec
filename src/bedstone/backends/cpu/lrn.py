"""Local response normalisation on the CPU, across channels and within them, both directions.

    y = x * base^-beta                       base = k + alpha / count * (window sum of x^2)
    dx = dy * base^-beta - 2 * alpha / count * beta * x * (window sum of dy * x * base^(-beta - 1))

A unit of work holds whole windows: every index of the window axes, of one vector or a few beside
each other where lanes lie across other axes. Its squares go to scratch with a border of zeros, so
that window sums need neither bounds nor masks; each sum is taken anew, never updated by a
difference, which would lose what cancels. Source: Krizhevsky et al., NIPS 2012, section 3.3.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bedstone.backends.cpu import vectormath as vm
from bedstone.backends.cpu.builder import Call, Int, KernelBuilder, itemsize
from bedstone.backends.cpu.elementwise import Nest, PointwiseAlgorithm, collapse, seconds_to_move
from bedstone.backends.cpu.irtypes import I32
from bedstone.backends.cpu.kernel import ENTRY
from bedstone.backends.cpu.target import Target
from bedstone.backends.cpu.tasks import Output, each_unit, unravel
from bedstone.backends.cpu.values import Float, IntLike, Mask
from bedstone.plan.device import Device
from bedstone.spec.normalization import LrnProblem
from bedstone.spec.problem import Problem
from bedstone.spec.tensor import TensorDesc

FIELD_BYTES = 16 * 1024  # of one field; a unit of more vectors would leave the first-level cache
FIELD_BYTES_MOST = 4 << 20  # of one field: what a thread's scratch may grow to
FIELDS = {"lrn_forward": 1, "lrn_backward": 3}
WIDEST_VECTOR_BYTES = 64  # of any target
UNROLLED_TAPS = 32  # windows up to here are straight code
ELEMENTS_PER_SECOND = 0.4e9  # of a core with a window of 5, fp32 (measured 0.3 to 0.6)


def negative_power(base: Float, beta: float) -> Float:
    """base^-beta; by square roots for the usual exponent."""
    k = base.k
    if beta == 0.75:
        root = k.unary("sqrt", base)
        return 1.0 / (root * k.unary("sqrt", root))
    return vm.power(base, -beta)


@dataclass
class Spot:
    """One vector of elements: its place in the fields, its addresses, which lanes exist."""

    place: IntLike  # bytes into a field, of the element itself when nothing is put before it
    addresses: list[IntLike]
    mask: Mask | None


class Lrn:
    """The kernel of either direction."""

    def __init__(self, k: KernelBuilder, problem: LrnProblem, call: Call) -> None:
        self.k, self.problem, self.lrn, self.call = k, problem, problem.lrn, call
        descs = [o.desc for o in problem.operands]
        self.dtype = problem.x.dtype.value
        self.compute = "float64" if self.dtype == "float64" else "float32"
        self.lanes, self.width = k.lanes(self.compute), itemsize(self.compute)
        self.size = itemsize(self.dtype)
        window = problem.lrn.axes(problem.x.rank)
        self.outer = _outer_nest(descs, window)
        # The window's axes, the finest of the output last.
        axes = sorted(window, key=lambda a: -abs(descs[-1].strides[a]))
        self.dims = [descs[0].dims[a] for a in axes]
        self.strides = [[d.strides[a] for a in axes] for d in descs]
        across = self.outer.strides[-1][-1] == 1 and self.outer.dims[-1] > 1
        self.along = self.strides[-1][-1] == 1 and self.dims[-1] > 1 and not across
        self.share = self.lrn.alpha / problem.reduction_length
        self.root = math.sqrt(abs(self.share))
        self._choose_block()

    def _choose_block(self) -> None:
        """The shape of a field: window axes with their border, and a block of columns."""
        border = self.lrn.size - 1
        self.field_dims = [d + border for d in self.dims]
        if self.along:
            self.block = 1
            whole = -(-self.dims[-1] // self.lanes) * self.lanes + border
            self.field_dims[-1] = whole
            self.unit_dims = self.outer.dims
        else:
            row = math.prod(self.field_dims) * self.lanes * self.width
            columns = self.outer.dims[-1]
            vectors = max(1, min(FIELD_BYTES // row, -(-columns // self.lanes)))
            self.block = vectors * self.lanes
            self.unit_dims = (*self.outer.dims[:-1], -(-columns // self.block))
        elements = math.prod(self.field_dims) * self.block
        self.field_bytes = -(-elements // self.lanes) * self.lanes * self.width
        steps = [self.block * self.width]
        for dim in reversed(self.field_dims[1:]):
            steps.append(steps[-1] * dim)
        self.steps = steps[::-1]  # bytes from index to index of each window axis

    def emit(self) -> None:
        """One parallel phase over the units."""
        k, direction = self.k, self.problem.direction
        scratch = FIELDS[direction] * self.field_bytes
        large = sum(o.desc.nbytes for o in self.problem.operands) > k.target.l3_bytes
        with each_unit(k, self.call.threads, math.prod(self.unit_dims), scratch, large) as (
            unit,
            memory,
        ):
            self.output = Output(k, self.call, self.dtype, self.lanes)
            self._enter(unit, memory)
            if direction == "lrn_forward":
                self._forward()
            else:
                self._backward()

    # The two directions --------------------------------------------------------------------------

    def _forward(self) -> None:
        self._squares()

        def write(spot: Spot) -> None:
            value = self._load(0, spot) * negative_power(self._base(spot), self.lrn.beta)
            self._store(spot, value)

        self._each(write)

    def _backward(self) -> None:
        k, beta, low = self.k, self.lrn.beta, (self.lrn.size - 1) // 2
        x, dy = 0, 1
        inner, factor = self.memory + self.field_bytes, self.memory + 2 * self.field_bytes
        self._squares()
        self._clear(inner)
        # The transposed window begins where the forward one ends.
        before = self._shift(self.lrn.size - 1 - low)

        def middle(spot: Spot) -> None:
            base = self._base(spot)
            power = negative_power(base, beta)
            k.store(power, factor + spot.place, self.compute)
            # In this order no factor leaves float32's range where the product is in it.
            product = (self._load(dy, spot) * power) * (self._load(x, spot) / base)
            k.store(product, inner + spot.place + before, self.compute, mask=spot.mask)

        self._each(middle)
        share = 2.0 * self.share * beta

        def write(spot: Spot) -> None:
            power = k.load(factor + spot.place, self.compute, self.lanes)
            through = self._window_sum(inner + spot.place) * self._load(x, spot)
            self._store(spot, self._load(dy, spot) * power - through * share)

        self._each(write)

    def _squares(self) -> None:
        """The first field: |alpha| / count * x^2, put where a window begins at its own index."""
        k = self.k
        self._clear(self.memory)
        before = self._shift((self.lrn.size - 1) // 2)

        def square(spot: Spot) -> None:
            x = self._load(0, spot) * self.root  # before the square, which may overflow
            k.store(x * x, self.memory + spot.place + before, self.compute, mask=spot.mask)

        self._each(square)

    def _base(self, spot: Spot) -> Float:
        total = self._window_sum(self.memory + spot.place)
        return total * math.copysign(1.0, self.lrn.alpha) + self.lrn.k

    def _shift(self, count: int) -> int:
        """Bytes of `count` indices along every window axis."""
        return sum(step * count for step in self.steps)

    # Fields --------------------------------------------------------------------------------------

    def _clear(self, field: IntLike) -> None:
        k = self.k
        zero = k.constant(0.0, self.compute, self.lanes)
        with k.loop(0, self.field_bytes, self.lanes * self.width) as place:
            k.store(zero, field + place, self.compute)

    def _window_sum(self, address: IntLike) -> Float:
        """The sum of a field over the window that begins at `address`."""
        k, size = self.k, self.lrn.size
        zero = k.constant(0.0, self.compute, self.lanes)
        if size ** len(self.steps) <= UNROLLED_TAPS:
            total = zero
            for index in itertools.product(range(size), repeat=len(self.steps)):
                offset = sum(i * step for i, step in zip(index, self.steps))
                total = total + k.load(address, self.compute, self.lanes, offset)
            return total
        total = k.variable(zero)

        def descend(address: IntLike, axis: int) -> None:
            if axis == len(self.steps):
                total.set(total.value + k.load(address, self.compute, self.lanes))
                return
            with k.loop(0, size) as i:
                descend(address + i * self.steps[axis], axis + 1)

        descend(address, 0)
        return total.value

    # The caller's tensors ------------------------------------------------------------------------

    def _enter(self, unit: IntLike, memory: Int) -> None:
        """Find the corner of a unit in every operand."""
        k = self.k
        self.memory = memory
        indices = unravel(unit, self.unit_dims)
        self.columns: IntLike = 1
        if not self.along:
            indices[-1] = indices[-1] * self.block
            total = self.outer.dims[-1]
            even = total % self.block == 0
            self.columns = self.block if even else k.min(total - indices[-1], self.block)
        self.corner: list[IntLike] = []
        for operand, pointer in enumerate(self.call.pointers):
            address: IntLike = pointer + self.outer.offsets[operand] * self.size
            for index, stride in zip(indices, self.outer.strides[operand]):
                address = address + index * (stride * self.size)
            self.corner.append(address)

    def _each(self, body: Callable[[Spot], None]) -> None:
        """body(spot) for every vector of the unit."""

        def descend(addresses: Sequence[IntLike], place: IntLike, axis: int) -> None:
            if axis == len(self.dims):
                self._columns(addresses, place, body)
            elif self.along and axis == len(self.dims) - 1:
                self._vectors(addresses, place, body)
            else:
                with self.k.loop(0, self.dims[axis]) as i:
                    moved = [a + i * (s[axis] * self.size) for a, s in zip(addresses, self.strides)]
                    descend(moved, place + i * self.steps[axis], axis + 1)

        descend(self.corner, 0, 0)

    def _vectors(
        self, addresses: Sequence[IntLike], place: IntLike, body: Callable[[Spot], None]
    ) -> None:
        """Lanes along the last window axis."""
        self._run([s[-1] for s in self.strides], self.dims[-1], addresses, place, body)

    def _columns(
        self, addresses: Sequence[IntLike], place: IntLike, body: Callable[[Spot], None]
    ) -> None:
        """Lanes across the last outer axis."""
        self._run([s[-1] for s in self.outer.strides], self.columns, addresses, place, body)

    def _run(
        self,
        strides: Sequence[int],
        count: IntLike,
        addresses: Sequence[IntLike],
        place: IntLike,
        body: Callable[[Spot], None],
    ) -> None:
        k, lanes = self.k, self.lanes
        self.lane_strides = strides

        def at(i: IntLike, mask: Mask | None) -> None:
            moved = [a + i * (s * self.size) for a, s in zip(addresses, strides)]
            body(Spot(place + i * self.width, moved, mask))

        # Masked stores are slow on some chips (by 20 times on an EPYC): one a run at most.
        rest = count % lanes
        whole = count - rest
        if not (isinstance(whole, int) and whole == 0):
            with k.loop(0, whole, lanes) as i:
                at(i, None)
        if not (isinstance(rest, int) and rest == 0):
            with k.if_(k.as_int(rest) > 0):
                at(whole, k.first_lanes(rest, lanes))

    def _load(self, operand: int, spot: Spot) -> Float:
        k, stride = self.k, self.lane_strides[operand]
        model = k.constant(0.0, self.compute, self.lanes)
        address = spot.addresses[operand]
        if stride == 1:
            return k.cast(k.load(address, self.dtype, self.lanes, mask=spot.mask), model)
        offsets = k.iota(self.lanes, I32) * (stride * self.size)
        return k.cast(k.gather(address, offsets, self.dtype, spot.mask), model)

    def _store(self, spot: Spot, value: Float) -> None:
        self.output.store(value, spot.addresses[-1], self.lane_strides[-1], spot.mask)


def _outer_nest(descs: Sequence[TensorDesc], window: Sequence[int]) -> Nest:
    """The axes that no window lies over, as few as they can be, in the output's order."""
    axes = [a for a in range(descs[0].rank) if a not in window]
    parts = [
        TensorDesc(tuple(d.dims[a] for a in axes), tuple(d.strides[a] for a in axes), d.dtype)
        for d in descs
    ]
    return collapse(parts)


def emit(target: Target, problem: LrnProblem) -> KernelBuilder:
    """The kernel of either direction."""
    k = KernelBuilder(target)
    with k.entry(ENTRY, pointers=len(problem.operands)) as call:
        if problem.x.size:
            Lrn(k, problem, call).emit()
    return k


class LocalResponse(PointwiseAlgorithm):
    """LRN in both regions and directions, any strides."""

    name = "cpu:window"
    emit = staticmethod(emit)

    def supports(self, problem: Problem, device: Device) -> str | None:
        if not isinstance(problem, LrnProblem):
            return "computes local response normalisation only"
        axes = problem.lrn.axes(problem.x.rank)
        plane = math.prod(problem.x.dims[a] + problem.lrn.size for a in axes)
        if plane * WIDEST_VECTOR_BYTES > FIELD_BYTES_MOST:
            return f"the elements under one row of windows exceed {FIELD_BYTES_MOST} bytes"
        return None

    def estimate(self, problem: Problem, device: Device) -> float:
        elements = problem.operands[0].desc.size
        return seconds_to_move(problem.bytes) + elements / ELEMENTS_PER_SECOND
