"""The gradient of a bias: dbias[k] = alpha * sum over images and pixels of dy + beta * dbias.

A task owns one channel, or a vector of channels where these are the neighbours in memory. Rows
are summed by vectors in the tensor's type, rows among themselves in float64.
"""

from __future__ import annotations

from bedstone.backends.cpu.builder import F64, I64
from bedstone.backends.cpu.irtypes import itemsize
from bedstone.backends.cpu.library.language import LibraryBuilder, Tensor, ceil_div
from bedstone.backends.cpu.values import Int

SPATIAL = 3


def emit_bias_gradient(k: LibraryBuilder, dtype: str) -> None:
    """bias_gradient(dy, its data, data of dbias, dbias, threads, alpha, beta)."""
    item = itemsize(dtype)
    with k.function(f"bias_gradient_{dtype}", *[I64] * 5, F64, F64) as arguments:
        desc, data, out, target, threads, alpha, beta = arguments
        t, step = Tensor(k, desc), Tensor(k, target).stride(0) * item
        dims, strides = [t.dim(0)], [t.stride(0) * item]
        for j in range(SPATIAL):  # axes that are missing count 1
            axis = t.rank - SPATIAL + j
            dims.append(k.select(axis >= 2, t.dim(axis), 1))
            strides.append(k.select(axis >= 2, t.stride(axis), 0) * item)
        channels, channel = t.dim(1), t.stride(1) * item
        across = channel.eq(item) & (channels > 1)

        def columns(lanes: int | None, first: Int) -> None:
            """Sums of `lanes` channels from one on, over all pixels."""
            zero = k.constant(0.0, "float64", lanes)
            total = k.variable(zero)
            with k.loop(0, dims[0]) as n, k.loop(0, dims[1]) as d, k.loop(0, dims[2]) as h:
                at = data + first * channel + n * strides[0] + d * strides[1] + h * strides[2]
                row = k.variable(k.constant(0.0, dtype, lanes))
                with k.loop(0, dims[3]) as w:
                    row.set(row.value + k.load(at + w * strides[3], dtype, lanes))
                total.set(total.value + k.cast(row.value, zero))
            write(total.value, lanes, first)

        def write(total: object, lanes: int | None, first: Int) -> None:
            for lane in range(lanes or 1):
                one = total if lanes is None else k.extract(total, lane)
                value = k.cast(one, k.constant(0.0, dtype))
                k.store_blended(value, alpha, beta, out + (first + lane) * step, dtype)

        def along(first: Int) -> None:
            """The sum of one channel, by vectors along the rows."""
            lanes = k.lanes(dtype)
            zero = k.constant(0.0, "float64")
            total = k.variable(zero)
            with k.loop(0, dims[0]) as n, k.loop(0, dims[1]) as d, k.loop(0, dims[2]) as h:
                at = data + first * channel + n * strides[0] + d * strides[1] + h * strides[2]
                row = k.variable(k.constant(0.0, dtype, lanes))
                even = dims[3] - dims[3] % lanes
                with k.loop(0, even, lanes) as w:
                    row.set(row.value + k.load(at + w * item, dtype, lanes))
                total.set(total.value + k.cast(k.reduce(row.value, lambda a, b: a + b), zero))
                with k.loop(even, dims[3]) as w:
                    total.set(total.value + k.cast(k.load(at + w * item, dtype), zero))
            write(total.value, None, first)

        lanes = k.lanes(dtype)
        width = k.select(across, lanes, 1)
        with k.job(ceil_div(channels, width), threads) as job, job.each_task() as task:
            first = task * width
            with k.if_else(across) as (vectors, single):
                with vectors, k.if_else(first + lanes <= channels) as (whole, rest):
                    with whole:
                        columns(lanes, first)
                    with rest, k.loop(first, channels) as c:
                        columns(None, c)
                with single, k.if_else(strides[3].eq(item)) as (near, apart):
                    with near:
                        along(task)
                    with apart:
                        columns(None, task)
