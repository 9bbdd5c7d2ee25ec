"""The roofline of a machine: the least time any implementation needs for a problem."""

from __future__ import annotations

from dataclasses import dataclass

import bedstone
from bedstone.plan import registry


@dataclass(frozen=True)
class Ceilings:
    """Measured flops per second by accumulator dtype, and bytes per second. Empty and 0 where
    nothing was measured."""

    flops: dict[str, float]
    bandwidth: float

    def floor(self, problem: bedstone.Problem) -> float:
        """Seconds: the larger of arithmetic at the peak and memory traffic at full bandwidth; 0 if
        the ceilings are not known.

        Algorithms that multiply less than the definition (Winograd) can beat it, and so can
        operands that stay in the caches.
        """
        rate = self.flops.get(str(problem.dtype.accumulator), 0.0)
        if not rate or not self.bandwidth:
            return 0.0
        arithmetic = problem.flops / rate if problem.primitive == "convolution" else 0.0
        return max(arithmetic, problem.bytes / self.bandwidth)

    def __str__(self) -> str:
        if not self.bandwidth:
            return "ceilings not measured"
        rates = ", ".join(f"{name} {rate / 1e9:.0f} GFLOP/s" for name, rate in self.flops.items())
        return f"measured peak {rates}; copy {self.bandwidth / 1e9:.0f} GB/s"


def measure(device_kind: str = "cpu") -> Ceilings:
    """Measure the device (the CPU: with the threads in force, under a second).

    A backend that can do so offers `ceilings() -> (flops by dtype, bytes per second)`.
    """
    for backend in registry.backends():
        ceilings = registry.backend_attribute(backend, "ceilings")
        usable = registry.backend_missing(backend) is None
        if ceilings and usable and device_kind in registry.device_kinds(backend):
            return Ceilings(*ceilings())  # type: ignore[operator]
    return Ceilings({}, 0.0)
