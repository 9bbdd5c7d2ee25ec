"""Convolution on the GPU in Triton: the general implicit GEMM, and kernels for special shapes."""

from bedstone.backends.triton.convolution.bias_gradient import ReduceBias, ReduceBiasSplit
from bedstone.backends.triton.convolution.depthwise import Depthwise
from bedstone.backends.triton.convolution.implicit_gemm import ImplicitGemm, ImplicitGemmSplit

ALGORITHMS = (
    Depthwise(),
    ImplicitGemm(),
    ImplicitGemmSplit(),
    ReduceBias(),
    ReduceBiasSplit(),
)
