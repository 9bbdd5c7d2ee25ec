"""Compiling ahead of time: fill the disk cache for problems that a device elsewhere will be given.

    python -m bedstone.backends.triton.ahead --architecture sm_90 'convolution forward ...' ...

No device is needed, nor the architecture of the one that is here. Prints, for each kernel, its
registers, spilled bytes and shared memory.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Iterator

from bedstone.backends.triton import compile, launch
from bedstone.spec.problem import Problem, parse_problem


def compile_ahead(
    problem: Problem, architecture: str, backend: str = "triton"
) -> Iterator[tuple[str, launch.Launch]]:
    """(algorithm, launch) for every algorithm of the backend that takes the problem; the binaries
    are in the disk cache afterwards. Raises compile.CompileError."""
    module = f"bedstone.backends.{backend}.{problem.primitive}"
    if importlib.util.find_spec(module) is None:
        return
    target = launch.target_device(architecture)
    for algorithm in importlib.import_module(module).ALGORITHMS:
        if algorithm.supports(problem, target) is None:
            for made in launch.launches_of(algorithm.build(problem, target)):
                yield algorithm.name, made


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit status is 1 when no algorithm took a problem."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--architecture", required=True, help="sm_80, sm_90, sm_100, gfx942")
    parser.add_argument("--backend", default="triton", help="triton (default) or gluon")
    parser.add_argument("problem", nargs="+", help="problem lines, as str(problem) prints them")
    options = parser.parse_args(arguments)
    untaken = 0
    for line in options.problem:
        made = list(compile_ahead(parse_problem(line), options.architecture, options.backend))
        untaken += not made
        print(line if made else f"{line}: no algorithm takes it")
        for name, one in made:
            report = compile.inspect(one.source, options.architecture, one.binary)
            print(
                f"  {name} {one.source.name}: {report.registers} registers, "
                f"{report.spilled_bytes} bytes spilled, {report.shared} bytes shared"
            )
    return 1 if untaken else 0


if __name__ == "__main__":
    sys.exit(main())
