"""`enable()`, `patch()` and `unpatch()`: bedstone's operators in the place of PaddlePaddle's.

PaddlePaddle's Python layer calls compiled operators through `paddle._C_ops`; some modules take a
few of them by name at import. Each operator is replaced wherever it is found in a module of
PaddlePaddle, except in the compiled modules themselves. What is turned into a static graph runs
without Python and keeps the native operators.
"""

from __future__ import annotations

import contextlib
import fnmatch
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import paddle

from bedstone import InvalidDescriptor
from bedstone.frameworks.paddle import biased, gradients, plans, static_graphs, threads
from bedstone.frameworks.paddle.convolution import Convolution, GroupsFirst, Transposed
from bedstone.frameworks.paddle.normalization import Batch, Group, Instance, Layer
from bedstone.frameworks.paddle.operators import Call, policy, replacement
from bedstone.frameworks.paddle.pointwise import Activation, Gelu, Relu, Sloped, Softmax
from bedstone.frameworks.paddle.pooling import IndexedPooling, Pooling

KINDS: tuple[type[Call], ...] = (
    Convolution, GroupsFirst, Transposed, Pooling, IndexedPooling, Softmax, Relu, Activation, Gelu,
    Sloped, Batch, Layer, Group, Instance,
)  # fmt: skip
OPERATORS: dict[str, type[Call]] = {name: kind for kind in KINDS for name in kind.names}

# The compiled operators themselves, and their static twins.
LEFT_ALONE = ("paddle.base.libpaddle*", "paddle._pir_ops")

_Functions = dict[str, Any]
_native: _Functions = {name: getattr(paddle._C_ops, name) for name in OPERATORS}
_ours: _Functions = {name: replacement(name, _native[name], OPERATORS[name]) for name in OPERATORS}
# Not an operator, but replaced like one while any of those is that it calls.
BIASED = "_conv_nd"
_native[BIASED], _ours[BIASED] = biased.native, biased.conv_nd
_Place = tuple[Any, str, str]  # module, attribute, operator
_found: tuple[int, list[_Place]] | None = None  # among how many modules, and where

_lock = threading.RLock()
_Asked = tuple[tuple[str, ...], bool, object]  # operators, `always`, threads taken
_asked: list[_Asked] = []  # of each patch() not yet taken back


def _chosen(only: Sequence[str] | None, except_: Sequence[str]) -> tuple[str, ...]:
    for argument, names in (("only", only or ()), ("except_", except_)):
        if isinstance(names, str):
            raise InvalidDescriptor(argument, names, "a list of operators' names")
        for name in names:
            if name not in OPERATORS:
                raise InvalidDescriptor(argument, name, f"of {tuple(OPERATORS)}")
    wanted = OPERATORS if only is None else only
    return tuple(name for name in OPERATORS if name in wanted and name not in except_)


def _settle() -> None:
    """Ours in all places of the operators that somebody asks for, the native ones in all others."""
    asked = set(patched())
    if not asked.isdisjoint(biased.OPERATORS):
        asked.add(BIASED)
    for module, attribute, name in _places():
        old, new = (_native, _ours) if name in asked else (_ours, _native)
        if vars(module).get(attribute) is old[name]:
            setattr(module, attribute, new[name])
    static_graphs.break_at(asked)


def _places() -> list[_Place]:
    """Where PaddlePaddle's modules hold an operator, native or ours."""
    global _found
    modules = {n: m for n, m in list(sys.modules.items()) if m and n.partition(".")[0] == "paddle"}
    if _found is None or _found[0] != len(modules):  # (to look through them all takes 20 ms)
        wanted = {id(f): name for functions in (_native, _ours) for name, f in functions.items()}
        places = [
            (module, attribute, wanted[id(value)])
            for name, module in modules.items()
            if not any(fnmatch.fnmatch(name, pattern) for pattern in LEFT_ALONE)
            for attribute, value in list(vars(module).items())
            if id(value) in wanted
        ]
        _found = (len(modules), places)
    return _found[1]


def _take(names: tuple[str, ...], always: bool) -> _Asked:
    with _lock:
        gradients.watch()
        policy.always += always
        policy.asked.update(names)
        _settle()
        return names, always, threads.take()


def _give_back(asked: _Asked) -> None:
    names, always, taken = asked
    with _lock:
        threads.give_back(taken)
        policy.always -= always
        policy.asked.subtract(names)
        _settle()
        if not any(policy.asked.values()):
            plans.release()


def patch(
    only: Sequence[str] | None = None, except_: Sequence[str] = (), always: bool = False
) -> None:
    """Replace PaddlePaddle's operators, in every thread, until `unpatch()`.

    only     names of operators of paddle._C_ops ("conv2d", ...); None for all that bedstone has
    except_  names to leave native
    always   run bedstone's kernels also where PaddlePaddle's are known to be as fast

    Meanwhile bedstone has as many CPU threads as PaddlePaddle has now, unless somebody has chosen
    bedstone's number, and where that is known PaddlePaddle's own, those of its OpenMP runtime.
    Calls add up: each needs its own `unpatch()`. Raises InvalidDescriptor for an unknown name.
    """
    chosen = _chosen(only, except_)
    with _lock:
        _asked.append(_take(chosen, always))


def unpatch() -> None:
    """Take back the latest `patch()`; the native operators return when nobody asks for ours.

    Raises RuntimeError where none is left to take back.
    """
    with _lock:
        if not _asked:
            raise RuntimeError("unpatch: no patch() is left to take back")
        _give_back(_asked.pop())


@contextlib.contextmanager
def enable(
    only: Sequence[str] | None = None, except_: Sequence[str] = (), always: bool = False
) -> Iterator[None]:
    """`patch()` for the code inside the block (in every thread meanwhile). Blocks nest. Gradients
    of what was computed inside run on bedstone's kernels after the block too."""
    asked = _take(_chosen(only, except_), always)
    try:
        yield
    finally:
        _give_back(asked)


def patched() -> tuple[str, ...]:
    """The operators that are replaced now."""
    return tuple(name for name in OPERATORS if policy.asked[name])
