"""Pointwise functions of tiles: accurate exp, tanh, ..., the activations and their derivatives.

Pure functions of registers, shared by the activation kernels, the softmax and the convolutions'
epilogues. The hardware's exp loses |x| * 2^-24 relative accuracy; here the argument is reduced
first. Comparisons are written so that NaN passes. Formulas: spec/activation.py; erfc after Press
et al., Numerical Recipes, section 6.2 (relative error below 1.2e-7).
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LOG2_E_LOW = tl.constexpr(1.925963033500e-08)  # log2(e) less its float32
LN2 = tl.constexpr(0.6931471805599453)
LN2_HIGH = tl.constexpr(0.693359375)  # 10 bits: n * LN2_HIGH is exact for |n| < 2^14
LN2_LOW = tl.constexpr(-2.12194440054690583e-4)
EXP_LIMIT = tl.constexpr(120.0)  # beyond it, exp is 0 or infinite in float32
FAR = tl.constexpr(1e9)  # beyond it, smooth derivatives are 0 or 1 and x * x * x might overflow
SQRT_HALF = tl.constexpr(0.7071067811865476)
SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
GELU_CUBIC = tl.constexpr(0.044715)
# (tanh(x) - x) / x^3 in x^2 where |x| is below TANH_NEAR: a minimax fit, tanh to 1e-10 of itself.
TANH_NEAR, TANH_NEAR_ROUGH = tl.constexpr(0.6), tl.constexpr(0.0625)
TANH_0, TANH_1 = tl.constexpr(-0.33333331720723114), tl.constexpr(0.1333324536905191)
TANH_2, TANH_3 = tl.constexpr(-0.05395216671724677), tl.constexpr(0.021732719997228287)
TANH_4, TANH_5 = tl.constexpr(-0.008262742103063363), tl.constexpr(0.0022269718148422227)
# erfc(z) e^(z^2) / 2t in t = 1 / (1 + ROUGH_SHARE z): a minimax fit for z up to 10, to 1e-5 of it.
ROUGH_SHARE = tl.constexpr(0.45)
ROUGH_0, ROUGH_1 = tl.constexpr(0.12695712037341256), tl.constexpr(0.12612517905204484)
ROUGH_2, ROUGH_3 = tl.constexpr(0.12320656108185737), tl.constexpr(0.04655047319483049)
ROUGH_4, ROUGH_5 = tl.constexpr(0.14460128900556704), tl.constexpr(-0.06744515766041087)


@triton.jit
def exp(x):
    """e^x within 3 units in the last place: the hardware's 2^t, times e to what rounding took from
    the exponent t = x log2(e)."""
    if x.dtype == tl.float64:
        return tl.exp(x)
    else:
        z = tl.minimum(x, EXP_LIMIT, propagate_nan=tl.PropagateNan.ALL)
        z = tl.maximum(z, -EXP_LIMIT, propagate_nan=tl.PropagateNan.ALL)
        t = z * LOG2_E
        lost = tl.fma(z, LOG2_E, -t) + z * LOG2_E_LOW
        return tl.math.exp2(t) * (1 + lost * LN2)


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
def rough_exp(x):
    """e^x for 16-bit results: its relative error |x| 2^-24 vanishes in them."""
    return tl.math.exp2(x * LOG2_E)


@triton.jit
def tanh(x, ROUGH: tl.constexpr = False):
    """1 - 2 / (1 + e^2x), which loses digits near 0, and a polynomial there. ROUGH: for results of
    16 bits."""
    if x.dtype == tl.float64:
        e = expm1(-2 * tl.abs(x))
        t = -e / (2 + e)
        return tl.where(x < 0, -t, t)
    else:
        # An error of 2x log2(e) counts little: where x is large, e^2x does.
        far = 1 - 2 / (1 + rough_exp(2 * x))
        s = x * x
        if ROUGH:
            near = x - x * s * (1 / 3 - s * (2 / 15))
            return tl.where(s < TANH_NEAR_ROUGH * TANH_NEAR_ROUGH, near, far)
        else:
            p = TANH_5
            p = TANH_4 + s * p
            p = TANH_3 + s * p
            p = TANH_2 + s * p
            p = TANH_1 + s * p
            p = TANH_0 + s * p
            return tl.where(s < TANH_NEAR * TANH_NEAR, x + x * (s * p), far)


@triton.jit
def sigmoid(x, ROUGH: tl.constexpr = False):
    """1 / (1 + e^-x), exact at both ends."""
    if ROUGH:
        e = rough_exp(-tl.abs(x))
    else:
        e = exp(-tl.abs(x))
    return tl.where(x < 0, e, 1.0) / (1 + e)


@triton.jit
def sigmoid_slope(x):
    """sigmoid(x) (1 - sigmoid(x)), without cancellation."""
    e = exp(-tl.abs(x))
    return e / ((1 + e) * (1 + e))


@triton.jit
def normal_cdf(x, ROUGH: tl.constexpr = False):
    """(1 + erf(x / sqrt 2)) / 2."""
    if x.dtype == tl.float64:
        return 0.5 * (1 + tl.erf(x * SQRT_HALF))
    else:
        z = tl.abs(x) * SQRT_HALF
        if ROUGH:
            t = 1 / (1 + ROUGH_SHARE * z)
            p = ROUGH_4 + t * ROUGH_5
            p = ROUGH_3 + t * p
            p = ROUGH_2 + t * p
            p = ROUGH_1 + t * p
            tail = t * (ROUGH_0 + t * p) * rough_exp(-z * z)
        else:
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
def activate(x, KIND: tl.constexpr, a, b, ROUGH: tl.constexpr = False):
    """f(x) of spec.activation's kinds; "none" is x itself. x is float32 or float64; ROUGH: as well
    as 16 bits show."""
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
        return sigmoid(x, ROUGH)
    elif KIND == "tanh":
        return tanh(x, ROUGH)
    elif KIND == "hard_sigmoid":
        return clamp(a * x + b, 0.0, 1.0)
    elif KIND == "hard_swish":
        return times_limit(x, clamp(a * x + b, 0.0, 1.0))
    elif KIND == "silu":
        return times_limit(x, sigmoid(x, ROUGH))
    elif KIND == "gelu":
        return times_limit(x, normal_cdf(x, ROUGH))
    elif KIND == "gelu_tanh":
        inner = SQRT_2_OVER_PI * (x + GELU_CUBIC * x * x * x)
        return times_limit(x, sigmoid(2 * inner, ROUGH))
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
