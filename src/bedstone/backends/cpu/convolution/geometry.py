"""The index map of a convolution, the same for forward and backward_data.

    out[n, g, o, pixel] = sum_{i, tap} filter[g, o, i, tap] * image[n, g, i, pixel * step + tap]

Forward reads x and writes y. Backward_data reads dy and writes dx: with a stride, the pixels of dx
fall into phases (their residues modulo the stride); within a phase it is a convolution of stride
1 with those taps that meet dy. Strides and offsets are in bytes, so that mode (flipped filters),
dilation, padding and layout have all become numbers. Backward_filter uses the forward's map.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from bedstone.spec.convolution import ConvolutionProblem


@dataclass(frozen=True)
class Axis:
    """One axis of the output's pixels (batch, or spatial).

    size    number of pixels
    image   bytes in the image from one pixel's origin to the next one's
    out     bytes in the output from one pixel to the next
    step    coordinate in the image per pixel
    limit   size of the image along the axis: coordinates 0 ... limit - 1 exist
    checked True if some tap of some pixel leaves the image
    out_step, out_limit  a pixel exists if phase start + pixel * out_step < out_limit; 0: always
    """

    size: int
    image: int
    out: int
    step: int = 1
    limit: int = 0
    checked: bool = False
    out_step: int = 0
    out_limit: int = 0


@dataclass(frozen=True)
class Tap:
    """One filter element: bytes from the filter's origin, from a pixel's origin in the image, and
    the distance in coordinates along the checked axes."""

    filter: int
    image: int
    shift: tuple[int, ...]


@dataclass(frozen=True)
class Phase:
    """Output pixels of one residue: bytes from the output's origin, first coordinate along the
    axes with an out_limit, and the taps that reach them."""

    out: int
    start: tuple[int, ...]
    taps: tuple[Tap, ...]


@dataclass(frozen=True)
class Channels:
    """A channel axis: its size per group and its stride in the two tensors it indexes."""

    size: int
    filter: int
    tensor: int


@dataclass(frozen=True)
class Geometry:
    """See the module's formula. `inner` are the channels summed over (stride `tensor` in the
    image), `outer` those of the output (stride `tensor` in the output); `group_*` are bytes."""

    axes: tuple[Axis, ...]
    phases: tuple[Phase, ...]
    groups: int
    group_image: int
    group_filter: int
    group_out: int
    inner: Channels
    outer: Channels

    @property
    def pixels(self) -> int:
        """Output pixels of one phase, over the batch."""
        total = 1
        for axis in self.axes:
            total *= axis.size
        return total

    @property
    def checked(self) -> tuple[int, ...]:
        """Indices of the axes along which the image must be checked."""
        return tuple(i for i, axis in enumerate(self.axes) if axis.checked)

    @property
    def limited(self) -> tuple[int, ...]:
        """Indices of the axes along which the output must be checked."""
        return tuple(i for i, axis in enumerate(self.axes) if axis.out_limit)

    @property
    def taps(self) -> int:
        """The largest number of taps of a phase."""
        return max(len(phase.taps) for phase in self.phases)


@dataclass(frozen=True)
class _Line:
    """One spatial axis before the axes are multiplied out: per residue, its (tap, shift) list."""

    axis: Axis
    residues: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    filter_stride: int
    image_stride: int
    out_stride: int


def geometry(problem: ConvolutionProblem) -> Geometry:
    """The map of a problem with no empty dimension (backward_filter: the forward's)."""
    backward = problem.direction == "backward_data"
    item = problem.x.dtype.itemsize
    x, w, y = ([s * item for s in desc.strides] for desc in (problem.x, problem.w, problem.y))
    conv, groups = problem.conv, problem.conv.groups
    channels, filters = problem.w.dims[1], problem.w.dims[0] // groups
    lines = [axis_line(problem, a, x, w, y, backward) for a in range(conv.axes)]
    image, out = (y, x) if backward else (x, y)
    batch = Axis(problem.x.dims[0], image[0], out[0])
    group_x, group_y = channels * x[1], filters * y[1]
    c, k = Channels(channels, w[1], x[1]), Channels(filters, w[0], y[1])
    found = Geometry(
        (batch, *(line.axis for line in lines)),
        _phases(lines),
        groups,
        group_y if backward else group_x,
        filters * w[0],
        group_x if backward else group_y,
        k if backward else c,
        c if backward else k,
    )
    return _merged(found)


def axis_line(
    problem: ConvolutionProblem, a: int, x: list[int], w: list[int], y: list[int], backward: bool
) -> _Line:
    conv = problem.conv
    size, window, out = (desc.dims[2 + a] for desc in (problem.x, problem.w, problem.y))
    stride, dilation, pad = conv.stride[a], conv.dilation[a], conv.padding[a][0]
    flip = conv.mode == "convolution"
    # The tap's distance from the pixel's first coordinate, in image elements.
    places = [((window - 1 - t if flip else t) * dilation - pad) for t in range(window)]
    if not backward:
        taps = tuple(enumerate(places))
        axis = Axis(out, x[2 + a] * stride, y[2 + a], stride, size)
        residues = ((0, taps),)
        line = _Line(axis, residues, w[2 + a], x[2 + a], y[2 + a])
    else:
        residues = tuple(
            (
                r,
                tuple(
                    (t, (r - d) // stride) for t, d in enumerate(places) if (r - d) % stride == 0
                ),
            )
            for r in range(min(stride, size))
        )
        ragged = size % stride and stride < size
        limits = (stride, size) if ragged else (0, 0)
        axis = Axis(-(-size // stride), y[2 + a], x[2 + a] * stride, 1, out, False, *limits)
        line = _Line(axis, residues, w[2 + a], y[2 + a], x[2 + a])
    shifts = [shift for _, taps in line.residues for _, shift in taps]
    last = (axis.size - 1) * axis.step
    checked = bool(shifts) and (min(shifts) < 0 or last + max(shifts) >= axis.limit)
    return replace(line, axis=replace(axis, checked=checked))


def _phases(lines: list[_Line]) -> tuple[Phase, ...]:
    phases = []
    for residues in itertools.product(*(line.residues for line in lines)):
        taps = [
            Tap(
                sum(t * line.filter_stride for (t, _), line in zip(combination, lines)),
                sum(shift * line.image_stride for (_, shift), line in zip(combination, lines)),
                tuple(s for (_, s), line in zip(combination, lines) if line.axis.checked),
            )
            for combination in itertools.product(*(taps for _, taps in residues))
        ]
        out = sum(r * line.out_stride for (r, _), line in zip(residues, lines))
        start = tuple(r for (r, _), line in zip(residues, lines) if line.axis.out_limit)
        phases.append(Phase(out, start, tuple(sorted(taps, key=lambda tap: tap.filter))))
    return tuple(phases)


def _merged(found: Geometry) -> Geometry:
    """Fewer, longer axes: those of one pixel dropped, neighbours that step alike joined."""
    axes: list[Axis] = []
    for axis in found.axes:
        plain = not axis.checked and not axis.out_limit
        if plain and axis.size == 1:
            continue
        if plain and axes and not axes[-1].checked and not axes[-1].out_limit:
            before = axes[-1]
            if before.image == axis.size * axis.image and before.out == axis.size * axis.out:
                axes[-1] = replace(axis, size=before.size * axis.size)
                continue
        axes.append(axis)
    return replace(found, axes=tuple(axes))
