"""cuDNN v1 in Python: its 35 functions, by their own names, over bedstone's plans.

Functions return what the C functions write through pointers and raise CudnnError; pointers given
at the end are written to instead. `cudnnF_status`, and the functions of `library`, keep the C
convention: pointers written, status returned. Descriptors are numbers. Data is NumPy memory, or
whatever lies on the handle's device: arrays or addresses.

Source of names, order and values: the interface of cuDNN's first release; see the page "From
cuDNN" of the documentation, which also lists what bedstone decided where that leaves it open.
"""

from __future__ import annotations

from typing import Any

from bedstone.compat import cudnn_convolution as conv
from bedstone.compat import cudnn_operations as ops
from bedstone.compat import cudnn_settings as settings
from bedstone.compat import cudnn_shared
from bedstone.compat.cudnn_arguments import enumerant, factor, integer
from bedstone.compat.cudnn_calls import checked, context, use_device
from bedstone.compat.cudnn_convolution import BoundConvolution
from bedstone.compat.cudnn_descriptors import (
    BoundConvolutionDescriptor,
    FilterDescriptor,
    PoolingDescriptor,
    TensorDescriptor,
    destroy,
    find,
    state,
)
from bedstone.compat.cudnn_entry import entry, publish
from bedstone.compat.cudnn_enums import (
    cudnnAccumulateResult,
    cudnnActivationMode,
    cudnnAddMode,
    cudnnConvolutionMode,
    cudnnConvolutionPath,
    cudnnDataType,
    cudnnSoftmaxAlgorithm,
    cudnnSoftmaxMode,
    cudnnTensorFormat,
)
from bedstone.compat.cudnn_enums import cudnnPoolingModeV1 as cudnnPoolingMode
from bedstone.compat.cudnn_status import CudnnError, cudnnCheckStatus, cudnnStatus
from bedstone.spec.errors import InvalidDescriptor
from bedstone.spec.pooling import PoolingDesc

POOLING = {
    cudnnPoolingMode.CUDNN_POOLING_MAX: "max",
    cudnnPoolingMode.CUDNN_POOLING_AVERAGE: "average_include_padding",
}
POOLING_MODES = {name: mode for mode, name in POOLING.items()}


# Tensors


@entry("tensorDesc")
def cudnnCreateTensor4dDescriptor() -> int:
    """Make a tensor descriptor; it must be set before it is used.

    bedstone: `bedstone.TensorDesc(...)`: made and set at once, never changed
    """
    return settings.create(TensorDescriptor)


@entry()
def cudnnDestroyTensor4dDescriptor(tensorDesc: Any) -> None:
    """Give the descriptor up.

    bedstone: not needed
    """
    destroy(TensorDescriptor, "tensorDesc", tensorDesc)


@entry()
def cudnnTransformTensor4d(
    handle: Any, srcDesc: Any, srcData: Any, destDesc: Any, destData: Any
) -> None:
    """Copy a tensor into another of the same dims and any strides; not in place.

    bedstone: `bedstone.transform(x, out=y)`
    """
    found = context(handle)
    src = state(TensorDescriptor, "srcDesc", srcDesc)
    dest = state(TensorDescriptor, "destDesc", destDesc)
    ops.transform(found, src, srcData, dest, destData, 1.0, 0.0)


@entry()
def cudnnAddTensor4d(
    handle: Any,
    mode: Any,
    alpha: Any,
    biasDesc: Any,
    biasData: Any,
    srcDestDesc: Any,
    srcDestData: Any,
) -> None:
    """Add alpha times a bias, of the dims that the mode asks for, to a tensor.

    bedstone: `bedstone.add(b, y, alpha=alpha)`
    """
    found, how = context(handle), enumerant("mode", cudnnAddMode, mode)
    bias = state(TensorDescriptor, "biasDesc", biasDesc)
    dest = state(TensorDescriptor, "srcDestDesc", srcDestDesc)
    a = factor("alpha", alpha, dest.value.dtype)
    ops.add(found, how, bias, biasData, dest, srcDestData, a, 1.0)


