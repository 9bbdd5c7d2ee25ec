"""The example networks against OpenCV's reader of Caffe networks: same files, weights and input."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("google.protobuf")

ROOT = Path(__file__).parents[3]
OPENCV = ROOT / ".venv-opencv"  # `make test` puts an OpenCV there that still reads Caffe networks
SCRIPT = ROOT / "examples" / "caffe" / "compare_opencv.py"
TOLERANCE = 1e-4

pytestmark = pytest.mark.skipif(
    not (OPENCV / "cv2").is_dir(),
    reason=f"no OpenCV before 5 in {OPENCV.name}: pip install --target {OPENCV.name} --no-deps "
    "'opencv-python-headless<5'",
)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("compare_opencv", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # (dataclasses look their module up)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize(
    ("network", "layers"),
    [("caffenet", 14), ("alexnet", 14), ("googlenet", 84), ("lenet", 7), ("cifar10_quick", 9),
     ("cifar10_full", 10)],
)  # fmt: skip
def test_outputs_agree(script, network, layers):
    """The output, and relative to its largest element that of every layer, within 1e-4."""
    found = script.compare(network, OPENCV, seed=3)
    assert found.layers == layers
    assert found.output_error <= TOLERANCE
    assert found.layer_error <= TOLERANCE, found.worst_layer


def test_another_result_is_seen(script, monkeypatch):
    """The comparison itself: weights that only one side has."""
    write = script.write_model

    def other(path, net):
        net.learnable_params[0].data[0] += 0.01
        write(path, net)

    monkeypatch.setattr(script, "write_model", other)
    found = script.compare("lenet", OPENCV)
    assert found.layer_error > TOLERANCE


def test_times_are_of_both_sides(script):
    found = script.compare("lenet", OPENCV, iterations=2)
    assert 0.05 < found.bedstone_ms < 5000 and 0.05 < found.opencv_ms < 5000
    assert not np.isnan(found.output_error)
    assert "| lenet | 64 |" in script.table([found])
