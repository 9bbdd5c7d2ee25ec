"""Requests that make no sense are refused, and the message names argument, value and what was
expected."""

import pickle

import numpy as np
import pytest
from spec_cases import packed

from bedstone.spec.activation import ActivationDesc, ActivationProblem
from bedstone.spec.convolution import (
    BiasGradientProblem,
    ConvolutionDesc,
    ConvolutionProblem,
    Epilogue,
    convolution_problem,
)
from bedstone.spec.dropout import DropoutProblem
from bedstone.spec.dtypes import DType
from bedstone.spec.errors import BedstoneError, InvalidDescriptor, NotSupported
from bedstone.spec.normalization import LrnDesc, LrnProblem, NormalizationProblem, NormDesc
from bedstone.spec.pooling import AdaptivePoolingProblem, PoolingDesc, PoolingProblem
from bedstone.spec.softmax import SoftmaxProblem
from bedstone.spec.tensor import TensorDesc
from bedstone.spec.tensor_ops import TensorOpProblem, add_dims

X, W, Y = packed((2, 4, 8, 8)), packed((6, 4, 3, 3)), packed((2, 6, 6, 6))
CONV = ConvolutionDesc.of(2)
SPREAD = TensorDesc((2, 6, 6, 6), (0, 36, 6, 1), "float64")  # two images in one place
M = packed((2, 4, 4, 4))  # X pooled by 2
POOL = PoolingDesc.of("max", 2)
RELU = ActivationDesc("relu")
FLAT = packed((4, 6))
NORM = NormDesc("batch")


def conv(direction="forward", x=X, w=W, y=Y, desc=CONV, **fields):
    return ConvolutionProblem(direction, x, w, y, desc, **fields)


def convolve(x, w, **keywords):
    return convolution_problem("forward", x, w, **keywords)


def pool(direction="forward", x=X, y=M, desc=POOL, **fields):
    return PoolingProblem(direction, x, y, desc, **fields)


