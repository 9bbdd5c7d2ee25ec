"""What every integration asks of a plan: a compiled kernel, or the reason to stay native."""

from __future__ import annotations

from bedstone import NotSupported, Plan, Problem, default_handle

# Bytes that a plan may use beside its operands: the transforms of the fastest algorithms.
WORKSPACE_LIMIT = 256 << 20


def compiled_plan(problem: Problem, device: str = "cpu") -> Plan | str:
    """The plan of a problem, or why there is none that a framework's own kernel should give way
    to: the reference, which takes everything, is slower than any of those."""
    try:
        plan = default_handle(device).plan(problem, workspace_limit=WORKSPACE_LIMIT)
    except NotSupported as error:
        return str(error).splitlines()[0]
    if plan.algorithm.startswith("reference:"):
        return "no compiled kernel for this problem"
    return plan
