"""float32 gradient by filter from bfloat16 products on Hopper, the operands read once.

bfloat16 has float32's range, so an element splits without a scale: x = x0 + x1 (+ x2), each the
rest rounded to 8 bits. With three parts and the six largest products, terms below 2^-24 of x * dy
are left out: float32's accuracy. With two parts and three products, 2^-16: what tf32 promises, and
32 times more. Each part is kept STEP times as large as it is against the one before it, so that
the parts of the smallest float32 numbers do not fall below bfloat16's: products of one order (the
sum of their parts' numbers) have one scale. Unlike the planes of filter_f16x3_kernels, parts are
made on the way from shared memory to the matrix units: of dy in registers, where the left operand
of a product may lie; of x by a warpgroup of its own, which writes them to a second ring.

The matrix unit's own sums truncate, so the sums of a step are added in ordinary registers. An
infinity times a part that is zero is no number where the whole product is an infinity: corrections
that are no numbers count as zero, and the largest product says what the sum is.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from bedstone.backends.gluon.convolution.filter_kernels import (
    filter_producer,
    steps_of,
    store_part,
    work_range,
)
from bedstone.backends.gluon.convolution.overlap import follow
from bedstone.backends.gluon.convolution.ring import advance, make_ring

CONSUMER_REGISTERS = gl.constexpr(208)
SPLITTER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(72), gl.constexpr(24)
ROWS = gl.constexpr(64)  # filters of a consumer
RING = gl.constexpr(2)  # stages of x's parts
STEP = gl.constexpr(2.0**8)  # a part's scale against the one before it: the bits of a part
# From here on rounding to bfloat16 would overflow: the first part is cut off instead.
NEAR_INFINITY = gl.constexpr(3.3e38)


@gluon.jit
def first_part(x):
    """x rounded to bfloat16, but finite where x is."""
    cut = (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    near = gl.abs(x) > NEAR_INFINITY
    return gl.where(near & (gl.abs(x) < float("inf")), cut, x).to(gl.bfloat16)


@gluon.jit
def split(x, PARTS: gl.constexpr):
    """The parts of x, each scaled by STEP once more; for two of them the third is the second."""
    first = first_part(x)
    rest = (x - first.to(gl.float32)) * STEP
    second = first_part(rest)
    third = second
    if PARTS == 3:
        third = ((rest - second.to(gl.float32)) * STEP).to(gl.bfloat16)
    return first, second, third


@gluon.jit
def parts_splitter(
    b_bufs, p_bufs, empty, full, p_empty, p_full, cut,
    BC: gl.constexpr, BP: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Splits x's patches: from the ring of stages into the ring of parts."""
    # A warp takes 8 pixels x 32 channels: the swizzle spreads its 16-byte words over all banks.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    run = work_range(cut)
    stage = 0
    phase = 0
    slot = 0
    slot_phase = 0
    for tile in range(run[0], run[1]):
        begin, end = steps_of(tile, run, cut[2])
        for _ in range(begin, end):
            mbarrier.wait(full.index(stage), phase)
            x = b_bufs.index(stage).reshape((BP, BC)).load(layout)
            first, second, third = split(x, PARTS)
            mbarrier.wait(p_empty.index(slot), slot_phase ^ 1)
            p_bufs.index(slot * PARTS).store(first)
            p_bufs.index(slot * PARTS + 1).store(second)
            if PARTS == 3:
                p_bufs.index(slot * PARTS + 2).store(third)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(p_full.index(slot), count=1)
            mbarrier.arrive(empty.index(stage), count=1)
            stage, phase = advance(stage, phase, STAGES)
            slot, slot_phase = advance(slot, slot_phase, RING)


@gluon.jit
def dy_rows(a_bufs, stage, IDX: gl.constexpr, BK: gl.constexpr, BP: gl.constexpr, operand):
    """A consumer's filters of dy's patch in a stage, transposed."""
    rows = a_bufs.index(stage).reshape((BP, BK)).slice(IDX * ROWS, ROWS, dim=1)
    return rows.permute((1, 0)).load(operand)


