"""`enable()`: bedstone under PyTorch's own operators, with no change to the model.

Each operator's kernel for CPU (and CUDA) tensors is overridden through torch.library, below
autograd, autocast, vmap and torch.compile, which go on as they are. The kernel that was there
before is kept and called wherever bedstone leaves a call to PyTorch. Inductor's freezing=True
replaces convolutions by an operator of its own, which is not overridden.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

import bedstone
from bedstone import BedstoneError, InvalidDescriptor
from bedstone.frameworks.torch import calls
from bedstone.frameworks.torch.calls import Operator
from bedstone.frameworks.torch.layers import Layers
from bedstone.frameworks.torch.overrides import OPERATORS

NAMES = {operator.name: operator for operator in OPERATORS}
# benchmark, deterministic, enabled, allow_tf32: what `convolution` adds for `_convolution`, and
# what no kernel of a CPU reads.
CUDNN_FLAGS = (False, False, True, True)
_lock = threading.RLock()
_depth = 0
_libraries: list[Any] = []
_layers: Layers | None = None
_decided: tuple[Any, ...] = ()  # the options that what is known of kinds of calls depends on


@contextlib.contextmanager
def enable(**options: Any) -> Iterator[None]:
    """PyTorch's operators run on bedstone inside the block, in every thread. Blocks nest, and the
    outermost one's options (those of `patch`) hold.

    >>> import torch
    >>> from bedstone.frameworks.torch import enable
    >>> layer, x = torch.nn.Conv2d(3, 8, 3), torch.randn(1, 3, 16, 16)
    >>> with enable():
    ...     y = layer(x)
    >>> torch.allclose(y, layer(x), atol=1e-5)
    True
    """
    patch(**options)
    try:
        yield
    finally:
        unpatch()


def patch(
    only: Iterable[str] | None = None,
    except_: Iterable[str] = (),
    layers: Iterable[torch.nn.Module] | None = None,
    find: bool = True,
    compile_after: int | None = None,
    least: int = calls.LEAST_ELEMENTS,
) -> None:
    """Put bedstone under PyTorch's operators until `unpatch()`; calls count, so that as many
    unpatches undo it.

    only, except_  names of operators, as `operators()` lists them: these alone; all but these
    layers         modules: only what runs inside their forward and backward is taken
    find           measure both sides when a kind of call (operator, shapes, strides, dtypes,
                   settings) is compiled, and keep the quicker; False: bedstone's wherever it can
    compile_after  the call of a kind at which bedstone compiles it, PyTorch's kernel serving those
                   before; 1: the first. None: when compiling can have paid, the 2nd to the 32nd,
                   by the size of the problem
    least          elements under which softmax, activations and normalisation are left alone

    Meanwhile bedstone has as many threads as PyTorch (`torch.get_num_threads()`), and where that is
    known PyTorch's own, those of its OpenMP runtime. Raises
    InvalidDescriptor for a name that is not known, and BedstoneError where PyTorch is too old
    (2.9).
    """
    global _depth, _layers
    chosen = _chosen(only, except_)
    if not isinstance(least, int) or least < 0:
        raise InvalidDescriptor("least", least, "a number of elements, 0 or more")
    if compile_after is not None and (not isinstance(compile_after, int) or compile_after < 1):
        raise InvalidDescriptor("compile_after", compile_after, "a number of calls, 1 or more")
    with _lock:
        if _depth == 0:
            if not hasattr(torch.library, "get_kernel"):
                raise BedstoneError(
                    f"PyTorch {torch.__version__} has no torch.library.get_kernel (2.9 has); "
                    "bedstone.frameworks.torch.ops works without it"
                )
            _layers = None if layers is None else Layers(layers)
            calls.settings.least = least
            calls.settings.find, calls.settings.compile_after = find, compile_after
            calls.settings.active = None if _layers is None else _layers.active
            _forget_if_other((find, compile_after))
            threads, team = torch.get_num_threads(), _team()
            bedstone.set_default_num_threads(threads, over_choice=True, team=team)
            _install(chosen)
        _depth += 1


def unpatch() -> None:
    """Undo a `patch()`. Raises BedstoneError if there is none."""
    global _depth, _layers
    with _lock:
        if _depth == 0:
            raise BedstoneError("unpatch: PyTorch's operators are not patched")
        _depth -= 1
        if _depth == 0:
            for library in _libraries:
                library._destroy()
            _libraries.clear()
            if _layers is not None:
                _layers.remove()
                _layers = None
            calls.settings.active = None
            bedstone.set_default_num_threads(None)


@functools.cache
def _team() -> int | None:
    """The function by which PyTorch's kernels start OpenMP's threads; None where they do not."""
    folder = Path(torch.__file__).parent / "lib"
    for path in folder.glob("*torch_cpu.*"):
        with contextlib.suppress(OSError, AttributeError):
            # A symbol of the runtime that this library is linked to, of whatever name.
            parallel = ctypes.CDLL(str(path)).GOMP_parallel
            return ctypes.cast(parallel, ctypes.c_void_p).value
    return None


def _forget_if_other(options: tuple[Any, ...]) -> None:
    """What was decided under other options, of a patch or of bedstone, is decided anew; else a
    later patch goes on where the last one ended."""
    global _decided
    with bedstone.config() as now:
        decided = (*options, now.choice_key, torch.get_num_threads())
    if decided != _decided:
        for operator in OPERATORS:
            operator.forget()
    _decided = decided


def enabled() -> bool:
    """True while PyTorch's operators are patched."""
    return _depth > 0


def operators() -> tuple[str, ...]:
    """The names of the operators that `patch` can take over."""
    return tuple(NAMES)


def _chosen(only: Iterable[str] | None, except_: Iterable[str]) -> list[Operator]:
    for argument, names in (("only", only), ("except_", except_)):
        if isinstance(names, str):
            raise InvalidDescriptor(argument, names, "a list of names of operators")
        for name in names or ():
            if name not in NAMES:
                raise InvalidDescriptor(argument, name, f"one of {', '.join(NAMES)}")
    wanted = list(NAMES) if only is None else list(only)
    return [NAMES[name] for name in wanted if name not in list(except_)]


def _install(chosen: Iterable[Operator]) -> None:
    keys = ["CPU"] + (["CUDA"] if torch.cuda.is_available() else [])
    for key in keys:
        library = torch.library.Library("aten", "IMPL")
        _libraries.append(library)
        for operator in chosen:
            try:
                native = torch.library.get_kernel(f"aten::{operator.name}", key)
            except RuntimeError:  # this version or device has no such operator
                continue
            kept = calls.Kernel(native)
            if (operator.name, key) == ("convolution", "CPU"):
                inner = torch.library.get_kernel("aten::_convolution", key)
                kept = calls.Kernel(native, inner, CUDNN_FLAGS)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that a kernel is overridden
                library.impl(
                    operator.name, operator.bind(kept, key == "CPU"), key, with_keyset=True
                )
