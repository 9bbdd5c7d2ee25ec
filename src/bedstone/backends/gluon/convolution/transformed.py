"""gluon:implicit_gemm_transformed(_input), channels-first convolution via channels-last copies.

The images (and the filter, where its kernel wants that) are copied into channels-last workspace at
copy speed, a channels-last algorithm of this package runs on the copies, and an image that it wrote
is copied back. With beta the old output makes the trip too, so that rounding is the direct
algorithm's. Gradients by filter are written in place: their kernels take any strides of dw.
`..._input` leaves the image that is written where it is, and its kernel stores pixels innermost:
one copy less, for a slower end of each tile.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bedstone.backends.gluon.convolution import tiles
from bedstone.backends.gluon.convolution.f16x3 import ImplicitGemmF16, ImplicitGemmF16x3
from bedstone.backends.gluon.convolution.filter_f16x3 import FilterF16, FilterF16x3
from bedstone.backends.gluon.convolution.filter_gradient import ImplicitGemm
from bedstone.backends.gluon.convolution.filter_parts import FilterBf16x3, FilterBf16x6
from bedstone.backends.gluon.convolution.grouped import Grouped
from bedstone.backends.gluon.convolution.halo import FilterHalo
from bedstone.backends.gluon.convolution.image_split import SplitGemm
from bedstone.backends.gluon.convolution.images import image_of
from bedstone.backends.gluon.convolution.implicit_gemm_ws import HALVES, declines
from bedstone.backends.triton import launch
from bedstone.backends.triton.convolution.geometry import word
from bedstone.plan.algorithm import Algorithm, Kernel
from bedstone.plan.device import Device
from bedstone.spec.convolution import ConvolutionProblem
from bedstone.spec.dtypes import DType
from bedstone.spec.problem import Operand, Problem
from bedstone.spec.tensor import CHANNELS_LAST, TensorDesc

INNER = (
    ImplicitGemm(), SplitGemm(), FilterHalo(), ImplicitGemmF16x3(), ImplicitGemmF16(),
    FilterF16x3(), FilterF16(), FilterBf16x6(), FilterBf16x3(), Grouped(),
)  # fmt: skip
REGION = 256  # bytes to which copies are aligned
BLOCK = 64  # channels and pixels that a program of the transform moves
# Images that are written in place, pixels innermost: past this size the level-2 cache no longer
# gathers the short rows (4 times slower than by way of a copy on 64 x 64 x 224 x 224), and 16-bit
# rows are too short at any size (0.2 to 0.8 of cuDNN's speed, 1.05 to 1.3 with a copy).
MAX_IN_PLACE = 32 << 20
IN_PLACE_SECONDS = 1.5e-12  # an element, besides what a channels-last store takes
COPY_BANDWIDTH = 3.0e12  # bytes/s of the transform, read and written: 2.7 to 4.1 measured


@dataclass(frozen=True)
class Copy:
    """An operand that has a channels-last copy: its number, desc, the copy's desc and offset."""

    operand: int
    desc: TensorDesc
    copy: TensorDesc
    offset: int
    written: bool


@dataclass(frozen=True)
class Detour:
    """The channels-last problem, the algorithm that takes it, and the copies."""

    problem: ConvolutionProblem
    algorithm: Algorithm
    copies: tuple[Copy, ...]
    inner_offset: int


def channels_last(desc: TensorDesc) -> TensorDesc:
    """The packed channels-last descriptor of the same dims and dtype."""
    return TensorDesc.packed(desc.dims, desc.dtype, CHANNELS_LAST[desc.rank])


def row_of(desc: TensorDesc) -> tuple[int, int, int, int, int, int] | None:
    """(batch, channels, pixels, and the distances of each), None if pixels are not one row."""
    image = image_of(desc)
    one = replace(image, dims=(1, *image.dims[1:])).merged()
    if one is None:
        return None
    batch = image.strides[0] if image.dims[0] > 1 else 0
    return image.dims[0], image.dims[4], one.dims[3], batch, image.strides[4], one.strides[3]


