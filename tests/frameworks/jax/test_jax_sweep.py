"""Convolutions of any shape, dimension numbers, strides, paddings, dilations and groups, and all
three directions' derivatives, against jax.lax."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")
hypothesis = pytest.importorskip("hypothesis")

import jax.numpy as jnp  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from jax import lax  # noqa: E402
from jax.test_util import check_grads  # noqa: E402
from jax_cases import bj, clean, near, normal  # noqa: E402, F401 (clean: of every test)

from bedstone.frameworks.jax import primitives  # noqa: E402
from bedstone.frameworks.jax.rules import bind  # noqa: E402

EXAMPLES = 30  # each compiles three kernels
TOLERANCE = 1e-4
LETTERS = "HWD"


@st.composite
def convolutions(draw):
    """(images' shape, filters' shape, the other arguments of conv_general_dilated)."""
    axes = draw(st.integers(1, 3))
    small = st.integers(1, 3)
    groups, inner, outer = draw(small), draw(small), draw(small)
    space = LETTERS[:axes]
    window = [draw(small) for _ in space]
    dilations = [draw(st.integers(1, 2)) for _ in space]
    padding = draw(st.sampled_from(["SAME", "VALID", None]))
    if padding is None:
        padding = [(draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in space]
    sizes = [(r - 1) * d + 1 + draw(st.integers(0, 4)) for r, d in zip(window, dilations)]
    words = [draw(st.permutations(list(letters + space))) for letters in ("NC", "OI", "NC")]
    x = {"N": draw(small), "C": groups * inner, **dict(zip(space, sizes))}
    w = {"O": groups * outer, "I": inner, **dict(zip(space, window))}
    return (
        tuple(x[a] for a in words[0]),
        tuple(w[a] for a in words[1]),
        {
            "window_strides": [draw(small) for _ in space],
            "padding": padding,
            "rhs_dilation": dilations,
            "feature_group_count": groups,
            "dimension_numbers": tuple("".join(word) for word in words),
        },
    )


@hypothesis.settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, database=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)  # fmt: skip
@hypothesis.given(convolutions())
def test_any_convolution_is_jaxs(case):
    images, filters, how = case
    x, w = normal(*images), normal(*filters, seed=1)

    def run(x, w):
        y, back = jax.vjp(lambda x, w: lax.conv_general_dilated(x, w, **how), x, w)
        return y, *back(jnp.cos(y))

    native = jax.jit(run)(x, w)
    bj.reset()
    with bj.enable():
        ours = jax.jit(run)(x, w)
    assert bj.report().own_calls, bj.report()
    for a, b in zip(ours, native, strict=True):
        near(a, b, TOLERANCE)


@pytest.mark.parametrize("direction", ["forward", "data", "filter"])
@pytest.mark.parametrize("groups, stride", [(1, 1), (2, 2)])
def test_every_direction_has_derivatives(direction, groups, stride):
    """Each is bilinear, and its derivatives are the two others."""
    x, w = normal(2, 4, 6, 5), normal(4, 4 // groups, 3, 3, seed=1) / 4
    numbers = lax.conv_dimension_numbers(x.shape, w.shape, None)
    how = primitives.How((stride,) * 2, ((1, 1),) * 2, (1, 1), groups, *map(tuple, numbers))
    dy = normal(*how.y_shape(x.shape, w.shape), seed=2)
    made, operands, shape = {
        "forward": (primitives.forward_p, (x, w), dy.shape),
        "data": (primitives.data_p, (dy, w), x.shape),
        "filter": (primitives.filter_p, (x, dy), w.shape),
    }[direction]

    def run(a, b):
        return bind(made, a, b, how=how, shape=shape)

    check_grads(run, operands, order=2, modes=["fwd", "rev"], atol=0.05, rtol=0.05)
    check_grads(jax.jit(run), operands, order=1, modes=["fwd", "rev"], atol=0.05, rtol=0.05)
    several = jax.vmap(run, (0, None))(jnp.stack([operands[0], -operands[0]]), operands[1])
    assert np.allclose(several[0], -several[1], atol=1e-5)
    assert np.allclose(several[0], run(*operands), atol=1e-4)
