"""Kernels for the tests of launching."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@triton.jit
def scale_add_kernel(x_ptr, y_ptr, n, alpha, beta, BLOCK: tl.constexpr):
    """y = alpha * x + beta * y over n packed elements, BLOCK a program."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    out = alpha * tl.load(x_ptr + offs, mask=mask)
    if beta != 0:
        out += beta * tl.load(y_ptr + offs, mask=mask)
    tl.store(y_ptr + offs, out, mask=mask)


@gluon.jit
def copy_tile_kernel(x_map, y_ptr):
    """The tile (program 0, program 1) of x into 4,096 packed elements of y, through TMA."""
    tile = gl.allocate_shared_memory(x_map.dtype, x_map.block_type.shape, x_map.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    mbarrier.expect(arrived, x_map.block_type.nbytes)
    origin = [gl.program_id(0) * 64, gl.program_id(1) * 64]
    tma.async_copy_global_to_shared(x_map, origin, arrived, tile)
    mbarrier.wait(arrived, 0)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    number = gl.program_id(0) * 2 + gl.program_id(1)
    offs = number * 4096 + rows[:, None] * 64 + columns[None, :]
    gl.store(y_ptr + offs, tile.load(layout))
