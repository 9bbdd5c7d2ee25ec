"""Random operands made where they are used: on the GPU, by PyTorch, in its memory.

Making them on the host and moving them would take longer than the measurement. Several sets of
operands are used in turn, so that what is timed finds its inputs in device memory, as it would
in a network, and not in the cache from the call before.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import bedstone

CACHE_BYTES = 150 << 20  # several times the level-2 cache of today's GPUs
MOST_SETS = 8


def available(device: str) -> bool:
    """True if PyTorch can make operands on the device."""
    if device == "cpu" or importlib.util.find_spec("torch") is None:
        return False
    return bool(importlib.import_module("torch").cuda.is_available())


def sets_of(problem: bedstone.Problem) -> int:
    """How many sets of operands are used in turn."""
    return max(1, min(MOST_SETS, math.ceil(CACHE_BYTES / max(problem.bytes, 1))))


class DeviceOperands:
    """As operands.Operands, uniform in -1 ... 1, but tensors on the GPU."""

    def __init__(self, problem: bedstone.Problem, device: str, seed: int = 0) -> None:
        torch: Any = importlib.import_module("torch")
        random = torch.Generator(device).manual_seed(seed)
        self._tensors, self.pointers = {}, []
        for operand in problem.operands:
            desc = operand.desc
            low, high = desc.offset_range()
            dtype = getattr(torch, str(desc.dtype))
            flat = torch.empty(max(high - low + 1, 1), dtype=dtype, device=device)
            if flat.is_floating_point():
                flat.uniform_(-1, 1, generator=random)
            else:
                flat.zero_()
            self._tensors[operand.name] = flat.as_strided(desc.dims, desc.strides, -low)
            self.pointers.append(flat.data_ptr() - low * desc.dtype.itemsize)

    def arrays(self) -> dict[str, Any]:
        """The operands as tensors, by name."""
        return self._tensors


def in_turn(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """A call that makes the next of the calls, over and over."""
    if len(calls) == 1:
        return calls[0]
    endless = itertools.cycle(calls)
    return lambda: next(endless)()
