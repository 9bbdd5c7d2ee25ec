"""Pooling's reference against numbers by hand, PyTorch and its own laws."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from spec_cases import close, dot, law, normal, packed, poolings, seeds

from bedstone.spec.pooling import (
    MODES,
    NO_INDEX,
    AdaptivePoolingProblem,
    PoolingDesc,
    PoolingProblem,
    adaptive_average_problem,
)

AVERAGES = MODES[1:]


def problem_of(direction, x, pool, indices=False, y=None):
    y = y or pool.output_dims(x)
    where = packed(y, "int64") if indices else None
    return PoolingProblem(direction, packed(x), packed(y), pool, where)


def backward_of(problem, indices=False):
    where = packed(problem.y.dims, "int64") if indices else None
    return PoolingProblem("backward", problem.x, problem.y, problem.pool, where)


def pooled(row, pool):
    """One row of numbers through a one-dimensional pooling."""
    x = np.array(row, float).reshape(1, 1, -1)
    return problem_of("forward", x.shape, pool).reference({"x": x})["y"].ravel().tolist()


def test_by_hand():
    x = np.array([[1, 2, 5, 3], [4, 0, -1, 7], [8, 6, 9, 2], [3, 1, 0, 4]], float)[None, None]
    pool = PoolingDesc.of("max", 2)
    out = problem_of("forward", x.shape, pool, indices=True).reference({"x": x})
    assert out["y"].tolist() == [[[[4, 7], [8, 9]]]]
    assert out["indices"].tolist() == [[[[4, 7], [8, 10]]]]
    mean = problem_of("forward", x.shape, PoolingDesc.of(AVERAGES[0], 2)).reference({"x": x})["y"]
    assert mean.tolist() == [[[[1.75, 3.5], [4.5, 3.75]]]]
    dy = np.array([[1, 2], [3, 4]], float)[None, None]
    dx = problem_of("backward", x.shape, pool).reference({"x": x, "dy": dy})["dx"]
    assert dx[0, 0].tolist() == [[0, 0, 0, 0], [1, 0, 0, 2], [3, 0, 4, 0], [0, 0, 0, 0]]


def test_divisors():
    """Windows of 3, padding 1, stride 2 over 4 elements; by ceil a third window begins at 3 and
    has one element, one of padding and one beyond the padding."""
    ones = [1, 1, 1, 1]
    floor = PoolingDesc.of("average_include_padding", 3, 1, 1, 2)
    assert pooled(ones, floor) == [2 / 3, 1]
    ceil = PoolingDesc.of("average_include_padding", 3, 1, 1, 2, rounding="ceil")
    assert pooled(ones, ceil) == [2 / 3, 1, 1 / 2]
    ceil = PoolingDesc.of("average_exclude_padding", 3, 1, 1, 2, rounding="ceil")
    assert pooled(ones, ceil) == [1, 1, 1]


@pytest.mark.parametrize(
    "size, window, pad, stride, floor, ceil",
    [
        (6, 3, 0, 2, 2, 3),  # the last window overruns the input (GoogLeNet's 3x3/2)
        (112, 3, 0, 2, 55, 56),
        (13, 3, 0, 2, 6, 6),
        (5, 2, 1, 2, 3, 3),  # a fourth would start in the high padding: dropped, as Caffe does
        (5, 3, 1, 3, 2, 2),
        (3, 5, 0, 3, None, 1),  # larger than the input: by ceil it still begins inside
        (2, 1, 0, 2, 1, 1),  # ... and one that starts beyond the input is dropped
    ],
)
def test_output_size(size, window, pad, stride, floor, ceil):
    for rounding, expected in (("floor", floor), ("ceil", ceil)):
        if expected is not None:
            pool = PoolingDesc.of("max", window, 1, pad, stride, rounding=rounding)
            assert pool.output_dims((1, 1, size)) == (1, 1, expected)


def test_given_output_size():
    """The caller may want fewer windows than floor gives, or more than ceil."""
    pool = PoolingDesc.of("max", 2, 1, stride=2, rounding="given")
    x = np.arange(5.0).reshape(1, 1, 5)
    for windows, expected in ((1, [1]), (2, [1, 3]), (3, [1, 3, 4])):
        problem = problem_of("forward", x.shape, pool, y=(1, 1, windows))
        assert problem.reference({"x": x})["y"].ravel().tolist() == expected


def test_first_of_equal_maxima_wins():
    x = np.zeros((1, 1, 3, 3))
    pool = PoolingDesc.of("max", 3)
    out = problem_of("forward", x.shape, pool, indices=True).reference({"x": x})
    assert out["indices"].item() == 0
    dx = problem_of("backward", x.shape, pool).reference({"x": x, "dy": np.ones((1, 1, 1, 1))})[
        "dx"
    ]
    assert dx.sum() == dx[0, 0, 0, 0] == 1


def test_nan_is_the_largest():
    x = np.array([1, np.nan, np.inf, np.nan, -np.inf, -np.inf]).reshape(1, 1, 6)
    out = problem_of("forward", x.shape, PoolingDesc.of("max", 3, 1), indices=True).reference(
        {"x": x}
    )
    assert np.isnan(out["y"]).tolist() == [[[True, True]]]
    assert out["indices"].ravel().tolist() == [1, 3]
    twice = np.array([[[0.0, np.nan, np.nan]]])
    out = problem_of("forward", (1, 1, 3), PoolingDesc.of("max", 3, 1), True).reference(
        {"x": twice}
    )
    assert out["indices"].item() == 1
    alone = np.full((1, 1, 2), -np.inf)
    out = problem_of("forward", (1, 1, 2), PoolingDesc.of("max", 2, 1), True).reference(
        {"x": alone}
    )
    assert out["y"].item() == -np.inf and out["indices"].item() == 0


def test_window_wholly_in_the_padding():
    """Possible with wide padding only: -inf without an index, or a mean of 0; no gradient."""
    x = np.array([[[1.0, 2.0]]])
    pool = PoolingDesc.of("max", 1, 1, [(2, 0)])
    out = problem_of("forward", x.shape, pool, indices=True).reference({"x": x})
    assert out["y"].ravel().tolist() == [-np.inf, -np.inf, 1, 2]
    assert out["indices"].ravel().tolist() == [NO_INDEX, NO_INDEX, 0, 1]
    for indices in (False, True):
        backward = backward_of(problem_of("forward", x.shape, pool), indices)
        dx = backward.reference({"x": x, "indices": out["indices"], "dy": np.ones((1, 1, 4))})["dx"]
        assert dx.tolist() == [[[1, 1]]]
    for mode in AVERAGES:
        assert pooled([1, 2], PoolingDesc.of(mode, 1, 1, [(2, 0)])) == [0, 0, 1, 2]


def test_global_pooling_is_the_mean_and_maximum_of_the_image():
    (x,) = normal(1, (2, 3, 4, 5))
    for mode, function in (("max", np.max), (AVERAGES[0], np.mean), (AVERAGES[1], np.mean)):
        problem = problem_of("forward", x.shape, PoolingDesc.whole(mode, x.shape))
        assert close(problem.reference({"x": x})["y"], function(x, axis=(2, 3), keepdims=True))


def by_loops(problem, x):
    """The definition, one window and tap at a time: (y, divisors)."""
    pool, y = problem.pool, np.zeros(problem.y.dims)
    for n, c, *at in np.ndindex(*problem.y.dims):
        inside, counted = [], 0
        for tap in np.ndindex(*pool.window):
            where = [
                p * u + t * step - low
                for p, u, t, step, (low, _) in zip(
                    at, pool.stride, tap, pool.dilation, pool.padding
                )
            ]
            sizes = x.shape[2:]
            counted += all(i < h + high for i, h, (_, high) in zip(where, sizes, pool.padding))
            if all(0 <= i < h for i, h in zip(where, sizes)):
                inside.append(x[(n, c, *where)])
        if pool.mode == "max":
            y[(n, c, *at)] = max(inside, default=-np.inf)
        else:
            count = counted if pool.mode == "average_include_padding" else len(inside)
            y[(n, c, *at)] = sum(inside) / max(count, 1)
    return y


@law
@given(poolings(), seeds)
def test_equals_loops(problem, seed):
    (x,) = normal(seed, problem.x.dims)
    expected = by_loops(problem, x)
    got = problem.reference({"x": x})["y"]
    assert np.array_equal(np.isinf(got), np.isinf(expected))
    assert close(np.where(np.isinf(got), 0, got), np.where(np.isinf(got), 0, expected))


@law
@given(poolings(AVERAGES), seeds)
def test_average_gradient_is_adjoint(problem, seed):
    x, dy = normal(seed, problem.x.dims, problem.y.dims)
    y = problem.reference({"x": x})["y"]
    dx = backward_of(problem).reference({"dy": dy})["dx"]
    assert close(dot(y, dy), dot(x, dx)) and dx.shape == x.shape


@law
@given(poolings(("max",)), seeds)
def test_maximum_gradient_goes_where_the_maximum_is(problem, seed):
    """y = x[indices]; dx is the adjoint of that choice, found again from x or from the indices."""
    x, dy = normal(seed, problem.x.dims, problem.y.dims)
    asked = PoolingProblem(
        "forward", problem.x, problem.y, problem.pool, packed(problem.y.dims, "int64")
    )
    out = asked.reference({"x": x})
    y, where = out["y"], out["indices"]
    flat = x.reshape(*x.shape[:2], -1)
    chosen = np.take_along_axis(flat, np.maximum(where, 0).reshape(*x.shape[:2], -1), -1)
    assert np.array_equal(np.where(where < 0, -np.inf, chosen.reshape(y.shape)), y)
    dx = backward_of(problem).reference({"x": x, "dy": dy})["dx"]
    same = backward_of(problem, indices=True).reference({"indices": where, "dy": dy})["dx"]
    assert np.array_equal(dx, same)
    assert close(dot(np.where(where < 0, 0, y), dy), dot(x, dx))


TORCH_CASES = [
    (axes, mode, window, pad, stride, ceil, dilation)
    for axes, mode, window, pad, stride, ceil, dilation in itertools.product(
        (1, 2, 3), MODES, (2, 3), (0, 1), (1, 2, 3), (False, True), (1, 2)
    )
    if mode == "max" or dilation == 1
]


@pytest.mark.parametrize("axes, mode, window, pad, stride, ceil, dilation", TORCH_CASES)
def test_equals_torch(axes, mode, window, pad, stride, ceil, dilation):
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    size = {1: (8,), 2: (7, 5), 3: (5, 6, 5)}[axes]
    x = np.random.default_rng(window).integers(-2, 3, (2, 2, *size)).astype(float)  # with ties
    tx = torch.tensor(x, requires_grad=True)
    pool = PoolingDesc.of(mode, window, axes, pad, stride, dilation, "ceil" if ceil else "floor")
    problem = problem_of("forward", x.shape, pool, indices=mode == "max")
    out = problem.reference({"x": x})
    if mode == "max":
        ty, where = getattr(functional, f"max_pool{axes}d")(
            tx, window, stride, pad, dilation, ceil, return_indices=True
        )
        assert np.array_equal(out["indices"], where.numpy())
    else:
        include = mode == "average_include_padding"
        ty = getattr(functional, f"avg_pool{axes}d")(tx, window, stride, pad, ceil, include)
    assert close(out["y"], ty.detach().numpy())
    (dy,) = normal(1, ty.shape)
    ty.backward(torch.tensor(dy))
    assert close(backward_of(problem).reference({"x": x, "dy": dy})["dx"], tx.grad.numpy())


@law
@given(st.lists(st.tuples(st.integers(1, 7), st.integers(1, 8)), min_size=1, max_size=3), seeds)
def test_adaptive_average(sizes, seed):
    """By the definition of its windows, by PyTorch where it is there, and adjoint."""
    x_dims, y_dims = (1, 2, *(h for h, _ in sizes)), (1, 2, *(p for _, p in sizes))
    x, dy = normal(seed, x_dims, y_dims)
    problem = adaptive_average_problem("forward", packed(x_dims), packed(y_dims))
    y = problem.reference({"x": x})["y"]
    for n, c, *at in np.ndindex(*y_dims):
        box = tuple(slice(i * h // p, -(-(i + 1) * h // p)) for i, (h, p) in zip(at, sizes))
        assert close(y[(n, c, *at)], x[(n, c, *box)].mean())
    divides = all(h % p == 0 for h, p in sizes)
    assert isinstance(problem, PoolingProblem if divides else AdaptivePoolingProblem)
    backward = adaptive_average_problem("backward", packed(x_dims), packed(y_dims))
    assert close(dot(y, dy), dot(x, backward.reference({"dy": dy})["dx"]))
