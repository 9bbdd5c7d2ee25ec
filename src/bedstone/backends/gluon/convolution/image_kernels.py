"""Warp-specialised implicit GEMM on Hopper: convolution forward and its gradient by data.

One producer warp asks TMA for tiles, four or eight consumer warps multiply them (wgmma), a ring of
stages lies between. The rows of the product are a patch of BN x BD x BH x BW output pixels: one box
of a tiled TMA map over the channels-last image. A filter tap only moves the box's origin, and TMA's
zero fill outside the tensor is the padding, so there is no index arithmetic an element, no im2col
and no workspace. Strides are the map's element strides. backward_data is the same kernel with
mirrored taps and the filter tile read the other way; its strides make one set of tiles a residue.
Where tiles are too few to fill the chip, the steps of each are shared by several programs, whose
parts a second kernel adds in order. Idea of the pipeline: CUTLASS's warp-specialised kernels.
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
    halves,
    pixel_offsets,
    store_direct,
    store_pixels,
)
from bedstone.backends.gluon.convolution.filter_kernels import store_part
from bedstone.backends.gluon.convolution.overlap import follow, lead
from bedstone.backends.gluon.convolution.ring import (
    advance,
    grouped,
    make_ring,
    previous,
    quotient,
    tap_range,
)

CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(224), gl.constexpr(40)


@gluon.jit
def image_tile(tile, tiles, columns, box, stride, inverse, RESIDUES: gl.constexpr):
    """Tile number -> origin of its patch (n, d, h, w), residues (d, h, w) and column tile. All
    patches of a residue come before the next residue's: neighbours then take equally long (the
    other order ran a 1x1 gradient of stride 2 at 134 TFLOP/s instead of 181)."""
    rows = tiles[0] * tiles[1] * tiles[2] * tiles[3]
    if RESIDUES:
        rows *= stride[0] * stride[1] * stride[2]
    row, column = grouped(tile, rows, columns, inverse)
    left = quotient(row, inverse, 1)
    w = row - left * tiles[3]
    row = quotient(left, inverse, 2)
    h = left - row * tiles[2]
    n = quotient(row, inverse, 3)
    d = row - n * tiles[1]
    rho = (0, 0, 0)
    if RESIDUES:
        left = n // tiles[0]
        n -= left * tiles[0]
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
def load_step(
    x_desc, w_desc, a_bufs, b_bufs, empty, full, stage, phase,
    n, id, ih, iw, g, c, tap, column, group_columns, channels,
    BK: gl.constexpr, STAGES: gl.constexpr, K_MAJOR: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """Fills a stage: the box of the image at (n, id, ih, iw), reduced channels c, ... of group g,
    and the filter's box of a tap and a column tile."""
    mbarrier.wait(empty.index(stage), phase ^ 1)
    bar = full.index(stage)
    mbarrier.expect(bar, x_desc.block_type.nbytes + w_desc.block_type.nbytes)
    a = a_bufs.index(stage)
    ic = g * channels + c
    if DEPTH:
        tma.async_copy_global_to_shared(x_desc, [n, id, ih, iw, ic], bar, a)
    else:
        tma.async_copy_global_to_shared(x_desc, [n, ih, iw, ic], bar, a)
    b = b_bufs.index(stage)
    if K_MAJOR:
        tma.async_copy_global_to_shared(w_desc, [column * BK, tap, c], bar, b)
    else:
        at = [ic, tap, (column - g * group_columns) * BK]
        tma.async_copy_global_to_shared(w_desc, at, bar, b)
    return advance(stage, phase, STAGES)


