"""Element types, their sizes and the type in which each is summed.

A `DType` is a string (`DType.float32 == "float32"`), so it prints, hashes and compares as one.
NumPy has no bfloat16 of its own: `ml_dtypes`, imported only when asked for, brings it.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np

from bedstone.spec.errors import InvalidDescriptor


class DType(str, Enum):
    """Element type of a tensor: four for data, three for indices and masks."""

    float32 = "float32"
    float64 = "float64"
    float16 = "float16"
    bfloat16 = "bfloat16"
    int64 = "int64"
    int32 = "int32"
    uint8 = "uint8"

    def __str__(self) -> str:
        return self.value

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _ITEMSIZE[self.value]

    @property
    def is_floating(self) -> bool:
        """True for the four data types."""
        return self.value in _EPSILON

    @property
    def accumulator(self) -> DType:
        """The type in which products of this type are summed: float64 for itself, else float32."""
        if not self.is_floating:
            return self
        return DType.float64 if self is DType.float64 else DType.float32

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next larger number (twice the unit roundoff)."""
        if self.value not in _EPSILON:
            raise InvalidDescriptor("dtype", self.value, f"one of {DATA_NAMES}")
        return _EPSILON[self.value]

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy dtype; bfloat16 needs the package ml_dtypes."""
        name: Any = _ml_dtypes().bfloat16 if self is DType.bfloat16 else self.value
        found: np.dtype[Any] = np.dtype(name)
        return found

    @classmethod
    def of(cls, dtype: object) -> DType:
        """The DType that `dtype` names: a string, NumPy dtype, or a framework's dtype object.

        Raises InvalidDescriptor for a type that bedstone does not compute with.
        """
        if isinstance(dtype, cls):
            return dtype
        name = dtype if isinstance(dtype, str) else _name_of(dtype)
        name = _ALIASES.get(name, name)
        try:
            return cls(name)
        except ValueError:
            expected = f"one of {DATA_NAMES} (or int64, int32, uint8 for indices and masks)"
            raise InvalidDescriptor("dtype", name, expected) from None


_ITEMSIZE = {
    "float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1,
}  # fmt: skip
_EPSILON = {"float32": 2.0**-23, "float64": 2.0**-52, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_ALIASES = {"float": "float32", "double": "float64", "half": "float16", "bf16": "bfloat16",
            "fp32": "float32", "fp64": "float64", "fp16": "float16",
            "f32": "float32", "f64": "float64", "f16": "float16"}  # fmt: skip
DATA_NAMES = tuple(_EPSILON)
DATA_DTYPES = tuple(DType(name) for name in DATA_NAMES)


def _name_of(dtype: object) -> str:
    """The bare name of a NumPy, PyTorch, JAX or PaddlePaddle dtype object."""
    text = str(dtype)
    if text.startswith(("torch.", "paddle.")):
        return text.split(".")[-1]
    try:
        return str(np.dtype(dtype).name)  # type: ignore[call-overload]
    except TypeError:
        return text


def _ml_dtypes() -> Any:
    try:
        import ml_dtypes
    except ImportError as error:
        raise InvalidDescriptor(
            "dtype", "bfloat16", "the package ml_dtypes: pip install 'bedstone[bfloat16]'"
        ) from error
    return ml_dtypes
