"""InferenceSession: an ONNX model compiled to a list of steps over NumPy arrays.

Constructor, `run`, `get_inputs` and the rest have onnxruntime's habits. Each step is a bedstone
plan where there is one, a NumPy form for the glue between, and the onnx package's reference for
what is left; `report()` says which, how often, how long, and why not bedstone. From the second run
with inputs of the same shapes on, the steps are a recording's calls (recording.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper

import bedstone
from bedstone.frameworks.onnx import report as reports
from bedstone.frameworks.onnx.fusion import optimize
from bedstone.frameworks.onnx.glue import NotHere, function_of
from bedstone.frameworks.onnx.graph import Array, Graph, Node, load
from bedstone.frameworks.onnx.operators import OPERATORS, Planned, Unplanned
from bedstone.frameworks.onnx.recording import Recording, Unrecorded
from bedstone.frameworks.onnx.reference import ReferenceNode

PROVIDER = "CPUExecutionProvider"  # the name by which callers ask for a CPU
REFERENCE = "onnx reference"
RECORDINGS_MOST = 4  # kept, each with memory for its values
SHAPES_MOST = 64  # remembered as met


@dataclass(frozen=True)
class NodeArg:
    """An input or output: its name, type as onnxruntime spells it, and shape (names for what is
    not fixed, None for what has no name)."""

    name: str
    type: str
    shape: list[int | str | None]


@dataclass
class ModelMetadata:
    """What the file says about itself."""

    producer_name: str
    graph_name: str
    domain: str
    description: str
    version: int
    custom_metadata_map: dict[str, str] = field(default_factory=dict)
    graph_description: str = ""


class Step:
    """One node: the ways to compute it, the quickest first; a way that declines is left out of
    the later calls of this step."""

    def __init__(self, node: Node, graph: Graph) -> None:
        self.node, self.graph = node, graph
        self.planned: Planned | None = None
        self.reason = "no primitive of bedstone"
        maker = None if node.domain else OPERATORS.get(node.op)
        if maker is not None:
            self.planned = maker(node, graph)
        self.glue = None if node.fused else function_of(node)
        self._reference: ReferenceNode | None = None
        self._declined: set[Any] = set()

    def run(self, values: Sequence[Any], outside: Mapping[str, Any]) -> tuple[list[Any], str]:
        """(outputs, what computed them); `outside` are values that subgraphs read."""
        if self.planned is not None:
            key = tuple(None if v is None else (v.shape, v.dtype) for v in values)
            if key not in self._declined:
                try:
                    return self.planned.run(values), self.planned.algorithm
                except (Unplanned, bedstone.BedstoneError) as error:
                    self.reason = str(error).splitlines()[0]
                    self._declined.add(key)
        if self.glue is not None:
            try:
                return self.glue(self.node.attributes, self.graph.opset, values), "numpy"
            except NotHere:
                pass
        return self._by_reference(values, outside), REFERENCE

    def _by_reference(self, values: Sequence[Any], outside: Mapping[str, Any]) -> list[Any]:
        if self._reference is None:
            self._reference = ReferenceNode(self.node, self.graph)
        known = dict(outside) | dict(zip(self.node.proto.input, values))
        if self.node.fused:  # there is no such ONNX node: the reference cannot compute it
            raise bedstone.NotSupported(
                f"{self.node.op} {self.node.outputs[0]}", {"bedstone": self.reason}
            )
        return self._reference.run([known.get(name) for name in self._reference.names])


class InferenceSession:
    """A model ready to run.

    path_or_bytes    a path, the file's bytes, or an onnx.ModelProto
    sess_options, providers, provider_options  accepted for the callers' sake

    Raises InvalidDescriptor for a file that is no model, FileNotFoundError for a missing one.
    """

    def __init__(
        self,
        path_or_bytes: Any,
        sess_options: Any = None,
        providers: Sequence[Any] | None = None,
        provider_options: Any = None,
        **ignored: Any,
    ) -> None:
        del sess_options, providers, provider_options, ignored
        graph = load(path_or_bytes)
        self._graph = optimize(graph, lambda node, values: Step(node, graph).run(values, {})[0])
        self._inputs = [_argument(value) for value in self._graph.inputs]
        self._outputs = [_argument(value) for value in self._graph.outputs]
        self._steps = [Step(node, self._graph) for node in self._graph.nodes]
        self._last_use = _last_uses(self._graph)
        self._lock = threading.Lock()
        self._recordings: dict[Any, Recording] = {}
        self._met: dict[Any, bool] = {}  # shapes of inputs: whether a run can be recorded
        self.ledger = reports.Ledger()

    def run(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        run_options: Any = None,
    ) -> list[Any]:
        """The outputs asked for (None: all), computed from arrays by input name.

        Raises InvalidDescriptor, naming the input, its value and what was expected, for a missing
        or unknown name, another element type, another rank or a size that the model fixes.
        """
        del run_options
        names = [o.name for o in self._outputs]
        wanted = list(output_names) if output_names else names
        for name in wanted:
            if name not in names:
                raise bedstone.InvalidDescriptor("output_names", name, f"one of {names}")
        values: dict[str, Any] = self._check(input_feed)
        constants = self._graph.constants
        with self._lock:  # plans of one session share what a node remembers between calls
            recording = self._recording(values)
            if recording is not None:
                return recording.run(values, wanted, self.ledger)
            for number, step in enumerate(self._steps):
                self._step(number, step, values, constants)
        return [values[name] if name in values else constants[name] for name in wanted]

    def _recording(self, feed: Mapping[str, Any]) -> Recording | None:
        """The recorded run for inputs of these shapes, made when they come a second time."""
        shapes = [(n, v.shape, v.dtype) for n, v in feed.items() if isinstance(v, np.ndarray)]
        key = (bedstone.get_num_threads(), *shapes)
        found = self._recordings.pop(key, None)
        if found is None:
            again = self._met.pop(key, None)
            self._met[key] = True if again is None else again
            if len(self._met) > SHAPES_MOST:
                del self._met[next(iter(self._met))]
            if not again:
                return None
            try:
                found = Recording(self._graph, self._steps, self._last_use, feed)
            except Unrecorded:
                self._met[key] = False
                return None
        self._recordings[key] = found  # the latest one last
        if len(self._recordings) > RECORDINGS_MOST:
            del self._recordings[next(iter(self._recordings))]
        return found

    def _step(
        self, number: int, step: Step, values: dict[str, Any], constants: Mapping[str, Array]
    ) -> None:
        node = step.node
        inputs = [
            None if not name else values[name] if name in values else constants[name]
            for name in node.inputs
        ]
        outside: dict[str, Any] = {}
        if step.planned is None and step.glue is None:
            outside = {**constants, **values} if node.captured else {}
        start = time.perf_counter()
        outputs, algorithm = step.run(inputs, outside)
        reason = step.reason if algorithm == REFERENCE else ""
        self.ledger.add(node.op, algorithm, time.perf_counter() - start, reason)
        for name, value in zip(node.outputs, outputs):
            if name:
                values[name] = value
        for name in self._last_use[number]:
            values.pop(name, None)

    def _check(self, feed: Mapping[str, Any]) -> dict[str, Any]:
        known = {i.name: i for i in self._inputs}
        for name in feed:
            if name not in known and name not in self._graph.constants:
                raise bedstone.InvalidDescriptor("input_feed", name, f"names among {list(known)}")
        found = {}
        for name, argument in known.items():
            if feed.get(name) is None:
                raise bedstone.InvalidDescriptor(name, None, f"an array of {argument.type}")
            value = feed[name]
            if argument.type.startswith("tensor("):
                value = np.asarray(value)
                _check_array(argument, value)
            found[name] = value
        return found

    def get_inputs(self) -> list[NodeArg]:
        """The model's inputs in order."""
        return list(self._inputs)

    def get_outputs(self) -> list[NodeArg]:
        """The model's outputs in order."""
        return list(self._outputs)

    def get_modelmeta(self) -> ModelMetadata:
        """Producer, name, version and the custom metadata of the file."""
        m = self._graph.model
        custom = {p.key: p.value for p in m.metadata_props}
        return ModelMetadata(
            m.producer_name, m.graph.name, m.domain, m.doc_string, m.model_version, custom
        )

    def get_providers(self) -> list[str]:
        """What runs the session: the CPU."""
        return [PROVIDER]

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """No provider has options."""
        return {PROVIDER: {}}

    def get_session_options(self) -> None:
        """There are none."""
        return None

    def get_overridable_initializers(self) -> list[NodeArg]:
        """None: constants are folded when the model is loaded."""
        return []

    def set_providers(self, providers: Sequence[Any] = (), options: Any = None) -> None:
        """Accepted and ignored: the session stays on the CPU."""

    def disable_fallback(self) -> None:
        """Accepted and ignored."""

    def enable_fallback(self) -> None:
        """Accepted and ignored."""

    def report(self) -> reports.Report:
        """What ran where in this session."""
        return reports.report([self.ledger])

    def plans(self) -> list[tuple[str, bedstone.Plan]]:
        """(operator, plan) of every plan made so far."""
        return [
            (step.node.op, plan)
            for step in self._steps
            if step.planned is not None
            for plan in step.planned.plans_made()
        ]

    @property
    def notes(self) -> list[str]:
        """What was folded and fused when the model was loaded."""
        return list(self._graph.notes)


