"""The two kernels of softmax: see softmax.py for the idea."""

import triton
import triton.language as tl

from bedstone.backends.triton.pointwise import exp, log, rough_exp


@triton.jit
def column_offsets(column, axes, strides):
    """Element offsets of positions in a row whose normalised axes are `axes`."""
    offset = column * 0
    for i in tl.static_range(6):
        offset += (column % axes[6 - i]) * strides[6 - i]
        column = column // axes[6 - i]
    return offset + column * strides[0]


@triton.jit
def row_offset(number, outer, strides, A):
    """Element offset of one row by its number."""
    offset = (number % A) * strides[6]
    index = number // A
    for i in tl.static_range(6):
        offset += (index % outer[5 - i]) * strides[5 - i]
        index = index // outer[5 - i]
    return offset


@triton.jit
def row_offsets(rows, outer, strides, A, BA: tl.constexpr, WIDE: tl.constexpr):
    """Element offsets of this program's rows (row numbers `rows` along A)."""
    index = tl.program_id(0) // tl.cdiv(A, BA)
    offset = rows * strides[6]
    for i in tl.static_range(6):
        offset += (index % outer[5 - i]) * strides[5 - i]
        index = index // outer[5 - i]
    return offset


@triton.jit
def rows_of_program(A, BA: tl.constexpr, WIDE: tl.constexpr):
    """Row numbers along A of this program."""
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    return (pid % tl.cdiv(A, BA)) * BA + tl.arange(0, BA)


# float16 numbers whose exp overflows float32 are common, so "fast" shifts rows of them too: by up
# to this number, so that what overflows float64 (beyond 709) still overflows, as it is defined to.
FAST_LIMIT = tl.constexpr(621.0)


@triton.jit
def origin(peak, ALGORITHM: tl.constexpr):
    """What is subtracted from a row with that peak: 0 for a peak of -inf."""
    found = tl.where(peak == float("-inf"), 0.0, peak)
    if ALGORITHM == "fast":
        found = tl.where(found > FAST_LIMIT, FAST_LIMIT, found)
    return found


@triton.jit
def shifted(x, peak, ALGORITHM: tl.constexpr, SHIFT: tl.constexpr):
    """x less the origin of its row; x itself without SHIFT ("fast" of wide types)."""
    if SHIFT:
        return x - origin(peak, ALGORITHM)[:, None]
    else:
        return x


@triton.jit
def power_of(s, ROUGH: tl.constexpr):
    """e^s; ROUGH: by the hardware's own, whose relative error |s| 2^-24 vanishes in 16 bits."""
    if ROUGH:
        return rough_exp(s)
    else:
        return exp(s)


@triton.jit
def over(power, total, ROUGH: tl.constexpr):
    """power / total of its row; ROUGH: one division a row."""
    if ROUGH:
        return power * (1 / total)[:, None]
    else:
        return power / total[:, None]


