"""Interleaved timing: A B A B ..., so that a noisy machine disturbs both sides alike.

A library's threads go on spinning for some milliseconds after a call and would steal a core from
whatever runs next. Between two sides the clock rests and the side makes one call that does not
count.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SETTLE_SECONDS = 0.012  # longer than an OpenMP runtime spins after a parallel region
SLICE_SECONDS = 0.01  # a side runs at least this long before the other has its turn
ROUNDS, FEWEST_ROUNDS = 9, 3
PATIENCE_SECONDS = 12.0  # for all rounds of a problem together; long calls get fewer rounds
WARM_SECONDS = 0.1  # calls longer than this need no warming up before they count
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's mallopt


@dataclass(frozen=True)
class Times:
    """Seconds per call: median and quartiles over the rounds."""

    median: float
    lower: float
    upper: float


def keep_freed_memory() -> None:
    """Have glibc keep what is freed, for the rest of the process.

    A peer that allocates its result anew each time would otherwise be charged for the page faults
    of a fresh mapping (on some machines several times the cost of the operation itself), which a
    program that runs for long does not pay, and which bedstone, writing to memory that it is
    given, never does.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def give_back_freed_memory() -> None:
    """Have glibc return to the system what is freed now."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def interleaved(
    calls: Sequence[Callable[[], object]],
    rounds: int = ROUNDS,
    slice_seconds: float = SLICE_SECONDS,
) -> list[Times]:
    """The times of each call, measured in turns."""
    once = [_once(call) for call in calls]
    repeats = [max(1, int(slice_seconds / max(seconds, 1e-9))) for seconds in once]
    a_round = sum(seconds * repeat for seconds, repeat in zip(once, repeats))
    rounds = min(rounds, max(FEWEST_ROUNDS, int(PATIENCE_SECONDS / a_round)))
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for i, call in enumerate(calls):
            time.sleep(SETTLE_SECONDS)
            if once[i] < WARM_SECONDS:
                call()
            start = time.perf_counter()
            for _ in range(repeats[i]):
                call()
            samples[i].append((time.perf_counter() - start) / repeats[i])
    return [summary(sample) for sample in samples]


def _once(call: Callable[[], object]) -> float:
    """Seconds of a call, the second one unless the first was long."""
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
        if seconds > WARM_SECONDS:
            break
    return seconds


def in_turns(clocks: Sequence[Callable[[], float]], rounds: int = FEWEST_ROUNDS) -> list[Times]:
    """The times of sides that bring a clock of their own (a device's): each clock, asked in
    turns, gives its side's seconds per call."""
    samples = [[clock() for clock in clocks] for _ in range(rounds)]
    return [summary(list(side)) for side in zip(*samples)]


def summary(sample: Sequence[float]) -> Times:
    """Median and quartiles."""
    if len(sample) < 2:
        return Times(sample[0], sample[0], sample[0])
    lower, median, upper = statistics.quantiles(sample, n=4, method="inclusive")
    return Times(median, lower, upper)
