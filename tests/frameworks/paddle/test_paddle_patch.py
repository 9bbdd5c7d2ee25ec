"""The switch: what is replaced and put back, gradients of all kinds, and a network's training."""

from __future__ import annotations

import gc
import logging
import sys

import numpy as np
import pytest

paddle = pytest.importorskip("paddle", reason="PaddlePaddle is not installed")

import paddle.nn.functional as F  # noqa: E402

import bedstone  # noqa: E402
import bedstone.frameworks.paddle as on_bedstone  # noqa: E402
from bedstone.frameworks.paddle.gradients import Record  # noqa: E402
from bedstone.frameworks.paddle.patch import LEFT_ALONE, OPERATORS  # noqa: E402

LOSS_TOLERANCE = 1e-6


def everywhere(value):
    """Every place among PaddlePaddle's Python modules that holds `value`."""
    return [
        (name, attribute)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "paddle" and module is not None
        for attribute, found in list(vars(module).items())
        if found is value
    ]


def test_every_place_is_replaced_and_put_back():
    natives = {name: getattr(paddle._C_ops, name) for name in OPERATORS}
    places = {name: everywhere(native) for name, native in natives.items()}
    # Some modules took these by name when they were imported.
    assert ("paddle.nn.functional.activation", "tanh") in places["tanh"]
    with on_bedstone.enable():
        for native in natives.values():
            left = {module for module, _ in everywhere(native)}
            assert left <= {"paddle._pir_ops", "paddle.base.libpaddle.pir.ops"}, LEFT_ALONE
        assert set(on_bedstone.patched()) == set(OPERATORS)
    assert {name: everywhere(native) for name, native in natives.items()} == places


def test_requests_add_up():
    native = paddle._C_ops.relu
    on_bedstone.patch(only=["relu", "tanh"])
    with on_bedstone.enable(except_=["tanh"]):
        on_bedstone.unpatch()
        assert paddle._C_ops.relu is not native
        assert "tanh" not in on_bedstone.patched() and "conv2d" in on_bedstone.patched()
    assert paddle._C_ops.relu is native
    with pytest.raises(RuntimeError, match="unpatch"):
        on_bedstone.unpatch()


@pytest.mark.parametrize("bad", [["conv9d"], "relu"])
def test_unknown_operators_are_refused(bad):
    with pytest.raises(bedstone.InvalidDescriptor, match="only"):
        on_bedstone.patch(only=bad)


def test_an_error_in_the_block_puts_back():
    native = paddle._C_ops.conv2d
    with pytest.raises(ZeroDivisionError), on_bedstone.enable():
        raise ZeroDivisionError
    assert paddle._C_ops.conv2d is native


def test_training_gives_the_native_losses(losses):
    native = losses()
    with on_bedstone.enable(always=True):
        patched = losses()
    assert native[-1] < native[0]
    np.testing.assert_allclose(patched, native, rtol=LOSS_TOLERANCE)
    report = on_bedstone.report()
    assert report.own_calls == report.calls, str(report)
    assert report.own("conv2d", "backward_filter") == 16
    assert report.own("conv2d", "backward_data") == 8  # the images need none
    assert report.own("relu", "backward") == report.own("pool2d", "forward") / 3 == 8


def test_small_tensors_stay_native_unless_asked():
    x = paddle.ones([2, 3])
    with on_bedstone.enable():
        F.relu(x)
    assert "so small" in on_bedstone.report().reasons("relu")[0]
    with on_bedstone.enable(always=True):
        F.relu(x)
    assert on_bedstone.report().own("relu") == 1


def test_mixed_precision_stays_native(images):
    x, _ = images
    w = paddle.ones([4, 1, 3, 3])
    with on_bedstone.enable(always=True):
        tracer = paddle.base.framework._dygraph_tracer()
        tracer._amp_dtype = "bfloat16"
        tracer._amp_level = paddle.base.core.AmpLevel.O1  # (auto_cast does not, on some CPUs)
        try:
            F.relu(x)
        finally:
            tracer._amp_level = paddle.base.core.AmpLevel.O0
            tracer._amp_dtype = "float32"
        F.conv2d(x, w)
    reasons = on_bedstone.report().reasons("relu")
    assert reasons == ["automatic mixed precision chooses the dtype"]
    assert on_bedstone.report().own("conv2d") == 1


def test_a_gradient_of_a_gradient(images):
    def penalty():
        paddle.seed(2)
        network = paddle.nn.Sequential(
            paddle.nn.Conv2D(1, 4, 3), paddle.nn.Sigmoid(), paddle.nn.Conv2D(4, 2, 3),
            paddle.nn.AvgPool2D(2), paddle.nn.ReLU(), paddle.nn.Conv2D(2, 1, 2),
        )  # fmt: skip
        x, _ = images
        x.stop_gradient = False
        (slope,) = paddle.grad([network(x).sum()], [x], create_graph=True)
        ((slope**2).sum() + network(x).mean()).backward()
        return [x.grad, *(p.grad for p in network.parameters() if p.grad is not None)]

    native = penalty()
    with on_bedstone.enable(always=True):
        patched = penalty()
    assert len(native) == len(patched) > 5
    for theirs, ours in zip(native, patched):
        scale = float(theirs.abs().max())
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-4, atol=1e-5 * scale)
    reasons = on_bedstone.report().reasons("conv2d")
    assert reasons == ["a gradient that is differentiated again"]


