"""Calls: what is refused and with which status, forms of data and factors, algorithms, threads."""

from __future__ import annotations

import ctypes
import pickle
import threading
from ctypes import byref

import numpy as np
import pytest
from cudnn_cases import (
    BAD_PARAM,
    CROSS,
    DOUBLE,
    FLOAT,
    MAPPING_ERROR,
    NOT_SUPPORTED,
    array,
    bound_convolution,
    convolution,
    filters,
    packed,
    refused,
    tensor,
)

import bedstone
from bedstone.backends.cpu.convolution.winograd_nested import NestedWinograd
from bedstone.compat import cudnn_calls, cudnn_descriptors, cudnn_v1, cudnn_v2
from bedstone.compat.cudnn_memory import Place
from bedstone.compat.cudnn_status import Refusal

HANDLE = cudnn_v2.cudnnCreate()
SAME = bedstone.ConvolutionDesc.of(2, padding=1)


def forward(x, y, xd, yd, wd=None, w=None, cd=None, algo=0, alpha=1.0, beta=0.0, **lent):
    """cudnnConvolutionForward with a 3x3 filter of 3 to 4 channels unless told otherwise."""
    workspace, size = lent.get("workspace"), lent.get("size", 0)
    return cudnn_v2.cudnnConvolutionForward, (
        HANDLE, alpha, xd, x, wd or filters(4, 3, 3, 3), array(4, 3, 3, 3) if w is None else w,
        cd or convolution(SAME), algo, workspace, size, beta, yd, y,
    )  # fmt: skip


def test_wrong_convolutions():
    x, y = array(2, 3, 8, 8), np.zeros((2, 4, 8, 8), "f")
    xd, yd = packed(2, 3, 8, 8), packed(2, 4, 8, 8)
    unset = cudnn_v2.cudnnCreateTensorDescriptor()
    wrong = [
        ("destDesc", forward(x, y, xd, packed(2, 4, 8, 7))),
        ("destDesc", forward(x, y, xd, packed(2, 4, 8, 8, dtype="float64"))),
        ("filterDesc", forward(x, y, xd, yd, filters(4, 2, 3, 3))),
        ("filterDesc", forward(x, y, xd, yd, filters(4, 3, 3, 3, dtype="float64"))),
        ("filterDesc: got 'a tensor", forward(x, y, xd, yd, packed(4, 3, 3, 3))),
        ("srcDesc.*has been set", forward(x, y, unset, yd)),
        ("srcDesc.*not NULL", forward(x, y, None, yd)),
        ("convDesc: got 'a convolution descriptor of v1",
         forward(x, y, xd, yd, cd=bound_convolution(xd, filters(4, 3, 3, 3), SAME))),
        ("destDesc.*do not overlap",
         forward(x, y, xd, tensor(bedstone.TensorDesc((2, 4, 8, 8), (256, 64, 1, 1), "float32")))),
        ("srcData.*not NULL", forward(None, y, xd, yd)),
        ("srcData.*not NULL", forward(0, y, xd, yd)),
        ("srcData.*not NULL", forward(ctypes.c_void_p(), y, xd, yd)),
        ("destData.*multiple of 4", forward(x, y.ctypes.data + 2, xd, yd)),
        ("destData.*overlaps srcData",
         forward(x.ctypes.data, x.ctypes.data + 64, xd, packed(2, 4, 8, 8))),
        ("srcData.*float64", forward(x.astype("d"), y, xd, yd)),
        ("srcData", forward("text", y, xd, yd)),
        ("srcData", forward([1.0, 2.0], y, xd, yd)),
        ("srcData.*holds all", forward(x[0].copy(), y, xd, yd)),
        ("destData.*read-only", forward(x, np.frombuffer(bytes(y.nbytes), "f"), xd, yd)),
        ("algo: got 4", forward(x, y, xd, yd, algo=4)),
        ("alpha", forward(x, y, xd, yd, alpha=None)),
        ("beta", forward(x, y, xd, yd, beta="one")),
        ("workSpaceSizeInBytes", forward(x, y, xd, yd, size=-1)),
    ]  # fmt: skip
    for words, (function, arguments) in wrong:
        refused(BAD_PARAM, words, function, *arguments)
        assert cudnn_v2.cudnnConvolutionForward_status(*arguments) == BAD_PARAM
    function, arguments = forward(x, y, xd, yd, algo=3)
    refused(NOT_SUPPORTED, "DIRECT", function, *arguments)
    assert not y.any()
    function, arguments = forward(x, y, xd, yd)
    refused(BAD_PARAM, "handle: got 'a tensor descriptor", function, xd, *arguments[1:])


