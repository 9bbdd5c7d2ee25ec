"""Peers: other ways to compute the same problem on the same memory.

A peer gives a call for a problem and its operands (NumPy arrays over the very buffers that
bedstone uses), or a reason why it cannot.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import bedstone

Call = Callable[[], object]
Arrays = Mapping[str, np.ndarray[Any, Any]]


class Declined(Exception):
    """The peer does not compute this problem; the message says why."""


def torch_call(problem: bedstone.Problem, arrays: Arrays) -> Call:
    """PyTorch's own kernels (oneDNN and the like), as many threads; NHWC as channels_last."""
    if importlib.util.find_spec("torch") is None:
        raise Declined("torch is not installed")
    import torch

    torch.set_num_threads(bedstone.get_num_threads())
    tensors = {name: _tensor(torch, array) for name, array in arrays.items()}
    maker = _TORCH.get(problem.primitive)
    if maker is None:
        raise Declined(f"no torch call is written for {problem.primitive}")
    call = maker(torch, problem, tensors)

    def run() -> object:
        with torch.no_grad():
            return call()

    return run


def _tensor(torch: Any, array: np.ndarray[Any, Any]) -> Any:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _torch_convolution(torch: Any, problem: Any, t: Mapping[str, Any]) -> Call:
    if isinstance(problem, bedstone.BiasGradientProblem):
        axes = [a for a in range(problem.y.rank) if a != 1]
        return lambda: t["dy"].sum(axes)
    conv = problem.conv
    if any(low != high for low, high in conv.padding) or conv.mode != "cross_correlation":
        raise Declined("torch has no uneven padding and no flipped filters")
    pads = [low for low, _ in conv.padding]
    stride, dilation = list(conv.stride), list(conv.dilation)
    if problem.direction == "forward":
        function = getattr(torch.nn.functional, f"conv{conv.axes}d")
        bias = t.get("bias")
        return lambda: function(t["x"], t["w"], bias, stride, pads, dilation, conv.groups)
    data = problem.direction == "backward_data"
    x, w = (t["dx"], t["w"]) if data else (t["x"], t["dw"])
    return lambda: torch.ops.aten.convolution_backward(
        t["dy"], x, w, None, stride, pads, dilation, False, [0] * conv.axes, conv.groups,
        [data, not data, False],
    )  # fmt: skip


def _torch_pooling(torch: Any, problem: Any, t: Mapping[str, Any]) -> Call:
    if problem.direction != "forward":
        raise Declined("only forward pooling is timed against torch")
    desc = problem.pool
    if any(low != high for low, high in desc.padding):
        raise Declined("torch has no uneven padding")
    pads = [low for low, _ in desc.padding]
    ceil = desc.rounding == "ceil"
    axes = len(desc.window)
    if desc.mode == "max":
        function = getattr(torch.nn.functional, f"max_pool{axes}d")
        return lambda: function(t["x"], desc.window, desc.stride, pads, desc.dilation, ceil)
    function = getattr(torch.nn.functional, f"avg_pool{axes}d")
    include = desc.mode == "average_include_padding"
    return lambda: function(t["x"], desc.window, desc.stride, pads, ceil, include)


def _torch_softmax(torch: Any, problem: Any, t: Mapping[str, Any]) -> Call:
    if len(problem.axes) != 1:
        raise Declined("torch's softmax runs over one axis")
    axis, log = problem.axes[0], problem.algorithm == "log"
    if problem.direction == "forward":
        function = torch.log_softmax if log else torch.softmax
        return lambda: function(t["x"], axis)
    name = "_log_softmax_backward_data" if log else "_softmax_backward_data"
    function = getattr(torch.ops.aten, name)
    return lambda: function(t["dy"], t["y"], axis, t["y"].dtype)


