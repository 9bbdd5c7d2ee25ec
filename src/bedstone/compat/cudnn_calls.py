"""The library handle, and calls prepared for it.

What a call needs besides addresses and factors is settled once for each combination of settings:
the bedstone plan, the operands' spans, which of them may share memory. Afterwards a call is a
dictionary look-up, the checks of its addresses, and the kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import bedstone
from bedstone.arrays import ArrayRef
from bedstone.compat import cudnn_descriptors
from bedstone.compat.cudnn_enums import cudnnConvolutionFwdAlgo as Algo
from bedstone.compat.cudnn_memory import Place
from bedstone.compat.cudnn_status import Refusal, cudnnStatus, not_supported
from bedstone.plan import config
from bedstone.plan.plan import overlap, same_elements
from bedstone.spec.errors import BedstoneError, InvalidDescriptor

PREPARED_LIMIT = 4096  # calls kept a handle; the oldest goes first

# Forward algorithm -> (name of bedstone's algorithm or None for its own choice, workspace limit).
ALGORITHMS: dict[Algo, tuple[str | None, int | None]] = {
    Algo.CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM: ("*:implicit_gemm*", 0),
    Algo.CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM: (None, 0),
    Algo.CUDNN_CONVOLUTION_FWD_ALGO_GEMM: (None, None),
}
OWN_CHOICE: tuple[str | None, int | None] = (None, 0)  # where the interface lends no workspace

_device = "cpu"


def use_device(device: str) -> None:
    """Handles made from now on are for "cpu" (which is the default), "cuda" or "cuda:N".

    Raises InvalidDescriptor for another name; whether the device is there shows when a handle is
    made (CUDNN_STATUS_NOT_INITIALIZED if not).
    """
    global _device
    kind, _, index = device.partition(":") if isinstance(device, str) else ("", "", "")
    if kind not in ("cpu", "cuda") or (index and not (kind == "cuda" and index.isdigit())):
        raise InvalidDescriptor("device", device, "'cpu', 'cuda' or 'cuda:N'")
    _device = device


class Context:
    """What a cudnnHandle_t stands for: a device, its plans and the current stream."""

    name = "handle"

    def __init__(self, device: str | None = None) -> None:
        try:
            self.handle = bedstone.Handle(device or _device)
        except BedstoneError as error:
            raise Refusal(cudnnStatus.CUDNN_STATUS_NOT_INITIALIZED, str(error)) from error
        self.device = (self.handle.device.kind, self.handle.device.index)
        self.stream = 0
        self._prepared: dict[Hashable, Any] = {}
        self._lock = threading.Lock()

    def prepared(self, key: tuple[Hashable, ...], build: Callable[[], Any]) -> Any:
        """The call of that key, built at its first use under the settings in force."""
        full = (key, config.current().choice_key)
        found = self._prepared.get(full)
        if found is None:
            found = build()
            with self._lock:
                while len(self._prepared) >= PREPARED_LIMIT:
                    del self._prepared[next(iter(self._prepared))]
                self._prepared[full] = found
        return found


def context(number: object) -> Context:
    """The live handle of that number."""
    return cudnn_descriptors.find(Context, "handle", number)


class Prepared:
    """A plan with its operands. `stems` maps the operands' names to those of the C function ("src"
    for srcDesc and srcData); `unread` are operands that the interface passes and the computation
    does not need: they are checked."""

    def __init__(
        self, plan: bedstone.Plan, stems: Mapping[str, str], unread: Sequence[Place] = ()
    ) -> None:
        self.plan = plan
        operands = plan.problem.operands
        places = [Place(f"{stems[o.name]}Data", o.desc, o.is_output) for o in operands]
        self.count = len(places)
        self.places = (*places, *unread)
        # (Every problem that is prepared here has one output, its last operand.)
        self.output = self.count - 1
        in_place = plan.problem.in_place
        self.others = [(i, operands[i].name in in_place) for i in range(self.output)]

    def run(
        self,
        context: Context,
        data: Sequence[object],
        alpha: float = 1.0,
        beta: float = 0.0,
        workspace: int = 0,
    ) -> None:
        """Check the addresses, in the plan's order with the unread ones behind, and run;
        `workspace` is the address of as much as the plan needs."""
        device = context.device
        addresses = [place.address(d, device) for place, d in zip(self.places, data)]
        place, start = self.places[self.output], addresses[self.output]
        low, high = start + place.low, start + place.high
        for i, may_alias in self.others:
            other, at = self.places[i], addresses[i]
            if at + other.low < high and low < at + other.high:
                self._check_shared(place, start, other, at, may_alias)
        if workspace:
            self._check_workspace(addresses, workspace)
        self.plan(
            *addresses[: self.count],
            workspace=workspace,
            alpha=alpha,
            beta=beta,
            stream=context.stream,
        )

    def _check_workspace(self, addresses: Sequence[int], start: int) -> None:
        end = start + self.plan.workspace_size
        for place, at in zip(self.places, addresses):
            if at + place.low < end and start < at + place.high:
                words = f"memory that overlaps {place.argument}"
                raise InvalidDescriptor("workSpace", words, "memory of its own")

    def _check_shared(
        self, place: Place, start: int, other: Place, at: int, may_alias: bool
    ) -> None:
        if may_alias and start == at and same_elements(place.desc, other.desc):
            return
        if overlap(ArrayRef(start, place.desc), ArrayRef(at, other.desc)):
            expected = "exactly the same memory" if may_alias else "memory of its own"
            raise InvalidDescriptor(
                place.argument, f"memory that overlaps {other.argument}", expected
            )


def checked(make: Callable[..., Any], stems: Mapping[str, str], *args: Any) -> Any:
    """make(*args); what is wrong with a problem is said in the C function's words."""
    try:
        return make(*args)
    except InvalidDescriptor as error:
        stem = stems.get(error.argument)
        argument = f"{stem}Desc" if stem else error.argument
        raise InvalidDescriptor(argument, error.value, error.expected) from None


def algorithm_of(argument: str, algo: Algo) -> tuple[str | None, int | None]:
    """How bedstone is asked for a forward algorithm."""
    found = ALGORITHMS.get(algo)
    if found is None:
        raise not_supported(argument, algo.name, f"one of {[a.name for a in ALGORITHMS]}")
    return found
