"""How good the choice is: the chosen algorithm's time against the best measured one's."""

from __future__ import annotations

import bedstone
from bedstone.bench.driver import side_of
from bedstone.bench.operands import Operands
from bedstone.bench.timing import in_turns, interleaved
from bedstone.plan.runtime import runtime_of
from bedstone.plan.select import survey

NEAR = 1.10  # the chosen algorithm may take so much of the best one's time
ROUNDS = 5


def seconds_of(
    problem: bedstone.Problem, handle: bedstone.Handle, workspace_limit: int
) -> dict[str, float]:
    """Measured seconds of every algorithm that takes the problem, the reference apart."""
    runtime = runtime_of(handle.device.kind)
    operands = Operands(problem, runtime)
    found = survey(problem, handle.device, workspace_limit)
    names = [a.name for a in found.accepted if a.backend != "reference"]
    plans = [handle.plan(problem, name, workspace_limit) for name in names]
    memory = [runtime.empty(plan.workspace_size) for plan in plans]
    sides = [side_of(p, operands, runtime.pointer(w)) for p, w in zip(plans, memory)]
    clocks = [side.clock for side in sides if side.clock is not None]
    times = in_turns(clocks) if clocks else interleaved([s.call for s in sides], ROUNDS)
    return {name: measured.median for name, measured in zip(names, times)}


def main(problems: list[tuple[str, bedstone.Problem]], device: str, workspace_limit: int) -> int:
    """Print every miss and, last, the share of problems whose choice is within 10% of the best."""
    handle, near, contested = bedstone.Handle(device), 0, 0
    for name, problem in problems:
        chosen = handle.plan(problem, workspace_limit=workspace_limit).algorithm
        times = seconds_of(problem, handle, workspace_limit)
        if not times:
            continue
        contested += len(times) > 1
        if times[chosen] <= NEAR * min(times.values()):
            near += 1
            continue
        ranked = sorted(times.items(), key=lambda item: item[1])
        table = ", ".join(f"{n} {1e3 * t:.3f} ms" for n, t in ranked)
        print(f"{name}: {problem}: chose {chosen}; {table}", flush=True)
    share = 100 * near / max(1, len(problems))
    print(
        f"the choice is within 10% of the best on {share:.0f}% of {len(problems)} problems, "
        f"{contested} of which had more than one candidate"
    )
    return 0
