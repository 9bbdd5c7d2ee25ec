"""Checks that entry points share: of tensors, of their number of threads, of equal dimensions.

Sizes are multiplied as float64, where nothing overflows: what passes fits 62 bits, offsets in
bytes included.
"""

from __future__ import annotations

from llvmlite import ir

from bedstone.backends.cpu.builder import F64, Float
from bedstone.backends.cpu.library.interface import DTYPES, MAX_RANK, MAX_THREADS
from bedstone.backends.cpu.library.language import LibraryBuilder, Tensor
from bedstone.backends.cpu.values import Int

LARGEST_BYTES = 2.0**60
ITEM_BYTES = 8.0  # of the widest dtype
LARGEST_PARAMETER = 2**31 - 1  # of windows, strides, dilations and paddings

READ, WRITTEN = 0, 1


def emit_checks(k: LibraryBuilder) -> None:
    """check_tensor(tensor, data, written, least rank, most rank), size_of(tensor),
    same_dims(a, b): see the methods that ask them."""
    with k.answering("size_of", 1) as (address,):
        tensor, size = Tensor(k, address), k.variable(1)
        with k.loop(0, tensor.rank) as axis:
            size.set(size.value * tensor.dim(axis))
        k.give(size.value)
    with k.answering("same_dims", 2) as (a, b):
        a, b = Tensor(k, a), Tensor(k, b)
        with k.if_(a.rank.ne(b.rank)):
            k.give(0)
        with k.loop(0, a.rank) as axis, k.if_(a.dim(axis).ne(b.dim(axis))):
            k.give(0)
        k.give(1)
    with k.answering("check_tensor", 4) as (address, written, least, most):
        k.require_all(address)
        tensor = Tensor(k, address)
        k.require(tensor.dtype.below(len(DTYPES)), "bad_dtype")
        k.require((tensor.rank >= least) & (tensor.rank <= most), "bad_rank")
        _check_extent(k, tensor)
        with k.if_(written.ne(0)):
            _check_overlap(k, tensor)
        k.give(0)


def _absolute(k: LibraryBuilder, value: Int) -> Int:
    return k.select(value < 0, -value, value)


def _check_extent(k: LibraryBuilder, tensor: Tensor) -> None:
    one = Float(k, ir.Constant(F64, 1.0))
    size, extent = k.variable(one), k.variable(one)
    empty = k.variable(0)
    with k.loop(0, tensor.rank) as axis:
        dim = tensor.dim(axis)
        k.require(dim >= 0, "bad_dims")
        with k.if_(dim.eq(0)):
            empty.set(k.as_int(1))
        size.set(size.value * k.cast(k.max(dim, 1), one))
        reach = k.unary("fabs", k.cast(tensor.stride(axis), one)) * k.cast(k.max(dim - 1, 0), one)
        extent.set(extent.value + reach)
    k.require(size.value * ITEM_BYTES < LARGEST_BYTES, "bad_dims")
    with k.if_(empty.value.eq(0)):
        k.require(extent.value * ITEM_BYTES < LARGEST_BYTES, "bad_strides")


def _check_overlap(k: LibraryBuilder, tensor: Tensor) -> None:
    """Every stride must step over all that the smaller ones reach."""
    with k.if_(k.ask("size_of", tensor.address) > 1), k.loop(0, tensor.rank) as a:
        stride, reach = _absolute(k, tensor.stride(a)), k.variable(0)
        with k.if_(tensor.dim(a) > 1):
            with k.loop(0, tensor.rank) as b:
                other = _absolute(k, tensor.stride(b))
                with k.if_((tensor.dim(b) > 1) & b.ne(a) & (other <= stride)):
                    # (Equal strides fail for one of the two whatever their order.)
                    reach.set(reach.value + other * (tensor.dim(b) - 1))
            k.require(stride > reach.value, "bad_strides")


def check_tensors(
    k: LibraryBuilder,
    inputs: list[Int],
    output: Int,
    least: int = 1,
    most: int = MAX_RANK,
    written: int = WRITTEN,
) -> None:
    """Return a status unless all are sound tensors of one dtype (and rank)."""
    for address, use in [(a, READ) for a in inputs] + [(output, written)]:
        k.passes(k.ask("check_tensor", address, use, least, most))
    for address in inputs:
        k.require(Tensor(k, address).dtype.eq(Tensor(k, output).dtype), "bad_dtype")
        k.require(Tensor(k, address).rank.eq(Tensor(k, output).rank), "bad_rank")


def check_data(k: LibraryBuilder, *pairs: tuple[Int, Int]) -> None:
    """Return null_pointer unless every (tensor, data) that is not empty has an address."""
    for tensor, data in pairs:
        with k.if_(data.eq(0)):
            k.require(k.ask("size_of", tensor).eq(0), "null_pointer")


def check_threads(k: LibraryBuilder, threads: Int) -> Int:
    """The number of threads meant, or return bad_threads."""
    k.require((threads >= 0) & (threads <= MAX_THREADS), "bad_threads")
    return k.ask("threads_of", threads)


def require_same_dims(k: LibraryBuilder, a: Int, b: Int) -> None:
    """Return mismatch unless both tensors have the same dims."""
    k.require(k.ask("same_dims", a, b).ne(0), "mismatch")
