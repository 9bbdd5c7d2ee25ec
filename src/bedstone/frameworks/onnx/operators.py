"""ONNX operators on bedstone's plans.

Each class is compiled once for a node and keeps one plan for every combination of input shapes it
meets; a call is a dictionary look-up and a kernel on raw pointers. `Unplanned` is raised, at the
first call with such inputs, for what bedstone does not compute: the session then takes another way
and says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import bedstone
from bedstone.frameworks.onnx.graph import Array, Graph, Node, activation_of
from bedstone.frameworks.onnx.recording import bound
from bedstone.spec.activation import ActivationProblem, parse_desc
from bedstone.spec.convolution import ConvolutionDesc, ConvolutionProblem, Epilogue
from bedstone.spec.normalization import NormalizationProblem, NormDesc
from bedstone.spec.pooling import PoolingDesc, PoolingProblem
from bedstone.spec.softmax import SoftmaxProblem


class Unplanned(Exception):
    """bedstone does not compute this node on these inputs; the message says why."""


FLOATS = {"float32", "float64", "float16", "bfloat16"}


class Planned:
    """A node on bedstone: `run(inputs) -> outputs`; `algorithm` says what ran last."""

    reads: int | None = None  # of the node's inputs, the first so many; all
    weights: int | None = None  # the input that is the filter of a plan

    def __init__(self, node: Node, graph: Graph) -> None:
        self.node, self.attributes, self.opset = node, node.attributes, graph.opset
        self.algorithm = ""
        self.plans: dict[Any, Any] = {}

    def run(self, inputs: Sequence[Any]) -> list[Array]:
        """The outputs for these inputs (None for an input left out)."""
        inputs = inputs[: self.reads]
        return self.call(self._entry(inputs), inputs)

    def plan_of(self, inputs: Sequence[Any]) -> bedstone.Plan:
        """The plan for inputs of these shapes."""
        plan: bedstone.Plan = self._entry(inputs[: self.reads])[0]
        return plan

    def bind(
        self,
        plan: bedstone.Plan | bedstone.PreparedPlan,
        inputs: Sequence[Any],
        outputs: Sequence[Array],
    ) -> list[Callable[[], Any]]:
        """Calls of a plan (prepared or not) for inputs of these shapes that compute `outputs` anew
        from `inputs`, contiguous arrays that stay where they are."""
        return [bound(plan, [i for i in inputs[: self.reads] if i is not None], outputs)]

    def _entry(self, inputs: Sequence[Any]) -> Any:
        x = inputs[0]
        key = (x.dtype, *(None if i is None else i.shape for i in inputs))
        entry = self.plans.get(key)
        if entry is None:
            if x.dtype.name not in FLOATS:
                raise Unplanned(f"{x.dtype.name} is not computed by bedstone")
            entry = self.plans[key] = self.plan(inputs)
        return entry

    def plan(self, inputs: Sequence[Any]) -> Any:
        """What `call` needs for inputs of these shapes."""
        raise NotImplementedError

    def call(self, entry: Any, inputs: Sequence[Any]) -> list[Array]:
        """Default: entry is (plan, output dims); operands are the inputs in order."""
        plan, dims = entry
        y = np.empty(dims, inputs[0].dtype)
        execute(plan, [i for i in inputs if i is not None], y)
        self.algorithm = plan.algorithm
        return [y]

    def plans_made(self) -> list[bedstone.Plan]:
        """Every plan this node holds."""
        found = []
        for entry in self.plans.values():
            first = entry[0] if isinstance(entry, tuple) else entry
            if isinstance(first, bedstone.Plan):
                found.append(first)
        return found


def make(problem: bedstone.Problem) -> bedstone.Plan:
    """The plan of a problem on this CPU, no workspace granted."""
    return bedstone.default_handle().plan(problem)


def execute(plan: bedstone.Plan, inputs: Sequence[Array], output: Array, beta: float = 0.0) -> None:
    """Run a plan on contiguous arrays."""
    kept = [i if i.flags.c_contiguous else np.ascontiguousarray(i) for i in inputs]
    pointers = [a.__array_interface__["data"][0] for a in (*kept, output)]
    plan.kernel(pointers, 0, 1.0, beta, 0)


def packed(dims: Sequence[int], dtype: Any) -> bedstone.TensorDesc:
    """A row-major descriptor."""
    return bedstone.TensorDesc.packed(tuple(dims), dtype.name)


def epilogue(node: Node, inputs: Sequence[Any]) -> Epilogue:
    """The bias (a third input), activation and shift of a node."""
    biased = len(inputs) > 2 and inputs[2] is not None
    return Epilogue(biased, parse_desc(node.epilogue) if node.epilogue else None, node.shift)


def sliding(
    attributes: dict[str, Any], sizes: Sequence[int], window: Sequence[int], same_ceil: bool = True
) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """(strides, dilations, padding pairs) of a node with a sliding window, auto_pad resolved."""
    axes = len(sizes)
    strides = list(attributes.get("strides", [1] * axes))
    dilations = list(attributes.get("dilations", [1] * axes))
    pads = list(attributes.get("pads", [0] * (2 * axes)))
    mode = attributes.get("auto_pad", b"NOTSET").decode()
    pairs = [(pads[a], pads[a + axes]) for a in range(axes)]
    if mode == "VALID":
        pairs = [(0, 0)] * axes
    elif mode.startswith("SAME"):
        pairs = []
        for size, extent_of, step, gap in zip(sizes, window, strides, dilations):
            extent = (extent_of - 1) * gap + 1
            total = max(0, (-(-size // step) - 1) * step + extent - size)
            small = total // 2
            low_first = mode == "SAME_UPPER"
            pairs.append((small, total - small) if low_first else (total - small, small))
    if any(p < 0 for pair in pairs for p in pair):
        raise Unplanned(f"negative padding {pads}")
    return strides, dilations, pairs


class Conv(Planned):
    """Conv, with bias and a fused activation as the plan's epilogue."""

    weights = 1

    def plan(self, inputs: Sequence[Any]) -> Any:
        x, w = inputs[:2]
        if x.ndim not in (3, 4, 5):
            raise Unplanned(f"{x.ndim - 2} spatial axes")
        groups = int(self.attributes.get("group", 1))
        strides, dilations, pads = sliding(self.attributes, x.shape[2:], w.shape[2:])
        conv = ConvolutionDesc.of(x.ndim - 2, pads, strides, dilations, groups)
        dims = conv.output_dims(x.shape, w.shape)
        descs = [packed(d, x.dtype) for d in (x.shape, w.shape, dims)]
        problem = ConvolutionProblem("forward", *descs, conv, epilogue=epilogue(self.node, inputs))
        return make(problem), dims


