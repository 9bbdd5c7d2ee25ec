"""Problem: what every primitive's question to the planner has in common.

A problem is a frozen, hashable description of one call: its operands in the order in which the
plan takes their pointers, its cost, its float64 reference and its one-line text form. Every
primitive computes `out = alpha * op(inputs) + beta * out`; beta == 0 never reads `out`.
"""

from __future__ import annotations

import importlib
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from bedstone.spec.dtypes import DType
from bedstone.spec.errors import InvalidDescriptor
from bedstone.spec.tensor import CHANNELS_LAST, LOGICAL_ORDERS, TensorDesc

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]

# Where each primitive lives; a new primitive adds its line here.
PRIMITIVES = {
    "convolution": "bedstone.spec.convolution",
    "pooling": "bedstone.spec.pooling",
    "softmax": "bedstone.spec.softmax",
    "activation": "bedstone.spec.activation",
    "tensor_ops": "bedstone.spec.tensor_ops",
    "normalization": "bedstone.spec.normalization",
    "dropout": "bedstone.spec.dropout",
}


@dataclass(frozen=True)
class Operand:
    """One argument of a plan: its name, descriptor and role: "in" is read, "out" is written (and
    read only when beta is not 0), "inout" is read and written whatever beta is."""

    name: str
    desc: TensorDesc
    role: str = "in"

    @property
    def is_output(self) -> bool:
        """True if the plan writes this operand."""
        return self.role != "in"


class Problem(ABC):
    """Base of the problems of all primitives (each a frozen dataclass)."""

    primitive: ClassVar[str]
    direction: str
    deterministic: bool

    @property
    @abstractmethod
    def operands(self) -> tuple[Operand, ...]:
        """Arguments in the order in which a plan takes their pointers; outputs last."""

    @property
    @abstractmethod
    def flops(self) -> int:
        """Floating-point operations of the definition (a multiply-add counts as two)."""

    @abstractmethod
    def compute(self, arrays: Arrays) -> dict[str, Array]:
        """op(inputs) in float64 by NumPy, one array an output, without alpha and beta."""

    @abstractmethod
    def fields(self) -> str:
        """The one-line form without the leading primitive and direction."""

    @classmethod
    @abstractmethod
    def from_fields(cls, direction: str, fields: Fields) -> Problem:
        """The inverse of `fields`."""

    @property
    def dtype(self) -> DType:
        """Element type of the data (the first operand's, unless a primitive says otherwise)."""
        return self.operands[0].desc.dtype

    @property
    def inputs(self) -> tuple[Operand, ...]:
        """The operands that are only read."""
        return tuple(o for o in self.operands if not o.is_output)

    @property
    def outputs(self) -> tuple[Operand, ...]:
        """The operands that are written."""
        return tuple(o for o in self.operands if o.is_output)

    @property
    def in_place(self) -> tuple[str, ...]:
        """Names of inputs whose very memory an output may be (same address and strides)."""
        return ()

    @property
    def unblended(self) -> tuple[str, ...]:
        """Names of outputs that alpha and beta leave alone (statistics)."""
        return ()

    def check_outputs(self) -> None:
        """Raises InvalidDescriptor for an output whose elements share memory."""
        for operand in self.outputs:
            if operand.desc.self_overlaps():
                raise InvalidDescriptor(
                    operand.name, operand.desc.strides, "an output whose elements do not overlap"
                )

    @property
    def bytes(self) -> int:
        """Least memory traffic: each distinct element of each operand moved once."""
        total = 0
        for operand in self.operands:  # (an "inout" one is moved twice)
            low, high = operand.desc.offset_range()
            moved = min(operand.desc.size, high - low + 1) * operand.desc.dtype.itemsize
            total += 2 * moved if operand.role == "inout" else moved
        return total

    def reference(self, arrays: Arrays, alpha: float = 1.0, beta: float = 0.0) -> dict[str, Array]:
        """alpha * op(inputs) + beta * out in float64, one array an output.

        `arrays` maps operand names to arrays of the operand's dims (any dtype); outputs need be
        there only when beta is not 0. Integer outputs (indices, masks) and those that `unblended`
        names are stored as computed.
        """
        with np.errstate(all="ignore"):  # NaN and infinities are data
            computed = self.compute({k: as_float64(v) for k, v in arrays.items()})
        return {
            name: value
            if value.dtype.kind in "iub" or name in self.unblended
            else blend(value, alpha, beta, arrays.get(name) if beta else None)
            for name, value in computed.items()
        }

    def __str__(self) -> str:
        return f"{self.primitive} {self.direction} {self.fields()}"


def check_same_data(x: TensorDesc, others: Mapping[str, TensorDesc], dims: bool = True) -> None:
    """Raises InvalidDescriptor unless x is of a floating dtype and all others are of the same,
    and of the same dims unless `dims` is False."""
    if not x.dtype.is_floating:
        raise InvalidDescriptor("x", str(x.dtype), "a floating-point dtype")
    for name, desc in others.items():
        if desc.dtype is not x.dtype:
            raise InvalidDescriptor(name, str(desc.dtype), f"the dtype of x, {x.dtype}")
        if dims and desc.dims != x.dims:
            raise InvalidDescriptor(name, desc.dims, f"the dims of x, {x.dims}")


def as_float64(array: Array) -> Array:
    """Floating arrays widened to float64 (exactly); integer arrays as they are."""
    return array if array.dtype.kind in "iub" else array.astype(np.float64)


