"""Random operands of a problem in a device's memory, and a look at them from the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import bedstone
from bedstone.plan.runtime import Runtime
from bedstone.plan.tune import view

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]


class Operands:
    """Operands of uniform values in -1 ... 1; `prepare` may change them before they are placed."""

    def __init__(
        self,
        problem: bedstone.Problem,
        runtime: Runtime,
        seed: int = 0,
        prepare: Callable[[Arrays], None] | None = None,
    ) -> None:
        random = np.random.default_rng(seed)
        self._runtime, self._operands = runtime, problem.operands
        flat = {o.name: _values(o.desc, random) for o in self._operands}
        if prepare is not None:
            prepare({o.name: _tensor(flat[o.name], o.desc) for o in self._operands})
        self._buffers = [runtime.upload(flat[o.name]) for o in self._operands]
        self.pointers = [
            runtime.pointer(buffer) - operand.desc.offset_range()[0] * operand.desc.dtype.itemsize
            for operand, buffer in zip(self._operands, self._buffers)
        ]

    def arrays(self) -> Arrays:
        """The operands as arrays over the very memory (on the host), or copies of it."""
        pairs = zip(self._operands, self._buffers)
        return {o.name: view(self._runtime.download(b), o.desc) for o, b in pairs}


def _values(desc: bedstone.TensorDesc, random: np.random.Generator) -> Array:
    low, high = desc.offset_range()
    wide = np.float64 if desc.dtype is bedstone.DType.float64 else np.float32
    values = random.random(max(high - low + 1, 1), wide)
    values *= 2
    values -= 1
    return values.astype(desc.dtype.numpy, copy=False)


def _tensor(flat: Array, desc: bedstone.TensorDesc) -> Array:
    return view(flat.view(np.uint8), desc)
