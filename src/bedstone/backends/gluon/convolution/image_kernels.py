"""Warp-specialised implicit GEMM on Hopper: convolution forward and its gradient by data.

One producer warp asks TMA for tiles, four or eight consumer warps multiply them (wgmma), a ring of
stages lies between. The rows of the product are a patch of BN x BD x BH x BW output pixels: one box
of a tiled TMA map over the channels-last image. A filter tap only moves the box's origin, and TMA's
zero fill outside the tensor is the padding, so there is no index arithmetic an element, no im2col
and no workspace. Strides are the map's element strides. backward_data is the same kernel with
mirrored taps and the filter tile read the other way; its strides make one set of tiles a residue.
Idea of the pipeline: CUTLASS's warp-specialised kernels.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from bedstone.backends.gluon.convolution.epilogue import (
    add_old,
    finish,
    pixel_offsets,
    store_pixels,
)
from bedstone.backends.gluon.convolution.ring import (
    advance,
    grouped,
    make_ring,
    previous,
    tap_range,
)

CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(224), gl.constexpr(40)


@gluon.jit
def image_tile(tile, tiles, columns, box, stride, group, RESIDUES: gl.constexpr):
    """Tile number -> origin of its patch (n, d, h, w), residues (d, h, w) and column tile. All
    patches of a residue come before the next residue's: neighbours then take equally long (the
    other order ran a 1x1 gradient of stride 2 at 134 TFLOP/s instead of 181)."""
    rows = tiles[0] * tiles[1] * tiles[2] * tiles[3]
    if RESIDUES:
        rows *= stride[0] * stride[1] * stride[2]
    row, column = grouped(tile, rows, columns, group)
    w = row % tiles[3]
    row = row // tiles[3]
    h = row % tiles[2]
    row = row // tiles[2]
    d = row % tiles[1]
    row = row // tiles[1]
    n = row % tiles[0]
    rho = (0, 0, 0)
    if RESIDUES:
        left = row // tiles[0]
        rho = (left // (stride[2] * stride[1]), left // stride[2] % stride[1], left % stride[2])
    return (n * box[0], d * box[1], h * box[2], w * box[3]), rho, column


@gluon.jit
def image_taps(
    origin, rho, box, size, taps, pad, stride, dilation,
    BACKWARD: gl.constexpr, UNIT: gl.constexpr, FLIP: gl.constexpr,
):  # fmt: skip
    """`tap_range` of the three axes."""
    d = tap_range(
        origin[1], rho[0], size[0], taps[0], pad[0], stride[0], dilation[0], box[1],
        BACKWARD, UNIT, FLIP,
    )  # fmt: skip
    h = tap_range(
        origin[2], rho[1], size[1], taps[1], pad[1], stride[1], dilation[1], box[2],
        BACKWARD, UNIT, FLIP,
    )  # fmt: skip
    w = tap_range(
        origin[3], rho[2], size[2], taps[2], pad[2], stride[2], dilation[2], box[3],
        BACKWARD, UNIT, FLIP,
    )  # fmt: skip
    return d, h, w


@gluon.jit
def tile_count(tiles, columns, stride, RESIDUES: gl.constexpr):
    """Tiles of the whole problem."""
    count = tiles[0] * tiles[1] * tiles[2] * tiles[3] * columns
    if RESIDUES:
        count *= stride[0] * stride[1] * stride[2]
    return count


@gluon.jit
def image_producer(
    x_desc, w_desc, a_bufs, b_bufs, empty, full,
    tiles, columns, group_columns, group, box, size, taps, pad, stride, dilation, channels,
    BK: gl.constexpr, BC: gl.constexpr, STAGES: gl.constexpr, BACKWARD: gl.constexpr,
    UNIT: gl.constexpr, FLIP: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """Fills the ring: for every tile of this program, every tap that meets the image and every
    block of reduced channels, one box of the image and one of the filter."""
    RESIDUES: gl.constexpr = BACKWARD and not UNIT
    count = tile_count(tiles, columns, stride, RESIDUES)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), count, gl.num_programs(0)):
        origin, rho, column = image_tile(tile, tiles, columns, box, stride, group, RESIDUES)
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
                        b = b_bufs.index(stage)
                        if BACKWARD:
                            at = [ic, tap, (column - g * group_columns) * BK]
                            tma.async_copy_global_to_shared(w_desc, at, bar, b)
                        else:
                            tma.async_copy_global_to_shared(w_desc, [column * BK, tap, c], bar, b)
                        stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def image_work(
    tile, tiles, columns, group, box, size, taps, pad, stride, dilation, channels,
    BC: gl.constexpr, BACKWARD: gl.constexpr, UNIT: gl.constexpr, FLIP: gl.constexpr,
):  # fmt: skip
    """A tile's origin, residues, column tile and number of steps."""
    origin, rho, column = image_tile(
        tile, tiles, columns, box, stride, group, BACKWARD and not UNIT
    )
    d, h, w = image_taps(origin, rho, box, size, taps, pad, stride, dilation, BACKWARD, UNIT, FLIP)
    steps = (d[4] - d[3]) * (h[4] - h[3]) * (w[4] - w[3]) * gl.cdiv(channels, BC)
    return origin, rho, column, steps


