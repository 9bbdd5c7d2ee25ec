"""float16 and bfloat16 on the CPU, for which PaddlePaddle has tensors but next to no kernels: every
replaced operator, forward and backward, against the native one in float32."""

from __future__ import annotations

import numpy as np
import pytest

paddle = pytest.importorskip("paddle", reason="PaddlePaddle is not installed")

import bedstone.frameworks.paddle as on_bedstone  # noqa: E402
from bedstone.frameworks.paddle.patch import OPERATORS  # noqa: E402

# Relative to the largest value: results are rounded once; gradients begin from rounded ones.
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.5e-2}
PAIR, PADS = [1, 1], ([1, 1], "EXPLICIT")
POOL = ([2, 2], [2, 2], [0, 0])
VOLUME = ([2, 2, 2], [2, 2, 2], [0, 0, 0])
IMAGE, SPACE = (2, 4, 6, 6), (2, 4, 3, 4, 4)
ROWS = (3, 5, 7)
# operator -> (dims of its tensors, what follows them)
CALLS = {
    "conv2d": ([IMAGE, (3, 4, 3, 3)], (PAIR, *PADS, PAIR, 1, "NCHW")),
    "depthwise_conv2d": ([IMAGE, (4, 1, 3, 3)], (PAIR, *PADS, 4, PAIR, "NCHW")),
    "conv3d": ([SPACE, (3, 4, 2, 3, 3)],
               ([1] * 3, [1] * 3, "EXPLICIT", 1, [1] * 3, "NCDHW")),
    "conv2d_transpose": (
        [IMAGE, (4, 3, 3, 3)], (PAIR, [1, 1], [], None, "EXPLICIT", 1, PAIR, "NCHW")),
    "depthwise_conv2d_transpose": (
        [IMAGE, (4, 1, 3, 3)], (PAIR, [1, 1], [], None, "EXPLICIT", 4, PAIR, "NCHW")),
    "conv3d_transpose": (
        [SPACE, (4, 3, 2, 2, 2)],
        ([1] * 3, [0] * 3, [], [], "EXPLICIT", 1, [1] * 3, "NCDHW")),
    "pool2d": ([IMAGE], (*POOL, False, True, "NCHW", "avg", False, False, "EXPLICIT")),
    "pool3d": ([SPACE], (*VOLUME, False, True, "NCDHW", "max", False, False, "EXPLICIT")),
    "max_pool2d_with_index": ([IMAGE], (*POOL, False, False, False)),
    "max_pool3d_with_index": ([SPACE], (*VOLUME, False, False, False)),
    "softmax": ([ROWS], (-1,)), "log_softmax": ([ROWS], (1,)),
    "relu": ([ROWS], ()), "sigmoid": ([ROWS], ()), "tanh": ([ROWS], ()), "silu": ([ROWS], ()),
    "gelu": ([ROWS], (False,)), "leaky_relu": ([ROWS], (0.1,)), "elu": ([ROWS], (1.0,)),
    "batch_norm": ([IMAGE, (4,), (4,), (4,), (4,)], (False, 0.9, 1e-5, "NCHW", False, False)),
    "layer_norm": ([ROWS, (35,), (35,)], (1e-5, 1)),
    "group_norm": ([IMAGE, (4,), (4,)], (1e-5, 2, "NCHW")),
    "instance_norm": ([IMAGE, (4,), (4,)], (1e-5,)),
}  # fmt: skip
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
