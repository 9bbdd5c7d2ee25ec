"""The descriptors of cuDNN v2's names: making, setting, reading and destroying them, and the
output dims that they tell. Part of the namespace cudnn_v2."""

from __future__ import annotations

from typing import Any

from bedstone.compat import cudnn_settings as settings
from bedstone.compat.cudnn_arguments import enumerant, integer, integers
from bedstone.compat.cudnn_calls import checked
from bedstone.compat.cudnn_descriptors import (
    ConvolutionDescriptor,
    FilterDescriptor,
    PoolingDescriptor,
    State,
    TensorDescriptor,
    destroy,
    find,
    state,
)
from bedstone.compat.cudnn_entry import entry
from bedstone.compat.cudnn_enums import cudnnPoolingModeV2 as cudnnPoolingMode
from bedstone.spec.convolution import ConvolutionDesc
from bedstone.spec.errors import InvalidDescriptor
from bedstone.spec.pooling import PoolingDesc
from bedstone.spec.tensor import TensorDesc

POOLING = {
    cudnnPoolingMode.CUDNN_POOLING_MAX: "max",
    cudnnPoolingMode.CUDNN_POOLING_AVERAGE_COUNT_INCLUDE_PADDING: "average_include_padding",
    cudnnPoolingMode.CUDNN_POOLING_AVERAGE_COUNT_EXCLUDE_PADDING: "average_exclude_padding",
}
POOLING_MODES = {name: mode for mode, name in POOLING.items()}


@entry("tensorDesc")
def cudnnCreateTensorDescriptor() -> int:
    """Make a tensor descriptor; it must be set before it is used.

    bedstone: `bedstone.TensorDesc(...)`: made and set at once, never changed
    """
    return settings.create(TensorDescriptor)


@entry()
def cudnnSetTensorNdDescriptor(
    tensorDesc: Any, dataType: Any, nbDims: Any, dimA: Any, strideA: Any
) -> None:
    """Describe a tensor of 1 to 8 dims and any strides, in elements.

    bedstone: `bedstone.TensorDesc(dims, strides, dtype)`
    """
    rank = settings.rank_of("nbDims", nbDims, 1)
    dims, strides = integers("dimA", dimA, rank), integers("strideA", strideA, rank)
    settings.set_tensor(tensorDesc, dataType, dims, strides)


@entry("dataType", "nbDims", "dimA", "strideA")
def cudnnGetTensorNdDescriptor(tensorDesc: Any, nbDimsRequested: Any) -> tuple[Any, ...]:
    """What the descriptor was set to: its rank, and the first nbDimsRequested dims and strides.

    bedstone: `desc.dtype, desc.rank, desc.dims, desc.strides`
    """
    count = integer("nbDimsRequested", nbDimsRequested, 0)
    desc: TensorDesc = state(TensorDescriptor, "tensorDesc", tensorDesc).value
    data_type = settings.DATA_TYPES[desc.dtype]
    return data_type, desc.rank, desc.dims[:count], desc.strides[:count]


@entry()
def cudnnDestroyTensorDescriptor(tensorDesc: Any) -> None:
    """Give the descriptor up.

    bedstone: not needed
    """
    destroy(TensorDescriptor, "tensorDesc", tensorDesc)


@entry()
def cudnnSetFilter4dDescriptor(
    filterDesc: Any, dataType: Any, k: Any, c: Any, h: Any, w: Any
) -> None:
    """Describe contiguous filters (K, C, R, S).

    bedstone: `bedstone.TensorDesc.packed((k, c, r, s), dtype)`
    """
    settings.set_filter(filterDesc, dataType, settings.sizes(0, k=k, c=c, h=h, w=w))


@entry("dataType", "k", "c", "h", "w")
def cudnnGetFilter4dDescriptor(filterDesc: Any) -> tuple[Any, ...]:
    """What the descriptor was set to.

    bedstone: `desc.dtype, desc.dims`
    """
    desc = settings.of_rank(FilterDescriptor, "filterDesc", filterDesc, 4)
    return (settings.DATA_TYPES[desc.dtype], *desc.dims)


@entry()
def cudnnSetFilterNdDescriptor(
    filterDesc: Any, dataType: Any, nbDims: Any, filterDimA: Any
) -> None:
    """Describe contiguous filters (K, C, spatial...) of 3 to 8 dims.

    bedstone: `bedstone.TensorDesc.packed(dims, dtype)`
    """
    rank = settings.rank_of("nbDims", nbDims, settings.SMALLEST_FILTER_RANK)
    settings.set_filter(filterDesc, dataType, integers("filterDimA", filterDimA, rank))


@entry("dataType", "nbDims", "filterDimA")
def cudnnGetFilterNdDescriptor(filterDesc: Any, nbDimsRequested: Any) -> tuple[Any, ...]:
    """What the descriptor was set to: its rank, and the first nbDimsRequested dims.

    bedstone: `desc.dtype, desc.rank, desc.dims`
    """
    count = integer("nbDimsRequested", nbDimsRequested, 0)
    desc: TensorDesc = state(FilterDescriptor, "filterDesc", filterDesc).value
    return settings.DATA_TYPES[desc.dtype], desc.rank, desc.dims[:count]


