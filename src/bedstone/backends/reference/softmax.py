"""The reference serves softmax by its one algorithm."""

from bedstone.backends.reference.direct import ALGORITHMS

__all__ = ["ALGORITHMS"]
