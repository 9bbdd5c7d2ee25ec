"""Mistakes in networks are told with file, line and layer; which gradients the rules ask for."""

from __future__ import annotations

import re

import numpy as np
import pytest

pytest.importorskip("google.protobuf")
from bedstone import InvalidDescriptor
from bedstone.frameworks.caffe import io, schema
from bedstone.frameworks.caffe.net import Net
from bedstone.frameworks.caffe.snapshots import write_model
from bedstone.frameworks.caffe.solver import Solver
from bedstone.frameworks.caffe.text_places import layer_at, layer_blocks

# The layer at fault begins on line 5.
NET = """# a comment with { a brace
name: "it's { a net"
layer { name: "in" type: "Input" top: "x"
  input_param { shape { dim: 2 dim: 3 dim: 8 dim: 8 } } }
layer {
  type: "Convolution" bottom: "x" top: "y"
  name: "conv"  # its name
  convolution_param { num_output: 4 kernel_size: 3
    weight_filler { type: "xavier" } }
}
layer { name: 'relu' type: "ReLU" bottom: "y" top: "y" }
"""
MISTAKES = [
    ("unknown field", "num_output: 4", "num_outputs: 4", 8, "num_outputs"),
    ("missing bottom", 'bottom: "x"', 'bottom: "z"', 5, "bottom: got 'z'"),
    ("wrong shape", "kernel_size: 3", "kernel_size: 9", 5, "a window of"),
    ("wrong number", "num_output: 4", "num_output: -4", 8, "-4"),
    ("wrong type of layer", '"Convolution"', '"Convolution2"', 5, "type: got 'Convolution2'"),
    ("wrong filler", '"xavier"', '"zavier"', 5, "zavier"),
    ("too many params", 'bottom: "x"', 'bottom: "x" param {} param {} param {}', 5, "at most 2"),
    ("include and exclude", 'bottom: "x"', 'include {} exclude {} bottom: "x"', 5, "exclude"),
]


@pytest.mark.parametrize("what, old, new, line, words", MISTAKES, ids=lambda v: str(v)[:16])
def test_file_line_and_layer(tmp_path, what, old, new, line, words):
    assert NET.count(old) == 1
    path = tmp_path / "net.prototxt"
    path.write_text(NET)
    Net(path)
    path.write_text(NET.replace(old, new))
    with pytest.raises(InvalidDescriptor) as error:
        Net(path)
    assert str(error.value).startswith(f"{path}:{line}: layer conv: "), error.value
    assert words in str(error.value)


def test_a_text_cut_short(tmp_path):
    path = tmp_path / "net.prototxt"
    path.write_text("\n".join(NET.splitlines()[:8]))
    with pytest.raises(InvalidDescriptor, match=rf"{re.escape(str(path))}:8: layer conv"):
        Net(path)


def test_weights_of_another_shape_name_both_files(tmp_path):
    path, weights = tmp_path / "net.prototxt", tmp_path / "w.caffemodel"
    path.write_text(NET)
    write_model(weights, Net(path))
    path.write_text(NET.replace("num_output: 4", "num_output: 5"))
    with pytest.raises(InvalidDescriptor) as error:
        Net(path, weights=weights)
    message = str(error.value)
    assert message.startswith(f"{weights}: layer conv: ") and f"{path}:5" in message


def test_older_layers_have_lines_too(tmp_path):
    path = tmp_path / "old.prototxt"
    path.write_text("""input: "x" input_dim: 1 input_dim: 2 input_dim: 4 input_dim: 4
layers { name: "one" type: RELU bottom: "x" top: "y" }
layers {
  layer { name: "two" type: "innerproduct" num_output: 0 } bottom: "y" top: "z" }
""")
    with pytest.raises(InvalidDescriptor, match=r"old.prototxt:3: layer two: num_output"):
        Net(path)


def test_a_network_in_a_solver(tmp_path):
    path = tmp_path / "solver.prototxt"
    text = NET.replace("num_output: 4", "num_output: 0")
    path.write_text('base_lr: 1 lr_policy: "fixed"\nnet_param {\n' + text + "}\n")
    with pytest.raises(InvalidDescriptor, match=r"solver.prototxt:7: layer conv: num_output"):
        Solver(path)


