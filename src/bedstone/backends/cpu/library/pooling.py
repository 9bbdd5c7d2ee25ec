"""Pooling of any shape, maximum and average, forward and backward.

Vectors run along the channels where these are neighbours in memory, else along the windows of a
row that lie on the image whole; other windows are computed one by one. The taps on the image are
a range on each axis. Backward, a task owns some channels of an image and goes through the windows
in order, adding to dx: no two threads add to one element.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

from bedstone.backends.cpu.builder import F64, I64, Int
from bedstone.backends.cpu.irtypes import itemsize
from bedstone.backends.cpu.library import checks
from bedstone.backends.cpu.library.interface import DTYPES, ENUMS, MAX_AXES
from bedstone.backends.cpu.library.language import LibraryBuilder, Tensor, ceil_div
from bedstone.backends.cpu.values import IntLike

MODES = ENUMS["bs_pooling_mode"]
MAXIMUM, INCLUDING = MODES.index("max"), MODES.index("average_include_padding")
LEAST_RANK, MOST_RANK = 3, 5
UNIT_WINDOWS = 512  # of a task

Ranges = list[tuple[Int, Int]]


class Windows:
    """The windows of a problem whose numbers are known at run time."""

    def __init__(self, k: LibraryBuilder, dtype: str, pool: Int, x: Int, y: Int) -> None:
        self.k, self.dtype, self.item = k, dtype, itemsize(dtype)
        self.tx, self.ty = Tensor(k, x), Tensor(k, y)
        self.images, self.channels = self.tx.dim(0), self.tx.dim(1)
        names = ("size", "out", "window", "stride", "dilation", "low", "high")
        self.numbers: dict[str, list[Int]] = {name: [] for name in names}
        for j in range(MAX_AXES):
            axis = self.tx.rank - MAX_AXES + j
            exists, place = axis >= 2, k.max(axis - 2, 0)
            found = {
                "size": self.tx.dim(axis),
                "out": self.ty.dim(axis),
                "low": k.member("bs_pooling", pool, "padding", place * 2),
                "high": k.member("bs_pooling", pool, "padding", place * 2 + 1),
            }
            for name in ("window", "stride", "dilation"):
                found[name] = k.member("bs_pooling", pool, name, place)
            for name, value in found.items():
                missing = 0 if name in ("low", "high") else 1
                self.numbers[name].append(k.select(exists, value, missing))
        self.mode = k.member("bs_pooling", pool, "mode")

    def strides(self, tensor: Tensor) -> tuple[Int, Int, list[Int]]:
        """Bytes between images, channels and along the spatial axes."""
        k, spatial = self.k, []
        for j in range(MAX_AXES):
            axis = tensor.rank - MAX_AXES + j
            spatial.append(k.select(axis >= 2, tensor.stride(axis), 0) * self.item)
        return tensor.stride(0) * self.item, tensor.stride(1) * self.item, spatial

    def start(self, axis: int, window: IntLike) -> Int:
        """The position of a window's first tap."""
        return window * self.numbers["stride"][axis] - self.numbers["low"][axis]

    def inside(self, axis: int, window: IntLike) -> tuple[Int, Int]:
        """The range of taps on the image."""
        k, n, start = self.k, self.numbers, self.start(axis, window)
        step = n["dilation"][axis]
        first = ceil_div(k.max(-start, 0), step)
        last = ceil_div(k.max(n["size"][axis] - start, 0), step)
        return first, k.min(last, n["window"][axis])

    def divisor(self, windows: Sequence[IntLike], ranges: Ranges) -> Any:
        """How many taps of a window count in its mean."""
        k, n = self.k, self.numbers
        total = k.variable(1)
        for axis, (window, (first, last)) in enumerate(zip(windows, ranges)):
            reach = n["size"][axis] + n["high"][axis] - self.start(axis, window)
            counted = k.min(ceil_div(k.max(reach, 0), n["dilation"][axis]), n["window"][axis])
            on_image = k.max(last - first, 0)
            counted = k.select(self.mode.eq(INCLUDING), counted, on_image)
            total.set(total.value * counted)
        return k.cast(k.max(total.value, 1), k.constant(0.0, self.dtype))

    @contextlib.contextmanager
    def taps(
        self, address: Int, strides: Sequence[Int], windows: Sequence[IntLike], ranges: Ranges
    ) -> Iterator[Int]:
        """Loop over the taps of a window on the image: the address of each, from that of the
        image's channel."""
        k, steps = self.k, self.numbers["dilation"]
        with contextlib.ExitStack() as stack:
            for axis, (first, last) in enumerate(ranges):
                tap = stack.enter_context(k.loop(first, last))
                place = self.start(axis, windows[axis]) + tap * steps[axis]
                address = address + place * strides[axis]
            yield address


