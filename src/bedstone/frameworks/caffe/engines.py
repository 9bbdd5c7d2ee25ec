"""Which engine computes a layer: bedstone's plans, or NumPy in Caffe's own way.

`engine: CUDNN` and DEFAULT mean bedstone; CAFFE means the native path (per-image lowering and BLAS
for convolution). Where bedstone does not take a layer it falls back to the native path, as Caffe
does, and says so: `net.engines.rows`. On a device, a layer that has no kernel or no code there
runs on the host, between copies: a row "device" says why.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np

from bedstone import Plan, Problem
from bedstone.frameworks.caffe import schema
from bedstone.frameworks.caffe.spaces import HOST, Host
from bedstone.frameworks.planning import compiled_plan

ALIGNMENT = 64
log = logging.getLogger("bedstone.caffe")


@dataclass(frozen=True)
class Row:
    """What runs one direction of a layer."""

    layer: str
    direction: str
    engine: str  # "bedstone", "native" or (direction "device") "host"
    what: str  # the algorithm, or why not bedstone


class NoDeviceKernel(Exception):
    """There is none for a problem; the message says why."""


class Kernel:
    """A plan with the network's workspace; called with arrays in the order of the operands."""

    def __init__(self, engines: Engines, plan: Plan, space: Host) -> None:
        self._engines, self._plan, self._space = engines, plan, space
        self._size = plan.workspace_size
        self._arrays: tuple[Any, ...] = ()
        self._addresses: list[int] = []

    def __call__(self, *arrays: Any, alpha: float = 1.0, beta: float = 0.0) -> None:
        space = self._space
        workspace = self._engines.workspace(self._size, space) if self._size else 0
        if not (self._arrays and all(map(is_, arrays, self._arrays))):
            self._arrays = arrays  # (the last call's arrays lie where they lay: asking costs time)
            self._addresses = [space.address(array) for array in arrays]
        self._plan(
            *self._addresses, workspace=workspace, alpha=alpha, beta=beta, stream=space.stream()
        )


class Engines:
    """The choice for every layer of a network, and the workspace that their plans share.

    forced  "CAFFE" or "CUDNN" for all layers; None or "DEFAULT" for what each layer says
    """

    def __init__(self, forced: str | None = None) -> None:
        self.forced = None if forced == "DEFAULT" else forced
        self._rows: dict[tuple[str, str], Row] = {}
        self._memory: dict[Host, Any] = {}

    def wanted(self, layer: Any, param: Any = None) -> bool:
        """Whether a layer is to run on bedstone, by the `engine` field of its parameters."""
        engine = self.forced
        if engine is None:
            engine = schema.enum_name(param, "engine") if param is not None else "DEFAULT"
        if engine == "CAFFE":
            self._note(layer.name, "all", "native", "engine: CAFFE")
        return engine != "CAFFE"

    def kernel(self, layer: Any, direction: str, problem: Problem) -> Kernel | None:
        """A kernel for a problem, where the layer computes; None, noted, where bedstone has none.

        Raises NoDeviceKernel where there is none on a device.
        """
        plan = compiled_plan(problem, layer.space.plans)
        if isinstance(plan, str):
            if layer.space is not HOST:
                raise NoDeviceKernel(f"{direction}: {plan}")
            self.fall_back(layer, direction, plan)
            return None
        self._note(layer.name, direction, "bedstone", plan.algorithm)
        return Kernel(self, plan, layer.space)

    def fall_back(self, layer: Any, direction: str, reason: str) -> None:
        """Note that a layer runs natively, and why."""
        self._note(layer.name, direction, "native", reason)
        log.info("layer %s, %s: native path: %s", layer.name, direction, reason)

    def to_host(self, layer: Any, reason: str) -> None:
        """Note that a layer of a network on a device runs on the host, and why."""
        self._note(layer.name, "device", "host", reason)
        log.info("layer %s runs on the host: %s", layer.name, reason)

    def _note(self, layer: str, direction: str, engine: str, what: str) -> None:
        self._rows[layer, direction] = Row(layer, direction, engine, what)

    @property
    def rows(self) -> list[Row]:
        """What runs where, in the order of the layers."""
        return list(self._rows.values())

    def __str__(self) -> str:
        return "\n".join(f"{r.layer:20} {r.direction:16} {r.engine:9} {r.what}" for r in self.rows)

    def workspace(self, size: int, space: Host) -> int:
        """The address of so many bytes in a space, shared by all layers."""
        held = self._memory.get(space)
        if held is None or held.nbytes < size + ALIGNMENT:
            held = self._memory[space] = space.empty((size + ALIGNMENT,), np.uint8)
        return -(-space.address(held) // ALIGNMENT) * ALIGNMENT

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace held."""
        return sum(held.nbytes for held in self._memory.values())
