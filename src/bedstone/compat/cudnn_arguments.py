"""Arguments as a C program or a ctypes wrapper passes them: numbers, enumerants, factors on the
host, arrays of int, and pointers to write results to.

Everything that is not understood is an InvalidDescriptor that names the argument, so that each
wrong call gets CUDNN_STATUS_BAD_PARAM and none a crash.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np

from bedstone.spec.dtypes import DType
from bedstone.spec.errors import InvalidDescriptor

INT_MAX = 2**31 - 1
ADDRESS_MIN, ADDRESS_MAX = 4096, 2**63 - 1  # the first page is never anybody's
# Kinds of objects for which ctypes has no public name.
Simple: Any = ctypes._SimpleCData
Pointer: Any = ctypes._Pointer
Reference: Any = type(ctypes.byref(ctypes.c_int()))  # what byref() returns

# C types of results that are no int; names that end in "A" are arrays of int.
RESULT_TYPES = {
    "handle": ctypes.c_void_p, "streamId": ctypes.c_void_p, "tensorDesc": ctypes.c_void_p,
    "filterDesc": ctypes.c_void_p, "convDesc": ctypes.c_void_p, "poolingDesc": ctypes.c_void_p,
    "sizeInBytes": ctypes.c_size_t,
}  # fmt: skip

E = TypeVar("E", bound=IntEnum)


def integer(argument: str, value: object, least: int = -INT_MAX - 1) -> int:
    """A C int of at least `least`."""
    if type(value) is not int:
        value = _whole(argument, value)
    if not least <= value <= INT_MAX:
        raise InvalidDescriptor(argument, value, f"an int of {least} or more")
    return value


def size(argument: str, value: object) -> int:
    """A C size_t."""
    number = value if type(value) is int else _whole(argument, value)
    if number < 0:
        raise InvalidDescriptor(argument, number, "0 or more bytes")
    return number


def _whole(argument: str, value: object) -> int:
    if isinstance(value, Simple) and not isinstance(value, ctypes.c_void_p):
        value = value.value
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidDescriptor(argument, value, "an integer") from None


def enumerant(argument: str, kind: type[E], value: Any) -> E:
    """The member of an enumeration that an integer stands for."""
    try:
        return kind(value)
    except ValueError:
        pass
    try:
        return kind(_whole(argument, value))
    except ValueError as error:
        known = ", ".join(f"{name} = {int(m)}" for name, m in kind.__members__.items())
        raise InvalidDescriptor(argument, value, f"one of {known}") from error


def integers(argument: str, values: object, count: int) -> tuple[int, ...]:
    """The first `count` of an array of C ints: a sequence, ctypes array or pointer, or address."""
    if values is None:
        raise InvalidDescriptor(argument, None, f"{count} integers, not NULL")
    if isinstance(values, (list, tuple, np.ndarray, ctypes.Array)):
        if np.ndim(values) != 1 or len(values) < count:
            raise InvalidDescriptor(argument, values, f"{count} integers")
        found: Sequence[object] = values[:count]  # type: ignore[assignment]
    elif isinstance(values, Pointer):
        found = [values[i] for i in range(count)] if values else ()
    else:
        address = host_address(argument, values, ctypes.sizeof(ctypes.c_int))
        found = (ctypes.c_int * count).from_address(address)[:]
    if len(found) < count:
        raise InvalidDescriptor(argument, values, f"{count} integers, not NULL")
    return tuple(integer(argument, value) for value in found)


def factor(argument: str, value: object, dtype: DType) -> float:
    """alpha, beta or a fill value: a number, or a host pointer to a float (double for double
    data). For float data it is rounded to float, as it would be in C."""
    kind = type(value)
    number = float(value) if kind is float or kind is int else _pointed(argument, value, dtype)  # type: ignore[arg-type]
    if dtype is DType.float64 or number == 1.0 or number == 0.0:
        return number
    return ctypes.c_float(number).value


def _pointed(argument: str, value: Any, dtype: DType) -> float:
    expected = "a number, or a pointer to one on the host"
    if isinstance(value, Reference):
        value = value._obj
    if isinstance(value, Pointer) and value:
        value = value[0]
    if isinstance(value, ctypes.c_void_p):
        kind = ctypes.c_double if dtype is DType.float64 else ctypes.c_float
        value = kind.from_address(host_address(argument, value, ctypes.sizeof(kind)))
    if isinstance(value, Simple):
        value = value.value
    elif isinstance(value, (ctypes.Array, np.ndarray)) and np.size(value) == 1:
        value = np.asarray(value).item()
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidDescriptor(argument, value, expected) from None


def address_of(argument: str, value: Any) -> int:
    """The address that a pointer-like value holds; 0 for NULL."""
    if value is None:
        return 0
    try:
        if isinstance(value, ctypes.Array):
            return ctypes.addressof(value)
        if isinstance(value, (Reference, Pointer, ctypes.c_void_p)):
            return ctypes.cast(value, ctypes.c_void_p).value or 0
        address = operator.index(value.value if isinstance(value, Simple) else value)
    except (TypeError, ValueError, ctypes.ArgumentError):
        address = -1
    if not 0 <= address <= ADDRESS_MAX:
        raise InvalidDescriptor(argument, value, "an address or a pointer")
    return address


def host_address(argument: str, value: Any, itemsize: int) -> int:
    """The address of numbers on the host, which are read or written by this process.

    Raises InvalidDescriptor for NULL, for small numbers, and for addresses out of alignment.
    """
    address = address_of(argument, value)
    if address < ADDRESS_MIN or address % itemsize:
        got = value if address else None
        raise InvalidDescriptor(argument, got, f"an address (a multiple of {itemsize}), not NULL")
    return address


Writer = Callable[[Any], None]


def writer(argument: str, pointer: object) -> Writer:
    """A function that stores a result where `pointer` says: byref(...) or a ctypes pointer, an
    array (ctypes or NumPy), or an address, at which a value of the result's C type is written."""
    is_array = argument.endswith("A")
    whole = _pointed_object(argument, pointer)
    if isinstance(whole, (ctypes.Array, np.ndarray)):
        return lambda value: _fill(argument, whole, value if is_array else (value,))
    if isinstance(whole, Simple) and not is_array:
        return lambda value: _assign(argument, whole, value)
    if isinstance(pointer, Simple) and not isinstance(pointer, ctypes.c_void_p):
        raise InvalidDescriptor(argument, pointer, "a pointer to write to: byref(...)")
    kind: Any = RESULT_TYPES.get(argument, ctypes.c_int)
    address = host_address(argument, pointer, ctypes.sizeof(kind))

    def store(value: Any) -> None:
        values = value if is_array else (value,)
        for number in values:
            _check_fits(argument, kind, number)
        (kind * len(values)).from_address(address)[:] = [int(number) for number in values]

    return store


def _pointed_object(argument: str, pointer: Any) -> Any:
    """The ctypes object or array that a pointer was made of, where that is known."""
    if isinstance(pointer, Reference):
        whole = pointer._obj
        return whole if address_of(argument, pointer) == ctypes.addressof(whole) else None
    if isinstance(pointer, Pointer):
        return pointer.contents if pointer else None
    return pointer if isinstance(pointer, (ctypes.Array, np.ndarray)) else None


def _assign(argument: str, place: Any, value: Any) -> None:
    _check_fits(argument, type(place), value)
    place.value = int(value)


def _check_fits(argument: str, kind: Any, value: Any) -> None:
    stored = kind(int(value)).value or 0
    if stored != value:
        raise InvalidDescriptor(argument, int(value), f"a value that fits {kind.__name__}")


def _fill(argument: str, place: Any, values: Sequence[Any]) -> None:
    if len(place) < len(values):
        raise InvalidDescriptor(argument, len(place), f"room for {len(values)} integers")
    place[: len(values)] = [int(value) for value in values]
