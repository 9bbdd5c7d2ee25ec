"""One layer on inputs a, b, c: the network of it, and a case of every layer with a gradient."""

from __future__ import annotations

import numpy as np

from bedstone.frameworks.caffe import io, schema
from bedstone.frameworks.caffe.net import Net


def network(layers, shapes, phase="TRAIN", engine=None, dtype="float32", gpu=None):
    """A net: inputs a, b, ... of these shapes, then the layers' text."""
    inputs = "".join(
        f'layer {{ name: "{n}" type: "Input" top: "{n}" input_param {{ shape {{ '
        + " ".join(f"dim: {d}" for d in shape)
        + " } } }\n"
        for n, shape in zip("abc", shapes)
    )
    text = f'name: "test" force_backward: true\n{inputs}{layers}'
    param = io.parse_text(text, schema.NetParameter)
    return Net(param, phase, engine=engine, seed=3, dtype=dtype, gpu=gpu)


def layer(kind, more="", bottoms=1, top="y"):
    below = " ".join(f'bottom: "{n}"' for n in "abc"[:bottoms])
    return f'layer {{ name: "it" type: "{kind}" {below} top: "{top}" {more} }}\n'


def fill(net, rng, positive=False):
    for name in net.inputs:
        values = rng.standard_normal(net.blobs[name].shape)
        net.blobs[name].data[...] = np.abs(values) + 0.5 if positive else values


# (kind, parameters, shapes of the bottoms)
CASES = [
    ("Convolution", 'convolution_param { num_output: 4 kernel_size: 3 pad: 1 '
     'weight_filler { type: "gaussian" } bias_filler { type: "gaussian" } }', [(2, 3, 6, 4)]),
    ("Convolution", 'convolution_param { num_output: 6 kernel_h: 3 kernel_w: 2 stride: 2 group: 3 '
     'weight_filler { type: "xavier" } bias_term: false }', [(2, 3, 6, 5)]),
    ("Convolution", 'convolution_param { num_output: 2 kernel_size: 3 dilation: 2 '
     'weight_filler { type: "msra" } }', [(1, 2, 7, 8)]),
    ("Convolution", 'convolution_param { num_output: 2 kernel_size: 2 '
     'weight_filler { type: "gaussian" } }', [(1, 2, 3, 4, 3)]),
    ("Deconvolution", 'convolution_param { num_output: 4 kernel_size: 3 stride: 2 pad: 1 group: 2 '
     'weight_filler { type: "gaussian" } bias_filler { type: "gaussian" } }', [(2, 2, 4, 3)]),
    ("Pooling", "pooling_param { pool: MAX kernel_size: 3 stride: 2 }", [(2, 3, 6, 7)]),
    ("Pooling", "pooling_param { pool: MAX kernel_size: 3 stride: 2 pad: 1 }", [(2, 3, 6, 7)]),
    ("Pooling", "pooling_param { pool: AVE kernel_size: 3 stride: 2 pad: 1 }", [(2, 3, 6, 7)]),
    ("Pooling", "pooling_param { pool: AVE global_pooling: true }", [(2, 3, 5, 4)]),
    ("ReLU", "", [(2, 3, 4)]),
    ("ReLU", "relu_param { negative_slope: 0.3 }", [(2, 3, 4)]),
    ("PReLU", "", [(2, 3, 4)]),
    ("PReLU", "prelu_param { channel_shared: true }", [(2, 3, 4)]),
    ("ELU", "elu_param { alpha: 0.7 }", [(2, 3, 4)]),
    ("Sigmoid", "", [(2, 3, 4)]),
    ("TanH", "", [(2, 3, 4)]),
    ("AbsVal", "", [(2, 3, 4)]),
    ("BNLL", "", [(2, 3, 4)]),
    ("Exp", "exp_param { base: 2 scale: 0.5 shift: 0.2 }", [(2, 3, 4)]),
    ("Dropout", "dropout_param { dropout_ratio: 0.4 }", [(2, 3, 4)]),
    ("Softmax", "", [(2, 5, 3)]),
    ("Softmax", "softmax_param { axis: 2 }", [(2, 5, 3)]),
    ("LRN", "lrn_param { local_size: 3 alpha: 0.8 }", [(2, 7, 3, 3)]),
    ("LRN", "lrn_param { local_size: 9 alpha: 0.8 beta: 0.6 k: 2 }", [(2, 3, 2, 3)]),
    ("LRN", "lrn_param { local_size: 3 alpha: 0.8 norm_region: WITHIN_CHANNEL }", [(2, 2, 5, 5)]),
    ("BatchNorm", "batch_norm_param { use_global_stats: false }", [(3, 2, 4, 3)]),
    ("Scale", "scale_param { bias_term: true filler { type: \"gaussian\" } }", [(2, 3, 4)]),
    ("Bias", "bias_param { filler { type: \"gaussian\" } }", [(2, 3, 4)]),
    ("MVN", "", [(2, 3, 4, 4)]),
    ("MVN", "mvn_param { across_channels: true normalize_variance: false }", [(2, 3, 4)]),
    ("InnerProduct", 'inner_product_param { num_output: 5 weight_filler { type: "xavier" } '
     'bias_filler { type: "gaussian" } }', [(3, 2, 4)]),
    ("InnerProduct", 'inner_product_param { num_output: 5 transpose: true axis: 2 '
     'weight_filler { type: "xavier" } }', [(3, 2, 4)]),
    ("Concat", "", [(2, 3, 4), (2, 2, 4)]),
    ("Eltwise", "eltwise_param { operation: SUM coeff: 0.5 coeff: -2 }", [(2, 3), (2, 3)]),
    ("Eltwise", "eltwise_param { operation: PROD }", [(2, 3), (2, 3)]),
    ("Eltwise", "eltwise_param { operation: MAX }", [(2, 3), (2, 3)]),
    ("Flatten", "", [(2, 3, 4)]),
    ("Reshape", "reshape_param { shape { dim: 0 dim: -1 dim: 2 } }", [(2, 3, 4)]),
    ("Crop", "crop_param { offset: 1 }", [(1, 2, 5, 6), (1, 2, 3, 4)]),
    ("Reduction", "reduction_param { operation: SUMSQ axis: 1 coeff: 0.5 }", [(2, 3, 4)]),
    ("Reduction", "reduction_param { operation: ASUM }", [(2, 3)]),
    ("Reduction", "reduction_param { operation: MEAN axis: -1 }", [(2, 3, 4)]),
    ("Tile", "tile_param { tiles: 3 }", [(2, 3, 4)]),
]  # fmt: skip