class ConvTranspose(Planned):
    """ConvTranspose: the data gradient of a convolution; the bias is what the output starts as."""

    weights = 1

    def plan(self, inputs: Sequence[Any]) -> Any:
        x, w = inputs[:2]
        axes = x.ndim - 2
        if axes not in (1, 2, 3):
            raise Unplanned(f"{axes} spatial axes")
        a, groups = self.attributes, int(self.attributes.get("group", 1))
        strides = list(a.get("strides", [1] * axes))
        dilations = list(a.get("dilations", [1] * axes))
        extra = list(a.get("output_padding", [0] * axes))
        extents = [(r - 1) * d + 1 for r, d in zip(w.shape[2:], dilations)]
        whole = [s * (h - 1) + o + e for s, h, o, e in zip(strides, x.shape[2:], extra, extents)]
        pads, sizes = self._pads(whole, strides, x.shape[2:])
        dims = (x.shape[0], w.shape[1] * groups, *sizes)
        # A gradient's output may not reach past what the convolution would have read.
        conv = ConvolutionDesc.of(axes, pads, strides, dilations, groups)
        if conv.output_dims(dims, w.shape) != x.shape:
            raise Unplanned(f"output_padding {extra} beyond the stride {strides}")
        descs = [packed(d, x.dtype) for d in (dims, w.shape, x.shape)]
        return make(ConvolutionProblem("backward_data", *descs, conv)), dims

    def _pads(
        self, whole: list[int], strides: list[int], sizes: Sequence[int]
    ) -> tuple[list[tuple[int, int]], list[int]]:
        a, axes = self.attributes, len(whole)
        mode = a.get("auto_pad", b"NOTSET").decode()
        wanted = list(a["output_shape"])[-axes:] if a.get("output_shape") else None
        if wanted is None and mode.startswith("SAME"):
            wanted = [h * s for h, s in zip(sizes, strides)]
        if wanted is not None:
            pairs = []
            for total in (f - w for f, w in zip(whole, wanted)):
                small = total // 2
                upper = mode == "SAME_UPPER"
                pairs.append((small, total - small) if upper else (total - small, small))
        else:
            pads = list(a.get("pads", [0] * (2 * axes))) if mode == "NOTSET" else [0] * (2 * axes)
            pairs = [(pads[i], pads[i + axes]) for i in range(axes)]
        if any(p < 0 for pair in pairs for p in pair):
            raise Unplanned(f"negative padding {pairs}")
        return pairs, [f - low - high for f, (low, high) in zip(whole, pairs)]

    def call(self, entry: Any, inputs: Sequence[Any]) -> list[Array]:
        plan, dims = entry
        x, w = inputs[:2]
        y = np.empty(dims, x.dtype)
        biased = len(inputs) > 2 and inputs[2] is not None
        if biased:
            y[...] = inputs[2].reshape(1, -1, *(1,) * (x.ndim - 2))
        execute(plan, [w, x], y, beta=1.0 if biased else 0.0)
        self.algorithm = plan.algorithm
        return [y]

    def bind(
        self,
        plan: bedstone.Plan | bedstone.PreparedPlan,
        inputs: Sequence[Any],
        outputs: Sequence[Array],
    ) -> list[Callable[[], Any]]:
        x, w = inputs[:2]
        if len(inputs) < 3 or inputs[2] is None:
            return [bound(plan, [w, x], outputs)]
        bias = inputs[2].reshape(1, -1, *(1,) * (x.ndim - 2))
        fill = functools.partial(np.copyto, outputs[0], bias)
        return [fill, bound(plan, [w, x], outputs, beta=1.0)]


