"""Pooling on the CPU, in every mode and direction.

`cpu:direct` walks the taps of each window, `cpu:global` reduces images that one window covers.
Both are deterministic: no two threads add to one element.
"""

from __future__ import annotations

from typing import Any

from bedstone.backends.cpu.builder import Call, KernelBuilder
from bedstone.backends.cpu.elementwise import seconds_to_move
from bedstone.backends.cpu.kernel import ENTRY, CompiledKernel, compiled
from bedstone.backends.cpu.pooling_backward import AverageBackward, MaximumBackward
from bedstone.backends.cpu.pooling_forward import Forward
from bedstone.backends.cpu.pooling_global import (
    GlobalForward,
    covers,
    emit_average_backward,
    refuse,
)
from bedstone.backends.cpu.pooling_windows import lanes_along_channels, refuse_large
from bedstone.backends.cpu.target import Target
from bedstone.plan.algorithm import Algorithm
from bedstone.plan.device import Device
from bedstone.spec.pooling import PoolingProblem
from bedstone.spec.problem import Problem

# Time model: taps a second that a core takes in.
TAPS_PER_SECOND = 4e9
ADAPTIVE = "its windows differ in size"


class PoolingAlgorithm(Algorithm):
    """What the algorithms share: compiling."""

    def emit(self, k: KernelBuilder, problem: PoolingProblem, call: Call) -> None:
        """The body of the kernel's entry."""
        raise NotImplementedError

    def build(self, problem: Problem, device: Device) -> CompiledKernel:
        def emit(target: Target) -> KernelBuilder:
            k = KernelBuilder(target)
            with k.entry(ENTRY, pointers=len(problem.operands)) as call:
                self.emit(k, problem, call)
            return k

        return compiled(f"{self.name} {problem}", emit, len(problem.operands))


class Direct(PoolingAlgorithm):
    """Lanes along channels where these are contiguous, else along the last axis."""

    name = "cpu:direct"

    def supports(self, problem: Problem, device: Device) -> str | None:
        if not isinstance(problem, PoolingProblem):
            return ADAPTIVE
        return refuse_large(problem)

    def estimate(self, problem: Any, device: Device) -> float:
        return seconds_to_move(problem.bytes) + problem.flops / TAPS_PER_SECOND

    def emit(self, k: KernelBuilder, problem: PoolingProblem, call: Call) -> None:
        if problem.direction == "forward":
            Forward(k, problem, call).emit()
        elif problem.pool.mode == "max":
            MaximumBackward(k, problem, call).emit()
        else:
            AverageBackward(k, problem, call).emit()


class Global(PoolingAlgorithm):
    """One window over the whole image: forward of NCHW, and the average's gradient."""

    name = "cpu:global"

    def supports(self, problem: Problem, device: Device) -> str | None:
        if not isinstance(problem, PoolingProblem):
            return ADAPTIVE
        if not covers(problem):
            return "a window does not cover the whole image"
        if problem.direction == "forward":
            if lanes_along_channels(problem.x, problem.y):
                return "channels are contiguous: cpu:direct runs along them"
            return refuse(problem)
        return "the gradient of a maximum: cpu:direct" if problem.pool.mode == "max" else None

    def estimate(self, problem: Any, device: Device) -> float:
        return seconds_to_move(problem.bytes)

    def emit(self, k: KernelBuilder, problem: PoolingProblem, call: Call) -> None:
        if problem.direction == "forward":
            GlobalForward(k, problem, call).emit()
        else:
            emit_average_backward(k, problem, call)


ALGORITHMS = (Direct(), Global())
