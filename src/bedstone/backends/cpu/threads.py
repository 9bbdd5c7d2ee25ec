"""The worker pool: threads parked inside compiled code, a few microseconds from work.

A parallel phase hands out numbered tasks through an atomic counter; the caller takes part. A
worker spins for a moment after its last phase, then sleeps on a condition variable. A worker
that has not woken when the tasks run out is not waited for: the caller takes its order back.
A second caller that finds the pool busy runs all its tasks on its own thread, so concurrent
callers neither block each other nor oversubscribe the cores.

While bedstone serves a framework, the threads may be those of the framework's OpenMP runtime, its
team (`set_default_num_threads`): the pool's own stay asleep then.

Scratch memory belongs to threads (a pthread key): it grows to the largest request, lives as long
as its thread and is never shared. After a fork the child starts with no workers and makes new
ones at its first phase.

The pool is itself emitted by the builder, so it needs Python only to be loaded.
"""

from __future__ import annotations

import ctypes
import functools
import os

import llvmlite.binding as llvm
from llvmlite import ir

from bedstone.backends.cpu.builder import (
    CALL_SCRATCH,
    JOB_ARGUMENTS,
    JOB_SCRATCH,
    PARALLEL_SYMBOL,
    SCRATCH_SYMBOL,
    Function,
    KernelBuilder,
)
from bedstone.backends.cpu.irtypes import I8, I32, I64, VOID
from bedstone.backends.cpu.objects import LoadedObject, obtain
from bedstone.backends.cpu.target import Target
from bedstone.backends.cpu.values import Int, IntLike, Mask
from bedstone.plan.config import team_address

START_SYMBOL, FORK_SYMBOL = "bedstone_pool_start", "bedstone_pool_after_fork"
MAX_WORKERS = 255
WORKER_SPINS = 4000  # pauses before a worker sleeps: 50-100 us, more than a gap between phases
CALLER_SPINS = 2000  # pauses of the caller before it starts to yield its core
SIGNAL_SET_BYTES = 128

# The pool's state, in bytes from its start; each group has cache lines of its own.
BUSY, GENERATION, WORKERS = 0, 8, 16
TEAM = 24  # the address of the word that names the team; 0: there is no such word
JOB, FRAME, SCRATCH = 64, 72, 80
COUNTER = 128
KEYS = 192  # one pthread key for each kind of scratch
SLOTS = 256
# A worker's slot. `go` is even when an order stands, odd (or 0) when there is none.
GO, SLEEPING, DONE, MUTEX, CONDITION, SLOT_BYTES = 0, 8, 64, 128, 192, 256
STATE_BYTES = SLOTS + MAX_WORKERS * SLOT_BYTES
SCRATCH_HEADER = 64  # before a scratch block: its size


@functools.cache
def runtime() -> LoadedObject:
    """The loaded pool. Its symbols are visible to every kernel loaded afterwards."""
    pool = obtain("thread pool", emit_pool)
    for name in (PARALLEL_SYMBOL, SCRATCH_SYMBOL):
        llvm.add_symbol(name, pool.address(name))
    pool.function(START_SYMBOL, [ctypes.c_int64])(team_address())
    after_fork = pool.function(FORK_SYMBOL, [])
    os.register_at_fork(after_in_child=after_fork)
    # Workers stand in this code until the process ends: it must never be unloaded.
    pool.engine.detach()
    return pool


def emit_pool(target: Target) -> KernelBuilder:
    """The module of the pool."""
    pool = Pool(KernelBuilder(target, "pool"))
    pool.emit_start()
    pool.emit_after_fork()
    pool.emit_scratch()
    pool.emit_run()
    pool.emit_worker()
    pool.emit_member()
    pool.emit_parallel()
    return pool.k