def test_v1_convolutions_keep_to_their_shapes():
    x, w, y = array(2, 3, 8, 8), array(4, 3, 3, 3), np.zeros((2, 4, 8, 8), "f")
    xd, wd, yd = packed(2, 3, 8, 8), filters(4, 3, 3, 3), packed(2, 4, 8, 8)
    bound = bound_convolution(xd, wd, SAME)
    call = cudnn_v1.cudnnConvolutionForward
    call(HANDLE, xd, x, wd, w, bound, yd, y, cudnn_v1.CUDNN_RESULT_NO_ACCUMULATE)
    first = y.copy()
    call(HANDLE, xd, x, wd, w, bound, yd, y, cudnn_v1.CUDNN_RESULT_ACCUMULATE)
    np.testing.assert_allclose(y, 2 * first, rtol=1e-6)
    other = packed(3, 3, 8, 8)
    refused(BAD_PARAM, "srcDesc.*input dims", call, HANDLE, other, x, wd, w, bound, yd, y, 1)
    other = filters(4, 3, 1, 3)
    refused(BAD_PARAM, "filterDesc.*filter dims", call, HANDLE, xd, x, other, w, bound, yd, y, 1)
    refused(BAD_PARAM, "accumulate: got 2", call, HANDLE, xd, x, wd, w, bound, yd, y, 2)
    strided = tensor(bedstone.TensorDesc.packed((2, 3, 8, 8), "float32", "NHWC"))  # same dims
    call(HANDLE, strided, x, wd, w, bound, yd, y, 1)


def test_wrong_tensor_operations():
    x, y = array(2, 3, 4, 4), np.zeros((2, 3, 4, 4), "f")
    d, call = packed(2, 3, 4, 4), cudnn_v2.cudnnTransformTensor
    refused(BAD_PARAM, "dims and data type", call, HANDLE, 1, d, x, 0, packed(2, 3, 4, 5), y)
    double = packed(2, 3, 4, 4, dtype="float64")
    refused(BAD_PARAM, "dims and data type", call, HANDLE, 1, d, x, 0, double, y)
    refused(BAD_PARAM, "destData.*overlaps srcData", call, HANDLE, 1, d, x, 0, d, x)
    call = cudnn_v2.cudnnAddTensor
    sizes = {0: (1, 1, 4, 4), 1: (1, 3, 4, 4), 2: (1, 3, 1, 1), 3: (2, 3, 4, 4)}
    for mode in sizes:
        for other, dims in sizes.items():
            bias = array(*dims)
            arguments = (HANDLE, mode, 1, packed(*dims), bias, 1, d, y)
            if mode == other:
                y[...] = x
                call(*arguments)
                np.testing.assert_array_equal(y, x + bias)
            else:
                refused(BAD_PARAM, "biasDesc", call, *arguments)
    refused(BAD_PARAM, "mode: got 4", call, HANDLE, 4, 1, d, x, 1, d, y)


