"""Warp-specialised gradient by filter on Hopper, with the reduction cut evenly over the chip.

dw[k, tap, c] = sum over output pixels of dy[pixel, k] * x[pixel moved by the tap, c]. A tile is
BK x BC of one tap; its reduction walks patches of BP output pixels, which TMA brings of dy and, the
origin moved by the tap, of x. All steps of all tiles form one line that is cut into equal runs, one
a program (stream-K, Osama et al., arXiv 2301.03598); a program writes what it has of a tile into
its own slot of the workspace, and a second kernel adds the slots of a tile in order: the result is
the same at every run. With one run a tile there are no slots and dw is written at once.
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

from bedstone.backends.gluon.convolution.ring import advance, make_ring, previous

CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(224), gl.constexpr(40)


@gluon.jit
def work_range(tiles, tile_steps):
    """This program's run of the tiles * tile_steps steps: (first tile, end tile, steps into the
    first tile, steps into the last tile)."""
    total = tiles.to(gl.int64) * tile_steps
    first = gl.program_id(0) * total // gl.num_programs(0)
    last = (gl.program_id(0) + 1) * total // gl.num_programs(0)
    first_tile = first // tile_steps
    end_tile = (last + tile_steps - 1) // tile_steps
    begin = first - first_tile * tile_steps
    end = last - (end_tile - 1) * tile_steps
    return (
        first_tile.to(gl.int32), end_tile.to(gl.int32), begin.to(gl.int32), end.to(gl.int32)
    )  # fmt: skip


@gluon.jit
def steps_of(tile, run, tile_steps):
    """The steps (begin, end) of a tile that belong to the run."""
    begin = gl.where(tile == run[0], run[2], 0)
    end = gl.where(tile == run[1] - 1, run[3], tile_steps)
    return begin, end


@gluon.jit
def filter_tile(tile, filter_tiles, channel_tiles, taps):
    """Tile number -> (group, filter tile, channel tile, tap d, h, w)."""
    w = tile % taps[2]
    tile = tile // taps[2]
    h = tile % taps[1]
    tile = tile // taps[1]
    d = tile % taps[0]
    tile = tile // taps[0]
    c = tile % channel_tiles
    tile = tile // channel_tiles
    return tile // filter_tiles, tile % filter_tiles, c, d, h, w


@gluon.jit
def patch_origin(i, patches, box):
    """Patch number -> the output pixel (n, d, h, w) where it begins."""
    w = i % patches[3] * box[3]
    rest = i // patches[3]
    h = rest % patches[2] * box[2]
    rest = rest // patches[2]
    d = rest % patches[1] * box[1]
    return rest // patches[1] * box[0], d, h, w


@gluon.jit
def filter_producer(
    x_desc, dy_desc, a_bufs, b_bufs, empty, full,
    tiles, tile_steps, filter_tiles, channel_tiles, patches, box, taps, pad, stride, dilation,
    filters, channels,
    BK: gl.constexpr, BC: gl.constexpr, STAGES: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """Fills the ring with patches of dy and of x for the steps of this program."""
    run = work_range(tiles, tile_steps)
    stage = 0
    phase = 0
    for tile in range(run[0], run[1]):
        begin, end = steps_of(tile, run, tile_steps)
        g, kt, ct, rd, rh, rw = filter_tile(tile, filter_tiles, channel_tiles, taps)
        k = g * filters + kt * BK
        c = g * channels + ct * BC
        for i in range(begin, end):
            n, d, h, w = patch_origin(i, patches, box)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, x_desc.block_type.nbytes + dy_desc.block_type.nbytes)
            ih = h * stride[1] + rh * dilation[1] - pad[1]
            iw = w * stride[2] + rw * dilation[2] - pad[2]
            a = a_bufs.index(stage)
            b = b_bufs.index(stage)
            if DEPTH:
                id = d * stride[0] + rd * dilation[0] - pad[0]
                tma.async_copy_global_to_shared(dy_desc, [n, d, h, w, k], bar, a)
                tma.async_copy_global_to_shared(x_desc, [n, id, ih, iw, c], bar, b)
            else:
                tma.async_copy_global_to_shared(dy_desc, [n, h, w, k], bar, a)
                tma.async_copy_global_to_shared(x_desc, [n, ih, iw, c], bar, b)
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def store_part(part_ptr, slot, acc, first_row, HEIGHT: gl.constexpr):
    """Rows of a partial tile of HEIGHT rows, row-major, into its slot."""
    ROWS: gl.constexpr = acc.type.shape[0]
    BC: gl.constexpr = acc.type.shape[1]
    layout: gl.constexpr = acc.type.layout
    i = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    j = gl.arange(0, BC, layout=gl.SliceLayout(0, layout))
    base = part_ptr + slot.to(gl.int64) * (HEIGHT * BC)
    gl.store(base + i[:, None] * BC + j[None, :], acc)


@gluon.jit
def filter_consumer(
    IDX: gl.constexpr, dw_ptr, part_ptr, alpha, beta, a_bufs, b_bufs, empty, full,
    tiles, tile_steps, filter_tiles, channel_tiles, taps, filters, channels, dw_strides, flip,
    BK: gl.constexpr, BC: gl.constexpr, BP: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, PARTIAL: gl.constexpr,
):  # fmt: skip
    """Filters IDX * ROWS, ... of the tiles: multiplies dy's patches, read transposed, by x's;
    stores tiles or parts of them."""
    ROWS: gl.constexpr = BK // CONSUMERS
    INSTR_K: gl.constexpr = 256 // a_bufs.dtype.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BC, INSTR_K]
    )
    run = work_range(tiles, tile_steps)
    stage = 0
    phase = 0
    for tile in range(run[0], run[1]):
        begin, end = steps_of(tile, run, tile_steps)
        acc = gl.zeros((ROWS, BC), gl.float32, layout)
        for i in range(begin, end):
            mbarrier.wait(full.index(stage), phase)
            a = a_bufs.index(stage).reshape((BP, BK)).slice(IDX * ROWS, ROWS, dim=1)
            b = b_bufs.index(stage).reshape((BP, BC))
            acc = warpgroup_mma(a.permute((1, 0)), b, acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            mbarrier.arrive(empty.index(previous(stage, STAGES)), count=1, pred=i > begin)
            stage, phase = advance(stage, phase, STAGES)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index(previous(stage, STAGES)), count=1)
        if PARTIAL:
            store_part(part_ptr, gl.program_id(0) + tile, acc, IDX * ROWS, BK)
        else:
            g, kt, ct, rd, rh, rw = filter_tile(tile, filter_tiles, channel_tiles, taps)
            tap = (rd * taps[1] + rh) * taps[2] + rw
            if flip:
                tap = taps[0] * taps[1] * taps[2] - 1 - tap
            k = kt * BK + IDX * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
            c = ct * BC + gl.arange(0, BC, layout=gl.SliceLayout(0, layout))
            ptr = dw_ptr + tap * dw_strides[1] + ((g * filters + k) * dw_strides[0])[:, None]
            ptr += (c * dw_strides[2])[None, :]
            mask = (k < filters)[:, None] & (c < channels)[None, :]
            v = alpha * acc
            if beta != 0:
                v += beta * gl.load(ptr, mask=mask, other=0.0).to(gl.float32)
            gl.store(ptr, v.to(dw_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def convolution_filter_ws_kernel(
    x_desc, dy_desc, dw_ptr, part_ptr, alpha, beta,
    tiles, tile_steps, filter_tiles, channel_tiles, patches, box, taps, pad, stride, dilation,
    filters, channels, dw_strides, flip,
    BK: gl.constexpr, BC: gl.constexpr, BP: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, DEPTH: gl.constexpr, PARTIAL: gl.constexpr,
):  # fmt: skip
    """dw = alpha * sum over pixels of dy * x + beta * dw, or parts of the sums in slots.

    x_desc      (n, [d,] h, w, c) with the convolution's strides as element strides, box BP x BC
    dy_desc     (n, [d,] h, w, k), box BP x BK
    tiles       group x filter_tiles x channel_tiles x taps of them, tile_steps patches each
    patches     along (n, d, h, w); box of each
    filters, channels  of one group; dw_strides (k, tap, c); flip reverses the taps
    CONSUMERS   share a tile's filters
    PARTIAL     write slot program + tile of part_ptr (BK x BC float32) instead of dw
    """
    a_bufs = gl.allocate_shared_memory(
        dy_desc.dtype, [STAGES] + dy_desc.block_type.shape, dy_desc.layout
    )
    b_bufs = gl.allocate_shared_memory(
        x_desc.dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout
    )
    empty, full = make_ring(STAGES, CONSUMERS)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (filter_consumer, (
                    0, dw_ptr, part_ptr, alpha, beta, a_bufs, b_bufs, empty, full,
                    tiles, tile_steps, filter_tiles, channel_tiles, taps, filters, channels,
                    dw_strides, flip, BK, BC, BP, STAGES, CONSUMERS, PARTIAL,
                )),
                (filter_consumer, (
                    1, dw_ptr, part_ptr, alpha, beta, a_bufs, b_bufs, empty, full,
                    tiles, tile_steps, filter_tiles, channel_tiles, taps, filters, channels,
                    dw_strides, flip, BK, BC, BP, STAGES, CONSUMERS, PARTIAL,
                )),
                (filter_producer, (
                    x_desc, dy_desc, a_bufs, b_bufs, empty, full,
                    tiles, tile_steps, filter_tiles, channel_tiles, patches, box, taps, pad,
                    stride, dilation, filters, channels, BK, BC, STAGES, DEPTH,
                )),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (filter_consumer, (
                    0, dw_ptr, part_ptr, alpha, beta, a_bufs, b_bufs, empty, full,
                    tiles, tile_steps, filter_tiles, channel_tiles, taps, filters, channels,
                    dw_strides, flip, BK, BC, BP, STAGES, CONSUMERS, PARTIAL,
                )),
                (filter_producer, (
                    x_desc, dy_desc, a_bufs, b_bufs, empty, full,
                    tiles, tile_steps, filter_tiles, channel_tiles, patches, box, taps, pad,
                    stride, dilation, filters, channels, BK, BC, STAGES, DEPTH,
                )),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )  # fmt: skip


@triton.jit
def first_program(step, total, programs):
    """The program whose run of `total` steps cut into `programs` runs holds the step."""
    p = step * programs // total
    return p + tl.where((p + 1) * total // programs <= step, 1, 0)


@triton.jit
def convolution_filter_sum_kernel(
    part_ptr, dw_ptr, alpha, beta,
    tiles, tile_steps, programs, filter_tiles, tap_groups, channel_tiles, taps,
    filters, channels, stride_k, stride_tap, stride_c, flip,
    BK: tl.constexpr, BC: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """dw = alpha * (sum of a tile's slots, in the order of their programs) + beta * dw.

    One program adds ROWS x BC of one of a slot's PARTS blocks (taps that were computed together),
    SLOTS slots at once. `programs` is the grid of the kernel that wrote them.
    """
    pid = tl.program_id(0)
    block = pid % (BK // ROWS)
    pid = pid // (BK // ROWS)
    part = pid % PARTS
    tile = pid // PARTS
    total = tiles.to(tl.int64) * tile_steps
    start = tile.to(tl.int64) * tile_steps
    begin = first_program(start, total, programs)
    end = first_program(start + tile_steps - 1, total, programs)
    o = tl.arange(0, ROWS * BC)
    acc = tl.zeros((ROWS * BC,), tl.float32)
    for p in range(begin, end + 1, SLOTS):
        q = p + tl.arange(0, SLOTS)
        slot = ((q + tile) * PARTS + part) * (BK * BC) + block * (ROWS * BC)
        ptr = part_ptr + slot[:, None] + o[None, :]
        acc += tl.sum(tl.load(ptr, mask=(q <= end)[:, None], other=0.0), 0)
    tap = tile % tap_groups * PARTS + part
    tile = tile // tap_groups
    c = tile % channel_tiles * BC + o % BC
    tile = tile // channel_tiles
    k = tile % filter_tiles * BK + block * ROWS + o // BC
    g = tile // filter_tiles
    mask = (k < filters) & (c < channels) & (tap < taps)
    if flip:
        tap = taps - 1 - tap
    ptr = dw_ptr + (g * filters + k).to(tl.int64) * stride_k + c.to(tl.int64) * stride_c
    ptr += tap.to(tl.int64) * stride_tap
    v = alpha * acc
    if beta != 0:
        v += beta * tl.load(ptr, mask=mask, other=0.0).to(tl.float32)
    tl.store(ptr, v.to(dw_ptr.dtype.element_ty), mask=mask)
