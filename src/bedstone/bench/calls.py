"""What a call costs besides its arithmetic: Python, planning, compiling, loading, importing."""

from __future__ import annotations

import csv
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import bedstone
from bedstone.bench import machine, peers, report
from bedstone.bench.operands import Operands
from bedstone.plan.runtime import runtime_of

NEVER = 1 << 62  # calls before a kind is compiled
TINY = "convolution forward n1c16h14k32r3p1 float32"
TINIES = {  # nearly all of a call of these is the call
    "convolution": "convolution forward n1c4h6k8r3p1 float32",
    "max pooling": "pooling forward n1c8h8r2u2 float32 mode=max",
    "softmax": "softmax forward 8x16 axes=1 float32",
    "relu": "activation forward 1x8x8x8 kind=relu float32",
    "transform": "tensor_ops transform 1x8x8x8 y=NHWC float32",
}
KERNELS = "kernels"  # the suite that is compiled
# A new process plans every problem of the suite: seconds of the imports, of each plan, and how many
# kernels were compiled.
FRESH = """
import json, sys, time
start = time.perf_counter()
import bedstone
from bedstone.backends.cpu import objects, threads
from bedstone.bench import suites
from bedstone.plan import registry
threads.runtime()
compile_object, compiled = objects.compile_object, []
objects.compile_object = lambda *given: compiled.append(1) or compile_object(*given)
problems = [problem for _, problem in suites.others(suites.read(sys.argv[1]), "float32")]
for problem in problems:
    registry.candidates(problem.primitive, bedstone.Handle().device)
imports, times = time.perf_counter() - start, []
for problem in problems:
    start = time.perf_counter()
    bedstone.Handle().plan(problem)
    times.append(time.perf_counter() - start)
print(json.dumps([imports, times, len(compiled)]))
"""


def table() -> list[tuple[str, float, str]]:
    """(what, value, unit) rows."""
    problem = bedstone.parse_problem(TINY)
    handle = bedstone.Handle()
    plan = handle.plan(problem)
    x, w, y = (np.ones(o.desc.dims, np.float32) for o in problem.operands)
    pointers = [array.ctypes.data for array in (x, w, y)]
    rows = [
        ("plan look-up", _microseconds(lambda: handle.plan(problem)), "us"),
        ("planned call on pointers", _microseconds(lambda: plan(*pointers)), "us"),
        ("planned call on arrays, checked", _microseconds(lambda: plan.execute(x, w, y)), "us"),
        ("functional call", _microseconds(lambda: bedstone.convolution(x, w, padding=1)), "us"),
    ]
    try:
        import torch
    except ImportError:
        pass
    else:
        torch.set_num_threads(bedstone.get_num_threads())
        tx, tw = torch.from_numpy(x), torch.from_numpy(w)
        with torch.no_grad():
            call = _microseconds(lambda: torch.nn.functional.conv2d(tx, tw, padding=1))
        rows.append(("torch conv2d, the same problem", call, "us"))
        rows += _left_to_torch()
        rows += _tiny_rows()
    rows += _jax_rows(x, w)
    return rows + _first_uses() + [("import bedstone", _imported(), "ms")]


def write_csv(path: str, rows: Sequence[tuple[str, float, str]]) -> None:
    """The table as a file, with what it depends on in its head."""
    head = report.environment(bedstone.Handle().device, machine.Ceilings({}, 0.0))
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.writelines(f"# {name}: {value}\n" for name, value in head.items())
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("what", "value", "unit"))
        writer.writerows((what, f"{value:.2f}", unit) for what, value, unit in rows)


