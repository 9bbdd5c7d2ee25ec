"""`bedstone caffe time --gpu N`: a network on a GPU, beside PyTorch (cuDNN) running the same one.

Both have the same weights and the same images, which lie on the device before the clock starts:
layers without bottoms are not timed. First a training pass of each, with the same dropout masks,
is compared: the loss, and all that every layer computes. A pass is timed by the clock, from a
device at rest until it has done everything; a layer by CUDA events on either side of it, so what
the host does meanwhile does not count unless the device waits for it. The two take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import bedstone
from bedstone.frameworks.caffe import io, schema, timing
from bedstone.frameworks.caffe.net import Net
from bedstone.frameworks.caffe.solver import Solver, batch_of
from bedstone.frameworks.caffe.spaces import HOST, Torch, space_of
from bedstone.frameworks.caffe.torch_network import TorchNetwork
from bedstone.spec.errors import InvalidDescriptor

# Largest |ours - theirs| over |theirs|, of the loss, and of what one layer computes. Products of a
# math mode lose 2^-24 or 2^-11 each; a network carries that on. (In float32 most layers agree to
# 1e-6, but cuDNN's benchmark may take filter gradients that are off by more: for 5x5 filters of
# CaffeNet's second layer 4e-3 from float64, where bedstone is off by 8e-7.)
TOLERANCES = {"ieee": 1e-3, "tf32": 3e-2}
LAYER_TOLERANCES = {"ieee": 5e-3, "tf32": 5e-3}
WARMING = 3  # iterations of each side before the clock counts
SETTINGS = {"base_lr": 1e-6, "momentum": 0.9, "weight_decay": 0.0005}


class Marks:
    """Points in the device's time."""

    def __init__(self, space: Torch) -> None:
        self.space, self._marks = space, [space.mark()]

    def mark(self) -> None:
        """Now, in the device's queue."""
        self._marks.append(self.space.mark())

    def milliseconds(self) -> list[float]:
        """Between each mark and the next, when all is done."""
        self.space.synchronize()
        return [self.space.between(a, b) for a, b in zip(self._marks, self._marks[1:])]


class Side:
    """One side's times: passes by the clock, layers by marks."""

    def __init__(self, name: str, space: Torch) -> None:
        self.name, self.space = name, space
        self.passes: dict[str, list[float]] = {each: [] for each in timing.PASSES}
        self.layers: dict[str, list[list[float]]] = {"forward": [], "backward": []}

    def forget(self) -> None:
        """Start again."""
        for times in (*self.passes.values(), *self.layers.values()):
            times.clear()

    def timed(self, name: str, call: Callable[[], Any]) -> None:
        """One pass, until the device is at rest."""
        self.space.synchronize()
        start = time.perf_counter()
        call()
        self.space.synchronize()
        self.passes[name].append(1e3 * (time.perf_counter() - start))

    def each(self, direction: str, call: Callable[[int], Any], layers: Sequence[int]) -> None:
        """Layer by layer, with marks between."""
        marks = Marks(self.space)
        for i in layers:
            call(i)
            marks.mark()
        self.layers[direction].append(marks.milliseconds())

    def summary(self, names: Sequence[str]) -> timing.Side:
        """Medians."""
        passes = {name: statistics.median(times) for name, times in self.passes.items()}
        passes["overall"] = sum(passes.values())
        spread = {name: (min(times), max(times)) for name, times in self.passes.items()}
        forward, backward = (
            [statistics.median(each) for each in zip(*self.layers[d])] for d in self.layers
        )
        return timing.Side(
            self.name, passes, spread, dict(zip(names, forward)),
            dict(zip(reversed(names), backward)),
        )  # fmt: skip


class Ours(Side):
    """bedstone's networks."""

    def __init__(self, param: Any, weights: str | None, space: Torch, math: str) -> None:
        super().__init__("bedstone", space)
        settings = schema.SolverParameter(
            net_param=param, lr_policy="fixed", random_seed=1, test_iter=[1], test_interval=1,
            **SETTINGS,
        )  # fmt: skip
        self.solver = Solver(settings, gpu=space, math=math)
        if weights is not None:
            self.solver.copy_weights(weights)
        self.net, self.test_net = self.solver.net, self.solver.test_nets[0]
        for net in (self.net, self.test_net):
            for i, bottom in enumerate(net.bottoms):
                if not bottom:
                    net.forward_layer(i)
                    for blob in net.tops[i]:  # on the device before the clock starts
                        blob.array("data", net.space)
        self.computing = [i for i, bottom in enumerate(self.net.bottoms) if bottom]
        self.testing = [i for i, bottom in enumerate(self.test_net.bottoms) if bottom]

    def forward(self) -> None:
        for i in self.computing:
            self.net.forward_layer(i)

    def backward(self) -> None:
        for i in reversed(self.computing):
            self.net.backward_layer(i)

    def test(self) -> None:
        for i in self.testing:
            self.test_net.forward_layer(i)

    def update(self) -> None:
        self.solver.apply_update()
        self.solver.iter += 1
        self.net.clear_param_diffs()

    def iteration(self) -> None:
        self.timed("forward", self.forward)
        self.timed("backward", self.backward)
        self.timed("update", self.update)
        self.timed("testing", self.test)
        self.each("forward", self.net.forward_layer, self.computing)
        self.each("backward", self.net.backward_layer, self.computing[::-1])
        self.net.clear_param_diffs()