class Pool(Planned):
    """MaxPool (with Indices) and AveragePool."""

    def plan(self, inputs: Sequence[Any]) -> Any:
        (x,) = inputs
        axes = x.ndim - 2
        if axes not in (1, 2, 3):
            raise Unplanned(f"{axes} spatial axes")
        window = self.attributes["kernel_shape"]
        strides, dilations, pads = sliding(self.attributes, x.shape[2:], window)
        mode = "max"
        if self.node.op == "AveragePool":
            include = self.attributes.get("count_include_pad", 0)
            mode = "average_include_padding" if include else "average_exclude_padding"
        rounding = "ceil" if self.attributes.get("ceil_mode", 0) else "floor"
        desc = PoolingDesc.of(mode, window, axes, pads, strides, dilations, rounding)
        dims = desc.output_dims(x.shape)
        indices = None
        if len(self.node.outputs) > 1 and self.node.outputs[1]:
            indices = bedstone.TensorDesc.packed(dims, "int64")
        descs = packed(x.shape, x.dtype), packed(dims, x.dtype)
        return make(PoolingProblem("forward", *descs, desc, indices)), dims

    def call(self, entry: Any, inputs: Sequence[Any]) -> list[Array]:
        plan, dims = entry
        if len(self.node.outputs) < 2 or not self.node.outputs[1]:
            return super().call(entry, inputs)
        x = np.ascontiguousarray(inputs[0])
        y, indices = np.empty(dims, x.dtype), np.empty(dims, np.int64)
        plan.kernel([a.ctypes.data for a in (x, y, indices)], 0, 1.0, 0.0, 0)
        self.algorithm = plan.algorithm
        return [y, self._flat(indices, x.shape)]

    def bind(
        self,
        plan: bedstone.Plan | bedstone.PreparedPlan,
        inputs: Sequence[Any],
        outputs: Sequence[Array],
    ) -> list[Callable[[], Any]]:
        if len(outputs) < 2:
            return super().bind(plan, inputs, outputs)
        y, flat = outputs
        indices, shape = np.empty(y.shape, np.int64), inputs[0].shape
        kernel = bound(plan, inputs, [y, indices])
        return [kernel, lambda: np.copyto(flat, self._flat(indices, shape))]

    def _flat(self, indices: Array, x: tuple[int, ...]) -> Array:
        """Indices over the whole tensor, as ONNX counts them; column-major if asked for."""
        spatial = int(np.prod(x[2:]))
        if self.attributes.get("storage_order", 0):
            places = np.unravel_index(indices, x[2:])
            indices = np.ravel_multi_index(places, x[2:], order="F")
        planes = np.arange(x[0] * x[1]).reshape(x[0], x[1], *(1,) * (len(x) - 2))
        return np.asarray(indices + planes * spatial, np.int64)


class GlobalPool(Planned):
    """GlobalAveragePool and GlobalMaxPool."""

    def plan(self, inputs: Sequence[Any]) -> Any:
        (x,) = inputs
        if x.ndim not in (3, 4, 5):
            raise Unplanned(f"{x.ndim - 2} spatial axes")
        mode = "max" if self.node.op == "GlobalMaxPool" else "average_exclude_padding"
        desc = PoolingDesc.whole(mode, x.shape)
        dims = desc.output_dims(x.shape)
        descs = packed(x.shape, x.dtype), packed(dims, x.dtype)
        return make(PoolingProblem("forward", *descs, desc)), dims


