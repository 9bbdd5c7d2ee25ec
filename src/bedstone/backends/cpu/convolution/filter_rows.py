"""How a filter's rows lie in memory: as they are multiplied, or to be transposed in registers.

In backward_data with channels first the sum runs over k, and w[k][c][r][s] has c and the taps side
by side. A panel's rows (c) with all their taps are therefore one run of memory for each k: vectors
of the runs of as many k as there are lanes, transposed, are vectors along k of one row and tap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from bedstone.backends.cpu.builder import KernelBuilder
from bedstone.backends.cpu.convolution.geometry import Geometry
from bedstone.backends.cpu.irtypes import itemsize
from bedstone.backends.cpu.shuffles import transposed
from bedstone.backends.cpu.values import IntLike

if TYPE_CHECKING:
    from bedstone.backends.cpu.convolution.image_product import Blocking

VECTORS_MAX = 48  # of a panel's run: each is written out in the kernel


def rows_of_filter(g: Geometry, item: int, taps_max: int) -> str:
    """The order in which an outer channel's elements lie side by side: "tap, channel" or
    "channel, tap" (of at most `taps_max` taps); "" if there is none."""
    if len(g.phases) > 1:
        return ""
    taps = [tap.filter for tap in g.phases[0].taps]
    channel = g.inner.filter
    if channel == item and taps == [t * g.inner.size * item for t in range(len(taps))]:
        return "tap, channel"
    if channel == len(taps) * item and taps == [t * item for t in range(len(taps))]:
        return "channel, tap" if len(taps) <= taps_max else ""
    return ""


def turns(g: Geometry, plan: Blocking, item: int) -> bool:
    """Whether `turn_rows` packs this filter: outer channels and taps are one run, and their inner
    channels no neighbours."""
    taps = [tap.filter for tap in g.phases[0].taps]
    run = taps == [t * item for t in range(len(taps))] and g.outer.filter == len(taps) * item
    if len(g.phases) > 1 or g.inner.filter == item or not run or not plan.lanes_are_pixels:
        return False
    if not g.inner.size:
        return False
    return 0 < len(taps) * plan.tile.rows <= VECTORS_MAX * plan.tile.lanes


def turn_rows(
    k: KernelBuilder,
    g: Geometry,
    plan: Blocking,
    dtype: str,
    source: IntLike,
    first: IntLike,
    target: Callable[[IntLike], IntLike],
) -> None:
    """A panel's rows from outer channel `first` on, zeros behind the last; `source` is the group's
    filter, `target` gives the address of the panel's part of a chunk."""
    tile, item, taps = plan.tile, itemsize(dtype), g.taps
    lanes, run = tile.lanes, tile.rows * taps
    starts = list(range(0, run, lanes))
    if run > lanes:
        starts[-1] = run - lanes
    left = (g.outer.size - first) * taps
    masks = [
        k.first_lanes(run, lanes)
        if g.outer.size % tile.rows == 0
        else k.first_lanes(k.min(left - start, run), lanes)
        for start in starts
    ]
    even = g.inner.size % plan.channel_chunk == 0
    with k.loop(0, plan.channel_chunks) as number:
        i0 = number * plan.channel_chunk
        channels = plan.channel_chunk if even else k.min(g.inner.size - i0, plan.channel_chunk)
        parts = [target(t * plan.channel_chunks + number) for t in range(plan.tap_chunks)]

        def block(c: IntLike, count: IntLike) -> None:
            """The next inner channels from number c of the chunk, `count` of them or all lanes."""
            kept, done = k.first_lanes(count, lanes), 0
            corner = source + first * g.outer.filter + (i0 + c) * g.inner.filter
            steps = [k.min(r, count - 1) * g.inner.filter for r in range(lanes)]
            for start, mask in zip(starts, masks):
                rows = [k.load(corner + step, dtype, lanes, start * item, mask) for step in steps]
                for lane, value in enumerate(transposed(k, rows)):
                    element = start + lane
                    if not done <= element < run:
                        continue
                    done = element + 1
                    m, tap = element // taps, element % taps
                    depth = tap % plan.tap_chunk * channels + c
                    to = parts[tap // plan.tap_chunk] + depth * tile.item
                    k.store(value, to, tile.dtype, m * tile.row_bytes, kept)

        whole = channels - channels % lanes
        with k.loop(0, whole, lanes) as c:
            block(c, lanes)
        if not even or channels % lanes:
            with k.if_(k.as_int(whole) < channels):
                block(whole, channels - whole)
