"""Networks on a device: every layer against the host, what is copied when, training, snapshots.

The device is PyTorch's own CPU arrays with the CPU's plans, so that all of it runs without a GPU;
`pytest -m gpu` runs it on one.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("google.protobuf")
pytest.importorskip("h5py")
pytest.importorskip("torch")
from caffe_cases import CASES, fill, layer, network
from google.protobuf import text_format

from bedstone import InvalidDescriptor
from bedstone.frameworks import caffe
from bedstone.frameworks.caffe import engines, schema, spaces
from bedstone.frameworks.caffe.blob import Blob
from bedstone.frameworks.caffe.solver import Solver
from bedstone.frameworks.caffe.solvers_rules import RULES
from bedstone.frameworks.caffe.spaces import HOST, Torch

WEIGHTED = 'layer { name: "sum" type: "Reduction" bottom: "y" top: "loss" loss_weight: 0.7 }\n'
HOST_ONLY = {"Embed", "HingeLoss", "Tile"}


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request):
    return Torch("cpu") if request.param == "cpu" else spaces.device_space(0)


def run(text, shapes, engine, dtype, space):
    net = network(text, shapes, engine=engine, dtype=dtype, gpu=space)
    fill(net, np.random.default_rng(8))
    for _ in range(2):  # (the second finds its arrays made, and averages begun)
        net.forward()
        net.clear_param_diffs()
        net.backward()
    found = [net.loss, net.blobs["y"].data, *(net.blobs[n].diff for n in net.inputs)]
    found += [blob.diff for blob in net.learnable_params]
    return net, [np.array(a) for a in (*found, *(b.data for b in net.layers[-2].blobs))]


@pytest.mark.parametrize("kind, more, shapes", CASES, ids=lambda v: v if isinstance(v, str) else "")
@pytest.mark.parametrize("engine", ["CUDNN", "CAFFE"])
@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-4), ("float64", 1e-11)])
def test_every_layer_equals_the_hosts(kind, more, shapes, engine, dtype, tolerance, device):
    text = layer(kind, more, len(shapes)) + WEIGHTED
    net, ours = run(text, shapes, engine, dtype, device)
    _, theirs = run(text, shapes, engine, dtype, HOST)
    for mine, other in zip(ours, theirs):
        np.testing.assert_allclose(mine, other, rtol=tolerance, atol=tolerance / 10)
    it = net.layers[-2]
    why = {row.layer: row.what for row in net.engines.rows if row.direction == "device"}
    assert (it.space is HOST) == (it.name in why)
    if engine == "CUDNN":
        assert (it.space is HOST) == (kind in HOST_ONLY)


def test_a_blob_is_copied_where_it_is_asked_for(device):
    blob = Blob((2, 3))
    blob.data[...] = 5
    there = blob.on(device)
    assert there.data.tolist() == [[5.0] * 3] * 2
    there.data = there.data + 1
    assert blob.on(HOST).data.tolist() == [[6.0] * 3] * 2
    assert blob.on(device).data.data_ptr() == there.data.data_ptr()
    there.data.fill_(9)  # (both sides were the newest: nobody said that this one was written to)
    assert blob.on(HOST).data[0, 0] == 6
    blob.data[0, 0] = 7
    assert there.data[0, 0] == 7
    blob.on(device).wrote("diff")  # what was never there cannot have been written to
    blob.diff[...] = 1
    other = Blob((6,))
    other.share_diff(blob)
    assert other.on(device).diff.tolist() == [1.0] * 6
    other.on(device).diff = 2
    assert blob.diff.tolist() == [[2.0] * 3] * 2
    assert blob.held_bytes == 4 * 6 * 4


def test_the_callers_values_arrive_and_nothing_is_copied_twice(device, monkeypatch):
    net = network(layer("TanH"), [(2, 3)], gpu=device)
    net.blobs["a"].data[...] = 0.5
    np.testing.assert_allclose(net.forward()["y"], np.tanh(0.5), rtol=1e-6)
    copies = []
    upload = Torch.upload
    monkeypatch.setattr(Torch, "upload", lambda *a: (copies.append(1), upload(*a)))
    net.forward()
    assert not copies
    net.blobs["a"].data[...] = 0.25
    np.testing.assert_allclose(net.forward()["y"], np.tanh(0.25), rtol=1e-6)
    assert len(copies) == 1


def test_a_layer_without_a_kernel_runs_on_the_host(device, monkeypatch):
    def refuse(problem, plans):
        return "none today" if plans == "elsewhere" else compiled(problem, plans)

    compiled = engines.compiled_plan
    monkeypatch.setattr(engines, "compiled_plan", refuse)
    net = network(layer("Softmax"), [(2, 3)], gpu=Torch("cpu", "elsewhere"))
    net.blobs["a"].data[...] = 1
    np.testing.assert_allclose(net.forward()["y"], 1 / 3, rtol=1e-6)
    rows = {row.layer: row for row in net.engines.rows if row.direction == "device"}
    row = rows["it"]
    assert (row.engine, row.what) == ("host", "forward: none today")


NET = """
name: "small"
layer {
  name: "data" type: "MemoryData" top: "data" top: "label"
  memory_data_param { batch_size: 8 channels: 3 height: 8 width: 8 }
}
layer {
  name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 6 kernel_size: 3 weight_filler { type: "xavier" } }
}
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "norm" type: "LRN" bottom: "conv" top: "norm" lrn_param { alpha: 0.1 } }
layer { name: "pool" type: "Pooling" bottom: "norm" top: "pool"
        pooling_param { kernel_size: 2 stride: 2 } }
