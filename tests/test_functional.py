"""Arrays in, an array of the caller's kind out; results against the reference."""

from __future__ import annotations

import numpy as np
import pytest

import bedstone
from bedstone import InvalidDescriptor, NotSupported, config
from bedstone.arrays import as_array_ref
from bedstone.spec.convolution import convolution_problem

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((2, 6, 9, 8)).astype(np.float32)
W = RANDOM.standard_normal((4, 3, 3, 2)).astype(np.float32)
OPTIONS = {"padding": ((1, 0), (2, 1)), "stride": (2, 1), "dilation": (1, 2), "groups": 2}
PROBLEM = convolution_problem("forward", X.shape, W.shape, **OPTIONS)
DY = RANDOM.standard_normal(PROBLEM.y.dims).astype(np.float32)


def reference(direction, **arrays):
    problem = convolution_problem(direction, X.shape, W.shape, **OPTIONS)
    (result,) = problem.reference(arrays).values()
    return result


def close(got, want):
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=1e-5, atol=1e-5)


def maker(kind):
    """(array -> the caller's kind, its class)."""
    if kind == "numpy":
        return np.asarray, np.ndarray
    module = pytest.importorskip(kind)
    if kind == "torch":
        return module.from_numpy, module.Tensor
    if kind == "jax":
        return module.numpy.asarray, module.Array
    return module.to_tensor, module.Tensor


@pytest.mark.parametrize("kind", ["numpy", "torch", "jax", "paddle"])
def test_all_directions_on_every_kind_of_array(kind):
    make, kind = maker(kind)
    x, w, dy = make(X.copy()), make(W.copy()), make(DY.copy())
    y = bedstone.convolution(x, w, **OPTIONS)
    dx = bedstone.convolution_backward_data(w, dy, X.shape, **OPTIONS)
    dw = bedstone.convolution_backward_filter(x, dy, W.shape, **OPTIONS)
    db = bedstone.convolution_backward_bias(dy)
    assert all(isinstance(a, kind) for a in (y, dx, dw, db))
    close(y, reference("forward", x=X, w=W))
    close(dx, reference("backward_data", w=W, dy=DY))
    close(dw, reference("backward_filter", x=X, dy=DY))
    close(db, DY.sum((0, 2, 3)))


def test_bias_and_activation():
    bias = np.arange(4, dtype=np.float32) - 2
    y = bedstone.convolution(X, W, bias, activation="relu", alpha=0.5, **OPTIONS)
    want = np.maximum(0.5 * reference("forward", x=X, w=W) + bias.reshape(1, -1, 1, 1), 0)
    close(y, want)


def test_out_alpha_and_beta():
    out = np.ones(PROBLEM.y.dims, np.float32)
    result = bedstone.convolution(X, W, out=out, alpha=2, beta=-1, **OPTIONS)
    assert result is out
    close(out, 2 * reference("forward", x=X, w=W) - 1)
    with pytest.raises(InvalidDescriptor, match="out: got None, expected an array to blend with"):
        bedstone.convolution(X, W, beta=1.0, **OPTIONS)