def _argument(value: onnx.ValueInfoProto) -> NodeArg:
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        return NodeArg(value.name, str(kind or "unknown"), [])
    tensor = value.type.tensor_type
    try:
        name = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type)).name
    except (KeyError, TypeError):
        name = "unknown"
    spelled = {"float32": "float", "float64": "double", "object": "string"}.get(name, name)
    shape: list[int | str | None] = []
    for d in tensor.shape.dim:
        shape.append(d.dim_value if d.HasField("dim_value") else (d.dim_param or None))
    return NodeArg(value.name, f"tensor({spelled})", shape)


def _check_array(argument: NodeArg, value: Array) -> None:
    name = value.dtype.name
    spelled = {"float32": "float", "float64": "double", "object": "string"}.get(name, name)
    if value.dtype.kind in "US":
        spelled = "string"
    if argument.type not in (f"tensor({spelled})", "tensor(unknown)"):
        raise bedstone.InvalidDescriptor(argument.name, f"tensor({spelled})", argument.type)
    if not argument.shape:
        return
    fits = len(argument.shape) == value.ndim and all(
        not isinstance(d, int) or d <= 0 or d == size
        for d, size in zip(argument.shape, value.shape)
    )
    if not fits:
        raise bedstone.InvalidDescriptor(argument.name, value.shape, f"shape {argument.shape}")


def _last_uses(graph: Graph) -> list[list[str]]:
    """For every node, the values that nobody reads after it."""
    kept = {output.name for output in graph.outputs} | set(graph.constants)
    seen: set[str] = set()
    uses: list[list[str]] = []
    for node in reversed(graph.nodes):
        here = []
        for name in dict.fromkeys((*node.inputs, *node.captured, *node.outputs)):
            if name and name not in seen and name not in kept:
                here.append(name)
                seen.add(name)
        uses.append(here)
    return uses[::-1]
