"""float32 convolution with float32's accuracy from three float16 products on Hopper.

float16's matrix rate is twice tf32's. A row of the image tile (one pixel, 64 channels) is scaled by
a power of two so that its largest magnitude lies in [2^14, 2^15) and split, x = hi + lo, both
float16 (11 + 11 bits), lo kept times 2^11; filters likewise, one scale an output channel, prepared
by split_kernels. Then x * w is hi * w_hi + (lo * w_hi + hi * w_lo) / 2^11 within 2^-20 relative,
at worst, for elements down to 2^-29 of the largest of their row or filter. The matrix unit's own
sums truncate, so each step's products are added to a float32 sum in ordinary registers, where the
rows' scales are undone.

What that cannot hold is noticed. Half a tile that meets smaller elements, rows of x from 2^50 on
or Inf is not stored but put on a list, which the careful kernel (careful_kernels) works off. A NaN
of x makes every sum of its row NaN, as it should.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from bedstone.backends.gluon.convolution.epilogue import add_old, finish, pixel_offsets
from bedstone.backends.gluon.convolution.image_kernels import image_taps, image_tile, tile_count
from bedstone.backends.gluon.convolution.overlap import follow
from bedstone.backends.gluon.convolution.ring import advance, make_ring

CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(232), gl.constexpr(24)
ROWS = gl.constexpr(64)  # pixels of a consumer
# Biased exponents E of float32. A row of largest exponent E is scaled by 2^(TOP - E), to [2^14,
# 2^15); E is taken as LEAST at least, where the scale is float32's largest power of two.
TOP, LEAST = gl.constexpr(141), gl.constexpr(14)
RANGE = gl.constexpr(29)  # bits below a row's largest within which hi + lo keeps 22 bits
HUGE = gl.constexpr(177)  # rows from 2^50 on might overflow the sums
# Sums are kept 2^LIFT larger than rows' scales say, lest small ones underflow.
LIFT = gl.constexpr(30)
LOW = gl.constexpr(11)  # lo is kept times 2^LOW
BEYOND = gl.constexpr(1 << 16)  # set beside the exponent of a column that is beyond the kernel


@gluon.jit
def power(exponent):
    """2^(exponent - 127) for a biased exponent of 0 (then 0) to 254."""
    return (exponent << 23).to(gl.float32, bitcast=True)


@gluon.jit
def column_info(info_ptr, first, columns, BK: gl.constexpr, layout: gl.constexpr):
    """Exponents of a column tile, and BEYOND."""
    k = first + gl.arange(0, BK, layout=layout)
    return gl.load(info_ptr + k, mask=k < columns, other=LEAST)


@gluon.jit
def survey(x):
    """Of each row of a tile: its largest exponent, LEAST at least, and 1 if it is beyond the fast
    kernel (huge, Inf or elements too small), else 0."""
    top = gl.max(gl.abs(x), 1).to(gl.int32, bitcast=True)  # of numbers: a NaN makes its own way
    e = gl.maximum(top >> 23, LEAST)
    # Twice a magnitude's bits less one, unsigned, so that zeros come last.
    twice = (x.to(gl.int32, bitcast=True) << 1) - 1
    least = gl.min(twice.to(gl.uint32, bitcast=True), 1) >> 1
    floor = gl.maximum(e - RANGE, 0) << 23
    beyond = (e >= HUGE) | (least.to(gl.int32, bitcast=True) < floor - 1)
    return e, beyond.to(gl.int32)


@gluon.jit
def split(x, e):
    """hi and lo * 2^LOW, float16, of x times its row's scale."""
    xs = x * power(127 + TOP - e)[:, None]
    hi = xs.to(gl.float16)
    lo = ((xs - hi.to(gl.float32)) * 2.0**LOW).to(gl.float16)
    return hi, lo


@gluon.jit
def unscale(acc, info):
    """Sums in float32's own scale: the columns' and the constant scales undone. In two steps, each
    a power of two that float32 has."""
    q = (info % BEYOND)[None, :] - (TOP + 14 + LIFT)
    return acc * power(127 + (q >> 1)) * power(127 + q - (q >> 1))


