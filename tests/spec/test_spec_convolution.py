"""Convolution's reference against numbers by hand, independent routes and its own laws."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from scipy import signal
from spec_cases import close, convolutions, dot, law, normal, packed, seeds

from bedstone.spec.activation import ActivationDesc
from bedstone.spec.convolution import (
    BiasGradientProblem,
    ConvolutionDesc,
    ConvolutionProblem,
    Epilogue,
    convolution_problem,
)


def with_direction(problem, direction):
    return ConvolutionProblem(direction, problem.x, problem.w, problem.y, problem.conv)


def forward(problem, x, w):
    return problem.reference({"x": x, "w": w})["y"]


def test_by_hand_figure_one_of_the_paper():
    """N=1, C=3, H=W=3, K=2, R=S=2, stride 1, no padding: the sizes of the paper's figure 1."""
    x = np.arange(27.0).reshape(1, 3, 3, 3)
    w = np.arange(24.0).reshape(2, 3, 2, 2)
    y = forward(convolution_problem("forward", x.shape, w.shape), x, w)
    assert y.shape == (1, 2, 2, 2)
    # First output: sum over c, r, s of w[0,c,r,s] * x[0,c,r,s], written out.
    first = sum(
        a * b for a, b in zip(range(12), (0, 1, 3, 4, 9, 10, 12, 13, 18, 19, 21, 22), strict=True)
    )
    assert y[0, 0, 0, 0] == first == 1035
    assert y[0, 0].tolist() == [[1035, 1101], [1233, 1299]]
    assert y[0, 1].tolist() == [[2619, 2829], [3249, 3459]]


def test_by_hand_one_dimension():
    """Stride 2, padding 1 and 0, dilation 1: y = [0*1 + 1*2, 2*1 + 3*2] (taps 1, 2)."""
    x, w = np.array([[[1.0, 2.0, 3.0]]]), np.array([[[1.0, 2.0]]])
    problem = convolution_problem("forward", (1, 1, 3), (1, 1, 2), padding=[(1, 0)], stride=2)
    assert forward(problem, x, w).tolist() == [[[2.0, 8.0]]]
    flipped = convolution_problem(
        "forward", (1, 1, 3), (1, 1, 2), padding=[(1, 0)], stride=2, mode="convolution"
    )
    assert forward(flipped, x, w).tolist() == [[[1.0, 7.0]]]


def test_by_hand_gradients():
    x, w, dy = np.array([[[1.0, 2.0, 3.0]]]), np.array([[[1.0, 10.0]]]), np.array([[[1.0, -1.0]]])
    problem = convolution_problem("backward_data", (1, 1, 3), (1, 1, 2))
    assert problem.reference({"w": w, "dy": dy})["dx"].tolist() == [[[1.0, 9.0, -10.0]]]
    problem = with_direction(problem, "backward_filter")
    assert problem.reference({"x": x, "dy": dy})["dw"].tolist() == [[[-1.0, -1.0]]]
    problem = BiasGradientProblem(packed((2, 1, 2)), packed((1,)))
    dy = np.array([[[1.0, 2.0]], [[3.0, 4.0]]])
    assert problem.reference({"dy": dy})["dbias"].tolist() == [10.0]


@pytest.mark.parametrize(
    "size, window, pad, stride, dilation, expected",
    [
        (128, 11, 0, 1, 1, 118),  # the paper's layer 1
        (64, 9, 0, 1, 1, 56),
        (32, 9, 0, 1, 1, 24),
        (16, 7, 0, 1, 1, 10),
        (13, 3, 0, 1, 1, 11),
        (227, 11, 0, 4, 1, 55),  # AlexNet's first
        (224, 7, 3, 2, 1, 112),  # ResNet's first
        (5, 3, 1, 1, 1, 5),  # "same"
        (5, 3, 2, 1, 1, 7),  # "full"
        (7, 3, 0, 1, 3, 1),
    ],
)
def test_output_size(size, window, pad, stride, dilation, expected):
    conv = ConvolutionDesc.of(1, pad, stride, dilation)
    assert conv.output_dims((1, 1, size), (1, 1, window)) == (1, 1, expected)


def test_cost_of_the_papers_second_layer():
    problem = convolution_problem("forward", (128, 96, 64, 64), (128, 96, 9, 9))
    assert round(problem.flops / 1e9, 1) == 799.1
    elements = 128 * 96 * 64 * 64 + 128 * 96 * 9 * 9 + 128 * 128 * 56 * 56
    assert problem.bytes == 4 * elements
    assert problem.reduction_length == 96 * 81


