"""The worker pool of threads.py for a library without Python: no hook tells it of a fork, so the
word that says who has the pool holds the process's number too. A child finds its parent's there,
takes the pool over and makes workers of its own.
"""

from __future__ import annotations

from llvmlite import ir

from bedstone.backends.cpu import threads
from bedstone.backends.cpu.builder import PARALLEL_SYMBOL
from bedstone.backends.cpu.irtypes import I64
from bedstone.backends.cpu.library.interface import MAX_THREADS
from bedstone.backends.cpu.library.language import WORD, LibraryBuilder
from bedstone.backends.cpu.values import Int, Mask

AFFINITY_BYTES = 1024  # of the system's CPU set: 8192 CPUs
DEFAULT_THREADS = "default_threads"


class LibraryPool(threads.Pool):
    """A pool whose BUSY word is 2 * process number, plus 1 while a phase runs."""

    def _idle(self) -> Int:
        return Int(self.k, self.k.ir.sext(self.c("getpid"), I64)) * 2

    def enter(self) -> Mask:
        k, idle = self.k, self._idle()
        found = self.read(self.state + threads.BUSY, "acquire")
        ours = (found >> 1).eq(idle >> 1)
        entered = k.variable(0)
        with k.if_(found.eq(idle) | ~ours):
            swapped = self.swap(self.state + threads.BUSY, found, idle + 1)
            entered.set(k.select(swapped, k.as_int(1), 0))
            with k.if_(swapped & ~ours):
                self.write(0, self.state + threads.WORKERS)
        return entered.value.ne(0)

    def leave(self) -> None:
        self.write(self._idle(), self.state + threads.BUSY, "release")


def emit_pool(k: LibraryBuilder) -> None:
    """The pool, and the number of threads that a call uses by default."""
    pool = LibraryPool(k)
    pool.emit_run()
    pool.emit_worker()
    pool.emit_member()  # (nobody names a team here)
    pool.emit_parallel()
    parallel = k.module.globals[PARALLEL_SYMBOL]
    parallel.linkage = "internal"
    k._declared[PARALLEL_SYMBOL] = parallel
    chosen = ir.GlobalVariable(k.module, I64, "chosen_threads")
    chosen.linkage, chosen.initializer = "internal", ir.Constant(I64, 0)

    def address() -> Int:
        return Int(k, k.ir.ptrtoint(chosen, I64))

    with k.answering(DEFAULT_THREADS, 0):
        found = k.variable(pool.read(address()))
        with k.if_(found.value.eq(0)):
            cpus = k.alloca(AFFINITY_BYTES)
            pool.c("memset", cpus, 0, AFFINITY_BYTES, result=I64)
            pool.c("sched_getaffinity", 0, AFFINITY_BYTES, cpus)  # (no bits where it fails)
            with k.loop(0, AFFINITY_BYTES // WORD) as i:
                bits = k.external("llvm.ctpop.i64", I64, k.word(cpus, i).ir)
                found.set(found.value + Int(k, bits))
            found.set(k.min(k.max(found.value, 1), MAX_THREADS))
            pool.write(found.value, address())
        k.give(found.value)
    with k.answering("threads_of", 1) as (threads_,):
        with k.if_(threads_.eq(0)):
            k.give(k.ask(DEFAULT_THREADS))
        k.give(threads_)
    with k.api("bs_set_num_threads") as arguments:
        number = arguments["threads"]
        k.require((number >= 0) & (number <= MAX_THREADS), "bad_threads")
        pool.write(number, address())
    with k.api("bs_get_num_threads"):
        k.give(k.ask(DEFAULT_THREADS))
