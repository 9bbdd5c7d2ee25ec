"""Times the C library against plans: python bench/c_library.py SUITE DIRECTION BATCH [THREADS].

Each layer of a suite in three ways, interleaved: cpu:implicit_gemm, the algorithm that a plan
chooses by itself, and the library built for this machine. Prints the library's time divided by
each of the others', and the largest difference of results.
"""

from __future__ import annotations

import math
import re
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "compat"))

import c_binding  # noqa: E402
from c_algorithm import CLibrary  # noqa: E402

import bedstone  # noqa: E402
from bedstone.bench.timing import interleaved  # noqa: E402
from bedstone.compat.c.build import build  # noqa: E402

SUITES = ROOT / "src" / "bedstone" / "bench" / "suites"


def main(suite: str, direction: str, batch: str, threads: str = "2") -> None:
    bedstone.set_num_threads(int(threads))
    handle = bedstone.Handle()
    ratios: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        library = CLibrary(c_binding.Library(Path(folder) / "libbedstone.so"), int(threads))
        for line in (SUITES / f"{suite}.txt").read_text().splitlines():
            if line.startswith("n"):
                shape = re.sub(r"^n\d+", f"n{batch}", line.split()[0])
                problem = bedstone.parse_problem(f"convolution {direction} {shape} float32")
                ratios.append(measure(problem, handle, library))
    for name, column in zip(("cpu:implicit_gemm", "the choice"), zip(*ratios)):
        mean = math.exp(sum(map(math.log, column)) / len(column))
        print(f"{suite} {direction}: {mean:.2f} of {name}, slowest {max(column):.2f}")


def measure(problem, handle, library):
    """(library / cpu:implicit_gemm, library / the choice) for one layer."""
    random = np.random.default_rng(0)
    arrays = [random.standard_normal(o.desc.dims).astype(np.float32) for o in problem.operands]
    pointers = [array.ctypes.data for array in arrays]
    calls, results, names = [], [], []
    for forced in ("cpu:implicit_gemm", None, "library"):
        if forced == "library":
            size, kernel = library.workspace(problem, None), library.build(problem, None)
        else:
            plan = handle.plan(problem, forced, workspace_limit=None)
            size, kernel = plan.workspace_size, plan.kernel
            names.append(plan.algorithm)
        space = np.empty(size + 1, np.uint8)
        calls.append(lambda k=kernel, s=space: k(pointers, s.ctypes.data, 1.0, 0.0, 0))
        calls[-1]()
        results.append(arrays[-1].copy())
    error = np.abs(results[0] - results[2]).max() / np.abs(results[0]).max()
    gemm, choice, own = (times.median for times in interleaved(calls, rounds=5))
    print(
        f"{str(problem):50} {own * 1e3:8.2f} ms  {own / gemm:.2f} of {names[0]}  "
        f"{own / choice:.2f} of {names[1]}  error {error:.0e}", flush=True,
    )  # fmt: skip
    return own / gemm, own / choice


if __name__ == "__main__":
    main(*sys.argv[1:])
