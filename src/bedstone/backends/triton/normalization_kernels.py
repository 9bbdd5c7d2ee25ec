"""The two kernels of normalisation: see normalization.py for the idea."""

import triton
import triton.language as tl

from bedstone.backends.triton.softmax_kernels import (
    column_offsets,
    load_columns,
    row_offsets,
    rows_of_program,
)


@triton.jit
def row_numbers(rows, A, BA: tl.constexpr):
    """Numbers of this program's rows among all rows, outer axes included."""
    return (tl.program_id(0) // tl.cdiv(A, BA)) * A + rows


@triton.jit
def inverse_root(x):
    """1 / sqrt(x), each step rounded correctly."""
    if x.dtype == tl.float64:
        return 1 / tl.sqrt(x)
    else:
        return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), tl.sqrt_rn(x))


@triton.jit
def spread(ptrs, at, axes, strides, ok_rows, mask, ACC: tl.constexpr, A_ROW: tl.constexpr):
    """Elements `at` of the rows at `ptrs`; [BA, 1] where an operand has one element A_ROW."""
    if A_ROW:
        return tl.load(ptrs, mask=ok_rows[:, None], other=0.0).to(ACC)
    else:
        return load_columns(ptrs, at, axes, strides, mask, ACC)


@triton.jit
def add_chunk(x, mask, n, count, mean, squares, shrink, CENTRED: tl.constexpr):
    """(count, mean, squares) of a row with one more chunk of n elements, by the formula of Chan,
    Golub and LeVeque (1979). Distances are shrunk before they are squared."""
    n = n.to(mean.dtype)
    total = count + n
    if CENTRED:
        new = tl.sum(tl.where(mask, x, 0.0), axis=1) / n
    else:
        new = mean
    near = tl.where(mask, (x - new[:, None]) * shrink, 0.0)
    apart = tl.where(count == 0, 0.0, (new - mean) * shrink)
    squares += tl.sum(near * near, axis=1) + apart * apart * (count * (n / total))
    # A weighted sum, not mean + distance * share: an infinite mean stays infinite.
    mean = tl.where(count == 0, new, mean * (count / total) + new * (n / total))
    return total, mean, squares


