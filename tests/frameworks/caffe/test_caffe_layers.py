"""Every layer: its gradients against numerical ones, its engines against each other."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("google.protobuf")
from bedstone import InvalidDescriptor
from bedstone.frameworks.caffe import io, schema
from bedstone.frameworks.caffe.net import Net

STEP, TOLERANCE = 1e-2, 1e-2  # of the numerical gradient, in float32
SAMPLES = 12  # elements of a blob that are checked


def network(layers, shapes, phase="TRAIN", engine=None):
    """A net: inputs a, b, ... of these shapes, then the layers' text."""
    inputs = "".join(
        f'layer {{ name: "{n}" type: "Input" top: "{n}" input_param {{ shape {{ '
        + " ".join(f"dim: {d}" for d in shape)
        + " } } }\n"
        for n, shape in zip("abc", shapes)
    )
    text = f'name: "test" force_backward: true\n{inputs}{layers}'
    return Net(io.parse_text(text, schema.NetParameter), phase, engine=engine, seed=3)


def layer(kind, more="", bottoms=1, top="y"):
    below = " ".join(f'bottom: "{n}"' for n in "abc"[:bottoms])
    return f'layer {{ name: "it" type: "{kind}" {below} top: "{top}" {more} }}\n'


WEIGHTED = 'layer { name: "sum" type: "Reduction" bottom: "y" top: "loss" loss_weight: 0.7 }\n'


def fill(net, rng, positive=False):
    for name in net.inputs:
        values = rng.standard_normal(net.blobs[name].shape)
        net.blobs[name].data[...] = np.abs(values) + 0.5 if positive else values


def objective(net, weights):
    """A scalar of the top y: its product with fixed weights."""
    net.forward()
    return float((net.blobs["y"].data.astype(np.float64) * weights).sum())


def check(net, rng, blobs, kinks=()):
    """The gradients of `blobs` (name, Blob) against differences of the objective. Elements whose
    difference straddles a kink are left out."""
    state = net.rng.bit_generator.state

    def run():
        net.rng.bit_generator.state = state
        return objective(net, weights)

    net.forward()
    weights = rng.standard_normal(net.blobs["y"].shape)
    run()
    net.clear_param_diffs()
    net.blobs["y"].diff[...] = weights
    last = next(i for i, top in enumerate(net.tops) if net.blobs["y"] in top)
    net._runs_backward = [True] * len(net.layers)
    for i in range(last, -1, -1):
        net.layers[i].backward(net.tops[i], _needs(net, i), net.bottoms[i])
    for name, blob in blobs:
        got = blob.diff.reshape(-1).copy()
        flat = blob.data.reshape(-1)
        for at in rng.choice(flat.size, min(SAMPLES, flat.size), replace=False):
            old = flat[at]
            if any(abs(old - kink) < 2 * STEP for kink in kinks):
                continue
            flat[at] = old + STEP
            above = run()
            flat[at] = old - STEP
            below = run()
            flat[at] = old
            wanted = (above - below) / (2 * STEP)
            scale = max(abs(wanted), abs(got[at]), 1.0)
            assert abs(got[at] - wanted) <= TOLERANCE * scale, (name, at, got[at], wanted)


def _needs(net, i):
    return [j not in net.layers[i].no_gradient for j in range(len(net.bottoms[i]))]


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
KINKS = {"ReLU": (0,), "PReLU": (0,), "AbsVal": (0,), "ELU": (0,), "Reduction": (0,)}


@pytest.mark.parametrize("engine", ["CUDNN", "CAFFE"])
@pytest.mark.parametrize("kind, more, shapes", CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_gradients(kind, more, shapes, engine):
    rng = np.random.default_rng(5)
    net = network(layer(kind, more, len(shapes)), shapes, engine=engine)
    fill(net, rng)
    blobs = [(n, net.blobs[n]) for n in net.inputs]
    blobs += [("parameter", b) for b in net.learnable_params]
    if kind == "Crop":
        blobs = blobs[:1]
    if kind == "BatchNorm":
        blobs = blobs[:1]
    check(net, rng, blobs, KINKS.get(kind, ()))


@pytest.mark.parametrize(
    "kind, more",
    [
        ("Power", "power_param { power: 2.5 scale: 0.7 shift: 0.4 }"),
        ("Log", "log_param { base: 10 }"),
    ],
)
def test_gradients_of_positive_inputs(kind, more):
    rng = np.random.default_rng(6)
    net = network(layer(kind, more), [(2, 3, 4)])
    fill(net, rng, positive=True)
    check(net, rng, [("a", net.blobs["a"])])


@pytest.mark.parametrize(
    "kind, more, labels",
    [
        ("SoftmaxWithLoss", "", (4, 3)),
        ("SoftmaxWithLoss", "loss_param { ignore_label: 1 normalization: FULL }", (4, 3)),
        ("SigmoidCrossEntropyLoss", "", (4, 5, 3)),
        ("EuclideanLoss", "", (4, 5, 3)),
        ("HingeLoss", "", (4,)),
        ("HingeLoss", "hinge_loss_param { norm: L2 }", (4,)),
    ],
)
@pytest.mark.parametrize("engine", ["CUDNN", "CAFFE"])
def test_gradients_of_losses(kind, more, labels, engine):
    rng = np.random.default_rng(7)
    net = network(layer(kind, more, 2), [(4, 5, 3), labels], engine=engine)
    fill(net, rng)
    if kind == "SigmoidCrossEntropyLoss":
        net.blobs["b"].data[...] = rng.random(labels)
    elif kind != "EuclideanLoss":
        net.blobs["b"].data[...] = rng.integers(0, 5, labels)
    check(net, rng, [("a", net.blobs["a"])], (1, -1) if kind == "HingeLoss" else ())


@pytest.mark.parametrize("kind, more, shapes", CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_both_engines_agree(kind, more, shapes):
    results = []
    for engine in ("CUDNN", "CAFFE"):
        rng = np.random.default_rng(8)
        net = network(layer(kind, more, len(shapes)) + WEIGHTED, shapes, engine=engine)
        fill(net, rng)
        net.forward()
        net.clear_param_diffs()
        net.backward()
        found = [net.blobs["y"].data, *(net.blobs[n].diff for n in net.inputs)]
        results.append([a.copy() for a in (*found, *(b.diff for b in net.learnable_params))])
    for ours, theirs in zip(*results):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)


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
