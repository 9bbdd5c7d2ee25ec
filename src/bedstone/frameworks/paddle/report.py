"""What ran where: calls and seconds of every replaced operator by algorithm, and why some were
left to PaddlePaddle."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace

from bedstone import config
from bedstone.frameworks.paddle import trial

NATIVE = "native"

_logger = logging.getLogger("bedstone.paddle")
_lock = threading.Lock()


@dataclass
class Line:
    """One operator, one direction, on one algorithm (or native, for one reason)."""

    operator: str
    direction: str
    algorithm: str
    reason: str = ""
    calls: int = 0
    seconds: float = 0.0

    @property
    def own(self) -> bool:
        """True for bedstone's kernels."""
        return self.algorithm != NATIVE


_lines: dict[tuple[str, str, str, str], Line] = {}


def add(operator: str, direction: str, algorithm: str, seconds: float, reason: str = "") -> None:
    """One call, unless it is made for a trial. The first of a kind that was left to PaddlePaddle is
    logged with its reason."""
    if trial.side.name is not None:
        return
    key = (operator, direction, algorithm, reason)
    line = _lines.get(key)
    if line is None:
        with _lock:
            line = _lines.setdefault(key, Line(*key))
        if reason:
            _log("paddle %s %s stays native: %s", operator, direction, reason)
    line.calls += 1
    line.seconds += seconds


def _log(message: str, *values: object) -> None:
    """Where bedstone's setting or the level of its loggers asks for it; the root logger's level,
    which PaddlePaddle sets to INFO, does not."""
    with config() as settings:
        wanted = settings.log != "off"
    named = _logger.level or logging.getLogger("bedstone").level
    if wanted or (named and _logger.isEnabledFor(logging.INFO)):
        line = (_logger.name, logging.INFO, __file__, 0, message, values, None)
        _logger.handle(_logger.makeRecord(*line))


@dataclass(frozen=True)
class Report:
    """The lines, the most expensive first; print it, or read `lines`, `own_calls`, `calls`."""

    lines: tuple[Line, ...]

    @property
    def calls(self) -> int:
        """Calls of all replaced operators."""
        return sum(line.calls for line in self.lines)

    @property
    def own_calls(self) -> int:
        """Calls that ran on bedstone's kernels."""
        return sum(line.calls for line in self.lines if line.own)

    @property
    def seconds(self) -> float:
        """Seconds in all replaced operators, native gradients left out (PaddlePaddle runs those
        by itself)."""
        return sum(line.seconds for line in self.lines)

    @property
    def own_seconds(self) -> float:
        """Seconds in bedstone's kernels."""
        return sum(line.seconds for line in self.lines if line.own)

    def own(self, operator: str, direction: str | None = None) -> int:
        """Calls of one operator (in one direction) on bedstone's kernels."""
        return sum(
            line.calls
            for line in self.lines
            if line.own and line.operator == operator and direction in (None, line.direction)
        )

    def reasons(self, operator: str) -> list[str]:
        """Why calls of an operator were left to PaddlePaddle."""
        return [x.reason for x in self.lines if x.operator == operator and not x.own]

    def __str__(self) -> str:
        rows = [f"{'operator':24} {'direction':15} {'algorithm':26} {'calls':>7} {'ms':>9}"
                "  why native"]  # fmt: skip
        for x in self.lines:
            numbers = f"{x.calls:7} {x.seconds * 1e3:9.1f}"
            row = f"{x.operator:24} {x.direction:15} {x.algorithm:26} {numbers}  {x.reason}"
            rows.append(row.rstrip())
        share = 100 * self.own_seconds / self.seconds if self.seconds else 0.0
        rows.append(
            f"bedstone's kernels: {self.own_calls} of {self.calls} calls, {share:.0f}% of the time"
        )
        return "\n".join(rows)


def report() -> Report:
    """The calls of this process since the last `reset()`."""
    lines = [replace(line) for line in list(_lines.values())]
    return Report(tuple(sorted(lines, key=lambda line: -line.seconds)))


def reset() -> None:
    """Start counting afresh."""
    _lines.clear()
