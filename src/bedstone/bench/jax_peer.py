"""The peers `jax` and `jax-on-bedstone`: convolutions called through JAX, with its own kernels and
with bedstone's in their place.

Both are the same program, compiled by `jax.jit`: the convolution for `forward`, its transpose by
one operand for the gradients, so that the ratio of the two is what a user of JAX gets. The same
values; filters of channels-last images are HWIO, as JAX's users have them. JAX allocates its
results, and runs a thread on every core.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import numpy as np

import bedstone
from bedstone.bench.operands import Array, Arrays
from bedstone.bench.torch_peer import Declined

Call = Callable[[], Any]
DTYPES = ("float32", "float16", "bfloat16")  # JAX's own, unless it is told of 64 bits
SPATIAL = {1: "W", 2: "HW", 3: "DHW"}


def call(problem: bedstone.Problem, arrays: Arrays, device: str, on_bedstone: bool) -> Call:
    """The call that computes the problem through JAX and waits for the result, which it returns in
    the order of `numbers`.

    Raises Declined.
    """
    reason = reason_against(problem, device)
    if reason is not None:
        raise Declined(reason)
    jax: Any = importlib.import_module("jax")
    if jax.default_backend() != "cpu":
        raise Declined(f"JAX is on {jax.default_backend()}")
    convolve = _convolution(jax, problem, on_bedstone)
    if problem.direction == "forward":
        function, names = convolve, ("x", "w")
    elif problem.direction == "backward_data":
        dx = _shape(jax, problem, arrays, "dx")

        def function(w: Any, dy: Any) -> Any:
            return jax.linear_transpose(lambda x: convolve(x, w), dx)(dy)[0]

        names = ("w", "dy")
    else:
        dw = _shape(jax, problem, arrays, "dw")

        def function(x: Any, dy: Any) -> Any:
            return jax.linear_transpose(lambda w: convolve(x, w), dw)(dy)[0]

        names = ("x", "dy")
    compiled = jax.jit(function)
    operands = [jax.numpy.asarray(ordered(problem, name, arrays[name])) for name in names]
    return lambda: compiled(*operands).block_until_ready()


def reason_against(problem: bedstone.Problem, device: str) -> str | None:
    """Why JAX is not timed on a problem; None if it is."""
    if importlib.util.find_spec("jax") is None:
        return "jax is not installed"
    if device != "cpu":
        return "jax is timed on the CPU"
    if not isinstance(problem, bedstone.ConvolutionProblem):
        return "jax is timed on convolutions"
    if problem.conv.mode != "cross_correlation" or problem.epilogue:
        return "jax has no flipped filters, and fuses nothing"
    if str(problem.dtype) not in DTYPES:
        return f"jax computes in {', '.join(DTYPES)} unless it is told"
    if not all(desc.is_packed() or _last(desc) for desc in (problem.x, problem.w, problem.y)):
        return "jax is timed on dense tensors"
    if bedstone.get_num_threads() != cores():
        return f"jax runs on all cores: --threads {cores()}"
    return None


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _last(desc: bedstone.TensorDesc) -> bool:
    return desc.layout is not None and desc.layout.endswith("C")


def numbers(problem: Any) -> tuple[str, str, str]:
    """The dimension numbers of the arrays that JAX is given, and gives."""
    spatial = SPATIAL[problem.conv.axes]
    images = [f"N{spatial}C" if _last(desc) else f"NC{spatial}" for desc in (problem.x, problem.y)]
    return images[0], f"{spatial}IO" if _last(problem.w) else f"OI{spatial}", images[1]


def ordered(problem: Any, name: str, array: Array) -> Array:
    """An operand, of logical dims (N, C, spatial...) or (K, C, spatial...), as JAX is given it."""
    words = dict(zip("xwy", numbers(problem)))[name[-1]]
    logical = ("OI" if name[-1] == "w" else "NC") + SPATIAL[problem.conv.axes]
    return np.ascontiguousarray(array.transpose([logical.index(axis) for axis in words]))


def _shape(jax: Any, problem: Any, arrays: Arrays, name: str) -> Any:
    array = ordered(problem, name, arrays[name])
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _convolution(jax: Any, problem: Any, on_bedstone: bool) -> Callable[[Any, Any], Any]:
    conv, words = problem.conv, numbers(problem)
    if not on_bedstone:
        return lambda x, w: jax.lax.conv_general_dilated(
            x, w, conv.stride, conv.padding, rhs_dilation=conv.dilation, dimension_numbers=words,
            feature_group_count=conv.groups,
        )  # fmt: skip
    patched: Any = importlib.import_module("bedstone.frameworks.jax")
    bedstone.set_num_threads(bedstone.get_num_threads())  # compiled programs read the process's
    return lambda x, w: patched.convolution(
        x, w, conv.stride, conv.padding, dilation=conv.dilation, groups=conv.groups,
        dimension_numbers=words,
    )  # fmt: skip
