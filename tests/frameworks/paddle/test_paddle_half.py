"""float16 and bfloat16 on the CPU, for which PaddlePaddle has tensors but next to no kernels: every
replaced operator, forward and backward, against the native one in float32."""

from __future__ import annotations

import numpy as np
import pytest

paddle = pytest.importorskip("paddle", reason="PaddlePaddle is not installed")

import bedstone.frameworks.paddle as on_bedstone  # noqa: E402
from bedstone.frameworks.paddle.coverage import CALLS, directions  # noqa: E402
from bedstone.frameworks.paddle.patch import OPERATORS  # noqa: E402

# Relative to the largest value: results are rounded once; gradients begin from rounded ones.
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.5e-2}
NORMALIZATIONS = ("batch_norm", "layer_norm", "group_norm", "instance_norm")


def outcome(name, dtype, parameters):
    """Result and gradients as float32 arrays, from values that both half types hold exactly."""
    shapes, how = CALLS[name]
    tensors = []
    for i, shape in enumerate(shapes):
        values = (np.random.default_rng(i).integers(-16, 16, shape) + 0.5) / 8
        if name == "batch_norm" and i == 2:
            values = np.abs(values)
        t = paddle.to_tensor(values.astype("float32")).astype(parameters if i else dtype)
        t.stop_gradient = name == "batch_norm" and i in (1, 2)
        tensors.append(t)
    y = getattr(paddle._C_ops, name)(*tensors, *how)
    y = y[0] if isinstance(y, (tuple, list)) else y
    dy = paddle.to_tensor(np.random.default_rng(9).integers(-8, 9, y.shape).astype("float32"))
    wanted = [t for t in tensors if not t.stop_gradient]
    gradients = paddle.grad([y], wanted, [dy.astype(dtype)])
    assert y.dtype == tensors[0].dtype
    assert [g.dtype for g in gradients] == [t.dtype for t in wanted]
    return [t.astype("float32").numpy() for t in (y, *gradients)]


def test_every_operator_is_here():
    assert set(CALLS) == set(OPERATORS)


def test_the_coverage_table_says_what_ran():
    assert directions("conv2d") == ("forward", "backward_data", "backward_filter")
    for name in OPERATORS:
        forward, *gradients = directions(name)
        assert forward == "forward" and gradients, name
        assert all(of.startswith("backward") for of in gradients), name


def test_the_coverage_table_can_say_native(monkeypatch):
    shapes, _ = CALLS["pool2d"]
    adaptive = ([3, 3], [1, 1], [0, 0], False, True, "NCHW", "max", False, True, "EXPLICIT")
    monkeypatch.setitem(CALLS, "pool2d", (shapes, adaptive))
    assert directions("pool2d") == ("native: adaptive maximum, or adaptive and global at once",)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", CALLS)
def test_half(name, dtype):
    native = outcome(name, "float32", "float32")
    for parameters in {dtype, "float32"} if name in NORMALIZATIONS else {dtype}:
        on_bedstone.reset()
        with on_bedstone.enable():  # (however small: there is nothing else)
            half = outcome(name, dtype, parameters)
        report = on_bedstone.report()
        assert report.own_calls == report.calls >= 2, str(report)
        for theirs, ours in zip(native, half, strict=True):
            scale = np.abs(theirs).max() or 1
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE[dtype] * scale)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_operands_of_two_types_are_left_to_paddle(dtype):
    """Which refuses them."""
    x, w = paddle.ones([1, 2, 4, 4]).astype(dtype), paddle.ones([2, 2, 3, 3])
    on_bedstone.reset()
    with on_bedstone.enable(always=True), pytest.raises(Exception):  # noqa: B017
        paddle.nn.functional.conv2d(x, w)
    assert on_bedstone.report().own_calls == 0


def test_a_network_s_gradients_in_bfloat16():
    paddle.seed(4)
    nn = paddle.nn
    network = nn.Sequential(
        nn.Conv2D(1, 8, 3, bias_attr=False), nn.BatchNorm2D(8), nn.Sigmoid(), nn.AvgPool2D(2),
        nn.Conv2D(8, 4, 3), nn.Sigmoid(), nn.AdaptiveAvgPool2D(1),
    )  # fmt: skip
    random = np.random.default_rng(0)
    x = paddle.to_tensor(random.random((8, 1, 12, 12), np.float32))
    network(x)[:, 0].sum().backward()
    learnt = [p for p in network.parameters() if not p.stop_gradient]
    native = [p.grad.numpy() for p in learnt]
    network.clear_gradients()
    network.to(dtype="bfloat16")
    with on_bedstone.enable():
        network(x.astype("bfloat16"))[:, 0].sum().backward()
    for theirs, p in zip(native, learnt, strict=True):
        ours = p.grad.astype("float32").numpy()
        cosine = (ours * theirs).sum() / np.sqrt((ours**2).sum() * (theirs**2).sum())
        assert cosine > 0.99
