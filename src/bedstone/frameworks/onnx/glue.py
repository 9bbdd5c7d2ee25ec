"""NumPy forms of the operators between the primitives: shapes, slices, sums, matrix products.

Only what the onnx package's reference computes too, without its checks and conversions; a node that
meets a case not covered here raises `NotHere` and is left to that reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import helper

from bedstone.frameworks.onnx.graph import Array, Node


class NotHere(Exception):
    """This case is left to the onnx package's reference."""


Attributes = dict[str, Any]
Function = Callable[[Attributes, int, Sequence[Any]], list[Array]]


def _binary(function: Callable[[Any, Any], Any]) -> Function:
    def run(a: Attributes, opset: int, inputs: Sequence[Any]) -> list[Array]:
        if opset < 7 and inputs[0].shape != inputs[1].shape:
            raise NotHere  # the old broadcast rules
        return [np.asarray(function(inputs[0], inputs[1]))]

    return run


def _unary(function: Callable[[Any], Any]) -> Function:
    return lambda a, opset, inputs: [np.asarray(function(inputs[0]))]


def _div(x: Any, y: Any) -> Any:
    if x.dtype.kind in "iu":
        quotient = np.abs(x) // np.abs(y)  # ONNX truncates towards zero
        return (quotient * np.sign(x) * np.sign(y)).astype(x.dtype)
    return x / y


def _pow(x: Any, y: Any) -> Any:
    if y.size == 1 and x.dtype.kind == "f" and float(y.reshape(-1)[0]) == 2.0:
        return (x * x).reshape(np.broadcast_shapes(x.shape, y.shape))
    return np.power(x, y).astype(x.dtype)


def _axes(a: Attributes, inputs: Sequence[Any], index: int = 1) -> tuple[int, ...] | None:
    """Axes from an attribute (old opsets) or an input (new ones)."""
    if a.get("axes") is not None:
        return tuple(a["axes"])
    if len(inputs) > index and inputs[index] is not None:
        return tuple(int(i) for i in inputs[index])
    return None


def _reshape(a: Attributes, opset: int, inputs: Sequence[Any]) -> list[Array]:
    x = inputs[0]
    shape = list(a["shape"]) if "shape" in a else [int(d) for d in inputs[1]]
    if not a.get("allowzero", 0):
        shape = [x.shape[i] if d == 0 else d for i, d in enumerate(shape)]
    return [x.reshape(shape)]


def _slice(a: Attributes, opset: int, inputs: Sequence[Any]) -> list[Array]:
    x = inputs[0]
    if opset < 10:
        starts, ends = a["starts"], a["ends"]
        axes, steps = a.get("axes", range(len(starts))), [1] * len(starts)
    else:
        starts, ends = inputs[1], inputs[2]
        given = len(inputs) > 3 and inputs[3] is not None
        axes = inputs[3] if given else range(len(starts))
        steps = inputs[4] if len(inputs) > 4 and inputs[4] is not None else [1] * len(starts)
    box = [slice(None)] * x.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps):
        start, end, step = int(start), int(end), int(step)
        if step < 0:
            size = x.shape[int(axis)]
            start = min(start + size if start < 0 else start, size - 1)
            end = end + size if end < 0 else end
            box[int(axis)] = slice(start, None if end < 0 else end, step)
        else:
            box[int(axis)] = slice(start, end, step)
    return [x[tuple(box)]]


def _squeeze(a: Attributes, opset: int, inputs: Sequence[Any]) -> list[Array]:
    return [np.squeeze(inputs[0], _axes(a, inputs))]


def _unsqueeze(a: Attributes, opset: int, inputs: Sequence[Any]) -> list[Array]:
    return [np.expand_dims(inputs[0], _axes(a, inputs) or ())]


def _concat(a: Attributes, opset: int, inputs: Sequence[Any]) -> list[Array]:
    return [np.concatenate(list(inputs), a.get("axis", 1))]


def _shape(a: Attributes, opset: int, inputs: Sequence[Any]) -> list[Array]:
    return [np.array(inputs[0].shape[a.get("start", 0) : a.get("end")], np.int64)]


def _gather(a: Attributes, opset: int, inputs: Sequence[Any]) -> list[Array]:
    return [np.asarray(np.take(inputs[0], inputs[1], a.get("axis", 0)))]


def _transpose(a: Attributes, opset: int, inputs: Sequence[Any]) -> list[Array]:
    return [inputs[0].transpose(a.get("perm"))]


def _cast(a: Attributes, opset: int, inputs: Sequence[Any]) -> list[Array]:
    kind = helper.tensor_dtype_to_np_dtype(a["to"])
    if kind.kind not in "fiub" or inputs[0].dtype.kind not in "fiub":
        raise NotHere
    return [inputs[0].astype(kind)]


def _reduce(function: Callable[..., Any]) -> Function:
    def run(a: Attributes, opset: int, inputs: Sequence[Any]) -> list[Array]:
        axes = _axes(a, inputs)
        if axes is None and a.get("noop_with_empty_axes", 0):
            return [inputs[0]]
        keep = bool(a.get("keepdims", 1))
        x = inputs[0]
        if x.size == 0:
            raise NotHere
        return [np.asarray(function(x, axis=axes or None, keepdims=keep), x.dtype)]

    return run


