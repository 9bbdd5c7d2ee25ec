"""Networks: which layers belong, what is shared, split and in place, what flows back, weights."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("google.protobuf")
from bedstone import InvalidDescriptor
from bedstone.frameworks.caffe import io, schema, wire
from bedstone.frameworks.caffe.blob import array_of
from bedstone.frameworks.caffe.net import Net

INPUT = 'layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 4 dim: 6 } } }\n'
LABEL = 'layer { name: "lab" type: "Input" top: "t" input_param { shape { dim: 4 } } }\n'


def net_of(text, phase="TRAIN", **more):
    return Net(io.parse_text(text, schema.NetParameter), phase, seed=1, **more)


def product(name, bottom, top, outputs=3, more=""):
    return (
        f'layer {{ name: "{name}" type: "InnerProduct" bottom: "{bottom}" top: "{top}" {more} '
        f'inner_product_param {{ num_output: {outputs} weight_filler {{ type: "xavier" }} }} }}\n'
    )


LOSS = 'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "y" bottom: "t" top: "l" }\n'


def test_layers_are_kept_by_phase_level_and_stage():
    text = INPUT
    rules = (
        "",
        "include { phase: TRAIN }",
        "exclude { phase: TRAIN }",
        "include { min_level: 2 }",
        'include { stage: "deep" not_stage: "shallow" }',
    )
    for i, rule in enumerate(rules):
        text += f'layer {{ name: "l{i}" type: "Power" bottom: "x" top: "y{i}" {rule} }}\n'

    def kept(**how):
        return {name for name in net_of(text, **how).layer_names if name[0] == "l"}

    assert kept() == {"l0", "l1"}
    assert kept(phase="TEST") == {"l0", "l2"}
    assert kept(level=2, stages=("deep",)) == {"l0", "l1", "l3", "l4"}
    assert kept(stages=("deep", "shallow")) == {"l0", "l1"}


def test_a_blob_that_several_layers_read_is_split_and_its_gradients_add_up():
    text = INPUT + product("p", "x", "h", 5) + product("a", "h", "ya") + product("b", "h", "yb")
    text += 'layer { name: "sum" type: "Eltwise" bottom: "ya" bottom: "yb" top: "y" }\n'
    net = net_of(LABEL + text + LOSS)
    assert "h_p_0_split" in net.layer_names
    rng = np.random.default_rng(0)
    net.forward(x=rng.standard_normal((4, 6)), t=rng.integers(0, 3, 4))
    net.backward()
    dy = net.blobs["y"].diff
    a, b = net.params["a"][0].data, net.params["b"][0].data
    np.testing.assert_allclose(net.blobs["h"].diff, dy @ a + dy @ b, rtol=1e-5, atol=1e-7)


def test_parameters_of_one_name_are_one():
    shared = 'param { name: "w" } param { name: "v" }'
    text = INPUT + product("p", "x", "h", 6, shared) + product("q", "h", "y", 6, shared)
    net = net_of(LABEL + text + LOSS)
    assert len(net.learnable_params) == 2
    assert np.shares_memory(net.params["p"][0].data, net.params["q"][0].data)
    rng = np.random.default_rng(0)
    net.forward(x=rng.standard_normal((4, 6)), t=rng.integers(0, 6, 4))
    net.clear_param_diffs()
    net.backward()
    w, x, dy = net.params["p"][0], net.blobs["x"].data, net.blobs["y"].diff
    wanted = dy.T @ net.blobs["h"].data + (dy @ w.data).T @ x
    np.testing.assert_allclose(w.diff, wanted, rtol=1e-4, atol=1e-6)
    with pytest.raises(InvalidDescriptor, match="layer q: shared parameter w"):
        net_of(INPUT + product("p", "x", "h", 5, shared) + product("q", "h", "y", 6, shared))


def test_what_needs_no_gradient_computes_none():
    frozen = "param { lr_mult: 0 } param { lr_mult: 0 }"
    text = LABEL + INPUT + product("p", "x", "h", 5, frozen) + product("q", "h", "y") + LOSS
    net = net_of(text)
    net.forward(x=np.ones((4, 6)), t=np.zeros(4))
    net.blobs["h"].diff[...] = 7
    net.backward()
    assert (net.blobs["h"].diff == 7).all()  # nothing below q learns
    assert net.params_lr == [0, 0, 1, 1]
    net = net_of("force_backward: true\n" + text)
    net.forward(x=np.ones((4, 6)), t=np.zeros(4))
    net.backward()
    assert net.blobs["x"].diff.any()


def test_loss_weights():
    text = (
        LABEL + INPUT + product("p", "x", "y") + LOSS.replace('top: "l"', 'top: "l" loss_weight: 3')
    )
    net = net_of(text)
    out = net.forward(x=np.ones((4, 6)), t=np.zeros(4))
    assert net.loss == pytest.approx(3 * float(out["l"]))
    assert net.loss_weights == {"l": 3.0}


def test_other_shapes_from_call_to_call():
    net = net_of(INPUT + product("p", "x", "y"), "TEST")
    for rows in (4, 9, 2):
        assert net.forward(x=np.ones((rows, 6)))["y"].shape == (rows, 3)
    with pytest.raises(InvalidDescriptor, match="layer p: bottom's shape"):
        net.forward(x=np.ones((4, 7)))
    with pytest.raises(InvalidDescriptor, match="input: got 'z'"):
        net.forward(z=np.ones(3))


@pytest.mark.parametrize(
    "text, words",
    [
        (product("p", "x", "y"), "layer p: bottom: got 'x'"),
        (INPUT + product("p", "x", "y") + product("q", "y", "x"), "layer q: top: got 'x'"),
        (INPUT + product("p", "x", "y", 3, "loss_weight: 1 loss_weight: 2"), "loss_weight"),
        (INPUT + product("p", "x", "y", 3, "param {} param {} param {}"), "at most 2"),
        (INPUT + product("p", "x", "y", 3, "propagate_down: true propagate_down: false"),
         "propagate_down"),
        (INPUT + product("p", "x", "y", 3, "include { phase: TEST } exclude { phase: TEST }"),
         "include and exclude"),
    ],
)  # fmt: skip
def test_networks_that_make_no_sense(text, words):
    with pytest.raises(InvalidDescriptor) as error:
        net_of(text)
    assert words in str(error.value)


def test_errors_in_a_file_name_the_line(tmp_path):
    path = tmp_path / "net.prototxt"
    path.write_text(INPUT + 'layer { name: "p" type: "Power"\n  bottm: "x" }\n')
    with pytest.raises(InvalidDescriptor) as error:
        Net(path)
    assert f"{path}:3" in str(error.value) and "bottm" in str(error.value)
    with pytest.raises(InvalidDescriptor, match="a file to read"):
        Net(tmp_path / "none.prototxt")


def test_weights_go_through_a_file(tmp_path):
    text = LABEL + INPUT + product("p", "x", "y") + LOSS
    net, path = net_of(text), tmp_path / "net.caffemodel"
    with path.open("wb") as file:
        wire.write_weights(file, net)
    message = io.read_binary(path, schema.NetParameter)  # by protobuf itself
    assert [layer.name for layer in message.layer] == net.layer_names
    saved = [array_of(b) for layer in message.layer for b in layer.blobs]
    for blob, array in zip(net.learnable_params, saved):
        np.testing.assert_array_equal(blob.data, array)
    other = net_of(text, weights=path)
    for mine, theirs in zip(other.learnable_params, net.learnable_params):
        np.testing.assert_array_equal(mine.data, theirs.data)
    path.write_bytes(net.to_proto().SerializeToString())  # and what protobuf writes
    other = net_of(text, weights=path)
    np.testing.assert_array_equal(other.learnable_params[0].data, net.learnable_params[0].data)


@pytest.mark.parametrize("name", ["net.caffemodel", "net.caffemodel.h5"])
def test_weights_by_pycaffes_names(tmp_path, name):
    text = INPUT + product("p", "x", "y")
    net, other, third = (net_of(text) for _ in range(3))
    other.params["p"][0].data[...] = 0
    net.save(tmp_path / name)
    other.copy_from(tmp_path / name)
    np.testing.assert_array_equal(other.params["p"][0].data, net.params["p"][0].data)
    third.share_with(net)
    net.params["p"][0].data[...] = 3
    assert (third.params["p"][0].data == 3).all()


def test_weights_that_do_not_fit(tmp_path):
    net, path = net_of(INPUT + product("p", "x", "y")), tmp_path / "net.caffemodel"
    with path.open("wb") as file:
        wire.write_weights(file, net)
    other = net_of(INPUT + product("p", "x", "y", 4))
    before = [b.data.copy() for b in other.learnable_params]
    with pytest.raises(InvalidDescriptor, match="layer p: shape of a blob"):
        other.copy_trained_layers_from(path)
    for blob, old in zip(other.learnable_params, before):
        np.testing.assert_array_equal(blob.data, old)
    whole = path.read_bytes()
    for size in range(1, len(whole), 7):
        path.write_bytes(whole[:size])
        try:
            wire.read_weights(path)
        except InvalidDescriptor as error:
            assert str(path) in str(error)  # cut short
    path.write_bytes(bytes(range(256)) * 4)
    with pytest.raises(InvalidDescriptor):
        wire.read_weights(path)


def test_four_extents_of_older_files_fit():
    net = net_of(INPUT + product("p", "x", "y"))
    proto = net.to_proto()
    for blob in proto.layer[1].blobs:
        values = array_of(blob)
        blob.ClearField("shape")
        dims = (1,) * (4 - values.ndim) + values.shape
        blob.num, blob.channels, blob.height, blob.width = dims
    other = net_of(INPUT + product("p", "x", "y"))
    other.params["p"][0].data[...] = 0
    other.copy_trained_layers_from(proto)
    np.testing.assert_array_equal(other.params["p"][0].data, net.params["p"][0].data)


V1 = """
name: "old"
input: "data" input_dim: 2 input_dim: 3 input_dim: 8 input_dim: 8
layers { name: "conv" type: CONVOLUTION bottom: "data" top: "conv" blobs_lr: 1 blobs_lr: 2
  weight_decay: 1 weight_decay: 0
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } } }
layers { name: "relu" type: RELU bottom: "conv" top: "conv" }
layers { name: "fc" type: INNER_PRODUCT bottom: "conv" top: "fc"
  inner_product_param { num_output: 5 } }
