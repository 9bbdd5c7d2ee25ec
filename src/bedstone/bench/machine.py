"""The machine: its roofline (the least time any implementation needs for a problem), and how busy
others keep it while something is measured."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import bedstone
from bedstone.plan import registry


@dataclass(frozen=True)
class Ceilings:
    """Measured flops per second by dtype (one that is not among them: by its accumulator), and
    bytes per second. Empty and 0 where nothing was measured."""

    flops: dict[str, float]
    bandwidth: float

    def floor(self, problem: bedstone.Problem) -> float:
        """Seconds: the larger of arithmetic at the peak and memory traffic at full bandwidth; 0 if
        the ceilings are not known.

        Algorithms that multiply less than the definition (Winograd) can beat it, and so can
        operands that stay in the caches.
        """
        rate = self.flops.get(str(problem.dtype.accumulator), 0.0)
        rate = self.flops.get(str(problem.dtype), rate)
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
    """Measure the device (the CPU: with the threads in force, about a second).

    A backend that can do so offers `ceilings() -> (flops by dtype, bytes per second)`.
    """
    for backend in registry.backends():
        ceilings = registry.backend_attribute(backend, "ceilings")
        usable = registry.backend_missing(backend) is None
        if ceilings and usable and device_kind in registry.device_kinds(backend):
            return Ceilings(*ceilings())  # type: ignore[operator]
    return Ceilings({}, 0.0)


def higher(a: Ceilings, b: Ceilings) -> Ceilings:
    """The higher of two measurements, each by each: disturbances only ever lower one."""
    rates = {name: max(rate, b.flops.get(name, 0.0)) for name, rate in a.flops.items()}
    return Ceilings(rates, max(a.bandwidth, b.bandwidth))


class OtherLoad:
    """The part of all CPU time that other processes take from the moment this object is made.

    Timings made beside other work mislead: a library that shares its work out evenly waits for
    the thread that was held up, one that shares it out as it goes does not.
    """

    def __init__(self) -> None:
        self._start = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Seconds of the clock, of all processes, of this one and of its children that have ended;
        None where the system is silent."""
        try:
            words = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
        except OSError:
            return None
        user, nice, system, _, _, irq, soft, steal = (int(word) for word in words[1:9])
        busy = (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), busy, sum(os.times()[:4])

    def share(self) -> float | None:
        """Between 0 and 1; None where the system does not tell."""
        now = self._now()
        if now is None or self._start is None:
            return None
        wall, busy, mine = (after - before for after, before in zip(now, self._start))
        return min(1.0, max(0.0, (busy - mine) / ((os.cpu_count() or 1) * max(wall, 1e-3))))
