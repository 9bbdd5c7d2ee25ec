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

from bedstone.backends.gluon.convolution.overlap import follow, lead
from bedstone.backends.gluon.convolution.ring import advance, make_ring, previous

CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(224), gl.constexpr(40)


@gluon.jit
def work_range(cut):
    """This program's run of steps: (first tile, end tile, steps into the first tile, steps into the
    last tile). A run has cut[0] steps, and cut[1] runs one more, spread evenly; a tile cut[2]."""
    p = gl.program_id(0)
    first = p * cut[0] + p * cut[1] // gl.num_programs(0)
    last = (p + 1) * cut[0] + (p + 1) * cut[1] // gl.num_programs(0)
    first_tile = first // cut[2]
    end_tile = (last + cut[2] - 1) // cut[2]
    return first_tile, end_tile, first - first_tile * cut[2], last - (end_tile - 1) * cut[2]


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
    cut, filter_tiles, channel_tiles, patches, box, taps, pad, stride, dilation,
    filters, channels,
    BK: gl.constexpr, BC: gl.constexpr, STAGES: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """Fills the ring with patches of dy and of x for the steps of this program."""
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
def filter_places(dw_ptr, before, k0, c0, filters, channels, dw_strides, M: gl.constexpr,
                  N: gl.constexpr, layout: gl.constexpr, WORD: gl.constexpr):  # fmt: skip
    """Pointers to M filters x N channels of a tap of dw, and which of them exist."""
    k = k0 + gl.arange(0, M, layout=gl.SliceLayout(1, layout))
    c = c0 + gl.arange(0, N, layout=gl.SliceLayout(0, layout))
    ptr = dw_ptr + ((before + k) * dw_strides[0])[:, None]
    if WORD > 1:  # channels are adjacent, and words of them whole
        ptr = gl.multiple_of(ptr + c[None, :], [1, 16])
        mask = (k < filters)[:, None] & (c // WORD < channels // WORD)[None, :]
    else:
        ptr += (c * dw_strides[2])[None, :]
        mask = (k < filters)[:, None] & (c < channels)[None, :]
    return ptr, mask


@gluon.jit
def store_filter(
    acc, dw_ptr, alpha, beta, before, k0, c0, filters, channels, dw_strides, WORD: gl.constexpr
):
    """Blends a tile into a tap of dw: filters k0, ... of the group that has `before` filters before
    it, channels c0, ...; in words of WORD elements if that is more than 1."""
    M: gl.constexpr = acc.type.shape[0]
    N: gl.constexpr = acc.type.shape[1]
    layout: gl.constexpr = acc.type.layout
    v = alpha * acc
    if beta != 0:
        ptr, mask = filter_places(
            dw_ptr, before, k0, c0, filters, channels, dw_strides, M, N, layout, 1
        )
        v += beta * gl.load(ptr, mask=mask, other=0.0).to(gl.float32)
    o = v.to(dw_ptr.dtype.element_ty)
    if WORD > 1:
        ACROSS: gl.constexpr = N // WORD if N // WORD < 32 else 32
        rows: gl.constexpr = gl.BlockedLayout([1, WORD], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
        ptr, mask = filter_places(
            dw_ptr, before, k0, c0, filters, channels, dw_strides, M, N, rows, WORD
        )
        gl.store(ptr, gl.convert_layout(o, rows), mask=mask)
    else:
        ptr, mask = filter_places(
            dw_ptr, before, k0, c0, filters, channels, dw_strides, M, N, layout, WORD
        )
        gl.store(ptr, o, mask=mask)


@gluon.jit
def filter_consumer(
    IDX: gl.constexpr, dw_ptr, part_ptr, alpha, beta, a_bufs, b_bufs, empty, full,
    cut, filter_tiles, channel_tiles, taps, filters, channels, dw_strides, flip,
    BK: gl.constexpr, BC: gl.constexpr, BP: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, PARTIAL: gl.constexpr, WORD: gl.constexpr,
):  # fmt: skip
    """Filters IDX * ROWS, ... of the tiles: multiplies dy's patches, read transposed, by x's;
    stores tiles or parts of them."""
    ROWS: gl.constexpr = BK // CONSUMERS
    INSTR_K: gl.constexpr = 256 // a_bufs.dtype.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BC, INSTR_K]
    )
    run = work_range(cut)
    stage = 0
    phase = 0
    for tile in range(run[0], run[1]):
        begin, end = steps_of(tile, run, cut[2])
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
            store_filter(
                acc, dw_ptr + tap * dw_strides[1], alpha, beta, g * filters, kt * BK + IDX * ROWS,
                ct * BC, filters, channels, dw_strides, WORD,
            )  # fmt: skip


@gluon.jit
def convolution_filter_ws_kernel(
    x_desc, dy_desc, dw_ptr, part_ptr, alpha, beta,
    cut, filter_tiles, channel_tiles, patches, box, taps, pad, stride, dilation,
    filters, channels, dw_strides, flip,
    BK: gl.constexpr, BC: gl.constexpr, BP: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, DEPTH: gl.constexpr, PARTIAL: gl.constexpr, WORD: gl.constexpr,
):  # fmt: skip
    """dw = alpha * sum over pixels of dy * x + beta * dw, or parts of the sums in slots.

    x_desc      (n, [d,] h, w, c) with the convolution's strides as element strides, box BP x BC
    dy_desc     (n, [d,] h, w, k), box BP x BK
    cut         how the steps of all tiles (group x filter_tiles x channel_tiles x taps) are cut in
                runs: cut[0] steps each, cut[1] runs one more; a tile has cut[2], its patches
    patches     along (n, d, h, w); box of each
    filters, channels  of one group; dw_strides (k, tap, c); flip reverses the taps
    CONSUMERS   share a tile's filters
    PARTIAL     write slot program + tile of part_ptr (BK x BC float32) instead of dw
    WORD        elements of a 16-byte word if channels of dw are adjacent and all else multiples
                of it, or 1
    """
    a_bufs = gl.allocate_shared_memory(
        dy_desc.dtype, [STAGES] + dy_desc.block_type.shape, dy_desc.layout
    )
    b_bufs = gl.allocate_shared_memory(
        x_desc.dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout
    )
    empty, full = make_ring(STAGES, CONSUMERS)
    if not PARTIAL:
        lead()
    follow()
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (filter_consumer, (
                    0, dw_ptr, part_ptr, alpha, beta, a_bufs, b_bufs, empty, full,
                    cut, filter_tiles, channel_tiles, taps, filters, channels,
                    dw_strides, flip, BK, BC, BP, STAGES, CONSUMERS, PARTIAL, WORD,
                )),
                (filter_consumer, (
                    1, dw_ptr, part_ptr, alpha, beta, a_bufs, b_bufs, empty, full,
                    cut, filter_tiles, channel_tiles, taps, filters, channels,
                    dw_strides, flip, BK, BC, BP, STAGES, CONSUMERS, PARTIAL, WORD,
                )),
                (filter_producer, (
                    x_desc, dy_desc, a_bufs, b_bufs, empty, full,
                    cut, filter_tiles, channel_tiles, patches, box, taps, pad,
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
                    cut, filter_tiles, channel_tiles, taps, filters, channels,
                    dw_strides, flip, BK, BC, BP, STAGES, CONSUMERS, PARTIAL, WORD,
                )),
                (filter_producer, (
                    x_desc, dy_desc, a_bufs, b_bufs, empty, full,
                    cut, filter_tiles, channel_tiles, patches, box, taps, pad,
                    stride, dilation, filters, channels, BK, BC, STAGES, DEPTH,
                )),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )  # fmt: skip


