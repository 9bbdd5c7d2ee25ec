"""`bedstone demo --framework paddle`: LeNet on scikit-learn's digits, trained by PaddlePaddle alone
and again on bedstone's kernels.

The network, the data and the training are the same function; only the second run is inside
`enable()`. Losses and accuracies must agree.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

LOSS_TOLERANCE = 1e-4  # relative: rounding differs in every step and adds up over an epoch
EPOCHS, BATCH = 3, 64
ZOOM = 4  # the digits have 8 x 8 pixels; LeNet reads 32 x 32
SETTLE_SECONDS = 0.05  # PaddlePaddle's threads go on spinning after a run


def main(args: argparse.Namespace) -> int:
    """Train twice and compare; 1 if the runs differ."""
    try:
        import paddle
    except ImportError:
        print("PaddlePaddle is not installed: pip install paddlepaddle")
        return 2
    import bedstone
    import bedstone.frameworks.paddle as on_bedstone

    # PaddlePaddle sets OMP_NUM_THREADS to 1 at its import, which bedstone reads later.
    threads = int(os.environ.get("BEDSTONE_NUM_THREADS") or os.cpu_count() or 1)
    bedstone.set_num_threads(threads)
    paddle.base.core.set_num_threads(threads)
    images, labels = _digits()
    print(f"LeNet on {len(images)} digits of 32 x 32, {EPOCHS} epochs, {threads} threads")
    with on_bedstone.enable():
        _train(images[:BATCH], labels[:BATCH], 1)  # compile, outside the clock
    native = _timed(images, labels)
    on_bedstone.reset()
    with on_bedstone.enable():
        ours = _timed(images, labels)
    print(on_bedstone.report())
    print(f"\n{'':22} {'PaddlePaddle':>14} {'on bedstone':>14}")
    for i, (a, b) in enumerate(zip(native[0], ours[0]), 1):
        print(f"loss, epoch {i:<10} {a:14.6f} {b:14.6f}")
    print(f"{'accuracy':22} {native[1]:14.4f} {ours[1]:14.4f}")
    print(f"{'seconds':22} {native[2]:14.2f} {ours[2]:14.2f}   {native[2] / ours[2]:.2f} times")
    same = all(abs(a - b) <= LOSS_TOLERANCE * abs(a) for a, b in zip(native[0], ours[0]))
    same = same and native[1] == ours[1]
    print("the same losses and accuracy" if same else "DIFFERENT")
    return 0 if same else 1


def _timed(images: Any, labels: Any) -> tuple[list[float], float, float]:
    """Losses of the epochs, accuracy on what was held out, seconds."""
    time.sleep(SETTLE_SECONDS)
    start = time.perf_counter()
    losses, accuracy = _train(images, labels, EPOCHS)
    return losses, accuracy, time.perf_counter() - start


def _digits() -> tuple[Any, Any]:
    """The digits, enlarged, in an order of their own; drawn strokes where scikit-learn is not
    installed."""
    import numpy as np

    random = np.random.default_rng(0)
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        labels = random.integers(0, 10, 1797)
        images = random.random((len(labels), 8, 8)) * 4
        for image, label in zip(images, labels):  # a bar whose place and direction is the label
            image[label % 5 : label % 5 + 3, :] += 8 * (label < 5)
            image[:, label % 5 : label % 5 + 3] += 8 * (label >= 5)
        print("scikit-learn is not installed: bars in the place of its digits")
    else:
        digits = load_digits()
        images, labels = digits.images, digits.target
    order = random.permutation(len(labels))
    large = np.kron(images[order], np.ones((ZOOM, ZOOM)))[:, None] / 16
    return large.astype(np.float32), labels[order].astype(np.int64)


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
