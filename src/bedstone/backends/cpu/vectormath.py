"""exp, expm1, log, log1p, tanh, sigmoid, erf, erfc and pow on vectors, float32 and float64.

Each reduces its argument to a short interval, sums a series there, Taylor's or Chebyshev's (its
length follows from the type, so there are no tables) and puts the result together again. Errors
are a few units in the last place; NaN, infinities, signed zeros and overflow come out as IEEE asks.
Cody and Waite, "Software Manual for the Elementary Functions", 1980, for the reductions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from llvmlite import ir

from bedstone.backends.cpu.irtypes import F64, I32, constant, mangled
from bedstone.backends.cpu.values import Float, Int

LOG2_E = 1.0 / math.log(2.0)
TAYLOR_TERMS = 20  # of a series that is cut off shorter: more than any type shows


@dataclass(frozen=True)
class Format:
    """What the functions need to know about a floating type."""

    mantissa: int  # stored bits
    bias: int
    ln2_high: float  # ln 2 = high + low; n * high is exact for every exponent n
    ln2_low: float
    exp_terms: int  # the first term left out, at |r| = ln(2)/2, is below half a unit
    log_terms: int  # likewise at |s| = (sqrt(2)-1)/(sqrt(2)+1)
    erf_terms: int  # likewise at |x| = 1
    log1p_terms: int  # likewise at s = 1/3
    erfc_degree: int
    erfc_limit: float  # beyond it erfc is below the smallest normal number
    exp_range: tuple[float, float]  # outside: 0, infinity
    tanh_limit: float  # from here on tanh is 1

    @property
    def smallest(self) -> float:
        """The smallest normal number."""
        return 2.0 ** (1 - self.bias)


SINGLE = Format(
    23, 127, 0.693359375, -2.12194440054690583e-4,
    8, 5, 11, 7, 9, 9.3, (-104.0, 89.0), 10.0,
)  # fmt: skip
DOUBLE = Format(
    52, 1023, 6.93147180369123816490e-01, 1.90821492927058770002e-10,
    14, 11, 20, 16, 20, 26.5, (-746.0, 710.0), 20.0,
)  # fmt: skip
CURRENT_ROUNDING = 4  # the operand of AVX-512 intrinsics that asks for no rounding of its own


def format_of(x: Float) -> Format:
    """The constants of x's element type."""
    return DOUBLE if x.element == F64 else SINGLE


def constant_like(x: Float, value: float) -> Float:
    """A constant of x's type."""
    return Float(x.k, constant(x.type, value))


def polynomial(x: Float, coefficients: Sequence[float]) -> Float:
    """c0 + c1 x + c2 x^2 + ... by Horner's rule (two coefficients or more)."""
    k = x.k
    total = k.fma(x, coefficients[-1], coefficients[-2])
    for c in reversed(coefficients[:-2]):
        total = k.fma(total, x, c)
    return total


def clamp(x: Float, low: float, high: float) -> Float:
    """x limited to low...high; NaN stays."""
    return at_most(at_least(x, low), high)


def at_least(x: Float, bound: float) -> Float:
    """max(x, bound) in one instruction; NaN stays."""
    return x.k.select(x < bound, bound, x)


def at_most(x: Float, bound: float) -> Float:
    """min(x, bound) in one instruction; NaN stays."""
    return x.k.select(x > bound, bound, x)


def power_of_two(n: Int, x: Float) -> Float:
    """2^n for an exponent in the normal range."""
    f = format_of(x)
    return x.k.float_from_bits((n + f.bias) << f.mantissa)


def _reduce_exp(x: Float, lift: int = 0) -> tuple[Float, Float, Float]:
    """(r, n, shifted): x = r + n ln 2, |r| <= ln(2)/2, n + lift in the low bits of `shifted`."""
    k, f = x.k, format_of(x)
    shifter = _shifter(f) + lift
    shifted = k.fma(x, LOG2_E, shifter)
    n = shifted - shifter
    return k.fma(n, -f.ln2_low, k.fma(n, -f.ln2_high, x)), n, shifted


def _shifter(f: Format) -> float:
    """Added to a number it pushes the fraction out of the mantissa: rounds to nearest."""
    return 1.5 * 2.0**f.mantissa


def _lowest_bits_power(shifted: Float) -> Float:
    """2^(m - bias) for the number m in the low bits, 0 < m <= 2 * bias: one shift."""
    return shifted.k.float_from_bits(shifted.bits() << format_of(shifted).mantissa)


def _halves(shifted: Float) -> tuple[Int, Int]:
    """(a, b) with a + b = n: 2^a and 2^b are both in the normal range."""
    shifter = constant_like(shifted, _shifter(format_of(shifted)))
    exponent = shifted.bits() - shifter.bits()
    half = exponent.shift_right_signed(1)
    return half, exponent - half


def _has_scale_instruction(x: Float) -> bool:
    """AVX-512 multiplies by 2^n in one instruction."""
    target = x.k.target
    wide = x.lanes is not None and x.lanes * (8 if x.element == F64 else 4) == 64
    return wide and target.has_masks and target.triple.startswith(("x86_64", "amd64"))


