"""`bedstone caffe time`: the paper's table of a network, for one engine or two side by side.

Each engine has a training and a testing network with the same weights. After one pass that does
not count, the engines take turns at every iteration: forward and backward layer by layer, the
update, a test pass. Reported are medians; "overall" is the sum of the four, as in the paper's
Table 4. The convolution layers alone stand below it: how NumPy does the rest is in the passes.
Peak memory is that of a process of its own for each engine.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import bedstone
from bedstone.frameworks.caffe import io, schema
from bedstone.frameworks.caffe.solver import Solver, batch_of
from bedstone.spec.errors import InvalidDescriptor

# The engines by the names of the command line, and what a layer's `engine` field calls them.
ENGINES = {"caffe": "CAFFE", "bedstone": "CUDNN"}
PASSES = ("forward", "backward", "testing", "update")
CONVOLUTIONS = ("Convolution", "Deconvolution")
# Table 4 of arXiv 1410.0759: CaffeNet, batch 256, 200 iterations, Tesla K40, milliseconds, for
# Caffe alone and for Caffe with the library under it. (The head of the table says seconds, which
# an iteration of 1.45 s rules out.)
PAPER = {
    "forward": (109310, 75330),
    "backward": (156270, 120651),
    "testing": (21600, 14529),
    "update": (2926, 2920),
    "overall": (290106, 213431),
}
# What bedstone's times are compared with, by the name of the side: in short, and what ratio means.
OTHERS = {
    "caffe": ("engine CAFFE", "time on engine CAFFE (lowering image by image, then NumPy's BLAS) "
              "over time on bedstone;"),
    "torch": ("PyTorch", "time of PyTorch (cuDNN, cuBLAS) over time on bedstone, same device;"),
}  # fmt: skip
# Seconds of rest when the turn passes to the other engine: threads of a BLAS that wait for work
# spin for some milliseconds and would take a core from whoever comes next.
SETTLE = 0.03


@dataclass
class Side:
    """What was measured of one engine; times in milliseconds."""

    engine: str
    passes: dict[str, float] = field(default_factory=dict)
    spread: dict[str, tuple[float, float]] = field(default_factory=dict)
    forward: dict[str, float] = field(default_factory=dict)
    backward: dict[str, float] = field(default_factory=dict)
    peak_memory_mib: float = 0.0


@dataclass
class Timing:
    """A whole measurement, as it is written to JSON."""

    network: str
    batch: int
    test_batch: int
    iterations: int
    machine: dict[str, str]
    layers: list[tuple[str, str]]
    sides: dict[str, Side]

    @property
    def other(self) -> str:
        """The side that bedstone is compared with: "caffe", its other engine, or "torch"."""
        return next(iter(self.sides))

    def ratio(self, name: str) -> float | None:
        """Time on the other side over time on bedstone for a pass; None with one side."""
        if len(self.sides) < 2 or name not in self.sides["bedstone"].passes:
            return None
        ours = self.sides["bedstone"].passes[name]
        return self.sides[self.other].passes[name] / ours if ours else None

    def convolutions(self) -> dict[str, dict[str, float]]:
        """Milliseconds of the convolution layers alone: by direction, then by engine."""
        names = [name for name, kind in self.layers if kind in CONVOLUTIONS]
        if not names:
            return {}
        return {
            direction: {
                engine: sum(getattr(side, direction)[name] for name in names)
                for engine, side in self.sides.items()
            }
            for direction in ("forward", "backward")
        }

    def write(self, path: str | Path) -> None:
        alone = self.convolutions()
        if len(self.sides) > 1:
            for times in alone.values():
                times["ratio"] = times[self.other] / times["bedstone"]
        content = asdict(self) | {
            "unit": "milliseconds, medians over the iterations; spread is least and most",
            "ratios": {n: r for n in (*PASSES, "overall") if (r := self.ratio(n)) is not None},
            "convolutions": alone,
            "paper": {n: {"caffe": a, "cudnn": b, "ratio": a / b} for n, (a, b) in PAPER.items()},
        }
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


class Runner:
    """One engine's networks, and the times of the passes that they have run."""

    def __init__(self, name: str, param: Any, weights: str | None) -> None:
        self.name = name
        settings = schema.SolverParameter(
            net_param=param, base_lr=1e-6, lr_policy="fixed", momentum=0.9, weight_decay=0.0005,
            random_seed=1, test_iter=[1], test_interval=1,
        )  # fmt: skip
        # (A rate so small that weights stay sound however many iterations run on random data.)
        self.solver = Solver(settings, engine=ENGINES[name])
        if weights is not None:
            self.solver.copy_weights(weights)
        self.net, self.test_net = self.solver.net, self.solver.test_nets[0]
        self._times: dict[str, list[float]] = {name: [] for name in PASSES}
        self._forward: list[list[float]] = []
        self._backward: list[list[float]] = []
        self.iteration()
        for times in (*self._times.values(), self._forward, self._backward):
            times.clear()  # the first pass compiles and allocates

    def iteration(self) -> None:
        layers = range(len(self.net.layers))
        self._forward.append(self._each(self.net.forward_layer, layers, "forward"))
        self._backward.append(self._each(self.net.backward_layer, reversed(layers), "backward"))
        self._once(self._update, "update")
        self._once(self.test_net.forward, "testing")

    def _update(self) -> None:
        self.solver.apply_update()
        self.solver.iter += 1
        self.net.clear_param_diffs()

    def _each(self, call: Callable[[int], Any], layers: Any, name: str) -> list[float]:
        marks = [time.perf_counter()]
        for i in layers:
            call(i)
            marks.append(time.perf_counter())
        self._times[name].append(marks[-1] - marks[0])
        return [b - a for a, b in zip(marks, marks[1:])]

    def _once(self, call: Callable[[], Any], name: str) -> None:
        start = time.perf_counter()
        call()
        self._times[name].append(time.perf_counter() - start)

    def side(self) -> Side:
        names = [layer.name for layer in self.net.layers]
        passes = {name: _median(times) for name, times in self._times.items()}
        passes["overall"] = sum(passes.values())
        spread = {n: (1e3 * min(times), 1e3 * max(times)) for n, times in self._times.items()}
        forward = dict(zip(names, map(_median, zip(*self._forward))))
        backward = dict(zip(reversed(names), map(_median, zip(*self._backward))))
        return Side(self.name, passes, spread, forward, backward)