@entry("convDesc")
def cudnnCreateConvolutionDescriptor() -> int:
    """Make a convolution descriptor; it must be set before it is used.

    bedstone: `bedstone.ConvolutionDesc.of(2, ...)`: made and set at once
    """
    return settings.create(ConvolutionDescriptor)


@entry()
def cudnnSetConvolution2dDescriptor(
    convDesc: Any,
    pad_h: Any,
    pad_w: Any,
    u: Any,
    v: Any,
    upscalex: Any,
    upscaley: Any,
    mode: Any,
) -> None:
    """Describe a convolution over two axes; up-scaling other than 1 is not supported.

    bedstone: `bedstone.ConvolutionDesc.of(2, (pad_h, pad_w), (u, v), mode=mode)`
    """
    found = find(ConvolutionDescriptor, "convDesc", convDesc)
    values = settings.sizes(
        None, pad_h=pad_h, pad_w=pad_w, u=u, v=v, upscalex=upscalex, upscaley=upscaley
    )
    arrays = ("pad_h, pad_w", "u, v", "upscalex, upscaley")
    found.set(settings.convolution(arrays, values[:2], values[2:4], values[4:], mode))


@entry("pad_h", "pad_w", "u", "v", "upscalex", "upscaley", "mode")
def cudnnGetConvolution2dDescriptor(convDesc: Any) -> tuple[Any, ...]:
    """What the descriptor was set to.

    bedstone: `conv.padding, conv.stride, conv.mode`
    """
    found = convolution_state(convDesc).value
    if found.axes != 2:
        raise InvalidDescriptor("convDesc", str(found), "a convolution over two axes")
    mode = settings.CONVOLUTION_MODES[found.mode]
    return (*settings.one_padding(found.padding), *found.stride, 1, 1, mode)


@entry("n", "c", "h", "w")
def cudnnGetConvolution2dForwardOutputDim(
    convDesc: Any, inputTensorDesc: Any, filterDesc: Any
) -> tuple[int, ...]:
    """Dims of the output: 1 + (input + 2 pad - filter) / stride, rounded down.

    bedstone: `conv.output_dims(x_dims, w_dims)`
    """
    return _output_dims(convDesc, inputTensorDesc, filterDesc, 4)


@entry()
def cudnnSetConvolutionNdDescriptor(
    convDesc: Any, arrayLength: Any, padA: Any, filterStrideA: Any, upscaleA: Any, mode: Any
) -> None:
    """Describe a convolution over 1, 2 or 3 axes; up-scaling other than 1 is not supported.

    bedstone: `bedstone.ConvolutionDesc.of(axes, padding, stride, mode=mode)`
    """
    found = find(ConvolutionDescriptor, "convDesc", convDesc)
    axes = settings.rank_of("arrayLength", arrayLength, 1)
    padding, stride = integers("padA", padA, axes), integers("filterStrideA", filterStrideA, axes)
    upscale = integers("upscaleA", upscaleA, axes)
    names = ("padA", "filterStrideA", "upscaleA")
    found.set(settings.convolution(names, padding, stride, upscale, mode))


@entry("arrayLength", "padA", "strideA", "upscaleA", "mode")
def cudnnGetConvolutionNdDescriptor(convDesc: Any, arrayLengthRequested: Any) -> tuple[Any, ...]:
    """What the descriptor was set to: its axes, and the first arrayLengthRequested numbers.

    bedstone: `conv.axes, conv.padding, conv.stride, conv.mode`
    """
    count = integer("arrayLengthRequested", arrayLengthRequested, 0)
    found = convolution_state(convDesc).value
    padding, ones = settings.one_padding(found.padding), (1,) * found.axes
    mode = settings.CONVOLUTION_MODES[found.mode]
    return found.axes, padding[:count], found.stride[:count], ones[:count], mode


@entry("outputDimA")
def cudnnGetConvolutionNdForwardOutputDim(
    convDesc: Any, inputTensorDesc: Any, filterDesc: Any, nbDims: Any
) -> tuple[int, ...]:
    """Dims of the output, of which there must be nbDims.

    bedstone: `conv.output_dims(x_dims, w_dims)`
    """
    return _output_dims(convDesc, inputTensorDesc, filterDesc, integer("nbDims", nbDims))


def convolution_state(number: Any) -> State:
    """What a convolution descriptor was set to."""
    return state(ConvolutionDescriptor, "convDesc", number)


def _output_dims(convolution: Any, images: Any, filters: Any, rank: int) -> tuple[int, ...]:
    found: ConvolutionDesc = convolution_state(convolution).value
    x = settings.of_rank(TensorDescriptor, "inputTensorDesc", images, rank)
    w = settings.of_rank(FilterDescriptor, "filterDesc", filters, rank)
    dims: tuple[int, ...] = checked(
        found.output_dims, {"x": "inputTensor", "w": "filter"}, x.dims, w.dims
    )
    return dims