def test_wrong_poolings_softmaxes_and_activations():
    x, y, d = array(2, 3, 8, 8), np.zeros((2, 3, 8, 8), "f"), packed(2, 3, 8, 8)
    pool = cudnn_v2.cudnnCreatePoolingDescriptor()
    call = cudnn_v2.cudnnPoolingForward
    refused(BAD_PARAM, "has been set", call, HANDLE, pool, 1, d, x, 0, d, y)
    cudnn_v2.cudnnSetPooling2dDescriptor(pool, 0, 2, 2, 0, 0, 2, 2)
    refused(BAD_PARAM, "destDesc", call, HANDLE, pool, 1, d, x, 0, d, y)
    refused(BAD_PARAM, "destDesc", call, HANDLE, pool, 1, d, x, 0, packed(2, 4, 4, 4), y)
    refused(BAD_PARAM, "srcDesc", call, HANDLE, pool, 1, packed(2, 3, 0, 8), x, 0, d, y)
    call = cudnn_v2.cudnnPoolingBackward
    small, dy = packed(2, 3, 4, 4), array(2, 3, 4, 4)
    tail = (1, small, dy, small, dy, d, x, 0, d, y)
    call(HANDLE, pool, *tail)
    tail = (1, d, dy, small, dy, d, x, 0, d, y)
    refused(BAD_PARAM, "srcDiffDesc", call, HANDLE, pool, *tail)
    tail = (1, small, None, small, dy, d, x, 0, d, y)
    refused(BAD_PARAM, "srcData", call, HANDLE, pool, *tail)
    call = cudnn_v2.cudnnSoftmaxForward
    refused(BAD_PARAM, "destDesc", call, HANDLE, 0, 0, 1, d, x, 0, small, y)
    refused(BAD_PARAM, "algorithm: got 2", call, HANDLE, 2, 0, 1, d, x, 0, d, y)
    refused(BAD_PARAM, "mode: got 2", call, HANDLE, 0, 2, 1, d, x, 0, d, y)
    call = cudnn_v2.cudnnActivationForward
    refused(BAD_PARAM, "mode: got 3", call, HANDLE, 3, 1, d, x, 0, d, y)
    both = np.zeros(2 * x.size, "f")
    half = both[1:]  # in place, or apart, but not half over each other
    refused(BAD_PARAM, "destData.*exactly the same", call, HANDLE, 1, 1, d, both, 0, d, half)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_forms_of_data_and_factors(dtype):
    x = array(1, 2, 3, 4, dtype=dtype)
    y = np.empty_like(x)
    d = packed(1, 2, 3, 4, dtype=dtype)
    kind = ctypes.c_double if dtype == "float64" else ctypes.c_float
    plain = kind * x.size
    held = plain.from_buffer(x)
    forms = [
        x, x.ctypes.data, ctypes.c_void_p(x.ctypes.data), np.int64(x.ctypes.data), held,
        byref(held), ctypes.cast(held, ctypes.POINTER(kind)), x.view(np.uint8),
    ]  # fmt: skip
    number = kind(3.0)
    factors = [
        3, 3.0, number, byref(number), ctypes.pointer(number), np.float32(3), np.array([3.0]),
        (kind * 1)(3.0), ctypes.c_void_p(ctypes.addressof(number)),
    ]  # fmt: skip
    for data in forms:
        y[...] = np.nan
        cudnn_v2.cudnnTransformTensor(HANDLE, 3.0, d, data, 0.0, d, y)
        np.testing.assert_array_equal(y, 3 * x)
    for alpha in factors:
        y[...] = np.nan
        cudnn_v2.cudnnTransformTensor(HANDLE, alpha, d, x, kind(0), d, y)
        np.testing.assert_array_equal(y, 3 * x)


def test_factors_have_the_type_of_the_data():
    """0.1 is the float nearest to it for float data, as it would be in C."""
    y, d = np.ones((1, 1, 1, 1), "d"), packed(1, 1, 1, 1, dtype="float64")
    cudnn_v2.cudnnScaleTensor(HANDLE, d, y, 0.1)
    assert y.item() == 0.1
    z, d = np.ones((1, 1, 1, 1), "f"), packed(1, 1, 1, 1)
    cudnn_v2.cudnnSetTensor(HANDLE, d, z, byref(ctypes.c_float(0.1)))
    assert z.item() == float(np.float32(0.1))


def test_arrays_of_other_libraries():
    torch = pytest.importorskip("torch")
    x, d = torch.randn(1, 2, 3, 4), packed(1, 2, 3, 4)
    y = torch.empty(1, 2, 3, 4)
    cudnn_v2.cudnnTransformTensor(HANDLE, 2.0, d, x, 0.0, d, y)
    assert torch.equal(y, 2 * x)
    call = cudnn_v2.cudnnTransformTensor
    refused(BAD_PARAM, "srcData", call, HANDLE, 2.0, d, x.double(), 0.0, d, y)
    refused(BAD_PARAM, "srcData.*holds all", call, HANDLE, 2.0, d, x[:, :1], 0.0, d, y)


