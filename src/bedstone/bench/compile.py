"""`bedstone compile`: plan a suite's problems ahead of time, so that the disk cache holds their
kernels before a program asks for them: for a device of this machine, or for a GPU elsewhere."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator
from typing import Any

import bedstone
from bedstone.bench import main as bench
from bedstone.plan import registry

EPILOG = """\
examples:
  bedstone compile --suite resnet50 --directions all                     for this machine's CPU
  bedstone compile --suite paper,vgg19 --dtype bfloat16 --device cuda    for its GPU
  bedstone compile --suite resnet50 --layout nhwc --architecture sm_90   for a GPU that is not here

Kernels go to the disk cache (`bedstone cache`); on another machine, BEDSTONE_CACHE_DIR names a copy
of it. A CPU's kernels are of no use to another kind of CPU.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bedstone compile`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    bench.add_problem_arguments(parser)
    add = parser.add_argument
    add("--architecture", metavar="SM", help="compile for this kind of GPU instead: sm_80, sm_90, "
        "sm_100, gfx942")  # fmt: skip
    add("--every", action="store_true", help="with --architecture: every algorithm that takes a "
        "problem, not only the one that would be chosen")  # fmt: skip


def main(args: argparse.Namespace) -> int:
    """Compile; returns 1 when a problem is taken by no algorithm, or its kernel by no compiler."""
    if not args.suite:
        raise bedstone.InvalidDescriptor("--suite", None, "the names of suites, or files")
    if args.architecture and not re.fullmatch(r"sm_\d\d\d?|gfx\w+", args.architecture):
        expected = "a GPU's architecture, such as sm_90 or gfx942"
        raise bedstone.InvalidDescriptor("--architecture", args.architecture, expected)
    if args.every and not args.architecture:
        raise bedstone.InvalidDescriptor("--every", True, "an --architecture with it")
    limit = bench.workspace_bytes(args)
    handle = None if args.architecture else bedstone.Handle(args.device)
    start, done, failures = time.perf_counter(), 0, 0
    for name, problem in bench.problems_of(args):
        lines: Iterator[Any]
        if handle is None:
            lines = _elsewhere(problem, args.architecture, limit, args.every)
        else:
            lines = iter([handle.plan(problem, workspace_limit=limit).algorithm])
        try:
            found = [str(line) for line in lines]
        except (bedstone.BedstoneError, RuntimeError) as error:
            found, failed = [str(error)], True
        else:
            failed = not found
        done, failures = done + 1, failures + failed
        print(f"{name[:28]:28} {problem}")
        print(*(f"  {line}" for line in found or ["no algorithm takes it"]), sep="\n", flush=True)
    seconds = time.perf_counter() - start
    print(f"{done} problems, {failures} not compiled, {seconds:.1f} s")
    return int(failures > 0)


def _elsewhere(
    problem: bedstone.Problem, architecture: str, limit: int, every: bool
) -> Iterator[Any]:
    """What the GPU backends compile for an architecture."""
    compile_ahead: Any = registry.backend_attribute("triton", "compile_ahead")
    return compile_ahead(problem, architecture, limit, every)  # type: ignore[no-any-return]
