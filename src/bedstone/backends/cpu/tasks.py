"""What kernels do around their loops: share units of work out to threads, and blend results in.

A unit is the least piece of work worth counting. A task is a run of consecutive units: one task a
thread while the operands fit the caches, so that each core finds its own part there next time (2
times faster than drawing units one by one); several for larger operands, where a core that falls
behind costs more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from llvmlite import ir

from bedstone.backends.cpu.builder import Call, Int, KernelBuilder, itemsize
from bedstone.backends.cpu.irtypes import I32, VOID
from bedstone.backends.cpu.values import Float, IntLike, Mask

TASKS_PER_THREAD = 1
TASKS_PER_THREAD_LARGE = 4


@contextlib.contextmanager
def each_unit(
    k: KernelBuilder,
    threads: Int,
    units: int,
    scratch: int = 0,
    large: bool = False,
) -> Iterator[tuple[IntLike, Int]]:
    """A parallel phase over the units: yields (number of the unit, the thread's scratch).

    `large`: the operands exceed the caches; stores may be streamed.
    """
    if units == 1:
        tasks: IntLike = 1
    else:
        wanted = TASKS_PER_THREAD_LARGE if large else TASKS_PER_THREAD
        tasks = k.min(k.max(threads, 1) * wanted, units)
    with k.parallel(tasks, threads, scratch) as job:
        with job.each_task() as task:
            if units == 1:
                yield 0, job.scratch
            else:
                first, last = task * units // tasks, (task + 1) * units // tasks
                with k.loop(first, last, at_least_once=True) as unit:
                    yield unit, job.scratch
        if large:
            flush_streamed(k)


def unravel(number: IntLike, dims: Sequence[int]) -> list[IntLike]:
    """The row-major indices of a linear number."""
    indices: list[IntLike] = []
    for dim in reversed(dims[1:]):
        indices.append(number % dim)
        number = number // dim
    return [number if dims else 0, *reversed(indices)][: max(len(dims), 0)]


class Output:
    """Writes vectors of one output: alpha * value + beta * old, rounded to its dtype.

    Where beta is 0 the load of the old value is masked off: memory is not read. Make it inside
    the parallel phase.
    """

    def __init__(self, k: KernelBuilder, call: Call, dtype: str, lanes: int) -> None:
        self.k, self.dtype, self.lanes = k, dtype, lanes
        self.compute = "float64" if dtype == "float64" else "float32"
        self.model = model = k.constant(0.0, self.compute, lanes)
        self.alpha, self.beta = k.cast(call.alpha, model), k.cast(call.beta, model)
        self.reads = self.beta.ne(0.0)

    def store(
        self,
        value: Float,
        address: IntLike,
        stride: int = 1,
        mask: Mask | None = None,
        streaming: bool = False,
    ) -> None:
        """The lanes of `value` at address, address + stride, ... (in elements). `streaming`: past
        the caches; beta is known to be 0, the vector whole, its address a multiple of its size."""
        k, value = self.k, self.k.cast(value, self.model)
        if streaming:
            store_streaming(k, value * self.alpha, address, self.dtype)
            return
        reads = self.reads if mask is None else self.reads & mask
        if stride == 1:
            old = k.load(address, self.dtype, self.lanes, mask=reads)
        else:
            offsets = k.iota(self.lanes, I32) * (stride * itemsize(self.dtype))
            old = k.gather(address, offsets, self.dtype, reads)
        value = k.fma(old, self.beta, value * self.alpha)
        if stride != 1:
            k.scatter(value, address, offsets, self.dtype, mask)
        elif mask is None or k.target.has_masks or isinstance(mask.ir, ir.Constant):
            k.store(value, address, self.dtype, mask=mask)
        else:  # masked stores are slow on chips with AVX2 (20 times on an EPYC); most are whole
            with k.if_else(k.all(mask)) as (whole, part):
                with whole:
                    k.store(value, address, self.dtype)
                with part:
                    k.store(value, address, self.dtype, mask=mask)


def store_streaming(k: KernelBuilder, value: Any, address: IntLike, dtype: str) -> None:
    """Write whole vectors, at an address that the size of one divides, past the caches."""
    raw = k._narrow(value, dtype)
    size = min(itemsize(dtype) * value.lanes, k.target.vector_bytes)
    store = k.ir.store(raw, k.pointer(address, raw.type), align=size)
    store.set_metadata("nontemporal", k.module.add_metadata([ir.Constant(I32, 1)]))


def flush_streamed(k: KernelBuilder) -> None:
    """Make this thread's streamed stores visible before it reports that it is done."""
    if k.target.triple.startswith(("x86_64", "amd64")):
        k.external("llvm.x86.sse.sfence", VOID)