def test_memory_of_another_device():
    place = Place("srcData", bedstone.TensorDesc.packed((4,)))
    with pytest.raises(Refusal, match="cpu:0.*of cuda:0") as caught:
        place.address(np.zeros(4, "f"), ("cuda", 0))
    assert caught.value.status == MAPPING_ERROR

    class OnTheDevice:
        __cuda_array_interface__ = {
            "shape": (2, 3), "typestr": "<f4", "data": (4096, False), "version": 3,
        }  # fmt: skip

    d, y = packed(1, 1, 2, 3), np.zeros((1, 1, 2, 3), "f")
    call = cudnn_v2.cudnnTransformTensor
    refused(MAPPING_ERROR, "cuda:0.*of cpu:0", call, HANDLE, 1, d, OnTheDevice(), 0, d, y)
    assert Place("srcData", bedstone.TensorDesc.packed((6,))).address(
        OnTheDevice(), ("cuda", 0)
    ) == 4096  # fmt: skip


def test_a_device_that_is_not_there():
    for wrong in ("gpu", "cuda:x", "cpu:1", None, ""):
        with pytest.raises(bedstone.InvalidDescriptor, match="device"):
            cudnn_v2.use_device(wrong)
    far = "cuda:99"
    with pytest.raises(cudnn_v2.CudnnError) as caught:
        cudnn_v2.cudnnCreate(device=far)
    assert caught.value.status == cudnn_v2.CUDNN_STATUS_NOT_INITIALIZED
    cudnn_v1.use_device(far)
    try:
        assert cudnn_v2.library.cudnnCreate(byref(ctypes.c_void_p())) == 1
    finally:
        cudnn_v1.use_device("cpu")
    assert cudnn_v2.library.cudnnCreate(byref(ctypes.c_void_p())) == 0