@triton.jit
def softmax_forward_kernel(
    x_ptr, y_ptr, alpha, beta, outer, A, L, axes, x_rows, x_columns, y_rows, y_columns,
    ALGORITHM: tl.constexpr, SHIFT: tl.constexpr, ROUGH: tl.constexpr, ACC: tl.constexpr,
    ONE: tl.constexpr, WIDE: tl.constexpr, BA: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """y = alpha * softmax(x) + beta * y for BA rows of L elements, BL at a time.

    ONE: the row fits a tile and is read once. Masked: rows past A, elements past L.
    """
    rows = rows_of_program(A, BA, WIDE)
    ok_rows = rows < A
    x_ptrs = x_ptr + row_offsets(rows, outer, x_rows, A, BA, WIDE)[:, None]
    y_ptrs = y_ptr + row_offsets(rows, outer, y_rows, A, BA, WIDE)[:, None]
    columns = tl.arange(0, BL)
    if ONE:
        mask = ok_rows[:, None] & (columns < L)[None, :]
        offs = column_offsets(columns, axes, x_columns)[None, :]
        x = tl.load(x_ptrs + offs, mask=mask, other=float("-inf")).to(ACC)
        s = shifted(x, tl.max(x, axis=1), ALGORITHM, SHIFT)
        power = power_of(s, ROUGH)
        total = tl.sum(power, axis=1)
        if ALGORITHM == "log":
            out = s - log(total)[:, None]
        else:
            out = over(power, total, ROUGH)
        out *= alpha
        y_ptrs += column_offsets(columns, axes, y_columns)[None, :]
        if beta != 0:
            out += beta * tl.load(y_ptrs, mask=mask, other=0.0).to(ACC)
        tl.store(y_ptrs, out.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        peak = tl.full((BA,), float("-inf"), ACC)
        total = tl.zeros((BA,), ACC)
        for start in range(0, L, BL):
            at = start + columns
            mask = ok_rows[:, None] & (at < L)[None, :]
            offs = column_offsets(at, axes, x_columns)[None, :]
            x = tl.load(x_ptrs + offs, mask=mask, other=float("-inf")).to(ACC)
            higher = tl.maximum(peak, tl.max(x, axis=1))
            if SHIFT:
                same = peak == higher
                grown = origin(higher, ALGORITHM) - origin(peak, ALGORITHM)
                total *= tl.where(same | (total == 0), 1.0, exp(-grown))
            total += tl.sum(power_of(shifted(x, higher, ALGORITHM, SHIFT), ROUGH), axis=1)
            peak = higher
        for start in range(0, L, BL):
            at = start + columns
            mask = ok_rows[:, None] & (at < L)[None, :]
            offs = column_offsets(at, axes, x_columns)[None, :]
            x = tl.load(x_ptrs + offs, mask=mask, other=float("-inf")).to(ACC)
            s = shifted(x, peak, ALGORITHM, SHIFT)
            if ALGORITHM == "log":
                out = s - log(total)[:, None]
            else:
                out = over(power_of(s, ROUGH), total, ROUGH)
            out *= alpha
            ptrs = y_ptrs + column_offsets(at, axes, y_columns)[None, :]
            if beta != 0:
                out += beta * tl.load(ptrs, mask=mask, other=0.0).to(ACC)
            tl.store(ptrs, out.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def softmax_part_kernel(
    x_ptr, y_ptr, part_ptr, alpha, beta, outer, A, L, axes, x_rows, x_columns, y_rows, y_columns,
    SPLIT, PARTS: tl.constexpr, APPLY: tl.constexpr, ALGORITHM: tl.constexpr,
    SHIFT: tl.constexpr, ROUGH: tl.constexpr, ACC: tl.constexpr, WIDE: tl.constexpr,
    BA: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """One of the SPLIT parts, of BL elements, of one row: its peak and the sum of its powers into
    workspace [row, part, 2]; or, with APPLY, y from those of all (at most PARTS) parts.

    APPLY starts with the last row, whose elements the first stage left in the cache.
    """
    pid = tl.program_id(0)
    if APPLY:
        pid = tl.num_programs(0) - 1 - pid
    if WIDE:
        pid = pid.to(tl.int64)
    row = pid // SPLIT
    at = (pid % SPLIT) * BL + tl.arange(0, BL)
    x_ptr += row_offset(row, outer, x_rows, A)
    mask = (at < L)[None, :]
    x_ptrs = x_ptr + column_offsets(at, axes, x_columns)[None, :]
    x = tl.load(x_ptrs, mask=mask, other=float("-inf")).to(ACC)
    if not APPLY:
        peak = tl.max(x, axis=1)
        total = tl.sum(power_of(shifted(x, peak, ALGORITHM, SHIFT), ROUGH), axis=1)
        to = part_ptr + (2 * pid + tl.arange(0, 1))
        tl.store(to, peak)
        tl.store(to + 1, total)
    else:
        number = tl.arange(0, PARTS)[None, :]
        part_ptrs = part_ptr + (2 * row * SPLIT + 2 * number)
        peaks = tl.load(part_ptrs, mask=number < SPLIT, other=float("-inf"))
        totals = tl.load(part_ptrs + 1, mask=number < SPLIT, other=0.0)
        peak = tl.max(peaks, axis=1)
        if SHIFT:
            same = (peaks == peak[:, None]) | (totals == 0)
            grown = origin(peak, ALGORITHM)[:, None] - origin(peaks, ALGORITHM)
            totals *= tl.where(same, 1.0, exp(-grown))
        total = tl.sum(totals, axis=1)
        s = shifted(x, peak, ALGORITHM, SHIFT)
        if ALGORITHM == "log":
            out = s - log(total)[:, None]
        else:
            out = over(power_of(s, ROUGH), total, ROUGH)
        out *= alpha
        offs = row_offset(row, outer, y_rows, A) + column_offsets(at, axes, y_columns)
        ptrs = (y_ptr + offs)[None, :]
        if beta != 0:
            out += beta * tl.load(ptrs, mask=mask, other=0.0).to(ACC)
        tl.store(ptrs, out.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def softmax_backward_kernel(
    y_ptr, dy_ptr, dx_ptr, alpha, beta, outer, A, L, axes,
    y_rows, y_columns, dy_rows, dy_columns, dx_rows, dx_columns,
    ALGORITHM: tl.constexpr, ACC: tl.constexpr, ONE: tl.constexpr, WIDE: tl.constexpr,
    BA: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """dx = alpha * y (dy - sum(y dy)) + beta * dx; log: alpha * (dy - exp(y) sum(dy)) + beta * dx.

    Rows and blocks as in the forward kernel; ONE skips the pass that adds up.
    """
    rows = rows_of_program(A, BA, WIDE)
    ok_rows = rows < A
    y_ptrs = y_ptr + row_offsets(rows, outer, y_rows, A, BA, WIDE)[:, None]
    dy_ptrs = dy_ptr + row_offsets(rows, outer, dy_rows, A, BA, WIDE)[:, None]
    dx_ptrs = dx_ptr + row_offsets(rows, outer, dx_rows, A, BA, WIDE)[:, None]
    columns = tl.arange(0, BL)
    total = tl.zeros((BA,), ACC)
    if not ONE:
        for start in range(0, L, BL):
            at = start + columns
            mask = ok_rows[:, None] & (at < L)[None, :]
            dy = load_columns(dy_ptrs, at, axes, dy_columns, mask, ACC)
            if ALGORITHM == "log":
                total += tl.sum(dy, axis=1)
            else:
                y = load_columns(y_ptrs, at, axes, y_columns, mask, ACC)
                total += tl.sum(y * dy, axis=1)
    for start in range(0, L, BL):
        at = start + columns
        mask = ok_rows[:, None] & (at < L)[None, :]
        dy = load_columns(dy_ptrs, at, axes, dy_columns, mask, ACC)
        y = load_columns(y_ptrs, at, axes, y_columns, mask, ACC)
        if ALGORITHM == "log":
            if ONE:
                total = tl.sum(dy, axis=1)
            out = dy - exp(y) * total[:, None]
        else:
            if ONE:
                total = tl.sum(y * dy, axis=1)
            out = y * (dy - total[:, None])
        out *= alpha
        ptrs = dx_ptrs + column_offsets(at, axes, dx_columns)[None, :]
        if beta != 0:
            out += beta * tl.load(ptrs, mask=mask, other=0.0).to(ACC)
        tl.store(ptrs, out.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_columns(ptrs, at, axes, strides, mask, ACC: tl.constexpr):
    """Elements `at` of the rows at `ptrs`, 0 where masked."""
    offs = column_offsets(at, axes, strides)[None, :]
    return tl.load(ptrs + offs, mask=mask, other=0.0).to(ACC)
