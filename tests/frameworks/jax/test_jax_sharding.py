"""Convolutions of sharded arrays, on four devices that are made of one CPU."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("jax")

SETUP = """
    import numpy as np, jax, jax.numpy as jnp
    from jax import lax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    import bedstone.frameworks.jax as bj

    mesh = Mesh(np.array(jax.devices()), ("d",))
    assert len(jax.devices()) == 4
    random = np.random.default_rng(0)
    x = jnp.asarray(random.standard_normal((8, 4, 12, 6)), jnp.float32)
    w = jnp.asarray(random.standard_normal((6, 4, 3, 3)), jnp.float32)

    def close(a, b):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-3, atol=1e-3)
"""
BATCH = """
    def loss(x, w):
        y = bj.convolution(x, w, padding="SAME")
        return jnp.sin(y).sum(), y

    step = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (value, y), (dx, dw) = step(x, w)
    put = jax.device_put(x, NamedSharding(mesh, P("d")))
    whole = jax.device_put(w, NamedSharding(mesh, P()))
    (shared, ys), (dxs, dws) = step(put, whole)
    close(shared, value), close(ys, y), close(dxs, dx), close(dws, dw)
    assert ys.sharding.spec[0] == "d" and dxs.sharding.spec[0] == "d"
    text = step.lower(put, whole).compile().as_text()
    assert "all-gather" not in text and "all-reduce" in text
    print("same")
"""
ROWS = """
    def rows(x, w):
        return bj.spatial_convolution(x, w, "d")

    spec = P(None, None, "d")
    cut = jax.jit(jax.shard_map(rows, mesh=mesh, in_specs=(spec, P()), out_specs=spec))
    close(cut(x, w), lax.conv(x, w, (1, 1), "SAME"))
    ours = jax.grad(lambda x, w: jnp.sin(cut(x, w)).sum(), (0, 1))(x, w)
    wanted = jax.grad(lambda x, w: jnp.sin(lax.conv(x, w, (1, 1), "SAME")).sum(), (0, 1))(x, w)
    close(ours[0], wanted[0]), close(ours[1], wanted[1])
    for padding in (((2, 0), (1, 1)), ((0, 2), (0, 0))):
        cut = jax.shard_map(
            lambda x, w: bj.spatial_convolution(x, w, "d", padding=padding),
            mesh=mesh, in_specs=(spec, P()), out_specs=spec,
        )
        close(cut(x, w), lax.conv_general_dilated(x, w, (1, 1), padding))
    print("same")
"""
FUNCTIONS = """
    cases = [  # what, how x is cut, whether the gradient needs a gathering
        (lambda x: bj.max_pool(x, 2), P("d"), False),
        (lambda x: bj.avg_pool(x, 3, 2, "SAME"), P(None, "d"), False),
        (bj.gelu, P(None, None, "d"), False),
        (lambda x: bj.softmax(x, 1), P(None, None, "d"), False),
        (bj.log_softmax, P("d"), False),
        (lambda x: bj.softmax(x, 1), P(None, "d"), True),
        (lambda x: bj.max_pool(x, 2), P(None, None, "d"), True),
    ]
    for function, spec, gathers in cases:
        step = jax.jit(jax.grad(lambda x: jnp.sin(function(x)).sum()))
        put = jax.device_put(x, NamedSharding(mesh, spec))
        close(step(put), step(x))
        text = step.lower(put).compile().as_text()
        assert ("all-gather" in text) is gathers, (spec, text)
        if not gathers:
            assert tuple(step(put).sharding.spec)[: len(spec)] == tuple(spec), spec
    cut = jax.shard_map(lambda x: bj.softmax(bj.relu(bj.max_pool(x, 2)), 1), mesh=mesh,
                        in_specs=P("d"), out_specs=P("d"))
    close(cut(x), bj.softmax(bj.relu(bj.max_pool(x, 2)), 1))
    print("same")
"""


@pytest.mark.parametrize("body", [BATCH, ROWS, FUNCTIONS], ids=["batch", "rows", "functions"])
def test_four_devices(body):
    flags = "--xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SETUP) + textwrap.dedent(body)],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "same" in done.stdout, done.stderr[-3000:]


def test_paddings_that_do_not_fit():
    import jax.numpy as jnp

    from bedstone import InvalidDescriptor
    from bedstone.frameworks.jax import spatial_convolution

    x, w = jnp.ones((1, 1, 4, 4)), jnp.ones((1, 1, 3, 3))
    with pytest.raises(InvalidDescriptor, match="padding"):
        spatial_convolution(x, w, "d", padding=((1, 0), (0, 0)))
    with pytest.raises(InvalidDescriptor, match="rows on each device"):
        spatial_convolution(x, jnp.ones((1, 1, 11, 3)), "d")
