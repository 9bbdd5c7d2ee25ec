"""A session's run with inputs of known shapes, recorded: calls on memory that stays where it is.

Small networks are many calls of a few microseconds, and looking each one up costs as much as the
call. What does not depend on the inputs' numbers is therefore done once: plans found, addresses
taken, shapes computed, views made, results of values that only a shape decides kept. What is left
is a list of calls. Inputs are copied in and outputs copied out, so nothing that the caller holds is
read later or written again.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import bedstone
from bedstone.arrays import ArrayRef
from bedstone.frameworks.onnx.graph import Array, Graph, Node
from bedstone.frameworks.onnx.report import Ledger

if TYPE_CHECKING:
    from bedstone.frameworks.onnx.session import Step

Call = Callable[[], Any]

MEMORY_MAX = 256 << 20  # bytes of values kept: in networks of more, looking up costs nothing
PACKED_MAX = 256 << 20  # bytes of packed weights kept; the rest are packed in each call
ALIGNMENT = 64  # of a value in memory: a cache line
# A call of less runs on one thread: about what it takes to start and join another.
SMALL_SECONDS = 15e-6
SLOW_FLOPS, SLOW_BYTES = 20e9, 10e9  # a second, of a thread on small problems

IN_PLACE = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply}
# The shape of the output follows from those of all inputs; of others, only of the first input's
# shape and the values of the rest.
SHAPED_BY_ALL = {"Add", "Sub", "Mul", "Div", "Pow", "MatMul", "Gemm", "Concat", "Gather"}


class Unrecorded(Exception):
    """The run cannot be recorded: some step depends on the numbers, or is the reference's."""


def bound(
    plan: bedstone.Plan | bedstone.PreparedPlan,
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    beta: float = 0.0,
) -> Call:
    """The plan's call on contiguous arrays that stay where they are."""
    pointers = [a.__array_interface__["data"][0] for a in (*inputs, *outputs)]
    packed = plan.packed if isinstance(plan, bedstone.PreparedPlan) else 0
    entry = plan.native_entry
    if entry is None:
        return functools.partial(plan.kernel, pointers, packed, 1.0, beta, 0)
    words, numbers = [ctypes.c_int64] * (entry.pointers + 1), [ctypes.c_double] * 2
    function = ctypes.CFUNCTYPE(None, *words, *numbers, ctypes.c_int64)(entry.address)
    problem = plan.problem
    small = problem.flops / SLOW_FLOPS + problem.bytes / SLOW_BYTES < SMALL_SECONDS
    threads = 1 if small else bedstone.get_num_threads()
    arguments = [
        *map(ctypes.c_int64, (*pointers, packed)),
        ctypes.c_double(1.0),
        ctypes.c_double(beta),
    ]
    call = functools.partial(function, *arguments, ctypes.c_int64(threads))
    call.owner = plan  # type: ignore[attr-defined]
    return call


