"""Algorithm: one way to compute a primitive. The unit of choice, explanation and measurement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from bedstone.plan.device import Device
from bedstone.spec.problem import Problem


@dataclass(frozen=True)
class NativeEntry:
    """Machine code behind a kernel, for callers that are compiled themselves:

        void entry(int64 pointers..., int64 workspace, double alpha, double beta, int64 threads)

    address   of the function;  pointers  how many come first, in the order of the operands
    owner     keeps the code in memory: hold it as long as the address is used
    """

    address: int
    pointers: int
    owner: object


class Kernel(Protocol):
    """What `build` returns: a compiled call. May have `description: str`, one line of plain words
    (tiles, vector width) for explain(), and `preparation() -> Preparation | None`, where it brings
    a filter into another form first."""

    def __call__(
        self, pointers: Sequence[int], workspace: int, alpha: float, beta: float, stream: int
    ) -> None:
        """Run on addresses in the order of the problem's operands. Checks and allocates nothing."""


@dataclass(frozen=True)
class Preparation:
    """A kernel's two halves, for a filter that stays the same over many calls.

    nbytes  of the filter's packed form
    pack    pack(address of w, address of the packed form) writes it
    kernel  does the rest: called as the whole kernel is, its `workspace` being the packed form
    """

    nbytes: int
    pack: Callable[[int, int], None]
    kernel: Kernel


class Algorithm(ABC):
    """One way to compute a primitive; backends list instances in their ALGORITHMS tuples.

    `supports` and `estimate` are pure and cheap; `build` compiles; the kernel does neither.
    """

    name: ClassVar[str]  # backend first, then the field's words: "cpu:implicit_gemm"
    deterministic: ClassVar[bool] = True
    # False if sums of products of small integers may come out rounded, as they do where an
    # algorithm interpolates at points that are no powers of two, or transforms to frequencies.
    exact: ClassVar[bool] = True
    # What rounding errors are relative to: "element", the sum of the sizes of that element's own
    # terms; "tile", the largest such sum nearby (algorithms that transform tiles, as Winograd's).
    error_scale: ClassVar[str] = "element"

    def missing(self, device: Device) -> str | None:
        """None, or what this machine lacks for the algorithm to take any problem at all."""
        return None

    @abstractmethod
    def supports(self, problem: Problem, device: Device) -> str | None:
        """None if this algorithm takes the problem, else the reason, in words, why not."""

    def workspace(self, problem: Problem, device: Device) -> int:
        """Bytes of caller's memory needed during a call."""
        return 0

    @abstractmethod
    def estimate(self, problem: Problem, device: Device) -> float:
        """Seconds expected on the device, from a small analytic model; infinity for what is to be
        taken only by name, or by find where it is measured."""

    @abstractmethod
    def build(self, problem: Problem, device: Device) -> Kernel:
        """Compile (or load from the cache) the kernel for a problem that `supports` accepted."""

    @property
    def backend(self) -> str:
        """The part of the name before the colon."""
        return self.name.split(":", 1)[0]
