"""Pointwise functions of tiles: accurate exp, tanh, ..., the activations and their derivatives.

Pure functions of registers, shared by the activation kernels, the softmax and the convolutions'
epilogues. The hardware's exp loses |x| * 2^-24 relative accuracy; here the argument is reduced
first. Comparisons are written so that NaN passes. Formulas: spec/activation.py; erfc after Press
et al., Numerical Recipes, section 6.2 (relative error below 1.2e-7).
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN2_HIGH = tl.constexpr(0.693359375)  # 10 bits: n * LN2_HIGH is exact for |n| < 2^14
LN2_LOW = tl.constexpr(-2.12194440054690583e-4)
EXP_LIMIT = tl.constexpr(120.0)  # beyond it, exp is 0 or infinite in float32
FAR = tl.constexpr(1e9)  # beyond it, smooth derivatives are 0 or 1 and x * x * x might overflow
SQRT_HALF = tl.constexpr(0.7071067811865476)
SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
GELU_CUBIC = tl.constexpr(0.044715)


@triton.jit
def power_of_two(n):
    """2^n as float32, for integers n from -126 to 127, by writing the exponent's bits."""
    return ((n + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exp(x):
    """e^x within 2 units in the last place."""
    if x.dtype == tl.float64:
        return tl.exp(x)
    else:
        t = tl.where(x > EXP_LIMIT, EXP_LIMIT, tl.where(x < -EXP_LIMIT, -EXP_LIMIT, x))
        n = tl.floor(t * LOG2_E + 0.5)
        r = (t - n * LN2_HIGH) - n * LN2_LOW
        # In two factors, since 2^n alone may overflow where e^x does not.
        i = tl.where(n == n, n, 0.0).to(tl.int32)
        half = i >> 1
        return tl.exp(r) * power_of_two(half) * power_of_two(i - half)


@triton.jit
def expm1(x):
    """e^x - 1 without cancellation near 0."""
    if x.dtype == tl.float64:
        u = tl.exp(x)  # Kahan's correction of the rounding of u, exact where u is 1
        d = u - 1
        near = d * x / tl.log(tl.where((u == 1) | (u == 0), 2.0, u))
        return tl.where(u == 1, x, tl.where(tl.abs(x) < 1, near, d))
    else:
        p = 1.0 + x * (1 / 8)
        p = 1.0 + x * (1 / 7) * p
        p = 1.0 + x * (1 / 6) * p
        p = 1.0 + x * (1 / 5) * p
        p = 1.0 + x * (1 / 4) * p
        p = 1.0 + x * (1 / 3) * p
        p = 1.0 + x * (1 / 2) * p
        return tl.where(tl.abs(x) < 0.5, x * p, exp(x) - 1)


@triton.jit
def log1p(z):
    """log(1 + z) for z in [0, 1], as 2 atanh(z / (2 + z))."""
    s = z / (2 + z)
    t = s * s
    if z.dtype == tl.float64:
        p = 1.0 / 35 + 0 * t
        for i in tl.static_range(17):
            p = 1.0 / (33 - 2 * i) + t * p
    else:
        p = 1.0 / 17 + 0 * t
        for i in tl.static_range(8):
            p = 1.0 / (15 - 2 * i) + t * p
    return 2 * s * p


@triton.jit
def log(x):
    """log of x >= 0 within 2 units in the last place, near 1 too."""
    if x.dtype == tl.float64:
        return tl.log(x)
    else:
        bits = x.to(tl.int32, bitcast=True)
        e = (bits - 0x3F3504F3) >> 23  # x = 2^e f with f from sqrt(1/2) to sqrt(2)
        f = (bits - (e << 23)).to(tl.float32, bitcast=True)
        s = (f - 1) / (f + 1)
        t = s * s
        p = 1.0 / 11 + 0 * t
        for i in tl.static_range(5):
            p = 1.0 / (9 - 2 * i) + t * p
        n = e.to(tl.float32)
        near = n * LN2_HIGH + (2 * s * p + n * LN2_LOW)
        return tl.where(x == 0, float("-inf"), tl.where((x == float("inf")) | (x != x), x, near))


@triton.jit
def tanh(x):
    """(e^2x - 1) / (e^2x + 1), from expm1(-2|x|)."""
    e = expm1(-2 * tl.abs(x))
    t = -e / (2 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x), exact at both ends."""
    e = exp(-tl.abs(x))
    return tl.where(x < 0, e, 1.0) / (1 + e)


@triton.jit
def sigmoid_slope(x):
    """sigmoid(x) (1 - sigmoid(x)), without cancellation."""
    e = exp(-tl.abs(x))
    return e / ((1 + e) * (1 + e))


@triton.jit
def normal_cdf(x):
    """(1 + erf(x / sqrt 2)) / 2."""
    if x.dtype == tl.float64:
        return 0.5 * (1 + tl.erf(x * SQRT_HALF))
    else:
        z = tl.abs(x) * SQRT_HALF
        t = 1 / (1 + 0.5 * z)
        p = 0.17087277
        p = -0.82215223 + t * p
        p = 1.48851587 + t * p
        p = -1.13520398 + t * p
        p = 0.27886807 + t * p
        p = -0.18628806 + t * p
        p = 0.09678418 + t * p
        p = 0.37409196 + t * p
        p = 1.00002368 + t * p
        tail = 0.5 * t * exp(-z * z - 1.26551223 + t * p)
        return tl.where(x < 0, tail, 1 - tail)


@triton.jit
def clamp(x, low, high):
    """min(max(x, low), high), NaN kept."""
    return tl.where(x < low, low, tl.where(x > high, high, x))


@triton.jit
def times_limit(x, factor):
    """x * factor with the limit 0 where x = -inf meets factor 0."""
    return tl.where(x == float("-inf"), 0.0, x * factor)


@triton.jit
def activate(x, KIND: tl.constexpr, a, b):
    """f(x) of spec.activation's kinds; "none" is x itself. x is float32 or float64."""
    if KIND == "relu":
        return tl.where(x < 0, 0.0, x)
    elif KIND == "leaky_relu":
        return tl.where(x > 0, x, a * x)
    elif KIND == "clipped_relu":
        return clamp(x, 0.0, a)
    elif KIND == "clip":
        return clamp(x, a, b)
    elif KIND == "elu":
        return tl.where(x > 0, x, a * expm1(tl.where(x > 0, 0.0, x)))
    elif KIND == "sigmoid":
        return sigmoid(x)
    elif KIND == "tanh":
        return tanh(x)
    elif KIND == "hard_sigmoid":
        return clamp(a * x + b, 0.0, 1.0)
    elif KIND == "hard_swish":
        return times_limit(x, clamp(a * x + b, 0.0, 1.0))
    elif KIND == "silu":
        return times_limit(x, sigmoid(x))
    elif KIND == "gelu":
        return times_limit(x, normal_cdf(x))
    elif KIND == "gelu_tanh":
        inner = SQRT_2_OVER_PI * (x + GELU_CUBIC * x * x * x)
        return times_limit(x, sigmoid(2 * inner))
    elif KIND == "softplus":
        return tl.where(x > 0, x, 0.0) + log1p(exp(-tl.abs(x)))
    else:
        tl.static_assert(KIND == "none", "unknown kind of activation")
        return x


@triton.jit
def nan_of(x):
    """x's NaNs, and 0 elsewhere."""
    return tl.where(x != x, x, 0.0)


@triton.jit
def derivative(s, KIND: tl.constexpr, a, b):
    """f'(x) from s = y, or from s = x for hard_swish, silu, gelu and gelu_tanh."""
    if KIND == "relu":
        return tl.where(s > 0, 1.0, 0.0) + nan_of(s)
    elif KIND == "leaky_relu":
        return tl.where(s > 0, 1.0, a) + nan_of(s)
    elif KIND == "clipped_relu":
        return tl.where((s > 0) & (s < a), 1.0, 0.0) + nan_of(s)
    elif KIND == "clip":
        return tl.where((s > a) & (s < b), 1.0, 0.0) + nan_of(s)
    elif KIND == "elu":
        return tl.where(s > 0, 1.0, s + a)
    elif KIND == "sigmoid":
        return s * (1 - s)
    elif KIND == "tanh":
        return (1 - s) * (1 + s)
    elif KIND == "hard_sigmoid":
        return tl.where((s > 0) & (s < 1), a, 0.0) + nan_of(s)
    elif KIND == "hard_swish":
        inner = a * s + b
        slope = tl.where(inner <= 0, 0.0, tl.where(inner >= 1, 1.0, 2 * a * s + b))
        return slope + nan_of(s)
    elif KIND == "softplus":
        return -expm1(-s)
    else:
        return smooth_derivative(s, KIND)


@triton.jit
def smooth_derivative(x, KIND: tl.constexpr):
    """Derivatives whose limits far out (0 and 1) must be spelt out."""
    if KIND == "silu":
        slope = sigmoid(x) + x * sigmoid_slope(x)
    elif KIND == "gelu":
        slope = normal_cdf(x) + x * exp(-0.5 * x * x) * INV_SQRT_2PI
    else:
        tl.static_assert(KIND == "gelu_tanh", "unknown kind of activation")
        z = 2 * SQRT_2_OVER_PI * (x + GELU_CUBIC * x * x * x)
        rise = SQRT_2_OVER_PI * (1 + 3 * GELU_CUBIC * x * x)
        slope = sigmoid(z) + 2 * x * sigmoid_slope(z) * rise
    return tl.where(tl.abs(x) > FAR, tl.where(x > 0, 1.0, 0.0), slope)