# (argument named, what the value must show, the request)
BAD = {
    "tensor": [
        ("dims", "()", lambda: TensorDesc((), (), "float32")),
        ("dims", "1, 1", lambda: TensorDesc.packed((1,) * 9)),
        ("dims", "-2", lambda: TensorDesc.packed((3, -2))),
        ("dims", "1.5", lambda: TensorDesc((1.5, 2), (2, 1), "float32")),
        ("dims", "7", lambda: TensorDesc(7, (1,), "float32")),
        ("strides", "(1,)", lambda: TensorDesc((2, 2), (1,), "float32")),
        ("dims", str(2**40), lambda: TensorDesc.packed((2**40, 2**40))),
        ("dims", str(2**62), lambda: TensorDesc((2, 2), (2**62, 2**62), "float32")),
        ("dims", str(2**61), lambda: TensorDesc((2,), (-(2**61),), "float64")),
        ("dims", str(2**64), lambda: TensorDesc.packed((2**64,))),
        ("dtype", "complex64", lambda: TensorDesc.packed((2,), "complex64")),
        ("dtype", "complex128", lambda: DType.of(np.complex128)),
        ("layout", "NHCC", lambda: TensorDesc.packed((1, 2, 3, 4), layout="NHCC")),
        ("layout", "NCHW", lambda: TensorDesc.packed((1, 2, 3), layout="NCHW")),
        ("start, dims", "(3, 0)", lambda: FLAT.sub((3, 0), (2, 6))),
        ("start, dims", "(0,)", lambda: FLAT.sub((0,), (2,))),
        ("axes", "(0, 0)", lambda: FLAT.permuted((0, 0))),
        ("strides", "(3,)", lambda: TensorDesc.of(  # two float16 that lie three bytes apart
            np.ndarray((2,), np.float16, bytes(5), strides=(3,)))),
    ],
    "convolution": [
        ("direction", "sideways", lambda: conv("sideways")),
        ("x", "(2, 4, 8)", lambda: conv(x=packed((2, 4, 8)))),
        ("w", "(6, 4, 3)", lambda: conv(w=packed((6, 4, 3)))),
        ("w", "(6, 5, 3, 3)", lambda: conv(w=packed((6, 5, 3, 3)))),
        ("w", "(6, 4, 0, 3)", lambda: convolve((2, 4, 8, 8), (6, 4, 0, 3))),
        ("w", "(6, 4, 9, 9)", lambda: convolve((2, 4, 8, 8), (6, 4, 9, 9))),
        ("w", "(6, 4, 3, 3)", lambda: convolve((2, 4, 8, 8), (6, 4, 3, 3), dilation=4)),
        ("w", "(6, 4, 3, 3)", lambda: convolve((2, 4, 0, 8), (6, 4, 3, 3))),
        ("groups", "3", lambda: convolve((2, 4, 8, 8), (6, 2, 3, 3), groups=3)),
        ("groups", "4", lambda: convolve((2, 4, 8, 8), (6, 1, 3, 3), groups=4)),
        ("groups", "0", lambda: convolve((2, 4, 8, 8), (6, 4, 3, 3), groups=0)),
        ("groups", "2.0", lambda: convolve((2, 4, 8, 8), (6, 4, 3, 3), groups=2.0)),
        ("padding", "-1", lambda: ConvolutionDesc.of(2, padding=-1)),
        ("padding", "(1, 2, 3)", lambda: ConvolutionDesc.of(2, padding=(1, 2, 3))),
        ("padding", "(0, 0, 0)", lambda: ConvolutionDesc.of(2, padding=((0, 0, 0), (1, 1)))),
        ("padding", "same", lambda: ConvolutionDesc.of(2, padding="same")),
        ("padding", str(2**62), lambda: convolve((1, 1, 8), (1, 1, 1), padding=2**62)),
        ("padding", str(2**63), lambda: ConvolutionDesc.of(1, padding=2**63)),
        ("stride", "0", lambda: ConvolutionDesc.of(2, stride=0)),
        ("stride", "(1, 2, 3)", lambda: ConvolutionDesc.of(2, stride=(1, 2, 3))),
        ("stride", "1.5", lambda: ConvolutionDesc.of(2, stride=1.5)),
        ("stride", "(1, 1, 1, 1)", lambda: ConvolutionDesc.of(4)),
        ("dilation", "0", lambda: ConvolutionDesc.of(2, dilation=0)),
        ("dilation", "(1,)", lambda: ConvolutionDesc(((0, 0),) * 2, (1, 1), (1,))),
        ("mode", "valid", lambda: ConvolutionDesc.of(2, mode="valid")),
        ("math", "tf64", lambda: conv(math="tf64")),
        ("w", "float32", lambda: conv(w=packed(W.dims, "float32"))),
        ("y", "float16", lambda: conv(y=packed(Y.dims, "float16"))),
        ("x", "int32", lambda: conv(
            "forward", *(packed(d.dims, "int32") for d in (X, W, Y)))),
        ("y", "(2, 6, 7, 6)", lambda: conv(y=packed((2, 6, 7, 6)))),
        ("y", "(0, 36, 6, 1)", lambda: conv(y=SPREAD)),
        ("dx", "(0, 0, 8, 1)", lambda: conv(
            "backward_data", x=TensorDesc(X.dims, (0, 0, 8, 1), "float64"))),
        ("dw", "(0, 9, 3, 1)", lambda: conv(
            "backward_filter", w=TensorDesc(W.dims, (0, 9, 3, 1), "float64"))),
        ("epilogue", "bias=True", lambda: conv("backward_data", epilogue=Epilogue(True))),
        ("shift", "nan", lambda: Epilogue(shift=float("nan"))),
        ("dy", "(3,)", lambda: BiasGradientProblem(packed((3,)), packed((3,)))),
        ("dbias", "(5,)", lambda: BiasGradientProblem(Y, packed((5,)))),
        ("dbias", "float32", lambda: BiasGradientProblem(Y, packed((6,), "float32"))),
        ("dbias", "(0,)", lambda: BiasGradientProblem(Y, TensorDesc((6,), (0,), "float64"))),
    ],
    "pooling": [
        ("mode", "median", lambda: PoolingDesc.of("median", 2)),
        ("rounding", "up", lambda: PoolingDesc.of("max", 2, rounding="up")),
        ("window", "(0, 0)", lambda: PoolingDesc.of("max", 0)),
        ("window", "(2, 2, 2, 2)", lambda: PoolingDesc.of("max", 2, 4)),
        ("stride", "(0, 0)", lambda: PoolingDesc.of("max", 2, stride=0)),
        ("dilation", "(-1, -1)", lambda: PoolingDesc.of("max", 2, dilation=-1)),
        ("padding", "-1", lambda: PoolingDesc.of("max", 2, padding=-1)),
        ("window", "(9, 9)", lambda: PoolingDesc.of("max", 9).output_dims(X.dims)),
        ("window", "(5, 5)", lambda: PoolingDesc.of("max", 5, dilation=2).output_dims(X.dims)),
        ("x", "(2, 4, 8)", lambda: pool(x=packed((2, 4, 8)))),
        ("x", "(2, 4, 0, 8)", lambda: pool(x=packed((2, 4, 0, 8)))),
        ("y", "(2, 4, 5, 4)", lambda: pool(y=packed((2, 4, 5, 4)))),
        ("y", "(2, 3, 4, 4)", lambda: pool(y=packed((2, 3, 4, 4)))),
        ("y", "(2, 4, 5, 4)", lambda: pool(
            y=packed((2, 4, 5, 4)), desc=PoolingDesc.of("max", 2, rounding="given"))),
        ("y", "float32", lambda: pool(y=packed(M.dims, "float32"))),
        ("x", "uint8", lambda: pool(x=packed(X.dims, "uint8"), y=packed(M.dims, "uint8"))),
        ("direction", "both", lambda: pool("both")),
        ("saved", "(2, 4, 8, 7)", lambda: pool("backward", saved=packed((2, 4, 8, 7)))),
        ("indices", "int32", lambda: pool(indices=packed(M.dims, "int32"))),
        ("indices", "2x4x8x8", lambda: pool(indices=packed(X.dims, "int64"))),
        ("indices", "int64", lambda: pool(
            desc=PoolingDesc.of("average_include_padding", 2), indices=packed(M.dims, "int64"))),
        ("dx", "(0, 64, 8, 1)", lambda: pool(
            "backward", x=TensorDesc(X.dims, (0, 64, 8, 1), "float64"))),
        ("padding", str(2**62), lambda: PoolingDesc.of("max", 2, 1, 2**62).output_dims((1, 1, 8))),
        ("direction", "forward", lambda: AdaptivePoolingProblem("forward", X, M)),
        ("y", "(2, 4, 0, 4)", lambda: AdaptivePoolingProblem(
            "adaptive_forward", X, packed((2, 4, 0, 4)))),
        ("y", "(2, 5, 4, 4)", lambda: AdaptivePoolingProblem(
            "adaptive_forward", X, packed((2, 5, 4, 4)))),
        ("x", "(4, 6)", lambda: AdaptivePoolingProblem("adaptive_forward", FLAT, FLAT)),
    ],
    "softmax": [
        ("direction", "up", lambda: SoftmaxProblem("up", FLAT, FLAT)),
        ("algorithm", "exact", lambda: SoftmaxProblem("forward", FLAT, FLAT, "exact")),
        ("axes", "()", lambda: SoftmaxProblem("forward", FLAT, FLAT, axes=())),
        ("axes", "(2,)", lambda: SoftmaxProblem("forward", FLAT, FLAT, axes=(2,))),
        ("axes", "(1, -1)", lambda: SoftmaxProblem("forward", FLAT, FLAT, axes=(1, -1))),
        ("y", "(6, 4)", lambda: SoftmaxProblem("forward", FLAT, packed((6, 4)))),
        ("y", "float32", lambda: SoftmaxProblem("forward", FLAT, packed((4, 6), "float32"))),
        ("x", "int64", lambda: SoftmaxProblem("forward", *(packed((4, 6), "int64"),) * 2)),
        ("y", "(0, 1)", lambda: SoftmaxProblem(
            "forward", FLAT, TensorDesc((4, 6), (0, 1), "float64"))),
    ],
    "activation": [
        ("kind", "softsign", lambda: ActivationDesc("softsign")),
        ("alpha", "nan", lambda: ActivationDesc("elu", float("nan"))),
        ("alpha", "-1.0", lambda: ActivationDesc("leaky_relu", -1.0)),
        ("alpha", "'big'", lambda: ActivationDesc("elu", "big")),
        ("alpha, beta", "(2.0, 1.0)", lambda: ActivationDesc("clip", 2.0, 1.0)),
        ("direction", "up", lambda: ActivationProblem("up", FLAT, FLAT, RELU)),
        ("y", "(6, 4)", lambda: ActivationProblem("forward", FLAT, packed((6, 4)), RELU)),
        ("y", "float16", lambda: ActivationProblem(
            "forward", FLAT, packed((4, 6), "float16"), RELU)),
        ("saved", "6x4", lambda: ActivationProblem("backward", FLAT, FLAT, RELU, packed((6, 4)))),
    ],
    "tensor_ops": [
        ("direction", "sub", lambda: TensorOpProblem("sub", FLAT)),
        ("x", "None", lambda: TensorOpProblem("transform", FLAT)),
        ("x", "dims=(4, 6)", lambda: TensorOpProblem("scale", FLAT, FLAT)),
        ("x", "(6, 4)", lambda: TensorOpProblem("transform", FLAT, packed((6, 4)))),
        ("b", "(2, 6)", lambda: TensorOpProblem("add", FLAT, packed((2, 6)))),
        ("b", "(6,)", lambda: TensorOpProblem("add", FLAT, packed((6,)))),
        ("b", "float32", lambda: TensorOpProblem("add", FLAT, packed((1, 6), "float32"))),
        ("x", "int64", lambda: TensorOpProblem("transform", FLAT, packed((4, 6), "int64"))),
        ("y", "uint8", lambda: TensorOpProblem("set", packed((4, 6), "uint8"))),
        ("y", "(0, 1)", lambda: TensorOpProblem("set", TensorDesc((4, 6), (0, 1), "float64"))),
        ("mode", "same_n", lambda: add_dims("same_n", X.dims)),
        ("y", "(4,)", lambda: add_dims("full", (4,))),
    ],
    "normalization": [
        ("kind", "weight", lambda: NormDesc("weight")),
        ("epsilon", "-1", lambda: NormDesc("batch", -1)),
        ("epsilon", "inf", lambda: NormDesc("batch", float("inf"))),
        ("epsilon", "'small'", lambda: NormDesc("batch", "small")),
        ("axis", "0", lambda: NormDesc("layer", axis=0)),
        ("groups", "0", lambda: NormDesc("group", groups=0)),
        ("groups", "3", lambda: NormDesc("group", groups=3).geometry(X.dims)),
        ("x", "(4, 6)", lambda: NormDesc("layer", axis=2).geometry(FLAT.dims)),
        ("x", "(4,)", lambda: NormalizationProblem("training", packed((4,)), packed((4,)), NORM)),
        ("direction", "forward", lambda: NormalizationProblem("forward", X, X, NORM)),
        ("direction", "inference", lambda: NormalizationProblem(
            "inference", X, X, NormDesc("layer"))),
        ("momentum", "0.1", lambda: NormalizationProblem("backward", X, X, NORM, momentum=0.1)),
        ("momentum", "0.1", lambda: NormalizationProblem(
            "training", X, X, NormDesc("layer"), momentum=0.1)),
        ("momentum", "nan", lambda: NormalizationProblem(
            "training", X, X, NORM, momentum=float("nan"))),
        ("parameters", "int32", lambda: NormalizationProblem("training", X, X, NORM, "int32")),
        ("y", "(2, 4, 4, 4)", lambda: NormalizationProblem("training", X, M, NORM)),
        ("saved", "(2, 4, 4, 4)", lambda: NormalizationProblem("backward", X, X, NORM, saved=M)),
        ("size", "0", lambda: LrnDesc(0)),
        ("alpha", "nan", lambda: LrnDesc(5, float("nan"))),
        ("region", "around", lambda: LrnDesc(5, region="around")),
        ("direction", "forward", lambda: LrnProblem("forward", X, X, LrnDesc(5))),
        ("x", "(4, 6)", lambda: LrnProblem(
            "lrn_forward", FLAT, FLAT, LrnDesc(5, region="within"))),
        ("y", "(2, 4, 4, 4)", lambda: LrnProblem("lrn_forward", X, M, LrnDesc(5))),
    ],
    "dropout": [
        ("direction", "up", lambda: DropoutProblem("up", FLAT, FLAT)),
        ("probability", "1.5", lambda: DropoutProblem("forward", FLAT, FLAT, 1.5)),
        ("probability", "nan", lambda: DropoutProblem("forward", FLAT, FLAT, float("nan"))),
        ("probability", "'half'", lambda: DropoutProblem("forward", FLAT, FLAT, "half")),
        ("mask", "float64", lambda: DropoutProblem("forward", FLAT, FLAT, 0.5, FLAT)),
        ("mask", "6x4", lambda: DropoutProblem(
            "forward", FLAT, FLAT, 0.5, packed((6, 4), "uint8"))),
        ("y", "(6, 4)", lambda: DropoutProblem("forward", FLAT, packed((6, 4)))),
    ],
}  # fmt: skip


