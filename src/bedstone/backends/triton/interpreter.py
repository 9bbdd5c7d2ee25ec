"""Running a launch in Triton's interpreter, over host memory: for tests without a GPU.

The interpreter takes arrays; a plan has addresses. `HostPointer` is the least object that it
accepts, and `_Grid` runs the programs without the copies that arrays would need. Two faults of the
interpreter of Triton 3.6 are mended here: its casts to bfloat16 and its use of NumPy 2.4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor

from bedstone.backends.triton import compile
from bedstone.spec.dtypes import DType

_TYPES = {"u8": "uint8", "i32": "int32", "i64": "int64"}


_original_patch = interpreter._patch_lang_tensor


def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
    """The interpreter's own, with an `__index__` that takes its one-element arrays: NumPy 2.4 no
    longer converts them to integers."""
    _original_patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_lang_tensor


class Builder(interpreter.InterpreterBuilder):
    """The interpreter's operations, with fma rounded once, and bfloat16 as GPUs have it: rounded
    to nearest even (its own casts cut digits off) and multiplied as numbers (its own products take
    the bits)."""

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if tl.bfloat16 not in (source, target) or source == target:
            return super().cast_impl(src, dst_type)
        if source == tl.bfloat16:
            wide = _from_bfloat16(src.data)
            return super().cast_impl(interpreter.TensorHandle(wide, tl.float32), dst_type)
        with np.errstate(all="ignore"):
            data = src.data.astype(DType.bfloat16.numpy).view(np.uint16)
        return interpreter.TensorHandle(data, target)

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        with np.errstate(all="ignore"):
            exact = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

    def create_dot(self, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (interpreter.TensorHandle(_from_bfloat16(t.data), tl.float32) for t in (a, b))
        return super().create_dot(a, b, d, *options)


def _from_bfloat16(bits: Any) -> Any:
    """float32 values of bfloat16 bit patterns."""
    return bits.view(DType.bfloat16.numpy).astype(np.float32)


interpreter.interpreter_builder.__class__ = Builder
interpreter.interpreter_builder.options = replace(
    interpreter.interpreter_builder.options,
    # Taken as they come: the interpreter's products are NumPy's, in the accumulator's type.
    allowed_dot_input_precisions=("tf32", "tf32x3", "ieee", "bf16x3", "bf16x6"),
)


class HostPointer:
    """An address and an element type, as the interpreter wants them."""

    def __init__(self, address: int, dtype: DType) -> None:
        name = compile.ELEMENT[dtype]
        self.dtype = tl.dtype(_TYPES.get(name, name))
        self._address = address

    def data_ptr(self) -> int:
        """The address."""
        return self._address


def _number(value: float, kind: str) -> Any:
    """A scalar argument of its declared type: the interpreter would take floats as float32."""
    if kind not in ("fp32", "fp64"):
        return value
    data = np.array([value], np.float32 if kind == "fp32" else np.float64)
    return tl.tensor(interpreter.TensorHandle(data, tl.dtype(kind)), tl.dtype(kind))


class _Grid(GridExecutor):
    """A grid whose pointer arguments need no copies to and from the host."""

    def _init_args_hst(self, args_dev: Any, kwargs: Any) -> tuple[Any, Any]:
        return args_dev, kwargs

    def _restore_args_dev(self, args_dev: Any, args_hst: Any, kwargs: Any, kwargs_hst: Any) -> None:
        """Nothing to copy back."""


class InterpretedLaunch:
    """What `launch.prepare` returns under TRITON_INTERPRET=1."""

    description = "in Triton's interpreter"

    def __init__(
        self,
        function: Any,
        grid: Sequence[int],
        arguments: Mapping[str, Any],
        constants: Mapping[str, Any],
    ) -> None:
        self._function, self._grid = function, tuple(grid)
        self._arguments, self._constants = dict(arguments), dict(constants)

    def __call__(
        self, pointers: Sequence[int], workspace: int, alpha: float, beta: float, stream: int
    ) -> None:
        from bedstone.backends.triton import launch

        values: dict[str, Any] = dict(self._constants)
        for name, argument in self._arguments.items():
            if isinstance(argument, launch.Pointer):
                address = pointers[argument.operand] + argument.offset
                values[name] = HostPointer(address, argument.dtype)
            elif isinstance(argument, launch.Scratch):
                values[name] = HostPointer(workspace + argument.offset, argument.dtype)
            elif isinstance(argument, launch.Factor):
                values[name] = _number(alpha if argument.name == "alpha" else beta, argument.type)
            elif isinstance(argument, launch.Integers):
                values[name] = argument.values
            elif isinstance(argument, launch.Scalar):
                values[name] = _number(argument.value, argument.type)
            else:
                raise NotImplementedError(f"{name}: the interpreter has no TMA maps")
        function = self._function
        rewritten = function.rewrite()
        _Grid(rewritten, function.arg_names, self._grid)(**values)
