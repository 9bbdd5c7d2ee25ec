"""The IR types of the kernel language: how each dtype lies in memory and in registers."""

from __future__ import annotations

from llvmlite import ir

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
VOID = ir.VoidType()

# dtype name -> (type in memory, type in registers)
TYPES = {
    "float32": (F32, F32),
    "float64": (F64, F64),
    "float16": (F16, F32),
    "bfloat16": (I16, F32),
    "int64": (I64, I64),
    "int32": (I32, I32),
    "int16": (I16, I16),
    "uint8": (I8, I32),
}
SIZES = {F64: 8, I64: 8, F32: 4, I32: 4, F16: 2, I16: 2, I8: 1}


def itemsize(dtype: str) -> int:
    """Bytes of one element in memory."""
    return SIZES[TYPES[str(dtype)][0]]


def vector(element: ir.Type, lanes: int | None) -> ir.Type:
    """`lanes` elements, or the bare element for None."""
    return element if lanes is None else ir.VectorType(element, lanes)


def like(type_: ir.Type, element: ir.Type) -> ir.Type:
    """A type with the lanes of `type_` and another element."""
    return vector(element, type_.count if isinstance(type_, ir.VectorType) else None)


def constant(type_: ir.Type, value: float) -> ir.Constant:
    """A number in every lane."""
    element = type_.element if isinstance(type_, ir.VectorType) else type_
    number = int(value) if isinstance(element, ir.IntType) else float(value)
    if isinstance(type_, ir.VectorType):
        return ir.Constant(type_, [number] * type_.count)
    return ir.Constant(type_, number)


def mangled(type_: ir.Type) -> str:
    """The type inside an intrinsic's name: f32, v16f32, v8i64."""
    if isinstance(type_, ir.VectorType):
        return f"v{type_.count}{mangled(type_.element)}"
    return {F16: "f16", F32: "f32", F64: "f64"}.get(type_) or f"i{type_.width}"
