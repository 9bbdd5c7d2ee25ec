"""Write what documents take from the code: tables and docstrings between markers.

    python tools/update_docs.py            rewrites README.md and docs/
    python tools/update_docs.py --check    exit code 1 if something is out of date

A marked part lies between `<!-- begin NAME -->` and `<!-- end NAME -->`.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import bedstone
from bedstone import functional
from bedstone.bench.report import read_csv
from bedstone.cli import support_table
from bedstone.compat import cudnn_v1, cudnn_v2
from bedstone.plan.config import SETTINGS

ROOT = Path(__file__).parent.parent


def settings_table() -> str:
    """The settings: keyword, environment variable, meaning."""
    rows = [f"| `{s.name}` | `{s.variable}` | {s.meaning} |" for s in SETTINGS]
    return "\n".join(["| keyword | environment | meaning |", "|---|---|---|", *rows])


def functional_reference() -> str:
    """Signature and docstring of every function that takes arrays."""
    parts = []
    for name in bedstone.__all__:
        function = getattr(bedstone, name)
        if inspect.isfunction(function) and function.__module__ == functional.__name__:
            text = f"{name}{_signature(function)}\n\n{inspect.getdoc(function)}"
            parts.append(f"### {name}\n\n```text\n{text}\n```")
    return "\n\n".join(parts)


def _signature(function: object) -> str:
    """Names and defaults, without annotations: the docstring says what they are."""
    words = []
    starred = False
    for p in inspect.signature(function).parameters.values():  # type: ignore[arg-type]
        if p.kind is p.KEYWORD_ONLY and not starred:
            words.append("*")
            starred = True
        words.append(p.name if p.default is p.empty else f"{p.name}={p.default!r}")
    return f"({', '.join(words)})"


def cudnn_table() -> str:
    """Each function of cuDNN v1 and v2: where it is, what it does, and what bedstone has for it,
    from the first line and the line "bedstone: ..." of its docstring."""
    names: dict[str, list[str]] = {}
    documented: dict[str, str] = {}
    for module in (cudnn_v2, cudnn_v1):
        version = module.__name__[-2:]
        for name, function in vars(module).items():
            if hasattr(function, "c_names"):
                names.setdefault(name, []).insert(0, version)
                documented.setdefault(name, inspect.getdoc(function) or "")
    rows = ["| name | in | meaning | bedstone |", "|---|---|---|---|"]
    for name in sorted(names):
        text = documented[name]
        meaning, form = text.split("\n")[0], text.rpartition("bedstone: ")[2].replace("\n", " ")
        rows.append(f"| `{name}` | {', '.join(names[name])} | {meaning} | {form} |")
    return "\n".join(rows)


def torch_table() -> str | None:
    """PyTorch's operators that bedstone takes over; None where PyTorch is not installed."""
    if importlib.util.find_spec("torch") is None:
        return None
    from bedstone.frameworks.torch import overrides

    rows = ["| kind | operators of `torch.ops.aten` |", "|---|---|"]
    for kind in ("CONVOLUTION", "POOLING", "POINTWISE", "NORMALIZATION"):
        names = ", ".join(f"`{operator.name}`" for operator in getattr(overrides, kind))
        rows.append(f"| {kind.lower()} | {names} |")
    return "\n".join(rows)