@entry()
def cudnnSetTensor4d(handle: Any, tensorDesc: Any, tensorData: Any, value: Any) -> None:
    """Write one value to every element.

    bedstone: `bedstone.set_to(y, value)`
    """
    found = context(handle)
    dest = state(TensorDescriptor, "tensorDesc", tensorDesc)
    number = factor("value", value, dest.value.dtype)
    ops.fill_or_scale(found, "set", "tensor", dest, tensorData, number)


# Filters


@entry()
def cudnnSetFilterDescriptor(
    filterDesc: Any, dataType: Any, k: Any, c: Any, h: Any, w: Any
) -> None:
    """Describe contiguous filters (K, C, R, S).

    bedstone: `bedstone.TensorDesc.packed((k, c, r, s), dtype)`
    """
    settings.set_filter(filterDesc, dataType, settings.sizes(0, k=k, c=c, h=h, w=w))


@entry("dataType", "k", "c", "h", "w")
def cudnnGetFilterDescriptor(filterDesc: Any) -> tuple[Any, ...]:
    """What the descriptor was set to.

    bedstone: `desc.dtype, desc.dims`
    """
    desc = settings.of_rank(FilterDescriptor, "filterDesc", filterDesc, 4)
    return (settings.DATA_TYPES[desc.dtype], *desc.dims)


# Convolution


@entry("convDesc")
def cudnnCreateConvolutionDescriptor() -> int:
    """Make a convolution descriptor; it must be set before it is used.

    bedstone: `bedstone.ConvolutionDesc.of(2, ...)`: made and set at once
    """
    return settings.create(BoundConvolutionDescriptor)


@entry()
def cudnnSetConvolutionDescriptor(
    convDesc: Any,
    inputTensorDesc: Any,
    filterDesc: Any,
    pad_h: Any,
    pad_w: Any,
    u: Any,
    v: Any,
    upscalex: Any,
    upscaley: Any,
    mode: Any,
) -> None:
    """Describe the convolution of these images by these filters; it holds for their dims only.

    bedstone: `bedstone.ConvolutionDesc.of(2, (pad_h, pad_w), (u, v), mode=mode)`
    """
    x = settings.of_rank(TensorDescriptor, "inputTensorDesc", inputTensorDesc, 4)
    filters = settings.of_rank(FilterDescriptor, "filterDesc", filterDesc, 4)
    if x.dtype is not filters.dtype:
        raise InvalidDescriptor("filterDesc", str(filters), f"the data type of {x}")
    _bind(convDesc, x.dims, filters.dims, (pad_h, pad_w, u, v, upscalex, upscaley), mode)


@entry()
def cudnnSetConvolutionDescriptorEx(
    convDesc: Any,
    n: Any,
    c: Any,
    h: Any,
    w: Any,
    k: Any,
    r: Any,
    s: Any,
    pad_h: Any,
    pad_w: Any,
    u: Any,
    v: Any,
    upscalex: Any,
    upscaley: Any,
    mode: Any,
) -> None:
    """As cudnnSetConvolutionDescriptor, from the dims of images and filters.

    bedstone: `bedstone.convolution_problem("forward", (n, c, h, w), (k, c, r, s), ...)`
    """
    dims = settings.sizes(0, n=n, c=c, h=h, w=w)
    filters = settings.sizes(0, k=k, c=c, r=r, s=s)
    _bind(convDesc, dims, filters, (pad_h, pad_w, u, v, upscalex, upscaley), mode)


def _bind(
    number: Any, x: tuple[int, ...], w: tuple[int, ...], values: tuple[Any, ...], mode: Any
) -> None:
    found = find(BoundConvolutionDescriptor, "convDesc", number)
    names = ("pad_h", "pad_w", "u", "v", "upscalex", "upscaley")
    pad_h, pad_w, u, v, *upscale = (integer(n, value) for n, value in zip(names, values))
    arrays = ("pad_h, pad_w", "u, v", "upscalex, upscaley")
    made = settings.convolution(arrays, (pad_h, pad_w), (u, v), tuple(upscale), mode)
    stems = {"x": "inputTensor", "w": "filter"}
    checked(made.output_dims, stems, x, w)
    found.set(BoundConvolution(made, x, w))


