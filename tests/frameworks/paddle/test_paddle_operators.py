"""Every replaced operator against PaddlePaddle's own: values, gradients, flags and errors."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

paddle = pytest.importorskip("paddle", reason="PaddlePaddle is not installed")

import bedstone.frameworks.paddle as on_bedstone  # noqa: E402
from bedstone.frameworks.paddle.patch import OPERATORS  # noqa: E402

# Relative to the largest value: both sides round sums of some hundred float32 products.
TOLERANCE = {"float32": 2e-5, "float64": 1e-12}


def tensor(*shape, dtype="float32", seed=0):
    values = np.random.default_rng(seed).standard_normal(shape)
    return paddle.to_tensor(values.astype(dtype))


def outputs(function, tensors):
    """Results and gradients of all tensors, or the type of the error."""
    tensors = [t.detach() for t in tensors]
    for t in tensors:
        t.stop_gradient = False
    try:
        results = function(*tensors)
    except Exception as error:
        return type(error)
    results = list(results) if isinstance(results, (tuple, list)) else [results]
    dy = tensor(*results[0].shape, dtype=str(results[0].dtype).rpartition(".")[2], seed=1)
    return results + paddle.grad([results[0]], tensors, [dy])


def compare(operator, function, tensors, own=True):
    """Native and patched agree in everything; `own`: all of it ran on bedstone's kernels."""
    native = outputs(function, tensors)
    on_bedstone.reset()
    with on_bedstone.enable(always=True):
        patched = outputs(function, tensors)
    report = on_bedstone.report()
    if isinstance(native, type):
        assert patched is native
        return
    assert patched[0].is_leaf is native[0].is_leaf is False
    for theirs, ours in zip(native, patched, strict=True):
        for name in ("shape", "dtype", "stop_gradient", "place"):
            assert getattr(ours, name) == getattr(theirs, name), name
        a, b = theirs.numpy().astype(float), ours.numpy().astype(float)
        tolerance = TOLERANCE[str(tensors[0].dtype).rpartition(".")[2]]
        np.testing.assert_allclose(b, a, rtol=0, atol=tolerance * (np.abs(a).max() or 1))
    assert report.own(operator, "forward") == (1 if own else 0), str(report)
    if own:
        assert report.own_calls == report.calls >= 1 + len(tensors), str(report)


EXPLICIT, SAME, VALID = (([1, 2], "EXPLICIT"), ([0, 0], "SAME"), ([0, 0], "VALID"))
PER_SIDE = ([1, 0, 2, 1], "EXPLICIT")
CONVOLUTIONS = [  # stride, padding, dilation, groups
    ([1, 1], EXPLICIT, [1, 1], 1),
    ([2, 1], EXPLICIT, [1, 1], 2),
    ([3, 2], PER_SIDE, [1, 1], 1),
    ([1, 1], PER_SIDE, [2, 1], 4),
    ([2, 1], SAME, [1, 1], 1),
    ([1, 1], SAME, [2, 2], 2),
    ([1, 2], VALID, [1, 2], 4),
]


def image(layout, spatial=(9, 10), dtype="float32"):
    dims = (2, 4, *spatial) if layout.startswith("NC") else (2, *spatial, 4)
    return tensor(*dims, dtype=dtype)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("stride, padding, dilation, groups", CONVOLUTIONS)