@gluon.jit
def parts_consumer(
    IDX: gl.constexpr, part_ptr, a_bufs, p_bufs, empty, full, p_empty, p_full, cut,
    BK: gl.constexpr, BC: gl.constexpr, BP: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """Filters IDX * ROWS, ... of the tiles: splits dy, multiplies, adds, stores parts of sums. The
    next step's dy is split while this step's products run."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BC, 16]
    )
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    run = work_range(cut)
    stage = 0
    phase = 0
    slot = 0
    slot_phase = 0
    for tile in range(run[0], run[1]):
        begin, end = steps_of(tile, run, cut[2])
        acc = gl.zeros((ROWS, BC), gl.float32, layout)
        t = gl.zeros((ROWS, BC), gl.float32, layout)
        mbarrier.wait(full.index(stage), phase)
        a0, a1, a2 = split(dy_rows(a_bufs, stage, IDX, BK, BP, operand), PARTS)
        for i in range(begin, end):
            mbarrier.wait(p_full.index(slot), slot_phase)
            b0 = p_bufs.index(slot * PARTS)
            b1 = p_bufs.index(slot * PARTS + 1)
            if PARTS == 3:
                b2 = p_bufs.index(slot * PARTS + 2)
                t = warpgroup_mma(a1, b1, t, is_async=True, use_acc=False)
                t = warpgroup_mma(a0, b2, t, is_async=True)
                t = warpgroup_mma(a2, b0, t, is_async=True)
                t = warpgroup_mma_wait(num_outstanding=0, deps=(t,)) * (1 / STEP)
                t = warpgroup_mma(a0, b1, t, is_async=True)
            else:
                t = warpgroup_mma(a0, b1, t, is_async=True, use_acc=False)
            t = warpgroup_mma(a1, b0, t, is_async=True)
            next_stage, next_phase = advance(stage, phase, STAGES)
            if i + 1 < end:
                mbarrier.wait(full.index(next_stage), next_phase)
            else:  # reads this stage again, for nothing, rather than one that is being filled
                next_stage = stage
            n0, n1, n2 = split(dy_rows(a_bufs, next_stage, IDX, BK, BP, operand), PARTS)
            t = warpgroup_mma_wait(num_outstanding=0, deps=(t,))
            acc += gl.where(t == t, t, 0.0) * (1 / STEP)
            t = warpgroup_mma(a0, b0, t, is_async=True, use_acc=False)
            t = warpgroup_mma_wait(num_outstanding=0, deps=(t,))
            acc += t
            mbarrier.arrive(p_empty.index(slot), count=1)
            mbarrier.arrive(empty.index(stage), count=1)
            slot, slot_phase = advance(slot, slot_phase, RING)
            stage, phase = advance(stage, phase, STAGES)
            a0, a1, a2 = n0, n1, n2
        store_part(part_ptr, gl.program_id(0) + tile, acc, IDX * ROWS, BK)


@gluon.jit
def convolution_filter_parts_kernel(
    x_desc, dy_desc, part_ptr,
    cut, filter_tiles, channel_tiles, patches, box, taps, pad, stride, dilation,
    filters, channels,
    BK: gl.constexpr, BC: gl.constexpr, BP: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, DEPTH: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Slots of dw = sum over pixels of dy * x, float32: convolution_filter_ws_kernel with PARTIAL,
    a consumer ROWS filters, and PARTS bfloat16 parts of an element."""
    a_bufs = gl.allocate_shared_memory(
        dy_desc.dtype, [STAGES] + dy_desc.block_type.shape, dy_desc.layout
    )
    b_bufs = gl.allocate_shared_memory(
        x_desc.dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout
    )
    p_bufs = gl.allocate_shared_memory(
        gl.bfloat16, [RING * PARTS, BP, BC],
        gl.NVMMASharedLayout.get_default_for([BP, BC], gl.bfloat16),
    )  # fmt: skip
    empty, full = make_ring(STAGES, CONSUMERS + 1)
    p_empty, p_full = make_ring(RING, CONSUMERS)
    follow()
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (parts_consumer, (
                    0, part_ptr, a_bufs, p_bufs, empty, full, p_empty, p_full, cut,
                    BK, BC, BP, STAGES, PARTS,
                )),
                (parts_consumer, (
                    1, part_ptr, a_bufs, p_bufs, empty, full, p_empty, p_full, cut,
                    BK, BC, BP, STAGES, PARTS,
                )),
                (parts_splitter, (
                    b_bufs, p_bufs, empty, full, p_empty, p_full, cut, BC, BP, STAGES, PARTS,
                )),
                (filter_producer, (
                    x_desc, dy_desc, a_bufs, b_bufs, empty, full,
                    cut, filter_tiles, channel_tiles, patches, box, taps, pad,
                    stride, dilation, filters, channels, BK, BC, STAGES, DEPTH,
                )),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, SPLITTER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (parts_consumer, (
                    0, part_ptr, a_bufs, p_bufs, empty, full, p_empty, p_full, cut,
                    BK, BC, BP, STAGES, PARTS,
                )),
                (parts_splitter, (
                    b_bufs, p_bufs, empty, full, p_empty, p_full, cut, BC, BP, STAGES, PARTS,
                )),
                (filter_producer, (
                    x_desc, dy_desc, a_bufs, b_bufs, empty, full,
                    cut, filter_tiles, channel_tiles, patches, box, taps, pad,
                    stride, dilation, filters, channels, BK, BC, STAGES, DEPTH,
                )),
            ],
            [4, 1],
            [SPLITTER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
