"""Gradient by filter for windows three wide: one copy of x serves the three taps of a filter row.

Inside a patch, pixels are ordered [w][8 images]: a column of a patch is one 1024-byte atom of the
shared-memory swizzle (8 images x 64 channels x 2 bytes), so that the patches of the taps s = 0, 1,
2 are the same shared memory, begun zero, one or two atoms later. dy enters the matrix unit from
registers, once for the three. Three consumers take one filter row each: a tile is 64 filters x 9
taps x 64 channels. Steps are cut evenly over the chip as in filter_kernels, whose sum kernel
finishes the job.
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

from bedstone.backends.gluon.convolution.filter_kernels import (
    steps_of,
    store_part,
    work_range,
)
from bedstone.backends.gluon.convolution.overlap import follow
from bedstone.backends.gluon.convolution.ring import advance, make_ring

ROWS = gl.constexpr(3)  # filter rows a tile, one a consumer
ATOMS = gl.constexpr(16)  # patch columns of x in a stage: 14 outputs and a halo of 2
IMAGES = gl.constexpr(8)  # images side by side in an atom
BLOCK = gl.constexpr(64)  # filters and channels a tile
CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(160), gl.constexpr(24)


@gluon.jit
def atoms(bufs, atom, LENGTH: gl.constexpr):
    """LENGTH pixels x 64 channels from any atom on (`slice` would want a multiple of LENGTH)."""
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return bufs.index(atom)._reinterpret(bufs.dtype, [LENGTH, BLOCK], layout)


@gluon.jit
def halo_producer(
    x_desc, dy_desc, dy_bufs, x_bufs, empty, full,
    cut, filter_tiles, channel_tiles, row_tiles, filters, channels, out_rows, across, width,
    pad_h, pad_w, STAGES: gl.constexpr,
):  # fmt: skip
    """Fills the ring: a row of dy and the three rows of x that the filter rows meet."""
    run = work_range(cut)
    stage = 0
    phase = 0
    for tile in range(run[0], run[1]):
        begin, end = steps_of(tile, run, cut[2])
        rt = tile % row_tiles
        ct = tile // row_tiles % channel_tiles
        kt = tile // (row_tiles * channel_tiles)
        g = kt // filter_tiles
        k = g * filters + (kt - g * filter_tiles) * BLOCK
        c = g * channels + ct * BLOCK
        for i in range(begin, end):
            p = i % out_rows
            w = i // out_rows % across * width
            n = i // (out_rows * across) * IMAGES
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, dy_desc.block_type.nbytes + ROWS * x_desc.block_type.nbytes)
            dy = dy_bufs.index(stage * ATOMS)
            dy = dy._reinterpret(dy_desc.dtype, dy_desc.block_type.shape, dy_desc.layout)
            tma.async_copy_global_to_shared(dy_desc, [p, w, n, k], bar, dy)
            for r in gl.static_range(ROWS):
                x = x_bufs.index((stage * ROWS + r) * ATOMS)
                x = x._reinterpret(x_desc.dtype, x_desc.block_type.shape, x_desc.layout)
                at = [p + rt * ROWS + r - pad_h, w - pad_w, n, c]
                tma.async_copy_global_to_shared(x_desc, at, bar, x)
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def segment(
    dy_bufs, d, x_bufs, x, a0, a1, a2,
    layout: gl.constexpr, OFFSET: gl.constexpr, LENGTH: gl.constexpr,
):  # fmt: skip
    """Adds LENGTH columns, from OFFSET on, to the three taps' accumulators."""
    dy = atoms(dy_bufs, d + OFFSET, LENGTH * IMAGES).permute((1, 0))
    dy = dy.load(gl.DotOperandLayout(0, layout, 2))
    a0 = warpgroup_mma(dy, atoms(x_bufs, x + OFFSET, LENGTH * IMAGES), a0, is_async=True)
    a1 = warpgroup_mma(dy, atoms(x_bufs, x + OFFSET + 1, LENGTH * IMAGES), a1, is_async=True)
    a2 = warpgroup_mma(dy, atoms(x_bufs, x + OFFSET + 2, LENGTH * IMAGES), a2, is_async=True)
    return a0, a1, a2