@entry()
def cudnnDestroyConvolutionDescriptor(convDesc: Any) -> None:
    """Give the descriptor up.

    bedstone: not needed
    """
    destroy(ConvolutionDescriptor, "convDesc", convDesc)


@entry()
def cudnnSetPooling2dDescriptor(
    poolingDesc: Any,
    mode: Any,
    windowHeight: Any,
    windowWidth: Any,
    verticalPadding: Any,
    horizontalPadding: Any,
    verticalStride: Any,
    horizontalStride: Any,
) -> None:
    """Describe windows over two axes.

    bedstone: `bedstone.PoolingDesc.of(mode, window, padding=padding, stride=stride)`
    """
    window = settings.sizes(1, windowHeight=windowHeight, windowWidth=windowWidth)
    padding = settings.sizes(
        0, verticalPadding=verticalPadding, horizontalPadding=horizontalPadding
    )
    stride = settings.sizes(1, verticalStride=verticalStride, horizontalStride=horizontalStride)
    _set_pooling(poolingDesc, mode, window, padding, stride)


@entry("mode", "windowHeight", "windowWidth", "verticalPadding", "horizontalPadding",
       "verticalStride", "horizontalStride")  # fmt: skip
def cudnnGetPooling2dDescriptor(poolingDesc: Any) -> tuple[Any, ...]:
    """What the descriptor was set to.

    bedstone: `pool.mode, pool.window, pool.padding, pool.stride`
    """
    pool = settings.pooling_of(poolingDesc, POOLING_MODES, 2)
    padding = settings.one_padding(pool.padding)
    return (POOLING_MODES[pool.mode], *pool.window, *padding, *pool.stride)


@entry()
def cudnnSetPoolingNdDescriptor(
    poolingDesc: Any, mode: Any, nbDims: Any, windowDimA: Any, paddingA: Any, strideA: Any
) -> None:
    """Describe windows over nbDims axes, 1 to 3: the spatial ones.

    bedstone: `bedstone.PoolingDesc.of(mode, window, axes, padding, stride)`
    """
    axes = settings.rank_of("nbDims", nbDims, 1)
    window, padding = integers("windowDimA", windowDimA, axes), integers("paddingA", paddingA, axes)
    _set_pooling(poolingDesc, mode, window, padding, integers("strideA", strideA, axes))


def _set_pooling(
    number: Any,
    mode: Any,
    window: tuple[int, ...],
    padding: tuple[int, ...],
    stride: tuple[int, ...],
) -> None:
    found = find(PoolingDescriptor, "poolingDesc", number)
    name = POOLING[enumerant("mode", cudnnPoolingMode, mode)]
    settings.check_axes("nbDims", len(window))
    found.set(PoolingDesc.of(name, window, len(window), padding, stride))


@entry("mode", "nbDims", "windowDimA", "paddingA", "strideA")
def cudnnGetPoolingNdDescriptor(poolingDesc: Any, nbDimsRequested: Any) -> tuple[Any, ...]:
    """What the descriptor was set to: its axes, and the first nbDimsRequested numbers.

    bedstone: `pool.mode, pool.axes, pool.window, pool.padding, pool.stride`
    """
    count = integer("nbDimsRequested", nbDimsRequested, 0)
    pool = settings.pooling_of(poolingDesc, POOLING_MODES, None)
    padding, mode = settings.one_padding(pool.padding), POOLING_MODES[pool.mode]
    return mode, pool.axes, pool.window[:count], padding[:count], pool.stride[:count]


@entry("outputTensorDimA")
def cudnnGetPoolingNdForwardOutputDim(
    poolingDesc: Any, inputTensorDesc: Any, nbDims: Any
) -> tuple[int, ...]:
    """Dims of the output, of which there must be nbDims.

    bedstone: `pool.output_dims(x_dims)`
    """
    return _pooled_dims(poolingDesc, inputTensorDesc, integer("nbDims", nbDims))


@entry("outN", "outC", "outH", "outW")
def cudnnGetPooling2dForwardOutputDim(poolingDesc: Any, inputTensorDesc: Any) -> tuple[int, ...]:
    """Dims of the output: 1 + (input + 2 padding - window) / stride, rounded down.

    bedstone: `pool.output_dims(x_dims)`
    """
    return _pooled_dims(poolingDesc, inputTensorDesc, 4)


def _pooled_dims(pooling: Any, images: Any, rank: int) -> tuple[int, ...]:
    pool = settings.pooling_of(pooling, POOLING_MODES, None)
    x = settings.of_rank(TensorDescriptor, "inputTensorDesc", images, rank)
    dims: tuple[int, ...] = checked(pool.output_dims, {"x": "inputTensor"}, x.dims)
    return dims
