"""Descriptors and handles: made, set, read back and destroyed, in both conventions."""

from __future__ import annotations

import ctypes
from ctypes import byref

import numpy as np
import pytest
from cudnn_cases import (
    BAD_PARAM,
    DOUBLE,
    FLOAT,
    NOT_SUPPORTED,
    filters,
    packed,
    refused,
    tensor,
)

import bedstone
from bedstone.compat import cudnn_v1, cudnn_v2

KINDS = [
    pytest.param(cudnn_v1, "", id="v1-handle"),
    pytest.param(cudnn_v1, "Tensor4dDescriptor", id="v1-tensor"),
    pytest.param(cudnn_v1, "FilterDescriptor", id="v1-filter"),
    pytest.param(cudnn_v1, "ConvolutionDescriptor", id="v1-convolution"),
    pytest.param(cudnn_v1, "PoolingDescriptor", id="v1-pooling"),
    pytest.param(cudnn_v2, "", id="v2-handle"),
    pytest.param(cudnn_v2, "TensorDescriptor", id="v2-tensor"),
    pytest.param(cudnn_v2, "FilterDescriptor", id="v2-filter"),
    pytest.param(cudnn_v2, "ConvolutionDescriptor", id="v2-convolution"),
    pytest.param(cudnn_v2, "PoolingDescriptor", id="v2-pooling"),
]


@pytest.mark.parametrize(("module", "kind"), KINDS)
def test_life_of_an_object(module, kind):
    create, destroy = (getattr(module, f"cudnn{verb}{kind}") for verb in ("Create", "Destroy"))
    number = create()
    assert isinstance(number, int) and ctypes.c_void_p(number).value == number
    assert create() != number
    destroy(number)
    refused(BAD_PARAM, "created and not destroyed", destroy, number)
    refused(BAD_PARAM, "not NULL", destroy, None)
    for wrong in (0, 1, -1, 2**70, 1.5, "text", [], {}, object(), np.zeros(3)):
        refused(BAD_PARAM, "got", destroy, wrong)
    pointer = ctypes.c_void_p()
    assert getattr(module, f"cudnnCreate{kind}_status")(byref(pointer)) == 0
    assert getattr(module, f"cudnnDestroy{kind}_status")(pointer) == 0
    assert getattr(module, f"cudnnDestroy{kind}_status")(pointer) == BAD_PARAM


@pytest.mark.parametrize(("module", "kind"), KINDS)
def test_another_kind_is_refused(module, kind):
    """Of all the ways to destroy an object, one works."""
    number = getattr(module, f"cudnnCreate{kind}")()
    others = [(m, k) for m, k in (p.values for p in KINDS) if k[:6] != kind[:6]]
    if "Convolution" in kind:  # v1's is bound to shapes and v2's is not
        others += [(m, k) for m, k in (p.values for p in KINDS) if k == kind and m is not module]
    for other, name in others:
        refused(BAD_PARAM, "got 'a ", getattr(other, f"cudnnDestroy{name}"), number)
    getattr(module, f"cudnnDestroy{kind}")(number)


def test_numbers_are_not_used_again():
    first = cudnn_v2.cudnnCreateTensorDescriptor()
    cudnn_v2.cudnnDestroyTensorDescriptor(first)
    assert first not in [cudnn_v2.cudnnCreateTensorDescriptor() for _ in range(100)]
    refused(BAD_PARAM, "destroyed", cudnn_v2.cudnnGetTensor4dDescriptor, first)


@pytest.mark.parametrize("module", [cudnn_v1, cudnn_v2])
@pytest.mark.parametrize(
    ("layout", "strides"), [("NCHW", (60, 20, 5, 1)), ("NHWC", (60, 1, 15, 3))]
)
def test_tensor_4d(module, layout, strides):
    desc = cudnn_v2.cudnnCreateTensorDescriptor()
    refused(BAD_PARAM, "has been set", module.cudnnGetTensor4dDescriptor, desc)
    layout = getattr(module, f"CUDNN_TENSOR_{layout}")
    module.cudnnSetTensor4dDescriptor(desc, layout, DOUBLE, 2, 3, 4, 5)
    assert module.cudnnGetTensor4dDescriptor(desc) == (DOUBLE, 2, 3, 4, 5, *strides)
    module.cudnnSetTensor4dDescriptorEx(desc, FLOAT, 2, 3, 4, 5, 1000, -7, 0, 2)
    assert module.cudnnGetTensor4dDescriptor(desc) == (FLOAT, 2, 3, 4, 5, 1000, -7, 0, 2)
    assert cudnn_v2.cudnnGetTensorNdDescriptor(desc, 2) == (FLOAT, 4, (2, 3), (1000, -7))


