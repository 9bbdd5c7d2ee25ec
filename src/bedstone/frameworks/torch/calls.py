"""One call of one of PyTorch's operators: from its arguments to plans, remembered by their layout.

An `Operator` says how to describe a call as problems (`describe`). What comes out, plans or a
reason for leaving the call to PyTorch, is kept by the shapes, strides, dtypes and settings of the
arguments: a *kind* of call. A repeated call costs a look-up, the allocation of its results and the
kernels.

The first call of every kind runs PyTorch's kernel: its errors are raised as they are, and the
strides of its results are taken over. A kind is compiled once PyTorch's kernel has served it so
often that compiling can have paid (`patience`), and is kept where it is measured to be quicker.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bedstone import InvalidDescriptor, Plan, Problem, TensorDesc
from bedstone.frameworks.planning import compiled_plan
from bedstone.frameworks.torch import report
from bedstone.frameworks.torch.recent import Recent

KINDS_KEPT = 512  # of calls of an operator: those used last (a compiled one holds 50 to 200 KiB)
# A pointwise call on fewer elements is over sooner than Python has prepared it.
LEAST_ELEMENTS = 1 << 15
# `find`: calls of each side that are timed, and seconds that may go into them.
TRIALS, TRIAL_SECONDS = 5, 0.1
SETTLE_SECONDS = 0.012  # OpenMP's threads keep spinning for some milliseconds after a call
# `patience`: what a kernel takes to compile, and what a CPU's thread computes and moves a second,
# roughly: numbers, not measurements, so that a program's every run compiles at the same call.
COMPILE_SECONDS = 0.25
FLOPS_OF_A_THREAD, BYTES_A_SECOND = 3e10, 1e10
FEWEST_CALLS, MOST_CALLS = 2, 32
SLOWER = "measured: PyTorch's kernel is quicker"
WAITING = "compiled when it has been called more often"


class Native(Exception):
    """This call is left to PyTorch; the message says why."""


@dataclass(frozen=True)
class Step:
    """A problem, and the tensors of its operands: numbers of arguments, or ~n for result n."""

    problem: Problem
    operands: tuple[int, ...]
    alpha: float = 1.0
    beta: float = 0.0


@dataclass(frozen=True)
class Result:
    """Memory of a result."""

    dims: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def like(cls, tensor: Tensor) -> Result:
        """Of the same dims, strides and dtype."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)


class Call:
    """The arguments of a call and the results it will have, as `describe` sees them."""

    def __init__(
        self, arguments: Sequence[Any], keywords: dict[str, Any], results: list[Result | None]
    ) -> None:
        self.arguments, self.keywords, self.results = arguments, keywords, results

    def __getitem__(self, number: int) -> Any:
        return self.arguments[number]

    def has(self, number: int) -> bool:
        """Whether an optional tensor, or a result, is there."""
        if number >= 0:
            return self.arguments[number] is not None
        return ~number < len(self.results) and self.results[~number] is not None

    def desc(self, number: int, rank: int = 0) -> TensorDesc:
        """The descriptor of an argument, or of result ~number; with `rank`, of at least that rank,
        an image without a batch being a batch of one."""
        if number >= 0:
            tensor = self.arguments[number]
            dims, strides, dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype
        else:
            result = self.results[~number]
            if result is None:
                raise Native("a result that PyTorch does not give")
            dims, strides, dtype = result.dims, result.strides, result.dtype
        if not dims:
            raise Native("a tensor of no dimension")
        if len(dims) == rank - 1:
            dims, strides = (1, *dims), (dims[0] * strides[0], *strides)
        if rank and len(dims) != rank:
            raise Native(f"a tensor of {len(dims)} dims")
        return TensorDesc(dims, strides, _dtype(dtype))

    @property
    def math(self) -> str:
        """The accuracy that PyTorch's settings ask of a convolution."""
        first = self.arguments[0]
        tf32 = torch.backends.cudnn.allow_tf32 and first.dtype is torch.float32
        return "tf32" if tf32 and first.device.type == "cuda" else "ieee"


_DTYPES = {
    torch.float32: "float32", torch.float64: "float64", torch.float16: "float16",
    torch.bfloat16: "bfloat16", torch.int64: "int64",
}  # fmt: skip


def _dtype(dtype: torch.dtype) -> Any:
    name = _DTYPES.get(dtype)
    if name is None:
        raise Native(f"dtype {str(dtype).removeprefix('torch.')}")
    return name


Describe = Callable[[Call], Sequence[Step]]


