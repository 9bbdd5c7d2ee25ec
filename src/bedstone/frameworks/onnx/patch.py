"""`enable()`: bedstone under every package that creates an `onnxruntime.InferenceSession`.

Packages often take the class's name at import (`from onnxruntime import InferenceSession`), so
replacing the attribute of the module would miss them. The class itself gets a `__new__` that, while
enabled, answers with bedstone's session; it is installed once and does nothing when not enabled.
Without onnxruntime a stand-in module of that name is offered while enabled.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

from bedstone.frameworks.onnx.session import PROVIDER, InferenceSession

_lock = threading.Lock()
_depth = 0
_patched: set[type] = set()


@contextlib.contextmanager
def enable() -> Iterator[None]:
    """Sessions created inside the block, by any thread, are bedstone's. Blocks nest; sessions
    created inside go on working afterwards."""
    global _depth
    with _lock:
        _depth += 1
        if _depth == 1:
            _install()
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0 and getattr(sys.modules.get("onnxruntime"), "bedstone_stand_in", False):
                del sys.modules["onnxruntime"]


def enabled() -> bool:
    """True inside a block."""
    return _depth > 0


def _install() -> None:
    if "onnxruntime" not in sys.modules and importlib.util.find_spec("onnxruntime") is None:
        sys.modules["onnxruntime"] = _stand_in()
        return
    import onnxruntime

    native = onnxruntime.InferenceSession
    if native in _patched or native is InferenceSession:
        return

    def new(cls: type, *arguments: Any, **keywords: Any) -> Any:
        if enabled() and cls is native:
            return InferenceSession(*arguments, **keywords)
        return object.__new__(cls)

    native.__new__ = staticmethod(new)
    _patched.add(native)


class _Options:
    """Accepts any attribute, as a session's options."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **keywords: None


class _Names:
    """Stands for an enumeration whose members do not matter here."""

    def __getattr__(self, name: str) -> str:
        return name


def _stand_in() -> types.ModuleType:
    module: Any = types.ModuleType("onnxruntime")
    module.bedstone_stand_in = True
    module.__version__ = "1.18.0"
    module.InferenceSession = InferenceSession
    module.SessionOptions = module.RunOptions = _Options
    module.GraphOptimizationLevel = module.ExecutionMode = _Names()
    module.get_available_providers = lambda: [PROVIDER]
    module.get_device = lambda: "CPU"
    return module