@triton.jit
def run_start(p, cut, programs):
    """The first step of a program's run, as work_range has it."""
    return p * cut[0] + p * cut[1] // programs


@triton.jit
def first_program(step, cut, programs):
    """The program whose run holds the step."""
    total = cut[0] * programs + cut[1]
    p = (step.to(tl.float32) * (programs.to(tl.float32) / total.to(tl.float32))).to(tl.int32)
    p = tl.where(run_start(p, cut, programs) > step, p - 1, p)  # rounding
    return tl.where(run_start(p + 1, cut, programs) <= step, p + 1, p)


@triton.jit
def convolution_filter_sum_kernel(
    part_ptr, dw_ptr, alpha, beta,
    cut, programs, filter_tiles, tap_groups, channel_tiles, taps,
    filters, channels, stride_k, stride_tap, stride_c, flip,
    BK: tl.constexpr, BC: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    SLOTS: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """dw = alpha * (sum of a tile's slots, in the order of their programs) + beta * dw.

    One program adds BLOCK elements of one of a slot's PARTS blocks of BK x BC (taps that were
    computed together), SLOTS slots at once. `programs` is the grid of the kernel that wrote them.
    SIDE groups lie side by side in a tile: of filters and channels only those of one group meet.
    """
    lead()
    follow()
    pid = tl.program_id(0)
    o = pid % (BK * BC // BLOCK) * BLOCK + tl.arange(0, BLOCK)
    pid = pid // (BK * BC // BLOCK)
    part = pid % PARTS
    tile = pid // PARTS
    start = tile * cut[2]
    begin = first_program(start, cut, programs)
    end = first_program(start + cut[2] - 1, cut, programs)
    acc = tl.zeros((BLOCK,), tl.float32)
    for p in range(begin, end + 1, SLOTS):
        q = p + tl.arange(0, SLOTS)
        slot = ((q + tile).to(tl.int64) * PARTS + part) * (BK * BC)
        ptr = part_ptr + slot[:, None] + o[None, :]
        acc += tl.sum(tl.load(ptr, mask=(q <= end)[:, None], other=0.0), 0)
    tap = tile % tap_groups * PARTS + part
    tile = tile // tap_groups
    c = tile % channel_tiles * BC + o % BC
    tile = tile // channel_tiles
    k = tile % filter_tiles * BK + o // BC
    g = tile // filter_tiles
    mask = (k < filters) & (c < channels) & (tap < taps)
    if SIDE > 1:
        own = channels // SIDE
        mask &= k // (filters // SIDE) == c // own
        c = c % own
    if flip:
        tap = taps - 1 - tap
    ptr = dw_ptr + (g * filters + k).to(tl.int64) * stride_k + c.to(tl.int64) * stride_c
    ptr += tap.to(tl.int64) * stride_tap
    v = alpha * acc
    if beta != 0:
        v += beta * tl.load(ptr, mask=mask, other=0.0).to(tl.float32)
    tl.store(ptr, v.to(dw_ptr.dtype.element_ty), mask=mask)
