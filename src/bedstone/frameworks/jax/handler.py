"""Plans as XLA custom calls: a handler for every plan, registered under a name.

The name is made from the problem, so no address enters a compiled program: one that is loaded from
JAX's persistent cache finds its target by that name, which tracing has registered. On the CPU a
handler calls the plan's machine code with the process's number of threads as it then is. On a GPU
it launches the plan's kernels on the stream of XLA, on the device that XLA names; XLA may capture
that into a CUDA graph, and then no Python runs either. Workspace is one more result.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bedstone import BedstoneError, Plan, Problem, default_handle, num_threads_address
from bedstone.frameworks.jax import interface
from bedstone.frameworks.planning import GPU_WORKSPACE_LIMIT, compiled_plan

PLATFORMS = ("cpu", "cuda")

_kept: list[Any] = []  # code that XLA may call until the process ends
_lock = threading.Lock()
# Never emptied: XLA keeps what is registered until the process ends.
_found: dict[tuple[Problem, float, str], Target | str] = {}
_named: dict[str, Target] = {}
Choose = Callable[[Problem], "tuple[str, int] | str"]
_choose: Choose | None = None  # for a GPU that is not here


class Target:
    """A registered plan: the name for `jax.ffi.ffi_call`, and the bytes of workspace it wants."""

    def __init__(self, name: str, workspace: int, algorithm: str) -> None:
        self.name, self.workspace, self.algorithm = name, workspace, algorithm


def platform() -> str:
    """Where JAX computes unless it is told otherwise: "cpu", "cuda", "rocm", "tpu", ..."""
    if _choose is not None:
        return "cuda"
    wanted = jax.config.jax_default_device
    name = wanted if isinstance(wanted, str) else getattr(wanted, "platform", None)
    name = name or jax.default_backend()
    if name != "gpu":
        return str(name)
    try:
        jax.devices("cuda")
    except RuntimeError:
        return "rocm"
    return "cuda"


@contextlib.contextmanager
def ahead(choose: Choose) -> Iterator[None]:
    """Inside, programs are traced and lowered for a GPU that need not be here; none can be run.

    choose  problem -> (the algorithm's name, bytes of workspace), or the reason why there is none
    """
    global _choose, _found
    before = _choose, _found
    _choose, _found = choose, {}
    jax.clear_caches()
    try:
        yield
    finally:
        _choose, _found = before
        jax.clear_caches()


def call(
    problem: Problem, operands: Sequence[Any], shape: Sequence[int], where: str, alpha: float = 1.0
) -> Any:
    """The custom call of alpha * problem on platform `where`: an array of `shape` (the problem's
    dims, as JAX orders them), of the operands' dtype; or the reason why there is none, a string."""
    found = target(problem, where, alpha)
    if isinstance(found, str):
        return found
    results = [jax.ShapeDtypeStruct(tuple(shape), operands[0].dtype)]
    if found.workspace:
        results.append(jax.ShapeDtypeStruct((found.workspace,), jnp.uint8))
    return jax.ffi.ffi_call(found.name, results)(*operands)[0]


def target(problem: Problem, where: str, alpha: float = 1.0) -> Target | str:
    """The target that runs a problem on a platform, registered; or why there is none."""
    key = (problem, alpha, where)
    with _lock:  # a name can be registered only once, whichever thread asks first
        if key not in _found:
            _found[key] = _find(problem, where, alpha)
        return _found[key]


def _find(problem: Problem, where: str, alpha: float) -> Target | str:
    if where not in PLATFORMS:
        return f"the platform {where}"
    if where == "cuda" and _choose is not None:
        choice = _choose(problem)
        if isinstance(choice, str):
            return choice
        algorithm, workspace = choice
        return Target(_name(problem, where, alpha, algorithm), workspace, algorithm)
    if where == "cuda" and not interface.tells_the_device():
        return "a jaxlib whose handlers cannot ask for their device"
    plan = compiled_plan(problem, _gpu() if where == "cuda" else "cpu")
    if isinstance(plan, str):
        return plan
    name = _name(problem, where, alpha, plan.algorithm)
    if name not in _named:  # problems that differ in strides of no effect share a name
        register = _register_gpu if where == "cuda" else _register_cpu
        reason = register(name, problem, alpha, plan)
        if reason is not None:
            return reason
        _named[name] = Target(name, plan.workspace_size, plan.algorithm)
    return _named[name]


def _name(problem: Problem, where: str, alpha: float, algorithm: str) -> str:
    word = hashlib.sha256(f"{algorithm} {alpha!r} {problem}".encode()).hexdigest()[:24]
    return f"bedstone_{where}_{word}"


def _register(name: str, module: str, where: str, *kept: Any) -> None:
    address, engine = interface.compiled(module)
    function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(address)
    _kept.append((engine, function, *kept))
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform=where)