@triton.jit
def merge_parts(
    part_ptr, number, ok_rows, L, PART, ROWS, SPLIT, shrink, CENTRED: tl.constexpr,
    PARTS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """(mean, squares) of whole rows from those of their SPLIT parts of PART elements."""
    parts = tl.arange(0, PARTS)
    ok = ok_rows[:, None] & (parts < SPLIT)[None, :]
    ptrs = part_ptr + ((2 * parts * ROWS)[None, :] + number[:, None])
    means = tl.load(ptrs, mask=ok, other=0.0)
    squares = tl.load(ptrs + ROWS, mask=ok, other=0.0)
    n = tl.minimum(tl.maximum(L - parts * PART, 0), PART).to(ACC)[None, :]
    mean = tl.sum(means * (n / L.to(ACC)), axis=1)
    if CENTRED:
        apart = tl.where(ok, (means - mean[:, None]) * shrink, 0.0)
        squares += apart * apart * n
    return mean, tl.sum(squares, axis=1)


@triton.jit
def run(ptrs, new, momentum, mask, ACC: tl.constexpr):
    """(1 - momentum) * running + momentum * new."""
    old = tl.load(ptrs, mask=mask, other=0.0).to(ACC)
    out = old * (1 - momentum) + new * momentum
    tl.store(ptrs, out.to(ptrs.dtype.element_ty), mask=mask)


@triton.jit
def blend(ptrs, value, alpha, beta, mask, ACC: tl.constexpr):
    """Write alpha * value + beta * what is there (read if beta is not 0)."""
    out = alpha * value
    if beta != 0:
        out += beta * tl.load(ptrs, mask=mask, other=0.0).to(ACC)
    tl.store(ptrs, out.to(ptrs.dtype.element_ty), mask=mask)


@triton.jit
def normalization_forward_kernel(
    x_ptr, scale_ptr, shift_ptr, mean_ptr, spread_ptr, running_mean_ptr, running_var_ptr, y_ptr,
    part_ptr, alpha, beta, epsilon, shrink, share, momentum, drawn,
    outer, A, L, SPAN, PART, ROWS, SPLIT, axes,
    x_rows, x_columns, scale_rows, scale_columns, shift_rows, shift_columns, y_rows, y_columns,
    statistics_rows,
    STAGE: tl.constexpr, CENTRED: tl.constexpr, SCALE: tl.constexpr, SHIFT: tl.constexpr,
    SCALE_A_ROW: tl.constexpr, SHIFT_A_ROW: tl.constexpr, MEAN: tl.constexpr,
    INV_STD: tl.constexpr, RUNNING: tl.constexpr, PARTS: tl.constexpr, ONE: tl.constexpr,
    ACC: tl.constexpr, WIDE: tl.constexpr, BA: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """y = alpha * ((x - mean) * inv_std * scale + shift) + beta * y for BA rows of L elements.

    STAGE  "whole": a program takes whole rows, and publishes their statistics
           "part": program (., s) takes SPAN elements from s * SPAN on and leaves their mean and
           sum of squares in workspace
           "apply": it merges those parts (of PART elements, SPLIT of them) and writes its SPAN
           "inference": mean and variance (spread_ptr) are given
    share turns the sum of squares into the variance, drawn that into the one of the running
    statistics. ONE: a row fits a tile and is read once. MEAN, INV_STD, RUNNING: what is published.
    """
    rows = rows_of_program(A, BA, WIDE)
    ok_rows = rows < A
    number = row_numbers(rows, A, BA)
    part = tl.program_id(1)
    begin = part * SPAN
    end = tl.minimum(L, begin + SPAN)
    x_ptrs = x_ptr + row_offsets(rows, outer, x_rows, A, BA, WIDE)[:, None]
    columns = tl.arange(0, BL)
    statistics = row_offsets(rows, outer, statistics_rows, A, BA, WIDE)
    mean = tl.zeros((BA,), ACC)
    squares = tl.zeros((BA,), ACC)
    if ONE:
        one_mask = ok_rows[:, None] & (columns < L)[None, :]
        one = load_columns(x_ptrs, columns, axes, x_columns, one_mask, ACC)
    if STAGE == "whole" or STAGE == "part":
        count = begin.to(ACC) * 0
        if ONE:
            count, mean, squares = add_chunk(
                one, one_mask, L, count, mean, squares, shrink, CENTRED
            )
        else:
            for start in range(begin, end, BL):
                at = start + columns
                mask = ok_rows[:, None] & (at < end)[None, :]
                x = load_columns(x_ptrs, at, axes, x_columns, mask, ACC)
                n = tl.minimum(end - start, BL)
                count, mean, squares = add_chunk(x, mask, n, count, mean, squares, shrink, CENTRED)
    if STAGE == "part":
        part_ptrs = part_ptr + (2 * part * ROWS + number)
        tl.store(part_ptrs, mean, mask=ok_rows)
        tl.store(part_ptrs + ROWS, squares, mask=ok_rows)
    else:
        if STAGE == "inference":
            mean = tl.load(mean_ptr + statistics, mask=ok_rows, other=0.0).to(ACC)
            variance = tl.load(spread_ptr + statistics, mask=ok_rows, other=0.0).to(ACC)
        else:
            if STAGE == "apply":
                mean, squares = merge_parts(
                    part_ptr, number, ok_rows, L, PART, ROWS, SPLIT, shrink, CENTRED, PARTS, ACC
                )
            variance = squares * share
        inv_std = inverse_root(variance + epsilon)
        ok_first = ok_rows & (part == 0)
        if MEAN:
            tl.store(mean_ptr + statistics, mean.to(mean_ptr.dtype.element_ty), mask=ok_first)
        if INV_STD:
            given = inv_std.to(spread_ptr.dtype.element_ty)
            tl.store(spread_ptr + statistics, given, mask=ok_first)
        if RUNNING:
            run(running_mean_ptr + statistics, mean, momentum, ok_first, ACC)
            run(running_var_ptr + statistics, variance * drawn, momentum, ok_first, ACC)
        scale_ptrs = scale_ptr + row_offsets(rows, outer, scale_rows, A, BA, WIDE)[:, None]
        shift_ptrs = shift_ptr + row_offsets(rows, outer, shift_rows, A, BA, WIDE)[:, None]
        y_ptrs = y_ptr + row_offsets(rows, outer, y_rows, A, BA, WIDE)[:, None]
        for start in range(begin, end, BL):
            at = start + columns
            mask = ok_rows[:, None] & (at < end)[None, :]
            if ONE:
                x = one
            else:
                x = load_columns(x_ptrs, at, axes, x_columns, mask, ACC)
            out = (x - mean[:, None]) * inv_std[:, None]
            if SCALE:
                out *= spread(scale_ptrs, at, axes, scale_columns, ok_rows, mask, ACC, SCALE_A_ROW)
            if SHIFT:
                out += spread(shift_ptrs, at, axes, shift_columns, ok_rows, mask, ACC, SHIFT_A_ROW)
            ptrs = y_ptrs + column_offsets(at, axes, y_columns)[None, :]
            blend(ptrs, out, alpha, beta, mask, ACC)


@triton.jit
def merge_sum(ptrs, ok, PARTS: tl.constexpr):
    """[BA] sums over the parts at ptrs [BA, PARTS]."""
    return tl.sum(tl.load(ptrs, mask=ok, other=0.0), axis=1)


@triton.jit
def normalization_backward_kernel(
    x_ptr, scale_ptr, mean_ptr, inv_std_ptr, dy_ptr, dscale_ptr, dshift_ptr, dx_ptr, part_ptr,
    alpha, beta, share, outer, A, L, SPAN, ROWS, SPLIT, axes,
    x_rows, x_columns, scale_rows, scale_columns, statistics_rows, statistics_columns,
    dy_rows, dy_columns, dx_rows, dx_columns, parameter_rows,
    STAGE: tl.constexpr, DX: tl.constexpr, DSCALE: tl.constexpr, DSHIFT: tl.constexpr,
    CENTRED: tl.constexpr, SCALE: tl.constexpr, SCALE_A_ROW: tl.constexpr,
    STATISTICS_A_ROW: tl.constexpr, PARTS: tl.constexpr,
    ACC: tl.constexpr, WIDE: tl.constexpr, BA: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Sums over rows of L elements, and what they are wanted for. With n = (x - mean) * inv_std:

    DX      dx = inv_std * (dy * scale - mean(dy * scale) - n * mean(dy * scale * n)), for rows
            that share statistics; share is 1 / L
    DSCALE, DSHIFT  sum(dy * n) and sum(dy), for rows that share a scale

    STAGE and the workspace are those of the forward kernel, with up to four sums a part.
    """
    rows = rows_of_program(A, BA, WIDE)
    ok_rows = rows < A
    number = row_numbers(rows, A, BA)
    part = tl.program_id(1)
    begin = part * SPAN
    end = tl.minimum(L, begin + SPAN)
    columns = tl.arange(0, BL)
    x_ptrs = x_ptr + row_offsets(rows, outer, x_rows, A, BA, WIDE)[:, None]
    dy_ptrs = dy_ptr + row_offsets(rows, outer, dy_rows, A, BA, WIDE)[:, None]
    scale_ptrs = scale_ptr + row_offsets(rows, outer, scale_rows, A, BA, WIDE)[:, None]
    statistics = row_offsets(rows, outer, statistics_rows, A, BA, WIDE)[:, None]
    slopes = tl.zeros((BA,), ACC)  # of dy * scale
    inclined = tl.zeros((BA,), ACC)  # of dy * scale * n
    dscale = tl.zeros((BA,), ACC)
    dshift = tl.zeros((BA,), ACC)
    if STAGE != "apply":
        for start in range(begin, end, BL):
            at = start + columns
            mask = ok_rows[:, None] & (at < end)[None, :]
            x = load_columns(x_ptrs, at, axes, x_columns, mask, ACC)
            dy = load_columns(dy_ptrs, at, axes, dy_columns, mask, ACC)
            normal = x
            if CENTRED:
                normal -= spread(
                    mean_ptr + statistics, at, axes, statistics_columns, ok_rows, mask, ACC,
                    STATISTICS_A_ROW,
                )  # fmt: skip
            normal *= spread(
                inv_std_ptr + statistics, at, axes, statistics_columns, ok_rows, mask, ACC,
                STATISTICS_A_ROW,
            )  # fmt: skip
            normal = tl.where(mask, normal, 0.0)
            if DX:
                slope = dy
                if SCALE:
                    slope *= spread(
                        scale_ptrs, at, axes, scale_columns, ok_rows, mask, ACC, SCALE_A_ROW
                    )
                slopes += tl.sum(slope, axis=1)
                inclined += tl.sum(slope * normal, axis=1)
            if DSCALE:
                dscale += tl.sum(dy * normal, axis=1)
            if DSHIFT:
                dshift += tl.sum(dy, axis=1)
    if STAGE == "part":
        part_ptrs = part_ptr + (4 * part * ROWS + number)
        if DX:
            tl.store(part_ptrs, slopes, mask=ok_rows)
            tl.store(part_ptrs + ROWS, inclined, mask=ok_rows)
        if DSCALE:
            tl.store(part_ptrs + 2 * ROWS, dscale, mask=ok_rows)
        if DSHIFT:
            tl.store(part_ptrs + 3 * ROWS, dshift, mask=ok_rows)
    else:
        if STAGE == "apply":
            parts = tl.arange(0, PARTS)
            ok = ok_rows[:, None] & (parts < SPLIT)[None, :]
            part_ptrs = part_ptr + ((4 * parts * ROWS)[None, :] + number[:, None])
            if DX:
                slopes = merge_sum(part_ptrs, ok, PARTS)
                inclined = merge_sum(part_ptrs + ROWS, ok, PARTS)
            if DSCALE:
                dscale = merge_sum(part_ptrs + 2 * ROWS, ok, PARTS)
            if DSHIFT:
                dshift = merge_sum(part_ptrs + 3 * ROWS, ok, PARTS)
        ok_first = ok_rows & (part == 0)
        parameters = row_offsets(rows, outer, parameter_rows, A, BA, WIDE)
        if DSCALE:
            blend(dscale_ptr + parameters, dscale, alpha, beta, ok_first, ACC)
        if DSHIFT:
            blend(dshift_ptr + parameters, dshift, alpha, beta, ok_first, ACC)
        if DX:
            dx_ptrs = dx_ptr + row_offsets(rows, outer, dx_rows, A, BA, WIDE)[:, None]
            inv_std = tl.load(inv_std_ptr + statistics, mask=ok_rows[:, None], other=0.0).to(ACC)
            for start in range(begin, end, BL):
                at = start + columns
                mask = ok_rows[:, None] & (at < end)[None, :]
                normal = load_columns(x_ptrs, at, axes, x_columns, mask, ACC)
                slope = load_columns(dy_ptrs, at, axes, dy_columns, mask, ACC)
                if SCALE:
                    slope *= spread(
                        scale_ptrs, at, axes, scale_columns, ok_rows, mask, ACC, SCALE_A_ROW
                    )
                if CENTRED:
                    mean = tl.load(mean_ptr + statistics, mask=ok_rows[:, None], other=0.0)
                    normal -= mean.to(ACC)
                    slope -= (slopes * share)[:, None]
                normal *= inv_std
                value = inv_std * (slope - normal * (inclined * share)[:, None])
                ptrs = dx_ptrs + column_offsets(at, axes, dx_columns)[None, :]
                blend(ptrs, value, alpha, beta, mask, ACC)
