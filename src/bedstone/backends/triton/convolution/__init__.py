"""Convolution on the GPU in Triton: the general implicit GEMM, and kernels for special shapes."""

from bedstone.backends.triton.convolution.depthwise import Depthwise
from bedstone.backends.triton.convolution.implicit_gemm import ImplicitGemm, ImplicitGemmSplit

ALGORITHMS = (Depthwise(), ImplicitGemm(), ImplicitGemmSplit())
