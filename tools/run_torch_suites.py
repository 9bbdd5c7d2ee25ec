"""Run PyTorch's own test files natively and with bedstone's patch on, and compare the outcomes.

    python tools/run_torch_suites.py FOLDER [test_convolution.py test_pooling.py ...]

FOLDER holds files of PyTorch's `test/nn`, of the version at hand or near it (Debian's source
package `pytorch` has them). Files of another version fail in places natively too: what counts is
that the patch adds no failure. Prints, for each file, tests passed, failed and skipped on both
sides, seconds, and how many operator calls ran on bedstone's kernels. The exit code is 1 if a test
that passes natively fails patched.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FILES = ("test_convolution.py", "test_pooling.py")
SECONDS = 4 * 3600  # for one file on one side
# Names that older files import from PyTorch's test tools, gone since, as they read on a CPU.
GONE = {("torch.testing._internal.common_cuda", "tf32_is_not_fp32"): lambda: False}


class Outcomes:
    """A pytest plugin that keeps the outcome of every test."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def pytest_runtest_logreport(self, report) -> None:  # type: ignore[no-untyped-def]
        """The call's outcome, or that of a set-up or tear-down that did not pass."""
        if report.when == "call" or report.outcome != "passed":
            self.found[report.nodeid] = report.outcome


def run_here(file: str, side: str, words: list[str], result: str) -> int:
    """One file on one side in this process; the outcomes go to the file `result`."""
    import pytest

    from bedstone.frameworks import torch as bedstone_torch

    for (module, name), value in GONE.items():
        tools = importlib.import_module(module)
        if not hasattr(tools, name):
            setattr(tools, name, value)
    outcomes = Outcomes()
    options = {"patched": {}, "always": {"find": False, "compile_after": 1}}.get(side)
    context = contextlib.nullcontext()
    if options is not None:
        context = bedstone_torch.enable(least=0, **options)
    start = time.monotonic()
    with context:
        code = pytest.main(
            ["-q", "-n0", "-p", "no:cacheprovider", "--no-header", "--tb=line", "-W", "ignore",
             "--rootdir", str(Path(file).parent), file, *words], plugins=[outcomes],
        )  # fmt: skip
        report = bedstone_torch.report()
    answer = {
        "outcomes": outcomes.found,
        "seconds": time.monotonic() - start,
        "own_calls": report.own_calls,
        "calls": report.own_calls + report.native_calls,
        "report": str(report),
    }
    Path(result).write_text(json.dumps(answer), encoding="utf-8")
    return int(code)


def run(file: Path, side: str, words: list[str]) -> dict:
    """One file on one side in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        result = str(Path(folder) / "outcomes.json")
        command = [sys.executable, __file__, "--here", side, result, str(file), *words]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, check=False,
            env={**os.environ, "PYTORCH_TEST_WITH_SLOW": "0"},
        )  # fmt: skip
        if not Path(result).exists():
            sys.exit(f"{file.name}, {side}: stopped with {done.returncode}\n{done.stdout[-3000:]}"
                     f"\n{done.stderr[-3000:]}")  # fmt: skip
        return json.loads(Path(result).read_text(encoding="utf-8"))


def counts(answer: dict) -> str:
    """Passed, failed and skipped."""
    kinds = list(answer["outcomes"].values())
    return ", ".join(f"{kinds.count(kind):4} {kind}" for kind in ("passed", "failed", "skipped"))


def main() -> int:
    """Run every file on both sides and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", nargs="*", default=list(FILES))
    parser.add_argument("-k", metavar="EXPRESSION", help="only tests that match, as in pytest")
    parser.add_argument("--always", action="store_true",
                        help="compile every kind at its first call, which takes hours")  # fmt: skip
    parser.add_argument("--report", action="store_true", help="print what ran where, too")
    args = parser.parse_args()
    words = ["-k", args.k] if args.k else []
    own = "always" if args.always else "patched"
    worse = []
    for name in args.files:
        file = (args.folder / name).resolve()
        if not file.exists():
            sys.exit(f"folder: got {args.folder}, expected a folder with {name}")
        answers = {side: run(file, side, words) for side in ("native", own)}
        for side, answer in answers.items():
            ours = f"bedstone's kernels {answer['own_calls']} of {answer['calls']} calls"
            took = f"{answer['seconds']:.0f} s"
            print(f"{name:24} {side:8} {counts(answer)}; {took}; {ours}", flush=True)
        native, patched = (answers[side]["outcomes"] for side in ("native", own))
        added = [t for t, o in patched.items() if o == "failed" and native.get(t) != "failed"]
        worse += added
        print(*(f"  fails with the patch only: {test}" for test in added), sep="\n")
        if args.report:
            print(answers[own]["report"])
    return 1 if worse else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        side, result, file = sys.argv[2:5]
        sys.exit(run_here(file, side, sys.argv[5:], result))
    sys.exit(main())