@gluon.jit
def f16x3_producer(
    x_desc, w_desc, a_bufs, bh_bufs, bl_bufs, empty, full,
    tiles, columns, group_columns, inverse, box, size, taps, pad, stride, dilation, channels,
    BK: gl.constexpr, BC: gl.constexpr, STAGES: gl.constexpr, BACKWARD: gl.constexpr,
    UNIT: gl.constexpr, FLIP: gl.constexpr, DEPTH: gl.constexpr, PRODUCTS: gl.constexpr,
):  # fmt: skip
    """Fills the ring as image_producer does, with both planes of the filter (for one product the
    first)."""
    PLANES: gl.constexpr = 2 if PRODUCTS == 3 else 1
    RESIDUES: gl.constexpr = BACKWARD and not UNIT
    count = tile_count(tiles, columns, stride, RESIDUES)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), count, gl.num_programs(0)):
        origin, rho, column = image_tile(tile, tiles, columns, box, stride, inverse, RESIDUES)
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
                        nbytes: gl.constexpr = (
                            x_desc.block_type.nbytes + PLANES * w_desc.block_type.nbytes
                        )
                        mbarrier.expect(bar, nbytes)
                        a = a_bufs.index(stage)
                        ic = g * channels + c
                        if DEPTH:
                            at = [origin[0], id, ih, iw, ic]
                            tma.async_copy_global_to_shared(x_desc, at, bar, a)
                        else:
                            at = [origin[0], ih, iw, ic]
                            tma.async_copy_global_to_shared(x_desc, at, bar, a)
                        bh = bh_bufs.index(stage)
                        bl = bl_bufs.index(stage)
                        if BACKWARD:
                            k = (column - g * group_columns) * BK
                            tma.async_copy_global_to_shared(w_desc, [0, ic, tap, k], bar, bh)
                            if PLANES == 2:
                                tma.async_copy_global_to_shared(w_desc, [1, ic, tap, k], bar, bl)
                        else:
                            k = column * BK
                            tma.async_copy_global_to_shared(w_desc, [0, k, tap, c], bar, bh)
                            if PLANES == 2:
                                tma.async_copy_global_to_shared(w_desc, [1, k, tap, c], bar, bl)
                        stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def image_rows(a_bufs, stage, IDX: gl.constexpr, BM: gl.constexpr, BC: gl.constexpr):
    """A consumer's rows of the image tile in a stage."""
    return a_bufs.index(stage).reshape((BM, BC)).slice(IDX * ROWS, ROWS, dim=0)


@gluon.jit
def filter_planes(
    bh_bufs, bl_bufs, stage, BK: gl.constexpr, BC: gl.constexpr, BACKWARD: gl.constexpr
):
    """The filter's hi and lo in a stage, as right operands."""
    if BACKWARD:
        bh = bh_bufs.index(stage).reshape((BC, BK))
        bl = bl_bufs.index(stage).reshape((BC, BK))
    else:
        bh = bh_bufs.index(stage).reshape((BK, BC)).permute((1, 0))
        bl = bl_bufs.index(stage).reshape((BK, BC)).permute((1, 0))
    return bh, bl


