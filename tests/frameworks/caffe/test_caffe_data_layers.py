"""Data layers in networks: what is in their files comes out of their tops, batch by batch."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("google.protobuf")
from caffe_cases import network

from bedstone import InvalidDescriptor
from bedstone.frameworks.caffe.lmdb_data import write_lmdb

RNG = np.random.default_rng(11)


def batches(text, count, phase="TEST"):
    """Data and labels of so many forward passes."""
    net = network(text, [], phase)
    found = []
    for _ in range(count):
        net.forward()
        found.append([net.blobs[name].data.copy() for name in ("data", "label")])
    return found


def test_image_data(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pixels = RNG.integers(0, 256, (3, 6, 5, 3), np.uint8)
    for i, each in enumerate(pixels):
        image.fromarray(each).save(tmp_path / f"{i}.png")
    (tmp_path / "list.txt").write_text("0.png 7\n1.png 8\n2.png 9\n")
    text = f"""layer {{ name: "data" type: "ImageData" top: "data" top: "label"
      transform_param {{ mean_value: 10 mean_value: 20 mean_value: 30 crop_size: 4 scale: 0.5 }}
      image_data_param {{ source: "{tmp_path}/list.txt" root_folder: "{tmp_path}/" batch_size: 2 }}
    }}"""
    mean = np.array([10, 20, 30]).reshape(3, 1, 1)
    centre = pixels[:, 1:5, :4, ::-1].transpose(0, 3, 1, 2)
    for (data, label), rows in zip(batches(text, 3), ([0, 1], [2, 0], [1, 2])):
        np.testing.assert_array_equal(label, [7 + row for row in rows])
        np.testing.assert_array_equal(data, 0.5 * (centre[rows] - mean))


def test_lmdb_data(tmp_path):
    pytest.importorskip("lmdb")
    images = RNG.integers(0, 256, (3, 2, 4, 5), np.uint8)
    write_lmdb(tmp_path / "db", images, [3, 1, 2])
    text = f"""layer {{ name: "data" type: "Data" top: "data" top: "label"
      data_param {{ source: "{tmp_path}/db" batch_size: 2 backend: LMDB }} }}"""
    for (data, label), rows in zip(batches(text, 2), ([0, 1], [2, 0])):
        np.testing.assert_array_equal(data, images[rows])
        np.testing.assert_array_equal(label, np.array([3, 1, 2])[rows])


def test_hdf5_data_and_output(tmp_path):
    h5py = pytest.importorskip("h5py")
    data, label = RNG.standard_normal((5, 2, 3)).astype(np.float32), np.arange(5.0)
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file["data"], file["label"] = data, label
    (tmp_path / "list.txt").write_text(f"{tmp_path}/in.h5\n")
    text = f"""layer {{ name: "data" type: "HDF5Data" top: "data" top: "label"
      hdf5_data_param {{ source: "{tmp_path}/list.txt" batch_size: 2 }} }}
    layer {{ name: "double" type: "Power" bottom: "data" top: "more" power_param {{ scale: 2 }} }}
    layer {{ name: "out" type: "HDF5Output" bottom: "more" bottom: "label"
      hdf5_output_param {{ file_name: "{tmp_path}/out.h5" }} }}"""
    rows = [0, 1, 2, 3, 4, 0]
    for (got, labels), two in zip(batches(text, 3), np.reshape(rows, (3, 2))):
        np.testing.assert_array_equal(got, data[two])
        np.testing.assert_array_equal(labels, label[two])
    with h5py.File(tmp_path / "out.h5") as file:
        np.testing.assert_array_equal(file["data"], 2 * data[rows])
        np.testing.assert_array_equal(file["label"], label[rows])


def test_memory_data_and_its_refusal():
    text = """layer { name: "data" type: "MemoryData" top: "data" top: "label"
      memory_data_param { batch_size: 2 channels: 1 height: 2 width: 3 } }"""
    net = network(text, [], "TEST")
    data, label = RNG.standard_normal((4, 1, 2, 3)).astype(np.float32), np.arange(4.0)
    net.layers[0].reset(data, label)
    for rows in ([0, 1], [2, 3], [0, 1]):
        net.forward()
        np.testing.assert_array_equal(net.blobs["data"].data, data[rows])
        np.testing.assert_array_equal(net.blobs["label"].data, label[rows])
    with pytest.raises(InvalidDescriptor):
        net.layers[0].reset(data[:, :, :1], label)


def test_dummy_data_fills_constants_once_and_draws_anew():
    text = """layer { name: "data" type: "DummyData" top: "data" top: "label" dummy_data_param {
      shape { dim: 2 dim: 3 } shape { dim: 2 } data_filler { type: "uniform" min: -1 max: 1 }
      data_filler { type: "constant" value: 4 } } }"""
    (first, label), (second, again) = batches(text, 2)
    assert (first != second).all() and np.abs(first).max() <= 1
    assert label.tolist() == again.tolist() == [4, 4]
