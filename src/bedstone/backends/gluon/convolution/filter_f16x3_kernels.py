"""float32 gradient by filter from three float16 products on Hopper, with float32's accuracy.

dw[k, tap, c] sums over pixels, so a scale must be the same for every pixel of a channel. Each
channel of dy and of x is scaled by a power of two so that its largest magnitude lies in [2^14,
2^15), and split into two float16 planes, hi + lo / 2^11 (11 + 11 bits). dy * x is then hi * hi +
(hi * lo + lo * hi) / 2^11, summed by filter_kernels' scheme; each step's products go to a float32
sum in ordinary registers, since the matrix unit's own sums truncate.

What that cannot hold is noticed when the parts are added. An element 2^-29 of its channel's largest
or smaller may be wrong by 2^-36 in scaled units, and its term by 2^-21: where that could matter
(|dw| is below the sum of all such errors times 2^22) and in channels that hold Inf or NaN, a block
of dw is left to the careful kernel, which multiplies in float32.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from bedstone.backends.gluon.convolution.filter_kernels import (
    filter_tile,
    first_program,
    patch_origin,
    steps_of,
    store_part,
    work_range,
)
from bedstone.backends.gluon.convolution.overlap import follow
from bedstone.backends.gluon.convolution.ring import advance, make_ring
from bedstone.backends.gluon.convolution.split_kernels import (
    INFINITE,
    LEAST,
    LOW,
    MAGNITUDE,
    RANGE,
    TOP,
    power_of_two,
)

CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(232), gl.constexpr(24)
LOWER = gl.constexpr(2.0**-11)  # what lo was multiplied by, undone
# |scaled dw| over this many a pixel: the errors of small elements do not matter.
SAFE = tl.constexpr(4.0)


@triton.jit
def pixel_offset(p, dims, strides):
    """Where pixel p of an image of dims (n, d, h, w) lies."""
    w = p % dims[3]
    p = p // dims[3]
    h = p % dims[2]
    p = p // dims[2]
    d = p % dims[1]
    n = (p // dims[1]).to(tl.int64)
    return n * strides[0] + d.to(tl.int64) * strides[1] + h * strides[2] + w * strides[3]


@triton.jit
def convolution_clear_kernel(info_ptr, list_ptr, length, BLOCK: tl.constexpr):
    """Sets the channels' info and the length of the list to 0."""
    follow()
    pid = tl.program_id(0)
    if pid == 0:
        tl.store(list_ptr, 0)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    tl.store(info_ptr + i, 0, mask=i < length)


