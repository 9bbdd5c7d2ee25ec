"""cpu:implicit_gemm_amx: implicit GEMM on the matrix unit of x86 (AMX).

The matrix product of implicit_gemm.py with other tiles: matrix_product.py for forward and
backward_data, matrix_gradient.py for backward_filter. bfloat16 operands are multiplied as they
are, exactly, and summed in float32: |error| <= (6 + 2 sqrt(n)) 2^-24 sum|terms| for n terms, as
with any float32 sum. With math "bf16x6" or "bf16x3" an operand in float32 is the sum of three or
two bfloat16 numbers, and the six or three largest of their products are added up: 2^-22 or 2^-16
takes the place of 2^-24.

The matrix unit counts subnormal numbers as zero, as operands and as sums: below 2^-126 an operand
or a sum is lost. A split loses the low bits of numbers below 2^-110; infinities, NaN and
the largest numbers pass through it as they do through float32.
"""

from __future__ import annotations

from typing import ClassVar

from bedstone.backends.cpu import cost
from bedstone.backends.cpu.convolution import matrix_gradient, matrix_product
from bedstone.backends.cpu.convolution.matrix_gradient import MatrixGradient
from bedstone.backends.cpu.convolution.matrix_product import MatrixProduct
from bedstone.backends.cpu.kernel import CompiledKernel, compiled, compiled_in_halves
from bedstone.backends.cpu.target import Target, matrix_unit_refusal
from bedstone.plan.algorithm import Algorithm
from bedstone.plan.device import Device
from bedstone.spec.convolution import ConvolutionProblem
from bedstone.spec.dtypes import DType
from bedstone.spec.problem import Problem

# bfloat16 numbers that stand for an operand, by math mode.
PIECES = {"bf16x3": 2, "bf16x6": 3}


def pieces_of(problem: ConvolutionProblem) -> int:
    """How many bfloat16 numbers stand for an operand; 0 if the problem asks for other products."""
    if problem.x.dtype == DType.bfloat16:
        return 1
    if problem.x.dtype == DType.float32 and problem.direction != "backward_filter":
        return PIECES.get(problem.math, 0)
    return 0


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
        return cost.seconds(self._work(problem), problem.bytes, "float32", phases=2)

    def _work(self, problem: ConvolutionProblem) -> float:
        target = Target.current()
        if problem.direction == "backward_filter":
            return matrix_gradient.work(problem, target)
        return matrix_product.work(problem, pieces_of(problem), target)

    def build(self, problem: Problem, device: Device) -> CompiledKernel:
        if not isinstance(problem, ConvolutionProblem):
            raise TypeError(f"{self.name} was asked to build {problem}")
        target, pointers = Target.current(), len(problem.operands)
        if problem.direction == "backward_filter":
            description = MatrixGradient.describe(problem, target)
            return compiled(
                f"{self.name} {problem} {description}",
                lambda target: MatrixGradient(problem, target).emit(),
                pointers,
                description,
            )
        pieces = pieces_of(problem)
        description = MatrixProduct.describe_tiles(problem, pieces, target)
        return compiled_in_halves(
            f"{self.name} {problem} {description}",
            lambda target: MatrixProduct(problem, target, pieces),
            pointers,
            description,
        )
