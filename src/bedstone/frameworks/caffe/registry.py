"""Layer types by name: `@register("Convolution")` on a class, `layer_class("Convolution")`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from bedstone.frameworks.caffe.layer import wrong

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


def layer_class(param: Any) -> Any:
    """The class of a layer's type."""
    _load()
    if param.type not in _classes:
        raise wrong(param, "type", param.type, f"one of {', '.join(layer_types())}")
    return _classes[param.type]


def _load() -> None:
    for module in MODULES:
        importlib.import_module(f"bedstone.frameworks.caffe.{module}")
