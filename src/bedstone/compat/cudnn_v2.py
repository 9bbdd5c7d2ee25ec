"""cuDNN v2 in Python: its 52 functions, by their own names, over bedstone's plans.

Functions return what the C functions write through pointers and raise CudnnError; pointers given
at the end are written to instead. `cudnnF_status`, and the functions of `library`, keep the C
convention: pointers written, status returned. Descriptors are numbers. Data is NumPy memory, or
whatever lies on the handle's device: arrays or addresses.

Every computation is dest = alpha * op(...) + beta * dest; where beta is 0, dest is not read.
Source of names, order and values: the interface of cuDNN's second release; see the page "From
cuDNN" of the documentation, which also lists what bedstone decided where that leaves it open.
"""

from __future__ import annotations

from typing import Any

from bedstone.compat import cudnn_convolution as conv
from bedstone.compat import cudnn_operations as ops
from bedstone.compat import cudnn_shared, cudnn_v2_descriptors
from bedstone.compat.cudnn_arguments import (
    enumerant,
    factor,
    integer,
    size,
)
from bedstone.compat.cudnn_calls import context, use_device
from bedstone.compat.cudnn_descriptors import (
    FilterDescriptor,
    PoolingDescriptor,
    TensorDescriptor,
    state,
)
from bedstone.compat.cudnn_entry import entry, publish, valued
from bedstone.compat.cudnn_enums import (
    cudnnActivationMode,
    cudnnAddMode,
    cudnnConvolutionFwdAlgo,
    cudnnConvolutionFwdPreference,
    cudnnConvolutionMode,
    cudnnDataType,
    cudnnSoftmaxAlgorithm,
    cudnnSoftmaxMode,
    cudnnTensorFormat,
)
from bedstone.compat.cudnn_enums import cudnnPoolingModeV2 as cudnnPoolingMode
from bedstone.compat.cudnn_status import (
    CudnnError,
    cudnnCheckStatus,
    cudnnStatus,
    error_string,
)
from bedstone.compat.cudnn_v2_descriptors import (
    convolution_state,
)
from bedstone.spec.tensor import TensorDesc

CUDNN_VERSION = 2000


# Library


@valued()
def cudnnGetVersion() -> int:
    """The version of the interface: 2000.

    bedstone: `bedstone.__version__`
    """
    return CUDNN_VERSION


@valued(lambda status: error_string(integer("status", status)).encode())
def cudnnGetErrorString(status: Any) -> str:
    """The name of a status code (through `library`: as bytes).

    bedstone: `str(error)` of a BedstoneError says what was wrong
    """
    return error_string(integer("status", status))


# Tensors


def factors(alpha: Any, beta: Any, desc: TensorDesc) -> tuple[float, float]:
    """alpha and beta as numbers of the data's type."""
    return factor("alpha", alpha, desc.dtype), factor("beta", beta, desc.dtype)


@entry()
def cudnnTransformTensor(
    handle: Any,
    alpha: Any,
    srcDesc: Any,
    srcData: Any,
    beta: Any,
    destDesc: Any,
    destData: Any,
) -> None:
    """Copy a tensor into another of the same dims and any strides; not in place.

    bedstone: `bedstone.transform(x, out=y, alpha=alpha, beta=beta)`
    """
    found = context(handle)
    src = state(TensorDescriptor, "srcDesc", srcDesc)
    dest = state(TensorDescriptor, "destDesc", destDesc)
    a, b = factors(alpha, beta, dest.value)
    ops.transform(found, src, srcData, dest, destData, a, b)


@entry()
def cudnnAddTensor(
    handle: Any,
    mode: Any,
    alpha: Any,
    biasDesc: Any,
    biasData: Any,
    beta: Any,
    srcDestDesc: Any,
    srcDestData: Any,
) -> None:
    """Add a bias, of the dims that the mode asks for, to a tensor.

    bedstone: `bedstone.add(b, y, alpha=alpha, beta=beta)`
    """
    found, how = context(handle), enumerant("mode", cudnnAddMode, mode)
    bias = state(TensorDescriptor, "biasDesc", biasDesc)
    dest = state(TensorDescriptor, "srcDestDesc", srcDestDesc)
    a, b = factors(alpha, beta, dest.value)
    ops.add(found, how, bias, biasData, dest, srcDestData, a, b)


