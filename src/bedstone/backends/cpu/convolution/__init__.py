"""Convolution on the CPU: the algorithms, the most general one last."""

from __future__ import annotations

from bedstone.backends.cpu.convolution import winograd
from bedstone.backends.cpu.convolution.bias_gradient import ReduceBias
from bedstone.backends.cpu.convolution.implicit_gemm import ImplicitGemm

ALGORITHMS = (*winograd.ALGORITHMS, ImplicitGemm(), ReduceBias())
