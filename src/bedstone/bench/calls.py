"""What a call costs besides its arithmetic: Python, planning, compiling, loading, importing."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import bedstone

NEVER = 1 << 62  # calls before a kind is compiled
TINY = "convolution forward n1c16h14k32r3p1 float32"


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
    rows += _jax_rows(x, w)
    with tempfile.TemporaryDirectory() as folder:
        rows.append(("first use: plan and compile", _fresh(folder), "ms"))
        rows.append(("second process: plan and load", _fresh(folder), "ms"))
    rows.append(("import bedstone", _imported(), "ms"))
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


def _fresh(cache: str) -> float:
    """Milliseconds until a plan is ready in a new process (imports not counted)."""
    program = (
        "import time, bedstone, bedstone.backends.cpu.kernel\n"
        "from bedstone.backends.cpu import threads; threads.runtime()\n"
        f"p = bedstone.parse_problem({TINY!r})\n"
        "t = time.perf_counter(); bedstone.Handle().plan(p)\n"
        "print((time.perf_counter() - t) * 1e3)"
    )
    return float(_python(program, BEDSTONE_CACHE_DIR=cache))


def _imported() -> float:
    program = (
        "import time; t = time.perf_counter(); import bedstone; "
        "print((time.perf_counter() - t) * 1e3)"
    )
    return min(float(_python(program)) for _ in range(3))


def _python(program: str, **environment: str) -> str:
    import os

    answer = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    return answer.stdout