@gluon.jit
def image_producer(
    x_desc, w_desc, a_bufs, b_bufs, empty, full,
    tiles, columns, group_columns, inverse, box, size, taps, pad, stride, dilation, channels, parts,
    BK: gl.constexpr, BC: gl.constexpr, STAGES: gl.constexpr, BACKWARD: gl.constexpr,
    UNIT: gl.constexpr, FLIP: gl.constexpr, DEPTH: gl.constexpr, K_MAJOR: gl.constexpr,
    SPLIT: gl.constexpr,
):  # fmt: skip
    """Fills the ring: for every tile of this program, every tap that meets the image and every
    block of reduced channels, one box of the image and one of the filter; with SPLIT for a part of
    these steps."""
    RESIDUES: gl.constexpr = BACKWARD and not UNIT
    count = tile_count(tiles, columns, stride, RESIDUES) * parts
    stage = 0
    phase = 0
    for item in range(gl.program_id(0), count, gl.num_programs(0)):
        tile = item // parts if SPLIT else item
        origin, rho, column = image_tile(tile, tiles, columns, box, stride, inverse, RESIDUES)
        td, th, tw = image_taps(
            origin, rho, box, size, taps, pad, stride, dilation, BACKWARD, UNIT, FLIP
        )
        g = column // group_columns
        if SPLIT:
            blocks = gl.cdiv(channels, BC)
            across = gl.maximum(tw[4] - tw[3], 1)
            down = gl.maximum(th[4] - th[3], 1)
            steps = (td[4] - td[3]) * (th[4] - th[3]) * (tw[4] - tw[3]) * blocks
            begin, end = part_of(item % parts, steps, parts)
            for i in range(begin, end):
                j = i // blocks
                jw = tw[3] + j % across
                jh = th[3] + j // across % down
                jd = td[3] + j // across // down
                tap = (td[1] + jd * td[2]) * taps[1] + th[1] + jh * th[2]
                tap = tap * taps[2] + tw[1] + jw * tw[2]
                stage, phase = load_step(
                    x_desc, w_desc, a_bufs, b_bufs, empty, full, stage, phase,
                    origin[0], td[0] + jd * dilation[0], th[0] + jh * dilation[1],
                    tw[0] + jw * dilation[2], g, i % blocks * BC, tap, column, group_columns,
                    channels, BK, STAGES, K_MAJOR, DEPTH,
                )  # fmt: skip
        else:
            for jd in range(td[3], td[4]):
                for jh in range(th[3], th[4]):
                    for jw in range(tw[3], tw[4]):
                        tap = (td[1] + jd * td[2]) * taps[1] + th[1] + jh * th[2]
                        tap = tap * taps[2] + tw[1] + jw * tw[2]
                        id = td[0] + jd * dilation[0]
                        ih = th[0] + jh * dilation[1]
                        iw = tw[0] + jw * dilation[2]
                        for c in range(0, channels, BC):
                            stage, phase = load_step(
                                x_desc, w_desc, a_bufs, b_bufs, empty, full, stage, phase,
                                origin[0], id, ih, iw, g, c, tap, column, group_columns, channels,
                                BK, STAGES, K_MAJOR, DEPTH,
                            )  # fmt: skip


@gluon.jit
def part_of(part, steps, parts):
    """The steps (begin, end) of a part of a tile."""
    return part * steps // parts, (part + 1) * steps // parts


