"""Passes that leave fewer nodes: what follows a convolution or a matrix product becomes part of it.

A node whose weights are constants is `linear` until it has an activation. Until then every scale
and offset by constants (Mul, Div, Add, Sub, BatchNormalization with known statistics) goes into its
weights and bias, computed in float64; then comes one activation, the epilogue; after it one number
may still be added (`shift`) and, where the activation allows it, multiplied. So a whole block of a
network, Conv - scale - offset - hard-swish - scale - offset, is one call that writes memory once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx

from bedstone.frameworks.onnx.graph import (
    Array,
    Evaluate,
    Graph,
    Node,
    activation_of,
    fold_constants,
    fuse_swish,
    number,
    remove_dead,
)

# Operators with constant weights -> the axis of the weights that counts output channels.
WEIGHTS_AXIS = {"Conv": 0, "ConvTranspose": 1, "MatMul": 1}
ACTIVATED = ("Conv", "MatMul")  # those whose plans take an activation
# A factor is pulled back through an activation only while it leaves numbers of ordinary size.
LEAST_FACTOR, LARGEST_FACTOR = 1e-3, 1e3


def optimize(graph: Graph, evaluate: Evaluate) -> Graph:
    """Every pass, in order. `evaluate` computes a node on constants."""
    fold_constants(graph, evaluate)
    drop_ones(graph)
    fuse_swish(graph)
    absorb(graph)
    fuse_gates(graph)
    remove_dead(graph)
    return graph


def drop_ones(graph: Graph) -> None:
    """x * 1 is x, where x is a convolution's: the 1 may be of one dim, and x has more."""
    producers, outputs = graph.producers(), {output.name for output in graph.outputs}
    captured = {name for node in graph.nodes for name in node.captured}
    alias: dict[str, str] = {}
    for node in graph.nodes:
        node.inputs = [alias.get(name, name) for name in node.inputs]
        if node.op != "Mul" or node.domain or node.outputs[0] in outputs | captured:
            continue
        for x, other in (node.inputs, node.inputs[::-1]):
            source, one = producers.get(x), graph.constants.get(other)
            if source is None or source.op != "Conv" or one is None or one.ndim > 1:
                continue
            if number(graph, other) == 1.0:
                alias[node.outputs[0]] = x
                break
    graph.nodes = [node for node in graph.nodes if node.outputs[0] not in alias]


def absorb(graph: Graph) -> None:
    """Make what follows a linear node, and only that node, part of it."""
    consumers, producers = graph.consumers(), graph.producers()
    for node in list(graph.nodes):
        for x, other in _operands(node):
            source = producers.get(x)
            if source is None or consumers[x] != 1 or not _has_weights(graph, source):
                continue
            if not _absorbed(graph, source, node, other):
                continue
            verb = "folded" if node.op == "BatchNormalization" else "fused"
            what = "matrix product" if source.op == "MatMul" else "convolution"
            graph.notes.append(f"{node.op} {node.outputs[0]} is {verb} into the {what} before it")
            source.outputs = list(node.outputs[:1])
            producers[node.outputs[0]] = source
            graph.nodes.remove(node)
            break


def _operands(node: Node) -> Iterator[tuple[str, str]]:
    """(value, the other operand) in the orders in which the node might be absorbed."""
    if node.domain or not node.inputs:
        return
    if node.op in ("Mul", "Add"):
        yield node.inputs[0], node.inputs[1]
        yield node.inputs[1], node.inputs[0]
    elif node.op in ("Div", "Sub"):
        yield node.inputs[0], node.inputs[1]
    else:
        yield node.inputs[0], ""


def _has_weights(graph: Graph, node: Node) -> bool:
    """Whether the node is linear in constants of ours to change."""
    if node.op not in WEIGHTS_AXIS or node.domain or len(node.inputs) < 2:
        return False
    w = graph.constants.get(node.inputs[1])
    if w is None or not w.size or not (w.dtype.kind == "f" or w.dtype.name == "bfloat16"):
        return False
    if node.op == "ConvTranspose" and node.attributes.get("group", 1) != 1:
        return False
    if node.op == "MatMul" and w.ndim != 2:
        return False
    bias = node.inputs[2] if len(node.inputs) > 2 else ""
    return not bias or bias in graph.constants


def _absorbed(graph: Graph, source: Node, node: Node, other: str) -> bool:
    """Try to make `node` part of `source`."""
    if node.op in ("Mul", "Div", "Add", "Sub"):
        value = graph.constants.get(other)
        if value is None or value.dtype != graph.constants[source.inputs[1]].dtype:
            return False
        return _arithmetic(graph, source, node, value)
    if source.epilogue or source.shift:
        return False
    if node.op == "BatchNormalization":
        return _normalization(graph, source, node)
    activation = activation_of(graph, node)
    if activation is None or source.op not in ACTIVATED:
        return False
    source.epilogue = activation
    return True


