"""Normalisation through PaddlePaddle: values, every gradient and the running statistics are its
own, in both layouts; what its gradients do not take stays native."""

from __future__ import annotations

import numpy as np
import pytest

paddle = pytest.importorskip("paddle", reason="PaddlePaddle is not installed")

import bedstone.frameworks.paddle as on_bedstone  # noqa: E402

# Relative to the largest value: sums of some hundred elements, in another order. (The native
# kernels hold some constants in float32 whatever the dtype.)
TOLERANCE = {"float32": 1e-5, "float64": 1e-11}
EPSILON = 1e-5
C = 6
NAMES = ("batch_norm", "layer_norm", "group_norm", "instance_norm")


def tensor(*shape, dtype="float32", seed=0):
    values = np.random.default_rng(seed).standard_normal(shape)
    return paddle.to_tensor(values.astype(dtype))


def outcome(function, tensors):
    """Results, gradients of all tensors and what the call changes, as float64 arrays."""
    tensors = [t.detach() for t in tensors]
    for t in tensors:
        t.stop_gradient = False
    y, *changed = function(*tensors)
    dy = tensor(*y.shape, dtype=str(y.dtype).rpartition(".")[2], seed=9)
    results = [y, *paddle.grad([y], tensors, [dy]), *changed]
    return [np.asarray(t.numpy(), np.float64) for t in results]


def compare(name, function, tensors, backward=True):
    """Native and patched agree; both directions ran on bedstone's kernels (`backward` False: the
    gradient is native)."""
    native = outcome(function, tensors)
    on_bedstone.reset()
    with on_bedstone.enable(always=True):
        patched = outcome(function, tensors)
    dtype = str(tensors[0].dtype).rpartition(".")[2]
    for theirs, ours in zip(native, patched, strict=True):
        assert ours.shape == theirs.shape
        scale = max(np.abs(theirs).max(), 1.0)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE[dtype] * scale)
    report = on_bedstone.report()
    # One kernel makes all gradients.
    assert (report.own(name, "forward"), report.own(name, "backward")) == (1, int(backward))
    return report


def affine(kinds, size=C, dtype="float32"):
    """Scale and shift, those named in `kinds`."""
    return [tensor(size, dtype=dtype, seed=s) for s, kind in enumerate("wb", 1) if kind in kinds]


def spread(kinds, vectors):
    """(scale, shift), None for those not named."""
    given = iter(vectors)
    return [next(given) if kind in kinds else None for kind in "wb"]