@pytest.mark.parametrize("function", [F.softmax, F.gelu, F.log_softmax])
def test_what_paddle_differentiates_once_only_is_refused(function):
    x = paddle.ones([4, 5])
    x.stop_gradient = False
    with pytest.raises(RuntimeError, match="higher order"):
        paddle.grad([(function(x) ** 2).sum()], [x], create_graph=True)
    with on_bedstone.enable(always=True), pytest.raises(RuntimeError, match="again"):
        paddle.grad([(function(x) ** 2).sum()], [x], create_graph=True)


def convolved(w, x):
    return F.conv2d(x, w)


def test_partial_and_repeated_gradients(images):
    x, _ = images
    w = paddle.ones([4, 1, 3, 3])
    x.stop_gradient = w.stop_gradient = False
    for asked in ([x], [w], [w, x]):
        with on_bedstone.enable(always=True):
            y = convolved(w, x)
        once = paddle.grad([y.sum()], asked, retain_graph=True)
        y.sum().backward(retain_graph=True)
        again = paddle.grad([y.sum()], asked)
        for a, b in zip(once, again, strict=True):
            assert (a == b).all()
        with pytest.raises(Exception, match="retain_graph"):
            y.sum().backward()
        x.clear_grad(), w.clear_grad()


def test_only_the_gradients_that_were_asked_for_are_computed(images):
    x, _ = images
    w = paddle.ones([4, 1, 3, 3])
    x.stop_gradient = w.stop_gradient = False
    with on_bedstone.enable(always=True):
        y = convolved(w, x)
        for asked, direction in ((x, "backward_data"), (w, "backward_filter")):
            on_bedstone.reset()
            paddle.grad([y.sum()], [asked], retain_graph=True)
            report = on_bedstone.report()
            assert report.own("conv2d", direction) == report.calls == 1, str(report)


def test_changes_in_place_are_noticed(images):
    x, _ = images
    w = paddle.ones([4, 1, 3, 3])
    w.stop_gradient = False
    with on_bedstone.enable(always=True):
        y = convolved(w, x)
        x.add_(paddle.ones_like(x))
        with pytest.raises(RuntimeError, match="in place"):
            y.sum().backward()


def test_hooks_and_kept_gradients_see_what_they_should():
    x = paddle.ones([4, 5])
    x.stop_gradient = False
    seen = []
    with on_bedstone.enable(always=True):
        y = F.sigmoid(x)
    y.register_hook(lambda gradient: seen.append(gradient.shape))
    y.retain_grads()
    y.sum().backward()
    assert seen == [[4, 5]] and y.grad.shape == [4, 5] and (y.grad == 1).all()


def records():
    gc.collect()
    return [found for found in gc.get_objects() if isinstance(found, Record)]


def test_graphs_are_freed():
    x = paddle.ones([64, 64])
    x.stop_gradient = False
    known = {id(record) for record in records()}
    before = len(known)
    with on_bedstone.enable(always=True):
        unused = [F.softmax(F.sigmoid(x * 1.0)) for _ in range(3)]
        assert len(records()) == before + 6
        del unused  # whether or not a gradient was ever asked for
        assert len(records()) == before
        losses = [F.sigmoid(x * 1.0).sum() for _ in range(3)]
        losses[0].backward(retain_graph=True)
        for loss in losses[1:]:
            loss.backward()
    # A loss that is kept, for a curve, keeps no tensors of its graph, unless that was asked for.
    mine = [record for record in records() if id(record) not in known]
    assert sorted(record.saved is not None for record in mine) == [False, False, True]
    del mine
    del losses, loss
    assert len(records()) == before


def test_reasons_are_logged_where_that_is_asked(caplog):
    reason = "paddle relu forward stays native"
    with caplog.at_level(logging.INFO), on_bedstone.enable():  # of the root: as PaddlePaddle sets
        F.relu(paddle.ones([2]))
        assert reason not in caplog.text
        on_bedstone.reset()
        with bedstone.config(log="info"):
            F.relu(paddle.ones([2]))
        assert caplog.text.count(reason) == 1
        on_bedstone.reset()
        with caplog.at_level(logging.INFO, "bedstone"):
            F.relu(paddle.ones([2]))
    assert caplog.text.count(reason) == 2


def test_the_process_s_logging_is_left_as_it_is(run):
    program = """
import logging, paddle
levels = lambda: {n: logging.getLogger(n).level for n in ("", *logging.root.manager.loggerDict)}
before = levels()
import bedstone.frameworks.paddle as on_bedstone
with on_bedstone.enable(always=True):
    paddle.nn.functional.relu(paddle.ones([64]))
    paddle.nn.functional.relu(paddle.ones([0]))  # (native, with a reason)
after = levels()
print(on_bedstone.report().own_calls)
assert {n: after[n] for n in before} == before, (before, after)
assert not any(level for name, level in after.items() if name.startswith("bedstone")), after
"""
    printed, errors = run(program)
    assert printed == ["1"]
    assert "bedstone" not in errors
