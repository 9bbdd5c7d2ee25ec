"""Every layer's gradient, element by element, against central differences, as Caffe checks its own.

The whole Jacobian: each element of a bottom (or parameter) moved by STEP to either side gives a
column of it, a backward pass for each element of a top a row. Two elements a and b agree where
|a - b| <= THRESHOLD max(|a|, |b|, 1). Inputs keep clear of a layer's kinks.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("google.protobuf")
from caffe_cases import CASES, layer, network

from bedstone.frameworks.caffe.registry import layer_types
from bedstone.frameworks.caffe.snapshots import net_state, restore_net_state

STEP, THRESHOLD = 1e-2, 1e-3
# Where a layer's gradient jumps, for each element by itself ...
KINKS = {"ReLU": (0,), "PReLU": (0,), "AbsVal": (0,), "ELU": (0,), "Reduction": (0,),
         "HingeLoss": (-1, 1)}  # fmt: skip
# ... or where two elements are equal.
RANKED = ("Pooling", "Eltwise")
APART = 0.05  # between any two elements of a layer's bottoms then
CLEAR = 2 * STEP  # of a kink

MORE = [
    ("Convolution", 'convolution_param { num_output: 4 kernel_size: 1 group: 2 '
     'weight_filler { type: "gaussian" } bias_filler { type: "gaussian" } }', [(2, 4, 3, 2)]),
    ("Deconvolution", 'convolution_param { num_output: 2 kernel_size: 2 dilation: 2 '
     'weight_filler { type: "gaussian" } bias_term: false }', [(1, 3, 4, 3)]),
    ("Pooling", "pooling_param { pool: AVE kernel_h: 2 kernel_w: 3 stride: 2 }", [(2, 2, 5, 6)]),
    ("Exp", "", [(2, 3, 4)]),
    ("BatchNorm", "batch_norm_param { use_global_stats: true }", [(3, 2, 4)]),
    ("Scale", "scale_param { axis: 0 }", [(2, 3, 4), (2, 3)]),
    ("Bias", "bias_param { axis: 1 }", [(2, 3, 4), (3,)]),
    ("Slice", 'top: "z" slice_param { axis: 1 slice_point: 1 }', [(2, 3, 4)]),
    ("Split", 'top: "z"', [(2, 3)]),
    ("EuclideanLoss", "", [(4, 5, 3), (4, 5, 3)]),
]  # fmt: skip
POSITIVE = [
    ("Power", "power_param { power: 2.5 scale: 0.7 shift: 0.4 }", [(2, 3, 4)]),
    ("Log", "log_param { base: 10 }", [(2, 3, 4)]),
    ("Log", "", [(2, 3, 4)]),
]
LABELLED = [
    ("SoftmaxWithLoss", "", [(4, 5, 3), (4, 3)]),
    ("SoftmaxWithLoss", "loss_param { ignore_label: 1 normalization: FULL }", [(4, 5, 3), (4, 3)]),
    ("SigmoidCrossEntropyLoss", "", [(4, 5, 3), (4, 5, 3)]),
    ("HingeLoss", "", [(4, 5), (4,)]),
    ("HingeLoss", "hinge_loss_param { norm: L2 }", [(4, 5), (4,)]),
]
TABLE = ("Embed", 'embed_param { num_output: 3 input_dim: 4 weight_filler { type: "gaussian" } '
         'bias_filler { type: "gaussian" } }', [(5,)])  # fmt: skip


def spread_out(kind, blobs, rng, positive=False):
    """Inputs of the layer: normal, away from its kinks."""
    if kind in RANKED:
        every = rng.permutation(sum(blob.count for blob in blobs)) * APART
        for blob in blobs:
            values, every = every[: blob.count], every[blob.count :]
            blob.data[...] = (values - APART * values.size / 2).reshape(blob.shape)
        return
    for blob in blobs:
        values = rng.standard_normal(blob.shape)
        if positive:
            values = np.abs(values) + 0.5
        for kink in KINKS.get(kind, ()):
            near = np.abs(values - kink) < CLEAR
            values = np.where(near, kink + np.copysign(CLEAR, values - kink), values)
        blob.data[...] = values


class Probe:
    """The layer `it` of a network, run alone; random draws are the same every time."""

    def __init__(self, net):
        self.net, self.layer = net, net.layers[-1]
        self.bottom, self.top = net.bottoms[-1], net.tops[-1]
        self.state = net_state(net)

    def forward(self):
        """All tops, one after another, in double."""
        restore_net_state(self.net, self.state)
        self.layer.forward(self.bottom, self.top)
        return np.concatenate([blob.data.astype(np.float64).ravel() for blob in self.top])

    def numeric(self, blob):
        """(elements of the blob, elements of the tops)."""
        flat, columns = blob.data.reshape(-1), []
        for at in range(flat.size):
            old = flat[at]
            flat[at] = old + STEP
            above, high = self.forward(), float(flat[at])
            flat[at] = old - STEP
            below, low = self.forward(), float(flat[at])
            flat[at] = old
            columns.append((above - below) / (high - low))
        return np.array(columns)

    def analytic(self, blobs):
        """For each blob (elements of the blob, elements of the tops)."""
        self.forward()
        down = [any(blob is each for each in blobs) for blob in self.bottom]
        rows = [[] for _ in blobs]
        for blob in self.top:
            blob.diff[...] = 0
        for top in self.top:
            flat = top.diff.reshape(-1)
            for at in range(flat.size):
                for blob in self.layer.blobs:
                    blob.diff[...] = 0
                flat[at] = 1
                self.layer.backward(self.top, down, self.bottom)
                # A Split or Flatten may show its top's diff: the row is a copy.
                for row, blob in zip(rows, blobs):
                    row.append(blob.diff.astype(np.float64).ravel())
                for each in self.top:
                    each.diff[...] = 0
        return [np.array(row).T for row in rows]


def check(net, blobs):
    probe = Probe(net)
    for number, (blob, got) in enumerate(zip(blobs, probe.analytic(blobs))):
        wanted = probe.numeric(blob)
        assert got.shape == wanted.shape and np.abs(wanted).max() > 0
        error = np.abs(got - wanted) / np.maximum(np.maximum(np.abs(got), np.abs(wanted)), 1)
        worst = np.unravel_index(error.argmax(), error.shape)
        assert error[worst] <= THRESHOLD, (number, worst, got[worst], wanted[worst])


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return request.param


@pytest.fixture(params=["CUDNN", "CAFFE"])
def engine(request):
    return request.param


def ids(value):
    return value.split(" {")[0] if isinstance(value, str) else ""


@pytest.mark.parametrize("kind, more, shapes", CASES + MORE, ids=ids)
def test_layers(kind, more, shapes, engine, dtype):
    rng = np.random.default_rng(5)
    net = network(layer(kind, more, len(shapes)), shapes, engine=engine, dtype=dtype)
    assert net.blobs["y"].data.dtype == dtype
    spread_out(kind, [net.blobs[n] for n in net.inputs], rng)
    blobs = [net.blobs[n] for n in net.inputs]
    if kind == "Crop":
        blobs = blobs[:1]  # (the second gives its shape only)
    if kind == "BatchNorm":
        mean, variance, weight = (blob.data for blob in net.layers[-1].blobs)
        mean[...], variance[...], weight[...] = [1, -2], [3, 5], 2  # averages, no parameters
    else:
        blobs += net.learnable_params
    check(net, blobs)


@pytest.mark.parametrize("kind, more, shapes", POSITIVE, ids=ids)
def test_layers_of_positive_inputs(kind, more, shapes, dtype):
    net = network(layer(kind, more), shapes, dtype=dtype)
    spread_out(kind, [net.blobs["a"]], np.random.default_rng(6), positive=True)
    check(net, [net.blobs["a"]])


@pytest.mark.parametrize("kind, more, shapes", LABELLED, ids=ids)
def test_losses(kind, more, shapes, engine, dtype):
    rng = np.random.default_rng(7)
    net = network(layer(kind, more, 2), shapes, engine=engine, dtype=dtype)
    spread_out(kind, [net.blobs["a"]], rng)
    labels = net.blobs["b"]
    whole = kind != "SigmoidCrossEntropyLoss"
    labels.data[...] = rng.integers(0, 5, labels.shape) if whole else rng.random(labels.shape)
    check(net, [net.blobs["a"]])


def test_embed(dtype):
    kind, more, shapes = TABLE
    net = network(layer(kind, more), shapes, dtype=dtype)
    net.blobs["a"].data[...] = [3, 0, 3, 1, 2]
    check(net, net.learnable_params)


def test_stochastic_pooling(dtype):
    """The gradient goes to the element drawn."""
    more = "pooling_param { pool: STOCHASTIC kernel_size: 2 stride: 2 }"
    net = network(layer("Pooling", more), [(2, 2, 4, 6)], dtype=dtype)
    x, y = net.blobs["a"], net.blobs["y"]
    x.data[...] = np.random.default_rng(1).permutation(x.count).reshape(x.shape) + 1
    net.forward()
    y.diff[...] = -y.data
    net.layers[-1].backward(net.tops[-1], [True], net.bottoms[-1])
    drawn = np.isin(x.data, y.data)
    np.testing.assert_array_equal(x.diff, np.where(drawn, -x.data, 0))


def test_silence():
    net = network('layer { name: "hush" type: "Silence" bottom: "a" }', [(3,)])
    net.blobs["a"].diff[...] = 5
    net.layers[-1].backward([], [True], net.bottoms[-1])
    assert not net.blobs["a"].diff.any()


def test_no_layer_is_left_out():
    checked = {kind for kind, *_ in [*CASES, *MORE, *POSITIVE, *LABELLED, TABLE]} | {"Silence"}
    without = {"Accuracy", "ArgMax", "Threshold", "HDF5Output", "Data", "DummyData", "HDF5Data",
               "ImageData", "Input", "MemoryData"}  # fmt: skip
    assert checked | without == set(layer_types()) and not checked & without


def test_a_wrong_gradient_is_seen(monkeypatch):
    net = network(layer("Sigmoid"), [(2, 3)])
    right = net.layers[-1].gradient

    def wrong(x, y, dy, dx):
        right(x, y, dy, dx)
        dx.reshape(-1)[4] += 2 * THRESHOLD * dy.reshape(-1)[4]

    monkeypatch.setattr(net.layers[-1], "gradient", wrong)
    with pytest.raises(AssertionError):
        check(net, [net.blobs["a"]])
