"""Sharded arrays: axes that every device may have a share of under plain jit, and rows of images
under shard_map.

`Sharing` tells XLA's partitioner which axes may be cut (batch, channels and rows of a convolution,
all axes of an activation): each device then works on its own share, and where windows reach over a
cut, neighbours send each other what lies there (a halo). Along every other axis, shares are
gathered first. `spatial_convolution` is the same exchange for use inside `jax.shard_map`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

Axis = tuple[str, ...]  # the factors of an axis's size, the slowest first
Axes = tuple[Axis, ...]


@dataclass(frozen=True)
class Cuts:
    """How a call is cut: factor -> the mesh's axes over which it is, and into how many shares."""

    names: Mapping[str, Any]
    counts: Mapping[str, int]

    def share(self, shape: Sequence[int], axes: Axes) -> tuple[int, ...]:
        """The shape of a share."""
        return tuple(size // self.counts.get(axis[0], 1) for size, axis in zip(shape, axes))


NONE = Cuts({}, {})
Run = Callable[..., Any]  # (cuts, *parts) -> the share of the result, summed or not


@dataclass(frozen=True)
class Sharing:
    """Which axes of a call may be cut over devices, each of which then works on its own share.

    operands, result  the factors of every axis; axes of one slowest factor are cut alike
    free              the factors that may be cut; a sum over such a factor (one that the result
                      lacks) becomes a sum over the devices too
    sizes             of the factors of axes that have several
    least             what a share of a factor must hold at least, where that is more than 1
    sent              those of the free factors at whose cuts neighbours send each other halos
    """

    operands: tuple[Axes, ...]
    result: Axes
    free: frozenset[str]
    sizes: Mapping[str, int] = field(default_factory=dict)
    least: Mapping[str, int] = field(default_factory=dict)
    sent: frozenset[str] = frozenset()

    @classmethod
    def alike(cls, operands: Sequence[str], result: str, free: str) -> Sharing:
        """Axes that are letters, of one factor each."""
        axes = [tuple((letter,) for letter in word) for word in (*operands, result)]
        return cls(tuple(axes[:-1]), axes[-1], frozenset(free))

    def over(self, devices: int) -> Sharing:
        """The same, without cuts of axes of several factors that so many devices would not share
        evenly: XLA would cut the slowest factor over some of the devices and the next one over the
        others, and custom_partitioning has no word for a part of a mesh's axis."""
        every = (*self.operands, self.result)
        several = {axis for axes in every for axis in axes if len(axis) > 1}
        uneven = {axis[0] for axis in several if self.sizes[axis[0]] % devices}
        if not uneven:
            return self
        whole = [
            tuple(("".join(axis),) if axis[0] in uneven else axis for axis in axes)
            for axes in every
        ]  # fmt: skip
        return replace(
            self, operands=tuple(whole[:-1]), result=whole[-1], free=self.free - uneven,
            sent=self.sent - uneven,
        )  # fmt: skip

    def _cuts(self, mesh: Any, arguments: Any) -> Cuts:
        names: dict[str, Any] = {}
        counts: dict[str, int] = {}
        for axes, argument in zip(self.operands, arguments):
            given = getattr(argument.sharding, "spec", ())
            for axis, size, over in zip(axes, argument.shape, given):
                label, taken = axis[0], {n for found in names.values() for n in _flat(found)}
                if over is None or label not in self.free or taken & set(_flat(over)):
                    continue
                count = math.prod(mesh.shape[name] for name in _flat(over))
                share, rest = divmod(self.sizes.get(label, size), count)
                if label not in names and not rest and share >= self.least.get(label, 1):
                    names[label], counts[label] = over, count
        return Cuts(names, counts)

    def tell(self, run: Run) -> Callable[..., Any]:
        """`run(NONE, *operands)`, told to XLA's partitioner."""

        def place(mesh: Any, axes: Axes, cuts: Cuts) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(cuts.names.get(axis[0]) for axis in axes)))

        def partition(mesh: Any, arguments: Any, result: Any) -> Any:
            cuts = self._cuts(mesh, arguments)
            kept = {axis[0] for axis in self.result}
            summed = tuple(
                name for label, names in cuts.names.items() if label not in kept
                for name in _flat(names)
            )  # fmt: skip

            def share(*parts: Any) -> Any:
                return lax.psum(run(cuts, *parts), summed) if summed else run(cuts, *parts)

            places = tuple(place(mesh, axes, cuts) for axes in self.operands)
            return mesh, share, place(mesh, self.result, cuts), places

        def infer(mesh: Any, arguments: Any, result: Any) -> Any:
            return place(mesh, self.result, self._cuts(mesh, arguments))

        every = dict.fromkeys(f for axes in (*self.operands, self.result) for a in axes for f in a)
        kept = {factor for axis in self.result for factor in axis}
        alone = {
            axis[0] for axes in (*self.operands, self.result) for axis in axes if len(axis) == 1
        }
        words = [" ".join(map(_word, axes)) for axes in (*self.operands, self.result)]
        made = custom_partitioning(lambda *parts: run(NONE, *parts))
        made.def_partition(
            partition,
            infer_sharding_from_operands=infer,
            sharding_rule=f"{', '.join(words[:-1])} -> {words[-1]}",
            need_replication_factors=tuple(x for x in every if x not in self.free),
            reduction_factors=tuple(x for x in every if x in self.free and x not in kept),
            permutation_factors=tuple(x for x in every if x in self.sent and x in kept),
            **{factor: self.sizes[factor] for factor in every if factor not in alone},
        )
        return made


def _word(axis: Axis) -> str:
    return axis[0] if len(axis) == 1 else f"({' '.join(axis)})"


def _flat(names: Any) -> tuple[Any, ...]:
    return names if isinstance(names, tuple) else (names,)
