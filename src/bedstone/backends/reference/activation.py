"""The reference serves activation by its one algorithm."""

from bedstone.backends.reference.direct import ALGORITHMS

__all__ = ["ALGORITHMS"]