def _scale(value: Float, n: Float, shifted: Float) -> Float:
    """value * 2^n, gradual underflow and overflow included."""
    k = value.k
    if not _has_scale_instruction(value):
        a, b = _halves(shifted)
        return value * power_of_two(a, value) * power_of_two(b, value)
    name = "pd" if value.element == F64 else "ps"
    all_lanes = ir.Constant(ir.IntType(value.lanes), -1)
    rounding = ir.Constant(I32, CURRENT_ROUNDING)
    arguments = [value.ir, n.ir, value.ir, all_lanes, rounding]
    return Float(k, k.external(f"llvm.x86.avx512.mask.scalef.{name}.512", value.type, *arguments))


@functools.cache
def _expm1_coefficients(f: Format) -> tuple[float, ...]:
    """(e^r - 1) / r for |r| <= ln(2)/2."""
    terms = [1.0 / math.factorial(i + 1) for i in range(TAYLOR_TERMS)]
    return _economized(terms, f.exp_terms - (2 if f is SINGLE else 3))


def _exp_coefficients(f: Format) -> tuple[float, ...]:
    """e^r for |r| <= ln(2)/2; exactly 1 at 0 (sums of what is 1 less a rounding drift)."""
    return 1.0, *_expm1_coefficients(f)


def _economized(taylor: Sequence[float], terms: int) -> tuple[float, ...]:
    """A Taylor series on |r| <= ln(2)/2 as a shorter polynomial: its Chebyshev series, cut off."""
    limit = math.log(2.0) / 2
    scaled = np.polynomial.Polynomial([c * limit**i for i, c in enumerate(taylor)])
    series = scaled.convert(kind=np.polynomial.Chebyshev).truncate(terms)
    found = series.convert(kind=np.polynomial.Polynomial).coef
    return tuple(float(c) / limit**i for i, c in enumerate(found))


def _inverse_factorials(first: int, count: int) -> list[float]:
    return [1.0 / math.factorial(i) for i in range(first, first + count)]


def exp(x: Float) -> Float:
    """e^x, exact 0 and infinity outside the type's range, gradual underflow included."""
    f = format_of(x)
    r, n, shifted = _reduce_exp(clamp(x, *f.exp_range))
    return _scale(polynomial(r, _inverse_factorials(0, f.exp_terms)), n, shifted)


def expm1(x: Float) -> Float:
    """e^x - 1 without cancellation near 0."""
    k, f = x.k, format_of(x)
    r, _, shifted = _reduce_exp(clamp(x, -f.tanh_limit * 4, f.exp_range[1]))
    a, b = _halves(shifted)
    q = polynomial(r, _inverse_factorials(1, f.exp_terms)) * r  # e^r - 1
    one_over_b = power_of_two(0 - b, x)
    scale = power_of_two(a, x)
    result = k.fma(q, scale, scale - one_over_b) * power_of_two(b, x)
    return k.select(x.eq(0.0), x, result)  # keeps the sign of zero


def exp_of_negative(x: Float) -> Float:
    """e^x for x <= 0 (above 0: anything), as exact as `exp` and a third quicker: 2^n cannot
    overflow, so it is raised by a constant that keeps it normal and is divided out last."""
    f = format_of(x)
    low = at_least(x, f.exp_range[0])
    if _has_scale_instruction(x):
        r, n, shifted = _reduce_exp(low)
        return _scale(polynomial(r, _exp_coefficients(f)), n, shifted)
    lift = (f.bias + 1) // 2
    r, _, shifted = _reduce_exp(low, lift + f.bias)
    raised = polynomial(r, _exp_coefficients(f)) * _lowest_bits_power(shifted)
    return raised * 2.0**-lift


def expm1_of_negative(x: Float) -> Float:
    """e^x - 1 for x <= 0 (above 0: anything) without cancellation near 0; 0 for -0."""
    k, f = x.k, format_of(x)
    r, _, shifted = _reduce_exp(at_least(x, -f.tanh_limit * 4), f.bias)
    scale = _lowest_bits_power(shifted)
    q = polynomial(r, _expm1_coefficients(f)) * r  # e^r - 1
    return k.fma(q, scale, scale - 1.0)


def log(x: Float) -> Float:
    """Natural logarithm: -infinity at 0, NaN below."""
    k, f = x.k, format_of(x)
    lift = f.mantissa + 1  # subnormal numbers are scaled into the normal range first
    subnormal = x < f.smallest
    scaled = k.select(subnormal, x * 2.0**lift, x)
    # m in [sqrt(1/2), sqrt(2)): counting exponents from sqrt(1/2) does the rounding.
    root = constant_like(x, math.sqrt(0.5)).bits()
    offset = scaled.bits() - root
    exponent = offset.shift_right_signed(f.mantissa)
    m = k.float_from_bits(scaled.bits() - (exponent << f.mantissa))
    e = k.cast(exponent, x) - k.select(subnormal, constant_like(x, lift), 0.0)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    tail = polynomial(z, [2.0 / (2 * i + 1) for i in range(1, f.log_terms + 1)]) * z
    small = k.fma(s, tail, e * f.ln2_low)
    result = k.fma(e, f.ln2_high, small + 2.0 * s)
    infinity, nan = float("inf"), float("nan")
    result = k.select(x.eq(infinity), infinity, result)
    result = k.select(x.eq(0.0), -infinity, result)
    return k.select(x >= 0.0, result, nan)