CASES = [
    pytest.param(*case, id=f"{family}-{number}-{case[0]}")
    for family, cases in BAD.items()
    for number, case in enumerate(cases)
]


@pytest.mark.parametrize("argument, shown, request_", CASES)
def test_is_refused_by_name(argument, shown, request_):
    with pytest.raises(InvalidDescriptor) as caught:
        request_()
    error = caught.value
    assert error.argument == argument
    assert shown in repr(error.value)
    assert len(error.expected) > 3
    assert str(error) == f"{argument}: got {error.value!r}, expected {error.expected}"
    assert isinstance(error, ValueError) and isinstance(error, BedstoneError)


def test_zero_sizes_are_fine_where_they_make_sense():
    """Empty batches and channels; not empty windows or images without padding."""
    assert convolve((0, 4, 8, 8), (6, 4, 3, 3)).y.dims == (0, 6, 6, 6)
    assert convolve((2, 0, 8, 8), (6, 0, 3, 3)).flops == 0
    assert convolve((2, 4, 0, 8), (6, 4, 2, 2), padding=1).y.dims == (2, 6, 1, 9)
    assert POOL.output_dims((0, 4, 8, 8)) == (0, 4, 4, 4)
    NormalizationProblem("training", packed((0, 4, 3)), packed((0, 4, 3)), NORM)


def test_overlapping_inputs_are_fine():
    spread = TensorDesc(X.dims, (0, 64, 0, 1), "float64")
    assert conv(x=spread).x is spread
    assert pool(x=spread).x is spread


def test_errors_survive_pickling():
    error = InvalidDescriptor("groups", 3, "a divisor of C = 4")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.value == 3
    declined = NotSupported("p", {"cpu:a": "no"})
    assert pickle.loads(pickle.dumps(declined)).reasons == {"cpu:a": "no"}
    assert "cpu:a: no" in str(declined)
