"""The careful f16x3 kernel: half tiles that the fast one left out, whatever their data.

A step's image rows and filter columns are taken in passes, each the elements within 2^29 of the
largest one left, with a scale of its own, split into float16 hi and lo in the kernel. Inf and NaN
stay out of the matrix products: their terms are added one by one, as float32 would. So every output
element is within a few 2^-22 of the sum of |x| |w|.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from bedstone.backends.gluon.convolution.epilogue import add_old, finish, pixel_offsets
from bedstone.backends.gluon.convolution.f16x3_kernels import (
    LEAST,
    LOW,
    RANGE,
    ROWS,
    TOP,
    image_rows,
    power,
)
from bedstone.backends.gluon.convolution.image_kernels import image_taps, image_tile
from bedstone.backends.gluon.convolution.overlap import follow
from bedstone.backends.gluon.convolution.ring import advance, make_ring

MAGNITUDE = gl.constexpr(0x7FFFFFFF)  # the bits of |x|
INFINITE = gl.constexpr(0x7F800000)  # the bits of infinity; NaNs are above
PRODUCER_REGISTERS = gl.constexpr(40)


@gluon.jit
def careful_producer(
    x_desc, w_desc, list_ptr, a_bufs, w_bufs, empty, full,
    tiles, columns, group_columns, inverse, box, size, taps, pad, stride, dilation, channels,
    BK: gl.constexpr, BC: gl.constexpr, STAGES: gl.constexpr, BACKWARD: gl.constexpr,
    UNIT: gl.constexpr, FLIP: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """Fills the ring with float32 boxes of the image and the filter, for the tiles listed."""
    count = gl.load(list_ptr)
    stage = 0
    phase = 0
    for item in range(gl.program_id(0), count, gl.num_programs(0)):
        tile = gl.load(list_ptr + 1 + item) // 2
        origin, rho, column = image_tile(
            tile, tiles, columns, box, stride, inverse, BACKWARD and not UNIT
        )
        td, th, tw = image_taps(
            origin, rho, box, size, taps, pad, stride, dilation, BACKWARD, UNIT, FLIP
        )
        g = column // group_columns
        for jd in range(td[3], td[4]):
            for jh in range(th[3], th[4]):
                for jw in range(tw[3], tw[4]):
                    tap = (td[1] + jd * td[2]) * taps[1] + th[1] + jh * th[2]
                    tap = tap * taps[2] + tw[1] + jw * tw[2]
                    id = td[0] + jd * dilation[0]
                    ih = th[0] + jh * dilation[1]
                    iw = tw[0] + jw * dilation[2]
                    for c in range(0, channels, BC):
                        mbarrier.wait(empty.index(stage), phase ^ 1)
                        bar = full.index(stage)
                        mbarrier.expect(bar, x_desc.block_type.nbytes + w_desc.block_type.nbytes)
                        a = a_bufs.index(stage)
                        ic = g * channels + c
                        if DEPTH:
                            at = [origin[0], id, ih, iw, ic]
                            tma.async_copy_global_to_shared(x_desc, at, bar, a)
                        else:
                            at = [origin[0], ih, iw, ic]
                            tma.async_copy_global_to_shared(x_desc, at, bar, a)
                        b = w_bufs.index(stage)
                        if BACKWARD:
                            at = [ic, tap, (column - g * group_columns) * BK]
                            tma.async_copy_global_to_shared(w_desc, at, bar, b)
                        else:
                            tma.async_copy_global_to_shared(w_desc, [column * BK, tap, c], bar, b)
                        stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def load_rows(a_bufs, stage, half, BM: gl.constexpr, BC: gl.constexpr, layout: gl.constexpr):
    """The image rows of a half tile."""
    x = image_rows(a_bufs, stage, 0, BM, BC).load(layout)
    if half == 1:
        x = image_rows(a_bufs, stage, 1, BM, BC).load(layout)
    return x


@gluon.jit
def take_pass(v, below, AXIS: gl.constexpr):
    """The elements of v under `below` (bits of a magnitude, one a row or column; AXIS is the other
    axis) that one pass takes: (hi, lo * 2^LOW, exponent of the largest, what is left is under
    this, 1 if anything is left)."""
    a = v.to(gl.int32, bitcast=True) & MAGNITUDE
    a = gl.where(a < gl.expand_dims(below, AXIS), a, 0)
    top = gl.maximum(gl.max(a, AXIS) >> 23, LEAST)
    floor = gl.maximum(top - RANGE, 0) << 23
    now = (a > 0) & (a >= gl.expand_dims(floor, AXIS))
    more = gl.max(gl.max(((a > 0) & (not_(now))).to(gl.int32), 1), 0)
    vs = gl.where(now, v * gl.expand_dims(power(127 + TOP - top), AXIS), 0.0)
    hi = vs.to(gl.float16)
    lo = ((vs - hi.to(gl.float32)) * 2.0**LOW).to(gl.float16)
    return hi, lo, top, floor, more


@gluon.jit
def not_(mask):
    """The opposite of a mask."""
    return mask ^ True


@gluon.jit
def add_scaled(acc, t, q):
    """acc + t * 2^q, the power in two steps that float32 has."""
    return acc + t * power(127 + (q >> 1)) * power(127 + q - (q >> 1))


@gluon.jit
def add_step(
    acc, a_bufs, w_bufs, bh, bl, stage, half,
    BM: gl.constexpr, BK: gl.constexpr, BC: gl.constexpr, BACKWARD: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Adds the products of the finite elements of a step: for every pass over the filter, every
    pass over the image."""
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    zero = gl.zeros((ROWS, BK), gl.float32, layout)
    if BACKWARD:
        w_layout: gl.constexpr = gl.BlockedLayout([4, 8], [2, 16], [4, 1], [1, 0])
        w_tile = w_bufs.index(stage).reshape((BC, BK))
        b_tiles = bh.reshape((BC, BK)), bl.reshape((BC, BK))
        b_hi = b_tiles[0]
        b_lo = b_tiles[1]
        REDUCED: gl.constexpr = 0
    else:
        w_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        w_tile = w_bufs.index(stage).reshape((BK, BC))
        b_tiles = bh.reshape((BK, BC)), bl.reshape((BK, BC))
        b_hi = b_tiles[0].permute((1, 0))
        b_lo = b_tiles[1].permute((1, 0))
        REDUCED: gl.constexpr = 1
    w_below = gl.full((BK,), INFINITE, gl.int32, gl.SliceLayout(REDUCED, w_layout))
    w_more = 1
    while w_more > 0:
        w_hi, w_lo, w_top, w_below, w_more = take_pass(w_tile.load(w_layout), w_below, REDUCED)
        b_tiles[0].store(w_hi)
        b_tiles[1].store(w_lo)
        fence_async_shared()
        columns = gl.convert_layout(w_top, gl.SliceLayout(0, layout))
        x_below = gl.full((ROWS,), INFINITE, gl.int32, gl.SliceLayout(1, operand))
        x_more = 1
        while x_more > 0:
            x = load_rows(a_bufs, stage, half, BM, BC, operand)
            hi, lo, x_top, x_below, x_more = take_pass(x, x_below, 1)
            rows = gl.convert_layout(x_top, gl.SliceLayout(1, layout))
            q = rows[:, None] + columns[None, :] - 2 * TOP
            t = warpgroup_mma(hi, b_lo, zero, use_acc=False)
            t = warpgroup_mma(lo, b_hi, t)
            acc = add_scaled(acc, t, q - LOW)
            t = warpgroup_mma(hi, b_hi, zero, use_acc=False)
            acc = add_scaled(acc, t, q)
    return acc


