"""1x1 convolution on Hopper straight from channels-first memory, and its gradients.

Image n is a matrix X of channels x pixels, pixels adjacent: its result is W X. The matrix unit
takes 16-bit X as it lies in memory, TMA brings boxes of it, and the rows of a tile of the result
are filters, its columns pixels, so that nothing is transposed. The gradient by data is the same
with W read the other way; the gradient by filter, the sum of dY X^T over images, has the reduced
pixels adjacent in both operands, and its work is cut evenly over the chip as in filter_kernels.
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

from bedstone.backends.gluon.convolution.filter_kernels import steps_of, store_part, work_range
from bedstone.backends.gluon.convolution.overlap import follow, lead
from bedstone.backends.gluon.convolution.ring import advance, make_ring, previous
from bedstone.backends.triton.pointwise import activate

CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(224), gl.constexpr(40)


@gluon.jit
def planar_tile(tile, row_tiles, across):
    """Tile number -> (image, tile of rows, tile of pixels): all rows of the same pixels follow one
    another, so that these are read from memory once."""
    rest = tile // row_tiles
    n = rest // across
    return n, tile - rest * row_tiles, rest - n * across


@gluon.jit
def planar_producer(
    x_desc, w_desc, x_bufs, w_bufs, empty, full, tiles, row_tiles, across, channels,
    BM: gl.constexpr, BP: gl.constexpr, BC: gl.constexpr, STAGES: gl.constexpr,
    K_MAJOR: gl.constexpr,
):  # fmt: skip
    """Fills the ring: for every tile of this program and every block of reduced channels, a box of
    the image and one of the filter."""
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        n, row, column = planar_tile(tile, row_tiles, across)
        for c in range(0, channels, BC):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, x_desc.block_type.nbytes + w_desc.block_type.nbytes)
            x = x_bufs.index(stage)
            w = w_bufs.index(stage)
            tma.async_copy_global_to_shared(x_desc, [n, c, column * BP], bar, x)
            if K_MAJOR:
                tma.async_copy_global_to_shared(w_desc, [row * BM, 0, c], bar, w)
            else:
                tma.async_copy_global_to_shared(w_desc, [c, 0, row * BM], bar, w)
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def planar_consumer(
    IDX: gl.constexpr, y_desc, y_ptr, bias_ptr, alpha, beta, act_a, act_b,
    x_bufs, w_bufs, o_bufs, empty, full,
    tiles, row_tiles, across, channels, rows, pixels, y_image, y_row,
    BM: gl.constexpr, BP: gl.constexpr, BC: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, K_MAJOR: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Rows IDX * ROWS, ... of the tiles: multiplies what the ring holds, stores through TMA."""
    ROWS: gl.constexpr = BM // CONSUMERS
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BP, 16]
    )
    steps = gl.cdiv(channels, BC)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        # Load and compute.
        acc = gl.zeros((ROWS, BP), gl.float32, layout)
        for i in range(steps):
            mbarrier.wait(full.index(stage), phase)
            if K_MAJOR:
                a = w_bufs.index(stage).reshape((BM, BC)).slice(IDX * ROWS, ROWS, dim=0)
            else:
                a = w_bufs.index(stage).reshape((BC, BM)).slice(IDX * ROWS, ROWS, dim=1)
                a = a.permute((1, 0))
            b = x_bufs.index(stage).reshape((BC, BP))
            acc = warpgroup_mma(a, b, acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            mbarrier.arrive(empty.index(previous(stage, STAGES)), count=1, pred=i > 0)
            stage, phase = advance(stage, phase, STAGES)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index(previous(stage, STAGES)), count=1)
        # Store.
        n, row, column = planar_tile(tile, row_tiles, across)
        first = row * BM + IDX * ROWS
        k = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        v = alpha * acc
        if beta != 0:
            p = column * BP + gl.arange(0, BP, layout=gl.SliceLayout(0, layout))
            ptr = y_ptr + n.to(gl.int64) * y_image + (k.to(gl.int64) * y_row)[:, None] + p[None, :]
            mask = (k < rows)[:, None] & (p < pixels)[None, :]
            v += beta * gl.load(ptr, mask=mask, other=0.0).to(gl.float32)
        if BIAS:
            v += gl.load(bias_ptr + k, mask=k < rows, other=0.0).to(gl.float32)[:, None]
        if ACTIVATION != "none":
            v = activate(v, ACTIVATION, act_a, act_b)
        o_buf = o_bufs.index(IDX)
        tma.store_wait(0)
        o_buf.reshape((ROWS, BP)).store(v.to(o_bufs.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(y_desc, [n, first, column * BP], o_buf)
    tma.store_wait(0)


@gluon.jit
def convolution_planar_kernel(
    x_desc, w_desc, y_desc, y_ptr, bias_ptr, alpha, beta, act_a, act_b,
    tiles, row_tiles, across, channels, rows, pixels, y_image, y_row,
    BM: gl.constexpr, BP: gl.constexpr, BC: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, K_MAJOR: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """y[n] = act(alpha * w x[n] + beta * y[n] + bias), or the same with w transposed.

    One program walks tiles of BM rows (output channels) x BP pixels of an image, BC reduced
    channels a step, accumulating in float32; CONSUMERS share the rows. What lies outside is read
    as zero and not written, by TMA.

    x_desc  (n, c, p), box 1 x BC x BP; y_desc (n, k, p), box 1 x BM / CONSUMERS x BP
    w_desc  (k, 1, c), the reduced channels last (K_MAJOR) or first
    tiles   in all: images x across (tiles of pixels) x row_tiles
    y_image, y_row  distances in y of images and output channels, of which there are `rows`
    """
    x_bufs = gl.allocate_shared_memory(
        x_desc.dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout
    )
    w_bufs = gl.allocate_shared_memory(
        w_desc.dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout
    )
    o_bufs = gl.allocate_shared_memory(
        y_desc.dtype, [CONSUMERS] + y_desc.block_type.shape, y_desc.layout
    )
    empty, full = make_ring(STAGES, CONSUMERS)
    lead()
    follow()
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (planar_consumer, (
                    0, y_desc, y_ptr, bias_ptr, alpha, beta, act_a, act_b,
                    x_bufs, w_bufs, o_bufs, empty, full,
                    tiles, row_tiles, across, channels, rows, pixels, y_image, y_row,
                    BM, BP, BC, STAGES, CONSUMERS, K_MAJOR, BIAS, ACTIVATION,
                )),
                (planar_consumer, (
                    1, y_desc, y_ptr, bias_ptr, alpha, beta, act_a, act_b,
                    x_bufs, w_bufs, o_bufs, empty, full,
                    tiles, row_tiles, across, channels, rows, pixels, y_image, y_row,
                    BM, BP, BC, STAGES, CONSUMERS, K_MAJOR, BIAS, ACTIVATION,
                )),
                (planar_producer, (
                    x_desc, w_desc, x_bufs, w_bufs, empty, full, tiles, row_tiles, across,
                    channels, BM, BP, BC, STAGES, K_MAJOR,
                )),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (planar_consumer, (
                    0, y_desc, y_ptr, bias_ptr, alpha, beta, act_a, act_b,
                    x_bufs, w_bufs, o_bufs, empty, full,
                    tiles, row_tiles, across, channels, rows, pixels, y_image, y_row,
                    BM, BP, BC, STAGES, CONSUMERS, K_MAJOR, BIAS, ACTIVATION,
                )),
                (planar_producer, (
                    x_desc, w_desc, x_bufs, w_bufs, empty, full, tiles, row_tiles, across,
                    channels, BM, BP, BC, STAGES, K_MAJOR,
                )),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )  # fmt: skip


@gluon.jit
def planar_filter_producer(
    x_desc, dy_desc, a_bufs, b_bufs, empty, full, cut, channel_tiles, across,
    BK: gl.constexpr, BC: gl.constexpr, BP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fills the ring with boxes of dy and x for the steps of this program."""
    run = work_range(cut)
    stage = 0
    phase = 0
    for tile in range(run[0], run[1]):
        begin, end = steps_of(tile, run, cut[2])
        kt = tile // channel_tiles
        ct = tile - kt * channel_tiles
        for i in range(begin, end):
            n = i // across
            p = (i - n * across) * BP
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, x_desc.block_type.nbytes + dy_desc.block_type.nbytes)
            a = a_bufs.index(stage)
            b = b_bufs.index(stage)
            tma.async_copy_global_to_shared(dy_desc, [n, kt * BK, p], bar, a)
            tma.async_copy_global_to_shared(x_desc, [n, ct * BC, p], bar, b)
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def planar_filter_consumer(
    IDX: gl.constexpr, part_ptr, a_bufs, b_bufs, empty, full, cut,
    BK: gl.constexpr, BC: gl.constexpr, BP: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
):  # fmt: skip
    """Filters IDX * ROWS, ... of the tiles: multiplies and stores parts of the sums."""
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
        for i in range(begin, end):
            mbarrier.wait(full.index(stage), phase)
            a = a_bufs.index(stage).reshape((BK, BP)).slice(IDX * ROWS, ROWS, dim=0)
            b = b_bufs.index(stage).reshape((BC, BP)).permute((1, 0))
            acc = warpgroup_mma(a, b, acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            mbarrier.arrive(empty.index(previous(stage, STAGES)), count=1, pred=i > begin)
            stage, phase = advance(stage, phase, STAGES)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index(previous(stage, STAGES)), count=1)
        store_part(part_ptr, gl.program_id(0) + tile, acc, IDX * ROWS, BK)


@gluon.jit
def convolution_planar_filter_kernel(
    x_desc, dy_desc, part_ptr, cut, channel_tiles, across,
    BK: gl.constexpr, BC: gl.constexpr, BP: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
):  # fmt: skip
    """Slots of dw = sum over images of dy x^T, as convolution_filter_ws_kernel writes them.

    x_desc  (n, c, p), box 1 x BC x BP; dy_desc (n, k, p), box 1 x BK x BP
    cut     of the steps: a tile has images x across (boxes of pixels) of them
    """
    a_bufs = gl.allocate_shared_memory(
        dy_desc.dtype, [STAGES] + dy_desc.block_type.shape, dy_desc.layout
    )
    b_bufs = gl.allocate_shared_memory(
        x_desc.dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout
    )
    empty, full = make_ring(STAGES, CONSUMERS)
    follow()
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (planar_filter_consumer, (
                    0, part_ptr, a_bufs, b_bufs, empty, full, cut, BK, BC, BP, STAGES, CONSUMERS,
                )),
                (planar_filter_consumer, (
                    1, part_ptr, a_bufs, b_bufs, empty, full, cut, BK, BC, BP, STAGES, CONSUMERS,
                )),
                (planar_filter_producer, (
                    x_desc, dy_desc, a_bufs, b_bufs, empty, full, cut, channel_tiles, across,
                    BK, BC, BP, STAGES,
                )),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (planar_filter_consumer, (
                    0, part_ptr, a_bufs, b_bufs, empty, full, cut, BK, BC, BP, STAGES, CONSUMERS,
                )),
                (planar_filter_producer, (
                    x_desc, dy_desc, a_bufs, b_bufs, empty, full, cut, channel_tiles, across,
                    BK, BC, BP, STAGES,
                )),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )  # fmt: skip