LAYOUTS = {"NCHW": (4, C, 5, 7), "NHWC": (4, 5, 7, C)}
FLAGS = {  # is_test, use_global_stats, trainable_statistics -> whether the gradient is ours
    "training": ((False, False, False), True),
    "evaluation": ((True, True, False), False),
    "frozen": ((False, True, False), False),
    "the batch's, in evaluation": ((True, False, True), False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("dtype, kinds", [("float32", "wb"), ("float64", "wb"), ("float32", "")])
def test_batch_norm(dtype, kinds, flags, layout):
    (test, *globally), backward = FLAGS[flags]

    def function(x, *vectors):
        running = [tensor(C, dtype=dtype, seed=3), tensor(C, dtype=dtype, seed=4).abs()]
        how = (test, 0.9, EPSILON, layout, *globally)
        y, *others = paddle._C_ops.batch_norm(x, *running, *spread(kinds, vectors), *how)
        # The running statistics are changed where they are, and given out too.
        assert [t.data_ptr() for t in others[:2]] == [t.data_ptr() for t in running]
        return y, *running, *(others[2:4] if flags == "training" else ())

    vectors = affine(kinds, dtype=dtype)
    x = tensor(*LAYOUTS[layout], dtype=dtype)
    report = compare("batch_norm", function, [x, *vectors], backward)
    if not backward:
        assert "running statistics" in report.reasons("batch_norm")[0]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("axis, kinds", [(1, "wb"), (2, "wb"), (3, ""), (1, "w"), (2, "b")])
def test_layer_norm(axis, kinds, dtype):
    shape = (3, 4, 5, 7)
    vectors = affine(kinds, int(np.prod(shape[axis:])), dtype)
    function = lambda x, *v: [  # noqa: E731
        paddle._C_ops.layer_norm(x, *spread(kinds, v), EPSILON, axis)
    ]
    compare("layer_norm", function, [tensor(*shape, dtype=dtype), *vectors])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("groups", [1, 2, C])
@pytest.mark.parametrize("layout, kinds", [("NCHW", "wb"), ("NHWC", "wb"), ("NCHW", "w")])
def test_group_norm(layout, kinds, groups, dtype):
    function = lambda x, *v: [  # noqa: E731
        paddle._C_ops.group_norm(x, *spread(kinds, v), EPSILON, groups, layout)
    ]
    x = tensor(*LAYOUTS[layout], dtype=dtype)
    compare("group_norm", function, [x, *affine(kinds, dtype=dtype)])


@pytest.mark.parametrize("kinds", ["wb", ""])
@pytest.mark.parametrize("shape", [(4, C, 9), (2, C, 5, 7), (2, C, 3, 2, 4)])
def test_instance_norm(shape, kinds):
    function = lambda x, *v: [  # noqa: E731
        paddle._C_ops.instance_norm(x, *spread(kinds, v), EPSILON)
    ]
    compare("instance_norm", function, [tensor(*shape), *affine(kinds)])


@pytest.mark.parametrize(
    "layer, shape",
    [
        (lambda: paddle.nn.BatchNorm1D(C), (4, C)),
        (lambda: paddle.nn.BatchNorm1D(C, data_format="NLC"), (4, 5, C)),
        (lambda: paddle.nn.BatchNorm3D(C, momentum=0.6, epsilon=1e-3), (2, C, 3, 4, 5)),
        (lambda: paddle.nn.BatchNorm(C), (2, C, 5, 7)),
        (lambda: paddle.nn.LayerNorm([5, 7]), (2, C, 5, 7)),
        (lambda: paddle.nn.GroupNorm(3, C), (2, C, 5, 7)),
        (lambda: paddle.nn.InstanceNorm2D(C), (2, C, 5, 7)),
    ],
    ids=["1D", "1D last", "3D", "of Paddle 1", "layer", "group", "instance"],
)
def test_layers_learn_and_evaluate_as_natively(layer, shape):
    """Some steps of training, then the running statistics in use."""

    def run():
        paddle.seed(3)
        network = layer()
        descent = paddle.optimizer.SGD(0.1, parameters=network.parameters())
        for step in range(3):
            # (The native instance_norm demands that its input need a gradient.)
            (network(wanted(tensor(*shape, seed=step))) ** 3).mean().backward()
            descent.step()
            descent.clear_grad()
        network.eval()
        with paddle.no_grad():
            y = network(tensor(*shape, seed=7))
        return [y, *network.parameters(), *network.buffers()]

    native = run()
    on_bedstone.reset()
    with on_bedstone.enable(always=True):
        patched = run()
    for theirs, ours in zip(native, patched, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-5, atol=1e-5)
    norms = [line for line in on_bedstone.report().lines if line.operator in NAMES]
    assert norms and all(line.own for line in norms), str(on_bedstone.report())
    assert sum(line.calls for line in norms) == 4 + 3


@pytest.mark.parametrize(
    "reason, call",
    [
        ("one element", lambda: norm((1, C, 1, 1))),
        ("no two vectors", lambda: norm((2, C, 3, 3), mean=tensor(2 * C)[::2])),
        ("need a gradient", lambda: norm((2, C, 3, 3), mean=wanted(tensor(C)))),
    ],
)
def test_what_stays_native(reason, call):
    native = call().numpy()
    on_bedstone.reset()
    with on_bedstone.enable(always=True):
        patched = call().numpy()
    np.testing.assert_equal(patched, native)
    assert on_bedstone.report().own_calls == 0
    assert any(reason in line.reason for line in on_bedstone.report().lines)


@pytest.mark.parametrize(
    "call",
    [
        lambda: norm((2, C, 3, 3), scale=tensor(C + 1)),
        lambda: paddle._C_ops.layer_norm(tensor(3, 4), None, None, EPSILON, 0),
        lambda: paddle._C_ops.layer_norm(tensor(3, 4), tensor(5), None, EPSILON, 1),
        lambda: paddle._C_ops.group_norm(tensor(2, C, 3), None, None, EPSILON, 4, "NCHW"),
    ],
    ids=["scale", "axis", "rows", "groups"],
)
def test_errors_are_paddles(call):
    with pytest.raises(Exception) as native:
        call()
    with on_bedstone.enable(always=True), pytest.raises(native.type):
        call()


def norm(shape, scale=None, mean=None):
    mean = tensor(C) if mean is None else mean
    how = (False, 0.9, EPSILON, "NCHW", False, False)
    return paddle._C_ops.batch_norm(tensor(*shape), mean, paddle.ones([C]), scale, scale, *how)[0]


def wanted(t):
    t.stop_gradient = False
    return t


def test_gradients_of_gradients_are_paddles():
    """Of batch and instance normalisation; of the others there are none, and that is an error."""

    def slope(name):
        x, w, b = wanted(tensor(2, C, 4, 5)), wanted(tensor(C, seed=1)), wanted(tensor(C, seed=2))
        if name == "batch_norm":
            running = (paddle.zeros([C]), paddle.ones([C]))
            how = (False, 0.9, EPSILON, "NCHW", False, False)
            y = paddle._C_ops.batch_norm(x, *running, w, b, *how)[0]
        elif name == "instance_norm":
            y = paddle._C_ops.instance_norm(x, w, b, EPSILON)
        else:
            y = paddle._C_ops.group_norm(x, w, b, EPSILON, 2, "NCHW")
        slopes = paddle.grad([(y**3).sum()], [x, w, b], create_graph=True)
        return paddle.grad([sum((s**2).sum() for s in slopes)], [x, w, b])

    for name in ("batch_norm", "instance_norm"):
        native = slope(name)
        on_bedstone.reset()
        with on_bedstone.enable(always=True):
            patched = slope(name)
        for theirs, ours in zip(native, patched, strict=True):
            scale = float(theirs.abs().max())
            np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-4, atol=1e-5 * scale)
        assert on_bedstone.report().own(name, "forward") == 1
        assert on_bedstone.report().reasons(name) == ["a gradient that is differentiated again"]
    with pytest.raises(RuntimeError, match="higher order"):
        slope("group_norm")
    with on_bedstone.enable(always=True), pytest.raises(RuntimeError, match="again"):
        slope("group_norm")