@triton.jit
def convolution_channel_range_kernel(
    x_ptr, top_ptr, pixels, channels, dims, strides, columns,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """top[c] = bits of the largest magnitude of a channel (a NaN counts as the largest). Programs
    take blocks of PIXELS x CHANNELS in turn, so that what is moved at a time lies together."""
    follow()
    c = tl.program_id(0) % columns * CHANNELS + tl.arange(0, CHANNELS)
    top = tl.zeros((PIXELS, CHANNELS), tl.int32)  # reduced once, at the end
    step = tl.num_programs(0) // columns
    for block in range(tl.program_id(0) // columns, tl.cdiv(pixels, PIXELS), step):
        p = block * PIXELS + tl.arange(0, PIXELS)
        place = pixel_offset(p, dims, strides)[:, None] + c[None, :]
        mask = (p < pixels)[:, None] & (c < channels)[None, :]
        x = tl.load(x_ptr + place, mask=mask, other=0.0)
        top = tl.maximum(top, x.to(tl.int32, bitcast=True) & MAGNITUDE)
    tl.atomic_max(top_ptr + c, tl.max(top, 0), mask=c < channels)


@triton.jit
def convolution_split_image_kernel(
    x_ptr, planes_ptr, top_ptr, small_ptr, pixels, channels, pitch, plane, dims, strides,
    columns,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """The planes hi and lo * 2^11 (pixels x pitch) of a scaled image; small[c] = 1 for a channel
    with elements under 2^-29 of its largest."""
    follow()
    c = tl.program_id(0) % columns * CHANNELS + tl.arange(0, CHANNELS)
    inside = c < channels
    e = tl.maximum(tl.load(top_ptr + c, mask=inside, other=0) >> 23, LEAST)
    e = tl.minimum(e, 254)
    floor = (tl.maximum(e - RANGE, 0) << 23)[None, :]
    scale = power_of_two(127 + TOP - e)[None, :]
    small = tl.zeros((PIXELS, CHANNELS), tl.int32)
    step = tl.num_programs(0) // columns
    for block in range(tl.program_id(0) // columns, tl.cdiv(pixels, PIXELS), step):
        p = block * PIXELS + tl.arange(0, PIXELS)
        mask = (p < pixels)[:, None] & inside[None, :]
        place = pixel_offset(p, dims, strides)[:, None] + c[None, :]
        x = tl.load(x_ptr + place, mask=mask, other=0.0)
        a = x.to(tl.int32, bitcast=True) & MAGNITUDE
        small |= ((a > 0) & (a < floor)).to(tl.int32)
        v = x * scale
        hi = v.to(tl.float16)
        to = planes_ptr + p.to(tl.int64)[:, None] * pitch + c[None, :]
        tl.store(to, hi, mask=mask)
        if PLANES == 2:
            lo = ((v - hi.to(tl.float32)) * 2.0**LOW).to(tl.float16)
            tl.store(to + plane, lo, mask=mask)
    found = tl.max(small, 0)
    tl.atomic_max(small_ptr + c, found, mask=inside & (found > 0))


@gluon.jit
def planes_producer(
    xh_desc, xl_desc, dh_desc, dl_desc, ah_bufs, al_bufs, bh_bufs, bl_bufs, empty, full,
    cut, filter_tiles, channel_tiles, patches, box, taps, pad, stride, dilation,
    filters, channels,
    BK: gl.constexpr, BC: gl.constexpr, STAGES: gl.constexpr, DEPTH: gl.constexpr,
    PLANES: gl.constexpr,
):  # fmt: skip
    """Fills the ring as filter_producer does, with the planes of both images."""
    run = work_range(cut)
    stage = 0
    phase = 0
    for tile in range(run[0], run[1]):
        begin, end = steps_of(tile, run, cut[2])
        g, kt, ct, rd, rh, rw = filter_tile(tile, filter_tiles, channel_tiles, taps)
        k = g * filters + kt * BK
        c = g * channels + ct * BC
        for i in range(begin, end):
            n, d, h, w = patch_origin(i, patches, box)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, PLANES * (xh_desc.block_type.nbytes + dh_desc.block_type.nbytes))
            ih = h * stride[1] + rh * dilation[1] - pad[1]
            iw = w * stride[2] + rw * dilation[2] - pad[2]
            ah = ah_bufs.index(stage)
            al = al_bufs.index(stage)
            bh = bh_bufs.index(stage)
            bl = bl_bufs.index(stage)
            if DEPTH:
                id = d * stride[0] + rd * dilation[0] - pad[0]
                tma.async_copy_global_to_shared(dh_desc, [n, d, h, w, k], bar, ah)
                tma.async_copy_global_to_shared(xh_desc, [n, id, ih, iw, c], bar, bh)
                if PLANES == 2:
                    tma.async_copy_global_to_shared(dl_desc, [n, d, h, w, k], bar, al)
                    tma.async_copy_global_to_shared(xl_desc, [n, id, ih, iw, c], bar, bl)
            else:
                tma.async_copy_global_to_shared(dh_desc, [n, h, w, k], bar, ah)
                tma.async_copy_global_to_shared(xh_desc, [n, ih, iw, c], bar, bh)
                if PLANES == 2:
                    tma.async_copy_global_to_shared(dl_desc, [n, h, w, k], bar, al)
                    tma.async_copy_global_to_shared(xl_desc, [n, ih, iw, c], bar, bl)
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def planes_consumer(
    IDX: gl.constexpr, part_ptr, ah_bufs, al_bufs, bh_bufs, bl_bufs, empty, full,
    cut,
    BK: gl.constexpr, BC: gl.constexpr, BP: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, PLANES: gl.constexpr,
):  # fmt: skip
    """Filters IDX * ROWS, ... of the tiles: the products of a step, added to float32 sums.
    While one sum is added, the other consumer's products run."""
    ROWS: gl.constexpr = BK // CONSUMERS
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BC, 16]
    )
    run = work_range(cut)
    stage = 0
    phase = 0
    for tile in range(run[0], run[1]):
        begin, end = steps_of(tile, run, cut[2])
        acc = gl.zeros((ROWS, BC), gl.float32, layout)
        zero = gl.zeros((ROWS, BC), gl.float32, layout)
        for _ in range(begin, end):
            mbarrier.wait(full.index(stage), phase)
            ah = ah_bufs.index(stage).reshape((BP, BK)).slice(IDX * ROWS, ROWS, dim=1)
            al = al_bufs.index(stage).reshape((BP, BK)).slice(IDX * ROWS, ROWS, dim=1)
            bh = bh_bufs.index(stage).reshape((BP, BC))
            bl = bl_bufs.index(stage).reshape((BP, BC))
            if PLANES == 2:
                t = warpgroup_mma(al.permute((1, 0)), bh, zero, is_async=True, use_acc=False)
                t = warpgroup_mma(ah.permute((1, 0)), bl, t, is_async=True)
            u = warpgroup_mma(ah.permute((1, 0)), bh, zero, is_async=True, use_acc=False)
            if PLANES == 2:
                t = warpgroup_mma_wait(num_outstanding=1, deps=(t,))
                acc += t * LOWER
            u = warpgroup_mma_wait(num_outstanding=0, deps=(u,))
            mbarrier.arrive(empty.index(stage), count=1)
            acc += u
            stage, phase = advance(stage, phase, STAGES)
        store_part(part_ptr, gl.program_id(0) + tile, acc, IDX * ROWS, BK)


@gluon.jit
def convolution_filter_f16x3_kernel(
    xh_desc, xl_desc, dh_desc, dl_desc, part_ptr,
    cut, filter_tiles, channel_tiles, patches, box, taps, pad, stride, dilation,
    filters, channels,
    BK: gl.constexpr, BC: gl.constexpr, BP: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, DEPTH: gl.constexpr, PLANES: gl.constexpr,
):  # fmt: skip
    """Parts of dw in scaled units: convolution_filter_ws_kernel, PARTIAL, over the planes of x
    (xh, xl) and dy (dh, dl); with one plane, hi * hi alone, which is what tf32 promises."""
    ah_bufs = gl.allocate_shared_memory(
        dh_desc.dtype, [STAGES] + dh_desc.block_type.shape, dh_desc.layout
    )
    bh_bufs = gl.allocate_shared_memory(
        xh_desc.dtype, [STAGES] + xh_desc.block_type.shape, xh_desc.layout
    )
    al_bufs = ah_bufs
    bl_bufs = bh_bufs
    if PLANES == 2:
        al_bufs = gl.allocate_shared_memory(
            dh_desc.dtype, [STAGES] + dh_desc.block_type.shape, dh_desc.layout
        )
        bl_bufs = gl.allocate_shared_memory(
            xh_desc.dtype, [STAGES] + xh_desc.block_type.shape, xh_desc.layout
        )
    empty, full = make_ring(STAGES, CONSUMERS)
    follow()
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (planes_consumer, (
                    0, part_ptr, ah_bufs, al_bufs, bh_bufs, bl_bufs, empty, full,
                    cut, BK, BC, BP, STAGES, CONSUMERS, PLANES,
                )),
                (planes_consumer, (
                    1, part_ptr, ah_bufs, al_bufs, bh_bufs, bl_bufs, empty, full,
                    cut, BK, BC, BP, STAGES, CONSUMERS, PLANES,
                )),
                (planes_producer, (
                    xh_desc, xl_desc, dh_desc, dl_desc, ah_bufs, al_bufs, bh_bufs, bl_bufs,
                    empty, full, cut, filter_tiles, channel_tiles, patches, box,
                    taps, pad, stride, dilation, filters, channels, BK, BC, STAGES, DEPTH, PLANES,
                )),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (planes_consumer, (
                    0, part_ptr, ah_bufs, al_bufs, bh_bufs, bl_bufs, empty, full,
                    cut, BK, BC, BP, STAGES, CONSUMERS, PLANES,
                )),
                (planes_producer, (
                    xh_desc, xl_desc, dh_desc, dl_desc, ah_bufs, al_bufs, bh_bufs, bl_bufs,
                    empty, full, cut, filter_tiles, channel_tiles, patches, box,
                    taps, pad, stride, dilation, filters, channels, BK, BC, STAGES, DEPTH, PLANES,
                )),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )  # fmt: skip