class Pool:
    """Emits the pool's functions."""

    def __init__(self, k: KernelBuilder) -> None:
        self.k = k
        self.state_global = ir.GlobalVariable(self.k.module, ir.ArrayType(I8, STATE_BYTES), "state")
        self.state_global.linkage = "internal"
        self.state_global.initializer = ir.Constant(self.state_global.value_type, None)
        self.state_global.align = SLOT_BYTES

    # Small words of this file ----------------------------------------------------------------

    @property
    def state(self) -> Int:
        return Int(self.k, self.k.ir.ptrtoint(self.state_global, I64))

    def read(self, address: IntLike, ordering: str = "monotonic") -> Int:
        return Int(self.k, self.k.ir.load_atomic(self.k.pointer(address, I64), ordering, 8))

    def write(self, value: IntLike, address: IntLike, ordering: str = "monotonic") -> None:
        pointer = self.k.pointer(address, I64)
        self.k.ir.store_atomic(self.k.to_ir(value), pointer, ordering, 8)

    def swap(self, address: IntLike, old: IntLike, new: IntLike) -> Mask:
        """Compare and exchange; true if it took place."""
        k = self.k
        values = [k.to_ir(v) for v in (old, new)]
        pair = k.ir.cmpxchg(k.pointer(address, I64), *values, "acq_rel", "acquire")
        return Mask(k, k.ir.extract_value(pair, 1))

    def c(self, name: str, *arguments: IntLike, result: ir.Type = I32) -> ir.Value:
        """A C function; every argument passes as a 64-bit integer."""
        return self.k.external(name, result, *(self.k.to_ir(a) for a in arguments))

    def pause(self) -> None:
        if self.k.target.triple.startswith(("x86_64", "amd64")):
            self.k.external("llvm.x86.sse2.pause", VOID)
        else:
            self.k.external("llvm.aarch64.hint", VOID, ir.Constant(I32, 1))

    def address_of(self, name: str) -> Int:
        return Int(self.k, self.k.ir.ptrtoint(self.k.module.globals[name], I64))

    def enter(self) -> Mask:
        """Take the pool; false if another caller has it."""
        return self.swap(self.state + BUSY, 0, 1)

    def leave(self) -> None:
        """Give the pool back."""
        self.write(0, self.state + BUSY, "release")

    # Functions -------------------------------------------------------------------------------

    def emit_start(self) -> None:
        """start(team's word), once a process, before anything else: make the scratch keys, freed
        with their thread."""
        k = self.k
        free = ir.Function(k.module, ir.FunctionType(VOID, [I64]), "free")
        k._declared["free"] = free
        with k.function(START_SYMBOL, I64, export=True) as (team,):
            self.write(team, self.state + TEAM)
            for which in (JOB_SCRATCH, CALL_SCRATCH):
                self.c("pthread_key_create", self.state + KEYS + 8 * which, self.address_of("free"))

    def emit_after_fork(self) -> None:
        """In the child: the workers are gone, and whoever held the pool is too."""
        k = self.k
        with k.function(FORK_SYMBOL, export=True):
            for field in (BUSY, WORKERS):
                self.write(0, self.state + field)

    def emit_scratch(self) -> None:
        """i64 bedstone_scratch(which, bytes): this thread's block, made larger if need be."""
        k = self.k
        function = Function(k, SCRATCH_SYMBOL, [I64, I64], result=I64)
        with k._inside(function):
            which, size = function.arguments()
            key = self.read(self.state + KEYS + which * 8)
            block = k.variable(Int(k, self.c("pthread_getspecific", key, result=I64)))
            present = k.select(block.value.eq(0), 0, 1)
            too_small = k.variable(0 + present)
            with k.if_(present.ne(0)):
                too_small.set(k.select(self.read(block.value) < size, 1, 0))
            with k.if_(present.eq(0) | too_small.value.ne(0)):
                self.c("free", block.value, result=VOID)
                holder = k.alloca(8)
                total = size + SCRATCH_HEADER
                failed = self.c("posix_memalign", holder, SCRATCH_HEADER, total)
                with k.if_(Mask(k, k.ir.icmp_signed("!=", failed, ir.Constant(I32, 0)))):
                    self.c("abort", result=VOID)
                block.set(self.read(holder))
                self.write(size, block.value)
                self.c("pthread_setspecific", key, block.value)
            k.ir.ret((block.value + SCRATCH_HEADER).ir)

    def emit_run(self) -> None:
        """run(job, frame, counter, scratch bytes): this thread's share of a phase."""
        k = self.k
        with k.function("run", I64, I64, I64, I64) as (job, frame, counter, size):
            scratch = k.variable(0)
            if SCRATCH_SYMBOL in k.module.globals:
                with k.if_(size > 0):
                    which = ir.Constant(I64, JOB_SCRATCH)
                    block = k.ir.call(k.module.globals[SCRATCH_SYMBOL], [which, size.ir])
                    scratch.set(Int(k, block))
            type_ = ir.FunctionType(VOID, [I64] * JOB_ARGUMENTS)
            function = k.ir.inttoptr(job.ir, type_.as_pointer())
            k.ir.call(function, [frame.ir, counter.ir, scratch.value.ir])

    def emit_worker(self) -> None:
        """worker(slot): wait for an order, claim it, carry it out; for ever."""
        k = self.k
        with k.function("worker", I64) as (slot,):
            signals = k.alloca(SIGNAL_SET_BYTES)  # signals are for the program's own threads
            self.c("memset", signals, 0xFF, SIGNAL_SET_BYTES, result=I64)
            self.c("pthread_sigmask", 0, signals, 0)
            order = k.variable(self.read(slot + GO, "acquire"))

            def idle() -> Mask:
                return (order.value & 1).ne(0) | order.value.eq(0)

            with k.while_(lambda: slot.ne(0)):
                order.set(self.read(slot + GO, "acquire"))
                spins = k.variable(0)
                with k.while_(lambda: idle() & (spins.value < WORKER_SPINS)):
                    self.pause()
                    spins.set(spins.value + 1)
                    order.set(self.read(slot + GO, "acquire"))
                with k.if_(idle()):
                    self.c("pthread_mutex_lock", slot + MUTEX)
                    self.write(1, slot + SLEEPING, "seq_cst")
                    order.set(self.read(slot + GO, "seq_cst"))
                    with k.while_(idle):
                        self.c("pthread_cond_wait", slot + CONDITION, slot + MUTEX)
                        order.set(self.read(slot + GO, "seq_cst"))
                    self.write(0, slot + SLEEPING)
                    self.c("pthread_mutex_unlock", slot + MUTEX)
                with k.if_(self.swap(slot + GO, order.value, order.value + 1)):
                    self._take_part()
                    self.write(order.value, slot + DONE, "release")

    def emit_member(self) -> None:
        """member(unused): the share of one thread of the team."""
        with self.k.function("member", I64):
            self._take_part()

    def _take_part(self) -> None:
        """Run a share of the phase that is published."""
        state = self.state
        fields = [self.read(state + field) for field in (JOB, FRAME)]
        self.k.call("run", *fields, state + COUNTER, self.read(state + SCRATCH))

    def emit_parallel(self) -> None:
        """void bedstone_parallel(job, frame, tasks, threads, scratch bytes)."""
        k = self.k
        with k.function(PARALLEL_SYMBOL, *[I64] * 5, export=True) as arguments:
            job, frame, tasks, threads, scratch = arguments
            helpers = k.min(k.min(threads, tasks) - 1, MAX_WORKERS)
            entered = k.variable(0)
            with k.if_(helpers > 0):
                entered.set(k.select(self.enter(), 1, 0))
            with k.if_else(entered.value.ne(0)) as (together, alone):
                with together:
                    self._publish(job, frame, scratch)
                    team = self._team()
                    with k.if_else(team.ne(0)) as (lent, own):
                        with lent:
                            self._run_in(team, helpers + 1)
                        with own:
                            self._create_workers(helpers)
                            helpers = k.min(helpers, self.read(self.state + WORKERS))
                            order = self._give_orders(helpers)
                            k.call("run", job, frame, self.state + COUNTER, scratch)
                            self._meet(helpers, order)
                    self.leave()
                with alone, k.if_(tasks > 0):
                    counter = k.alloca(8)
                    self.write(0, counter)
                    k.call("run", job, frame, counter, scratch)

    def _publish(self, job: Int, frame: Int, scratch: Int) -> None:
        """Write down the phase for those who will take part in it."""
        for value, field in ((job, JOB), (frame, FRAME), (scratch, SCRATCH), (0, COUNTER)):
            self.write(value, self.state + field)

    def _team(self) -> Int:
        """The function that runs work in the team's threads, or 0."""
        k = self.k
        team = k.variable(self.read(self.state + TEAM))
        with k.if_(team.value.ne(0)):
            team.set(self.read(team.value))
        return team.value

    def _run_in(self, team: Int, threads: Int) -> None:
        """The phase in the threads of the team, this one among them."""
        k = self.k
        type_ = ir.FunctionType(VOID, [I64, I64, I32, I32])
        count, none = k.ir.trunc(threads.ir, I32), ir.Constant(I32, 0)
        work, data = self.address_of("member").ir, ir.Constant(I64, 0)
        k.ir.call(k.ir.inttoptr(team.ir, type_.as_pointer()), [work, data, count, none])

    def _create_workers(self, wanted: Int) -> None:
        """Make workers until there are `wanted`, or the system refuses."""
        k, state = self.k, self.state
        refused = k.variable(0)
        thread = k.alloca(8)
        with k.while_(lambda: (self.read(state + WORKERS) < wanted) & refused.value.eq(0)):
            workers = self.read(state + WORKERS)
            slot = state + SLOTS + workers * SLOT_BYTES
            for field in (GO, SLEEPING, DONE):
                self.write(0, slot + field)
            self.c("pthread_mutex_init", slot + MUTEX, 0)
            self.c("pthread_cond_init", slot + CONDITION, 0)
            failed = self.c("pthread_create", thread, 0, self.address_of("worker"), slot)
            is_made = Mask(k, k.ir.icmp_signed("==", failed, ir.Constant(I32, 0)))
            with k.if_else(is_made) as (made, not_made):
                with made:
                    self.c("pthread_detach", self.read(thread))
                    self.write(workers + 1, state + WORKERS)
                with not_made:
                    refused.set(Int(k, ir.Constant(I64, 1)))

    def _give_orders(self, helpers: Int) -> Int:
        """Order the first `helpers` workers to take part, and wake those that sleep."""
        k, state = self.k, self.state
        order = self.read(state + GENERATION) + 2
        self.write(order, state + GENERATION)
        with k.loop(0, helpers) as i:
            slot = state + SLOTS + i * SLOT_BYTES
            self.write(order, slot + GO, "seq_cst")
            with k.if_(self.read(slot + SLEEPING, "seq_cst").ne(0)):
                self.c("pthread_mutex_lock", slot + MUTEX)
                self.c("pthread_cond_signal", slot + CONDITION)
                self.c("pthread_mutex_unlock", slot + MUTEX)
        return order

    def _meet(self, helpers: Int, order: Int) -> None:
        """Take back orders that no worker has claimed; wait for the workers that have."""
        k = self.k
        with k.loop(0, helpers) as i:
            slot = self.state + SLOTS + i * SLOT_BYTES
            with k.if_(~self.swap(slot + GO, order, order + 1)):
                spins = k.variable(0)
                with k.while_(lambda: self.read(slot + DONE, "acquire").ne(order)):
                    spins.set(spins.value + 1)
                    with k.if_else(spins.value < CALLER_SPINS) as (early, late):
                        with early:
                            self.pause()
                        with late:
                            self.c("sched_yield")