@dataclass(frozen=True)
class Ready:
    """A kind of call that is ours: its plans, and the results to allocate."""

    steps: tuple[tuple[Plan, tuple[int, ...], float, float], ...]
    results: tuple[Result | int | None, ...]  # a number: the argument that is returned
    single: bool
    workspace: int
    device: torch.device
    count: Callable[[], None]  # for the report

    @property
    def algorithms(self) -> str:
        """Their names."""
        return algorithms(plan for plan, *_ in self.steps)

    @property
    def problems(self) -> str:
        """Their lines."""
        return "; ".join(str(plan.problem) for plan, *_ in self.steps)

    def run(self, arguments: Sequence[Any]) -> Any:
        """Allocate the results and fill them."""
        device = self.device
        results: list[Any] = []
        for made in self.results:
            if type(made) is Result:
                made = torch.empty_strided(made.dims, made.strides, dtype=made.dtype, device=device)
            elif made is not None:
                made = arguments[made]
            results.append(made)
        stream, workspace = 0, 0
        if device.type != "cpu":
            stream = torch.cuda.current_stream(device).cuda_stream
        if self.workspace:
            memory = workspace_of(self.workspace, device)
            workspace = memory.data_ptr()
        for plan, operands, alpha, beta in self.steps:
            pointers = [(arguments[i] if i >= 0 else results[~i]).data_ptr() for i in operands]
            plan.kernel(pointers, workspace, alpha, beta, stream)
        return results[0] if self.single else tuple(results)


def algorithms(plans: Iterable[Plan]) -> str:
    """Their names, in order."""
    return ", ".join(plan.algorithm for plan in plans)


@dataclass(frozen=True)
class Left:
    """A kind of call that is left to PyTorch."""

    reason: str
    count: Callable[[], None]  # for the report


def leave(name: str, reason: str) -> Left:
    """Calls of that operator, for that reason."""
    return Left(reason, report.counter(name, False, reason))


@dataclass
class Waiting:
    """A kind of call that can be ours, and has not been called often enough to compile it."""

    steps: tuple[Step, ...]
    results: tuple[Result | int | None, ...]
    single: bool
    device: torch.device
    count: Callable[[], None]  # for the report
    left: int = 0  # calls that PyTorch's kernel still serves

    def compiled(self, name: str) -> Ready | Left:
        """With its plans, or the reason why there are none; `name` is the operator's."""
        device = self.device
        where = "cpu" if device.type == "cpu" else f"{device.type}:{device.index or 0}"
        found = []
        for step in self.steps:
            plan = compiled_plan(step.problem, where)
            if isinstance(plan, str):
                return leave(name, plan)
            found.append((plan, step.operands, step.alpha, step.beta))
        workspace = max((plan.workspace_size for plan, *_ in found), default=0)
        count = report.counter(name, True, algorithms(plan for plan, *_ in found))
        return Ready(tuple(found), self.results, self.single, workspace, device, count)


def patience(kind: Waiting) -> int:
    """The call at which a kind is compiled: when PyTorch's kernel has run, by estimate, as long as
    compiling takes. What compiling saves is less than what PyTorch's kernel took, so that before
    that it cannot have paid; and a program of ever new shapes loses little."""
    if settings.compile_after is not None:
        return settings.compile_after
    if kind.device.type != "cpu":
        return FEWEST_CALLS
    flops = FLOPS_OF_A_THREAD * torch.get_num_threads()
    seconds = math.fsum(
        max(s.problem.flops / flops, s.problem.bytes / BYTES_A_SECOND) for s in kind.steps
    )
    calls = math.ceil(COMPILE_SECONDS / max(seconds, COMPILE_SECONDS / MOST_CALLS))
    return max(FEWEST_CALLS, calls)


class _Local(threading.local):
    memory: Tensor | None = None  # a workspace, kept: fresh memory costs more than most kernels
    native = False  # inside a kernel of PyTorch's, whose own calls are left alone


_local = _Local()


def workspace_of(size: int, device: torch.device) -> Tensor:
    """So many bytes for the plans that this thread runs, on a device."""
    if device.type != "cpu":  # PyTorch keeps that memory, stream by stream
        return torch.empty(size, dtype=torch.uint8, device=device)
    if _local.memory is None or _local.memory.numel() < size:
        _local.memory = None
        _local.memory = torch.empty(size, dtype=torch.uint8)
    return _local.memory


# Arguments by whose value a kind of call is known; lists are made tuples, tensors have a layout.
_VALUES = frozenset({type(None), bool, int, float, str, torch.dtype})


