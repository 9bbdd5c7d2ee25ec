"""Layers whose top is their bottom: refused where the result would be wrong, right elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("google.protobuf")
from bedstone import InvalidDescriptor
from bedstone.frameworks.caffe import io, schema
from bedstone.frameworks.caffe.net import Net

INPUT = """
layer { name: "in" type: "Input" top: "a" input_param { shape { dim: 2 dim: 4 dim: 6 dim: 6 } } }
layer { name: "p" type: "Power" bottom: "a" top: "x" power_param { scale: 1.5 } }
"""
FILTER = (
    'convolution_param { num_output: 4 kernel_size: 3 pad: 1 weight_filler { type: "xavier" } }'
)
POOL = "pooling_param { kernel_size: 3 pad: 1 stride: 1 }"


def network(kind, more, top, engine=None):
    text = INPUT + f'layer {{ name: "it" type: "{kind}" bottom: "x" top: "{top}" {more} }}'
    text += f'layer {{ name: "q" type: "Reduction" bottom: "{top}" top: "loss" loss_weight: 1'
    text += " reduction_param { operation: SUMSQ } }"
    param = io.parse_text("force_backward: true" + text, schema.NetParameter)
    return Net(param, "TRAIN", engine=engine, seed=1)


@pytest.mark.parametrize("engine", ["CUDNN", "CAFFE"])
@pytest.mark.parametrize(
    "kind, more",
    [("Convolution", FILTER), ("Deconvolution", FILTER), ("Pooling", POOL), ("LRN", ""),
     ("InnerProduct", "inner_product_param { num_output: 3 }"), ("ArgMax", ""), ("Reduction", ""),
     ("Flatten", ""), ("Tile", "tile_param { tiles: 2 }")],
)  # fmt: skip
def test_layers_that_read_what_they_have_overwritten_are_refused(kind, more, engine):
    network(kind, more, "y", engine)  # apart it is a good network
    with pytest.raises(InvalidDescriptor, match=f"layer it: top: .*{kind} cannot work in place"):
        network(kind, more, "x", engine)


@pytest.mark.parametrize("engine", ["CUDNN", "CAFFE"])
@pytest.mark.parametrize("kind", ["Softmax", "MVN", "BatchNorm", "Power", "Exp"])
def test_the_others_give_what_they_give_apart(kind, engine):
    x = np.random.default_rng(0).standard_normal((2, 4, 6, 6)).astype(np.float32)
    found = []
    for top in ("y", "x"):
        net = network(kind, "", top, engine)
        net.forward(a=x)
        net.backward()
        found.append((net.loss, net.blobs["a"].diff))
    # (The gradients of what is normalised cancel: an absolute bound is the right one.)
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-5)
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-4, atol=1e-4)