def emit_forward(k: LibraryBuilder, dtype: str) -> None:
    """pool_forward(pool, x, y, data of x and y, threads, alpha, beta)."""
    item, lanes = itemsize(dtype), k.lanes(dtype)
    with k.function(f"pool_forward_{dtype}", *[I64] * 6, F64, F64) as arguments:
        pool, x, y, source, target, threads, alpha, beta = arguments
        w = Windows(k, dtype, pool, x, y)
        (xn, xc, xs), (yn, yc, ys) = w.strides(w.tx), w.strides(w.ty)
        out = w.numbers["out"]
        step = w.numbers["stride"][2] * xs[2]  # from one window of a row to the next
        by_channel = xc.eq(item) & yc.eq(item) & (w.channels > 1)
        lane_x = k.select(by_channel, xc, step)
        lane_y = k.select(by_channel, yc, ys[2])

        def window(width: int | None, apart: bool, at: Int, to: Int, windows: Any) -> None:
            """One window, or `width` neighbours of it with the same taps on the image."""
            ranges = [w.inside(a, windows[a]) for a in range(MAX_AXES)]
            offsets = k.iota(lanes) * k.splat(lane_x, lanes) if apart else None
            found = k.variable(k.constant(0.0, dtype, width))
            with k.if_else(w.mode.eq(MAXIMUM)) as (largest, mean):

                def load(address: Int) -> Any:
                    if apart:
                        return k.gather(address, offsets, dtype)
                    return k.load(address, dtype, width)

                with largest:
                    found.set(k.constant(-math.inf, dtype, width))
                    with w.taps(at, xs, windows, ranges) as tap:
                        found.set(k.fmax(found.value, load(tap)))
                with mean:
                    with w.taps(at, xs, windows, ranges) as tap:
                        found.set(found.value + load(tap))
                    found.set(found.value / w.divisor(windows, ranges))
            if not apart:
                k.store_blended(found.value, alpha, beta, to, dtype)
                return
            for lane in range(lanes):
                one = k.extract(found.value, lane)
                k.store_blended(one, alpha, beta, to + lane * lane_y, dtype)

        # Rows: of channels for each window, or of windows for each channel.
        counts = [w.images, k.select(by_channel, 1, w.channels), out[0], out[1]]
        counts.append(k.select(by_channel, out[2], 1))
        length = k.select(by_channel, w.channels, out[2])
        size, low = w.numbers["size"][2], w.numbers["low"][2]
        extent = (w.numbers["window"][2] - 1) * w.numbers["dilation"][2] + 1
        stride = w.numbers["stride"][2]
        first_whole = k.select(by_channel, 0, k.min(ceil_div(low, stride), length))
        room = size + low - extent
        end_whole = k.select(room < 0, 0, k.min(room // stride + 1, length))
        end_whole = k.max(k.select(by_channel, length, end_whole), first_whole)
        near = lane_x.eq(item) & lane_y.eq(item)
        rows = k.variable(1)
        for count in counts:
            rows.set(rows.value * count)
        total = rows.value
        each = k.max(k.as_int(UNIT_WINDOWS) // k.max(length, 1), 1)
        with k.job(ceil_div(total, each), threads) as job, job.each_task() as task:
            begin = task * each
            with k.loop(begin, k.min(begin + each, total)) as row:
                left, indices = row, []
                for count in reversed(counts):
                    indices.insert(0, left % count)
                    left = left // count
                n, c, d, h, q = indices
                at = source + n * xn + c * xc
                to = target + n * yn + c * yc + d * ys[0] + h * ys[1] + q * ys[2]

                def place(i: IntLike) -> tuple[Int, Int, list[Any]]:
                    channel = k.select(by_channel, i, 0)
                    column = k.select(by_channel, q, i)
                    return at + channel * xc, to + i * lane_y, [d, h, column]

                vectors = (end_whole - first_whole) // lanes * lanes
                with k.loop(0, first_whole) as i:
                    window(None, False, *place(i))
                with k.loop(first_whole, first_whole + vectors, lanes) as i:
                    where = place(i)
                    with k.if_else(near) as (together, scattered):
                        with together:
                            window(lanes, False, *where)
                        with scattered:
                            window(lanes, True, *where)
                with k.loop(first_whole + vectors, length) as i:
                    window(None, False, *place(i))


def emit_backward(k: LibraryBuilder, dtype: str) -> None:
    """pool_backward(pool, x or dx, dy, dx, data of x, dy and dx, threads, alpha, beta)."""
    item, lanes = itemsize(dtype), k.lanes(dtype)
    with k.function(f"pool_backward_{dtype}", *[I64] * 8, F64, F64) as arguments:
        pool, x, dy, dx, x_data, dy_data, dx_data, threads, alpha, beta = arguments
        w = Windows(k, dtype, pool, dx, dy)
        (xn, xc, xs), (yn, yc, ys) = w.strides(Tensor(k, x)), w.strides(w.ty)
        dn, dc, ds = w.strides(w.tx)
        size, out = w.numbers["size"], w.numbers["out"]
        near = xc.eq(item) & yc.eq(item) & dc.eq(item)

        def planes(width: int | None, at: Int, source: Int, target: Int) -> None:
            """All windows of a channel, or of `width` neighbouring ones."""
            with k.loop(0, size[0]) as d, k.loop(0, size[1]) as h, k.loop(0, size[2]) as q:
                place = target + d * ds[0] + h * ds[1] + q * ds[2]
                zero = k.constant(0.0, dtype, width)
                start = k.variable(zero)
                with k.if_(beta.ne(0.0)):
                    start.set(k.load(place, dtype, width) * k.cast(beta, zero))
                k.store(start.value, place, dtype)
            with k.loop(0, out[0]) as d, k.loop(0, out[1]) as h, k.loop(0, out[2]) as q:
                windows = [d, h, q]
                ranges = [w.inside(a, windows[a]) for a in range(MAX_AXES)]
                value = k.load(source + d * ys[0] + h * ys[1] + q * ys[2], dtype, width)
                value = value * k.cast(alpha, value)
                with k.if_else(w.mode.eq(MAXIMUM)) as (largest, mean):
                    with largest:
                        add_to_maximum(width, at, target, windows, ranges, value)
                    with mean:
                        share = value / w.divisor(windows, ranges)
                        with w.taps(target, ds, windows, ranges) as place:
                            k.store(k.load(place, dtype, width) + share, place, dtype)

        def add_to_maximum(
            width: int | None, at: Int, target: Int, windows: Any, ranges: Any, value: Any
        ) -> None:
            """The first maximum in row-major order gets the gradient; NaN is larger than all."""
            none = k.splat(k.as_int(-1), width)
            best = k.variable(k.constant(-math.inf, dtype, width))
            where, number = k.variable(none), k.variable(0)
            with w.taps(at, xs, windows, ranges) as tap:
                found = k.load(tap, dtype, width)
                larger = (found > best.value) | (found.is_nan() & ~best.value.is_nan())
                larger = larger | where.value.eq(none)
                best.set(k.select(larger, found, best.value))
                where.set(k.select(larger, k.splat(number.value, width), where.value))
                number.set(number.value + 1)
            number.set(k.as_int(0))
            with w.taps(target, ds, windows, ranges) as place:
                chosen = where.value.eq(k.splat(number.value, width))
                with k.if_(chosen if width is None else k.any(chosen)):
                    old = k.load(place, dtype, width)
                    new = k.select(chosen, old + value, old)
                    k.store(new, place, dtype)
                number.set(number.value + 1)

        width = k.select(near, lanes, 1)
        blocks = ceil_div(w.channels, width)
        with k.job(w.images * blocks, threads) as job, job.each_task() as task:
            n, first = task // blocks, task % blocks * width
            bases = x_data + n * xn, dy_data + n * yn, dx_data + n * dn

            def channel(c: IntLike) -> list[Int]:
                return [b + c * s for b, s in zip(bases, (xc, yc, dc))]

            with k.if_else(near & (first + lanes <= w.channels)) as (vector, single):
                with vector:
                    planes(lanes, *channel(first))
                with single, k.loop(first, k.min(first + width, w.channels)) as c:
                    planes(None, *channel(c))


# Entry points ------------------------------------------------------------------------------------


def emit_pooling(k: LibraryBuilder) -> None:
    """bs_pooling_forward, _backward and _output_dims."""
    for dtype in DTYPES:
        emit_forward(k, dtype)
        emit_backward(k, dtype)
    _emit_check(k)
    with k.api("bs_pooling_output_dims") as call:
        pool, x, dims = call["pooling"], call["x"], call["dims"]
        k.require_all(pool, dims)
        checks.check_tensors(k, [], x, LEAST_RANK, MOST_RANK, checks.READ)
        k.require(call["rounding"].below(2), "bad_enum")
        k.passes(k.ask("check_pooling", pool, x))
        for axis in range(2):
            k.put(Tensor(k, x).dim(axis), dims, axis)
        with k.loop(2, Tensor(k, x).rank) as axis:
            size, low, high, extent, stride = _numbers(k, pool, x, axis)
            room = size + low + high - extent
            k.require(room >= 0, "bad_window")
            most = ceil_div(size + low, stride)
            up = k.min(ceil_div(room, stride) + 1, most)
            count = k.select(call["rounding"].eq(0), room // stride + 1, up)
            k.put(count, dims, axis)
    for direction in ("forward", "backward"):
        _emit_entry(k, direction)


def _numbers(k: LibraryBuilder, pool: Int, x: Int, axis: Int) -> tuple[Int, Int, Int, Int, Int]:
    place = axis - 2
    low, high = (k.member("bs_pooling", pool, "padding", place * 2 + side) for side in range(2))
    window, stride, gap = (
        k.member("bs_pooling", pool, name, place) for name in ("window", "stride", "dilation")
    )
    return Tensor(k, x).dim(axis), low, high, (window - 1) * gap + 1, stride


def _emit_check(k: LibraryBuilder) -> None:
    """check_pooling(pool, x), and check_pooled(pool, x, y): y has the images and channels of x,
    and each window starts on the image or its low padding, or lies on the padded image whole."""
    with k.answering("check_pooling", 2) as (pool, x):
        k.require(k.member("bs_pooling", pool, "mode").below(len(MODES)), "bad_enum")
        with k.loop(2, Tensor(k, x).rank) as axis:
            for name, least in (("window", 1), ("stride", 1), ("dilation", 1)):
                value = k.member("bs_pooling", pool, name, axis - 2)
                fits = (value >= least) & (value <= checks.LARGEST_PARAMETER)
                k.require(fits, "bad_window")
            for side in range(2):
                value = k.member("bs_pooling", pool, "padding", (axis - 2) * 2 + side)
                k.require((value >= 0) & (value <= checks.LARGEST_PARAMETER), "bad_window")
            dim = Tensor(k, x).dim(axis)
            k.require((dim >= 1) & (dim <= checks.LARGEST_PARAMETER), "bad_dims")
        k.give(0)
    with k.answering("check_pooled", 3) as (pool, x, y):
        tx, ty = Tensor(k, x), Tensor(k, y)
        k.require(tx.dim(0).eq(ty.dim(0)) & tx.dim(1).eq(ty.dim(1)), "mismatch")
        with k.loop(2, tx.rank) as axis:
            size, low, high, extent, stride = _numbers(k, pool, x, axis)
            rounded_down = k.max(size + low + high - extent, 0) // stride + 1
            most = k.max(ceil_div(size + low, stride), rounded_down)
            k.require((ty.dim(axis) >= 1) & (ty.dim(axis) <= most), "mismatch")
        k.give(0)


def _emit_entry(k: LibraryBuilder, direction: str) -> None:
    forward = direction == "forward"
    with k.api(f"bs_pooling_{direction}") as call:
        pool = call["pooling"]
        image, pooled = (call["x"], call["y"]) if forward else (call["dx"], call["dy"])
        tensors = (pooled, image) if forward else (image, pooled)  # the output first
        k.require_all(pool)
        checks.check_tensors(k, [tensors[1]], tensors[0], LEAST_RANK, MOST_RANK)
        k.passes(k.ask("check_pooling", pool, image))
        k.passes(k.ask("check_pooled", pool, image, pooled))
        names = ("y", "x") if forward else ("dx", "dy")
        checks.check_data(k, *((t, call[f"{n}_data"]) for t, n in zip(tensors, names)))
        threads = checks.check_threads(k, call["threads"])
        factors = call["alpha"], call["beta"]
        source, source_data = image, call["x_data"]
        if not forward:  # only a maximum's gradient reads x
            finds = k.member("bs_pooling", pool, "mode").eq(MAXIMUM)
            with k.if_(finds):
                checks.check_tensors(k, [call["x"]], image, LEAST_RANK, MOST_RANK)
                checks.require_same_dims(k, call["x"], image)
                checks.check_data(k, (call["x"], source_data))
            source = k.select(finds, call["x"], image)
            source_data = k.select(finds, source_data, call["dx_data"])
        with k.if_(k.ask("size_of", tensors[0]).eq(0)):
            k.give(0)
        if forward:
            given = [pool, image, pooled, source_data, call["y_data"]]
        else:
            data = source_data, call["dy_data"], call["dx_data"]
            given = [pool, source, pooled, image, *data]
        with k.if_else(Tensor(k, image).dtype.eq(0)) as branches:
            for branch, dtype in zip(branches, DTYPES):
                with branch:
                    k.call(f"pool_{direction}_{dtype}", *given, threads, *factors)
