"""Activations and tensor operations of any shape: one loop nest, many row functions.

The operands' axes are sorted and joined at run time, as elementwise.collapse does while building
a kernel. Threads share out rows (or pieces of long ones) and call, through a pointer, the row
function of the operation: vectors where every operand is contiguous along the row, else gathers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from bedstone.backends.cpu import activation
from bedstone.backends.cpu.builder import F64, I64, Float, Int
from bedstone.backends.cpu.irtypes import VOID, itemsize
from bedstone.backends.cpu.library import checks
from bedstone.backends.cpu.library.interface import DTYPES, MAX_RANK
from bedstone.backends.cpu.library.language import WORD, LibraryBuilder, Tensor, all_of, ceil_div
from bedstone.backends.cpu.values import Mask
from bedstone.spec.activation import KINDS

Body = Callable[[LibraryBuilder, list[Any], Any, Any], Any]  # (k, inputs, a, b) -> value

UNIT_ELEMENTS = 16 * 1024  # of a task
OPERANDS = 3  # y and up to two inputs; one that is missing repeats y
# A nest in memory: the number of axes, dims, then for each operand its offset and strides.
DIMS = WORD
OPERAND = DIMS + MAX_RANK * WORD
OPERAND_BYTES = (1 + MAX_RANK) * WORD
EVERY_AXIS = -1
NEST_BYTES = OPERAND + OPERANDS * OPERAND_BYTES
# Arguments of a row function: addresses y, p, q; count; their strides in bytes; alpha, beta, a, b.
ROW_TYPES = [I64] * (2 * OPERANDS + 1) + [F64] * 4


class Nest:
    """Collapsed axes in memory, outermost first; strides and offsets in elements."""

    def __init__(self, k: LibraryBuilder, address: Int) -> None:
        self.k, self.address = k, address

    @property
    def rank(self) -> Int:
        return self.k.word(self.address)

    def dim(self, axis: Any) -> Int:
        """The size along an axis."""
        return self.k.word(self.address + DIMS, axis)

    def offset(self, operand: int) -> Int:
        """From the operand's first element to the nest's first one."""
        return self.k.word(self.address + OPERAND + operand * OPERAND_BYTES)

    def stride(self, operand: int, axis: Any) -> Int:
        """The operand's stride along an axis."""
        return self.k.word(self.address + OPERAND + operand * OPERAND_BYTES + WORD, axis)

    def put(self, axis: Any, dim: Int, strides: list[Int]) -> None:
        """Write one axis."""
        self.k.put(dim, self.address + DIMS, axis)
        for operand, stride in enumerate(strides):
            at = self.address + OPERAND + operand * OPERAND_BYTES + WORD
            self.k.put(stride, at, axis)


