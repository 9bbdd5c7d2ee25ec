"""Write crops of scikit-learn's two sample photographs as image files, and CaffeNet on them.

    python examples/caffe/caffenet/make_images.py
    bedstone caffe train --solver examples/caffe/caffenet/images/solver.prototxt

The photographs (a temple, a flower) come with the package scikit-learn (no download); a crop's
label says of which one it is. Beside the crops lie their list, train_val.prototxt with an ImageData
layer in place of the random data, and a solver of ten iterations; the loss falls from about
ln 1000. The learning rate is small beside the usual 0.01: with two labels all images pull one way.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from google.protobuf import text_format
from PIL import Image
from sklearn.datasets import load_sample_images

from bedstone.frameworks.caffe import io, schema

HERE = Path(__file__).parent
SIZE, CROP = 256, 227
MEAN = (104, 117, 123)  # blue, green, red
CROPS, BATCH, ITERATIONS = 64, 16, 10


def write_crops(folder: Path, crops: int) -> Path:
    """So many crops, of either photograph in turns, and the list of their names and labels."""
    photographs, rng = load_sample_images().images, np.random.default_rng(0)
    lines = []
    for i in range(crops):
        label = i % len(photographs)
        photograph = photographs[label]
        top, left = (rng.integers(0, n - SIZE + 1) for n in photograph.shape[:2])
        name = f"{i:03}.png"
        Image.fromarray(photograph[top : top + SIZE, left : left + SIZE]).save(folder / name)
        lines.append(f"{name} {label}\n")
    path = folder / "list.txt"
    path.write_text("".join(lines), encoding="utf-8")
    return path


def write_all(folder: Path, crops: int = CROPS, batch: int = BATCH) -> Path:
    """Crops, network and solver; returns the solver's path."""
    folder.mkdir(parents=True, exist_ok=True)
    images = schema.LayerParameter(name="data", type="ImageData", top=["data", "label"])
    given = images.image_data_param
    given.source, given.root_folder = str(write_crops(folder, crops)), f"{folder}/"
    given.batch_size, given.shuffle = batch, True
    images.transform_param.crop_size, images.transform_param.mirror = CROP, True
    images.transform_param.mean_value.extend(MEAN)
    net = io.read_net(HERE / "train_val.prototxt")
    layers = [images, *(each for each in net.layer if each.type != "DummyData")]
    for layer in layers:
        layer.ClearField("bedstone_place")
    content = schema.NetParameter(name=net.name, layer=layers)
    (folder / "train_val.prototxt").write_text(text_format.MessageToString(content), "utf-8")
    solver = schema.SolverParameter(
        net=str(folder / "train_val.prototxt"), base_lr=0.0003, lr_policy="fixed", momentum=0.9,
        weight_decay=0.0005, max_iter=ITERATIONS, display=1, random_seed=1,
        snapshot_prefix=str(folder / "caffenet"),
    )  # fmt: skip
    (folder / "solver.prototxt").write_text(text_format.MessageToString(solver), "utf-8")
    return folder / "solver.prototxt"


def main() -> None:
    path = write_all(HERE / "images")
    print(f"{path.parent}: {CROPS} crops\n{path}: {ITERATIONS} iterations of {BATCH} images")


if __name__ == "__main__":
    main()
