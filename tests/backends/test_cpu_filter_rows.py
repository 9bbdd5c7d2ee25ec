"""Filters whose reduced channels lie far apart: packed by transposing, read nowhere beside them."""

from __future__ import annotations

import pytest

import bedstone
from bedstone.backends.cpu.convolution.filter_rows import turns
from bedstone.backends.cpu.convolution.geometry import geometry
from bedstone.backends.cpu.convolution.image_product import ImageProduct, blocking
from bedstone.backends.cpu.convolution.implicit_gemm import kernel_of
from bedstone.backends.cpu.target import Target
from bedstone.spec.convolution import ConvolutionProblem
from bedstone.testing.harness import Case, run_case

# Channels that are no multiple of the lanes or of a tile's rows, one chunk and several, groups.
LINES = (
    "n1c12h6k8r3p1 float32",
    "n2c13h5k21r3p1 float32",
    "n1c64h7k300r1 float32",
    "n1c5h9k16r1 float64",
    "n1c26h9k70r3p1g2 float32",
    "n1c9h7k17r5p2 float32",
    "n1c14h6k515r2p1 float16",
)


@pytest.mark.parametrize("line", LINES)
def test_rows_of_every_size(line: str) -> None:
    problem = bedstone.parse_problem(f"convolution backward_data {line}")
    assert isinstance(problem, ConvolutionProblem)
    target, item = Target.current(), problem.x.dtype.itemsize
    assert kernel_of(problem, target)[0] is ImageProduct
    g = geometry(problem)
    plan = blocking(g, str(problem.x.dtype), str(problem.x.dtype.accumulator), target)
    assert turns(g, plan, item)
    for fill, placement in (("integers", "start"), ("random", "end"), ("special", "end")):
        case = Case(problem, "cpu:implicit_gemm", fill, 1.0, 0.0, placement)
        run_case(case, bedstone.default_handle())