def log1p(x: Float) -> Float:
    """log(1 + x) without loss near 0: what 1 + x rounds off is put back to first order."""
    k = x.k
    u = x + 1.0
    correction = (x - (u - 1.0)) / u
    special = u.eq(float("inf")) | (u <= 0.0)
    result = log(u) + k.select(special, 0.0, correction)
    return k.select(x.eq(0.0), x, result)


def log1p_unit(x: Float) -> Float:
    """log(1 + x) for 0 <= x <= 1, quicker: 2 artanh(x / (2 + x)) by its series."""
    s = x / (x + 2.0)
    z = s * s
    count = format_of(x).log1p_terms
    return s * polynomial(z, [2.0 / (2 * i + 1) for i in range(count)])


def absolute(x: Float) -> Float:
    """|x|."""
    return x.k.unary("fabs", x)


def with_sign(magnitude: Float, sign: Float) -> Float:
    """|magnitude| with the sign bit of `sign`."""
    return Float(
        sign.k,
        sign.k.external(f"llvm.copysign.{mangled(sign.type)}", sign.type, magnitude.ir, sign.ir),
    )


def tanh(x: Float) -> Float:
    """Hyperbolic tangent, from expm1(-2|x|)."""
    f = format_of(x)
    t = expm1_of_negative(at_most(absolute(x), f.tanh_limit) * -2.0)
    return with_sign(t / (t + 2.0), x)


def sigmoid(x: Float) -> Float:
    """1 / (1 + e^-x), accurate in both tails."""
    e = exp_of_negative(-absolute(x))
    return x.k.select(x < 0.0, e, 1.0) / (e + 1.0)


def power(x: Float, y: float) -> Float:
    """x^y for x > 0 and a constant y, relative error about |y log x| units in the last place."""
    return exp(log(x) * y)


def erf(x: Float) -> Float:
    """The error function: its Taylor series to |x| = 1, beyond it 1 - erfc |x|."""
    k = x.k
    a = absolute(x)
    coefficients = [
        2.0 / math.sqrt(math.pi) * (-1) ** n / (math.factorial(n) * (2 * n + 1))
        for n in range(format_of(x).erf_terms)
    ]
    near = a * polynomial(a * a, coefficients)
    return with_sign(k.select(a < 1.0, near, 1.0 - _erfc_of_magnitude(a)), x)


def erfc(x: Float) -> Float:
    """1 - erf(x), relatively accurate where it is small."""
    upper = _erfc_of_magnitude(absolute(x))
    return x.k.select(x < 0.0, 2.0 - upper, upper)


def _erfc_of_magnitude(a: Float) -> Float:
    """erfc(a) for a >= 0: e^(-a^2) g(t) / (a + ERFC_POLE), t = (a - pole) / (a + pole)."""
    k = a.k
    a = at_most(a, ERFC_ZERO)
    inverse = 1.0 / (a + ERFC_POLE)
    t = k.fma(inverse, -2.0 * ERFC_POLE, 1.0)
    square = a * a
    lost = k.fma(a, a, -square)  # what the square rounded off, where the target has fma
    g = polynomial(t, scaled_erfc_coefficients(format_of(a)))
    return exp_of_negative(-square) * (1.0 - lost) * (g * inverse)


ERFC_POLE = 2.5  # maps 0...infinity on -1...1
ERFC_ZERO = 30.0  # erfc underflows to 0 in both types
ASYMPTOTIC_FROM = 3.0  # the continued fraction converges to the last bit
ASYMPTOTIC_TERMS = 80


def scaled_erfc(x: float) -> float:
    """e^(x^2) erfc(x): from the C library, or for large x by its continued fraction."""
    if x < ASYMPTOTIC_FROM:
        return math.exp(x * x) * math.erfc(x)
    fraction = x
    for n in range(ASYMPTOTIC_TERMS, 0, -1):
        fraction = x + n / 2 / fraction
    return 1.0 / (math.sqrt(math.pi) * fraction)


@functools.cache
def scaled_erfc_coefficients(f: Format) -> tuple[float, ...]:
    """e^(x^2) erfc(x) (x + pole) for 0 <= x <= f.erfc_limit as a polynomial in t, interpolated at
    Chebyshev points. Relative error 2e-8 and 5e-15."""
    high = (f.erfc_limit - ERFC_POLE) / (f.erfc_limit + ERFC_POLE)

    def g(t: np.ndarray) -> np.ndarray:
        x = ERFC_POLE * (1.0 + t) / (1.0 - t)
        return np.array([scaled_erfc(v) * (v + ERFC_POLE) for v in x])

    series = np.polynomial.Chebyshev.interpolate(g, f.erfc_degree, domain=[-1.0, high])
    return tuple(float(c) for c in series.convert(kind=np.polynomial.Polynomial).coef)