@pytest.mark.parametrize("rank", range(1, 9))
def test_tensor_nd(rank):
    desc = cudnn_v2.cudnnCreateTensorDescriptor()
    dims, strides = tuple(range(2, 2 + rank)), tuple(range(rank, 0, -1))
    cudnn_v2.cudnnSetTensorNdDescriptor(desc, FLOAT, rank, dims, strides)
    assert cudnn_v2.cudnnGetTensorNdDescriptor(desc, 8) == (FLOAT, rank, dims, strides)
    if rank != 4:
        refused(BAD_PARAM, "4 dims", cudnn_v2.cudnnGetTensor4dDescriptor, desc)


def test_wrong_tensors():
    desc, set_nd = cudnn_v2.cudnnCreateTensorDescriptor(), cudnn_v2.cudnnSetTensorNdDescriptor
    refused(NOT_SUPPORTED, "nbDims: got 9", set_nd, desc, FLOAT, 9, [1] * 9, [1] * 9)
    refused(BAD_PARAM, "nbDims: got 0", set_nd, desc, FLOAT, 0, [], [])
    refused(BAD_PARAM, "dimA", set_nd, desc, FLOAT, 4, [1] * 3, [1] * 4)
    refused(BAD_PARAM, "strideA", set_nd, desc, FLOAT, 4, [1] * 4, None)
    refused(BAD_PARAM, "dims", set_nd, desc, FLOAT, 2, [-1, 2], [1, 1])
    refused(BAD_PARAM, "dimA", set_nd, desc, FLOAT, 2, [1.5, 2], [1, 1])
    refused(BAD_PARAM, "64-bit", set_nd, desc, FLOAT, 4, [2**31 - 1] * 4, [2**31 - 1] * 4)
    set_4d = cudnn_v2.cudnnSetTensor4dDescriptor
    refused(BAD_PARAM, "format: got 2", set_4d, desc, 2, FLOAT, 1, 1, 1, 1)
    refused(BAD_PARAM, "dataType: got 2", set_4d, desc, 0, 2, 1, 1, 1, 1)
    refused(BAD_PARAM, "n: got -1", set_4d, desc, 0, FLOAT, -1, 1, 1, 1)
    refused(BAD_PARAM, "c: got 2147483648", set_4d, desc, 0, FLOAT, 1, 2**31, 1, 1)
    refused(BAD_PARAM, "h: got 1.5", set_4d, desc, 0, FLOAT, 1, 1, 1.5, 1)
    assert cudnn_v2.cudnnSetTensor4dDescriptor_status(desc, 0, FLOAT, 0, 3, 4, 5) == 0


def test_filters():
    desc = cudnn_v1.cudnnCreateFilterDescriptor()
    cudnn_v1.cudnnSetFilterDescriptor(desc, FLOAT, 8, 3, 5, 7)
    assert cudnn_v1.cudnnGetFilterDescriptor(desc) == (FLOAT, 8, 3, 5, 7)
    cudnn_v2.cudnnSetFilter4dDescriptor(desc, DOUBLE, 9, 3, 5, 7)
    assert cudnn_v2.cudnnGetFilter4dDescriptor(desc) == (DOUBLE, 9, 3, 5, 7)
    cudnn_v2.cudnnSetFilterNdDescriptor(desc, DOUBLE, 5, (9, 3, 5, 7, 2))
    assert cudnn_v2.cudnnGetFilterNdDescriptor(desc, 3) == (DOUBLE, 5, (9, 3, 5))
    refused(BAD_PARAM, "4 dims", cudnn_v2.cudnnGetFilter4dDescriptor, desc)
    set_nd = cudnn_v2.cudnnSetFilterNdDescriptor
    refused(BAD_PARAM, "nbDims: got 2", set_nd, desc, FLOAT, 2, (9, 3))
    refused(NOT_SUPPORTED, "nbDims: got 9", set_nd, desc, FLOAT, 9, (1,) * 9)


