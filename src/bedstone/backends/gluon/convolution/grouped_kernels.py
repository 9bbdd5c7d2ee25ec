"""Convolution of many narrow groups on Hopper, forward and its gradient by data.

As image_kernels, for groups side by side: a tile's channels are those of several groups, its
filter holds zeros where a channel and a filter are of different groups. A program keeps the filter
of its channels, all taps, in shared memory, where it lays it out itself, and walks patches of
pixels; the matrix units multiply the zeros along, but memory is read as if there were none.

A zero times an infinity or NaN of another group would be NaN: tiles with a NaN in them are computed
again, one group's channels at a time, in ordinary arithmetic.
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

from bedstone.backends.gluon.convolution.epilogue import finish
from bedstone.backends.gluon.convolution.image_kernels import image_taps, image_tile, pick
from bedstone.backends.gluon.convolution.overlap import follow, lead
from bedstone.backends.gluon.convolution.ring import advance, make_ring, previous

CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(224), gl.constexpr(40)
TOGETHER = gl.constexpr(3)  # taps of the filter that are read at once


@gluon.jit
def first_patch(columns):
    """This program's column of channels, its first patch and the step to the next."""
    column = gl.program_id(0) % columns
    return column, gl.program_id(0) // columns, gl.num_programs(0) // columns


@gluon.jit
def filter_taps(
    w_ptr, tap, taps, out_first, reduced_first, out_group, reduced_group, out_count, reduced_count,
    stride_tap, stride_out, stride_reduced, BACKWARD: gl.constexpr, BK: gl.constexpr,
    BC: gl.constexpr,
):  # fmt: skip
    """Filter tap `tap` of a column: BK output channels x BC reduced channels, zeros between
    groups."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    o = gl.arange(0, BK, layout=gl.SliceLayout(1, layout))
    r = gl.arange(0, BC, layout=gl.SliceLayout(0, layout))
    same = (o // out_group)[:, None] == (r // reduced_group)[None, :]
    mask = (
        same & (out_first + o < out_count)[:, None] & (reduced_first + r < reduced_count)[None, :]
    )
    if BACKWARD:  # the filter's channels are the output's, a group's; its filters are reduced
        rows = o % out_group
        columns = reduced_first + r
    else:
        rows = out_first + o
        columns = r % reduced_group
    rows = rows.to(gl.int64) * stride_out
    columns = columns.to(gl.int64) * stride_reduced
    offset = rows[:, None] + columns[None, :]
    return gl.load(w_ptr + tap * stride_tap + offset, mask=mask & (tap < taps), other=0.0)


@gluon.jit
def load_filter(
    w_ptr, w_bufs, taps, out_first, reduced_first, out_group, reduced_group, out_count,
    reduced_count, stride_tap, stride_out, stride_reduced,
    TAPS: gl.constexpr, BACKWARD: gl.constexpr, BK: gl.constexpr, BC: gl.constexpr,
):  # fmt: skip
    """All taps of a column's filter into shared memory. TAPS is a multiple of TOGETHER."""
    for tap in range(0, TAPS, TOGETHER):
        v0 = filter_taps(
            w_ptr, tap, taps, out_first, reduced_first, out_group, reduced_group, out_count,
            reduced_count, stride_tap, stride_out, stride_reduced, BACKWARD, BK, BC,
        )  # fmt: skip
        v1 = filter_taps(
            w_ptr, tap + 1, taps, out_first, reduced_first, out_group, reduced_group, out_count,
            reduced_count, stride_tap, stride_out, stride_reduced, BACKWARD, BK, BC,
        )  # fmt: skip
        v2 = filter_taps(
            w_ptr, tap + 2, taps, out_first, reduced_first, out_group, reduced_group, out_count,
            reduced_count, stride_tap, stride_out, stride_reduced, BACKWARD, BK, BC,
        )  # fmt: skip
        w_bufs.index(tap).store(v0)
        w_bufs.index(tap + 1).store(v1)
        w_bufs.index(tap + 2).store(v2)
    fence_async_shared()


