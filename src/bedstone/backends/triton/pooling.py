"""Max and average pooling on the GPU, forward and backward, 1 to 3 spatial axes, any strides.

Forward visits the taps of each window. Backward gathers: each input element asks the few windows
that cover it for their gradient, so nothing is added to the same place twice and results repeat
bitwise. Without indices, backward of max looks for the maxima again, window by window, or (with
workspace) once beforehand. Adaptive windows differ only in where they start and stop.
"""

from __future__ import annotations

import math
from typing import Any

from bedstone.backends.triton import chips, launch
from bedstone.backends.triton import pooling_kernels as kernels
from bedstone.backends.triton.pooling_patch import Patches, Whole
from bedstone.backends.triton.walk import MAX_PROGRAMS, power_of_two
from bedstone.plan.algorithm import Algorithm, Kernel
from bedstone.plan.device import Device
from bedstone.spec.dtypes import DType
from bedstone.spec.pooling import AdaptivePoolingProblem, PoolingProblem
from bedstone.spec.problem import Problem
from bedstone.spec.tensor import TensorDesc

WARPS = 4
STRIP_LAST = 1024  # elements of a program's strip where channels are innermost: 8 a thread
STRIP = 256  # elsewhere: elements are loaded one by one, and many programs hide the wait
UNROLL = 4  # taps, or windows, an axis
INDEX = DType.int64
AnyPooling = PoolingProblem | AdaptivePoolingProblem


class Direct(Algorithm):
    """Pooling without workspace."""

    name = "triton:direct"

    def supports(self, problem: Problem, device: Device) -> str | None:
        if not isinstance(problem, (PoolingProblem, AdaptivePoolingProblem)):
            return "it computes pooling"
        if math.prod(problem.x.dims[2:]) >= 2**31:
            return "takes images of less than 2^31 pixels"
        if Grid(problem.outputs[0].desc).programs > MAX_PROGRAMS:
            return f"needs more than {MAX_PROGRAMS} programs"
        return None

    def estimate(self, problem: Problem, device: Device) -> float:
        repeats = 1.5  # against kernels by patches, which read what windows share once
        if isinstance(problem, PoolingProblem) and problem.finds_maxima:
            # Each element reads all taps of all the windows that cover it, from the caches.
            repeats = max(repeats, problem.reduction_length / 4)
        return repeats * chips.move_seconds(problem.bytes, device.architecture)

    def build(self, problem: Problem, device: Device) -> Kernel:
        if not isinstance(problem, (PoolingProblem, AdaptivePoolingProblem)):
            raise TypeError(f"not a pooling: {problem}")
        if problem.direction.endswith("forward"):
            return _forward(problem, device)
        return _backward(problem, device)


class TwoPass(Direct):
    """Backward of max without indices: the maxima are found once, into workspace."""

    name = "triton:two_pass"

    def supports(self, problem: Problem, device: Device) -> str | None:
        reason = super().supports(problem, device)
        if reason is None and not (isinstance(problem, PoolingProblem) and problem.finds_maxima):
            return "takes backward of max without indices"
        return reason

    def workspace(self, problem: Problem, device: Device) -> int:
        return problem.y.size * INDEX.itemsize  # type: ignore[attr-defined]

    def estimate(self, problem: Problem, device: Device) -> float:
        moved = problem.bytes + 2 * self.workspace(problem, device)
        return chips.move_seconds(moved, device.architecture, 2)

    def build(self, problem: Problem, device: Device) -> Kernel:
        if not isinstance(problem, PoolingProblem):
            raise TypeError(f"not a pooling: {problem}")
        indices = TensorDesc.packed(problem.y.dims, INDEX, _layout_of(problem.y))
        find = _forward(problem, device, indices)
        return launch.Chain((find, _backward(problem, device, indices)), "maxima found first")


def _layout_of(desc: TensorDesc) -> str | None:
    """The memory order for indices that are walked together with the tensor."""
    if desc.strides[1] == 1 and desc.rank > 2:
        return {3: "NWC", 4: "NHWC", 5: "NDHWC"}[desc.rank]
    return None


