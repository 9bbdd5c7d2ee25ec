"""SIGINT and SIGHUP in training, as in Caffe: they ask the solver to stop or to take a snapshot."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from bedstone.frameworks.caffe.solver import NONE, SNAPSHOT, STOP

EFFECTS = (STOP, SNAPSHOT, NONE)


class Signals:
    """While entered, turns the two signals into requests that `next_request` hands out once.

    The solver obeys between iterations and between test batches. A second SIGINT before it has
    done so interrupts at once, as everywhere in Python.
    """

    def __init__(self, sigint: str = STOP, sighup: str = SNAPSHOT) -> None:
        self._effects = {signal.SIGINT: sigint, signal.SIGHUP: sighup}
        self._requests: list[str] = []
        self._before: dict[signal.Signals, Any] = {}

    def next_request(self) -> str:
        return self._requests.pop(0) if self._requests else NONE

    def _received(self, number: int, frame: FrameType | None) -> None:
        effect = self._effects[signal.Signals(number)]
        if number == signal.SIGINT and effect in self._requests:
            raise KeyboardInterrupt
        if effect != NONE:
            self._requests.append(effect)

    def __enter__(self) -> Signals:
        for number in self._effects:
            self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
