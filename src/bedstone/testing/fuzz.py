"""The fuzzer: random problems on every algorithm that takes them, until time or count runs out.

    python -m bedstone.testing.fuzz --seconds 60 --seed 7
    python -m bedstone.testing.fuzz --primitive convolution --count 2000
    python -m bedstone.testing.fuzz --problem "convolution forward n1c3h8k4r3 float32"

A failure is printed as the arguments that repeat it, after the problem has been made smaller as
long as it still fails. Values, factors and placement follow from the problem's line. On the CPU
the work is done in a child process: a crash names its problem and the next child goes on.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import numpy as np

from bedstone.plan import registry
from bedstone.plan.device import Device
from bedstone.plan.handle import Handle
from bedstone.spec.problem import Problem, parse_problem
from bedstone.testing import gaps, problems
from bedstone.testing.conformance import usable
from bedstone.testing.harness import Case, Mismatch, in_place_names, run_case
from bedstone.testing.memory import PLACEMENTS
from bedstone.testing.shrink import shrunk

# (alpha, beta), the plain one most often.
FACTORS = ((1.0, 0.0), (1.0, 0.0), (1.0, 0.0), (1.0, 1.0), (2.0, -1.0), (-0.5, 0.0), (0.25, 2.0))
FILLS = ("integers", "random", "random", "special", "extreme")
THREADS = (0, 0, 1, 2, 3)
ALIAS_SHARE = 0.3  # of the problems that can run in place do
CRASH_LIMIT = 20  # children that may die before the fuzzer gives up


@dataclass(frozen=True)
class Failure:
    """A case that fails, as small as it could be made, and what happens."""

    case: Case
    check: str
    message: str

    def __str__(self) -> str:
        return self.message


def case_of(problem: Problem, algorithm: str) -> Case:
    """The case of a problem: all else is drawn from its line, so that the line repeats it."""
    random = np.random.default_rng(zlib.crc32(str(problem).encode()))
    fill = str(random.choice(FILLS))
    alpha, beta = FACTORS[int(random.integers(len(FACTORS)))]
    placement = str(random.choice(PLACEMENTS))
    threads = int(random.choice(THREADS))
    names = in_place_names(problem)
    alias = str(random.choice(names)) if names and random.random() < ALIAS_SHARE else ""
    return Case(problem, algorithm, fill, alpha, beta, placement, alias, threads)


def takers(problem: Problem, device: Device) -> list[str]:
    """Algorithms that take the problem; the reference only where it is alone."""
    found = [
        algorithm
        for algorithm in registry.candidates(problem.primitive, device)
        if (algorithm.deterministic or not problem.deterministic)
        and algorithm.supports(problem, device) is None
    ]
    kernels = [a.name for a in found if a.backend != "reference"]
    return kernels or [a.name for a in found]


def cases_of(problem: Problem, device: Device, algorithm: str = "") -> list[Case]:
    """One case for each algorithm that takes the problem, or for the one named."""
    names = [algorithm] if algorithm else takers(problem, device)
    return [case_of(problem, name) for name in names]


def failure_of(case: Case, handle: Handle) -> Failure | None:
    """Run a case; None if it passes, or fails as a known gap says."""
    try:
        run_case(case, handle)
    except Mismatch as mismatch:
        backend = case.algorithm.split(":", 1)[0]
        if gaps.gap_of(case, gaps.load(backend)) is not None:
            return None
        return Failure(case, mismatch.check, str(mismatch))
    return None


def check(problem: Problem, handle: Handle, algorithm: str = "") -> list[Failure]:
    """The failures of one problem, made small. Its plans are dropped afterwards."""
    own = Handle(handle.device)
    found = []
    for case in cases_of(problem, handle.device, algorithm):
        failure = failure_of(case, own)
        if failure is not None:
            found.append(shrunk(failure, lambda smaller: _fails(smaller, own)))
    return found


def _fails(case: Case, handle: Handle) -> Failure | None:
    """The failure of a smaller case; None also where its algorithm does not take it."""
    taken = case.algorithm in takers(case.problem, handle.device)
    return failure_of(case, handle) if taken else None


def drawn(primitives: tuple[str, ...], seed: int) -> Iterator[Problem]:
    """Problems without end, of the primitives in turn."""
    random = np.random.default_rng(seed)
    while True:
        for primitive in primitives:
            yield problems.draw(primitive, random)


@dataclass(frozen=True)
class Budget:
    """When to stop: a number of seconds, of problems, or both (0: no bound)."""

    seconds: float = 0.0
    count: int = 0

    def spent(self, start: float, done: int) -> bool:
        """True once either bound is reached."""
        over = self.seconds and time.monotonic() - start > self.seconds
        return bool(over) or bool(self.count and done >= self.count)


def _child(
    channel: Connection, device: str, primitives: tuple[str, ...], seed: int, skip: int,
    budget: Budget, start: float,
) -> None:  # fmt: skip
    """Sends ("at", number, line) before each problem, ("failure", text) and ("end", number)."""
    handle = Handle(device)
    number = 0
    for problem in drawn(primitives, seed):
        if budget.spent(start, number):
            break
        number += 1
        if number <= skip or not usable(problem):
            continue
        channel.send(("at", number, str(problem)))
        for failure in check(problem, handle):
            channel.send(("failure", number, str(failure)))
    channel.send(("end", number, ""))


def fuzz(
    device: str = "cpu",
    primitives: tuple[str, ...] = (),
    seed: int = 0,
    budget: Budget = Budget(count=1000),
    progress: bool = False,
) -> tuple[int, list[str]]:
    """(problems tried, failures). A child that dies counts as a failure of its last problem."""
    context = multiprocessing.get_context("spawn")
    wanted = primitives or problems.primitives()
    failures: list[str] = []
    start, done, line = time.monotonic(), 0, ""
    for _ in range(CRASH_LIMIT):
        here, there = context.Pipe(duplex=False)
        arguments = (there, device, wanted, seed, done, budget, start)
        child = context.Process(target=_child, args=arguments, daemon=True)
        child.start()
        there.close()
        ended = False
        while not ended:
            try:
                kind, done, text = here.recv()
            except EOFError:
                break
            ended = kind == "end"
            line = text if kind == "at" else line
            if kind == "failure":
                failures.append(text)
            if progress and (kind == "failure" or done % 100 == 0):
                print(text if kind == "failure" else f"... {done} problems", flush=True)
        child.join()
        if ended:
            return done, failures
        failures.append(f"crash: exit code {child.exitcode}\n  --problem '{line}'")
        if progress:
            print(failures[-1], flush=True)
    return done, failures


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit status is 1 when something failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after so long")
    parser.add_argument("--count", type=int, default=0, help="stop after so many problems")
    parser.add_argument("--seed", type=int, default=0, help="of the problems (default 0)")
    parser.add_argument("--primitive", action="append", default=[], help="draw only this one")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda or cuda:N")
    parser.add_argument("--problem", help="repeat this one-line problem and nothing else")
    for option in ("--algorithm", "--fill", "--placement", "--alias"):
        parser.add_argument(option, help="with --problem")
    for option in ("--alpha", "--beta", "--threads"):
        parser.add_argument(option, type=float, help="with --problem")
    options = parser.parse_args(arguments)
    if options.problem:
        return _repeat(options)
    budget = Budget(options.seconds, options.count or (0 if options.seconds else 1000))
    done, failures = fuzz(
        options.device, tuple(options.primitive), options.seed, budget, progress=True
    )
    print(f"{done} problems, {len(failures)} failures, seed {options.seed}")
    return 1 if failures else 0


def _repeat(options: argparse.Namespace) -> int:
    handle = Handle(options.device)
    names = ("fill", "alpha", "beta", "placement", "alias", "threads")
    given = {n: getattr(options, n) for n in names if getattr(options, n) is not None}
    if "threads" in given:
        given["threads"] = int(given["threads"])
    wrong = 0
    for case in cases_of(parse_problem(options.problem), handle.device, options.algorithm or ""):
        case = replace(case, **given)
        failure = failure_of(case, handle)
        print(failure or f"passes\n  {case}")
        wrong += failure is not None
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
