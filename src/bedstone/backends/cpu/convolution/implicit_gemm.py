"""cpu:implicit_gemm: convolution as a matrix product whose patch matrix never exists.

Takes every convolution: one to three spatial axes, any strides of x, w and y, groups, dilation,
padding, both modes, four dtypes, no workspace. The paper's lowered matrix (Chetlur et al., arXiv
1410.0759, section 3) is packed piece by piece into each thread's scratch, where it meets the
packed filter in a micro-kernel; see image_product.py and filter_gradient.py.
"""

from __future__ import annotations

from typing import ClassVar

from bedstone.backends.cpu import cost
from bedstone.backends.cpu.convolution import filter_gradient, image_product
from bedstone.backends.cpu.kernel import CompiledKernel, compiled
from bedstone.backends.cpu.target import Target
from bedstone.plan.algorithm import Algorithm
from bedstone.plan.device import Device
from bedstone.spec.convolution import ConvolutionProblem
from bedstone.spec.problem import Problem

KERNELS = {
    "forward": (image_product.ImageProduct, image_product.work),
    "backward_data": (image_product.ImageProduct, image_product.work),
    "backward_filter": (filter_gradient.FilterGradient, filter_gradient.work),
}


class ImplicitGemm(Algorithm):
    """cpu:implicit_gemm."""

    name: ClassVar[str] = "cpu:implicit_gemm"

    def supports(self, problem: Problem, device: Device) -> str | None:
        if not isinstance(problem, ConvolutionProblem):
            return "computes no gradient of a bias"
        return None

    def estimate(self, problem: Problem, device: Device) -> float:
        _, work = KERNELS[problem.direction]
        flops = work(problem, Target.current())
        return cost.seconds(flops, problem.bytes, str(problem.dtype.accumulator), phases=2)

    def build(self, problem: Problem, device: Device) -> CompiledKernel:
        emitter, _ = KERNELS[problem.direction]
        return compiled(
            f"{self.name} {problem}",
            lambda target: emitter(problem, target).emit(),
            len(problem.operands),
        )