def torch_coverage() -> str | None:
    """Calls of PyTorch and where they run, as its report says; None where it is not installed, or
    has no kernels to take the place of."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    if not hasattr(torch.library, "get_kernel"):
        return None
    from bedstone.frameworks.torch.coverage import coverage_table

    return coverage_table()


def paddle_table() -> str | None:
    """PaddlePaddle's operators and where they run, as its report says; None where it is not
    installed."""
    if importlib.util.find_spec("paddle") is None:
        return None
    from bedstone.frameworks.paddle.coverage import coverage_table

    return coverage_table()


def jax_table() -> str | None:
    """Calls of JAX and where they run, as its report says; None where it is not installed."""
    if importlib.util.find_spec("jax") is None:
        return None
    from bedstone.frameworks.jax.coverage import coverage_table

    return coverage_table()


def jax_times() -> str:
    """JAX's own kernels against bedstone's in their place, from the measurements that are kept."""
    parts: dict[tuple[str, ...], list[float]] = {}
    for suite in ("paper", "resnet50"):
        for row, ratio in _gains("jax", suite):
            parts.setdefault((suite, row["direction"], row["layout"]), []).append(ratio)
    return _gains_table("suite | direction | layout | problems", "JAX", parts)


def paddle_times() -> str:
    """PaddlePaddle's own kernels against bedstone's, likewise."""
    parts: dict[tuple[str, ...], list[float]] = {}
    for row, ratio in _gains("paddle", "baidu"):
        layers = row["name"].partition(":")[0]
        for key in ((layers, row["direction"]), ("all", row["direction"]), ("all", "all")):
            parts.setdefault(key, []).append(ratio)
    order = sorted(parts, key=lambda key: (key[0] == "all", key[1] == "all"))
    table = _gains_table("layers | direction | calls", "PaddlePaddle", {k: parts[k] for k in order})
    head, rows = read_csv(str(ROOT / "bench/results/cpu-paddle-baidu-float32.csv"))
    return f"On {rows[0]['threads']} threads of {head['device']}:\n\n{table}"


def paddle_calls() -> str:
    """What calls of tiny tensors cost through PaddlePaddle, from the measurement that is kept."""
    _, found = read_csv(str(ROOT / "bench/results/cpu-paddle-calls.csv"))
    columns = ("native", "on_bedstone", "left_native", "training_native", "training_on_bedstone")
    rows = [
        "| call, microseconds | native | on bedstone | left native | native, with gradients "
        "| on bedstone, with gradients |",
        "|---|---|---|---|---|---|",
    ]
    for row in found:
        if row["on_bedstone"]:
            cells = " | ".join(f"{float(row[column]):.0f}" for column in columns)
            rows.append(f"| `{row['what']}` | {cells} |")
    return "\n".join(rows)


def _gains(framework: str, suite: str) -> list[tuple[dict[str, str], float]]:
    """The rows of a framework's own kernels, and how many times as long as bedstone's they take."""
    _, found = read_csv(str(ROOT / f"bench/results/cpu-{framework}-{suite}-float32.csv"))
    sides = {(r["problem"], r["name"], r["peer"]): float(r["peer_ms"]) for r in found}
    own = [row for row in found if row["peer"] == framework]
    ours = [sides[row["problem"], row["name"], f"{framework}-on-bedstone"] for row in own]
    return [(row, float(row["peer_ms"]) / time) for row, time in zip(own, ours)]


def _gains_table(heads: str, framework: str, parts: dict[tuple[str, ...], list[float]]) -> str:
    """Geometric mean, least and most of each part's ratios."""
    rows = [f"| {heads} | times {framework}'s own: mean | least | most |"]
    rows.append("|---" * (rows[0].count("|") - 1) + "|")
    for key, ratios in parts.items():
        mean = statistics.geometric_mean(ratios)
        rows.append(
            f"| {' | '.join(key)} | {len(ratios)} "
            f"| {mean:.2f} | {min(ratios):.2f} | {max(ratios):.2f} |"
        )
    return "\n".join(rows)


