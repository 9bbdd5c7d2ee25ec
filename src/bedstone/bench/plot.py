"""Pictures, drawn from a CSV and nothing else: ratio bars, rate against batch, roofline."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import bedstone
from bedstone.bench.report import batch_of, read_csv

KINDS = ("auto", "ratio", "batch", "roofline")
COLOURS = ("#3b6ea5", "#e08e2b", "#5a9e6f", "#a5527a", "#777777")
MARKERS = "os^Dv"
DOTS_PER_INCH = 110

Rows = list[dict[str, str]]


def draw(csv_path: str, picture: str, kind: str = "auto") -> None:
    """Draw the rows of a CSV.

    ratio     one panel a direction: a bar for each problem and layout, the first peer's time over
              bedstone's
    batch     rate against batch, the mean over layers (the paper's Figure 2); for suites whose
              problems are named LAYER@BATCH
    roofline  rate against flops per byte, under the machine's measured ceilings
    auto      batch where the names say one, else ratio where there is a peer, else roofline

    Raises InvalidDescriptor when matplotlib is missing or the file does not have what is needed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise bedstone.InvalidDescriptor("plot", picture, "matplotlib installed") from None
    head, rows = read_csv(csv_path)
    if not rows:
        raise bedstone.InvalidDescriptor("plot", csv_path, "a CSV with rows")
    rows = [row for row in rows if row["peer"] == rows[0]["peer"]]
    named = all(batch_of(row["name"]) is not None for row in rows)
    if kind == "auto":
        kind = "batch" if named else "ratio" if rows[0]["peer"] else "roofline"
    if kind == "batch" and not named:
        raise bedstone.InvalidDescriptor("plot", csv_path, "problems named LAYER@BATCH")
    if kind == "ratio" and not rows[0]["peer"]:
        raise bedstone.InvalidDescriptor("plot", csv_path, "rows with a peer")
    if kind == "roofline" and "bandwidth" not in head:
        raise bedstone.InvalidDescriptor("plot", csv_path, "measured ceilings in its head")
    figure = {"ratio": _ratio, "batch": _batch, "roofline": _roofline}[kind](pyplot, rows, head)
    threads = f", {rows[0]['threads']} threads" if rows[0]["threads"] != "0" else ""
    dtypes = ", ".join(dict.fromkeys(row["dtype"] for row in rows))
    figure.suptitle(f"{head.get('device', '')}{threads}, {dtypes}", fontsize=10)
    figure.tight_layout()
    try:
        figure.savefig(picture, dpi=DOTS_PER_INCH)
    except (OSError, ValueError) as error:
        expected = f"a picture that can be written: {error}"
        raise bedstone.InvalidDescriptor("plot", picture, expected) from None
    finally:
        pyplot.close(figure)


def _series(rows: Rows, column: str) -> dict[str, Rows]:
    found: dict[str, Rows] = {}
    for row in rows:
        found.setdefault(row[column], []).append(row)
    return found


def _ratio(pyplot: Any, rows: Rows, head: dict[str, str]) -> Any:
    directions, layouts = _series(rows, "direction"), list(_series(rows, "layout"))
    names = list(_series(rows, "name"))
    width = 0.8 / len(layouts)
    size = (max(7.0, 1.5 + 0.2 * len(names) * len(layouts)), 2.4 * len(directions) + 1.0)
    figure, axes = pyplot.subplots(len(directions), 1, figsize=size, squeeze=False, sharex=True)
    for axis, (direction, here) in zip(axes[:, 0], directions.items()):
        for i, layout in enumerate(layouts):
            bars = [row for row in here if row["layout"] == layout]
            places = [names.index(row["name"]) + (i + 0.5) * width - 0.4 for row in bars]
            heights = [float(row["ratio"]) for row in bars]
            axis.bar(places, heights, width, label=layout, color=COLOURS[i % len(COLOURS)])
        logs = [math.log(float(row["ratio"])) for row in here]
        axis.axhline(1.0, color="black", linewidth=0.8)
        mean = math.exp(sum(logs) / len(logs))
        axis.set_title(f"{direction}: geometric mean {mean:.2f}", fontsize=9)
        axis.set_ylabel(f"{rows[0]['peer']} time / bedstone time", fontsize=7)
        axis.grid(axis="y", alpha=0.3)
    axes[-1, 0].set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
    axes[0, 0].legend(fontsize=8)
    return figure


def _batch(pyplot: Any, rows: Rows, head: dict[str, str]) -> Any:
    figure, axis = pyplot.subplots(figsize=(6.5, 4))
    for i, ((direction, layout), here) in enumerate(_pairs(rows).items()):
        label = f"{layout}, {direction}"
        colour = COLOURS[i % len(COLOURS)]
        for column, who, style in (("gflops", "bedstone", "o-"), ("peer_gflops", "", "s--")):
            rates: dict[int, list[float]] = defaultdict(list)
            for row in here:
                if float(row[column]):
                    rates[batch_of(row["name"]) or 0].append(float(row[column]))
            means = [sum(rates[batch]) / len(rates[batch]) for batch in sorted(rates)]
            if means:
                name = f"{who or rows[0]['peer']}, {label}"
                axis.plot(sorted(rates), means, style, label=name, color=colour, markersize=4)
    batches = sorted({batch_of(row["name"]) or 0 for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(batches, [str(batch) for batch in batches])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("batch")
    axis.set_ylabel("GFLOP/s, mean over the layers")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)
    return figure


def _pairs(rows: Rows) -> dict[tuple[str, str], Rows]:
    found: dict[tuple[str, str], Rows] = {}
    for row in rows:
        found.setdefault((row["direction"], row["layout"]), []).append(row)
    return found


def _roofline(pyplot: Any, rows: Rows, head: dict[str, str]) -> Any:
    dtype = rows[0]["dtype"]
    peak_of = "float64" if dtype == "float64" else "float32"  # the type that is summed in
    peak = float(head[f"peak {peak_of}"].split()[0])
    bandwidth = float(head["bandwidth"].split()[0])
    figure, axis = pyplot.subplots(figsize=(6.5, 4))
    intensities = [float(row["gflops"]) / float(row["gbytes"]) for row in rows]
    first, last = min(*intensities, peak / bandwidth / 4), max(*intensities, peak / bandwidth * 4)
    points = [first * (last / first) ** (i / 64) for i in range(65)]
    axis.plot(points, [min(peak, bandwidth * x) for x in points], color="black", linewidth=1)
    for i, (algorithm, here) in enumerate(_series(rows, "algorithm").items()):
        x = [float(row["gflops"]) / float(row["gbytes"]) for row in here]
        y = [float(row["gflops"]) for row in here]
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        axis.plot(x, y, marker, label=algorithm, color=colour, markersize=4, alpha=0.8)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("flops per byte (of the definition)")
    axis.set_ylabel("GFLOP/s (of the definition)")
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=7)
    return figure
