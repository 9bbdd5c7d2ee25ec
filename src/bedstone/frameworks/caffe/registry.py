"""Layer types by name: `@register("Convolution")` on a class, `layer_class("Convolution")`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from bedstone.spec.errors import InvalidDescriptor

# The modules that register layers; a new kind of layer is a class in one of them, or a new one.
MODULES = (
    "data_layers",
    "data_layers_files",
    "layers_activation",
    "layers_convolution",
    "layers_loss",
    "layers_normalization",
    "layers_pooling",
    "layers_product",
    "layers_shape",
)
_classes: dict[str, type] = {}


def register(name: str) -> Callable[[type], type]:
    """Class decorator: the layer type of that name."""

    def add(kind: type) -> type:
        _classes[name] = kind
        return kind

    return add


def layer_types() -> tuple[str, ...]:
    """The names of all layer types."""
    _load()
    return tuple(sorted(_classes))


def layer_class(name: str, layer: str) -> Any:
    """The class of a layer type; `layer` is named in the error."""
    _load()
    if name not in _classes:
        raise InvalidDescriptor(f"layer {layer}: type", name, f"one of {', '.join(layer_types())}")
    return _classes[name]


def _load() -> None:
    for module in MODULES:
        importlib.import_module(f"bedstone.frameworks.caffe.{module}")
