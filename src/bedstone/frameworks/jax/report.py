"""`report()`: which convolutions were traced onto bedstone's kernels, which left to JAX, and why.

What jit has compiled calls the kernels without coming by here: calls are counted as they are traced
(and, outside of jit, as they are made).
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

_lock = threading.Lock()
_own: Counter[tuple[str, str]] = Counter()
_native: Counter[tuple[str, str]] = Counter()


def own(operator: str, algorithms: str) -> None:
    """Count a call of ours."""
    with _lock:
        _own[operator, algorithms] += 1


def native(operator: str, reason: str) -> None:
    """Count a call that was left to JAX."""
    with _lock:
        _native[operator, reason] += 1


@dataclass(frozen=True)
class Row:
    """Calls of one operator by one algorithm, or left to JAX for one reason."""

    operator: str
    own: bool
    what: str  # algorithms, or the reason
    calls: int


@dataclass(frozen=True)
class Report:
    """Calls since the start or the last `reset()`, the most frequent first."""

    rows: tuple[Row, ...]

    @property
    def own_calls(self) -> int:
        """Calls on bedstone's kernels."""
        return sum(row.calls for row in self.rows if row.own)

    @property
    def native_calls(self) -> int:
        """Calls, of operators that were taken over, that JAX itself serves."""
        return sum(row.calls for row in self.rows if not row.own)

    def calls(self, operator: str) -> int:
        """Calls of an operator on bedstone's kernels."""
        return sum(row.calls for row in self.rows if row.own and row.operator == operator)

    def __str__(self) -> str:
        lines = [f"{self.own_calls} calls on bedstone, {self.native_calls} on JAX"]
        for row in self.rows:
            where = row.what if row.own else f"native: {row.what}"
            lines.append(f"{row.calls:8d}  {row.operator:32} {where}")
        return "\n".join(lines)


def report() -> Report:
    """What ran where since the start or the last `reset()`."""
    with _lock:
        rows = [Row(o, True, what, n) for (o, what), n in _own.items()]
        rows += [Row(o, False, what, n) for (o, what), n in _native.items()]
    return Report(tuple(sorted(rows, key=lambda row: (-row.calls, row.operator, row.what))))


def reset() -> None:
    """Start counting anew."""
    with _lock:
        _own.clear()
        _native.clear()
