"""`bedstone demo --framework jax`: a small network on scikit-learn's digits, trained in plain JAX
and again on bedstone's convolutions. Losses and accuracies must agree.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from bedstone.frameworks import digits

EPOCHS, BATCH, RATE = 3, 64, 0.1
HELD_OUT = 297  # of 1,797
NEEDS = "pip install jax scikit-learn"


def main(args: argparse.Namespace) -> int:
    """Train twice and compare; 1 if the runs differ, 2 if a package is missing."""
    try:
        images, labels = digits.load()
        import jax
    except ImportError as error:
        print(f"the demonstration needs {NEEDS} ({error})", file=sys.stderr)
        return 2
    import bedstone.frameworks.jax as on_bedstone

    print(f"{len(images)} digits of 32 x 32, {EPOCHS} epochs in batches of {BATCH}")
    with on_bedstone.enable():
        _train(images[:BATCH], labels[:BATCH])  # compile the kernels, outside the clock
    native = _timed(images, labels)
    on_bedstone.reset()
    with on_bedstone.enable():
        ours = _timed(images, labels)
    print(on_bedstone.report())
    return 0 if digits.compare(f"JAX {jax.__version__}", native, ours) else 1


def _parameters() -> list[Any]:
    import jax

    keys = jax.random.split(jax.random.PRNGKey(0), 3)
    shapes = ((16, 1, 5, 5), (32, 16, 5, 5), (32 * 8 * 8, 10))
    scales = (0.2, 0.05, 0.02)
    return [s * jax.random.normal(k, shape) for k, shape, s in zip(keys, shapes, scales)]


def _scores(parameters: list[Any], x: Any) -> Any:
    import jax
    from jax import lax

    # All smooth: at the kinks of a ReLU or a maximum two roundings would part for good.
    for w in parameters[:2]:
        x = jax.numpy.tanh(lax.conv_general_dilated(x, w, (1, 1), "SAME"))
        window = (1, 1, 2, 2)
        x = lax.reduce_window(x, 0.0, lax.add, window, window, "VALID") / 4
    return x.reshape(x.shape[0], -1) @ parameters[2]


def _train(images: Any, labels: Any) -> tuple[list[float], float]:
    """Mean losses of the epochs, and the accuracy on what was held out."""
    import jax
    import jax.numpy as jnp

    def loss(parameters: list[Any], x: Any, t: Any) -> Any:
        return -jnp.take_along_axis(
            jax.nn.log_softmax(_scores(parameters, x)), t[:, None], 1
        ).mean()

    @jax.jit
    def step(parameters: list[Any], x: Any, t: Any) -> tuple[Any, list[Any]]:
        value, slopes = jax.value_and_grad(loss)(parameters, x, t)
        return value, [p - RATE * g for p, g in zip(parameters, slopes)]

    parameters, losses = _parameters(), []
    count = max(BATCH, len(images) - HELD_OUT) // BATCH
    for _ in range(EPOCHS):
        found = []
        for i in range(count):
            here = slice(i * BATCH, (i + 1) * BATCH)
            value, parameters = step(parameters, images[here], labels[here])
            found.append(value)
        losses.append(float(sum(map(float, found)) / len(found)))
    answers = jax.jit(_scores)(parameters, images[-HELD_OUT:]).argmax(1)
    return losses, float((answers == labels[-HELD_OUT:]).mean())


def _timed(images: Any, labels: Any) -> digits.Run:
    """What `_train` gives, and its seconds, compilation included."""
    start = time.perf_counter()
    losses, accuracy = _train(images, labels)
    return losses, accuracy, time.perf_counter() - start