@gluon.jit
def pick(y_descs, rho, stride, at, bar, buf, OUT: gl.constexpr, RESIDUES: gl.constexpr):
    """Copies buf to (OUT) or from the residue's own view of the output."""
    which = 0
    if RESIDUES:
        which = (rho[0] * stride[1] + rho[1]) * stride[2] + rho[2]
    for i in gl.static_range(4 if RESIDUES else 1):
        if which == i:
            if OUT:
                tma.async_copy_shared_to_global(y_descs[i], at, buf)
            else:
                tma.async_copy_global_to_shared(y_descs[i], at, bar, buf)


@gluon.jit
def image_consumer(
    IDX: gl.constexpr, y_descs, y_ptr, bias_ptr, alpha, beta, act_a, act_b,
    a_bufs, b_bufs, o_bufs, loaded, empty, full,
    tiles, columns, group, box, half, size, taps, pad, stride, dilation, channels,
    logs, out, out_strides, channel_stride, out_channels,
    BM: gl.constexpr, BK: gl.constexpr, BC: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, BACKWARD: gl.constexpr, UNIT: gl.constexpr, FLIP: gl.constexpr,
    DEPTH: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr, STORE: gl.constexpr,
):  # fmt: skip
    """Rows IDX * ROWS, ... of the tiles: multiplies what the ring holds into float32 accumulators
    and stores them. Consumers are not in step with one another, so that one's stores hide behind
    another's products. A stage is released one step late, when the product that read it has surely
    ended; the next tile's place is worked out while the last product runs."""
    RESIDUES: gl.constexpr = BACKWARD and not UNIT
    ROWS: gl.constexpr = BM // CONSUMERS
    INSTR_K: gl.constexpr = 256 // a_bufs.dtype.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BK, INSTR_K]
    )
    count = tile_count(tiles, columns, stride, RESIDUES)
    stage = 0
    phase = 0
    loads = 0
    origin, rho, column, steps = image_work(
        gl.program_id(0), tiles, columns, group, box, size, taps, pad, stride, dilation, channels,
        BC, BACKWARD, UNIT, FLIP,
    )  # fmt: skip
    for tile in range(gl.program_id(0), count, gl.num_programs(0)):
        # Load and compute.
        acc = gl.zeros((ROWS, BK), gl.float32, layout)
        for i in range(steps):
            mbarrier.wait(full.index(stage), phase)
            a = a_bufs.index(stage).reshape((BM, BC)).slice(IDX * ROWS, ROWS, dim=0)
            if BACKWARD:
                b = b_bufs.index(stage).reshape((BC, BK))
            else:
                b = b_bufs.index(stage).reshape((BK, BC)).permute((1, 0))
            acc = warpgroup_mma(a, b, acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            mbarrier.arrive(empty.index(previous(stage, STAGES)), count=1, pred=i > 0)
            stage, phase = advance(stage, phase, STAGES)
        next_origin, next_rho, next_column, next_steps = image_work(
            tile + gl.num_programs(0), tiles, columns, group, box, size, taps, pad, stride,
            dilation, channels, BC, BACKWARD, UNIT, FLIP,
        )  # fmt: skip
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index(previous(stage, STAGES)), count=1, pred=steps > 0)
        # Store.
        first = column * BK
        if STORE == "tma":
            n = origin[0] + IDX * half[0]
            h = origin[2] + IDX * half[2]
            w = origin[3] + IDX * half[3]
            at = [n, h, w, first]
            if DEPTH:
                at = [n, origin[1] + IDX * half[1], h, w, first]
            o_buf = o_bufs.index(IDX)
            out_tile = o_buf.reshape((ROWS, BK))
            tma.store_wait(0)
            v = alpha * acc
            if beta != 0:
                bar = loaded.index(IDX)
                mbarrier.expect(bar, y_descs[0].block_type.nbytes)
                pick(y_descs, rho, stride, at, bar, o_buf, False, RESIDUES)
                mbarrier.wait(bar, loads & 1)
                loads += 1
                v += beta * out_tile.load(layout).to(gl.float32)
            v = finish(v, bias_ptr, act_a, act_b, first, out_channels, BIAS, ACTIVATION)
            out_tile.store(v.to(o_bufs.dtype))
            fence_async_shared()
            pick(y_descs, rho, stride, at, full.index(0), o_buf, True, RESIDUES)
        else:
            offset, inside = pixel_offsets(
                origin, rho, box, logs, out, out_strides, stride, IDX * ROWS, ROWS, layout,
                RESIDUES,
            )  # fmt: skip
            v = add_old(
                acc, alpha, beta, y_ptr, offset, inside, first, out_channels, channel_stride
            )
            v = finish(v, bias_ptr, act_a, act_b, first, out_channels, BIAS, ACTIVATION)
            store_pixels(
                v, y_ptr, first, out_channels, origin, rho, box, logs, out, out_strides,
                channel_stride, stride, IDX * ROWS, RESIDUES, STORE,
            )  # fmt: skip
        origin, rho, column, steps = next_origin, next_rho, next_column, next_steps
    if STORE == "tma":
        tma.store_wait(0)