def blend(value: Array, alpha: float, beta: float, out: Array | None) -> Array:
    """alpha * value + beta * out; `out` is not looked at when beta is 0."""
    with np.errstate(all="ignore"):
        value = value if alpha == 1.0 else alpha * value
        if beta == 0.0 or out is None:
            return value
        return value + beta * np.asarray(out).astype(np.float64)


# What may stand in a problem line besides the shape, a dtype and key=value.
BARE_WORDS = {"bias", "nondeterministic", "with_indices", "with_mask", "no_scale", "no_shift",
              "no_statistics", "biased"}  # fmt: skip


class Fields:
    """The words of a problem line: the first is the shape, `key=value` and bare words follow."""

    def __init__(self, words: list[str]) -> None:
        self.shape = words[0] if words else ""
        self.options: dict[str, str] = {}
        self.flags: set[str] = set()
        for word in words[1:]:
            key, sign, value = word.partition("=")
            if sign:
                self.options[key] = value
            elif word in BARE_WORDS or word in DType.__members__:
                self.flags.add(word)
            else:
                expected = f"a dtype, key=value, or one of {sorted(BARE_WORDS)}"
                raise InvalidDescriptor("problem", word, expected)

    def get(self, key: str, default: str) -> str:
        """The option's value, or the default."""
        return self.options.get(key, default)

    def number(self, key: str, default: float) -> float:
        """The option as a float, or the default."""
        text = self.options.get(key)
        try:
            return default if text is None else float(text)
        except ValueError:
            raise InvalidDescriptor(key, text, "a number") from None

    def integer(self, key: str, default: int) -> int:
        """The option as an integer, or the default."""
        return self.integers(key, (default,))[0]

    def integers(self, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """The option's integers, joined by commas, or the default."""
        text = self.options.get(key)
        try:
            return default if text is None else tuple(int(word) for word in text.split(","))
        except ValueError:
            raise InvalidDescriptor(key, text, "integers joined by commas") from None

    def layout(self, rank: int) -> str | None:
        """The memory order of tensors that do not name their own: layout=..., or the logical one.
        NCHW and NHWC stand for their family at every rank."""
        text = self.options.get("layout", "nchw")
        family = {"nchw": LOGICAL_ORDERS, "nhwc": CHANNELS_LAST}.get(text.lower())
        return family.get(rank) if family else text

    def dtype(self, default: str = "float32") -> DType:
        """The dtype named by a bare word or by dtype=..., or the default."""
        for word in self.flags:
            if word in DType.__members__:
                return DType(word)
        return DType.of(self.options.get("dtype", default))

    def desc(
        self, key: str, dims: tuple[int, ...], dtype: DType, default: str | None
    ) -> TensorDesc:
        """The tensor `key`: packed in the layout it names, or with the strides it lists."""
        text = self.options.get(key)
        if text is not None and re.fullmatch(r"-?\d+(,-?\d+)*", text):
            return TensorDesc(dims, tuple(int(s) for s in text.split(",")), dtype)
        layout = text or default
        return TensorDesc.packed(dims, dtype, None if layout == "packed" else layout)


def desc_option(key: str, desc: TensorDesc, default: str | None) -> str:
    """ " key=..." for a problem line, empty when the desc is packed in the default layout."""
    if desc.layout is not None and default is not None and desc.is_packed(default):
        return ""
    if default in (None, "packed") and desc.is_packed():
        return ""
    if desc.layout is not None and desc.size:
        return f" {key}={desc.layout}"
    return f" {key}={','.join(map(str, desc.strides))}"


def parse_dims(text: str) -> tuple[int, ...]:
    """ "2x3x4" -> (2, 3, 4)."""
    try:
        return tuple(int(d) for d in text.split("x"))
    except ValueError:
        raise InvalidDescriptor("problem", text, "dims joined by x, such as 2x3x8x8") from None


def parse_shape(text: str, allowed: set[str]) -> dict[str, str]:
    """`n128c96h64ph1_2` -> {"n": "128", "c": "96", "h": "64", "ph": "1_2"}."""
    tokens = re.findall(r"([a-z]+)(\d+(?:_\d+)?)", text)
    if not tokens or "".join(k + v for k, v in tokens) != text:
        raise InvalidDescriptor(
            "problem", text, "letters followed by numbers, such as n128c96h64k128r9p1"
        )
    found: dict[str, str] = {}
    for key, value in tokens:
        if key not in allowed or key in found:
            raise InvalidDescriptor(
                "problem", text, f"each of {sorted(allowed)} at most once; {key!r} is not"
            )
        found[key] = value
    return found


def parse_problem(line: str) -> Problem:
    """The problem that `str(problem)` printed, for example
    `convolution forward n128c96h64w64k128r9s9 float32`.

    Raises InvalidDescriptor for an unknown primitive, direction, key or layout.
    """
    words = shlex.split(line, comments=True)
    if len(words) < 2 or words[0] not in PRIMITIVES:
        raise InvalidDescriptor(
            "problem", line, f"'PRIMITIVE DIRECTION SHAPE ...', PRIMITIVE in {tuple(PRIMITIVES)}"
        )
    module = importlib.import_module(PRIMITIVES[words[0]])
    problem: Problem = module.problem_from_fields(words[1], Fields(words[2:]))
    return problem
