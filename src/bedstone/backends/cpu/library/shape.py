"""A convolution's numbers at run time, its images with zeros around them, and its offset tables.

Every direction reads an image at (pixel, tap) and a filter at (filter, channel, tap). Where some
tap leaves the image, or a stride would put neighbours apart, the image is first copied into the
workspace with real zeros around it and, for vectors along pixels, its columns sorted by their
residue modulo the stride: pixels that are neighbours in the output are then neighbours in memory,
whatever the tap, and no product asks for bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bedstone.backends.cpu.builder import I64
from bedstone.backends.cpu.irtypes import itemsize
from bedstone.backends.cpu.library.interface import MAX_AXES
from bedstone.backends.cpu.library.language import (
    WORD,
    LibraryBuilder,
    Tensor,
    Workspace,
    ceil_div,
)
from bedstone.backends.cpu.values import Int, IntLike

FEW_CHANNELS = 8  # fewer than this in a row are not worth vectors over channels


@dataclass(frozen=True)
class Strides:
    """Bytes between images, channels and positions of a tensor (of a filter: filters, channels,
    taps). Column number q lies at (q % cut) * residue + (q // cut) * column."""

    outer: Any
    channel: Any
    rows: Sequence[Any]  # of the two outer spatial axes
    column: Any
    cut: Any = 1
    residue: Any = 0


@dataclass(frozen=True)
class Shape:
    """One convolution as a forward one, for a group: sizes of the three spatial axes, which count
    1 where the tensors have fewer; strides in bytes."""

    images: Int
    groups: Int
    channels: Int  # of the image, of one group
    filters: Int  # of one group
    size: Sequence[Int]
    window: Sequence[Int]
    out: Sequence[Int]
    pad: Sequence[Any]
    stride: Sequence[Any]
    dilation: Sequence[Any]
    image: Strides
    filter: Strides
    output: Strides
    filter_start: Any  # bytes to the tap that reads the first position

    @property
    def taps(self) -> Int:
        """Elements of the window."""
        return self.window[0] * self.window[1] * self.window[2]

    @property
    def positions(self) -> Int:
        """Pixels of one image of the output."""
        return self.out[0] * self.out[1] * self.out[2]

    @property
    def pixels(self) -> Int:
        """Pixels of the output, over the batch."""
        return self.images * self.positions

    @property
    def depth(self) -> Int:
        """Products of one result."""
        return self.channels * self.taps

    def reach(self, axis: int) -> Int:
        """Positions that taps reach along an axis, from the first one on."""
        last = (self.out[axis] - 1) * self.stride[axis]
        return last + (self.window[axis] - 1) * self.dilation[axis] + 1


def read_shape(
    k: LibraryBuilder, dtype: str, conv: Int, x: Int, w: Int, y: Int, turned: bool = False
) -> Shape:
    """The numbers of a convolution; `turned` (stride 1 only) gives its backward_data as the
    convolution of dy with the filter turned round and its two channel axes exchanged."""
    item = itemsize(dtype)
    tx, tw, ty = Tensor(k, x), Tensor(k, w), Tensor(k, y)
    groups = k.member("bs_convolution", conv, "groups")
    sizes: dict[str, list[Any]] = {n: [] for n in ("x", "w", "y", "xs", "ws", "ys")}
    numbers: dict[str, list[Any]] = {"stride": [], "dilation": [], "padding": []}
    for j in range(MAX_AXES):
        axis = tx.rank - MAX_AXES + j
        exists = axis >= 2
        for name, tensor in (("x", tx), ("w", tw), ("y", ty)):
            sizes[name].append(k.select(exists, tensor.dim(axis), 1))
            sizes[name + "s"].append(k.select(exists, tensor.stride(axis), 0) * item)
        place = k.max(axis - 2, 0)
        for name, default in (("stride", 1), ("dilation", 1), ("padding", 0)):
            found = k.member("bs_convolution", conv, name, place * (2 if name == "padding" else 1))
            numbers[name].append(k.select(exists, found, default))
    flip = k.member("bs_convolution", conv, "mode").ne(0)
    if turned:
        flip = ~flip
    start: Any = 0
    ws = []
    for stride, window in zip(sizes["ws"], sizes["w"]):
        start = k.select(flip, stride * (window - 1), 0) + start
        ws.append(k.select(flip, -stride, stride))
    channels, filters = tw.dim(1), tw.dim(0) // groups
    outer, inner = tw.stride(0) * item, tw.stride(1) * item

    def image(t: Tensor, strides: list[Any]) -> Strides:
        return Strides(t.stride(0) * item, t.stride(1) * item, strides[:2], strides[2])

    ends = image(tx, sizes["xs"]), image(ty, sizes["ys"])
    pads = numbers["padding"]
    if turned:
        channels, filters, outer, inner = filters, channels, inner, outer
        ends = ends[1], ends[0]
        sizes["x"], sizes["y"] = sizes["y"], sizes["x"]
        pads = [(r - 1) * d - p for r, d, p in zip(sizes["w"], numbers["dilation"], pads)]
    return Shape(
        tx.dim(0), groups, channels, filters, sizes["x"], sizes["w"], sizes["y"], pads,
        numbers["stride"], numbers["dilation"], ends[0], Strides(outer, inner, ws[:2], ws[2]),
        ends[1], start,
    )  # fmt: skip


def group_filter_bytes(s: Shape, turned: bool) -> Any:
    """From one group's filters to the next one's: along the filter tensor's first axis."""
    return s.channels * s.filter.channel if turned else s.filters * s.filter.outer


# Images with zeros around them -------------------------------------------------------------------


class Frame:
    """The image as products read it: in place, or its copy in the workspace. A copy is always
    made where `extent` says how many positions it has along each axis, with its columns sorted
    by their residue modulo `cut`."""

    def __init__(
        self, k: LibraryBuilder, dtype: str, shape: Shape, by_channel: bool, space: Workspace,
        extent: Sequence[IntLike] | None = None, cut: IntLike | None = None,
    ) -> None:  # fmt: skip
        self.k, self.dtype, self.shape, self.by_channel = k, dtype, shape, by_channel
        self.item, self.lanes = itemsize(dtype), k.lanes(dtype)
        self.extent = extent or [shape.reach(a) for a in range(MAX_AXES)]
        self.cut = shape.stride[2] if cut is None else cut
        leaves = k.as_int(0).ne(0) if extent is None else k.as_int(1).ne(0)
        for size, pad, extent in zip(shape.size, shape.pad, self.extent):
            leaves = k.as_int(pad).ne(0) | (extent - pad > size) | leaves
        if not by_channel:
            leaves = ((shape.stride[2] > 1) & (shape.window[2] > 1)) | leaves
        self.is_copy = leaves
        laid = self._lay_out()
        total = shape.images * laid.outer
        self.address = space.take(k.select(leaves, total, 0))
        own = shape.image

        def either(a: Any, b: Any) -> Int:
            return k.select(leaves, k.as_int(a), k.as_int(b))

        self.laid = laid
        self.strides = Strides(
            either(laid.outer, own.outer), either(laid.channel, own.channel),
            [either(a, b) for a, b in zip(laid.rows, own.rows)],
            either(laid.column, own.column), either(laid.cut, 1), either(laid.residue, 0),
        )  # fmt: skip

    def _lay_out(self) -> Strides:
        """Dense strides of the copy: images, channels, rows, columns by residue, with room for a
        vector after each channel; or images, rows, columns, channels."""
        s, (depth, height, width) = self.shape, self.extent
        if self.by_channel:
            column = s.channels * s.groups * self.item
            row = width * column
            return Strides(depth * height * row, self.item, (height * row, row), column)
        cut = self.cut
        residue = ceil_div(width, cut) * self.item
        row = residue * cut
        plane = depth * height * row + self.lanes * self.item
        return Strides(
            plane * (s.channels * s.groups), plane, (height * row, row), self.item, cut, residue
        )

    def fill(self, source: IntLike, threads: Int) -> Int:
        """Copy, if that is wanted, in parallel; the address of the image's first position."""
        k = self.k
        with k.if_(self.is_copy):
            copy = self._copy_rows if self.by_channel else self._copy_planes
            copy(source, threads)
        return k.select(self.is_copy, self.address, source)

    def _bounds(self, axis: int) -> tuple[Int, Int]:
        """Source positions along an axis that fall into the frame."""
        k, pad = self.k, self.shape.pad[axis]
        return k.max(-k.as_int(pad), 0), k.min(self.shape.size[axis], self.extent[axis] - pad)

    def _copy_planes(self, source: IntLike, threads: Int) -> None:
        k, s, laid = self.k, self.shape, self.laid
        channels = s.channels * s.groups
        bounds = [self._bounds(a) for a in range(MAX_AXES)]
        first, last = bounds[2][0] + s.pad[2], k.max(bounds[2][1] + s.pad[2], 0)
        step = s.image.column * laid.cut
        with k.each(s.images * channels, threads) as plane:
            to = self.address + plane * laid.channel
            at = source + plane // channels * s.image.outer
            at = at + plane % channels * s.image.channel
            k.external("memset", I64, to.ir, k.to_ir(0), k.to_ir(laid.channel))
            with k.loop(*bounds[0]) as d, k.loop(*bounds[1]) as h:
                row = at + d * s.image.rows[0] + h * s.image.rows[1] - s.pad[2] * s.image.column
                target = to + (d + s.pad[0]) * laid.rows[0] + (h + s.pad[1]) * laid.rows[1]
                with k.loop(0, laid.cut) as r:
                    low = (first - r + (laid.cut - 1)) // laid.cut
                    high = k.max(last - r + (laid.cut - 1), 0) // laid.cut
                    k.call(
                        f"copy_run_{self.dtype}", row + r * s.image.column + low * step, step,
                        target + r * laid.residue + low * self.item, high - low,
                    )  # fmt: skip

    def _copy_rows(self, source: IntLike, threads: Int) -> None:
        k, s, laid = self.k, self.shape, self.laid
        channels = s.channels * s.groups
        depth, height, width = self.extent
        low, high = self._bounds(2)
        with k.each(s.images * depth * height, threads) as row:
            to = self.address + row * laid.rows[1]
            h = row % height - s.pad[1]
            d = row // height % depth - s.pad[0]
            k.external("memset", I64, to.ir, k.to_ir(0), k.to_ir(laid.rows[1]))
            with k.if_(d.below(s.size[0]) & h.below(s.size[1])):
                at = source + row // (height * depth) * s.image.outer
                at = at + d * s.image.rows[0] + h * s.image.rows[1]
                with k.loop(low, high) as w:
                    k.call(
                        f"copy_run_{self.dtype}", at + w * s.image.column, s.image.channel,
                        to + (w + s.pad[2]) * laid.column, channels,
                    )  # fmt: skip


def emit_copy_run(k: LibraryBuilder, dtype: str) -> None:
    """copy_run(source, its stride, target, count): elements laid side by side."""
    item, lanes = itemsize(dtype), k.lanes(dtype)
    with k.function(f"copy_run_{dtype}", *[I64] * 4) as (source, step, target, count):
        done = k.variable(0)
        with k.if_(step.eq(item) & (count >= lanes)):
            with k.loop(0, count - lanes + 1, lanes) as i:
                k.store(k.load(source + i * item, dtype, lanes), target + i * item, dtype)
            # The last vector may overlap the one before.
            last = (count - lanes) * item
            k.store(k.load(source + last, dtype, lanes), target + last, dtype)
            done.set(count)
        with k.loop(done.value, count) as i:
            k.store(k.load(source + i * step, dtype), target + i * item, dtype)


# Tables -------------------------------------------------------------------------------------------


def emit_fill_offsets(k: LibraryBuilder) -> None:
    """fill_offsets(table, outer count and stride, two rows' counts and strides, columns: count,
    step, cut, residue, column stride, inner count and stride): all sums, the last index fastest."""
    with k.function("fill_offsets", *[I64] * 14) as arguments:
        table, outer, outer_step, d, d_step, h, h_step = arguments[:7]
        w, w_step, cut, residue, column, inner, inner_step = arguments[7:]
        at = k.variable(table)
        with k.loop(0, outer) as i0, k.loop(0, d) as i1, k.loop(0, h) as i2:
            base = i0 * outer_step + i1 * d_step + i2 * h_step

            def fill(offset_of: Callable[[Int], Int], base: Int = base) -> None:
                with k.loop(0, w) as i3:
                    offset = base + offset_of(i3 * w_step)
                    with k.loop(0, inner) as i4:
                        k.put(offset + i4 * inner_step, at.value)
                        at.set(at.value + WORD)

            with k.if_else(cut.eq(1)) as (plain, apart):  # divisions take as long as all the rest
                with plain:
                    fill(lambda place: place * column)
                with apart:
                    fill(lambda place: place % cut * residue + place // cut * column)


def fill_pixels(k: LibraryBuilder, table: Int, s: Shape, strides: Strides, steps: Any) -> None:
    """Offsets of all output pixels in a tensor; `steps`: positions between pixels."""
    rows = [step * stride for step, stride in zip(steps, strides.rows)]
    k.call(
        "fill_offsets", table, s.images, strides.outer, s.out[0], rows[0], s.out[1], rows[1],
        s.out[2], steps[2], strides.cut, strides.residue, strides.column, 1, 0,
    )  # fmt: skip


def fill_taps(
    k: LibraryBuilder, table: Int, s: Shape, strides: Strides, steps: Any, by_channel: bool
) -> None:
    """Offsets of (channel, tap), or with `by_channel` (tap, channel), in a tensor."""
    rows = [step * stride for step, stride in zip(steps, strides.rows)]
    first = (1, 0) if by_channel else (s.channels, strides.channel)
    final = (s.channels, strides.channel) if by_channel else (1, 0)
    k.call(
        "fill_offsets", table, *first, s.window[0], rows[0], s.window[1], rows[1], s.window[2],
        steps[2], strides.cut, strides.residue, strides.column, *final,
    )  # fmt: skip


def fill_line(k: LibraryBuilder, table: Int, count: Int, stride: IntLike) -> None:
    """Offsets 0, stride, 2 * stride, ..."""
    k.call("fill_offsets", table, 1, 0, 1, 0, 1, 0, count, 1, 1, 0, stride, 1, 0)
