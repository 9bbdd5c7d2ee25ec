"""Activations on the CPU: y = alpha * f(x) + beta * y and dx = alpha * dy * f'(.) + beta * dx.

`emit_activation` and `emit_derivative` are the formulas of spec.activation on vectors, for the
pointwise loops here and for the epilogues of other primitives. They keep NaN, take the limits at
infinity, and are rearranged where the plain formula would cancel: a complement 1 - sigmoid(x) is
computed as sigmoid(-x), a normal distribution's lower tail as erfc. Errors are a few units in the
last place of the type computed in (float32, or float64 for itself).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from bedstone.backends.cpu import vectormath as vm
from bedstone.backends.cpu.builder import F64, KernelBuilder
from bedstone.backends.cpu.elementwise import PointwiseAlgorithm, Stream, emit_map
from bedstone.backends.cpu.kernel import ENTRY
from bedstone.backends.cpu.target import Target
from bedstone.backends.cpu.values import Float, FloatLike
from bedstone.spec.activation import GELU_CUBIC, GELU_SCALE, ActivationDesc, ActivationProblem
from bedstone.spec.convolution import Epilogue

LOWEST = {False: -3.4028234663852886e38, True: -1.7976931348623157e308}  # finite; is float64?
# Beyond these |x| the derivatives are 0 and 1 to the last bit: limiting x keeps inf * 0 away.
SILU_LIMIT = 800.0
GELU_LIMIT = 40.0
GELU_TANH_LIMIT = 20.0
# Vectors abreast through a chain of operations that each wait for the one before (sigmoid, tanh,
# gelu: 1.2 to 1.5 times faster on an EPYC); others only need the memory.
LONG_CHAINS = ("elu", "sigmoid", "tanh", "silu", "gelu", "gelu_tanh", "softplus")
ABREAST = 4


def times_limit(x: Float, factor: Float) -> Float:
    """x * factor, 0 where x is -infinity (the factor is 0 there)."""
    return vm.at_least(x, LOWEST[x.element == F64]) * factor


def logistic(x: Float) -> tuple[Float, Float]:
    """sigmoid(x) and 1 - sigmoid(x), each to full relative accuracy."""
    k = x.k
    e = vm.exp_of_negative(-vm.absolute(x))
    share = 1.0 / (e + 1.0)
    small = e * share
    negative = x < 0.0
    return k.select(negative, small, share), k.select(negative, share, small)


def gelu_tanh_argument(x: Float) -> Float:
    """2 u, since (1 + tanh u) / 2 = sigmoid(2 u)."""
    return x * x.k.fma(x * x, 2 * GELU_SCALE * GELU_CUBIC, 2 * GELU_SCALE)


def normal_cdf(x: Float) -> Float:
    """(1 + erf(x / sqrt 2)) / 2."""
    return vm.erfc(x * -math.sqrt(0.5)) * 0.5


def softplus(x: Float) -> Float:
    """log(1 + e^x) = max(x, 0) + log1p(e^-|x|)."""
    return vm.at_least(x, 0.0) + vm.log1p_unit(vm.exp_of_negative(-vm.absolute(x)))


def elu(x: Float, alpha: float) -> Float:
    """x from 0 on, alpha (e^x - 1) below."""
    return x.k.select(x < 0.0, vm.expm1_of_negative(vm.at_most(x, 0.0)) * alpha, x)


def inside(y: Float, low: FloatLike, high: FloatLike, slope: FloatLike) -> Float:
    """`slope` strictly between the bounds, else 0."""
    slope = slope if isinstance(slope, Float) else vm.constant_like(y, slope)
    return y.k.select((y > low) & (y < high), slope, 0.0)


def hard_swish_derivative(x: Float, a: float, b: float) -> Float:
    """0, 2 a x + b or 1, as a x + b lies below 0, between or above 1."""
    k = x.k
    inner = k.fma(x, a, b)
    middle = k.fma(x, 2 * a, b)
    return k.select(inner <= 0.0, 0.0, k.select(inner >= 1.0, 1.0, middle))


def silu_derivative(x: Float) -> Float:
    """s + x s (1 - s)."""
    x = vm.clamp(x, -SILU_LIMIT, SILU_LIMIT)
    s, complement = logistic(x)
    return s * x.k.fma(x, complement, 1.0)


def gelu_derivative(x: Float) -> Float:
    """Phi(x) + x phi(x), with the normal distribution's Phi and density phi."""
    x = vm.clamp(x, -GELU_LIMIT, GELU_LIMIT)
    density = vm.exp_of_negative(x * x * -0.5) * (1.0 / math.sqrt(2 * math.pi))
    return x.k.fma(x, density, normal_cdf(x))


def gelu_tanh_derivative(x: Float) -> Float:
    """s + x s (1 - s) (2 u)', s = sigmoid(2 u)."""
    k = x.k
    x = vm.clamp(x, -GELU_TANH_LIMIT, GELU_TANH_LIMIT)
    s, complement = logistic(gelu_tanh_argument(x))
    slope = k.fma(x * x, 6 * GELU_SCALE * GELU_CUBIC, 2 * GELU_SCALE)
    return s * k.fma(x * complement, slope, 1.0)