def _torch_activation(torch: Any, problem: Any, t: Mapping[str, Any]) -> Call:
    kind, f = problem.activation.kind, torch.nn.functional
    if problem.direction == "backward":
        if kind != "relu":
            raise Declined("only relu's gradient is timed against torch")
        return lambda: torch.ops.aten.threshold_backward(t["dy"], t["y"], 0)
    known = {"relu": torch.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "elu": f.elu,
             "gelu": f.gelu, "silu": f.silu}  # fmt: skip
    if kind not in known:
        raise Declined(f"no torch call is written for {kind}")
    return lambda: known[kind](t["x"])


def _torch_tensor_ops(torch: Any, problem: Any, t: Mapping[str, Any]) -> Call:
    if problem.direction != "transform":
        raise Declined(f"no torch call is written for {problem.direction}")
    return lambda: t["y"].copy_(t["x"])


_TORCH: dict[str, Callable[[Any, Any, Mapping[str, Any]], Call]] = {
    "convolution": _torch_convolution,
    "pooling": _torch_pooling,
    "softmax": _torch_softmax,
    "activation": _torch_activation,
    "tensor_ops": _torch_tensor_ops,
}


def im2col_call(problem: bedstone.Problem, arrays: Arrays) -> Call:
    """What Caffe did: lower one image at a time, then one BLAS product (NumPy's BLAS)."""
    if not isinstance(problem, bedstone.ConvolutionProblem) or problem.conv.axes != 2:
        raise Declined("lowers two-dimensional convolutions only")
    if problem.y.layout != "NCHW" and not problem.y.is_packed("NCHW"):
        raise Declined("lowers NCHW only, as Caffe did")
    return _Lowering(problem, arrays).call


class _Lowering:
    """Per-image lowering with a column buffer that is made once."""

    def __init__(self, problem: bedstone.ConvolutionProblem, arrays: Arrays) -> None:
        self.p, self.arrays = problem, arrays
        _, channels, height, width = problem.x.dims
        filters, _, r, s = problem.w.dims
        (top, bottom), (left, right) = problem.conv.padding
        dtype = arrays[problem.operands[0].name].dtype
        self.padded = np.zeros((channels, height + top + bottom, width + left + right), dtype)
        self.inside = (slice(top, top + height), slice(left, left + width))
        _, _, p, q = problem.y.dims
        self.columns = np.empty((channels, r, s, p, q), dtype)
        self.matrix = (problem.conv.groups, channels // problem.conv.groups * r * s, p * q)
        self.call = getattr(self, problem.direction)

    def _lower(self, image: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        self.padded[(slice(None), *self.inside)] = image
        for (r, s), box in self.p.taps():
            self.columns[:, r, s] = self.padded[(slice(None), *box)]
        return self.columns.reshape(self.matrix)

    def _filters(self, w: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        groups = self.p.conv.groups
        return w.reshape(groups, w.shape[0] // groups, -1)

    def forward(self) -> None:
        w, y = self._filters(self.arrays["w"]), self.arrays["y"]
        for n, image in enumerate(self.arrays["x"]):
            np.matmul(w, self._lower(image), out=y[n].reshape(w.shape[0], w.shape[1], -1))

    def backward_filter(self) -> None:
        dw = self._filters(self.arrays["dw"])
        dw[...] = 0
        for n, image in enumerate(self.arrays["x"]):
            dy = self.arrays["dy"][n].reshape(dw.shape[0], dw.shape[1], -1)
            dw += dy @ self._lower(image).transpose(0, 2, 1)

    def backward_data(self) -> None:
        w = self._filters(self.arrays["w"])
        for n, dy in enumerate(self.arrays["dy"]):
            columns = self.columns.reshape(self.matrix)
            np.matmul(w.transpose(0, 2, 1), dy.reshape(w.shape[0], w.shape[1], -1), out=columns)
            self.padded[...] = 0
            for (r, s), box in self.p.taps():
                self.padded[(slice(None), *box)] += self.columns[:, r, s]
            self.arrays["dx"][n] = self.padded[(slice(None), *self.inside)]


PEERS: dict[str, Callable[[bedstone.Problem, Arrays], Call]] = {
    "torch": torch_call,
    "im2col": im2col_call,
}
