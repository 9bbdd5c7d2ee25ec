"""Net: a network of layers read from a NetParameter, run forward and backward.

The rules are Caffe's: layers are kept or dropped by phase, level and stage; a blob that several
layers read is split, so that its gradients add up; a layer whose top has its bottom's name works
in place; parameters of one name are shared; what needs no gradient computes none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bedstone.frameworks.caffe import io, schema, snapshots, upgrade, wire
from bedstone.frameworks.caffe.blob import Blob, array_of
from bedstone.frameworks.caffe.engines import Engines
from bedstone.frameworks.caffe.hdf5_files import hdf5_file
from bedstone.frameworks.caffe.layer import Layer, naming, wrong
from bedstone.frameworks.caffe.registry import layer_class
from bedstone.frameworks.caffe.spaces import HOST, MATHS, Host, space_of
from bedstone.spec.errors import InvalidDescriptor

PHASES = ("TRAIN", "TEST")
DTYPES = ("float32", "float64")
MULTIPLIERS = ("lr_mult", "decay_mult")  # of a parameter's learning rate and weight decay
ENGINES = (None, "DEFAULT", "CAFFE", "CUDNN")


class Net:
    """A network.

    param    a NetParameter, or the path of a .prototxt (or .caffemodel)
    phase    "TRAIN" or "TEST"
    weights  a .caffemodel (or .h5) to take parameters from
    engine   "CAFFE" or "CUDNN" for every layer, whatever the file says; None as the file says
    level, stages  the rest of the state that layers are included by
    seed     of the fillers and of layers that draw random numbers
    dtype    of all blobs and of the computation: float32, or float64
    gpu      the number of a GPU to compute on, or a space; None for what `set_mode_gpu` and
             `set_mode_cpu` said last (the CPU)
    math     on a GPU, of the products in float32: "ieee", or "tf32" for fewer digits

    Raises InvalidDescriptor, naming file or layer, for a network that makes no sense.
    """

    def __init__(
        self,
        param: Any,
        phase: str = "TRAIN",
        weights: str | Path | None = None,
        engine: str | None = None,
        level: int = 0,
        stages: Sequence[str] = (),
        seed: int | None = None,
        dtype: Any = "float32",
        gpu: int | Host | None = None,
        math: str = "ieee",
    ) -> None:
        if phase not in PHASES:
            raise InvalidDescriptor("phase", phase, f"one of {PHASES}")
        if engine not in ENGINES:
            raise InvalidDescriptor("engine", engine, f"one of {ENGINES}")
        if isinstance(param, (str, Path)):
            read = io.read_net(param)
            if weights is None and Path(param).suffix in io.BINARY:
                weights = param
        else:
            read = schema.NetParameter()
            read.CopyFrom(param)
            read = upgrade.upgrade_net(read)
        self.phase, self.level, self.stages = phase, level, tuple(stages)
        self.dtype = np.dtype(dtype)
        if self.dtype.name not in DTYPES:
            raise InvalidDescriptor("dtype", self.dtype.name, f"one of {DTYPES}")
        self.space = space_of(gpu)
        if math not in (MATHS if self.space is not HOST else MATHS[:1]):
            raise InvalidDescriptor("math", math, f"one of {MATHS} on a GPU, {MATHS[0]} elsewhere")
        self.math = math
        self.rng = np.random.default_rng(seed)
        self.engines = Engines(engine)
        self.name: str = read.name
        self.loss = 0.0
        self.layers: list[Layer] = []
        self.blobs: dict[str, Blob] = {}
        self.bottoms: list[list[Blob]] = []
        self.tops: list[list[Blob]] = []
        self.param = schema.NetParameter(name=read.name, force_backward=read.force_backward)
        self.param.layer.extend(insert_splits(included(read, self._state(read))))
        self._needs: list[list[bool]] = []  # by layer: whether each bottom's gradient is wanted
        self._runs_backward: list[bool] = []
        self.loss_weights: dict[str, float] = {}
        self._build()
        self._collect_parameters()
        if weights is not None:
            self.copy_trained_layers_from(weights)

    # Building ------------------------------------------------------------------------------------

    def _state(self, read: Any) -> Any:
        state = schema.NetState(level=self.level, stage=self.stages)
        state.MergeFrom(read.state)
        state.phase = PHASES.index(self.phase)
        return state

    def _build(self) -> None:
        available: dict[str, bool] = {}  # blobs that no layer has read yet -> need a gradient
        gradient: dict[str, bool] = {}
        for param in self.param.layer:
            param.phase = PHASES.index(self.phase)
            layer = layer_class(param)(param, self)
            bottom = []
            for name in param.bottom:
                if name not in available:
                    expected = (
                        f"the top of a layer before it ({', '.join(available) or 'none yet'})"
                    )
                    raise wrong(param, "bottom", name, expected)
                available.pop(name)
                bottom.append(self.blobs[name])
            top = self._tops_of(param, layer, available, gradient)
            with naming(param):
                layer.check_counts(bottom, top)
                layer.setup(bottom, top)
                if self.space is not HOST and layer.host_only is not None:
                    layer.to_host(layer.host_only)
                self._place(layer, param)
                layer.prepare(bottom, top)
            self._weigh(layer, param, top)
            self._decide(layer, param, bottom, gradient)
            self.layers.append(layer)
            self.bottoms.append(bottom)
            self.tops.append(top)
        self.outputs = [name for name in self.blobs if name in available]
        self.inputs = [t for p in self.param.layer if p.type == "Input" for t in p.top]
        self._prune()

    def _tops_of(
        self, param: Any, layer: Layer, available: dict[str, bool], gradient: dict[str, bool]
    ) -> list[Blob]:
        tops = []
        for i, name in enumerate(param.top):
            in_place = i < len(param.bottom) and param.bottom[i] == name
            if name in self.blobs and not in_place:
                expected = "a name of its own, or that of the layer's bottom of the same number"
                raise wrong(param, "top", name, expected)
            if not in_place:
                self.blobs[name] = Blob(dtype=self.dtype)
                gradient[name] = False
            available[name] = True
            tops.append(self.blobs[name])
        least = layer.tops if isinstance(layer.tops, int) else layer.tops[0]
        if layer.loss and not tops:  # a loss needs no name
            tops = [Blob(dtype=self.dtype) for _ in range(least)]
        return tops

    def _place(self, layer: Layer, param: Any) -> None:
        """Parameters given in the network file itself replace what fillers made."""
        if param.blobs:
            if len(param.blobs) != len(layer.blobs):
                raise layer.wrong("blobs", len(param.blobs), f"{len(layer.blobs)} of them")
            for blob, proto in zip(layer.blobs, param.blobs):
                array = array_of(proto)
                self._check_shape(layer.name, blob, array, param=param)
                wire.copy_into(array, blob.data)
            del param.blobs[:]

    def _weigh(self, layer: Layer, param: Any, top: list[Blob]) -> None:
        weights = list(param.loss_weight)
        if len(weights) not in (0, len(top)):
            raise layer.wrong("loss_weight", weights, f"one for each of {len(top)} tops")
        if not weights:
            weights = [1.0 if layer.loss and i == 0 else 0.0 for i in range(len(top))]
        layer.loss_weights = weights
        for name, weight in zip(param.top, weights):
            if weight:
                self.loss_weights[name] = weight

    def _decide(
        self, layer: Layer, param: Any, bottom: list[Blob], gradient: dict[str, bool]
    ) -> None:
        """Which gradients the layer is asked for."""
        count, given = len(bottom), list(param.propagate_down)
        if len(given) not in (0, count):
            raise layer.wrong("propagate_down", given, f"one for each of {count} bottoms")
        specs = [param.param[i] if i < len(param.param) else None for i in range(len(layer.blobs))]
        if len(param.param) > len(layer.blobs):
            raise layer.wrong("param", len(param.param), f"at most {len(layer.blobs)} of them")
        layer.param_propagate = [spec is None or spec.lr_mult != 0 for spec in specs]
        needs = given or [gradient[name] for name in param.bottom]
        if self.param.force_backward:
            needs = [True] * count
            layer.param_propagate = [True] * len(layer.blobs)
        for i in layer.no_gradient:
            if given and i < count and given[i]:
                raise layer.wrong("propagate_down", given, f"false for bottom {i}, of no gradient")
        needs = [need and i not in layer.no_gradient for i, need in enumerate(needs)]
        runs = any(needs) or any(layer.param_propagate)
        for name in param.top:
            gradient[name] = runs and layer.type not in NO_FLOW
        self._needs.append(needs)
        self._runs_backward.append(runs)

    def _prune(self) -> None:
        """Layers that no loss depends on run no backward pass; nor do those to whose tops no
        gradient is propagated down."""
        under: set[str] = set()  # blobs that a loss depends on
        cut: set[str] = set()  # blobs whose reader hands no gradient down
        for i in range(len(self.layers) - 1, -1, -1):
            layer = self.layers[i]
            bottoms, tops = layer.param.bottom, layer.param.top
            is_loss = any(layer.loss_weights)
            contributes = is_loss or any(top in under for top in tops)
            reached = is_loss or any(top not in cut for top in tops)
            if not contributes or not reached:
                self._runs_backward[i] = False
                self._needs[i] = [False] * len(bottoms)
            if contributes:
                under.update(bottoms)
            # (A layer in place has the last word on its blob: it comes first here.)
            for name, need in zip(bottoms, self._needs[i]):
                cut.discard(name) if need else cut.add(name)

    def _collect_parameters(self) -> None:
        self.params: dict[str, list[Blob]] = {}
        self.learnable_params: list[Blob] = []
        self.params_lr: list[float] = []
        self.params_weight_decay: list[float] = []
        self._given: list[set[str]] = []  # by parameter: which of its multipliers a layer has set
        owners: dict[str, tuple[Layer, int, int]] = {}
        for layer in self.layers:
            for i, blob in enumerate(layer.blobs):
                spec = layer.param.param[i] if i < len(layer.param.param) else schema.ParamSpec()
                if spec.name in owners:
                    self._share(layer, i, spec, *owners[spec.name])
                    continue
                if spec.name:
                    owners[spec.name] = (layer, i, len(self.learnable_params))
                self.learnable_params.append(blob)
                self.params_lr.append(spec.lr_mult)
                self.params_weight_decay.append(spec.decay_mult)
                self._given.append({f for f in MULTIPLIERS if spec.HasField(f)})
            if layer.blobs:
                self.params[layer.name] = layer.blobs

    def _share(self, layer: Layer, i: int, spec: Any, owner: Layer, j: int, number: int) -> None:
        blob, mine = owner.blobs[j], layer.blobs[i]
        permissive = schema.enum_name(spec, "share_mode") == "PERMISSIVE"
        fits = mine.count == blob.count if permissive else mine.shape == blob.shape
        if not fits:
            expected = f"the shape {blob.shape} of its owner, layer {owner.name}"
            raise layer.wrong(f"shared parameter {spec.name}", mine.shape, expected)
        for field, kept in zip(MULTIPLIERS, (self.params_lr, self.params_weight_decay)):
            if not spec.HasField(field):
                continue
            if field not in self._given[number]:  # the first that sets one sets it for all
                self._given[number].add(field)
                kept[number] = getattr(spec, field)
            if getattr(spec, field) != kept[number]:
                expected = f"{kept[number]:g}, as its owner, layer {owner.name}"
                raise layer.wrong(f"shared parameter {spec.name}: {field}",
                                  getattr(spec, field), expected)  # fmt: skip
        mine.share_data(blob)
        mine.share_diff(blob)

    # Running -------------------------------------------------------------------------------------

    @property
    def layer_names(self) -> list[str]:
        """Names of the layers, in order."""
        return [layer.name for layer in self.layers]

    def forward(self, **inputs: Any) -> dict[str, np.ndarray]:
        """Run all layers; arrays given by name go into input blobs first (and reshape them).
        Returns the data of the outputs; the weighted loss is in `loss`."""
        for name, values in inputs.items():
            if name not in self.inputs:
                raise InvalidDescriptor("input", name, f"one of {', '.join(self.inputs)}")
            array = np.asarray(values, self.dtype)
            self.blobs[name].reshape(*array.shape)
            self.blobs[name].data[...] = array
        self.loss = 0.0
        for i in range(len(self.layers)):
            self.loss += self.forward_layer(i)
        return {name: self.blobs[name].on(HOST).data for name in self.outputs}

    def _handed(self, i: int) -> tuple[Sequence[Any], Sequence[Any]]:
        """Bottoms and tops of layer i, with arrays where it computes."""
        if self.space is HOST:
            return self.bottoms[i], self.tops[i]
        space = self.layers[i].space
        return [b.on(space) for b in self.bottoms[i]], [t.on(space) for t in self.tops[i]]

    def forward_layer(self, i: int) -> float:
        """Run layer i; returns its part of the loss."""
        layer = self.layers[i]
        with naming(layer.param):
            layer.prepare(self.bottoms[i], self.tops[i])
            layer.forward(*self._handed(i))
        if self.space is not HOST and not layer.shows_bottom:
            for blob in self.tops[i]:
                blob.wrote("data", layer.space)
        loss = 0.0
        for weight, blob in zip(layer.loss_weights, self.tops[i]):
            if weight:
                loss += weight * float(blob.on(HOST).data.sum())
        return loss

    def backward(self) -> None:
        """Run the layers' backward passes, last to first: diffs of blobs, and of parameters, to
        which they are added."""
        for i in range(len(self.layers) - 1, -1, -1):
            self.backward_layer(i)

    def backward_layer(self, i: int) -> None:
        """Run layer i backward."""
        if not self._runs_backward[i]:
            return
        layer, needs = self.layers[i], self._needs[i]
        for weight, blob in zip(layer.loss_weights, self.tops[i]):
            if weight:
                blob.on(HOST).diff = weight
        bottom, top = self._handed(i)
        layer.backward(top, needs, bottom)
        if self.space is not HOST:
            written = [*zip(needs, self.bottoms[i]), *zip(layer.param_propagate, layer.blobs)]
            for wanted, blob in written:
                if wanted:
                    blob.wrote("diff", layer.space)

    def propagate_down(self, i: int) -> list[bool]:
        """Whether the gradient of each of layer i's bottoms is wanted."""
        return self._needs[i]

    def clear_param_diffs(self) -> None:
        """Set the gradients of all parameters to 0."""
        for blob in self.learnable_params:
            blob.on(self.space).diff = 0.0

    # Weights -------------------------------------------------------------------------------------

    def copy_trained_layers_from(self, source: str | Path | Any) -> None:
        """Take parameters, by layer name, from a .caffemodel or .h5 file or a NetParameter. Layers
        that one of the two lacks are left alone. Raises InvalidDescriptor, naming the layer, where
        shapes differ; nothing has been copied then."""
        if isinstance(source, (str, Path)):
            hdf5 = str(source).endswith(".h5")
            found = _read_hdf5(source) if hdf5 else wire.read_weights(source)
            where = f"{source}: "
        else:
            where, net = "", schema.NetParameter()
            net.CopyFrom(source)
            net = upgrade.upgrade_net(net)
            found = [(each.name, [array_of(b) for b in each.blobs]) for each in net.layer]
        pairs = []
        for name, arrays in found:
            blobs = self.params.get(name)
            if blobs is None or not arrays:
                continue
            if len(arrays) != len(blobs):
                expected = f"{len(blobs)}, as in the network"
                raise InvalidDescriptor(
                    f"{where}layer {name}: number of blobs", len(arrays), expected
                )
            pairs += [(name, blob, array) for blob, array in zip(blobs, arrays)]
        for name, blob, array in pairs:
            self._check_shape(name, blob, array, where)
        for _, blob, array in pairs:
            wire.copy_into(array, blob.data)

    def share_trained_layers_with(self, other: Net) -> None:
        """Show the other network's parameters, by layer name, as this one's own."""
        for name, blobs in self.params.items():
            for blob, theirs in zip(blobs, other.params.get(name, ())):
                self._check_shape(name, blob, theirs)
                blob.share_data(theirs)

    # pycaffe's names
    copy_from = copy_trained_layers_from
    share_with = share_trained_layers_with

    def save(self, path: str | Path) -> None:
        """Write the parameters to a .caffemodel, or to HDF5 if the name ends in .h5; under another
        name first, so that a file is whole or not there."""
        snapshots.write_model(path, self)

    def _check_shape(
        self, name: str, blob: Blob, array: Any, where: str = "", param: Any = None
    ) -> None:
        """Raises InvalidDescriptor unless an array's extents are a blob's; `where` names its
        file."""
        if _bare(blob.shape) == _bare(array.shape):
            return
        if param is None:
            param = next(layer.param for layer in self.layers if layer.name == name)
        place = f" ({param.bedstone_place})" if param.bedstone_place else ""
        expected = f"{blob.shape}, as in the network{place}"
        raise InvalidDescriptor(f"{where}layer {name}: shape of a blob", array.shape, expected)

    def to_proto(self, write_diff: bool = False) -> Any:
        """A NetParameter with the layers and their parameters."""
        net = schema.NetParameter(name=self.name)
        for layer in self.layers:
            copy = net.layer.add()
            copy.CopyFrom(self.layer_proto(layer))
            copy.blobs.extend(blob.to_proto(write_diff) for blob in layer.blobs)
        return net

    @staticmethod
    def layer_proto(layer: Layer) -> Any:
        """A layer's message without its blobs, as it goes into files."""
        copy = schema.LayerParameter()
        copy.CopyFrom(layer.param)
        copy.ClearField("bedstone_place")
        return copy

    @property
    def held_bytes(self) -> int:
        """Bytes of all blobs, parameters and workspace."""
        blobs = {id(b): b for b in self.blobs.values()}
        blobs.update({id(b): b for b in self.learnable_params})
        return sum(b.held_bytes for b in blobs.values()) + self.engines.workspace_bytes


