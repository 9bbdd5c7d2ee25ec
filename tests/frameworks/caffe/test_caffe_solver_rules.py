"""Update rules and learning-rate policies against formulas written out one element at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bedstone.frameworks.caffe import solvers_rules as rules
from bedstone.spec.errors import InvalidDescriptor

RATE, MOMENTUM, MOMENTUM2, RMS, DELTA, DECAY = 0.1, 0.9, 0.95, 0.8, 1e-4, 0.01
STEPS = 7


def by_hand(kind: str, w: float, gradients: list[float], decay: str) -> float:
    """A scalar weight after all steps, in Python's doubles."""
    h = u = 0.0
    for i, g in enumerate(gradients):
        g += DECAY * (w if decay == "L2" else math.copysign(1.0, w))
        if kind == "SGD":
            h = MOMENTUM * h + RATE * g
            step = h
        elif kind == "Nesterov":
            before, h = h, MOMENTUM * h + RATE * g
            step = (1 + MOMENTUM) * h - MOMENTUM * before
        elif kind == "AdaGrad":
            h += g * g
            step = RATE * g / (math.sqrt(h) + DELTA)
        elif kind == "RMSProp":
            h = RMS * h + (1 - RMS) * g * g
            step = RATE * g / (math.sqrt(h) + DELTA)
        elif kind == "AdaDelta":
            h = MOMENTUM * h + (1 - MOMENTUM) * g * g
            step = g * math.sqrt((u + DELTA) / (h + DELTA))
            u = MOMENTUM * u + (1 - MOMENTUM) * step * step
            step *= RATE
        else:
            h = MOMENTUM * h + (1 - MOMENTUM) * g
            u = MOMENTUM2 * u + (1 - MOMENTUM2) * g * g
            fixed = math.sqrt(1 - MOMENTUM2 ** (i + 1)) / (1 - MOMENTUM ** (i + 1))
            step = RATE * fixed * h / (math.sqrt(u) + DELTA)
        w -= step
    return w


@pytest.mark.parametrize("decay", ["L2", "L1"])
@pytest.mark.parametrize("kind", list(rules.RULES))
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rule_is_the_formula(kind, decay, dtype, monkeypatch):
    monkeypatch.setattr(rules, "BLOCK", 4)  # several blocks, the last one short
    rng = np.random.default_rng(3)
    weights = rng.normal(size=(3, 5)).astype(dtype)
    gradients = rng.normal(size=(STEPS, 3, 5)).astype(dtype)
    expected = [
        by_hand(kind, float(w), [float(g) for g in gs], decay)
        for w, gs in zip(weights.ravel(), gradients.reshape(STEPS, -1).T)
    ]
    rule = rules.RULES[kind]
    history = [np.zeros_like(weights) for _ in range(rule.histories)]
    for i in range(STEPS):
        before, step = weights.copy(), gradients[i].copy()
        settings = rules.Step(RATE, MOMENTUM, MOMENTUM2, RMS, DELTA, i)
        rules.update(rule, weights, step, history, settings, DECAY, decay)
        np.testing.assert_array_equal(weights, before - step)  # the gradient holds the step
    tolerance = 2e-5 if dtype == np.float32 else 1e-12
    np.testing.assert_allclose(weights.ravel(), expected, rtol=tolerance, atol=tolerance)


def test_scale_comes_before_decay():
    weights, gradient = np.full(3, 2.0, "f"), np.full(3, 8.0, "f")
    rules.update(
        rules.RULES["SGD"], weights, gradient, [np.zeros(3, "f")], rules.Step(1.0),
        decay=0.5, scale=0.25,
    )  # fmt: skip
    np.testing.assert_array_equal(gradient, 8 * 0.25 + 2 * 0.5)


def test_l1_leaves_a_zero_weight():
    gradient = np.zeros(3, "f")
    rules.decay_l1(gradient, np.array([-2, 0, 3], "f"), 0.5)
    np.testing.assert_array_equal(gradient, [-0.5, 0, 0.5])


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (rules.Policy("fixed", 0.5), lambda i: 0.5),
        (rules.Policy("step", 0.5, gamma=0.1, stepsize=3), lambda i: 0.5 * 0.1 ** (i // 3)),
        (rules.Policy("multistep", 1, gamma=0.5, stepvalue=(2, 5)),
         lambda i: [1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0.25][i]),
        (rules.Policy("exp", 2, gamma=0.9), lambda i: 2 * 0.9**i),
        (rules.Policy("inv", 2, gamma=0.1, power=0.75), lambda i: 2 / (1 + 0.1 * i) ** 0.75),
        (rules.Policy("poly", 2, power=2, max_iter=10), lambda i: 2 * (1 - i / 10) ** 2),
        (rules.Policy("sigmoid", 2, gamma=-0.5, stepsize=4),
         lambda i: 2 / (1 + math.exp(0.5 * (i - 4)))),
    ],
    ids=lambda value: getattr(value, "name", ""),
)  # fmt: skip
def test_policy_is_the_formula(policy, expected):
    for i in range(10):
        assert policy.rate(i) == pytest.approx(expected(i), rel=1e-12), i


def test_poly_ends_at_nothing_and_sigmoid_does_not_overflow():
    assert rules.Policy("poly", 1, power=0.5, max_iter=10).rate(25) == 0
    assert rules.Policy("sigmoid", 1, gamma=100, stepsize=1000).rate(0) < 1e-300


@pytest.mark.parametrize(
    ("name", "more", "argument"),
    [("cosine", {}, "lr_policy"), ("", {}, "lr_policy"), ("step", {}, "stepsize"),
     ("poly", {}, "max_iter"), ("multistep", {"stepvalue": (5, 2)}, "stepvalue")],
)  # fmt: skip
def test_policy_refuses(name, more, argument):
    with pytest.raises(InvalidDescriptor, match=argument):
        rules.Policy(name, 0.1, **more)


def test_clip_scales_all_gradients_together():
    gradients = [np.array([3.0, 0.0], "f"), np.array([[0.0], [4.0]], "f")]
    assert rules.clip(gradients, 10.0) == (5.0, 1.0)
    assert rules.clip(gradients, -1.0) == (5.0, 1.0)
    assert rules.clip(gradients, 1.0) == (5.0, 0.2)
    np.testing.assert_allclose(gradients[0], [0.6, 0], rtol=1e-6)
    np.testing.assert_allclose(gradients[1], [[0], [0.8]], rtol=1e-6)


def test_clip_does_not_hide_an_infinite_gradient():
    gradient = np.array([np.inf, 1.0], "f")
    rules.clip([gradient], 1.0)
    np.testing.assert_array_equal(gradient, [np.inf, 1.0])
