"""Find: measure every candidate on the device, with the caller's workspace limit.

Candidates are checked before they are timed: each must agree with the first one's result, or it
is struck out with the reason. What was measured is remembered on disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bedstone.plan import cache, log
from bedstone.plan.algorithm import Algorithm
from bedstone.plan.device import Device
from bedstone.plan.runtime import Runtime, runtime_of
from bedstone.plan.select import survey
from bedstone.spec.problem import Operand, Problem
from bedstone.spec.tensor import TensorDesc

MEASURE_SECONDS = 0.05  # per candidate, after one warm-up call
# Two right results of the same sum differ by rounding only: this many epsilons of the dtype,
# relative to the largest output, is far above that and far below any wrong index.
AGREEMENT_EPSILONS = 2.0**10
SLOW_REFERENCE_FLOPS = 10**7  # the reference is timed only below this


@dataclass(frozen=True)
class Measurement:
    """One candidate's result: seconds a call, workspace in bytes; or the reason it has none."""

    algorithm: str
    seconds: float | None
    workspace: int
    reason: str | None = None


def find(
    problem: Problem, device: Device, workspace_limit: int | None = 0, fresh: bool = False
) -> list[Measurement]:
    """Measurements of every candidate, quickest first, those without one last. Taken from the disk
    cache when the same candidates were measured before, unless `fresh`."""
    found = survey(problem, device, workspace_limit)
    names = sorted(a.name for a in found.accepted)
    record_key = cache.key(problem, device, f"workspace {workspace_limit}", *names)
    if not fresh:
        record = cache.read("find", record_key)
        if record is not None:
            try:
                return [Measurement(*row) for row in record["measurements"]]
            except (KeyError, TypeError):
                log.debug("the record of %s cannot be read; measuring again", problem)
    rows = _measure(problem, device, found.accepted)
    rows += [Measurement(name, None, 0, reason) for name, reason in found.reasons.items()]
    cache.write(
        "find",
        record_key,
        {"measurements": [[m.algorithm, m.seconds, m.workspace, m.reason] for m in rows]},
    )
    return rows


def _measure(
    problem: Problem, device: Device, algorithms: tuple[Algorithm, ...]
) -> list[Measurement]:
    runtime = runtime_of(device.kind)
    trial = Trial(problem, runtime)
    rows: list[Measurement] = []
    expected: list[np.ndarray[Any, Any]] | None = None
    for algorithm in algorithms:
        needed = algorithm.workspace(problem, device)
        if algorithm.backend == "reference" and rows and problem.flops > SLOW_REFERENCE_FLOPS:
            rows.append(Measurement(algorithm.name, None, needed, "the reference is not timed"))
            continue
        kernel = algorithm.build(problem, device)
        workspace = runtime.empty(needed)
        address = runtime.pointer(workspace)
        kernel(trial.pointers, address, 1.0, 0.0, 0)
        result = trial.outputs()
        expected = expected or result
        if not _agree(result, expected, problem):
            rows.append(Measurement(algorithm.name, None, needed, "its result is wrong here"))
            log.info("%s gives a wrong result for %s and was struck out", algorithm.name, problem)
            continue

        def call(kernel: Any = kernel, address: int = address) -> None:
            kernel(trial.pointers, address, 1.0, 0.0, 0)

        rows.append(Measurement(algorithm.name, runtime.time(call, MEASURE_SECONDS), needed))
    return sorted(rows, key=lambda m: (m.seconds is None, m.seconds or 0.0))


def _agree(
    result: list[np.ndarray[Any, Any]], expected: list[np.ndarray[Any, Any]], problem: Problem
) -> bool:
    for got, want in zip(result, expected):
        if got.dtype.kind in "iub":
            if not np.array_equal(got, want):
                return False
            continue
        scale = max(float(np.max(np.abs(want), initial=0.0)), 1e-30)
        tolerance = AGREEMENT_EPSILONS * problem.dtype.epsilon * scale
        if not bool(np.all(np.abs(got - want) <= tolerance)):
            return False
    return True


class Trial:
    """Random operands of a problem in a device's memory."""

    def __init__(self, problem: Problem, runtime: Runtime, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self._runtime = runtime
        self._operands = problem.operands
        self._buffers = [self._fill(operand, random) for operand in self._operands]
        self.pointers = [
            runtime.pointer(buffer) - operand.desc.offset_range()[0] * operand.desc.dtype.itemsize
            for operand, buffer in zip(self._operands, self._buffers)
        ]

    def _fill(self, operand: Operand, random: np.random.Generator) -> Any:
        low, high = operand.desc.offset_range()
        values = random.uniform(-1, 1, max(high - low + 1, 1))
        return self._runtime.upload(values.astype(operand.desc.dtype.numpy))

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """The operands as arrays over the very buffers (copies, off the host)."""
        pairs = zip(self._operands, self._buffers)
        return {o.name: view(self._runtime.download(b), o.desc) for o, b in pairs}

    def outputs(self) -> list[np.ndarray[Any, Any]]:
        """The outputs' elements on the host, as float64 (integers as they are)."""
        found = []
        for operand, buffer in zip(self._operands, self._buffers):
            if operand.is_output:
                raw = self._runtime.download(buffer)
                values = view(raw, operand.desc)
                found.append(
                    values.copy() if values.dtype.kind in "iub" else values.astype(np.float64)
                )
        return found


def view(raw: np.ndarray[Any, Any], desc: TensorDesc) -> np.ndarray[Any, Any]:
    """The tensor that lies in `raw`, bytes that start at its lowest element."""
    itemsize = desc.dtype.itemsize
    flat = raw[: raw.size // itemsize * itemsize].view(desc.dtype.numpy)
    if desc.size == 0:
        return np.empty(desc.dims, flat.dtype)
    origin = -desc.offset_range()[0]
    return np.lib.stride_tricks.as_strided(
        flat[origin:], desc.dims, tuple(s * itemsize for s in desc.strides), writeable=True
    )
