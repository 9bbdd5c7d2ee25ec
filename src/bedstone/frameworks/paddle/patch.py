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
from bedstone.frameworks.paddle import gradients, plans, threads
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

_lock = threading.RLock()
_depth: dict[str, int] = dict.fromkeys(OPERATORS, 0)  # how many have asked for each operator
_undo: dict[str, list[tuple[Any, str, Any]]] = {}  # operator -> (module, attribute, original)
_Asked = tuple[tuple[str, ...], bool]  # operators, `always`
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


def _install(name: str) -> None:
    native = getattr(paddle._C_ops, name)
    ours = replacement(name, native, OPERATORS[name])
    undo = _undo[name] = []
    for module_name, module in list(sys.modules.items()):
        if module is None or module_name.partition(".")[0] != "paddle":
            continue
        if any(fnmatch.fnmatch(module_name, pattern) for pattern in LEFT_ALONE):
            continue
        for attribute, value in list(vars(module).items()):
            if value is native:
                undo.append((module, attribute, native))
                setattr(module, attribute, ours)


def _take(asked: _Asked) -> None:
    names, always = asked
    with _lock:
        gradients.watch()
        threads.take()
        policy.always += always
        for name in names:
            _depth[name] += 1
            if _depth[name] == 1:
                _install(name)


def _give_back(asked: _Asked) -> None:
    names, always = asked
    with _lock:
        threads.give_back()
        policy.always -= always
        for name in names:
            _depth[name] -= 1
            if _depth[name] == 0:
                for module, attribute, native in _undo.pop(name):
                    setattr(module, attribute, native)
        if not _undo:
            plans.release()


def patch(
    only: Sequence[str] | None = None, except_: Sequence[str] = (), always: bool = False
) -> None:
    """Replace PaddlePaddle's operators, in every thread, until `unpatch()`.

    only     names of operators of paddle._C_ops ("conv2d", ...); None for all that bedstone has
    except_  names to leave native
    always   run bedstone's kernels also where PaddlePaddle's are known to be as fast

    Meanwhile bedstone has as many CPU threads as PaddlePaddle has now, unless somebody has chosen
    bedstone's number. Calls add up: each needs its own `unpatch()`. Raises InvalidDescriptor for an
    unknown name.
    """
    asked = (_chosen(only, except_), always)
    with _lock:
        _take(asked)
        _asked.append(asked)


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
    asked = (_chosen(only, except_), always)
    _take(asked)
    try:
        yield
    finally:
        _give_back(asked)


def patched() -> tuple[str, ...]:
    """The operators that are replaced now."""
    return tuple(name for name, depth in _depth.items() if depth)
