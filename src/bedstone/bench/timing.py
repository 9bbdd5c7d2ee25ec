"""Interleaved timing: A B A B ..., so that a noisy machine disturbs both sides alike.

A library's threads go on spinning for some milliseconds after a call and would steal a core from
whatever runs next. Between two sides the clock rests and the side makes one call that does not
count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SETTLE_SECONDS = 0.012  # longer than an OpenMP runtime spins after a parallel region
SLICE_SECONDS = 0.01  # a side runs at least this long before the other has its turn
ROUNDS = 7


@dataclass(frozen=True)
class Times:
    """Seconds per call: median and quartiles over the rounds."""

    median: float
    lower: float
    upper: float


def interleaved(
    calls: Sequence[Callable[[], object]],
    rounds: int = ROUNDS,
    slice_seconds: float = SLICE_SECONDS,
) -> list[Times]:
    """The times of each call, measured in turns."""
    repeats = []
    for call in calls:
        call()
        start = time.perf_counter()
        call()
        once = time.perf_counter() - start
        repeats.append(max(1, int(slice_seconds / max(once, 1e-9))))
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for i, call in enumerate(calls):
            time.sleep(SETTLE_SECONDS)
            call()
            start = time.perf_counter()
            for _ in range(repeats[i]):
                call()
            samples[i].append((time.perf_counter() - start) / repeats[i])
    return [_times(sample) for sample in samples]


def _times(sample: list[float]) -> Times:
    if len(sample) < 2:
        return Times(sample[0], sample[0], sample[0])
    lower, median, upper = statistics.quantiles(sample, n=4, method="inclusive")
    return Times(median, lower, upper)
