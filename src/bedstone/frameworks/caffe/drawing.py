"""`bedstone caffe draw`: a network as a picture (matplotlib) or as text for Graphviz.

A box is a layer with the layers that work in place on its output; an arrow is a blob. Boxes lie in
rows by the longest way from the input, and in a row by where their inputs are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bedstone.frameworks.caffe import io, schema
from bedstone.frameworks.caffe.net import included
from bedstone.spec.errors import InvalidDescriptor

COLOURS = {"data": "#f0d9a8", "weights": "#a9c4e2", "loss": "#e6a9a0", "other": "#dddddd"}
WEIGHTED = {"Convolution", "Deconvolution", "InnerProduct", "Embed", "Scale", "Bias", "BatchNorm"}


@dataclass
class Box:
    """A layer and those in place after it; `inputs` are (box, blob)."""

    number: int
    lines: list[str]
    kind: str
    inputs: list[tuple[int, str]] = field(default_factory=list)


def boxes_of(layers: Sequence[Any]) -> list[Box]:
    """The boxes of layers, each after those that it reads."""
    boxes: list[Box] = []
    makers: dict[str, list[int]] = {}
    for layer in layers:
        in_place = len(layer.bottom) == 1 and list(layer.bottom) == list(layer.top)
        if in_place and layer.bottom[0] in makers:
            for number in makers[layer.bottom[0]]:
                boxes[number].lines.append(f"{layer.name} ({layer.type})")
            continue
        box = Box(len(boxes), [layer.name, _describe(layer)], _kind(layer))
        for blob in layer.bottom:
            for maker in makers.get(blob, []):
                box.inputs.append((maker, blob))
        for blob in layer.top:
            # Two data layers, one for each phase, make the same blobs: both point to the readers.
            twins = makers.get(blob, []) if not layer.bottom else []
            makers[blob] = [*twins, box.number]
        boxes.append(box)
    return boxes


def _kind(layer: Any) -> str:
    if not layer.bottom:
        return "data"
    if layer.type in WEIGHTED:
        return "weights"
    return "loss" if "Loss" in layer.type or layer.type == "Accuracy" else "other"


def _describe(layer: Any) -> str:
    """`Convolution 96 11x11 /4 +0`, as far as the layer has such numbers."""
    words = [layer.type]
    for rule in layer.include:
        if rule.HasField("phase"):
            words.append(schema.enum_name(rule, "phase"))
    if layer.HasField("convolution_param"):
        conv = layer.convolution_param
        kernel = list(conv.kernel_size) or [conv.kernel_h, conv.kernel_w]
        words += [str(conv.num_output), "x".join(map(str, kernel * (2 if len(kernel) == 1 else 1)))]
        words += [f"stride {conv.stride[0]}"] if conv.stride else []
        words += [f"groups {conv.group}"] if conv.group > 1 else []
    elif layer.HasField("pooling_param"):
        pool = layer.pooling_param
        words.append(schema.enum_name(pool, "pool"))
        words += ["global"] if pool.global_pooling else [f"{pool.kernel_size}", f"/{pool.stride}"]
    elif layer.HasField("inner_product_param"):
        words.append(str(layer.inner_product_param.num_output))
    return " ".join(words)


def dot(name: str, boxes: list[Box], rankdir: str = "TB") -> str:
    """The network in Graphviz's language."""
    lines = [f"digraph {_quoted(name or 'net')} {{", f"  rankdir={rankdir};",
             '  node [shape=box, style="filled,rounded", fontname="sans-serif"];']  # fmt: skip
    for box in boxes:
        label = _quoted("\n".join(box.lines))
        lines.append(f'  n{box.number} [label={label}, fillcolor="{COLOURS[box.kind]}"];')
    for box in boxes:
        lines += [f"  n{a} -> n{box.number} [label={_quoted(blob)}];" for a, blob in box.inputs]
    return "\n".join([*lines, "}", ""])


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def places(boxes: list[Box]) -> dict[int, tuple[float, int]]:
    """(place in the row, row) of every box; rows are centred on 0."""
    rows: dict[int, int] = {}
    for box in boxes:
        rows[box.number] = 1 + max((rows[a] for a, _ in box.inputs), default=-1)
    by_row = defaultdict(list)
    for box in boxes:
        by_row[rows[box.number]].append(box)
    found: dict[int, tuple[float, int]] = {}
    for row in sorted(by_row):
        here = by_row[row]

        def above(box: Box) -> float:
            inputs = [found[a][0] for a, _ in box.inputs]
            return sum(inputs) / len(inputs) if inputs else 0.0

        here.sort(key=above)
        # One box stays under its inputs; several spread out around where theirs are.
        centre = sum(map(above, here)) / len(here)
        for i, box in enumerate(here):
            found[box.number] = (centre + i - (len(here) - 1) / 2, row)
    return found


def draw(model: str, output: str, phase: str = "ALL", rankdir: str = "TB") -> None:
    """Draw the network of a .prototxt to a .dot text or to any picture that matplotlib writes."""
    param = io.read_net(model)
    layers = list(param.layer)
    if phase != "ALL":
        state = schema.NetState()
        state.MergeFrom(param.state)
        state.phase = {"TRAIN": schema.TRAIN, "TEST": schema.TEST}[phase]
        layers = included(param, state)
    boxes = boxes_of(layers)
    if not boxes:
        raise InvalidDescriptor("model", model, "a network with layers")
    if output.endswith((".dot", ".gv")):
        try:
            Path(output).write_text(dot(param.name, boxes, rankdir), encoding="utf-8")
        except OSError as error:
            raise InvalidDescriptor("output", output, f"a place to write ({error})") from None
        return
    _picture(param.name, boxes, output, rankdir)


# Inches of a box and of the gap to the next, across and along.
WIDE, HIGH = 2.5, 0.75


def _picture(name: str, boxes: list[Box], output: str, rankdir: str) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise InvalidDescriptor("output", output, "matplotlib installed, or a .dot file") from None
    across = rankdir == "LR"
    spots = {}
    for number, (place, row) in places(boxes).items():
        spots[number] = (row * WIDE, -place * HIGH) if across else (place * WIDE, -row * HIGH)
    x, y = zip(*spots.values())
    size = (max(x) - min(x) + WIDE, max(y) - min(y) + HIGH + 0.5)
    figure, axis = pyplot.subplots(figsize=size)
    axis.set_xlim(min(x) - WIDE / 2, max(x) + WIDE / 2)
    axis.set_ylim(min(y) - HIGH / 2, max(y) + HIGH / 2)
    axis.axis("off")
    axis.set_title(name, fontsize=10)
    for box in boxes:
        for maker, _ in box.inputs:
            axis.annotate(
                "", xy=spots[box.number], xytext=spots[maker], zorder=1,
                arrowprops={"arrowstyle": "-|>", "color": "#555555", "shrinkA": 14, "shrinkB": 14},
            )  # fmt: skip
        style = {"boxstyle": "round,pad=0.35", "facecolor": COLOURS[box.kind], "linewidth": 0.6}
        axis.text(*spots[box.number], "\n".join(box.lines), ha="center", va="center", fontsize=6,
                  bbox=style, zorder=2)  # fmt: skip
    try:
        figure.savefig(output, dpi=130, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise InvalidDescriptor("output", output, f"a picture to write: {error}") from None
    finally:
        pyplot.close(figure)
