"""The values of the kernel language: integers, floats and masks of the running kernel.

Operators emit IR. Python numbers may stand on either side; an operation that leaves a value as
it is emits nothing, and sizes known while building stay Python ints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llvmlite import ir

from bedstone.backends.cpu.irtypes import F32, I32, I64, like

if TYPE_CHECKING:
    from bedstone.backends.cpu.builder import KernelBuilder


class Value:
    """A run-time value of the function in which it was made; a job captures it when it uses it."""

    __slots__ = ("k", "_ir", "home")

    def __init__(self, k: KernelBuilder, value: ir.Value) -> None:
        self.k = k
        self._ir = value
        self.home = None if isinstance(value, ir.Constant) else k.current

    @property
    def ir(self) -> ir.Value:
        """The IR value, brought into the current function if it comes from the enclosing one."""
        if self.home is None or self.home is self.k.current:
            return self._ir
        return self.k.current.capture(self)

    @property
    def type(self) -> ir.Type:
        return self._ir.type

    @property
    def lanes(self) -> int | None:
        """Vector length, None for a scalar."""
        return self.type.count if isinstance(self.type, ir.VectorType) else None

    @property
    def element(self) -> ir.Type:
        return self.type.element if isinstance(self.type, ir.VectorType) else self.type


class Mask(Value):
    """A truth value or a vector of them. Comparisons that fold give Python bools instead."""

    __slots__ = ()

    def __and__(self, other: MaskLike) -> MaskLike:
        if isinstance(other, bool):
            return self if other else False
        return Mask(self.k, self.k.ir.and_(self.ir, other.ir))

    def __or__(self, other: MaskLike) -> MaskLike:
        if isinstance(other, bool):
            return True if other else self
        return Mask(self.k, self.k.ir.or_(self.ir, other.ir))

    __rand__, __ror__ = __and__, __or__

    def __invert__(self) -> Mask:
        return Mask(self.k, self.k.ir.not_(self.ir))


class Int(Value):
    """An i64 (sizes, indices, byte addresses) or a vector of i64 or i32.

    `//` and `%` are unsigned: use them on numbers that are not negative.
    """

    __slots__ = ()

    def _pair(self, other: IntLike) -> tuple[ir.Value, ir.Value]:
        return self.k.pair(self, other)

    def _signed(self, op: str, other: IntLike, swap: bool = False) -> Int:
        a, b = self._pair(other)
        return Int(self.k, getattr(self.k.ir, op)(*((b, a) if swap else (a, b)), flags=("nsw",)))

    def _plain(self, op: str, other: IntLike) -> Int:
        return Int(self.k, getattr(self.k.ir, op)(*self._pair(other)))

    def __add__(self, other: IntLike) -> Int:
        return self if is_number(other, 0) else self._signed("add", other)

    def __sub__(self, other: IntLike) -> Int:
        return self if is_number(other, 0) else self._signed("sub", other)

    def __rsub__(self, other: IntLike) -> Int:
        return self._signed("sub", other, swap=True)

    def __mul__(self, other: IntLike) -> IntLike:
        if is_number(other, 0) and self.lanes is None:
            return 0
        return self if is_number(other, 1) else self._signed("mul", other)

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Int:
        return 0 - self

    def __floordiv__(self, other: IntLike) -> Int:
        return self if is_number(other, 1) else self._plain("udiv", other)

    def __mod__(self, other: IntLike) -> IntLike:
        return 0 if is_number(other, 1) and self.lanes is None else self._plain("urem", other)

    def __and__(self, other: IntLike) -> Int:
        return self._plain("and_", other)

    def __or__(self, other: IntLike) -> Int:
        return self._plain("or_", other)

    def __xor__(self, other: IntLike) -> Int:
        return self._plain("xor", other)

    def __lshift__(self, other: IntLike) -> Int:
        return self._plain("shl", other)

    def __rshift__(self, other: IntLike) -> Int:
        """Logical shift."""
        return self._plain("lshr", other)

    def shift_right_signed(self, other: IntLike) -> Int:
        return self._plain("ashr", other)

    def _compare(self, op: str, other: IntLike) -> Mask:
        return Mask(self.k, self.k.ir.icmp_signed(op, *self._pair(other)))

    def __lt__(self, other: IntLike) -> Mask:
        return self._compare("<", other)

    def __le__(self, other: IntLike) -> Mask:
        return self._compare("<=", other)

    def __gt__(self, other: IntLike) -> Mask:
        return self._compare(">", other)

    def __ge__(self, other: IntLike) -> Mask:
        return self._compare(">=", other)

    def eq(self, other: IntLike) -> Mask:
        return self._compare("==", other)

    def ne(self, other: IntLike) -> Mask:
        return self._compare("!=", other)

    def below(self, other: IntLike) -> Mask:
        """0 <= self < other in one unsigned comparison (other must not be negative)."""
        return Mask(self.k, self.k.ir.icmp_unsigned("<", *self._pair(other)))


class Float(Value):
    """A float32 or float64, scalar or vector. Comparisons are false on NaN, `ne` is true."""

    __slots__ = ()

    def _binary(self, op: str, other: FloatLike, swap: bool = False) -> Float:
        a, b = self.k.pair(self, other)
        return Float(self.k, getattr(self.k.ir, op)(*((b, a) if swap else (a, b))))

    def __add__(self, other: FloatLike) -> Float:
        return self._binary("fadd", other)

    def __sub__(self, other: FloatLike) -> Float:
        return self._binary("fsub", other)

    def __rsub__(self, other: FloatLike) -> Float:
        return self._binary("fsub", other, swap=True)

    def __mul__(self, other: FloatLike) -> Float:
        return self._binary("fmul", other)

    def __truediv__(self, other: FloatLike) -> Float:
        return self._binary("fdiv", other)

    def __rtruediv__(self, other: FloatLike) -> Float:
        return self._binary("fdiv", other, swap=True)

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Float:
        return Float(self.k, self.k.ir.fneg(self.ir))

    def _compare(self, op: str, other: FloatLike) -> Mask:
        return Mask(self.k, self.k.ir.fcmp_ordered(op, *self.k.pair(self, other)))

    def __lt__(self, other: FloatLike) -> Mask:
        return self._compare("<", other)

    def __le__(self, other: FloatLike) -> Mask:
        return self._compare("<=", other)

    def __gt__(self, other: FloatLike) -> Mask:
        return self._compare(">", other)

    def __ge__(self, other: FloatLike) -> Mask:
        return self._compare(">=", other)

    def eq(self, other: FloatLike) -> Mask:
        return self._compare("==", other)

    def ne(self, other: FloatLike) -> Mask:
        return Mask(self.k, self.k.ir.fcmp_unordered("!=", *self.k.pair(self, other)))

    def unordered(self, other: FloatLike) -> Mask:
        """True where either is NaN."""
        return Mask(self.k, self.k.ir.fcmp_unordered("uno", *self.k.pair(self, other)))

    def is_nan(self) -> Mask:
        return Mask(self.k, self.k.ir.fcmp_unordered("uno", self.ir, self.ir))

    def bits(self) -> Int:
        """The bit pattern, as an integer of the same width."""
        integer = I32 if self.element == F32 else I64
        return Int(self.k, self.k.ir.bitcast(self.ir, like(self.type, integer)))


IntLike = Int | int
FloatLike = Float | float | int
MaskLike = Mask | bool


class Variable:
    """A mutable register: `value` reads it, `set` writes it. Also the accumulators of a tile."""

    __slots__ = ("k", "slot", "kind")

    def __init__(self, k: KernelBuilder, initial: Value) -> None:
        self.k, self.kind = k, type(initial)
        self.slot = k.current.stack(initial.type)
        self.set(initial)

    @property
    def value(self) -> Any:
        return self.kind(self.k, self.k.ir.load(self.slot))

    def set(self, value: Value) -> None:
        self.k.ir.store(value.ir, self.slot)


def is_number(value: Any, number: int) -> bool:
    """True if `value` is that Python int."""
    return isinstance(value, int) and value == number
