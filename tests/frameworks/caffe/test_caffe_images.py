"""CaffeNet, all 61 million weights, in training on photographs read from image files."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("google.protobuf")
pytest.importorskip("sklearn")
pytest.importorskip("PIL")

from bedstone.frameworks.caffe import Solver, io

SCRIPT = Path(__file__).parents[3] / "examples" / "caffe" / "caffenet" / "make_images.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_images", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_network_is_caffenet_on_image_files(script, tmp_path):
    path = script.write_all(tmp_path / "images", crops=4, batch=2)
    net = io.read_net(path.parent / "train_val.prototxt")
    whole = io.read_net(SCRIPT.parent / "train_val.prototxt")
    data = net.layer[0]
    assert data.type == "ImageData" and data.image_data_param.batch_size == 2
    kept = [each for each in whole.layer if each.type != "DummyData"]
    assert [each.name for each in net.layer[1:]] == [each.name for each in kept]
    for ours, theirs in zip(net.layer[1:], kept):
        for each in (ours, theirs):
            each.ClearField("bedstone_place")
        assert ours == theirs
    assert len((path.parent / "list.txt").read_text().splitlines()) == 4


@pytest.mark.slow
def test_the_loss_falls(script, tmp_path):
    solver = Solver(script.write_all(tmp_path / "images", crops=32, batch=8))
    net = solver.net
    assert sum(blob.count for blob in net.learnable_params) == 60_965_224
    losses = []
    for _ in range(script.ITERATIONS):
        solver.step(1)
        losses.append(solver.loss)
        data = net.blobs["data"].data
        assert data.shape == (8, 3, 227, 227) and -123 <= data.min() < data.max() <= 151
        assert set(net.blobs["label"].data) <= {0, 1}
    assert losses[0] == pytest.approx(math.log(1000), abs=2)
    assert np.mean(losses[-3:]) < 0.5 * losses[0]
