"""Convolution behind the names of both versions, and the lowering cudnnIm2Col.

The lowered matrix is the paper's D_m: one row for each (c, r, s), one column for each (n, p, q),
contiguous, so that the filters as a K x (C R S) matrix times it are the convolution. In mode
CUDNN_CONVOLUTION its rows are those of the flipped filter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import bedstone
from bedstone.compat.cudnn_calls import OWN_CHOICE, Context, Prepared, algorithm_of, checked
from bedstone.compat.cudnn_descriptors import State
from bedstone.compat.cudnn_enums import cudnnConvolutionFwdAlgo as Algo
from bedstone.compat.cudnn_enums import cudnnConvolutionFwdPreference as Preference
from bedstone.compat.cudnn_memory import Place
from bedstone.spec.convolution import BiasGradientProblem, ConvolutionDesc, ConvolutionProblem
from bedstone.spec.errors import InvalidDescriptor
from bedstone.spec.tensor import TensorDesc
from bedstone.spec.tensor_ops import TensorOpProblem

FORWARD = {"x": "src", "w": "filter", "y": "dest"}
BACKWARD_FILTER = {"x": "src", "dy": "diff", "y": "diff", "dw": "grad", "w": "grad"}
BACKWARD_DATA = {"w": "filter", "dy": "diff", "y": "diff", "dx": "grad", "x": "grad"}


@dataclass(frozen=True)
class BoundConvolution:
    """v1's descriptor: a convolution of images x (N, C, H, W) and filters w (K, C, R, S)."""

    conv: ConvolutionDesc
    x: tuple[int, ...]
    w: tuple[int, ...]

    def check(self, x_name: str, x: State, w_name: str, w: State) -> None:
        """Raises InvalidDescriptor for images or filters of other dims."""
        if x.value.dims != self.x:
            raise InvalidDescriptor(x_name, x.value.dims, f"convDesc's input dims, {self.x}")
        if w.value.dims != self.w:
            raise InvalidDescriptor(w_name, w.value.dims, f"convDesc's filter dims, {self.w}")


def _problem(
    direction: str, x: State, w: State, y: State, conv: ConvolutionDesc, stems: dict[str, str]
) -> ConvolutionProblem:
    problem: ConvolutionProblem = checked(
        ConvolutionProblem, stems, direction, x.value, w.value, y.value, conv
    )
    return problem


def forward_plan(
    context: Context, x: State, w: State, y: State, conv: ConvolutionDesc, algo: Algo | None
) -> bedstone.Plan:
    """The plan that a forward algorithm stands for; None leaves the choice to bedstone."""
    name, limit = OWN_CHOICE if algo is None else algorithm_of("algo", algo)
    return context.handle.plan(_problem("forward", x, w, y, conv, FORWARD), name, limit)


def proposed_algorithm(
    context: Context,
    x: State,
    w: State,
    y: State,
    conv: ConvolutionDesc,
    preference: Preference,
    limit: int,
) -> Algo:
    """The algorithm of least estimated time whose workspace the preference allows."""
    allowed = {
        Preference.CUDNN_CONVOLUTION_FWD_NO_WORKSPACE: 0,
        Preference.CUDNN_CONVOLUTION_FWD_PREFER_FASTEST: math.inf,
        Preference.CUDNN_CONVOLUTION_FWD_SPECIFY_WORKSPACE_LIMIT: limit,
    }[preference]
    roomy = Algo.CUDNN_CONVOLUTION_FWD_ALGO_GEMM
    if 0 < forward_plan(context, x, w, y, conv, roomy).workspace_size <= allowed:
        return roomy
    frugal = Algo.CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM
    chosen = forward_plan(context, x, w, y, conv, frugal).algorithm
    if chosen.partition(":")[2].startswith("implicit_gemm"):
        return Algo.CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM
    return frugal


