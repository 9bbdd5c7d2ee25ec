"""Handle: a device and its plans. The second request for a problem is a dictionary look-up."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from bedstone.plan import config, log, select, tune
from bedstone.plan.algorithm import Algorithm, Kernel
from bedstone.plan.device import Device
from bedstone.plan.plan import Plan
from bedstone.plan.runtime import runtime_of
from bedstone.spec.errors import InvalidDescriptor
from bedstone.spec.problem import Problem

PLAN_LIMIT = 4096  # plans kept a handle; the oldest goes first


class Handle:
    """Makes and keeps plans for one device; safe to use from several threads at once.

    device  "cpu", "cuda", "cuda:1" or a Device
    """

    def __init__(self, device: str | Device = "cpu") -> None:
        self.device = device if isinstance(device, Device) else parse_device(device)
        self._plans: OrderedDict[object, Plan] = OrderedDict()
        self._lock = threading.RLock()

    def plan(
        self,
        problem: Problem,
        algorithm: str | None = None,
        workspace_limit: int | None = 0,
        find: bool = False,
    ) -> Plan:
        """The plan for a problem.

        algorithm        use this one ("cpu:implicit_gemm", or a pattern), else choose
        workspace_limit  bytes that the caller is ready to lend; 0 (default) none, None any number
        find             measure the candidates (once; remembered on disk) instead of estimating

        Raises NotSupported, with each algorithm's reason, when none takes the problem, and
        InvalidDescriptor for an unknown algorithm or a negative limit.
        """
        settings = config.current()
        forced = algorithm or settings.algorithm or None
        if forced and not algorithm and not select.names_of(problem.primitive, self.device, forced):
            # A setting holds for every primitive: it steers those that have such an algorithm.
            forced = None if select.names_anywhere(self.device, forced) else forced
        key = (problem, forced, workspace_limit, find, settings.choice_key)
        plan = self._plans.get(key)
        if plan is not None:
            return plan
        if workspace_limit is not None and workspace_limit < 0:
            raise InvalidDescriptor("workspace_limit", workspace_limit, "0 or more bytes, or None")
        with self._lock:
            plan = self._plans.get(key)
            if plan is None:
                plan = self._make(problem, forced, workspace_limit, find)
                self._plans[key] = plan
                if len(self._plans) > PLAN_LIMIT:
                    self._plans.popitem(last=False)
        return plan

    def find(
        self, problem: Problem, workspace_limit: int | None = 0, fresh: bool = False
    ) -> list[tune.Measurement]:
        """Measure every candidate within the workspace limit, quickest first."""
        return tune.find(problem, self.device, workspace_limit, fresh)

    def _make(
        self, problem: Problem, forced: str | None, workspace_limit: int | None, find: bool
    ) -> Plan:
        if all(operand.desc.size == 0 for operand in problem.outputs):
            return Plan(problem, self.device, _NOTHING, _do_nothing)
        measured = None
        if find and forced is None:
            rows = tune.find(problem, self.device, workspace_limit)
            measured = {row.algorithm: row.seconds for row in rows if row.seconds is not None}
        choice = select.choose(problem, self.device, workspace_limit, forced, measured)
        kernel = choice.algorithm.build(problem, self.device)
        plan = Plan(problem, self.device, choice, kernel)
        if choice.algorithm.backend == "reference" and not forced:
            log.info("fallback to %s for %s: %s", plan.algorithm, problem, dict(choice.reasons))
        else:
            log.info("%s for %s: %s", plan.algorithm, problem, choice.why)
        return plan


class _Nothing(Algorithm):
    """For problems whose outputs have no elements."""

    name = "plan:nothing"

    def supports(self, problem: Problem, device: Device) -> str | None:
        return None

    def estimate(self, problem: Problem, device: Device) -> float:
        return 0.0

    def build(self, problem: Problem, device: Device) -> Kernel:
        return _do_nothing


def _do_nothing(
    pointers: Sequence[int], workspace: int, alpha: float, beta: float, stream: int
) -> None:
    """The kernel of an empty result."""


_NOTHING = select.Choice(_Nothing(), 0, "the result has no elements")


def parse_device(text: str) -> Device:
    """ "cpu", "cuda" or "cuda:1" as a Device of this machine."""
    kind, _, index = text.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise InvalidDescriptor("device", text, "'cpu', 'cuda' or 'cuda:N'")
    return runtime_of(kind).device(int(index or 0))


_default: dict[str, Handle] = {}
_default_lock = threading.Lock()


def default_handle(device: str = "cpu") -> Handle:
    """The process's shared handle of a device."""
    handle = _default.get(device)
    if handle is None:
        with _default_lock:
            handle = _default.setdefault(device, Handle(device))
    return handle
