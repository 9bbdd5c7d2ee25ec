"""`enable()`: functions of jax.lax and jax.nn, and all that is built on them, on bedstone.

A function is replaced wherever a module that is loaded holds it, so that layers of libraries, and
`from jax.nn import relu` in a user's own file, reach it too. What is compiled stays compiled: JAX's
caches are cleared when the outermost block begins and ends, so that functions are traced anew on
either side.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bedstone import BedstoneError, InvalidDescriptor
from bedstone.frameworks.jax import activation, report
from bedstone.frameworks.jax.convolution import take_convolution
from bedstone.frameworks.jax.pooling import take_reduce_window
from bedstone.frameworks.jax.rules import Native
from bedstone.frameworks.jax.softmax import take_log_softmax, take_softmax

# name -> (the function of JAX, what takes its arguments and gives (result, algorithm))
OPERATORS: dict[str, tuple[Any, Callable[..., tuple[Any, str]]]] = {
    "conv_general_dilated": (lax.conv_general_dilated, take_convolution),
    "reduce_window": (lax.reduce_window, take_reduce_window),
    "softmax": (jax.nn.softmax, take_softmax),
    "log_softmax": (jax.nn.log_softmax, take_log_softmax),
    "tanh": (jnp.tanh, activation.taker("tanh")),
    **{
        name: (getattr(jax.nn, name), activation.taker(name))
        for name in activation.NAMES
        if name != "tanh"
    },
}
# What `enable()` takes unless it is told: XLA fuses the others into what stands around them, which
# a call of a kernel ends.
USUAL = ("conv_general_dilated", "reduce_window")

_lock = threading.RLock()
_depth = 0
_places: list[tuple[Any, str, Any]] = []  # (module, attribute, the function of JAX)


@contextlib.contextmanager
def enable(only: Iterable[str] | None = None, except_: Iterable[str] = ()) -> Iterator[None]:
    """What is traced or made inside the block runs on bedstone, in every thread. Blocks nest, and
    the outermost one's options (those of `patch`) hold.

    >>> import jax, jax.numpy as jnp
    >>> from bedstone.frameworks.jax import enable
    >>> x, w = jnp.ones((1, 2, 6, 6)), jnp.ones((3, 2, 3, 3))
    >>> with enable():
    ...     y = jax.lax.conv(x, w, (1, 1), "VALID")
    >>> float(y[0, 0, 0, 0])
    18.0
    """
    patch(only, except_)
    try:
        yield
    finally:
        unpatch()


def patch(only: Iterable[str] | None = None, except_: Iterable[str] = ()) -> None:
    """Replace functions of JAX until `unpatch()`; calls count.

    only     names of `operators()`; None for those that pay: convolution and pooling
    except_  names to leave to JAX

    Raises InvalidDescriptor for a name that is not known.
    """
    global _depth
    chosen = _chosen(only, except_)
    with _lock:
        if _depth == 0:
            _install(chosen)
            jax.clear_caches()
        _depth += 1


def unpatch() -> None:
    """Undo a `patch()`. Raises BedstoneError if there is none."""
    global _depth
    with _lock:
        if _depth == 0:
            raise BedstoneError("unpatch: JAX's functions are not patched")
        _depth -= 1
        if _depth == 0:
            for module, attribute, native in _places:
                setattr(module, attribute, native)
            _places.clear()
            jax.clear_caches()


def enabled() -> bool:
    """True while functions are replaced."""
    return _depth > 0


def operators() -> tuple[str, ...]:
    """The names of the functions that `patch` can take over."""
    return tuple(OPERATORS)


def _chosen(only: Iterable[str] | None, except_: Iterable[str]) -> list[str]:
    for argument, names in (("only", only), ("except_", except_)):
        if isinstance(names, str):
            raise InvalidDescriptor(argument, names, "a list of names of functions")
        for name in names or ():
            if name not in OPERATORS:
                raise InvalidDescriptor(argument, name, f"one of {', '.join(OPERATORS)}")
    left = list(except_)
    return [name for name in (USUAL if only is None else only) if name not in left]


def _install(names: Iterable[str]) -> None:
    ours = {id(OPERATORS[name][0]): _replacement(name) for name in names}
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").partition(".")[0] == "bedstone":
            continue  # what is native here is meant to be
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in ours:
                _places.append((module, attribute, value))
                setattr(module, attribute, ours[id(value)])


def _replacement(name: str) -> Callable[..., Any]:
    native, take = OPERATORS[name]

    def function(*arguments: Any, **keywords: Any) -> Any:
        if not _depth:  # a module that was loaded inside a block has kept it
            return native(*arguments, **keywords)
        try:
            result, algorithm = take(*arguments, **keywords)
        except Native as why:
            reason = str(why)
        except (TypeError, ValueError) as error:  # JAX says so in its own words, or takes it
            reason = f"arguments not understood: {error}".splitlines()[0]
        else:
            report.own(name, algorithm)
            return result
        report.native(name, reason)
        return native(*arguments, **keywords)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = native.__doc__
    function.__wrapped__ = native  # type: ignore[attr-defined]
    return function
