"""The entry points of convolution: what is checked, and which kernel takes a call."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from bedstone.backends.cpu.builder import F64, I64, Float
from bedstone.backends.cpu.irtypes import itemsize
from bedstone.backends.cpu.library import checks
from bedstone.backends.cpu.library.bias import emit_bias_gradient
from bedstone.backends.cpu.library.contraction import Product
from bedstone.backends.cpu.library.convolution import FilterGradient, Forward, Scatter
from bedstone.backends.cpu.library.interface import DTYPES, ENUMS
from bedstone.backends.cpu.library.language import LibraryBuilder, Tensor, ceil_div
from bedstone.backends.cpu.library.shape import FEW_CHANNELS, emit_copy_run, emit_fill_offsets
from bedstone.backends.cpu.library.winograd import OUTPUTS, WINDOW, Winograd, emit_winograd
from bedstone.backends.cpu.values import Int, Mask

LEAST_RANK, MOST_RANK = 3, 5
LARGEST_ELEMENTS = 2.0**44  # of x, w or y, and of x with its padding: sizes of tables fit 62 bits
# Backward_data of stride 1 is a convolution of dy where that meets little padding.
GATHER_PIXELS = 1.15
DIRECTIONS = ENUMS["bs_direction"]
# The model of convolution/winograd.py, in flops of the peak rate for a patch of 2x2 outputs, a
# channel and a filter: what a tap costs by the definition, and what a 3x3 piece of the window does
# (16 products at 0.9 of the rate); reading a channel, writing an output, transforming a filter.
TAP_FLOPS, PIECE_FLOPS = 8.0, 36.0
SCATTERED = 1.3  # what scattering, or gathering with padding, costs against plain products
CHUNK_FLOPS = 400.0  # to add a chunk's sums to those in memory, however few its channels
READ_FLOPS, WRITE_FLOPS, FILTER_FLOPS = 200.0, 900.0, 600.0


def emit_convolution(k: LibraryBuilder) -> None:
    """Kernels of both dtypes, checks, entry points."""
    emit_fill_offsets(k)
    for dtype in DTYPES:
        product = Product(k, dtype)
        product.emit()
        emit_copy_run(k, dtype)
        emit_blend_run(k, dtype)
        emit_winograd(k, product)
        for turned in (False, True):
            Winograd(k, product, turned).emit()
        for by_channel in (False, True):
            for turned in (False, True):
                Forward(k, product, by_channel, turned).emit()
            FilterGradient(k, product, by_channel).emit()
        Scatter(k, product).emit()
        emit_bias_gradient(k, dtype)
    _emit_checks(k)
    _emit_sizes(k)
    for direction in DIRECTIONS:
        _emit_entry(k, direction)
    _emit_bias_entry(k)


def emit_blend_run(k: LibraryBuilder, dtype: str) -> None:
    """blend_run(source, target, its stride, count, alpha, beta): y = alpha * x + beta * y, x side
    by side."""
    item, lanes = itemsize(dtype), k.lanes(dtype)
    with k.function(f"blend_run_{dtype}", *[I64] * 4, F64, F64) as arguments:
        source, target, step, count, alpha, beta = arguments
        whole = k.select(step.eq(item), count - count % lanes, 0)
        with k.loop(0, whole, lanes) as i:
            value = k.load(source + i * item, dtype, lanes)
            k.store_blended(value, alpha, beta, target + i * item, dtype)
        with k.loop(whole, count) as i:
            value = k.load(source + i * item, dtype)
            k.store_blended(value, alpha, beta, target + i * step, dtype)


# Checks ------------------------------------------------------------------------------------------


def _number(k: LibraryBuilder, value: Int) -> Float:
    return k.cast(value, Float(k, ir.Constant(F64, 0.0)))


def padded_out(k: LibraryBuilder, size: Int, window: Int, extent: Int, pads: Int, step: Int) -> Int:
    """Windows along an axis; 0 or less if none fits."""
    room = size + pads - extent
    return k.select(room < 0, 0, room // step + 1)


def _emit_checks(k: LibraryBuilder) -> None:
    """check_convolution(conv, x, w): ranks are equal already. out_size(conv, x, w, axis)."""
    with k.answering("out_size", 4) as (conv, x, w, axis):
        place = axis - 2
        low = k.member("bs_convolution", conv, "padding", place * 2)
        high = k.member("bs_convolution", conv, "padding", place * 2 + 1)
        step = k.member("bs_convolution", conv, "stride", place)
        gap = k.member("bs_convolution", conv, "dilation", place)
        window = Tensor(k, w).dim(axis)
        extent = (window - 1) * gap + 1
        k.give(padded_out(k, Tensor(k, x).dim(axis), window, extent, low + high, step))
    with k.answering("check_convolution", 3) as (conv, x, w):
        tx, tw = Tensor(k, x), Tensor(k, w)
        k.require(k.member("bs_convolution", conv, "mode").below(2), "bad_enum")
        groups = k.member("bs_convolution", conv, "groups")
        k.require((groups >= 1) & (groups <= checks.LARGEST_PARAMETER), "bad_window")
        padded = k.variable(_number(k, tx.dim(0) * tx.dim(1)) + 1.0)
        filters = k.variable(_number(k, tw.dim(0) * tw.dim(1)) + 1.0)
        with k.loop(0, tx.rank) as axis:
            for tensor in (tx, tw):
                k.require(tensor.dim(axis) <= checks.LARGEST_PARAMETER, "bad_dims")
        with k.loop(2, tx.rank) as axis:
            place = axis - 2
            for name, least in (("stride", 1), ("dilation", 1)):
                value = k.member("bs_convolution", conv, name, place)
                fits = (value >= least) & (value <= checks.LARGEST_PARAMETER)
                k.require(fits, "bad_window")
            total = k.variable(tx.dim(axis))
            for side in range(2):
                value = k.member("bs_convolution", conv, "padding", place * 2 + side)
                k.require((value >= 0) & (value <= checks.LARGEST_PARAMETER), "bad_window")
                total.set(total.value + value)
            k.require(tw.dim(axis) >= 1, "bad_window")
            k.require(k.ask("out_size", conv, x, w, axis) >= 1, "bad_window")
            padded.set(padded.value * (_number(k, total.value) + 1.0))
            filters.set(filters.value * _number(k, tw.dim(axis)))
        k.require(padded.value < LARGEST_ELEMENTS, "bad_dims")
        k.require(filters.value < LARGEST_ELEMENTS, "bad_dims")
        k.require((tx.dim(1) % groups).eq(0) & (tw.dim(0) % groups).eq(0), "mismatch")
        k.require((tx.dim(1) // groups).eq(tw.dim(1)), "mismatch")
        k.give(0)
    with k.answering("check_output", 4) as (conv, x, w, y):
        tx, tw, ty = Tensor(k, x), Tensor(k, w), Tensor(k, y)
        k.require(ty.dim(0).eq(tx.dim(0)) & ty.dim(1).eq(tw.dim(0)), "mismatch")
        with k.loop(2, tx.rank) as axis:
            k.require(ty.dim(axis).eq(k.ask("out_size", conv, x, w, axis)), "mismatch")
        k.require(_number(k, k.ask("size_of", y)) < LARGEST_ELEMENTS, "bad_dims")
        k.give(0)
    with k.api("bs_convolution_output_dims") as call:
        conv, x, w, dims = (call[n] for n in ("convolution", "x", "w", "dims"))
        k.require_all(conv, dims)
        checks.check_tensors(k, [x], w, LEAST_RANK, MOST_RANK)
        k.passes(k.ask("check_convolution", conv, x, w))
        k.put(Tensor(k, x).dim(0), dims, 0)
        k.put(Tensor(k, w).dim(0), dims, 1)
        with k.loop(2, Tensor(k, x).rank) as axis:
            k.put(k.ask("out_size", conv, x, w, axis), dims, axis)


def _check(k: LibraryBuilder, conv: Int, x: Int, w: Int, y: Int, written: str) -> None:
    k.require_all(conv)
    tensors = {"x": x, "w": w, "y": y}
    output, use = (tensors.pop(written), checks.WRITTEN) if written else (y, checks.READ)
    checks.check_tensors(k, list(tensors.values()), output, LEAST_RANK, MOST_RANK, use)
    k.passes(k.ask("check_convolution", conv, x, w))
    k.passes(k.ask("check_output", conv, x, w, y))


# Choice ------------------------------------------------------------------------------------------


def _runs_by_channel(k: LibraryBuilder, tensor: Int, groups: Int) -> Mask:
    """Whether vectors over the channels of an image are better than over its pixels."""
    t = Tensor(k, tensor)
    neighbours = t.stride(1).eq(1) & t.stride(t.rank - 1).ne(1)
    return neighbours & (t.dim(1) >= groups * FEW_CHANNELS)


def _has_few_products(
    k: LibraryBuilder, conv: Int, image: Int, w: Int, out: Int, y: Int, scatters: bool
) -> Mask:
    """Whether Winograd's method takes the call, and its transforms cost less than they spare of
    what the definition spends: a product for every tap and pixel of y."""
    ti, tw, to = Tensor(k, image), Tensor(k, w), Tensor(k, out)
    takes = ti.rank.eq(4) & ti.stride(3).eq(1) & to.stride(3).eq(1)
    taps, pieces = tw.dim(2) * tw.dim(3), ceil_div(tw.dim(2), WINDOW) * ceil_div(tw.dim(3), WINDOW)
    taps, pieces = _number(k, taps), _number(k, pieces)
    for axis in range(2):
        for name in ("stride", "dilation"):
            takes = takes & k.member("bs_convolution", conv, name, axis).eq(1)
    groups = k.member("bs_convolution", conv, "groups")
    channels, filters = (_number(k, t.dim(1) // groups) for t in (ti, to))
    across, down = (ceil_div(to.dim(axis), OUTPUTS) for axis in (2, 3))
    patches = _number(k, to.dim(0) * across * down)
    y_pixels = Tensor(k, y).dim(2) * Tensor(k, y).dim(3)
    piece = PIECE_FLOPS + CHUNK_FLOPS / channels  # (of no channels: infinity or NaN, not taken)
    direct = TAP_FLOPS * taps * (_number(k, to.dim(0) * y_pixels) * (1 / OUTPUTS**2))
    if scatters:
        direct = direct * SCATTERED
    spared = (direct - piece * pieces * patches) * channels * filters
    spent = (READ_FLOPS * channels * pieces + WRITE_FLOPS * filters) * patches
    return takes & (spared > spent + FILTER_FLOPS * pieces * channels * filters)


def _choose(
    k: LibraryBuilder, direction: str, conv: Int, x: Int, w: Int, y: Int,
    use: Callable[[str], None],
) -> None:  # fmt: skip
    """use(name of the kernel), in a branch for each kernel that may take the call."""
    groups = k.member("bs_convolution", conv, "groups")

    def by_layout(name: str, tensor: Int) -> None:
        with k.if_else(_runs_by_channel(k, tensor, groups)) as (channels, pixels):
            with channels:
                use(f"{name}_channels")
            with pixels:
                use(f"{name}_pixels")

    if direction == "backward_filter":
        by_layout("filter", x)
        return
    image, out = (x, y) if direction == "forward" else (y, x)
    scatters = direction != "forward"
    with k.if_else(_has_few_products(k, conv, image, w, out, y, scatters)) as (transformed, direct):
        with transformed:
            use("forward_winograd" if direction == "forward" else "gather_winograd")
        with direct:
            if direction == "forward":
                by_layout("forward", x)
            else:
                _choose_gradient(k, conv, x, y, by_layout, use)


def _choose_gradient(
    k: LibraryBuilder, conv: Int, x: Int, y: Int, by_layout: Callable[[str, Int], None],
    use: Callable[[str], None],
) -> None:  # fmt: skip
    """Backward_data by the definition: gathered from dy, or scattered into dx."""
    gathers = k.variable(1)
    inside, outside = k.variable(_number(k, k.as_int(1))), k.variable(_number(k, k.as_int(1)))
    with k.loop(2, Tensor(k, x).rank) as axis:
        with k.if_(k.member("bs_convolution", conv, "stride", axis - 2).ne(1)):
            gathers.set(k.as_int(0))
        inside.set(inside.value * _number(k, Tensor(k, y).dim(axis)))
        outside.set(outside.value * _number(k, Tensor(k, x).dim(axis)))
    little = outside.value <= inside.value * GATHER_PIXELS
    channels = _runs_by_channel(k, y, k.member("bs_convolution", conv, "groups"))
    with k.if_else(gathers.value.ne(0) & (little | channels)) as (gather, scatter):
        with gather:
            by_layout("gather", y)
        with scatter:
            use("scatter_pixels")


def _emit_sizes(k: LibraryBuilder) -> None:
    """workspace_direction(conv, x, w, y, threads): bytes. And the entry point that asks it."""
    for direction in DIRECTIONS:
        with k.answering(f"workspace_{direction}", 5) as (conv, x, w, y, threads):
            found = k.variable(0)

            def use(name: str, found: object = found, tensors: tuple = (conv, x, w, y)) -> None:
                with k.if_else(Tensor(k, tensors[1]).dtype.eq(0)) as branches:
                    for branch, dtype in zip(branches, DTYPES):
                        with branch:
                            size = k.ask(f"size_{name}_{dtype}", *tensors, threads)
                            found.set(size)

            _choose(k, direction, conv, x, w, y, use)
            k.give(found.value)
    with k.api("bs_convolution_workspace_size") as call:
        conv, x, w, y = (call[n] for n in ("convolution", "x", "w", "y"))
        k.require(call["direction"].below(len(DIRECTIONS)), "bad_enum")
        k.require_all(call["bytes"])
        _check(k, conv, x, w, y, written="")
        threads = checks.check_threads(k, call["threads"])
        for number, direction in enumerate(DIRECTIONS):
            with k.if_(call["direction"].eq(number)):
                size = k.ask(f"workspace_{direction}", conv, x, w, y, threads)
                k.put(size, call["bytes"])


# Entry points ------------------------------------------------------------------------------------

# direction -> the names of x, w and y among the parameters, the two inputs in order, the output
OPERANDS = {
    "forward": (("x", "w", "y"), ("x", "w"), "y"),
    "backward_data": (("dx", "w", "dy"), ("w", "dy"), "dx"),
    "backward_filter": (("x", "dw", "dy"), ("x", "dy"), "dw"),
}


def _emit_entry(k: LibraryBuilder, direction: str) -> None:
    names, inputs, output = OPERANDS[direction]
    with k.api(f"bs_convolution_{direction}") as call:
        conv = call["convolution"]
        x, w, y = tensors = [call[n] for n in names]
        _check(k, conv, *tensors, written="xwy"[names.index(output)])
        checks.check_data(k, *((call[n], call[f"{n}_data"]) for n in names))
        threads = checks.check_threads(k, call["threads"])
        with k.if_(k.ask("size_of", call[output]).eq(0)):
            k.give(0)
        need = k.ask(f"workspace_{direction}", conv, *tensors, threads)
        workspace = call["workspace"]
        enough = workspace.ne(0) & (call["workspace_bytes"] >= need)
        k.require(enough, "small_workspace")
        data = [call[f"{n}_data"] for n in inputs]
        bias = call.get("bias_data", k.as_int(0))
        out = call[f"{output}_data"]

        def use(name: str) -> None:
            with k.if_else(Tensor(k, x).dtype.eq(0)) as branches:
                for branch, dtype in zip(branches, DTYPES):
                    with branch:
                        k.call(
                            f"{name}_{dtype}", conv, x, w, y, *data, bias, out, workspace, threads,
                            call["alpha"], call["beta"],
                        )  # fmt: skip

        _choose(k, direction, conv, x, w, y, use)


def _emit_bias_entry(k: LibraryBuilder) -> None:
    with k.api("bs_convolution_backward_bias") as call:
        dy, dbias = call["dy"], call["dbias"]
        checks.check_tensors(k, [], dbias, 1, 1)
        k.passes(k.ask("check_tensor", dy, checks.READ, 2, MOST_RANK))
        k.require(Tensor(k, dy).dtype.eq(Tensor(k, dbias).dtype), "bad_dtype")
        k.require(Tensor(k, dbias).dim(0).eq(Tensor(k, dy).dim(1)), "mismatch")
        data = call["dy_data"], call["dbias_data"]
        checks.check_data(k, (dy, data[0]), (dbias, data[1]))
        threads = checks.check_threads(k, call["threads"])
        factors = call["alpha"], call["beta"]
        with k.if_else(Tensor(k, dy).dtype.eq(0)) as branches:
            for branch, dtype in zip(branches, DTYPES):
                with branch:
                    k.call(f"bias_gradient_{dtype}", dy, *data, dbias, threads, *factors)
