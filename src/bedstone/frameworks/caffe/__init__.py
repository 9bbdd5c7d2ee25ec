"""Caffe's networks on bedstone: its files, layers, solvers and command line.

from bedstone.frameworks.caffe import Net, Solver

net = Net("deploy.prototxt", "TEST", weights="net.caffemodel")
scores = net.forward(data=images)["prob"]
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "Classifier", "Net", "Solver", "Transformer", "current_device", "set_device", "set_mode_cpu",
    "set_mode_gpu",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Net and Solver, imported (and protobuf with them) when they are asked for."""
    if name == "Net":
        from bedstone.frameworks.caffe.net import Net

        return Net
    if name == "Solver":
        from bedstone.frameworks.caffe.solver import Solver

        return Solver
    if name in ("Classifier", "Transformer"):
        from bedstone.frameworks.caffe import classifying

        return getattr(classifying, name)
    if name in __all__:
        from bedstone.frameworks.caffe import spaces

        return getattr(spaces, name)
    raise AttributeError(f"module {__name__} has no attribute {name!r}")
