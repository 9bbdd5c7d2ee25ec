"""The ONNX backend interface, by which ONNX's own test suite runs against bedstone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx.backend.base import Backend, BackendRep, namedtupledict

import bedstone
from bedstone.frameworks.onnx.session import InferenceSession


class BedstoneRep(BackendRep):  # type: ignore[misc]
    """A model ready to run."""

    def __init__(self, session: InferenceSession) -> None:
        self.session = session

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Outputs for a list of arrays in the model's order, one array, or a dict by name."""
        names = [i.name for i in self.session.get_inputs()]
        if isinstance(inputs, np.ndarray):
            inputs = [inputs]
        feed = inputs if isinstance(inputs, dict) else dict(zip(names, inputs))
        outputs = self.session.run(None, feed)
        fields = [o.name for o in self.session.get_outputs()]
        return namedtupledict("Outputs", fields)(*outputs)


class BedstoneBackend(Backend):  # type: ignore[misc]
    """`onnx.backend.base.Backend` for the CPU."""

    @classmethod
    def is_compatible(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        """Every model is: what has no primitive runs on the onnx package's reference."""
        return cls.supports_device(device)

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> BedstoneRep:
        """A model as something with `run`."""
        if not cls.supports_device(device):
            raise bedstone.InvalidDescriptor("device", device, "CPU")
        return BedstoneRep(InferenceSession(model))

    @classmethod
    def run_model(
        cls, model: onnx.ModelProto, inputs: Any, device: str = "CPU", **kwargs: Any
    ) -> tuple[Any, ...]:
        """Prepare and run once."""
        return cls.prepare(model, device).run(inputs)

    @classmethod
    def run_node(
        cls, node: onnx.NodeProto, inputs: Any, device: str = "CPU",
        outputs_info: Sequence[Any] | None = None, **kwargs: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Run a single operator."""
        anything = onnx.TypeProto()
        given = [name for name in node.input if name]
        graph = helper.make_graph(
            [node],
            "node",
            [helper.make_value_info(name, anything) for name in given],
            [helper.make_value_info(name, anything) for name in node.output if name],
        )
        version = kwargs.get("opset_version", onnx.defs.onnx_opset_version())
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)])
        return cls.run_model(model, inputs, device)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """The CPU only."""
        return device.split(":")[0] == "CPU"


prepare = BedstoneBackend.prepare
run_model = BedstoneBackend.run_model
run_node = BedstoneBackend.run_node
supports_device = BedstoneBackend.supports_device
is_compatible = BedstoneBackend.is_compatible
