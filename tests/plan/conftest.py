"""Tests of planning choose the algorithms that there are."""

from __future__ import annotations

import pytest

from bedstone.plan import registry


@pytest.fixture
def use(monkeypatch):
    """use(a, b, ...) makes these all the algorithms that there are."""

    def replace(*algorithms, unavailable=None):
        monkeypatch.setattr(registry, "candidates", lambda primitive, device: algorithms)
        monkeypatch.setattr(registry, "unavailable", lambda device: dict(unavailable or {}))
        return algorithms

    return replace