layer { name: "bn" type: "BatchNorm" bottom: "pool" top: "pool" }
layer { name: "drop" type: "Dropout" bottom: "pool" top: "pool" }
layer {
  name: "ip" type: "InnerProduct" bottom: "pool" top: "ip"
  param { lr_mult: 1 } param { lr_mult: 2 decay_mult: 0 }
  inner_product_param { num_output: 4 weight_filler { type: "xavier" } }
}
layer { name: "accuracy" type: "Accuracy" bottom: "ip" bottom: "label" top: "accuracy"
        include { phase: TEST } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""


def trained(space, more="", resume=None, steps=6):
    param = schema.SolverParameter()
    text = 'base_lr: 0.01 lr_policy: "fixed" max_iter: 100 random_seed: 3 weight_decay: 0.01 '
    text_format.Parse(text + "test_iter: 2 test_interval: 50 test_initialization: false", param)
    param.MergeFrom(text_format.Parse(more, schema.SolverParameter()))
    text_format.Parse(NET, param.net_param)
    solver = Solver(param, gpu=space)
    rng = np.random.default_rng(0)
    images, labels = rng.standard_normal((32, 3, 8, 8)).astype("f"), rng.integers(0, 4, 32)
    for net in (solver.net, *solver.test_nets):
        net.layers[0].reset(images, labels)
    if resume:
        solver.restore(resume)
    losses = []
    for _ in range(steps):
        solver.step(1)
        losses.append(solver.net.loss)
    return solver, losses


@pytest.mark.parametrize("kind", RULES)
def test_training_equals_the_hosts(kind, device):
    momentum = "momentum: 0.9" if RULES[kind].takes_momentum else ""
    delta = "delta: 0.01 momentum2: 0.99 clip_gradients: 1.5 regularization_type: "
    more = f'type: "{kind}" {momentum} {delta}"{"L1" if kind == "Adam" else "L2"}" iter_size: 2'
    ours, losses = trained(device, more)
    theirs, expected = trained(HOST, more)
    assert len({round(loss, 4) for loss in expected}) == len(expected)
    np.testing.assert_allclose(losses, expected, rtol=2e-4)
    for mine, other in zip(ours.net.learnable_params, theirs.net.learnable_params):
        np.testing.assert_allclose(mine.data, other.data, rtol=1e-3, atol=1e-5)
    tested, wanted = ours.test(), theirs.test()
    for name, value in tested.items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-3)


@pytest.mark.parametrize("more", ["", "snapshot_format: HDF5"])
def test_a_snapshot_goes_on_to_the_same_weights(more, device, tmp_path):
    more += f' momentum: 0.9 snapshot_prefix: "{tmp_path}/s"'
    first, _ = trained(device, more, steps=3)
    state = first.snapshot()
    first.step(3)
    second, _ = trained(device, more, resume=state, steps=3)
    for mine, other in zip(first.net.learnable_params, second.net.learnable_params):
        np.testing.assert_array_equal(mine.data, other.data)
    on_host, _ = trained(HOST, more, resume=state, steps=3)  # a snapshot knows no device
    for mine, other in zip(first.net.learnable_params, on_host.net.learnable_params):
        np.testing.assert_allclose(mine.data, other.data, rtol=1e-3, atol=1e-5)


def test_the_mode_decides_for_networks_that_are_not_told(device, monkeypatch):
    monkeypatch.setattr(spaces, "device_space", lambda index: device if index == 1 else HOST)
    monkeypatch.setattr(spaces, "_mode", {"gpu": False, "index": 0})
    assert network(layer("TanH"), [(2, 3)]).space is HOST
    caffe.set_device(1)
    assert caffe.current_device() == 1
    assert network(layer("TanH"), [(2, 3)]).space is HOST
    caffe.set_mode_gpu()
    assert network(layer("TanH"), [(2, 3)]).space is device
    caffe.set_mode_cpu()
    assert network(layer("TanH"), [(2, 3)]).space is HOST


