"""Convolution on Hopper in Gluon."""

from bedstone.backends.gluon.convolution.f16x3 import ImplicitGemmF16, ImplicitGemmF16x3
from bedstone.backends.gluon.convolution.filter_f16x3 import FilterF16, FilterF16x3
from bedstone.backends.gluon.convolution.filter_gradient import ImplicitGemm
from bedstone.backends.gluon.convolution.filter_parts import FilterBf16x3, FilterBf16x6
from bedstone.backends.gluon.convolution.grouped import Grouped
from bedstone.backends.gluon.convolution.halo import FilterHalo
from bedstone.backends.gluon.convolution.image_split import SplitGemm
from bedstone.backends.gluon.convolution.planar import Planar
from bedstone.backends.gluon.convolution.transformed import Transformed, TransformedInput

ALGORITHMS = (
    ImplicitGemm(),
    SplitGemm(),
    FilterHalo(),
    ImplicitGemmF16x3(),
    ImplicitGemmF16(),
    FilterF16x3(),
    FilterF16(),
    FilterBf16x6(),
    FilterBf16x3(),
    Planar(),
    Grouped(),
    Transformed(),
    TransformedInput(),
)
