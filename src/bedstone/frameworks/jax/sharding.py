"""Convolutions of sharded arrays: batches under plain jit, rows of images under shard_map.

`by_batch` tells XLA's partitioner that N may be sharded: each device then works on its own images,
and a gradient by filter is summed over the devices. Everything else is gathered first.
`spatial_convolution` is for use inside `jax.shard_map`, with images cut by rows: neighbours send
each other the rows at the cuts (a halo), and the zeros that no neighbour sends are the padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from bedstone import InvalidDescriptor

Run = Callable[[Any, Any], Any]


def by_batch(run: Run, ranks: tuple[int, int, int], batch: tuple[int | None, ...]) -> Run:
    """`run(a, b) -> c`, which works on any share of a batch, told to XLA.

    ranks  of a, b and c
    batch  which axis of a, b and c is the batch, None where there is none: a sum over the batch
           then becomes one over the devices
    """
    summed = batch[2] is None

    def spec(rank: int, at: int | None, names: Any) -> PartitionSpec:
        return PartitionSpec(*(names if i == at else None for i in range(rank)))

    def names_of(arguments: Any) -> Any:
        for argument, at in zip(arguments, batch):
            given = getattr(argument.sharding, "spec", ())
            if at is not None and at < len(given) and given[at] is not None:
                return given[at]
        return None

    def partition(mesh: Any, arguments: Any, result: Any) -> Any:
        names = names_of(arguments)

        def share(a: Any, b: Any) -> Any:
            c = run(a, b)
            return lax.psum(c, names) if summed and names is not None else c

        places = [NamedSharding(mesh, spec(r, at, names)) for r, at in zip(ranks, batch)]
        return mesh, share, places[2], tuple(places[:2])

    def infer(mesh: Any, arguments: Any, result: Any) -> Any:
        return NamedSharding(mesh, spec(ranks[2], batch[2], names_of(arguments)))

    labels, alone = [], []
    for part, (rank, at) in zip("abc", zip(ranks, batch)):
        own = [f"{part}{i}" if i != at else "n" for i in range(rank)]
        alone += [label for label in own if label != "n"]
        labels.append(" ".join(own))
    made = custom_partitioning(run)
    made.def_partition(
        partition,
        infer_sharding_from_operands=infer,
        sharding_rule=f"{labels[0]}, {labels[1]} -> {labels[2]}",
        need_replication_factors=tuple(alone),
        reduction_factors=("n",) if summed else (),
    )
    return made


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
