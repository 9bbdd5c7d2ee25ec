"""Plan: a problem with its algorithm chosen and its kernel compiled, ready to be called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bedstone.arrays import ArrayRef, as_array_ref
from bedstone.plan.algorithm import Kernel, NativeEntry
from bedstone.plan.device import Device
from bedstone.plan.select import Choice
from bedstone.spec.errors import InvalidDescriptor
from bedstone.spec.problem import Operand, Problem
from bedstone.spec.tensor import TensorDesc

# Work that np.shares_memory may spend on deciding whether two strided tensors overlap.
OVERLAP_WORK: Any = 100_000  # (NumPy's annotation knows only its two special values)


class Plan:
    """A compiled answer to a problem.

    `plan(*pointers, ...)` runs it on raw addresses, unchecked and without allocating;
    `plan.execute(*arrays, ...)` checks the arrays first. All memory is the caller's.
    """

    def __init__(self, problem: Problem, device: Device, choice: Choice, kernel: Kernel) -> None:
        self.problem = problem
        self.device = device
        self.choice = choice
        self.kernel = kernel
        self.algorithm = choice.algorithm.name
        self.workspace_size = choice.workspace
        self._operands = problem.operands

    def __call__(
        self,
        *pointers: int,
        workspace: int = 0,
        alpha: float = 1.0,
        beta: float = 0.0,
        stream: int = 0,
    ) -> None:
        """Run on the addresses of element [0, ..., 0] of each operand, in the order of
        `problem.operands` (inputs first). `workspace` is the address of `workspace_size` bytes.
        Nothing is checked: a wrong address is undefined behaviour, as in any BLAS."""
        self.kernel(pointers, workspace, alpha, beta, stream)

    @property
    def native_entry(self) -> NativeEntry | None:
        """The machine code of a CPU plan, to be called from other compiled code; None for plans
        that are run by Python or on a GPU."""
        return getattr(self.kernel, "native", None)

    def execute(
        self,
        *arrays: object,
        workspace: object = None,
        alpha: float = 1.0,
        beta: float = 0.0,
        **named: object,
    ) -> None:
        """Check and run. Arrays (NumPy, or anything with DLPack) are given in the order of
        `problem.operands` or by operand name; outputs are written in place.

        Raises InvalidDescriptor for a missing or unknown operand, dims, strides or dtype other
        than planned, another device, a read-only output, an output that overlaps an input (other
        than exactly in place, where the primitive allows it), or a workspace too small.
        """
        refs = self._match(arrays, named)
        for operand, ref in zip(self._operands, refs):
            self._check_operand(operand, ref)
        self._check_overlaps(refs)
        address = self._check_workspace(workspace)
        self.kernel(
            [ref.pointer for ref in refs],
            address,
            _number("alpha", alpha),
            _number("beta", beta),
            refs[-1].stream,
        )

    def _match(self, arrays: Sequence[object], named: Mapping[str, object]) -> list[ArrayRef]:
        names = [operand.name for operand in self._operands]
        given = dict(zip(names, arrays))
        if len(arrays) > len(names):
            raise InvalidDescriptor("arrays", len(arrays), f"{len(names)} arrays: {names}")
        for name, array in named.items():
            if name not in names or name in given:
                raise InvalidDescriptor(name, type(array).__name__, f"each of {names} once")
            given[name] = array
        for name in names:
            if given.get(name) is None:
                raise InvalidDescriptor(name, None, f"an array for each of {names}")
        return [as_array_ref(given[name], name) for name in names]

    def _check_operand(self, operand: Operand, ref: ArrayRef) -> None:
        if (ref.device_kind, ref.device_index) != (self.device.kind, self.device.index):
            raise InvalidDescriptor(
                operand.name, f"{ref.device_kind}:{ref.device_index}", f"memory of {self.device}"
            )
        if not same_elements(ref.desc, operand.desc):
            raise InvalidDescriptor(operand.name, str(ref.desc), f"the planned {operand.desc}")
        if operand.is_output and ref.readonly:
            raise InvalidDescriptor(operand.name, "a read-only array", "memory that can be written")

    def _check_overlaps(self, refs: Sequence[ArrayRef]) -> None:
        for i, (out, out_ref) in enumerate(zip(self._operands, refs)):
            if not out.is_output:
                continue
            for j, (other, ref) in enumerate(zip(self._operands, refs)):
                if j == i or (other.is_output and j < i):
                    continue
                in_place = (
                    other.name in self.problem.in_place
                    and ref.pointer == out_ref.pointer
                    and same_elements(ref.desc, out_ref.desc)
                )
                if not in_place and overlap(out_ref, ref):
                    raise InvalidDescriptor(
                        out.name, f"memory that overlaps {other.name}", "memory of its own"
                    )

    def _check_workspace(self, workspace: object) -> int:
        if self.workspace_size == 0:
            return 0
        if workspace is None:
            raise InvalidDescriptor("workspace", None, f"{self.workspace_size} bytes")
        ref = as_array_ref(workspace, "workspace")
        if ref.desc.nbytes < self.workspace_size or not ref.desc.is_packed():
            raise InvalidDescriptor(
                "workspace", f"{ref.desc.nbytes} bytes", f"{self.workspace_size} contiguous bytes"
            )
        if ref.device_kind != self.device.kind or ref.readonly:
            raise InvalidDescriptor("workspace", ref.device_kind, f"writable {self.device} memory")
        return ref.pointer

    def explain(self) -> str:
        """Which algorithm runs, why, with what workspace, and why each other one does not."""
        choice, problem = self.choice, self.problem
        lines = [f"{problem}", f"  on {self.device} ({self.device.name})"]
        lines.append(f"  runs {self.algorithm}: {choice.why}")
        description = getattr(self.kernel, "description", "")
        if description:
            lines.append(f"  {description}")
        seconds = choice.estimates.get(self.algorithm)
        estimate = f", estimated {seconds * 1e3:.3g} ms" if seconds is not None else ""
        lines.append(
            f"  {problem.flops / 1e9:.4g} GFLOP, at least {problem.bytes / 2**20:.4g} MiB moved, "
            f"workspace {self.workspace_size} bytes{estimate}"
        )
        for name, reason in choice.reasons.items():
            lines.append(f"  not {name}: {reason}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Plan({str(self.problem)!r}, algorithm={self.algorithm!r}, device='{self.device}')"


def _number(argument: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise InvalidDescriptor(argument, value, "a number") from None


def same_elements(a: TensorDesc, b: TensorDesc) -> bool:
    """Equal dims and dtype, and strides equal wherever they matter."""
    return (
        a.dims == b.dims
        and a.dtype is b.dtype
        and (a.size == 0 or all(d == 1 or s == t for d, s, t in zip(a.dims, a.strides, b.strides)))
    )


def overlap(a: ArrayRef, b: ArrayRef) -> bool:
    """True if two tensors share a byte (decided exactly unless that is too hard: then True)."""
    if a.desc.size == 0 or b.desc.size == 0 or a.device_kind != b.device_kind:
        return False
    first, second = _byte_range(a), _byte_range(b)
    if first[1] <= second[0] or second[1] <= first[0]:
        return False
    try:
        return bool(np.shares_memory(_shadow(a), _shadow(b), max_work=OVERLAP_WORK))
    except Exception:  # numpy raises TooHardError from a place that moved between versions
        return True


def _byte_range(ref: ArrayRef) -> tuple[int, int]:
    low, high = ref.desc.offset_range()
    size = ref.desc.dtype.itemsize
    return ref.pointer + low * size, ref.pointer + (high + 1) * size


class _Shadow:
    """Lends NumPy an address to reason about; the memory is never touched."""

    def __init__(self, ref: ArrayRef) -> None:
        size = ref.desc.dtype.itemsize
        self.__array_interface__ = {
            "version": 3,
            "data": (ref.pointer, True),
            "shape": ref.desc.dims,
            "strides": tuple(s * size for s in ref.desc.strides),
            "typestr": f"|V{size}",
        }


def _shadow(ref: ArrayRef) -> np.ndarray[tuple[int, ...], np.dtype[np.void]]:
    return np.asarray(_Shadow(ref))
