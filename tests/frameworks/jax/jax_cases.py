"""What the tests of bedstone under JAX share."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")
bj = pytest.importorskip("bedstone.frameworks.jax")

import jax.numpy as jnp  # noqa: E402

if jax.default_backend() != "cpu":
    pytest.skip("made for JAX's CPU backend", allow_module_level=True)


@pytest.fixture(autouse=True)
def clean():
    """No counts from before, and no patch left behind."""
    bj.reset()
    yield
    assert not bj.enabled()


def normal(*shape, dtype=jnp.float32, seed=0):
    """Normal numbers."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def near(a, b, tolerance):
    """Equal within a share of the largest element (at least of 1)."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape
    if a.size:
        assert np.abs(a - b).max() <= tolerance * max(np.abs(b).max(), 1.0)
