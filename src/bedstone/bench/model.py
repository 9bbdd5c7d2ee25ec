"""`bedstone bench model`: whole networks of a framework, on its kernels and on bedstone's in turns.

A framework joins with a module `frameworks/<name>/bench.py` that has a class `Model`. Speeds are
items (images, seconds of sound) per second; the peak of memory is that of a process of its own for
each side, beyond what it had when the network was loaded: activations, workspaces, compiled kernels
and caches of plans. Both sides' results are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import bedstone
from bedstone.bench import machine, report, timing

ROOM = Path(bedstone.__file__).parent / "frameworks"
FRAMEWORKS = tuple(sorted(path.parent.name for path in ROOM.glob("*/bench.py")))
SIDES = ("native", "bedstone")
ROUNDS = 5
BATCH = 8  # images, unless the caller says
STEPS_FOR_MEMORY = 2  # the second step meets memory as all later ones do
MEMORY_SECONDS = 300
# Two float32 networks differ by their rounding; more than this is an error, in the shares of the
# largest result. Half types round at every layer.
DIFFERENCE = {"float64": 1e-9, "float32": 1e-3, "float16": 5e-2, "bfloat16": 2e-1}


@dataclass(frozen=True)
class ModelRow:
    """A network on one side: one line of the table and of the files."""

    framework: str
    model: str
    mode: str
    layout: str
    dtype: str
    batch: int
    side: str
    items_per_second: float
    lower: float
    upper: float
    ratio: float  # of items per second, this side to native
    peak_mib: float | None
    own_calls: int
    calls: int

    def record(self) -> dict[str, Any]:
        """As a dictionary."""
        return asdict(self)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `model` beside those that it shares with the others."""
    found = ", ".join(FRAMEWORKS)
    parser.add_argument("--framework", default="torch", help=f"of model: {found}")
    parser.add_argument("--model", default="resnet50", help="of model (default: resnet50)")
    parser.add_argument("--training", action="store_true", help="of model: steps of training")


def load(framework: str) -> Any:
    """The class `Model` of a framework's folder."""
    if framework not in FRAMEWORKS:
        raise bedstone.InvalidDescriptor("--framework", framework, f"one of {FRAMEWORKS}")
    try:
        return importlib.import_module(f"bedstone.frameworks.{framework}.bench").Model
    except ImportError as error:
        raise bedstone.InvalidDescriptor(
            "--framework", framework, f"{framework} installed: {error}"
        ) from None


def main(args: argparse.Namespace) -> int:
    """Measure one network in the layouts asked for; 1 if the sides' results differ."""
    rows: list[ModelRow] = []
    load_of_others, code = machine.OtherLoad(), 0
    head = report.environment(bedstone.Handle(args.device).device, machine.Ceilings({}, 0.0))
    head["bedstone threads"] = str(bedstone.get_num_threads())
    differences: dict[str, str] = {}
    print(f"{'model':20} {'mode':10} {'layout':6} {'side':9} {'items/s':>9} {'ratio':>6} "
          f"{'peak MiB':>9}  kernels")  # fmt: skip
    for layout in args.layout.split(","):
        settings = (args.model, args.batch or BATCH, layout, args.dtype, args.training, args.device)
        model = load(args.framework)(*settings)
        difference = compare(model)
        for row in measure(model, args.framework, settings):
            rows.append(row)
            print(line(row), flush=True)
        print(model.taken())
        differences[f"largest difference, {layout}"] = f"{difference:.2g}"
        head.update(model.versions)
        if difference > DIFFERENCE[args.dtype]:
            print(f"the results differ by {difference:.2g} of the largest")
            code = 1
    head.update(differences)
    others = load_of_others.share()
    if others is not None:
        head["other load"] = f"{100 * others:.0f}% of the CPU"
    if args.csv:
        report.write_csv(args.csv, rows, head)
    if args.json:
        report.write_json(args.json, rows, head)
    print("; ".join(f"{key} {value}" for key, value in head.items()))
    return code


def compare(model: Any) -> float:
    """The largest difference between the sides' results, in shares of the largest result."""
    results = []
    for side in SIDES:
        with model.side(side):
            results.append(model.result())
    scale = max(float(np.abs(results[0]).max()), 1e-30)
    return float(np.abs(results[1] - results[0]).max()) / scale


def measure(model: Any, framework: str, settings: tuple[Any, ...]) -> list[ModelRow]:
    """A row a side, timed in turns."""
    clocks = [partial(_clock, model, side) for side in SIDES]
    for clock in clocks:
        clock()  # plans are made, kernels compiled
    before = model.counts()
    times = timing.in_turns(clocks, ROUNDS)
    own, calls = (now - then for now, then in zip(model.counts(), before))
    name, batch, layout, dtype, training, _ = settings
    rows = []
    for side, seconds in zip(SIDES, times):
        rows.append(
            ModelRow(
                framework, name, "training" if training else "inference", layout, dtype, batch,
                side, batch / seconds.median, batch / seconds.upper, batch / seconds.lower,
                times[0].median / seconds.median, peak(framework, settings, side),
                own if side == "bedstone" else 0, calls if side == "bedstone" else 0,
            )
        )  # fmt: skip
    return rows


def _clock(model: Any, side: str) -> float:
    """Seconds of a step, after one that does not count."""
    with model.side(side):
        time.sleep(timing.SETTLE_SECONDS)
        model.step()
        start = time.perf_counter()
        model.step()
        return time.perf_counter() - start


def line(row: ModelRow) -> str:
    """A row of the table."""
    peak_text = "-" if row.peak_mib is None else f"{row.peak_mib:.0f}"
    kernels = f"{row.own_calls} of {row.calls} calls" if row.calls else "the framework's"
    return (
        f"{row.model[:20]:20} {row.mode:10} {row.layout:6} {row.side:9} "
        f"{row.items_per_second:9.2f} {row.ratio:6.2f} {peak_text:>9}  {kernels}"
    )


def peak(framework: str, settings: tuple[Any, ...], side: str) -> float | None:
    """MiB that a process of its own needs at most for steps, beyond the loaded network; None where
    the system does not tell (other than Linux) or the model is not on the CPU."""
    if settings[-1] != "cpu" or not Path("/proc/self/status").exists():
        return None
    words = [sys.executable, "-m", __name__, json.dumps([framework, settings, side])]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, check=True, timeout=MEMORY_SECONDS
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    return float(done.stdout.split()[-1])


def _status(key: str) -> float:
    """A line of this process's status, in MiB."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(rf"{key}:\s+(\d+) kB", text)
    return int(found.group(1)) / 1024 if found else 0.0


def _peak_here(framework: str, settings: list[Any], side: str) -> float:
    model = load(framework)(*settings)
    timing.give_back_freed_memory()
    before = _status("VmRSS")
    with model.side(side):
        model.step()  # what compiling needs for a while is no part of it
        timing.give_back_freed_memory()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # start the peak afresh
        for _ in range(STEPS_FOR_MEMORY):
            model.step()
    return _status("VmHWM") - before


if __name__ == "__main__":
    print(_peak_here(*json.loads(sys.argv[1])))
