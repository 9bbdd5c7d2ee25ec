"""Static graphs: native with a reason, or broken at what runs on bedstone."""

from __future__ import annotations

import numpy as np
import pytest

paddle = pytest.importorskip("paddle", reason="PaddlePaddle is not installed")

import paddle.nn.functional as F  # noqa: E402
from paddle.jit.sot.utils import paddle_api_config  # noqa: E402

import bedstone  # noqa: E402
import bedstone.frameworks.paddle as on_bedstone  # noqa: E402

LOSS_TOLERANCE = 1e-6
GRAPH = "a static graph is being built"


def to_static(full_graph):
    return lambda network: paddle.jit.to_static(network, full_graph=full_graph)


def test_an_unbroken_static_graph_stays_native_and_the_log_says_why(caplog, losses):
    native = losses(3)
    with on_bedstone.enable(always=True), bedstone.config(log="info"):
        static = losses(3, to_static(full_graph=True))
    np.testing.assert_allclose(static, native, rtol=1e-5)
    report = on_bedstone.report()
    assert report.own_calls == 0 and set(report.reasons("conv2d")) == {GRAPH}, str(report)
    assert f"conv2d forward stays native: {GRAPH}" in caplog.text


def test_static_graphs_are_broken_at_convolutions(losses):
    """And the pieces train."""
    native = losses(3)
    with on_bedstone.enable(always=True):
        static = losses(3, to_static(full_graph=False))
    np.testing.assert_allclose(static, native, rtol=LOSS_TOLERANCE)
    report = on_bedstone.report()
    assert report.own("conv2d", "forward") == report.own("conv2d", "backward_filter") == 3 * 2
    assert report.own("depthwise_conv2d", "forward") == 3
    assert report.own("conv2d_transpose", "backward_filter") == 3


CALLERS = {
    "conv2d": F.conv2d,
    "conv1d": lambda x, w: F.conv1d(x.flatten(2), w.flatten(2)),
    "conv2d_transpose": F.conv2d_transpose,
}


@pytest.mark.parametrize("name", CALLERS)
def test_functions_break_static_graphs(name):
    function = CALLERS[name]

    def network(x, w):
        return F.relu(function(x * 2.0, w)) + 1.0

    x, w = paddle.randn([2, 3, 9, 9]), paddle.randn([3, 3, 3, 3])
    native = network(x, w).numpy()
    with on_bedstone.enable(always=True):
        static = to_static(full_graph=False)(network)
        inside = static(x, w).numpy()
        operator = "conv2d_transpose" if "transpose" in name else "conv2d"
        assert on_bedstone.report().own(operator) == 1
    np.testing.assert_allclose(inside, native, rtol=1e-5, atol=1e-5)
    on_bedstone.reset()
    np.testing.assert_array_equal(static(x, w).numpy(), native)  # traced before, native again
    assert on_bedstone.report().calls == 0


def test_marks_in_static_graphs_are_taken_back():
    known = (paddle_api_config.break_graph_layer_classes, paddle_api_config.break_graph_functions)
    before = [set(marks) for marks in known]
    paddle.jit.marker.force_dynamic(paddle.nn.Conv3D)  # by the program
    try:
        with on_bedstone.enable(only=["conv3d"]):
            with on_bedstone.enable(only=["conv2d", "relu"]):
                assert paddle.nn.Conv2D in known[0] and F.conv1d in known[1]
            assert F.conv3d in known[1] and F.conv2d not in known[1]
        assert paddle.nn.Conv3D in known[0]
    finally:
        known[0].discard(paddle.nn.Conv3D)
    assert [set(marks) for marks in known] == before


def test_what_the_program_forces_to_be_dynamic_is_ours(images):
    @paddle.jit.marker.force_dynamic
    class Dynamic(paddle.nn.MaxPool2D):
        pass

    network = paddle.nn.Sequential(paddle.nn.Tanh(), Dynamic(3), paddle.nn.Tanh())
    x, _ = images
    native = network(x)
    with on_bedstone.enable(only=["pool2d"], always=True):
        static = paddle.jit.to_static(network, full_graph=False)(x)
    np.testing.assert_allclose(static.numpy(), native.numpy(), rtol=1e-5, atol=1e-6)
    assert on_bedstone.report().own("pool2d", "forward") == 1


def test_static_mode_programs_stay_native():
    paddle.enable_static()
    try:
        with on_bedstone.enable(), paddle.static.program_guard(paddle.static.Program()):
            x = paddle.static.data("x", [2, 3, 8, 8])
            y = F.max_pool2d(F.relu(x), 2)
            (result,) = paddle.static.Executor().run(
                feed={"x": np.ones((2, 3, 8, 8), np.float32)}, fetch_list=[y]
            )
    finally:
        paddle.disable_static()
    assert result.shape == (2, 3, 4, 4) and (result == 1).all()
    assert on_bedstone.report().own_calls == 0