def _median(seconds: Sequence[float]) -> float:
    return 1e3 * statistics.median(seconds)


def measure(
    model: str,
    engines: Sequence[str],
    iterations: int,
    *,
    batch: int | None = None,
    weights: str | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Timing:
    """Time a network. `batch` overrides the batch of its data layers; `tell` hears of progress."""
    if iterations < 1:
        raise InvalidDescriptor("iterations", iterations, "1 or more")
    param = io.read_net(model)
    if batch is not None:
        set_batch(param, batch)
    memory: dict[str, float] = {}
    if len(engines) > 1:  # (first: the networks of this process would crowd those out)
        for name in engines:
            tell(f"peak memory of engine {name}")
            memory[name] = _memory_of_a_process(model, name, batch, weights)
    runners = []
    for name in engines:
        tell(f"warming up engine {name}")
        runners.append(Runner(name, param, weights))
    for i in range(iterations):
        tell(f"iteration {i + 1}/{iterations}")
        for runner in runners if i % 2 == 0 else runners[::-1]:
            time.sleep(SETTLE)
            runner.iteration()
    sides = {runner.name: runner.side() for runner in runners}
    for name, side in sides.items():
        side.peak_memory_mib = memory.get(name) or peak_memory_mib()
    net, test_net = runners[0].net, runners[0].test_net
    return Timing(
        net.name, batch_of(net), batch_of(test_net), iterations, machine(),
        [(layer.name, layer.type) for layer in net.layers], sides,
    )  # fmt: skip


def set_batch(param: Any, batch: int) -> None:
    """Give all data layers of a network (and its `input` fields) this batch."""
    if batch < 1:
        raise InvalidDescriptor("batch", batch, "1 or more")
    found = False
    for layer in param.layer:
        shapes = [*layer.dummy_data_param.shape, *layer.input_param.shape]
        for shape in shapes:
            if shape.dim:
                shape.dim[0], found = batch, True
        for name in ("data_param", "image_data_param", "memory_data_param", "hdf5_data_param"):
            if layer.HasField(name):
                getattr(layer, name).batch_size, found = batch, True
        if layer.dummy_data_param.num:
            layer.dummy_data_param.num[:] = [batch] * len(layer.dummy_data_param.num)
            found = True
    if not found:
        raise InvalidDescriptor("batch", batch, "a network with a data layer that has a batch")


def peak_memory_mib() -> float:
    """The most memory that this process ever held."""
    try:  # VmHWM, because the other counter starts at what the parent process had
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def _memory_of_a_process(model: str, engine: str, batch: int | None, weights: str | None) -> float:
    """Peak memory of a process that runs two iterations on one engine."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "time.json")
        command = [sys.executable, "-m", "bedstone.cli", "caffe", "time", "--model", model,
                   "--engine", engine, "--iterations", "1", "--json", out]  # fmt: skip
        command += [] if batch is None else ["--batch", str(batch)]
        command += [] if weights is None else ["--weights", weights]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise InvalidDescriptor("engine", engine, f"a run to measure:\n{done.stderr.strip()}")
        content = json.loads(Path(out).read_text(encoding="utf-8"))
    return float(content["sides"][engine]["peak_memory_mib"])


def machine() -> dict[str, str]:
    """What the numbers depend on."""
    device = bedstone.default_handle().device
    return {
        "device": device.name,
        "architecture": device.architecture,
        "threads": str(bedstone.get_num_threads()),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "bedstone": bedstone.__version__,
    }


def table(timing: Timing) -> str:
    """The measurement as text: layers, then passes beside the paper's."""
    names = list(timing.sides)
    width = max(len("convolutions backward"), *(len(name) for name, _ in timing.layers))
    heads = [f"{direction} {name}" for direction in ("fwd", "bwd") for name in names]
    both = len(names) > 1
    lines = [
        f"{timing.network}: batch {timing.batch} (testing {timing.test_batch}), "
        f"{timing.iterations} iterations, {_place(timing)}; milliseconds, medians",
        "",
        f"{'layer':{width}} {'type':16}" + "".join(f"{head:>13}" for head in heads)
        + (f"{'fwd ratio':>11}{'bwd ratio':>11}" if both else ""),
    ]  # fmt: skip
    for layer, kind in timing.layers:
        cells = [getattr(timing.sides[name], direction)[layer]
                 for direction in ("forward", "backward") for name in names]  # fmt: skip
        line = f"{layer:{width}} {kind:16}" + "".join(f"{cell:13.2f}" for cell in cells)
        if both:
            line += _ratio(cells[0], cells[1]) + _ratio(cells[2], cells[3])
        lines.append(line)
    lines += ["", f"{'':{width}}" + "".join(f"{name:>13}" for name in names)
              + (f"{'ratio':>11}{'paper':>11}" if both else "")]  # fmt: skip
    for name in (*PASSES, "overall"):
        cells = [side.passes[name] for side in timing.sides.values()]
        line = f"{name:{width}}" + "".join(f"{cell:13.2f}" for cell in cells)
        if both:
            line += _ratio(*cells) + _ratio(*PAPER[name])
        lines.append(line)
    for direction, times in timing.convolutions().items():
        line = f"{f'convolutions {direction}':{width}}"
        line += "".join(f"{times[name]:13.2f}" for name in names)
        lines.append(line + (_ratio(*times.values()) if both else ""))
    peaks = "".join(f"{side.peak_memory_mib:13.0f}" for side in timing.sides.values())
    if any(side.peak_memory_mib for side in timing.sides.values()):
        lines.append(f"{'peak MiB':{width}}{peaks}")
    if both:
        lines += [
            "",
            f"ratio: {OTHERS[timing.other][1]}",
            "paper: Caffe over Caffe with cuDNN v1 (CaffeNet, batch 256, Tesla K40; Table 4 of "
            "arXiv 1410.0759)",
        ]
    return "\n".join(lines)


def _place(timing: Timing) -> str:
    """The device, and what else the numbers depend on."""
    math = timing.machine.get("math")
    return f"{timing.machine['device']}, " + (
        f"float32 ({math})" if math else f"{timing.machine['threads']} threads"
    )


def _ratio(above: float, below: float) -> str:
    """A ratio, or nothing where both times are too short to compare."""
    return f"{above / below:11.2f}" if min(above, below) > 1e-3 else f"{'-':>11}"


def plot(timing: Timing, path: str) -> None:
    """A picture: ratios of the passes beside the paper's, and each layer's times."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise InvalidDescriptor("plot", path, "matplotlib installed") from None
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 0.28 * len(timing.layers) + 2))
    _plot_passes(axes[0], timing)
    for axis, direction in zip(axes[1:], ("forward", "backward")):
        _plot_layers(axis, timing, direction)
    figure.suptitle(
        f"{timing.network}, batch {timing.batch}, {_place(timing)}", fontsize=10,
    )  # fmt: skip
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise InvalidDescriptor("plot", path, f"a picture that can be written: {error}") from None
    finally:
        pyplot.close(figure)


COLOURS = {"caffe": "#999999", "torch": "#999999", "bedstone": "#3b6ea5", "paper": "#e08e2b"}


def _plot_passes(axis: Any, timing: Timing) -> None:
    names = (*PASSES, "overall")
    place = np.arange(len(names))
    if len(timing.sides) < 2:
        (side,) = timing.sides.values()
        axis.bar(place, [side.passes[n] for n in names], color=COLOURS[side.engine])
        axis.set_ylabel("milliseconds an iteration")
    else:
        ours = [timing.ratio(name) or 0.0 for name in names]
        for direction, times in timing.convolutions().items():
            ours.append(times[timing.other] / times["bedstone"])
            names += (f"conv.\n{direction}",)
        place = np.arange(len(names))
        paper = [before / after for before, after in PAPER.values()]
        for shift, values, label, colour in (
            (-0.2, ours, f"bedstone over {OTHERS[timing.other][0]}", "bedstone"),
            (0.2, paper, "the paper, K40, batch 256", "paper"),
        ):
            bars = axis.bar(
                place[: len(values)] + shift, values, 0.4, label=label, color=COLOURS[colour]
            )
            axis.bar_label(bars, fmt="%.2f", fontsize=8)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_ylabel("times as fast")
        axis.legend(fontsize=8)
    axis.set_xticks(place, names, fontsize=8)


def _plot_layers(axis: Any, timing: Timing, direction: str) -> None:
    names = [name for name, _ in timing.layers][::-1]
    height = 0.8 / len(timing.sides)
    for i, side in enumerate(timing.sides.values()):
        values = [getattr(side, direction)[name] for name in names]
        place = np.arange(len(names)) - i * height
        axis.barh(place, values, height, label=side.engine, color=COLOURS[side.engine])
    axis.set_yticks(np.arange(len(names)), names, fontsize=7)
    axis.set_xlabel(f"{direction}, milliseconds")
    axis.legend(fontsize=8)
