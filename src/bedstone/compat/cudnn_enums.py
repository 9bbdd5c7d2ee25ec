"""Enumerations of the cuDNN names, with their integer values.

Members can be had by attribute, by name in brackets, as older wrappers' dictionaries were read
(`cudnnDataType["CUDNN_DATA_FLOAT"]`), and as constants of cudnn_v1 and cudnn_v2. They are ints.
"""

from __future__ import annotations

from enum import IntEnum


class cudnnDataType(IntEnum):
    """Element type of a tensor or filter, and of the factors alpha and beta."""

    CUDNN_DATA_FLOAT = 0
    CUDNN_DATA_DOUBLE = 1


class cudnnTensorFormat(IntEnum):
    """Memory order of a packed 4-d tensor."""

    CUDNN_TENSOR_NCHW = 0
    CUDNN_TENSOR_NHWC = 1


class cudnnAddMode(IntEnum):
    """Which dims of the tensor the bias has; its others are 1."""

    CUDNN_ADD_IMAGE = 0
    CUDNN_ADD_SAME_HW = 0
    CUDNN_ADD_FEATURE_MAP = 1
    CUDNN_ADD_SAME_CHW = 1
    CUDNN_ADD_SAME_C = 2
    CUDNN_ADD_FULL_TENSOR = 3


class cudnnConvolutionMode(IntEnum):
    """Whether the filter is flipped."""

    CUDNN_CONVOLUTION = 0
    CUDNN_CROSS_CORRELATION = 1


class cudnnConvolutionPath(IntEnum):
    """v1: whose dims cudnnGetOutputTensor4dDim tells."""

    CUDNN_CONVOLUTION_FWD = 0
    CUDNN_CONVOLUTION_WEIGHT_GRAD = 1
    CUDNN_CONVOLUTION_DATA_GRAD = 2


class cudnnAccumulateResult(IntEnum):
    """v1: whether a result is added to what is there."""

    CUDNN_RESULT_ACCUMULATE = 0
    CUDNN_RESULT_NO_ACCUMULATE = 1


class cudnnConvolutionFwdPreference(IntEnum):
    """v2: how much workspace the proposed algorithm may need."""

    CUDNN_CONVOLUTION_FWD_NO_WORKSPACE = 0
    CUDNN_CONVOLUTION_FWD_PREFER_FASTEST = 1
    CUDNN_CONVOLUTION_FWD_SPECIFY_WORKSPACE_LIMIT = 2


class cudnnConvolutionFwdAlgo(IntEnum):
    """v2: see cudnn_calls.ALGORITHMS for what each stands for here."""

    CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM = 0
    CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM = 1
    CUDNN_CONVOLUTION_FWD_ALGO_GEMM = 2
    CUDNN_CONVOLUTION_FWD_ALGO_DIRECT = 3


class cudnnSoftmaxAlgorithm(IntEnum):
    """Without or with the maximum subtracted."""

    CUDNN_SOFTMAX_FAST = 0
    CUDNN_SOFTMAX_ACCURATE = 1


class cudnnSoftmaxMode(IntEnum):
    """Over C, H, W of each image, or over C of each pixel."""

    CUDNN_SOFTMAX_MODE_INSTANCE = 0
    CUDNN_SOFTMAX_MODE_CHANNEL = 1


class cudnnPoolingModeV1(IntEnum):
    """v1, which knows no padding."""

    CUDNN_POOLING_MAX = 0
    CUDNN_POOLING_AVERAGE = 1


class cudnnPoolingModeV2(IntEnum):
    """v2: whether padding counts in an average's divisor."""

    CUDNN_POOLING_MAX = 0
    CUDNN_POOLING_AVERAGE_COUNT_INCLUDE_PADDING = 1
    CUDNN_POOLING_AVERAGE_COUNT_EXCLUDE_PADDING = 2


class cudnnActivationMode(IntEnum):
    """The pointwise function."""

    CUDNN_ACTIVATION_SIGMOID = 0
    CUDNN_ACTIVATION_RELU = 1
    CUDNN_ACTIVATION_TANH = 2
