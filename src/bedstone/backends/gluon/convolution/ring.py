"""What the warp-specialised kernels share: the ring of stages, the order of tiles, a patch's taps.

A ring has a `full` and an `empty` barrier a stage. The producer waits for empty, asks TMA to fill
the stage and to signal full; consumers wait for full, multiply, and signal empty. Both sides walk
it with a (stage, phase) pair that `advance` moves on.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

L2_GROUP = gl.constexpr(8)  # rows of tiles walked together


@gluon.jit
def make_ring(STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """The barriers (empty, full) of a ring whose stages `CONSUMERS` consumers release."""
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(empty.index(i), count=CONSUMERS)
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    return empty, full


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The next stage; the phase flips when the ring starts over."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def previous(stage, STAGES: gl.constexpr):
    """The stage before."""
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def quotient(n, inverse, WHICH: gl.constexpr):
    """n // divisor for 0 <= n < 2^31, by a multiplication with the divisor's inverse: pairs of
    (multiplier, shift) made by implicit_gemm_ws.inverse_of. A division takes a hundred cycles, and
    a tile's place six of them, one after the other, before its first load."""
    multiplier = inverse[2 * WHICH].to(gl.uint32, bitcast=True).to(gl.int64)
    return ((n.to(gl.int64) * multiplier) >> inverse[2 * WHICH + 1]).to(gl.int32)


@gluon.jit
def grouped(tile, rows, columns, inverse):
    """Tile number -> (row, column): L2_GROUP rows are walked together, so that the operands of the
    tiles in flight stay in the L2 cache. inverse: first of L2_GROUP * columns."""
    whole = quotient(tile, inverse, 0)
    inside = tile - whole * (L2_GROUP * columns)
    first = whole * L2_GROUP
    size = rows - first
    row = inside % L2_GROUP
    column = inside // L2_GROUP
    if size < L2_GROUP:
        size = gl.maximum(size, 1)
        row = inside % size
        column = inside // size
    return first + row, column


@gluon.jit
def tap_range(
    o, rho, size, taps, pad, u, dil, span,
    BACKWARD: gl.constexpr, UNIT: gl.constexpr, FLIP: gl.constexpr,
):  # fmt: skip
    """The taps that a patch needs along one axis: (first input coordinate, first tap, tap step,
    begin, end); tap number j in [begin, end) reads from coordinate first + j * dil, filter
    element tap + j * step. Taps whose rows lie wholly in the padding are left out.

    The patch is `span` outputs from o, of the residue rho modulo the stride u in a backward pass
    (input h = o * u + rho meets the taps r with (h + pad - r * dil) % u == 0).
    """
    if UNIT:
        n = taps
        step = 1
        extent = span
        if BACKWARD:
            base = o + pad - (taps - 1)
            tap = taps - 1
            step = -1
        else:
            base = o - pad
            tap = 0
        begin = gl.maximum(1 - base - extent, 0)
        end = gl.minimum(n, gl.maximum(size - base, 0))
    else:
        if BACKWARD:
            r0 = (rho + pad) % u
            n = gl.maximum(taps - r0 + u - 1, 0) // u
            base = o + (rho + pad) // u - (n - 1) * dil
            tap = r0 + (n - 1) * u
            step = -u
            extent = span
        else:
            n = taps
            base = o * u - pad
            tap = 0
            step = 1
            extent = (span - 1) * u + 1
        begin = gl.maximum(dil - base - extent, 0) // dil
        end = gl.minimum(n, gl.maximum(size - 1 - base + dil, 0) // dil)
    if FLIP:
        tap = taps - 1 - tap
        step = -step
    return base, tap, step, begin, gl.maximum(end, begin)