@entry("n", "c", "h", "w")
def cudnnGetOutputTensor4dDim(convDesc: Any, path: Any) -> tuple[int, ...]:
    """Dims of a pass's result: the output's, the filter's or the input's.

    bedstone: `conv.output_dims(x_dims, w_dims)`
    """
    bound: BoundConvolution = state(BoundConvolutionDescriptor, "convDesc", convDesc).value
    which = enumerant("path", cudnnConvolutionPath, path)
    if which == cudnnConvolutionPath.CUDNN_CONVOLUTION_FWD:
        return bound.conv.output_dims(bound.x, bound.w)
    return bound.w if which == cudnnConvolutionPath.CUDNN_CONVOLUTION_WEIGHT_GRAD else bound.x


@entry()
def cudnnDestroyConvolutionDescriptor(convDesc: Any) -> None:
    """Give the descriptor up.

    bedstone: not needed
    """
    destroy(BoundConvolutionDescriptor, "convDesc", convDesc)


def _beta(accumulate: Any) -> float:
    how = enumerant("accumulate", cudnnAccumulateResult, accumulate)
    return 1.0 if how == cudnnAccumulateResult.CUDNN_RESULT_ACCUMULATE else 0.0


@entry()
def cudnnConvolutionForward(
    handle: Any,
    srcDesc: Any,
    srcData: Any,
    filterDesc: Any,
    filterData: Any,
    convDesc: Any,
    destDesc: Any,
    destData: Any,
    accumulate: Any,
) -> None:
    """Convolve images by filters into, or onto, the destination.

    bedstone: `bedstone.convolution(x, w, padding=..., stride=..., out=y, beta=0 or 1)`
    """
    found, beta = context(handle), _beta(accumulate)
    src = state(TensorDescriptor, "srcDesc", srcDesc)
    filters = state(FilterDescriptor, "filterDesc", filterDesc)
    bound = state(BoundConvolutionDescriptor, "convDesc", convDesc)
    dest = state(TensorDescriptor, "destDesc", destDesc)
    bound.value.check("srcDesc", src, "filterDesc", filters)
    how, version = bound.value.conv, bound.version
    conv.forward(found, src, srcData, filters, filterData, how, version, dest, destData, 1.0, beta)


@entry()
def cudnnConvolutionBackwardBias(
    handle: Any, srcDesc: Any, srcData: Any, destDesc: Any, destData: Any, accumulate: Any
) -> None:
    """Sum the output's gradient over images and pixels: the bias's gradient, (1, C, 1, 1).

    bedstone: `bedstone.convolution_backward_bias(dy, out=dbias, beta=0 or 1)`
    """
    found, beta = context(handle), _beta(accumulate)
    src = state(TensorDescriptor, "srcDesc", srcDesc)
    dest = state(TensorDescriptor, "destDesc", destDesc)
    conv.backward_bias(found, src, srcData, dest, destData, 1.0, beta)


@entry()
def cudnnConvolutionBackwardFilter(
    handle: Any,
    srcDesc: Any,
    srcData: Any,
    diffDesc: Any,
    diffData: Any,
    convDesc: Any,
    gradDesc: Any,
    gradData: Any,
    accumulate: Any,
) -> None:
    """The filters' gradient from the images and the output's gradient.

    bedstone: `bedstone.convolution_backward_filter(x, dy, w_dims, ..., out=dw, beta=0 or 1)`
    """
    found, beta = context(handle), _beta(accumulate)
    src = state(TensorDescriptor, "srcDesc", srcDesc)
    diff = state(TensorDescriptor, "diffDesc", diffDesc)
    bound = state(BoundConvolutionDescriptor, "convDesc", convDesc)
    grad = state(FilterDescriptor, "gradDesc", gradDesc)
    bound.value.check("srcDesc", src, "gradDesc", grad)
    how, version = bound.value.conv, bound.version
    conv.backward_filter(
        found, src, srcData, diff, diffData, how, version, grad, gradData, 1.0, beta
    )