def _arithmetic(graph: Graph, source: Node, node: Node, value: Array) -> bool:
    vector = _per_channel(graph, source, value.astype(np.float64))
    if vector is None:
        return False
    multiplies = node.op in ("Mul", "Div")
    if node.op == "Div":
        if not vector.all():
            return False
        vector = 1.0 / vector
    elif node.op == "Sub":
        vector = -vector
    if not np.isfinite(vector).all():
        return False
    ones, zeros = np.ones_like(vector), np.zeros_like(vector)
    if not source.epilogue:
        factor, offset = (vector, zeros) if multiplies else (ones, vector)
        _scale_and_offset(graph, source, node.outputs[0], factor, offset)
        return True
    if value.size != 1:
        return False
    single = float(vector[0])
    if not multiplies:
        source.shift += single
        return True
    scaled = _scaled_activation(source.epilogue, single)
    if scaled is None:
        return False
    _scale_and_offset(graph, source, node.outputs[0], ones * single, zeros)
    source.epilogue = scaled
    source.shift *= single
    return True


def _scaled_activation(activation: str, factor: float) -> str | None:
    """The activation g with factor * f(x) = g(factor * x), or None if there is none of a kind."""
    kind, *numbers = activation.split(":")
    if not LEAST_FACTOR < abs(factor) < LARGEST_FACTOR:
        return None
    if kind == "hard_swish":
        a, b = (float(n) for n in numbers) if numbers else (1 / 6, 0.5)
        return f"hard_swish:{a / factor!r}:{b!r}"
    return activation if kind in ("relu", "leaky_relu") and factor > 0 else None


def _per_channel(graph: Graph, source: Node, value: Array) -> Array | None:
    """`value` as one number an output channel, if it is broadcast like that."""
    w = graph.constants[source.inputs[1]]
    channels = w.shape[WEIGHTS_AXIS[source.op]]
    if source.op == "MatMul":
        fits = value.ndim <= 1 and value.size in (1, channels)
        return np.broadcast_to(value.reshape(-1), (channels,)) if fits else None
    if value.ndim > w.ndim:
        return None
    shape = (1,) * (w.ndim - value.ndim) + value.shape
    if value.size != 1 and shape != (1, channels) + (1,) * (w.ndim - 2):
        return None
    return np.broadcast_to(value.reshape(-1), (channels,))


def _normalization(graph: Graph, source: Node, node: Node) -> bool:
    """With constant statistics it is one factor and one offset a channel."""
    if source.op == "MatMul" or node.attributes.get("training_mode"):
        return False
    if len([name for name in node.outputs if name]) > 1:
        return False
    if not all(name in graph.constants for name in node.inputs[1:5]):
        return False
    scale, shift, mean, variance = (
        graph.constants[name].astype(np.float64) for name in node.inputs[1:5]
    )
    factor = scale / np.sqrt(variance + node.attributes.get("epsilon", 1e-5))
    w = graph.constants[source.inputs[1]]
    if factor.shape != (w.shape[WEIGHTS_AXIS[source.op]],):
        return False
    _scale_and_offset(graph, source, node.outputs[0], factor, shift - mean * factor)
    return True


def _scale_and_offset(graph: Graph, source: Node, stem: str, factor: Array, offset: Array) -> None:
    """Weights times factor, bias times factor plus offset, as constants named after `stem`."""
    w, axis = graph.constants[source.inputs[1]], WEIGHTS_AXIS[source.op]
    has_bias = len(source.inputs) > 2 and source.inputs[2]
    bias = graph.constants[source.inputs[2]].astype(np.float64) if has_bias else 0.0
    spread = factor.reshape(tuple(-1 if a == axis else 1 for a in range(w.ndim)))
    graph.constants[f"{stem}:weight"] = (w.astype(np.float64) * spread).astype(w.dtype)
    graph.constants[f"{stem}:bias"] = (bias * factor + offset).astype(w.dtype)
    source.inputs = [source.inputs[0], f"{stem}:weight", f"{stem}:bias"]
    if source.op != "MatMul":  # (which takes no bias in ONNX)
        source.proto = _with_inputs(source)


def _with_inputs(node: Node) -> onnx.NodeProto:
    """The node's proto with its present inputs, should it be left to the reference."""
    proto = onnx.NodeProto()
    proto.CopyFrom(node.proto)
    del proto.input[:]
    proto.input.extend(node.inputs)
    return proto


def fuse_gates(graph: Graph) -> None:
    """x + x * g, where g is a convolution's alone: x * (g + 1), the 1 added in that convolution."""
    consumers, producers = graph.consumers(), graph.producers()
    for node in list(graph.nodes):
        if node.op != "Add" or node.domain:
            continue
        for x, product in (node.inputs, node.inputs[::-1]):
            inner = producers.get(product)
            if inner is None or inner.op != "Mul" or inner.domain or consumers[product] != 1:
                continue
            if x not in inner.inputs or inner.inputs[0] == inner.inputs[1]:
                continue
            gate = inner.inputs[1] if inner.inputs[0] == x else inner.inputs[0]
            source = producers.get(gate)
            if source is None or not source.epilogue or consumers[gate] != 1:
                continue
            source.shift += 1.0
            inner.inputs, inner.outputs = [x, gate], list(node.outputs)
            inner.proto = _with_inputs(inner)
            # It takes the sum's place: the gate and x are both known there.
            graph.nodes.remove(inner)
            graph.nodes[graph.nodes.index(node)] = inner
            producers[node.outputs[0]] = inner
            break
