"""Filters split into float16 planes for the f16x3 kernels."""

import triton
import triton.language as tl

from bedstone.backends.gluon.convolution.overlap import follow

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITE = tl.constexpr(0x7F800000)  # the bits of infinity; NaNs are above
TOP, LEAST, RANGE, LOW = (tl.constexpr(v) for v in (141, 14, 29, 11))  # as in f16x3_kernels
BEYOND = tl.constexpr(1 << 16)


@triton.jit
def power_of_two(exponent):
    """2^(exponent - 127) for a biased exponent of 1 to 254."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def filter_places(
    i, j, taps, filters, channels, pitch, stride_k, stride_tap, stride_c, BACKWARD: tl.constexpr
):
    """(offset in w, offset in a plane) of the i-th element of the reduction of column j."""
    if BACKWARD:
        g = j // channels
        k = g * filters + i // taps
        tap = i % taps
        c = j % channels
    else:
        k = j
        tap = i // channels
        c = i % channels
    source = k.to(tl.int64) * stride_k + tap.to(tl.int64) * stride_tap + c.to(tl.int64) * stride_c
    return source, (k.to(tl.int64) * taps + tap) * pitch + c


@triton.jit
def convolution_split_filter_kernel(
    w_ptr, planes_ptr, info_ptr, list_ptr, columns, length, taps, filters, channels, pitch,
    stride_k, stride_tap, stride_c, plane,
    BACKWARD: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Planes (k, tap, c) hi and lo * 2^11, float16, of w times a power of two a column.

    A column is what one output channel sums: `length` elements. One program takes COLUMNS of them.
    info[column] = biased exponent of its largest, + BEYOND if there are elements under 2^-29 of it,
    Inf or NaN. The list of left-out tiles is emptied. `filters`, `channels`: of a group;
    pitch: distance of taps in a plane.
    """
    follow()
    pid = tl.program_id(0)
    if pid == 0:
        tl.store(list_ptr, 0)
    j = (pid * COLUMNS + tl.arange(0, COLUMNS))[:, None]
    top = tl.zeros((COLUMNS,), tl.int32)
    for start in range(0, length, CHUNK):
        i = start + tl.arange(0, CHUNK)[None, :]
        source, _ = filter_places(
            i, j, taps, filters, channels, pitch, stride_k, stride_tap, stride_c, BACKWARD
        )
        w = tl.load(w_ptr + source, mask=(i < length) & (j < columns), other=0.0)
        top = tl.maximum(top, tl.max(w.to(tl.int32, bitcast=True) & MAGNITUDE, 1))
    e = tl.maximum(top >> 23, LEAST)
    floor = tl.maximum(e - RANGE, 0) << 23
    scale = power_of_two(127 + TOP - e)[:, None]
    beyond = (top >= INFINITE).to(tl.int32)
    for start in range(0, length, CHUNK):
        i = start + tl.arange(0, CHUNK)[None, :]
        source, place = filter_places(
            i, j, taps, filters, channels, pitch, stride_k, stride_tap, stride_c, BACKWARD
        )
        mask = (i < length) & (j < columns)
        w = tl.load(w_ptr + source, mask=mask, other=0.0)
        a = w.to(tl.int32, bitcast=True) & MAGNITUDE
        beyond = tl.maximum(beyond, tl.max(((a > 0) & (a < floor[:, None])).to(tl.int32), 1))
        v = w * scale
        hi = v.to(tl.float16)
        tl.store(planes_ptr + place, hi, mask=mask)
        lo = ((v - hi.to(tl.float32)) * 2.0**LOW).to(tl.float16)
        tl.store(planes_ptr + plane + place, lo, mask=mask)
    column = pid * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(info_ptr + column, e + beyond * BEYOND, mask=column < columns)
