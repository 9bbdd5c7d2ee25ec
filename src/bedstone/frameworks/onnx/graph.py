"""The graph between file and session: nodes in order, constants by name, inputs and outputs.

Each pass takes a graph and leaves one that computes the same. Here: constants folded, the
arithmetic that spells hard-swish and swish made one node, dead nodes dropped; in `fusion.py`: what
follows a convolution made part of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

import bedstone

Array = np.ndarray[Any, Any]


@dataclass
class Node:
    """One operator. `proto` is the node it came from, for operators left to the reference."""

    op: str
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, Any]
    proto: onnx.NodeProto
    domain: str = ""
    epilogue: str = ""  # activation fused into the node, as bedstone spells it
    shift: float = 0.0  # added after it

    @property
    def fused(self) -> bool:
        """True if no ONNX operator computes all that the node has become."""
        return (
            self.op == "Activation"
            or bool(self.epilogue)
            or self.shift != 0.0
            or (self.op == "MatMul" and len(self.inputs) > 2)
        )

    @property
    def captured(self) -> list[str]:
        """Names that subgraphs (If, Loop, Scan) take from outside."""
        return [name for name in _captured(self.proto) if name not in self.inputs]


@dataclass
class Graph:
    """A model ready to be compiled into a session."""

    nodes: list[Node]
    constants: dict[str, Array]
    inputs: list[onnx.ValueInfoProto]
    outputs: list[onnx.ValueInfoProto]
    opset: int
    model: onnx.ModelProto
    notes: list[str] = field(default_factory=list)

    def consumers(self) -> Counter[str]:
        """How often each value is read (an output of the graph counts as a reader)."""
        count: Counter[str] = Counter(output.name for output in self.outputs)
        for node in self.nodes:
            count.update(name for name in (*node.inputs, *node.captured) if name)
        return count

    def producers(self) -> dict[str, Node]:
        """The node that makes each value."""
        return {name: node for node in self.nodes for name in node.outputs if name}


def load(model: Any) -> Graph:
    """A graph from a path, bytes or ModelProto.

    Raises InvalidDescriptor for something else, or a file that is no ONNX model.
    """
    proto = _proto(model)
    constants = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    opset = next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), 1)
    nodes = []
    for node in proto.graph.node:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type == "Constant" and "value" in attributes:
            constants[node.output[0]] = numpy_helper.to_array(attributes["value"])
            continue
        domain = "" if node.domain == "ai.onnx" else node.domain
        nodes.append(
            Node(node.op_type, list(node.input), list(node.output), attributes, node, domain)
        )
    inputs = [i for i in proto.graph.input if i.name not in constants]
    return Graph(nodes, constants, inputs, list(proto.graph.output), opset, proto)


def _proto(model: Any) -> onnx.ModelProto:
    if isinstance(model, onnx.ModelProto):
        return model
    try:
        if isinstance(model, (bytes, bytearray)):
            return onnx.load_model_from_string(bytes(model))
        return onnx.load(model)
    except FileNotFoundError:
        raise
    except Exception as error:  # protobuf raises its own kinds, by version
        shown = f"{len(model)} bytes" if isinstance(model, (bytes, bytearray)) else model
        raise bedstone.InvalidDescriptor("model", shown, f"an ONNX model ({error})") from error


def _captured(node: onnx.NodeProto) -> Iterable[str]:
    for attribute in node.attribute:
        graphs = [attribute.g] if attribute.HasField("g") else list(attribute.graphs)
        for graph in graphs:
            known = {i.name for i in graph.input} | {t.name for t in graph.initializer}
            for inner in graph.node:
                wanted = [*inner.input, *_captured(inner)]
                yield from (name for name in wanted if name and name not in known)
                known.update(inner.output)
            yield from (o.name for o in graph.output if o.name not in known)


Evaluate = Callable[[Node, list[Any]], list[Array]]


# Operators whose result does not follow from their inputs alone.
RANDOM = {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial",
          "Bernoulli", "Dropout"}  # fmt: skip


def fold_constants(graph: Graph, evaluate: Evaluate) -> None:
    """Compute now what depends on constants only."""
    kept = []
    for node in graph.nodes:
        needed = [name for name in node.inputs if name]
        constant = all(name in graph.constants for name in needed) and not node.captured
        if not constant or node.op in RANDOM or node.domain:
            kept.append(node)
            continue
        values = [graph.constants[name] if name else None for name in node.inputs]
        for name, value in zip(node.outputs, evaluate(node, values)):
            if name:
                graph.constants[name] = np.asarray(value)
    graph.nodes = kept


def fuse_swish(graph: Graph) -> None:
    """x * HardSigmoid(x), x * clip(x + 3, 0, 6) / 6 and x * Sigmoid(x) as one node each."""
    consumers, producers = graph.consumers(), graph.producers()
    for node in list(graph.nodes):
        match = _swish(graph, node, producers, consumers) if node.op in ("Mul", "Div") else None
        if match is None:
            continue
        source, activation, used = match
        place = graph.nodes.index(node)
        fused = replace(
            node, op="Activation", inputs=[source], attributes={"activation": activation}
        )
        graph.nodes[place] = fused
        producers[fused.outputs[0]] = fused
        for old in used:
            graph.nodes.remove(old)
        consumers = graph.consumers()
        graph.notes.append(f"{activation.split(':')[0]} {fused.outputs[0]} is one node")


def _swish(
    graph: Graph, node: Node, producers: dict[str, Node], consumers: Counter[str]
) -> tuple[str, str, list[Node]] | None:
    """(input, activation, nodes that vanish) if `node` closes one of the patterns."""
    scale, outer = 1.0, []
    if node.op == "Div":
        divisor = number(graph, node.inputs[1])
        inner = producers.get(node.inputs[0])
        if divisor is None or inner is None or inner.op != "Mul":
            return None
        if consumers[inner.outputs[0]] != 1 or inner.epilogue:
            return None
        scale, outer, node = 1.0 / divisor, [inner], inner
    for x, gate_name in (node.inputs, node.inputs[::-1]):
        gate = producers.get(gate_name)
        if gate is None or consumers[gate_name] != 1 or gate.domain:
            continue
        if gate.op in ("Sigmoid", "HardSigmoid") and gate.inputs[0] == x and scale == 1.0:
            if gate.op == "Sigmoid":
                return x, "silu", [*outer, gate]
            a, b = gate.attributes.get("alpha", 0.2), gate.attributes.get("beta", 0.5)
            return x, f"hard_swish:{float(a)!r}:{float(b)!r}", [*outer, gate]
        if gate.op == "Clip":
            found = _clip_gate(graph, gate, x, scale, producers, consumers)
            if found is not None:
                return x, found[0], [*outer, gate, found[1]]
    return None


def _clip_gate(
    graph: Graph, gate: Node, x: str, scale: float, producers: dict[str, Node],
    consumers: Counter[str],
) -> tuple[str, Node] | None:  # fmt: skip
    """clip(x + b, 0, top) * scale = hard_sigmoid if top * scale = 1."""
    bounds = clip_bounds(graph, gate)
    add = producers.get(gate.inputs[0])
    if bounds is None or bounds[0] != 0.0 or add is None or add.op != "Add":
        return None
    if consumers[add.outputs[0]] != 1 or x not in add.inputs or abs(bounds[1] * scale - 1) > 1e-6:
        return None
    other = add.inputs[1] if add.inputs[0] == x else add.inputs[0]
    shift = number(graph, other)
    if shift is None:
        return None
    return f"hard_swish:{1 / bounds[1]!r}:{shift / bounds[1]!r}", add


def number(graph: Graph, name: str) -> float | None:
    """The single number a constant holds, or None."""
    value = graph.constants.get(name)
    return float(value.reshape(-1)[0]) if value is not None and value.size == 1 else None


def clip_bounds(graph: Graph, node: Node) -> tuple[float, float] | None:
    """Clip's bounds where they are known now."""
    if graph.opset < 11:
        low = node.attributes.get("min", -np.inf)
        return float(low), float(node.attributes.get("max", np.inf))
    bounds = []
    for index, default in ((1, -np.inf), (2, np.inf)):
        name = node.inputs[index] if len(node.inputs) > index else ""
        value = default if not name else number(graph, name)
        if value is None:
            return None
        bounds.append(float(value))
    return bounds[0], bounds[1]