def lowered(problem, x):
    """im2col: (C/groups * taps, N * windows) for each group, by explicit indices."""
    conv = problem.conv
    window, out = problem.w.dims[2:], problem.y.dims[2:]
    channels = problem.w.dims[1]
    columns = np.zeros((conv.groups, channels, *window, x.shape[0], *out))
    for group, c in itertools.product(range(conv.groups), range(channels)):
        for tap in np.ndindex(*window):
            for n, *at in np.ndindex(x.shape[0], *out):
                position = []
                for axis, (p, t) in enumerate(zip(at, tap)):
                    t = t if conv.mode == "cross_correlation" else window[axis] - 1 - t
                    step = p * conv.stride[axis] + t * conv.dilation[axis]
                    position.append(step - conv.padding[axis][0])
                if all(0 <= i < h for i, h in zip(position, x.shape[2:])):
                    value = x[(n, group * channels + c, *position)]
                    columns[(group, c, *tap, n, *at)] = value
    return columns.reshape(conv.groups, channels * int(np.prod(window)), -1)


@law
@given(convolutions(), seeds)
def test_equals_lowering_times_matrix(problem, seed):
    x, w = normal(seed, problem.x.dims, problem.w.dims)
    g, k = problem.conv.groups, problem.w.dims[0]
    product = w.reshape(g, k // g, -1) @ lowered(problem, x)
    y = product.reshape(k, x.shape[0], *problem.y.dims[2:]).swapaxes(0, 1)
    assert close(forward(problem, x, w), y)


@pytest.mark.parametrize("mode", ["convolution", "cross_correlation"])
@pytest.mark.parametrize("size, window", [((9,), (4,)), ((7, 6), (3, 2)), ((4, 5, 6), (2, 3, 2))])
def test_equals_fourier_transform(mode, size, window):
    """A "full" convolution of every pair of channels by FFT."""
    x, w = normal(3, (2, 3, *size), (4, 3, *window))
    padding = [r - 1 for r in window]
    problem = convolution_problem("forward", x.shape, w.shape, padding=padding, mode=mode)
    flipped = w if mode == "convolution" else np.flip(w, tuple(range(2, w.ndim)))
    expected = sum(
        signal.fftconvolve(x[:, None, c], flipped[None, :, c], axes=tuple(range(2, w.ndim)))
        for c in range(3)
    )
    assert close(forward(problem, x, w), expected)


@law
@given(convolutions(), seeds)
def test_gradients_are_adjoint(problem, seed):
    """<conv(x, w), dy> = <x, backward_data(w, dy)> = <w, backward_filter(x, dy)>."""
    x, w, dy = normal(seed, problem.x.dims, problem.w.dims, problem.y.dims)
    product = dot(forward(problem, x, w), dy)
    dx = with_direction(problem, "backward_data").reference({"w": w, "dy": dy})["dx"]
    dw = with_direction(problem, "backward_filter").reference({"x": x, "dy": dy})["dw"]
    assert close(product, dot(x, dx)) and dx.shape == x.shape
    assert close(product, dot(w, dw)) and dw.shape == w.shape


@law
@given(convolutions(), seeds)
def test_is_linear_in_both_arguments(problem, seed):
    x, x2, w, w2 = normal(seed, *(problem.x.dims,) * 2, *(problem.w.dims,) * 2)
    y = forward(problem, x, w)
    assert close(forward(problem, 2 * x - x2, w), 2 * y - forward(problem, x2, w))
    assert close(forward(problem, x, 3 * w + w2), 3 * y + forward(problem, x, w2))


@law
@given(convolutions(), seeds)
def test_groups_are_separate_convolutions(problem, seed):
    x, w = normal(seed, problem.x.dims, problem.w.dims)
    conv, g = problem.conv, problem.conv.groups
    alone = ConvolutionDesc(conv.padding, conv.stride, conv.dilation, 1, conv.mode)
    parts = []
    for xs, ws in zip(np.split(x, g, axis=1), np.split(w, g, axis=0)):
        y = packed(alone.output_dims(xs.shape, ws.shape))
        part = ConvolutionProblem("forward", packed(xs.shape), packed(ws.shape), y, alone)
        parts.append(forward(part, xs, ws))
    assert close(forward(problem, x, w), np.concatenate(parts, axis=1))


@law
@given(convolutions(), seeds)
def test_padding_stride_dilation_and_mode_are_what_they_say(problem, seed):
    """Padding is a border of zeros, stride a choice of outputs, dilation zeros between taps, the
    convolution mode a flipped filter."""
    x, w = normal(seed, problem.x.dims, problem.w.dims)
    conv, axes = problem.conv, problem.conv.axes
    bordered = np.pad(x, ((0, 0), (0, 0), *conv.padding))
    spaced = np.zeros(
        (*w.shape[:2], *((r - 1) * gap + 1 for r, gap in zip(w.shape[2:], conv.dilation)))
    )
    spaced[(..., *(slice(None, None, step) for step in conv.dilation))] = w
    if conv.mode == "convolution":
        spaced = np.flip(spaced, tuple(range(2, 2 + axes)))
    plain = ConvolutionDesc.of(axes, groups=conv.groups)
    y = packed(plain.output_dims(bordered.shape, spaced.shape))
    simple = ConvolutionProblem("forward", packed(bordered.shape), packed(spaced.shape), y, plain)
    every = forward(simple, bordered, spaced)
    assert close(forward(problem, x, w), every[(..., *(slice(None, None, u) for u in conv.stride))])


@given(seeds)
@law
def test_one_by_one_is_a_matrix_product(seed):
    x, w = normal(seed, (2, 5, 3, 4), (6, 5, 1, 1))
    y = forward(convolution_problem("forward", x.shape, w.shape), x, w)
    assert close(y, np.einsum("kc,nchw->nkhw", w[:, :, 0, 0], x))


def test_epilogue_adds_bias_after_blending_then_activates_then_shifts():
    x, w, bias, y = normal(5, (2, 3, 4, 4), (2, 3, 3, 3), (2,), (2, 2, 2, 2))
    epilogue = Epilogue(True, ActivationDesc("relu"), 0.75)
    problem = convolution_problem("forward", x.shape, w.shape, epilogue=epilogue)
    assert [o.name for o in problem.operands] == ["x", "w", "bias", "y"]
    plain = forward(convolution_problem("forward", x.shape, w.shape), x, w)
    expected = np.maximum(2 * plain - 3 * y + bias[:, None, None], 0) + 0.75
    got = problem.reference({"x": x, "w": w, "bias": bias, "y": y}, 2.0, -3.0)["y"]
    assert close(got, expected)


def test_beta_zero_does_not_read_the_output():
    x, w = normal(6, (1, 1, 4), (1, 1, 2))
    problem = convolution_problem("forward", x.shape, w.shape)
    poisoned = problem.reference({"x": x, "w": w, "y": np.full(problem.y.dims, np.nan)})["y"]
    assert close(poisoned, forward(problem, x, w))


def test_empty_batch_gives_a_zero_filter_gradient():
    problem = convolution_problem("backward_filter", (0, 2, 5, 5), (4, 2, 3, 3))
    arrays = {
        "x": np.zeros((0, 2, 5, 5)),
        "dy": np.zeros((0, 4, 3, 3)),
        "dw": np.ones((4, 2, 3, 3)),
    }
    assert np.all(problem.reference(arrays)["dw"] == 0)
    assert np.all(problem.reference(arrays, 1.0, 0.5)["dw"] == 0.5)


def test_padding_hides_no_infinity():
    """A tap on the padding contributes 0 * w: an infinite weight there gives NaN, as IEEE says;
    infinite pixels pass through."""
    x = np.array([[[1.0, np.inf, 2.0]]])
    y = forward(convolution_problem("forward", (1, 1, 3), (1, 1, 1)), x, np.ones((1, 1, 1)))
    assert y.tolist() == [[[1.0, np.inf, 2.0]]]


@law
@given(convolutions(), seeds)
def test_equals_torch(problem, seed):
    torch = pytest.importorskip("torch")
    conv = problem.conv
    x, w, dy = normal(seed, problem.x.dims, problem.w.dims, problem.y.dims)
    tx, tw = (torch.tensor(a, requires_grad=True) for a in (x, w))
    sides = [p for pair in reversed(conv.padding) for p in pair]
    function = getattr(torch.nn.functional, f"conv{conv.axes}d")
    flipped = tw if conv.mode == "cross_correlation" else tw.flip(tuple(range(2, tw.ndim)))
    ty = function(
        torch.nn.functional.pad(tx, sides),
        flipped,
        None,
        conv.stride,
        0,
        conv.dilation,
        conv.groups,
    )
    ty.backward(torch.tensor(dy))
    assert close(forward(problem, x, w), ty.detach().numpy())
    dx = with_direction(problem, "backward_data").reference({"w": w, "dy": dy})["dx"]
    dw = with_direction(problem, "backward_filter").reference({"x": x, "dy": dy})["dw"]
    assert close(dx, tx.grad.numpy()) and close(dw, tw.grad.numpy())