@entry()
def cudnnConvolutionBackwardData(
    handle: Any,
    filterDesc: Any,
    filterData: Any,
    diffDesc: Any,
    diffData: Any,
    convDesc: Any,
    gradDesc: Any,
    gradData: Any,
    accumulate: Any,
) -> None:
    """The images' gradient from the filters and the output's gradient.

    bedstone: `bedstone.convolution_backward_data(w, dy, x_dims, ..., out=dx, beta=0 or 1)`
    """
    found, beta = context(handle), _beta(accumulate)
    filters = state(FilterDescriptor, "filterDesc", filterDesc)
    diff = state(TensorDescriptor, "diffDesc", diffDesc)
    bound = state(BoundConvolutionDescriptor, "convDesc", convDesc)
    grad = state(TensorDescriptor, "gradDesc", gradDesc)
    bound.value.check("gradDesc", grad, "filterDesc", filters)
    how, version = bound.value.conv, bound.version
    conv.backward_data(
        found, filters, filterData, diff, diffData, how, version, grad, gradData, 1.0, beta
    )


# Softmax


@entry()
def cudnnSoftmaxForward(
    handle: Any,
    algorithm: Any,
    mode: Any,
    srcDesc: Any,
    srcData: Any,
    destDesc: Any,
    destData: Any,
) -> None:
    """Softmax over each image's C, H, W or over C of each pixel.

    bedstone: `bedstone.softmax(x, axes=(1, 2, 3) or 1, kind="accurate", out=y)`
    """
    found = context(handle)
    how = enumerant("algorithm", cudnnSoftmaxAlgorithm, algorithm)
    over = enumerant("mode", cudnnSoftmaxMode, mode)
    src = state(TensorDescriptor, "srcDesc", srcDesc)
    dest = state(TensorDescriptor, "destDesc", destDesc)
    ops.softmax_forward(found, how, over, src, srcData, dest, destData, 1.0, 0.0)


@entry()
def cudnnSoftmaxBackward(
    handle: Any,
    algorithm: Any,
    mode: Any,
    srcDesc: Any,
    srcData: Any,
    srcDiffDesc: Any,
    srcDiffData: Any,
    destDiffDesc: Any,
    destDiffData: Any,
) -> None:
    """The gradient of softmax, from its result (src) and the result's gradient.

    bedstone: `bedstone.softmax_backward(y, dy, axes=..., out=dx)`
    """
    found = context(handle)
    how = enumerant("algorithm", cudnnSoftmaxAlgorithm, algorithm)
    over = enumerant("mode", cudnnSoftmaxMode, mode)
    src = state(TensorDescriptor, "srcDesc", srcDesc)
    diff = state(TensorDescriptor, "srcDiffDesc", srcDiffDesc)
    grad = state(TensorDescriptor, "destDiffDesc", destDiffDesc)
    ops.softmax_backward(
        found, how, over, src, srcData, diff, srcDiffData, grad, destDiffData, 1.0, 0.0
    )


# Pooling


@entry()
def cudnnSetPoolingDescriptor(
    poolingDesc: Any,
    mode: Any,
    windowHeight: Any,
    windowWidth: Any,
    verticalStride: Any,
    horizontalStride: Any,
) -> None:
    """Describe windows without padding.

    bedstone: `bedstone.PoolingDesc.of(mode, (height, width), stride=(vertical, horizontal))`
    """
    found = find(PoolingDescriptor, "poolingDesc", poolingDesc)
    name = POOLING[enumerant("mode", cudnnPoolingMode, mode)]
    window = settings.sizes(1, windowHeight=windowHeight, windowWidth=windowWidth)
    stride = settings.sizes(1, verticalStride=verticalStride, horizontalStride=horizontalStride)
    found.set(PoolingDesc.of(name, window, 2, 0, stride))


@entry("mode", "windowHeight", "windowWidth", "verticalStride", "horizontalStride")
def cudnnGetPoolingDescriptor(poolingDesc: Any) -> tuple[Any, ...]:
    """What the descriptor was set to.

    bedstone: `pool.mode, pool.window, pool.stride`
    """
    pool = settings.pooling_of(poolingDesc, POOLING_MODES, 2)
    return (POOLING_MODES[pool.mode], *pool.window, *pool.stride)


