"""Plan: a problem with its algorithm chosen and its kernel compiled, ready to be called.

PreparedPlan: the same for one filter, packed or transformed once for all calls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from bedstone.arrays import ArrayRef, as_array_ref
from bedstone.plan.algorithm import Kernel, NativeEntry, Preparation
from bedstone.plan.device import Device
from bedstone.plan.select import Choice
from bedstone.spec.errors import InvalidDescriptor
from bedstone.spec.problem import Operand, Problem
from bedstone.spec.tensor import TensorDesc

# Work that np.shares_memory may spend on deciding whether two strided tensors overlap.
OVERLAP_WORK: Any = 100_000  # (NumPy's annotation knows only its two special values)
FILTER = "w"  # the operand that may stay the same over many calls
ALIGNMENT = 64  # bytes: of memory for a packed filter, a cache line


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
        refs = self._checked(arrays, named)
        address = self._check_workspace(workspace)
        self.kernel(
            [ref.pointer for ref in refs],
            address,
            _number("alpha", alpha),
            _number("beta", beta),
            refs[-1].stream,
        )

    @property
    def prepared_size(self) -> int:
        """Bytes that the packed filter of a prepared plan takes; 0 where the kernel reads the
        filter as it lies. (A first look compiles the kernel's two halves.)"""
        return self._preparation.nbytes if self._preparation else 0

    @cached_property
    def _preparation(self) -> Preparation | None:
        find = getattr(self.kernel, "preparation", None)
        return find() if find else None

    def prepare(self, w: object, memory: object = None) -> PreparedPlan:
        """The plan for calls that all use this filter: it is packed or transformed here, once.

        w       the filter as planned. It must stay as it is while the prepared plan is in use;
                after a change, prepare again
        memory  an array of `prepared_size` contiguous bytes or more, for the packed filter, that
                nobody else writes to; None: the prepared plan has its own

        Results are bit for bit those of the plan itself. Where the kernel reads the filter as it
        lies, nothing is packed and calls take as long as before.

        Raises InvalidDescriptor for a problem that has no filter among its inputs
        (backward_filter, pooling, ...), a filter other than planned, or memory that will not do.
        """
        place = next((i for i, o in enumerate(self._operands) if o.name == FILTER), None)
        if place is None or self._operands[place].is_output:
            raise InvalidDescriptor(
                "problem", str(self.problem), f"one with the filter {FILTER!r} among its inputs"
            )
        ref = as_array_ref(w, FILTER)
        self._check_operand(self._operands[place], ref)
        room = None
        if self._preparation:
            memory = _aligned(self.prepared_size) if memory is None else memory
            room = self._check_memory("memory", memory, self.prepared_size)
            if overlap(room, ref):
                raise InvalidDescriptor("memory", "memory that overlaps w", "memory of its own")
            self._preparation.pack(ref.pointer, room.pointer)
        return PreparedPlan(self, place, ref, self._preparation, room)

    def _checked(
        self, arrays: Sequence[object], named: Mapping[str, object], fixed: ArrayRef | None = None
    ) -> list[ArrayRef]:
        """The operands of a call, checked; `fixed` is a prepared plan's filter."""
        refs = self._match(arrays, named, fixed)
        for operand, ref in zip(self._operands, refs):
            if ref is not fixed:
                self._check_operand(operand, ref)
        self._check_overlaps(refs)
        return refs

    def _match(
        self, arrays: Sequence[object], named: Mapping[str, object], fixed: ArrayRef | None
    ) -> list[ArrayRef]:
        every = [operand.name for operand in self._operands]
        names = [name for name in every if fixed is None or name != FILTER]
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
        refs = {name: as_array_ref(given[name], name) for name in names}
        return [refs[name] if fixed is None or name != FILTER else fixed for name in every]

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
        return self._check_memory("workspace", workspace, self.workspace_size).pointer

    def _check_memory(self, argument: str, memory: object, size: int) -> ArrayRef:
        ref = as_array_ref(memory, argument)
        if ref.desc.nbytes < size or not ref.desc.is_packed():
            raise InvalidDescriptor(
                argument, f"{ref.desc.nbytes} bytes", f"{size} contiguous bytes"
            )
        if ref.device_kind != self.device.kind or ref.readonly:
            raise InvalidDescriptor(argument, ref.device_kind, f"writable {self.device} memory")
        return ref

    def explain(self) -> str:
        """Which algorithm runs, why, with what workspace, and why each other one does not."""
        choice, problem = self.choice, self.problem
        lines = [f"{problem}", f"  on {self.device} ({self.device.name})"]
        lines.append(f"  runs {self.algorithm}: {choice.why}")
        description = getattr(self.kernel, "description", "")
        if description:
            lines.append(f"  {description}")
        seconds = choice.estimates.get(self.algorithm, math.inf)
        estimate = f", estimated {seconds * 1e3:.3g} ms" if math.isfinite(seconds) else ""
        lines.append(
            f"  {problem.flops / 1e9:.4g} GFLOP, at least {problem.bytes / 2**20:.4g} MiB moved, "
            f"workspace {self.workspace_size} bytes{estimate}"
        )
        for name, reason in choice.reasons.items():
            lines.append(f"  not {name}: {reason}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Plan({str(self.problem)!r}, algorithm={self.algorithm!r}, device='{self.device}')"


class PreparedPlan:
    """A plan with its filter: `plan.prepare(w)`. Called as the plan is, without w.

    plan            the plan that it was made from
    memory          the packed filter, as an array reference; None where nothing is packed
    workspace_size  bytes of workspace that a call needs
    kernel          runs on the addresses of all operands of the problem, w included, with
                    `packed` as its workspace: for callers that keep the arguments themselves
    """

    def __init__(
        self,
        plan: Plan,
        place: int,
        w: ArrayRef,
        preparation: Preparation | None,
        memory: ArrayRef | None,
    ) -> None:
        self.plan, self.problem, self.algorithm = plan, plan.problem, plan.algorithm
        self.memory = memory
        self.kernel = preparation.kernel if preparation else plan.kernel
        self.workspace_size = 0 if preparation else plan.workspace_size
        self._place, self._w = place, w

    @property
    def packed(self) -> int:
        """The address of the packed filter; 0 where nothing is packed."""
        return self.memory.pointer if self.memory else 0

    @property
    def native_entry(self) -> NativeEntry | None:
        """As `Plan.native_entry`; its workspace argument is `packed`, where that is not 0."""
        return getattr(self.kernel, "native", None)

    def __call__(
        self,
        *pointers: int,
        workspace: int = 0,
        alpha: float = 1.0,
        beta: float = 0.0,
        stream: int = 0,
    ) -> None:
        """Run on the addresses of the operands other than w, unchecked, without allocating."""
        every = (*pointers[: self._place], self._w.pointer, *pointers[self._place :])
        self.kernel(every, self.packed or workspace, alpha, beta, stream)

    def execute(
        self,
        *arrays: object,
        workspace: object = None,
        alpha: float = 1.0,
        beta: float = 0.0,
        **named: object,
    ) -> None:
        """Check and run: arrays in the order of the problem's operands without w, or by name.

        Raises InvalidDescriptor as `Plan.execute` does, and for an output that overlaps the
        packed filter."""
        refs = self.plan._checked(arrays, named, self._w)
        if self.memory is None:
            address = self.plan._check_workspace(workspace)
        else:
            address, name = self.packed, self.problem.operands[-1].name
            if overlap(refs[-1], self.memory):
                raise InvalidDescriptor(name, "memory of the packed filter", "memory of its own")
        self.kernel(
            [ref.pointer for ref in refs],
            address,
            _number("alpha", alpha),
            _number("beta", beta),
            refs[-1].stream,
        )

    def explain(self) -> str:
        """What the plan says, and what was prepared."""
        size = self.plan.prepared_size
        what = f"packed beforehand: {size} bytes" if size else "read as it lies"
        return f"{self.plan.explain()}\n  the filter is {what}"

    def __repr__(self) -> str:
        return f"PreparedPlan({str(self.problem)!r}, algorithm={self.algorithm!r})"


def _aligned(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """So many bytes from a multiple of ALIGNMENT on."""
    raw = np.empty(size + ALIGNMENT, np.uint8)
    return raw[-raw.ctypes.data % ALIGNMENT :][:size]


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
