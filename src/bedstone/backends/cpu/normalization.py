"""Normalisation on the CPU: batch, layer, group and RMS, in training, inference and backward.

    y = (x - mean) * inv_std * scale + shift

Statistics are taken chunk by chunk, each while it is in the cache: first the mean, then the sum
of squares around it; chunks are merged by the formula of Chan, Golub and LeVeque, "Updating
formulae and a pairwise algorithm for computing sample variances", 1979. So a large mean costs no
accuracy. Everything is float32, or float64 where an operand is.
"""

from __future__ import annotations

import math
from typing import Any

from bedstone.backends.cpu.builder import Call, KernelBuilder, itemsize
from bedstone.backends.cpu.elementwise import PointwiseAlgorithm, Stream, emit_map, seconds_to_move
from bedstone.backends.cpu.kernel import ENTRY
from bedstone.backends.cpu.lrn import LocalResponse
from bedstone.backends.cpu.row_kernel import RowKernel
from bedstone.backends.cpu.rows import PerRow, Position, Rows
from bedstone.backends.cpu.target import Target
from bedstone.backends.cpu.tasks import Output
from bedstone.backends.cpu.values import Float, IntLike
from bedstone.plan.device import Device
from bedstone.spec.normalization import NormalizationProblem, View
from bedstone.spec.problem import Problem
from bedstone.spec.tensor import MAX_RANK, TensorDesc

PASSES_WAITED_FOR = 1.5  # time model: reductions read their operands again from a cache


class Kernel(RowKernel):
    """What the kernels share: operands by name."""

    def __init__(
        self,
        k: KernelBuilder,
        problem: NormalizationProblem,
        call: Call,
        axes: tuple[int, ...],
        lead: str,
    ) -> None:
        self.problem, self.norm = problem, problem.norm
        view = View(problem)
        names = [o.name for o in problem.operands]
        self.number = {name: i for i, name in enumerate(names)}
        streams = [Stream(p, view.desc(n)) for n, p in zip(names, call.pointers)]
        super().__init__(Rows(k, call, streams, axes, self.number[lead], problem.accumulator.value))

    def prepare(self) -> None:
        rows = self.rows
        self.output = {
            o.name: Output(self.k, rows.call, o.desc.dtype.value, rows.lanes)
            for o in self.problem.outputs
        }

    def load(self, name: str, position: Position, default: float = 0.0) -> Float:
        """An operand of the problem; a constant if it has none of this name."""
        if name not in self.number:
            return self.k.constant(default, self.rows.compute, self.rows.lanes)
        return position.load(self.number[name])

    def of_row(self, name: str, position: Position) -> Float:
        """An operand with one element a row (inside `rows.each_row`)."""
        number, rows = self.number[name], self.rows
        address = position.addresses[number]
        return rows.load(number, address, rows.row_stride(number), position.mask)

    def give(self, name: str, position: Position, value: Float) -> None:
        """Write one element a row, as it is (inside `rows.each_row`)."""
        number, rows, k = self.number[name], self.rows, self.k
        dtype, stride = rows.dtypes[number], rows.row_stride(number)
        value = k.cast(value, self.output[name].model)
        address = position.addresses[number]
        if stride == 1:
            k.store(value, address, dtype, mask=position.mask)
        else:
            offsets = k.iota(rows.lanes) * (stride * rows.sizes[number])
            k.scatter(value, address, offsets, dtype, position.mask)

    def blend(self, name: str, position: Position, value: Float) -> None:
        """The same, with alpha and beta."""
        number = self.number[name]
        stride = self.rows.row_stride(number)
        self.output[name].store(value, position.addresses[number], stride, position.mask)


