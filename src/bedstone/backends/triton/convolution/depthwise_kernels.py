"""Kernels of depthwise convolution (one filter a channel), for NHWC, NCHW and any other strides.

There is no matrix product here, only memory to move: a program walks down the rows of a strip and
keeps R rolling sums (or R rows of x) in registers, so each row is fetched once and not once a
filter row. The strip is [BA, BB] elements, BB along the innermost axis of memory: runs of QC
columns x channels when CHANNELS_LAST (an element of the tile then stands for QC outputs, so that a
column of x is loaded once for all the taps that meet it), else (image, channel) planes x columns.
"""

import triton
import triton.language as tl

from bedstone.backends.triton.pointwise import activate
from bedstone.backends.triton.walk import strip


@triton.jit
def columns_strip(
    pid, C, Q, N, CHANNELS_LAST: tl.constexpr, QC: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr
):  # fmt: skip
    """(image, channel, first column, inside) of a strip, shaped to broadcast to [BA, BB]."""
    if CHANNELS_LAST:
        blocks = tl.cdiv(C, BB)
        channel = (pid % blocks) * BB + tl.arange(0, BB)[None, :]
        runs = tl.cdiv(Q, QC)
        run = (pid // blocks) * BA + tl.arange(0, BA)[:, None]
        image = run // runs
        return image, channel, (run % runs) * QC, (channel < C) & (image < N)
    else:
        image, channel, column, ok = strip(pid, C, Q, N, False, BA, BB)
        return image, channel, column, ok & (image < N)


@triton.jit
def load_taps(
    w_ptr, mask, w_h, w_w, R: tl.constexpr, S: tl.constexpr, ACC: tl.constexpr
):  # fmt: skip
    """The R * S taps of each channel's filter, as a tuple."""
    taps = ()
    for r in tl.static_range(R):
        for s in tl.static_range(S):
            taps = taps + (tl.load(w_ptr + (r * w_h + s * w_w), mask=mask, other=0.0).to(ACC),)
    return taps


@triton.jit
def load_column(ptrs, t, row_ok, W, x_w, UP_W: tl.constexpr, ACC: tl.constexpr):
    """The elements of a row at columns t, of which each UP_W-th stands for one of x."""
    inside = row_ok & (t >= 0) & (t < W * UP_W)
    if UP_W > 1:
        inside = inside & (t % UP_W == 0)
        t = t // UP_W
    return tl.load(ptrs + t * x_w, mask=inside, other=0.0).to(ACC)


@triton.jit
def convolution_image_depthwise_kernel(
    x_ptr, w_ptr, y_ptr, bias_ptr, alpha, beta, act_a, act_b,
    N, C, H, W, P, Q, pad_h, pad_w, u_h, u_w, dil_h, dil_w,
    x_n, x_c, x_h, x_w, w_k, w_h, w_w, y_n, y_c, y_h, y_w, ROWS,
    R: tl.constexpr, S: tl.constexpr, UP_H: tl.constexpr, UP_W: tl.constexpr,
    ROLL: tl.constexpr, CHANNELS_LAST: tl.constexpr, QC: tl.constexpr, STEP: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, ACC: tl.constexpr, BA: tl.constexpr,
    BB: tl.constexpr,
):  # fmt: skip
    """y[n, c, p, q] = act(alpha sum_{r, s} w[c, r, s] x[n, c, h, w] + beta y + bias[c])

    with h = (p u_h - pad_h + r dil_h) / UP_H where that is whole (backward_data of stride UP_H is
    such a convolution with the filter mirrored), w likewise. One program computes ROWS rows of a
    strip of y. Rows and columns outside x count as 0. ROLL (u_h = dil_h = UP_H = 1) keeps R sums
    for each of QC columns; QC > 1 needs u_w = STEP dil_w and UP_W = 1.
    """
    # Which strip and rows
    pid = tl.program_id(0)
    parts = tl.cdiv(P, ROWS)
    first = (pid % parts) * ROWS
    last = tl.minimum(first + ROWS, P)
    n, c, q, ok = columns_strip(pid // parts, C, Q, N, CHANNELS_LAST, QC, BA, BB)
    x_ptr += n * x_n + c * x_c
    y_ptr += n * y_n + c * y_c + q * y_w
    taps = load_taps(w_ptr + c * w_k, c < C, w_h, w_w, R, S, ACC)
    column = q * u_w - pad_w
    zero = tl.zeros((BA, BB), ACC)
    bias = zero
    if BIAS:
        bias += tl.load(bias_ptr + c, mask=c < C, other=0.0).to(ACC)

    if ROLL:
        sums = (zero,) * (R * QC)
        for h in tl.range(first - pad_h, last - pad_h + R - 1):
            row_ok = ok & (h >= 0) & (h < H)
            for j in tl.static_range((QC - 1) * STEP + S):
                v = load_column(x_ptr + h * x_h, column + j * dil_w, row_ok, W, x_w, UP_W, ACC)
                added = ()
                for i in tl.static_range(QC):
                    for r in tl.static_range(R):
                        if j >= i * STEP and j < i * STEP + S:
                            added = added + (sums[i * R + r] + v * taps[r * S + j - i * STEP],)
                        else:
                            added = added + (sums[i * R + r],)
                sums = added
            # Row h is the last one of output row h + pad_h - (R - 1).
            p = h + pad_h - (R - 1)
            moved = ()
            for i in tl.static_range(QC):
                store_row(
                    y_ptr, sums[i * R + R - 1], bias, alpha, beta, act_a, act_b, p * y_h + i * y_w,
                    ok & (p >= first) & (q + i < Q), ACTIVATION,
                )  # fmt: skip
                moved = moved + (zero,)
                for r in tl.static_range(R - 1):
                    moved = moved + (sums[i * R + r],)
            sums = moved
    else:
        for p in tl.range(first, last):
            sums = (zero,) * QC
            for r in tl.static_range(R):
                h = p * u_h - pad_h + r * dil_h
                row_ok = ok & (h >= 0) & (h < H * UP_H)
                if UP_H > 1:
                    row_ok = row_ok & (h % UP_H == 0)
                    h = h // UP_H
                for j in tl.static_range((QC - 1) * STEP + S):
                    v = load_column(x_ptr + h * x_h, column + j * dil_w, row_ok, W, x_w, UP_W, ACC)
                    added = ()
                    for i in tl.static_range(QC):
                        if j >= i * STEP and j < i * STEP + S:
                            added = added + (sums[i] + v * taps[r * S + j - i * STEP],)
                        else:
                            added = added + (sums[i],)
                    sums = added
            for i in tl.static_range(QC):
                store_row(
                    y_ptr, sums[i], bias, alpha, beta, act_a, act_b, p * y_h + i * y_w,
                    ok & (q + i < Q), ACTIVATION,
                )  # fmt: skip


@triton.jit
def store_row(
    y_ptr, acc, bias, alpha, beta, act_a, act_b, offs, mask, ACTIVATION: tl.constexpr
):  # fmt: skip
    """y = act(alpha * acc + beta * y + bias) where mask; y is read only if beta is not 0."""
    acc *= alpha
    if beta != 0:
        acc += beta * tl.load(y_ptr + offs, mask=mask, other=0.0).to(acc.dtype)
    acc = activate(acc + bias, ACTIVATION, act_a, act_b)
    tl.store(y_ptr + offs, acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_row(
    ptrs, h, column, ok, H, W, x_h, x_w, dil_w, S: tl.constexpr, ACC: tl.constexpr
):  # fmt: skip
    """Row h of x at the S columns column + s * dil_w, 0 outside x: a tuple of S tiles."""
    row_ok = ok & (h >= 0) & (h < H)
    loaded = ()
    for s in tl.static_range(S):
        t = column + s * dil_w
        inside = row_ok & (t >= 0) & (t < W)
        loaded = loaded + (tl.load(ptrs + (h * x_h + t * x_w), mask=inside, other=0.0).to(ACC),)
    return loaded


@triton.constexpr_function
def tap_of(position, output, step):
    """The tap by which an output reads a position (rows or columns, counted from those that the
    first output reads)."""
    return position - output * step


@triton.constexpr_function
def has_tap(position, output, taps, step):
    """True if the output reads that position."""
    return 0 <= position - output * step < taps


@triton.jit
def with_product(sums, PLACE: tl.constexpr, a, b):
    """The tuple with a * b added to its element PLACE."""
    changed = ()
    for k in tl.static_range(len(sums)):
        if k == PLACE:
            changed = changed + (sums[k] + a * b,)
        else:
            changed = changed + (sums[k],)
    return changed


@triton.jit
def convolution_filter_depthwise_kernel(
    x_ptr, dy_ptr, part_ptr,
    N, C, H, W, P, Q, pad_h, pad_w, u_h, u_w, dil_h, dil_w,
    x_n, x_c, x_h, x_w, y_n, y_c, y_h, y_w, ROWS, SPLIT,
    R: tl.constexpr, S: tl.constexpr, ROLL: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    QC: tl.constexpr, STEP: tl.constexpr, RAGGED: tl.constexpr, PATCH: tl.constexpr,
    PATCH_U: tl.constexpr, ACC: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """part[split, c, r, s] = sum over the program's share of pixels of dy[n, c, p, q] x[n, c, h, w]

    with h = p u_h - pad_h + r dil_h, w likewise. CHANNELS_LAST: a program takes BB channels and
    walks BA runs of QC columns at a time (QC > 1 needs u_w = STEP dil_w; RAGGED: the last run of a
    row is shorter); else one channel, BA images at a time, BB columns. Its share: every
    SPLIT-th of the pieces, a piece being ROWS rows of a strip. R * S sums of [BA, BB] stay in
    registers until the end, where columns (and images) are added up. ROLL (u_h = dil_h = 1) keeps
    the R rows of x that meet a row of dy, so that each row of x is read S times and not R * S.
    PATCH rows of dy (0: any number; needs dil_h = 1, u_h = PATCH_U) are held while the rows of x
    that meet them pass once.
    """
    pid = tl.program_id(0)
    split = tl.program_id(1)
    a = tl.arange(0, BA)[:, None]
    b = tl.arange(0, BB)[None, :]
    parts = tl.cdiv(P, ROWS)
    if CHANNELS_LAST:
        c = pid * BB + b
        runs = tl.cdiv(Q, QC)
        pieces = tl.cdiv(N * runs, BA) * parts
    else:
        c = pid + 0 * b
        spans = tl.cdiv(Q, BB)
        pieces = tl.cdiv(N, BA) * spans * parts
    zero = tl.zeros((BA, BB), ACC)
    sums = (zero,) * (R * S)
    for piece in tl.range(split, pieces, SPLIT):
        first = (piece % parts) * ROWS
        last = tl.minimum(first + ROWS, P)
        rest = piece // parts
        if CHANNELS_LAST:
            run = rest * BA + a
            q = (run % runs) * QC
            n = run // runs
        else:
            q = (rest % spans) * BB + b
            n = (rest // spans) * BA + a
        ok = (c < C) & (q < Q) & (n < N)
        xs = x_ptr + (n * x_n + c * x_c)
        ys = dy_ptr + (n * y_n + c * y_c + q * y_w)
        column = q * u_w - pad_w
        if PATCH > 0:
            dys = ()
            for i in tl.static_range(PATCH * QC):
                inside = ok & (q + i % QC < Q) & (first + i // QC < P)
                at = ys + ((first + i // QC) * y_h + (i % QC) * y_w)
                dys = dys + (tl.load(at, mask=inside, other=0.0).to(ACC),)
            for t in tl.static_range((PATCH - 1) * PATCH_U + R):
                h = first * PATCH_U - pad_h + t
                row_ok = ok & (h >= 0) & (h < H)
                for j in tl.static_range((QC - 1) * STEP + S):
                    v = load_column(xs + h * x_h, column + j * dil_w, row_ok, W, x_w, 1, ACC)
                    for i in tl.static_range(PATCH * QC):
                        if has_tap(t, i // QC, R, PATCH_U) and has_tap(j, i % QC, S, STEP):
                            seen = v
                            if RAGGED:  # (0 times an infinity is not 0)
                                seen = tl.where((q + i % QC < Q) & (first + i // QC < P), v, 0.0)
                            sums = with_product(
                                sums, tap_of(t, i // QC, PATCH_U) * S + tap_of(j, i % QC, STEP),
                                seen, dys[i],
                            )  # fmt: skip
        elif QC > 1:
            for p in tl.range(first, last):
                dys = ()
                for i in tl.static_range(QC):
                    dy = tl.load(ys + (p * y_h + i * y_w), mask=ok & (q + i < Q), other=0.0)
                    dys = dys + (dy.to(ACC),)
                for r in tl.static_range(R):
                    h = p * u_h - pad_h + r * dil_h
                    row_ok = ok & (h >= 0) & (h < H)
                    for j in tl.static_range((QC - 1) * STEP + S):
                        v = load_column(xs + h * x_h, column + j * dil_w, row_ok, W, x_w, 1, ACC)
                        for i in tl.static_range(QC):
                            if j >= i * STEP and j < i * STEP + S:
                                seen = v
                                if RAGGED:  # (0 times an infinity is not 0)
                                    seen = tl.where(q + i < Q, v, 0.0)
                                sums = with_product(sums, r * S + j - i * STEP, seen, dys[i])
        elif ROLL:
            # kept[(r, s)] are the rows of x that output row p reads; each step loads one more.
            kept = ()
            for r in tl.static_range(R - 1):
                kept = kept + load_row(
                    xs, first - pad_h + r, column, ok, H, W, x_h, x_w, dil_w, S, ACC
                )
            for p in tl.range(first, last):
                dy = tl.load(ys + p * y_h, mask=ok, other=0.0).to(ACC)
                kept = kept + load_row(
                    xs, p - pad_h + R - 1, column, ok, H, W, x_h, x_w, dil_w, S, ACC
                )
                added = ()
                for tap in tl.static_range(R * S):
                    added = added + (sums[tap] + kept[tap] * dy,)
                sums = added
                moved = ()
                for tap in tl.static_range(S, R * S):
                    moved = moved + (kept[tap],)
                kept = moved
        else:
            for p in tl.range(first, last):
                dy = tl.load(ys + p * y_h, mask=ok, other=0.0).to(ACC)
                added = ()
                for r in tl.static_range(R):
                    h = p * u_h - pad_h + r * dil_h
                    row = load_row(xs, h, column, ok, H, W, x_h, x_w, dil_w, S, ACC)
                    for s in tl.static_range(S):
                        added = added + (sums[r * S + s] + row[s] * dy,)
                sums = added
    for tap in tl.static_range(R * S):
        total = tl.sum(sums[tap], axis=0)
        if CHANNELS_LAST:
            k = pid * BB + tl.arange(0, BB)
            offs = split.to(tl.int64) * C * (R * S) + k * (R * S) + tap
            tl.store(part_ptr + offs, total, mask=k < C)
        else:
            offs = split.to(tl.int64) * C * (R * S) + pid * (R * S) + tap
            tl.store(part_ptr + offs, tl.sum(total, axis=0))
