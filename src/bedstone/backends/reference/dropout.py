"""The reference serves dropout by its one algorithm."""

from bedstone.backends.reference.direct import ALGORITHMS

__all__ = ["ALGORITHMS"]
