"""From tensors with any strides to the packed operands of the micro-kernel, and back.

A matrix index such as "pixel" is a flattened run over axes of a tensor. `Lanes` says where
consecutive numbers of such an index lie: as a few masked runs of neighbours (or of every second
neighbour) where the finest axis allows it, else as offsets to gather from. It also knows the
coordinates along axes whose bounds matter, so that padding is filled with real zeros and never
read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bedstone.backends.cpu.builder import KernelBuilder
from bedstone.backends.cpu.irtypes import I32, I64, itemsize
from bedstone.backends.cpu.values import Float, Int, IntLike, Mask, MaskLike

MAX_RUNS = 4  # masked loads of more runs cost what a gather does
MAX_RUNS_16_BITS = 8  # for which no processor has a gather
INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Span:
    """One axis of a flattened index: its size, its stride in bytes, and whether the coordinate
    along it is wanted."""

    size: int
    stride: int
    wanted: bool = False


def joined(spans: Sequence[Span]) -> list[Span]:
    """Neighbours that step alike made one; axes of one element dropped."""
    found: list[Span] = []
    for span in spans:
        if span.size == 1 and not span.wanted:
            continue
        before = found[-1] if found else None
        plain = before is not None and not before.wanted and not span.wanted
        if plain and before.stride == span.size * span.stride:
            found[-1] = Span(before.size * span.size, span.stride)
            continue
        found.append(span)
    return found or [Span(1, 0)]


def place(k: KernelBuilder, number: IntLike, spans: Sequence[Span]) -> tuple[IntLike, list[Any]]:
    """(byte offset, coordinates along all spans) of one number of the flattened index."""
    coordinates: list[IntLike] = []
    for span in reversed(spans[1:]):
        coordinates.append(number % span.size)
        number = number // span.size
    coordinates.append(number)
    coordinates.reverse()
    offset: IntLike = 0
    for coordinate, span in zip(coordinates, spans):
        offset = coordinate * span.stride + offset
    return offset, coordinates


class Lanes:
    """`lanes` consecutive numbers of a flattened index from `first` on, as places in a tensor.

    total   how many numbers the index has: lanes past it are outside
    ragged  False if no lane is ever outside
    item    bytes of an element
    """

    def __init__(
        self,
        k: KernelBuilder,
        first: IntLike,
        lanes: int,
        spans: Sequence[Span],
        total: IntLike,
        ragged: bool,
        item: int,
    ) -> None:
        self.k, self.lanes, self.item = k, lanes, item
        self.spans = list(spans)
        first = k.as_int(first)
        self.inside = (k.iota(lanes) < total - first) if ragged else None
        if ragged:
            # Addresses stay in the tensor even where no lane is inside: a masked access to
            # memory that is not mapped does nothing, but takes 700 cycles.
            first = k.min(first, total - 1)
        self.first, self.total = first, total
        self.base, self.origin = place(k, first, self.spans)
        self._spread()
        inner = self.spans[-1]
        runs = 1 if len(self.spans) == 1 else 1 + -(-(lanes - 1) // inner.size)
        # Elements from one lane to the next where a run is read by whole vectors, else 0.
        self.step = inner.stride // item if inner.stride in (item, 2 * item) else 0
        most = MAX_RUNS_16_BITS if item == 2 else MAX_RUNS
        self.step = self.step if runs <= most else 0
        self.whole: MaskLike = self.step > 0 and runs == 1
        if self.step:
            self._make_runs(runs)
            if runs > 1:
                self.whole = self.origin[-1] + lanes <= inner.size
            if ragged:
                self.whole = (first + lanes <= total) & self.whole
        if self.step != 1:
            self._make_offsets()

    def _spread(self) -> None:
        """Coordinates of all lanes, counting up from the first one's and carrying over."""
        k = self.k
        carry = k.iota(self.lanes, I32)
        self.coordinates: list[Int] = []
        self.carries: list[Int] = []  # what an axis passes on to the next coarser one
        for axis in range(len(self.spans) - 1, -1, -1):
            start = k.splat(k.resize(k.as_int(self.origin[axis]), I32), self.lanes)
            value = start + carry
            if axis:
                carry = value // self.spans[axis].size
                value = value - carry * self.spans[axis].size
                self.carries.append(carry)
            self.coordinates.append(value)
        self.coordinates.reverse()

    def _make_runs(self, runs: int) -> None:
        k, inner = self.k, self.spans[-1]
        self.runs: list[tuple[IntLike, Mask | None]] = [(self.base, None)]
        if runs > 1:
            carry, row = self.carries[0], self.first // inner.size
            rows = (self.total + (inner.size - 1)) // inner.size
            self.runs = [(self.base, carry.eq(0))]
            for j in range(1, runs):
                offset, _ = place(k, row + j, self.spans[:-1])
                before = j * inner.size - self.origin[-1]  # lanes of the earlier runs
                offset = k.select(row + j < rows, offset - before * inner.stride, self.base)
                self.runs.append((offset, carry.eq(j)))

    def _make_offsets(self) -> None:
        k = self.k
        reach = sum(min(s.size, self.lanes) * abs(s.stride) for s in self.spans)
        element = I32 if reach <= INT32_MAX else I64
        total: Any = None
        for value, start, span in zip(self.coordinates, self.origin, self.spans):
            steps = k.resize(value - k.resize(k.as_int(start), I32), element)
            part = steps * span.stride
            total = part if total is None else total + part
        self.offsets = total

    def _mask(self, *masks: Mask | None) -> Mask | None:
        found: Any = self.inside
        for mask in masks:
            if mask is not None:
                found = mask if found is None else found & mask
        return found

    def reader(self, dtype: str, valid: Mask | None = None) -> Callable[[IntLike], Float]:
        """A function from the address of number 0 to the lanes' elements; lanes that are left
        out read as 0. What does not depend on the address is computed here, not in its calls."""
        k = self.k
        if not self.step:
            mask = self._mask(valid)
            return lambda address: k.gather(address + self.base, self.offsets, dtype, mask)
        runs = [(offset, self._mask(run, valid)) for offset, run in self.runs]
        if self.step == 2:
            pairs = [(offset, *self._spread_mask(mask)) for offset, mask in runs]
            return lambda address: self._read_pairs(address, pairs, dtype)

        def read(address: IntLike) -> Float:
            value: Any = None
            for offset, mask in runs:
                value = k.load(address + offset, dtype, self.lanes, mask=mask, otherwise=value)
            return value

        return read

    def _spread_mask(self, mask: Mask | None) -> tuple[Mask, Mask]:
        """The mask over the elements that two vectors cover: from the first lane's on, and up to
        the last lane's (so that nothing beyond it is touched)."""
        k, lanes = self.k, self.lanes
        mask = mask or k.lane_mask([True] * lanes)
        none = k.lane_mask([False] * lanes)
        low = [i // 2 if i % 2 == 0 else lanes for i in range(lanes)]
        high = [(i + lanes - 1) // 2 if i % 2 else lanes for i in range(lanes)]
        return k.shuffle(mask, none, low), k.shuffle(mask, none, high)

    def _read_pairs(
        self, address: IntLike, runs: Sequence[tuple[IntLike, Any, Any]], dtype: str
    ) -> Float:
        """Every second element, from two vectors."""
        k, lanes = self.k, self.lanes
        low = high = None
        for offset, low_mask, high_mask in runs:
            at = address + offset
            second = at + (lanes - 1) * self.item
            low = k.load(at, dtype, lanes, mask=low_mask, otherwise=low)
            high = k.load(second, dtype, lanes, mask=high_mask, otherwise=high)
        return k.shuffle(low, high, [2 * i + (2 * i >= lanes) for i in range(lanes)])

    def load(self, address: IntLike, dtype: str, valid: Mask | None = None) -> Float:
        """The lanes' elements, `address` being that of number 0; lanes left out read as 0."""
        return self.reader(dtype, valid)(address)

    def load_whole(self, address: IntLike, dtype: str) -> Float:
        """As `load`, where `whole` holds."""
        if self.step == 2:
            return self._read_pairs(address, [(self.base, None, None)], dtype)
        return self.k.load(address + self.base, dtype, self.lanes)

    def store(self, value: Float, address: IntLike, dtype: str, valid: Mask | None = None) -> None:
        """Write the lanes that are inside and valid."""
        if self.step != 1:
            mask = self._mask(valid)
            self.k.scatter(value, address + self.base, self.offsets, dtype, mask)
            return
        for offset, run in self.runs:
            self.k.store(value, address + offset, dtype, mask=self._mask(run, valid))

    def add(self, value: Float, address: IntLike, dtype: str) -> None:
        """Add to what is there, lane by lane. All runs are read before the first is written: a
        masked read waits for an earlier write near it even where no lane is common."""
        self.store(self.load(address, dtype) + value, address, dtype)

    def add_whole(self, value: Float, address: IntLike, dtype: str) -> None:
        """As `add`, where `whole` holds."""
        self.store_whole(self.load_whole(address, dtype) + value, address, dtype)

    def store_whole(self, value: Float, address: IntLike, dtype: str) -> None:
        """As `store`, where `whole` holds."""
        if self.step == 2:
            self.k.scatter(value, address + self.base, self.offsets, dtype)
        else:
            self.k.store(value, address + self.base, dtype)


def copy_vectors(
    k: KernelBuilder,
    vectors: Sequence[Lanes],
    valid: Sequence[Mask | None],
    walk: Callable[[Callable[[IntLike, IntLike], None]], None],
    dtype: str,
    sum_dtype: str,
) -> None:
    """The elements at adjacent vectors of places, stored side by side; lanes that are not valid
    become zeros. `walk(copy)` loops over what is to be copied: copy(source, target), addresses."""
    vector_bytes = vectors[0].lanes * itemsize(sum_dtype)

    def copy(read: Callable[[int], Callable[[IntLike], Float]], numbers: Sequence[int]) -> None:
        readers = [read(j) for j in numbers]

        def one(source: IntLike, target: IntLike) -> None:
            loaded = [reader(source) for reader in readers]
            for j, value in zip(numbers, loaded):
                k.store(value, target, sum_dtype, offset=j * vector_bytes)

        walk(one)

    def plain(j: int) -> Callable[[IntLike], Float]:
        return lambda at: vectors[j].load_whole(at, dtype)

    def masked(j: int) -> Callable[[IntLike], Float]:
        return vectors[j].reader(dtype, valid[j])

    whole = [
        lanes.whole if mask is None else k.all(mask) & lanes.whole
        for lanes, mask in zip(vectors, valid)
    ]
    every: MaskLike = True
    for one in whole:
        every = every & one
    numbers = range(len(vectors))
    if every is False:
        copy(masked, numbers)
        return
    with k.if_else(every) as (together, apart):
        with together:
            copy(plain, numbers)
        with apart:
            for j in numbers:
                with k.if_else(whole[j]) as (simple, ragged):
                    with simple:
                        copy(plain, [j])
                    with ragged:
                        copy(masked, [j])


def load_strided(
    k: KernelBuilder, address: IntLike, stride: int, lanes: int, dtype: str, mask: Mask | None
) -> Float:
    """A vector of elements `stride` bytes apart."""
    if stride == itemsize(dtype):
        return k.load(address, dtype, lanes, mask=mask)
    return k.gather(address, k.iota(lanes) * stride, dtype, mask)


def store_strided(
    k: KernelBuilder, value: Float, address: IntLike, stride: int, dtype: str, mask: Mask | None
) -> None:
    """Write a vector to elements `stride` bytes apart."""
    if stride == itemsize(dtype):
        k.store(value, address, dtype, mask=mask)
    else:
        k.scatter(value, address, k.iota(value.lanes) * stride, dtype, mask)


def blend_strided(
    k: KernelBuilder,
    value: Float,
    alpha: Float,
    beta: Float,
    address: IntLike,
    stride: int,
    dtype: str,
    mask: Mask | None,
) -> None:
    """alpha * value + beta * old to elements `stride` bytes apart; beta 0 reads nothing."""
    result = k.variable(value * k.cast(alpha, value))
    with k.if_(beta.ne(0.0)):
        old = load_strided(k, address, stride, value.lanes, dtype, mask)
        result.set(k.fma(old, k.cast(beta, value), result.value))
    store_strided(k, result.value, address, stride, dtype, mask)


def fill_zero(k: KernelBuilder, address: IntLike, count: IntLike, dtype: str, lanes: int) -> None:
    """`count` zeros at `address`."""
    item = itemsize(dtype)
    zero = k.constant(0.0, dtype, lanes)
    with k.loop(0, count, lanes) as i:
        k.store(zero, address + i * item, dtype, mask=k.first_lanes(count - i, lanes))
