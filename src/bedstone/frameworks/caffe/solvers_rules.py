"""How a gradient becomes a step: learning-rate policies, clipping, weight decay and update rules.

Pure functions on arrays, in Caffe's order of operations. NumPy's go through a parameter in blocks
that stay in a core's cache, so its arrays are read from memory once however many operations a rule
has; a device takes them whole. Sources: the names and formulas of Caffe's solver documentation;
Duchi et al. 2011 (AdaGrad), Zeiler 2012 (AdaDelta), Tieleman and Hinton 2012 (RMSProp), Kingma and
Ba 2014 (Adam), Sutskever et al. 2013 (Nesterov).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bedstone.spec.errors import InvalidDescriptor

# Elements a block: 128 KiB an array of float32, so that a rule's three or four fit a second-level
# cache. (61 million parameters, SGD with decay: 85 ms, against 153 ms for whole arrays.)
BLOCK = 32 * 1024


@dataclass(frozen=True)
class Policy:
    """`lr_policy` with its numbers, named as in the solver file."""

    name: str
    base_lr: float
    gamma: float = 0.0
    power: float = 0.0
    stepsize: int = 0
    stepvalue: tuple[int, ...] = ()
    max_iter: int = 0

    def __post_init__(self) -> None:
        if self.name not in POLICIES:
            raise InvalidDescriptor("lr_policy", self.name or "(none)", " or ".join(POLICIES))
        if self.name == "step" and self.stepsize < 1:
            raise InvalidDescriptor("stepsize", self.stepsize, "1 or more for lr_policy step")
        if self.name == "poly" and self.max_iter < 1:
            raise InvalidDescriptor("max_iter", self.max_iter, "1 or more for lr_policy poly")
        if list(self.stepvalue) != sorted(self.stepvalue):
            raise InvalidDescriptor("stepvalue", self.stepvalue, "values in rising order")

    def rate(self, iteration: int) -> float:
        """The learning rate of an iteration, counted from 0."""
        return POLICIES[self.name](self, iteration)

    def step(self, iteration: int) -> int:
        """How many times the rate has dropped so far (the solver state's current_step)."""
        if self.name == "step":
            return iteration // self.stepsize
        if self.name == "multistep":
            return sum(iteration >= value for value in self.stepvalue)
        return 0


def _exponential(power: Callable[[Policy, int], float]) -> Callable[[Policy, int], float]:
    return lambda p, i: p.base_lr * p.gamma ** power(p, i)


def _sigmoid(p: Policy, iteration: int) -> float:
    return p.base_lr / (1.0 + math.exp(min(-p.gamma * (iteration - p.stepsize), 700.0)))


def _poly(p: Policy, iteration: int) -> float:
    left = max(0.0, 1.0 - iteration / p.max_iter)  # (past the end: no rate, not a complex one)
    return p.base_lr * left**p.power


POLICIES: dict[str, Callable[[Policy, int], float]] = {
    "fixed": lambda p, i: p.base_lr,
    "step": _exponential(Policy.step),
    "multistep": _exponential(Policy.step),
    "exp": _exponential(lambda p, i: i),
    "inv": lambda p, i: p.base_lr * (1.0 + p.gamma * i) ** -p.power,
    "poly": _poly,
    "sigmoid": _sigmoid,
}


def clip(gradients: Sequence[np.ndarray], limit: float) -> tuple[float, float]:
    """Scale all gradients together so that their common L2 norm is at most `limit`.

    Returns (norm before, scale). A negative limit leaves them; so does a norm that is not finite,
    which no scale would mend.
    """
    norm = math.sqrt(sum(_squares(gradient) for gradient in gradients))
    scale = 1.0
    if 0 <= limit < norm < math.inf:
        scale = limit / norm
        for gradient in gradients:
            gradient *= scale
    return norm, scale


def _squares(gradient: np.ndarray) -> float:
    """The sum of squares: blocks in the array's precision, their sums in double."""
    flat = gradient.reshape(-1)
    return sum(float(flat[here] @ flat[here]) for here in _blocks(flat))


def _blocks(flat: Any) -> Iterator[slice]:
    """What of a flat array is updated at a time."""
    block = BLOCK if isinstance(flat, np.ndarray) else max(len(flat), 1)
    for start in range(0, len(flat), block):
        yield slice(start, start + block)


@dataclass(frozen=True)
class Step:
    """What a rule may ask for: the rate of this parameter and the solver's constants."""

    rate: float
    momentum: float = 0.0
    momentum2: float = 0.999
    rms_decay: float = 0.99
    delta: float = 1e-8
    iteration: int = 0
    xp: Any = np  # or what has its names where the arrays lie


# A rule turns the gradient g, in place, into what is subtracted from the weights; `h` are the
# parameter's histories.
History = list[np.ndarray]


def sgd(g: np.ndarray, h: History, s: Step) -> None:
    """h = momentum h + rate g; the step is h."""
    h[0] *= s.momentum
    g *= s.rate
    h[0] += g
    g[...] = h[0]


def nesterov(g: np.ndarray, h: History, s: Step) -> None:
    """h' = momentum h + rate g; the step is (1 + momentum) h' - momentum h."""
    before = h[0] * s.momentum
    g *= s.rate
    s.xp.add(before, g, out=h[0])
    s.xp.multiply(h[0], 1.0 + s.momentum, out=g)
    g -= before


def adagrad(g: np.ndarray, h: History, s: Step) -> None:
    """h += g^2; the step is rate g / (sqrt(h) + delta)."""
    h[0] += g * g
    g /= s.xp.sqrt(h[0]) + s.delta
    g *= s.rate


def rmsprop(g: np.ndarray, h: History, s: Step) -> None:
    """h = rms_decay h + (1 - rms_decay) g^2; the step is rate g / (sqrt(h) + delta)."""
    _average(h[0], g * g, s.rms_decay)
    g /= s.xp.sqrt(h[0]) + s.delta
    g *= s.rate


def adadelta(g: np.ndarray, h: History, s: Step) -> None:
    """The step is rate g sqrt((h1 + delta) / (h0 + delta)).

    h0 and h1 are running means, by momentum, of the squared gradients and of the squared steps.
    """
    _average(h[0], g * g, s.momentum)
    g *= s.xp.sqrt((h[1] + s.delta) / (h[0] + s.delta))
    _average(h[1], g * g, s.momentum)
    g *= s.rate


def adam(g: np.ndarray, h: History, s: Step) -> None:
    """The step is rate c h0 / (sqrt(h1) + delta), c = sqrt(1 - momentum2^t) / (1 - momentum^t).

    h0 and h1 are running means of g (by momentum) and g^2 (by momentum2); t counts from 1.
    """
    t = s.iteration + 1
    correction = math.sqrt(1.0 - s.momentum2**t) / (1.0 - s.momentum**t)
    _average(h[0], g, s.momentum)
    _average(h[1], g * g, s.momentum2)
    s.xp.divide(h[0], s.xp.sqrt(h[1]) + s.delta, out=g)
    g *= s.rate * correction


def _average(mean: np.ndarray, value: np.ndarray, decay: float) -> None:
    mean *= decay
    mean += value * (1.0 - decay)


@dataclass(frozen=True)
class Rule:
    """A solver type: its function, how many histories it keeps, whether it takes a momentum."""

    update: Callable[[np.ndarray, History, Step], None]
    histories: int = 1
    takes_momentum: bool = True


RULES = {
    "SGD": Rule(sgd),
    "Nesterov": Rule(nesterov),
    "AdaGrad": Rule(adagrad, takes_momentum=False),
    "RMSProp": Rule(rmsprop, takes_momentum=False),
    "AdaDelta": Rule(adadelta, histories=2),
    "Adam": Rule(adam, histories=2),
}


def decay_l2(g: np.ndarray, weights: np.ndarray, decay: float, xp: Any = np) -> None:
    """The gradient of decay/2 |w|^2."""
    g += weights * decay


def decay_l1(g: np.ndarray, weights: np.ndarray, decay: float, xp: Any = np) -> None:
    """The gradient of decay |w|_1, 0 at 0."""
    g += xp.sign(weights) * decay


DECAYS = {"L2": decay_l2, "L1": decay_l1}


def update(
    rule: Rule,
    weights: np.ndarray,
    gradient: np.ndarray,
    histories: Iterable[np.ndarray],
    step: Step,
    decay: float = 0.0,
    regularization: str = "L2",
    scale: float = 1.0,
) -> None:
    """One step of one parameter: scale the gradient, add the decay's, apply the rule, subtract.

    All arrays have one shape and are contiguous. Afterwards the gradient holds what was
    subtracted, as in Caffe.
    """
    w, g = weights.reshape(-1), gradient.reshape(-1)
    all_h = [h.reshape(-1) for h in histories]
    regularize = DECAYS[regularization]
    for here in _blocks(w):
        wb, gb = w[here], g[here]
        if scale != 1.0:
            gb *= scale
        if decay:
            regularize(gb, wb, decay, step.xp)
        rule.update(gb, [h[here] for h in all_h], step)
        wb -= gb
