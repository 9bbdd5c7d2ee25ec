"""Pooling, softmax and activations under JAX: results, derivatives of every kind, what is ours."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from jax.nn import relu as kept_by_name  # noqa: E402
from jax.test_util import check_grads  # noqa: E402
from jax_cases import bj, clean, near, normal  # noqa: E402, F401 (clean: of every test)

from bedstone import InvalidDescriptor  # noqa: E402
from bedstone.frameworks.jax import handler  # noqa: E402
from bedstone.frameworks.jax.activation import NAMES  # noqa: E402


def close(a, b, tolerance=1e-5):
    near(a, b, tolerance)


def loss(function):
    return lambda x: jnp.sin(function(x)).sum()


def everything(function, x):
    """Value, gradient, tangent, gradient of a gradient, batches: all that a model may ask."""
    slope = jax.grad(loss(function))
    stacked = jnp.stack([x, 2 * x, x - 1], 1)
    return [
        jax.jit(function)(x),
        jax.jit(slope)(x),
        jax.jvp(function, (x,), (jnp.cos(x),))[1],
        jax.jit(jax.grad(lambda x: jnp.square(slope(x)).sum()))(x),
        jax.vmap(slope, 1, 1)(stacked),
    ]


def compare(ours, native, x, tolerance=2e-5):
    for a, b in zip(everything(ours, x), everything(native, x)):
        close(a, b, tolerance)


def nn(name):
    return jnp.tanh if name == "tanh" else getattr(jax.nn, name)


@pytest.mark.parametrize("name", NAMES)
def test_activations(name):
    compare(getattr(bj, name), nn(name), normal(3, 5, 7) * 3)


@pytest.mark.parametrize(
    "name, arguments",
    [("elu", (0.5,)), ("leaky_relu", (0.2,)), ("gelu", (False,))],
)
def test_coefficients(name, arguments):
    compare(lambda x: getattr(bj, name)(x, *arguments), lambda x: nn(name)(x, *arguments),
            normal(4, 9))  # fmt: skip


@pytest.mark.parametrize("axis", [-1, 0, 1, (1, 2), None])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax(name, axis):
    compare(lambda x: getattr(bj, name)(x, axis), lambda x: nn(name)(x, axis), normal(3, 4, 6))


def windows(x, init, op, window, stride, padding, dilation=None):
    return lax.reduce_window(x, init, op, window, stride, padding, None, dilation)


POOLINGS = [  # shape, window, stride, padding, dilation
    ((2, 3, 9, 8), (1, 1, 3, 2), (1, 1, 2, 2), "VALID", None),
    ((2, 9, 8, 3), (1, 3, 3, 1), (1, 2, 1, 1), "SAME", None),
    ((3, 9, 8), (1, 2, 3), (1, 2, 3), ((0, 0), (0, 1), (2, 0)), None),
    ((9, 8), (2, 2), (2, 2), "VALID", None),
    ((2, 2, 3, 7), (1, 1, 1, 3), (1, 1, 1, 1), "SAME", (1, 1, 1, 2)),
    ((2, 5, 6, 4, 3), (1, 2, 3, 2, 1), (1, 1, 2, 2, 1), "SAME", None),
    ((2, 9, 4, 3), (1, 3, 1, 1), (1, 1, 1, 1), "VALID", None),
]


@pytest.mark.parametrize("op", ["max", "add"])
@pytest.mark.parametrize("case", POOLINGS, ids=str)
def test_reduce_window(case, op):
    shape, *how = case
    init, op = (-jnp.inf, lax.max) if op == "max" else (0.0, lax.add)
    x = normal(*shape)
    if op is lax.max and how[-1] is not None:  # JAX has no gradient of it
        with bj.enable():
            ours = windows(x, init, op, *how)
        close(ours, windows(x, init, op, *how))
        return
    native = everything(lambda x: windows(x, init, op, *how), x)
    with bj.enable():
        ours = everything(lambda x: windows(x, init, op, *how), x)
    for a, b in zip(ours, native):
        close(a, b)
    found = bj.report()
    assert found.calls("reduce_window") >= 4, found
    # (JAX's own rule for the tangents of a maximum reduces pairs of arrays.)
    assert {row.what for row in found.rows if not row.own} <= {"an operand that is no array"}, found


LAYOUTS = list(itertools.product([False, True], ["VALID", "SAME", 1, [(1, 0), (0, 1)]]))


@pytest.mark.parametrize("last, padding", LAYOUTS, ids=str)
def test_the_functions_for_images(last, padding):
    x = normal(2, 9, 8, 3) if last else normal(2, 3, 9, 8)
    first = 1 if last else 2

    def whole(pair, rest):
        return (rest,) * first + tuple(pair) + (rest,) * (2 - first)

    pads = padding
    if not isinstance(padding, str):
        pads = whole([(1, 1)] * 2 if padding == 1 else padding, (0, 0))
    how = (whole((3, 2), 1), whole((2, 2), 1), pads)
    ours = {"stride": 2, "padding": padding, "channels_last": last}
    close(bj.max_pool(x, (3, 2), **ours), windows(x, -jnp.inf, lax.max, *how))
    total = windows(x, 0.0, lax.add, *how)
    counts = windows(jnp.ones_like(x), 0.0, lax.add, *how)
    close(bj.avg_pool(x, (3, 2), **ours), total / 6)
    close(bj.avg_pool(x, (3, 2), count_include_pad=False, **ours), total / counts)


@pytest.mark.parametrize(
    "function",
    [
        bj.gelu, bj.tanh, bj.silu, bj.softmax, bj.log_softmax,
        lambda x: bj.avg_pool(x[None], 2, 1, 1),
        lambda x: bj.avg_pool(x[None], 2, 1, 1, count_include_pad=False),
        lambda x: bj.max_pool(x[None], (2, 3), (1, 2), "SAME"),
    ],
    ids=["gelu", "tanh", "silu", "softmax", "log_softmax", "mean", "mean-inside", "max"],
)  # fmt: skip
def test_derivatives_are_the_slopes(function):
    with jax.enable_x64(True):
        values = np.random.default_rng(0).permutation(48).reshape(2, 4, 6) / 12.0
        check_grads(function, (jnp.asarray(values),), order=2, modes=["fwd", "rev"])


@pytest.mark.parametrize("dtype, tolerance", [("float16", 4e-3), ("bfloat16", 3e-2)])
def test_halves(dtype, tolerance):
    x = normal(2, 4, 8, 8).astype(dtype)
    for ours, native in (
        (bj.softmax, jax.nn.softmax), (bj.gelu, jax.nn.gelu),
        (lambda x: bj.max_pool(x, 2), lambda x: windows(x, -jnp.inf, lax.max, *[(1, 1, 2, 2)] * 2,
                                                        "VALID")),
    ):  # fmt: skip
        y = ours(x)
        assert y.dtype == dtype
        close(y, native(x.astype(jnp.float32)), tolerance)


def test_nan_passes():
    x = normal(1, 1, 4, 4).at[0, 0, 1, 1].set(jnp.nan)
    assert jnp.isnan(bj.max_pool(x, 2)).sum() == 1
    assert jnp.isnan(bj.relu(x)).sum() == 1


def test_the_first_of_equal_maxima_gets_the_gradient_as_in_jax():
    x = jnp.ones((1, 1, 5, 5))
    how = ((1, 1, 3, 3), (1, 1, 2, 2), "SAME")
    native = jax.grad(lambda x: windows(x, -jnp.inf, lax.max, *how).sum())(x)
    close(jax.grad(lambda x: bj.max_pool(x, 3, 2, "SAME").sum())(x), native, 0)


def test_without_a_kernel_the_formulas_serve(monkeypatch):
    x = normal(2, 3, 6, 6)
    functions = [
        bj.gelu, bj.hard_swish, bj.elu, bj.log_softmax, bj.softmax,
        lambda x: bj.max_pool(x, 3, 2, 1),
        lambda x: bj.avg_pool(x, 3, 2, 1),
        lambda x: bj.avg_pool(x, 3, 2, 1, count_include_pad=False),
    ]  # fmt: skip
    with_kernels = [everything(function, x) for function in functions]
    monkeypatch.setattr(handler, "call", lambda *arguments: "none")
    jax.clear_caches()
    for function, wanted in zip(functions, with_kernels):
        for a, b in zip(everything(function, x), wanted):
            close(a, b, 2e-5)
    monkeypatch.undo()
    jax.clear_caches()


def test_everything_is_taken_where_it_is_asked_for():
    x = normal(4, 6)
    names = [name for name in bj.operators() if name not in ("conv_general_dilated",)]
    with bj.enable(only=names):
        for name in (*NAMES, "softmax", "log_softmax"):
            nn(name)(x)
            assert bj.report().calls(name) >= 1, bj.report()
        jax.nn.swish(x), kept_by_name(x)
    assert bj.report().calls("silu") == 2 and bj.report().calls("relu") == 2
    assert kept_by_name is jax.nn.relu  # put back


def test_what_xla_fuses_is_its_own_unless_asked_for():
    with bj.enable():
        jax.nn.relu(normal(3))
    assert not bj.report().rows
    with bj.enable(except_=["reduce_window"]):
        windows(normal(4, 4), -jnp.inf, lax.max, (2, 2), (2, 2), "VALID")
    assert not bj.report().rows


def test_what_is_left_to_jax_says_why():
    x = normal(2, 6, 6, 3)
    how = ((1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    with bj.enable(only=bj.operators()):
        windows(x, jnp.inf, lax.min, *how)
        windows(x, 0.0, lax.max, *how)
        windows(x.astype(int), 0, lax.add, *how)
        lax.reduce_window(x, 0.0, lax.add, *how[:2], "VALID", (1, 2, 1, 1))
        windows(x, 0.0, lax.add, (1, 1, 1, 1), None, "VALID")
        windows(x, 0.0, lax.add, (2, 1, 2, 1), None, "VALID")  # axes 1 and 3 apart: C and N
        jax.nn.softmax(x, where=x > 0)
        jax.nn.softmax(x, axis=(0, 2))
        jax.nn.elu(x, alpha=x)
        jax.nn.leaky_relu(x, -1.0)
        jax.nn.relu(3)
    reasons = " ".join(row.what for row in bj.report().rows)
    for words in ("min", "initial value 0.0", "int32", "dilated", "0 axes", "argument where",
                  "next to each other", "no number", "0 or more", "int"):  # fmt: skip
        assert words in reasons, bj.report()
    assert bj.report().own_calls == 1


@pytest.mark.parametrize("bad", [["convolve"], "relu"])
def test_unknown_names_are_refused(bad):
    with pytest.raises(InvalidDescriptor, match="only"):
        bj.patch(only=bad)


def test_bad_arguments_of_the_functions():
    x = normal(1, 3, 5, 5)
    with pytest.raises(InvalidDescriptor, match="window"):
        bj.max_pool(x, 7)
    with pytest.raises(InvalidDescriptor, match="stride"):
        bj.avg_pool(x, 2, 0)
    with pytest.raises(InvalidDescriptor, match="window"):
        bj.avg_pool(x, (2, 2, 2))
    with pytest.raises(InvalidDescriptor, match="x: got"):
        bj.max_pool(normal(3, 4), 2)
    with pytest.raises(NotImplementedError, match="int32"):
        bj.relu(jnp.arange(3))
    with pytest.raises(NotImplementedError, match="axis"):
        bj.softmax(x, 4)
    with pytest.raises(InvalidDescriptor):
        bj.elu(x, -1.0)


def test_a_module_loaded_inside_a_block_goes_native_afterwards():
    with bj.enable():
        kept = lax.reduce_window
    kept(normal(4, 4), -jnp.inf, lax.max, (2, 2), (2, 2), "VALID")
    assert not bj.report().rows
