"""How a kernel of bedstone becomes a primitive of JAX: shapes, lowering, sharding, batches, and
derivatives in pairs of linear functions.

The first derivatives of everything here run on bedstone's kernels. A kernel's derivative by the
point at which it was taken (a gradient of a gradient) is left to JAX, which differentiates the
formula that is given beside the kernel; the same formula serves where there is no kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import dispatch
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from bedstone.frameworks.jax import handler
from bedstone.frameworks.jax.sharding import Cuts, Sharing

Shape = tuple[int, ...]
DTYPES = ("float32", "float64", "float16", "bfloat16")


class Native(Exception):
    """This call is left to JAX; the message says why."""


def check_array(x: Any) -> None:
    """Raises Native for an operand that no kernel takes."""
    if handler.platform() not in handler.PLATFORMS:
        raise Native(f"the platform {handler.platform()}")
    if not hasattr(x, "dtype") or str(x.dtype) not in DTYPES:
        raise Native(f"dtype {getattr(x, 'dtype', type(x).__name__)}")
    if 0 in x.shape:
        raise Native("an empty array")


def primitive(
    name: str,
    run: Callable[..., Any],
    shape_of: Callable[..., Shape],
    sharing: Callable[..., Sharing],
    adapt: Callable[..., Any] | None = None,
) -> Any:
    """A primitive of one result, of the dtype of its first operand.

    run(*arrays, where, **params)  the result, on tracers, as a program for the platform `where`
    shape_of(*shapes, **params)    its shape
    sharing(*shapes, **params)     which axes may be cut over devices
    adapt(cuts, parts, params)     the operands and parameters of a share; None: those of the whole
    """
    made = core.Primitive(f"bedstone_{name}")

    def abstract(*avals: Any, **params: Any) -> Any:
        shape = shape_of(*(aval.shape for aval in avals), **params)
        # (`bind` has made all vary alike over the axes of a shard_map.)
        if _varying(avals[0]):
            return avals[0].update(shape=shape, weak_type=False)
        return jax.core.ShapedArray(shape, avals[0].dtype)

    def lowered(where: str, devices: int, *operands: Any, **params: Any) -> Any:
        axes = sharing(*(operand.shape for operand in operands), **params).over(devices)

        def share(cuts: Cuts, *parts: Any) -> Any:
            local = dict(params)
            if "shape" in params:
                local["shape"] = cuts.share(params["shape"], axes.result)
            if adapt is not None:
                parts, local = adapt(cuts, parts, local)
            return run(*parts, where=where, **local)

        return axes.tell(share)(*operands)

    made.def_impl(functools.partial(dispatch.apply_primitive, made))
    made.def_abstract_eval(abstract)

    def rule(where: str, context: Any, *operands: Any, **params: Any) -> Any:
        written = functools.partial(lowered, where, _devices(context.module_context.axis_context))
        return mlir.lower_fun(written, multiple_results=False)(context, *operands, **params)

    for where in handler.PLATFORMS:
        mlir.register_lowering(made, functools.partial(rule, where), platform=where)
    # Lowering asks which devices there are, as custom_partitioning does; JAX has no public word.
    dispatch.prim_requires_devices_during_lowering.add(made)
    return made


def _devices(context: Any) -> int:
    """How many devices a program is lowered for."""
    mesh = getattr(context, "mesh", None)
    return mesh.size if mesh is not None else getattr(context, "num_devices", 1)


def _varying(aval: Any) -> frozenset[Any]:
    """The axes of shard_map over which a value differs from device to device."""
    kind = getattr(aval, "mat", None)
    return frozenset(getattr(aval, "vma", ()) if kind is None else kind.varying)


def bind(made: Any, *operands: Any, **params: Any) -> Any:
    """`made` on operands of which some may be the same on all devices of a shard_map."""
    if len(operands) > 1:
        axes = [_varying(jax.typeof(operand)) for operand in operands]
        every = frozenset().union(*axes)
        operands = tuple(
            lax.pcast(operand, tuple(every - mine), to="varying") if every - mine else operand
            for operand, mine in zip(operands, axes)
        )
    return made.bind(*operands, **params)


def batched(made: Any) -> None:
    """Batches (vmap) become the first axis of every operand; `how.batched()` says how the rest is
    then meant."""

    def rule(operands: Any, dims: Any, *, how: Any, **params: Any) -> tuple[Any, int]:
        size = next(a.shape[at] for a, at in zip(operands, dims) if at is not None)
        spread = [
            jnp.broadcast_to(a, (size, *a.shape)) if at is None else jnp.moveaxis(a, at, 0)
            for a, at in zip(operands, dims)
        ]
        if "shape" in params:
            params["shape"] = (size, *params["shape"])
        return bind(made, *spread, how=how.batched(), **params), 0

    batching.primitive_batchers[made] = rule


Formula = Callable[..., Any]  # (saved, t, how) -> the result, by JAX


def transposes(one: Any, other: Any, formula: Formula, other_formula: Formula) -> None:
    """`one` and `other`, functions of (saved, t) and linear in t, are each other's transposes;
    their derivatives by `saved` are those of the formulas."""
    rows = [(one, other, formula)]
    if other is not one:
        rows.append((other, one, other_formula))
    for made, transposed, written in rows:
        _linear(made, transposed, written)


def _linear(made: Any, transposed: Any, formula: Formula) -> None:
    def by_saved(tangent: Any, saved: Any, t: Any, *, how: Any) -> Any:
        return jax.jvp(lambda at: formula(at, t, how), (saved,), (tangent,))[1]

    def by_t(tangent: Any, saved: Any, t: Any, *, how: Any) -> Any:
        return bind(made, saved, tangent, how=how)

    def transpose(cotangent: Any, saved: Any, t: Any, *, how: Any) -> list[Any]:
        if type(cotangent) is ad.Zero:
            return [None, ad.Zero(t.aval.to_ct_aval())]
        return [None, bind(transposed, saved, cotangent, how=how)]

    ad.defjvp(made, by_saved, by_t)
    ad.primitive_transposes[made] = transpose
