"""`enable()`: jax.lax.conv_general_dilated, and all that is built on it, on bedstone.

The function is replaced where JAX keeps it, so that `jax.lax.conv`, Flax's and Haiku's layers reach
it too. What is compiled stays compiled: JAX's caches are cleared when the outermost block begins
and ends, so that functions are traced anew on either side.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax import lax

from bedstone import BedstoneError
from bedstone.frameworks.jax import handler, report
from bedstone.frameworks.jax.convolution import Native, take

NAME = "conv_general_dilated"
PACKAGES = ("jax", "flax", "haiku", "equinox")  # that keep the function under its name
_lock = threading.RLock()
_depth = 0
_native: Any = lax.conv_general_dilated
_places: list[Any] = []


@contextlib.contextmanager
def enable() -> Iterator[None]:
    """Convolutions traced or made inside the block run on bedstone, in every thread. Blocks nest.

    >>> import jax, jax.numpy as jnp
    >>> from bedstone.frameworks.jax import enable
    >>> x, w = jnp.ones((1, 2, 6, 6)), jnp.ones((3, 2, 3, 3))
    >>> with enable():
    ...     y = jax.lax.conv(x, w, (1, 1), "VALID")
    >>> float(y[0, 0, 0, 0])
    18.0
    """
    patch()
    try:
        yield
    finally:
        unpatch()


def patch() -> None:
    """Replace the function until `unpatch()`; calls count."""
    global _depth
    with _lock:
        if _depth == 0:
            handler.update_threads()
            for module in list(sys.modules.values()):
                name = getattr(module, "__name__", "").partition(".")[0]
                if name in PACKAGES and vars(module).get(NAME) is _native:
                    setattr(module, NAME, _convolve)
                    _places.append(module)
            jax.clear_caches()
        _depth += 1


def unpatch() -> None:
    """Undo a `patch()`. Raises BedstoneError if there is none."""
    global _depth
    with _lock:
        if _depth == 0:
            raise BedstoneError("unpatch: jax.lax.conv_general_dilated is not patched")
        _depth -= 1
        if _depth == 0:
            for module in _places:
                setattr(module, NAME, _native)
            _places.clear()
            jax.clear_caches()


def enabled() -> bool:
    """True while the function is replaced."""
    return _depth > 0


def _convolve(
    lhs: Any, rhs: Any, window_strides: Any, padding: Any, lhs_dilation: Any = None,
    rhs_dilation: Any = None, dimension_numbers: Any = None, feature_group_count: int = 1,
    batch_group_count: int = 1, precision: Any = None, preferred_element_type: Any = None,
    **rest: Any,
) -> Any:  # fmt: skip
    try:
        y, algorithm = take(
            lhs, rhs, window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers,
            feature_group_count, batch_group_count, precision, preferred_element_type, rest,
        )  # fmt: skip
    except Native as reason:
        report.native(NAME, str(reason))
        return _native(
            lhs, rhs, window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers,
            feature_group_count, batch_group_count, precision, preferred_element_type, **rest,
        )  # fmt: skip
    report.own(NAME, algorithm)
    return y
