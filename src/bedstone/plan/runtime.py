"""Memory and clocks of a kind of device, for measuring and testing plans there.

The host's is here; a GPU backend brings its own as the attribute `RUNTIME` of its package.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from bedstone.plan import registry
from bedstone.plan.device import Device, cpu_device
from bedstone.spec.errors import InvalidDescriptor, NotSupported

ALIGNMENT = 64  # bytes: a cache line, and the widest vector


class Runtime(Protocol):
    """Buffers are raw bytes: `upload` takes and `download` gives a one-dimensional uint8 array."""

    def device(self, index: int) -> Device: ...
    def upload(self, data: np.ndarray[Any, Any]) -> Any: ...
    def empty(self, nbytes: int) -> Any: ...
    def pointer(self, buffer: Any) -> int: ...
    def download(self, buffer: Any) -> np.ndarray[Any, Any]: ...
    def time(self, call: Callable[[], None], seconds: float) -> float: ...


class HostRuntime:
    """NumPy memory and the process's clock."""

    def device(self, index: int) -> Device:
        """The CPU; there is one."""
        if index != 0:
            raise InvalidDescriptor("device", f"cpu:{index}", "cpu")
        return cpu_device()

    def empty(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Aligned bytes, not initialised."""
        raw = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        return raw[start : start + nbytes]

    def upload(self, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """A copy in aligned memory."""
        buffer = self.empty(data.nbytes)
        buffer[:] = data.reshape(-1).view(np.uint8)
        return buffer

    def pointer(self, buffer: np.ndarray[Any, Any]) -> int:
        """The buffer's address."""
        return int(buffer.ctypes.data)

    def download(self, buffer: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The buffer itself."""
        return buffer

    def time(self, call: Callable[[], None], seconds: float = 0.05) -> float:
        """Median seconds of a call, measured for about `seconds` after one warm-up."""
        call()
        times: list[float] = []
        end = time.perf_counter() + seconds
        while not times or (time.perf_counter() < end and len(times) < 1000):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return statistics.median(times)


_HOST = HostRuntime()


def runtime_of(kind: str) -> Runtime:
    """The runtime of a kind of device. Raises NotSupported when no usable backend brings one."""
    if kind == "cpu":
        return _HOST
    reasons = {}
    for name in registry.backends():
        if kind in registry.device_kinds(name):
            runtime: Any = registry.backend_attribute(name, "RUNTIME")
            reason = registry.backend_missing(name)
            if runtime is not None and reason is None:
                return runtime  # type: ignore[no-any-return]
            reasons[name] = reason or "it brings no runtime"
    raise NotSupported(f"the device {kind}", reasons)