class Softmax(Planned):
    """Softmax and LogSoftmax, by the rule of the model's opset."""

    def plan(self, inputs: Sequence[Any]) -> Any:
        (x,) = inputs
        axis = int(self.attributes.get("axis", -1 if self.opset >= 13 else 1))
        axis += x.ndim if axis < 0 else 0
        axes = (axis,) if self.opset >= 13 else tuple(range(axis, x.ndim))
        if not axes or not x.ndim or x.ndim > 8:
            raise Unplanned(f"rank {x.ndim} with axis {axis}")
        desc = packed(x.shape, x.dtype)
        algorithm = "log" if self.node.op == "LogSoftmax" else "accurate"
        return make(SoftmaxProblem("forward", desc, desc, algorithm, axes)), x.shape


class Activation(Planned):
    """Every operator that is one of bedstone's activations."""

    reads = 1

    def __init__(self, node: Node, graph: Graph) -> None:
        super().__init__(node, graph)
        self.kind = activation_of(graph, node)

    def plan(self, inputs: Sequence[Any]) -> Any:
        (x,) = inputs
        if self.kind is None:
            raise Unplanned("its coefficients are not known before it runs, or are out of range")
        # Elementwise: the shape does not matter, only how many.
        desc = packed((max(x.size, 0),), x.dtype)
        return make(ActivationProblem("forward", desc, desc, parse_desc(self.kind))), x.shape


class BatchNormalization(Planned):
    """Inference; training falls back."""

    def plan(self, inputs: Sequence[Any]) -> Any:
        x = inputs[0]
        trains = self.attributes.get("training_mode", 0) or (
            self.opset < 7 and not self.attributes.get("is_test", 0)
        )
        if trains or len([o for o in self.node.outputs if o]) > 1:
            raise Unplanned("training mode")
        if self.opset < 9 and not self.attributes.get("spatial", 1):
            raise Unplanned("a mean for each activation")
        if not 2 <= x.ndim <= 8:
            raise Unplanned(f"rank {x.ndim}")
        kinds = {i.dtype for i in inputs[1:]}
        if len(kinds) != 1:
            raise Unplanned("parameters of several types")
        desc = packed(x.shape, x.dtype)
        norm = NormDesc("batch", float(self.attributes.get("epsilon", 1e-5)))
        problem = NormalizationProblem("inference", desc, desc, norm, parameters=kinds.pop().name)  # type: ignore[arg-type]
        return make(problem), x.shape


class MatMul(Planned):
    """A matrix (or a stack of rows) times a matrix: a 1x1 convolution of one row of pixels, whose
    strides say that channels lie innermost. Bias and activation are its epilogue."""

    weights = 1

    def plan(self, inputs: Sequence[Any]) -> Any:
        a, b = inputs[:2]
        if b.ndim != 2 or a.ndim < 1 or a.shape[-1] != b.shape[0] or not b.size:
            raise Unplanned("a product of more than two dimensions on the right")
        depth, columns = b.shape
        rows = a.size // depth
        dtype = a.dtype.name
        problem = ConvolutionProblem(
            "forward",
            bedstone.TensorDesc((1, depth, 1, rows), (a.size, 1, a.size, depth), dtype),  # type: ignore[arg-type]
            bedstone.TensorDesc((columns, depth, 1, 1), (1, columns, 1, 1), dtype),  # type: ignore[arg-type]
            bedstone.TensorDesc(
                (1, columns, 1, rows), (rows * columns, 1, rows * columns, columns), dtype
            ),  # type: ignore[arg-type]
            ConvolutionDesc(),
            epilogue=epilogue(self.node, inputs),
        )
        return make(problem), (*a.shape[:-1], columns)


OPERATORS: dict[str, Callable[[Node, Graph], Planned]] = {
    "Conv": Conv,
    "ConvTranspose": ConvTranspose,
    "MaxPool": Pool,
    "AveragePool": Pool,
    "GlobalAveragePool": GlobalPool,
    "GlobalMaxPool": GlobalPool,
    "Softmax": Softmax,
    "LogSoftmax": Softmax,
    "BatchNormalization": BatchNormalization,
    "MatMul": MatMul,
    **dict.fromkeys(
        ("Relu", "LeakyRelu", "Clip", "Sigmoid", "HardSigmoid", "HardSwish", "Tanh", "Elu", "Gelu",
         "Softplus", "Activation"),
        Activation,
    ),
}  # fmt: skip
