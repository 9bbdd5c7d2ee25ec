"""`reference:direct`: views the operands' memory as NumPy arrays and evaluates the definition."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bedstone.plan.algorithm import Algorithm, Kernel
from bedstone.plan.device import Device
from bedstone.spec.errors import InvalidDescriptor
from bedstone.spec.problem import Array, Problem
from bedstone.spec.tensor import TensorDesc

# NumPy's temporaries stream through memory: about 1e8 operations a second, and some calls.
SECONDS_PER_FLOP = 1e-8
SECONDS_PER_CALL = 1e-4


def view(pointer: int, desc: TensorDesc) -> Array:
    """The tensor at the address of its element [0, ..., 0] as an array that shares its memory."""
    dtype = desc.dtype.numpy
    if desc.size == 0:
        return np.empty(desc.dims, dtype)
    low, high = desc.offset_range()
    nbytes = (high - low + 1) * dtype.itemsize
    memory = (ctypes.c_char * nbytes).from_address(pointer + low * dtype.itemsize)
    origin = np.frombuffer(memoryview(memory), dtype)[-low:]
    strides = tuple(s * dtype.itemsize for s in desc.strides)
    return np.lib.stride_tricks.as_strided(origin, desc.dims, strides)


@dataclass(frozen=True)
class DirectKernel:
    """The problem's reference as a plan calls it. Results are complete before any is stored, so
    an output may be an input's memory; they are rounded once, to the output's type."""

    problem: Problem
    description = "float64 NumPy by the definition, rounded once; allocates temporaries"

    def __call__(
        self, pointers: Sequence[int], workspace: int, alpha: float, beta: float, stream: int
    ) -> None:
        operands = self.problem.operands
        memory = {o.name: view(pointer, o.desc) for pointer, o in zip(pointers, operands)}
        read = {o.name: memory[o.name] for o in operands if o.role != "out" or beta != 0.0}
        results = self.problem.reference(read, alpha, beta)
        with np.errstate(all="ignore"):
            for name, result in results.items():
                memory[name][...] = result.astype(memory[name].dtype)


class Direct(Algorithm):
    """Takes every problem of every primitive on a CPU."""

    name = "reference:direct"

    def supports(self, problem: Problem, device: Device) -> str | None:
        if device.kind != "cpu":
            return f"runs on the CPU, not on {device.kind}"
        try:
            for operand in problem.operands:
                _ = operand.desc.dtype.numpy
        except InvalidDescriptor as error:
            return f"NumPy has no {error.value} without {error.expected}"
        return None

    def estimate(self, problem: Problem, device: Device) -> float:
        return SECONDS_PER_CALL + problem.flops * SECONDS_PER_FLOP

    def build(self, problem: Problem, device: Device) -> Kernel:
        return DirectKernel(problem)


ALGORITHMS = (Direct(),)
