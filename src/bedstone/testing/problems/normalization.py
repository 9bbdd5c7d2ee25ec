"""Normalisation problems: each kind and direction, with and without each optional operand; LRN."""

from __future__ import annotations

import dataclasses

import numpy as np

from bedstone.spec.normalization import (
    LRN_DIRECTIONS,
    LrnDesc,
    LrnProblem,
    NormalizationProblem,
    NormDesc,
)
from bedstone.spec.problem import Array, Problem, parse_problem
from bedstone.spec.tensor import TensorDesc
from bedstone.testing.problems.strides import KINDS as STRIDES
from bedstone.testing.problems.strides import randomly_strided, with_strides
from bedstone.testing.tolerances import (
    FUNCTION_ULPS,
    OVERFLOW_SHARE,
    ROUNDINGS,
    Bounds,
    Wide,
    blended,
    growth,
    largest,
    smallest,
    unit_of,
)

ALIKE_SHARE = 0.5  # of a unit roundoff that each term of a sum may lose, all with one sign
UNDERFLOWS = 4.0  # roundings to a denormal in a product of several factors

DTYPES = ("float32", "float64", "float16", "bfloat16")
NORMS = (  # directions, shapes, options
    (("training", "inference", "backward"), ("2x3x5x7", "4x17", "1x16x4x4", "2x5x9", "2x3x2x4x3"),
     ("kind=batch",)),
    (("training", "backward"), ("2x3x5x7", "4x33", "3x5x17", "6x1"),
     ("kind=layer", "kind=rms")),
    (("training", "backward"), ("2x12x5x7", "1x16x4x4", "3x6x10"),
     ("kind=group groups=2", "kind=group groups=1")),
)  # fmt: skip
OPTIONS = (
    "training 3x5x4x6 float32 kind=batch momentum=0.1",
    "training 3x5x4x6 float64 kind=batch momentum=0.1 biased",
    "training 3x5x4x6 float32 kind=batch momentum=1.0 no_statistics",
    "training 3x5x4x6 float32 kind=batch no_scale no_shift",
    "training 3x5x4x6 float32 kind=batch no_scale",
    "training 3x5x4x6 float16 kind=batch parameters=float16",
    "inference 3x5x4x6 bfloat16 kind=batch parameters=bfloat16",
    "inference 3x5x4x6 float32 kind=batch no_shift epsilon=0.001",
    "backward 3x5x4x6 float32 kind=batch no_scale no_shift",
    "backward 3x5x4x6 float32 kind=layer axis=2 no_shift",
    "training 2x5x4x6 float32 kind=layer axis=3",
    "training 2x5x4x6 float32 kind=rms axis=2 no_statistics",
    "training 2x6x4x6 float32 kind=group groups=6",
    "training 0x3x4x4 float32 kind=batch",
    "backward 0x3x4x4 float32 kind=batch",
    "training 2x3x60x50 float32 kind=batch momentum=0.2",  # rows long enough to be cut in parts
    "backward 2x3x60x50 float32 kind=batch",
    "backward 300x40 float32 kind=layer",
    "training 2x5x4x6 float32 kind=batch x=NHWC y=NHWC",
    "backward 2x5x4x6 float32 kind=batch x=NHWC y=NHWC saved=NHWC",
)
LRNS = (
    "2x7x5x3 {} size=5",
    "1x33x4x4 {} size=4 alpha=0.5 beta=0.5 k=2.0",
    "2x3x6x7 {} size=3 alpha=1.0 region=within",
    "1x2x9 {} size=1 alpha=0.1",
    "2x3x3x4x5 {} size=3 alpha=0.3 region=within",
    "4x17 {} size=7 alpha=0.2",
)


def curated() -> list[Problem]:
    """Kinds by shapes and dtypes, options once each, strides of each direction."""
    random = np.random.default_rng(0)
    lines = [
        f"{direction} {shape} {dtype} {kind}"
        for directions, shapes, kinds in NORMS
        for direction in directions
        for shape in shapes
        for kind in kinds
        for dtype in (DTYPES if shape == shapes[0] else DTYPES[:2])
    ]
    lines += OPTIONS
    lines += [
        f"{d} {line.format(dtype)}" for d in LRN_DIRECTIONS for line in LRNS for dtype in DTYPES
    ]
    found = [parse_problem(f"normalization {line}") for line in lines]
    for line in (
        "training 2x6x5x7 float32 kind=batch momentum=0.1", "inference 2x6x5x7 float32 kind=batch",
        "backward 2x6x5x7 float32 kind=batch", "training 2x6x5x7 float32 kind=layer",
        "backward 2x6x5x7 float32 kind=group groups=3", "lrn_forward 2x6x5x7 float32 size=3",
        "lrn_backward 2x6x5x7 float32 size=3 region=within",
    ):  # fmt: skip
        base = parse_problem(f"normalization {line}")
        fields = ("x", "y", "saved") if "backward" in line else ("x", "y")
        found += [with_strides(base, field, kind, random) for field in fields for kind in STRIDES]
    return found


