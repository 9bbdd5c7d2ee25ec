"""What a call through PaddlePaddle costs besides its arithmetic: `python -m
bedstone.bench.paddle_calls [FILE]` prints the table, and writes it to the CSV file.

Tiny tensors, of which nearly all of a call is the call; native operators and bedstone's in their
place in turns, medians. And how long the array adapter takes to understand a tensor.
"""

from __future__ import annotations

import contextlib
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bedstone.arrays import as_array_ref
from bedstone.bench import machine, report
from bedstone.plan.device import cpu_device

REPEATS, ROUNDS = 200, 15
Call = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """Microseconds of a call; with `training`, of the call and its gradients. None where there is
    no such side."""

    what: str
    native: float
    on_bedstone: float | None = None
    left_native: float | None = None  # patched, and declined
    training_native: float | None = None
    training_on_bedstone: float | None = None

    def record(self) -> dict[str, Any]:
        """As a dictionary."""
        return {name: "" if value is None else value for name, value in asdict(self).items()}


def operators(paddle: Any) -> dict[str, Call]:
    """Calls of tiny tensors, and of the layers that most networks are made of."""
    F = paddle.nn.functional
    x, w = paddle.randn([1, 4, 6, 8]), paddle.randn([8, 4, 3, 3])
    layer = paddle.nn.Conv2D(4, 8, 3, padding=1)
    for tensor in (x, w):
        tensor.stop_gradient = False  # (without effect under no_grad)
    return {
        "F.conv2d": lambda: F.conv2d(x, w, padding=1),
        "nn.Conv2D with bias": lambda: layer(x),
        "F.max_pool2d": lambda: F.max_pool2d(x, 2),
        "F.softmax": lambda: F.softmax(x),
        "F.relu": lambda: F.relu(x),
    }


def adapters(paddle: Any) -> dict[str, Call]:
    """Ways from a tensor to its pointer, shape, strides and dtype."""
    dlpack = importlib.import_module("paddle.utils.dlpack")
    x = paddle.randn([1, 4, 6, 8])
    return {
        "empty and data_ptr": lambda: paddle.empty([1, 4, 6, 8]).data_ptr(),
        "the adapter": lambda: as_array_ref(x),
        "DLPack to PaddlePaddle": lambda: dlpack.from_dlpack(dlpack.to_dlpack(x)),
        "DLPack to NumPy": lambda: np.from_dlpack(x),
        "a copy, .numpy()": lambda: x.numpy(),
    }


def table() -> list[Row]:
    """Operators, then adapters."""
    paddle: Any = importlib.import_module("paddle")
    enable: Any = importlib.import_module("bedstone.frameworks.paddle").enable
    sides = (contextlib.nullcontext, lambda: enable(always=True))
    rows = []
    for name, call in operators(paddle).items():
        with paddle.no_grad():
            forward = _in_turns(call, *sides, enable)
        training = _in_turns(lambda: call().backward(), *sides)  # noqa: B023
        rows.append(Row(name, *forward, *training))
    for name, call in adapters(paddle).items():
        rows.append(Row(name, *_in_turns(call, contextlib.nullcontext)))
    return rows


def _in_turns(call: Call, *sides: Callable[[], Any]) -> list[float]:
    """Microseconds of the call on each side: medians."""
    samples: list[list[float]] = [[] for _ in sides]
    for turn in range(ROUNDS + 1):
        for side, found in zip(sides, samples):
            with side():
                start = time.perf_counter()
                for _ in range(REPEATS):
                    call()
                if turn:  # (the first compiles)
                    found.append((time.perf_counter() - start) / REPEATS * 1e6)
    return [statistics.median(found) for found in samples]


def main(arguments: list[str]) -> None:
    """Print the table, and write it where the arguments say."""
    rows = table()
    names = list(Row.__dataclass_fields__)
    print("".join(f"{name:>22}" for name in names))
    for row in rows:
        cells = [f"{v:.1f}" if isinstance(v, float) else v for v in row.record().values()]
        print("".join(f"{cell[-22:]:>22}" for cell in cells))
    head = report.environment(cpu_device(), machine.Ceilings({}, 0.0))
    head["paddle"] = importlib.import_module("paddle").__version__
    for path in arguments:
        report.write_csv(path, rows, head)


if __name__ == "__main__":
    main(sys.argv[1:])
