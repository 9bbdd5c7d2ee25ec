"""cpu:implicit_gemm_amx: implicit GEMM on the matrix unit of x86 (AMX).

The matrix product of implicit_gemm.py with other tiles: matrix_product.py for forward and
backward_data, matrix_rows.py for those with channels last, matrix_gradient.py for backward_filter.
bfloat16 operands are multiplied as they are, exactly, and summed in float32: |error| <= (6 + 2
sqrt(n)) 2^-24 sum|terms| for n terms, as with any float32 sum. With math "bf16x6" or "bf16x3" an
operand in float32 is the sum of three or two bfloat16 numbers, and the six or three largest of
their products are added up: 2^-22 or 2^-16 takes the place of 2^-24.

The matrix unit counts subnormal numbers as zero, as operands and as sums: below 2^-126 an operand
or a sum is lost. A split loses the low bits of numbers below 2^-110; infinities, NaN and the
largest numbers pass through it as they do through float32.
"""

from __future__ import annotations

from typing import Any, ClassVar

from bedstone.backends.cpu import cost
from bedstone.backends.cpu.convolution import matrix_gradient, matrix_product, matrix_rows
from bedstone.backends.cpu.convolution.matrix_gradient import MatrixGradient
from bedstone.backends.cpu.convolution.matrix_product import MatrixProduct, pieces_of
from bedstone.backends.cpu.convolution.matrix_rows import MatrixRows
from bedstone.backends.cpu.kernel import CompiledKernel, compiled, compiled_in_halves
from bedstone.backends.cpu.target import Target, matrix_unit_refusal
from bedstone.plan.algorithm import Algorithm
from bedstone.plan.device import Device
from bedstone.spec.convolution import ConvolutionProblem
from bedstone.spec.dtypes import DType
from bedstone.spec.problem import Problem


def kernel_of(problem: ConvolutionProblem, target: Target) -> tuple[Any, float]:
    """The emitter that does the problem with the least work, and the work: flops of the peak
    float32 rate."""
    if problem.direction == "backward_filter":
        return MatrixGradient, matrix_gradient.work(problem, target)
    ways: list[tuple[Any, float]] = [(MatrixProduct, matrix_product.work(problem, target))]
    if problem.x.dtype == DType.bfloat16:
        ways.append((MatrixRows, matrix_rows.work(problem, target)))
    return min(ways, key=lambda way: way[1])


class MatrixImplicitGemm(Algorithm):
    """cpu:implicit_gemm_amx."""

    name: ClassVar[str] = "cpu:implicit_gemm_amx"

    def supports(self, problem: Problem, device: Device) -> str | None:
        if not isinstance(problem, ConvolutionProblem):
            return "computes no gradient of a bias"
        if not pieces_of(problem):
            return (
                "multiplies bfloat16; float32 in forward and backward_data with math bf16x6, bf16x3"
            )
        if problem.flops == 0:
            return "an empty tensor"
        return self.missing(device)

    def missing(self, device: Device) -> str | None:
        target = Target.current()
        if target.has_matrix_unit:
            return None
        return matrix_unit_refusal() or f"{target.cpu} has no matrix unit (AMX)"

    def estimate(self, problem: Problem, device: Device) -> float:
        if not isinstance(problem, ConvolutionProblem):
            return float("inf")
        _, flops = kernel_of(problem, Target.current())
        return cost.seconds(flops, problem.bytes, "float32", phases=2)

    def build(self, problem: Problem, device: Device) -> CompiledKernel:
        if not isinstance(problem, ConvolutionProblem):
            raise TypeError(f"{self.name} was asked to build {problem}")
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
