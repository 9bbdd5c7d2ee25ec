"""Trials: the quicker side keeps a kind of call; the program does not notice them."""

from __future__ import annotations

import numpy as np
import pytest

paddle = pytest.importorskip("paddle", reason="PaddlePaddle is not installed")

import paddle.nn.functional as F  # noqa: E402

import bedstone.frameworks.paddle as on_bedstone  # noqa: E402
from bedstone.frameworks.paddle import trial  # noqa: E402

NATIVE_QUICKER, OURS_QUICKER = {"ours": 2.0, "native": 1.0}, {"ours": 1.0, "native": 2.0}


@pytest.fixture
def clock(monkeypatch):
    """The function that gives trials these seconds by side, and returns the list of what is timed:
    (side, of how many tensors gradients are wanted)."""
    timed = trial._timed

    def set_clock(seconds):
        seen = []

        def pretend(function, tensors, wanted):
            timed(function, tensors, wanted)
            seen.append((trial.side.name, len(wanted)))
            return seconds[trial.side.name]

        monkeypatch.setattr(trial, "_timed", pretend)
        return seen

    return set_clock


def tensors(height):
    """Of a kind that no other test has tried: by their height."""
    x, w = paddle.randn([1, 8, height, 41]), paddle.randn([4, 8, 3, 3])
    w.stop_gradient = False
    return x, w


@pytest.mark.parametrize(
    "seconds, height, own", [(NATIVE_QUICKER, 33, False), (OURS_QUICKER, 35, True)]
)
def test_the_quicker_side_keeps_the_call(seconds, height, own, clock):
    seen = clock(seconds)
    x, w = tensors(height)
    native = F.conv2d(x, w).numpy()
    with on_bedstone.enable():
        results = [F.conv2d(x, w) for _ in range(3)]
        # (A long call is timed once, after the first on each side.)
        assert seen == [("ours", 1)] * 2 + [("native", 1)] * 2
        with paddle.no_grad():
            F.conv2d(x, w)
        assert seen[4:] == [("ours", 0)] * 2 + [("native", 0)] * 2
    for result in results:
        np.testing.assert_allclose(result.numpy(), native, rtol=1e-4, atol=1e-4)
    report = on_bedstone.report()
    assert report.calls == 4 and report.own_calls == (4 if own else 0), str(report)
    assert report.reasons("conv2d") == ([] if own else [trial.QUICKER])


def test_nothing_is_tried_where_all_calls_are_asked_for(clock):
    seen = clock(NATIVE_QUICKER)
    x, w = tensors(37)
    with on_bedstone.enable(always=True):
        F.conv2d(x, w)
    assert seen == [] and on_bedstone.report().own("conv2d") == 1


@pytest.mark.parametrize("seconds, height", [(NATIVE_QUICKER, 39), (OURS_QUICKER, 41)])
def test_a_layer_with_a_bias_is_tried_as_a_whole(seconds, height, clock):
    seen = clock(seconds)
    layer, (x, _) = paddle.nn.Conv2D(8, 4, 3), tensors(height)
    native = layer(x).numpy()
    with on_bedstone.enable():
        np.testing.assert_allclose(layer(x).numpy(), native, rtol=1e-4, atol=1e-4)
    assert seen[:4] == [("ours", 2)] * 2 + [("native", 2)] * 2
    own = on_bedstone.report().own("conv2d")
    assert own == (1 if seconds is OURS_QUICKER else 0)


def test_the_program_does_not_notice():
    x, w = tensors(43)
    x.stop_gradient = False
    gradients = []
    w.register_hook(lambda gradient: gradients.append(gradient))
    with on_bedstone.enable():
        y = F.conv2d(x, w)
    assert x.grad is None and w.grad is None and not gradients
    assert on_bedstone.report().calls == 1  # on one side or the other
    y.sum().backward()
    assert len(gradients) == 1
    assert trial.side.name is None


def test_an_error_in_a_trial_ends_it(monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(trial, "_timed", fail)
    x, w = tensors(45)
    with on_bedstone.enable(), pytest.raises(ZeroDivisionError):
        F.conv2d(x, w)
    assert trial.side.name is None


def test_what_changes_its_arguments_is_not_tried(clock):
    seen = clock(NATIVE_QUICKER)
    layer = paddle.nn.BatchNorm2D(16)
    x = paddle.randn([4, 16, 128, 129])
    with on_bedstone.enable():
        layer(x)
    assert seen == [] and on_bedstone.report().own("batch_norm", "forward") == 1