layers { name: "prob" type: SOFTMAX bottom: "fc" top: "prob" }
"""
V0 = """
name: "older"
input: "data" input_dim: 2 input_dim: 3 input_dim: 8 input_dim: 8
layers { layer { name: "pad" type: "padding" pad: 1 } bottom: "data" top: "padded" }
layers { layer { name: "conv" type: "conv" num_output: 4 kernelsize: 3 stride: 1 blobs_lr: 1
  blobs_lr: 2 weight_filler { type: "xavier" } } bottom: "padded" top: "conv" }
layers { layer { name: "pool" type: "pool" kernelsize: 2 stride: 2 pool: AVE } bottom: "conv"
  top: "pool" }
layers { layer { name: "fc" type: "innerproduct" num_output: 5 biasterm: false } bottom: "pool"
  top: "fc" }
"""


def test_networks_of_version_1():
    net = net_of(V1, "TEST")
    assert [layer.type for layer in net.layers] == [
        "Input", "Convolution", "ReLU", "InnerProduct", "Softmax",
    ]  # fmt: skip
    assert net.params_lr[:2] == [1, 2] and net.params_weight_decay[:2] == [1, 0]
    assert net.forward(data=np.ones((2, 3, 8, 8)))["prob"].sum() == pytest.approx(2)


def test_networks_of_version_0():
    net = net_of(V0, "TEST")
    assert [layer.type for layer in net.layers] == [
        "Input",
        "Convolution",
        "Pooling",
        "InnerProduct",
    ]
    assert net.blobs["conv"].shape == (2, 4, 8, 8)  # the padding layer's pad
    assert net.blobs["pool"].shape == (2, 4, 4, 4)
    assert len(net.params["fc"]) == 1


def test_what_runs_where_is_told():
    net = net_of(V1, "TEST")
    assert any(row.engine == "bedstone" and "cpu:" in row.what for row in net.engines.rows)
    native = net_of(V1, "TEST", engine="CAFFE")
    assert all(row.engine == "native" for row in native.engines.rows)
    x = np.random.default_rng(0).standard_normal((2, 3, 8, 8))
    for name, blobs in net.params.items():
        for mine, theirs in zip(native.params[name], blobs):
            mine.data[...] = theirs.data
    np.testing.assert_allclose(
        net.forward(data=x)["prob"], native.forward(data=x)["prob"], rtol=1e-4
    )
