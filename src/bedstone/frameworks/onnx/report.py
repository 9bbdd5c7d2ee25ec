"""What ran where: calls and seconds of every operator by algorithm, and why some fell back."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class Line:
    """One operator on one algorithm."""

    operator: str
    algorithm: str  # bedstone's name; "numpy" for glue; "onnx reference" for the rest
    calls: int = 0
    seconds: float = 0.0
    reason: str = ""

    @property
    def own(self) -> bool:
        """True for bedstone's kernels (the NumPy reference backend does not count)."""
        return ":" in self.algorithm and not self.algorithm.startswith("reference:")


class Ledger:
    """The lines of one session."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], Line] = {}
        _ledgers.add(self)

    def add(
        self, operator: str, algorithm: str, seconds: float, reason: str = "", calls: int = 1
    ) -> None:
        """One call, or several together."""
        line = self._lines.get((operator, algorithm))
        if line is None:
            line = self._lines.setdefault(
                (operator, algorithm), Line(operator, algorithm, reason=reason)
            )
        line.calls += calls
        line.seconds += seconds

    def clear(self) -> None:
        """Forget every call."""
        self._lines.clear()

    def lines(self) -> list[Line]:
        """The lines, the most expensive first."""
        return sorted(self._lines.values(), key=lambda line: -line.seconds)


_ledgers: weakref.WeakSet[Ledger] = weakref.WeakSet()
_lock = threading.Lock()


@dataclass(frozen=True)
class Report:
    """Lines summed over sessions; print it, or read `lines`, `own_calls`, `own_seconds`."""

    lines: tuple[Line, ...]

    @property
    def calls(self) -> int:
        """Calls of all operators."""
        return sum(line.calls for line in self.lines)

    @property
    def seconds(self) -> float:
        """Seconds in all operators."""
        return sum(line.seconds for line in self.lines)

    @property
    def own_calls(self) -> int:
        """Calls that ran on bedstone's kernels."""
        return sum(line.calls for line in self.lines if line.own)

    @property
    def own_seconds(self) -> float:
        """Seconds in bedstone's kernels."""
        return sum(line.seconds for line in self.lines if line.own)

    def __str__(self) -> str:
        rows = [f"{'operator':22} {'algorithm':30} {'calls':>7} {'ms':>9}  why not bedstone"]
        for x in self.lines:
            numbers = f"{x.calls:7} {x.seconds * 1e3:9.1f}"
            rows.append(f"{x.operator:22} {x.algorithm:30} {numbers}  {x.reason}".rstrip())
        share = 100 * self.own_seconds / self.seconds if self.seconds else 0.0
        rows.append(
            f"bedstone's kernels: {self.own_calls} of {self.calls} calls, {share:.0f}% of the time"
        )
        return "\n".join(rows)


def report(ledgers: Iterable[Ledger] | None = None) -> Report:
    """The sum over every session alive in this process (or over the given ledgers)."""
    total: dict[tuple[str, str], Line] = {}
    with _lock:
        chosen = list(_ledgers) if ledgers is None else list(ledgers)
    for ledger in chosen:
        for line in ledger.lines():
            key = (line.operator, line.algorithm)
            into = total.setdefault(key, Line(*key, reason=line.reason))
            into.calls += line.calls
            into.seconds += line.seconds
    return Report(tuple(sorted(total.values(), key=lambda line: -line.seconds)))


def reset() -> None:
    """Start counting afresh in every session alive."""
    with _lock:
        for ledger in _ledgers:
            ledger.clear()