@pytest.mark.parametrize("gpu", [-1, "0", 99])
def test_a_device_that_is_not_there_is_refused(gpu):
    with pytest.raises((InvalidDescriptor, Exception), match="gpu|device|GPU"):
        network(layer("TanH"), [(2, 3)], gpu=gpu)


def test_math_is_of_a_device():
    param = network(layer("TanH"), [(2, 3)]).param
    with pytest.raises(InvalidDescriptor, match="math"):
        caffe.Net(param, math="tf32")
    with pytest.raises(InvalidDescriptor, match="math"):
        caffe.Net(param, math="bf16", gpu=Torch("cpu"))


def test_the_peer_computes_the_same_network_and_is_timed(device, tmp_path):
    from bedstone.frameworks.caffe import timing, timing_device

    text = NET.replace("MemoryData", "DummyData").replace(
        "memory_data_param { batch_size: 8 channels: 3 height: 8 width: 8 }",
        """dummy_data_param { shape { dim: 8 dim: 3 dim: 8 dim: 8 } shape { dim: 8 }
           data_filler { type: "gaussian" } data_filler { type: "uniform" max: 4 } }""",
    )
    text = text.replace(
        'layer { name: "bn" type: "BatchNorm" bottom: "pool" top: "pool" }\n',
        'layer { name: "cat" type: "Concat" bottom: "pool" bottom: "pool" top: "cat" }\n',
    ).replace('"drop" type: "Dropout" bottom: "pool" top: "pool"',
              '"drop" type: "Dropout" bottom: "cat" top: "pool_"')  # fmt: skip
    text = text.replace('"InnerProduct" bottom: "pool"', '"InnerProduct" bottom: "pool_"')
    path = tmp_path / "net.prototxt"
    path.write_text(text)
    found = timing_device.measure(str(path), 2, device, peer="torch", batch=6)
    assert (found.batch, found.test_batch, list(found.sides)) == (6, 6, ["torch", "bedstone"])
    assert float(found.machine["largest difference from the peer"]) < 1e-5
    for side in found.sides.values():
        assert all(side.passes[name] > 0 for name in timing.PASSES)
        assert list(side.forward) == [name for name, _ in found.layers] == list(side.backward)[::-1]
        assert side.forward["conv"] > 0 < side.backward["conv"]
    assert "PyTorch" in timing.table(found)
    found.write(tmp_path / "t.json")
    timing.plot(found, str(tmp_path / "t.png"))


def test_a_peer_that_computes_something_else_is_refused(device):
    from bedstone.frameworks.caffe import timing_device
    from bedstone.frameworks.caffe.torch_network import TorchNetwork

    model = schema.NetParameter()
    text_format.Parse(
        """layer { name: "data" type: "DummyData" top: "a" top: "label" dummy_data_param {
             shape { dim: 4 dim: 5 } shape { dim: 4 }
             data_filler { type: "gaussian" } data_filler { type: "uniform" max: 3 } } }
           layer { name: "ip" type: "InnerProduct" bottom: "a" top: "ip" inner_product_param {
             num_output: 3 weight_filler { type: "xavier" } } }
           layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" }""",
        model,
    )
    ours = timing_device.Ours(model, None, device, "ieee")
    network = TorchNetwork(ours.net, "ieee")
    found = timing_device.compare(ours, network, "ieee")
    assert max(found.values()) < 1e-5
    assert set(found) == {"loss", "loss's gradient", "ip", "ip's gradient"}
    network.parameters["ip"][0].data[0] += 0.1
    with pytest.raises(InvalidDescriptor, match="ip.*apart by"):
        timing_device.compare(ours, network, "ieee")


INTERPRETED = """
import numpy as np
from bedstone.frameworks.caffe import Net, io, schema

TEXT = '''
layer { name: "a" type: "Input" top: "a" input_param { shape { dim: 1 dim: 2 dim: 4 dim: 3 } } }
layer { name: "n" type: "LRN" bottom: "a" top: "n" lrn_param { alpha: 0.1 local_size: 3 } }
layer { name: "r" type: "ReLU" bottom: "n" top: "n" }
layer { name: "d" type: "Dropout" bottom: "n" top: "d" }
'''
values = np.random.default_rng(0).standard_normal((1, 2, 4, 3))
nets = [Net(io.parse_text(TEXT, schema.NetParameter), gpu=gpu, seed=1) for gpu in (0, None)]
ours, theirs = (net.forward(a=values)["d"] for net in nets)
np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
print({row.what.partition(":")[0] for row in nets[0].engines.rows if row.engine == "bedstone"})
"""


def test_a_network_runs_on_the_gpus_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERPRETED], capture_output=True, text=True,
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}, check=False,
    )  # fmt: skip
    assert done.stdout == "{'triton'}\n", done.stdout + done.stderr[-2000:]
