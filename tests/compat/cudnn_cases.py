"""What the tests of the cuDNN names share: descriptors made in one call, from either version."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bedstone
from bedstone.compat import cudnn_v1, cudnn_v2

FLOAT, DOUBLE = cudnn_v2.CUDNN_DATA_FLOAT, cudnn_v2.CUDNN_DATA_DOUBLE
BAD_PARAM = cudnn_v2.CUDNN_STATUS_BAD_PARAM
NOT_SUPPORTED = cudnn_v2.CUDNN_STATUS_NOT_SUPPORTED
MAPPING_ERROR = cudnn_v2.CUDNN_STATUS_MAPPING_ERROR
CROSS = cudnn_v2.CUDNN_CROSS_CORRELATION
DATA_TYPES = {"float32": FLOAT, "float64": DOUBLE}
MODES = {"convolution": 0, "cross_correlation": 1}


def tensor(desc: bedstone.TensorDesc) -> int:
    """A tensor descriptor with the desc's dims and strides (they are the same for v1 and v2)."""
    made = cudnn_v2.cudnnCreateTensorDescriptor()
    data_type = DATA_TYPES[str(desc.dtype)]
    cudnn_v2.cudnnSetTensorNdDescriptor(made, data_type, desc.rank, desc.dims, desc.strides)
    return made


def packed(*dims: int, dtype: str = "float32") -> int:
    """A tensor descriptor without gaps."""
    return tensor(bedstone.TensorDesc.packed(dims, dtype))


def filters(*dims: int, dtype: str = "float32") -> int:
    """A filter descriptor."""
    made = cudnn_v2.cudnnCreateFilterDescriptor()
    cudnn_v2.cudnnSetFilterNdDescriptor(made, DATA_TYPES[dtype], len(dims), dims)
    return made


def convolution(conv: bedstone.ConvolutionDesc) -> int:
    """v2's convolution descriptor."""
    made = cudnn_v2.cudnnCreateConvolutionDescriptor()
    padding = [low for low, _ in conv.padding]
    ones, mode = [1] * conv.axes, MODES[conv.mode]
    cudnn_v2.cudnnSetConvolutionNdDescriptor(made, conv.axes, padding, conv.stride, ones, mode)
    return made


def bound_convolution(x: int, w: int, conv: bedstone.ConvolutionDesc) -> int:
    """v1's convolution descriptor."""
    made = cudnn_v1.cudnnCreateConvolutionDescriptor()
    (pad_h, _), (pad_w, _) = conv.padding
    mode = MODES[conv.mode]
    cudnn_v1.cudnnSetConvolutionDescriptor(made, x, w, pad_h, pad_w, *conv.stride, 1, 1, mode)
    return made


def array(*dims: int, dtype: str = "float32", seed: int = 0) -> Any:
    """Normal values."""
    return np.random.default_rng(seed).standard_normal(dims).astype(dtype)


def refused(status: int, words: str, function: Any, *args: Any) -> None:
    """The call raises an error with that status whose message has those words."""
    with pytest.raises(cudnn_v2.CudnnError, match=words) as caught:
        function(*args)
    assert caught.value.status == status, caught.value
    assert caught.value.function == function.__name__
