"""The three exceptions of the library.

A mistake in the description is found once, in spec, and is an `InvalidDescriptor`; a sound
problem that no algorithm takes is a `NotSupported`, and carries every algorithm's reason.
"""

from __future__ import annotations

from collections.abc import Mapping


class BedstoneError(Exception):
    """Base of every error that bedstone raises on purpose."""


class InvalidDescriptor(BedstoneError, ValueError):
    """The request makes no sense; the message names argument, value and what was expected."""

    def __init__(self, argument: str, value: object, expected: str) -> None:
        super().__init__(f"{argument}: got {value!r}, expected {expected}")
        self.argument = argument
        self.value = value
        self.expected = expected

    def __reduce__(self) -> tuple[type, tuple[str, object, str]]:
        return type(self), (self.argument, self.value, self.expected)


class NotSupported(BedstoneError, RuntimeError):
    """Every algorithm declined. `reasons` maps each algorithm's name to its reason, in words."""

    def __init__(self, problem: object, reasons: Mapping[str, str]) -> None:
        lines = [f"  {name}: {reason}" for name, reason in reasons.items()]
        listing = "\n".join(lines) if lines else "  (no algorithm is registered)"
        super().__init__(f"no algorithm takes the problem `{problem}`:\n{listing}")
        self.problem = problem
        self.reasons = dict(reasons)

    def __reduce__(self) -> tuple[type, tuple[object, dict[str, str]]]:
        return type(self), (self.problem, self.reasons)
