"""Opaque objects: handles and descriptors, known to the caller by a number that fits a pointer.

A number is never used twice, so a destroyed object, one of another kind, and a number that was
never given out are all told apart from a live one. What a descriptor was last set to is a frozen
value of bedstone.spec with a small integer that stands for it in the keys of prepared calls.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple, TypeVar

from bedstone.compat.cudnn_arguments import address_of
from bedstone.spec.errors import InvalidDescriptor

FIRST_NUMBER = 0xBED_0000_0000  # far from small integers: a size or an index is no descriptor
STEP = 64  # looks aligned, as a pointer would
STATES_KEPT = 1 << 16  # distinct settings remembered before the table starts afresh


class State(NamedTuple):
    """What a descriptor was set to; equal settings share one version number."""

    value: Any
    version: int


_objects: dict[int, Any] = {}
_numbers = itertools.count(FIRST_NUMBER, STEP)
_states: dict[Any, State] = {}
_versions = itertools.count(1)


class Descriptor:
    """Nothing yet, or the State that it was last set to (replaced as a whole: threads see the old
    setting or the new one)."""

    name = "descriptor"
    state: State | None = None

    def set(self, value: Any) -> None:
        """Remember a frozen, hashable setting."""
        state = _states.get(value)
        if state is None:
            if len(_states) >= STATES_KEPT:
                _states.clear()
            state = _states.setdefault(value, State(value, next(_versions)))
        self.state = state


class TensorDescriptor(Descriptor):
    """Of a TensorDesc."""

    name = "tensor descriptor"


class FilterDescriptor(Descriptor):
    """Of a packed TensorDesc."""

    name = "filter descriptor"


class ConvolutionDescriptor(Descriptor):
    """v2: of a ConvolutionDesc."""

    name = "convolution descriptor"


class BoundConvolutionDescriptor(Descriptor):
    """v1: of a ConvolutionDesc with the dims of its images and filters."""

    name = "convolution descriptor of v1"


class PoolingDescriptor(Descriptor):
    """Of a PoolingDesc."""

    name = "pooling descriptor"


Kind = TypeVar("Kind")


def register(thing: Any) -> int:
    """The number by which the caller will know the object."""
    number = next(_numbers)
    _objects[number] = thing
    return number


def find(kind: type[Kind], argument: str, number: object) -> Kind:
    """The live object of that kind. Raises InvalidDescriptor for any other number."""
    try:
        found = _objects.get(number)  # type: ignore[call-overload]
    except TypeError:
        found = None
    if found is None:
        number = address_of(argument, number)
        found = _objects.get(number)
    if type(found) is kind:
        return found
    wanted = getattr(kind, "name", "")
    if found is not None:
        raise InvalidDescriptor(argument, f"a {found.name}", f"a {wanted}")
    if not number:
        raise InvalidDescriptor(argument, None, f"a {wanted}, not NULL")
    raise InvalidDescriptor(argument, number, f"a {wanted} that was created and not destroyed")


def state(kind: type[Descriptor], argument: str, number: object) -> State:
    """What the descriptor was set to. Raises InvalidDescriptor while it was not."""
    found = find(kind, argument, number).state
    if found is None:
        raise InvalidDescriptor(argument, number, f"a {kind.name} that has been set")
    return found


def destroy(kind: type[Any], argument: str, number: object) -> None:
    """Forget the object; the same number is not valid again."""
    find(kind, argument, number)
    if _objects.pop(address_of(argument, number), None) is None:
        raise InvalidDescriptor(argument, number, f"a {kind.name} that is not destroyed already")
