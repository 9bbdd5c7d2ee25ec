"""This machine's ceilings, measured: multiply-adds in registers, and bytes through memory.

Each is the best of several short runs: a ceiling is what the machine can do when nothing else
disturbs it. A run is long against the waking of a thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from bedstone.backends.cpu.builder import KernelBuilder
from bedstone.backends.cpu.irtypes import itemsize
from bedstone.backends.cpu.kernel import ENTRY, compiled
from bedstone.backends.cpu.target import Target
from bedstone.plan.config import config, get_num_threads

ROUNDS = 1_000_000  # of one multiply-add on every accumulator, per task: about 5 ms
RUNS = 8
BLOCK = 1 << 20  # bytes a copy task moves
COPY_BYTES = 256 << 20  # far beyond the caches


def _emit_products(target: Target, dtype: str) -> KernelBuilder:
    """Every thread runs ROUNDS of independent multiply-adds on 3/4 of the registers."""
    k = KernelBuilder(target)
    lanes = target.vector_bytes // itemsize(dtype)
    with k.entry(ENTRY, pointers=1) as call:
        (memory,) = call.pointers
        with k.parallel(call.threads, call.threads) as job, job.each_task() as task:
            base = memory + task * 4096
            count = target.vector_registers * 3 // 4
            factor = k.load(base, dtype, lanes)
            # Different start values, or the compiler would merge the sums.
            sums = [k.variable(k.load(base, dtype, lanes, offset=64 * i)) for i in range(count)]
            with k.loop(0, ROUNDS):
                for total in sums:
                    total.set(k.fma(factor, factor, total.value))
            for i, total in enumerate(sums):
                k.store(total.value, base, dtype, offset=64 * i)
    return k


def _emit_copy(target: Target) -> KernelBuilder:
    k = KernelBuilder(target)
    lanes = target.vector_bytes // 4
    with k.entry(ENTRY, pointers=2) as call:
        source, to = call.pointers
        blocks = COPY_BYTES // BLOCK
        with (
            k.parallel(blocks, call.threads) as job,
            job.each_task() as task,
            k.loop(task * BLOCK, (task + 1) * BLOCK, target.vector_bytes) as at,
        ):
            k.store(k.load(source + at, "float32", lanes), to + at, "float32")
    return k


def _best(call: Callable[[], None]) -> float:
    """Seconds of the quickest of RUNS calls."""
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def flops_per_second(dtype: str = "float32", threads: int | None = None) -> float:
    """Multiply-adds in registers, two flops each, on `threads` threads (default: all)."""
    threads = threads or get_num_threads()
    target = Target.current()
    kernel = compiled(f"peak {dtype}", lambda t: _emit_products(t, dtype), 1)
    memory = np.zeros(4096 * threads // 4 + 4096, np.float32)
    with config(num_threads=threads):
        seconds = _best(lambda: kernel([memory.ctypes.data]))
    lanes = target.vector_bytes // itemsize(dtype)
    return 2.0 * lanes * (target.vector_registers * 3 // 4) * ROUNDS * threads / seconds


def bytes_per_second(threads: int | None = None) -> float:
    """Bytes read plus bytes written by a large copy."""
    source, to = (np.ones(COPY_BYTES // 4, np.float32) for _ in range(2))
    kernel = compiled("peak copy", _emit_copy, 2)
    with config(num_threads=threads or get_num_threads()):
        seconds = _best(lambda: kernel([source.ctypes.data, to.ctypes.data]))
    return 2.0 * COPY_BYTES / seconds
