"""gluon:implicit_gemm_ws_split, forward and gradient by data where tiles are too few for the chip.

The steps of a tile (taps x blocks of reduced channels) are cut into equal parts, one a program. The
parts' sums lie in workspace and are added in order, so that the result is the same at every run.
The gradient by filter of the same name is in filter_gradient.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from bedstone.backends.gluon.convolution import tiles
from bedstone.backends.gluon.convolution.filter_gradient import ByDirection, FilterSplit
from bedstone.backends.gluon.convolution.implicit_gemm_ws import (
    CHEAP_ACTIVATIONS,
    WARPS,
    Guarded,
    ImageChoice,
    ImplicitGemmWs,
    choose_image,
    common_arguments,
    fits,
    image_arguments,
    image_view,
    multiprocessors,
    step_seconds,
    table_of,
    turn_seconds,
)
from bedstone.backends.gluon.convolution.patches import choose_patch
from bedstone.backends.gluon.convolution.turned import turn_launch, turned_bytes, turns
from bedstone.backends.triton import launch
from bedstone.plan.algorithm import Algorithm, Kernel
from bedstone.plan.device import Device
from bedstone.spec.convolution import ConvolutionProblem
from bedstone.spec.dtypes import DType
from bedstone.spec.problem import Problem

PARTS = (2, 3, 4, 6, 8, 12, 16, 24)
FEWEST_STEPS = 2  # of a part
SUM_ELEMENTS = 1024  # of a tile that a program of the sum adds
SUM_SECONDS = 1e-6  # that the sum takes besides its launch and its traffic
SUM_WARPS = 4
REGION = 256  # bytes to which the parts are aligned


@dataclass(frozen=True)
class SplitChoice:
    """Tile and patch, the parts of a tile, how many tiles there are, and the seconds expected."""

    image: ImageChoice
    parts: int
    count: int
    seconds: float

    @property
    def nbytes(self) -> int:
        """Of all parts."""
        return 4 * self.count * self.parts * self.image.tile.bm * self.image.tile.bk


@functools.lru_cache(maxsize=1024)
def choose_split(
    problem: ConvolutionProblem, table: tuple[tiles.Tile, ...], processors: int
) -> SplitChoice | None:
    """The tile and number of parts of the least modelled time, None if none fits."""
    view = image_view(problem)
    best = None
    for tile in table:
        if not fits(tile, view, "tma", CHEAP_ACTIVATIONS[0]):  # parts leave as they are
            continue
        patch = choose_patch(view.geo.images, view.geo.axes, tile.bm, view.backward)
        count = patch.count * view.geo.groups * -(-view.produced // tile.bk)
        steps = patch.taps / max(patch.count, 1) * -(-view.reduced // tile.bc)
        step = step_seconds(tile, processors)
        for parts in PARTS:
            if steps < parts * FEWEST_STEPS:
                break
            rounds = -(-count * parts // processors)
            seconds = rounds * -(-steps // parts) * step + (rounds + 1) * tile.tail * 1e-6
            found = SplitChoice(ImageChoice(tile, patch, seconds), parts, count, seconds)
            seconds += SUM_SECONDS + 2 * found.nbytes / tiles.BANDWIDTH
            if best is None or seconds < best.seconds:
                best = SplitChoice(found.image, parts, count, seconds)
    return best


class ImageSplit(Algorithm):
    """Forward and backward_data with the steps of a tile shared by several programs."""

    name = "gluon:implicit_gemm_ws_split"
    _whole = ImplicitGemmWs()

    def supports(self, problem: Problem, device: Device) -> str | None:
        reason = self._whole.supports(problem, device)
        if reason is not None or not isinstance(problem, ConvolutionProblem):
            return reason
        processors, table = multiprocessors(device), table_of(problem)
        whole = choose_image(problem, table, processors)
        choice = choose_split(problem, table, processors)
        if choice is None:
            return f"fewer than {PARTS[0] * FEWEST_STEPS} steps a tile"
        if whole is not None and whole.seconds <= choice.seconds + tiles.LAUNCH_SECONDS:
            return "whole tiles are no slower than parts of them and their sum"
        return None

    def workspace(self, problem: Problem, device: Device) -> int:
        if not isinstance(problem, ConvolutionProblem):
            return 0
        return parts_at(problem) + self.choice(problem, device).nbytes

    def estimate(self, problem: Problem, device: Device) -> float:
        if not isinstance(problem, ConvolutionProblem):
            raise TypeError(f"not a convolution: {problem}")
        choice = self.choice(problem, device)
        seconds = max(choice.seconds, problem.bytes / tiles.BANDWIDTH)
        return turn_seconds(problem) + 2 * tiles.LAUNCH_SECONDS + seconds

    def build(self, problem: Problem, device: Device) -> Kernel:
        if not isinstance(problem, ConvolutionProblem):
            raise TypeError(f"not a convolution: {problem}")
        choice = self.choice(problem, device)
        launches = [parts_launch(problem, device, choice), sum_launch(problem, device, choice)]
        if turns(problem):
            launches.insert(0, turn_launch(problem, device))
        return Guarded(launches, problem, device, "parts added in order")

    def choice(self, problem: ConvolutionProblem, device: Device) -> SplitChoice:
        """Tile, patch and parts."""
        choice = choose_split(problem, table_of(problem), multiprocessors(device))
        if choice is None:
            raise ValueError(f"no tile fits {problem}")
        return choice


class SplitGemm(ByDirection):
    """All three directions, with the work of a tile in parts."""

    name = "gluon:implicit_gemm_ws_split"
    images = ImageSplit()
    filters = FilterSplit()


def parts_at(problem: ConvolutionProblem) -> int:
    """Where the parts begin in the workspace: behind the turned filter."""
    return -(-turned_bytes(problem) // REGION) * REGION


def parts_launch(problem: ConvolutionProblem, device: Device, choice: SplitChoice) -> Kernel:
    """The kernel that writes the parts."""
    from bedstone.backends.gluon.convolution.image_kernels import convolution_image_ws_kernel

    view, tile = image_view(problem), choice.image.tile
    arguments, constants = image_arguments(problem, view, tile, choice.image.patch, "part")
    arguments["y_ptr"] = launch.Scratch(DType.float32, parts_at(problem))
    arguments["parts"] = launch.Scalar(choice.parts)
    constants |= {"BIAS": False, "ACTIVATION": "none"}
    grid = (min(choice.count * choice.parts, multiprocessors(device) * tile.resident),)
    return launch.prepare(
        device,
        convolution_image_ws_kernel,
        grid,
        arguments,
        constants,
        overlaps=True,
        num_warps=WARPS,
    )


def sum_launch(problem: ConvolutionProblem, device: Device, choice: SplitChoice) -> Kernel:
    """The kernel that adds the parts."""
    from bedstone.backends.gluon.convolution.image_kernels import convolution_image_sum_kernel

    view, tile = image_view(problem), choice.image.tile
    common, constants = common_arguments(problem, view, tile, choice.image.patch)
    names = convolution_image_sum_kernel.arg_names
    arguments = {name: value for name, value in common.items() if name in names}
    arguments["part_ptr"] = launch.Scratch(DType.float32, parts_at(problem))
    arguments["parts"] = launch.Scalar(choice.parts)
    rows = min(tile.bm, max(1, SUM_ELEMENTS // tile.bk))
    own: dict[str, Any] = {
        "BM": tile.bm, "BK": tile.bk, "ROWS": rows,
        "RESIDUES": view.backward and not view.unit,
        "BIAS": constants["BIAS"], "ACTIVATION": constants["ACTIVATION"],
    }  # fmt: skip
    if view.target.strides[4] == 1:  # known to the compiler, it allows wide stores
        own["channel_stride"] = arguments.pop("channel_stride").value  # type: ignore[union-attr]
    grid = (choice.count * tile.bm // rows,)
    return launch.prepare(
        device,
        convolution_image_sum_kernel,
        grid,
        arguments,
        own,
        overlaps=True,
        num_warps=SUM_WARPS,
    )
