"""`bedstone demo --framework paddle`: LeNet on scikit-learn's digits, trained by PaddlePaddle alone
and again on bedstone's kernels.

The network, the data and the training are the same function; only the second run is inside
`enable()`. Losses and accuracies must agree.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

from bedstone.frameworks import digits

EPOCHS, BATCH = 3, 64
NEEDS = "pip install paddlepaddle scikit-learn"
SETTLE_SECONDS = 0.05  # PaddlePaddle's threads go on spinning after a run


def main(args: argparse.Namespace) -> int:
    """Train twice and compare; 1 if the runs differ, 2 if a package is missing."""
    try:
        images, labels = digits.load()
        import paddle
    except ImportError as error:
        print(f"the demonstration needs {NEEDS} ({error})", file=sys.stderr)
        return 2
    import bedstone.frameworks.paddle as on_bedstone

    # PaddlePaddle has one thread, and set OMP_NUM_THREADS to 1, unless it is told.
    threads = int(os.environ.get("BEDSTONE_NUM_THREADS") or os.cpu_count() or 1)
    paddle.base.core.set_num_threads(threads)
    print(f"LeNet on {len(images)} digits of 32 x 32, {EPOCHS} epochs, {threads} threads")
    with on_bedstone.enable():
        _train(images[:BATCH], labels[:BATCH], 1)  # compile, outside the clock
    native = _timed(images, labels)
    on_bedstone.reset()
    with on_bedstone.enable():
        ours = _timed(images, labels)
    print(on_bedstone.report())
    return 0 if digits.compare("PaddlePaddle", native, ours) else 1


def _timed(images: Any, labels: Any) -> digits.Run:
    """Losses of the epochs, accuracy on what was held out, seconds."""
    time.sleep(SETTLE_SECONDS)
    start = time.perf_counter()
    losses, accuracy = _train(images, labels, EPOCHS)
    return losses, accuracy, time.perf_counter() - start


def _train(images: Any, labels: Any, epochs: int) -> tuple[list[float], float]:
    """Ordinary PaddlePaddle: mean losses of the epochs, accuracy on the last fifth."""
    import paddle
    from paddle import nn

    paddle.seed(1)
    # All smooth: between two values that are nearly the same, rounding decides which is the
    # maximum, and from there on two trainings part.
    network = nn.Sequential(
        nn.Conv2D(1, 20, 5), nn.Tanh(), nn.AvgPool2D(2),
        nn.Conv2D(20, 50, 5), nn.Tanh(), nn.AvgPool2D(2),
        nn.Flatten(), nn.Linear(1250, 200), nn.Tanh(), nn.Linear(200, 10),
    )  # fmt: skip
    optimizer = paddle.optimizer.SGD(0.03, parameters=network.parameters())
    held = len(images) // 5
    x, y = paddle.to_tensor(images), paddle.to_tensor(labels)
    losses = []
    for _ in range(epochs):
        total = 0.0
        for first in range(0, len(images) - held, BATCH):
            last = min(first + BATCH, len(images) - held)
            loss = nn.functional.cross_entropy(network(x[first:last]), y[first:last])
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            total += float(loss) * (last - first)
        losses.append(total / (len(images) - held))
    network.eval()
    with paddle.no_grad():
        answers = network(x[-held:]).argmax(1)
    return losses, float((answers == y[-held:]).astype("float32").mean())
