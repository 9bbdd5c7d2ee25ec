"""Dropout on the CPU: Philox 4x32-10 in vectors, the same mask as every other backend draws.

Each lane draws the Philox block of its own element and keeps one of its four words. The number of
an element is that of the logical dims, so a stream without an address brings it along whatever
the strides are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bedstone.backends.cpu.builder import KernelBuilder
from bedstone.backends.cpu.elementwise import PointwiseAlgorithm, Stream, emit_map, seconds_to_move
from bedstone.backends.cpu.irtypes import I32, I64
from bedstone.backends.cpu.kernel import ENTRY
from bedstone.backends.cpu.target import Target
from bedstone.backends.cpu.values import Int, Mask
from bedstone.plan.device import Device
from bedstone.spec.dropout import (
    PHILOX_MULTIPLIERS,
    PHILOX_ROUNDS,
    PHILOX_WEYL,
    PHILOX_WORDS,
    DropoutProblem,
    threshold,
)
from bedstone.spec.dtypes import DType
from bedstone.spec.problem import Problem
from bedstone.spec.tensor import TensorDesc

LOW_WORD = 0xFFFFFFFF
ELEMENTS_PER_SECOND = 0.5e9  # drawn by a core: for the time model


def philox(k: KernelBuilder, counter: Int, keys: Sequence[Int]) -> list[Int]:
    """The four words of Philox at 64-bit counters, each in the low half of an i64 lane."""
    words = [counter & LOW_WORD, counter >> 32, counter & 0, counter & 0]
    key = list(keys)
    for _ in range(PHILOX_ROUNDS):
        # Unsigned 64-bit products: the operator * promises LLVM that no sign overflows.
        products = [w._plain("mul", m) for w, m in zip(words[::2], PHILOX_MULTIPLIERS)]
        (high0, low0), (high1, low1) = ((p >> 32, p & LOW_WORD) for p in products)
        words = [high1 ^ words[1] ^ key[0], low1, high0 ^ words[3] ^ key[1], low0]
        key = [(part + step) & LOW_WORD for part, step in zip(key, PHILOX_WEYL)]
    return words


def kept(k: KernelBuilder, number: Int, state: Sequence[Int], limit: int) -> Mask:
    """Which elements stay."""
    seed, offset = (k.splat(part, number.lanes) for part in state)
    counter = offset._plain("add", number >> 2)  # may wrap around
    words = philox(k, counter, [seed & LOW_WORD, seed >> 32])
    which = number & (PHILOX_WORDS - 1)
    word = words[0]
    for i in range(1, PHILOX_WORDS):
        word = k.select(which.eq(i), words[i], word)
    return word >= limit


def emit(target: Target, problem: DropoutProblem) -> KernelBuilder:
    """The kernel of either direction."""
    k = KernelBuilder(target)
    factor, limit = problem.factor, threshold(problem.probability)
    names = [o.name for o in problem.operands]
    with k.entry(ENTRY, pointers=len(names)) as call:
        descs = [o.desc for o in problem.operands]
        stream = {n: Stream(p, d) for n, p, d in zip(names, call.pointers, descs)}
        source = stream["x" if problem.direction == "forward" else "dy"]
        out = stream["y" if problem.direction == "forward" else "dx"]

        def scaled(k: KernelBuilder, value: Any, keep: Any) -> Any:
            return k.select(keep, value * factor, 0.0)

        if "mask" in stream and problem.direction == "backward":

            def masked(k: KernelBuilder, values: list[Any]) -> list[Any]:
                return [scaled(k, values[0], values[1].ne(0))]

            emit_map(k, call, [source, stream["mask"]], [out], masked)
            return k
        address = stream["state"].address
        state = [k.load(address, "int64"), k.load(address, "int64", offset=8)]
        numbers = Stream(None, TensorDesc.packed(problem.x.dims, DType.int64))

        def drawn(k: KernelBuilder, values: list[Any]) -> list[Any]:
            keep = kept(k, k.resize(values[1], I64), state, limit)
            results = [scaled(k, values[0], keep)]
            if "mask" in stream:
                ones = k.splat(k.resize(k.as_int(1), I32), keep.lanes)
                results.insert(0, k.select(keep, ones, 0))
            return results

        # The data comes last: its memory order is the one that the loops follow.
        outputs = [stream["mask"], out] if "mask" in stream else [out]
        emit_map(k, call, [source, numbers], outputs, drawn)
    return k


class Philox(PointwiseAlgorithm):
    """Both directions, with and without a mask, any strides, in place."""

    name = "cpu:elementwise"
    emit = staticmethod(emit)

    def estimate(self, problem: Problem, device: Device) -> float:
        return seconds_to_move(problem.bytes) + problem.operands[-1].desc.size / ELEMENTS_PER_SECOND


ALGORITHMS = (Philox(),)