Formula = Callable[[Float, FloatLike, FloatLike], Float]

FORWARD: dict[str, Formula] = {
    "relu": lambda x, a, b: vm.at_least(x, 0.0),
    "leaky_relu": lambda x, a, b: x.k.select(x > 0.0, x, x * a),
    "clipped_relu": lambda x, a, b: vm.clamp(x, 0.0, a),
    "clip": lambda x, a, b: vm.clamp(x, a, b),
    "elu": lambda x, a, b: elu(x, a),
    "sigmoid": lambda x, a, b: vm.sigmoid(x),
    "tanh": lambda x, a, b: vm.tanh(x),
    "hard_sigmoid": lambda x, a, b: vm.clamp(x.k.fma(x, a, b), 0.0, 1.0),
    "hard_swish": lambda x, a, b: times_limit(x, vm.clamp(x.k.fma(x, a, b), 0.0, 1.0)),
    "silu": lambda x, a, b: times_limit(x, vm.sigmoid(x)),
    "gelu": lambda x, a, b: times_limit(x, normal_cdf(x)),
    "gelu_tanh": lambda x, a, b: times_limit(x, vm.sigmoid(gelu_tanh_argument(x))),
    "softplus": lambda x, a, b: softplus(x),
}

DERIVATIVE: dict[str, Formula] = {  # of y, or of x for the kinds that need it
    "relu": lambda y, a, b: y.k.select(y > 0.0, vm.constant_like(y, 1.0), 0.0),
    "leaky_relu": lambda y, a, b: y.k.select(y > 0.0, vm.constant_like(y, 1.0), a),
    "clipped_relu": lambda y, a, b: inside(y, 0.0, a, 1.0),
    "clip": lambda y, a, b: inside(y, a, b, 1.0),
    "elu": lambda y, a, b: y.k.select(y > 0.0, 1.0, y + a),
    "sigmoid": lambda y, a, b: y * (1.0 - y),
    "tanh": lambda y, a, b: (1.0 - y) * (y + 1.0),  # without FMA 1 - y * y would lose digits
    "hard_sigmoid": lambda y, a, b: inside(y, 0.0, 1.0, a),
    "hard_swish": hard_swish_derivative,
    "silu": lambda x, a, b: silu_derivative(x),
    "gelu": lambda x, a, b: gelu_derivative(x),
    "gelu_tanh": lambda x, a, b: gelu_tanh_derivative(x),
    "softplus": lambda y, a, b: -vm.expm1(-y),
}
# Derivatives made of comparisons alone lose the NaN of what they are taken of.
COMPARISONS_ONLY = {"relu", "leaky_relu", "clipped_relu", "clip", "hard_sigmoid"}


def emit_activation(k: KernelBuilder, desc: ActivationDesc, x: Float) -> Float:
    """f(x) on a vector (or scalar) of float32 or float64."""
    return FORWARD[desc.kind](x, desc.alpha, desc.beta)


def emit_epilogue(k: KernelBuilder, epilogue: Epilogue, x: Float) -> Float:
    """What a convolution's epilogue does after the bias: activation, shift."""
    if epilogue.activation is not None:
        x = emit_activation(k, epilogue.activation, x)
    return x + epilogue.shift if epilogue.shift else x


def emit_derivative(k: KernelBuilder, desc: ActivationDesc, saved: Float) -> Float:
    """f'(x), from y where `desc.backward_from_y`, else from x."""
    return derivative(desc.kind, saved, desc.alpha, desc.beta)


def derivative(kind: str, saved: Float, alpha: FloatLike, beta: FloatLike) -> Float:
    """As emit_derivative, of coefficients that may be known at run time only."""
    slope = DERIVATIVE[kind](saved, alpha, beta)
    if kind in COMPARISONS_ONLY:
        slope = saved.k.select(saved.is_nan(), saved, slope)
    return slope


def emit(target: Target, problem: ActivationProblem) -> KernelBuilder:
    """The kernel of either direction."""
    k = KernelBuilder(target)
    desc = problem.activation
    abreast = ABREAST if desc.kind in LONG_CHAINS else 1
    with k.entry(ENTRY, pointers=len(problem.operands)) as call:
        streams = [Stream(p, o.desc) for p, o in zip(call.pointers, problem.operands)]
        if problem.direction == "forward":
            emit_map(
                k,
                call,
                streams[:1],
                streams[1:],
                lambda k, v: [emit_activation(k, desc, *v)],
                abreast=abreast,
            )
        else:
            emit_map(
                k,
                call,
                streams[:2],
                streams[2:],
                lambda k, v: [v[1] * emit_derivative(k, desc, v[0])],
                abreast=1 if desc.backward_from_y else abreast,
            )
    return k


class Activation(PointwiseAlgorithm):
    """All kinds, both directions, any strides, in place."""

    name = "cpu:elementwise"
    emit = staticmethod(emit)


ALGORITHMS = (Activation(),)
