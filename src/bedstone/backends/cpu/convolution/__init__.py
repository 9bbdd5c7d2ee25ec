"""Convolution on the CPU: the algorithms, the most general one last."""

from __future__ import annotations

from bedstone.backends.cpu.convolution import winograd
from bedstone.backends.cpu.convolution.bias_gradient import ReduceBias
from bedstone.backends.cpu.convolution.depthwise import Depthwise
from bedstone.backends.cpu.convolution.depthwise_filter import DepthwiseFilter
from bedstone.backends.cpu.convolution.implicit_gemm import ImplicitGemm
from bedstone.backends.cpu.convolution.implicit_gemm_amx import MatrixImplicitGemm
from bedstone.backends.cpu.convolution.winograd_filter import WinogradFilter
from bedstone.backends.cpu.convolution.winograd_nested import NestedWinograd

ALGORITHMS = (
    *winograd.ALGORITHMS,
    WinogradFilter(),
    NestedWinograd(),
    Depthwise(),
    DepthwiseFilter(),
    MatrixImplicitGemm(),
    ImplicitGemm(),
    ReduceBias(),
)