def forward(
    context: Context,
    x: State,
    x_data: Any,
    w: State,
    w_data: Any,
    conv: ConvolutionDesc,
    conv_version: int,
    y: State,
    y_data: Any,
    alpha: float,
    beta: float,
    algo: Algo | None = None,
    workspace: Any = None,
    workspace_bytes: int = 0,
) -> None:
    """y = alpha * conv(x, w) + beta * y."""

    def build() -> tuple[Prepared, Place]:
        plan = forward_plan(context, x, w, y, conv, algo)
        lent = TensorDesc.packed((plan.workspace_size,), "uint8")
        return Prepared(plan, FORWARD), Place("workSpace", lent, written=True)

    key = ("forward", algo, x.version, w.version, conv_version, y.version)
    call, place = context.prepared(key, build)
    address = 0
    if place.high:
        if workspace_bytes < place.high:
            raise InvalidDescriptor(
                "workSpaceSizeInBytes", workspace_bytes, f"at least {place.high} bytes"
            )
        address = place.address(workspace, context.device)
    call.run(context, (x_data, w_data, y_data), alpha, beta, address)


def backward_bias(
    context: Context, dy: State, dy_data: Any, db: State, db_data: Any, alpha: float, beta: float
) -> None:
    """db (1, C, 1, ...) = alpha * the sum of dy over everything but channels + beta * db."""

    def build() -> Prepared:
        stems = {"dy": "src", "y": "src", "dbias": "dest", "bias": "dest"}
        y, bias = dy.value, db.value
        if y.rank < 2 or bias.dims != (1, y.dims[1], *(1,) * (y.rank - 2)):
            raise InvalidDescriptor("destDesc", bias.dims, f"dims 1xCx1... for srcDesc {y.dims}")
        vector = TensorDesc((bias.dims[1],), (bias.strides[1],), bias.dtype)
        problem = checked(BiasGradientProblem, stems, y, vector)
        return Prepared(context.handle.plan(problem), stems)

    call = context.prepared(("backward bias", dy.version, db.version), build)
    call.run(context, (dy_data, db_data), alpha, beta)


def backward_filter(
    context: Context,
    x: State,
    x_data: Any,
    dy: State,
    dy_data: Any,
    conv: ConvolutionDesc,
    conv_version: int,
    dw: State,
    dw_data: Any,
    alpha: float,
    beta: float,
) -> None:
    """dw = alpha * (the sum over images and pixels of dy * x) + beta * dw."""

    def build() -> Prepared:
        problem = _problem("backward_filter", x, dw, dy, conv, BACKWARD_FILTER)
        return Prepared(context.handle.plan(problem), BACKWARD_FILTER)

    key = ("backward filter", x.version, dy.version, conv_version, dw.version)
    context.prepared(key, build).run(context, (x_data, dy_data, dw_data), alpha, beta)


def backward_data(
    context: Context,
    w: State,
    w_data: Any,
    dy: State,
    dy_data: Any,
    conv: ConvolutionDesc,
    conv_version: int,
    dx: State,
    dx_data: Any,
    alpha: float,
    beta: float,
) -> None:
    """dx = alpha * (the transposed convolution of dy by w) + beta * dx."""

    def build() -> Prepared:
        problem = _problem("backward_data", dx, w, dy, conv, BACKWARD_DATA)
        return Prepared(context.handle.plan(problem), BACKWARD_DATA)

    key = ("backward data", w.version, dy.version, conv_version, dx.version)
    context.prepared(key, build).run(context, (w_data, dy_data, dx_data), alpha, beta)


