"""Convolution on Hopper in Gluon."""

from bedstone.backends.gluon.convolution.filter_gradient import FilterSplit, ImplicitGemm
from bedstone.backends.gluon.convolution.halo import FilterHalo

ALGORITHMS = (ImplicitGemm(), FilterSplit(), FilterHalo())