@gluon.jit
def image_work(
    item, tiles, columns, inverse, box, size, taps, pad, stride, dilation, channels, parts,
    BC: gl.constexpr, BACKWARD: gl.constexpr, UNIT: gl.constexpr, FLIP: gl.constexpr,
    SPLIT: gl.constexpr,
):  # fmt: skip
    """A tile's origin, residues, column tile and number of steps (with SPLIT of its part)."""
    tile = item // parts if SPLIT else item
    origin, rho, column = image_tile(
        tile, tiles, columns, box, stride, inverse, BACKWARD and not UNIT
    )
    d, h, w = image_taps(origin, rho, box, size, taps, pad, stride, dilation, BACKWARD, UNIT, FLIP)
    steps = (d[4] - d[3]) * (h[4] - h[3]) * (w[4] - w[3]) * gl.cdiv(channels, BC)
    if SPLIT:
        begin, end = part_of(item % parts, steps, parts)
        steps = end - begin
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
    tiles, columns, inverse, box, half, size, taps, pad, stride, dilation, channels, parts,
    logs, out, out_strides, channel_stride, out_channels,
    BM: gl.constexpr, BK: gl.constexpr, BC: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, BACKWARD: gl.constexpr, UNIT: gl.constexpr, FLIP: gl.constexpr,
    DEPTH: gl.constexpr, K_MAJOR: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
    STORE: gl.constexpr,
):  # fmt: skip
    """Rows IDX * ROWS, ... of the tiles: multiplies what the ring holds into float32 accumulators
    and stores them. Consumers are not in step with one another, so that one's stores hide behind
    another's products. A stage is released one step late, when the product that read it has surely
    ended; the next tile's place is worked out while the last product runs."""
    RESIDUES: gl.constexpr = BACKWARD and not UNIT
    SPLIT: gl.constexpr = STORE == "part"
    ROWS: gl.constexpr = BM // CONSUMERS
    INSTR_K: gl.constexpr = 256 // a_bufs.dtype.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BK, INSTR_K]
    )
    count = tile_count(tiles, columns, stride, RESIDUES) * parts
    stage = 0
    phase = 0
    loads = 0
    origin, rho, column, steps = image_work(
        gl.program_id(0), tiles, columns, inverse, box, size, taps, pad, stride, dilation, channels,
        parts, BC, BACKWARD, UNIT, FLIP, SPLIT,
    )  # fmt: skip
    for item in range(gl.program_id(0), count, gl.num_programs(0)):
        # Load and compute.
        acc = gl.zeros((ROWS, BK), gl.float32, layout)
        for i in range(steps):
            mbarrier.wait(full.index(stage), phase)
            a = a_bufs.index(stage).reshape((BM, BC)).slice(IDX * ROWS, ROWS, dim=0)
            if K_MAJOR:
                b = b_bufs.index(stage).reshape((BK, BC)).permute((1, 0))
            else:
                b = b_bufs.index(stage).reshape((BC, BK))
            acc = warpgroup_mma(a, b, acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            mbarrier.arrive(empty.index(previous(stage, STAGES)), count=1, pred=i > 0)
            stage, phase = advance(stage, phase, STAGES)
        next_origin, next_rho, next_column, next_steps = image_work(
            item + gl.num_programs(0), tiles, columns, inverse, box, size, taps, pad, stride,
            dilation, channels, parts, BC, BACKWARD, UNIT, FLIP, SPLIT,
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
        elif STORE == "part":
            store_part(y_ptr, item, acc, IDX * ROWS, BM)
        else:
            offset, inside = pixel_offsets(
                origin, rho, box, logs, out, out_strides, stride, IDX * ROWS, ROWS, layout,
                RESIDUES,
            )  # fmt: skip
            if STORE == "direct":  # by halves, for want of registers
                low, high = halves(acc)
                store_direct(
                    low, alpha, beta, y_ptr, bias_ptr, act_a, act_b, offset, inside, first,
                    out_channels, BIAS, ACTIVATION,
                )  # fmt: skip
                store_direct(
                    high, alpha, beta, y_ptr, bias_ptr, act_a, act_b, offset, inside,
                    first + BK // 2, out_channels, BIAS, ACTIVATION,
                )  # fmt: skip
            else:
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
    tiles, columns, group_columns, inverse, box, half, size, taps, pad, stride, dilation, channels,
    parts, logs, out, out_strides, channel_stride, out_channels,
    BM: gl.constexpr, BK: gl.constexpr, BC: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, BACKWARD: gl.constexpr, UNIT: gl.constexpr, FLIP: gl.constexpr,
    DEPTH: gl.constexpr, K_MAJOR: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
    STORE: gl.constexpr,
):  # fmt: skip
    """y = act(alpha * conv(x, w) + beta * y + bias), or the same with the transposed convolution.

    One program walks tiles of BM pixels x BK output channels, BC reduced channels of one tap a
    step, accumulating in float32; CONSUMERS share the pixels. `x` is the image that is read (dy in
    a backward pass), `y` the one that is written.

    x_desc   (n, [d,] h, w, c) with the strides of a forward convolution as element strides
    w_desc   (k, tap, c); K_MAJOR: the reduced channels are its last axis, else the first
    y_desc   y (n, [d,] h, w, c), boxes of a consumer's pixels; with STORE other than "tma" masked
             stores through y_ptr take its place. A backward pass with strides has one view a
             residue of the pixels, y_desc to y3_desc
    parts    programs that share a tile; with STORE "part" item tile * parts + part of y_ptr is
             BM x BK float32 sums, which convolution_image_sum_kernel adds
    tiles    patches along (n, d, h, w); columns tiles along the output channels, group_columns of
             them a group of the convolution
    inverse  see ring.quotient; of the divisors L2_GROUP * columns and tiles along w, h and d
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
    if STORE != "part":
        lead()
    follow()
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (image_consumer, (
                    0, y_descs, y_ptr, bias_ptr, alpha, beta, act_a, act_b,
                    a_bufs, b_bufs, o_bufs, loaded, empty, full,
                    tiles, columns, inverse, box, half, size, taps, pad, stride, dilation, channels,
                    parts, logs, out, out_strides, channel_stride, out_channels, BM, BK, BC,
                    STAGES, CONSUMERS, BACKWARD, UNIT, FLIP, DEPTH, K_MAJOR, BIAS, ACTIVATION,
                    STORE,
                )),
                (image_consumer, (
                    1, y_descs, y_ptr, bias_ptr, alpha, beta, act_a, act_b,
                    a_bufs, b_bufs, o_bufs, loaded, empty, full,
                    tiles, columns, inverse, box, half, size, taps, pad, stride, dilation, channels,
                    parts, logs, out, out_strides, channel_stride, out_channels, BM, BK, BC,
                    STAGES, CONSUMERS, BACKWARD, UNIT, FLIP, DEPTH, K_MAJOR, BIAS, ACTIVATION,
                    STORE,
                )),
                (image_producer, (
                    x_desc, w_desc, a_bufs, b_bufs, empty, full,
                    tiles, columns, group_columns, inverse, box, size, taps, pad, stride, dilation,
                    channels, parts, BK, BC, STAGES, BACKWARD, UNIT, FLIP, DEPTH, K_MAJOR,
                    STORE == "part",
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
                    tiles, columns, inverse, box, half, size, taps, pad, stride, dilation, channels,
                    parts, logs, out, out_strides, channel_stride, out_channels, BM, BK, BC,
                    STAGES, CONSUMERS, BACKWARD, UNIT, FLIP, DEPTH, K_MAJOR, BIAS, ACTIVATION,
                    STORE,
                )),
                (image_producer, (
                    x_desc, w_desc, a_bufs, b_bufs, empty, full,
                    tiles, columns, group_columns, inverse, box, size, taps, pad, stride, dilation,
                    channels, parts, BK, BC, STAGES, BACKWARD, UNIT, FLIP, DEPTH, K_MAJOR,
                    STORE == "part",
                )),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )  # fmt: skip


@gluon.jit
def convolution_image_sum_kernel(
    part_ptr, y_ptr, bias_ptr, alpha, beta, act_a, act_b,
    tiles, columns, inverse, box, stride, parts, logs, out, out_strides, channel_stride,
    out_channels,
    BM: gl.constexpr, BK: gl.constexpr, ROWS: gl.constexpr, RESIDUES: gl.constexpr,
    BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """y = act(alpha * (sum of a tile's parts, in order) + beta * y + bias) for ROWS x BK of it;
    arguments as in convolution_image_ws_kernel."""
    lead()
    follow()
    VEC: gl.constexpr = 4
    ACROSS: gl.constexpr = BK // VEC if BK // VEC < 32 else 32
    layout: gl.constexpr = gl.BlockedLayout([1, VEC], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    tile = gl.program_id(0) // (BM // ROWS)
    first_row = gl.program_id(0) % (BM // ROWS) * ROWS
    i = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    j = gl.arange(0, BK, layout=gl.SliceLayout(0, layout))
    ptr = part_ptr + tile.to(gl.int64) * parts * (BM * BK) + (i[:, None] * BK + j[None, :])
    acc = gl.load(ptr)
    for _ in range(1, parts):
        ptr += BM * BK
        acc += gl.load(ptr)
    origin, rho, column = image_tile(tile, tiles, columns, box, stride, inverse, RESIDUES)
    first = column * BK
    offset, inside = pixel_offsets(
        origin, rho, box, logs, out, out_strides, stride, first_row, ROWS, layout, RESIDUES
    )
    v = add_old(acc, alpha, beta, y_ptr, offset, inside, first, out_channels, channel_stride)
    v = finish(v, bias_ptr, act_a, act_b, first, out_channels, BIAS, ACTIVATION)
    k = first + gl.arange(0, BK, layout=gl.SliceLayout(0, layout))
    at = y_ptr + offset[:, None] + (k.to(gl.int64) * channel_stride)[None, :]
    mask = inside[:, None] & (k < out_channels)[None, :]
    gl.store(at, v.to(y_ptr.dtype.element_ty), mask=mask)