def kind_of(arguments: Sequence[Any], keywords: dict[str, Any]) -> Hashable:
    """What calls of one kind have in common: the layout of tensors, the value of all else, and the
    setting that `Call.math` reads."""
    key: list[Any] = [
        a
        if (kind := type(a)) in _VALUES
        else tuple(a)
        if kind is list
        else (a.shape, a.stride(), a.dtype, a.device)
        for a in arguments
    ]
    key += keywords.values()
    key.append(torch._C._get_cudnn_allow_tf32())
    return tuple(key)


@dataclass
class Settings:
    """What `patch` was asked for. `watch` sees every call that is ours (explain)."""

    least: int = LEAST_ELEMENTS
    find: bool = True
    compile_after: int | None = None
    active: Callable[[], bool] | None = None
    watch: Callable[[Operator, Ready, Callable[[], Any], Callable[[], Any]], None] | None = None


settings = Settings()


class Kernel:
    """PyTorch's own kernel of an operator.

    `inner` is another operator's, which `kernel` only calls with `more` arguments: to call that one
    at once spares a way through the dispatcher, and through our own entry there.
    """

    def __init__(self, kernel: Any, inner: Any = None, more: tuple[Any, ...] = ()) -> None:
        self.kernel, self.more = kernel, more
        self.boxed = (inner or kernel).call_boxed

    def call(self, keyset: Any, arguments: Sequence[Any], keywords: Any) -> Any:
        """Its result; what it calls in turn is left alone."""
        before, _local.native = _local.native, True
        try:
            return self.boxed(keyset, *arguments, *self.more, **keywords)
        finally:
            _local.native = before


