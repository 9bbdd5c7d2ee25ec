"""KernelBuilder: the language in which every CPU kernel is written.

Python code runs once and leaves a loop nest behind as LLVM IR. Shapes and strides are Python
ints and stay so: an `Int` appears only where a number is known at run time, so arithmetic on
sizes folds by itself. Addresses are `Int`s that count bytes. Registers hold float32 or float64
(`Float`, scalar or vector): 16-bit types are widened by `load` and rounded by `store`.

A kernel, y = alpha * relu(x) + beta * y over `size` elements, on every thread of the pool:

    def emit(target):
        k = KernelBuilder(target)
        lanes, step = k.lanes(dtype), itemsize(dtype)
        chunk = 64 * lanes                                     # elements of one task
        with k.entry("entry", pointers=2) as call:
            x, y = call.pointers
            with k.parallel(tasks=-(-size // chunk), threads=call.threads) as job:
                with job.each_task() as task:                  # outer scalars are captured
                    first = task * chunk
                    with k.loop(first, k.min(first + chunk, size), lanes) as i:
                        mask = k.first_lanes(size - i, lanes)  # the tail is masked, not looped
                        v = k.fmax(k.load(x + i * step, dtype, lanes, mask=mask), 0.0)
                        k.store_blended(v, call.alpha, call.beta, y + i * step, dtype, mask=mask)
        return k

    run = compiled(f"relu {size} {dtype}", emit, pointers=2)   # from kernel.py
    run([x.ctypes.data, y.ctypes.data], alpha=1.0, beta=0.0)

Accumulators are `k.variable(...)`: stack slots that the compiler turns into registers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from bedstone.backends.cpu import halffloat
from bedstone.backends.cpu.irtypes import (
    F32,
    F64,
    I1,
    I8,
    I32,
    I64,
    SIZES,
    TYPES,
    VOID,
    constant,
    itemsize,
    like,
    mangled,
    vector,
)
from bedstone.backends.cpu.target import Target
from bedstone.backends.cpu.values import (
    Float,
    FloatLike,
    Int,
    IntLike,
    Mask,
    MaskLike,
    Value,
    Variable,
    is_number,
)

__all__ = ["F32", "F64", "I32", "I64", "KernelBuilder", "Float", "Int", "Mask", "itemsize"]

# The two functions of the thread pool that kernels call; threads.py emits them.
PARALLEL_SYMBOL = "bedstone_parallel"  # void (job, frame, tasks, threads, scratch bytes)
SCRATCH_SYMBOL = "bedstone_scratch"  # i64 address (which, bytes)
JOB_SCRATCH, CALL_SCRATCH = 0, 1  # which
JOB_ARGUMENTS = 3  # frame, address of the task counter, address of the thread's scratch


class Function:
    """A function under construction: its IR, and for a job the values captured from outside."""

    def __init__(
        self, k: KernelBuilder, name: str, types: Sequence[ir.Type], result: ir.Type = VOID
    ) -> None:
        self.k = k
        self.fn = ir.Function(k.module, ir.FunctionType(result, list(types)), name)
        self.fn.attributes.add("nounwind")
        self.head = ir.IRBuilder(self.fn.append_basic_block("entry"))  # stack slots, captures
        self.ir = ir.IRBuilder(self.fn.append_basic_block("body"))
        self.body = self.ir.block
        self.outer: Function | None = None
        self.captured: dict[int, tuple[Value, ir.Value]] = {}

    def arguments(self) -> list[Value]:
        return [(Int if a.type == I64 else Float)(self.k, a) for a in self.fn.args]

    def stack(self, type_: ir.Type, count: int | None = None, align: int = 64) -> ir.Value:
        slot = self.head.alloca(type_, count)
        slot.align = align
        return slot

    def capture(self, value: Value) -> ir.Value:
        """`value` of the enclosing function, reloaded from the job's frame (8 bytes a value)."""
        if self.outer is None or value.home is not self.outer or value.lanes is not None:
            raise TypeError("only scalars of the enclosing function can be used inside a job")
        if id(value) not in self.captured:
            address = self.head.add(self.fn.args[0], ir.Constant(I64, 8 * len(self.captured)))
            pointer = self.head.inttoptr(address, value.type.as_pointer())
            self.captured[id(value)] = value, self.head.load(pointer)
        return self.captured[id(value)][1]

    def finish(self) -> None:
        if not self.ir.block.is_terminated:
            self.ir.ret_void()
        self.head.branch(self.body)


