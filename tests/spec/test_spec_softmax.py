"""Softmax's reference against numbers by hand, SciPy and its own laws."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special
from spec_cases import close, dot, gradient, law, normal, packed, seeds, shapes

from bedstone.spec.softmax import ALGORITHMS, SoftmaxProblem, channel_axes, instance_axes

STABLE = ("accurate", "log")


def forward(x, algorithm="accurate", axes=(1,)):
    desc = packed(x.shape)
    return SoftmaxProblem("forward", desc, desc, algorithm, axes).reference({"x": x})["y"]


def backward(y, dy, algorithm="accurate", axes=(1,)):
    desc = packed(y.shape)
    problem = SoftmaxProblem("backward", desc, desc, algorithm, axes)
    return problem.reference({"y": y, "dy": dy})["dx"]


@st.composite
def cases(draw):
    dims = draw(shapes())
    axes = draw(st.sets(st.integers(0, len(dims) - 1), min_size=1).map(tuple))
    return dims, axes


def test_by_hand():
    x = np.log(np.array([[1.0, 2.0, 5.0], [3.0, 3.0, 2.0]]))
    for algorithm in ("fast", "accurate"):
        assert close(forward(x, algorithm), [[0.125, 0.25, 0.625], [0.375, 0.375, 0.25]])
    assert close(forward(x, "log"), np.log([[0.125, 0.25, 0.625], [0.375, 0.375, 0.25]]))
    y, dy = np.array([[0.25, 0.75]]), np.array([[4.0, 8.0]])
    assert backward(y, dy).tolist() == [[-0.75, 0.75]]  # y * (dy - 7)
    assert close(backward(np.log(y), dy, "log"), [[1.0, -1.0]])  # dy - y * 12


@law
@given(cases(), st.sampled_from(ALGORITHMS), seeds)
def test_equals_scipy(case, algorithm, seed):
    dims, axes = case
    (x,) = normal(seed, dims)
    function = special.log_softmax if algorithm == "log" else special.softmax
    assert close(forward(x, algorithm, axes), function(x, axis=axes))


@law
@given(cases(), st.sampled_from(ALGORITHMS), seeds)
def test_shift_changes_nothing_and_the_sum_is_one(case, algorithm, seed):
    dims, axes = case
    (x,) = normal(seed, dims)
    shift = normal(seed + 1, tuple(1 if a in axes else d for a, d in enumerate(dims)))[0]
    y = forward(x, algorithm, axes)
    assert close(y, forward(x + shift, algorithm, axes))
    total = (np.exp(y) if algorithm == "log" else y).sum(axis=axes)
    assert close(total, np.ones(total.shape))


@law
@given(shapes(1, 3, 3), st.sampled_from(ALGORITHMS), seeds)
def test_gradient(dims, algorithm, seed):
    axes = (len(dims) - 1,)
    x, dy = normal(seed, dims, dims)
    dx = backward(forward(x, algorithm, axes), dy, algorithm, axes)
    slope = gradient(lambda at: dot(forward(at, algorithm, axes), dy), x)
    assert np.allclose(dx, slope, atol=1e-7)


def test_the_papers_two_modes():
    (x,) = normal(2, (2, 3, 4, 5))
    flat = special.softmax(x.reshape(2, -1), axis=1).reshape(x.shape)
    assert close(forward(x, axes=instance_axes(4)), flat)
    assert close(forward(x, axes=channel_axes(4)), special.softmax(x, axis=1))
    assert close(forward(x, axes=(-1,)), special.softmax(x, axis=3))


def test_large_values():
    x = np.array([[1000.0, 999.0, -1000.0]])
    assert close(forward(x), special.softmax(x, axis=1))
    assert forward(x, "log")[0, 2] == pytest.approx(-2000.0, abs=1)  # no log(0)
    assert np.isnan(forward(x, "fast")[0, 0])  # overflows, as documented


def test_special_values():
    for algorithm in STABLE:
        assert np.isnan(forward(np.array([[0.0, np.nan]]), algorithm)).all()
        assert np.isnan(forward(np.array([[0.0, np.inf]]), algorithm)).any()
    assert forward(np.array([[0.0, -np.inf]])).tolist() == [[1.0, 0.0]]
    assert forward(np.array([[0.0, -np.inf]]), "log").tolist() == [[0.0, -np.inf]]


def test_blends_and_accepts_nothing():
    x, y = normal(3, (2, 4), (2, 4))
    problem = SoftmaxProblem("forward", packed((2, 4)), packed((2, 4)))
    got = problem.reference({"x": x, "y": y}, 2.0, -1.0)["y"]
    assert close(got, 2 * special.softmax(x, axis=1) - y)
    for dims in ((0, 3), (3, 0)):
        assert forward(np.zeros(dims)).shape == dims