def test_sub_tensors_lie_in_their_owner():
    """The address of a view with its parent's strides: inside the parent, and not beyond."""
    whole = array(4, 6, 8, 8)
    part = whole[1:3, 2:5, 1:7, 2:6]
    strides = tuple(s // 4 for s in part.strides)
    d = tensor(bedstone.TensorDesc(part.shape, strides, "float32"))
    wanted = np.maximum(part, 0)
    cudnn_v2.cudnnActivationForward(
        HANDLE, cudnn_v2.CUDNN_ACTIVATION_RELU, 1.0, d, part, 0.0, d, part
    )
    np.testing.assert_array_equal(part, wanted)
    assert (whole[0] < 0).any() and (whole[1:3, 2:5, 0] < 0).any()
    beyond = whole[3:, 2:5, 1:7, 2:6]
    call = cudnn_v2.cudnnActivationForward
    refused(BAD_PARAM, "srcData.*holds all", call, HANDLE, 1, 1.0, d, beyond, 0.0, d, beyond)


def test_empty_tensors():
    """Nothing to do is done, whatever the pointers; sums over nothing are zero."""
    none, d = packed(0, 3, 4, 4), packed(1, 3, 1, 1)
    cudnn_v2.cudnnActivationForward(HANDLE, 1, 1.0, none, None, 0.0, none, None)
    cudnn_v2.cudnnTransformTensor(HANDLE, 1.0, none, None, 0.0, none, 0)
    bias = np.full(3, np.nan, "f")
    cudnn_v2.cudnnConvolutionBackwardBias(HANDLE, 1.0, none, None, 0.0, d, bias)
    assert bias.tolist() == [0, 0, 0]


def test_a_changed_descriptor_is_another_call():
    x, y, d = array(1, 1, 4, 6), np.zeros(24, "f"), packed(1, 1, 4, 6)
    call = cudnn_v2.cudnnSoftmaxForward
    for dims in ((1, 1, 4, 6), (4, 6, 1, 1), (2, 3, 4, 1), (1, 1, 4, 6)):
        cudnn_v2.cudnnSetTensor4dDescriptor(d, 0, FLOAT, *dims)
        call(HANDLE, 1, 0, 1.0, d, x, 0.0, d, y)
        assert y.sum() == pytest.approx(dims[0])


def test_tables_that_are_full_start_afresh(monkeypatch):
    """Few settings and calls are kept: the results are the same."""
    monkeypatch.setattr(cudnn_descriptors, "STATES_KEPT", 3)
    monkeypatch.setattr(cudnn_calls, "PREPARED_LIMIT", 2)
    handle = cudnn_v2.cudnnCreate()
    for _ in range(2):
        for width in range(1, 8):
            d, x = packed(1, 1, 1, width), array(1, 1, 1, width)
            wanted = np.maximum(x, 0)
            cudnn_v2.cudnnActivationForward(handle, 1, 1.0, d, x, 0.0, d, x)
            np.testing.assert_array_equal(x, wanted)
    assert len(cudnn_calls.context(handle)._prepared) == 2


def test_settings_in_force_steer_the_next_call():
    """A prepared call belongs to the settings that it was prepared under."""
    problem = bedstone.parse_problem("convolution forward n1c8h10k8r3p1 float32")
    x, w = array(*problem.x.dims), array(*problem.w.dims, seed=1)
    results = []
    for backend in ("cpu", "reference", "cpu"):
        y = np.empty(problem.y.dims, "f")
        with bedstone.config(backend=backend):
            args = forward(
                x, y, tensor(problem.x), tensor(problem.y), filters(8, 8, 3, 3), w, algo=1
            )[1]
            cudnn_v2.cudnnConvolutionForward(*args)
        results.append(y)
    exact = problem.reference({"x": x, "w": w})["y"].astype("f")
    assert np.array_equal(results[1], exact) and np.array_equal(results[0], results[2])
    assert not np.array_equal(results[0], exact)


# Algorithms


def planned(handle, x, w, conv, size):
    """(algorithm, bytes of workspace) for each preference; `size` is the limit of the third."""
    xd, wd, cd = packed(*x), filters(*w), convolution(conv)
    yd = packed(*cudnn_v2.cudnnGetConvolution2dForwardOutputDim(cd, xd, wd))
    found = []
    for preference in cudnn_v2.cudnnConvolutionFwdPreference:
        limit = size if preference == 2 else 0
        args = (handle, xd, wd, cd, yd)
        algo = cudnn_v2.cudnnGetConvolutionForwardAlgorithm(*args, preference, limit)
        found.append((algo, cudnn_v2.cudnnGetConvolutionForwardWorkspaceSize(*args, algo)))
    return found


def test_preferences(monkeypatch):
    """An algorithm with workspace that gains by it is proposed where that is granted."""
    monkeypatch.setattr(NestedWinograd, "estimate", lambda self, problem, device: 0.0)
    handle = cudnn_v2.cudnnCreate()  # that has planned nothing yet
    x, w, conv = (1, 32, 40, 40), (32, 32, 9, 9), bedstone.ConvolutionDesc.of(2)
    none, fastest, limited = planned(handle, x, w, conv, 1)
    gemm = cudnn_v2.CUDNN_CONVOLUTION_FWD_ALGO_GEMM
    assert none[1] == 0 and none[0] != gemm and limited == none
    assert fastest[0] == gemm and fastest[1] > 0
    assert planned(handle, x, w, conv, fastest[1])[2] == fastest
    assert planned(handle, x, w, conv, fastest[1] - 1)[2] == none
    # Where nothing needs workspace, all agree.
    assert len(set(planned(handle, (2, 3, 8, 8), (4, 3, 1, 1), conv, 0))) == 1
    args = (handle, packed(2, 3, 8, 8), filters(4, 3, 1, 1), convolution(conv), packed(2, 4, 8, 8))
    ask = cudnn_v2.cudnnGetConvolutionForwardAlgorithm
    refused(BAD_PARAM, "preference: got 3", ask, *args, 3, 0)
    refused(BAD_PARAM, "memoryLimitInbytes", ask, *args, 2, -1)
    assert ask(*args, 2, 2**40) == 0
    ask = cudnn_v2.cudnnGetConvolutionForwardWorkspaceSize
    refused(NOT_SUPPORTED, "DIRECT", ask, *args, 3)
    size = ctypes.c_size_t(7)
    assert cudnn_v2.library.cudnnGetConvolutionForwardWorkspaceSize(*args, 0, byref(size)) == 0
    assert size.value == 0


@pytest.mark.parametrize("algo", [0, 1, 2])
@pytest.mark.parametrize("gemm", ["cpu:winograd_2x2_nested", None])
def test_algorithms_agree(monkeypatch, algo, gemm):
    """Whether a machine's own choice needs workspace is its own affair: one that does is named."""
    which = cudnn_v2.cudnnConvolutionFwdAlgo(2)
    if gemm is not None:
        monkeypatch.setitem(cudnn_calls.ALGORITHMS, which, (gemm, None))
    handle = cudnn_v2.cudnnCreate()  # that has prepared nothing yet
    conv, dims, window = bedstone.ConvolutionDesc.of(2), (1, 32, 24, 24), (32, 32, 9, 9)
    x, w, y = array(*dims), array(*window, seed=1), np.full((1, 32, 16, 16), np.nan, "f")
    xd, wd, cd, yd = packed(*dims), filters(*window), convolution(conv), packed(*y.shape)
    need = cudnn_v2.cudnnGetConvolutionForwardWorkspaceSize(handle, xd, wd, cd, yd, algo)
    assert need == 0 or algo == which
    assert need > 0 or algo != which or gemm is None
    lent = np.full(need + 64, 0x55, np.uint8)
    call = cudnn_v2.cudnnConvolutionForward
    head, tail = (handle, 1.0, xd, x, wd, w, cd, algo), (0.0, yd, y)
    call(*head, lent, need, *tail)
    assert (lent[need:] == 0x55).all()
    np.testing.assert_allclose(y, bedstone.convolution(x, w), rtol=2e-4, atol=2e-3)
    if need:
        refused(BAD_PARAM, "workSpaceSizeInBytes", call, *head, lent, need - 1, *tail)
        call(*head, np.zeros(need // 4 + 1, "f"), need, *tail)  # of any type
        refused(BAD_PARAM, "workSpace.*overlaps", call, *head, x.ctypes.data, need, *tail)
        refused(BAD_PARAM, "workSpace.*not NULL", call, *head, None, need, *tail)
        refused(BAD_PARAM, "workSpace.*holds all", call, *head, lent[:9].copy(), need, *tail)


def test_implicit_gemm_is_what_runs():
    """Algorithm 0 is the paper's: it needs no workspace and is the same in every handle."""
    problem = bedstone.parse_problem("convolution forward n1c16h14k16r3p1 float32")
    x, w = array(*problem.x.dims), array(*problem.w.dims, seed=1)
    wanted = np.empty(problem.y.dims, "f")
    bedstone.Handle().plan(problem, "cpu:implicit_gemm").execute(x, w, wanted)
    got = np.empty_like(wanted)
    args = forward(x, got, tensor(problem.x), tensor(problem.y), filters(16, 16, 3, 3), w)[1]
    cudnn_v2.cudnnConvolutionForward(*args)
    assert got.tobytes() == wanted.tobytes()


# Pooling as Caffe sizes it, and who gets the gradient


def test_a_destination_of_another_size():
    """A caller may round up, as Caffe does: windows may overrun, and average over what is there."""
    x = np.arange(25, dtype="d").reshape(1, 1, 5, 5)
    y = np.empty((1, 1, 3, 3))
    pool = cudnn_v1.cudnnCreatePoolingDescriptor()
    for mode, last in ((0, 24.0), (1, 24.0)):
        cudnn_v1.cudnnSetPoolingDescriptor(pool, mode, 2, 2, 2, 2)
        xd, yd = packed(1, 1, 5, 5, dtype="float64"), packed(1, 1, 3, 3, dtype="float64")
        cudnn_v1.cudnnPoolingForward(HANDLE, pool, xd, x, yd, y)
        assert y[0, 0, 2, 2] == last
        assert y[0, 0, 0, 2] == (9.0 if mode == 0 else 6.5)


def test_the_first_of_equal_maxima_gets_the_gradient():
    x, dx = np.zeros((1, 1, 2, 2), "f"), np.empty((1, 1, 2, 2), "f")
    one, pool = np.ones((1, 1, 1, 1), "f"), cudnn_v2.cudnnCreatePoolingDescriptor()
    cudnn_v2.cudnnSetPooling2dDescriptor(pool, 0, 2, 2, 0, 0, 2, 2)
    small, d = packed(1, 1, 1, 1), packed(1, 1, 2, 2)
    cudnn_v2.cudnnPoolingBackward(HANDLE, pool, 1, small, one, small, one, d, x, 0, d, dx)
    assert dx.ravel().tolist() == [1, 0, 0, 0]


def test_nan_passes_through_relu_and_maxima():
    x, y = np.array([[[[np.nan, -1.0], [2.0, 3.0]]]], "f"), np.empty((1, 1, 1, 1), "f")
    d, pool = packed(1, 1, 2, 2), cudnn_v2.cudnnCreatePoolingDescriptor()
    cudnn_v2.cudnnSetPooling2dDescriptor(pool, 0, 2, 2, 0, 0, 2, 2)
    cudnn_v2.cudnnPoolingForward(HANDLE, pool, 1, d, x, 0, packed(1, 1, 1, 1), y)
    assert np.isnan(y.item())
    cudnn_v2.cudnnActivationForward(HANDLE, 1, 1, d, x, 0, d, x)
    assert np.isnan(x[0, 0, 0, 0]) and x.ravel()[1:].tolist() == [0, 2, 3]


# Threads, errors


def test_one_handle_in_several_threads():
    """Same results from one handle in four threads, which also make descriptors of their own."""
    x, w = array(2, 8, 12, 12), array(8, 8, 3, 3, seed=1)
    wanted = bedstone.convolution(x, w, padding=1)
    handle, wrong = cudnn_v2.cudnnCreate(), []

    def work(number):
        xd, wd, cd = packed(*x.shape), filters(*w.shape), convolution(SAME)
        yd, y = packed(*wanted.shape), np.empty_like(wanted)
        for turn in range(30):
            y[...] = np.nan
            args = (handle, 1.0, xd, x, wd, w, cd, 1, None, 0, 0.0, yd, y)
            status = cudnn_v2.library.cudnnConvolutionForward(*args)
            if status or not np.allclose(y, wanted, rtol=1e-4, atol=1e-4):
                wrong.append((number, turn, status))
        for kind, number in (("Tensor", xd), ("Tensor", yd), ("Filter", wd), ("Convolution", cd)):
            getattr(cudnn_v2, f"cudnnDestroy{kind}Descriptor")(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    cudnn_v2.cudnnDestroy(handle)
    d = packed(1, 1, 1, 1)
    assert cudnn_v2.library.cudnnSetTensor(handle, d, np.zeros(1, "f"), 1.0) == BAD_PARAM


def test_only_one_thread_destroys():
    numbers = [packed(1, 1, 1, 1) for _ in range(200)]
    results: list[list[int]] = [[] for _ in range(4)]

    def work(found):
        found += [cudnn_v2.library.cudnnDestroyTensorDescriptor(n) for n in numbers]

    threads = [threading.Thread(target=work, args=(found,)) for found in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [sorted(each) for each in zip(*results)] == [[0, 3, 3, 3]] * len(numbers)


def test_the_error():
    with pytest.raises(cudnn_v2.CudnnError) as caught:
        cudnn_v2.cudnnSetTensor(HANDLE, None, None, 1.0)
    error = caught.value
    assert isinstance(error, bedstone.BedstoneError) and error.status.name.endswith("BAD_PARAM")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.status == error.status
    assert str(error).startswith("cudnnSetTensor: CUDNN_STATUS_BAD_PARAM: srcDestDesc: got None")


def test_the_constants_are_plain_integers():
    assert (FLOAT, DOUBLE, CROSS) == (0, 1, 1)
    assert ctypes.c_int(CROSS).value == 1 and f"{int(NOT_SUPPORTED)}" == "9"
