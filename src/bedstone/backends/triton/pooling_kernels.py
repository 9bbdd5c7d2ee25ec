"""The two kernels of pooling: see pooling.py for the idea."""

import triton
import triton.language as tl

from bedstone.backends.triton.walk import strip


@triton.jit
def window_start(p, size, out, low, step, ADAPTIVE: tl.constexpr):
    """Position of the first tap of window p (before the input, in its padding, if negative)."""
    if ADAPTIVE:
        return p * size // out
    else:
        return p * step - low


@triton.jit
def window_taps(p, size, out, window, ADAPTIVE: tl.constexpr):
    """Number of taps of window p."""
    if ADAPTIVE:
        return ((p + 1) * size + out - 1) // out - p * size // out
    else:
        return window + 0 * p


@triton.jit
def window_share(
    p, size, out, window, low, high, step, dil, MODE: tl.constexpr, ADAPTIVE: tl.constexpr
):  # fmt: skip
    """How many taps of window p count in the divisor along one axis."""
    if ADAPTIVE:
        return window_taps(p, size, out, window, ADAPTIVE)
    else:
        start = window_start(p, size, out, low, step, ADAPTIVE)
        stop = size
        first = 0
        if MODE == "average_include_padding":
            stop = size + high
        else:
            first = tl.maximum((dil - 1 - start) // dil, 0)
        return tl.maximum(tl.minimum((stop - start + dil - 1) // dil, window) - first, 0)


@triton.jit
def row_of(pid, shape):
    """(strip number, d, h) of a program."""
    h = pid % shape[1]
    pid = pid // shape[1]
    return pid // shape[0], pid % shape[0], h


@triton.jit
def first_maximum(
    x_ptr, od, oh, ow, ok, size, x_strides, window: tl.constexpr, low: tl.constexpr,
    step: tl.constexpr, dil: tl.constexpr, unroll: tl.constexpr, INDEXED: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """(largest value, flat position) of the windows; the first wins, NaN is above everything.
    Without INDEXED the position is not looked for."""
    best = tl.where(ok, float("-inf"), float("-inf")).to(ACC)
    where = tl.where(ok, -1, -1)
    for t in tl.range(0, window[0], loop_unroll_factor=unroll[0]):
        d = od * step[0] - low[0] + t * dil[0]
        for r in tl.range(0, window[1], loop_unroll_factor=unroll[1]):
            h = oh * step[1] - low[1] + r * dil[1]
            ok_row = ok & (d >= 0) & (d < size[0]) & (h >= 0) & (h < size[1])
            for s in tl.range(0, window[2], loop_unroll_factor=unroll[2]):
                w = ow * step[2] - low[2] + s * dil[2]
                inside = ok_row & (w >= 0) & (w < size[2])
                offs = d * x_strides[2] + h * x_strides[3] + w * x_strides[4]
                value = tl.load(x_ptr + offs, mask=inside, other=float("-inf")).to(ACC)
                if INDEXED:
                    larger = (value > best) | ((value != value) & (best == best)) | (where < 0)
                    take = larger & inside
                    where = tl.where(take, (d * size[1] + h) * size[2] + w, where)
                else:
                    take = (value > best) | (value != value)
                best = tl.where(take, value, best)
    return best, where


@triton.jit
def pooling_forward_kernel(
    x_ptr, y_ptr, i_ptr, alpha, beta, N, C, size, out, x_strides, y_strides, i_strides,
    window: tl.constexpr, low: tl.constexpr, high: tl.constexpr, step: tl.constexpr,
    dil: tl.constexpr, unroll: tl.constexpr,
    MODE: tl.constexpr, ADAPTIVE: tl.constexpr, VALUES: tl.constexpr, INDICES: tl.constexpr,
    ACC: tl.constexpr, CHANNELS_LAST: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """y = alpha * pool(x) + beta * y and the maxima's flat positions, one row of a strip of y.

    size, out, window, low and high padding, step (stride) and dil(ation) are (d, h, w), `unroll`
    says how far the loops over taps are unrolled; strides (n, c, d, h, w). Taps outside x are
    masked. VALUES False: only the indices are written.
    """
    number, od, oh = row_of(tl.program_id(0), out)
    n, c, ow, ok = strip(number, C, out[2], N, CHANNELS_LAST, BA, BB)
    ok &= n < N
    x_ptr += n * x_strides[0] + c * x_strides[1]
    if MODE == "max":
        result, where = first_maximum(
            x_ptr, od, oh, ow, ok, size, x_strides, window, low, step, dil, unroll, INDICES, ACC
        )
        if INDICES:
            row = n * i_strides[0] + c * i_strides[1] + od * i_strides[2] + oh * i_strides[3]
            tl.store(i_ptr + row + ow * i_strides[4], where.to(tl.int64), mask=ok)
    else:
        result = tl.zeros((BA, BB), ACC)
        d0 = window_start(od, size[0], out[0], low[0], step[0], ADAPTIVE)
        h0 = window_start(oh, size[1], out[1], low[1], step[1], ADAPTIVE)
        w0 = window_start(ow, size[2], out[2], low[2], step[2], ADAPTIVE)
        taps_d = window_taps(od, size[0], out[0], window[0], ADAPTIVE)
        taps_h = window_taps(oh, size[1], out[1], window[1], ADAPTIVE)
        taps_w = window_taps(ow, size[2], out[2], window[2], ADAPTIVE)
        for t in tl.range(0, window[0], loop_unroll_factor=unroll[0]):
            d = d0 + t * dil[0]
            ok_d = ok & (d >= 0) & (d < size[0]) & (t < taps_d)
            for r in tl.range(0, window[1], loop_unroll_factor=unroll[1]):
                h = h0 + r * dil[1]
                ok_h = ok_d & (h >= 0) & (h < size[1]) & (r < taps_h)
                for s in tl.range(0, window[2], loop_unroll_factor=unroll[2]):
                    w = w0 + s * dil[2]
                    inside = ok_h & (w >= 0) & (w < size[2]) & (s < taps_w)
                    offs = d * x_strides[2] + h * x_strides[3] + w * x_strides[4]
                    result += tl.load(x_ptr + offs, mask=inside, other=0.0).to(ACC)
        share = (
            window_share(
                od, size[0], out[0], window[0], low[0], high[0], step[0], dil[0], MODE, ADAPTIVE
            )
            * window_share(
                oh, size[1], out[1], window[1], low[1], high[1], step[1], dil[1], MODE, ADAPTIVE
            )
            * window_share(
                ow, size[2], out[2], window[2], low[2], high[2], step[2], dil[2], MODE, ADAPTIVE
            )
        )
        result = result / tl.maximum(share, 1).to(ACC)
    if VALUES:
        row = n * y_strides[0] + c * y_strides[1] + od * y_strides[2] + oh * y_strides[3]
        y_ptrs = y_ptr + row + ow * y_strides[4]
        result *= alpha
        if beta != 0:
            result += beta * tl.load(y_ptrs, mask=ok, other=0.0).to(ACC)
        tl.store(y_ptrs, result.to(y_ptr.dtype.element_ty), mask=ok)


@triton.jit
def last_window(h, size, out, low, step, ADAPTIVE: tl.constexpr):
    """The last window that may cover position h."""
    if ADAPTIVE:
        return ((h + 1) * out + size - 1) // size - 1
    else:
        return (h + low) // step


@triton.jit
def covered(h, p, size, out, window, low, step, dil, ADAPTIVE: tl.constexpr):
    """True where window p exists and has a tap at position h."""
    gap = h - window_start(p, size, out, low, step, ADAPTIVE)
    taps = window_taps(p, size, out, window, ADAPTIVE)
    return (p >= 0) & (p < out) & (gap >= 0) & (gap % dil == 0) & (gap // dil < taps)


@triton.jit
def pooling_backward_kernel(
    x_ptr, i_ptr, dy_ptr, dx_ptr, alpha, beta, N, C, size, out,
    x_strides, i_strides, dy_strides, dx_strides,
    window: tl.constexpr, low: tl.constexpr, high: tl.constexpr, step: tl.constexpr,
    dil: tl.constexpr, unroll: tl.constexpr, covers: tl.constexpr, ask: tl.constexpr,
    MODE: tl.constexpr, SOURCE: tl.constexpr, ADAPTIVE: tl.constexpr, ACC: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """dx = alpha * (sum of the covering windows' shares of dy) + beta * dx, one row of a strip.

    An element asks at most covers = (d, h, w) windows, last one first (`ask` and `unroll`: how far
    these loops and those over taps are unrolled). A window's share is
    dy / divisor (averages), or dy if the element is its maximum, which SOURCE says: "indices" or
    "x" (the window is searched again).
    """
    number, d, h = row_of(tl.program_id(0), size)
    n, c, w, ok = strip(number, C, size[2], N, CHANNELS_LAST, BA, BB)
    ok &= n < N
    dy_ptr += n * dy_strides[0] + c * dy_strides[1]
    i_ptr += n * i_strides[0] + c * i_strides[1]
    x_ptr += n * x_strides[0] + c * x_strides[1]
    own = (d * size[1] + h) * size[2] + w
    total = tl.zeros((BA, BB), ACC)
    for i in tl.range(0, covers[0], loop_unroll_factor=ask[0]):
        od = last_window(d, size[0], out[0], low[0], step[0], ADAPTIVE) - i
        ok_d = ok & covered(d, od, size[0], out[0], window[0], low[0], step[0], dil[0], ADAPTIVE)
        for j in tl.range(0, covers[1], loop_unroll_factor=ask[1]):
            oh = last_window(h, size[1], out[1], low[1], step[1], ADAPTIVE) - j
            ok_h = ok_d & covered(
                h, oh, size[1], out[1], window[1], low[1], step[1], dil[1], ADAPTIVE
            )
            for k in tl.range(0, covers[2], loop_unroll_factor=ask[2]):
                ow = last_window(w, size[2], out[2], low[2], step[2], ADAPTIVE) - k
                inside = ok_h & covered(
                    w, ow, size[2], out[2], window[2], low[2], step[2], dil[2], ADAPTIVE
                )
                offs = od * dy_strides[2] + oh * dy_strides[3] + ow * dy_strides[4]
                dy = tl.load(dy_ptr + offs, mask=inside, other=0.0).to(ACC)
                if MODE == "max":
                    if SOURCE == "indices":
                        offs = od * i_strides[2] + oh * i_strides[3] + ow * i_strides[4]
                        where = tl.load(i_ptr + offs, mask=inside, other=-1)
                    else:
                        _, where = first_maximum(
                            x_ptr, od, oh, ow, inside, size, x_strides, window, low, step, dil,
                            unroll, True, ACC,
                        )  # fmt: skip
                    total += tl.where(inside & (where == own), dy, 0.0)
                else:
                    share = (
                        window_share(
                            od, size[0], out[0], window[0], low[0], high[0], step[0], dil[0],
                            MODE, ADAPTIVE,
                        )
                        * window_share(
                            oh, size[1], out[1], window[1], low[1], high[1], step[1], dil[1],
                            MODE, ADAPTIVE,
                        )
                        * window_share(
                            ow, size[2], out[2], window[2], low[2], high[2], step[2], dil[2],
                            MODE, ADAPTIVE,
                        )
                    )  # fmt: skip
                    total += tl.where(inside, dy / tl.maximum(share, 1).to(ACC), 0.0)
    row = n * dx_strides[0] + c * dx_strides[1] + d * dx_strides[2] + h * dx_strides[3]
    dx_ptrs = dx_ptr + row + w * dx_strides[4]
    total *= alpha
    if beta != 0:
        total += beta * tl.load(dx_ptrs, mask=ok, other=0.0).to(ACC)
    tl.store(dx_ptrs, total.to(dx_ptr.dtype.element_ty), mask=ok)
