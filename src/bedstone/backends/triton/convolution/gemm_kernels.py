"""The three kernels of the implicit-GEMM convolution, for any strides, dtype, groups and rank.

The paper's idea: convolution is one matrix product whose image-side matrix is never stored; its
tiles are gathered while the product runs (Chetlur et al., arXiv 1410.0759, section 3). Forward and
backward_data gather from one image into another by the same affine index map, backward_filter
reduces over pixels. Divisions happen once a program: inside the loops indices advance by carries.
Sizes and strides are arguments, so one binary serves all problems of its kind. Spatial axes are
always three (d, h, w); missing ones have extent 1.
"""

import triton
import triton.language as tl

from bedstone.backends.triton.pointwise import activate


@triton.jit
def first_tap(residue, off, dil, u, jump, taps):
    """The first tap r below jump with (residue + off - r * dil) divisible by u; else `taps`."""
    found = taps
    for r in range(jump):
        hit = (residue + off - r * dil) % u == 0
        found = tl.where(hit & (r < found), r, found)
    return found


@triton.jit
def axis_of_class(residue, size, taps, off, dil, u, jump):
    """One axis of backward_data with stride u, for image pixels residue, residue + u, ...

    Returns (pixels, taps, offset): source index = pixel + offset - j * (dil * jump / u) for the
    j-th of the taps that reach these pixels, first, first + jump, ...; and that first tap.
    """
    first = first_tap(residue, off, dil, u, jump, taps)
    pixels = (size - residue + u - 1) // u
    reached = (taps - first + jump - 1) // jump
    return pixels, reached, (residue + off - first * dil) // u, first


@triton.jit
def outer_sum(rows, columns, TRANSPOSED: tl.constexpr):
    """rows[i] + columns[j] at [i, j], or at [j, i] if TRANSPOSED."""
    if TRANSPOSED:
        return columns[:, None] + rows[None, :]
    else:
        return rows[:, None] + columns[None, :]


@triton.jit
def outer_and(rows, columns, TRANSPOSED: tl.constexpr):
    """rows[i] & columns[j] at [i, j], or at [j, i] if TRANSPOSED."""
    if TRANSPOSED:
        return columns[:, None] & rows[None, :]
    else:
        return rows[:, None] & columns[None, :]


@triton.jit
def load_masked(ptr, offs, mask, TRANSPOSED: tl.constexpr):
    """[rows, columns] elements, 0 where masked; offs and mask are [columns, rows] if TRANSPOSED, so
    that threads walk the innermost axis of memory."""
    tile = tl.load(ptr + offs, mask=mask, other=0.0)
    if TRANSPOSED:
        tile = tl.trans(tile)
    return tile


@triton.jit
def load_tile(ptr, rows, columns, ok_rows, ok_columns, TRANSPOSED: tl.constexpr):
    """load_masked of an outer sum of offsets under an outer product of masks."""
    offs = outer_sum(rows, columns, TRANSPOSED)
    return load_masked(ptr, offs, outer_and(ok_rows, ok_columns, TRANSPOSED), TRANSPOSED)


@triton.jit
def within(d, h, w, ID, IH, IW):
    """True where the pixel lies in the image."""
    return (d >= 0) & (d < ID) & (h >= 0) & (h < IH) & (w >= 0) & (w < IW)


