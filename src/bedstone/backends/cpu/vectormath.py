"""exp, expm1, log, log1p, tanh, sigmoid, erf and pow on vectors, float32 and float64.

Each reduces its argument to a short interval, sums a Taylor series there (its length follows from
the type, so there are no tables) and puts the result together again. Errors are a few units in
the last place; NaN, infinities, signed zeros and overflow come out as IEEE asks. Cody and Waite,
"Software Manual for the Elementary Functions", 1980, for the reductions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bedstone.backends.cpu.irtypes import F64, constant, mangled
from bedstone.backends.cpu.values import Float, Int

LOG2_E = 1.0 / math.log(2.0)


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
    erfc_degree: int
    exp_range: tuple[float, float]  # outside: 0, infinity
    tanh_limit: float  # from here on tanh is 1

    @property
    def smallest(self) -> float:
        """The smallest normal number."""
        return 2.0 ** (1 - self.bias)


SINGLE = Format(23, 127, 0.693359375, -2.12194440054690583e-4, 8, 5, 11, 11, (-104.0, 89.0), 10.0)
DOUBLE = Format(
    52, 1023, 6.93147180369123816490e-01, 1.90821492927058770002e-10,
    14, 11, 20, 24, (-746.0, 710.0), 20.0,
)  # fmt: skip


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
    return x.k.fmin(x.k.fmax(x, low), high)


def power_of_two(n: Int, x: Float) -> Float:
    """2^n for an exponent in the normal range."""
    f = format_of(x)
    return x.k.float_from_bits((n + f.bias) << f.mantissa)


def _reduce_exp(x: Float) -> tuple[Float, Int, Int]:
    """(r, a, b) with x = r + (a + b) ln 2, |r| <= ln(2)/2; 2^a and 2^b are both in range."""
    k, f = x.k, format_of(x)
    shifter = 1.5 * 2.0**f.mantissa  # pushes the fraction out of the mantissa: rounds to nearest
    shifted = k.fma(x, LOG2_E, shifter)
    n = shifted - shifter
    r = k.fma(n, -f.ln2_low, k.fma(n, -f.ln2_high, x))
    exponent = shifted.bits() - constant_like(x, shifter).bits()
    half = exponent.shift_right_signed(1)
    return r, half, exponent - half


def _inverse_factorials(first: int, count: int) -> list[float]:
    return [1.0 / math.factorial(i) for i in range(first, first + count)]


def exp(x: Float) -> Float:
    """e^x, exact 0 and infinity outside the type's range, gradual underflow included."""
    f = format_of(x)
    r, a, b = _reduce_exp(clamp(x, *f.exp_range))
    return (
        polynomial(r, _inverse_factorials(0, f.exp_terms)) * power_of_two(a, x) * power_of_two(b, x)
    )


def expm1(x: Float) -> Float:
    """e^x - 1 without cancellation near 0."""
    k, f = x.k, format_of(x)
    r, a, b = _reduce_exp(clamp(x, -f.tanh_limit * 4, f.exp_range[1]))
    q = polynomial(r, _inverse_factorials(1, f.exp_terms)) * r  # e^r - 1
    one_over_b = power_of_two(0 - b, x)
    scale = power_of_two(a, x)
    result = k.fma(q, scale, scale - one_over_b) * power_of_two(b, x)
    return k.select(x.eq(0.0), x, result)  # keeps the sign of zero


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
    result = k.select(special, log(u), log(u) + correction)
    return k.select(x.eq(0.0), x, result)


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
    """Hyperbolic tangent, from expm1(2|x|)."""
    f = format_of(x)
    t = expm1(clamp(absolute(x), 0.0, f.tanh_limit) * 2.0)
    return with_sign(t / (t + 2.0), x)


def sigmoid(x: Float) -> Float:
    """1 / (1 + e^-x), accurate in both tails."""
    e = exp(-absolute(x))
    return x.k.select(x < 0.0, e, 1.0) / (e + 1.0)


def power(x: Float, y: float) -> Float:
    """x^y for x > 0 and a constant y, relative error about |y log x| units in the last place."""
    return exp(log(x) * y)


def erf(x: Float) -> Float:
    """The error function: its Taylor series to |x| = 1, beyond it 1 - e^(-x^2) g(|x|)."""
    k, f = x.k, format_of(x)
    a = absolute(x)
    z = a * a
    two_over_root_pi = 2.0 / math.sqrt(math.pi)
    near = a * polynomial(
        z,
        [
            two_over_root_pi * (-1) ** n / (math.factorial(n) * (2 * n + 1))
            for n in range(f.erf_terms)
        ],
    )
    b = clamp(a, 1.0, ERFC_LIMIT)
    t = (b - ERFC_POLE) / (b + ERFC_POLE)
    far = 1.0 - exp(-(b * b)) * polynomial(t, scaled_erfc_coefficients(f.erfc_degree))
    result = k.select(a < 1.0, near, k.select(a.is_nan(), a, far))
    return with_sign(result, x)


ERFC_LIMIT = 6.0  # erfc(6) = 2e-17
ERFC_POLE = 2.5  # maps 1...6 near the middle of the unit interval


def scaled_erfc_coefficients(degree: int) -> list[float]:
    """g(x) = e^(x^2) erfc(x) on [1, ERFC_LIMIT] as a polynomial in t = (x - p) / (x + p).

    Interpolated at Chebyshev points from the C library's erfc.
    """
    low, high = ((b - ERFC_POLE) / (b + ERFC_POLE) for b in (1.0, ERFC_LIMIT))

    def g(t: np.ndarray) -> np.ndarray:
        x = ERFC_POLE * (1.0 + t) / (1.0 - t)
        return np.array([math.exp(v * v) * math.erfc(v) for v in x])

    series = np.polynomial.Chebyshev.interpolate(g, degree, domain=[low, high])
    return [float(c) for c in series.convert(kind=np.polynomial.Polynomial).coef]
