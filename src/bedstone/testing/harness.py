"""Runs one case of a problem on one algorithm and says what is wrong with it, if anything.

A case is run through the plan's raw pointers, in guarded memory, against the float64 reference:
every element within its bound, NaN and infinities where the reference has them, guards, gaps and
inputs untouched, outputs not read when beta is 0, and a second run equal to the first bit by bit.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bedstone.plan.config import config
from bedstone.plan.handle import Handle
from bedstone.plan.plan import Plan, same_elements
from bedstone.plan.runtime import Runtime, runtime_of
from bedstone.spec.dtypes import DType
from bedstone.spec.problem import Array, Problem, as_float64
from bedstone.spec.tensor import TensorDesc
from bedstone.testing import fills, problems, tolerances
from bedstone.testing.memory import FencedMemory, Image, elements_of, place

# What is returned for a result without elements, whatever algorithm was asked for.
NOTHING = "plan:nothing"


class Mismatch(Exception):
    """A case that failed; `check` says at which check: build, algorithm,
    error, values, guards, inputs or repeat."""

    def __init__(self, case: Case, check: str, message: str) -> None:
        super().__init__(f"{check}: {message}\n  {case}")
        self.case = case
        self.check = check


@dataclass(frozen=True)
class Case:
    """A problem with the algorithm, values, factors and memory to run it in.

    alias    the input whose very memory the output is, where the primitive allows it in place
    threads  CPU threads; 0 for the setting in force
    """

    problem: Problem
    algorithm: str
    fill: str = "integers"
    alpha: float = 1.0
    beta: float = 0.0
    placement: str = "middle"
    alias: str = ""
    threads: int = 0

    @property
    def seed(self) -> int:
        """Of the values: any number that is the same every time."""
        return zlib.crc32(f"{self.problem} {self.fill}".encode())

    def __str__(self) -> str:
        line = f"--problem '{self.problem}' --algorithm {self.algorithm} --fill {self.fill}"
        line += f" --alpha {self.alpha:g} --beta {self.beta:g} --placement {self.placement}"
        line += f" --alias {self.alias}" if self.alias else ""
        return line + (f" --threads {self.threads}" if self.threads else "")


def run_case(case: Case, handle: Handle, runtime: Runtime | None = None) -> str:
    """Run it; returns the name of the algorithm that ran. Raises Mismatch.

    `runtime` is where the memory comes from; by default fenced host memory, or the device's own.
    """
    with config(**({"num_threads": case.threads} if case.threads else {})):
        try:
            plan = handle.plan(case.problem, case.algorithm, workspace_limit=None)
        except Exception as error:  # whatever it is, the suite goes on
            raise Mismatch(case, "build", f"{type(error).__name__}: {error}") from error
        if plan.algorithm not in (case.algorithm, NOTHING) and "*" not in case.algorithm:
            raise Mismatch(case, "algorithm", f"{plan.algorithm} was planned")
        try:
            Trial(case, plan, runtime or memory_of(handle.device.kind)).check()
        except Mismatch:
            raise
        except Exception as error:
            raise Mismatch(case, "error", f"{type(error).__name__}: {error}") from error
    return plan.algorithm


def memory_of(kind: str) -> Runtime:
    """Fenced memory on the host, else the device's runtime."""
    return FencedMemory() if kind == "cpu" else runtime_of(kind)


