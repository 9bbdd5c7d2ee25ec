"""ArrayRef: pointer, shape, strides, dtype, device and stream of anybody's array.

NumPy arrays and CPU torch tensors are read directly (under a microsecond); every other kind goes
through the protocol it offers: `__cuda_array_interface__`, DLPack or `__array_interface__`.
Nothing is copied and no framework is imported: an object's own module is loaded already.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from bedstone.spec.dtypes import DType
from bedstone.spec.errors import InvalidDescriptor
from bedstone.spec.tensor import DESCRIPTORS_KEPT, TensorDesc


@dataclass(frozen=True)
class ArrayRef:
    """Where an array lies. `owner` keeps its memory alive; `stream` is the GPU stream it is
    current on (0 on the CPU)."""

    pointer: int
    desc: TensorDesc
    device_kind: str = "cpu"
    device_index: int = 0
    readonly: bool = False
    stream: int = 0
    owner: object = None


def as_array_ref(array: object, argument: str = "array") -> ArrayRef:
    """The reference of a NumPy array, torch, JAX, PaddlePaddle or CuPy array, or anything that
    speaks DLPack or an array interface.

    Raises InvalidDescriptor, naming `argument`, for anything else, and for dtypes that bedstone
    does not compute with.
    """
    if isinstance(array, ArrayRef):
        return array
    adapter = _ADAPTERS.get(type(array).__module__.partition(".")[0]) or _inherited(type(array))
    try:
        return adapter(array)
    except InvalidDescriptor as error:
        raise InvalidDescriptor(
            f"{argument} ({error.argument})", error.value, error.expected
        ) from None
    except (TypeError, AttributeError, BufferError, RuntimeError, ValueError) as error:
        raise InvalidDescriptor(
            argument, type(array).__name__, f"an array (NumPy or DLPack): {error}"
        ) from error


def _inherited(kind: type) -> Callable[[Any], ArrayRef]:
    """The adapter for a class that somebody derived from an array class."""
    modules = (base.__module__.partition(".")[0] for base in kind.__mro__)
    return next((_ADAPTERS[m] for m in modules if m in _ADAPTERS), _from_protocol)


def _from_numpy(array: Any) -> ArrayRef:
    if not isinstance(array, np.ndarray):  # a NumPy scalar
        array = np.asarray(array)
        array.flags.writeable = False
    flags = array.flags
    _check_native(array.dtype)
    if not flags.aligned:
        raise InvalidDescriptor("address", array.ctypes.data, "a multiple of the element size")
    return ArrayRef(
        array.ctypes.data, TensorDesc.of(array), readonly=not flags.writeable, owner=array
    )


def _check_native(dtype: np.dtype[Any]) -> None:
    if not dtype.isnative:
        raise InvalidDescriptor("dtype", dtype.str, "the machine's own byte order")


def _from_torch(tensor: Any) -> ArrayRef:
    device = tensor.device
    if tensor.layout is not _torch().strided:
        raise InvalidDescriptor("layout", str(tensor.layout), "a strided (dense) tensor")
    if tensor.is_neg():  # a view of the imaginary part of a conjugate
        raise InvalidDescriptor("sign", "a lazily negated view", "tensor.resolve_neg()")
    desc = _described(tensor.shape, tensor.stride(), tensor.dtype)
    if device.type == "cpu":
        return ArrayRef(tensor.data_ptr(), desc, owner=tensor)
    if device.type != "cuda":
        raise InvalidDescriptor("device", device.type, "cpu or cuda")
    index = device.index or 0
    stream = _torch().cuda.current_stream(index).cuda_stream
    return ArrayRef(tensor.data_ptr(), desc, "cuda", index, False, stream, tensor)


@lru_cache(DESCRIPTORS_KEPT)
def _described(dims: Any, strides: tuple[int, ...], dtype: Any) -> TensorDesc:
    """The descriptor of a tensor; a call describes the same ones again."""
    return TensorDesc(tuple(dims) or (1,), tuple(strides) or (1,), DType.of(dtype))


def _torch() -> Any:
    import sys

    return sys.modules["torch"]


def _from_jax(array: Any) -> ArrayRef:
    """JAX arrays are immutable: always read-only."""
    ref = _from_protocol(array)
    return ArrayRef(
        ref.pointer, ref.desc, ref.device_kind, ref.device_index, True, ref.stream, array
    )


def _from_paddle(tensor: Any) -> ArrayRef:
    if not tensor.is_dense():
        raise InvalidDescriptor("layout", "sparse or distributed", "a strided (dense) tensor")
    place = tensor.place
    kind = "cuda" if place.is_gpu_place() else "cpu"
    index = place.gpu_device_id() if kind == "cuda" else 0
    desc = _described(tuple(tensor.shape), tuple(tensor.strides), tensor.dtype)
    return ArrayRef(tensor.data_ptr(), desc, kind, index, False, 0, tensor)


def _from_protocol(array: Any) -> ArrayRef:
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is not None:
        return _from_interface(interface, "cuda", array)
    if hasattr(array, "__dlpack__"):
        return _from_dlpack(array)
    interface = getattr(array, "__array_interface__", None)
    if interface is not None:
        return _from_interface(interface, "cpu", array)
    raise TypeError(f"{type(array).__name__} offers neither DLPack nor an array interface")


def _from_interface(interface: dict[str, Any], kind: str, owner: object) -> ArrayRef:
    dtype = np.dtype(interface["typestr"])
    _check_native(dtype)
    dims = tuple(interface["shape"])
    strides = interface.get("strides")
    if strides is None:
        desc = TensorDesc.packed(dims or (1,), DType.of(dtype))
    else:
        if any(s % dtype.itemsize for s in strides):
            raise InvalidDescriptor("strides", strides, f"multiples of {dtype.itemsize} bytes")
        desc = TensorDesc(
            dims or (1,), tuple(s // dtype.itemsize for s in strides) or (1,), DType.of(dtype)
        )
    pointer, readonly = interface["data"]
    stream = interface.get("stream") or 0
    index = 0
    if kind == "cuda" and hasattr(owner, "__dlpack_device__"):
        index = owner.__dlpack_device__()[1]
    return ArrayRef(pointer or 0, desc, kind, index, bool(readonly), stream, owner)


class _DLDevice(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("index", ctypes.c_int32)]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    ]


# DLPack's codes for device kinds and for element types (code, bits).
_DL_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu", 10: "cuda", 13: "cuda"}
_DL_TYPES = {
    (2, 32): DType.float32, (2, 64): DType.float64, (2, 16): DType.float16,
    (4, 16): DType.bfloat16, (0, 64): DType.int64, (0, 32): DType.int32, (1, 8): DType.uint8,
}  # fmt: skip
_DL_READ_ONLY = 1  # flag bit of a versioned tensor


def _from_dlpack(array: Any) -> ArrayRef:
    try:
        capsule = array.__dlpack__(max_version=(1, 1))
    except TypeError:  # an exporter of before DLPack 1.0
        capsule = array.__dlpack__()
    tensor, flags = _dl_tensor(capsule)
    kind = _DL_DEVICES.get(tensor.device.kind)
    if kind is None:
        raise InvalidDescriptor("device", f"DLPack device {tensor.device.kind}", "cpu or cuda")
    dtype = _DL_TYPES.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes != 1:
        raise InvalidDescriptor(
            "dtype", f"DLPack type {tensor.code}, {tensor.bits} bits", "a data dtype of bedstone"
        )
    dims = tuple(tensor.shape[: tensor.ndim]) or (1,)
    if tensor.strides:
        desc = TensorDesc(dims, tuple(tensor.strides[: tensor.ndim]) or (1,), dtype)
    else:
        desc = TensorDesc.packed(dims, dtype)
    pointer = (tensor.data or 0) + tensor.byte_offset
    readonly = bool(flags & _DL_READ_ONLY)
    # The capsule is kept, unconsumed, with its exporter: its own destructor frees it.
    return ArrayRef(pointer, desc, kind, tensor.device.index, readonly, 0, (array, capsule))


def _dl_tensor(capsule: Any) -> tuple[_DLTensor, int]:
    api = ctypes.pythonapi
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    api.PyCapsule_IsValid.argtypes = [ctypes.py_object, ctypes.c_char_p]
    if api.PyCapsule_IsValid(capsule, b"dltensor_versioned"):
        address = api.PyCapsule_GetPointer(capsule, b"dltensor_versioned")
        managed = _DLManagedTensorVersioned.from_address(address)
        return managed.tensor, managed.flags
    return _DLTensor.from_address(api.PyCapsule_GetPointer(capsule, b"dltensor")), 0


_ADAPTERS: dict[str, Callable[[Any], ArrayRef]] = {
    "numpy": _from_numpy,
    "ml_dtypes": _from_numpy,
    "torch": _from_torch,
    "jax": _from_jax,
    "jaxlib": _from_jax,
    "paddle": _from_paddle,
}


def empty_like_kind(prototype: object, desc: TensorDesc) -> Any:
    """A new array of the caller's kind (NumPy, torch, paddle, JAX's host memory) with `desc`'s
    dims, strides order and dtype, on the prototype's device. Packed descs only."""
    module = type(prototype).__module__.partition(".")[0]
    order = sorted(range(desc.rank), key=lambda a: (-desc.strides[a], a))
    dims = [desc.dims[a] for a in order]
    inverse = [order.index(a) for a in range(desc.rank)]
    if module == "torch":
        torch = _torch()
        dtype = getattr(torch, desc.dtype.value)
        return torch.empty(dims, dtype=dtype, device=prototype.device).permute(inverse)  # type: ignore[attr-defined]
    if module == "paddle":
        import paddle

        # PaddlePaddle's tensors are row-major.
        return paddle.empty(desc.dims, dtype=desc.dtype.value)
    if module == "cupy":
        import cupy

        return cupy.empty(dims, dtype=desc.dtype.numpy).transpose(inverse)
    return np.empty(dims, desc.dtype.numpy).transpose(inverse)


def as_caller_kind(prototype: object, array: Any) -> Any:
    """A result for the caller: NumPy results become JAX arrays for a JAX caller."""
    if type(prototype).__module__.partition(".")[0] in ("jax", "jaxlib"):
        import jax.numpy

        return jax.numpy.asarray(array)
    return array
