"""What every integration asks of a plan: a compiled kernel, or the reason to stay native."""

from __future__ import annotations

from bedstone import NotSupported, Plan, Problem, default_handle

# Bytes that a plan may use beside its operands: the transforms of the fastest algorithms.
WORKSPACE_LIMIT = 256 << 20
# The same on a GPU, of larger batches and tens of GiB. (CaffeNet's filter gradients
# at batch 256 want up to 506 MiB; without them they take 8 times as long.)
GPU_WORKSPACE_LIMIT = 1 << 30


def compiled_plan(problem: Problem, device: str = "cpu") -> Plan | str:
    """The plan of a problem, or why there is none that a framework's own kernel should give way
    to: the reference, which takes everything, is slower than any of those."""
    limit = WORKSPACE_LIMIT if device == "cpu" else GPU_WORKSPACE_LIMIT
    try:
        plan = default_handle(device).plan(problem, workspace_limit=limit)
    except NotSupported as error:
        return str(error).splitlines()[0]
    if plan.algorithm.startswith("reference:"):
        return "no compiled kernel for this problem"
    return plan
