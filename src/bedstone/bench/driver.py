"""Runs problems: plan, check against the reference, time against peers, one row each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import bedstone
from bedstone.arrays import ArrayRef
from bedstone.bench import device_operands, peers
from bedstone.bench.check import check
from bedstone.bench.device_operands import DeviceOperands, in_turn
from bedstone.bench.machine import Ceilings
from bedstone.bench.operands import Operands
from bedstone.bench.peers import PEERS, Declined, Side
from bedstone.bench.timing import Times, in_turns, interleaved
from bedstone.plan.runtime import Runtime, runtime_of

AnyOperands = Operands | DeviceOperands
DEVICE_SECONDS = 0.02  # that a GPU side is timed for, each round


@dataclass(frozen=True)
class Row:
    """One measurement. Times in milliseconds; ratio = peer time / bedstone time; roofline = the
    part reached of the device's measured ceilings; error = relative RMS of the checked part."""

    name: str
    problem: str
    primitive: str
    direction: str
    dtype: str
    layout: str
    threads: int
    algorithm: str
    ms: float
    ms_lower: float
    ms_upper: float
    gflops: float
    gbytes: float
    roofline: float
    workspace_bytes: int
    error: float
    peer: str = ""
    peer_ms: float = 0.0
    peer_ms_lower: float = 0.0
    peer_ms_upper: float = 0.0
    peer_gflops: float = 0.0
    ratio: float = 0.0
    note: str = ""

    def record(self) -> dict[str, Any]:
        """As a flat dictionary, for CSV and JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Options:
    """How to plan and what to compare with."""

    peers: tuple[str, ...] = ()
    algorithm: str | None = None
    find: bool = False
    workspace_limit: int | None = 0
    device: str = "cpu"
    check: bool = True
    prepared: bool = False  # the filter packed once, before it is timed


def run(
    name: str,
    problem: bedstone.Problem,
    handle: bedstone.Handle,
    options: Options,
    ceilings: Ceilings,
) -> Iterator[Row]:
    """A row for each peer that computes the problem, or one without a peer.

    Raises NotSupported, and WrongResult for a plan that does not agree with the reference.
    """
    plan = handle.plan(problem, options.algorithm, options.workspace_limit, options.find)
    error = check(problem, plan) if options.check else 0.0
    runtime = runtime_of(handle.device.kind)
    operands = _operands(problem, runtime, options.device)
    workspace = runtime.empty(plan.workspace_size)
    ours = side_of(plan, operands, runtime.pointer(workspace), options.prepared)
    sides, notes = _peers(problem, operands, options)
    times = _times([ours, *sides.values()])
    note = "; ".join(notes)
    common = _common(name, problem, plan, ceilings, times[0]) | {"error": error, "note": note}
    if not sides:
        yield Row(**common)
    for peer, theirs in zip(sides, times[1:]):
        yield Row(
            **common,
            peer=peer,
            peer_ms=theirs.median * 1e3,
            peer_ms_lower=theirs.lower * 1e3,
            peer_ms_upper=theirs.upper * 1e3,
            peer_gflops=problem.flops / theirs.median / 1e9,
            ratio=theirs.median / times[0].median,
        )


def _operands(problem: bedstone.Problem, runtime: Runtime, device: str) -> list[AnyOperands]:
    """Sets of operands, to be used in turn; on a host one."""
    if not device_operands.available(device):
        return [Operands(problem, runtime)]
    count = device_operands.sets_of(problem)
    return [DeviceOperands(problem, device, seed) for seed in range(count)]


def side_of(
    plan: bedstone.Plan, operands: Sequence[AnyOperands], workspace: int, prepared: bool = False
) -> Side:
    """A plan over sets of operands as one side of a comparison, `prepared` with each set's filter
    if asked; on a GPU its runtime's clock times it."""
    calls = []
    for made in operands:
        kernel, space, kept = plan.kernel, workspace, None
        if prepared:
            kept = plan.prepare(_filter(plan, made))
            kernel, space = kept.kernel, kept.packed or workspace
        calls.append(functools.partial(kernel, made.pointers, space, 1.0, 0.0, 0))
        calls[-1].kept = kept  # type: ignore[attr-defined]  # the packed filter's memory
    call: Callable[[], Any] = in_turn(calls)
    if plan.device.kind == "cpu":
        return Side(call)
    runtime = runtime_of(plan.device.kind)
    return Side(call, lambda: runtime.time(call, DEVICE_SECONDS))


def _filter(plan: bedstone.Plan, operands: AnyOperands) -> ArrayRef:
    """The operand that may stay the same (of problems without one, any: they are refused)."""
    named = enumerate(plan.problem.operands)
    place, operand = next((p for p in named if p[1].name == "w"), (0, plan.problem.operands[0]))
    device = plan.device
    return ArrayRef(
        operands.pointers[place], operand.desc, device.kind, device.index, owner=operands
    )


def _peers(
    problem: bedstone.Problem, operands: Sequence[AnyOperands], options: Options
) -> tuple[dict[str, Side], list[str]]:
    """Sides by name, and the reasons of peers that decline."""
    sides, notes = {}, []
    for peer in options.peers:
        try:
            made = [PEERS[peer](problem, o.arrays(), options.device) for o in operands]
            sides[peer] = made[0] if len(made) == 1 else peers.turning(made)
        except Declined as reason:
            notes.append(f"{peer}: {reason}")
    return sides, notes


def _times(sides: list[Side]) -> list[Times]:
    clocks = [side.clock for side in sides if side.clock is not None]
    return in_turns(clocks) if clocks else interleaved([side.call for side in sides])


def layout_of(descs: Sequence[bedstone.TensorDesc]) -> str:
    """The layout of a problem's tensors. One whose axes of size 1 fit both orders (a 1x1 filter)
    says channels first, so the first that can only be otherwise speaks for all."""
    named = [str(desc.layout) for desc in descs if desc.layout]
    return next((n for n in named if not n.startswith("NC")), named[0] if named else "strided")


def _common(
    name: str, problem: bedstone.Problem, plan: bedstone.Plan, ceilings: Ceilings, times: Times
) -> dict[str, Any]:
    descs = [operand.desc for operand in problem.operands]
    return {
        "name": name,
        "problem": str(problem),
        "primitive": problem.primitive,
        "direction": problem.direction,
        "dtype": str(problem.dtype),
        "layout": layout_of(descs),
        "threads": bedstone.get_num_threads() if plan.device.kind == "cpu" else 0,
        "algorithm": plan.algorithm,
        "ms": times.median * 1e3,
        "ms_lower": times.lower * 1e3,
        "ms_upper": times.upper * 1e3,
        "gflops": problem.flops / times.median / 1e9,
        "gbytes": problem.bytes / times.median / 1e9,
        "roofline": ceilings.floor(problem) / times.median,
        "workspace_bytes": plan.workspace_size,
    }
