"""Every layer: its engines against each other, in place, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("google.protobuf")
from caffe_cases import CASES, fill, layer, network

from bedstone import InvalidDescriptor
from bedstone.frameworks.caffe import spaces

WEIGHTED = 'layer { name: "sum" type: "Reduction" bottom: "y" top: "loss" loss_weight: 0.7 }\n'


@pytest.mark.parametrize("kind, more, shapes", CASES, ids=lambda v: v if isinstance(v, str) else "")
@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-4), ("float64", 1e-11)])
def test_both_engines_agree(kind, more, shapes, dtype, tolerance):
    results = []
    for engine in ("CUDNN", "CAFFE"):
        rng = np.random.default_rng(8)
        text = layer(kind, more, len(shapes)) + WEIGHTED
        net = network(text, shapes, engine=engine, dtype=dtype)
        fill(net, rng)
        net.forward()
        net.clear_param_diffs()
        net.backward()
        found = [net.blobs["y"].data, *(net.blobs[n].diff for n in net.inputs)]
        results.append([a.copy() for a in (*found, *(b.diff for b in net.learnable_params))])
    for ours, theirs in zip(*results):
        assert ours.dtype == dtype
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize(
    "kind, more",
    [("ReLU", ""), ("Sigmoid", ""), ("TanH", ""), ("ELU", ""), ("PReLU", ""), ("AbsVal", ""),
     ("BNLL", ""), ("Dropout", ""), ("Scale", ""), ("Bias", ""),
     ("BatchNorm", "batch_norm_param { use_global_stats: false }")],
)  # fmt: skip
def test_in_place_is_the_same(kind, more):
    before = 'layer { name: "p" type: "Power" bottom: "a" top: "x" power_param { scale: 1.5 } }\n'
    outputs = []
    for top in ("y", "x"):
        text = before + f'layer {{ name: "it" type: "{kind}" bottom: "x" top: "{top}" {more} }}\n'
        text += f'layer {{ name: "q" type: "Reduction" bottom: "{top}" top: "loss" loss_weight: 1 '
        text += "reduction_param { operation: SUMSQ } }\n"
        rng = np.random.default_rng(9)
        net = network(text, [(3, 2, 4, 3)])
        fill(net, rng)
        net.forward()
        net.clear_param_diffs()
        net.backward()
        outputs.append([net.loss, net.blobs["a"].diff, *(b.diff for b in net.learnable_params)])
    for apart, in_place in zip(*outputs):
        np.testing.assert_allclose(apart, in_place, rtol=1e-5, atol=1e-6)


def test_a_layer_reads_memory_that_is_shared_with_it_later():
    kind, more, shapes = CASES[0]
    nets = [network(layer(kind, more), shapes) for _ in range(2)]
    x = np.random.default_rng(7).standard_normal(shapes[0])
    nets[1].learnable_params[0].data[...] *= -2
    before, other = (net.forward(a=x)["y"].copy() for net in nets)
    nets[0].share_trained_layers_with(nets[1])
    assert np.abs(before - other).max() > 0.1
    np.testing.assert_array_equal(nets[0].forward()["y"], other)
    nets[1].learnable_params[0].data[...] *= -0.5
    np.testing.assert_array_equal(nets[0].forward()["y"], before)


def test_a_product_is_added_in_parts(monkeypatch):
    rng = np.random.default_rng(6)
    a, b, total = (rng.integers(-9, 10, shape).astype(float) for shape in ((7, 4), (4, 5), (7, 5)))
    expected = total + a @ b
    for part in (1, 10, 14, 1 << 20):  # a row, two rows (the last ones one), all of them
        monkeypatch.setattr(spaces, "PART", part)
        found = total.copy()
        spaces.HOST.add_product(a, b, found, "ieee")
        np.testing.assert_array_equal(found, expected)


def test_stochastic_pooling_draws_elements_of_its_windows():
    net = network(layer("Pooling", "pooling_param { pool: STOCHASTIC kernel_size: 2 stride: 2 }"),
                  [(2, 3, 4, 6)])  # fmt: skip
    fill(net, np.random.default_rng(1), positive=True)
    x = net.blobs["a"].data
    seen = [net.forward()["y"].copy() for _ in range(40)]
    windows = x.reshape(2, 3, 2, 2, 3, 2).transpose(0, 1, 2, 4, 3, 5).reshape(2, 3, 2, 3, 4)
    for y in seen:
        assert (windows == y[..., None]).any(-1).all()
    assert len({y.tobytes() for y in seen}) > 1
    expected = (windows**2).sum(-1) / windows.sum(-1)
    test = network(layer("Pooling", "pooling_param { pool: STOCHASTIC kernel_size: 2 stride: 2 }"),
                   [(2, 3, 4, 6)], "TEST")  # fmt: skip
    np.testing.assert_allclose(test.forward(a=x)["y"], expected, rtol=1e-5)
    assert "native" in str(net.engines) and "stochastic" in str(net.engines)


def test_pooling_gives_its_indices_as_a_second_top():
    text = layer("Pooling", 'top: "mask" pooling_param { kernel_size: 2 stride: 2 }')
    for engine in ("CUDNN", "CAFFE"):
        net = network(text, [(1, 2, 4, 6)], engine=engine)
        fill(net, np.random.default_rng(2))
        net.forward()
        flat = net.blobs["a"].data.reshape(1, 2, -1)
        at = net.blobs["mask"].data.astype(int).reshape(1, 2, -1)
        found = np.take_along_axis(flat, at, 2).reshape(net.blobs["y"].shape)
        np.testing.assert_array_equal(found, net.blobs["y"].data)


def test_slice_argmax_embed_accuracy_silence():
    net = network(layer("Slice", 'top: "z" slice_param { slice_point: 1 }'), [(2, 3, 4)])
    fill(net, np.random.default_rng(3))
    out = net.forward()
    np.testing.assert_array_equal(out["y"], net.blobs["a"].data[:, :1])
    np.testing.assert_array_equal(out["z"], net.blobs["a"].data[:, 1:])
    x = np.array([[3.0, 9.0, 5.0], [1.0, 0.0, 2.0]])
    net = network(layer("ArgMax", "argmax_param { top_k: 2 }"), [(2, 3)], "TEST")
    assert net.forward(a=x)["y"].reshape(2, 2).tolist() == [[1, 2], [2, 0]]
    net = network(layer("Accuracy", 'top: "each" accuracy_param { top_k: 1 }', 2),
                  [(2, 3), (2,)], "TEST")  # fmt: skip
    out = net.forward(a=x, b=[1, 0])
    assert float(out["y"]) == 0.5 and out["each"].tolist() == [0, 1, 0]
    embed = 'embed_param { num_output: 2 input_dim: 4 weight_filler { type: "gaussian" } }'
    net = network(layer("Embed", embed), [(3,)])
    out = net.forward(a=[3, 0, 3])["y"]
    np.testing.assert_array_equal(out, net.learnable_params[0].data[[3, 0, 3]])
    with pytest.raises(InvalidDescriptor, match="layer it: bottom: got 4"):
        net.forward(a=[4, 0, 0])
    net = network('layer { name: "hush" type: "Silence" bottom: "a" }', [(3,)])
    assert net.forward() == {}


@pytest.mark.parametrize(
    "kind, more, shapes, words",
    [
        ("Convolution", "convolution_param { num_output: 0 kernel_size: 3 }", [(1, 2, 5, 5)],
         "num_output: got 0"),
        ("Convolution", "convolution_param { num_output: 4 kernel_size: 9 }", [(1, 2, 5, 5)],
         "a window of"),
        ("Convolution", "convolution_param { num_output: 4 kernel_size: 3 group: 3 }",
         [(1, 2, 5, 5)], "group: got 3"),
        ("Pooling", "pooling_param { kernel_size: 2 pad: 2 }", [(1, 2, 5, 5)], "pad"),
        ("LRN", "lrn_param { local_size: 4 }", [(1, 2, 5, 5)], "local_size: got 4"),
        ("InnerProduct", "", [(1, 2)], "num_output"),
        ("Concat", "", [(1, 2), (2, 2, 3)], "bottom's shape"),
        ("Nonsense", "", [(1, 2)], "type: got 'Nonsense'"),
        ("SoftmaxWithLoss", "", [(2, 3), (5,)], "2 labels"),
        ("Softmax", "", [(2, 3), (2, 3)], "number of bottoms: got 2"),
    ],
)  # fmt: skip
def test_refusals_name_the_layer(kind, more, shapes, words):
    with pytest.raises(InvalidDescriptor) as error:
        network(layer(kind, more, len(shapes)), shapes)
    assert "layer it" in str(error.value) and words in str(error.value)