def draw(random: np.random.Generator) -> Problem:
    """A random problem of up to some thousands of elements."""
    rank = int(random.integers(2, 6))
    dims = tuple(int(d) for d in random.integers(1, {2: 60, 3: 14}.get(rank, 8), rank))
    x = TensorDesc.packed(dims, str(random.choice(DTYPES, p=(0.6, 0.26, 0.07, 0.07))))
    if random.random() < 0.25:
        return randomly_strided(_draw_lrn(x, random), random)
    kind = str(random.choice(("batch", "layer", "group", "rms"), p=(0.5, 0.2, 0.2, 0.1)))
    divisors = [g for g in range(1, dims[1] + 1) if dims[1] % g == 0]
    epsilon = float(random.choice((1e-5, 1e-3, 0.1)))
    axis, groups = int(random.integers(1, rank)), int(random.choice(divisors))
    scale, shift = (bool(v) for v in random.random(2) < 0.8)
    norm = NormDesc(kind, epsilon, axis, groups, scale, shift)
    directions = (
        ("training", "backward", "inference") if kind == "batch" else ("training", "backward")
    )
    direction = str(random.choice(directions))
    momentum = None
    if kind == "batch" and direction == "training" and random.random() < 0.5:
        momentum = 0.1
    statistics, unbiased = (bool(v) for v in random.random(2) < 0.7)
    problem = NormalizationProblem(
        direction, x, x, norm, statistics=statistics, momentum=momentum, unbiased=unbiased
    )
    return randomly_strided(problem, random)


def _draw_lrn(x: TensorDesc, random: np.random.Generator) -> LrnProblem:
    region = "within" if x.rank > 2 and random.random() < 0.5 else "across"
    alpha, beta = float(random.choice((1e-4, 0.1, 1.0))), float(random.choice((0.5, 0.75, 1.0)))
    lrn = LrnDesc(int(random.integers(1, 7)), alpha, beta, float(random.choice((1.0, 2.0))), region)
    return LrnProblem(str(random.choice(LRN_DIRECTIONS)), x, x, lrn)


def meaning(problem: Problem, found: dict[str, Array], random: np.random.Generator) -> None:
    """Variances are not negative; mean and inv_std of backward are those of x."""
    for name in ("variance", "running_var"):
        if name in found:
            found[name] = np.abs(found[name])
    if problem.direction == "backward" and isinstance(problem, NormalizationProblem):
        x = TensorDesc.packed(problem.x.dims, problem.x.dtype)
        forward = dataclasses.replace(
            problem, direction="training", x=x, y=x, saved=x, statistics=True
        )
        inputs = {o.name: found.get(o.name, np.zeros(o.desc.dims)) for o in forward.inputs}
        computed = forward.reference(inputs)
        with np.errstate(all="ignore"):
            for name in ("mean", "inv_std"):
                if name in found:
                    found[name] = computed[name].astype(found[name].dtype)


def bounds(problem: Problem, wide: Wide, alpha: float, beta: float) -> Bounds:
    """Of each output, from the sizes of what is added to make it."""
    if isinstance(problem, LrnProblem):
        return blended(problem, _lrn(problem, wide), wide, alpha, beta)
    norm: NormalizationProblem = problem  # type: ignore[assignment]
    errors = getattr(_Errors(norm, wide), norm.direction)()
    shaped = {o.name: errors[o.name].reshape(o.desc.dims) for o in norm.outputs}
    return blended(problem, shaped, wide, alpha, beta)