@triton.jit
def multiply_add(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b on the matrix units, in the accumulator's type."""
    if acc.dtype == tl.float64:
        return tl.dot(a, b, acc, out_dtype=tl.float64)
    elif PRECISION == "bf16":
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def tile_of(pid, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Tile (m, n) of a program: GROUP_M rows of tiles are walked together, so that both operands
    stay in the L2 cache."""
    width = GROUP_M * tiles_n
    first = (pid // width) * GROUP_M
    rows = tl.minimum(tiles_m - first, GROUP_M)
    return first + (pid % width) % rows, (pid % width) // rows


@triton.jit
def blend_and_store(
    out_ptr, bias_ptr, alpha, beta, act_a, act_b, acc, rows, columns, channel, ok_rows, ok_columns,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """out = act(alpha * acc + beta * out + bias) on a tile; `out` is read only if beta is not 0."""
    acc *= alpha
    if TRANSPOSED:
        acc = tl.trans(acc)
    ptrs = out_ptr + outer_sum(rows, columns, TRANSPOSED)
    mask = outer_and(ok_rows, ok_columns, TRANSPOSED)
    if beta != 0:
        acc += beta * tl.load(ptrs, mask=mask, other=0.0).to(acc.dtype)
    if BIAS:
        bias = tl.load(bias_ptr + channel, mask=ok_columns, other=0.0).to(acc.dtype)
        if TRANSPOSED:
            acc += bias[:, None]
        else:
            acc += bias[None, :]
    acc = activate(acc, ACTIVATION, act_a, act_b)
    tl.store(ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def convolution_image_implicit_gemm_kernel(
    src_ptr, w_ptr, out_ptr, bias_ptr, part_ptr, alpha, beta, act_a, act_b,
    N, OD, OH, OW, ID, IH, IW, RC, OC, GROUPS, TD, TH, TW,
    mul_d, mul_h, mul_w, off_d, off_h, off_w, step_d, step_h, step_w,
    u_d, u_h, u_w, dil_d, dil_h, dil_w, jump_d, jump_h, jump_w,
    s_n, s_c, s_d, s_h, s_w, w_g, w_o, w_c, w_d, w_h, w_w, o_n, o_c, o_d, o_h, o_w,
    SPLIT,
    STRIDED: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, PARTIAL: tl.constexpr,
    SRC_T: tl.constexpr, W_T: tl.constexpr, OUT_T: tl.constexpr,
    TAPS_INNER: tl.constexpr, W_PACKED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """out[n, o, i] = act(alpha sum_{c, j} w[o, c, j] src[n, c, i * mul + off + j * step] + ...)

    One program computes BM pixels x BN channels of one group (and, STRIDED, of one residue class
    of pixels, which meets only every jump-th tap: backward_data of a convolution of stride u).
    src: (N, GROUPS * RC, ID, IH, IW); out: (N, GROUPS * OC, OD, OH, OW); taps TD x TH x TW. The
    reduction runs over taps, then blocks of BK channels; FLAT, over taps and channels as one index
    (few channels; or, TAPS_INNER, taps innermost as filters in NCHW have them, and W_PACKED says
    that this index is the offset in a filter). Pixels outside src, channels past RC and OC, pixels
    past the end are masked. Sums in ACC. PARTIAL writes part `program_id(1)` of SPLIT of the
    reduction, unscaled, to part[split, n, d, h, w, channel] instead.
    """
    # Which tile
    pid = tl.program_id(0)
    g = pid % GROUPS
    pid = pid // GROUPS
    oc = OC
    tiles_n = tl.cdiv(oc, BN)
    nd, nh, nw = OD, OH, OW
    r0_d, r0_h, r0_w = 0, 0, 0
    res_d, res_h, res_w = 0, 0, 0
    taps_d, taps_h, taps_w = TD, TH, TW
    if STRIDED:
        classes = u_d * u_h * u_w
        residue = pid % classes
        pid = pid // classes
        res_w = residue % u_w
        res_h = (residue // u_w) % u_h
        res_d = residue // (u_w * u_h)
        nd, taps_d, off_d, r0_d = axis_of_class(res_d, OD, TD, off_d, dil_d, u_d, jump_d)
        nh, taps_h, off_h, r0_h = axis_of_class(res_h, OH, TH, off_h, dil_h, u_h, jump_h)
        nw, taps_w, off_w, r0_w = axis_of_class(res_w, OW, TW, off_w, dil_w, u_w, jump_w)
        most = N * tl.cdiv(OD, u_d) * tl.cdiv(OH, u_h) * tl.cdiv(OW, u_w)
        pm, pn = tile_of(pid, tl.cdiv(most, BM), tiles_n, GROUP_M)
    else:
        pm, pn = tile_of(pid, tl.cdiv(N * nd * nh * nw, BM), tiles_n, GROUP_M)
    if WIDE:
        m = pm.to(tl.int64) * BM + tl.arange(0, BM)
        pixels = N.to(tl.int64) * nd * nh * nw
    else:
        m = pm * BM + tl.arange(0, BM)
        pixels = N * nd * nh * nw
    ok_m = m < pixels
    # An empty class (a stride larger than the image) has no pixels: divide by 1 instead of 0.
    ow = m % tl.maximum(nw, 1)
    rest = m // tl.maximum(nw, 1)
    oh = rest % tl.maximum(nh, 1)
    rest = rest // tl.maximum(nh, 1)
    od = rest % tl.maximum(nd, 1)
    n = rest // tl.maximum(nd, 1)
    o = pn * BN + tl.arange(0, BN)
    ok_o = o < oc

    # Where it reads
    in_d = od * mul_d + off_d
    in_h = oh * mul_h + off_h
    in_w = ow * mul_w + off_w
    src_rows = n * s_n + in_d * s_d + in_h * s_h + in_w * s_w
    src_ptr += g * (RC * s_c)
    w_ptr += g * w_g + r0_d * w_d + r0_h * w_h + r0_w * w_w
    w_columns = o * w_o
    acc = tl.zeros((BM, BN), dtype=ACC)
    k = tl.arange(0, BK)
    if FLAT:
        steps = tl.cdiv(taps_d * taps_h * taps_w * RC, BK)
    else:
        blocks = tl.cdiv(RC, BK)
        steps = taps_d * taps_h * taps_w * blocks
    steps = tl.where(pm * BM < pixels, steps, 0)
    low, high = 0, steps
    if PARTIAL:
        split = tl.program_id(1)
        low = (split.to(tl.int64) * steps // SPLIT).to(tl.int32)
        high = ((split + 1).to(tl.int64) * steps // SPLIT).to(tl.int32)
    if FLAT:
        for i in tl.range(low, high):
            e = i * BK + k
            taps = taps_d * taps_h * taps_w
            ok_k = e < taps * RC
            if TAPS_INNER:
                c = e // taps
                tap = e % taps
            else:
                c = e % RC
                tap = e // RC
            jw = tap % taps_w
            tap = tap // taps_w
            jh = tap % taps_h
            jd = tap // taps_h
            d = outer_sum(in_d, jd * step_d, SRC_T)
            h = outer_sum(in_h, jh * step_h, SRC_T)
            w = outer_sum(in_w, jw * step_w, SRC_T)
            mask = within(d, h, w, ID, IH, IW) & outer_and(ok_m, ok_k, SRC_T)
            shift = jd * (step_d * s_d) + jh * (step_h * s_h) + jw * (step_w * s_w) + c * s_c
            a = load_masked(src_ptr, outer_sum(src_rows, shift, SRC_T), mask, SRC_T)
            if W_PACKED:
                w_rows = e
            else:
                w_rows = jd * (w_d * jump_d) + jh * (w_h * jump_h) + jw * (w_w * jump_w) + c * w_c
            b = load_tile(w_ptr, w_rows, w_columns, ok_k, ok_o, W_T)
            acc = multiply_add(a, b, acc, PRECISION)
    else:
        # The counters of the first step; each later step advances them by carries.
        c0 = (low % tl.maximum(blocks, 1)) * BK
        tap = low // tl.maximum(blocks, 1)
        jw = tap % tl.maximum(taps_w, 1)
        tap = tap // tl.maximum(taps_w, 1)
        jh = tap % tl.maximum(taps_h, 1)
        jd = tap // tl.maximum(taps_h, 1)
        for _ in tl.range(low, high):
            d = in_d + jd * step_d
            h = in_h + jh * step_h
            w = in_w + jw * step_w
            inside = within(d, h, w, ID, IH, IW) & ok_m
            shift = jd * (step_d * s_d) + jh * (step_h * s_h) + jw * (step_w * s_w)
            ok_c = c0 + k < RC
            a = load_tile(src_ptr, src_rows + shift, (c0 + k) * s_c, inside, ok_c, SRC_T)
            w_tap = jd * (w_d * jump_d) + jh * (w_h * jump_h) + jw * (w_w * jump_w)
            b = load_tile(w_ptr, (c0 + k) * w_c + w_tap, w_columns, ok_c, ok_o, W_T)
            acc = multiply_add(a, b, acc, PRECISION)
            c0 += BK
            turn = c0 >= RC
            c0 = tl.where(turn, 0, c0)
            jw += turn.to(tl.int32)
            turn = jw >= taps_w
            jw = tl.where(turn, 0, jw)
            jh += turn.to(tl.int32)
            turn = jh >= taps_h
            jh = tl.where(turn, 0, jh)
            jd += turn.to(tl.int32)

    # Store
    out_d, out_h, out_w = od, oh, ow
    if STRIDED:
        out_d = od * u_d + res_d
        out_h = oh * u_h + res_h
        out_w = ow * u_w + res_w
    channel = g * oc + o
    if PARTIAL:
        pixel = ((n.to(tl.int64) * OD + out_d) * OH + out_h) * OW + out_w
        base = split.to(tl.int64) * N * OD * OH * OW
        rows = (base + pixel) * (GROUPS * oc)
        tl.store(
            part_ptr + (rows[:, None] + channel[None, :]), acc, mask=ok_m[:, None] & ok_o[None, :]
        )
    else:
        rows = n * o_n + out_d * o_d + out_h * o_h + out_w * o_w
        blend_and_store(
            out_ptr, bias_ptr, alpha, beta, act_a, act_b, acc, rows, channel * o_c, channel,
            ok_m, ok_o, BIAS, ACTIVATION, OUT_T,
        )  # fmt: skip


@triton.jit
def convolution_filter_implicit_gemm_kernel(
    x_ptr, dy_ptr, dw_ptr, part_ptr, alpha, beta,
    N, OD, OH, OW, ID, IH, IW, C, K, GROUPS, TD, TH, TW,
    mul_d, mul_h, mul_w, off_d, off_h, off_w, step_d, step_h, step_w,
    x_n, x_c, x_d, x_h, x_w, y_n, y_c, y_d, y_h, y_w, w_g, w_k, w_c, w_d, w_h, w_w,
    SPLIT,
    FLAT: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, PARTIAL: tl.constexpr,
    X_T: tl.constexpr, Y_T: tl.constexpr, OUT_T: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dw[k, c, j] = alpha sum_{n, p} dy[n, k, p] x[n, c, p * mul + off + j * step] + beta dw

    One program computes BM filters x BN columns of one group: BN channels of one tap, or, FLAT, BN
    of the (tap, channel) pairs as one index. The reduction runs over BK pixels (n, d, h, w) a step.
    C and K count channels a group. Masked: pixels past the end and outside x, filters past K,
    columns past the last. Sums in ACC. PARTIAL writes part `program_id(1)` of SPLIT, unscaled, to
    part[split, filter, d, h, w, channel] instead.
    """
    # Which tile
    pid = tl.program_id(0)
    g = pid % GROUPS
    pid = pid // GROUPS
    tiles_m = tl.cdiv(K, BM)
    k = (pid % tiles_m) * BM + tl.arange(0, BM)
    ok_k = k < K
    pid = pid // tiles_m
    if FLAT:
        e = pid * BN + tl.arange(0, BN)
        c = e % C
        tap = e // C
        ok_c = tap < TD * TH * TW
    else:
        tiles_n = tl.cdiv(C, BN)
        c = (pid % tiles_n) * BN + tl.arange(0, BN)
        tap = pid // tiles_n
        ok_c = c < C
    jw = tap % TW
    jh = (tap // TW) % TH
    jd = tap // (TW * TH)

    # Which pixels: a run of whole steps, advanced by the digits of BK in base (OW, OH, OD)
    if WIDE:
        pixels = N.to(tl.int64) * OD * OH * OW
        steps = tl.cdiv(pixels, BK)
    else:
        pixels = N * OD * OH * OW
        steps = tl.cdiv(pixels, BK)
    low, high = 0 * steps, steps
    if PARTIAL:
        split = tl.program_id(1)
        low = (split.to(tl.int64) * steps // SPLIT).to(steps.dtype)
        high = ((split + 1).to(tl.int64) * steps // SPLIT).to(steps.dtype)
    m = low * BK + tl.arange(0, BK)
    q = (m % OW).to(tl.int32)
    rest = m // OW
    p = (rest % OH).to(tl.int32)
    rest = rest // OH
    z = (rest % OD).to(tl.int32)
    n = (rest // OD).to(tl.int32)
    add_q = BK % OW
    add_p = (BK // OW) % OH
    add_z = (BK // OW // OH) % OD
    add_n = BK // OW // OH // OD

    x_ptr += g * (C * x_c)
    dy_ptr += g * (K * y_c)
    shift_d = jd * step_d + off_d
    shift_h = jh * step_h + off_h
    shift_w = jw * step_w + off_w
    x_columns = c * x_c
    if FLAT:
        x_columns += shift_d * x_d + shift_h * x_h + shift_w * x_w
    acc = tl.zeros((BM, BN), dtype=ACC)
    for _ in tl.range(low, high):
        ok_m = n < N
        y_rows = n * y_n + z * y_d + p * y_h + q * y_w
        a = tl.trans(load_tile(dy_ptr, y_rows, k * y_c, ok_m, ok_k, Y_T))
        if FLAT:
            d = outer_sum(z * mul_d, shift_d, X_T)
            h = outer_sum(p * mul_h, shift_h, X_T)
            w = outer_sum(q * mul_w, shift_w, X_T)
            mask = within(d, h, w, ID, IH, IW) & outer_and(ok_m, ok_c, X_T)
            x_rows = n * x_n + z * (mul_d * x_d) + p * (mul_h * x_h) + q * (mul_w * x_w)
            b = load_masked(x_ptr, outer_sum(x_rows, x_columns, X_T), mask, X_T)
        else:
            d = z * mul_d + shift_d
            h = p * mul_h + shift_h
            w = q * mul_w + shift_w
            inside = within(d, h, w, ID, IH, IW) & ok_m
            x_rows = n * x_n + d * x_d + h * x_h + w * x_w
            b = load_tile(x_ptr, x_rows, x_columns, inside, ok_c, X_T)
        acc = multiply_add(a, b, acc, PRECISION)
        q += add_q
        carry = (q >= OW).to(tl.int32)
        q -= carry * OW
        p += add_p + carry
        carry = (p >= OH).to(tl.int32)
        p -= carry * OH
        z += add_z + carry
        carry = (z >= OD).to(tl.int32)
        z -= carry * OD
        n += add_n + carry

    # Store
    if PARTIAL:
        filters = split.to(tl.int64) * GROUPS * K + g * K + k
        rows = filters * (TD * TH * TW * C)
        columns = tap * C + c
        tl.store(
            part_ptr + (rows[:, None] + columns[None, :]), acc, mask=ok_k[:, None] & ok_c[None, :]
        )
    else:
        columns = c * w_c + jd * w_d + jh * w_h + jw * w_w
        rows = g * w_g + k * w_k
        blend_and_store(
            dw_ptr, dw_ptr, alpha, beta, 0.0, 0.0, acc, rows, columns, k, ok_k, ok_c,
            False, "none", OUT_T,
        )  # fmt: skip


@triton.jit
def convolution_sum_parts_kernel(
    part_ptr, out_ptr, bias_ptr, alpha, beta, act_a, act_b,
    SPLIT, TOTAL, D, H, W, C, o_n, o_c, o_d, o_h, o_w,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """out[n, c, d, h, w] = act(alpha * sum_s part[s, n, d, h, w, c] + beta * out + bias[c])

    One program adds BLOCK of the TOTAL elements of a part, SLOTS parts at once: the order is
    fixed, so results repeat bitwise. Sums in the type of `part`.
    """
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = e < TOTAL
    acc = tl.zeros((BLOCK,), dtype=part_ptr.dtype.element_ty)
    for first in range(0, SPLIT, SLOTS):
        s = first + tl.arange(0, SLOTS)
        ptr = part_ptr + (s.to(tl.int64) * TOTAL)[:, None] + e[None, :]
        acc += tl.sum(tl.load(ptr, mask=(s < SPLIT)[:, None] & ok[None, :], other=0.0), 0)
    c = e % C
    rest = e // C
    w = rest % W
    rest = rest // W
    h = rest % H
    rest = rest // H
    ptrs = out_ptr + (rest // D) * o_n + c * o_c + (rest % D) * o_d + h * o_h + w * o_w
    acc *= alpha
    if beta != 0:
        acc += beta * tl.load(ptrs, mask=ok, other=0.0).to(acc.dtype)
    if BIAS:
        acc += tl.load(bias_ptr + c, mask=ok, other=0.0).to(acc.dtype)
    acc = activate(acc, ACTIVATION, act_a, act_b)
    tl.store(ptrs, acc.to(out_ptr.dtype.element_ty), mask=ok)
