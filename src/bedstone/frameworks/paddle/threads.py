"""bedstone's number of CPU threads while it serves PaddlePaddle: PaddlePaddle's own.

PaddlePaddle has one thread unless OMP_NUM_THREADS was set before its import, or
`paddle.base.core.set_num_threads` after; only the OpenMP runtime that it brings along knows the
number. Who has chosen bedstone's (`bedstone.set_num_threads`, `bedstone.config`,
BEDSTONE_NUM_THREADS) has that number instead.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path

import paddle

from bedstone import set_default_num_threads

_lock = threading.Lock()
_users = 0


@functools.cache
def _counter() -> Callable[[], int] | None:
    """The function of PaddlePaddle's OpenMP runtime that tells the number; None where it brings
    none, or another."""
    path = Path(paddle.__file__).parent / "libs" / "libiomp5.so"
    loaded_already = getattr(os, "RTLD_NOLOAD", 0) | os.RTLD_NOW if path.exists() else 0
    try:
        return ctypes.CDLL(str(path), mode=loaded_already).omp_get_max_threads
    except (OSError, AttributeError):
        return None


def paddle_threads() -> int:
    """The CPU threads that PaddlePaddle's kernels use when called from this thread."""
    count = _counter()
    if count is not None:
        return count()
    found = os.environ.get("OMP_NUM_THREADS", "")  # PaddlePaddle sets it if nobody else has
    return int(found) if found.isdigit() and int(found) else 1


def take() -> None:
    """From now on bedstone's default is PaddlePaddle's number; each call needs its `give_back`."""
    global _users
    threads = paddle_threads()
    with _lock:
        _users += 1
        set_default_num_threads(threads)


def give_back() -> None:
    """Undo a `take`; after the last, bedstone's default is its own again."""
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            set_default_num_threads(None)
