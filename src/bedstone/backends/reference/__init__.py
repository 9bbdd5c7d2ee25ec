"""The reference backend: every primitive's own float64 definition, on the caller's memory.

It takes every problem on a CPU and is asked last. Its one algorithm is in `direct`; the other
files name the primitives that it serves.
"""

from __future__ import annotations

DEVICE_KINDS = ("cpu",)
