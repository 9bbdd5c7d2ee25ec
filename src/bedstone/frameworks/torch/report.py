"""`report()`: which operators ran on bedstone's kernels, which on PyTorch's own, and why."""

from bedstone.frameworks.counting import Counts, Report

_counts = Counts("PyTorch's kernels")
own, native, counter = _counts.own, _counts.native, _counts.counter
report, reset = _counts.report, _counts.reset

__all__ = ["Report", "counter", "native", "own", "report", "reset"]