class Trial:
    """The operands of a case in memory, and what must come out."""

    def __init__(self, case: Case, plan: Plan, runtime: Runtime) -> None:
        self.case, self.plan, self.runtime = case, plan, runtime
        self.problem = case.problem
        values = fills.operands(case.problem, case.fill, case.seed)
        self.images = {}
        for number, operand in enumerate(case.problem.operands):
            poisoned = operand.role == "out" and case.beta == 0.0
            self.images[operand.name] = Image.of(
                operand.desc,
                case.placement,
                None if poisoned else values[operand.name],
                shift=(case.seed + number) % 16,
            )
        if case.alias:  # the output starts with the input's values
            self.images[self._aliased] = self.images[case.alias]
        # Read back, since elements that share memory hold what was written last.
        self.arrays: dict[str, Array] = {n: i.elements.copy() for n, i in self.images.items()}

    @property
    def _aliased(self) -> str:
        return self.problem.outputs[0].name

    def check(self) -> None:
        """Run twice and compare. Raises Mismatch."""
        first = self._run()
        for operand in self.problem.operands:
            image, after = self.images[operand.name], first[operand.name]
            if operand.is_output or operand.name == self.case.alias:
                if not image.guards_unchanged(after):
                    raise self._mismatch("guards", f"{operand.name} was written outside its dims")
            elif not np.array_equal(after, image.data):
                raise self._mismatch("inputs", f"the input {operand.name} was changed")
        self._compare(first)
        second = self._run()
        for name, data in second.items():
            if not np.array_equal(data, first[name]) and self.problem.deterministic:
                raise self._mismatch("repeat", f"{name} differs in a second run")

    def _run(self) -> dict[str, Any]:
        """One call on fresh copies; the bytes of every operand afterwards."""
        buffers: dict[str, Any] = {}
        for name, image in self.images.items():
            aliased = bool(self.case.alias) and name == self._aliased
            buffers[name] = None if aliased else place(self.runtime, image)
        if self.case.alias:
            buffers[self._aliased] = buffers[self.case.alias]
        pointers = [self.runtime.pointer(buffers[n]) + i.origin for n, i in self.images.items()]
        scratch = TensorDesc.packed((max(self.plan.workspace_size, 1),), DType.uint8)
        workspace = Image.of(scratch, self.case.placement, None)
        lent = place(self.runtime, workspace)
        address = self.runtime.pointer(lent) + workspace.origin
        self.plan(*pointers, workspace=address, alpha=self.case.alpha, beta=self.case.beta)
        if self.plan.workspace_size and not workspace.guards_unchanged(self.runtime.download(lent)):
            raise self._mismatch("guards", "the workspace was overrun")
        return {name: self.runtime.download(buffer) for name, buffer in buffers.items()}

    def _compare(self, after: Mapping[str, Any]) -> None:
        case = self.case
        unread = {o.name for o in self.problem.operands if o.role == "out" and case.beta == 0.0}
        before = {n: a for n, a in self.arrays.items() if n not in unread}
        expected = self.problem.reference(before, case.alpha, case.beta)
        scale = self.plan.choice.algorithm.error_scale
        bounds = tolerances.bounds(self.problem, before, expected, case.alpha, case.beta, scale)
        for operand in self.problem.outputs:
            image = self.images[operand.name]
            got = elements_of(after[operand.name], operand.desc, image.before)
            want = expected[operand.name]
            if want.dtype.kind in "iub":
                wrong = got.astype(np.int64) != want.astype(np.int64)
            else:
                exact = self._is_exact()
                bound = bounds[operand.name]
                wrong = differs(as_float64(got), want, bound, operand.desc.dtype, exact)
            if wrong.any():
                raise self._mismatch("values", describe(operand.name, wrong, got, want, bounds))

    def _is_exact(self) -> bool:
        """Small integers through sums of products: no rounding before the store."""
        exact = problems.hook(self.problem.primitive, "exact")
        return (
            self.case.fill == "integers"
            and self.plan.choice.algorithm.exact
            and exact is not None
            and bool(exact(self.problem))
        )

    def _mismatch(self, check: str, message: str) -> Mismatch:
        return Mismatch(self.case, check, f"{self.plan.algorithm}: {message}")


def differs(got: Array, want: Array, bound: Array, dtype: DType, exact: bool) -> Array:
    """Where a result is wrong: outside its bound, or not NaN or infinite as the reference is."""
    with np.errstate(all="ignore"):
        stored = want.astype(dtype.numpy).astype(np.float64)
        right: Array = (got == stored) | (np.isnan(got) & np.isnan(want))
        if exact:
            return ~right
        right |= (np.abs(got - want) <= bound) & np.isfinite(want)
        # Rounding may carry a result over the edge to infinity, or not quite.
        edge = np.isinf(got) & (np.sign(got) == np.sign(want))
        right |= edge & (np.abs(want) + bound >= tolerances.largest(dtype))
        # Not compared: the order of summation decides.
        right |= np.isinf(bound) & np.isfinite(want)
    return ~right


def describe(name: str, wrong: Array, got: Array, want: Array, bounds: Mapping[str, Array]) -> str:
    """How many elements are wrong and the first of them."""
    where = tuple(int(i) for i in np.argwhere(wrong)[0])
    text = f"{name}{list(where)} is {got[where]}, expected {want[where]}"
    if name in bounds:
        text += f" within {bounds[name][where]:.3g}"
    return f"{text}; {int(wrong.sum())} of {wrong.size} elements are wrong"


def in_place_names(problem: Problem) -> tuple[str, ...]:
    """Inputs whose memory the first output may be: the ones with an equal descriptor."""
    out = problem.outputs[0].desc
    return tuple(
        o.name for o in problem.inputs if o.name in problem.in_place and same_elements(o.desc, out)
    )