def test_conv2d(stride, padding, dilation, groups, layout):
    how = (stride, *padding, dilation, groups, layout)
    w = tensor(8, 4 // groups, 3, 2, seed=2)
    compare("conv2d", lambda x, w: paddle._C_ops.conv2d(x, w, *how), [image(layout), w])


@pytest.mark.parametrize("stride, padding", [([1, 1], EXPLICIT), ([2, 2], SAME)])
def test_depthwise_conv2d(stride, padding):
    how = (stride, *padding, 4, [1, 1], "NCHW")
    operands = [image("NCHW"), tensor(8, 1, 3, 3, seed=2)]
    compare("depthwise_conv2d", lambda x, w: paddle._C_ops.depthwise_conv2d(x, w, *how), operands)


@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
def test_conv3d(layout):
    how = ([1, 2, 1], [1, 0, 1], "EXPLICIT", 2, [1, 1, 2], layout)
    operands = [image(layout, (5, 6, 7)), tensor(6, 2, 2, 3, 2, seed=2)]
    compare("conv3d", lambda x, w: paddle._C_ops.conv3d(x, w, *how), operands)


def biased(operator="conv2d", padding=EXPLICIT, layout="NCHW", **how):
    """A convolution with a bias, as the layers call it."""
    pads, algorithm = padding
    axes = len(layout) - 2
    how = {"stride": [1] * axes, "dilation": [1] * axes, "groups": 1, **how}
    how |= {"padding": pads, "padding_algorithm": algorithm, "op_type": operator}
    how |= {"data_format": layout, "channel_dim": layout.index("C")}
    return lambda x, w, b: paddle.nn.functional.conv._conv_nd(x, w, bias=b, **how)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "operator, function, shapes",
    [
        ("conv2d", biased(stride=[2, 1]), [(2, 4, 9, 10), (6, 4, 3, 2), (6,)]),
        ("conv2d", biased(groups=2, stride=[1, 2], padding=SAME),
         [(2, 4, 9, 10), (6, 2, 3, 2), (6,)]),
        ("conv2d", biased(layout="NHWC", dilation=[1, 2]), [(2, 9, 10, 4), (6, 4, 3, 2), (6,)]),
        ("depthwise_conv2d", biased("depthwise_conv2d", groups=4, dilation=[2, 1]),
         [(2, 4, 9, 10), (8, 1, 3, 3), (8,)]),
        ("conv3d", lambda x, w, b: paddle.nn.functional.conv3d(x, w, b, padding=1),
         [(2, 4, 5, 6, 7), (3, 4, 2, 3, 2), (3,)]),
    ],
    ids=["conv2d", "groups", "channels last", "depthwise", "conv3d"],
)  # fmt: skip
def test_a_bias_is_added_by_the_same_kernel(operator, function, shapes, dtype):
    operands = [tensor(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
    compare(operator, function, operands)
    report = on_bedstone.report()
    assert [report.own(operator, f"backward_{of}") for of in ("data", "filter", "bias")] == [1] * 3
    for operand in operands[:2]:  # the gradient of the bias alone
        operand.stop_gradient = True
    operands[2].stop_gradient = False
    native = paddle.grad([function(*operands).sum()], operands[2:])[0]
    on_bedstone.reset()
    with on_bedstone.enable(always=True):
        ours = paddle.grad([function(*operands).sum()], operands[2:])[0]
    np.testing.assert_allclose(ours.numpy(), native.numpy(), rtol=1e-5)
    assert on_bedstone.report().calls == 2


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_a_bias_s_gradient_that_is_differentiated_again(layout):
    shape = (2, 4, 6, 7) if layout == "NCHW" else (2, 6, 7, 4)
    operands = [tensor(*shape), tensor(3, 4, 2, 2, seed=1), tensor(3, seed=2)]

    def penalty():
        tensors = [t.detach() for t in operands]
        for t in tensors:
            t.stop_gradient = False
        loss = (biased(layout=layout)(*tensors) ** 3).sum()
        slopes = paddle.grad([loss], tensors, create_graph=True)
        sum((slope**2).mean() for slope in slopes).backward()
        return [t.grad.numpy() for t in tensors]

    native = penalty()
    with on_bedstone.enable(always=True):
        patched = penalty()
    for theirs, ours in zip(native, patched, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4 * np.abs(theirs).max())


def test_where_a_bias_cannot_be_taken_the_convolution_still_is():
    operands = [tensor(2, 4, 6, 7), tensor(3, 4, 2, 2, seed=1), tensor(6, seed=2)]
    strided = lambda x, w, b: biased()(x, w, b[::2])  # noqa: E731
    native = strided(*operands).numpy()
    on_bedstone.reset()
    with on_bedstone.enable(always=True):
        np.testing.assert_allclose(strided(*operands).numpy(), native, rtol=1e-4, atol=1e-4)
    assert on_bedstone.report().own("conv2d") == on_bedstone.report().calls == 1


def test_a_bias_is_taken_with_the_operators_that_were_asked_for():
    functional = paddle.nn.functional.conv
    untouched = functional._conv_nd
    x, b = tensor(1, 4, 6, 7), tensor(4, seed=1)
    plain, depthwise = tensor(4, 4, 2, 2, seed=2), tensor(4, 1, 2, 2, seed=3)
    on_bedstone.reset()
    with on_bedstone.enable(only=["relu", "conv2d_transpose"], always=True):
        assert functional._conv_nd is untouched
    with on_bedstone.enable(only=["conv2d"], always=True):
        biased()(x, plain, b)
        biased("depthwise_conv2d", groups=4)(x, depthwise, b)
    assert functional._conv_nd is untouched
    report = on_bedstone.report()
    assert (report.own("conv2d"), report.calls) == (1, 1)


def test_a_layer_s_bias_is_taken():
    layer, x = paddle.nn.Conv2D(4, 5, 3, padding=1), tensor(2, 4, 6, 7)
    x.stop_gradient = False
    on_bedstone.reset()
    with on_bedstone.enable(always=True):
        layer(x).sum().backward()
    assert on_bedstone.report().own("conv2d", "backward_bias") == 1
    np.testing.assert_allclose(layer.bias.grad.numpy(), 2 * 6 * 7, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_bias_in_half_types_which_paddle_has_no_sum_for(dtype):
    operands = [tensor(2, 4, 6, 7), tensor(3, 4, 2, 2, seed=1), tensor(3, seed=2)]
    native = biased()(*operands).numpy()
    with on_bedstone.enable():
        half = biased()(*(t.astype(dtype) for t in operands))
    assert half.dtype == getattr(paddle, dtype)
    error = np.abs(half.astype("float32").numpy() - native).max()
    assert error < {"float16": 4e-3, "bfloat16": 3e-2}[dtype] * np.abs(native).max()


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize(
    "stride, padding, extra, size, groups",
    [
        ([1, 1], EXPLICIT, [], None, 1),
        ([2, 3], PER_SIDE, [1, 2], None, 2),
        ([2, 1], SAME, [], None, 1),
        ([2, 1], ([1, 1], "EXPLICIT"), [], [18, 9], 1),
        ([2, 1], ([1, 1], "EXPLICIT"), [], [40, 9], 1),  # too large: an error
    ],
)
def test_conv2d_transpose(stride, padding, extra, size, groups, layout):
    pads, algorithm = padding
    how = (stride, pads, extra, size, algorithm, groups, [1, 1], layout)
    operands = [image(layout), tensor(4, 6 // groups, 3, 2, seed=2)]
    function = paddle._C_ops.conv2d_transpose
    compare("conv2d_transpose", lambda x, w: paddle._C_ops.conv2d_transpose(x, w, *how), operands)
    assert paddle._C_ops.conv2d_transpose is function


POOLINGS = [
    *itertools.product([[1, 1], [3, 2]], [EXPLICIT, PER_SIDE, SAME], [False], ["NCHW"]),
    ([3, 2], ([0, 0], "EXPLICIT"), True, "NCHW"),
    ([2, 2], ([0, 1, 0, 0], "EXPLICIT"), False, "NHWC"),
    ([2, 3], ([1, 1], "EXPLICIT"), True, "NHWC"),
]


@pytest.mark.parametrize("kind, exclusive", [("max", True), ("avg", True), ("avg", False)])
@pytest.mark.parametrize("stride, padding, ceil, layout", POOLINGS)
def test_pool2d(stride, padding, ceil, layout, kind, exclusive):
    pads, algorithm = padding
    how = ([3, 3], stride, pads, ceil, exclusive, layout, kind, False, False, algorithm)
    compare("pool2d", lambda x: paddle._C_ops.pool2d(x, *how), [image(layout)])


@pytest.mark.parametrize(
    "size, whole, kind, own",
    [
        ([3, 5], False, "avg", True),
        ([1, 1], True, "avg", True),
        ([1, 1], True, "max", True),
        ([3, 5], False, "max", False),  # adaptive maximum
    ],
)
def test_adaptive_and_global_pooling(size, whole, kind, own):
    how = (size, [1, 1], [0, 0], False, True, "NCHW", kind, whole, not whole, "EXPLICIT")
    compare("pool2d", lambda x: paddle._C_ops.pool2d(x, *how), [image("NCHW")], own)


def test_pool3d():
    how = ([2, 3, 2], [2, 1, 2], [1, 1, 0], False, True, "NCDHW", "max", False, False, "EXPLICIT")
    compare("pool3d", lambda x: paddle._C_ops.pool3d(x, *how), [image("NCDHW", (5, 6, 7))])


@pytest.mark.parametrize("ceil", [False, True])
def test_maximum_with_index(ceil):
    how = ([3, 2], [2, 2], [1, 0], False, False, ceil)
    name = "max_pool2d_with_index"
    compare(name, lambda x: paddle._C_ops.max_pool2d_with_index(x, *how), [image("NCHW")])
    ties = paddle.ones([1, 2, 6, 6])  # the first of equal maxima, in both
    compare(name, lambda x: paddle._C_ops.max_pool2d_with_index(x, *how), [ties])


POINTWISE = {
    "relu": (), "sigmoid": (), "tanh": (), "silu": (), "gelu": (False,), "leaky_relu": (0.1,),
    "elu": (1.5,), "softmax": (-1,), "log_softmax": (1,),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise(name, dtype):
    how = POINTWISE[name]
    function = lambda x: getattr(paddle._C_ops, name)(x, *how)  # noqa: E731
    compare(name, function, [tensor(3, 5, 7, dtype=dtype)])


def test_every_operator_is_tested_here():
    tested = {"conv2d", "depthwise_conv2d", "conv3d", "conv2d_transpose", "pool2d", "pool3d",
              "max_pool2d_with_index", *POINTWISE, "batch_norm", "layer_norm", "group_norm",
              "instance_norm"}  # fmt: skip
    # The same classes, one dimension more or another name of the same arguments.
    twins = {"depthwise_conv2d_transpose", "conv3d_transpose", "max_pool3d_with_index"}
    assert tested | twins == set(OPERATORS)


@pytest.mark.parametrize(
    "function, shapes",
    [
        (lambda x: paddle._C_ops.relu(x.transpose([0, 3, 1, 2])), [(2, 5, 6, 3)]),
        (lambda x: paddle.nn.functional.max_pool2d(x[:, :, ::2], 2), [(2, 3, 12, 8)]),
        (lambda x, w: paddle.nn.functional.conv2d(x.transpose([0, 3, 1, 2]), w),
         [(2, 7, 8, 3), (4, 3, 3, 3)]),
        (lambda x, w: paddle.nn.functional.conv1d(x, w, padding=1), [(2, 3, 11), (4, 3, 3)]),
        (lambda x, w: paddle.nn.functional.conv3d_transpose(x, w, stride=2),
         [(1, 2, 3, 4, 3), (2, 3, 2, 2, 2)]),
        (lambda x, w: paddle.nn.functional.conv2d_transpose(x, w, groups=4),
         [(1, 4, 5, 6), (4, 1, 3, 3)]),
        (lambda x: paddle.nn.functional.max_pool3d(x, 2, return_mask=True)[0], [(1, 2, 4, 6, 5)]),
    ],
    ids=["strided", "sliced", "transposed", "conv1d", "conv3d_transpose", "depthwise_transpose",
         "pool3d_index"],
)  # fmt: skip
def test_through_the_functional_layer(function, shapes):
    operands = [tensor(*shape, seed=i) for i, shape in enumerate(shapes)]
    native = outputs(function, operands)
    on_bedstone.reset()
    with on_bedstone.enable(always=True):
        patched = outputs(function, operands)
    for theirs, ours in zip(native, patched, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-5, atol=1e-5)
    assert on_bedstone.report().own_calls == 1 + len(shapes)


@pytest.mark.parametrize("name", ["conv2d", "conv2d_transpose", "pool2d", "tanh", "gelu"])
def test_gradients_are_the_slopes(name):
    """In float64, against differences of the operator's own values."""
    rest = {
        "conv2d": ([2, 1], [1, 1], "EXPLICIT", [1, 1], 1, "NCHW"),
        "conv2d_transpose": ([2, 1], [1, 1], [], None, "EXPLICIT", 1, [1, 1], "NCHW"),
        "pool2d": ([2, 2], [1, 2], [1, 0], False, False, "NCHW", "avg", False, False, "EXPLICIT"),
        "tanh": (),
        "gelu": (True,),
    }[name]
    shapes = [(2, 3, 4, 5), (3, 3, 3, 2)] if name.startswith("conv") else [(2, 3, 4, 5)]
    tensors = [tensor(*s, dtype="float64", seed=i) for i, s in enumerate(shapes)]
    step = 1e-5
    on_bedstone.reset()
    with on_bedstone.enable(always=True), paddle.no_grad():
        function = getattr(paddle._C_ops, name)
        y = function(*tensors, *rest)
        dy = tensor(*y.shape, dtype="float64", seed=7)
        with paddle.enable_grad():
            gradients = outputs_of(function, tensors, rest, dy)
        for i, gradient in enumerate(gradients):
            direction = tensor(*tensors[i].shape, dtype="float64", seed=8)
            sides = []
            for sign in (1, -1):
                moved = list(tensors)
                moved[i] = tensors[i] + sign * step * direction
                sides.append(float((function(*moved, *rest) * dy).sum()))
            slope = (sides[0] - sides[1]) / (2 * step)
            assert float((gradient * direction).sum()) == pytest.approx(slope, rel=1e-7, abs=1e-8)
    assert on_bedstone.report().own_calls == on_bedstone.report().calls


def outputs_of(function, tensors, rest, dy):
    tensors = [t.detach() for t in tensors]
    for t in tensors:
        t.stop_gradient = False
    return paddle.grad([function(*tensors, *rest)], tensors, [dy])