def copyable(operand: Operand) -> bool:
    """True if the transform can read or write the operand's memory: pixels adjacent."""
    row = row_of(operand.desc)
    return row is not None and (row[5] == 1 or row[2] == 1) and row[4] > 0 and row[3] >= 0


@functools.lru_cache(maxsize=1024)
def detour(problem: ConvolutionProblem, device: Device, in_place: bool) -> Detour | str:
    """The way of least estimated time, or the reason why there is none. `in_place`: the image that
    is written stays as it is."""
    filters = {o.name: o for o in problem.operands}
    views = {"x": channels_last(problem.x), "y": channels_last(problem.y)}
    if in_place:
        if problem.direction == "backward_filter":
            return "writes images, and a gradient by filter writes none"
        reason = refuses_in_place(problem)
        if reason is not None:
            return reason
        del views["y" if problem.direction == "forward" else "x"]
    if problem.direction != "backward_filter" and not same(problem.w, channels_last(problem.w)):
        views["w"] = channels_last(problem.w)
    inner = replace(problem, **views)
    best: tuple[float, Algorithm] | None = None
    reasons = []
    for algorithm in INNER:
        reason = algorithm.supports(inner, device)
        if reason is not None:
            reasons.append(f"{algorithm.name} {reason}")
        elif best is None or algorithm.estimate(inner, device) < best[0]:
            best = (algorithm.estimate(inner, device), algorithm)
    if best is None:
        return "channels last, too, it is declined: " + "; ".join(reasons)
    copies, offset = [], 0
    for number, (before, after) in enumerate(zip(problem.operands, inner.operands)):
        if same(before.desc, after.desc):
            continue
        if not copyable(filters[before.name]):
            return f"{before.name}: pixels are not adjacent"
        copies.append(Copy(number, before.desc, after.desc, offset, before.is_output))
        offset += -(-after.desc.nbytes // REGION) * REGION
    if not copies:
        return "memory is channels last already"
    return Detour(inner, best[1], tuple(copies), offset)


def refuses_in_place(problem: ConvolutionProblem) -> str | None:
    """Why the image that is written should rather be copied, or None."""
    out = problem.outputs[0].desc
    if out.dtype is not DType.float32:
        return "takes float32: rows of 16-bit pixels are too short for its stores"
    if problem.direction == "backward_data" and any(u > 1 for u in problem.conv.stride):
        return "the pixels of a strided gradient are not stored side by side"
    if out.nbytes > MAX_IN_PLACE:
        return f"writes at most {MAX_IN_PLACE} bytes, what the cache gathers; here {out.nbytes}"
    return None


def same(a: TensorDesc, b: TensorDesc) -> bool:
    """True if two descriptors of equal dims name the same elements."""
    return all(d == 1 or s == t for d, s, t in zip(a.dims, a.strides, b.strides))


class Transformed(Algorithm):
    """A channels-last algorithm between two transforms."""

    name = "gluon:implicit_gemm_transformed"
    in_place = False

    def supports(self, problem: Problem, device: Device) -> str | None:
        reason = declines(problem, device, (*HALVES, DType.float32))
        if reason is not None or not isinstance(problem, ConvolutionProblem):
            return reason
        found = detour(problem, device, self.in_place)
        return found if isinstance(found, str) else None

    def workspace(self, problem: Problem, device: Device) -> int:
        found = self._detour(problem, device)
        return found.inner_offset + found.algorithm.workspace(found.problem, device)

    def estimate(self, problem: Problem, device: Device) -> float:
        found = self._detour(problem, device)
        moved = sum(2 * copy.copy.nbytes for copy in found.copies)
        launches = len(found.copies) * tiles.LAUNCH_SECONDS
        if self.in_place:
            launches += IN_PLACE_SECONDS * problem.outputs[0].desc.size
        return launches + moved / COPY_BANDWIDTH + found.algorithm.estimate(found.problem, device)

    def build(self, problem: Problem, device: Device) -> Kernel:
        return TransformedKernel(self._detour(problem, device), device)

    def _detour(self, problem: Problem, device: Device) -> Detour:
        if not isinstance(problem, ConvolutionProblem):
            raise TypeError(f"not a convolution: {problem}")
        found = detour(problem, device, self.in_place)
        if isinstance(found, str):
            raise ValueError(found)
        return found


class TransformedInput(Transformed):
    """The same, with the image that is written left in place."""

    name = "gluon:implicit_gemm_transformed_input"
    in_place = True


class TransformedKernel:
    """Copies in, the channels-last kernel, copies out."""

    def __init__(self, way: Detour, device: Device) -> None:
        inputs = [copy for copy in way.copies if not copy.written]
        outputs = [copy for copy in way.copies if copy.written]
        self._before = [transform_launch(device, copy, True) for copy in inputs]
        self._before_beta = [transform_launch(device, copy, True) for copy in outputs]
        self._after = [transform_launch(device, copy, False) for copy in outputs]
        self._inner = way.algorithm.build(way.problem, device)
        self._moved = [(copy.operand, copy.offset) for copy in way.copies]
        self._inner_offset = way.inner_offset
        names = [way.problem.operands[copy.operand].name for copy in way.copies]
        self.launches = (*self._before, *self._before_beta, self._inner, *self._after)
        self.description = (
            f"{' and '.join(names)} by way of channels-last copies; {way.algorithm.name}: "
            f"{getattr(self._inner, 'description', '')}"
        )

    def __call__(
        self, pointers: Sequence[int], workspace: int, alpha: float, beta: float, stream: int
    ) -> None:
        for transform in self._before:
            transform(pointers, workspace, 1.0, 0.0, stream)
        if beta != 0:
            for transform in self._before_beta:
                transform(pointers, workspace, 1.0, 0.0, stream)
        moved = list(pointers)
        for operand, offset in self._moved:
            moved[operand] = workspace + offset
        self._inner(moved, workspace + self._inner_offset, alpha, beta, stream)
        for transform in self._after:
            transform(pointers, workspace, 1.0, 0.0, stream)


def transform_launch(device: Device, copy: Copy, into: bool) -> Kernel:
    """The copy of an operand into the workspace, or out of it."""
    from bedstone.backends.gluon.convolution.transform_kernels import convolution_transform_kernel

    row = row_of(copy.desc)
    if row is None:
        raise ValueError(f"pixels are not adjacent: {copy.desc}")
    batch, channels, pixels, first_batch, first_step, _ = row
    unit = word(copy.desc.dtype.itemsize)
    operand = launch.Pointer(copy.operand, copy.desc.dtype)
    scratch = launch.Scratch(copy.desc.dtype, copy.offset)
    names = ("x", "y") if into else ("y", "x")
    distances = ((first_batch, first_step), (channels * pixels, channels))
    arguments: dict[str, launch.Argument] = {
        f"{names[0]}_ptr": operand,
        f"{names[1]}_ptr": scratch,
        "batch": launch.Scalar(batch),
        "channels": launch.Scalar(channels, divisor=divisor_of(channels, unit)),
        "pixels": launch.Scalar(pixels, divisor=divisor_of(pixels, unit)),
    }
    for name, (far, step) in zip(names, distances):
        arguments[f"{name}_batch"] = launch.Scalar(far, "i64", divisor_of(far, unit))
        arguments[f"{name}_step"] = launch.Scalar(step, "i64", divisor_of(step, unit))
    bp = min(BLOCK, 1 << (pixels - 1).bit_length())
    bc = min(BLOCK * BLOCK // bp, 4 * BLOCK, max(BLOCK, 1 << (channels - 1).bit_length()))
    grid = -(-pixels // bp) * -(-channels // bc) * batch
    constants = {"TO_CHANNELS_LAST": into, "BC": bc, "BP": bp}
    return launch.prepare(
        device,
        convolution_transform_kernel,
        (grid,),
        arguments,
        constants,
        overlaps=True,
        num_warps=4,
    )


def divisor_of(value: int, unit: int) -> int:
    """unit if it divides the value, else 1."""
    return unit if value % unit == 0 else 1