def emit_nest(k: LibraryBuilder) -> None:
    """collapse(nest, tensors of y, p, q, axes): the fewest axes that all share, in the order of
    y's memory, y's strides positive; of the axes whose bits are set. An input's axes of size 1
    are repeated."""
    with k.answering("collapse", 2 + OPERANDS) as (address, *tensors, wanted):
        nest, descs = Nest(k, address), [Tensor(k, t) for t in tensors]
        y, rank = descs[0], k.variable(0)
        offsets = [k.variable(0) for _ in descs]

        def is_wanted(axis: Int) -> Mask:
            return y.dim(axis).ne(1) & ((wanted >> axis) & 1).ne(0)

        with k.loop(0, y.rank) as axis, k.if_(is_wanted(axis)):
            dim, strides = y.dim(axis), []
            backwards = y.stride(axis) < 0
            for desc, offset in zip(descs, offsets):
                stride = k.select(desc.dim(axis).eq(1), 0, desc.stride(axis))
                turned = k.select(backwards, stride * (dim - 1), 0)
                offset.set(offset.value + turned)
                strides.append(k.select(backwards, -stride, stride))
            # Insert behind the axes of larger strides.
            place = k.variable(rank.value)
            moving = k.variable(1)
            with k.while_(lambda: (place.value > 0) & moving.value.ne(0)):
                before = place.value - 1
                with k.if_else(nest.stride(0, before) < strides[0]) as (smaller, larger):
                    with smaller:
                        moved = [nest.stride(o, before) for o in range(OPERANDS)]
                        nest.put(place.value, nest.dim(before), moved)
                        place.set(before)
                    with larger:
                        moving.set(k.as_int(0))
            nest.put(place.value, dim, strides)
            rank.set(rank.value + 1)
        with k.if_(rank.value.eq(0)):
            one = k.as_int(1)
            nest.put(0, one, [one] * OPERANDS)
            rank.set(one)
        last = k.variable(0)
        with k.loop(1, rank.value) as axis:
            dim = nest.dim(axis)
            strides = [nest.stride(o, axis) for o in range(OPERANDS)]
            before = [nest.stride(o, last.value) for o in range(OPERANDS)]
            alike = all_of([b.eq(s * dim) for b, s in zip(before, strides)])
            with k.if_else(alike) as (join, apart):
                with join:
                    nest.put(last.value, nest.dim(last.value) * dim, strides)
                with apart:
                    last.set(last.value + 1)
                    nest.put(last.value, dim, strides)
        k.put(last.value + 1, address)
        for operand, offset in enumerate(offsets):
            k.put(offset.value, address + OPERAND + operand * OPERAND_BYTES)
        k.give(0)


def emit_run(k: LibraryBuilder) -> None:
    """run_rows(row function, bytes of an element, tensors y, p, q, their data, threads, alpha,
    beta, a, b): the whole operation."""
    with k.function("run_rows", *[I64] * 9, *[F64] * 4) as arguments:
        row, item, *rest = arguments
        tensors, data, threads, scalars = rest[:3], rest[3:6], rest[6], rest[7:]
        address = k.alloca(NEST_BYTES)
        k.ask("collapse", address, *tensors, EVERY_AXIS)
        nest = Nest(k, address)
        inner = nest.rank - 1
        length, rows = nest.dim(inner), k.variable(1)
        with k.loop(0, inner) as axis:
            rows.set(rows.value * nest.dim(axis))
        bases = [d + nest.offset(o) * item for o, d in enumerate(data)]
        steps = [nest.stride(o, inner) * item for o in range(OPERANDS)]
        # A unit is some rows, or a piece of one.
        rows_each = k.max(k.as_int(UNIT_ELEMENTS) // k.max(length, 1), 1)
        pieces = k.max(ceil_div(length, UNIT_ELEMENTS), 1)
        total = rows.value
        tasks = ceil_div(total, rows_each) * pieces
        with k.job(tasks, threads) as job, job.each_task() as task:
            first = task // pieces * rows_each
            begin = task % pieces * length // pieces
            end = (task % pieces + 1) * length // pieces
            with k.loop(first, k.min(first + rows_each, total)) as number:
                left = k.variable(number)
                places = [k.variable(b + begin * s) for b, s in zip(bases, steps)]
                with k.loop(0, inner) as i:
                    axis = inner - 1 - i
                    index = left.value % nest.dim(axis)
                    left.set(left.value // nest.dim(axis))
                    for operand, place in enumerate(places):
                        place.set(place.value + index * nest.stride(operand, axis) * item)
                function = k.ir.inttoptr(row.ir, ir.FunctionType(VOID, ROW_TYPES).as_pointer())
                values = [*(p.value for p in places), end - begin, *steps, *scalars]
                k.ir.call(function, [v.ir for v in values])


def emit_row(
    k: LibraryBuilder, name: str, dtype: str, inputs: int, body: Body, blended: bool = True
) -> None:
    """A row function: y = alpha * body(p, q) + beta * y over `count` elements."""
    item, lanes = itemsize(dtype), k.lanes(dtype)
    with k.function(name, *ROW_TYPES) as arguments:
        y, *sources = arguments[:OPERANDS]
        count, *steps = arguments[OPERANDS : 2 * OPERANDS + 1]
        alpha, beta, a, b = arguments[2 * OPERANDS + 1 :]
        model = k.constant(0.0, dtype, lanes)
        alpha, a, b = (k.cast(v, model) for v in (alpha, a, b))
        y_step, *source_steps = steps
        sources, source_steps = sources[:inputs], source_steps[:inputs]

        def vectors(contiguous: bool) -> None:
            offsets = [k.iota(lanes) * k.splat(s, lanes) for s in (y_step, *source_steps)]

            def load(at: Int, number: int, step: Int, i: Any, mask: Any) -> Any:
                at = at + i * step
                if contiguous:
                    return k.load(at, dtype, lanes, mask=mask)
                return k.gather(at, offsets[number], dtype, mask)

            def one(i: Any, mask: Any) -> None:
                values = [
                    load(s, n + 1, step, i, mask)
                    for n, (s, step) in enumerate(zip(sources, source_steps))
                ]
                result = k.variable(body(k, values, a, b) * alpha)
                if blended:
                    with k.if_(beta.ne(0.0)):
                        old = load(y, 0, y_step, i, mask)
                        result.set(k.fma(old, k.cast(beta, model), result.value))
                at = y + i * y_step
                if contiguous:
                    k.store(result.value, at, dtype, mask=mask)
                else:
                    k.scatter(result.value, at, offsets[0], dtype, mask)

            even = count - count % lanes
            with k.loop(0, even, lanes) as i:
                one(i, None)
            with k.if_(even < count):
                one(even, k.first_lanes(count - even, lanes))

        with k.if_else(all_of([s.eq(item) for s in (y_step, *source_steps)])) as (near, apart):
            with near:
                vectors(True)
            with apart:
                vectors(False)


def function_address(k: LibraryBuilder, name: str) -> Int:
    """The address of an emitted function."""
    return Int(k, k.ir.ptrtoint(k.module.globals[name], I64))


def run(
    k: LibraryBuilder,
    names: list[str],
    tensors: list[Int],
    data: list[Int],
    threads: Int,
    scalars: list[Any],
) -> None:
    """Call run_rows with the row function of the first tensor's dtype; names[dtype]."""
    tensors = tensors + [tensors[0]] * (OPERANDS - len(tensors))
    data = data + [data[0]] * (OPERANDS - len(data))
    is_single = Tensor(k, tensors[0]).dtype.eq(0)
    row = k.select(is_single, *(function_address(k, name) for name in names))
    numbers = [s if isinstance(s, Float) else k.constant(s, "float64") for s in scalars]
    with k.if_(k.ask("size_of", tensors[0]) > 0):
        k.call("run_rows", row, k.select(is_single, 4, 8), *tensors, *data, threads, *numbers)


# Tensor operations --------------------------------------------------------------------------------


def emit_tensor_operations(k: LibraryBuilder) -> None:
    """bs_tensor_transform, _add, _set and _scale."""

    def copy(k: LibraryBuilder, values: list[Any], a: Any, b: Any) -> Any:
        return values[0]

    for dtype in DTYPES:
        emit_row(k, f"copy_{dtype}", dtype, 1, copy)
        emit_row(k, f"scale_{dtype}", dtype, 1, copy, blended=False)
        emit_row(
            k, f"set_{dtype}", dtype, 0,
            lambda k, values, a, b, dtype=dtype: k.constant(1.0, dtype, k.lanes(dtype)),
        )  # fmt: skip

    def names(kind: str) -> list[str]:
        return [f"{kind}_{dtype}" for dtype in DTYPES]

    for name, source in (("bs_tensor_transform", "x"), ("bs_tensor_add", "b")):
        with k.api(name) as call:
            x, y = call[source], call["y"]
            checks.check_tensors(k, [x], y)
            if source == "x":
                checks.require_same_dims(k, x, y)
            else:
                with k.loop(0, Tensor(k, y).rank) as axis:
                    dim = Tensor(k, x).dim(axis)
                    k.require(dim.eq(1) | dim.eq(Tensor(k, y).dim(axis)), "mismatch")
            data = [call["y_data"], call[source + "_data"]]
            checks.check_data(k, (y, data[0]), (x, data[1]))
            threads = checks.check_threads(k, call["threads"])
            run(k, names("copy"), [y, x], data, threads, [call["alpha"], call["beta"], 0.0, 0.0])
    for name, kind in (("bs_tensor_set", "set"), ("bs_tensor_scale", "scale")):
        with k.api(name) as call:
            y, data = call["y"], call["y_data"]
            checks.check_tensors(k, [], y)
            checks.check_data(k, (y, data))
            threads = checks.check_threads(k, call["threads"])
            operands = [y, y] if kind == "scale" else [y]
            beta = call.get("beta", 0.0)
            numbers = [call["alpha"], beta, 0.0, 0.0]
            run(k, names(kind), operands, [data] * len(operands), threads, numbers)


# Activations --------------------------------------------------------------------------------------


def emit_activations(k: LibraryBuilder) -> None:
    """bs_activation_forward and _backward."""
    for dtype in DTYPES:
        for kind in KINDS:
            emit_row(
                k, f"{kind}_forward_{dtype}", dtype, 1,
                lambda k, v, a, b, kind=kind: activation.FORWARD[kind](v[0], a, b),
            )  # fmt: skip
            emit_row(
                k, f"{kind}_backward_{dtype}", dtype, 2,
                lambda k, v, a, b, kind=kind: v[1] * activation.derivative(kind, v[0], a, b),
            )  # fmt: skip
    for direction in ("forward", "backward"):
        with k.api(f"bs_activation_{direction}") as call:
            inputs = ["x"] if direction == "forward" else ["saved", "dy"]
            output = "y" if direction == "forward" else "dx"
            tensors = [call[output], *(call[i] for i in inputs)]
            data = [call[f"{n}_data"] for n in (output, *inputs)]
            checks.check_tensors(k, tensors[1:], tensors[0])
            for tensor in tensors[1:]:
                checks.require_same_dims(k, tensor, tensors[0])
            a, b = _check_activation(k, call["activation"])
            checks.check_data(k, *zip(tensors, data))
            threads = checks.check_threads(k, call["threads"])
            kind = k.member("bs_activation", call["activation"], "kind")
            for number, name in enumerate(KINDS):
                with k.if_(kind.eq(number)):
                    rows = [f"{name}_{direction}_{dtype}" for dtype in DTYPES]
                    run(k, rows, tensors, data, threads, [call["alpha"], call["beta"], a, b])


def _check_activation(k: LibraryBuilder, desc: Int) -> tuple[Float, Float]:
    """The coefficients, or return a status: the rules of spec.activation.ActivationDesc."""
    k.require_all(desc)
    kind = k.member("bs_activation", desc, "kind")
    k.require(kind.below(len(KINDS)), "bad_enum")
    a, b = (k.member("bs_activation", desc, name) for name in ("alpha", "beta"))
    number = {name: value for value, name in enumerate(KINDS)}
    unbounded = kind.eq(number["clip"]) | kind.eq(number["clipped_relu"])
    for value in (a, b):
        k.require(~value.is_nan(), "bad_coefficient")
        k.require((k.unary("fabs", value) < float("inf")) | unbounded, "bad_coefficient")
    with k.if_(kind.eq(number["clip"])):
        k.require(a <= b, "bad_coefficient")
    for name in ("clipped_relu", "leaky_relu", "elu"):
        with k.if_(kind.eq(number[name])):
            k.require(a >= 0.0, "bad_coefficient")
    return a, b