@triton.jit
def sum_block(
    pid, filter_tiles, channel_tiles, taps, BK: tl.constexpr, BC: tl.constexpr, ROWS: tl.constexpr
):
    """Number of a block of the sum -> (tile, block of rows, group, first filter, first channel,
    tap)."""
    block = pid % (BK // ROWS)
    tile = pid // (BK // ROWS)
    tap = tile % taps
    rest = tile // taps
    c = rest % channel_tiles * BC
    rest = rest // channel_tiles
    return tile, block, rest // filter_tiles, rest % filter_tiles * BK + block * ROWS, c, tap


@triton.jit
def store_dw(
    dw_ptr, v, alpha, beta, g, k, c, tap, taps, filters, stride_k, stride_tap, stride_c, flip, mask
):
    """Blends a block of dw in."""
    if flip:
        tap = taps - 1 - tap
    ptr = dw_ptr + tap.to(tl.int64) * stride_tap
    ptr += ((g * filters + k).to(tl.int64) * stride_k)[:, None]
    ptr += (c.to(tl.int64) * stride_c)[None, :]
    v = alpha * v
    if beta != 0:
        v += beta * tl.load(ptr, mask=mask, other=0.0)
    tl.store(ptr, v, mask=mask)


@triton.jit
def convolution_filter_f16x3_sum_kernel(
    part_ptr, dw_ptr, x_top_ptr, x_small_ptr, dy_top_ptr, dy_small_ptr, list_ptr, alpha, beta,
    cut, programs, filter_tiles, channel_tiles, taps, pixels,
    filters, channels, stride_k, stride_tap, stride_c, flip,
    BK: tl.constexpr, BC: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """dw = alpha * (sum of a tile's slots, in order, scales undone) + beta * dw; blocks of
    ROWS x BC that need more care go on the list instead."""
    follow()
    pid = tl.program_id(0)
    tile, block, g, k0, c0, tap = sum_block(pid, filter_tiles, channel_tiles, taps, BK, BC, ROWS)
    start = tile * cut[2]
    begin = first_program(start, cut, programs)
    end = first_program(start + cut[2] - 1, cut, programs)
    o = tl.arange(0, ROWS * BC)
    acc = tl.zeros((ROWS * BC,), tl.float32)
    for p in range(begin, end + 1, SLOTS):
        q = p + tl.arange(0, SLOTS)
        slot = (q + tile).to(tl.int64) * (BK * BC) + block * (ROWS * BC)
        ptr = part_ptr + slot[:, None] + o[None, :]
        acc += tl.sum(tl.load(ptr, mask=(q <= end)[:, None], other=0.0), 0)
    acc = tl.reshape(acc, (ROWS, BC))
    k = k0 + tl.arange(0, ROWS)
    c = c0 + tl.arange(0, BC)
    in_k = k < filters
    in_c = c < channels
    mask = in_k[:, None] & in_c[None, :]
    dy_top = tl.load(dy_top_ptr + g * filters + k, mask=in_k, other=0)
    x_top = tl.load(x_top_ptr + g * channels + c, mask=in_c, other=0)
    dy_small = tl.load(dy_small_ptr + g * filters + k, mask=in_k, other=0)
    x_small = tl.load(x_small_ptr + g * channels + c, mask=in_c, other=0)
    odd = (dy_top >= INFINITE)[:, None] | (x_top >= INFINITE)[None, :]
    small = (dy_small > 0)[:, None] | (x_small > 0)[None, :]
    care = mask & (odd | (small & (tl.abs(acc) < SAFE * pixels)))
    if tl.max(tl.max(care.to(tl.int32), 1), 0) > 0:
        at = tl.atomic_add(list_ptr, 1)
        tl.store(list_ptr + 1 + at, pid)
    else:
        e = tl.maximum(dy_top >> 23, LEAST)[:, None] + tl.maximum(x_top >> 23, LEAST)[None, :]
        q = e - 2 * TOP
        v = acc * power_of_two(127 + (q >> 1)) * power_of_two(127 + q - (q >> 1))
        store_dw(
            dw_ptr, v, alpha, beta, g, k, c, tap, taps, filters, stride_k, stride_tap, stride_c,
            flip, mask,
        )  # fmt: skip


@triton.jit
def convolution_filter_careful_kernel(
    x_ptr, dy_ptr, dw_ptr, list_ptr, alpha, beta, filter_tiles, channel_tiles, taps,
    size, out, x_strides, dy_strides, window, pad, stride, dilation, pixels,
    filters, channels, stride_k, stride_tap, stride_c, flip,
    BK: tl.constexpr, BC: tl.constexpr, ROWS: tl.constexpr, HEIGHT: tl.constexpr,
    PIXELS: tl.constexpr,
):  # fmt: skip
    """The listed blocks of dw, by float32 products, as the first ROWS of HEIGHT rows.

    size, out   (n, d, h, w) of x and dy;  window  taps along d, h, w
    """
    follow()
    count = tl.load(list_ptr)
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        pid = tl.load(list_ptr + 1 + item)
        _, _, g, k0, c0, tap = sum_block(pid, filter_tiles, channel_tiles, taps, BK, BC, ROWS)
        row = tl.arange(0, HEIGHT)
        k = k0 + row
        in_k = (row < ROWS) & (k < filters)
        c = c0 + tl.arange(0, BC)
        rw = tap % window[2]
        rh = tap // window[2] % window[1]
        rd = tap // window[2] // window[1]
        acc = tl.zeros((HEIGHT, BC), tl.float32)
        for first in range(0, pixels, PIXELS):
            p = first + tl.arange(0, PIXELS)
            w = p % out[3]
            rest = p // out[3]
            h = rest % out[2]
            rest = rest // out[2]
            d = rest % out[1]
            n = (rest // out[1]).to(tl.int64)
            iw = w * stride[2] + rw * dilation[2] - pad[2]
            ih = h * stride[1] + rh * dilation[1] - pad[1]
            id = d * stride[0] + rd * dilation[0] - pad[0]
            valid = p < pixels
            inside = valid & (iw >= 0) & (iw < size[3]) & (ih >= 0) & (ih < size[2])
            inside &= (id >= 0) & (id < size[1])
            at = n * dy_strides[0] + d.to(tl.int64) * dy_strides[1] + h * dy_strides[2]
            at += w * dy_strides[3] + g * filters
            mask = in_k[:, None] & valid[None, :]
            dy = tl.load(dy_ptr + at[None, :] + k[:, None], mask=mask, other=0.0)
            at = n * x_strides[0] + id.to(tl.int64) * x_strides[1] + ih * x_strides[2]
            at += iw * x_strides[3] + g * channels
            mask = inside[:, None] & (c < channels)[None, :]
            x = tl.load(x_ptr + at[:, None] + c[None, :], mask=mask, other=0.0)
            acc += tl.dot(dy, x, input_precision="ieee")
        mask = in_k[:, None] & (c < channels)[None, :]
        store_dw(
            dw_ptr, acc, alpha, beta, g, k, c, tap, taps, filters, stride_k, stride_tap,
            stride_c, flip, mask,
        )  # fmt: skip