def _tiny_rows() -> list[tuple[str, float, str]]:
    """Plan look-up and call of a tiny problem of each primitive, and PyTorch's own call."""
    rows, handle, runtime = [], bedstone.Handle(), runtime_of("cpu")
    for name, line in TINIES.items():
        problem = bedstone.parse_problem(line)
        operands = Operands(problem, runtime)
        workspace = runtime.empty(handle.plan(problem).workspace_size)
        where, pointers = runtime.pointer(workspace), operands.pointers

        def ours() -> None:
            handle.plan(problem).kernel(pointers, where, 1.0, 0.0, 0)  # noqa: B023

        theirs = peers.PEERS["torch"](problem, operands.arrays(), "cpu").call
        rows.append((f"tiny {name}: look-up and call", _microseconds(ours), "us"))
        rows.append((f"tiny {name}: torch", _microseconds(theirs), "us"))
    return rows


def _first_uses() -> list[tuple[str, float, str]]:
    """Plans of many kernels in a new process that must compile them, and in one that need not."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        _, compiling, _ = _fresh(folder)
        imports, loading, compiled = _fresh(folder)
    for what, times in (("first use, compiled", compiling), ("cached reload", loading)):
        for how, value in (("median", statistics.median(times)), ("max", max(times))):
            rows.append((f"{what}: {how} of {len(times)}", value * 1e3, "ms"))
    rows.append(("kernels compiled by a second process", float(compiled), ""))
    rows.append(("imports before a process's first plan", imports * 1e3, "ms"))
    return rows


def _jax_rows(x: np.ndarray, w: np.ndarray) -> list[tuple[str, float, str]]:
    """The same problem as a program that JAX has compiled, awaited: its own, and with ours in it;
    and one of a few numbers, where nearly all is the call."""
    try:
        import jax
    except ImportError:
        return []
    on_bedstone: Any = importlib.import_module("bedstone.frameworks.jax")

    sides = {
        "": lambda x, w: jax.lax.conv(x, w, (1, 1), "SAME"),
        " on bedstone": lambda x, w: on_bedstone.convolution(x, w, padding="SAME"),
    }
    few = np.ones((1, 1, 4, 4), np.float32), np.ones((1, 1, 3, 3), np.float32)
    rows = []
    for what, arrays in (("the same problem", (x, w)), ("of 4 x 4 numbers", few)):
        for name, function in sides.items():
            compiled, operands = jax.jit(function), [jax.numpy.asarray(a) for a in arrays]
            call = _microseconds(lambda: compiled(*operands).block_until_ready())  # noqa: B023
            rows.append((f"jax{name}, {what}", call, "us"))
    return rows


def _left_to_torch() -> list[tuple[str, float, str]]:
    """What PyTorch's small calls cost more while bedstone is patched under them and declines."""
    import torch

    enable = importlib.import_module("bedstone.frameworks.torch").enable

    if not hasattr(torch.library, "get_kernel"):
        return []
    x, w = torch.ones(1, 8, 8, 8), torch.ones(8, 8, 3, 3)
    named = {
        "relu": lambda: torch.relu(x),
        "conv2d": lambda: torch.nn.functional.conv2d(x, w, padding=1),
    }
    rows = []
    with torch.no_grad():
        for name, call in named.items():
            native = _microseconds(call)
            with enable(compile_after=NEVER):
                patched = _microseconds(call)
            rows.append((f"more for a {name} left to torch", patched - native, "us"))
    return rows


def _microseconds(call: Callable[[], object], seconds: float = 0.2) -> float:
    time.sleep(0.02)
    for _ in range(20):
        call()
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(20):
            call()
        times.append((time.perf_counter() - start) / 20)
    return sorted(times)[len(times) // 2] * 1e6


def _fresh(cache: str) -> tuple[float, list[float], int]:
    """What FRESH prints, with the kernels kept in that folder."""
    return tuple(json.loads(_python(FRESH, KERNELS, BEDSTONE_CACHE_DIR=cache)))


def _imported() -> float:
    program = (
        "import time; t = time.perf_counter(); import bedstone; "
        "print((time.perf_counter() - t) * 1e3)"
    )
    return min(float(_python(program)) for _ in range(3))


def _python(program: str, *arguments: str, **environment: str) -> str:
    import os

    answer = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | environment, capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    return answer.stdout
