"""Memory and clocks of a CUDA device through the driver alone, and of the interpreter.

Buffers are raw device memory, freed when they are dropped. A call is timed by replaying a CUDA
graph of many calls, so that launch gaps do not count; what cannot be captured is timed by events.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bedstone.backends.triton import driver
from bedstone.plan.device import Device
from bedstone.plan.runtime import HostRuntime
from bedstone.spec.errors import InvalidDescriptor

# The graph that is timed holds about this much work: long against an event's resolution (0.5 us)
# and short enough for several replays in the time allowed.
GRAPH_SECONDS = 2e-3
GRAPH_CALLS = 200  # at most, so that building the graph stays quick
INTERPRETED_ARCHITECTURE = "sm_90"  # whose tile tables the interpreter uses


def interpreting() -> bool:
    """True if kernels are to run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


class DefaultStream:
    """Which stream stands for stream 0: the driver's default one, but for a moment of timing."""

    handle = 0


class Buffer:
    """Device memory of `nbytes` bytes on one device."""

    def __init__(self, nbytes: int, index: int) -> None:
        self.nbytes, self.index = nbytes, index
        address = ctypes.c_uint64()
        with driver.current(index):
            driver.check("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(nbytes, 1)))
        self.address = address.value

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            cuda = driver.library()
            cuda.cuCtxPushCurrent_v2(driver.primary_context(self.index))
            cuda.cuMemFree_v2(ctypes.c_uint64(self.address))
            cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


class CudaRuntime:
    """The devices of the CUDA driver; memory lies on device `index` (0 unless told otherwise)."""

    def __init__(self, index: int = 0) -> None:
        self.index = index

    def device(self, index: int) -> Device:
        """The device, with its name and architecture ("sm_90").

        Raises InvalidDescriptor when there is none of that index.
        """
        count = driver.device_count()
        if not 0 <= index < count:
            raise InvalidDescriptor("device", f"cuda:{index}", f"one of {count} devices")
        major, minor = driver.attribute(index, driver.MAJOR), driver.attribute(index, driver.MINOR)
        return Device("cuda", index, driver.device_name(index), f"sm_{major}{minor}")

    def empty(self, nbytes: int) -> Buffer:
        """Device memory, not initialised, aligned to 256 bytes."""
        return Buffer(nbytes, self.index)

    def upload(self, data: np.ndarray[Any, Any]) -> Buffer:
        """A copy of the array's bytes in device memory."""
        data = np.ascontiguousarray(data)
        buffer = self.empty(data.nbytes)
        with driver.current(self.index):
            driver.check(
                "cuMemcpyHtoD_v2",
                ctypes.c_uint64(buffer.address),
                ctypes.c_void_p(data.ctypes.data),
                ctypes.c_size_t(data.nbytes),
            )
        return buffer

    def pointer(self, buffer: Buffer) -> int:
        """The buffer's device address."""
        return buffer.address

    def download(self, buffer: Buffer) -> np.ndarray[Any, Any]:
        """The buffer's bytes on the host, after all work on the device has ended."""
        data = np.empty(buffer.nbytes, np.uint8)
        self.synchronize()
        with driver.current(self.index):
            driver.check(
                "cuMemcpyDtoH_v2",
                ctypes.c_void_p(data.ctypes.data),
                ctypes.c_uint64(buffer.address),
                ctypes.c_size_t(buffer.nbytes),
            )
        return data

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        with driver.current(self.index):
            driver.check("cuCtxSynchronize")

    def time(self, call: Callable[[], None], seconds: float = 0.05) -> float:
        """Median seconds of a call that launches on stream 0, measured for about `seconds`."""
        with driver.current(self.index):
            stream = ctypes.c_void_p()
            driver.check("cuStreamCreate", ctypes.byref(stream), driver.STREAM_NON_BLOCKING)
            DefaultStream.handle = stream.value or 0
            try:
                return _time(call, stream, seconds)
            finally:
                DefaultStream.handle = 0
                driver.check("cuStreamDestroy_v2", stream)


def _time(call: Callable[[], None], stream: ctypes.c_void_p, seconds: float) -> float:
    once = _elapsed(call, stream)
    once = min(once, _elapsed(call, stream))
    calls = max(1, min(GRAPH_CALLS, int(GRAPH_SECONDS / max(once, 1e-7))))
    graph = _capture(call, calls, stream)

    def replay() -> None:
        driver.check("cuGraphLaunch", graph, stream)

    def batch() -> None:
        for _ in range(calls):
            call()

    run = batch if graph is None else replay
    _elapsed(run, stream)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or (time.perf_counter() < end and len(times) < 1000):
        times.append(_elapsed(run, stream) / calls)
    if graph is not None:
        driver.check("cuGraphExecDestroy", graph)
    return statistics.median(times)


def _elapsed(run: Callable[[], None], stream: ctypes.c_void_p) -> float:
    """Seconds between an event before and one after, on the stream."""
    events = [ctypes.c_void_p(), ctypes.c_void_p()]
    for event in events:
        driver.check("cuEventCreate", ctypes.byref(event), 0)
    driver.check("cuEventRecord", events[0], stream)
    run()
    driver.check("cuEventRecord", events[1], stream)
    driver.check("cuEventSynchronize", events[1])
    milliseconds = ctypes.c_float()
    driver.check("cuEventElapsedTime", ctypes.byref(milliseconds), *events)
    for event in events:
        driver.check("cuEventDestroy_v2", event)
    return milliseconds.value * 1e-3


def _capture(call: Callable[[], None], calls: int, stream: ctypes.c_void_p) -> Any:
    """An executable graph of `calls` calls, or None if they cannot be captured."""
    graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
    driver.check("cuStreamBeginCapture_v2", stream, driver.CAPTURE_RELAXED)
    try:
        for _ in range(calls):
            call()
    except driver.CudaError:
        driver.library().cuStreamEndCapture(stream, ctypes.byref(graph))
        return None
    driver.check("cuStreamEndCapture", stream, ctypes.byref(graph))
    driver.check("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_uint64(0))
    driver.check("cuGraphDestroy", graph)
    return executable


class InterpreterRuntime(HostRuntime):
    """Host memory that stands for a device's, under TRITON_INTERPRET=1."""

    def device(self, index: int) -> Device:
        """The interpreter; there is one."""
        if index != 0:
            raise InvalidDescriptor("device", f"cuda:{index}", "cuda:0, Triton's interpreter")
        return Device("cuda", 0, "Triton's interpreter", INTERPRETED_ARCHITECTURE)