def models_table(framework: str) -> str:
    """Whole networks through a framework, from the measurement that is kept."""
    head, rows = read_csv(str(ROOT / f"bench/results/cpu-{framework}-models.csv"))
    threads, device = head[f"{framework} threads"], head["device"]
    items = head.get("items", "images").capitalize()
    table = [
        f"{items} a second, and MiB beyond the loaded network, on {threads} threads of {device}:",
        "",
        "| network | mode | batch | native | bedstone | times | native MiB | bedstone MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for native, ours in zip(rows[::2], rows[1::2]):
        speeds = " | ".join(f"{float(row['items_per_second']):.2f}" for row in (native, ours))
        peaks = " | ".join(f"{float(row['peak_mib']):.0f}" for row in (native, ours))
        what = f"{ours['model']} | {ours['mode']} | {ours['batch']}"
        table.append(f"| {what} | {speeds} | {float(ours['ratio']):.2f} | {peaks} |")
    return "\n".join(table)


def caffenet_table() -> str:
    """The paper's table, from the measurement that is kept."""
    found = json.loads((ROOT / "bench/results/caffe-caffenet.json").read_text(encoding="utf-8"))
    caffe, ours = found["sides"]["caffe"], found["sides"]["bedstone"]
    rows = [
        f"CaffeNet, batch {found['batch']}, {found['machine']['device']}, milliseconds:",
        "",
        "| pass | engine CAFFE | bedstone | ratio | the paper's |",
        "|---|---|---|---|---|",
    ]
    for name in ("forward", "backward", "testing", "update", "overall"):
        ratio, paper = found["ratios"][name], found["paper"][name]["ratio"]
        times = f"{caffe['passes'][name]:.0f} | {ours['passes'][name]:.0f}"
        rows.append(f"| {name} | {times} | {ratio:.2f} | {paper:.2f} |")
    for name, times in found["convolutions"].items():
        cells = f"{times['caffe']:.0f} | {times['bedstone']:.0f} | {times['ratio']:.2f}"
        rows.append(f"| convolutions {name} | {cells} | |")
    return "\n".join(rows)


def caffe_layers() -> str | None:
    """Caffe's layer types by the module that has them; None where protobuf is not installed."""
    if importlib.util.find_spec("google") is None:
        return None
    from bedstone.frameworks.caffe import registry

    rows = ["| layers | module |", "|---|---|"]
    kinds: dict[str, list[str]] = {}
    for name in registry.layer_types():
        module = registry.layer_class(SimpleNamespace(type=name)).__module__.rpartition(".")[2]
        kinds.setdefault(module, []).append(name)
    for module in registry.MODULES:
        rows.append(f"| {', '.join(kinds[module])} | `{module}` |")
    return "\n".join(rows)


# (document, marker) -> what stands there; None leaves it as it is
PARTS = {
    ("README.md", "algorithms"): support_table,
    ("docs/planning.md", "settings"): settings_table,
    ("docs/reference.md", "functional"): functional_reference,
    ("docs/from_cudnn.md", "cudnn"): cudnn_table,
    ("docs/pytorch.md", "torch"): torch_table,
    ("docs/pytorch.md", "torch-coverage"): torch_coverage,
    ("docs/pytorch.md", "torch-models"): lambda: models_table("torch"),
    ("docs/paddle.md", "paddle"): paddle_table,
    ("docs/paddle.md", "paddle-times"): paddle_times,
    ("docs/paddle.md", "paddle-calls"): paddle_calls,
    ("docs/paddle.md", "paddle-models"): lambda: models_table("paddle"),
    ("docs/jax.md", "jax"): jax_table,
    ("docs/jax.md", "jax-times"): jax_times,
    ("docs/caffe.md", "caffenet"): caffenet_table,
    ("docs/caffe.md", "caffe-layers"): caffe_layers,
}


def updated(text: str, marker: str, content: str) -> str:
    """The document with the marked part replaced."""
    begin, end = f"<!-- begin {marker} -->", f"<!-- end {marker} -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"no markers {begin} ... {end}")
    return pattern.sub(lambda _: f"{begin}\n{content}\n{end}", text)


def stale(write: bool) -> list[str]:
    """Documents that were out of date (and now are not, if `write`)."""
    found = []
    for (document, marker), content in PARTS.items():
        path = ROOT / document
        old = path.read_text(encoding="utf-8")
        made = content()
        new = old if made is None else updated(old, marker, made)
        if new != old:
            found.append(document)
            if write:
                path.write_text(new, encoding="utf-8")
    return found


if __name__ == "__main__":
    check = "--check" in sys.argv[1:]
    documents = stale(write=not check)
    for document in documents:
        print(f"{document}: {'out of date' if check else 'updated'}")
    sys.exit(1 if check and documents else 0)