@dataclass
class Call:
    """The arguments of a kernel's entry."""

    pointers: list[Int]
    workspace: Int
    alpha: Float
    beta: Float
    threads: Int


class Job:
    """Inside `with k.parallel(...)`: one thread's share of a parallel phase."""

    def __init__(self, k: KernelBuilder, tasks: IntLike) -> None:
        self.k, self.tasks = k, tasks
        _, self._counter, self.scratch = k.current.arguments()

    @contextlib.contextmanager
    def each_task(self) -> Iterator[Int]:
        """Loop over the task numbers that this thread draws from the shared counter.

        Exactly one such loop a job: every task runs once, on whichever thread is free.
        """
        k = self.k
        fn, tasks = k.current.fn, k.to_ir(self.tasks)
        head, body, done = (fn.append_basic_block(n) for n in ("draw", "task", "drained"))
        k.ir.branch(head)
        k.ir.position_at_end(head)
        counter = k.ir.inttoptr(self._counter.ir, I64.as_pointer())
        task = k.ir.atomic_rmw("add", counter, ir.Constant(I64, 1), "monotonic")
        k.ir.cbranch(k.ir.icmp_signed("<", task, tasks), body, done)
        k.ir.position_at_end(body)
        yield Int(k, task)
        k.ir.branch(head)
        k.ir.position_at_end(done)


