"""This machine's ceilings, measured: multiply-adds in registers, and bytes through memory.

Each is the best of several short runs: a ceiling is what the machine can do when nothing else
disturbs it. A run is long against the waking of a thread.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import numpy as np

from bedstone.backends.cpu import matrix_unit
from bedstone.backends.cpu.builder import KernelBuilder
from bedstone.backends.cpu.irtypes import itemsize
from bedstone.backends.cpu.kernel import ENTRY, compiled
from bedstone.backends.cpu.target import CACHE_LINE, Target
from bedstone.backends.cpu.tasks import flush_streamed, store_streaming
from bedstone.plan.config import config, get_num_threads

ROUNDS = 1_000_000  # of one multiply-add on every accumulator, per task: about 5 ms
MATRIX_ROUNDS = 100_000  # of a product of tiles, per task
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


def _emit_matrix_products(target: Target) -> KernelBuilder:
    """Every thread runs MATRIX_ROUNDS of products of operands that stay in the first cache."""
    k = KernelBuilder(target)
    with k.entry(ENTRY, pointers=1) as call:
        (memory,) = call.pointers
        with (
            k.parallel(call.threads, call.threads) as job,
            matrix_unit.each_task(k, job) as task,
        ):
            base = memory + task * 4096
            matrix_unit.clear_sums(k)
            with k.loop(0, MATRIX_ROUNDS):
                pitch = matrix_unit.ROW_BYTES
                matrix_unit.multiply(k, base, pitch, matrix_unit.ROWS * pitch, base, 2 * pitch)
            matrix_unit.store_sums(k, base, 2 * pitch)
    return k


def _emit_copy(target: Target, streaming: bool) -> KernelBuilder:
    """Streamed stores spare the read of each line before it is overwritten."""
    k = KernelBuilder(target)
    lanes = target.vector_bytes // 4
    with k.entry(ENTRY, pointers=2) as call:
        source, to = call.pointers
        blocks = COPY_BYTES // BLOCK
        with k.parallel(blocks, call.threads) as job:
            with (
                job.each_task() as task,
                k.loop(task * BLOCK, (task + 1) * BLOCK, target.vector_bytes) as at,
            ):
                value = k.load(source + at, "float32", lanes)
                if streaming:
                    store_streaming(k, value, to + at, "float32")
                else:
                    k.store(value, to + at, "float32")
            if streaming:
                flush_streamed(k)
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


def matrix_flops_per_second(threads: int | None = None) -> float:
    """Products of the matrix unit, their operands loaded from the first cache."""
    threads = threads or get_num_threads()
    kernel = compiled("peak of the matrix unit", _emit_matrix_products, 1)
    memory = _aligned(4096 * threads)
    with config(num_threads=threads):
        seconds = _best(lambda: kernel([memory.ctypes.data]))
    products = matrix_unit.SIDE * matrix_unit.SIDE * matrix_unit.STEPS
    return 2.0 * products * MATRIX_ROUNDS * threads / seconds


def bytes_per_second(threads: int | None = None) -> float:
    """Bytes read plus bytes written by a large copy, through the caches or past them, whichever
    is quicker."""
    source, to = (_aligned(COPY_BYTES) for _ in range(2))
    seconds = []
    for streaming in (False, True):
        key = f"peak copy streaming={streaming}"
        kernel = compiled(key, lambda t: _emit_copy(t, streaming), 2)  # noqa: B023
        with config(num_threads=threads or get_num_threads()):
            call = functools.partial(kernel, [source.ctypes.data, to.ctypes.data])
            seconds.append(_best(call))
    return 2.0 * COPY_BYTES / min(seconds)


def _aligned(nbytes: int) -> np.ndarray:
    """Ones, from a cache line's first byte on."""
    raw = np.ones(nbytes + CACHE_LINE, np.uint8)
    start = -raw.ctypes.data % CACHE_LINE
    return raw[start : start + nbytes]