class Recording:
    """One run, ready to be repeated on inputs of the same shapes and types.

    Raises Unrecorded where that would not be the same computation.
    """

    def __init__(
        self,
        graph: Graph,
        steps: Sequence[Step],
        last_use: Sequence[Sequence[str]],
        feed: Mapping[str, Any],
    ) -> None:
        self._constants = graph.constants
        self._values: dict[str, Array] = {}
        self._static: set[str] = set()
        self._calls: list[Call] = []
        self._group_of: list[int] = []  # of each call: the number of its line in the report
        self._groups: Counter[tuple[str, str]] = Counter()
        self._kept: list[Array] = []  # whatever a call has the address of
        self._memory = _Memory()
        self._packed_left = PACKED_MAX
        for name, value in feed.items():
            if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiub":
                raise Unrecorded
            self._values[name] = self._memory.array(name, value)
        self._inputs = {name: self._values[name] for name in feed}
        for number, step in enumerate(steps):
            self._record(step)
            for name in last_use[number]:
                self._memory.release(name)
        self._lines = list(self._groups)

    def run(self, feed: Mapping[str, Any], wanted: Sequence[str], ledger: Ledger) -> list[Array]:
        """The outputs asked for, in memory of their own."""
        for name, place in self._inputs.items():
            np.copyto(place, feed[name])
        clock = time.perf_counter
        seconds = [0.0] * len(self._lines)
        before = clock()
        for call, group in zip(self._calls, self._group_of):
            call()
            now = clock()
            seconds[group] += now - before
            before = now
        for (operator, algorithm), spent in zip(self._lines, seconds):
            calls = self._groups[operator, algorithm]
            ledger.add(operator, algorithm, spent, calls=calls)
        return [self._output(name) for name in wanted]

    def _output(self, name: str) -> Array:
        value = self._values.get(name)
        return self._constants[name] if value is None else value.copy()

    def _record(self, step: Step) -> None:
        node = step.node
        if node.captured or not node.inputs:
            raise Unrecorded
        inputs = [None if not name else self._value(name) for name in node.inputs]
        known = [not n or n in self._static or n in self._constants for n in node.inputs]
        outputs, algorithm = step.run(inputs, {})
        line = (node.op, algorithm)
        self._groups[line] += 1
        group = list(self._groups).index(line)
        if all(known) or (node.op == "Shape" and not node.domain):
            for name, value in zip(node.outputs, outputs):
                self._values[name] = value
                self._static.add(name)
            return
        if any(not isinstance(o, np.ndarray) for o in outputs):
            raise Unrecorded
        if step.planned is not None and algorithm == step.planned.algorithm:
            places = self._places(node, outputs)
            inputs = [i if i is None else self._contiguous(i, group) for i in inputs]
            plan, weights = step.planned.plan_of(inputs), step.planned.weights
            if weights is not None and known[weights]:
                plan = self._prepared(plan, inputs[weights])
            calls = step.planned.bind(plan, inputs, places)
            self._kept += [i for i in inputs if i is not None] + places
        elif algorithm == "numpy" and step.glue is not None:
            if node.op not in SHAPED_BY_ALL and not all(known[1:]):
                raise Unrecorded
            if self._view(node, inputs, outputs):
                return
            places = self._places(node, outputs)
            calls = [_glue_call(step, inputs, places)]
        else:
            raise Unrecorded
        self._add(group, *calls)

    def _prepared(
        self, plan: bedstone.Plan, weights: Array
    ) -> bedstone.Plan | bedstone.PreparedPlan:
        """The plan with weights that stay as they are, packed here if there is room."""
        if plan.prepared_size > self._packed_left:
            return plan
        self._packed_left -= plan.prepared_size
        address = weights.__array_interface__["data"][0]
        return plan.prepare(ArrayRef(address, plan.problem.w, owner=weights))  # type: ignore[attr-defined]

    def _value(self, name: str) -> Array:
        return self._values[name] if name in self._values else self._constants[name]

    def _add(self, group: int, *calls: Call) -> None:
        self._calls += calls
        self._group_of += [group] * len(calls)

    def _places(self, node: Node, outputs: Sequence[Array]) -> list[Array]:
        """Memory for the outputs of a step, their values in it."""
        places = []
        for name, value in zip(node.outputs, outputs):
            places.append(self._memory.array(name, value))
            if name:
                self._values[name] = places[-1]
        return places

    def _view(self, node: Node, inputs: Sequence[Any], outputs: Sequence[Array]) -> bool:
        """Whether the outputs are the first input's memory seen otherwise: nothing to call."""
        source = inputs[0]
        if source is None or not all(np.may_share_memory(o, source) for o in outputs):
            return False
        for name, value in zip(node.outputs, outputs):
            self._values[name] = value
            self._memory.share(name, node.inputs[0])
        return True

    def _contiguous(self, value: Array, group: int) -> Array:
        if value.flags.c_contiguous:
            return value
        copy = self._memory.array("", value)
        self._add(group, functools.partial(np.copyto, copy, value))
        return copy


def _glue_call(step: Step, inputs: Sequence[Any], places: Sequence[Array]) -> Call:
    """A NumPy form that writes to its place."""
    node = step.node
    function = IN_PLACE.get(node.op)
    if function is not None:
        return functools.partial(function, *inputs, places[0])
    if node.op == "Concat":
        axis = node.attributes.get("axis", 1)
        return functools.partial(np.concatenate, list(inputs), axis, places[0])
    glue, attributes, opset = step.glue, node.attributes, step.graph.opset

    def call() -> None:
        for place, value in zip(places, glue(attributes, opset, inputs)):  # type: ignore[misc]
            np.copyto(place, value)

    return call


class _Memory:
    """Memory for the values of a run: what nobody reads any more is given to later values."""

    def __init__(self) -> None:
        self._free: dict[int, list[Array]] = {}
        self._of: dict[str, tuple[Array, set[str]]] = {}
        self._bytes = 0

    def array(self, name: str, value: Array) -> Array:
        """A contiguous copy of a value, by the name under which it is released ("": never)."""
        free = self._free.get(value.nbytes)
        raw = free.pop() if free else self._new(value.nbytes)
        if name:
            self._of[name] = raw, {name}
        found = raw[: value.nbytes].view(value.dtype).reshape(value.shape)
        np.copyto(found, value)
        return found

    def _new(self, size: int) -> Array:
        self._bytes += size
        if self._bytes > MEMORY_MAX:
            raise Unrecorded
        raw = np.empty(size + ALIGNMENT, np.uint8)
        return raw[-raw.__array_interface__["data"][0] % ALIGNMENT :][: max(size, 1)]

    def share(self, name: str, other: str) -> None:
        """A value lies in another one's memory (or in a constant's)."""
        if other in self._of:
            self._of[name] = self._of[other]
            self._of[name][1].add(name)

    def release(self, name: str) -> None:
        """Nobody reads the value any more."""
        if name not in self._of:
            return
        raw, names = self._of.pop(name)
        names.discard(name)
        if not names:
            self._free.setdefault(len(raw), []).append(raw)
