"""The worker pool: every task once, forks, concurrent callers, thread counts, teams, exit."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from bedstone.backends.cpu.builder import KernelBuilder
from bedstone.backends.cpu.kernel import compiled
from bedstone.plan.config import (
    config,
    get_num_threads,
    set_default_num_threads,
    set_num_threads,
)
from bedstone.spec.errors import InvalidDescriptor

TASKS, LINE = 500, 64
SCRATCH = 4096


def counting_kernel(delay=0):
    """Adds 1 to slot t of p0 for each task t, through scratch memory; `delay` busy rounds each."""

    def emit(target):
        k = KernelBuilder(target)
        with k.entry("entry", pointers=1) as call:
            slots = call.pointers[0]
            with (
                k.parallel(TASKS, call.threads, scratch=SCRATCH) as job,
                job.each_task() as task,
            ):
                k.store(k.load(slots + task * 8, "int64"), job.scratch, "int64", offset=SCRATCH - 8)
                spin = k.variable(k.constant(1.0, "float64"))
                with k.loop(0, delay):
                    spin.set(spin.value * 0.5 + 0.5)
                one = k.cast_to_int(spin.value)
                total = k.load(job.scratch, "int64", offset=SCRATCH - 8) + one
                k.store(total, slots + task * 8, "int64")
        return k

    return compiled(f"test counting {delay}", emit, 1)


def run(kernel, slots):
    kernel([slots.ctypes.data])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_each_task_runs_once(threads):
    kernel, slots = counting_kernel(), np.zeros(TASKS, np.int64)
    with config(num_threads=threads):
        for _ in range(200):
            run(kernel, slots)
    assert (slots == 200).all()


def test_two_callers_at_once():
    kernel = counting_kernel(delay=200)
    results = [np.zeros(TASKS, np.int64) for _ in range(4)]

    def caller(slots):
        with config(num_threads=2):
            for _ in range(50):
                run(kernel, slots)

    callers = [threading.Thread(target=caller, args=(slots,)) for slots in results]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(timeout=60)
        assert not thread.is_alive()
    for slots in results:
        assert (slots == 50).all()


WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
PARALLEL = ctypes.CFUNCTYPE(None, WORK, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


@pytest.fixture
def team():
    """Another runtime's threads while the test runs: the sizes of the teams that were asked for."""
    sizes = []

    @PARALLEL
    def parallel(work, data, threads, flags):
        sizes.append(threads)
        others = [threading.Thread(target=work, args=(data,)) for _ in range(threads - 1)]
        for thread in others:
            thread.start()
        work(data)
        for thread in others:
            thread.join()

    set_default_num_threads(3, team=ctypes.cast(parallel, ctypes.c_void_p).value)
    yield sizes
    set_default_num_threads(None)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_each_task_runs_once_in_a_team(team, threads):
    kernel, slots = counting_kernel(), np.zeros(TASKS, np.int64)
    with config(num_threads=threads):
        for _ in range(20):
            run(kernel, slots)
    assert (slots == 20).all()
    assert team == [threads] * 20 * (threads > 1)  # one thread needs no team
    set_default_num_threads(None)
    run(kernel, slots)
    assert len(team) == 20 * (threads > 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_leaves_the_team_to_its_parent(team):
    kernel, slots = counting_kernel(), np.zeros(TASKS, np.int64)
    with config(num_threads=2):
        run(kernel, slots)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            run(kernel, slots)
            set_default_num_threads(2, team=1)  # (an address that a call would not survive)
            run(kernel, slots)
            os._exit(0 if (slots == 3).all() and len(team) == 1 else 1)
        _, status = os.waitpid(child, 0)
    assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_that_loads_the_pool_itself_leaves_the_team_too():
    program = """
import os, signal
import bedstone
bedstone.set_default_num_threads(2, team=1)  # no kernel has run: the pool is not loaded
child = os.fork()
if child == 0:
    signal.alarm(60)
    import numpy as np
    x, w = np.ones((2, 8, 32, 32), np.float32), np.ones((8, 8, 3, 3), np.float32)
    bedstone.convolution(x, w)
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "0", done.stderr


@pytest.mark.parametrize("wrong", [{"team": 0}, {"team": "x"}, {"threads": None, "team": 1}])
def test_a_wrong_team_is_refused(wrong):
    with pytest.raises(InvalidDescriptor, match="team: got .*, expected None, or with `threads`"):
        set_default_num_threads(**{"threads": 2, **wrong})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_fork_after_use():
    kernel, slots = counting_kernel(delay=50), np.zeros(TASKS, np.int64)
    with config(num_threads=3):
        run(kernel, slots)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            for _ in range(20):
                run(kernel, slots)
            os._exit(0 if (slots == 21).all() else 1)
        run(kernel, slots)
        _, status = os.waitpid(child, 0)
    assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0
    assert (slots == 2).all()


def test_workers_that_sleep_wake_up():
    kernel, slots = counting_kernel(delay=2000), np.zeros(TASKS, np.int64)
    with config(num_threads=2):
        for _ in range(5):
            time.sleep(0.02)
            run(kernel, slots)
    assert (slots == 5).all()


def child(code, **environment):
    command = [sys.executable, "-c", code]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def test_process_exits_with_workers_parked():
    code = f"""
import sys, numpy
sys.path.insert(0, {os.path.dirname(__file__)!r})
import test_cpu_threads as t
slots = numpy.zeros(t.TASKS, numpy.int64)
with t.config(num_threads=4):
    t.run(t.counting_kernel(), slots)
assert (slots == 1).all()
print("done")
"""
    done = child(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "done"


def test_thread_count_from_the_environment():
    code = "from bedstone.plan.config import get_num_threads as g; print(g())"
    environment = {k: v for k, v in os.environ.items() if k != "BEDSTONE_NUM_THREADS"}
    assert child(code, **{**environment, "OMP_NUM_THREADS": "1"}).stdout.strip() == "1"
    assert child(code, BEDSTONE_NUM_THREADS="3", OMP_NUM_THREADS="1").stdout.strip() == "3"


def test_set_num_threads():
    before = get_num_threads()
    try:
        set_num_threads(1)
        assert get_num_threads() == 1
    finally:
        set_num_threads(before)