def test_convolution_of_v2():
    desc = cudnn_v2.cudnnCreateConvolutionDescriptor()
    cudnn_v2.cudnnSetConvolution2dDescriptor(desc, 1, 2, 3, 4, 1, 1, 0)
    assert cudnn_v2.cudnnGetConvolution2dDescriptor(desc) == (1, 2, 3, 4, 1, 1, 0)
    assert cudnn_v2.cudnnGetConvolutionNdDescriptor(desc, 1) == (2, (1,), (3,), (1,), 0)
    set_2d = cudnn_v2.cudnnSetConvolution2dDescriptor
    refused(NOT_SUPPORTED, "upscalex, upscaley", set_2d, desc, 1, 2, 3, 4, 2, 1, 0)
    refused(BAD_PARAM, "upscalex, upscaley", set_2d, desc, 1, 2, 3, 4, 0, 1, 0)
    refused(BAD_PARAM, "pad_h, pad_w", set_2d, desc, 1, -2, 3, 4, 1, 1, 0)
    refused(BAD_PARAM, "u, v", set_2d, desc, 1, 2, 0, 4, 1, 1, 0)
    refused(BAD_PARAM, "mode: got 2", set_2d, desc, 1, 2, 3, 4, 1, 1, 2)
    # A refused setting leaves the old one.
    assert cudnn_v2.cudnnGetConvolution2dDescriptor(desc) == (1, 2, 3, 4, 1, 1, 0)
    set_nd = cudnn_v2.cudnnSetConvolutionNdDescriptor
    set_nd(desc, 3, (1, 2, 3), (1, 1, 2), (1, 1, 1), 1)
    assert cudnn_v2.cudnnGetConvolutionNdDescriptor(desc, 5) == (
        3, (1, 2, 3), (1, 1, 2), (1, 1, 1), 1,
    )  # fmt: skip
    refused(BAD_PARAM, "two axes", cudnn_v2.cudnnGetConvolution2dDescriptor, desc)
    refused(NOT_SUPPORTED, "arrayLength", set_nd, desc, 4, (1,) * 4, (1,) * 4, (1,) * 4, 1)
    refused(BAD_PARAM, "arrayLength", set_nd, desc, 0, (), (), (), 1)


