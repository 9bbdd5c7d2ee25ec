"""Where the layers of a prototxt stand: the line each begins on, for errors that name it.

protobuf's parser keeps no lines, so the text is gone through a second time, for its braces only.
What is found travels with the layers' messages, in a field of our own (`bedstone_place`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

TOKEN = re.compile(r"#[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|[{}<>\n]|\w+")
LAYERS = ("layer", "layers")  # the fields that hold layers, of either age
NET_FIELDS = ("net_param", "train_net_param", "test_net_param")  # those of a solver that hold nets


@dataclass
class Block:
    """A layer's message in the text: the field around it ("" at the top), its lines, its name."""

    within: str
    first: int
    last: float = float("inf")  # of a block that never ends
    name: str = ""


def layer_blocks(text: str) -> list[Block]:
    """The layers of a network's or solver's text, in its order."""
    found: list[Block] = []
    open_fields: list[str] = []
    block: Block | None = None  # the layer at hand, open since its field's depth
    line, word, depth = 1, "", 0
    for token in TOKEN.findall(text):
        if token == "\n":
            line += 1
        elif token in "{<":
            if word in LAYERS and block is None:
                block, depth = Block("/".join(open_fields), line), len(open_fields)
                found.append(block)
            open_fields.append(word)
        elif token in "}>":
            if open_fields:
                open_fields.pop()
            if block is not None and len(open_fields) == depth:
                block.last, block = line, None
        elif token[0] in "\"'":
            # (A layer of V0 lies inside another message, and has the name.)
            inside = block is not None and all(f in LAYERS for f in open_fields[depth:])
            if inside and word == "name" and block is not None and not block.name:
                block.name = token[1:-1]
        elif token[0] != "#":
            word = token
    return found


def mark(message: Any, text: str, name: str) -> None:
    """Give every layer of a parsed network or solver its place, `file:line`."""
    blocks = layer_blocks(text)
    for within in ("", *NET_FIELDS):
        if not within:
            nets = [message]
        elif within in message.DESCRIPTOR.fields_by_name:
            value = getattr(message, within)
            if hasattr(value, "append"):
                nets = list(value)
            else:
                nets = [value] if message.HasField(within) else []
        else:
            continue
        layers = [each for net in nets for field in LAYERS for each in getattr(net, field, ())]
        here = [block for block in blocks if block.within == within]
        if len(layers) != len(here):  # (both forms of layers mixed, which is refused later)
            continue
        for layer, block in zip(layers, here):
            layer.bedstone_place = f"{name}:{block.first}"


def layer_at(text: str, line: int) -> str:
    """The name of the layer that a line belongs to, or nothing."""
    names = [block.name for block in layer_blocks(text) if block.first <= line <= block.last]
    return names[-1] if names else ""
