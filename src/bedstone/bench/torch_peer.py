"""The peer `torch`: PyTorch's own kernels (oneDNN on the CPU, cuDNN on a GPU), nothing patched.

The same values in the same layout (NHWC is torch's channels_last), as many threads. Results are
allocated by PyTorch, as it always does, or written to given memory where it offers that.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import bedstone
from bedstone.bench.operands import Arrays

Call = Callable[[], Any]
GRAPH_CALLS = 20  # in a CUDA graph at most, so that launch gaps do not count
GRAPH_SECONDS = 5e-3  # that such a graph need not last longer than
CLOCK_SECONDS = 0.02


class Declined(Exception):
    """The peer does not compute this problem; the message says why."""


def call(problem: bedstone.Problem, arrays: Arrays, device: str) -> Call:
    """The call that computes the problem by PyTorch and returns what PyTorch returns.

    Raises Declined.
    """
    if importlib.util.find_spec("torch") is None:
        raise Declined("torch is not installed")
    torch: Any = importlib.import_module("torch")
    if device != "cpu" and not torch.cuda.is_available():
        raise Declined("this build of torch has no GPU")
    maker = _MAKERS.get(problem.primitive)
    if maker is None:
        raise Declined(f"no torch call is written for {problem.primitive}")
    torch.set_num_threads(bedstone.get_num_threads())
    if (
        device != "cpu"
    ):  # (elsewhere the flags mean nothing, and torch.testing forbids setting them)
        _set_math(torch, getattr(problem, "math", "ieee"))
    tensors = {name: _tensor(torch, array).to(device) for name, array in arrays.items()}
    function = maker(torch, problem, tensors)

    def run() -> Any:
        with torch.no_grad():
            return function()

    return run


def clock(function: Call) -> float:
    """Seconds a call on the GPU, by replaying a CUDA graph of several."""
    torch: Any = importlib.import_module("torch")
    for _ in range(3):
        function()
    once = _elapsed(torch, function)
    calls = max(1, min(GRAPH_CALLS, int(GRAPH_SECONDS / max(once, 1e-6))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    graph.replay()
    times: list[float] = []
    end = time.perf_counter() + CLOCK_SECONDS
    while not times or time.perf_counter() < end:
        times.append(_elapsed(torch, graph.replay) / calls)
    return statistics.median(times)


def _elapsed(torch: Any, run: Call) -> float:
    """Seconds on the GPU between an event before and one after."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    run()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) * 1e-3


def _set_math(torch: Any, math: str) -> None:
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = math == "tf32"


def _tensor(torch: Any, array: Any) -> Any:
    if isinstance(array, torch.Tensor):
        return array
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)


def _symmetric(padding: Any) -> list[int]:
    if any(low != high for low, high in padding):
        raise Declined("torch pads both sides alike")
    return [low for low, _ in padding]


def _convolution(torch: Any, problem: Any, t: Mapping[str, Any]) -> Call:
    if isinstance(problem, bedstone.BiasGradientProblem):
        axes = [a for a in range(problem.y.rank) if a != 1]
        return lambda: t["dy"].sum(axes)
    conv = problem.conv
    if conv.mode != "cross_correlation":
        raise Declined("torch has no flipped filters")
    pads = _symmetric(conv.padding)
    stride, dilation = list(conv.stride), list(conv.dilation)
    if problem.direction == "forward":
        if problem.epilogue.activation is not None or problem.epilogue.shift:
            raise Declined("torch fuses no activation")
        function = getattr(torch.nn.functional, f"conv{conv.axes}d")
        return lambda: function(t["x"], t["w"], t.get("bias"), stride, pads, dilation, conv.groups)
    data = problem.direction == "backward_data"
    x, w = (t["dx"], t["w"]) if data else (t["x"], t["dw"])
    return lambda: torch.ops.aten.convolution_backward(
        t["dy"], x, w, None, stride, pads, dilation, False, [0] * conv.axes, conv.groups,
        [data, not data, False],
    )[0 if data else 1]  # fmt: skip


