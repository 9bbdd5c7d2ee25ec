"""Convolution on Hopper in Gluon."""

from bedstone.backends.gluon.convolution.f16x3 import ImplicitGemmF16, ImplicitGemmF16x3
from bedstone.backends.gluon.convolution.filter_f16x3 import FilterF16, FilterF16x3
from bedstone.backends.gluon.convolution.filter_gradient import FilterSplit, ImplicitGemm
from bedstone.backends.gluon.convolution.halo import FilterHalo
from bedstone.backends.gluon.convolution.transformed import Transformed

ALGORITHMS = (
    ImplicitGemm(),
    FilterSplit(),
    FilterHalo(),
    ImplicitGemmF16x3(),
    ImplicitGemmF16(),
    FilterF16x3(),
    FilterF16(),
    Transformed(),
)
