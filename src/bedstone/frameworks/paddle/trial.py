"""Trials: a kind of call that may pay is timed once on both sides, and the quicker one keeps it.

Which side is quicker depends on the machine: on some, PaddlePaddle's matrix products are as fast
as the hardware, and a 1 x 1 convolution is no more than one. A call whose gradients are wanted is
timed with them. Trials are no calls of the program: the report does not count them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import paddle
from paddle import Tensor

REPEATS = 3
LONG_SECONDS = 0.02  # a call as long as this is timed once
MARGIN = 0.95  # the share of our time under which PaddlePaddle's must lie: less may be noise
QUICKER = "PaddlePaddle's kernel was quicker in a trial"

Function = Callable[..., Any]  # of the tensors


class _Side(threading.local):
    """What this thread's calls are made for: a trial of "native" or "ours", or None."""

    name: str | None = None


side = _Side()


@contextlib.contextmanager
def _on(name: str) -> Iterator[None]:
    side.name = name
    try:
        yield
    finally:
        side.name = None


def reason_for_native(
    ours: Function, native: Function, tensors: Sequence[Tensor | None], wanted: Sequence[int]
) -> str | None:
    """QUICKER if PaddlePaddle's kernel is; `wanted`: of which tensors the gradients are, too."""
    times = []
    for name, function in (("ours", ours), ("native", native)):
        with _on(name):
            _timed(function, tensors, wanted)  # compiles, and wakes the threads
            seconds = _timed(function, tensors, wanted)
            if seconds < LONG_SECONDS:
                more = (_timed(function, tensors, wanted) for _ in range(REPEATS - 1))
                seconds = min(seconds, *more)
        times.append(seconds)
    return QUICKER if times[1] < MARGIN * times[0] else None


def _timed(function: Function, tensors: Sequence[Tensor | None], wanted: Sequence[int]) -> float:
    """Seconds of a call on tensors outside the program's graph."""
    copies = [None if t is None else t.detach() for t in tensors]
    for i in wanted:
        copies[i].stop_gradient = False  # type: ignore[union-attr]
    start = time.perf_counter()
    result = function(*copies)
    if wanted:
        first = result[0] if isinstance(result, (tuple, list)) else result
        paddle.grad([first], [copies[i] for i in wanted])
    return time.perf_counter() - start