def test_output_dims_of_v2():
    desc = cudnn_v2.cudnnCreateConvolutionDescriptor()
    cudnn_v2.cudnnSetConvolution2dDescriptor(desc, 1, 0, 2, 3, 1, 1, 1)
    ask, ask_nd = (
        cudnn_v2.cudnnGetConvolution2dForwardOutputDim,
        cudnn_v2.cudnnGetConvolutionNdForwardOutputDim,
    )
    x, w = packed(2, 3, 10, 11), filters(4, 3, 3, 5)
    assert ask(desc, x, w) == (2, 4, 1 + (10 + 2 - 3) // 2, 1 + (11 - 5) // 3)
    assert ask_nd(desc, x, w, 4) == ask(desc, x, w)
    refused(BAD_PARAM, "5 dims", ask_nd, desc, x, w, 5)
    refused(BAD_PARAM, "filterDesc", ask, desc, x, filters(4, 2, 3, 5))
    refused(BAD_PARAM, "filterDesc", ask, desc, x, filters(4, 3, 3, 12))
    refused(BAD_PARAM, "filterDesc", ask, desc, x, filters(4, 3, 0, 5))
    refused(BAD_PARAM, "4 dims", ask, desc, packed(2, 3, 10), w)


def test_convolution_of_v1_is_bound_to_its_shapes():
    desc = cudnn_v1.cudnnCreateConvolutionDescriptor()
    ask = cudnn_v1.cudnnGetOutputTensor4dDim
    refused(BAD_PARAM, "has been set", ask, desc, 0)
    x, w = packed(2, 3, 10, 11), filters(4, 3, 3, 5)
    cudnn_v1.cudnnSetConvolutionDescriptor(desc, x, w, 1, 0, 2, 3, 1, 1, 1)
    wanted = {
        cudnn_v1.CUDNN_CONVOLUTION_FWD: (2, 4, 5, 3),
        cudnn_v1.CUDNN_CONVOLUTION_WEIGHT_GRAD: (4, 3, 3, 5),
        cudnn_v1.CUDNN_CONVOLUTION_DATA_GRAD: (2, 3, 10, 11),
    }
    assert {path: ask(desc, path) for path in wanted} == wanted
    refused(BAD_PARAM, "path: got 3", ask, desc, 3)
    cudnn_v1.cudnnSetConvolutionDescriptorEx(desc, 2, 3, 10, 11, 4, 3, 5, 1, 0, 2, 3, 1, 1, 1)
    assert {path: ask(desc, path) for path in wanted} == wanted
    bind, rest = cudnn_v1.cudnnSetConvolutionDescriptor, (1, 0, 2, 3, 1, 1, 1)
    refused(BAD_PARAM, "filterDesc", bind, desc, x, filters(4, 2, 3, 5), *rest)
    refused(BAD_PARAM, "filterDesc", bind, desc, x, filters(4, 3, 3, 5, dtype="float64"), *rest)
    refused(NOT_SUPPORTED, "upscale", bind, desc, x, w, 1, 0, 2, 3, 1, 2, 1)


def test_pooling():
    desc = cudnn_v1.cudnnCreatePoolingDescriptor()
    cudnn_v1.cudnnSetPoolingDescriptor(desc, cudnn_v1.CUDNN_POOLING_AVERAGE, 2, 3, 4, 5)
    assert cudnn_v1.cudnnGetPoolingDescriptor(desc) == (1, 2, 3, 4, 5)
    for mode in range(3):
        cudnn_v2.cudnnSetPooling2dDescriptor(desc, mode, 3, 4, 1, 2, 2, 1)
        assert cudnn_v2.cudnnGetPooling2dDescriptor(desc) == (mode, 3, 4, 1, 2, 2, 1)
    x = packed(2, 3, 10, 11)
    wanted = (2, 3, 1 + (10 + 2 - 3) // 2, 1 + 11 + 4 - 4)
    assert cudnn_v2.cudnnGetPooling2dForwardOutputDim(desc, x) == wanted
    assert cudnn_v2.cudnnGetPoolingNdForwardOutputDim(desc, x, 4) == wanted
    cudnn_v2.cudnnSetPoolingNdDescriptor(desc, 0, 3, (1, 2, 3), (0, 1, 1), (2, 2, 2))
    assert cudnn_v2.cudnnGetPoolingNdDescriptor(desc, 2) == (0, 3, (1, 2), (0, 1), (2, 2))
    refused(BAD_PARAM, "2 axes", cudnn_v2.cudnnGetPooling2dDescriptor, desc)
    refused(BAD_PARAM, "inputTensorDesc", cudnn_v2.cudnnGetPooling2dForwardOutputDim, desc, x)
    set_2d = cudnn_v2.cudnnSetPooling2dDescriptor
    refused(BAD_PARAM, "windowHeight", set_2d, desc, 0, 0, 4, 1, 2, 2, 1)
    refused(BAD_PARAM, "verticalPadding", set_2d, desc, 0, 3, 4, -1, 2, 2, 1)
    refused(BAD_PARAM, "mode: got 3", set_2d, desc, 3, 3, 4, 1, 2, 2, 1)
    set_nd = cudnn_v2.cudnnSetPoolingNdDescriptor
    refused(NOT_SUPPORTED, "nbDims", set_nd, desc, 0, 4, (1,) * 4, (0,) * 4, (1,) * 4)


def test_streams():
    for module in (cudnn_v1, cudnn_v2):
        handle = module.cudnnCreate()
        assert module.cudnnGetStream(handle) == 0
        for stream in (0x1234, ctypes.c_void_p(0x1234)):
            module.cudnnSetStream(handle, stream)
            assert module.cudnnGetStream(handle) == 0x1234
        found = ctypes.c_void_p()
        assert module.library.cudnnGetStream(handle, byref(found)) == 0
        assert found.value == 0x1234
        module.cudnnSetStream(handle, None)
        assert module.cudnnGetStream(handle) == 0
        refused(BAD_PARAM, "streamId", module.cudnnSetStream, handle, "a stream")
        module.cudnnDestroy(handle)
        refused(BAD_PARAM, "handle", module.cudnnGetStream, handle)


# Pointers for results, as C programs and ctypes wrappers pass them


def test_pointers_for_integers():
    desc = tensor(bedstone.TensorDesc((2, 3, 4, 5), (60, 20, 5, 1), "float64"))
    wanted = [1, 2, 3, 4, 5, 60, 20, 5, 1]
    for name in ("cudnnGetTensor4dDescriptor", "cudnnGetTensor4dDescriptor_status"):
        get = getattr(cudnn_v2, name)
        numbers = [ctypes.c_int() for _ in range(9)]
        assert not get(desc, *map(byref, numbers))
        assert [n.value for n in numbers] == wanted
        numbers = [ctypes.c_int() for _ in range(9)]
        assert not get(ctypes.c_void_p(desc), *map(ctypes.pointer, numbers))
        assert [n.value for n in numbers] == wanted
        memory = np.zeros(9, np.int32)
        assert not get(desc, *(memory.ctypes.data + 4 * i for i in range(9)))
        assert memory.tolist() == wanted
        memory[:] = 0
        assert not get(desc, *(memory[i : i + 1] for i in range(9)))
        assert memory.tolist() == wanted
    by_name = {n: ctypes.c_int() for n in cudnn_v2.cudnnGetTensor4dDescriptor.results}
    pointers = {n: byref(value) for n, value in by_name.items()}
    assert cudnn_v2.cudnnGetTensor4dDescriptor(tensorDesc=desc, **pointers) is None
    assert [n.value for n in by_name.values()] == wanted


def test_pointers_for_arrays():
    desc = tensor(bedstone.TensorDesc((2, 3, 4), (12, 4, 1), "float32"))
    get = cudnn_v2.library.cudnnGetTensorNdDescriptor
    kind, rank = ctypes.c_int(-1), ctypes.c_int(-1)
    dims, strides = (ctypes.c_int * 8)(), np.zeros(8, np.int32)
    assert get(desc, 8, byref(kind), byref(rank), dims, strides) == 0
    assert (kind.value, rank.value) == (0, 3)
    assert dims[:4] == [2, 3, 4, 0] and strides[:4].tolist() == [12, 4, 1, 0]
    dims, strides = (ctypes.c_int * 8)(), (ctypes.c_int * 8)()
    pointer = ctypes.cast(strides, ctypes.POINTER(ctypes.c_int))
    assert get(desc, 8, byref(kind), byref(rank), byref(dims), pointer) == 0
    assert dims[:3] == [2, 3, 4] and strides[:3] == [12, 4, 1]
    address = ctypes.c_void_p(ctypes.addressof(dims))
    assert get(desc, 2, byref(kind), byref(rank), byref(strides, 4), address) == 0
    assert strides[:4] == [12, 2, 3, 0] and dims[:3] == [12, 4, 4]
    short = (ctypes.c_int * 1)()
    assert get(desc, 8, byref(kind), byref(rank), short, dims) == BAD_PARAM
    # Arrays that are read
    set_nd = cudnn_v2.cudnnSetTensorNdDescriptor
    numbers = (ctypes.c_int * 3)(5, 2, 1)
    pointer = ctypes.cast(numbers, ctypes.POINTER(ctypes.c_int))
    forms = [[5, 2, 1], (5, 2, 1), np.array([5, 2, 1]), numbers, byref(numbers), pointer]
    for form in [*forms, ctypes.c_void_p(ctypes.addressof(numbers)), ctypes.addressof(numbers)]:
        set_nd(desc, FLOAT, 3, form, form)
        assert cudnn_v2.cudnnGetTensorNdDescriptor(desc, 3)[2:] == ((5, 2, 1), (5, 2, 1))


def test_wrong_pointers_write_nothing():
    desc, get = packed(2, 3, 4, 5), cudnn_v2.library.cudnnGetTensor4dDescriptor
    numbers = [ctypes.c_int(-1) for _ in range(8)]
    null = ctypes.POINTER(ctypes.c_int)()
    for wrong in (None, 0, null, ctypes.c_void_p(), ctypes.c_int(5), "text", 1.5):
        assert get(desc, *map(byref, numbers), wrong) == BAD_PARAM
    assert [n.value for n in numbers] == [-1] * 8
    assert get(desc, *map(byref, numbers), byref(ctypes.c_byte())) == 0
    cudnn_v2.cudnnSetTensor4dDescriptor(desc, 0, FLOAT, 2, 3, 4, 500)
    results = [*numbers[:4], ctypes.c_byte(), *numbers[4:8]]
    assert get(desc, *map(byref, results)) == BAD_PARAM  # 500 does not fit a byte
    with pytest.raises(TypeError, match="takes"):
        cudnn_v2.cudnnGetTensor4dDescriptor(desc, byref(numbers[0]))
