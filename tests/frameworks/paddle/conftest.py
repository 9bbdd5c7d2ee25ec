"""What the tests of PaddlePaddle share: a network that is trained, and programs of their own.

(PaddlePaddle is imported late: without it the tests are skipped, and this file is read.)
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def clean():
    import bedstone.frameworks.paddle as on_bedstone

    on_bedstone.reset()
    yield
    assert on_bedstone.patched() == ()


@pytest.fixture
def images():
    """16 pictures and their labels."""
    import paddle

    random = np.random.default_rng(0)
    return paddle.to_tensor(random.random((16, 1, 12, 12), np.float32)), paddle.arange(16) % 10


@pytest.fixture
def losses(images):
    """The function that trains a small network, as `wrap` makes it, with every kind of layer that
    is replaced, and returns each step's loss."""
    import paddle
    from paddle import nn

    class Network(nn.Layer):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2D(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2D(2),
                nn.Conv2D(12, 12, 3, padding="SAME", groups=12), nn.Conv2D(12, 16, 1), nn.Tanh(),
                nn.AvgPool2D(2), nn.Conv2DTranspose(16, 8, 3, stride=2), nn.Sigmoid(),
                nn.AdaptiveAvgPool2D(1), nn.Flatten(), nn.Linear(8, 10),
            )  # fmt: skip

        def forward(self, x):
            return self.body(x)

    def train(steps=8, wrap=lambda network: network):
        paddle.seed(5)
        network = wrap(Network())
        optimizer = paddle.optimizer.Adam(3e-3, parameters=network.parameters())
        x, labels = images
        found = []
        for _ in range(steps):
            loss = nn.functional.cross_entropy(network(x), labels)
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            found.append(float(loss))
        return found

    return train


@pytest.fixture
def run():
    """The function that runs a program in a new process, and returns what it prints and its
    errors."""

    def run_it(program, **environment):
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("BEDSTONE_", "OMP_"))}
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**kept, **environment}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.split(), done.stderr

    return run_it
