"""Which calls of a framework's operators ran on bedstone's kernels, which did not, and why."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """Calls of one operator by one algorithm, or left to the framework for one reason."""

    operator: str
    own: bool
    what: str  # algorithms, or the reason
    calls: int


@dataclass(frozen=True)
class Report:
    """Calls since the start or the last `reset()`, the most frequent first."""

    rows: tuple[Row, ...]
    framework: str

    @property
    def own_calls(self) -> int:
        """Calls on bedstone's kernels."""
        return sum(row.calls for row in self.rows if row.own)

    @property
    def native_calls(self) -> int:
        """Calls, of operators that were taken over, that the framework's own kernels served."""
        return sum(row.calls for row in self.rows if not row.own)

    def calls(self, operator: str) -> int:
        """Calls of an operator on bedstone's kernels."""
        return sum(row.calls for row in self.rows if row.own and row.operator == operator)

    def __str__(self) -> str:
        lines = [f"{self.own_calls} calls on bedstone, {self.native_calls} on {self.framework}"]
        for row in self.rows:
            where = row.what if row.own else f"native: {row.what}"
            lines.append(f"{row.calls:8d}  {row.operator:32} {where}")
        return "\n".join(lines)


class Counts:
    """The running counts of one framework."""

    def __init__(self, framework: str) -> None:
        self._framework = framework
        self._lock = threading.Lock()
        self._calls: dict[tuple[str, bool, str], list[int]] = {}

    def counter(self, operator: str, own: bool, what: str) -> Callable[[], None]:
        """A function that counts one more call of that kind, with nothing to look up."""
        lock = self._lock
        with lock:
            calls = self._calls.setdefault((operator, own, what), [0])

        def count() -> None:
            with lock:
                calls[0] += 1

        return count

    def own(self, operator: str, algorithms: str) -> None:
        """Count a call on bedstone's kernels."""
        with self._lock:
            self._calls.setdefault((operator, True, algorithms), [0])[0] += 1

    def native(self, operator: str, reason: str) -> None:
        """Count a call that was left to the framework."""
        with self._lock:
            self._calls.setdefault((operator, False, reason), [0])[0] += 1

    def report(self) -> Report:
        """What ran where since the start or the last `reset()`."""
        with self._lock:
            rows = [Row(*key, calls[0]) for key, calls in self._calls.items() if calls[0]]
        rows.sort(key=lambda row: (-row.calls, row.operator, row.what))
        return Report(tuple(rows), self._framework)

    def reset(self) -> None:
        """Start counting anew."""
        with self._lock:
            for calls in self._calls.values():
                calls[0] = 0