class _Errors:
    """Errors of the outputs of a normalisation, in its view's shape."""

    def __init__(self, problem: NormalizationProblem, wide: Wide) -> None:
        self.problem, self.wide = problem, wide
        self.geometry = problem.geometry
        self.unit = unit_of(problem)
        self.sum_units = growth(problem.reduction_length) * self.unit
        self.x = wide["x"].reshape(self.geometry.view)
        self.scale = np.abs(self._spread("scale", 1.0))
        self.shift = np.abs(self._spread("shift", 0.0))

    def _spread(self, name: str, default: float) -> Array:
        if name not in self.wide:
            return np.array(default)
        return self.wide[name].reshape(self.geometry.broadcast)

    def _mean(self, values: Array) -> Array:
        total: Array = values.sum(axis=self.geometry.axes, keepdims=True)
        return total / max(self.problem.reduction_length, 1)

    def _normalised(self, mean: Array, inv_std: Array) -> tuple[Array, Array]:
        """Size and error of (x - mean) * inv_std, for exact statistics."""
        apart = np.abs(self.x - mean)
        rounded = ROUNDINGS * self.unit * (np.abs(self.x) + np.abs(mean)) * inv_std
        # inv_std and the product may be denormal numbers, of fewer digits.
        lost = UNDERFLOWS * smallest(self.problem.x.dtype.accumulator)
        return apart * inv_std, rounded + lost * (1 + apart)

    def training(self) -> dict[str, Array]:
        """Two passes: an error d of the mean changes the variance by d * d."""
        centred = self.problem.norm.kind != "rms"
        mean = self._mean(self.x) if centred else np.zeros(1)
        variance = self._mean((self.x - mean) ** 2)
        total = variance + self.problem.norm.epsilon
        inv_std = 1 / np.sqrt(total)
        mean_error = self.sum_units * self._mean(np.abs(self.x)) * (1 if centred else 0)
        # Where a few elements dwarf the rest, most squares are equal, and rounded alike.
        alike = ALIKE_SHARE * self.problem.reduction_length * self.unit
        relative = max(self.sum_units, alike) + FUNCTION_ULPS * self.unit + mean_error**2 / total
        size, error = self._normalised(mean, inv_std)
        error = error + relative * size + inv_std * mean_error
        y = self.scale * error + ROUNDINGS * self.unit * (self.scale * size + self.shift)
        found = {"y": y, "mean": mean_error, "inv_std": relative * inv_std}
        variance_error = max(self.sum_units, alike) * variance + mean_error**2
        momentum = self.problem.momentum
        if momentum is not None:
            for name, new, new_error in (
                ("running_mean", mean, mean_error),
                ("running_var", variance, variance_error),
            ):
                old = np.abs((1 - momentum) * self.wide[name])
                n = self.problem.reduction_length
                share = abs(momentum) * (n / max(n - 1, 1))
                rounded = ROUNDINGS * self.unit * (old + share * np.abs(new).ravel())
                found[name] = rounded + share * new_error.ravel()
        return found

    def inference(self) -> dict[str, Array]:
        """Statistics are given."""
        inv_std = 1 / np.sqrt(self._spread("variance", 1.0) + self.problem.norm.epsilon)
        size, error = self._normalised(self._spread("mean", 0.0), inv_std)
        rest = FUNCTION_ULPS * self.unit * (self.scale * size + self.shift)
        return {"y": self.scale * error + rest}

    def backward(self) -> dict[str, Array]:
        """Sums of products with the normalised x, which has an error of its own."""
        geometry = self.geometry
        kept = tuple(1 if a in geometry.axes else d for a, d in enumerate(geometry.view))
        inv_std = np.abs(self.wide["inv_std"].reshape(kept))
        mean = self.wide["mean"].reshape(kept) if "mean" in self.wide else np.zeros(1)
        dy = np.abs(self.wide["dy"].reshape(geometry.view))
        slope = dy * self.scale
        size, error = self._normalised(mean, inv_std)
        product = self._mean(slope * size)
        terms = slope + self._mean(slope) + size * product
        carried = error * product + size * self._mean(slope * error)
        # The sums behind the two means may overflow where the means do not.
        sums = self.problem.reduction_length * self._mean(slope * (1 + size))
        most = OVERFLOW_SHARE * largest(self.problem.x.dtype.accumulator)
        carried = np.where(sums > most, np.inf, carried)
        length = int(np.prod([geometry.view[a] for a in geometry.shared], dtype=np.int64))
        units = growth(length) * self.unit
        return {
            "dx": inv_std * (self.sum_units * terms + carried),
            "dscale": (units * dy * size + dy * error).sum(axis=geometry.shared),
            "dshift": units * dy.sum(axis=geometry.shared),
        }


def _lrn(problem: LrnProblem, wide: Wide) -> dict[str, Array]:
    lrn, x = problem.lrn, np.abs(wide["x"])
    share = abs(lrn.alpha) / problem.reduction_length
    base = lrn.k + share * lrn.window_sum(x * x)
    power = base**-lrn.beta
    grown = growth(problem.reduction_length) * (1 + abs(lrn.beta))
    units = (grown + 2 * FUNCTION_ULPS * (1 + np.abs(lrn.beta * np.log(base)))) * unit_of(problem)
    if problem.direction == "lrn_forward":
        return {"y": units * x * power}
    dy = np.abs(wide["dy"])
    inner = lrn.window_sum(units * (dy * power) * (x / base), transposed=True)
    # Products of four factors pass through the denormals; what they lose is multiplied by x.
    lost = UNDERFLOWS * smallest(problem.x.dtype.accumulator) * problem.reduction_length
    through = 2 * share * abs(lrn.beta) * x * (inner + lost)
    whole = 2 * share * lrn.beta * x * lrn.window_sum((dy * power) * (x / base), transposed=True)
    return {"dx": units * (dy * power + whole) + through}
