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
        (lambda x: bj.max_pool(x, 2), P(None, None, "d"), True),  # 6 rows for 4
        (lambda x: bj.max_pool(x, 3), P(None, None, "d"), False),
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


CUTS = """
    # images, filters, strides, paddings, dilations, groups, layouts
    cases = [
        ((2, 4, 16, 8), (6, 4, 3, 3), (1, 1), "SAME", (1, 1), 1, None),
        ((2, 4, 16, 8), (6, 4, 3, 3), (2, 2), "SAME", (1, 1), 1, None),
        ((2, 4, 16, 8), (6, 4, 3, 3), (2, 1), ((1, 1), (1, 1)), (1, 1), 1, None),
        ((2, 4, 16, 8), (6, 4, 3, 3), (1, 1), "SAME", (2, 2), 1, None),
        ((2, 4, 16, 8), (6, 4, 3, 3), (1, 1), ((4, 0), (0, 2)), (2, 1), 1, None),
        ((2, 4, 24, 8), (6, 4, 4, 3), (3, 1), ((0, 2), (1, 1)), (1, 1), 1, None),
        ((2, 4, 16, 8), (6, 4, 1, 1), (2, 2), "VALID", (1, 1), 1, None),
        ((2, 4, 16, 8), (6, 4, 2, 2), (2, 2), "VALID", (1, 1), 1, None),
        ((2, 4, 16, 8), (6, 2, 3, 3), (1, 1), "SAME", (1, 1), 2, None),
        ((2, 4, 16, 8), (4, 1, 5, 3), (1, 1), "SAME", (1, 1), 4, None),
        ((2, 16, 8, 4), (3, 3, 4, 6), (2, 1), "SAME", (1, 1), 1, ("NHWC", "HWIO", "NHWC")),
        ((2, 4, 16), (6, 4, 3), (1,), "SAME", (1,), 1, None),
    ]
"""
SPATIAL = (
    CUTS
    + """
    grid = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
    two = Mesh(np.array(jax.devices()[:2]), ("d",))
    for images, filters, stride, padding, dilation, groups, layout in cases:
        x = jnp.asarray(random.standard_normal(images), jnp.float32)
        w = jnp.asarray(random.standard_normal(filters), jnp.float32)
        rows = 1 if layout else 2

        def whole(x, w):
            return lax.conv_general_dilated(x, w, stride, padding, rhs_dilation=dilation,
                                            feature_group_count=groups, dimension_numbers=layout)

        meshes = [(mesh, "d", ["d"])]
        if len(stride) == 2:
            meshes.append((grid, ["a", "b"], ["a", "b"]))
        else:
            meshes.append((two, "d", ["d"]))
        for over, names, axes in meshes:
            spec = P(*([None] * rows), *axes)
            cut = jax.shard_map(
                lambda x, w: bj.spatial_convolution(
                    x, w, names, stride, padding, dilation=dilation, groups=groups,
                    dimension_numbers=layout),
                mesh=over, in_specs=(spec, P()), out_specs=spec)
            ours, wanted = (
                jax.jit(lambda x, w: (f(x, w), jax.vjp(f, x, w)[1](jnp.sin(f(x, w)))))(x, w)
                for f in (cut, whole))
            for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(wanted)):
                close(one, other)
    print("same")
"""
)
PLAIN = (
    CUTS
    + """
    for images, filters, stride, padding, dilation, groups, layout in cases:
        x = jnp.asarray(random.standard_normal(images), jnp.float32)
        w = jnp.asarray(random.standard_normal(filters), jnp.float32)
        rows = 1 if layout else 2
        how = dict(dilation=dilation, groups=groups, dimension_numbers=layout)

        def loss(x, w):
            y = bj.convolution(x, w, stride, padding, **how)
            return jnp.sin(y).sum(), y

        step = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
        (value, y), (dx, dw) = step(x, w)
        spec = P(*([None] * rows), "d")
        put = jax.device_put(x, NamedSharding(mesh, spec))
        kept = jax.device_put(w, NamedSharding(mesh, P()))
        (shared, ys), (dxs, dws) = step(put, kept)
        close(shared, value), close(ys, y), close(dxs, dx), close(dws, dw)
        assert ys.sharding.spec[rows] == "d" and dxs.sharding.spec[rows] == "d", images
        text = step.lower(put, kept).compile().as_text()
        assert "all-gather" not in text and "all-reduce" in text, (images, filters, stride)
    print("same")
"""
)
UNEVEN = """
    # Gathered: rows or groups that the devices do not share evenly, parts shorter than a halo.
    for rows, window, stride in ((20, 3, 2), (8, 7, 1), (12, 3, 5)):
        filters = (6, 4, window, 3)
        x = jnp.asarray(random.standard_normal((2, 4, rows, 6)), jnp.float32)
        w = jnp.asarray(random.standard_normal(filters), jnp.float32)
        step = jax.jit(jax.grad(
            lambda x, w: jnp.sin(bj.convolution(x, w, stride, "SAME")).sum(), (0, 1)))
        put = jax.device_put(x, NamedSharding(mesh, P(None, None, "d")))
        for ours, wanted in zip(step(put, w), step(x, w)):
            close(ours, wanted)
    x = jnp.asarray(random.standard_normal((2, 8, 8, 6)), jnp.float32)
    w = jnp.asarray(random.standard_normal((16, 4, 3, 3)), jnp.float32)
    f = jax.jit(lambda x, w: bj.convolution(x, w, padding="SAME", groups=2))
    for of_x, of_w in ((P(None, "d"), P()), (P(), P("d"))):
        put = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((x, of_x), (w, of_w))]
        close(f(*put), f(x, w))
    # Channels: a forward pass sums over the devices; filters need no sum.
    x = jnp.asarray(random.standard_normal((2, 4, 8, 6)), jnp.float32)
    w = jnp.asarray(random.standard_normal((8, 4, 3, 3)), jnp.float32)
    f = jax.jit(lambda x, w: bj.convolution(x, w, padding="SAME"))
    for of_x, of_w in ((P(None, "d"), P(None, "d")), (P(), P("d"))):
        put = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((x, of_x), (w, of_w))]
        close(f(*put), f(x, w))
        assert "all-gather" not in f.lower(*put).compile().as_text()
    print("same")
"""


