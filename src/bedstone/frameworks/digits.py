"""What the demonstrations that train share: scikit-learn's digits, and the table of two runs."""

from __future__ import annotations

from typing import Any

import numpy as np

ZOOM = 4  # the digits have 8 x 8 pixels; the networks read 32 x 32
SEED = 0
LOSS_TOLERANCE = 1e-4  # relative: rounding differs in every step and adds up over an epoch

# Mean losses of the epochs, accuracy on what was held out, seconds.
Run = tuple[list[float], float, float]


def load() -> tuple[Any, Any]:
    """1,797 images (N, 1, 32, 32), float32, and their labels, shuffled. ImportError without
    scikit-learn."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = np.kron(data.images / 16, np.ones((ZOOM, ZOOM)))[:, None]
    order = np.random.default_rng(SEED).permutation(len(images))
    return images[order].astype(np.float32), data.target[order].astype(np.int64)


def compare(framework: str, native: Run, ours: Run) -> bool:
    """Print both runs side by side; True if losses and accuracies agree."""
    print(f"\n{'':22} {framework:>14} {'on bedstone':>14}")
    for i, (a, b) in enumerate(zip(native[0], ours[0]), 1):
        print(f"loss, epoch {i:<10} {a:14.6f} {b:14.6f}")
    print(f"{'accuracy':22} {native[1]:14.4f} {ours[1]:14.4f}")
    print(f"{'seconds':22} {native[2]:14.2f} {ours[2]:14.2f}   {native[2] / ours[2]:.2f} times")
    same = all(abs(a - b) <= LOSS_TOLERANCE * abs(a) for a, b in zip(native[0], ours[0]))
    same = same and native[1] == ours[1]
    print("the same losses and accuracy" if same else "DIFFERENT")
    return same
