"""The cost model's two ceilings: floating-point rate and memory bandwidth of a CPU.

Estimates only have to rank algorithms on one machine, so nominal numbers do; a benchmark's
roofline measures instead. Algorithms express their overheads in flops of the peak rate, which
carries over between chips better than seconds do.
"""

from __future__ import annotations

from bedstone.backends.cpu.irtypes import itemsize
from bedstone.backends.cpu.target import Target
from bedstone.plan.config import get_num_threads

CLOCK_HZ = 3.5e9
FMA_PER_CYCLE = 2  # vector multiply-adds; one multiply-add is two flops
MATRIX_RATE = 16.0  # of the matrix unit's products of bfloat16, in float32 vector multiply-adds
BYTES_PER_SECOND = 12e9  # a core's share of the memory bandwidth
PHASE_SECONDS = 3e-6  # starting and joining a parallel phase
CALL_SECONDS = 2e-6  # a call from Python


def peak(accumulator: str, threads: int | None = None) -> float:
    """Flops per second that the threads reach together in registers."""
    lanes = Target.current().vector_bytes / itemsize(accumulator)
    return (threads or get_num_threads()) * lanes * 2 * FMA_PER_CYCLE * CLOCK_HZ


def seconds(flops: float, nbytes: float, accumulator: str, phases: int = 1) -> float:
    """Time of work that needs `flops` of the peak rate and moves `nbytes` through memory."""
    threads = get_num_threads()
    busy = max(flops / peak(accumulator, threads), nbytes / (BYTES_PER_SECOND * threads))
    return busy + CALL_SECONDS + phases * PHASE_SECONDS * (threads > 1)
