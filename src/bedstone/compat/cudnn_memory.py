"""Where data lies: an operand's descriptor and the caller's pointer or array become an address.

A bare address is believed, as in C, but for NULL and alignment. An array (NumPy, or anything with
DLPack or an array interface) stands for the address of its first element, and is checked: its
memory must hold all that the descriptor describes, be of the element type, on the handle's device,
and writable where a result goes. Its own shape and strides do not matter.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from bedstone.arrays import ArrayRef, as_array_ref
from bedstone.compat.cudnn_arguments import (
    ADDRESS_MAX,
    ADDRESS_MIN,
    Pointer,
    Reference,
    Simple,
    address_of,
)
from bedstone.compat.cudnn_status import mapping_error
from bedstone.spec.dtypes import DType
from bedstone.spec.errors import InvalidDescriptor
from bedstone.spec.tensor import TensorDesc

Device = tuple[str, int]  # kind and index


class Place:
    """An operand: its argument's name, descriptor, and the bytes from its address that it spans.

    low, high   of the first byte and behind the last
    """

    def __init__(self, argument: str, desc: TensorDesc, written: bool = False) -> None:
        self.argument, self.desc, self.written = argument, desc, written
        self.itemsize, self.numpy = desc.dtype.itemsize, desc.dtype.numpy
        self.typed = desc.dtype is not DType.uint8  # else bytes: a workspace
        low, high = desc.offset_range()
        self.low, self.high = low * self.itemsize, (high + 1) * self.itemsize

    def address(self, data: object, device: Device) -> int:
        """The address of element [0, ..., 0]; whatever it is where there are no elements."""
        address = data if type(data) is int else self._resolve(data, device)
        if address % self.itemsize or not ADDRESS_MIN <= address <= ADDRESS_MAX:
            self._check(address)
        return address

    def _check(self, address: int) -> None:
        if self.high <= self.low:
            return
        if not ADDRESS_MIN <= address <= ADDRESS_MAX:
            got = None if address == 0 else address
            raise InvalidDescriptor(self.argument, got, f"memory of {self.desc}, not NULL")
        raise InvalidDescriptor(
            self.argument, address, f"an address that is a multiple of {self.itemsize}"
        )

    def _resolve(self, data: Any, device: Device) -> int:
        if data is None:
            return 0
        if isinstance(data, np.ndarray):
            self._check_device(("cpu", 0), device)
            return self._in_array(data)
        if isinstance(data, (ctypes.c_void_p, Pointer)):
            return address_of(self.argument, data)
        if isinstance(data, (ctypes.Array, Simple, Reference)):  # objects of known size
            self._check_device(("cpu", 0), device)
            whole = data._obj if isinstance(data, Reference) else data
            low = ctypes.addressof(whole)
            start = address_of(self.argument, data) if isinstance(data, Reference) else low
            self._check_span(start, low, low + ctypes.sizeof(whole))
            return start
        if hasattr(data, "__index__") and not hasattr(data, "__dlpack__"):
            return address_of(self.argument, data)
        try:
            ref = as_array_ref(data, self.argument)
        except InvalidDescriptor:
            if isinstance(data, float) or not hasattr(data, "__int__"):
                raise
            return int(data)  # a device allocation that converts to its address
        self._check_device((ref.device_kind, ref.device_index), device)
        return self._in_reference(ref)

    def _check_device(self, found: Device, wanted: Device) -> None:
        if found != wanted:
            raise mapping_error(
                self.argument, f"memory of {found[0]}:{found[1]}", f"of {wanted[0]}:{wanted[1]}"
            )

    def _in_array(self, array: np.ndarray[Any, Any]) -> int:
        if self.typed and array.dtype != self.numpy and array.dtype != np.uint8:
            raise InvalidDescriptor(self.argument, str(array.dtype), f"an array of {self.desc}")
        if self.written and not array.flags.writeable:
            raise InvalidDescriptor(self.argument, "a read-only array", "memory to write to")
        start: int = array.__array_interface__["data"][0]  # (quicker than array.ctypes.data)
        owner = array
        while isinstance(owner.base, np.ndarray):  # a view may reach to all that its owner has
            owner = owner.base
        first: int = start if owner is array else owner.__array_interface__["data"][0]
        if owner.flags.c_contiguous:
            self._check_span(start, first, first + owner.nbytes)
            return start
        low = high = first
        for d, step in zip(owner.shape, owner.strides):
            low, high = low + min((d - 1) * step, 0), high + max((d - 1) * step, 0)
        self._check_span(start, low, high + owner.itemsize if owner.size else low)
        return start

    def _in_reference(self, ref: ArrayRef) -> int:
        if self.typed and ref.desc.dtype not in (self.desc.dtype, DType.uint8):
            raise InvalidDescriptor(self.argument, str(ref.desc), f"an array of {self.desc}")
        if self.written and ref.readonly:
            raise InvalidDescriptor(self.argument, "a read-only array", "memory to write to")
        low, high = ref.desc.offset_range()
        size = ref.desc.dtype.itemsize
        self._check_span(ref.pointer, ref.pointer + low * size, ref.pointer + (high + 1) * size)
        return ref.pointer

    def _check_span(self, start: int, low: int, high: int) -> None:
        if self.high > self.low and (start + self.low < low or start + self.high > high):
            raise InvalidDescriptor(
                self.argument,
                f"an array with {start - low} bytes before its first element and {high - start} "
                f"from it on",
                f"memory that holds all of {self.desc}: {-self.low} and {self.high} bytes",
            )
