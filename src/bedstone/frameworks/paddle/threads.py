"""bedstone's CPU threads while it serves PaddlePaddle: as many as PaddlePaddle's, and the same.

PaddlePaddle has one thread unless OMP_NUM_THREADS was set before its import, or
`paddle.base.core.set_num_threads` after; only the OpenMP runtime that it brings along knows the
number. Who has chosen bedstone's (`bedstone.set_num_threads`, `bedstone.config`,
BEDSTONE_NUM_THREADS) has that number instead. The runtime's threads spin for 0.2 s after
each use, and would keep bedstone's own from their cores.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import paddle

from bedstone import set_default_num_threads


@functools.cache
def _runtime() -> ctypes.CDLL | None:
    """The OpenMP runtime that PaddlePaddle brings along and has loaded; None where it brings none,
    or another."""
    path = Path(paddle.__file__).parent / "libs" / "libiomp5.so"
    loaded_already = getattr(os, "RTLD_NOLOAD", 0) | os.RTLD_NOW if path.exists() else 0
    try:
        return ctypes.CDLL(str(path), mode=loaded_already)
    except OSError:
        return None


@functools.cache
def _team() -> int | None:
    """The function by which PaddlePaddle's kernels start OpenMP's threads."""
    parallel = getattr(_runtime(), "GOMP_parallel", None)
    return None if parallel is None else ctypes.cast(parallel, ctypes.c_void_p).value


def paddle_threads() -> int:
    """The CPU threads that PaddlePaddle's kernels use when called from this thread."""
    runtime = _runtime()
    if runtime is not None:
        return int(runtime.omp_get_max_threads())
    found = os.environ.get("OMP_NUM_THREADS", "")  # PaddlePaddle sets it if nobody else has
    return int(found) if found.isdigit() and int(found) else 1


def spin_for(milliseconds: int) -> None:
    """Have the runtime's threads, as started from this thread, spin for so long after each use
    (200 at first): a measurement in turns must not let them into the next side's turn. Without
    such a runtime nothing happens."""
    set_blocktime = getattr(_runtime(), "kmp_set_blocktime", None)
    if set_blocktime is not None:
        set_blocktime(milliseconds)


def take() -> object:
    """From now on bedstone's default is PaddlePaddle's number, and its threads are
    PaddlePaddle's, until the result is given to `give_back`."""
    owner = object()
    set_default_num_threads(paddle_threads(), team=_team(), owner=owner)
    return owner


def give_back(owner: object) -> None:
    """Undo a `take`: what held before holds again, if nobody has asked for anything since."""
    set_default_num_threads(None, owner=owner)
