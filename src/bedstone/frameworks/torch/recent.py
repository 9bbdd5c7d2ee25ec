"""What was used lately, in bounded memory: a long-lived server meets ever new kinds of calls."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """A dictionary that keeps the `size` keys used last, and at most twice as many.

    Two generations: what is found in the old one joins the young one, and when the young one is
    full the old one is dropped. A hit in the young one costs a look-up and changes nothing, so
    that threads need no lock.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._young: dict[Hashable, Value] = {}
        self._old: dict[Hashable, Value] = {}

    def __len__(self) -> int:
        return len(self._young | self._old)

    def get(self, key: Hashable) -> Value | None:
        """The value of a key, or None."""
        value = self._young.get(key)
        if value is None:
            value = self._old.get(key)
            if value is not None:
                self.put(key, value)
        return value

    def put(self, key: Hashable, value: Value) -> None:
        """Keep the value (not None) of a key."""
        if len(self._young) >= self._size and key not in self._young:
            self._old, self._young = self._young, {}
        self._young[key] = value

    def clear(self) -> None:
        """Forget everything."""
        self._young, self._old = {}, {}