@entry()
def cudnnSetTensor(handle: Any, srcDestDesc: Any, srcDestData: Any, value: Any) -> None:
    """Write one value to every element.

    bedstone: `bedstone.set_to(y, value)`
    """
    found = context(handle)
    dest = state(TensorDescriptor, "srcDestDesc", srcDestDesc)
    number = factor("value", value, dest.value.dtype)
    ops.fill_or_scale(found, "set", "srcDest", dest, srcDestData, number)


@entry()
def cudnnScaleTensor(handle: Any, srcDestDesc: Any, srcDestData: Any, alpha: Any) -> None:
    """Multiply every element.

    bedstone: `bedstone.scale(y, alpha)`
    """
    found = context(handle)
    dest = state(TensorDescriptor, "srcDestDesc", srcDestDesc)
    number = factor("alpha", alpha, dest.value.dtype)
    ops.fill_or_scale(found, "scale", "srcDest", dest, srcDestData, number)


# Convolution


@entry("algo")
def cudnnGetConvolutionForwardAlgorithm(
    handle: Any,
    srcDesc: Any,
    filterDesc: Any,
    convDesc: Any,
    destDesc: Any,
    preference: Any,
    memoryLimitInbytes: Any,
) -> Any:
    """The algorithm of least estimated time within what the preference grants of workspace.

    bedstone: `handle.plan(problem, workspace_limit=limit).algorithm`
    """
    found = context(handle)
    src = state(TensorDescriptor, "srcDesc", srcDesc)
    filters = state(FilterDescriptor, "filterDesc", filterDesc)
    how, dest = convolution_state(convDesc), state(TensorDescriptor, "destDesc", destDesc)
    wish = enumerant("preference", cudnnConvolutionFwdPreference, preference)
    limit = 0
    if wish == cudnnConvolutionFwdPreference.CUDNN_CONVOLUTION_FWD_SPECIFY_WORKSPACE_LIMIT:
        limit = size("memoryLimitInbytes", memoryLimitInbytes)
    return conv.proposed_algorithm(found, src, filters, dest, how.value, wish, limit)


@entry("sizeInBytes")
def cudnnGetConvolutionForwardWorkspaceSize(
    handle: Any, srcDesc: Any, filterDesc: Any, convDesc: Any, destDesc: Any, algo: Any
) -> int:
    """Bytes of workspace that the algorithm needs.

    bedstone: `plan.workspace_size`
    """
    found = context(handle)
    src = state(TensorDescriptor, "srcDesc", srcDesc)
    filters = state(FilterDescriptor, "filterDesc", filterDesc)
    how, dest = convolution_state(convDesc), state(TensorDescriptor, "destDesc", destDesc)
    which = enumerant("algo", cudnnConvolutionFwdAlgo, algo)
    return conv.forward_plan(found, src, filters, dest, how.value, which).workspace_size


@entry()
def cudnnConvolutionForward(
    handle: Any,
    alpha: Any,
    srcDesc: Any,
    srcData: Any,
    filterDesc: Any,
    filterData: Any,
    convDesc: Any,
    algo: Any,
    workSpace: Any,
    workSpaceSizeInBytes: Any,
    beta: Any,
    destDesc: Any,
    destData: Any,
) -> None:
    """Convolve images by filters.

    bedstone: `bedstone.convolution(x, w, padding=..., stride=..., out=y, alpha=a, beta=b)`
    """
    found, how = context(handle), convolution_state(convDesc)
    src = state(TensorDescriptor, "srcDesc", srcDesc)
    filters = state(FilterDescriptor, "filterDesc", filterDesc)
    dest = state(TensorDescriptor, "destDesc", destDesc)
    which = enumerant("algo", cudnnConvolutionFwdAlgo, algo)
    nbytes = size("workSpaceSizeInBytes", workSpaceSizeInBytes)
    a, b = factors(alpha, beta, dest.value)
    conv.forward(
        found, src, srcData, filters, filterData, how.value, how.version, dest, destData, a, b,
        which, workSpace, nbytes,
    )  # fmt: skip


