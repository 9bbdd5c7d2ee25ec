"""What happens to a finished tile: alpha, beta, bias, activation, and the ways to store it.

The tile's rows are the pixels of a patch, its columns output channels; it leaves through TMA, or by
masked stores with channels or pixels innermost. beta == 0 never reads y.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from bedstone.backends.triton.pointwise import activate


@gluon.jit
def pixel_offsets(
    origin, rho, box, logs, out, out_strides, stride, first_row,
    BM: gl.constexpr, layout: gl.constexpr, RESIDUES: gl.constexpr,
):  # fmt: skip
    """Element offsets in the output of BM of the patch's pixels, from first_row on, and a mask of
    those inside it.

    box is powers of two, logs their logarithms but the first (d, h, w); out the output's dims
    (n, d, h, w). With RESIDUES the patch lies on every stride-th pixel, starting at rho.
    """
    m = first_row + gl.arange(0, BM, layout=gl.SliceLayout(1, layout))
    w = origin[3] + (m & (box[3] - 1))
    h = origin[2] + ((m >> logs[2]) & (box[2] - 1))
    d = origin[1] + ((m >> (logs[2] + logs[1])) & (box[1] - 1))
    n = origin[0] + (m >> (logs[2] + logs[1] + logs[0]))
    if RESIDUES:
        d = d * stride[0] + rho[0]
        h = h * stride[1] + rho[1]
        w = w * stride[2] + rho[2]
    inside = (n < out[0]) & (d < out[1]) & (h < out[2]) & (w < out[3])
    offset = n.to(gl.int64) * out_strides[0] + d.to(gl.int64) * out_strides[1]
    offset += h.to(gl.int64) * out_strides[2] + w.to(gl.int64) * out_strides[3]
    return offset, inside


@gluon.jit
def add_old(acc, alpha, beta, y_ptr, offset, inside, first, channels, channel_stride):
    """alpha * acc + beta * y, y read by masked loads only if beta is not 0."""
    layout: gl.constexpr = acc.type.layout
    BK: gl.constexpr = acc.type.shape[1]
    v = alpha * acc
    if beta != 0:
        k = first + gl.arange(0, BK, layout=gl.SliceLayout(0, layout))
        ptr = y_ptr + offset[:, None] + (k.to(gl.int64) * channel_stride)[None, :]
        old = gl.load(ptr, mask=inside[:, None] & (k < channels)[None, :], other=0.0)
        v += beta * old.to(gl.float32)
    return v


@gluon.jit
def finish(
    v, bias_ptr, act_a, act_b, first, channels, BIAS: gl.constexpr, ACTIVATION: gl.constexpr
):
    """act(v + bias) for the output channels first, ..., of which there are `channels` in all."""
    if BIAS:
        layout: gl.constexpr = v.type.layout
        k = first + gl.arange(0, v.type.shape[1], layout=gl.SliceLayout(0, layout))
        v += gl.load(bias_ptr + k, mask=k < channels, other=0.0).to(gl.float32)[None, :]
    if ACTIVATION != "none":
        v = activate(v, ACTIVATION, act_a, act_b)
    return v


@gluon.jit
def halves(acc):
    """The first and the second half of a tile's columns."""
    M: gl.constexpr = acc.type.shape[0]
    N: gl.constexpr = acc.type.shape[1]
    return acc.reshape([M, 2, N // 2]).permute([0, 2, 1]).split()


@gluon.jit
def store_direct(
    acc, alpha, beta, y_ptr, bias_ptr, act_a, act_b, offset, inside, first, channels,
    BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Blends in, finishes and stores a tile as it lies in registers, channels adjacent in memory;
    for 32-bit types a warp then writes whole sectors. Offsets are in any layout."""
    layout: gl.constexpr = acc.type.layout
    offset = gl.convert_layout(offset, gl.SliceLayout(1, layout))
    inside = gl.convert_layout(inside, gl.SliceLayout(1, layout))
    v = add_old(acc, alpha, beta, y_ptr, offset, inside, first, channels, 1)
    v = finish(v, bias_ptr, act_a, act_b, first, channels, BIAS, ACTIVATION)
    k = first + gl.arange(0, v.type.shape[1], layout=gl.SliceLayout(0, layout))
    mask = inside[:, None] & (k < channels)[None, :]
    gl.store(y_ptr + offset[:, None] + k[None, :], v.to(y_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def store_pixels(
    v, y_ptr, first, channels, origin, rho, box, logs, out, out_strides, channel_stride, stride,
    first_row, RESIDUES: gl.constexpr, ORDER: gl.constexpr,
):  # fmt: skip
    """Masked stores of a tile in y's type, with channels ("rows") or pixels ("columns")
    innermost; only columns below `channels` are written."""
    BM: gl.constexpr = v.type.shape[0]
    BK: gl.constexpr = v.type.shape[1]
    if ORDER == "rows":
        VEC: gl.constexpr = 128 // y_ptr.dtype.element_ty.primitive_bitwidth
        ACROSS: gl.constexpr = BK // VEC if BK // VEC < 32 else 32
        layout: gl.constexpr = gl.BlockedLayout([1, VEC], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    else:
        layout: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
    o = gl.convert_layout(v.to(y_ptr.dtype.element_ty), layout)
    offset, inside = pixel_offsets(
        origin, rho, box, logs, out, out_strides, stride, first_row, BM, layout, RESIDUES
    )
    k = first + gl.arange(0, BK, layout=gl.SliceLayout(0, layout))
    mask = inside[:, None] & (k < channels)[None, :]
    if ORDER == "rows":
        gl.store(y_ptr + offset[:, None] + k[None, :], o, mask=mask)
    else:
        gl.store(y_ptr + offset[:, None] + (k.to(gl.int64) * channel_stride)[None, :], o, mask=mask)