class Training(Kernel):
    """Numbers of a row: how many elements, their mean, the sum of squares around it.

    In float32, distances from the mean are shrunk by a power of two near the root of the row's
    length, so the sum of squares overflows only where the variance itself does.
    """

    numbers = 3
    kept = 2

    def __init__(self, k: KernelBuilder, problem: NormalizationProblem, call: Call) -> None:
        super().__init__(k, problem, call, View(problem).axes, "y")
        self.centred = self.norm.kind != "rms"
        self.shrink = 1.0
        if self.rows.compute == "float32":
            self.shrink = 2.0 ** -math.ceil(math.log2(self.rows.length) / 2)

    def statistics(self, chunk: IntLike | None) -> list[PerRow]:
        k, rows = self.k, self.rows
        count = self._count(chunk)
        mean = rows.derive(lambda: k.constant(0.0, rows.compute, rows.lanes))
        if self.centred:
            total = rows.total(lambda p: self.load("x", p), chunk)
            mean = rows.derive(lambda t, n: t / n, total, count)

        def square(position: Position) -> Float:
            distance = (self.load("x", position) - mean.at(position)) * self.shrink
            return distance * distance

        return [count, mean, rows.total(square, chunk)]

    def _count(self, chunk: IntLike | None) -> PerRow:
        """The elements of a row in this chunk, as a float."""
        k, rows = self.k, self.rows
        model = k.constant(0.0, rows.compute, rows.lanes)
        dim = rows.inner.dims[rows.chunk_axis]
        length: IntLike = dim
        if chunk is not None:
            length = k.min(dim - chunk * rows.chunk, rows.chunk)
        elements = k.as_int(length * (rows.length // dim))
        return rows.derive(lambda: k.cast(elements, model))

    def merge(self, a: list[Float], b: list[Float]) -> list[Float]:
        (n, mean, squares), (m, other, more) = a, b
        total = n + m
        if not self.centred:
            return [total, mean, squares + more]
        distance = other - mean
        share, shrunk = m / total, distance * self.shrink
        # A weighted sum, not mean + distance * share: an infinite mean stays infinite.
        middle = mean * (n / total) + other * share
        return [total, middle, squares + more + shrunk * shrunk * n * share]

    def conclude(self, numbers: list[PerRow]) -> list[PerRow]:
        k, rows = self.k, self.rows
        count, mean, squares = numbers
        variance = rows.derive(lambda s, n: s / (n * self.shrink * self.shrink), squares, count)
        epsilon = self.norm.epsilon
        inv_std = rows.derive(lambda v: 1.0 / k.unary("sqrt", v + epsilon), variance)

        def publish(position: Position) -> None:
            if "mean" in self.number:
                self.give("mean", position, mean.at(position))
            if "inv_std" in self.number:
                self.give("inv_std", position, inv_std.at(position))
            if self.problem.momentum is not None:
                drawn = self._unbiased(variance.at(position))
                self._run("running_mean", position, mean.at(position))
                self._run("running_var", position, drawn)

        rows.each_row(publish)
        return [mean, inv_std]

    def _unbiased(self, variance: Float) -> Float:
        n = self.problem.reduction_length
        return variance * (n / max(n - 1, 1)) if self.problem.unbiased else variance

    def _run(self, name: str, position: Position, new: Float) -> None:
        """(1 - momentum) * running + momentum * new."""
        momentum = float(self.problem.momentum or 0.0)
        old = self.of_row(name, position)
        self.give(name, position, old * (1.0 - momentum) + new * momentum)

    def write(self, numbers: list[PerRow], chunk: IntLike | None) -> None:
        mean, inv_std = numbers

        def body(position: Position) -> None:
            value = (self.load("x", position) - mean.at(position)) * inv_std.at(position)
            if "scale" in self.number:
                value = value * self.load("scale", position)
            if "shift" in self.number:
                value = value + self.load("shift", position)
            position.store(self.output["y"], self.number["y"], value)

        self.rows.walk(body, chunk, written=self.number["y"])


class Gradient(Kernel):
    """What the two kernels of backward share: (x - mean) * inv_std."""

    def normal(self, position: Position) -> Float:
        """The normalised input."""
        x = self.load("x", position)
        if "mean" in self.number:
            x = x - self.load("mean", position)
        return x * self.load("inv_std", position)


class InputGradient(Gradient):
    """dx. Numbers of a row: the sums of dy * scale and of dy * scale * normal; and of dy and dy *
    normal, where these are the parameters' gradients (batch)."""

    kept = 2

    def __init__(self, k: KernelBuilder, problem: NormalizationProblem, call: Call) -> None:
        super().__init__(k, problem, call, View(problem).axes, "dx")
        self.batch = self.norm.kind == "batch"
        self.numbers = 4 if self.batch else 2

    def _slope(self, position: Position) -> Float:
        dy = self.load("dy", position)
        return dy * self.load("scale", position) if "scale" in self.number else dy

    def statistics(self, chunk: IntLike | None) -> list[PerRow]:
        def terms(position: Position) -> list[Float]:
            slope, normal = self._slope(position), self.normal(position)
            found = [slope, slope * normal]
            if self.batch:
                dy = self.load("dy", position)
                found += [dy, dy * normal]
            return found

        return self.rows.totals(terms, self.numbers, chunk)

    def merge(self, a: list[Float], b: list[Float]) -> list[Float]:
        return [x + y for x, y in zip(a, b)]

    def conclude(self, numbers: list[PerRow]) -> list[PerRow]:
        rows, share = self.rows, 1.0 / max(self.problem.reduction_length, 1)
        if self.batch:

            def publish(position: Position) -> None:
                for name, number in zip(("dshift", "dscale"), numbers[2:]):
                    if name in self.number:
                        self.blend(name, position, number.at(position))

            rows.each_row(publish)
        return [rows.derive(lambda total: total * share, number) for number in numbers[:2]]

    def write(self, numbers: list[PerRow], chunk: IntLike | None) -> None:
        mean_slope, mean_product = numbers

        def body(position: Position) -> None:
            average, product = mean_slope.at(position), mean_product.at(position)
            value = self._slope(position)
            if self.norm.kind != "rms":
                value = value - average
            value = (value - self.normal(position) * product) * self.load("inv_std", position)
            position.store(self.output["dx"], self.number["dx"], value)

        self.rows.walk(body, chunk, written=self.number["dx"])


class ParameterGradient(Gradient):
    """dscale and dshift where they are not sums over the rows of dx: rows of their own."""

    numbers = 2
    kept = 1
    writes = False

    def __init__(self, k: KernelBuilder, problem: NormalizationProblem, call: Call) -> None:
        super().__init__(k, problem, call, View(problem).shared, "dy")

    def statistics(self, chunk: IntLike | None) -> list[PerRow]:
        def terms(position: Position) -> list[Float]:
            dy = self.load("dy", position)
            return [dy, dy * self.normal(position)]

        return self.rows.totals(terms, 2, chunk)

    def merge(self, a: list[Float], b: list[Float]) -> list[Float]:
        return [x + y for x, y in zip(a, b)]

    def conclude(self, numbers: list[PerRow]) -> list[PerRow]:
        def publish(position: Position) -> None:
            for name, number in zip(("dshift", "dscale"), numbers):
                if name in self.number:
                    self.blend(name, position, number.at(position))

        self.rows.each_row(publish)
        return numbers[:1]


def emit_inference(k: KernelBuilder, problem: NormalizationProblem, call: Call) -> None:
    """A pointwise loop over x, mean, shift and factors scale / sqrt(variance + epsilon), which
    are made first."""
    view, compute = View(problem), problem.accumulator.value
    pointers = dict(zip((o.name for o in problem.operands), call.pointers))
    parameters = problem.parameters.value
    lanes, size, width = k.lanes(compute), itemsize(parameters), itemsize(compute)
    channels = problem.x.dims[1]
    factors = k.scratch(channels * width)
    model = k.constant(0.0, compute, lanes)
    with k.loop(0, channels, lanes) as c:
        mask = k.first_lanes(channels - c, lanes)

        def parameter(name: str) -> Float:
            return k.cast(k.load(pointers[name], parameters, lanes, c * size, mask), model)

        factor = 1.0 / k.unary("sqrt", parameter("variance") + problem.norm.epsilon)
        if "scale" in pointers:
            factor = factor * parameter("scale")
        k.store(factor, factors + c * width, compute, mask=mask)
    mean = view.desc("mean")
    inputs = [Stream(pointers["x"], view.desc("x")), Stream(pointers["mean"], mean)]
    inputs.append(Stream(factors, TensorDesc(mean.dims, mean.strides, compute)))  # type: ignore[arg-type]
    if "shift" in pointers:
        inputs.append(Stream(pointers["shift"], view.desc("shift")))

    def body(k: KernelBuilder, values: list[Any]) -> list[Any]:
        x, mean, factor, *shift = values
        value = (x - mean) * factor
        return [value + shift[0] if shift else value]

    emit_map(k, call, inputs, [Stream(pointers["y"], view.desc("y"))], body)


def emit(target: Target, problem: NormalizationProblem) -> KernelBuilder:
    """The kernel of any direction."""
    k = KernelBuilder(target)
    with k.entry(ENTRY, pointers=len(problem.operands)) as call:
        if problem.direction == "inference":
            emit_inference(k, problem, call)
        elif problem.direction == "training":
            Training(k, problem, call).emit()
        else:
            names = {o.name for o in problem.outputs}
            if problem.norm.kind != "batch" and names & {"dscale", "dshift"}:
                # First: dx may take the memory of dy.
                ParameterGradient(k, problem, call).emit()
            InputGradient(k, problem, call).emit()
    return k


class Normalization(PointwiseAlgorithm):
    """All kinds and directions, any strides, in place."""

    name = "cpu:rows"
    emit = staticmethod(emit)

    def supports(self, problem: Problem, device: Device) -> str | None:
        if not isinstance(problem, NormalizationProblem):
            return "local response normalisation"
        if problem.x.size == 0:
            return "an empty tensor, whose statistics are still to be written"
        if problem.norm.kind == "group" and problem.x.rank == MAX_RANK:
            return f"group normalisation of {MAX_RANK} dims"
        return None

    def estimate(self, problem: Problem, device: Device) -> float:
        passes = 1.0 if problem.direction == "inference" else PASSES_WAITED_FOR
        return seconds_to_move(math.ceil(problem.bytes * passes))


ALGORITHMS = (Normalization(), LocalResponse())
