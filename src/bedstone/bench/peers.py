"""Peers: other ways to compute the same problem on the same values, to compare with.

A peer gives a `Side` for a problem and its operands, or a reason why it does not compute it. A new
peer is a function here and an entry of PEERS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import bedstone
from bedstone.bench import jax_peer, lowering, paddle_peer, torch_peer
from bedstone.bench.device_operands import in_turn
from bedstone.bench.operands import Arrays
from bedstone.bench.torch_peer import Declined

__all__ = ["PEERS", "Declined", "Side"]


@dataclass(frozen=True)
class Side:
    """One side of a comparison: its call, and on a GPU the clock that times it (seconds a call)."""

    call: Callable[[], Any]
    clock: Callable[[], float] | None = None


def turning(sides: Sequence[Side]) -> Side:
    """Sides over several sets of operands as one that takes them in turn (PyTorch on a GPU)."""
    call = in_turn([side.call for side in sides])
    return Side(call, lambda: torch_peer.clock(call))


def torch_side(problem: bedstone.Problem, arrays: Arrays, device: str) -> Side:
    """PyTorch on the same device."""
    call = torch_peer.call(problem, arrays, device)
    return Side(call, None if device == "cpu" else lambda: torch_peer.clock(call))


def cudnn_side(problem: bedstone.Problem, arrays: Arrays, device: str) -> Side:
    """cuDNN through PyTorch, its own benchmark mode on."""
    if device == "cpu":
        raise Declined("needs --device cuda")
    return torch_side(problem, arrays, device)


def im2col_side(problem: bedstone.Problem, arrays: Arrays, device: str) -> Side:
    """Per-image lowering and BLAS."""
    reason = lowering.reason_against(problem, device)
    if reason is not None:
        raise Declined(reason)
    return Side(lowering.call(problem, arrays))


def paddle_side(problem: bedstone.Problem, arrays: Arrays, device: str) -> Side:
    """PaddlePaddle's own kernels."""
    return Side(paddle_peer.call(problem, arrays, device, on_bedstone=False))


def paddle_on_bedstone_side(problem: bedstone.Problem, arrays: Arrays, device: str) -> Side:
    """The same calls of PaddlePaddle with bedstone's kernels in their place."""
    return Side(paddle_peer.call(problem, arrays, device, on_bedstone=True))


def jax_side(problem: bedstone.Problem, arrays: Arrays, device: str) -> Side:
    """JAX's own kernels."""
    return Side(jax_peer.call(problem, arrays, device, on_bedstone=False))


def jax_on_bedstone_side(problem: bedstone.Problem, arrays: Arrays, device: str) -> Side:
    """The same programs of JAX with bedstone's kernels in their place."""
    return Side(jax_peer.call(problem, arrays, device, on_bedstone=True))


PEERS: dict[str, Callable[[bedstone.Problem, Arrays, str], Side]] = {
    "torch": torch_side,
    "cudnn": cudnn_side,
    "im2col": im2col_side,
    "paddle": paddle_side,
    "paddle-on-bedstone": paddle_on_bedstone_side,
    "jax": jax_side,
    "jax-on-bedstone": jax_on_bedstone_side,
}