def test_channels_last_in_channels_last_out():
    last = np.ascontiguousarray(X.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    y = bedstone.convolution(last, W, **OPTIONS)
    assert as_array_ref(y).desc.layout == "NHWC"
    close(y, reference("forward", x=X, w=W))
    assert as_array_ref(bedstone.convolution(X, W, **OPTIONS)).desc.layout == "NCHW"


def test_strided_arrays_are_taken_as_they_lie():
    wide = np.zeros((2, 6, 9, 16), np.float32)
    wide[..., ::2] = X
    out = np.zeros((2, 4, *PROBLEM.y.dims[2:][::-1]), np.float32).transpose(0, 1, 3, 2)
    bedstone.convolution(wide[..., ::2], W[::-1][::-1], out=out, **OPTIONS)
    close(out, reference("forward", x=X, w=W))


def test_one_and_three_axes():
    x, w = np.ones((1, 2, 7), np.float32), np.ones((3, 2, 3), np.float32)
    assert bedstone.convolution(x, w, padding=1)[0, 0].tolist() == [4, 6, 6, 6, 6, 6, 4]
    x, w = np.ones((1, 2, 3, 3, 3)), np.ones((3, 2, 3, 3, 3))
    y = bedstone.convolution(x, w)
    assert y.dtype == np.float64 and y.ravel().tolist() == [54.0] * 3


@pytest.mark.parametrize(
    "match, call",
    [
        ("x: got .*3, 4 or 5 dims", lambda: bedstone.convolution(X[0, 0], W)),
        ("w: got .*C/groups = 6 channels", lambda: bedstone.convolution(X, W)),
        ("groups: got 4, expected a divisor", lambda: bedstone.convolution(X, W, groups=4)),
        ("groups: got 0", lambda: bedstone.convolution(X, W, groups=0)),
        ("w: got 'float64', expected the dtype of x",
         lambda: bedstone.convolution(X, W.astype("d"), groups=2)),
        ("stride: got 0, expected 1 or more|stride: got .0, 0.",
         lambda: bedstone.convolution(X, W, groups=2, stride=0)),
        ("padding: got .*0 or more", lambda: bedstone.convolution(X, W, groups=2, padding=-1)),
        ("padding: got .1, 2, 3.", lambda: bedstone.convolution(X, W, groups=2, padding=(1, 2, 3))),
        ("dilation: got 'two'", lambda: bedstone.convolution(X, W, groups=2, dilation="two")),
        ("w: got .*no larger than the padded input",
         lambda: bedstone.convolution(X[:, :, :2], W, groups=2)),
        ("mode: got 'valid'", lambda: bedstone.convolution(X, W, groups=2, mode="valid")),
        ("math: got 'fp8'", lambda: bedstone.convolution(X, W, groups=2, math="fp8")),
        ("y: got .*expected dims .2, 4, 7, 7.",
         lambda: bedstone.convolution(X, W, groups=2, out=np.zeros((2, 4, 7, 8), "f"))),
        ("algorithm: got 'cpu:magic'",
         lambda: bedstone.convolution(X, W, groups=2, algorithm="cpu:magic")),
        ("kind: got 'swoosh'", lambda: bedstone.activation(X, "swoosh")),
        ("bias: got '1x?3? ?.*', expected the planned 4|bias: got '3 float32'",
         lambda: bedstone.convolution(X, W, np.zeros(3, "f"), groups=2)),
        ("dy: got .*expected dims|y: got .*expected dims",
         lambda: bedstone.convolution_backward_data(W, DY, (2, 6, 9, 80), groups=2)),
        ("dy: got .*2 or more dims", lambda: bedstone.convolution_backward_bias(DY[0, 0, 0])),
    ],
)  # fmt: skip
def test_mistakes_are_named(match, call):
    with pytest.raises(InvalidDescriptor, match=match):
        call()


def test_forced_algorithms():
    y = bedstone.convolution(X, W, algorithm="reference:direct", **OPTIONS)
    close(y, reference("forward", x=X, w=W))
    with config(backend="reference"), pytest.raises(InvalidDescriptor, match="algorithm"):
        bedstone.convolution(X, W, algorithm="cpu:implicit_gemm", **OPTIONS)


def test_nobody_on_this_device():
    with config(backend="triton"), pytest.raises(NotSupported):
        bedstone.convolution(X, W, **OPTIONS)


def test_activations_in_place_and_backward():
    x = X.copy()
    assert bedstone.activation(x, "tanh", out=x) is x
    close(x, np.tanh(X.astype(np.float64)))
    dy = DY.copy()
    y = np.tanh(DY)
    assert bedstone.activation_backward(y, dy, "tanh", out=dy) is dy
    close(dy, DY * (1 - y.astype(np.float64) ** 2))
    dx = bedstone.activation_backward(X, X, "gelu")
    assert dx.shape == X.shape
    y = bedstone.activation(X, bedstone.ActivationDesc("clip", -0.5, 0.25))
    close(y, np.clip(X, -0.5, 0.25))
    close(bedstone.activation(X, "clipped_relu:0.5:0.0"), np.clip(X, 0, 0.5))


def test_half_types():
    x, w = X.astype(np.float16), W.astype(np.float16)
    y = bedstone.convolution(x, w, **OPTIONS)
    assert y.dtype == np.float16
    want = reference("forward", x=x, w=w)
    np.testing.assert_allclose(y.astype("d"), want, rtol=2e-3, atol=2e-3)


def test_plans_are_shared():
    handle = bedstone.default_handle("cpu")
    bedstone.activation(X, "relu")
    kept = len(handle._plans)
    bedstone.activation(X + 1, "relu")
    assert len(handle._plans) == kept


def test_doctests_of_the_functional_level() -> None:
    import doctest

    import bedstone.functional

    assert doctest.testmod(bedstone.functional).failed == 0


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("mode", ["max", "average_include_padding", "average_exclude_padding"])
def test_pool_and_its_gradient(mode: str, layout: str) -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 7, 9))
    x = bedstone.transform(x, layout=layout)
    y = bedstone.pool(x, 3, mode, stride=2, padding=1)
    problem = bedstone.PoolingProblem(
        "forward",
        bedstone.TensorDesc.of(x),
        bedstone.TensorDesc.of(y),
        bedstone.PoolingDesc.of(mode, 3, 2, 1, 2),
    )
    np.testing.assert_allclose(y, problem.reference({"x": x})["y"], rtol=1e-12)
    saved = {"x": x} if mode == "max" else {"x_dims": x.shape}
    dx = bedstone.pool_backward(np.ones_like(y), 3, mode, stride=2, padding=1, **saved)
    step = 1e-6 * np.random.default_rng(1).standard_normal(x.shape)
    moved = bedstone.pool(x + step, 3, mode, stride=2, padding=1).sum() - y.sum()
    assert abs(moved - (dx * step).sum()) < 1e-9


