"""The roofline of this machine: the least time any implementation needs for a problem."""

from __future__ import annotations

from dataclasses import dataclass

import bedstone
from bedstone.plan.registry import backend_attribute


@dataclass(frozen=True)
class Ceilings:
    """Measured flops per second by accumulator dtype, and bytes per second."""

    flops: dict[str, float]
    bandwidth: float

    def floor(self, problem: bedstone.Problem) -> float:
        """Seconds: the larger of arithmetic at the peak and memory traffic at full bandwidth.

        Algorithms that multiply less than the definition (Winograd) can beat it.
        """
        rate = self.flops[str(problem.dtype.accumulator)]
        arithmetic = problem.flops / rate if problem.primitive == "convolution" else 0.0
        return max(arithmetic, problem.bytes / self.bandwidth)


def measure() -> Ceilings:
    """Measure this CPU with the threads in force (takes under a second)."""
    ceilings = backend_attribute("cpu", "ceilings")
    flops, bandwidth = ceilings()  # type: ignore[operator]
    return Ceilings(flops, bandwidth)
