"""What JAX does to functions that hold bedstone's kernels: loops, checkpoints, donated memory,
devices; and types, sizes and paddings at the edge of what is ours."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from jax_cases import bj, clean, near, normal  # noqa: E402, F401 (clean: of every test)

IMAGES, FILTERS = (2, 4, 8, 8), (4, 4, 3, 3)


def conv(x, w, padding="SAME"):
    return lax.conv_general_dilated(x, w, (1, 1), padding)


def loss(x, w):
    return jnp.sin(conv(x, w)).sum()


def both(function, *arrays, tolerance=1e-4, own=1, dtype=None):
    """`function` by JAX and, with at least `own` calls, on bedstone."""
    native = function(*arrays)
    with bj.enable(only=bj.operators()):
        ours = function(*arrays)
    found = bj.report()
    assert found.own_calls >= own and (own or not found.own_calls), found
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(native), strict=True):
        assert a.dtype == b.dtype and (dtype is None or a.dtype == dtype)
        near(a, b, tolerance)


def repeated(step):
    return lambda x, w: lax.scan(lambda c, _: (step(c, w), c.sum()), x, None, length=4)[0].sum()


def layer(x, w):
    return jnp.tanh(conv(x, w))


GRADIENTS = {
    "checkpoint": jax.checkpoint(loss),
    "checkpoint-saving": jax.checkpoint(
        loss, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
    "scan": repeated(layer),
    "scan-of-checkpoints": repeated(jax.checkpoint(layer)),
    "cond": lambda x, w: lax.cond(x.sum() > 0, lambda: loss(x, w), lambda: 2 * loss(x, w)),
    "map": lambda x, w: lax.map(lambda a: conv(a, w), jnp.stack([x, x + 1])).sum(),
    "twice-vmapped": lambda x, w: jax.vmap(jax.vmap(conv, (0, None)), (None, 0))(
        jnp.stack([x, x + 1]), jnp.stack([w, 2 * w, w - 1])
    ).sum(),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of(name):
    function = GRADIENTS[name]
    both(lambda x, w: jax.jit(jax.grad(function, (0, 1)))(x, w), normal(*IMAGES), normal(*FILTERS))


def test_a_loop_whose_carry_is_donated():
    def run(x, w):
        step = jax.jit(layer, donate_argnums=0)
        y = step(x + 0, w)
        for _ in range(3):
            y = step(y, w)
        return y

    both(run, normal(*IMAGES), normal(*FILTERS))


def test_parameters_that_are_donated():
    def run(x, w):
        step = jax.jit(lambda w, x: w - 0.1 * jax.grad(loss, 1)(x, w), donate_argnums=0)
        w = w + 0
        for _ in range(3):
            w = step(w, x)
        return w

    both(run, normal(*IMAGES), normal(*FILTERS))


@pytest.mark.parametrize("name", ["relu", "softmax", "tanh"])
def test_an_operand_that_is_donated_to_an_elementwise_kernel(name):
    function = jnp.tanh if name == "tanh" else getattr(jax.nn, name)
    called = getattr(bj, name)
    x = normal(3, 5)
    wanted = function(x)
    near(jax.jit(lambda x: called(x), donate_argnums=0)(x + 0), wanted, 1e-6)


def test_pmap():
    both(lambda x, w: jax.pmap(conv, in_axes=(0, None))(x[None], w), normal(*IMAGES),
         normal(*FILTERS))  # fmt: skip


def test_a_hessian_either_way():
    x, w = normal(1, 2, 5, 5), normal(3, 2, 3, 3, seed=1)

    def scaled(v):
        return loss(v[0] * x, v[1] * w)

    def run(v):
        return jax.jit(lambda v: (jax.hessian(scaled)(v), jax.jacrev(jax.grad(scaled))(v)))(v)

    both(run, jnp.array([0.5, -1.5]), tolerance=1e-3)


@pytest.mark.parametrize("dtype, tolerance", [("float16", 1e-2), ("bfloat16", 6e-2)])
def test_gradients_in_halves(dtype, tolerance):
    x, w = normal(*IMAGES).astype(dtype), normal(*FILTERS).astype(dtype)
    both(jax.jit(jax.grad(loss, (0, 1))), x, w, tolerance=tolerance, dtype=dtype)


def test_gradients_of_gradients_in_double_precision():
    with jax.enable_x64(True):
        x, w = normal(*IMAGES, dtype=jnp.float64), normal(*FILTERS, dtype=jnp.float64)

        def curve(x, w):
            return jnp.square(jax.grad(loss, 1)(x, w)).sum()

        both(lambda x, w: jax.jit(jax.grad(curve, (0, 1)))(x, w), x, w, tolerance=1e-11)
        both(lambda x, w: jax.grad(loss, (0, 1))(x, w), normal(*IMAGES), normal(*FILTERS),
             dtype="float32")  # fmt: skip


@pytest.mark.parametrize(
    "images, filters",
    [((0, 4, 8, 8), FILTERS), (IMAGES, (0, 4, 3, 3)), ((2, 0, 8, 8), (4, 0, 3, 3)),
     ((2, 4, 0, 8), FILTERS)],
    ids=["batch", "filters", "channels", "rows"],
)  # fmt: skip
def test_nothing_of_something(images, filters):
    x, w = jnp.ones(images), jnp.ones(filters)
    both(lambda x, w: [conv(x, w), *jax.jit(jax.grad(loss, (0, 1)))(x, w)], x, w, own=0)


def test_an_empty_batch_of_pooling():
    def run(x):
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")

    both(run, jnp.ones((0, 2, 4, 4)), own=0)


def test_negative_padding_is_jaxs():
    def run(x, w):
        return jax.grad(lambda x, w: jnp.sin(conv(x, w, [(-1, 0), (-2, 1)])).sum(), (0, 1))(x, w)

    both(run, normal(*IMAGES), normal(*FILTERS), own=0)


def test_padding_far_beyond_the_window():
    """By NumPy: the gradient by data of JAX 0.10.2 on the CPU is wrong here."""
    x, w = normal(*IMAGES), normal(*FILTERS, seed=1)
    high, wide = (30, 20), (5, 0)
    y, back = jax.vjp(lambda x, w: bj.convolution(x, w, padding=(high, wide)), x, w)
    dy = normal(*y.shape, seed=2)
    whole = np.pad(np.asarray(x, np.float64), ((0, 0), (0, 0), high, wide))
    dw, d_whole = np.zeros(FILTERS), np.zeros(whole.shape)
    total = np.zeros(y.shape)
    for r, s in np.ndindex(3, 3):
        part = np.s_[:, :, r : r + y.shape[2], s : s + y.shape[3]]
        tap = np.asarray(w, np.float64)[:, :, r, s]
        total += np.einsum("ncpq,kc->nkpq", whole[part], tap)
        dw[:, :, r, s] = np.einsum("nkpq,ncpq->kc", dy, whole[part])
        d_whole[part] += np.einsum("nkpq,kc->ncpq", dy, tap)
    dx = d_whole[:, :, high[0] : high[0] + 8, wide[0] : wide[0] + 8]
    for ours, wanted in zip((y, *back(dy)), (total, dx, dw)):
        near(ours, wanted, 1e-5)


def test_errors_of_pads_and_types_are_jaxs_own():
    x, w = normal(*IMAGES), normal(*FILTERS)
    calls = [
        lambda: conv(x, w, [(-7, -3), (0, 0)]),
        lambda: conv(x, w, "SOME"),
        lambda: conv(x, w.astype(jnp.bfloat16)),
        lambda: lax.conv_general_dilated(x, w, (1, 1), "SAME", rhs_dilation=(-1, 1)),
        lambda: lax.conv_general_dilated(x, w, (1, 1), "SAME", feature_group_count=3),
    ]
    for call in calls:
        with pytest.raises(Exception) as native:
            call()
        with bj.enable(), pytest.raises(type(native.value)) as patched:
            call()
        assert str(patched.value).splitlines()[0] == str(native.value).splitlines()[0]