@gluon.jit
def row_products(dy_bufs, d, x_bufs, x, a0, a1, a2, layout: gl.constexpr, WIDTH: gl.constexpr):
    """Adds a patch row of WIDTH columns (an even number) in segments of 8, 4 and 2."""
    t0, t1, t2 = a0, a1, a2
    if WIDTH >= 8:
        t0, t1, t2 = segment(dy_bufs, d, x_bufs, x, t0, t1, t2, layout, 0, 8)
    if WIDTH % 8 >= 4:
        t0, t1, t2 = segment(dy_bufs, d, x_bufs, x, t0, t1, t2, layout, WIDTH // 8 * 8, 4)
    if WIDTH % 4 >= 2:
        t0, t1, t2 = segment(dy_bufs, d, x_bufs, x, t0, t1, t2, layout, WIDTH // 4 * 4, 2)
    a0, a1, a2 = warpgroup_mma_wait(num_outstanding=0, deps=(t0, t1, t2))
    return a0, a1, a2


@gluon.jit
def halo_consumer(
    ROW: gl.constexpr, part_ptr, dy_bufs, x_bufs, empty, full,
    cut, row_tiles, out_rows, in_rows, pad_h,
    WIDTH: gl.constexpr, STAGES: gl.constexpr, SKIP: gl.constexpr,
):  # fmt: skip
    """Filter row ROW of the tiles: three accumulators of 64 filters x 64 channels."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 16]
    )
    run = work_range(cut)
    stage = 0
    phase = 0
    for tile in range(run[0], run[1]):
        begin, end = steps_of(tile, run, cut[2])
        a0 = gl.zeros((BLOCK, BLOCK), gl.float32, layout)
        a1 = gl.zeros((BLOCK, BLOCK), gl.float32, layout)
        a2 = gl.zeros((BLOCK, BLOCK), gl.float32, layout)
        for i in range(begin, end):
            mbarrier.wait(full.index(stage), phase)
            d = stage * ATOMS
            x = (stage * ROWS + ROW) * ATOMS
            t0, t1, t2 = a0, a1, a2
            if SKIP:  # rows of x in the padding
                row = i % out_rows + tile % row_tiles * ROWS + ROW - pad_h
                if (row >= 0) & (row < in_rows):
                    t0, t1, t2 = row_products(dy_bufs, d, x_bufs, x, t0, t1, t2, layout, WIDTH)
            else:
                t0, t1, t2 = row_products(dy_bufs, d, x_bufs, x, t0, t1, t2, layout, WIDTH)
            a0, a1, a2 = t0, t1, t2
            mbarrier.arrive(empty.index(stage), count=1)
            stage, phase = advance(stage, phase, STAGES)
        slot = (gl.program_id(0) + tile) * (ROWS * 3) + ROW * 3
        store_part(part_ptr, slot, a0, 0, BLOCK)
        store_part(part_ptr, slot + 1, a1, 0, BLOCK)
        store_part(part_ptr, slot + 2, a2, 0, BLOCK)


@gluon.jit
def convolution_filter_halo_kernel(
    x_desc, dy_desc, part_ptr,
    cut, filter_tiles, channel_tiles, row_tiles, filters, channels, out_rows, in_rows, across,
    pad_h, pad_w,
    WIDTH: gl.constexpr, STAGES: gl.constexpr, SKIP: gl.constexpr, NARROW: gl.constexpr,
):  # fmt: skip
    """Parts of dw[k, 3 rows, 3, c] = sum of dy * x, in slots of 9 blocks of 64 x 64 float32.

    x_desc   (h, w, n, c), box 1 x 16 x 8 x 64, or 1 x 8 x 8 x 64 if NARROW: images at most 7 wide
             with their padding, whose columns beyond the box stay zero
    dy_desc  (h, w, n, k), box 1 x WIDTH rounded up to 8 or 16 x 8 x 64
    tiles    are groups x filter_tiles x channel_tiles x row_tiles; one takes cut[2] = eights of
             images x `across` patches of WIDTH columns x out_rows steps
    filters, channels  of one group
    SKIP     leave out rows of x in the padding
    """
    atom: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    dy_bufs = gl.allocate_shared_memory(dy_desc.dtype, [STAGES * ATOMS, IMAGES, BLOCK], atom)
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES * ROWS * ATOMS, IMAGES, BLOCK], atom)
    empty, full = make_ring(STAGES, ROWS)
    if NARROW:
        zero_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        zeros = gl.zeros((ATOMS * IMAGES, BLOCK), x_desc.dtype, zero_layout)
        for i in gl.static_range(STAGES * ROWS):
            atoms(x_bufs, i * ATOMS, ATOMS * IMAGES).store(zeros)
        fence_async_shared()
    follow()
    gl.warp_specialize(
        [
            (halo_consumer, (
                0, part_ptr, dy_bufs, x_bufs, empty, full, cut, row_tiles,
                out_rows, in_rows, pad_h, WIDTH, STAGES, SKIP,
            )),
            (halo_consumer, (
                1, part_ptr, dy_bufs, x_bufs, empty, full, cut, row_tiles,
                out_rows, in_rows, pad_h, WIDTH, STAGES, SKIP,
            )),
            (halo_consumer, (
                2, part_ptr, dy_bufs, x_bufs, empty, full, cut, row_tiles,
                out_rows, in_rows, pad_h, WIDTH, STAGES, SKIP,
            )),
            (halo_producer, (
                x_desc, dy_desc, dy_bufs, x_bufs, empty, full, cut, filter_tiles, channel_tiles,
                row_tiles, filters, channels, out_rows, across, WIDTH, pad_h, pad_w, STAGES,
            )),
        ],
        [4, 4, 1],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
