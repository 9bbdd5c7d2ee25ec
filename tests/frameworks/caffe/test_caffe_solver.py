"""The solver on small networks: updates by hand, accumulation, tests, the log, snapshots."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest

pytest.importorskip("google.protobuf")
pytest.importorskip("h5py")

from google.protobuf import text_format

from bedstone.frameworks.caffe import schema
from bedstone.frameworks.caffe.solver import SNAPSHOT, STOP, Solver
from bedstone.frameworks.caffe.solvers_log import Log
from bedstone.frameworks.caffe.spaces import HOST
from bedstone.spec.errors import InvalidDescriptor

BATCH, INPUTS, OUTPUTS = 4, 3, 2

NET = """
name: "regression"
layer {
  name: "data" type: "MemoryData" top: "data" top: "label"
  memory_data_param { batch_size: %(batch)d channels: 3 height: 1 width: 1 }
}
layer { name: "silent" type: "Silence" bottom: "label" }
layer {
  name: "target" type: "InnerProduct" bottom: "data" top: "target"
  param { lr_mult: 0 decay_mult: 0 }
  inner_product_param { num_output: 2 bias_term: false weight_filler { type: "gaussian" } }
}
layer {
  name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
  param { lr_mult: 1 decay_mult: 1 } param { lr_mult: 2 decay_mult: 0.5 }
  inner_product_param { num_output: 2 weight_filler { type: "gaussian" } }
}
layer { name: "loss" type: "EuclideanLoss" bottom: "ip" bottom: "target" top: "loss" }
"""
DATA = np.random.default_rng(7).normal(size=(24, INPUTS, 1, 1)).astype("f")


def solver(text="", batch=BATCH, net=NET, log=None, data=DATA):
    param = schema.SolverParameter()
    defaults = 'base_lr: 0.05 lr_policy: "fixed" max_iter: 8 random_seed: 3'
    text_format.Parse(f"{defaults} snapshot_after_train: false", param)
    param.MergeFrom(text_format.Parse(text, schema.SolverParameter()))
    text_format.Parse(net % {"batch": batch}, param.net_param)
    made = Solver(param, log=log)
    for each in (made.net, *made.test_nets):
        each.layers[0].reset(data, np.zeros(len(data)))
    return made


def weights(made):
    return [blob.data.copy() for blob in made.net.params["ip"]]


def gradients(w, b, target, x):
    """Of the Euclidean loss sum |x w' + b - x target'|^2 / 2N."""
    error = (x @ w.T + b - x @ target.T) / len(x)
    return error.T @ x, error.sum(axis=0)


def by_hand(made, steps, advance, batch=BATCH):
    """Weights after `steps` updates, in float64; `advance(i, parameter, g, history) -> step`."""
    w, b = (blob.data.astype(float) for blob in made.net.params["ip"])
    target = made.net.params["target"][0].data.astype(float)
    histories = [{}, {}]
    rows = DATA.reshape(-1, INPUTS).astype(float)
    for i in range(steps):
        x = np.roll(rows, -i * batch, axis=0)[:batch]
        gw, gb = gradients(w, b, target, x)
        w = w - advance(i, w, gw, histories[0], 1.0, 1.0)
        b = b - advance(i, b, gb, histories[1], 2.0, 0.5)
    return w, b


def sgd(momentum=0.0, decay=0.0, rate=lambda i: 0.05):
    def advance(i, value, g, h, lr_mult, decay_mult):
        h["v"] = momentum * h.get("v", 0.0) + rate(i) * lr_mult * (g + decay * decay_mult * value)
        return h["v"]

    return advance


def adam(i, value, g, h, lr_mult, decay_mult):
    h["m"] = 0.9 * h.get("m", 0.0) + 0.1 * g
    h["v"] = 0.99 * h.get("v", 0.0) + 0.01 * g * g
    fixed = np.sqrt(1 - 0.99 ** (i + 1)) / (1 - 0.9 ** (i + 1))
    return 0.05 * lr_mult * fixed * h["m"] / (np.sqrt(h["v"]) + 1e-8)


@pytest.mark.parametrize(
    ("text", "advance"),
    [("", sgd()),
     ("momentum: 0.9 weight_decay: 0.1", sgd(0.9, 0.1)),
     ('lr_policy: "step" gamma: 0.5 stepsize: 2', sgd(rate=lambda i: 0.05 * 0.5 ** (i // 2))),
     ('type: "Adam" momentum: 0.9 momentum2: 0.99', adam),
     ("solver_type: ADAM momentum: 0.9 momentum2: 0.99", adam)],
    ids=["plain", "momentum-decay", "step", "adam", "old-enum"],
)  # fmt: skip
def test_training_is_the_formula(text, advance):
    made = solver(text)
    expected = by_hand(made, 8, advance)
    made.step(8)
    assert made.iter == 8
    for got, wanted in zip(weights(made), expected):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)


def test_fixed_layer_stays():
    made = solver("weight_decay: 0.5")
    before = made.net.params["target"][0].data.copy()
    made.step(3)
    np.testing.assert_array_equal(made.net.params["target"][0].data, before)


def test_clipping_limits_the_common_norm():
    made = solver("clip_gradients: 0.01")
    before = weights(made)
    made.step(1)
    moved = [(a - b) / 0.05 for a, b in zip(before, weights(made))]
    moved[1] /= 2  # the bias's lr_mult
    assert np.sqrt(sum((m**2).sum() for m in moved)) == pytest.approx(0.01, rel=1e-3)


def test_iter_size_is_a_larger_batch():
    settings = "momentum: 0.9 weight_decay: 0.01"
    small, large = solver(f"{settings} iter_size: 3", batch=4), solver(settings, batch=12)
    small.step(4)
    large.step(4)
    for a, b in zip(weights(small), weights(large)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_shared_parameter_gets_both_gradients_and_one_step():
    twice = NET.replace("param { lr_mult: 1 decay_mult: 1 } param { lr_mult: 2 decay_mult: 0.5 }",
                        'param { name: "w" } param { name: "b" }')  # fmt: skip
    layer = twice[twice.index('layer {\n  name: "ip"') : twice.index('layer { name: "loss"')]
    twice += layer.replace('name: "ip"', 'name: "ip2"').replace('top: "ip"', 'top: "ip2"')
    twice += 'layer { name: "l2" type: "EuclideanLoss" bottom: "ip2" bottom: "target" top: "l2" }'
    made, single = solver(net=twice), solver("base_lr: 0.1", net=NET.replace("lr_mult: 2", ""))
    assert len(made.history) == len(made.net.learnable_params) == 3
    for a, b in zip(single.net.params["ip"], made.net.params["ip"]):
        a.data[...] = b.data
    single.net.params["target"][0].data[...] = made.net.params["target"][0].data
    made.step(3)
    single.step(3)
    for a, b in zip(weights(single), weights(made)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_loss_is_averaged_over_the_last_iterations():
    made = solver("average_loss: 3")
    losses = []
    made.add_callback(lambda: None, lambda: losses.append(float(made.net.loss)))
    made.step(7)
    assert len(losses) == 7
    assert made.loss == pytest.approx(np.mean(losses[-3:]))


LINES = [
    r"Iteration 0.*, loss = \S+",
    r"    Train net output #0: loss = \S+ \(\* 1 = \S+ loss\)",
    r"Iteration 0, lr = 0\.05",
    r"Iteration 2 \(\S+ iter/s\), loss = \S+",
    r"Iteration 4, Testing net \(#0\)",
    r"    Test net output #0: loss = \S+ \(\* 1 = \S+ loss\)",
    r"Optimization Done\.",
]


def test_log_has_caffe_s_lines_in_order():
    stream = io.StringIO()
    made = solver("display: 2 test_iter: 2 test_interval: 4", log=Log(stream))
    made.solve()
    text = stream.getvalue()
    at = text.index("Solving regression")
    for line in LINES:
        found = re.compile(rf"\] {line}$", re.MULTILINE).search(text, at)
        assert found, f"no {line} after {text[at:]}"
        at = found.end()
    # Three tests: before the first iteration, after 4, and at the end (8).
    assert re.findall(r"Iteration (\d+), Testing net", text) == ["0", "4", "8"]


def test_what_log_parsers_look_for():
    """The numbers come out with the expressions that such tools use."""
    stream = io.StringIO()
    solver("display: 1 test_iter: 1 test_interval: 4", log=Log(stream)).solve()
    train, test, rates, iteration = [], [], {}, None
    for line in stream.getvalue().splitlines():
        if found := re.search(r"Iteration (\d+)", line):
            iteration = int(found[1])
        if found := re.search(r"lr = ([-+]?\d*\.?\d+(?:[eE]?[-+]?\d+)?)", line):
            rates[iteration] = float(found[1])
        if found := re.search(r"Train net output #(\d+): (\S+) = ([.\deE+-]+)", line):
            train.append((iteration, found[2], float(found[3])))
        if found := re.search(r"Test net output #(\d+): (\S+) = ([.\deE+-]+)", line):
            test.append((iteration, found[2], float(found[3])))
    assert [i for i, _, _ in train] == list(range(8)) and {n for _, n, _ in train} == {"loss"}
    assert all(loss > 0 for _, _, loss in train)
    assert [i for i, _, _ in test] == [0, 4, 8]
    assert rates == dict.fromkeys(range(8), 0.05)


def test_test_nets_see_the_training_weights():
    made = solver("test_iter: 6 test_interval: 100")
    made.step(2)
    w, b = (blob.data for blob in made.net.params["ip"])
    x = DATA.reshape(-1, INPUTS)
    error = x @ w.T + b - x @ made.net.params["target"][0].data.T
    expected = (error**2).sum() / 2 / BATCH / 6  # six batches are all 24 rows
    assert made.test(0)["loss"] == pytest.approx(expected, rel=1e-4)


KINDS = ['type: "SGD" momentum: 0.9', 'type: "Nesterov" momentum: 0.9', 'type: "AdaGrad"',
         'type: "RMSProp" rms_decay: 0.9', 'type: "AdaDelta" momentum: 0.95 delta: 1e-6',
         'type: "Adam" momentum: 0.9']  # fmt: skip


@pytest.mark.parametrize("form", ["BINARYPROTO", "HDF5"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.split('"')[1])
def test_snapshot_goes_on_bit_for_bit(tmp_path, monkeypatch, kind, form):
    monkeypatch.chdir(tmp_path)
    text = f'{kind} weight_decay: 0.01 snapshot_prefix: "s" snapshot_format: {form}'
    one = solver(text)
    one.step(3)
    state = one.snapshot()
    assert state.name == "s_iter_3.solverstate" + (".h5" if form == "HDF5" else "")
    one.step(4)
    other = solver(text.replace("random_seed: 3", "random_seed: 4"))
    other.restore(state)
    assert other.iter == 3
    other.step(4)
    for a, b in zip(weights(one), weights(other)):
        np.testing.assert_array_equal(a, b)
    assert not list(tmp_path.glob(".*tmp"))


def test_snapshot_every_so_often_and_after_training(tmp_path):
    prefix = tmp_path / "s"
    made = solver(f'snapshot: 3 snapshot_prefix: "{prefix}" snapshot_after_train: true')
    made.solve()
    names = sorted(path.name for path in tmp_path.glob("*.solverstate"))
    assert names == ["s_iter_3.solverstate", "s_iter_6.solverstate", "s_iter_8.solverstate"]
    assert len(list(tmp_path.glob("*.caffemodel"))) == 3


def test_moved_snapshot_finds_its_weights(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    made = solver(f'snapshot_prefix: "{first}/s"')
    made.step(2)
    made.snapshot()
    first.rename(second)
    other = solver()
    other.restore(second / "s_iter_2.solverstate")
    for a, b in zip(weights(made), weights(other)):
        np.testing.assert_array_equal(a, b)


def test_state_of_another_program_is_read(tmp_path):
    """Without our field: the iteration and histories are there, the data start anew."""
    made = solver(f'momentum: 0.9 snapshot_prefix: "{tmp_path}/s"')
    made.step(2)
    path = made.snapshot()
    state = schema.SolverState.FromString(path.read_bytes())
    state.ClearField("bedstone_state")
    path.write_bytes(state.SerializeToString())
    stream = io.StringIO()
    other = solver("momentum: 0.9", log=Log(stream))
    other.restore(path)
    assert other.iter == 2 and "no data positions" in stream.getvalue()
    np.testing.assert_array_equal(other.history[1], made.history[1])


def test_failed_snapshot_leaves_the_older_one(tmp_path, monkeypatch):
    made = solver(f'snapshot_prefix: "{tmp_path}/s"')
    path = made.snapshot()
    before = path.read_bytes()
    made.net.params["ip"][0].data[...] = 5
    monkeypatch.setattr("os.replace", lambda *names: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(InvalidDescriptor, match="disk full"):
        made.snapshot()
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s_iter_0.caffemodel", path.name]


@pytest.mark.parametrize("damage", ["missing", "cut", "other solver", "other net"])
def test_bad_snapshot_is_refused(tmp_path, damage):
    made = solver(f'momentum: 0.9 snapshot_prefix: "{tmp_path}/s"')
    path = made.snapshot()
    other = solver('type: "Adam" momentum: 0.9' if damage == "other solver" else "momentum: 0.9",
                   net=NET.replace("num_output: 2", "num_output: 5")
                   if damage == "other net" else NET)  # fmt: skip
    if damage == "missing":
        path.unlink()
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InvalidDescriptor, match="s_iter_0"):
        other.restore(path)


def test_requests_are_obeyed_between_iterations(tmp_path):
    made = solver(f'snapshot_prefix: "{tmp_path}/s" snapshot_after_train: true')
    requests = iter(["none", SNAPSHOT, "none", STOP])
    made.requested = lambda: next(requests, "none")
    made.solve()
    assert made.iter == 4
    assert sorted(p.name for p in tmp_path.glob("*state")) == [
        "s_iter_2.solverstate", "s_iter_4.solverstate",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "complaint"),
    [('type: "Lion"', "solver type.*Lion"), ('lr_policy: "cosine"', "lr_policy.*cosine"),
     ('type: "AdaGrad" momentum: 0.9', "momentum"), ("momentum: 1.5", "momentum.*1.5"),
     ('regularization_type: "L3"', "regularization_type.*L3"), ("iter_size: 0", "iter_size"),
     ("test_iter: 3", "test_interval"), ("test_iter: 0 test_interval: 5", "test_iter"),
     ('net: "a.prototxt"', "net and net_param"), ('weights: "none.caffemodel"', "none.caffemodel"),
     ("test_iter: 1 test_interval: 1 test_state {} test_state {}", "test_state")],
)  # fmt: skip
def test_bad_solver_is_refused(text, complaint):
    with pytest.raises((InvalidDescriptor, FileNotFoundError), match=complaint):
        solver(text)


@pytest.mark.parametrize("mode", ["GPU", "CPU"])
def test_gpu_mode_without_a_gpu_runs_on_the_cpu_visibly(mode, monkeypatch):
    def missing(index):
        raise InvalidDescriptor("device", index, "a GPU")

    monkeypatch.setattr("bedstone.frameworks.caffe.solver.device_space", missing)
    stream = io.StringIO()
    made = solver(f"solver_mode: {mode}", log=Log(stream))
    made.step(1)
    assert made.net.space is HOST
    assert ("running on the CPU" in stream.getvalue()) == (mode == "GPU")