def _register_cpu(name: str, problem: Problem, alpha: float, plan: Plan) -> str | None:
    entry = plan.native_entry
    if entry is None:
        return "no machine code to call"
    module = interface.cpu_handler(
        len(problem.inputs), len(problem.outputs), plan.workspace_size > 0, entry.address, alpha,
        num_threads_address(),
    )  # fmt: skip
    _register(name, module, "cpu", entry.owner)
    return None


# GPUs.


def _gpu() -> str:
    """The device that plans are made for first."""
    return f"cuda:{jax.local_devices(backend='cuda')[0].local_hardware_id}"


class Launcher:
    """alpha * problem on whichever GPU it is called for, by the algorithm that was chosen when it
    was lowered. Plans for other devices than the first are made when they are first called for."""

    def __init__(self, problem: Problem, alpha: float, plan: Plan) -> None:
        self.problem, self.alpha = problem, alpha
        self.algorithm, self.workspace = plan.algorithm, plan.workspace_size
        self.operands = len(problem.operands)
        self.results = len(problem.outputs) + (self.workspace > 0)
        self._addresses = ctypes.c_uint64 * (len(problem.inputs) + self.results)
        self._plans = {plan.device.index: plan}

    def __call__(self, addresses: int, stream: int, device: int) -> None:
        """Launch on the operands, and the workspace after them, whose addresses lie there."""
        plan = self._plans.get(device) or self._planned(device)
        *operands, last = self._addresses.from_address(addresses)
        if not self.workspace:
            operands, last = [*operands, last], 0
        plan.kernel(operands, last, self.alpha, 0.0, stream)

    def _planned(self, device: int) -> Plan:
        plan = default_handle(f"cuda:{device}").plan(
            self.problem, self.algorithm, GPU_WORKSPACE_LIMIT
        )
        if plan.workspace_size != self.workspace:
            raise BedstoneError(
                f"{self.problem}: lowered for {self.workspace} bytes of workspace; device {device} "
                f"needs {plan.workspace_size}"
            )
        self._plans[device] = plan
        return plan


_launchers: list[Launcher] = []
_said = threading.local()  # a message lives until the next one of its thread


@interface.Launch
def _launch(number: int, addresses: int, stream: int | None, device: int) -> int:
    """What handlers for GPUs call."""
    try:
        _launchers[number](addresses, stream or 0, device)
    except Exception as error:  # XLA raises it where the result is awaited
        _said.message = ctypes.create_string_buffer(f"bedstone: {error}".encode())
        return ctypes.addressof(_said.message)
    return 0


def _register_gpu(name: str, problem: Problem, alpha: float, plan: Plan) -> None:
    launcher = Launcher(problem, alpha, plan)
    _launchers.append(launcher)
    address = ctypes.cast(_launch, ctypes.c_void_p).value
    module = interface.gpu_handler(
        len(problem.inputs), launcher.results, address or 0, len(_launchers) - 1
    )
    _register(name, module, "CUDA")