# Layers through which no gradient flows to the tops.
NO_FLOW = ("Accuracy", "ArgMax", "Silence")


def _bare(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without leading ones: files of four extents hold vectors as 1 x 1 x 1 x N."""
    while shape and shape[0] == 1:
        shape = shape[1:]
    return shape


def _read_hdf5(path: str | Path) -> list[tuple[str, list[np.ndarray]]]:
    with hdf5_file(path, "r") as file:
        if "data" not in file:
            raise InvalidDescriptor("weights", str(path), "a group `data`, by layer")
        data = file["data"]
        return [
            (name, [np.asarray(data[name][str(i)]) for i in range(len(data[name]))])
            for name in data
        ]


def included(net: Any, state: Any) -> list[Any]:
    """The layers of a NetParameter that belong to a state."""
    found = []
    for layer in net.layer:
        if layer.include and layer.exclude:
            raise wrong(layer, "rules", "include and exclude", "one of the two")
        if layer.include:
            keep = any(_meets(rule, state) for rule in layer.include)
        else:
            keep = not any(_meets(rule, state) for rule in layer.exclude)
        if keep:
            found.append(layer)
    return found


def _meets(rule: Any, state: Any) -> bool:
    if rule.HasField("phase") and rule.phase != state.phase:
        return False
    if rule.HasField("min_level") and state.level < rule.min_level:
        return False
    if rule.HasField("max_level") and state.level > rule.max_level:
        return False
    stages = set(state.stage)
    return stages.issuperset(rule.stage) and stages.isdisjoint(rule.not_stage)


def insert_splits(layers: Sequence[Any]) -> list[Any]:
    """The layers with a Split after every blob that more than one reads; a top with a loss weight
    counts as read once by the loss itself."""
    version: dict[str, tuple[int, int]] = {}  # blob -> (layer, top) that last wrote it
    readers: Counter[tuple[int, int]] = Counter()
    source: dict[tuple[int, int], tuple[int, int]] = {}
    for i, layer in enumerate(layers):
        for b, name in enumerate(layer.bottom):
            if name not in version:
                expected = "the top of a layer before it"
                raise wrong(layer, "bottom", name, expected)
            source[i, b] = version[name]
            readers[version[name]] += 1
        for t, name in enumerate(layer.top):
            version[name] = (i, t)
            if t < len(layer.loss_weight) and layer.loss_weight[t]:
                readers[i, t] += 1
    given: Counter[tuple[int, int]] = Counter()
    found = []
    for i, layer in enumerate(layers):
        copy = schema.LayerParameter()
        copy.CopyFrom(layer)
        for b, name in enumerate(layer.bottom):
            wrote = source[i, b]
            if readers[wrote] > 1:
                copy.bottom[b] = _split_name(layers[wrote[0]].name, name, wrote[1], given[wrote])
                given[wrote] += 1
        found.append(copy)
        for t, name in enumerate(layer.top):
            count = readers[i, t]
            if count < 2:
                continue
            split = schema.LayerParameter(
                name=f"{name}_{layer.name}_{t}_split", type="Split", bottom=[name],
                top=[_split_name(layer.name, name, t, k) for k in range(count)],
            )  # fmt: skip
            if t < len(layer.loss_weight) and layer.loss_weight[t]:
                # The loss reads the first of the copies.
                split.loss_weight.extend([layer.loss_weight[t]] + [0.0] * (count - 1))
                copy.loss_weight[t] = 0.0
                given[i, t] += 1
            found.append(split)
    return found


def _split_name(layer: str, blob: str, top: int, number: int) -> str:
    return f"{blob}_{layer}_{top}_split_{number}"
