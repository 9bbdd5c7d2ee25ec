"""The reference serves normalization by its one algorithm."""

from bedstone.backends.reference.direct import ALGORITHMS

__all__ = ["ALGORITHMS"]
