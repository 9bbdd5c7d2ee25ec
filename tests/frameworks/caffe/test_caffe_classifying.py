"""Transformer and Classifier: what they do to images, by hand."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("google.protobuf")

from bedstone import InvalidDescriptor
from bedstone.frameworks.caffe import Classifier, Transformer
from bedstone.frameworks.caffe.classifying import load_image, resize_image, ten_crops

NET = """
layer { name: "data" type: "Input" top: "data"
        input_param { shape { dim: 1 dim: 3 dim: 4 dim: 4 } } }
layer { name: "pool" type: "Pooling" bottom: "data" top: "pool"
        pooling_param { pool: AVE global_pooling: true } }
layer { name: "prob" type: "Softmax" bottom: "pool" top: "prob" }
"""


def transformer():
    made = Transformer({"data": (10, 3, 4, 6)})
    made.set_transpose("data", (2, 0, 1))
    made.set_channel_swap("data", (2, 1, 0))
    made.set_raw_scale("data", 255)
    made.set_mean("data", np.array([104.0, 117.0, 123.0]))
    made.set_input_scale("data", 0.5)
    return made


def test_every_step_in_its_order():
    image = np.random.default_rng(1).random((4, 6, 3), np.float32)
    blue, green, red = (255 * image[:, :, channel] for channel in (2, 1, 0))
    expected = 0.5 * np.stack([blue - 104, green - 117, red - 123])
    found = transformer().preprocess("data", image)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(transformer().deprocess("data", found), image, atol=1e-6)


def test_nothing_set_changes_nothing():
    values = np.random.default_rng(2).random((3, 4, 6), np.float32)
    plain = Transformer({"data": (1, 3, 4, 6)})
    np.testing.assert_array_equal(plain.preprocess("data", values), values)


def test_a_mean_image_is_in_the_network_s_order():
    made = Transformer({"data": (1, 2, 2, 2)})
    mean = np.arange(8.0).reshape(2, 2, 2)
    made.set_mean("data", mean)
    np.testing.assert_array_equal(made.preprocess("data", np.zeros((2, 2, 2))), -mean)


def test_resizing_is_between_pixel_centres():
    line = np.array([0.0, 1.0, 2.0, 3.0]).reshape(1, 4, 1)
    np.testing.assert_allclose(resize_image(line, (1, 2)).ravel(), [0.5, 2.5])
    np.testing.assert_allclose(resize_image(line, (2, 8))[1].ravel(),
                               [0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3])  # fmt: skip
    made = Transformer({"data": (1, 1, 1, 2)})
    made.set_transpose("data", (2, 0, 1))
    np.testing.assert_allclose(made.preprocess("data", line).ravel(), [0.5, 2.5])


def test_crops_are_corners_centre_and_mirrored():
    image = np.arange(4 * 6).reshape(4, 6, 1)
    crops = ten_crops([image], (2, 4))
    assert crops.shape == (10, 2, 4, 1)
    assert [int(each[0, 0, 0]) for each in crops] == [0, 2, 12, 14, 7, 3, 5, 15, 17, 10]
    with pytest.raises(InvalidDescriptor, match="crop"):
        ten_crops([image], (5, 4))


def test_a_classifier_averages_over_crops(tmp_path):
    path = tmp_path / "net.prototxt"
    path.write_text(NET)
    classifier = Classifier(path, image_dims=(6, 6), raw_scale=2, channel_swap=(2, 1, 0))
    images = np.random.default_rng(3).random((2, 6, 6, 3), np.float32)

    def scores(crop):
        e = np.exp(2 * crop.mean((0, 1))[::-1])
        return e / e.sum()

    centre = [scores(each[1:5, 1:5]) for each in images]
    np.testing.assert_allclose(classifier.predict(images, oversample=False), centre, rtol=1e-5)
    ten = [np.mean([scores(c) for c in ten_crops([each], (4, 4))], 0) for each in images]
    np.testing.assert_allclose(classifier.predict(images), ten, rtol=1e-5)
    larger = images.repeat(2, 1).repeat(2, 2)
    np.testing.assert_allclose(classifier.predict(larger), ten, rtol=1e-5)


def test_an_image_file_is_red_first_from_0_to_1(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(4).integers(0, 256, (3, 5, 3), np.uint8)
    image.fromarray(pixels).save(tmp_path / "x.png")
    np.testing.assert_allclose(load_image(tmp_path / "x.png"), pixels / 255, atol=1e-7)
    assert load_image(tmp_path / "x.png", color=False).shape == (3, 5, 1)


@pytest.mark.parametrize(
    "call, words",
    [(lambda t: t.set_mean("data", np.zeros(4)), "mean's shape: got (4,)"),
     (lambda t: t.set_mean("label", 0), "input: got 'label'"),
     (lambda t: t.set_transpose("data", (0, 1)), "order: got (0, 1)"),
     (lambda t: t.set_channel_swap("data", (0, 1, 1)), "order: got (0, 1, 1)"),
     (lambda t: t.preprocess("data", np.zeros((4, 6, 1))), "image's shape: got (4, 6, 1)"),
     (lambda t: Transformer({"data": (3, 4)}), "shape of data: got (3, 4)")],
)  # fmt: skip
def test_refusals(call, words):
    with pytest.raises(InvalidDescriptor) as error:
        call(transformer())
    assert words in str(error.value)
