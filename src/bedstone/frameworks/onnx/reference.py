"""The onnx package's own operators, for everything that is neither planned nor glue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from onnx import helper
from onnx.reference import ReferenceEvaluator

from bedstone.frameworks.onnx.graph import Graph, Node


class ReferenceNode:
    """One node as a model of its own, run by onnx.reference.

    Values that its subgraphs take from outside become inputs of that model.
    """

    def __init__(self, node: Node, graph: Graph) -> None:
        self.names = [name for name in dict.fromkeys((*node.proto.input, *node.captured)) if name]
        anything = onnx.TypeProto()
        inputs = [helper.make_value_info(name, anything) for name in self.names]
        outputs = [helper.make_value_info(name, anything) for name in node.proto.output if name]
        self.kept = [name for name in node.proto.output if name]
        self.outputs = list(node.proto.output)
        body = helper.make_graph([node.proto], "node", inputs, outputs)
        model = helper.make_model(
            body,
            opset_imports=list(graph.model.opset_import),
            functions=list(graph.model.functions),
        )
        model.ir_version = graph.model.ir_version
        self.evaluator = ReferenceEvaluator(model)

    def run(self, values: Sequence[Any]) -> list[Any]:
        """The outputs, None for those left out; `values` follow `self.names`."""
        feed = {n: v for n, v in zip(self.names, values) if v is not None}
        results = dict(zip(self.kept, self.evaluator.run(None, feed)))
        return [results.get(name) for name in self.outputs]