@entry()
def cudnnConvolutionBackwardBias(
    handle: Any,
    alpha: Any,
    srcDesc: Any,
    srcData: Any,
    beta: Any,
    destDesc: Any,
    destData: Any,
) -> None:
    """Sum the output's gradient over images and pixels: the bias's gradient, (1, C, 1, 1).

    bedstone: `bedstone.convolution_backward_bias(dy, out=dbias, alpha=a, beta=b)`
    """
    found = context(handle)
    src = state(TensorDescriptor, "srcDesc", srcDesc)
    dest = state(TensorDescriptor, "destDesc", destDesc)
    a, b = factors(alpha, beta, dest.value)
    conv.backward_bias(found, src, srcData, dest, destData, a, b)


@entry()
def cudnnConvolutionBackwardFilter(
    handle: Any,
    alpha: Any,
    srcDesc: Any,
    srcData: Any,
    diffDesc: Any,
    diffData: Any,
    convDesc: Any,
    beta: Any,
    gradDesc: Any,
    gradData: Any,
) -> None:
    """The filters' gradient from the images and the output's gradient.

    bedstone: `bedstone.convolution_backward_filter(x, dy, w_dims, ..., out=dw, alpha=a, beta=b)`
    """
    found, how = context(handle), convolution_state(convDesc)
    src = state(TensorDescriptor, "srcDesc", srcDesc)
    diff = state(TensorDescriptor, "diffDesc", diffDesc)
    grad = state(FilterDescriptor, "gradDesc", gradDesc)
    a, b = factors(alpha, beta, grad.value)
    conv.backward_filter(
        found, src, srcData, diff, diffData, how.value, how.version, grad, gradData, a, b
    )


@entry()
def cudnnConvolutionBackwardData(
    handle: Any,
    alpha: Any,
    filterDesc: Any,
    filterData: Any,
    diffDesc: Any,
    diffData: Any,
    convDesc: Any,
    beta: Any,
    gradDesc: Any,
    gradData: Any,
) -> None:
    """The images' gradient from the filters and the output's gradient.

    bedstone: `bedstone.convolution_backward_data(w, dy, x_dims, ..., out=dx, alpha=a, beta=b)`
    """
    found, how = context(handle), convolution_state(convDesc)
    filters = state(FilterDescriptor, "filterDesc", filterDesc)
    diff = state(TensorDescriptor, "diffDesc", diffDesc)
    grad = state(TensorDescriptor, "gradDesc", gradDesc)
    a, b = factors(alpha, beta, grad.value)
    conv.backward_data(
        found, filters, filterData, diff, diffData, how.value, how.version, grad, gradData, a, b
    )


@entry()
def cudnnIm2Col(
    handle: Any,
    alpha: Any,
    srcDesc: Any,
    srcData: Any,
    filterDesc: Any,
    convDesc: Any,
    colBuffer: Any,
) -> None:
    """Lower images to the matrix (C R S) x (N P Q), contiguous, times alpha.

    bedstone: not needed: its convolutions never form the matrix
    """
    found, how = context(handle), convolution_state(convDesc)
    src = state(TensorDescriptor, "srcDesc", srcDesc)
    filters = state(FilterDescriptor, "filterDesc", filterDesc)
    a = factor("alpha", alpha, src.value.dtype)
    conv.lower(found, src, srcData, filters, how.value, how.version, colBuffer, a)


# Softmax


