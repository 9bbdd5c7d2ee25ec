"""The two conventions of every function, made from one implementation.

An implementation takes the C function's inputs, in order, and returns its results. From it come

    cudnnF(inputs...)                       returns the results; raises CudnnError
    cudnnF(inputs..., pointers...)          writes them through the pointers; raises CudnnError
    cudnnF_status(inputs..., pointers...)   the C convention: writes them, returns the status

so that programs written against a ctypes wrapper module, and against the bare library, both run.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from enum import IntEnum
from types import ModuleType
from typing import Any

from bedstone.compat.cudnn_arguments import writer
from bedstone.compat.cudnn_status import EXPECTED_ERRORS, SUCCESS, CudnnError, status_of
from bedstone.plan import log

Function = Callable[..., Any]


class Signature:
    """The parameters of a C function: inputs, then pointers for its results."""

    def __init__(self, implementation: Function, results: tuple[str, ...]) -> None:
        self.name = implementation.__name__
        self.parameters = tuple(inspect.signature(implementation).parameters.values())
        positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.inputs = tuple(p.name for p in self.parameters if p.kind is positional)
        self.results = results
        self.names = self.inputs + results

    def positional(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """`args` with what is given by name appended in order, taken out of `named`."""
        values = list(args)
        for name in self.names[len(args) :]:
            if name not in named:
                break
            values.append(named.pop(name))
        return tuple(values)

    def refuse_count(self, count: int) -> TypeError:
        """A wrong number of arguments is a mistake in the program, not a status."""
        return TypeError(f"{self.name} takes ({', '.join(self.names)}), not {count} arguments")

    def shown(self, pointers_may_be_omitted: bool) -> inspect.Signature:
        """For help(): the pointers follow the inputs."""
        empty = inspect.Parameter.empty
        default = None if pointers_may_be_omitted else empty
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        inputs = [p.replace(annotation=empty) for p in self.parameters if p.kind is kind]
        rest = [p.replace(annotation=empty) for p in self.parameters if p.kind is not kind]
        pointers = [inspect.Parameter(name, kind, default=default) for name in self.results]
        return inspect.Signature([*inputs, *pointers, *rest])


def entry(*results: str) -> Callable[[Function], Function]:
    """Decorates an implementation; `results` names the C function's result pointers."""

    def decorate(implementation: Function) -> Function:
        signature = Signature(implementation, results)
        raising = _with_pointers(implementation, signature) if results else implementation
        call: Any = _raising(raising, signature)
        call.c_names = signature.names
        call.results = results
        call.status_form = _status_form(implementation, signature)
        call.__signature__ = signature.shown(pointers_may_be_omitted=True)
        return call  # type: ignore[no-any-return]

    return decorate


def _raising(implementation: Function, signature: Signature) -> Function:
    @functools.wraps(implementation)
    def call(*args: Any, **named: Any) -> Any:
        try:
            return implementation(*args, **named)
        except CudnnError:
            raise
        except EXPECTED_ERRORS as error:
            raise CudnnError(status_of(error), signature.name, str(error)) from error

    return call


def _with_pointers(implementation: Function, signature: Signature) -> Function:
    inputs, results = len(signature.inputs), signature.results

    @functools.wraps(implementation)
    def call(*args: Any, **named: Any) -> Any:
        if len(args) == inputs and not named:
            return implementation(*args)
        args = signature.positional(args, named)
        if len(args) == inputs:
            return implementation(*args, **named)
        if len(args) != len(signature.names):
            raise signature.refuse_count(len(args))
        writers = [writer(name, pointer) for name, pointer in zip(results, args[inputs:])]
        found = implementation(*args[:inputs], **named)
        for write, value in zip(writers, found if len(results) > 1 else (found,)):
            write(value)
        return None

    return call


def _status_form(implementation: Function, signature: Signature) -> Function:
    called = _with_pointers(implementation, signature)
    count = len(signature.names)

    @functools.wraps(implementation)
    def call(*args: Any, **named: Any) -> int:
        if named:
            args = signature.positional(args, named)
        if len(args) != count:
            raise signature.refuse_count(len(args))
        try:
            called(*args, **named)
        except Exception as error:  # a C program has no exceptions: each becomes a status
            status = status_of(error)
            log.info("%s: %s: %s", signature.name, status.name, error)
            return status
        return SUCCESS

    shown: Any = call
    shown.__name__ = f"{signature.name}_status"
    shown.__qualname__ = shown.__name__
    shown.__doc__ = f"As {signature.name}, in the C convention: returns the status code."
    shown.__signature__ = signature.shown(pointers_may_be_omitted=False)
    return call


def valued(c_form: Function | None = None) -> Callable[[Function], Function]:
    """Decorates a function that answers with a value in C too, not with a status; `c_form` is it
    as ctypes would give it, where that differs."""

    def decorate(implementation: Function) -> Function:
        signature = Signature(implementation, ())
        call: Any = _raising(implementation, signature)
        call.c_names, call.results, call.status_form = signature.names, (), None
        call.c_form = c_form or call
        return call  # type: ignore[no-any-return]

    return decorate


def publish(
    namespace: dict[str, Any],
    version: str,
    parts: Sequence[ModuleType],
    enumerations: Sequence[type[IntEnum]],
) -> tuple[list[str], Library]:
    """Completes a version's module: the functions of its parts, all status forms, enumerations
    also by their C names ("..._t"), and their members as constants. Returns the public names and
    the library."""
    for part in parts:
        namespace.update({n: f for n, f in vars(part).items() if hasattr(f, "c_names")})
    functions = {n: f for n, f in namespace.items() if hasattr(f, "c_names")}
    c_forms = {n: f.status_form or f.c_form for n, f in functions.items()}
    added: dict[str, Any] = {f"{n}_status": f.status_form for n, f in functions.items()}
    added = {name: form for name, form in added.items() if form is not None}
    for kind in enumerations:
        name = next(n for n, found in namespace.items() if found is kind)
        added |= {name: kind, f"{name}_t": kind, **kind.__members__}
    namespace.update(added)
    return [*functions, *added], Library(version, c_forms)


class Library:
    """The functions under their own names in the C convention, as `ctypes.CDLL` would give them:
    results are written through pointers and the status is returned. `argtypes` and `restype` may
    be set on them, without effect."""

    def __init__(self, version: str, functions: dict[str, Function]) -> None:
        self._name = f"bedstone.compat.{version}"
        for name, function in functions.items():
            setattr(self, name, function)

    def __repr__(self) -> str:
        return f"<the functions of {self._name} in the C convention>"
