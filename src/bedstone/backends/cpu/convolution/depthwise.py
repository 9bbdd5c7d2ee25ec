"""Depthwise convolution (one filter a channel), forward and backward_data, straight from memory.

There is no sum over channels, so nothing is worth packing: the work is bound by memory. Channels
last: a vector holds channels. Channels first: a vector holds output pixels of a row. Padding is
real zeros: border tiles read masked or from a zero line. Sums run over the taps in order, in
float32 (float64 for float64): error (R*S + 1) roundings.
"""

from __future__ import annotations

from bedstone.backends.cpu import cost
from bedstone.backends.cpu.convolution.depthwise_emitter import Emitter, shape_of
from bedstone.backends.cpu.convolution.depthwise_first import ChannelsFirst
from bedstone.backends.cpu.convolution.depthwise_last import ChannelsLast
from bedstone.backends.cpu.kernel import CompiledKernel, compiled_in_halves
from bedstone.backends.cpu.target import Target
from bedstone.plan.algorithm import Algorithm
from bedstone.plan.device import Device
from bedstone.spec.convolution import ConvolutionProblem
from bedstone.spec.problem import Problem

TAPS_MAX = 121  # 11x11: unrolled code stays small enough to compile quickly
ZERO_BYTES_MAX = 512 * 1024  # of zeros that stand in for padding rows, per thread
EFFICIENCY = 0.25  # of the FMA peak, where not bound by memory


class Depthwise(Algorithm):
    """cpu:direct_depthwise."""

    name = "cpu:direct_depthwise"

    def supports(self, problem: Problem, device: Device) -> str | None:
        if not isinstance(problem, ConvolutionProblem) or problem.direction == "backward_filter":
            return "computes forward and backward_data only"
        if problem.conv.axes > 2:
            return "1 and 2 spatial dimensions only"
        if problem.x.size == 0 or problem.w.size == 0 or problem.y.size == 0:
            return "an empty tensor"
        if problem.w.dims[1] != 1 or problem.w.dims[0] != problem.conv.groups:
            return "not depthwise with one filter a channel"
        taps = problem.w.size // problem.w.dims[0]
        if taps > TAPS_MAX:
            return f"{taps} taps are more than {TAPS_MAX}, which it unrolls"
        return None if self._layout(problem) else self._layout_reason(problem)

    @staticmethod
    def _layout(problem: ConvolutionProblem) -> type[Emitter] | None:
        x, y = problem.x.strides, problem.y.strides
        if x[1] == 1 and y[1] == 1:
            shape = shape_of(problem, Target.current())
            return ChannelsLast if ChannelsLast.zero_bytes(shape) <= ZERO_BYTES_MAX else None
        source = y if problem.direction == "backward_data" else x
        step = problem.conv.stride[-1] if problem.direction == "forward" else 1
        if source[-1] == 1 and step in (1, 2):
            return ChannelsFirst
        return None

    @staticmethod
    def _layout_reason(problem: ConvolutionProblem) -> str:
        return (
            "needs unit stride along channels in x and y (and pixels that lie close), or along the "
            "width of the tensor read with a convolution stride of 1 or 2"
        )

    def estimate(self, problem: Problem, device: Device) -> float:
        accumulator = str(problem.dtype.accumulator)
        return cost.seconds(problem.flops / EFFICIENCY, problem.bytes, accumulator)

    def build(self, problem: Problem, device: Device) -> CompiledKernel:
        if not isinstance(problem, ConvolutionProblem):
            raise TypeError(f"{self.name} was asked to build {problem}")
        emitter = self._layout(problem)
        if emitter is None:
            raise TypeError(f"{self.name} was asked to build {problem}")
        words = "vectors of channels" if emitter is ChannelsLast else "vectors of pixels"
        return compiled_in_halves(
            f"{self.name}|{problem}",
            lambda target: emitter(target, problem, shape_of(problem, target)),
            len(problem.operands),
            f"{words}, straight from memory",
        )
