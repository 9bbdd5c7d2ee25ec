"""Dropout with a counter-based random generator, forward and backward.

    y = x / (1 - p) where kept, else 0        dx = dy / (1 - p) where kept, else 0

Element number i (row-major in the logical dims, whatever the strides) is kept if word i % 4 of
Philox 4x32-10 at counter offset + i // 4 under the key `seed` is at least p * 2^32: a function
of the element alone, so every backend, thread count and direction draws the same mask. Source:
Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from bedstone.spec.dtypes import DType
from bedstone.spec.errors import InvalidDescriptor
from bedstone.spec.problem import (
    Array,
    Arrays,
    Fields,
    Operand,
    Problem,
    check_same_data,
    desc_option,
    parse_dims,
)
from bedstone.spec.tensor import LOGICAL_ORDERS, TensorDesc

# The constants of Philox 4x32: two multipliers, two increments of the key, the number of rounds.
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10
PHILOX_WORDS = 4

# What drawing one element's share of a Philox block, comparing and scaling costs: 10 rounds of 2
# multiplications and 4 other operations for 4 elements, and 2.
FLOPS_PER_ELEMENT = 17

LOW_WORD = np.uint64(0xFFFFFFFF)
HIGH_SHIFT = np.uint64(32)


def philox(counter: Array, seed: int) -> Array:
    """The four 32-bit words of Philox 4x32-10 at each 64-bit counter: (blocks,) -> (blocks, 4).

    The counter fills the two low words of Philox's 128-bit one, the seed its 64-bit key.
    """
    at = counter.astype(np.uint64)
    words = [at & LOW_WORD, at >> HIGH_SHIFT, np.zeros_like(at), np.zeros_like(at)]
    key = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    for _ in range(PHILOX_ROUNDS):
        products = [w * np.uint64(m) for w, m in zip(words[::2], PHILOX_MULTIPLIERS)]
        (high0, low0), (high1, low1) = ((p >> HIGH_SHIFT, p & LOW_WORD) for p in products)
        words = [high1 ^ words[1] ^ np.uint64(key[0]), low1,
                 high0 ^ words[3] ^ np.uint64(key[1]), low0]  # fmt: skip
        key = [(k + step) & 0xFFFFFFFF for k, step in zip(key, PHILOX_WEYL)]
    return np.stack(words, axis=-1)


def threshold(probability: float) -> int:
    """Words below this number drop their element: p * 2^32 rounded, 0 ... 2^32."""
    return round(probability * 2**32)


def keep_mask(dims: tuple[int, ...], probability: float, seed: int, offset: int) -> Array:
    """True for the elements that are kept."""
    size = int(np.prod(dims, dtype=np.int64))
    blocks = np.arange(-(-size // PHILOX_WORDS), dtype=np.uint64)
    words = philox(blocks + np.uint64(offset % 2**64), seed).reshape(-1)[:size]
    return (words >= np.uint64(threshold(probability))).reshape(dims)


@dataclass(frozen=True)
class DropoutProblem(Problem):
    """One dropout call. In backward x is dx's descriptor and y is dy's.

    forward   y = alpha * dropout(x) + beta * y          operands x, state, y [, mask]
    backward  dx = alpha * dropout'(dy) + beta * dx      operands state, dy, dx; with a mask
              operands mask, dy, dx

    probability  of an element to be dropped, 0 to 1
    mask         uint8, dims of x: 1 where kept; given out by forward, taken by backward; None:
                 backward draws it again from the same state
    state        two packed int64: the seed and the offset. A call uses ceil(size / 4) counters:
                 the caller adds as many to the offset before the next one

    y may be the memory of x, and dx that of dy.
    """

    primitive: ClassVar[str] = "dropout"
    direction: str
    x: TensorDesc
    y: TensorDesc
    probability: float = 0.5
    mask: TensorDesc | None = None
    deterministic: bool = True

    def __post_init__(self) -> None:
        if self.direction not in ("forward", "backward"):
            raise InvalidDescriptor("direction", self.direction, "'forward' or 'backward'")
        if not isinstance(self.probability, (int, float)) or not 0 <= self.probability <= 1:
            raise InvalidDescriptor("probability", self.probability, "a number from 0 to 1")
        object.__setattr__(self, "probability", float(self.probability))
        mask = self.mask
        if mask is not None and (mask.dims != self.x.dims or mask.dtype is not DType.uint8):
            raise InvalidDescriptor("mask", str(mask), f"uint8, dims {self.x.dims}")
        check_same_data(self.x, {"y": self.y})
        self.check_outputs()

    @property
    def operands(self) -> tuple[Operand, ...]:
        state = Operand("state", TensorDesc.packed((2,), DType.int64))
        if self.direction == "forward":
            mask = () if self.mask is None else (Operand("mask", self.mask, "out"),)
            return (Operand("x", self.x), state, Operand("y", self.y, "out"), *mask)
        drawn = state if self.mask is None else Operand("mask", self.mask)
        return (drawn, Operand("dy", self.y), Operand("dx", self.x, "out"))

    @property
    def in_place(self) -> tuple[str, ...]:
        return ("x", "dy")

    @property
    def dtype(self) -> DType:
        return self.x.dtype

    @property
    def flops(self) -> int:
        return self.x.size * FLOPS_PER_ELEMENT

    @property
    def factor(self) -> float:
        """What kept elements are multiplied by: 1 / (1 - p); 0 for p = 1, which keeps none."""
        return 1 / (1 - self.probability) if self.probability < 1 else 0.0

    def compute(self, arrays: Arrays) -> dict[str, Array]:
        forward = self.direction == "forward"
        if not forward and self.mask is not None:
            kept = arrays["mask"] != 0
        else:
            seed, offset = (int(v) for v in arrays["state"])
            kept = keep_mask(self.x.dims, self.probability, seed, offset)
        with np.errstate(all="ignore"):
            value = np.where(kept, arrays["x" if forward else "dy"] * self.factor, 0.0)
        found = {self.outputs[0].name: value}
        if forward and self.mask is not None:
            found["mask"] = kept.astype(np.uint8)
        return found

    def fields(self) -> str:
        default = LOGICAL_ORDERS.get(self.x.rank)
        line = "x".join(map(str, self.x.dims)) + f" {self.x.dtype} p={self.probability!r}"
        line += desc_option("x", self.x, default) + desc_option("y", self.y, default)
        if self.mask is not None:
            line += " with_mask" + desc_option("mask", self.mask, default)
        return line

    @classmethod
    def from_fields(cls, direction: str, fields: Fields) -> DropoutProblem:
        dims, dtype = parse_dims(fields.shape), fields.dtype()
        layout = fields.layout(len(dims))
        x, y = (fields.desc(k, dims, dtype, layout) for k in ("x", "y"))
        mask = fields.desc("mask", dims, DType.uint8, layout)
        with_mask = mask if "with_mask" in fields.flags else None
        return cls(direction, x, y, fields.number("p", 0.5), with_mask)


def problem_from_fields(direction: str, fields: Fields) -> DropoutProblem:
    """The problem of a `dropout DIRECTION ...` line."""
    return DropoutProblem.from_fields(direction, fields)