@entry()
def cudnnSoftmaxForward(
    handle: Any,
    algorithm: Any,
    mode: Any,
    alpha: Any,
    srcDesc: Any,
    srcData: Any,
    beta: Any,
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
    a, b = factors(alpha, beta, dest.value)
    ops.softmax_forward(found, how, over, src, srcData, dest, destData, a, b)


@entry()
def cudnnSoftmaxBackward(
    handle: Any,
    algorithm: Any,
    mode: Any,
    alpha: Any,
    srcDesc: Any,
    srcData: Any,
    srcDiffDesc: Any,
    srcDiffData: Any,
    beta: Any,
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
    a, b = factors(alpha, beta, grad.value)
    ops.softmax_backward(
        found, how, over, src, srcData, diff, srcDiffData, grad, destDiffData, a, b
    )


# Pooling


@entry()
def cudnnPoolingForward(
    handle: Any,
    poolingDesc: Any,
    alpha: Any,
    srcDesc: Any,
    srcData: Any,
    beta: Any,
    destDesc: Any,
    destData: Any,
) -> None:
    """The maximum or mean of every window.

    bedstone: `bedstone.pool(x, window, mode, padding=..., stride=..., out=y)`
    """
    found = context(handle)
    pool = state(PoolingDescriptor, "poolingDesc", poolingDesc)
    src = state(TensorDescriptor, "srcDesc", srcDesc)
    dest = state(TensorDescriptor, "destDesc", destDesc)
    a, b = factors(alpha, beta, dest.value)
    ops.pooling_forward(found, pool, src, srcData, dest, destData, a, b)


@entry()
def cudnnPoolingBackward(
    handle: Any,
    poolingDesc: Any,
    alpha: Any,
    srcDesc: Any,
    srcData: Any,
    srcDiffDesc: Any,
    srcDiffData: Any,
    destDesc: Any,
    destData: Any,
    beta: Any,
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
    a, b = factors(alpha, beta, grad.value)
    ops.pooling_backward(
        found, pool, src, srcData, diff, srcDiffData, dest, destData, grad, destDiffData, a, b
    )


# Activation


@entry()
def cudnnActivationForward(
    handle: Any,
    mode: Any,
    alpha: Any,
    srcDesc: Any,
    srcData: Any,
    beta: Any,
    destDesc: Any,
    destData: Any,
) -> None:
    """Sigmoid, ReLU or tanh of every element; in place is allowed.

    bedstone: `bedstone.activation(x, "relu", out=y)`
    """
    found, how = context(handle), enumerant("mode", cudnnActivationMode, mode)
    src = state(TensorDescriptor, "srcDesc", srcDesc)
    dest = state(TensorDescriptor, "destDesc", destDesc)
    a, b = factors(alpha, beta, dest.value)
    ops.activation_forward(found, how, src, srcData, dest, destData, a, b)


@entry()
def cudnnActivationBackward(
    handle: Any,
    mode: Any,
    alpha: Any,
    srcDesc: Any,
    srcData: Any,
    srcDiffDesc: Any,
    srcDiffData: Any,
    destDesc: Any,
    destData: Any,
    beta: Any,
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
    a, b = factors(alpha, beta, grad.value)
    ops.activation_backward(
        found, how, src, srcData, diff, srcDiffData, dest, destData, grad, destDiffData, a, b
    )


ENUMERATIONS = (
    cudnnStatus, cudnnDataType, cudnnTensorFormat, cudnnAddMode, cudnnConvolutionMode,
    cudnnConvolutionFwdPreference, cudnnConvolutionFwdAlgo, cudnnSoftmaxAlgorithm,
    cudnnSoftmaxMode, cudnnPoolingMode, cudnnActivationMode,
)  # fmt: skip
cudnnError = CudnnError
FUNCTIONS, library = publish(
    globals(), "cudnn_v2", (cudnn_shared, cudnn_v2_descriptors), ENUMERATIONS
)
__all__ = [
    "CUDNN_VERSION",
    "CudnnError",
    "cudnnCheckStatus",
    "cudnnError",
    "library",
    "use_device",
    *FUNCTIONS,
]
