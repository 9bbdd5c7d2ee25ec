"""Layer: the base of all layer types. A layer reads its bottoms and writes its tops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bedstone import TensorDesc
from bedstone.frameworks.caffe.blob import Blob
from bedstone.frameworks.caffe.engines import NoDeviceKernel
from bedstone.frameworks.caffe.spaces import HOST, Host
from bedstone.spec.errors import InvalidDescriptor


def wrong(param: Any, field: str, value: object, expected: str) -> InvalidDescriptor:
    """The error to raise for a field of a layer's message; names file and line where it has
    them."""
    place = f"{param.bedstone_place}: " if param.bedstone_place else ""
    return InvalidDescriptor(f"{place}layer {param.name}: {field}", value, expected)


class naming:
    """Errors from within name the layer and its place, also those of what it calls."""

    def __init__(self, param: Any) -> None:
        self.param = param

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, InvalidDescriptor):
            return
        if f"layer {self.param.name}: " not in error.argument:
            raise wrong(self.param, error.argument, error.value, error.expected) from None


class Layer:
    """One layer of a network.

    Subclasses say how many bottoms and tops they take (`bottoms`, `tops`: a number, or the least
    and the most) and implement:

    setup(bottom, top)        once: parameters read, `self.blobs` made and filled
    reshape(bottom, top)      whenever a bottom's shape has changed: shapes of tops, plans
    forward(bottom, top)      top data from bottom data
    backward(top, propagate_down, bottom)   bottom diffs (overwritten) from top diffs where asked
                              for, gradients of own blobs (added to)

    The last two get blobs whose arrays lie in `self.space`, and so do `self.own`, the layer's own
    blobs; `self.xp` is NumPy or what has its names there. A type that says `host_only = None`
    computes on devices too; one that does not runs on the host, and the blobs are copied.
    """

    bottoms: int | tuple[int, int | None] = 1
    tops: int | tuple[int, int | None] = 1
    loss = False  # whether the first top is a loss by default
    no_gradient: tuple[int, ...] = ()  # bottoms that never have one (labels)
    in_place = False  # whether a top may be the bottom of the same number
    host_only: str | None = "this type of layer has no code for devices"  # why, or None
    shows_bottom = False  # whether forward writes nothing: tops are the bottom's memory

    def __init__(self, param: Any, net: Any) -> None:
        self.param, self.net = param, net
        self.dtype: np.dtype = net.dtype  # of blobs and computation
        self.name: str = param.name
        self.type: str = param.type
        self.phase: str = net.phase
        self.blobs: list[Blob] = []
        self.loss_weights: list[float] = []
        self.param_propagate: list[bool] = []  # whether each blob's gradient is wanted
        self._shapes: Any = None
        self.space: Host = net.space

    @property
    def xp(self) -> Any:
        """NumPy, or what has its names on the device."""
        return self.space.xp

    @property
    def own(self) -> Sequence[Any]:
        """The layer's blobs, with arrays where it computes."""
        if self.net.space is HOST:
            return self.blobs
        return [blob.on(self.space) for blob in self.blobs]

    def to_host(self, reason: str) -> None:
        """Compute on the host from now on."""
        self.space = HOST
        self.net.engines.to_host(self, reason)

    def new_blob(self, shape: Sequence[int]) -> Blob:
        """A blob of the network's dtype."""
        return Blob(shape, self.dtype)

    def packed(self, shape: Sequence[int], dtype: str | None = None) -> TensorDesc:
        """The descriptor of a blob of that shape."""
        return TensorDesc.packed(tuple(shape), dtype or self.dtype.name)

    def wrong(self, field: str, value: object, expected: str) -> InvalidDescriptor:
        """The error to raise for one of the layer's parameters or bottoms."""
        return wrong(self.param, field, value, expected)

    def check_counts(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        """Raises InvalidDescriptor where there are too few or too many bottoms or tops, or a top is
        a bottom of a layer that cannot work in place."""
        for field, allowed, blobs in (("bottoms", self.bottoms, bottom), ("tops", self.tops, top)):
            least, most = (allowed, allowed) if isinstance(allowed, int) else allowed
            if len(blobs) < least or (most is not None and len(blobs) > most):
                wanted = f"{least}" if least == most else f"{least} to {most or 'any number'}"
                raise self.wrong(f"number of {field}", len(blobs), wanted)
        if not self.in_place and any(blob is other for blob in bottom for other in top):
            names = list(self.param.top)
            raise self.wrong("top", names, f"no bottom: {self.type} cannot work in place")

    def prepare(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        """`reshape`, if a bottom's shape is another than last time."""
        shapes = [blob.shape for blob in bottom]
        if shapes != self._shapes:
            try:
                self.reshape(bottom, top)
            except NoDeviceKernel as missing:
                self.to_host(str(missing))
                self.reshape(bottom, top)
            self._shapes = shapes

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        """Nothing to read by default."""

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        """The shapes of the tops."""
        raise NotImplementedError

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        """Top data from bottom data."""
        raise NotImplementedError

    def backward(
        self, top: Sequence[Blob], propagate_down: Sequence[bool], bottom: Sequence[Blob]
    ) -> None:
        """Bottom diffs from top diffs."""
        if any(propagate_down):
            raise self.wrong("backward", self.type, "no gradient asked of it")

    def axis_of(self, axis: int, rank: int, field: str = "axis") -> int:
        """An axis counted from the front; negative ones count from the end."""
        if not -rank <= axis < rank:
            raise self.wrong(field, axis, f"an axis of {rank}: {-rank} to {rank - 1}")
        return axis % rank

    def same_shape(self, bottom: Sequence[Blob]) -> None:
        """Raises InvalidDescriptor unless all bottoms have one shape."""
        for blob in bottom[1:]:
            if blob.shape != bottom[0].shape:
                expected = f"{bottom[0].shape}, as the first bottom"
                raise self.wrong("bottom's shape", blob.shape, expected)
