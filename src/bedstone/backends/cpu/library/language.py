"""The kernel language with what entry points of a C library need: arguments that are checked,
structs that are read, loops over sizes known at run time, memory that the caller gave.

Where a plan's kernel has Python numbers, these have `Int`s: one compiled function serves every
shape.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from llvmlite import ir

from bedstone.backends.cpu.builder import F64, I64, Function, Job, KernelBuilder
from bedstone.backends.cpu.irtypes import I8, I32
from bedstone.backends.cpu.library.interface import FUNCTIONS, SIZES, STATUS, STRUCTS, offset_of
from bedstone.backends.cpu.target import CACHE_LINE
from bedstone.backends.cpu.values import Float, Int, IntLike, Mask, MaskLike

WORD = 8  # bytes of an i64
TASKS_PER_THREAD = 4  # of short equal steps: a core that falls behind costs a quarter
C_TYPES = {"int32_t": I32, "double": F64}  # all others are addresses and sizes


def ceil_div(a: IntLike, b: IntLike) -> Any:
    """a / b rounded up, for numbers that are not negative."""
    return (a + (b - 1)) // b


class LibraryBuilder(KernelBuilder):
    """KernelBuilder for one module with many functions of run-time shapes."""

    @contextlib.contextmanager
    def api(self, name: str) -> Iterator[dict[str, Any]]:
        """An exported function of interface.FUNCTIONS: its arguments by name. It returns
        success unless something returned before."""
        result, parameters = FUNCTIONS[name]
        result_type = I64 if result.endswith("*") else I32
        types = [C_TYPES.get(ctype, I64) for ctype, _ in parameters]
        function = Function(self, name, types, result_type)
        with self._inside(function):
            yield {p: self._argument(a) for (_, p), a in zip(parameters, function.fn.args)}
            if not self.ir.block.is_terminated:
                self.give(0)

    def _argument(self, argument: ir.Argument) -> Int | Float:
        if argument.type == I32:
            return Int(self, self.ir.sext(argument, I64))
        return (Int if argument.type == I64 else Float)(self, argument)

    @contextlib.contextmanager
    def answering(self, name: str, arguments: int) -> Iterator[list[Int]]:
        """An internal function of i64 numbers that returns one (by `give`)."""
        function = Function(self, name, [I64] * arguments, I64)
        function.fn.linkage = "internal"
        with self._inside(function):
            yield function.arguments()

    def ask(self, name: str, *arguments: IntLike) -> Int:
        """The answer of such a function."""
        values = [self.to_ir(a) for a in arguments]
        return Int(self, self.ir.call(self.module.globals[name], values))

    def give(self, value: IntLike) -> None:
        """Return from the current function."""
        type_ = self.current.fn.function_type.return_type
        number = self.as_int(value)
        self.ir.ret(number.ir if type_ == I64 else self.ir.trunc(number.ir, type_))

    def require(self, condition: MaskLike, status: str) -> None:
        """Return the status unless the condition holds."""
        if condition is True:
            return
        with self.if_(~condition):
            self.give(STATUS[status])

    def require_all(self, *pointers: Int) -> None:
        """Return null_pointer if one is null."""
        for pointer in pointers:
            self.require(pointer.ne(0), "null_pointer")

    def passes(self, status: Int) -> None:
        """Return the status unless it is success."""
        with self.if_(status.ne(0)):
            self.give(status)

    # Memory ------------------------------------------------------------------------------------

    def word(self, address: IntLike, index: IntLike = 0) -> Int:
        """An int64 of an array."""
        return self.load(address + index * WORD, "int64")

    def put(self, value: IntLike, address: IntLike, index: IntLike = 0) -> None:
        """Write an int64 of an array."""
        self.store(self.as_int(value), address + index * WORD, "int64")

    def member(self, struct: str, address: Int, field: str, index: IntLike = 0) -> Any:
        """A value of a struct's member."""
        member = next(m for m in STRUCTS[struct] if m.name == field)
        at = address + offset_of(struct, field) + index * SIZES[member.ctype]
        if member.ctype == "int32_t":
            return Int(self, self.ir.sext(self.load(at, "int32").ir, I64))
        return self.load(at, "int64" if member.ctype == "int64_t" else "float64")

    def text(self, sentence: str) -> Int:
        """The address of a C string."""
        data = bytearray(sentence.encode() + b"\0")
        type_ = ir.ArrayType(I8, len(data))
        name = self.module.get_unique_name("text")
        string = ir.GlobalVariable(self.module, type_, name)
        string.linkage, string.global_constant = "internal", True
        string.initializer = ir.Constant(type_, data)
        return Int(self, self.ir.ptrtoint(string, I64))

    # Threads -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def job(
        self, tasks: IntLike, threads: IntLike, memory: IntLike = 0, share: IntLike = 0
    ) -> Iterator[Job]:
        """A parallel phase; each thread has `share` bytes of `memory` as job.scratch."""
        taken = self.alloca(WORD)
        self.put(0, taken)
        with self.parallel(tasks, threads) as job:
            counter = self.ir.inttoptr(taken.ir, I64.as_pointer())
            one = ir.Constant(I64, 1)
            number = Int(self, self.ir.atomic_rmw("add", counter, one, "monotonic"))
            job.scratch = number * share + memory
            yield job

    @contextlib.contextmanager
    def each(self, total: Int, threads: Int) -> Iterator[Int]:
        """A parallel phase over 0 ... total - 1."""
        tasks = self.min(self.max(total, 1), threads * TASKS_PER_THREAD)
        with self.job(tasks, threads) as job, job.each_task() as task:
            first, end = task * total // tasks, (task + 1) * total // tasks
            with self.loop(first, end) as number:
                yield number


class Workspace:
    """Pieces of the caller's memory, each at a cache line's start."""

    def __init__(self, k: LibraryBuilder, address: IntLike) -> None:
        self.k, self.start = k, address
        aligned = (k.as_int(address) + (CACHE_LINE - 1)) & -CACHE_LINE
        self.next = aligned

    def take(self, size: IntLike) -> Int:
        """The address of `size` bytes."""
        address = self.next
        self.next = self.next + ((self.k.as_int(size) + (CACHE_LINE - 1)) & -CACHE_LINE)
        return address

    @property
    def size(self) -> Int:
        """Bytes taken so far, with what aligning may cost."""
        return self.next - self.start + CACHE_LINE


class Tensor:
    """A bs_tensor at an address: what its members say."""

    def __init__(self, k: LibraryBuilder, address: Int) -> None:
        self.k, self.address = k, address

    @property
    def dtype(self) -> Int:
        return self.k.member("bs_tensor", self.address, "dtype")

    @property
    def rank(self) -> Int:
        return self.k.member("bs_tensor", self.address, "rank")

    def dim(self, axis: IntLike) -> Int:
        """The size along an axis."""
        return self.k.member("bs_tensor", self.address, "dims", axis)

    def stride(self, axis: IntLike) -> Int:
        """Elements from one index of an axis to the next."""
        return self.k.member("bs_tensor", self.address, "strides", axis)


def all_of(masks: Sequence[MaskLike]) -> Any:
    """True if all are."""
    found: MaskLike = True
    for mask in masks:
        found = mask & found if isinstance(mask, Mask) else found
    return found