@gluon.jit
def f16x3_consumer(
    IDX: gl.constexpr, y_ptr, bias_ptr, info_ptr, list_ptr, alpha, beta, act_a, act_b,
    a_bufs, bh_bufs, bl_bufs, empty, full,
    tiles, columns, inverse, box, size, taps, pad, stride, dilation, channels,
    logs, out, out_strides, channel_stride, out_channels,
    BM: gl.constexpr, BK: gl.constexpr, BC: gl.constexpr, STAGES: gl.constexpr,
    BACKWARD: gl.constexpr, UNIT: gl.constexpr, FLIP: gl.constexpr,
    BIAS: gl.constexpr, ACTIVATION: gl.constexpr, PRODUCTS: gl.constexpr,
):  # fmt: skip
    """Rows IDX * 64, ... of the tiles: split the image, multiply, add, store. The next step's
    image is split while this step's products run."""
    RESIDUES: gl.constexpr = BACKWARD and not UNIT
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BK, 16]
    )
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    count = tile_count(tiles, columns, stride, RESIDUES)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), count, gl.num_programs(0)):
        # Which tile, how many steps.
        origin, rho, column = image_tile(tile, tiles, columns, box, stride, inverse, RESIDUES)
        td, th, tw = image_taps(
            origin, rho, box, size, taps, pad, stride, dilation, BACKWARD, UNIT, FLIP
        )
        first = column * BK
        steps = (td[4] - td[3]) * (th[4] - th[3]) * (tw[4] - tw[3]) * gl.cdiv(channels, BC)
        # Load and compute.
        acc = gl.zeros((ROWS, BK), gl.float32, layout)
        t = gl.zeros((ROWS, BK), gl.float32, layout)
        x = gl.zeros((ROWS, BC), gl.float32, operand)
        if steps > 0:
            mbarrier.wait(full.index(stage), phase)
            x = image_rows(a_bufs, stage, IDX, BM, BC).load(operand)
        e, beyond = survey(x)
        hi, lo = split(x, e)
        for i in range(steps):
            bh, bl = filter_planes(bh_bufs, bl_bufs, stage, BK, BC, BACKWARD)
            if PRODUCTS == 3:
                t = warpgroup_mma(hi, bl, t, is_async=True, use_acc=False)
                t = warpgroup_mma(lo, bh, t, is_async=True)
            else:
                t = warpgroup_mma(hi, bh, t, is_async=True, use_acc=False)
            factor = gl.convert_layout(e, rows) + LIFT
            next_stage, next_phase = advance(stage, phase, STAGES)
            if i + 1 < steps:
                mbarrier.wait(full.index(next_stage), next_phase)
            else:  # reads this stage again, for nothing, rather than one that is being filled
                next_stage = stage
            x = image_rows(a_bufs, next_stage, IDX, BM, BC).load(operand)
            e, next_beyond = survey(x)
            beyond = beyond | next_beyond
            if PRODUCTS == 3:
                t = warpgroup_mma_wait(num_outstanding=0, deps=(t,))
                acc += t * power(factor - LOW)[:, None]
                t = warpgroup_mma(hi, bh, t, is_async=True, use_acc=False)
            next_hi, next_lo = split(x, e)
            t = warpgroup_mma_wait(num_outstanding=0, deps=(t,))
            mbarrier.arrive(empty.index(stage), count=1)
            acc += t * power(factor)[:, None]
            hi, lo = next_hi, next_lo
            stage, phase = advance(stage, phase, STAGES)
        # Store, or leave to the careful kernel.
        info = column_info(info_ptr, first, out_channels, BK, gl.SliceLayout(0, layout))
        if gl.maximum(gl.max(beyond, 0), gl.max(info // BEYOND, 0)) > 0:
            at = gl.atomic_add(list_ptr, 1)
            gl.store(list_ptr + 1 + at, tile * 2 + IDX)
        else:
            offset, inside = pixel_offsets(
                origin, rho, box, logs, out, out_strides, stride, IDX * ROWS, ROWS, layout,
                RESIDUES,
            )  # fmt: skip
            v = unscale(acc, info)
            v = add_old(v, alpha, beta, y_ptr, offset, inside, first, out_channels, channel_stride)
            v = finish(v, bias_ptr, act_a, act_b, first, out_channels, BIAS, ACTIVATION)
            k = first + gl.arange(0, BK, layout=gl.SliceLayout(0, layout))
            ptr = y_ptr + offset[:, None] + (k.to(gl.int64) * channel_stride)[None, :]
            gl.store(ptr, v, mask=inside[:, None] & (k < out_channels)[None, :])


@gluon.jit
def convolution_image_f16x3_kernel(
    x_desc, w_desc, y_ptr, bias_ptr, info_ptr, list_ptr, alpha, beta, act_a, act_b,
    tiles, columns, group_columns, inverse, box, size, taps, pad, stride, dilation, channels,
    logs, out, out_strides, channel_stride, out_channels,
    BM: gl.constexpr, BK: gl.constexpr, BC: gl.constexpr, STAGES: gl.constexpr,
    BACKWARD: gl.constexpr, UNIT: gl.constexpr, FLIP: gl.constexpr, DEPTH: gl.constexpr,
    BIAS: gl.constexpr, ACTIVATION: gl.constexpr, PRODUCTS: gl.constexpr,
):  # fmt: skip
    """convolution_image_ws_kernel for float32, two consumers of 64 pixels each.

    PRODUCTS   3, or 1 for what tf32 promises: hi * hi alone

    w_desc     (plane, k, tap, c): hi and lo * 2^11
    info_ptr   a column's exponent, and BEYOND, from convolution_split_filter_kernel
    list_ptr   how many halves of tiles were left out, and which: 2 * tile + half
    """
    a_bufs = gl.allocate_shared_memory(
        x_desc.dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout
    )
    bh_bufs = gl.allocate_shared_memory(
        w_desc.dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout
    )
    bl_bufs = bh_bufs
    if PRODUCTS == 3:
        bl_bufs = gl.allocate_shared_memory(
            w_desc.dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout
        )
    empty, full = make_ring(STAGES, 2)
    follow()
    gl.warp_specialize(
        [
            (f16x3_consumer, (
                0, y_ptr, bias_ptr, info_ptr, list_ptr, alpha, beta, act_a, act_b,
                a_bufs, bh_bufs, bl_bufs, empty, full,
                tiles, columns, inverse, box, size, taps, pad, stride, dilation,
                channels, logs, out, out_strides, channel_stride, out_channels,
                BM, BK, BC, STAGES, BACKWARD, UNIT, FLIP, BIAS, ACTIVATION, PRODUCTS,
            )),
            (f16x3_consumer, (
                1, y_ptr, bias_ptr, info_ptr, list_ptr, alpha, beta, act_a, act_b,
                a_bufs, bh_bufs, bl_bufs, empty, full,
                tiles, columns, inverse, box, size, taps, pad, stride, dilation,
                channels, logs, out, out_strides, channel_stride, out_channels,
                BM, BK, BC, STAGES, BACKWARD, UNIT, FLIP, BIAS, ACTIVATION, PRODUCTS,
            )),
            (f16x3_producer, (
                x_desc, w_desc, a_bufs, bh_bufs, bl_bufs, empty, full,
                tiles, columns, group_columns, inverse, box, size, taps, pad, stride, dilation,
                channels, BK, BC, STAGES, BACKWARD, UNIT, FLIP, DEPTH, PRODUCTS,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
