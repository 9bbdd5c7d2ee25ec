"""The C library as an algorithm, so that the conformance harness runs it as it runs any other."""

from __future__ import annotations

import ctypes
import functools

import c_binding as c

from bedstone.backends.cpu.library import interface
from bedstone.plan.algorithm import Algorithm
from bedstone.plan.device import cpu_device
from bedstone.plan.plan import Plan
from bedstone.plan.select import Choice
from bedstone.spec.activation import ActivationProblem
from bedstone.spec.convolution import BiasGradientProblem, ConvolutionProblem
from bedstone.spec.pooling import PoolingProblem
from bedstone.spec.softmax import SoftmaxProblem, channel_axes, instance_axes
from bedstone.spec.tensor_ops import TensorOpProblem
from bedstone.testing.harness import Trial
from bedstone.testing.memory import FencedMemory


def describe(desc):
    """bs_tensor of a spec.TensorDesc."""
    tensor = c.STRUCTURES["bs_tensor"]()
    tensor.dtype, tensor.rank = interface.DTYPES.index(str(desc.dtype)), desc.rank
    tensor.dims[: desc.rank], tensor.strides[: desc.rank] = desc.dims, desc.strides
    return tensor


class CLibrary(Algorithm):
    """c:library."""

    name = "c:library"

    def __init__(self, library, threads=2):
        self.library, self.threads = library, threads

    def supports(self, problem, device):
        if any(str(o.desc.dtype) not in interface.DTYPES for o in problem.operands):
            return "float32 and float64 only"
        if isinstance(problem, TensorOpProblem):
            if problem.x is not None and problem.x.dtype is not problem.y.dtype:
                return "one dtype only"
        elif isinstance(problem, ConvolutionProblem):
            epilogue = problem.epilogue
            if epilogue.activation is not None or epilogue.shift or problem.math != "ieee":
                return "no activation and no shift, and one kind of mathematics"
        elif isinstance(problem, SoftmaxProblem):
            rank = problem.x.rank
            if rank < 2 or problem.axes not in (channel_axes(rank), instance_axes(rank)):
                return "normalises channels or instances"
        elif isinstance(problem, PoolingProblem):
            if getattr(problem, "indices", None) is not None:
                return "no positions of the maxima"
        elif not isinstance(problem, (BiasGradientProblem, ActivationProblem)):
            return "not one of its functions"
        return None

    def estimate(self, problem, device):
        return 0.0

    def workspace(self, problem, device):
        if not isinstance(problem, ConvolutionProblem):
            return 0
        size = ctypes.c_size_t()
        self.library.call(
            "convolution_workspace_size",
            c.NUMBER["bs_direction"][problem.direction],
            c.convolution(problem.conv),
            *(describe(d) for d in (problem.x, problem.w, problem.y)),
            self.threads,
            ctypes.addressof(size),
        )
        return size.value

    def build(self, problem, device):
        size = self.workspace(problem, device)
        emit = getattr(self, f"_{problem.primitive}")
        descs = {o.name: describe(o.desc) for o in problem.operands}

        def kernel(pointers, workspace, alpha, beta, stream):
            name, first, middle = emit(problem)
            data = dict(zip((o.name for o in problem.operands), pointers))
            if problem.direction == "scale":
                self.library.call(name, alpha, descs["y"], data["y"], self.threads)
                return
            arguments = [*first, alpha]
            *inputs, output = (o.name for o in problem.operands)
            if name == "pooling_backward" and "x" not in inputs:  # averages do not read it
                arguments += [0, 0]
            for operand in inputs:
                if operand != "bias":
                    arguments += [descs[operand], data[operand]]
            arguments += [data.get(n, 0) for n in middle]
            arguments += [beta, descs[output], data[output]]
            if isinstance(problem, ConvolutionProblem):
                arguments += [workspace, size]
            self.library.call(name, *arguments, self.threads)

        return kernel

    def _convolution(self, problem):
        name = f"convolution_{problem.direction}"
        if isinstance(problem, BiasGradientProblem):
            return name, (), ()
        middle = ("bias",) if problem.direction == "forward" else ()
        return name, (c.convolution(problem.conv),), middle

    def _pooling(self, problem):
        return f"pooling_{problem.direction}", (c.pooling(problem.pool),), ()

    def _softmax(self, problem):
        algorithm = c.NUMBER["bs_softmax_algorithm"][problem.algorithm]
        axes = "channel" if problem.axes == channel_axes(problem.x.rank) else "instance"
        return f"softmax_{problem.direction}", (algorithm, c.NUMBER["bs_softmax_axes"][axes]), ()

    def _activation(self, problem):
        return f"activation_{problem.direction}", (c.activation(problem.activation),), ()

    def _tensor_ops(self, problem):
        return f"tensor_{problem.direction}", (), ()


@functools.cache
def device():
    """The CPU."""
    return cpu_device()


def run(case, algorithm):
    """Run a case of the harness on the library. Raises Mismatch."""
    problem = case.problem
    size = algorithm.workspace(problem, device())
    choice = Choice(algorithm, size, "tested")
    Trial(case, Plan(problem, device(), choice, algorithm.build(problem, device())),
          FencedMemory()).check()  # fmt: skip
