"""From paddle tensors to a kernel: the dictionary of problems, and the call.

An operator says how to describe a problem (`make`: descriptors and settings in, `Recipe` out).
The recipe is kept by shapes, strides, dtype and settings, so that a repeated call is two look-ups,
an allocation by PaddlePaddle and the kernel on raw pointers.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import paddle
from paddle import Tensor, _C_ops

from bedstone import InvalidDescriptor, Plan, Problem, TensorDesc
from bedstone.frameworks.paddle import report
from bedstone.frameworks.planning import compiled_plan

RECIPES_KEPT = 4096  # as many as a handle keeps plans

DTYPES = {getattr(paddle, n): n for n in ("float32", "float64", "float16", "bfloat16")}
# There is one object of each dtype. (To hash or compare them takes microseconds.)
_NAMES = {id(dtype): name for dtype, name in DTYPES.items()}
HALF_BYTES = 2
Layout = tuple[tuple[int, ...], tuple[int, ...], str]  # dims, strides, dtype
# A PaddlePaddle built for the CPU has no other place to ask about.
CPU_ONLY = not (paddle.is_compiled_with_cuda() or paddle.is_compiled_with_xpu())
CPU = paddle.CPUPlace()
RESULTS = {name: kind for kind, name in DTYPES.items()} | {
    "int64": paddle.int64,
    "uint8": paddle.uint8,
}


class Native(Exception):
    """This call is left to PaddlePaddle; the message says why."""


@dataclass(frozen=True)
class Recipe:
    """A problem, and the dims and dtypes of the tensors that receive its results (as
    PaddlePaddle orders dims)."""

    problem: Problem
    outputs: tuple[tuple[tuple[int, ...], str], ...]


Maker = Callable[..., Recipe]


@functools.lru_cache(RECIPES_KEPT)
def _recipe(make: Maker, operands: tuple[Any, ...], settings: tuple[Any, ...]) -> Recipe | str:
    """The recipe, or why there is none."""
    try:
        return make(*(TensorDesc(*operand) for operand in operands), *settings)
    except InvalidDescriptor as error:
        return str(error)
    except Native as reason:
        return str(reason)


def layout_of(tensor: Any) -> Layout:
    """Raises Native unless it is a tensor with elements, of one of our dtypes, on the CPU."""
    if not isinstance(tensor, Tensor):
        raise Native("a static graph is being built, or an argument is no tensor")
    if not tensor.is_dense():
        raise Native("a tensor that is sparse or distributed")
    dtype = _NAMES.get(id(tensor.dtype))
    if dtype is None:
        raise Native(f"dtype {str(tensor.dtype).rpartition('.')[2]}")
    if not (CPU_ONLY or tensor.place.is_cpu_place()):
        raise Native("a tensor that is not on the CPU")
    dims = tuple(tensor.shape)
    if not dims or 0 in dims:
        raise Native("a tensor that is empty or a scalar")
    return dims, tuple(tensor.strides), dtype


def described(make: Maker, inputs: Sequence[Tensor], settings: tuple[Any, ...]) -> Recipe:
    """The recipe of the problem whose first operands are these. Raises Native."""
    recipe = _recipe(make, tuple([layout_of(t) for t in inputs]), settings)
    if isinstance(recipe, str):
        raise Native(recipe)
    return recipe


def launch(
    label: tuple[str, str], make: Maker, inputs: Sequence[Tensor], settings: tuple[Any, ...] = ()
) -> list[Tensor]:
    """Run the problem that `make` describes; returns new tensors.

    label    operator and direction, for the report
    inputs   the problem's first operands; then come the results

    Raises Native where there is no kernel for it.
    """
    return run(label, described(make, inputs, settings), inputs)


def run(
    label: tuple[str, str],
    recipe: Recipe,
    inputs: Sequence[Tensor],
    updated: Sequence[Tensor] = (),
) -> list[Tensor]:
    """The same of a recipe; `updated`, the last operands, are written in place."""
    start = time.perf_counter()
    plan = _plan(recipe.problem)
    outputs = [_C_ops.empty(dims, RESULTS[kind], CPU) for dims, kind in recipe.outputs]
    pointers = [t.data_ptr() for t in (*inputs, *outputs, *updated)]
    plan(*pointers, workspace=_workspace(plan.workspace_size))
    report.add(*label, plan.algorithm, time.perf_counter() - start)
    return outputs


def _plan(problem: Problem) -> Plan:
    plan = compiled_plan(problem)
    if isinstance(plan, str):
        raise Native(plan)
    return plan


class _Scratch(threading.local):
    """One workspace a thread, kept: fresh memory costs more to map than most kernels to run."""

    buffer: Tensor | None = None
    size = 0


_scratch = _Scratch()


def _workspace(size: int) -> int:
    if size == 0:
        return 0
    if _scratch.buffer is None or _scratch.size < size:
        _scratch.buffer = None
        _scratch.buffer = _C_ops.empty([size], paddle.uint8, CPU)
        _scratch.size = size
    return int(_scratch.buffer.data_ptr())


def release() -> None:
    """Give back this thread's workspace."""
    _scratch.buffer = None
