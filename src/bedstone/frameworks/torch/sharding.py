"""Sharded tensors (DTensor): rules for bedstone's operators, and convolution split over space.

`register()` tells DTensor how each operator runs on shards as it is: any by batch, convolutions by
channels (input channels leave partial sums), pooling by channels, pointwise work by any axis,
normalisations by axes that share no statistics. A
convolution of an image cut along a spatial axis needs rows of its neighbours: these it is sent by
`spatial_convolution`, and its gradient sends theirs back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from bedstone import InvalidDescriptor
from bedstone.frameworks.torch import ops
from bedstone.frameworks.torch.ops.launch import spread

Rule = tuple[list[Any], list[Any]]  # placements of the results, and of the arguments

BATCH, CHANNEL = 0, 1  # axes of images (N, C, spatial...)
K_OF_FILTER, C_OF_FILTER = 0, 1  # axes of filters (K, C/groups, spatial...)


def _completed(rules: list[Rule], arguments: int) -> list[Rule]:
    """Rules with None for the arguments that are no tensors."""
    return [(results, given + [None] * (arguments - len(given))) for results, given in rules]


def _convolution_rules(x: Any, w: Any, bias: Any, axes: int, groups: int, *how: Any) -> list[Rule]:
    """Each row is (y), (x, w, bias)."""

    def with_bias(placement: Any) -> Any:
        return None if bias is None else placement

    everywhere = Replicate()
    rules: list[Rule] = [
        ([everywhere], [everywhere, everywhere, with_bias(everywhere)]),
        ([Shard(BATCH)], [Shard(BATCH), everywhere, with_bias(everywhere)]),
    ]
    if groups == 1:
        by_k = [everywhere, Shard(K_OF_FILTER), with_bias(Shard(0))]
        by_c = [Shard(CHANNEL), Shard(C_OF_FILTER), with_bias(Partial())]
        rules += [([Shard(CHANNEL)], by_k), ([Partial()], by_c)]
    return _completed(rules, 5 + len(how))


def _data_rules(dy: Any, w: Any, axes: int, groups: int, *how: Any) -> list[Rule]:
    """Each row is (dx), (dy, w)."""
    everywhere = Replicate()
    rules: list[Rule] = [
        ([everywhere], [everywhere, everywhere]),
        ([Shard(BATCH)], [Shard(BATCH), everywhere]),
    ]
    if groups == 1:
        rules += [
            ([Shard(CHANNEL)], [everywhere, Shard(C_OF_FILTER)]),
            ([Partial()], [Shard(CHANNEL), Shard(K_OF_FILTER)]),
        ]
    return _completed(rules, 4 + len(how))


def _filter_rules(x: Any, dy: Any, axes: int, groups: int, *how: Any) -> list[Rule]:
    """Each row is (dw), (x, dy)."""
    everywhere = Replicate()
    rules: list[Rule] = [
        ([everywhere], [everywhere, everywhere]),
        ([Partial()], [Shard(BATCH), Shard(BATCH)]),
    ]
    if groups == 1:
        rules += [
            ([Shard(K_OF_FILTER)], [everywhere, Shard(CHANNEL)]),
            ([Shard(C_OF_FILTER)], [Shard(CHANNEL), everywhere]),
        ]
    return _completed(rules, 4 + len(how))


def _bias_rules(dy: Any) -> list[Rule]:
    return [
        ([Replicate()], [Replicate()]),
        ([Partial()], [Shard(BATCH)]),
        ([Shard(0)], [Shard(CHANNEL)]),
    ]


def _alike(tensors: int, results: int, placements: Sequence[Any], arguments: int) -> list[Rule]:
    """All tensors placed alike, in each of these ways or everywhere."""
    rules = [([p] * results, [p] * tensors) for p in (Replicate(), *placements)]
    return _completed(rules, arguments)


def _image_rules(tensors: int, results: int) -> Callable[..., list[Rule]]:
    """Pooling: images and channels are apart."""
    placements = (Shard(BATCH), Shard(CHANNEL))
    return lambda *arguments: _alike(tensors, results, placements, len(arguments))


def _pointwise_rules(tensors: int) -> Callable[..., list[Rule]]:
    def rules(x: Any, *rest: Any) -> list[Rule]:
        return _alike(tensors, 1, [Shard(a) for a in range(x.ndim)], 1 + len(rest))

    return rules


def _softmax_rules(tensors: int) -> Callable[..., list[Rule]]:
    def rules(x: Any, *rest: Any) -> list[Rule]:
        axis = rest[tensors - 1] % x.ndim
        placements = [Shard(a) for a in range(x.ndim) if a != axis]
        return _alike(tensors, 1, placements, 1 + len(rest))

    return rules


def _norm_placements(axis: int, kind: str) -> list[Any]:
    """Axes of x whose elements share no statistics, and are axes of the statistics too."""
    return [Shard(a) for a in {"layer": range(axis), "group": (BATCH,)}.get(kind, ())]


def _norm_rules(
    x: Any, scale: Any, shift: Any, axis: int, groups: int, kind: str, epsilon: float
) -> list[Rule]:
    """Each row is (y, mean, inv_std), (x, scale, shift)."""
    everywhere = [None if t is None else Replicate() for t in (scale, shift)]
    placements = [Replicate(), *_norm_placements(axis, kind)]
    return _completed([([p] * 3, [p, *everywhere]) for p in placements], 7)


def _norm_backward_rules(
    x: Any, scale: Any, mean: Any, inv_std: Any, dy: Any,
    axis: int, groups: int, kind: str, epsilon: float,
) -> list[Rule]:  # fmt: skip
    """Each row is (dx, dscale, dshift), (x, scale, mean, inv_std, dy)."""
    whole = None if scale is None else Replicate()
    rules: list[Rule] = [([Replicate()] * 3, [Replicate(), whole, *[Replicate()] * 3])]
    for p in _norm_placements(axis, kind):
        rules.append(([p, Partial(), Partial()], [p, whole, p, p, p]))
    return _completed(rules, 9)


RULES: dict[str, Callable[..., list[Rule]]] = {
    "convolution": _convolution_rules,
    "convolution_backward_data": _data_rules,
    "convolution_backward_filter": _filter_rules,
    "convolution_backward_bias": _bias_rules,
    "max_pool": _image_rules(1, 2),
    "max_pool_backward": _image_rules(2, 1),
    "average_pool": _image_rules(1, 1),
    "average_pool_backward": _image_rules(1, 1),
    "adaptive_average_pool": _image_rules(1, 1),
    "adaptive_average_pool_backward": _image_rules(1, 1),
    "activation": _pointwise_rules(1),
    "activation_backward": _pointwise_rules(2),
    "normalize": _norm_rules,
    "normalize_backward": _norm_backward_rules,
    "softmax": _softmax_rules(1),
    "softmax_backward": _softmax_rules(2),
}


@functools.cache
def register() -> None:
    """Tell DTensor the rules of every operator. Once; importing this module does it."""
    for name, rules in RULES.items():
        register_sharding(getattr(torch.ops.bedstone, name).default)(rules)


register()


def shares(size: int, ranks: int) -> list[tuple[int, int]]:
    """(first, end) of the rows that each rank holds of an axis that DTensor cuts: equal pieces,
    rounded up, the last ones shorter or empty."""
    piece = -(-size // ranks)
    return [(min(r * piece, size), min((r + 1) * piece, size)) for r in range(ranks)]


class _Swap:
    """Which rows travel: every rank holds `have` of an axis and needs `need` (whose rows outside
    the axis are zeros)."""

    def __init__(
        self, axis: int, size: int, have: list[tuple[int, int]], need: list[tuple[int, int]],
        group: Any,
    ) -> None:  # fmt: skip
        self.axis, self.size, self.have, self.need, self.group = axis, size, have, need, group
        self.rank = dist.get_rank(group)

    def _shared(self, holder: int, reader: int) -> tuple[int, int]:
        """The rows that `holder` has and `reader` needs."""
        (a, b), (c, d) = self.have[holder], self.need[reader]
        return max(a, c), max(min(b, d), max(a, c))

    def _transfer(
        self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]
    ) -> dict[int, Tensor]:
        """Send and receive, one message a rank and direction."""
        steps = []
        for other, tensor in outgoing.items():
            steps.append(dist.P2POp(dist.isend, tensor, group=self.group, group_peer=other))
        for other, tensor in incoming.items():
            steps.append(dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=other))
        for work in dist.batch_isend_irecv(steps) if steps else []:
            work.wait()
        return incoming

    def _others(self, rows: Callable[[int], tuple[int, int]]) -> dict[int, tuple[int, int]]:
        every = {r: rows(r) for r in range(len(self.have)) if r != self.rank}
        return {r: (first, end) for r, (first, end) in every.items() if end > first}

    def gather(self, held: Tensor) -> Tensor:
        """The needed rows, from the rows held here and those that others send."""
        start = self.have[self.rank][0]
        sent = self._others(lambda r: self._shared(self.rank, r))
        got = self._others(lambda r: self._shared(r, self.rank))
        outgoing = {
            r: held.narrow(self.axis, a - start, b - a).contiguous() for r, (a, b) in sent.items()
        }
        incoming = {r: held.new_empty(self._dims(held, b - a)) for r, (a, b) in got.items()}
        pieces = self._transfer(outgoing, incoming)
        a, b = self._shared(self.rank, self.rank)
        pieces[self.rank] = held.narrow(self.axis, a - start, b - a) if b > a else (
            held.new_empty(self._dims(held, 0)))  # fmt: skip
        low, high = self.need[self.rank]
        before, after = max(min(0, high) - low, 0), max(high - max(self.size, low), 0)
        ordered = [pieces[r] for r in sorted(pieces)]
        return torch.cat(
            [held.new_zeros(self._dims(held, before)), *ordered,
             held.new_zeros(self._dims(held, after))], self.axis,
        )  # fmt: skip

    def scatter(self, needed: Tensor) -> Tensor:
        """The adjoint: rows of a gradient go back to their holders, and are summed there."""
        first, (start, stop) = self.need[self.rank][0], self.have[self.rank]
        back = self._others(lambda r: self._shared(r, self.rank))
        got = self._others(lambda r: self._shared(self.rank, r))
        outgoing = {
            r: needed.narrow(self.axis, a - first, b - a).contiguous() for r, (a, b) in back.items()
        }
        incoming = {r: needed.new_empty(self._dims(needed, b - a)) for r, (a, b) in got.items()}
        held = needed.new_zeros(self._dims(needed, stop - start))
        a, b = self._shared(self.rank, self.rank)
        if b > a:
            held.narrow(self.axis, a - start, b - a).add_(
                needed.narrow(self.axis, a - first, b - a)
            )
        for r, tensor in sorted(self._transfer(outgoing, incoming).items()):
            a, b = got[r]
            held.narrow(self.axis, a - start, b - a).add_(tensor)
        return held

    def _dims(self, tensor: Tensor, rows: int) -> list[int]:
        return [*tensor.shape[: self.axis], rows, *tensor.shape[self.axis + 1 :]]


class _Exchange(torch.autograd.Function):
    """Gather halos, or scatter them back: each is the other's derivative."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, swap: _Swap, back: bool) -> Tensor:
        ctx.swap, ctx.back = swap, back
        return swap.scatter(tensor) if back else swap.gather(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _Exchange.apply(gradient, ctx.swap, not ctx.back), None, None


def spatial_convolution(
    x: DTensor,
    w: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> DTensor:
    """`ops.convolution` of an image that is cut along spatial axes: y is cut the same way.

    x        (N, C, spatial...), a DTensor. On each axis of its mesh: a shard of the batch or of one
             spatial axis, or a replica. An axis is cut by one mesh axis at most
    w, bias  the same on every rank: plain tensors or replicated DTensors. Their gradients are the
             sums over all ranks
    returns  a DTensor with x's placements

    Every rank is sent the rows that its share of y reads beyond its share of x: those of its
    neighbours, or from farther away where shares are smaller than the filter. Collective: all ranks
    of the mesh call it, in the same order. Raises InvalidDescriptor for other placements.
    """
    if not isinstance(x, DTensor):
        raise InvalidDescriptor("x", type(x).__name__, "a DTensor")
    axes, mesh = x.dim() - 2, x.device_mesh
    _check_placements(x)
    u, p, step = (
        spread(name, value, axes)
        for name, value in (("stride", stride), ("padding", padding), ("dilation", dilation))
    )
    sizes = list(x.shape)
    sizes[CHANNEL] = w.shape[0]
    for a in range(axes):
        extent = (w.shape[a + 2] - 1) * step[a] + 1
        sizes[a + 2] = (x.shape[a + 2] + 2 * p[a] - extent) // u[a] + 1
        if sizes[a + 2] < 1:
            expected = f"a window no larger than the padded input, {tuple(x.shape[2:])} with {p}"
            raise InvalidDescriptor("w", tuple(w.shape), expected)
    local, empty = x.to_local(), False
    for mesh_axis, placement in enumerate(x.placements):
        if not isinstance(placement, Shard) or placement.dim < 2:
            continue
        axis = placement.dim
        ranks, here = mesh.size(mesh_axis), mesh.get_local_rank(mesh_axis)
        window = (w.shape[axis] - 1) * step[axis - 2] + 1
        need = []
        for first, end in shares(sizes[axis], ranks):
            start = first * u[axis - 2] - p[axis - 2]
            rows = (end - first - 1) * u[axis - 2] + window if end > first else 0
            need.append((start, start + rows))
        have = shares(x.shape[axis], ranks)
        swap = _Swap(axis, x.shape[axis], have, need, mesh.get_group(mesh_axis))
        local = _Exchange.apply(local, swap, False)
        p[axis - 2] = 0
        empty = empty or need[here][0] == need[here][1]
    w, bias = _whole(w, x), None if bias is None else _whole(bias, x)
    if empty:
        y = _nothing(local, w, bias, _local_dims(x, sizes))
    else:
        y = ops.convolution(local, w, bias, u, p, step, groups)
    strides = torch.empty(sizes, device="meta").stride()
    return DTensor.from_local(
        y.contiguous(), mesh, x.placements, run_check=False, shape=torch.Size(sizes), stride=strides
    )


def _check_placements(x: DTensor) -> None:
    cut = [q.dim for q in x.placements if isinstance(q, Shard)]
    known = all(isinstance(q, Replicate) or type(q) is Shard for q in x.placements)
    if x.dim() not in (3, 4, 5) or not known or CHANNEL in cut or len(set(cut)) != len(cut):
        expected = "3 to 5 dims; shards of the batch or of spatial axes, each cut once; replicas"
        raise InvalidDescriptor("x", (tuple(x.shape), x.placements), expected)


def _local_dims(x: DTensor, sizes: list[int]) -> list[int]:
    """The dims of this rank's share of a tensor of `sizes` with x's placements."""
    dims = list(sizes)
    for mesh_axis, placement in enumerate(x.placements):
        if isinstance(placement, Shard):
            ranks, here = x.device_mesh.size(mesh_axis), x.device_mesh.get_local_rank(mesh_axis)
            first, end = shares(sizes[placement.dim], ranks)[here]
            dims[placement.dim] = end - first
    return dims


def _nothing(x: Tensor, w: Tensor, bias: Tensor | None, dims: list[int]) -> Tensor:
    """A tensor with no elements that depends on all of these: ranks without a share of y take part
    in their gradients' exchange."""
    return (x.sum() + w.sum() + (0 if bias is None else bias.sum())).expand(dims)


def _whole(tensor: Tensor, x: DTensor) -> Tensor:
    """A tensor that every rank has, whose gradients are summed over the ranks that cut x."""
    everywhere = [Replicate()] * x.device_mesh.ndim
    if not isinstance(tensor, DTensor):
        tensor = DTensor.from_local(tensor, x.device_mesh, everywhere, run_check=False)
    summed = [Partial() if isinstance(q, Shard) else Replicate() for q in x.placements]
    return tensor.redistribute(placements=everywhere).to_local(grad_placements=summed)
