"""How good the choice is: the chosen algorithm's time against the best measured one's."""

from __future__ import annotations

from functools import partial

import bedstone
from bedstone.bench.timing import interleaved
from bedstone.plan.runtime import runtime_of
from bedstone.plan.select import survey
from bedstone.plan.tune import Trial

NEAR = 1.10  # the chosen algorithm may take so much of the best one's time
ROUNDS = 3


def main(problems: list[tuple[str, bedstone.Problem]], workspace_limit: int) -> int:
    """Print every miss and, last, the share of problems whose choice is within 10% of the best."""
    handle, near = bedstone.Handle(), 0
    runtime = runtime_of("cpu")
    for name, problem in problems:
        chosen = handle.plan(problem, workspace_limit=workspace_limit)
        found = survey(problem, handle.device, workspace_limit)
        names = [a.name for a in found.accepted if a.backend != "reference"]
        trial = Trial(problem, runtime)
        calls, kept = [], []
        for algorithm in names:
            plan = handle.plan(problem, algorithm, workspace_limit)
            workspace = runtime.empty(plan.workspace_size)

            address = runtime.pointer(workspace)
            calls.append(partial(plan.kernel, trial.pointers, address, 1.0, 0.0, 0))
            kept.append(workspace)
        times = dict(zip(names, (t.median for t in interleaved(calls, ROUNDS))))
        best = min(times, key=times.__getitem__)
        if times[chosen.algorithm] <= NEAR * times[best]:
            near += 1
            continue
        table = ", ".join(f"{n} {1e3 * t:.3f} ms" for n, t in sorted(times.items()))
        print(
            f"{name} {problem.direction} {problem}: chose {chosen.algorithm}; {table}", flush=True
        )
    share = 100 * near / max(1, len(problems))
    print(f"the choice is within 10% of the best on {share:.0f}% of {len(problems)} problems")
    return 0
