"""Activations against numbers by hand, SciPy's functions and finite differences."""

import numpy as np
import pytest
from hypothesis import given
from scipy import special
from spec_cases import close, law, normal, packed, seeds

from bedstone.spec.activation import KINDS, ActivationDesc, ActivationProblem

AT = np.array([-4.0, -1.5, -0.25, 0.25, 1.5, 3.75, 7.0])  # no kink of any default kind

FUNCTIONS = {
    "relu": lambda x: np.where(x > 0, x, 0),
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "clipped_relu": lambda x: np.clip(x, 0, 6),
    "clip": lambda x: np.clip(x, -1, 1),
    "elu": lambda x: np.where(x > 0, x, np.exp(x) - 1),
    "sigmoid": special.expit,
    "tanh": np.tanh,
    "hard_sigmoid": lambda x: np.clip(x / 6 + 0.5, 0, 1),
    "hard_swish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    "silu": lambda x: x * special.expit(x),
    "gelu": lambda x: x * special.ndtr(x),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "softplus": lambda x: np.log1p(np.exp(x)),
}


def backward(kind, x, dy):
    """dx by the problem, from what the kind needs."""
    act = ActivationDesc(kind)
    problem = ActivationProblem("backward", packed(x.shape), packed(x.shape), act)
    return problem.reference({"x": x, "y": act.apply(x), "dy": dy})["dx"]


def test_every_kind_is_tested():
    assert set(FUNCTIONS) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_forward(kind):
    problem = ActivationProblem("forward", packed(AT.shape), packed(AT.shape), ActivationDesc(kind))
    assert close(problem.reference({"x": AT})["y"], FUNCTIONS[kind](AT))
    y = np.full(AT.shape, 2.0)
    assert close(problem.reference({"x": AT, "y": y}, 3.0, 0.5)["y"], 3 * FUNCTIONS[kind](AT) + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient(kind):
    step = 1e-6
    slope = (FUNCTIONS[kind](AT + step) - FUNCTIONS[kind](AT - step)) / (2 * step)
    dy = np.arange(1.0, 8.0)
    assert np.allclose(backward(kind, AT, dy), dy * slope, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_passes_through(kind):
    nan = np.array([np.nan])
    assert np.isnan(ActivationDesc(kind).apply(nan)).all()
    assert np.isnan(backward(kind, nan, np.ones(1))).all()


def test_limits():
    ends = np.array([-np.inf, np.inf])
    limits = {
        "relu": (0, np.inf), "leaky_relu": (-np.inf, np.inf), "clipped_relu": (0, 6),
        "clip": (-1, 1), "elu": (-1, np.inf), "sigmoid": (0, 1), "tanh": (-1, 1),
        "hard_sigmoid": (0, 1), "hard_swish": (0, np.inf), "silu": (0, np.inf),
        "gelu": (0, np.inf), "gelu_tanh": (0, np.inf), "softplus": (0, np.inf),
    }  # fmt: skip
    for kind, expected in limits.items():
        assert tuple(ActivationDesc(kind).apply(ends)) == expected, kind


def test_kinks_take_the_derivative_zero():
    assert backward("relu", np.zeros(1), np.ones(1)) == 0
    assert backward("clipped_relu", np.array([0.0, 6.0]), np.ones(2)).tolist() == [0, 0]
    assert backward("clip", np.array([-1.0, 1.0]), np.ones(2)).tolist() == [0, 0]


def test_no_overflow_far_out():
    far = np.array([-800.0, 800.0])
    assert ActivationDesc("sigmoid").apply(far).tolist() == [0, 1]
    assert ActivationDesc("softplus").apply(far).tolist() == [0, 800]
    assert ActivationDesc("elu").apply(far).tolist() == [-1, 800]


def test_coefficients():
    assert ActivationDesc("leaky_relu", 0.5).apply(np.array([-2.0, 2.0])).tolist() == [-1, 2]
    assert ActivationDesc("clip", 0.0, 3.0).apply(np.array([-2.0, 9.0])).tolist() == [0, 3]
    assert close(ActivationDesc("elu", 2.0).apply(np.array([-1.0])), 2 * np.expm1([-1.0]))


TORCH_NAMES = {
    "relu": "relu", "leaky_relu": "leaky_relu", "clipped_relu": "relu6", "elu": "elu",
    "sigmoid": "sigmoid", "tanh": "tanh", "hard_sigmoid": "hardsigmoid",
    "hard_swish": "hardswish", "silu": "silu", "gelu": "gelu", "softplus": "softplus",
}  # fmt: skip


@pytest.mark.parametrize("kind", TORCH_NAMES)
@law
@given(seeds)
def test_equals_torch(kind, seed):
    torch = pytest.importorskip("torch")
    x, dy = normal(seed, (3, 5), (3, 5))
    tx = torch.tensor(3 * x, requires_grad=True)
    ty = getattr(torch.nn.functional, TORCH_NAMES[kind])(tx)
    ty.backward(torch.tensor(dy))
    assert np.allclose(ActivationDesc(kind).apply(3 * x), ty.detach().numpy(), atol=1e-8)
    assert np.allclose(backward(kind, 3 * x, dy), tx.grad.numpy(), atol=1e-8)