def test_places_do_not_go_into_files(tmp_path):
    net, path = Net(io.parse_text(NET, schema.NetParameter)), tmp_path / "n.caffemodel"
    write_model(path, net)
    assert net.layers[1].param.bedstone_place == "text:5"
    assert b"text:5" not in path.read_bytes()
    assert b"text:5" not in net.to_proto().SerializeToString()


def test_blocks_of_a_text():
    found = [(b.first, b.last, b.name) for b in layer_blocks(NET)]
    assert found == [(3, 4, "in"), (5, 10, "conv"), (11, 11, "relu")]
    assert layer_at(NET, 2) == "" and layer_at(NET, 8) == "conv"


INPUT = """
layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 4 dim: 6 } } }
layer { name: "lab" type: "Input" top: "t" input_param { shape { dim: 4 } } }
"""


def product(name, bottom, top, outputs=6, more=""):
    return (
        f'layer {{ name: "{name}" type: "InnerProduct" bottom: "{bottom}" top: "{top}" {more} '
        f'inner_product_param {{ num_output: {outputs} weight_filler {{ type: "xavier" }} }} }}\n'
    )


def trained(layers, loss_more=""):
    """The network after a forward and a backward pass."""
    text = INPUT + layers + 'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "y" bottom: "t" '
    net = Net(io.parse_text(text + f'top: "l" {loss_more} }}', schema.NetParameter), seed=2)
    net.forward(x=np.random.default_rng(0).standard_normal((4, 6)), t=[0, 1, 2, 3])
    net.backward()
    return net


def test_propagate_down_true_forces_a_gradient():
    assert not trained(product("p", "x", "y")).blobs["x"].diff.any()
    net = trained(product("p", "x", "y", more="propagate_down: true"))
    expected = net.blobs["y"].diff @ net.params["p"][0].data
    np.testing.assert_allclose(net.blobs["x"].diff, expected, rtol=1e-5)


def test_propagate_down_false_stops_the_layers_below():
    net = trained(product("p", "x", "h") + product("q", "h", "y", more="propagate_down: false"))
    assert net.params["q"][0].diff.any() and not net.params["p"][0].diff.any()
    net = trained(product("p", "x", "y"), "propagate_down: false propagate_down: false")
    assert not net.params["p"][0].diff.any()


def test_propagate_down_to_a_label_is_refused():
    with pytest.raises(InvalidDescriptor, match="layer loss: propagate_down.*bottom 1"):
        trained(product("p", "x", "y"), "propagate_down: true propagate_down: true")


@pytest.mark.parametrize(
    "owner, sharer, rates, decays",
    [("", "lr_mult: 3", [3, 1, 1], [1, 1, 1]), ("", "decay_mult: 0", [1, 1, 1], [0, 1, 1]),
     ("lr_mult: 2", "", [2, 1, 1], [1, 1, 1]), ("lr_mult: 2", "lr_mult: 2", [2, 1, 1], [1, 1, 1]),
     ("lr_mult: 2", "decay_mult: 5", [2, 1, 1], [5, 1, 1])],
)  # fmt: skip
def test_multipliers_of_shared_parameters(owner, sharer, rates, decays):
    layers = product("p", "x", "h", more=f'param {{ name: "w" {owner} }}')
    net = trained(layers + product("q", "h", "y", more=f'param {{ name: "w" {sharer} }}'))
    assert net.params_lr == rates and net.params_weight_decay == decays


@pytest.mark.parametrize("field", ["lr_mult", "decay_mult"])
def test_multipliers_that_contradict(field):
    more = f'param {{ name: "w" {field}: %d }}'
    layers = product("p", "x", "h", more='param { name: "w" }')
    layers += product("q", "h", "h2", more=more % 2) + product("r", "h2", "y", more=more % 3)
    with pytest.raises(InvalidDescriptor, match=f"layer r: shared parameter w: {field}: got 3"):
        trained(layers)