@gluon.jit
def grouped_producer(
    x_desc, a_bufs, empty, full, count, columns, tiles, inverse, box, size, taps, pad, stride,
    dilation, reduced,
    STAGES: gl.constexpr, BACKWARD: gl.constexpr, UNIT: gl.constexpr, FLIP: gl.constexpr,
    DEPTH: gl.constexpr,
):  # fmt: skip
    """Fills the ring: a box of the image for every patch of this program and every tap that meets
    the image."""
    column, begin, step = first_patch(columns)
    c = column * reduced
    stage = 0
    phase = 0
    for patch in range(begin, count, step):
        origin, rho, _ = image_tile(patch, tiles, 1, box, stride, inverse, BACKWARD and not UNIT)
        td, th, tw = image_taps(
            origin, rho, box, size, taps, pad, stride, dilation, BACKWARD, UNIT, FLIP
        )
        for jd in range(td[3], td[4]):
            for jh in range(th[3], th[4]):
                for jw in range(tw[3], tw[4]):
                    mbarrier.wait(empty.index(stage), phase ^ 1)
                    bar = full.index(stage)
                    mbarrier.expect(bar, x_desc.block_type.nbytes)
                    ih = th[0] + jh * dilation[1]
                    iw = tw[0] + jw * dilation[2]
                    a = a_bufs.index(stage)
                    if DEPTH:
                        at = [origin[0], td[0] + jd * dilation[0], ih, iw, c]
                        tma.async_copy_global_to_shared(x_desc, at, bar, a)
                    else:
                        at = [origin[0], ih, iw, c]
                        tma.async_copy_global_to_shared(x_desc, at, bar, a)
                    stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def one_by_one(
    x_ptr, w_ptr, origin, td, th, tw, box, logs, size, images, taps, stride, dilation, x_strides,
    out_first, reduced_first, out_group, reduced_group, out_count,
    stride_tap, stride_out, stride_reduced, first_row,
    ROWS: gl.constexpr, BK: gl.constexpr, BACKWARD: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """A tile from each group's own channels alone, one product at a time."""
    m = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    o = gl.arange(0, BK, layout=gl.SliceLayout(0, layout))
    n = origin[0] + (m >> (logs[2] + logs[1] + logs[0]))
    d = (m >> (logs[2] + logs[1])) & (box[1] - 1)
    h = (m >> logs[2]) & (box[2] - 1)
    w = m & (box[3] - 1)
    if not BACKWARD:
        d *= stride[0]
        h *= stride[1]
        w *= stride[2]
    group = o // out_group * reduced_group
    exists = out_first + o < out_count
    acc = gl.zeros((ROWS, BK), gl.float32, layout)
    for jd in range(td[3], td[4]):
        for jh in range(th[3], th[4]):
            for jw in range(tw[3], tw[4]):
                tap = (td[1] + jd * td[2]) * taps[1] + th[1] + jh * th[2]
                tap = tap * taps[2] + tw[1] + jw * tw[2]
                id = d + td[0] + jd * dilation[0]
                ih = h + th[0] + jh * dilation[1]
                iw = w + tw[0] + jw * dilation[2]
                inside = (n < images) & (id >= 0) & (id < size[0]) & (ih >= 0) & (ih < size[1])
                inside &= (iw >= 0) & (iw < size[2])
                pixel = n.to(gl.int64) * x_strides[0] + id.to(gl.int64) * x_strides[1]
                pixel += ih.to(gl.int64) * x_strides[2] + iw.to(gl.int64) * x_strides[3]
                for i in range(reduced_group):
                    c = reduced_first + group + i
                    x = gl.load(
                        x_ptr + pixel[:, None] + c[None, :],
                        mask=inside[:, None] & exists[None, :], other=0.0,
                    )  # fmt: skip
                    if BACKWARD:
                        at = (o % out_group) * stride_out + c * stride_reduced
                    else:
                        at = (out_first + o) * stride_out + i * stride_reduced
                    v = gl.load(w_ptr + tap * stride_tap + at, mask=exists, other=0.0)
                    acc += x.to(gl.float32) * v.to(gl.float32)[None, :]
    return acc


@gluon.jit
def grouped_consumer(
    IDX: gl.constexpr, x_ptr, w_ptr, y_descs, bias_ptr, alpha, beta, act_a, act_b,
    a_bufs, w_bufs, o_bufs, loaded, empty, full,
    count, columns, tiles, inverse, box, half, logs, size, images, taps, pad, stride, dilation,
    x_strides, reduced, out_group, reduced_group, out_count,
    stride_tap, stride_out, stride_reduced,
    BM: gl.constexpr, BK: gl.constexpr, BC: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, MIXED: gl.constexpr, BACKWARD: gl.constexpr, UNIT: gl.constexpr,
    FLIP: gl.constexpr, DEPTH: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Rows IDX * ROWS, ... of the patches: multiplies, checks, stores through TMA."""
    RESIDUES: gl.constexpr = BACKWARD and not UNIT
    ROWS: gl.constexpr = BM // CONSUMERS
    INSTR_K: gl.constexpr = 256 // a_bufs.dtype.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BK, INSTR_K]
    )
    column, begin, step = first_patch(columns)
    first = column * BK
    stage = 0
    phase = 0
    loads = 0
    for patch in range(begin, count, step):
        # Load and compute.
        origin, rho, _ = image_tile(patch, tiles, 1, box, stride, inverse, RESIDUES)
        td, th, tw = image_taps(
            origin, rho, box, size, taps, pad, stride, dilation, BACKWARD, UNIT, FLIP
        )
        steps = 0
        acc = gl.zeros((ROWS, BK), gl.float32, layout)
        for jd in range(td[3], td[4]):
            for jh in range(th[3], th[4]):
                for jw in range(tw[3], tw[4]):
                    tap = (td[1] + jd * td[2]) * taps[1] + th[1] + jh * th[2]
                    tap = tap * taps[2] + tw[1] + jw * tw[2]
                    mbarrier.wait(full.index(stage), phase)
                    a = a_bufs.index(stage).reshape((BM, BC)).slice(IDX * ROWS, ROWS, dim=0)
                    b = w_bufs.index(tap).permute((1, 0))
                    acc = warpgroup_mma(a, b, acc, is_async=True)
                    acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
                    mbarrier.arrive(empty.index(previous(stage, STAGES)), count=1, pred=steps > 0)
                    steps += 1
                    stage, phase = advance(stage, phase, STAGES)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index(previous(stage, STAGES)), count=1, pred=steps > 0)
        if MIXED:
            bad = gl.max(gl.max((acc != acc).to(gl.int32), 1), 0)
            if bad > 0:
                acc = one_by_one(
                    x_ptr, w_ptr, origin, td, th, tw, box, logs, size, images, taps, stride,
                    dilation, x_strides, first, column * reduced, out_group, reduced_group,
                    out_count, stride_tap, stride_out, stride_reduced, IDX * ROWS,
                    ROWS, BK, BACKWARD, layout,
                )  # fmt: skip
        # Store.
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
        v = finish(v, bias_ptr, act_a, act_b, first, out_count, BIAS, ACTIVATION)
        out_tile.store(v.to(o_bufs.dtype))
        fence_async_shared()
        pick(y_descs, rho, stride, at, full.index(0), o_buf, True, RESIDUES)
    tma.store_wait(0)


@gluon.jit
def convolution_grouped_kernel(
    x_desc, y_desc, y1_desc, y2_desc, y3_desc, x_ptr, w_ptr, bias_ptr, alpha, beta, act_a, act_b,
    count, columns, tiles, inverse, box, half, logs, size, images, taps, pad, stride, dilation,
    x_strides, reduced, out_group, reduced_group, out_count, reduced_count,
    stride_tap, stride_out, stride_reduced,
    BM: gl.constexpr, BK: gl.constexpr, BC: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, TAPS: gl.constexpr, MIXED: gl.constexpr, BACKWARD: gl.constexpr,
    UNIT: gl.constexpr, FLIP: gl.constexpr, DEPTH: gl.constexpr, BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
):  # fmt: skip
    """y = act(alpha * conv(x, w) + beta * y + bias), or the same with the transposed convolution,
    for groups of which one or (MIXED) several lie side by side in a column of channels.

    A program walks patches of BM pixels of one column: BK output channels, which read the
    `reduced` (at most BC) channels of the same groups, TAPS taps or fewer. x_desc, y_desc to
    y3_desc, tiles, inverse, box, half, logs, size and the window as in
    convolution_image_ws_kernel.

    count      patches in all; columns of channels
    out_group, reduced_group  channels of a group, of the image that is written and the one read;
               out_count, reduced_count of all groups
    stride_*   distances in the filter of taps, and of what belongs to output and reduced channels
    """
    a_bufs = gl.allocate_shared_memory(
        x_desc.dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout
    )
    w_bufs = gl.allocate_shared_memory(
        x_desc.dtype, [TAPS, BK, BC], gl.NVMMASharedLayout.get_default_for([BK, BC], x_desc.dtype)
    )
    o_bufs = gl.allocate_shared_memory(
        y_desc.dtype, [CONSUMERS] + y_desc.block_type.shape, y_desc.layout
    )
    y_descs = (y_desc,)
    if BACKWARD and not UNIT:
        y_descs = (y_desc, y1_desc, y2_desc, y3_desc)
    empty, full = make_ring(STAGES, CONSUMERS)
    loaded = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(loaded.index(i), count=1)
    lead()
    follow()
    column = gl.program_id(0) % columns
    load_filter(
        w_ptr, w_bufs, taps[0] * taps[1] * taps[2], column * BK, column * reduced, out_group,
        reduced_group, out_count, reduced_count, stride_tap, stride_out, stride_reduced,
        TAPS, BACKWARD, BK, BC,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (grouped_consumer, (
                0, x_ptr, w_ptr, y_descs, bias_ptr, alpha, beta, act_a, act_b,
                a_bufs, w_bufs, o_bufs, loaded, empty, full,
                count, columns, tiles, inverse, box, half, logs, size, images, taps, pad, stride,
                dilation, x_strides, reduced, out_group, reduced_group, out_count,
                stride_tap, stride_out, stride_reduced,
                BM, BK, BC, STAGES, CONSUMERS, MIXED, BACKWARD, UNIT, FLIP, DEPTH, BIAS, ACTIVATION,
            )),
            (grouped_consumer, (
                1, x_ptr, w_ptr, y_descs, bias_ptr, alpha, beta, act_a, act_b,
                a_bufs, w_bufs, o_bufs, loaded, empty, full,
                count, columns, tiles, inverse, box, half, logs, size, images, taps, pad, stride,
                dilation, x_strides, reduced, out_group, reduced_group, out_count,
                stride_tap, stride_out, stride_reduced,
                BM, BK, BC, STAGES, CONSUMERS, MIXED, BACKWARD, UNIT, FLIP, DEPTH, BIAS, ACTIVATION,
            )),
            (grouped_producer, (
                x_desc, a_bufs, empty, full, count, columns, tiles, inverse, box, size, taps, pad,
                stride, dilation, reduced, STAGES, BACKWARD, UNIT, FLIP, DEPTH,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
