"""Narrow groups side by side: several of a convolution's groups as one, for tiles of 64 channels.

Each of ResNeXt's groups has 4 to 32 channels. Sixteen to two of them make a tile of the matrix
units; what it multiplies of one group's filters and another's channels is wasted, but reads no
memory.
"""

from __future__ import annotations

from dataclasses import replace

from bedstone.backends.triton.convolution.geometry import Geometry
from bedstone.spec.convolution import ConvolutionProblem

WIDTH = 64  # channels and filters that fill a tile


def sides(problem: ConvolutionProblem) -> int:
    """How many groups lie side by side: a divisor of all, the fewest that nearly fill a tile."""
    groups = problem.conv.groups
    narrow = min(problem.w.dims[1], problem.w.dims[0] // groups)
    wanted = min(groups, max(1, WIDTH // max(narrow, 1)))
    return next(n for n in range(wanted, groups + 1) if groups % n == 0)


def side_by_side(geo: Geometry, side: int) -> Geometry:
    """The geometry with `side` groups as one."""
    return replace(
        geo, groups=geo.groups // side, channels=geo.channels * side, filters=geo.filters * side
    )