@pytest.mark.parametrize(
    "body",
    [BATCH, ROWS, FUNCTIONS, SPATIAL, PLAIN, UNEVEN],
    ids=["batch", "rows", "functions", "cuts", "plain-jit", "uneven"],
)
def test_four_devices(body):
    flags = "--xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SETUP) + textwrap.dedent(body)],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "same" in done.stdout, done.stderr[-3000:]


def test_paddings_that_do_not_fit():
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    from bedstone import InvalidDescriptor
    from bedstone.frameworks.jax import spatial_convolution

    mesh, spec = jax.sharding.Mesh(jax.devices()[:1], ("d",)), P(None, None, "d")

    def run(x, w, **how):
        def rows(x, w):
            return spatial_convolution(x, w, "d", **how)

        return jax.shard_map(rows, mesh=mesh, in_specs=(spec, P()), out_specs=spec)(x, w)

    x, w = jnp.ones((1, 1, 4, 4)), jnp.ones((1, 1, 3, 3))
    with pytest.raises(InvalidDescriptor, match="padding"):
        run(x, w, padding=((1, 0), (0, 0)))
    with pytest.raises(InvalidDescriptor, match="padding"):
        run(x, w, stride=3)
    with pytest.raises(InvalidDescriptor, match="on each device"):
        run(x, jnp.ones((1, 1, 11, 3)))
    with pytest.raises(InvalidDescriptor, match="1 to 3 spatial"):
        run(jnp.ones((1, 1, 4)).reshape(1, 1, 4, 1, 1, 1), jnp.ones((1,) * 6))