def activation_of(graph: Graph, node: Node) -> str | None:
    """The node as one of bedstone's activations, or None if it is none."""
    a = node.attributes
    if node.domain:
        return None
    if node.op == "Activation":
        return str(a["activation"])
    if node.op == "Clip":
        bounds = clip_bounds(graph, node)
        return None if bounds is None or bounds[0] > bounds[1] else (
            f"clip:{bounds[0]!r}:{bounds[1]!r}"
        )  # fmt: skip
    if node.op == "LeakyRelu":
        alpha = float(a.get("alpha", 0.01))
        return f"leaky_relu:{alpha!r}:0.0" if alpha >= 0 else None
    if node.op == "Elu":
        alpha = float(a.get("alpha", 1.0))
        return f"elu:{alpha!r}:0.0" if alpha >= 0 else None
    if node.op == "HardSigmoid":
        return f"hard_sigmoid:{float(a.get('alpha', 0.2))!r}:{float(a.get('beta', 0.5))!r}"
    if node.op == "Gelu":
        return "gelu_tanh" if a.get("approximate", b"none") == b"tanh" else "gelu"
    plain = {"Relu": "relu", "Sigmoid": "sigmoid", "Tanh": "tanh", "HardSwish": "hard_swish",
             "Softplus": "softplus"}  # fmt: skip
    return plain.get(node.op)


def remove_dead(graph: Graph) -> None:
    """Drop nodes and constants that nobody reads, and pass Identity through."""
    outputs = {output.name for output in graph.outputs}
    alias: dict[str, str] = {}
    kept = []
    for node in graph.nodes:
        node.inputs = [alias.get(name, name) for name in node.inputs]
        if node.op == "Identity" and not node.domain and node.outputs[0] not in outputs:
            alias[node.outputs[0]] = node.inputs[0]
        else:
            kept.append(node)
    captured = {name for node in kept for name in node.captured}
    if captured & set(alias):  # a subgraph reads through an Identity by its name: keep them all
        kept = graph.nodes
    graph.nodes = kept
    needed, live = set(outputs), []
    for node in reversed(graph.nodes):
        if any(name in needed for name in node.outputs):
            live.append(node)
            needed.update(name for name in (*node.inputs, *node.captured) if name)
    graph.nodes = live[::-1]
    graph.constants = {k: v for k, v in graph.constants.items() if k in needed}
