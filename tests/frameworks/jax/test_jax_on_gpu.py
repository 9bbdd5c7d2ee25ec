"""On a CUDA device: values and gradients by bedstone's handlers against NumPy's float64, replays,
and errors. (`pytest -m gpu`; skipped without a device.)"""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")
bj = pytest.importorskip("bedstone.frameworks.jax")

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() == "cpu", reason="JAX has no CUDA here"),
]
TOLERANCE = {"float32": 2e-5, "float64": 1e-12, "float16": 4e-3, "bfloat16": 3e-2}


def normal(*shape, dtype="float32", seed=0):
    numbers = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(numbers, dtype)


def compare(function, *operands, tolerance, calls=1):
    """The value and gradients, jitted inside `enable()`, against JAX on the CPU in float64."""

    def run(*operands):
        y, back = jax.vjp(function, *operands)
        return y, *back(jnp.cos(y))

    with bj.enable(only=bj.operators()):
        lowered = jax.jit(run).lower(*operands)
    assert lowered.as_text().count("custom_call @bedstone_cuda_") >= calls
    program = lowered.compile()
    found = program(*operands)
    again = program(*operands)
    with jax.enable_x64(True):
        wide = [jax.device_put(np.asarray(a, np.float64), jax.devices("cpu")[0]) for a in operands]
        wanted = jax.jit(run)(*wide)
    for one, other, exact in zip(found, again, wanted, strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other))
        a, b = np.asarray(one, np.float64), np.asarray(exact)
        assert np.isfinite(a).all()
        assert np.abs(a - b).max() <= tolerance * max(np.abs(b).max(), 1.0)


CONVOLUTIONS = [  # images, filters, strides, pads, dilations, groups, layouts
    ((2, 8, 14, 12), (16, 8, 3, 3), (1, 1), "SAME", (1, 1), 1, None),
    ((2, 8, 15, 12), (16, 8, 3, 3), (2, 1), ((1, 0), (2, 1)), (1, 1), 1, None),
    ((2, 14, 12, 16), (3, 3, 16, 32), (1, 1), "SAME", (1, 1), 1, ("NHWC", "HWIO", "NHWC")),
    ((2, 8, 14, 12), (16, 4, 3, 3), (1, 1), "SAME", (2, 2), 2, None),
    ((2, 8, 14, 12), (8, 1, 3, 3), (1, 1), "SAME", (1, 1), 8, None),
    ((2, 8, 20), (16, 8, 5), (2,), "VALID", (1,), 1, None),
    ((1, 4, 6, 7, 8), (8, 4, 3, 3, 3), (1, 1, 1), "SAME", (1, 1, 1), 1, None),
]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_convolutions(case, dtype):
    images, filters, strides, pads, dilations, groups, layout = case

    def function(x, w):
        return lax.conv_general_dilated(
            x, w, strides, pads, rhs_dilation=dilations, feature_group_count=groups,
            dimension_numbers=layout, precision="highest",
        )  # fmt: skip

    x, w = normal(*images, dtype=dtype), normal(*filters, dtype=dtype, seed=1) / 8
    compare(function, x, w, tolerance=TOLERANCE[dtype], calls=3)


def windows(op, init):
    return lambda x: lax.reduce_window(x, init, op, (1, 1, 3, 3), (1, 1, 2, 2), "SAME")


FUNCTIONS = {
    "max": windows(lax.max, -np.inf),
    "sum": windows(lax.add, 0.0),
    "softmax": lambda x: jax.nn.softmax(x, 1),
    "log_softmax": lambda x: jax.nn.log_softmax(x, 1),
    "tanh": lambda x: jnp.tanh(x),
    "relu": lambda x: jax.nn.relu(x),
    "gelu": lambda x: jax.nn.gelu(x),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name, dtype):
    compare(FUNCTIONS[name], normal(2, 5, 13, 12, dtype=dtype), tolerance=TOLERANCE[dtype])


def test_a_batch_and_a_gradient_of_a_gradient():
    def function(x, w):
        return lax.conv(x, w, (1, 1), "SAME", precision="highest")

    def curve(x, w):
        return jax.grad(lambda x, w: jnp.sin(function(x, w)).sum(), 1)(x, w)

    x, w = normal(3, 2, 4, 8, 8), normal(3, 6, 4, 3, 3, seed=1) / 6
    compare(jax.vmap(function), x, w, tolerance=TOLERANCE["float32"], calls=3)
    compare(curve, x[0], w[0], tolerance=TOLERANCE["float32"], calls=3)


def test_loops_that_xla_replays():
    """Many calls in one program, which XLA may put into a CUDA graph."""
    x, w = normal(2, 8, 8, 8), normal(8, 8, 3, 3, seed=1) / 9

    def run(x, w):
        for _ in range(12):
            x = jnp.tanh(lax.conv(x, w, (1, 1), "SAME", precision="highest"))
        return x

    native = jax.jit(run)(x, w)
    with bj.enable(only=bj.operators()):
        ours = jax.jit(run)
        for _ in range(5):
            found = ours(x, w)
    assert np.abs(np.asarray(found) - np.asarray(native)).max() <= 1e-4