class Grid:
    """The strips of an image-shaped tensor: see walk.strip. One row of a strip a program."""

    def __init__(self, desc: TensorDesc) -> None:
        n, c, *spatial = desc.dims
        columns = spatial[-1]
        self.rows = math.prod(spatial[:-1])
        self.last = desc.strides[1] == 1 and desc.rank > 2 and c > 1
        if self.last:
            self.bb = min(128, power_of_two(c))
            self.ba = min(power_of_two(columns), max(1, STRIP_LAST // self.bb))
            strips = n * -(-columns // self.ba) * -(-c // self.bb)
        else:
            self.bb = min(128, power_of_two(columns))
            self.ba = min(power_of_two(n * c), max(1, STRIP // self.bb))
            strips = -(-n * c // self.ba) * -(-columns // self.bb)
        self.programs = strips * self.rows


def _three(values: Any, missing: int) -> tuple[int, int, int]:
    """Spatial values padded in front to three axes."""
    values = tuple(values)
    return (*(missing,) * (3 - len(values)), *values)  # type: ignore[return-value]


def _strides(desc: TensorDesc, grid: Grid) -> launch.Integers:
    """(n, c, d, h, w) strides, told to be whole words where channels are innermost."""
    values = (desc.strides[0], desc.strides[1], *_three(desc.strides[2:], 0))
    low, high = desc.offset_range()
    unit = launch.ALIGNMENT // desc.dtype.itemsize
    words = grid.last and all(v in (0, 1) or v % unit == 0 for v in values)
    return launch.Integers(values, "i64" if high - low >= 2**31 else "i32", unit if words else 1)


def _unrolled(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Short loops are unrolled whole, so that their loads are in flight together."""
    return tuple(n if n <= UNROLL else 1 for n in counts)


def _geometry(problem: AnyPooling, grid: Grid) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arguments, constants) that both kernels take."""
    n, c, *size = problem.x.dims
    adaptive = isinstance(problem, AdaptivePoolingProblem)
    if isinstance(problem, AdaptivePoolingProblem):
        window = tuple(m.index.shape[1] for m in problem.maps)
        low = high = (0,) * len(size)
        stride = dilation = (1,) * len(size)
        mode = "average_exclude_padding"
    else:
        pool = problem.pool
        window, stride, dilation, mode = pool.window, pool.stride, pool.dilation, pool.mode
        low, high = zip(*pool.padding)
    unit = launch.ALIGNMENT // problem.x.dtype.itemsize
    words = grid.last and c % unit == 0
    arguments = {
        "N": launch.Scalar(n),
        "C": launch.Scalar(c, divisor=unit if words else 1),
        "size": launch.Integers(_three(size, 1)),
        "out": launch.Integers(_three(problem.y.dims[2:], 1)),
    }
    # The windows' numbers are baked in: then no index is divided by a variable.
    constants = {
        "window": _three(window, 1),
        "low": _three(low, 0),
        "high": _three(high, 0),
        "step": _three(stride, 1),
        "dil": _three(dilation, 1),
        "unroll": _unrolled(_three(window, 1)),
        "MODE": mode,
        "ADAPTIVE": adaptive,
        "ACC": launch.accumulator(problem.x.dtype),
        "CHANNELS_LAST": grid.last,
        "BA": grid.ba,
        "BB": grid.bb,
    }
    return arguments, constants


def _forward(problem: AnyPooling, device: Device, find: TensorDesc | None = None) -> Kernel:
    """Forward; or, with `find`, only the indices of the maxima, into workspace."""
    y = problem.y
    grid = Grid(y)
    arguments, constants = _geometry(problem, grid)
    saved = problem.saved if isinstance(problem, PoolingProblem) else problem.x
    indices = getattr(problem, "indices", None) if find is None else find
    arguments |= {
        "x_ptr": launch.Pointer(0, saved.dtype),
        "y_ptr": launch.Pointer(1, y.dtype),
        "i_ptr": launch.Pointer(1, y.dtype),
        **launch.factors(y.dtype),
        "x_strides": _strides(saved, grid),
        "y_strides": _strides(y, grid),
        "i_strides": _strides(y if indices is None else indices, grid),
    }
    if indices is not None:
        arguments["i_ptr"] = launch.Pointer(2, INDEX) if find is None else launch.Scratch(INDEX)
    constants |= {"VALUES": find is None, "INDICES": indices is not None}
    return launch.prepare(
        device, kernels.pooling_forward_kernel, (grid.programs,), arguments, constants,
        num_warps=WARPS,
    )  # fmt: skip


def _backward(problem: AnyPooling, device: Device, found: TensorDesc | None = None) -> Kernel:
    """Backward; `found` describes indices in workspace that stand in for looking again."""
    dx, dy = problem.x, problem.y
    grid = Grid(dx)
    arguments, constants = _geometry(problem, grid)
    last = len(problem.operands) - 1
    source, first, i_desc = "dy", launch.Pointer(last - 1, dy.dtype), dy
    saved = problem.saved if isinstance(problem, PoolingProblem) else dx
    if constants["MODE"] == "max":
        source = "indices"
        if found is not None:
            first, i_desc = launch.Scratch(INDEX), found  # type: ignore[assignment]
        elif problem.indices is not None:  # type: ignore[union-attr]
            first, i_desc = launch.Pointer(0, INDEX), problem.indices  # type: ignore[union-attr]
        else:
            source = "x"
    arguments |= {
        "x_ptr": launch.Pointer(0 if source == "x" else last, dx.dtype),
        "i_ptr": first,
        "dy_ptr": launch.Pointer(last - 1, dy.dtype),
        "dx_ptr": launch.Pointer(last, dx.dtype),
        **launch.factors(dx.dtype),
        "x_strides": _strides(saved, grid),
        "i_strides": _strides(i_desc, grid),
        "dy_strides": _strides(dy, grid),
        "dx_strides": _strides(dx, grid),
    }
    covers = _three(_covers(problem), 1)
    constants |= {"SOURCE": source, "covers": covers, "ask": _unrolled(covers)}
    return launch.prepare(
        device, kernels.pooling_backward_kernel, (grid.programs,), arguments, constants,
        num_warps=WARPS,
    )  # fmt: skip


def _covers(problem: AnyPooling) -> tuple[int, ...]:
    """Per axis, the most windows that can cover one element."""
    if isinstance(problem, AdaptivePoolingProblem):
        return tuple(-(-p // h) + 1 for h, p in zip(problem.x.dims[2:], problem.y.dims[2:]))
    return tuple(-(-extent // u) for extent, u in zip(problem.pool.extent, problem.pool.stride))


ALGORITHMS = (Patches(), Whole(), Direct(), TwoPass())
