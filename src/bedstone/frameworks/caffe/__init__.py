"""Caffe's networks on bedstone: its files, layers, solvers and command line.

from bedstone.frameworks.caffe import Net, Solver

net = Net("deploy.prototxt", "TEST", weights="net.caffemodel")
scores = net.forward(data=images)["prob"]
"""

from __future__ import annotations

from typing import Any

__all__ = ["Net", "Solver"]


def __getattr__(name: str) -> Any:
    """Net and Solver, imported (and protobuf with them) when they are asked for."""
    if name == "Net":
        from bedstone.frameworks.caffe.net import Net

        return Net
    if name == "Solver":
        from bedstone.frameworks.caffe.solver import Solver

        return Solver
    raise AttributeError(f"module {__name__} has no attribute {name!r}")