@gluon.jit
def convolution_image_ws_kernel(
    x_desc, w_desc, y_desc, y1_desc, y2_desc, y3_desc, y_ptr, bias_ptr, alpha, beta, act_a, act_b,
    tiles, columns, group_columns, group, box, half, size, taps, pad, stride, dilation, channels,
    logs, out, out_strides, channel_stride, out_channels,
    BM: gl.constexpr, BK: gl.constexpr, BC: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, BACKWARD: gl.constexpr, UNIT: gl.constexpr, FLIP: gl.constexpr,
    DEPTH: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr, STORE: gl.constexpr,
):  # fmt: skip
    """y = act(alpha * conv(x, w) + beta * y + bias), or the same with the transposed convolution.

    One program walks tiles of BM pixels x BK output channels, BC reduced channels of one tap a
    step, accumulating in float32; CONSUMERS share the pixels. `x` is the image that is read (dy in
    a backward pass), `y` the one that is written.

    x_desc   (n, [d,] h, w, c) with the strides of a forward convolution as element strides
    w_desc   (k, tap, c)
    y_desc   y (n, [d,] h, w, c), boxes of a consumer's pixels; with STORE other than "tma" masked
             stores through y_ptr take its place. A backward pass with strides has one view a
             residue of the pixels, y_desc to y3_desc
    tiles    patches along (n, d, h, w); columns tiles along the output channels, group_columns of
             them a group of the convolution; group patches walked together
    box      a patch (n, d, h, w); half where its second half begins
    size     image that is read (d, h, w); channels reduced, a group
    logs     log2 of box (d, h, w); out, out_strides, out_channels the image that is written
             (n, d, h, w), channel_stride its distance of channels
    """
    a_bufs = gl.allocate_shared_memory(
        x_desc.dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout
    )
    b_bufs = gl.allocate_shared_memory(
        w_desc.dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout
    )
    if STORE == "tma":
        o_bufs = gl.allocate_shared_memory(
            y_desc.dtype, [CONSUMERS] + y_desc.block_type.shape, y_desc.layout
        )
        y_descs = (y_desc,)
        if BACKWARD and not UNIT:
            y_descs = (y_desc, y1_desc, y2_desc, y3_desc)
    else:  # stand-ins
        o_bufs = a_bufs
        y_descs = (x_desc,)
    empty, full = make_ring(STAGES, CONSUMERS)
    loaded = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(loaded.index(i), count=1)
    fence_async_shared()
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (image_consumer, (
                    0, y_descs, y_ptr, bias_ptr, alpha, beta, act_a, act_b,
                    a_bufs, b_bufs, o_bufs, loaded, empty, full,
                    tiles, columns, group, box, half, size, taps, pad, stride, dilation, channels,
                    logs, out, out_strides, channel_stride, out_channels, BM, BK, BC, STAGES,
                    CONSUMERS, BACKWARD, UNIT, FLIP, DEPTH, BIAS, ACTIVATION, STORE,
                )),
                (image_consumer, (
                    1, y_descs, y_ptr, bias_ptr, alpha, beta, act_a, act_b,
                    a_bufs, b_bufs, o_bufs, loaded, empty, full,
                    tiles, columns, group, box, half, size, taps, pad, stride, dilation, channels,
                    logs, out, out_strides, channel_stride, out_channels, BM, BK, BC, STAGES,
                    CONSUMERS, BACKWARD, UNIT, FLIP, DEPTH, BIAS, ACTIVATION, STORE,
                )),
                (image_producer, (
                    x_desc, w_desc, a_bufs, b_bufs, empty, full,
                    tiles, columns, group_columns, group, box, size, taps, pad, stride, dilation,
                    channels, BK, BC, STAGES, BACKWARD, UNIT, FLIP, DEPTH,
                )),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (image_consumer, (
                    0, y_descs, y_ptr, bias_ptr, alpha, beta, act_a, act_b,
                    a_bufs, b_bufs, o_bufs, loaded, empty, full,
                    tiles, columns, group, box, half, size, taps, pad, stride, dilation, channels,
                    logs, out, out_strides, channel_stride, out_channels, BM, BK, BC, STAGES,
                    CONSUMERS, BACKWARD, UNIT, FLIP, DEPTH, BIAS, ACTIVATION, STORE,
                )),
                (image_producer, (
                    x_desc, w_desc, a_bufs, b_bufs, empty, full,
                    tiles, columns, group_columns, group, box, size, taps, pad, stride, dilation,
                    channels, BK, BC, STAGES, BACKWARD, UNIT, FLIP, DEPTH,
                )),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )  # fmt: skip