def _flatten(a: Attributes, opset: int, inputs: Sequence[Any]) -> list[Array]:
    x, axis = inputs[0], a.get("axis", 1)
    axis += x.ndim if axis < 0 else 0
    return [x.reshape(int(np.prod(x.shape[:axis])), -1)] if x.size else _give_up()


def _give_up() -> list[Array]:
    raise NotHere


def _gemm(a: Attributes, opset: int, inputs: Sequence[Any]) -> list[Array]:
    x, y = inputs[:2]
    x, y = (x.T if a.get("transA", 0) else x), (y.T if a.get("transB", 0) else y)
    out = x @ y
    alpha, beta = a.get("alpha", 1.0), a.get("beta", 1.0)
    if alpha != 1.0:
        out = out * out.dtype.type(alpha)
    if len(inputs) > 2 and inputs[2] is not None:
        out = out + (inputs[2] if beta == 1.0 else inputs[2] * out.dtype.type(beta))
    return [out]


def _pad(a: Attributes, opset: int, inputs: Sequence[Any]) -> list[Array]:
    x = inputs[0]
    mode = a.get("mode", b"constant")
    if mode != b"constant" or opset < 11 or (len(inputs) > 3 and inputs[3] is not None):
        raise NotHere
    pads = [int(p) for p in inputs[1]]
    if any(p < 0 for p in pads):
        raise NotHere
    value = inputs[2].reshape(-1)[0] if len(inputs) > 2 and inputs[2] is not None else 0
    pairs = list(zip(pads[: x.ndim], pads[x.ndim :]))
    return [np.pad(x, pairs, constant_values=value)]


def _resize(a: Attributes, opset: int, inputs: Sequence[Any]) -> list[Array]:
    """Nearest by whole factors; the rest is left to the reference."""
    x = inputs[0]
    if opset < 11 or a.get("mode", b"nearest") != b"nearest" or x.ndim != 4 or "axes" in a:
        raise NotHere
    if a.get("coordinate_transformation_mode", b"half_pixel") == b"tf_crop_and_resize":
        raise NotHere
    if len(inputs) > 3 and inputs[3] is not None and inputs[3].size:
        sizes = [int(s) for s in inputs[3]]
    elif len(inputs) > 2 and inputs[2] is not None and inputs[2].size:
        scaled = [d * float(s) for d, s in zip(x.shape, inputs[2])]
        sizes = [int(s) for s in scaled]
        if any(abs(s - t) > 1e-6 for s, t in zip(sizes, scaled)):
            raise NotHere
    else:
        raise NotHere
    factors = [s // d if d and s % d == 0 else 0 for s, d in zip(sizes, x.shape)]
    if factors[:2] != [1, 1] or 0 in factors:
        raise NotHere
    # A whole factor repeats every pixel under each of these rules for coordinates and rounding.
    rules = (a.get("coordinate_transformation_mode", b"half_pixel"),
             a.get("nearest_mode", b"round_prefer_floor"))  # fmt: skip
    if rules not in {(b"asymmetric", b"floor"), (b"half_pixel", b"round_prefer_floor"),
                     (b"half_pixel", b"round_prefer_ceil")}:  # fmt: skip
        raise NotHere
    n, c, h, w = x.shape
    spread = np.broadcast_to(x[:, :, :, None, :, None], (n, c, h, factors[2], w, factors[3]))
    return [spread.reshape(n, c, h * factors[2], w * factors[3])]


def _split(a: Attributes, opset: int, inputs: Sequence[Any]) -> list[Array]:
    x, axis = inputs[0], a.get("axis", 0)
    sizes = a.get("split")
    if sizes is None and len(inputs) > 1 and inputs[1] is not None:
        sizes = [int(s) for s in inputs[1]]
    if sizes is None:
        raise NotHere
    return np.split(x, np.cumsum(sizes)[:-1], axis)


GLUE: dict[str, Function] = {
    "Add": _binary(np.add),
    "Sub": _binary(np.subtract),
    "Mul": _binary(np.multiply),
    "Div": _binary(_div),
    "Pow": _binary(_pow),
    "Sqrt": _unary(np.sqrt),
    "Exp": _unary(np.exp),
    "Log": _unary(np.log),
    "Neg": _unary(np.negative),
    "Abs": _unary(np.abs),
    "Identity": _unary(lambda x: x),
    "Reshape": _reshape,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Concat": _concat,
    "Shape": _shape,
    "Gather": _gather,
    "Transpose": _transpose,
    "Cast": _cast,
    "ReduceMean": _reduce(np.mean),
    "ReduceSum": _reduce(np.sum),
    "ReduceMax": _reduce(np.max),
    "Flatten": _flatten,
    "MatMul": _binary(np.matmul),
    "Gemm": _gemm,
    "Pad": _pad,
    "Resize": _resize,
    "Split": _split,
}


def function_of(node: Node) -> Function | None:
    """The node's NumPy form, or None."""
    return None if node.domain else GLUE.get(node.op)