def test_softmax_and_its_gradient() -> None:
    x = np.random.default_rng(0).standard_normal((2, 5, 3))
    y = bedstone.softmax(x, axes=(1, 2))
    np.testing.assert_allclose(y.sum(axis=(1, 2)), 1.0)
    np.testing.assert_allclose(np.exp(bedstone.softmax(x, axes=(1, 2), kind="log")), y)
    dy = np.random.default_rng(1).standard_normal(x.shape)
    dx = bedstone.softmax_backward(y, dy, axes=(1, 2))
    np.testing.assert_allclose(dx, y * (dy - (y * dy).sum(axis=(1, 2), keepdims=True)), atol=1e-12)


def test_tensor_operations() -> None:
    out = np.zeros((2, 3, 4, 5), np.float32)
    bedstone.set_to(out, 2.0)
    bedstone.scale(out, 3.0)
    assert np.all(out == 6.0)
    b = np.arange(3, dtype=np.float32).reshape(1, 3, 1, 1)
    bedstone.add(b, out, alpha=2.0, beta=0.5)
    np.testing.assert_array_equal(out, np.broadcast_to(2 * b + 3, out.shape))
    turned = bedstone.transform(out, layout="NHWC", dtype="float64")
    np.testing.assert_array_equal(turned, out)
    assert turned.dtype == np.float64 and turned.transpose(0, 2, 3, 1).flags.c_contiguous


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda x: bedstone.pool_backward(x, 3), "x"),
        (lambda x: bedstone.pool_backward(x, 3, "average_exclude_padding"), "x_dims"),
        (lambda x: bedstone.pool(x, 2, "mean"), "mode"),
        (lambda x: bedstone.pool(x, 99), "window"),
        (lambda x: bedstone.softmax(x, axes=9), "axes"),
        (lambda x: bedstone.softmax(x, kind="quick"), "algorithm"),
        (lambda x: bedstone.transform(x, layout="NHXC"), "layout"),
        (lambda x: bedstone.add(np.ones(3), x), "b"),
        (lambda x: bedstone.convolution(x, x[:, :, :3, :3], alpha="much"), "alpha"),
    ],
)
def test_mistakes_name_their_argument(call: object, argument: str) -> None:
    with pytest.raises(bedstone.InvalidDescriptor) as caught:
        call(np.ones((3, 3, 4, 5)))  # type: ignore[operator]
    assert caught.value.argument == argument
