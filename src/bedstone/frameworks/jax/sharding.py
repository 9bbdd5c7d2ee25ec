"""Sharded arrays: axes that every device may have a share of under plain jit, and rows of images
under shard_map.

`Sharing` tells XLA's partitioner which axes may be cut (the batch of a convolution, all axes of an
activation): each device then works on its own share. Along every other axis, shares are gathered
first.
`spatial_convolution` is for use inside `jax.shard_map`, with images cut by rows: neighbours send
each other the rows at the cuts (a halo), and the zeros that no neighbour sends are the padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from bedstone import InvalidDescriptor

Labels = tuple[str, ...]


@dataclass(frozen=True)
class Sharing:
    """Which axes of a call may be cut over devices, each of which then works on its own share.

    operands, result  a label for every axis; axes of one label are cut alike
    free              the labels of the axes that may be cut; a sum over such an axis (one that the
                      result lacks) becomes a sum over the devices too
    """

    operands: tuple[Labels, ...]
    result: Labels
    free: frozenset[str]

    def shape(self, whole: tuple[int, ...], parts: Sequence[Any]) -> tuple[int, ...]:
        """The shape of a share of a result of shape `whole`, made from these parts."""
        sizes = {
            label: size
            for labels, part in zip(self.operands, parts)
            for label, size in zip(labels, part.shape)
            if label in self.free
        }
        return tuple(sizes.get(label, size) for label, size in zip(self.result, whole))

    def _names(self, arguments: Any) -> dict[str, Any]:
        """label -> the axes of the mesh over which it is cut."""
        found: dict[str, Any] = {}
        for labels, argument in zip(self.operands, arguments):
            for label, names in zip(labels, getattr(argument.sharding, "spec", ())):
                taken = {n for given in found.values() for n in _flat(given)}
                if names is not None and label in self.free and not taken & set(_flat(names)):
                    found.setdefault(label, names)
        return found

    def tell(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run(*operands)`, which works on any share, told to XLA's partitioner."""

        def place(mesh: Any, labels: Labels, found: dict[str, Any]) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(found.get(label) for label in labels)))

        def partition(mesh: Any, arguments: Any, result: Any) -> Any:
            found = self._names(arguments)
            summed = tuple(
                name for label, names in found.items() if label not in self.result
                for name in _flat(names)
            )  # fmt: skip

            def share(*parts: Any) -> Any:
                return lax.psum(run(*parts), summed) if summed else run(*parts)

            places = tuple(place(mesh, labels, found) for labels in self.operands)
            return mesh, share, place(mesh, self.result, found), places

        def infer(mesh: Any, arguments: Any, result: Any) -> Any:
            return place(mesh, self.result, self._names(arguments))

        every = dict.fromkeys(label for labels in (*self.operands, self.result) for label in labels)
        rule = ", ".join(" ".join(labels) for labels in self.operands)
        made = custom_partitioning(run)
        made.def_partition(
            partition,
            infer_sharding_from_operands=infer,
            sharding_rule=f"{rule} -> {' '.join(self.result)}",
            need_replication_factors=tuple(x for x in every if x not in self.free),
            reduction_factors=tuple(x for x in every if x in self.free and x not in self.result),
        )
        return made


def _flat(names: Any) -> tuple[Any, ...]:
    return names if isinstance(names, tuple) else (names,)


def spatial_convolution(
    x: Any, w: Any, axis_name: str, *, padding: Any = "SAME", dilation: int = 1, groups: int = 1
) -> Any:
    """The share of a convolution of images that are cut by rows over a mesh axis.

    x        this device's rows, (N, C, H / devices, W); the devices in the order of the rows
    w        filters (K, C/groups, R, S), the same on all
    padding  "SAME", or one (low, high) pair for each of H and W whose sum for H is the window's
             height less one: as many rows come out as go in
    returns  this device's rows of the result, (N, K, H / devices, W'); stride 1

    Use inside jax.shard_map. Raises InvalidDescriptor for other paddings, and where a device has
    fewer rows than its neighbour needs.
    """
    from bedstone.frameworks.jax.convolution import convolution

    reach = dilation * (w.shape[2] - 1)
    if padding == "SAME":
        wide = dilation * (w.shape[3] - 1)
        padding = ((reach // 2, reach - reach // 2), (wide // 2, wide - wide // 2))
    (low, high), columns = padding
    if low + high != reach or min(low, high) < 0:
        raise InvalidDescriptor("padding", padding, f"{reach} rows in all, 0 or more each side")
    rows = x.shape[2]
    if max(low, high) > rows:
        raise InvalidDescriptor("x", tuple(x.shape), f"{max(low, high)} rows on each device")
    count = jax.lax.axis_size(axis_name)
    above = [(i, i + 1) for i in range(count - 1)]
    parts = [x]
    if low:  # the last rows of the device before; zeros for the first
        parts.insert(0, lax.ppermute(x[:, :, rows - low :], axis_name, above))
    if high:
        below = [(b, a) for a, b in above]
        parts.append(lax.ppermute(x[:, :, :high], axis_name, below))
    grown = jnp.concatenate(parts, 2) if len(parts) > 1 else x
    return convolution(grown, w, 1, ((0, 0), tuple(columns)), dilation=dilation, groups=groups)
