"""The functions that tell: version, status strings, and the descriptor of a tensor."""

from __future__ import annotations

from bedstone.backends.cpu.irtypes import I32
from bedstone.backends.cpu.library import checks
from bedstone.backends.cpu.library.interface import DTYPES, MAX_RANK, SIZES, STATUSES, offset_of
from bedstone.backends.cpu.library.language import LibraryBuilder
from bedstone.backends.cpu.values import Int
from bedstone.version import __version__

UNKNOWN_STATUS = "no status of this library"


def emit_strings(k: LibraryBuilder) -> None:
    """bs_version, bs_status_string, bs_tensor_init."""
    with k.api("bs_version"):
        k.give(k.text(__version__))
    with k.api("bs_status_string") as call:
        for value, sentence in enumerate(STATUSES.values()):
            with k.if_(call["status"].eq(value)):
                k.give(k.text(sentence))
        k.give(k.text(UNKNOWN_STATUS))
    with k.api("bs_tensor_init") as call:
        tensor, rank, dims = call["tensor"], call["rank"], call["dims"]
        k.require_all(tensor, dims)
        k.require(call["dtype"].below(len(DTYPES)), "bad_dtype")
        k.require((rank >= 1) & (rank <= MAX_RANK), "bad_rank")
        for field in ("dtype", "rank"):
            at = tensor + offset_of("bs_tensor", field)
            k.store(_narrow(k, call[field]), at, "int32")
        size = SIZES["int64_t"]
        place = tensor + offset_of("bs_tensor", "dims")
        with k.loop(0, MAX_RANK) as axis:
            k.put(0, place, axis)
            k.put(0, tensor + offset_of("bs_tensor", "strides"), axis)
        step = k.variable(1)
        with k.loop(0, rank) as number:
            axis = rank - 1 - number
            dim = k.word(dims, axis)
            k.require(dim >= 0, "bad_dims")
            # (A product that overflows is refused where the tensor is checked, with its dims.)
            k.put(dim, place, axis)
            stride = k.variable(step.value)
            with k.if_(call["strides"].ne(0)):
                stride.set(k.word(call["strides"], axis))
            k.put(stride.value, tensor + offset_of("bs_tensor", "strides") + axis * size)
            step.set(step.value * k.max(dim, 1))
        k.passes(k.ask("check_tensor", tensor, checks.READ, 1, MAX_RANK))


def _narrow(k: LibraryBuilder, value: Int) -> Int:
    return k.resize(value, I32)
