"""The CUDA driver, bound by ctypes: the few functions that loading, launching and timing need.

Every call goes through `check`, which turns an error code into a `CudaError` with the driver's
own words. Contexts are the primary ones, which frameworks use too, so memory is shared with them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator

from bedstone.spec.errors import BedstoneError

LIBRARY = "libcuda.so.1"

# Attributes of a device and of a function, and launch attributes, by their numbers in cuda.h.
MULTIPROCESSORS, MAJOR, MINOR, SHARED_OPTIN = 16, 75, 76, 97
SHARED_STATIC, LOCAL_BYTES, REGISTERS, MAX_DYNAMIC_SHARED, CACHE_PREFER_SHARED = 1, 3, 4, 8, 1
CLUSTER_DIMENSION, CLUSTER_SCHEDULING, PROGRAMMATIC_SERIALIZATION = 4, 5, 6
CAPTURE_RELAXED, STREAM_NON_BLOCKING = 2, 1


class CudaError(BedstoneError, RuntimeError):
    """A driver call failed; the message carries the call, the driver's code and its words."""


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: a number and 64 bytes of value."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z")),
        *((name, ctypes.c_uint) for name in ("block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    ]


@functools.cache
def library() -> ctypes.CDLL:
    """libcuda, initialised. Raises CudaError or OSError when there is no usable driver."""
    cuda = ctypes.CDLL(LIBRARY)
    cuda.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    cuda.cuTensorMapReplaceAddress.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    code = cuda.cuInit(0)
    if code:
        raise CudaError(f"cuInit: {_words(cuda, code)}")
    return cuda


def _words(cuda: ctypes.CDLL, code: int) -> str:
    text = ctypes.c_char_p()
    cuda.cuGetErrorString(code, ctypes.byref(text))
    return f"error {code}, {text.value.decode() if text.value else 'unknown'}"


def check(name: str, *arguments: object) -> None:
    """Call the driver's function; raise CudaError unless it succeeds."""
    cuda = library()
    code = getattr(cuda, name)(*arguments)
    if code:
        raise CudaError(f"{name}: {_words(cuda, code)}")


@functools.cache
def missing() -> str | None:
    """None if there is a driver with a device, else why not."""
    try:
        count = device_count()
    except OSError:
        return f"there is no CUDA driver ({LIBRARY} cannot be loaded)"
    except CudaError as error:
        return f"the CUDA driver cannot be used: {error}"
    return None if count else "the CUDA driver sees no device"


def device_count() -> int:
    """Number of devices that the driver sees."""
    count = ctypes.c_int()
    check("cuDeviceGetCount", ctypes.byref(count))
    return count.value


def attribute(index: int, number: int) -> int:
    """A device attribute by its number in cuda.h."""
    value = ctypes.c_int()
    check("cuDeviceGetAttribute", ctypes.byref(value), number, index)
    return value.value


def device_name(index: int) -> str:
    """What the device calls itself, such as "NVIDIA H200"."""
    name = ctypes.create_string_buffer(256)
    check("cuDeviceGetName", name, len(name), index)
    return name.value.decode()


@functools.cache
def primary_context(index: int) -> ctypes.c_void_p:
    """The device's primary context, retained for the life of the process."""
    context = ctypes.c_void_p()
    check("cuDevicePrimaryCtxRetain", ctypes.byref(context), index)
    return context


@contextlib.contextmanager
def current(index: int) -> Iterator[None]:
    """The device's context is the thread's current one inside the block."""
    check("cuCtxPushCurrent_v2", primary_context(index))
    try:
        yield
    finally:
        library().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def function_attribute(function: ctypes.c_void_p, number: int) -> int:
    """An attribute of a loaded kernel (registers, local bytes, ...)."""
    value = ctypes.c_int()
    check("cuFuncGetAttribute", ctypes.byref(value), number, function)
    return value.value


def load(binary: bytes, name: str, shared: int, index: int) -> ctypes.c_void_p:
    """The kernel `name` of a cubin, loaded on the device, allowed `shared` bytes of dynamic shared
    memory. The module stays loaded."""
    with current(index):
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        check("cuModuleLoadData", ctypes.byref(module), binary)
        check("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        available = attribute(index, SHARED_OPTIN)
        if shared > available:
            raise CudaError(
                f"kernel {name} needs {shared} bytes of shared memory; the device has {available}"
            )
        if shared > 48 << 10:
            room = available - function_attribute(function, SHARED_STATIC)
            check("cuFuncSetCacheConfig", function, CACHE_PREFER_SHARED)
            check("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, room)
        return function