class Operator:
    """One operator of PyTorch.

    name      "convolution", "relu_"
    describe  a call -> steps; raises Native or InvalidDescriptor where it is not ours
    results   for an operator that writes to an argument, so that PyTorch's kernel cannot be tried
              beside: the results of a call (a number for an argument that is returned); None to
              try it
    cpu_kind  a quicker `kind_of` for tensors that are all on the CPU
    least     calls on fewer elements are left to PyTorch at once, where the quicker side is looked
              for; None: as the caller of `patch` says, in any case
    """

    def __init__(
        self,
        name: str,
        describe: Describe,
        results: Callable[[Sequence[Any]], list[Result | int | None] | None] | None = None,
        cpu_kind: Callable[..., Hashable] | None = None,
        least: int | None = None,
    ) -> None:
        self.cpu_kind = cpu_kind
        self.name, self.describe, self.least = name, describe, least
        self._results = results
        self._kinds: Recent[Ready | Waiting | Left] = Recent(KINDS_KEPT)

    def forget(self) -> None:
        """Decide anew from now on."""
        self._kinds.clear()

    def bind(self, native: Kernel, on_cpu: bool) -> Callable[..., Any]:
        """What takes the place of PyTorch's kernel for tensors on that device: the operator's
        result, ours or PyTorch's.

        A call that is left to PyTorch costs what Python does here: no more names are looked up,
        functions called and objects made than must be.
        """
        boxed, theirs, more = native.kernel.call_boxed, native.boxed, native.more
        tracing, find, local = torch._C._get_tracing_state, self._kinds.get, _local
        cpu_kind = self.cpu_kind if on_cpu else None
        least = settings.least if self.least is None else self.least * settings.find
        small = leave(self.name, f"fewer than {least} elements").count
        outside = leave(self.name, "outside of the layers named").count

        def run(keyset: Any, *arguments: Any, **keywords: Any) -> Any:
            if local.native or tracing() is not None:
                # A traced graph must hold the operator itself, and what it calls.
                return boxed(keyset, *arguments, **keywords)
            if settings.active is not None and not settings.active():
                outside()
            elif least and arguments[0].numel() < least:
                small()
            else:
                key = cpu_kind(*arguments) if cpu_kind else kind_of(arguments, keywords)
                known = find(key)
                if known is None:
                    return self._first(native, keyset, arguments, keywords, key)
                if type(known) is Waiting:
                    known.left -= 1
                    if known.left <= 0 or settings.watch is not None:
                        known = self._decide(known, native, keyset, arguments, keywords, key)
                if type(known) is Ready:
                    return self._own(known, native, keyset, arguments, keywords)
                known.count()
            local.native = True
            try:
                return theirs(keyset, *arguments, *more, **keywords)
            finally:
                local.native = False

        return run

    def _own(
        self, known: Ready, native: Kernel, keyset: Any, arguments: Sequence[Any], keywords: Any
    ) -> Any:
        known.count()
        if settings.watch is not None:
            return self._watched(known, native, keyset, arguments, keywords)
        return known.run(arguments)

    def _first(
        self, native: Kernel, keyset: Any, arguments: Sequence[Any], keywords: Any, key: Any
    ) -> Any:
        """A kind of call that has not been seen."""
        given, made = None, None
        if self._results is not None:
            made = self._results(arguments)
        if made is None:
            given = native.call(keyset, arguments, keywords)
        known: Ready | Waiting | Left
        try:
            known = self._describe(arguments, keywords, given, made)
        except (Native, InvalidDescriptor) as error:
            known = leave(self.name, str(error).splitlines()[0])
        self._kinds.put(key, known)
        if isinstance(known, Waiting):
            known.left = patience(known) - 1
            if known.left <= 0 or settings.watch is not None:
                known = self._decide(known, native, keyset, arguments, keywords, key)
        if isinstance(known, Ready):
            return self._own(known, native, keyset, arguments, keywords)
        known.count()
        if given is None:
            return native.call(keyset, arguments, keywords)
        return given

    def _decide(
        self, kind: Waiting, native: Kernel, keyset: Any, arguments: Sequence[Any], keywords: Any,
        key: Any,
    ) -> Ready | Left:  # fmt: skip
        """Compile a kind, and keep it if it is the quicker."""
        known = kind.compiled(self.name)
        if settings.watch is not None:  # which compares by itself; what patch does is left open
            return known
        if isinstance(known, Ready) and settings.find:
            known = self._quicker(known, native, keyset, arguments, keywords)
        self._kinds.put(key, known)
        return known

    def _describe(
        self, arguments: Sequence[Any], keywords: Any, given: Any,
        made: list[Result | int | None] | None,
    ) -> Waiting:  # fmt: skip
        tensors = [a for a in arguments if isinstance(a, Tensor)]
        device = tensors[0].device
        if any(t.device != device for t in tensors):
            raise Native("tensors on several devices")
        if any(t.numel() == 0 for t in tensors):
            raise Native("an empty tensor")
        if any(type(t) not in (Tensor, torch.nn.Parameter) for t in tensors):
            raise Native("a subclass of Tensor")
        single = isinstance(given, Tensor) or (made is not None and len(made) == 1)
        if made is None:
            outputs = [given] if single else list(given)
            made = [None if t is None else Result.like(t) for t in outputs]
        shown = [Result.like(arguments[r]) if isinstance(r, int) else r for r in made]
        steps = self.describe(Call(*self._complete(arguments, keywords), shown))
        count = leave(self.name, WAITING).count
        return Waiting(tuple(steps), tuple(made), single, device, count)

    def _complete(
        self, arguments: Sequence[Any], keywords: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with the defaults that the dispatcher left out."""
        schema = getattr(torch.ops.aten, self.name).default._schema
        positional = [a for a in schema.arguments if not a.kwarg_only]
        rest = [a.default_value for a in positional[len(arguments) :]]
        defaults = {a.name: a.default_value for a in schema.arguments if a.kwarg_only}
        return [*arguments, *rest], {**defaults, **keywords}

    def _quicker(
        self, ready: Ready, native: Kernel, keyset: Any, arguments: Sequence[Any], keywords: Any
    ) -> Ready | Left:
        """Ours if it is the quicker of the two, measured on these tensors; on copies of them where
        the operator writes to its arguments."""
        if self._results is not None:
            arguments = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
        with torch.no_grad():
            ours = measure(lambda: ready.run(arguments), arguments)
            theirs = measure(lambda: native.call(keyset, arguments, keywords), arguments)
        return ready if ours <= theirs else leave(self.name, SLOWER)

    def _watched(
        self, known: Ready, native: Kernel, keyset: Any, arguments: Sequence[Any], keywords: Any
    ) -> Any:
        pure = self._results is None
        watch = settings.watch
        if watch is not None and pure:
            settings.watch = None  # what is run for timing is not seen
            try:
                watch(
                    self,
                    known,
                    lambda: measure(lambda: known.run(arguments), arguments),
                    lambda: measure(lambda: native.call(keyset, arguments, keywords), arguments),
                )
            finally:
                settings.watch = watch
        return known.run(arguments)


def measure(run: Callable[[], Any], arguments: Sequence[Any]) -> float:
    """The median of a few calls, in seconds."""
    cuda = any(isinstance(a, Tensor) and a.device.type == "cuda" for a in arguments)

    def once() -> float:
        start = time.perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    time.sleep(SETTLE_SECONDS)
    once()
    times: list[float] = []
    while len(times) < TRIALS and math.fsum(times) < TRIAL_SECONDS:
        times.append(once())
    return sorted(times)[len(times) // 2]
