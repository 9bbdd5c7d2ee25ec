"""Dropout on the GPU: Philox 4x32-10 at every element, the same mask as every other backend draws.

One kernel over the walk of `walk.py`. An element's number in the logical dims is its offset in a
packed tensor of these dims, one more operand of the walk, so any strides will do. The four words
of a Philox block are drawn for each of its four elements anew: hidden behind the memory.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from bedstone.backends.triton import chips, launch, walk
from bedstone.backends.triton.walk import tile_mask, tile_offsets
from bedstone.plan.algorithm import Algorithm, Kernel
from bedstone.plan.device import Device
from bedstone.spec import dropout as spec
from bedstone.spec.dropout import DropoutProblem
from bedstone.spec.dtypes import DType
from bedstone.spec.problem import Problem
from bedstone.spec.tensor import TensorDesc

MULTIPLIER_A, MULTIPLIER_B = (tl.constexpr(m) for m in spec.PHILOX_MULTIPLIERS)
WEYL_A, WEYL_B = (tl.constexpr(w) for w in spec.PHILOX_WEYL)
ROUNDS = tl.constexpr(spec.PHILOX_ROUNDS)
LOW_WORD = tl.constexpr(0xFFFFFFFF)


@triton.jit
def philox_round(a, b, c, d, key_a, key_b):
    """One round on four words, each in the low half of a 64-bit number."""
    first = a * MULTIPLIER_A
    second = c * MULTIPLIER_B
    return (
        (second >> 32) ^ b ^ key_a,
        second & LOW_WORD,
        (first >> 32) ^ d ^ key_b,
        first & LOW_WORD,
    )


@triton.jit
def drawn_word(number, seed, offset):
    """The word of element `number` (int64), as an unsigned 64-bit number below 2^32."""
    counter = (offset + (number >> 2)).to(tl.uint64)
    a = counter & LOW_WORD
    b = counter >> 32
    c = counter & 0
    d = c
    key_a = (seed & LOW_WORD).to(tl.uint64)
    key_b = ((seed >> 32) & LOW_WORD).to(tl.uint64)
    for _ in tl.static_range(ROUNDS):
        a, b, c, d = philox_round(a, b, c, d, key_a, key_b)
        key_a = (key_a + WEYL_A) & LOW_WORD
        key_b = (key_b + WEYL_B) & LOW_WORD
    which = number & 3
    return tl.where(which < 2, tl.where(which == 0, a, b), tl.where(which == 2, c, d))


@triton.jit
def dropout_kernel(
    x_ptr, state_ptr, mask_ptr, y_ptr, alpha, beta, factor, limit, dims, A, B,
    number_strides, x_strides, mask_strides, y_strides,
    TAKE: tl.constexpr, GIVE: tl.constexpr, ACC: tl.constexpr,
    BA: tl.constexpr, BB: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """y = alpha * factor * x where kept, else 0, + beta * y, on the tile [BA, BB] of a walk.

    Kept is what the mask says (TAKE), or elements whose word is at least `limit`; GIVE stores the
    mask. In backward x is dy and y is dx.
    """
    inside = tile_mask(A, B, BA, BB, WIDE)
    x_offs = tile_offsets(dims, A, B, x_strides, BA, BB, WIDE)
    y_ptrs = y_ptr + tile_offsets(dims, A, B, y_strides, BA, BB, WIDE)
    mask_ptrs = mask_ptr + tile_offsets(dims, A, B, mask_strides, BA, BB, WIDE)
    if TAKE:
        kept = tl.load(mask_ptrs, mask=inside, other=0) != 0
    else:
        number = tile_offsets(dims, A, B, number_strides, BA, BB, WIDE).to(tl.int64)
        word = drawn_word(number, tl.load(state_ptr), tl.load(state_ptr + 1))
        kept = word >= limit.to(tl.uint64)
    x = tl.load(x_ptr + x_offs, mask=inside, other=0.0).to(ACC)
    if GIVE:
        tl.store(mask_ptrs, kept.to(tl.uint8), mask=inside)
    out = alpha * tl.where(kept, x * factor, 0.0)
    if beta != 0:
        out += beta * tl.load(y_ptrs, mask=inside).to(ACC)
    tl.store(y_ptrs, out.to(y_ptr.dtype.element_ty), mask=inside)


class Philox(Algorithm):
    """Both directions, with and without a mask, any strides, in place."""

    name = "triton:pointwise"

    def supports(self, problem: Problem, device: Device) -> str | None:
        if not isinstance(problem, DropoutProblem):
            return "it computes dropout"
        return walk.too_many(_walk(problem))

    def estimate(self, problem: Problem, device: Device) -> float:
        return chips.move_seconds(problem.bytes, device.architecture)

    def build(self, problem: Problem, device: Device) -> Kernel:
        if not isinstance(problem, DropoutProblem):
            raise TypeError(f"not dropout: {problem}")
        dtype, over = problem.x.dtype, _walk(problem)
        forward = problem.direction == "forward"
        names = [operand.name for operand in problem.operands]
        at = {name: launch.Pointer(names.index(name), dtype) for name in names}
        source, result = (at["x"], at["y"]) if forward else (at["dy"], at["dx"])
        # (A pointer that the kernel does not read stands in for what is missing.)
        state = names.index("state") if "state" in names else result.operand
        mask = names.index("mask") if "mask" in names else result.operand
        number = "fp64" if dtype is DType.float64 else "fp32"
        arguments: dict[str, Any] = {
            "x_ptr": source,
            "state_ptr": launch.Pointer(state, DType.int64),
            "mask_ptr": launch.Pointer(mask, DType.uint8),
            "y_ptr": result,
            **launch.factors(dtype),
            "factor": launch.Scalar(problem.factor, number),
            "limit": launch.Scalar(spec.threshold(problem.probability), "i64"),
            **over.arguments("number_strides", "x_strides", "mask_strides", "y_strides"),
        }
        constants = {
            **over.constants(),
            "TAKE": not forward and problem.mask is not None,
            "GIVE": forward and problem.mask is not None,
            "ACC": launch.accumulator(dtype),
        }
        return launch.prepare(
            device, dropout_kernel, (over.programs,), arguments, constants, num_warps=walk.WARPS
        )


def _walk(problem: DropoutProblem) -> walk.Walk:
    """Over (an element's number, x or dy, the mask, y or dx)."""
    x, y = (problem.x, problem.y) if problem.direction == "forward" else (problem.y, problem.x)
    number = TensorDesc.packed(x.dims, x.dtype)
    mask = problem.mask
    return walk.walk([number, x, number if mask is None else mask, y])


ALGORITHMS = (Philox(),)
