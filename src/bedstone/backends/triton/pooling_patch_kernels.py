"""The kernels of pooling by patches, and of one window over a whole image: see pooling_patch.py.

A tile's element stands for a run of columns. Where memory is innermost along columns and BLOCK
columns of a run are one word of it, a run is loaded and stored as that word, and only the columns
beside it (its window's reach) one by one; elsewhere (channels innermost) each column is a tile.
Maxima read the nearest row or column of x in place of padding: it lies in the same window, so
neither the maximum nor its first position changes, and no mask is needed.
"""

import triton
import triton.language as tl

from bedstone.backends.triton.softmax_kernels import (
    column_offsets,
    row_offsets,
    rows_of_program,
)


@triton.jit
def patch_tile(
    pid, C, runs, N, CHANNELS_LAST: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr
):  # fmt: skip
    """(image, channel, run, inside) of a program's tile, shaped to broadcast to [BA, BB]."""
    a = tl.arange(0, BA)[:, None]
    b = tl.arange(0, BB)[None, :]
    if CHANNELS_LAST:
        blocks = tl.cdiv(C, BB)
        channel = (pid % blocks) * BB + b
        number = (pid // blocks) * BA + a
        image = number // runs
        return image, channel, number % runs, (channel < C) & (image < N)
    else:
        spans = tl.cdiv(runs, BB)
        run = (pid % spans) * BB + b
        plane = (pid // spans) * BA + a
        return plane // C, plane % C, run, (plane < N * C) & (run < runs)


@triton.jit
def parts_of(word, BLOCK: tl.constexpr):
    """The BLOCK (2 or 4) columns of [BA, BB, BLOCK] words."""
    if BLOCK == 2:
        return tl.split(word)
    else:
        even, odd = tl.split(tl.reshape(word, (word.shape[0], word.shape[1], 2, 2)))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        return a, b, c, d


@triton.jit
def load_run(
    ptrs, base, ok, row_ok, W, stride, COUNT: tl.constexpr, AT: tl.constexpr, BLOCK: tl.constexpr,
    MAX: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """COUNT columns of a row as a tuple of tiles [BA, BB]; the one at AT is column `base`. Outside
    0 <= column < W: 0; MAX: the first column before it, -inf behind it."""
    other: tl.constexpr = float("-inf") if MAX else 0.0
    inner: tl.constexpr = BLOCK if AT >= 0 and AT < COUNT else 1
    if inner > 1:
        column = base[:, :, None] + tl.arange(0, inner)[None, None, :]
        mask = ok[:, :, None] & (column < W)
        if not MAX:
            mask = mask & row_ok
        parts = parts_of(tl.load(ptrs[:, :, None] + column * stride, mask=mask, other=other), inner)
    found = ()
    for j in tl.static_range(COUNT):
        if inner > 1 and j >= AT and j < AT + inner:
            found = found + (parts[j - AT].to(ACC),)
        else:
            column = base + (j - AT)
            inside = ok & (column < W)
            if MAX:
                if j < AT:
                    column = tl.maximum(column, 0)
            else:
                inside = inside & row_ok
                if j < AT:
                    inside = inside & (column >= 0)
            value = tl.load(ptrs + column * stride, mask=inside, other=other)
            found = found + (value.to(ACC),)
    return found


@triton.jit
def store_run(
    ptrs, values, START: tl.constexpr, COUNT: tl.constexpr, base, ok, W, stride, alpha, beta,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """alpha * values[START:START + COUNT] + beta * what is there, to columns base, base + 1, ...
    below W."""
    if BLOCK == COUNT and COUNT > 1:
        if COUNT == 2:
            word = tl.join(values[START], values[START + 1])
        else:
            word = tl.join(
                tl.join(values[START], values[START + 2]),
                tl.join(values[START + 1], values[START + 3]),
            )
            word = tl.reshape(word, (word.shape[0], word.shape[1], 4))
        column = base[:, :, None] + tl.arange(0, COUNT)[None, None, :]
        to, mask = ptrs[:, :, None] + column * stride, ok[:, :, None] & (column < W)
        word *= alpha
        if beta != 0:
            word += beta * tl.load(to, mask=mask, other=0.0).to(word.dtype)
        tl.store(to, word.to(ptrs.dtype.element_ty), mask=mask)
    else:
        for j in tl.static_range(COUNT):
            mask = ok & (base + j < W)
            to = ptrs + (base + j) * stride
            out = alpha * values[START + j]
            if beta != 0:
                out += beta * tl.load(to, mask=mask, other=0.0).to(out.dtype)
            tl.store(to, out.to(ptrs.dtype.element_ty), mask=mask)


@triton.jit
def larger(best, value):
    """True where value, which comes later, is the new maximum: NaN is above everything."""
    return (value > best) | ((value != value) & (best == best))


@triton.jit
def joined(a, b, MAX: tl.constexpr):
    """The larger of two terms, NaN if one is; or their sum."""
    if not MAX:
        return a + b
    elif a.dtype == tl.float64:
        return tl.where((b > a) | (b != b), b, a)
    else:
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.constexpr_function
def has_tap(position, window, taps, step, low):
    """True if a window, of which `position` and `window` count from the same patch, reads there."""
    return 0 <= position - window * step + low < taps


@triton.jit
def taps_counted(p, size, window, low, high, step, INCLUDE: tl.constexpr):
    """How many taps of window p count in the divisor along one axis."""
    start = p * step - low
    if INCLUDE:
        return tl.maximum(tl.minimum(size + high - start, window), 0)
    else:
        return tl.maximum(tl.minimum(size - start, window) - tl.maximum(-start, 0), 0)


@triton.jit
def pooling_patch_forward_kernel(
    x_ptr, y_ptr, alpha, beta, N, C, H, W, P, Q, x_strides, y_strides,
    R: tl.constexpr, S: tl.constexpr, U_H: tl.constexpr, U_W: tl.constexpr, low: tl.constexpr,
    high: tl.constexpr, MODE: tl.constexpr, ACC: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_OUT: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BA: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """y = alpha * pool(x) + beta * y: an element of the tile computes PH rows of PW columns.

    Rows of x pass once, from top to bottom: a row's S taps are joined for each of PW columns, and
    that goes into every output row whose window has it. Strides are (n, c, h, w).
    """
    MAX: tl.constexpr = MODE == "max"
    INCLUDE: tl.constexpr = MODE == "average_include_padding"
    # Which tile and rows
    pid = tl.program_id(0)
    parts = tl.cdiv(P, PH)
    first = (pid % parts) * PH
    n, c, run, ok = patch_tile(pid // parts, C, tl.cdiv(Q, PW), N, CHANNELS_LAST, BA, BB)
    x_ptrs = x_ptr + (n * x_strides[0] + c * x_strides[1])
    y_ptrs = y_ptr + (n * y_strides[0] + c * y_strides[1])
    base = run * (PW * U_W)
    sums = (tl.zeros((BA, BB), ACC),) * (PH * PW)
    for t in tl.static_range((PH - 1) * U_H + R):
        h = first * U_H - low[0] + t
        near = tl.minimum(tl.maximum(h, 0), H - 1)
        columns = load_run(
            x_ptrs + near * x_strides[2], base, ok, (h >= 0) & (h < H), W, x_strides[3],
            (PW - 1) * U_W + S, low[1], BLOCK, MAX, ACC,
        )  # fmt: skip
        rows = ()
        for k in tl.static_range(PW):
            row = columns[k * U_W]
            for s in tl.static_range(1, S):
                row = joined(row, columns[k * U_W + s], MAX)
            rows = rows + (row,)
        changed = ()
        for i in tl.static_range(PH):
            for k in tl.static_range(PW):
                if t == i * U_H:
                    changed = changed + (rows[k],)
                elif t > i * U_H and t < i * U_H + R:
                    changed = changed + (joined(sums[i * PW + k], rows[k], MAX),)
                else:
                    changed = changed + (sums[i * PW + k],)
        sums = changed
        for i in tl.static_range(PH):
            if t == i * U_H + R - 1:
                p = first + i
                out = ()
                for k in tl.static_range(PW):
                    if MAX:
                        out = out + (sums[i * PW + k],)
                    else:
                        taps = taps_counted(
                            run * PW + k, W, S, low[1], high[1], U_W, INCLUDE
                        ) * taps_counted(p, H, R, low[0], high[0], U_H, INCLUDE)
                        out = out + (sums[i * PW + k] / tl.maximum(taps, 1).to(ACC),)
                store_run(
                    y_ptrs + p * y_strides[2], out, 0, PW, run * PW, ok & (p < P), Q, y_strides[3],
                    alpha, beta, BLOCK_OUT,
                )  # fmt: skip


@triton.jit
def pooling_patch_maxima_kernel(
    x_ptr, dy_ptr, dx_ptr, alpha, beta, N, C, H, W, P, Q, x_strides, dy_strides, dx_strides,
    R: tl.constexpr, S: tl.constexpr, U_H: tl.constexpr, U_W: tl.constexpr, low: tl.constexpr,
    before: tl.constexpr, NH: tl.constexpr, NW: tl.constexpr, ACC: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, BLOCK: tl.constexpr, PH: tl.constexpr,
    PW: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """dx = alpha * (sum of dy of the windows whose first maximum it is) + beta * dx.

    An element of the tile computes PH * U_H rows of PW * U_W columns. The NH x NW windows
    that meet them start with window first + before. Rows of x pass once, from top to bottom; a
    window's maximum and its flat position grow with them, and when it is complete, its dy goes to
    the element of the patch at that position, if there is one.
    """
    # Which tile and rows
    pid = tl.program_id(0)
    parts = tl.cdiv(H, PH * U_H)
    first = (pid % parts) * PH
    n, c, run, ok = patch_tile(pid // parts, C, tl.cdiv(W, PW * U_W), N, CHANNELS_LAST, BA, BB)
    x_ptrs = x_ptr + (n * x_strides[0] + c * x_strides[1])
    dy_ptrs = dy_ptr + (n * dy_strides[0] + c * dy_strides[1])
    dx_ptrs = dx_ptr + (n * dx_strides[0] + c * dx_strides[1])
    base = run * (PW * U_W)
    AT: tl.constexpr = low[1] - before[1] * U_W
    zero = tl.zeros((BA, BB), ACC)
    spread = base + tl.zeros((BA, BB), tl.int32)
    total = (zero,) * (PH * U_H * PW * U_W)
    best = (zero,) * (NH * NW)
    where = (zero.to(tl.int32),) * (NH * NW)
    for t in tl.static_range((NH - 1) * U_H + R):
        h = (first + before[0]) * U_H - low[0] + t
        near = tl.minimum(tl.maximum(h, 0), H - 1)
        columns = load_run(
            x_ptrs + near * x_strides[2], base, ok, True, W, x_strides[3],
            (NW - 1) * U_W + S, AT, BLOCK, True, ACC,
        )  # fmt: skip
        rows = ()
        places = ()
        for k in tl.static_range(NW):
            row = columns[k * U_W]
            place = tl.maximum(spread + (k * U_W - AT), 0)
            for s in tl.static_range(1, S):
                take = larger(row, columns[k * U_W + s])
                row = tl.where(take, columns[k * U_W + s], row)
                place = tl.where(take, tl.maximum(spread + (k * U_W + s - AT), 0), place)
            rows = rows + (row,)
            places = places + (place + near * W,)
        new_best = ()
        new_where = ()
        for m in tl.static_range(NH):
            for k in tl.static_range(NW):
                if t == m * U_H:
                    new_best = new_best + (rows[k],)
                    new_where = new_where + (places[k],)
                elif t > m * U_H and t < m * U_H + R:
                    old, place = best[m * NW + k], where[m * NW + k]
                    take = larger(old, rows[k])
                    new_best = new_best + (tl.where(take, rows[k], old),)
                    new_where = new_where + (tl.where(take, places[k], place),)
                else:
                    new_best = new_best + (best[m * NW + k],)
                    new_where = new_where + (where[m * NW + k],)
        best = new_best
        where = new_where
        for m in tl.static_range(NH):
            if t == m * U_H + R - 1:
                # Window row m is complete.
                p = first + before[0] + m
                added = total
                for k in tl.static_range(NW):
                    q = run * PW + (before[1] + k)
                    inside = ok & (p >= 0) & (p < P) & (q >= 0) & (q < Q)
                    at = dy_ptrs + (p * dy_strides[2] + q * dy_strides[3])
                    dy = tl.load(at, mask=inside, other=0.0).to(ACC)
                    grown = ()
                    for a in tl.static_range(PH * U_H):
                        for b in tl.static_range(PW * U_W):
                            so_far = added[a * (PW * U_W) + b]
                            if has_tap(a, before[0] + m, R, U_H, low[0]) and has_tap(
                                b, before[1] + k, S, U_W, low[1]
                            ):
                                own = (first * U_H + a) * W + spread + b
                                hit = where[m * NW + k] == own
                                so_far += tl.where(hit, dy, 0.0)
                            grown = grown + (so_far,)
                    added = grown
                total = added
    for a in tl.static_range(PH * U_H):
        row = first * U_H + a
        store_run(
            dx_ptrs + row * dx_strides[2], total, a * (PW * U_W), PW * U_W, base, ok & (row < H),
            W, dx_strides[3], alpha, beta, BLOCK,
        )  # fmt: skip


@triton.jit
def pooling_patch_averages_kernel(
    dy_ptr, dx_ptr, alpha, beta, N, C, H, W, P, Q, dy_strides, dx_strides,
    R: tl.constexpr, S: tl.constexpr, U_H: tl.constexpr, U_W: tl.constexpr, low: tl.constexpr,
    high: tl.constexpr, before: tl.constexpr, NH: tl.constexpr, NW: tl.constexpr,
    MODE: tl.constexpr, ACC: tl.constexpr, CHANNELS_LAST: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_OUT: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """dx = alpha * (sum of dy / divisor of the windows that cover it) + beta * dx, on patches as
    the kernel of maxima has them: rows of dy pass once, from top to bottom."""
    # Which tile and rows
    pid = tl.program_id(0)
    parts = tl.cdiv(H, PH * U_H)
    first = (pid % parts) * PH
    n, c, run, ok = patch_tile(pid // parts, C, tl.cdiv(W, PW * U_W), N, CHANNELS_LAST, BA, BB)
    dy_ptrs = dy_ptr + (n * dy_strides[0] + c * dy_strides[1])
    dx_ptrs = dx_ptr + (n * dx_strides[0] + c * dx_strides[1])
    base = run * (PW * U_W)
    INCLUDE: tl.constexpr = MODE == "average_include_padding"
    zero = tl.zeros((BA, BB), ACC)
    total = (zero,) * (PH * U_H * PW * U_W)
    for m in tl.static_range(NH):
        p = first + (before[0] + m)
        columns = load_run(
            dy_ptrs + p * dy_strides[2], run * PW, ok, (p >= 0) & (p < P), Q, dy_strides[3],
            NW, -before[1], BLOCK, False, ACC,
        )  # fmt: skip
        rows_counted = taps_counted(p, H, R, low[0], high[0], U_H, INCLUDE)
        shares = ()
        for k in tl.static_range(NW):
            q = run * PW + (before[1] + k)
            taps = taps_counted(q, W, S, low[1], high[1], U_W, INCLUDE) * rows_counted
            shares = shares + (columns[k] / tl.maximum(taps, 1).to(ACC),)
        rows = ()
        for b in tl.static_range(PW * U_W):
            row = zero
            for k in tl.static_range(NW):
                if has_tap(b, before[1] + k, S, U_W, low[1]):
                    row += shares[k]
            rows = rows + (row,)
        grown = ()
        for a in tl.static_range(PH * U_H):
            for b in tl.static_range(PW * U_W):
                if has_tap(a, before[0] + m, R, U_H, low[0]):
                    grown = grown + (total[a * (PW * U_W) + b] + rows[b],)
                else:
                    grown = grown + (total[a * (PW * U_W) + b],)
        total = grown
    for a in tl.static_range(PH * U_H):
        row = first * U_H + a
        store_run(
            dx_ptrs + row * dx_strides[2], total, a * (PW * U_W), PW * U_W, base, ok & (row < H),
            W, dx_strides[3], alpha, beta, BLOCK_OUT,
        )  # fmt: skip


@triton.jit
def pooling_whole_forward_kernel(
    x_ptr, y_ptr, alpha, beta, divisor, outer, A, L, axes, x_rows, x_columns, y_rows,
    MAX: tl.constexpr, ACC: tl.constexpr, WIDE: tl.constexpr, BA: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """y = alpha * (the largest of a row, or its sum / divisor) + beta * y for BA rows (an image's
    channel each) of L elements, BL at a time. Rows as softmax has them."""
    rows = rows_of_program(A, BA, WIDE)
    ok = rows < A
    x_ptrs = x_ptr + row_offsets(rows, outer, x_rows, A, BA, WIDE)[:, None]
    start: tl.constexpr = float("-inf") if MAX else 0.0
    found = tl.full((BA, BL), start, ACC)
    for begin in range(0, L, BL):
        at = begin + tl.arange(0, BL)
        mask = ok[:, None] & (at < L)[None, :]
        x = tl.load(x_ptrs + column_offsets(at, axes, x_columns)[None, :], mask=mask, other=start)
        found = joined(found, x.to(ACC), MAX)
    if MAX:
        # A row with a NaN has it in `found`; the reduction of maxima may pass over it.
        bad = tl.max((found != found).to(tl.int32), axis=1) > 0
        out = tl.where(bad, float("nan"), tl.max(found, axis=1))
    else:
        out = tl.sum(found, axis=1) / divisor
    y_ptrs = y_ptr + row_offsets(rows, outer, y_rows, A, BA, WIDE)
    out *= alpha
    if beta != 0:
        out += beta * tl.load(y_ptrs, mask=ok, other=0.0).to(ACC)
    tl.store(y_ptrs, out.to(y_ptr.dtype.element_ty), mask=ok)