class Lowering:
    """Copies between strided views of the image and of the matrix: all in one where no window
    leaves the image, else the border's zeros and then one copy for each tap."""

    def __init__(
        self, handle: bedstone.Handle, x: TensorDesc, w: TensorDesc, conv: ConvolutionDesc
    ) -> None:
        y = checked(conv.output_dims, FORWARD, x.dims, w.dims)
        self.x, self.conv = x, conv
        self.windows, self.pixels = w.dims[2:], y[2:]
        shape = (x.dims[1], *self.windows, x.dims[0], *self.pixels)
        matrix = TensorDesc.packed((math.prod(shape),), x.dtype)
        self.columns = TensorDesc.packed(shape, x.dtype)
        self.source, self.target = Place("srcData", x), Place("colBuffer", matrix, written=True)
        self.zeros = None
        if any(p for pair in conv.padding for p in pair):
            self.zeros = handle.plan(TensorOpProblem("set", matrix))
            boxes = list(self._taps())
        else:
            boxes = [self._all_taps()] if matrix.size else []
        self.copies = [
            (handle.plan(TensorOpProblem("transform", to, of)), at * x.dtype.itemsize,
             start * x.dtype.itemsize)
            for of, at, to, start in boxes
        ]  # fmt: skip

    def _flipped(self, tap: tuple[int, ...]) -> tuple[int, ...]:
        """Where the filter's tap lies in its window."""
        if self.conv.mode == "cross_correlation":
            return tap
        return tuple(r - 1 - t for t, r in zip(tap, self.windows))

    def _all_taps(self) -> tuple[TensorDesc, int, TensorDesc, int]:
        """The image as a tensor of (C, taps, N, pixels), and the matrix."""
        (n, c, *space), x = self.x.strides, self.x
        sign = 1 if self.conv.mode == "cross_correlation" else -1
        steps = [s * u for s, u in zip(space, self.conv.stride)]
        strides = (c, *(sign * s for s in space), n, *steps)
        corner = sum(t * s for t, s in zip(self._flipped((0,) * len(space)), space))
        return TensorDesc(self.columns.dims, strides, x.dtype), corner, self.columns, 0

    def _taps(self) -> Iterator[tuple[TensorDesc, int, TensorDesc, int]]:
        """For each tap that meets the image: the pixels that it reads as a tensor (N, C, ...),
        their offset in the image, and where they go in the matrix. Offsets count elements."""
        axes = len(self.windows)
        (n, c, *space), (col_c, *rest) = self.x.strides, self.columns.strides
        col_taps, col_n, col_space = rest[:axes], rest[axes], rest[axes + 1 :]
        for tap in itertools.product(*map(range, self.windows)):
            counts, at, start = [], 0, 0
            for a, place in enumerate(self._flipped(tap)):
                pad, u, h = self.conv.padding[a][0], self.conv.stride[a], self.x.dims[2 + a]
                first = max(0, -((place - pad) // u))  # the first window whose tap is inside
                last = min(self.pixels[a] - 1, (h - 1 + pad - place) // u)
                counts.append(max(0, last - first + 1))
                at += (first * u + place - pad) * space[a]
                start += tap[a] * col_taps[a] + first * col_space[a]
            dims = (*self.x.dims[:2], *counts)
            if math.prod(dims):
                steps = [s * u for s, u in zip(space, self.conv.stride)]
                of = TensorDesc(dims, (n, c, *steps), self.x.dtype)
                yield of, at, TensorDesc(dims, (col_n, col_c, *col_space), self.x.dtype), start

    def run(self, context: Context, x_data: Any, columns: Any, alpha: float) -> None:
        """Check the addresses and copy."""
        source = self.source.address(x_data, context.device)
        target = self.target.address(columns, context.device)
        low, high = source + self.source.low, source + self.source.high
        if low < target + self.target.high and target < high:
            raise InvalidDescriptor("colBuffer", "memory that overlaps srcData", "its own memory")
        stream = context.stream
        if self.zeros is not None:
            self.zeros(target, alpha=0.0, stream=stream)
        for plan, at, start in self.copies:
            plan(source + at, target + start, alpha=alpha, stream=stream)


def lower(
    context: Context,
    x: State,
    x_data: Any,
    w: State,
    conv: ConvolutionDesc,
    conv_version: int,
    columns: Any,
    alpha: float,
) -> None:
    """columns = alpha * (the lowered matrix of x for filters like w)."""
    if w.value.dtype is not x.value.dtype:
        raise InvalidDescriptor("filterDesc", str(w.value), f"the data type of srcDesc, {x.value}")
    key = ("lowering", x.version, w.version, conv_version)
    call = context.prepared(key, lambda: Lowering(context.handle, x.value, w.value, conv))
    call.run(context, x_data, columns, alpha)
