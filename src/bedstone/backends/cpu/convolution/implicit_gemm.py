"""cpu:implicit_gemm: convolution as a matrix product whose patch matrix never exists.

Takes every convolution: one to three spatial axes, any strides of x, w and y, groups, dilation,
padding, both modes, four dtypes, no workspace. The paper's lowered matrix (Chetlur et al., arXiv
1410.0759, section 3) is packed piece by piece into each thread's scratch, where it meets the
packed filter in a micro-kernel: image_product.py for forward and backward_data, row_product.py for
those with channels last, tap_product.py for backward_data of few channels last, data_gradient.py
for those backward_data whose products would mostly meet padding, filter_gradient.py for
backward_filter, row_gradient.py for that with channels last.
"""

from __future__ import annotations

from typing import Any, ClassVar

from bedstone.backends.cpu import cost
from bedstone.backends.cpu.convolution import (
    data_gradient,
    filter_gradient,
    image_product,
    row_blocking,
    row_gradient_blocking,
    tap_product,
)
from bedstone.backends.cpu.convolution.data_gradient import DataGradient
from bedstone.backends.cpu.convolution.filter_gradient import FilterGradient
from bedstone.backends.cpu.convolution.image_product import ImageProduct
from bedstone.backends.cpu.convolution.row_gradient import RowGradient
from bedstone.backends.cpu.convolution.row_product import RowProduct
from bedstone.backends.cpu.convolution.tap_product import TapProduct
from bedstone.backends.cpu.kernel import CompiledKernel, compiled, compiled_in_halves
from bedstone.backends.cpu.target import Target
from bedstone.plan.algorithm import Algorithm
from bedstone.plan.device import Device
from bedstone.spec.convolution import ConvolutionProblem
from bedstone.spec.problem import Problem


def kernel_of(problem: ConvolutionProblem, target: Target) -> tuple[Any, float]:
    """The emitter that does the problem with the least work, and the work: flops of the peak
    rate, the cost of packing included."""
    if problem.direction == "backward_filter":
        rows = RowGradient, row_gradient_blocking.work(problem, target)
        patches = FilterGradient, filter_gradient.work(problem, target)
        return min(rows, patches, key=lambda way: way[1])
    ways: list[tuple[Any, float]] = [
        (RowProduct, row_blocking.work(problem, target)),
        (ImageProduct, image_product.work(problem, target)),
    ]
    if problem.direction == "backward_data" and data_gradient.fits(problem, target):
        ways.append((DataGradient, data_gradient.work(problem, target)))
    if tap_product.fits(problem, target):
        ways.append((TapProduct, tap_product.work(problem, target)))
    return min(ways, key=lambda way: way[1])


class ImplicitGemm(Algorithm):
    """cpu:implicit_gemm."""

    name: ClassVar[str] = "cpu:implicit_gemm"

    def supports(self, problem: Problem, device: Device) -> str | None:
        if not isinstance(problem, ConvolutionProblem):
            return "computes no gradient of a bias"
        return None

    def estimate(self, problem: Problem, device: Device) -> float:
        if problem.flops == 0:
            return cost.seconds(0.0, problem.bytes, str(problem.dtype.accumulator))
        _, flops = kernel_of(problem, Target.current())
        return cost.seconds(flops, problem.bytes, str(problem.dtype.accumulator), phases=2)

    def build(self, problem: Problem, device: Device) -> CompiledKernel:
        target = Target.current()
        emitter, _ = kernel_of(problem, target)
        description, pointers = emitter.describe(problem, target), len(problem.operands)
        key = f"{self.name} {emitter.__name__} {problem} {description}"
        if problem.direction == "backward_filter":
            return compiled(
                key, lambda target: emitter(problem, target).emit(), pointers, description
            )
        return compiled_in_halves(
            key, lambda target: emitter(problem, target), pointers, description
        )
