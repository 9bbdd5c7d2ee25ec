"""`report()`: which convolutions were traced onto bedstone's kernels, which left to JAX, and why.

What jit has compiled calls the kernels without coming by here: calls are counted as they are traced
(and, outside of jit, as they are made).
"""

from bedstone.frameworks.counting import Counts, Report

_counts = Counts("JAX")
own, native = _counts.own, _counts.native
report, reset = _counts.report, _counts.reset

__all__ = ["Report", "native", "own", "report", "reset"]
