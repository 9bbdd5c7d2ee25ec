"""Pictures, drawn from a CSV only: ratio bars per layer, or throughput against batch."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from typing import Any

import bedstone
from bedstone.bench.report import read_csv


def draw(csv_path: str, picture: str) -> None:
    """One panel a direction: bars of time relative to the file's first peer, coloured by layout; a
    suite of several batch sizes a layer instead gives GFLOP/s against batch.

    Raises InvalidDescriptor when matplotlib is missing or the file has no rows.
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
    first_peer = rows[0]["peer"]
    rows = [row for row in rows if row["peer"] == first_peer]
    by_batch = all(re.search(r"@\d+$", row["name"]) for row in rows)
    figure = (_against_batch if by_batch else _ratio_bars)(pyplot, rows)
    title = f"{head.get('device', '')}, {rows[0]['threads']} threads, {rows[0]['dtype']}"
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


COLOURS = {"NCHW": "#3b6ea5", "NHWC": "#e08e2b", "NCW": "#3b6ea5", "NCDHW": "#3b6ea5"}


def _ratio_bars(pyplot: Any, rows: list[dict[str, str]]) -> Any:
    directions = list(dict.fromkeys(row["direction"] for row in rows))
    names = list(dict.fromkeys(row["name"] for row in rows))
    layouts = list(dict.fromkeys(row["layout"] for row in rows))
    width = 0.8 / len(layouts)
    size = (max(7.0, 0.32 * len(names) * len(layouts)), 2.6 * len(directions) + 0.6)
    figure, axes = pyplot.subplots(len(directions), 1, figsize=size, squeeze=False, sharex=True)
    for axis, direction in zip(axes[:, 0], directions):
        for i, layout in enumerate(layouts):
            here = {r["name"]: float(r["ratio"] or 0) for r in rows
                    if r["direction"] == direction and r["layout"] == layout}  # fmt: skip
            places = [names.index(name) + (i - (len(layouts) - 1) / 2) * width for name in here]
            colour = COLOURS.get(layout, "#777777")
            axis.bar(places, list(here.values()), width, label=layout, color=colour)
        ratios = [float(r["ratio"]) for r in rows if r["direction"] == direction and r["ratio"]]
        mean = math.exp(sum(math.log(x) for x in ratios if x > 0) / max(1, len(ratios)))
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_title(f"{direction}: geometric mean {mean:.2f}", fontsize=9)
        axis.set_ylabel(f"{rows[0]['peer'] or 'peer'} time / bedstone time", fontsize=7)
        axis.grid(axis="y", alpha=0.3)
    axes[-1, 0].set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
    axes[0, 0].legend(fontsize=8)
    return figure


def _against_batch(pyplot: Any, rows: list[dict[str, str]]) -> Any:
    figure, axis = pyplot.subplots(figsize=(6.5, 4))
    for column, label, style in (("gflops", "bedstone", "o-"), ("peer_gflops", "peer", "s--")):
        series: dict[int, list[float]] = defaultdict(list)
        for row in rows:
            if float(row[column] or 0) > 0:
                series[int(row["name"].rsplit("@", 1)[1])].append(float(row[column]))
        if series:
            batches = sorted(series)
            means = [sum(series[b]) / len(series[b]) for b in batches]
            name = label if label == "bedstone" else rows[0]["peer"]
            axis.plot(batches, means, style, label=name)
    axis.set_xscale("log", base=2)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("batch")
    axis.set_ylabel("GFLOP/s, mean over layers and directions")
    axis.grid(alpha=0.3)
    axis.legend()
    return figure
