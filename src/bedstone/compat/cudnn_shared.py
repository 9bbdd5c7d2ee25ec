"""Functions that v1 and v2 of the cuDNN names have in common, arguments and all: the handle, the
4-d tensor descriptor, making and destroying filter and pooling descriptors."""

from __future__ import annotations

from typing import Any

from bedstone.compat import cudnn_settings as settings
from bedstone.compat.cudnn_arguments import address_of
from bedstone.compat.cudnn_calls import Context, context
from bedstone.compat.cudnn_descriptors import (
    FilterDescriptor,
    PoolingDescriptor,
    TensorDescriptor,
    destroy,
    register,
)
from bedstone.compat.cudnn_entry import entry


@entry("handle")
def cudnnCreate(*, device: str | None = None) -> int:
    """Make a handle: a device with its plans. `device`: "cpu", "cuda", "cuda:N".

    bedstone: `handle = bedstone.Handle(device)`
    """
    return register(Context(device))


@entry()
def cudnnDestroy(handle: Any) -> None:
    """Give the handle and its plans up.

    bedstone: not needed: a Handle goes when nothing refers to it
    """
    destroy(Context, "handle", handle)


@entry()
def cudnnSetStream(handle: Any, streamId: Any) -> None:
    """Set the CUDA stream of later calls; on the CPU calls are synchronous whatever it is.

    bedstone: `plan(*pointers, stream=stream)`
    """
    context(handle).stream = address_of("streamId", streamId)


@entry("streamId")
def cudnnGetStream(handle: Any) -> int:
    """The stream that was set; 0, the default one, at first.

    bedstone: the caller knows it
    """
    return context(handle).stream


@entry()
def cudnnSetTensor4dDescriptor(
    tensorDesc: Any, format: Any, dataType: Any, n: Any, c: Any, h: Any, w: Any
) -> None:
    """Describe a tensor without gaps, NCHW or NHWC.

    bedstone: `bedstone.TensorDesc.packed((n, c, h, w), dtype, "NHWC")`
    """
    dims = settings.sizes(0, n=n, c=c, h=h, w=w)
    settings.set_packed_tensor(tensorDesc, format, dataType, dims)


@entry()
def cudnnSetTensor4dDescriptorEx(
    tensorDesc: Any,
    dataType: Any,
    n: Any,
    c: Any,
    h: Any,
    w: Any,
    nStride: Any,
    cStride: Any,
    hStride: Any,
    wStride: Any,
) -> None:
    """Describe a tensor of any strides, in elements: any order, gaps, sub-tensors.

    bedstone: `bedstone.TensorDesc((n, c, h, w), strides, dtype)`
    """
    dims = settings.sizes(0, n=n, c=c, h=h, w=w)
    strides = settings.sizes(
        None, nStride=nStride, cStride=cStride, hStride=hStride, wStride=wStride
    )
    settings.set_tensor(tensorDesc, dataType, dims, strides)


@entry("dataType", "n", "c", "h", "w", "nStride", "cStride", "hStride", "wStride")
def cudnnGetTensor4dDescriptor(tensorDesc: Any) -> tuple[Any, ...]:
    """What the descriptor was set to.

    bedstone: `desc.dtype, desc.dims, desc.strides`
    """
    desc = settings.of_rank(TensorDescriptor, "tensorDesc", tensorDesc, 4)
    return (settings.DATA_TYPES[desc.dtype], *desc.dims, *desc.strides)


@entry("filterDesc")
def cudnnCreateFilterDescriptor() -> int:
    """Make a filter descriptor; it must be set before it is used.

    bedstone: `bedstone.TensorDesc.packed(...)`: filters are tensors
    """
    return settings.create(FilterDescriptor)


@entry()
def cudnnDestroyFilterDescriptor(filterDesc: Any) -> None:
    """Give the descriptor up.

    bedstone: not needed
    """
    destroy(FilterDescriptor, "filterDesc", filterDesc)


@entry("poolingDesc")
def cudnnCreatePoolingDescriptor() -> int:
    """Make a pooling descriptor; it must be set before it is used.

    bedstone: `bedstone.PoolingDesc.of(...)`: made and set at once
    """
    return settings.create(PoolingDescriptor)


@entry()
def cudnnDestroyPoolingDescriptor(poolingDesc: Any) -> None:
    """Give the descriptor up.

    bedstone: not needed
    """
    destroy(PoolingDescriptor, "poolingDesc", poolingDesc)
