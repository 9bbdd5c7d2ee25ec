"""The networks of `bedstone bench model --framework paddle`, small: both sides agree, and count."""

from __future__ import annotations

import pytest

paddle = pytest.importorskip("paddle", reason="PaddlePaddle is not installed")

import bedstone  # noqa: E402
from bedstone.bench import model, paddle_calls, report  # noqa: E402
from bedstone.frameworks.paddle import bench, trial  # noqa: E402

SETTINGS = ("squeezenet1_1", 1, "nchw", "float32")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(bench, "PICTURE", (3, 64, 64))
    monkeypatch.setattr(bench, "SETTLE_SECONDS", 0.0)
    # Nothing here may hang on which side is the quicker one on this machine.
    monkeypatch.setattr(trial, "reason_for_native", lambda *_: None)
    threads = bench.paddle_threads()
    yield
    paddle.base.core.set_num_threads(threads)


@pytest.mark.parametrize("training", [False, True])
def test_both_sides_agree(training):
    network = model.load("paddle")(*SETTINGS, training)
    assert model.compare(network) < model.DIFFERENCE["float32"]
    first = network.result()
    seen = []
    for side in model.SIDES:
        before = network.counts()
        with network.side(side):
            network.step()
        seen.append(tuple(b - a for a, b in zip(before, network.counts())))
    assert seen[0] == (0, 0)  # native: nothing was taken over
    own, calls = seen[1]
    assert 0 < own <= calls and calls >= 26  # its convolutions (the small ones stay native)
    changed = bool(abs(network.result() - first).max() > 0)
    assert changed is training  # (a step changes the weights)
    assert "conv2d" in network.taken() and "paddle" in network.versions


def test_every_name_is_a_network():
    assert all(callable(getattr(bench.models, name)) for name in bench.MODELS)


@pytest.mark.parametrize(
    "place, wrong, match",
    [(0, "resnet51", "--model"), (2, "nhwc", "--layout"), (3, "float16", "--dtype")],
)
def test_mistakes(place, wrong, match):
    settings = list(SETTINGS)
    settings[place] = wrong
    with pytest.raises(bedstone.InvalidDescriptor, match=match):
        bench.Model(*settings, False)


def test_the_table_of_what_a_call_costs(monkeypatch, tmp_path):
    monkeypatch.setattr(paddle_calls, "REPEATS", 1)
    monkeypatch.setattr(paddle_calls, "ROUNDS", 1)
    paddle_calls.main([str(tmp_path / "calls.csv")])
    _, rows = report.read_csv(str(tmp_path / "calls.csv"))
    both = [row["what"] for row in rows if row["training_on_bedstone"]]
    assert both == list(paddle_calls.operators(paddle))
    assert len(rows) == len(both) + len(paddle_calls.adapters(paddle))
    assert all(float(row["native"]) > 0 for row in rows)
