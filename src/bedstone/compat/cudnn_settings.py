"""Creating, setting, reading and destroying descriptors: what v1 and v2 have in common."""

from __future__ import annotations

from collections.abc import Mapping

from bedstone.compat.cudnn_arguments import enumerant, integer
from bedstone.compat.cudnn_descriptors import (
    Descriptor,
    FilterDescriptor,
    PoolingDescriptor,
    TensorDescriptor,
    find,
    register,
    state,
)
from bedstone.compat.cudnn_enums import cudnnConvolutionMode, cudnnDataType, cudnnTensorFormat
from bedstone.compat.cudnn_status import not_supported
from bedstone.spec.convolution import SPATIAL_RANKS, ConvolutionDesc
from bedstone.spec.dtypes import DType
from bedstone.spec.errors import InvalidDescriptor
from bedstone.spec.pooling import PoolingDesc
from bedstone.spec.tensor import MAX_RANK, TensorDesc

DTYPES = {
    cudnnDataType.CUDNN_DATA_FLOAT: DType.float32,
    cudnnDataType.CUDNN_DATA_DOUBLE: DType.float64,
}
DATA_TYPES = {dtype: data_type for data_type, dtype in DTYPES.items()}
LAYOUTS = {
    cudnnTensorFormat.CUDNN_TENSOR_NCHW: "NCHW",
    cudnnTensorFormat.CUDNN_TENSOR_NHWC: "NHWC",
}
MODES = {
    cudnnConvolutionMode.CUDNN_CONVOLUTION: "convolution",
    cudnnConvolutionMode.CUDNN_CROSS_CORRELATION: "cross_correlation",
}
CONVOLUTION_MODES = {mode: enum for enum, mode in MODES.items()}
SMALLEST_FILTER_RANK = 3  # K, C and one spatial axis


def create(kind: type[Descriptor]) -> int:
    """The number of a new descriptor that is not set yet."""
    return register(kind())


def dtype_of(argument: str, data_type: object) -> DType:
    """The DType of a cudnnDataType_t."""
    return DTYPES[enumerant(argument, cudnnDataType, data_type)]


def sizes(least: int | None, **values: object) -> tuple[int, ...]:
    """Named C ints, each at least `least` (None: any)."""
    if least is None:
        return tuple(integer(name, value) for name, value in values.items())
    return tuple(integer(name, value, least) for name, value in values.items())


def rank_of(argument: str, count: object, least: int) -> int:
    """A number of dimensions that a TensorDesc can have."""
    rank = integer(argument, count, least)
    if rank > MAX_RANK:
        raise not_supported(argument, rank, f"at most {MAX_RANK} dimensions")
    return rank


def set_packed_tensor(
    tensor_desc: object, layout: object, data_type: object, dims: tuple[int, ...]
) -> None:
    """A 4-d tensor without gaps in one of the two formats."""
    found = find(TensorDescriptor, "tensorDesc", tensor_desc)
    name = LAYOUTS[enumerant("format", cudnnTensorFormat, layout)]
    found.set(TensorDesc.packed(dims, dtype_of("dataType", data_type), name))


def set_tensor(
    tensor_desc: object, data_type: object, dims: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    """A tensor of any rank with its strides, in elements."""
    found = find(TensorDescriptor, "tensorDesc", tensor_desc)
    found.set(TensorDesc(dims, strides, dtype_of("dataType", data_type)))


def set_filter(filter_desc: object, data_type: object, dims: tuple[int, ...]) -> None:
    """Contiguous filters (K, C, spatial...)."""
    found = find(FilterDescriptor, "filterDesc", filter_desc)
    found.set(TensorDesc.packed(dims, dtype_of("dataType", data_type)))


def of_rank(kind: type[Descriptor], argument: str, number: object, rank: int) -> TensorDesc:
    """The tensor or filter of a descriptor, which must have that rank."""
    desc: TensorDesc = state(kind, argument, number).value
    if desc.rank != rank:
        raise InvalidDescriptor(argument, desc.dims, f"a descriptor of {rank} dims")
    return desc


def check_axes(argument: str, axes: int) -> None:
    """Raises Refusal (not supported) for more spatial axes than bedstone has."""
    if axes not in SPATIAL_RANKS:
        raise not_supported(argument, axes, f"one of {SPATIAL_RANKS}")


def convolution(
    names: tuple[str, str, str],
    padding: tuple[int, ...],
    stride: tuple[int, ...],
    upscale: tuple[int, ...],
    mode: object,
) -> ConvolutionDesc:
    """The convolution; `names` are the arguments that hold the three arrays.

    Raises InvalidDescriptor for a wrong value, and Refusal (not supported) for up-scaling, and
    for more spatial axes than bedstone has.
    """
    found = MODES[enumerant("mode", cudnnConvolutionMode, mode)]
    check_axes("arrayLength", len(stride))
    for name, values, least in zip(names, (padding, stride, upscale), (0, 1, 1)):
        if any(value < least for value in values):
            raise InvalidDescriptor(name, values, f"{least} or more")
    if any(value != 1 for value in upscale):
        raise not_supported(names[2], upscale, "1: images are not scaled up")
    return ConvolutionDesc.of(len(stride), padding, stride, mode=found)


def one_padding(pairs: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """Padding per axis; the interface has one number for both sides."""
    return tuple(low for low, _ in pairs)


def pooling_of(number: object, modes: Mapping[str, object], axes: int | None) -> PoolingDesc:
    """The setting of a pooling descriptor, which must have one of the modes and, unless None, so
    many axes."""
    pool: PoolingDesc = state(PoolingDescriptor, "poolingDesc", number).value
    if pool.mode not in modes or axes not in (None, pool.axes):
        expected = f"{axes or 'any number of'} axes and a mode of {tuple(modes)}"
        raise InvalidDescriptor("poolingDesc", str(pool), expected)
    return pool