class Theirs(Side):
    """PyTorch's."""

    def __init__(self, ours: Ours, math: str) -> None:
        super().__init__("torch", ours.space)
        self.network = TorchNetwork(ours.net, math)
        self.test_network = TorchNetwork(ours.test_net, math, self.network)
        self.optimizer = self.network.optimizer(**SETTINGS)

    def iteration(self) -> None:
        self.timed("forward", self.network.forward)
        self.timed("backward", self.network.backward)
        self.timed("update", self._update)
        self.timed("testing", self.test_network.test)
        self.each("forward", self.network.forward_layer, self.network.computing)
        self.each("backward", self.network.backward_layer, self.network.computing[::-1])
        self.network.forget()

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def compare(ours: Ours, network: TorchNetwork, math: str) -> dict[str, float]:
    """Check a training pass of ours against PyTorch: the loss of the whole, and layer by layer,
    from the same bottoms and gradients of tops, the tops and the gradients of bottoms and
    parameters. (Over the whole network rounding decides some signs and maxima, and a gradient
    differs more than any layer's arithmetic.) Returns |ours - theirs| / |theirs| by name.

    Raises InvalidDescriptor where one is above TOLERANCES.
    """
    net, found = ours.net, Differences(math)
    net.clear_param_diffs()
    loss, kept = 0.0, {}
    for i in ours.computing:
        bottoms, tops = ([b.on(net.space) for b in each] for each in (net.bottoms[i], net.tops[i]))
        inputs = [bottom.data.clone() for bottom in bottoms]
        loss += net.forward_layer(i)
        kept[i] = (inputs, [top.data.clone() for top in tops])
    found.add("loss", loss, network.forward(same_masks=True), TOLERANCES[math])
    for i in reversed(ours.computing):
        slopes = [top.on(net.space).diff.clone() for top in net.tops[i]]
        net.backward_layer(i)
        inputs, outputs = kept.pop(i)
        results, gradients = network.same_layer(i, inputs, slopes)
        layer = net.layers[i]
        for mine, theirs in zip(outputs, results):
            found.add(layer.name, mine, theirs)
        blobs = [b for b, wanted in zip(net.bottoms[i], net.propagate_down(i)) if wanted]
        for blob, theirs in zip([*blobs, *layer.blobs], gradients):
            found.add(f"{layer.name}'s gradient", blob.on(net.space).diff, theirs)
    net.clear_param_diffs()
    network.forget()
    return found.of


class Differences:
    """|ours - theirs| / |theirs| by name; refuses what is above the tolerance of a layer."""

    def __init__(self, math: str) -> None:
        self.of: dict[str, float] = {}
        self._tolerance = LAYER_TOLERANCES[math]

    def add(self, name: str, ours: Any, theirs: Any, tolerance: float | None = None) -> None:
        """Compare two arrays or numbers."""
        mine, other = (
            np.asarray(a.detach().cpu() if hasattr(a, "detach") else a, np.float64).reshape(-1)
            for a in (ours, theirs)
        )
        apart = float(np.linalg.norm(mine - other) / max(np.linalg.norm(other), 1e-30))
        limit = self._tolerance if tolerance is None else tolerance
        if not apart <= limit:
            expected = f"PyTorch's within {limit:g} of its size"
            raise InvalidDescriptor(name, f"apart by {apart:.3g} of its size", expected)
        self.of[name] = max(apart, self.of.get(name, 0.0))


def measure(
    model: str,
    iterations: int,
    gpu: int | Torch,
    *,
    peer: str | None = None,
    math: str = "ieee",
    batch: int | None = None,
    weights: str | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> timing.Timing:
    """Time a network on a GPU, alone or beside `peer` ("torch")."""
    if iterations < 1:
        raise InvalidDescriptor("iterations", iterations, "1 or more")
    space = space_of(gpu)
    if not isinstance(space, Torch):
        raise InvalidDescriptor("gpu", gpu, "a device")
    param = io.read_net(model)
    if batch is not None:
        timing.set_batch(param, batch)
    tell("compiling")
    ours = Ours(param, weights, space, math)
    sides: list[Any] = [ours]
    differences: dict[str, float] = {}
    if peer is not None:
        theirs = Theirs(ours, math)
        tell("comparing")
        differences = compare(ours, theirs.network, math)
        sides.insert(0, theirs)
    for side in sides:
        tell(f"warming up {side.name}")
        for _ in range(WARMING):
            side.iteration()
        side.forget()
    for i in range(iterations):
        tell(f"iteration {i + 1}/{iterations}")
        for side in sides if i % 2 == 0 else sides[::-1]:
            side.iteration()
    net: Net = ours.net
    computing = [net.layers[i] for i in ours.computing]
    names = [layer.name for layer in computing]
    device = bedstone.default_handle(space.plans).device
    machine = timing.machine() | {
        "device": device.name, "architecture": device.architecture, "math": math,
        "torch": space.versions(), "host only": ", ".join(
            layer.name for layer in computing if layer.space is HOST
        ) or "none",
        "clock": "passes: clock until the device is at rest; layers: CUDA events; no data layers",
        "largest difference from the peer":
            f"{max(differences.values(), default=float('nan')):.3g}",
    }  # fmt: skip
    return timing.Timing(
        net.name, batch_of(net), batch_of(ours.test_net), iterations, machine,
        [(layer.name, layer.type) for layer in computing],
        {side.name: side.summary(names) for side in sides},
    )  # fmt: skip
