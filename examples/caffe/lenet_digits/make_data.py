"""Write scikit-learn's digits as two LMDB databases of 28x28 images, for train_test.prototxt.

    python examples/caffe/lenet_digits/make_data.py

The 8x8 images come with the package scikit-learn (no download); a fifth of them are the test set.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from bedstone.frameworks.caffe.lmdb_data import write_lmdb

HERE = Path(__file__).parent
SIZE = 28
TEST_IMAGES = 360


def main() -> None:
    digits = load_digits()
    grey = (digits.images * (255 / 16)).astype(np.uint8)
    large = [
        Image.fromarray(image).resize((SIZE, SIZE), Image.Resampling.BILINEAR) for image in grey
    ]
    images = np.stack([np.asarray(image)[None] for image in large])  # N, 1, H, W
    order = np.random.default_rng(0).permutation(len(images))
    for name, part in (("test", order[:TEST_IMAGES]), ("train", order[TEST_IMAGES:])):
        path = HERE / f"digits_{name}_lmdb"
        write_lmdb(path, images[part], digits.target[part])
        print(f"{path}: {len(part)} images")


if __name__ == "__main__":
    main()