class KernelBuilder:
    """One module of functions under construction, for one target."""

    def __init__(self, target: Target, name: str = "kernel") -> None:
        self.target = target
        self.module = ir.Module(name)
        self.module.triple = target.triple
        self.current: Function = None  # type: ignore[assignment]
        self._declared: dict[str, ir.Function] = {}

    @property
    def ir(self) -> ir.IRBuilder:
        """The IR builder at the current position (for the rare instruction not offered here)."""
        return self.current.ir

    # Functions ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _inside(self, function: Function) -> Iterator[Function]:
        outer, self.current = self.current, function
        try:
            yield function
            function.finish()
        finally:
            self.current = outer

    @contextlib.contextmanager
    def entry(self, name: str, pointers: int) -> Iterator[Call]:
        """The kernel's entry: void name(pointers..., workspace, alpha, beta, threads)."""
        types = [I64] * (pointers + 1) + [F64, F64, I64]
        with self._inside(Function(self, name, types)) as function:
            *addresses, workspace, alpha, beta, threads = function.arguments()
            yield Call(addresses, workspace, alpha, beta, threads)

    @contextlib.contextmanager
    def function(self, name: str, *types: ir.Type, export: bool = False) -> Iterator[list[Value]]:
        """A function of i64 and float arguments, to be `call`ed by its name."""
        function = Function(self, name, types)
        if not export:
            function.fn.linkage = "internal"
        with self._inside(function):
            yield function.arguments()

    def call(self, name: str, *arguments: Value | int) -> None:
        self.ir.call(self.module.globals[name], [self.to_ir(a) for a in arguments])

    def external(self, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
        """A call of a C function or LLVM intrinsic, declared on first use."""
        if name not in self._declared:
            type_ = ir.FunctionType(result, [a.type for a in arguments])
            self._declared[name] = ir.Function(self.module, type_, name)
        return self.ir.call(self._declared[name], arguments)

    @contextlib.contextmanager
    def parallel(self, tasks: IntLike, threads: IntLike, scratch: IntLike = 0) -> Iterator[Job]:
        """A parallel phase: the body runs on up to `threads` threads, then all of them meet.

        The body sees scalars of the enclosing function and its own `job.scratch` (64-byte
        aligned, `scratch` bytes, contents undefined). It must not start a phase itself.
        """
        name = f"{self.current.fn.name}.job{len(self.module.functions)}"
        function = Function(self, name, [I64] * JOB_ARGUMENTS)
        function.fn.linkage = "internal"
        function.outer = self.current
        with self._inside(function):
            yield Job(self, tasks)
        frame = self.current.stack(I64, max(1, len(function.captured)))
        for i, (value, _) in enumerate(function.captured.values()):
            slot = self.ir.gep(frame, [ir.Constant(I64, i)])
            self.ir.store(value.ir, self.ir.bitcast(slot, value.type.as_pointer()))
        job = self.ir.ptrtoint(function.fn, I64)
        frame = self.ir.ptrtoint(frame, I64)
        numbers = [self.to_ir(n) for n in (tasks, threads, scratch)]
        self.external(PARALLEL_SYMBOL, VOID, job, frame, *numbers)

    def scratch(self, size: IntLike) -> Int:
        """The address of `size` bytes for the whole call (64-byte aligned, contents undefined).

        They belong to the calling thread and every job may use them; one request a call.
        """
        which = ir.Constant(I64, CALL_SCRATCH)
        return Int(self, self.external(SCRATCH_SYMBOL, I64, which, self.to_ir(size)))

    # Control ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def loop(
        self, lo: IntLike, hi: IntLike, step: int = 1, at_least_once: bool = False
    ) -> Iterator[Any]:
        """for i in range(lo, hi, step). A loop known to run once is no loop and i a Python int."""
        if isinstance(lo, int) and isinstance(hi, int):
            trips = -(-(hi - lo) // step)
            if trips == 1:
                yield lo
                return
            at_least_once = trips > 1
        fn, first, last = self.current.fn, self.to_ir(lo), self.to_ir(hi)
        before, body, done = self.ir.block, fn.append_basic_block("loop"), None
        done = fn.append_basic_block("done")
        if at_least_once:
            self.ir.branch(body)
        else:
            self.ir.cbranch(self.ir.icmp_signed("<", first, last), body, done)
        self.ir.position_at_end(body)
        i = self.ir.phi(I64)
        i.add_incoming(first, before)
        yield Int(self, i)
        following = self.ir.add(i, ir.Constant(I64, step), flags=("nsw",))
        i.add_incoming(following, self.ir.block)
        self.ir.cbranch(self.ir.icmp_signed("<", following, last), body, done)
        self.ir.position_at_end(done)

    @contextlib.contextmanager
    def while_(self, condition: Any) -> Iterator[None]:
        """Repeat while `condition()`, evaluated before each round, holds."""
        head, body, done = (self.current.fn.append_basic_block(n) for n in ("head", "body", "done"))
        self.ir.branch(head)
        self.ir.position_at_end(head)
        self.ir.cbranch(condition().ir, body, done)
        self.ir.position_at_end(body)
        yield
        self.ir.branch(head)
        self.ir.position_at_end(done)

    @contextlib.contextmanager
    def if_(self, condition: MaskLike) -> Iterator[None]:
        if condition is True:
            yield
            return
        with self.ir.if_then(self._condition(condition)):
            yield

    @contextlib.contextmanager
    def if_else(self, condition: MaskLike) -> Iterator[tuple[Any, Any]]:
        """with k.if_else(c) as (then, otherwise): with then: ...; with otherwise: ..."""
        with self.ir.if_else(self._condition(condition)) as branches:
            yield branches

    def _condition(self, condition: MaskLike) -> ir.Value:
        return ir.Constant(I1, int(condition)) if isinstance(condition, bool) else condition.ir

    # Values -------------------------------------------------------------------------------

    def lanes(self, dtype: str) -> int:
        """Lanes of a full vector register of values of this dtype as registers hold them."""
        return self.target.vector_bytes // SIZES[TYPES[str(dtype)][1]]

    def to_ir(self, value: Value | int) -> ir.Value:
        return ir.Constant(I64, value) if isinstance(value, int) else value.ir

    def pair(self, a: Value, b: Any) -> tuple[ir.Value, ir.Value]:
        """Both operands as IR of one type: numbers become constants, scalars are spread."""
        if not isinstance(b, Value):
            return a.ir, constant(a.type, b)
        if a.lanes == b.lanes:
            return a.ir, b.ir
        if a.lanes is None:
            return self.splat(a, b.lanes).ir, b.ir
        return a.ir, self.splat(b, a.lanes).ir

    def constant(self, value: float, dtype: str, lanes: int | None = None) -> Any:
        """A Float (or, of an integer dtype, an Int) constant, spread over the lanes."""
        type_ = vector(TYPES[str(dtype)][1], lanes)
        kind = Int if isinstance(TYPES[str(dtype)][1], ir.IntType) else Float
        return kind(self, constant(type_, value))

    def as_int(self, value: IntLike) -> Int:
        """A Python int as an Int."""
        return Int(self, constant(I64, value)) if isinstance(value, int) else value

    def variable(self, initial: Value | int) -> Variable:
        """A mutable register."""
        return Variable(self, self.as_int(initial) if isinstance(initial, int) else initial)

    def splat(self, value: Any, lanes: int | None) -> Any:
        """A scalar in every lane."""
        if lanes is None or value.lanes is not None:
            return value
        type_ = ir.VectorType(value.type, lanes)
        undefined = ir.Constant(type_, ir.Undefined)
        one = self.ir.insert_element(undefined, value.ir, ir.Constant(I32, 0))
        zeros = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
        return type(value)(self, self.ir.shuffle_vector(one, undefined, zeros))

    def iota(self, lanes: int, type_: ir.Type = I64) -> Int:
        """The vector 0, 1, ..., lanes - 1."""
        return Int(self, ir.Constant(ir.VectorType(type_, lanes), list(range(lanes))))

    def first_lanes(self, count: IntLike, lanes: int) -> Mask | None:
        """True in the first `count` lanes; None (no mask needed) if that is known to be all."""
        if isinstance(count, int):
            return None if count >= lanes else self.lane_mask([i < count for i in range(lanes)])
        return self.iota(lanes) < self.splat(count, lanes)

    def lane_mask(self, flags: Sequence[bool]) -> Mask:
        """A constant mask."""
        return Mask(self, ir.Constant(ir.VectorType(I1, len(flags)), [int(f) for f in flags]))

    def select(self, condition: MaskLike, a: Any, b: Any) -> Any:
        """a where condition, else b (both branches are evaluated)."""
        if isinstance(condition, bool):
            return a if condition else b
        if not isinstance(a, Value) and not isinstance(b, Value):
            a = Int(self, ir.Constant(I64, a))
        if isinstance(a, Value):
            kind, (x, y) = type(a), self.pair(a, b)
        else:
            kind, (y, x) = type(b), self.pair(b, a)
        return kind(self, self.ir.select(condition.ir, x, y))

    def min(self, a: IntLike, b: IntLike) -> Any:
        if isinstance(a, int):
            return min(a, b) if isinstance(b, int) else self.min(b, a)
        return self.select(a < b, a, b)

    def max(self, a: IntLike, b: IntLike) -> Any:
        if isinstance(a, int):
            return max(a, b) if isinstance(b, int) else self.max(b, a)
        return self.select(a > b, a, b)

    def fmin(self, a: Float, b: FloatLike) -> Float:
        """The smaller; NaN if either is NaN."""
        return self.select(a.is_nan(), a, self.select(a < b, a, b))

    def fmax(self, a: Float, b: FloatLike) -> Float:
        """The larger; NaN if either is NaN."""
        return self.select(a.is_nan(), a, self.select(a > b, a, b))

    def fma(self, a: Float, b: FloatLike, c: FloatLike) -> Float:
        """a * b + c, fused where the target has the instruction."""
        x, y = self.pair(a, b)
        x, z = self.pair(Float(self, x), c)
        return Float(self, self.external(f"llvm.fmuladd.{mangled(x.type)}", x.type, x, y, z))

    def unary(self, name: str, a: Float) -> Float:
        """An LLVM intrinsic of one float: sqrt, fabs, floor, ceil, trunc."""
        return Float(self, self.external(f"llvm.{name}.{mangled(a.type)}", a.type, a.ir))

    def cast(self, value: Value, model: Float) -> Float:
        """A float or integer converted to the element type (and lanes) of `model`."""
        type_ = like(value.type, model.element)
        if isinstance(value, Int):
            value = Float(self, self.ir.sitofp(value.ir, type_))
        elif value.element != model.element:
            convert = self.ir.fpext if model.element == F64 else self.ir.fptrunc
            value = Float(self, convert(value.ir, type_))
        return self.splat(value, model.lanes)

    def cast_to_int(self, value: Float) -> Int:
        """A float truncated towards zero, to i64 (or, a float32 vector, to i32 lanes)."""
        element = I32 if value.lanes and value.element == F32 else I64
        return Int(self, self.ir.fptosi(value.ir, like(value.type, element)))

    def float_from_bits(self, bits: Int) -> Float:
        """The float32 or float64 with this bit pattern (i32 or i64)."""
        element = F32 if bits.element == I32 else F64
        return Float(self, self.ir.bitcast(bits.ir, like(bits.type, element)))

    def resize(self, value: Int, element: ir.Type) -> Int:
        """An integer sign-extended or truncated to another width."""
        if value.element == element:
            return value
        convert = self.ir.sext if element.width > value.element.width else self.ir.trunc
        return Int(self, convert(value.ir, like(value.type, element)))

    def any(self, mask: Mask) -> Mask:
        """True if some lane is."""
        bits = self.ir.bitcast(mask.ir, ir.IntType(mask.lanes))
        return Mask(self, self.ir.icmp_unsigned("!=", bits, ir.Constant(bits.type, 0)))

    def all(self, mask: Mask) -> Mask:
        """True if every lane is."""
        bits = self.ir.bitcast(mask.ir, ir.IntType(mask.lanes))
        return Mask(self, self.ir.icmp_unsigned("==", bits, ir.Constant(bits.type, -1)))

    def extract(self, value: Any, lane: int) -> Any:
        return type(value)(self, self.ir.extract_element(value.ir, ir.Constant(I32, lane)))

    def shuffle(self, a: Any, b: Any, lanes: Sequence[int]) -> Any:
        """Lanes picked from a (0..n-1) and b (n..2n-1)."""
        picks = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
        return type(a)(self, self.ir.shuffle_vector(a.ir, b.ir, picks))

    def reduce(self, value: Any, combine: Any) -> Any:
        """A vector folded to a scalar by halving: combine(a, b) on ever shorter vectors."""
        while value.lanes and value.lanes > 1:
            half = value.lanes // 2
            low = self.shuffle(value, value, range(half))
            high = self.shuffle(value, value, range(half, 2 * half))
            value = combine(low, high)
        return self.extract(value, 0) if value.lanes else value

    # Memory -------------------------------------------------------------------------------

    def pointer(self, address: IntLike, type_: ir.Type, offset: IntLike = 0) -> ir.Value:
        """A typed pointer to address + offset bytes."""
        base = self.ir.inttoptr(self.to_ir(address), I8.as_pointer())
        if not is_number(offset, 0):
            base = self.ir.gep(base, [self.to_ir(offset)], source_etype=I8)
        return self.ir.bitcast(base, type_.as_pointer())

    def alloca(self, size: int) -> Int:
        """The address of `size` bytes on the stack (64-byte aligned), made once a call."""
        return Int(self, self.current.head.ptrtoint(self.current.stack(I8, size), I64))

    def table(self, numbers: Sequence[int]) -> Int:
        """The address of constant i64 numbers that are part of the kernel."""
        type_ = ir.ArrayType(I64, len(numbers))
        name = self.module.get_unique_name("table")
        table = ir.GlobalVariable(self.module, type_, name)
        table.linkage, table.global_constant = "internal", True
        table.initializer = ir.Constant(type_, list(numbers))
        return Int(self, table.ptrtoint(I64))

    def load(
        self,
        address: IntLike,
        dtype: str,
        lanes: int | None = None,
        offset: IntLike = 0,
        mask: Mask | None = None,
        otherwise: Float | None = None,
    ) -> Any:
        """One element or `lanes` consecutive ones.

        Lanes that the mask leaves out are not touched: they read as 0, or take the lane of
        `otherwise`.
        """
        stored = TYPES[str(dtype)][0]
        type_ = vector(stored, lanes)
        pointer = self.pointer(address, type_, offset)
        if mask is None:
            raw = self.ir.load(pointer, align=SIZES[stored])
        else:
            arguments = [pointer, ir.Constant(I32, SIZES[stored]), mask.ir, constant(type_, 0)]
            raw = self.external(f"llvm.masked.load.{mangled(type_)}.p0", type_, *arguments)
        wide = self._widen(raw, str(dtype))
        return wide if otherwise is None else self.select(mask, wide, otherwise)

    def store(
        self,
        value: Any,
        address: IntLike,
        dtype: str,
        offset: IntLike = 0,
        mask: Mask | None = None,
    ) -> None:
        """Write the value's lanes, rounded to dtype; lanes that the mask leaves out stay."""
        lane = _only_lane(mask)
        if lane is not None:
            # LLVM 22.1 writes 4 bytes where a vector narrowed to 16 bits meets such a mask.
            value, mask = self.extract(value, lane), None
            offset = offset + lane * SIZES[TYPES[str(dtype)][0]]
        raw = self._narrow(value, str(dtype))
        pointer, align = self.pointer(address, raw.type, offset), SIZES[TYPES[str(dtype)][0]]
        if mask is None:
            self.ir.store(raw, pointer, align=align)
        else:
            arguments = [raw, pointer, ir.Constant(I32, align), mask.ir]
            self.external(f"llvm.masked.store.{mangled(raw.type)}.p0", VOID, *arguments)

    def store_blended(
        self,
        value: Float,
        alpha: Float,
        beta: Float,
        address: IntLike,
        dtype: str,
        offset: IntLike = 0,
        mask: Mask | None = None,
    ) -> None:
        """alpha * value + beta * (what is there), which is not read when beta is 0."""
        result = self.variable(value * self.cast(alpha, value))
        with self.if_(beta.ne(0.0)):
            old = self.load(address, dtype, value.lanes, offset, mask)
            result.set(self.fma(old, self.cast(beta, value), result.value))
        self.store(result.value, address, dtype, offset, mask)

    def _addresses(self, address: IntLike, offsets: Int) -> ir.Value:
        """A vector of pointers; 32-bit offsets stay so, which makes for faster gathers."""
        base = self.ir.inttoptr(self.to_ir(address), I8.as_pointer())
        pointers = self.ir.gep(base, [offsets.ir], source_etype=I8)
        pointers.type = ir.VectorType(I8.as_pointer(), offsets.lanes)
        return pointers

    def gather(self, address: IntLike, offsets: Int, dtype: str, mask: Mask | None = None) -> Any:
        """Lane i reads address + offsets[i] (bytes); lanes that the mask leaves out read as 0."""
        stored, lanes = TYPES[str(dtype)][0], offsets.lanes
        type_, mask = ir.VectorType(stored, lanes), mask or self.lane_mask([True] * lanes)
        arguments = [self._addresses(address, offsets), ir.Constant(I32, SIZES[stored]), mask.ir]
        name = f"llvm.masked.gather.{mangled(type_)}.v{lanes}p0"
        raw = self.external(name, type_, *arguments, constant(type_, 0))
        return self._widen(raw, str(dtype))

    def scatter(
        self, value: Any, address: IntLike, offsets: Int, dtype: str, mask: Mask | None = None
    ) -> None:
        """Lane i writes address + offsets[i] (bytes), in lane order."""
        raw, lanes = self._narrow(value, str(dtype)), offsets.lanes
        mask = mask or self.lane_mask([True] * lanes)
        align = ir.Constant(I32, SIZES[TYPES[str(dtype)][0]])
        name = f"llvm.masked.scatter.{mangled(raw.type)}.v{lanes}p0"
        self.external(name, VOID, raw, self._addresses(address, offsets), align, mask.ir)

    def prefetch(self, address: IntLike, offset: IntLike = 0, level: int = 1) -> None:
        """Ask for the cache line at address + offset, for reading, into this level and those
        behind it. No address is wrong: what is not mapped is not fetched."""
        flags = [ir.Constant(I32, n) for n in (0, 4 - level, 1)]
        self.external("llvm.prefetch.p0", VOID, self.pointer(address, I8, offset), *flags)

    def _widen(self, raw: ir.Value, dtype: str) -> Any:
        if dtype == "bfloat16":
            return Float(self, halffloat.widen_bfloat16(self.ir, raw))
        if dtype == "float16":
            return Float(self, halffloat.widen_float16(self.ir, raw, self.target.has_f16))
        if dtype == "uint8":
            return Int(self, self.ir.zext(raw, like(raw.type, I32)))
        return (Float if dtype in ("float32", "float64") else Int)(self, raw)

    def _narrow(self, value: Any, dtype: str) -> ir.Value:
        if dtype == "bfloat16":
            return halffloat.narrow_bfloat16(self.ir, value.ir)
        if dtype == "float16":
            return halffloat.narrow_float16(self.ir, value.ir, self.target.has_f16)
        if dtype == "uint8":
            return self.ir.trunc(value.ir, like(value.type, I8))
        return value.ir


def _only_lane(mask: Mask | None) -> int | None:
    """The one lane of a constant mask that has one."""
    if mask is None or not isinstance(mask.ir, ir.Constant):
        return None
    flags = [flag.constant for flag in mask.ir.constant]
    return flags.index(1) if flags.count(1) == 1 else None
