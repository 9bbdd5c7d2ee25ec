"""Finds algorithms: backends/<backend>/<primitive>.py ends in a tuple ALGORITHMS.

A backend package says in `DEVICE_KINDS` where it runs and may have `missing() -> str | None`, the
reason why it cannot be used here. Packages outside bedstone join by an entry point of the group
"bedstone.backends" that names such a package; they are asked before the built-in ones.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from importlib.metadata import entry_points
from types import ModuleType

from bedstone.plan import config
from bedstone.plan.algorithm import Algorithm
from bedstone.plan.device import Device
from bedstone.spec.errors import InvalidDescriptor

BUILT_IN = ("gluon", "triton", "cpu", "reference")  # fastest first; reference fills every gap


@functools.cache
def _packages() -> dict[str, str]:
    """Backend name -> package, outside ones first, in the order in which they are asked."""
    found = {point.name: point.value for point in entry_points(group="bedstone.backends")}
    found.update({name: f"bedstone.backends.{name}" for name in BUILT_IN})
    return found


@functools.cache
def _package(name: str) -> ModuleType | None:
    package = _packages()[name]
    return importlib.import_module(package) if importlib.util.find_spec(package) else None


@functools.cache
def backend_missing(name: str) -> str | None:
    """None if the backend can be used here, else why not."""
    package = _package(name)
    if package is None:
        return f"the package {_packages()[name]} is not installed"
    missing = getattr(package, "missing", None)
    return missing() if missing else None


@functools.cache
def algorithms_of(backend: str, primitive: str) -> tuple[Algorithm, ...]:
    """The backend's ALGORITHMS for the primitive; () if it has none or cannot be used here."""
    return () if backend_missing(backend) is not None else every_algorithm(backend, primitive)


def every_algorithm(backend: str, primitive: str) -> tuple[Algorithm, ...]:
    """The backend's ALGORITHMS for the primitive, also where its device is not at hand.

    Raises ImportError where its kernel language is not installed.
    """
    module = f"{_packages()[backend]}.{primitive}"
    if importlib.util.find_spec(module) is None:
        return ()
    return tuple(importlib.import_module(module).ALGORITHMS)


def backends() -> tuple[str, ...]:
    """Backends in the order in which they are asked, as the settings narrow them."""
    known = tuple(_packages())
    wanted = config.current().backend
    if not wanted:
        return known
    chosen = tuple(word.strip() for word in wanted.split(",") if word.strip())
    for name in chosen:
        if name not in known:
            raise InvalidDescriptor("backend", name, f"one of {known}")
    return chosen


def device_kinds(backend: str) -> tuple[str, ...]:
    """Kinds of device on which the backend runs."""
    package = _package(backend)
    return tuple(getattr(package, "DEVICE_KINDS", ("cpu",))) if package is not None else ()


def candidates(primitive: str, device: Device) -> tuple[Algorithm, ...]:
    """Every algorithm for the primitive on that kind of device, in the order of the backends."""
    found: list[Algorithm] = []
    for backend in backends():
        if device.kind in device_kinds(backend):
            found.extend(algorithms_of(backend, primitive))
    return tuple(found)


def unavailable(device: Device) -> dict[str, str]:
    """Backends that would serve this kind of device but cannot be used here, with the reason."""
    reasons = {}
    for name in backends():
        reason = backend_missing(name)
        if reason is not None and device.kind in (device_kinds(name) or (device.kind,)):
            reasons[name] = reason
    return reasons


def backend_attribute(backend: str, name: str) -> object:
    """An attribute of the backend's package, or None."""
    return getattr(_package(backend), name, None)
