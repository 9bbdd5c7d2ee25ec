"""float16 and bfloat16 to and from float32, in registers, by IEEE round-to-nearest-even.

bfloat16 is the upper half of a float32: a shift, and an integer addition that rounds. float16
uses the target's own conversion where it has one (`Target.has_f16`); elsewhere the exponent is
moved by a multiplication with a power of two, which also handles subnormal numbers.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from bedstone.backends.cpu.irtypes import F16, F32, I16, I32, constant, like

FLOAT32_INFINITY = 0x7F800000
FLOAT32_SIGN = 0x80000000
QUIET_BIT = 0x0040  # of a bfloat16
FLOAT16_SIGN, FLOAT16_REST, FLOAT16_INFINITY, FLOAT16_NAN = 0x8000, 0x7FFF, 0x7C00, 0x7E00
MANTISSA_SHIFT = 23 - 10
EXPONENT_SHIFT = (127 - 15) << 23
FLOAT16_OVERFLOW = (127 + 16) << 23  # 2^16: the first magnitude whose exponent float16 lacks
FLOAT16_NORMAL = (127 - 14) << 23  # 2^-14: the smallest normal float16
SUBNORMAL_MAGIC = (127 - 15 + MANTISSA_SHIFT + 1) << 23  # adding 0.5 puts its bits lowest


def widen_bfloat16(b: ir.IRBuilder, raw: ir.Value) -> ir.Value:
    """i16 bit patterns -> float32, exact."""
    wide = b.zext(raw, like(raw.type, I32))
    return b.bitcast(b.shl(wide, constant(wide.type, 16)), like(raw.type, F32))


def narrow_bfloat16(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """float32 -> i16 bit patterns; a NaN stays a (quiet) NaN with its sign."""
    type_ = like(value.type, I32)
    bits = b.bitcast(value, type_)
    upper = b.lshr(bits, constant(type_, 16))
    odd = b.and_(upper, constant(type_, 1))
    rounded = b.add(bits, b.add(odd, constant(type_, 0x7FFF)))
    nan = b.or_(upper, constant(type_, QUIET_BIT))
    result = b.select(
        b.fcmp_unordered("uno", value, value), nan, b.lshr(rounded, constant(type_, 16))
    )
    return b.trunc(result, like(type_, I16))


def widen_float16(b: ir.IRBuilder, raw: ir.Value, has_f16: bool) -> ir.Value:
    """float16 -> float32, exact."""
    if has_f16:
        return b.fpext(raw, like(raw.type, F32))
    type_ = like(raw.type, I32)
    bits = b.zext(b.bitcast(raw, like(raw.type, I16)), type_)
    sign = b.shl(b.and_(bits, constant(type_, FLOAT16_SIGN)), constant(type_, 16))
    rest = b.and_(bits, constant(type_, FLOAT16_REST))
    moved = b.shl(rest, constant(type_, MANTISSA_SHIFT))
    real = like(type_, F32)
    scaled = b.bitcast(b.fmul(b.bitcast(moved, real), constant(real, 2.0**112)), type_)
    special = b.or_(moved, constant(type_, FLOAT32_INFINITY))
    is_special = b.icmp_unsigned(">=", rest, constant(type_, FLOAT16_INFINITY))
    return b.bitcast(b.or_(b.select(is_special, special, scaled), sign), real)


def narrow_float16(b: ir.IRBuilder, value: ir.Value, has_f16: bool) -> ir.Value:
    """float32 -> float16; overflow gives infinity, NaN a quiet NaN."""
    if has_f16:
        return b.fptrunc(value, like(value.type, F16))
    type_, real = like(value.type, I32), value.type

    def number(n: int) -> Any:
        return constant(type_, n)

    bits = b.bitcast(value, type_)
    sign = b.and_(bits, number(FLOAT32_SIGN))
    rest = b.xor(bits, sign)
    is_nan = b.icmp_unsigned(">", rest, number(FLOAT32_INFINITY))
    huge = b.select(is_nan, number(FLOAT16_NAN), number(FLOAT16_INFINITY))
    magic = b.bitcast(number(SUBNORMAL_MAGIC), real)
    small = b.bitcast(b.fadd(b.bitcast(rest, real), magic), type_)
    small = b.sub(small, number(SUBNORMAL_MAGIC))
    odd = b.and_(b.lshr(rest, number(MANTISSA_SHIFT)), number(1))
    rounded = b.add(b.sub(rest, number(EXPONENT_SHIFT - 0xFFF)), odd)
    normal = b.lshr(rounded, number(MANTISSA_SHIFT))
    is_small = b.icmp_unsigned("<", rest, number(FLOAT16_NORMAL))
    is_huge = b.icmp_unsigned(">=", rest, number(FLOAT16_OVERFLOW))
    result = b.select(is_huge, huge, b.select(is_small, small, normal))
    result = b.or_(result, b.lshr(sign, number(16)))
    return b.bitcast(b.trunc(result, like(type_, I16)), like(type_, F16))