@entry()
def cudnnPoolingForward(
    handle: Any, poolingDesc: Any, srcDesc: Any, srcData: Any, destDesc: Any, destData: Any
) -> None:
    """The maximum or mean of every window.

    bedstone: `bedstone.pool(x, window, mode, stride=..., out=y)`
    """
    found = context(handle)
    pool = state(PoolingDescriptor, "poolingDesc", poolingDesc)
    src = state(TensorDescriptor, "srcDesc", srcDesc)
    dest = state(TensorDescriptor, "destDesc", destDesc)
    ops.pooling_forward(found, pool, src, srcData, dest, destData, 1.0, 0.0)


@entry()
def cudnnPoolingBackward(
    handle: Any,
    poolingDesc: Any,
    srcDesc: Any,
    srcData: Any,
    srcDiffDesc: Any,
    srcDiffData: Any,
    destDesc: Any,
    destData: Any,
    destDiffDesc: Any,
    destDiffData: Any,
) -> None:
    """The gradient of pooling: src is the pooled output, dest the input; maxima are found again.

    bedstone: `bedstone.pool_backward(dy, window, mode, x=x, stride=..., out=dx)`
    """
    found = context(handle)
    pool = state(PoolingDescriptor, "poolingDesc", poolingDesc)
    src = state(TensorDescriptor, "srcDesc", srcDesc)
    diff = state(TensorDescriptor, "srcDiffDesc", srcDiffDesc)
    dest = state(TensorDescriptor, "destDesc", destDesc)
    grad = state(TensorDescriptor, "destDiffDesc", destDiffDesc)
    ops.pooling_backward(
        found, pool, src, srcData, diff, srcDiffData, dest, destData, grad, destDiffData, 1.0, 0.0
    )  # fmt: skip


# Activation


@entry()
def cudnnActivationForward(
    handle: Any, mode: Any, srcDesc: Any, srcData: Any, destDesc: Any, destData: Any
) -> None:
    """Sigmoid, ReLU or tanh of every element; in place is allowed.

    bedstone: `bedstone.activation(x, "relu", out=y)`
    """
    found, how = context(handle), enumerant("mode", cudnnActivationMode, mode)
    src = state(TensorDescriptor, "srcDesc", srcDesc)
    dest = state(TensorDescriptor, "destDesc", destDesc)
    ops.activation_forward(found, how, src, srcData, dest, destData, 1.0, 0.0)


@entry()
def cudnnActivationBackward(
    handle: Any,
    mode: Any,
    srcDesc: Any,
    srcData: Any,
    srcDiffDesc: Any,
    srcDiffData: Any,
    destDesc: Any,
    destData: Any,
    destDiffDesc: Any,
    destDiffData: Any,
) -> None:
    """The gradient of an activation, from its result (src); dest, its input, is not read.

    bedstone: `bedstone.activation_backward(y, dy, "relu", out=dx)`
    """
    found, how = context(handle), enumerant("mode", cudnnActivationMode, mode)
    src = state(TensorDescriptor, "srcDesc", srcDesc)
    diff = state(TensorDescriptor, "srcDiffDesc", srcDiffDesc)
    dest = state(TensorDescriptor, "destDesc", destDesc)
    grad = state(TensorDescriptor, "destDiffDesc", destDiffDesc)
    ops.activation_backward(
        found, how, src, srcData, diff, srcDiffData, dest, destData, grad, destDiffData, 1.0, 0.0
    )  # fmt: skip


ENUMERATIONS = (
    cudnnStatus, cudnnDataType, cudnnTensorFormat, cudnnAddMode, cudnnConvolutionMode,
    cudnnConvolutionPath, cudnnAccumulateResult, cudnnSoftmaxAlgorithm, cudnnSoftmaxMode,
    cudnnPoolingMode, cudnnActivationMode,
)  # fmt: skip
cudnnError = CudnnError
FUNCTIONS, library = publish(globals(), "cudnn_v1", (cudnn_shared,), ENUMERATIONS)
__all__ = ["CudnnError", "cudnnCheckStatus", "cudnnError", "library", "use_device", *FUNCTIONS]