def _pooling(torch: Any, problem: Any, t: Mapping[str, Any]) -> Call:
    pool = problem.pool
    pads, axes = _symmetric(pool.padding), len(pool.window)
    window, stride, dilation = list(pool.window), list(pool.stride), list(pool.dilation)
    ceil = pool.rounding == "ceil"
    aten = torch.ops.aten
    if pool.mode == "max":
        if problem.direction == "forward":
            function = getattr(torch.nn.functional, f"max_pool{axes}d")
            return lambda: function(t["x"], window, stride, pads, dilation, ceil)
        if axes != 2:
            raise Declined("torch's max pooling gradient is timed in two dimensions")
        # PyTorch keeps the indices of the forward call; bedstone finds the maxima again.
        found = aten.max_pool2d_with_indices(t["x"], window, stride, pads, dilation, ceil)[1]
        return lambda: aten.max_pool2d_with_indices_backward(
            t["dy"], t["x"], window, stride, pads, dilation, ceil, found
        )
    if any(d != 1 for d in dilation):
        raise Declined("torch's average pooling has no dilation")
    include = pool.mode == "average_include_padding"
    if problem.direction == "forward":
        function = getattr(torch.nn.functional, f"avg_pool{axes}d")
        return lambda: function(t["x"], window, stride, pads, ceil, include)
    function = getattr(aten, f"avg_pool{axes}d_backward", None)
    if function is None:
        raise Declined("torch has no one-dimensional average pooling gradient")
    return lambda: function(t["dy"], t["dx"], window, stride, pads, ceil, include, None)


def _softmax(torch: Any, problem: Any, t: Mapping[str, Any]) -> Call:
    if len(problem.axes) != 1:
        raise Declined("torch's softmax runs over one axis")
    axis, aten = problem.axes[0], torch.ops.aten
    log = "_log" if problem.algorithm == "log" else ""
    if problem.direction == "forward":
        function = getattr(aten, f"{log}_softmax").out
        return lambda: function(t["x"], axis, False, out=t["y"])
    function = getattr(aten, f"{log}_softmax_backward_data").out
    name = "out" if log else "grad_input"
    return lambda: function(t["dy"], t["y"], axis, t["y"].dtype, **{name: t["dx"]})


def _activation(torch: Any, problem: Any, t: Mapping[str, Any]) -> Call:
    kind, aten, f = problem.activation.kind, torch.ops.aten, torch.nn.functional
    if problem.direction == "forward":
        into: dict[str, Call] = {
            "sigmoid": lambda: torch.sigmoid(t["x"], out=t["y"]),
            "tanh": lambda: torch.tanh(t["x"], out=t["y"]),
            "relu": lambda: torch.relu(t["x"]),
            "elu": lambda: f.elu(t["x"]),
            "gelu": lambda: f.gelu(t["x"]),
            "silu": lambda: f.silu(t["x"]),
        }
    else:
        into = {
            "relu": lambda: aten.threshold_backward(t["dy"], t["y"], 0),
            "sigmoid": lambda: aten.sigmoid_backward(t["dy"], t["y"]),
            "tanh": lambda: aten.tanh_backward(t["dy"], t["y"]),
        }
    if kind not in into:
        raise Declined(f"no torch call is written for {kind} {problem.direction}")
    return into[kind]


def _tensor_ops(torch: Any, problem: Any, t: Mapping[str, Any]) -> Call:
    if problem.direction == "transform":
        return lambda: t["y"].copy_(t["x"])
    raise Declined(f"no torch call is written for {problem.direction}")


_MAKERS: dict[str, Callable[[Any, Any, Mapping[str, Any]], Call]] = {
    "convolution": _convolution,
    "pooling": _pooling,
    "softmax": _softmax,
    "activation": _activation,
    "tensor_ops": _tensor_ops,
}