@gluon.jit
def any_odd(v):
    """1 if there is an Inf or NaN in v, else 0."""
    a = v.to(gl.int32, bitcast=True) & MAGNITUDE
    return gl.max(gl.max((a >= INFINITE).to(gl.int32), 1), 0)


@gluon.jit
def add_odd(
    acc, a_bufs, w_bufs, stage, half,
    BM: gl.constexpr, BK: gl.constexpr, BC: gl.constexpr, BACKWARD: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Adds the terms x * w of a step of which x or w is Inf or NaN, one channel after the other."""
    wide: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    tall: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    for i in range(BC):
        at = gl.arange(0, BC, layout=gl.SliceLayout(0, wide))
        x = load_rows(a_bufs, stage, half, BM, BC, wide)
        xc = gl.sum(gl.where((at == i)[None, :], x, 0.0), 1)
        xc = gl.convert_layout(xc, gl.SliceLayout(1, layout))
        if BACKWARD:
            at = gl.arange(0, BC, layout=gl.SliceLayout(1, tall))
            w = w_bufs.index(stage).reshape((BC, BK)).load(tall)
            wc = gl.sum(gl.where((at == i)[:, None], w, 0.0), 0)
        else:
            w = w_bufs.index(stage).reshape((BK, BC)).load(wide)
            wc = gl.sum(gl.where((at == i)[None, :], w, 0.0), 1)
        wc = gl.convert_layout(wc, gl.SliceLayout(0, layout))
        use = (xc - xc != 0)[:, None] | (wc - wc != 0)[None, :]
        acc += gl.where(use, xc[:, None] * wc[None, :], 0.0)
    return acc


@gluon.jit
def careful_consumer(
    y_ptr, bias_ptr, list_ptr, alpha, beta, act_a, act_b, a_bufs, w_bufs, bh, bl, empty, full,
    tiles, columns, inverse, box, size, taps, pad, stride, dilation, channels,
    logs, out, out_strides, channel_stride, out_channels,
    BM: gl.constexpr, BK: gl.constexpr, BC: gl.constexpr, STAGES: gl.constexpr,
    BACKWARD: gl.constexpr, UNIT: gl.constexpr, FLIP: gl.constexpr,
    BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Multiplies and stores the half tiles of the list."""
    RESIDUES: gl.constexpr = BACKWARD and not UNIT
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BK, 16]
    )
    odd_layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    count = gl.load(list_ptr)
    stage = 0
    phase = 0
    for item in range(gl.program_id(0), count, gl.num_programs(0)):
        entry = gl.load(list_ptr + 1 + item)
        half = entry % 2
        origin, rho, column = image_tile(entry // 2, tiles, columns, box, stride, inverse, RESIDUES)
        td, th, tw = image_taps(
            origin, rho, box, size, taps, pad, stride, dilation, BACKWARD, UNIT, FLIP
        )
        first = column * BK
        steps = (td[4] - td[3]) * (th[4] - th[3]) * (tw[4] - tw[3]) * gl.cdiv(channels, BC)
        acc = gl.zeros((ROWS, BK), gl.float32, layout)
        for _ in range(steps):
            mbarrier.wait(full.index(stage), phase)
            acc = add_step(acc, a_bufs, w_bufs, bh, bl, stage, half, BM, BK, BC, BACKWARD, layout)
            odd = any_odd(load_rows(a_bufs, stage, half, BM, BC, odd_layout))
            if BACKWARD:
                odd |= any_odd(w_bufs.index(stage).reshape((BC, BK)).load(odd_layout))
            else:
                odd |= any_odd(w_bufs.index(stage).reshape((BK, BC)).load(odd_layout))
            if odd > 0:
                acc = add_odd(acc, a_bufs, w_bufs, stage, half, BM, BK, BC, BACKWARD, layout)
            mbarrier.arrive(empty.index(stage), count=1)
            stage, phase = advance(stage, phase, STAGES)
        offset, inside = pixel_offsets(
            origin, rho, box, logs, out, out_strides, stride, half * ROWS, ROWS, layout, RESIDUES
        )
        v = add_old(acc, alpha, beta, y_ptr, offset, inside, first, out_channels, channel_stride)
        v = finish(v, bias_ptr, act_a, act_b, first, out_channels, BIAS, ACTIVATION)
        k = first + gl.arange(0, BK, layout=gl.SliceLayout(0, layout))
        ptr = y_ptr + offset[:, None] + (k.to(gl.int64) * channel_stride)[None, :]
        gl.store(ptr, v, mask=inside[:, None] & (k < out_channels)[None, :])


@gluon.jit
def convolution_image_careful_kernel(
    x_desc, w_desc, y_ptr, bias_ptr, list_ptr, alpha, beta, act_a, act_b,
    tiles, columns, group_columns, inverse, box, size, taps, pad, stride, dilation, channels,
    logs, out, out_strides, channel_stride, out_channels,
    BM: gl.constexpr, BK: gl.constexpr, BC: gl.constexpr, STAGES: gl.constexpr,
    BACKWARD: gl.constexpr, UNIT: gl.constexpr, FLIP: gl.constexpr, DEPTH: gl.constexpr,
    BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """The half tiles that convolution_image_f16x3_kernel put on the list: its arguments, but for
    w_desc, which views the filter (k, tap, c) itself."""
    a_bufs = gl.allocate_shared_memory(
        x_desc.dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout
    )
    w_bufs = gl.allocate_shared_memory(
        w_desc.dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout
    )
    half: gl.constexpr = gl.NVMMASharedLayout.get_default_for(w_desc.block_type.shape, gl.float16)
    bh = gl.allocate_shared_memory(gl.float16, w_desc.block_type.shape, half)
    bl = gl.allocate_shared_memory(gl.float16, w_desc.block_type.shape, half)
    empty, full = make_ring(STAGES, 1)
    follow()
    gl.warp_specialize(
        [
            (careful_consumer, (
                y_ptr, bias_ptr, list_ptr, alpha, beta, act_a, act_b, a_bufs, w_bufs, bh, bl,
                empty, full, tiles, columns, inverse, box, size, taps, pad, stride, dilation,
                channels, logs, out, out_strides, channel_stride, out_channels,
                BM, BK, BC, STAGES, BACKWARD, UNIT, FLIP, BIAS, ACTIVATION,
            )),
            (careful_producer, (
                x_desc, w_desc, list_ptr, a_bufs, w_bufs, empty, full,
                tiles, columns, group_columns, inverse, box, size, taps, pad, stride, dilation,
                channels, BK, BC, STAGES, BACKWARD, UNIT, FLIP, DEPTH,
            )),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip
