"""Launching a compiled kernel through the driver, with its parameters laid out once.

`prepare` compiles the kernel for what its arguments are (pointers to operands, sizes, alpha and
beta) and returns a `Launch`: a call writes the addresses into the parameter block and launches,
about 8 microseconds in all. It allocates nothing, can be captured into a CUDA graph, and may be
shared by threads. Binaries compiled for 16-byte aligned addresses are the rule; when a call
brings another address, a binary without that assumption is compiled and used.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bedstone.backends.triton import compile, driver, runtime
from bedstone.plan import log
from bedstone.plan.algorithm import Kernel
from bedstone.plan.device import Device
from bedstone.spec.activation import ActivationDesc
from bedstone.spec.dtypes import DType

ALIGNMENT = 16  # bytes: the widest load of a thread, and what TMA asks of a base address
COMPILE_ONLY = -1  # index of a device that is not here: kernels are compiled, not loaded
MAP_BYTES = 128  # a CUtensorMap, and the alignment that it needs


@dataclass(frozen=True)
class Pointer:
    """The address of operand number `operand` plus `offset` bytes."""

    operand: int
    dtype: DType
    offset: int = 0


@dataclass(frozen=True)
class Scratch:
    """The address of the workspace plus `offset` bytes."""

    dtype: DType
    offset: int = 0


@dataclass(frozen=True)
class Scalar:
    """A number passed at every launch. `divisor` divides it (told to the compiler)."""

    value: float
    type: str = "i32"  # "i32", "i64", "fp32" or "fp64"
    divisor: int = 1


@dataclass(frozen=True)
class Integers:
    """A tuple of integers (dims, strides). Zeros and ones are baked in, so that missing axes cost
    nothing and the compiler sees unit strides; `divisor` divides all the others."""

    values: tuple[int, ...]
    type: str = "i32"
    divisor: int = 1

    def __post_init__(self) -> None:
        if any(v not in (0, 1) and v % self.divisor for v in self.values):
            raise ValueError(f"{self.divisor} does not divide all of {self.values}")

    @property
    def variable(self) -> tuple[int, ...]:
        """Positions of the values that are passed at run time."""
        return tuple(i for i, v in enumerate(self.values) if v not in (0, 1))


@dataclass(frozen=True)
class Factor:
    """alpha or beta of the call."""

    name: str
    type: str = "fp32"


@dataclass(frozen=True)
class TensorMap:
    """A TMA map over an operand (or, operand None, over the workspace), `offset` bytes in.

    dims, strides  of the viewed tensor, outermost first, strides in elements, the last one 1
    box            elements copied at once
    layout         Gluon's shared-memory layout of a box
    steps          element strides of the box (2 takes every other element)
    seen           the box as the kernel declares it, where that is another shape of as many
                   elements: one binary then serves boxes of every shape
    """

    operand: int | None
    dtype: DType
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    layout: Any
    steps: tuple[int, ...] | None = None
    offset: int = 0
    seen: tuple[int, ...] | None = None

    @property
    def type(self) -> str:
        """Triton's type of the argument."""
        box = list(self.seen or self.box)
        return f"tensordesc<{compile.ELEMENT[self.dtype]}{box},{self.layout!r}>"


Argument = Pointer | Scratch | Scalar | Integers | Factor | TensorMap
_STORAGE = {
    "i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float, "fp64": ctypes.c_double,
}  # fmt: skip


def factors(dtype: DType) -> dict[str, Factor]:
    """The arguments `alpha` and `beta` in the type in which the dtype is accumulated."""
    kind = compile.ELEMENT[dtype.accumulator]
    return {"alpha": Factor("alpha", kind), "beta": Factor("beta", kind)}


def activation_arguments(activation: ActivationDesc | None, dtype: DType) -> dict[str, Scalar]:
    """The coefficients `act_a` and `act_b` of pointwise.activate."""
    kind = compile.ELEMENT[dtype.accumulator]
    a, b = (activation.alpha, activation.beta) if activation is not None else (0.0, 0.0)
    return {"act_a": Scalar(a, kind), "act_b": Scalar(b, kind)}


def accumulator(dtype: DType) -> Any:
    """Triton's type in which the dtype is summed, as a constant of kernels."""
    import triton.language as tl

    return tl.float64 if dtype is DType.float64 else tl.float32


def source_of(
    function: Any,
    arguments: Mapping[str, Argument],
    constants: Mapping[str, Any],
    options: Mapping[str, Any],
    aligned: bool = True,
) -> compile.Source:
    """What `prepare` compiles for these arguments."""
    signature: dict[str, Any] = {}
    divisors: dict[Any, int] = {}
    constants = dict(constants)
    for name, argument in arguments.items():
        if isinstance(argument, (Pointer, Scratch)):
            signature[name] = "*" + compile.ELEMENT[argument.dtype]
            offset_aligned = argument.offset % ALIGNMENT == 0
            divisors[name] = ALIGNMENT if aligned and offset_aligned else argument.dtype.itemsize
        elif isinstance(argument, Integers):
            variable = argument.variable
            places = range(len(argument.values))
            signature[name] = tuple(argument.type if i in variable else "constexpr" for i in places)
            constants |= {(name, i): argument.values[i] for i in places if i not in variable}
            divisors |= {(name, i): argument.divisor for i in variable}
        else:
            signature[name] = argument.type
            divisors[name] = getattr(argument, "divisor", 1)
    return compile.Source(function, signature, constants, divisors, options)


def prepare(
    device: Device,
    function: Any,
    grid: Sequence[int],
    arguments: Mapping[str, Argument],
    constants: Mapping[str, Any],
    *,
    fallback: Callable[[], Kernel] | None = None,
    overlaps: bool = False,
    **options: Any,
) -> Kernel:
    """The kernel `function` over `grid` programs (x, at most 2^31 - 1, then y, z up to 65535).

    arguments  every runtime argument by name;  constants  every constexpr by name
    options    num_warps, num_stages, ... as Triton takes them
    fallback   makes what runs when an address is not 16-byte aligned; by default the same kernel
               compiled without that assumption
    overlaps   the kernel itself waits for the one before it on the stream (griddepcontrol.wait,
               before it touches memory), so that it may start while that one ends

    A grid without programs gives a kernel that does nothing. Raises CompileError.
    """
    grid = (*grid, 1, 1)[:3]
    if 0 in grid:
        return nothing
    if runtime.interpreting():
        from bedstone.backends.triton.interpreter import InterpretedLaunch

        return InterpretedLaunch(function, grid, arguments, constants)

    def unaligned() -> Kernel:
        source = source_of(function, arguments, constants, options, aligned=False)
        return Launch(device, source, grid, arguments, None, overlaps)

    source = source_of(function, arguments, constants, options)
    return Launch(device, source, grid, arguments, fallback or unaligned, overlaps)


def target_device(architecture: str) -> Device:
    """A device that is not here: `build` on it compiles for the architecture and loads nothing."""
    return Device("cuda", COMPILE_ONLY, "ahead of time", architecture)


def launches_of(kernel: Kernel) -> tuple[Launch, ...]:
    """The launches that a built kernel makes, each with its `source` and `binary`."""
    if isinstance(kernel, Launch):
        return (kernel,)
    return tuple(found for k in getattr(kernel, "launches", ()) for found in launches_of(k))


def nothing(
    pointers: Sequence[int], workspace: int, alpha: float, beta: float, stream: int
) -> None:
    """The launch of an empty grid."""


class Chain:
    """Several launches, one after the other on the same stream, as one kernel."""

    def __init__(self, launches: Sequence[Kernel], description: str = "") -> None:
        self.launches = tuple(launches)
        self.description = description

    def __call__(
        self, pointers: Sequence[int], workspace: int, alpha: float, beta: float, stream: int
    ) -> None:
        for launch in self.launches:
            launch(pointers, workspace, alpha, beta, stream)


class Launch:
    """A loaded kernel with its parameter block. See `prepare`."""

    def __init__(
        self,
        device: Device,
        source: compile.Source,
        grid: Sequence[int],
        arguments: Mapping[str, Argument],
        fallback: Callable[[], Kernel] | None,
        overlaps: bool = False,
    ) -> None:
        self.source = source
        self.binary = compile.binary(source, device.architecture)
        self.device = device
        self.description = describe(self.binary, grid)
        self._make_fallback, self._fallback = fallback, None
        self._lock = threading.Lock()
        self._lay_out([(n, arguments[n]) for n in source.function.arg_names if n in arguments])
        self._config = driver.LaunchConfig(
            *(grid[0] * self.binary.num_ctas, grid[1], grid[2]),
            *(32 * self.binary.num_warps, 1, 1, self.binary.shared),
        )
        self._set_attributes(overlaps)
        if device.index != COMPILE_ONLY:
            self._load()

    def _lay_out(self, arguments: Sequence[tuple[str, Argument]]) -> None:
        """One 8-byte cell a parameter, in the order of the binary; maps have buffers apart."""
        self._keep: list[Any] = []
        self._maps: list[tuple[TensorMap, Mapping[str, Any], int]] = []
        addresses: list[int] = []
        cells: list[tuple[Argument, ctypes.c_uint64]] = []
        meta = iter(self.binary.maps)
        for _, argument in arguments:
            if isinstance(argument, TensorMap):
                raw = ctypes.create_string_buffer(2 * MAP_BYTES)
                address = ctypes.addressof(raw) + -ctypes.addressof(raw) % MAP_BYTES
                self._keep.append(raw)
                self._maps.append((argument, next(meta), address))
                addresses.append(address)
                addresses += [self._cell(ctypes.c_int32(d)) for d in argument.dims]
                addresses += [self._cell(ctypes.c_int64(s)) for s in argument.strides]
            elif isinstance(argument, Integers):
                kind = _STORAGE[argument.type]
                addresses += [self._cell(kind(argument.values[i])) for i in argument.variable]
            elif isinstance(argument, Scalar):
                addresses.append(self._cell(_STORAGE[argument.type](argument.value)))
            else:
                cell = ctypes.c_uint64(0)
                if isinstance(argument, Factor):
                    cell = _STORAGE[argument.type](0)
                cells.append((argument, cell))
                addresses.append(self._cell(cell))
        addresses += [self._cell(ctypes.c_uint64(0)) for _ in range(2)]  # Triton's own scratch
        self._parameters = (ctypes.c_void_p * len(addresses))(*addresses)
        self._pointers = [(c, a.operand, a.offset) for a, c in cells if isinstance(a, Pointer)]
        self._scratch = [(c, a.offset) for a, c in cells if isinstance(a, Scratch)]
        self._alpha = [c for a, c in cells if isinstance(a, Factor) and a.name == "alpha"]
        self._beta = [c for a, c in cells if isinstance(a, Factor) and a.name == "beta"]
        self._map_operands = [(address, m.operand, m.offset) for m, _, address in self._maps]

    def _cell(self, value: Any) -> int:
        self._keep.append(value)
        return ctypes.addressof(value)

    def _set_attributes(self, overlaps: bool) -> None:
        found: list[tuple[int, list[int]]] = []
        if self.binary.num_ctas > 1:
            found.append((driver.CLUSTER_DIMENSION, [self.binary.num_ctas, 1, 1]))
            found.append((driver.CLUSTER_SCHEDULING, [1]))  # spread
        if overlaps:
            found.append((driver.PROGRAMMATIC_SERIALIZATION, [1]))
        attributes = (driver.LaunchAttribute * len(found))()
        for attribute, (number, values) in zip(attributes, found):
            attribute.id = number
            attribute.value[: len(values)] = values
        self._keep.append(attributes)
        self._config.attributes = ctypes.addressof(attributes) if found else None
        self._config.attribute_count = len(found)

    def _load(self) -> None:
        if self.binary.scratch:
            raise compile.CompileError(f"{self.source.name} wants scratch memory of its own")
        cuda = driver.library()
        self._function = driver.load(
            self.binary.code, self.binary.name, self.binary.shared, self.device.index
        )
        with driver.current(self.device.index):
            for argument, meta, address in self._maps:
                encode_map(argument, meta, address)
        self._launch, self._replace = cuda.cuLaunchKernelEx, cuda.cuTensorMapReplaceAddress
        self._config_pointer = ctypes.byref(self._config)

    def __call__(
        self, pointers: Sequence[int], workspace: int, alpha: float, beta: float, stream: int
    ) -> None:
        with self._lock:
            bits = 0
            for cell, operand, offset in self._pointers:
                address = pointers[operand] + offset
                cell.value = address
                bits |= pointers[operand]
            for address, operand, offset in self._map_operands:
                base = workspace if operand is None else pointers[operand]
                bits |= base
                if not base % ALIGNMENT and self._replace(address, base + offset):
                    with driver.current(self.device.index):  # the thread has no context yet
                        driver.check("cuTensorMapReplaceAddress", address, base + offset)
            for cell, offset in self._scratch:
                cell.value = workspace + offset
                bits |= workspace
            for cell in self._alpha:
                cell.value = alpha
            for cell in self._beta:
                cell.value = beta
            if not bits % ALIGNMENT or self._make_fallback is None:
                self._config.stream = stream or runtime.DefaultStream.handle
                code = self._launch(self._config_pointer, self._function, self._parameters, None)
                if code:
                    self._launch_in_context()
                return
            if self._fallback is None:
                log.info("an address is not %d-byte aligned: recompiling", ALIGNMENT)
                self._fallback = self._make_fallback()
        self._fallback(pointers, workspace, alpha, beta, stream)

    def _launch_in_context(self) -> None:
        """A first launch may have failed because this thread has no context, or another's."""
        with driver.current(self.device.index):
            driver.check(
                "cuLaunchKernelEx", self._config_pointer, self._function, self._parameters, None
            )


# Where cuda.h's CUtensorMapDataType differs from the numbers in the compiler's metadata.
_MAP_TYPES = {8: 10, 9: 8, 10: 9}


def encode_map(argument: TensorMap, meta: Mapping[str, Any], address: int) -> None:
    """Fill the CUtensorMap at `address`; its base address is replaced at every call."""
    rank = len(argument.dims)
    size = meta["elem_size"]
    dims = (ctypes.c_uint64 * rank)(*reversed(argument.dims))
    strides = (ctypes.c_uint64 * rank)(*(s * size for s in reversed(argument.strides[:-1])), 0)
    steps = argument.steps or (1,) * rank
    counts = (*argument.box[:-1], meta["block_size"][-1]) if argument.seen else meta["block_size"]
    # The driver counts a box in elements passed over, not in elements taken.
    box = (ctypes.c_uint32 * rank)(
        *(n * step for n, step in zip(reversed(counts), reversed(steps)))
    )
    steps = (ctypes.c_uint32 * rank)(*reversed(steps))
    kind = _MAP_TYPES.get(meta["elem_type"], meta["elem_type"])
    no_interleave, promote_128_bytes, fill_zero = 0, 2, 0
    driver.check(
        "cuTensorMapEncodeTiled",
        ctypes.c_void_p(address), kind, rank, ctypes.c_void_p(MAP_BYTES), dims, strides, box, steps,
        no_interleave, meta["swizzle"], promote_128_bytes, fill_zero,
    )  # fmt: skip


def describe(binary: compile.Binary, grid: Sequence[int]) -> str:
    """One line for explain()."""
    programs = grid[0] * grid[1] * grid[2]
    return (
        f"{binary.name} for {binary.architecture}: {programs} programs of {binary.num_warps} warps,"
        f" {binary.shared} bytes of shared memory"
    )
