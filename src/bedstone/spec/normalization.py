"""Normalisation: batch, layer, group, instance and RMS; and local response normalisation (LRN).

    y = (x - mean) * inv_std * scale + shift          inv_std = 1 / sqrt(variance + epsilon)

The kinds differ in the elements that share a mean and in those that share a scale: `Geometry`
says both, and one formula serves all, forward and backward. LRN divides by a power of the sum of
squares in a window, over channels or over space. Sources: Ioffe and Szegedy, arXiv 1502.03167
(batch); Ba et al., arXiv 1607.06450 (layer); Wu and He, arXiv 1803.08494 (group); Zhang and
Sennrich, arXiv 1910.07467 (RMS); Krizhevsky et al., NIPS 2012 (LRN).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from bedstone.spec.dtypes import DType
from bedstone.spec.errors import InvalidDescriptor
from bedstone.spec.problem import (
    Array,
    Arrays,
    Fields,
    Operand,
    Problem,
    check_same_data,
    desc_option,
    parse_dims,
)
from bedstone.spec.tensor import LOGICAL_ORDERS, TensorDesc

KINDS = ("batch", "layer", "group", "rms")
DIRECTIONS = ("training", "inference", "backward")
LRN_DIRECTIONS = ("lrn_forward", "lrn_backward")
LRN_REGIONS = ("across", "within")

# Operations an element. training: mean 1, variance 3, normalise 2, scale and shift 2. inference:
# one multiply-add. backward: normalise 2, scale 1, three sums of products 5, combine 4.
FLOPS_PER_ELEMENT = {"training": 8, "inference": 2, "backward": 12}
# LRN beside its window sums: square, scale, offset, power, multiply; twice that in backward.
LRN_FLOPS_PER_ELEMENT = 5

STATISTICS = ("mean", "inv_std", "running_mean", "running_var")
AFFINE = ("scale", "shift", "dscale", "dshift")


def check_number(argument: str, value: object, least: float = -math.inf) -> float:
    """`value` as a finite float of at least `least`; else InvalidDescriptor."""
    expected = "a finite number" + ("" if math.isinf(least) else f" of at least {least:g}")
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise InvalidDescriptor(argument, value, expected) from None
    if not math.isfinite(number) or number < least:
        raise InvalidDescriptor(argument, value, expected)
    return number


@dataclass(frozen=True)
class Geometry:
    """x seen in the shape `view`: statistics are taken over `axes` and have dims `statistics`;
    scale and shift have dims `parameters` and are broadcast to the view as `broadcast`."""

    view: tuple[int, ...]
    axes: tuple[int, ...]
    statistics: tuple[int, ...]
    parameters: tuple[int, ...]
    broadcast: tuple[int, ...]

    @property
    def shared(self) -> tuple[int, ...]:
        """Axes of the view along which a scale is repeated: its gradient sums over them."""
        return tuple(a for a, d in enumerate(self.broadcast) if d == 1)


@dataclass(frozen=True)
class NormDesc:
    """The kind of normalisation and what it needs.

    kind     "batch": a mean for each channel, over N and space
             "layer": a mean for each index of the axes before `axis`, over all axes from it on
             "rms": as layer, but with no mean taken off and no shift
             "group": a mean for each image and group of channels (instance normalisation is
             `groups` == C)
    epsilon  added to the variance, >= 0
    axis     layer and rms: the first normalised axis, >= 1
    groups   group: a divisor of C
    scale, shift  whether the result is scaled and shifted
    """

    kind: str
    epsilon: float = 1e-5
    axis: int = 1
    groups: int = 1
    scale: bool = True
    shift: bool = True

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidDescriptor("kind", self.kind, f"one of {KINDS}")
        object.__setattr__(self, "epsilon", check_number("epsilon", self.epsilon, 0.0))
        if self.kind == "rms":
            object.__setattr__(self, "shift", False)
        if not isinstance(self.axis, int) or self.axis < 1:
            raise InvalidDescriptor("axis", self.axis, "an integer of 1 or more")
        if not isinstance(self.groups, int) or self.groups < 1:
            raise InvalidDescriptor("groups", self.groups, "an integer of 1 or more")

    def geometry(self, x: tuple[int, ...]) -> Geometry:
        """How x of those dims is normalised. Raises InvalidDescriptor where it cannot be."""
        if self.kind in ("layer", "rms"):
            if len(x) <= self.axis:
                raise InvalidDescriptor("x", x, f"more than {self.axis} dims (the axis)")
            rows, columns = math.prod(x[: self.axis]), math.prod(x[self.axis :])
            return Geometry((rows, columns), (1,), x[: self.axis], x[self.axis :], (1, columns))
        if len(x) < 2:
            raise InvalidDescriptor("x", x, "2 or more dims: N, C, spatial")
        n, c, space = x[0], x[1], math.prod(x[2:])
        if self.kind == "batch":
            return Geometry((n, c, space), (0, 2), (c,), (c,), (1, c, 1))
        g = self.groups
        if c % g:
            raise InvalidDescriptor("groups", g, f"a divisor of C = {c}")
        return Geometry((n, g, c // g, space), (2, 3), (n, g), (c,), (1, g, c // g, 1))


@dataclass(frozen=True)
class NormalizationProblem(Problem):
    """One normalisation call. x and y describe the input- and the output-shaped tensor in every
    direction: in backward x is dx's descriptor and y is dy's. [Brackets] depend on the fields.

    training   by x's own mean and biased variance
               x, [scale,] [shift,] y [, [mean,] inv_std] [, running_mean, running_var]
    inference  (batch only) by given statistics
               x, [scale,] [shift,] mean, variance, y
    backward   gradient of training
               x, [scale,] [mean,] inv_std, dy, dx [, dscale] [, dshift]

    parameters  dtype of scale, shift, their gradients, variance, the mean of inference and the
                running statistics (default: the accumulator of x's); mean and inv_std that
                training gives and backward takes are of the accumulator type
    statistics  training: whether mean and inv_std (rms: inv_std alone) are given out
    momentum    training, batch: running = (1 - momentum) * running + momentum * new, whatever
                alpha and beta; None for no running statistics
    unbiased    the running variance takes variance * n / (n - 1) (PyTorch), not variance (ONNX)
    saved       backward: the strides of the forward input (default: x's)

    All vectors are packed. alpha and beta act on y, dx, dscale and dshift only.
    """

    primitive: ClassVar[str] = "normalization"
    direction: str
    x: TensorDesc
    y: TensorDesc
    norm: NormDesc
    parameters: DType = None  # type: ignore[assignment]
    statistics: bool = True
    momentum: float | None = None
    unbiased: bool = True
    saved: TensorDesc = None  # type: ignore[assignment]
    deterministic: bool = True

    def __post_init__(self) -> None:
        if self.direction not in DIRECTIONS:
            raise InvalidDescriptor("direction", self.direction, f"one of {DIRECTIONS}")
        if self.direction == "inference" and self.norm.kind != "batch":
            raise InvalidDescriptor("direction", "inference", f"'training' for {self.norm.kind}")
        if self.saved is None or self.direction != "backward":
            object.__setattr__(self, "saved", self.x)
        parameters = self.x.dtype.accumulator if self.parameters is None else self.parameters
        object.__setattr__(self, "parameters", DType.of(parameters))
        if not self.parameters.is_floating:
            raise InvalidDescriptor("parameters", self.parameters, "a floating-point dtype")
        if self.momentum is not None:
            if self.direction != "training" or self.norm.kind != "batch":
                expected = f"None for {self.norm.kind} {self.direction}"
                raise InvalidDescriptor("momentum", self.momentum, expected)
            object.__setattr__(self, "momentum", check_number("momentum", self.momentum))
        self.norm.geometry(self.x.dims)
        check_same_data(self.x, {"y": self.y, "saved": self.saved})
        self.check_outputs()

    @property
    def geometry(self) -> Geometry:
        """Which elements share statistics, and which share parameters."""
        return self.norm.geometry(self.x.dims)

    @property
    def accumulator(self) -> DType:
        """The type of all arithmetic: float64 if any operand is, else float32."""
        types = {operand.desc.dtype for operand in self.operands}
        return DType.float64 if DType.float64 in types else DType.float32

    def _parameter(self, name: str, role: str = "in") -> Operand:
        return Operand(name, TensorDesc.packed(self.geometry.parameters, self.parameters), role)

    def _statistics(self, role: str) -> tuple[Operand, ...]:
        desc = TensorDesc.packed(self.geometry.statistics, self.x.dtype.accumulator)
        names = ("inv_std",) if self.norm.kind == "rms" else ("mean", "inv_std")
        return tuple(Operand(name, desc, role) for name in names)

    def _affine(self, *names: str, role: str = "in") -> tuple[Operand, ...]:
        wanted = (self.norm.scale, self.norm.shift)
        return tuple(self._parameter(n, role) for n, there in zip(names, wanted) if there)

    @property
    def operands(self) -> tuple[Operand, ...]:
        x, y = Operand("x", self.saved), Operand("y", self.y, "out")
        if self.direction == "backward":
            dy, dx = Operand("dy", self.y), Operand("dx", self.x, "out")
            gradients = self._affine("dscale", "dshift", role="out")
            return (x, *self._affine("scale"), *self._statistics("in"), dy, dx, *gradients)
        affine = self._affine("scale", "shift")
        if self.direction == "inference":
            return (x, *affine, self._parameter("mean"), self._parameter("variance"), y)
        given = self._statistics("out") if self.statistics else ()
        running: tuple[Operand, ...] = ()
        if self.momentum is not None:
            names = ("running_mean", "running_var")
            running = tuple(self._parameter(name, "inout") for name in names)
        return (x, *affine, y, *given, *running)

    @property
    def in_place(self) -> tuple[str, ...]:
        return ("dy",) if self.direction == "backward" else ("x",)

    @property
    def unblended(self) -> tuple[str, ...]:
        return STATISTICS

    @property
    def flops(self) -> int:
        return self.x.size * FLOPS_PER_ELEMENT[self.direction]

    @property
    def reduction_length(self) -> int:
        """Number of elements that share a mean."""
        return math.prod(self.geometry.view[a] for a in self.geometry.axes)

    def compute(self, arrays: Arrays) -> dict[str, Array]:
        with np.errstate(all="ignore"):
            found = getattr(self, f"_{self.direction}")(arrays)
        return {o.name: found[o.name].reshape(o.desc.dims) for o in self.outputs}

    def _mean(self, view: Array) -> Array:
        total: Array = view.sum(axis=self.geometry.axes, keepdims=True)
        return total / max(self.reduction_length, 1)

    def _spread(self, name: str, arrays: Arrays, default: float) -> Array:
        """A parameter, broadcast to the view; the default where the problem has none."""
        if name not in arrays:
            return np.array(default)
        spread: Array = arrays[name].reshape(self.geometry.broadcast)
        return spread

    def _apply(self, arrays: Arrays, mean: Array, inv_std: Array) -> Array:
        view = arrays["x"].reshape(self.geometry.view)
        scale, shift = self._spread("scale", arrays, 1.0), self._spread("shift", arrays, 0.0)
        return (view - mean) * inv_std * scale + shift

    def _training(self, arrays: Arrays) -> dict[str, Array]:
        view = arrays["x"].reshape(self.geometry.view)
        mean = self._mean(view) if self.norm.kind != "rms" else np.zeros(1)
        variance = self._mean((view - mean) ** 2)
        inv_std = 1 / np.sqrt(variance + self.norm.epsilon)
        found = {"mean": mean, "inv_std": inv_std, "y": self._apply(arrays, mean, inv_std)}
        if self.momentum is not None:
            n = self.reduction_length
            drawn = variance * (n / max(n - 1, 1)) if self.unbiased else variance
            for name, new in (("running_mean", mean), ("running_var", drawn)):
                found[name] = (1 - self.momentum) * arrays[name] + self.momentum * new.ravel()
        return found

    def _inference(self, arrays: Arrays) -> dict[str, Array]:
        inv_std = 1 / np.sqrt(self._spread("variance", arrays, 1.0) + self.norm.epsilon)
        return {"y": self._apply(arrays, self._spread("mean", arrays, 0.0), inv_std)}

    def _backward(self, arrays: Arrays) -> dict[str, Array]:
        geometry = self.geometry
        kept = tuple(1 if a in geometry.axes else d for a, d in enumerate(geometry.view))
        inv_std = arrays["inv_std"].reshape(kept)
        mean = arrays["mean"].reshape(kept) if "mean" in arrays else np.zeros(1)
        dy = arrays["dy"].reshape(geometry.view)
        normal = (arrays["x"].reshape(geometry.view) - mean) * inv_std
        slope = dy * self._spread("scale", arrays, 1.0)
        centred = slope - self._mean(slope) if self.norm.kind != "rms" else slope
        return {
            "dx": inv_std * (centred - normal * self._mean(slope * normal)),
            "dscale": (dy * normal).sum(axis=geometry.shared),
            "dshift": dy.sum(axis=geometry.shared),
        }

    def fields(self) -> str:
        norm, line = self.norm, "x".join(map(str, self.x.dims)) + f" {self.x.dtype}"
        line += f" kind={norm.kind} epsilon={norm.epsilon!r}"
        if norm.kind in ("layer", "rms"):
            line += f" axis={norm.axis}"
        if norm.kind == "group":
            line += f" groups={norm.groups}"
        line += "" if norm.scale else " no_scale"
        line += "" if norm.shift or norm.kind == "rms" else " no_shift"
        if self.parameters is not self.x.dtype.accumulator:
            line += f" parameters={self.parameters}"
        line += "" if self.statistics else " no_statistics"
        if self.momentum is not None:
            line += f" momentum={self.momentum!r}"
        line += "" if self.unbiased else " biased"
        for name in ("x", "y", "saved") if self.direction == "backward" else ("x", "y"):
            line += desc_option(name, getattr(self, name), LOGICAL_ORDERS.get(self.x.rank))
        return line

    @classmethod
    def from_fields(cls, direction: str, fields: Fields) -> NormalizationProblem:
        dims, dtype = parse_dims(fields.shape), fields.dtype()
        layout = fields.layout(len(dims))
        x, y, saved = (fields.desc(k, dims, dtype, layout) for k in ("x", "y", "saved"))
        norm = NormDesc(
            fields.get("kind", "batch"),
            fields.number("epsilon", 1e-5),
            fields.integer("axis", 1),
            fields.integer("groups", 1),
            "no_scale" not in fields.flags,
            "no_shift" not in fields.flags,
        )
        return cls(
            direction,
            x,
            y,
            norm,
            DType.of(fields.get("parameters", dtype.accumulator)),
            "no_statistics" not in fields.flags,
            fields.number("momentum", 0.0) if "momentum" in fields.options else None,
            "biased" not in fields.flags,
            saved,
        )


class View:
    """How backends walk a problem: its operands over common dims, which are x's, with C of a group
    normalisation in two. `axes` share statistics, along `shared` a scale is repeated."""

    def __init__(self, problem: NormalizationProblem) -> None:
        self.norm, self.x = problem.norm, problem.x.dims
        self.groups = self.norm.kind == "group"
        self.descs = {o.name: o.desc for o in problem.operands}
        rank = len(self.x) + self.groups
        first = {"batch": (0, *range(2, rank)), "group": tuple(range(2, rank))}
        self.axes = first.get(self.norm.kind, tuple(range(self.norm.axis, rank)))
        # Where scale and shift are repeated: their gradients sum over these axes.
        shared = {"batch": self.axes, "group": (0, *range(3, rank))}
        self.shared = shared.get(self.norm.kind, tuple(range(self.norm.axis)))

    def split(self, values: tuple[int, ...], outer: int, inner: int) -> tuple[int, ...]:
        """Values of x's axes with axis 1 replaced by two (group normalisation)."""
        return (values[0], outer, inner, *values[2:]) if self.groups else values

    @property
    def dims(self) -> tuple[int, ...]:
        """The common dims."""
        g = self.norm.groups
        return self.split(self.x, g, self.x[1] // g if self.groups else 0)

    def desc(self, name: str) -> TensorDesc:
        """An operand over the common dims, with strides of 0 where it is repeated."""
        desc, dims = self.descs[name], self.dims
        if name in ("x", "y", "dx", "dy"):
            c = desc.strides[1] if self.groups else 0
            per_group = dims[2] if self.groups else 0
            return TensorDesc(dims, self.split(desc.strides, c * per_group, c), desc.dtype)
        there = self.parameters if name in AFFINE else self.statistics
        strides, step = [0] * len(dims), 1
        for axis in reversed(there):
            strides[axis], step = step, step * dims[axis]
        return TensorDesc(dims, tuple(strides), desc.dtype)

    @property
    def parameters(self) -> tuple[int, ...]:
        """The axes that scale and shift have."""
        return tuple(a for a in range(len(self.dims)) if a not in self.shared)

    @property
    def statistics(self) -> tuple[int, ...]:
        """The axes that mean and inv_std have."""
        return tuple(a for a in range(len(self.dims)) if a not in self.axes)


@dataclass(frozen=True)
class LrnDesc:
    """Local response normalisation: y = x * (k + alpha / count * sum x^2) ^ -beta.

    size    of the window, >= 1: it begins (size - 1) // 2 elements before its centre
    region  "across": the window lies over channels, count = size
            "within": over every spatial axis of one channel, count = size ^ axes
    """

    size: int
    alpha: float = 1e-4
    beta: float = 0.75
    k: float = 1.0
    region: str = "across"

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or self.size < 1:
            raise InvalidDescriptor("size", self.size, "an integer of 1 or more")
        for name in ("alpha", "beta", "k"):
            object.__setattr__(self, name, check_number(name, getattr(self, name)))
        if self.region not in LRN_REGIONS:
            raise InvalidDescriptor("region", self.region, f"one of {LRN_REGIONS}")

    def axes(self, rank: int) -> tuple[int, ...]:
        """The axes over which the window lies."""
        return (1,) if self.region == "across" else tuple(range(2, rank))

    def window_sum(self, values: Array, transposed: bool = False) -> Array:
        """The sum over the window around every element, zeros outside. Transposed: over the
        elements whose windows hold it."""
        sides = ((self.size - 1) // 2, self.size - 1 - (self.size - 1) // 2)
        low, high = sides[::-1] if transposed else sides
        for axis in self.axes(values.ndim):
            line = np.moveaxis(values, axis, -1)
            padded = np.pad(line, (*((0, 0),) * (line.ndim - 1), (low, high)))
            length = line.shape[-1]
            total = sum(padded[..., i : i + length] for i in range(self.size))
            values = np.moveaxis(np.asarray(total), -1, axis)
        return values


@dataclass(frozen=True)
class LrnProblem(Problem):
    """One LRN call; dims (N, C, spatial...). In backward x is dx's descriptor and y is dy's.

    lrn_forward   y = alpha * lrn(x) + beta * y             operands x, y
    lrn_backward  dx = alpha * lrn'(x, dy) + beta * dx      operands x, dy, dx

    saved  backward: the strides of the forward input (default: x's)
    """

    primitive: ClassVar[str] = "normalization"
    direction: str
    x: TensorDesc
    y: TensorDesc
    lrn: LrnDesc
    saved: TensorDesc = None  # type: ignore[assignment]
    deterministic: bool = True

    def __post_init__(self) -> None:
        if self.direction not in LRN_DIRECTIONS:
            raise InvalidDescriptor("direction", self.direction, f"one of {LRN_DIRECTIONS}")
        if self.saved is None or self.direction == "lrn_forward":
            object.__setattr__(self, "saved", self.x)
        least = 2 if self.lrn.region == "across" else 3
        if self.x.rank < least:
            raise InvalidDescriptor("x", self.x.dims, f"{least} or more dims: N, C, spatial")
        check_same_data(self.x, {"y": self.y, "saved": self.saved})
        self.check_outputs()

    @property
    def operands(self) -> tuple[Operand, ...]:
        x = Operand("x", self.saved)
        if self.direction == "lrn_forward":
            return (x, Operand("y", self.y, "out"))
        return (x, Operand("dy", self.y), Operand("dx", self.x, "out"))

    @property
    def flops(self) -> int:
        passes = 1 if self.direction == "lrn_forward" else 2
        return self.x.size * passes * (LRN_FLOPS_PER_ELEMENT + 2 * self.reduction_length)

    @property
    def reduction_length(self) -> int:
        """Number of elements in a window."""
        return int(self.lrn.size ** len(self.lrn.axes(self.x.rank)))

    def compute(self, arrays: Arrays) -> dict[str, Array]:
        lrn, x = self.lrn, arrays["x"]
        share = lrn.alpha / self.reduction_length
        with np.errstate(all="ignore"):
            base = lrn.k + share * lrn.window_sum(x * x)
            if self.direction == "lrn_forward":
                return {"y": x * base**-lrn.beta}
            # In this order no factor leaves the range of float64 where the product is in it.
            inner = (arrays["dy"] * base**-lrn.beta) * (x / base)
            through = 2 * share * lrn.beta * x * lrn.window_sum(inner, transposed=True)
            return {"dx": arrays["dy"] * base**-lrn.beta - through}

    def fields(self) -> str:
        lrn, line = self.lrn, "x".join(map(str, self.x.dims)) + f" {self.x.dtype}"
        line += f" size={lrn.size} alpha={lrn.alpha!r} beta={lrn.beta!r} k={lrn.k!r}"
        line += "" if lrn.region == "across" else f" region={lrn.region}"
        for name in ("x", "y", "saved") if self.direction == "lrn_backward" else ("x", "y"):
            line += desc_option(name, getattr(self, name), LOGICAL_ORDERS.get(self.x.rank))
        return line

    @classmethod
    def from_fields(cls, direction: str, fields: Fields) -> LrnProblem:
        dims, dtype = parse_dims(fields.shape), fields.dtype()
        layout = fields.layout(len(dims))
        x, y, saved = (fields.desc(k, dims, dtype, layout) for k in ("x", "y", "saved"))
        lrn = LrnDesc(
            fields.integer("size", 5),
            fields.number("alpha", 1e-4),
            fields.number("beta", 0.75),
            fields.number("k", 1.0),
            fields.get("region", "across"),
        )
        return cls(direction, x, y, lrn, saved)


def problem_from_fields(direction: str, fields: Fields) -> NormalizationProblem | LrnProblem:
    """The problem of a `normalization DIRECTION ...` line."""
    kind = LrnProblem if direction in LRN_DIRECTIONS else NormalizationProblem
    return kind.from_fields(direction, fields)
