"""Fillers: the first values of a network's parameters, and of DummyData.

fan_in is count / first extent, fan_out count / second extent, of (K, C, R, S) the inputs and
outputs of a unit. Sources: Glorot and Bengio, AISTATS 2010 (xavier); He et al., arXiv 1502.01852
(msra); Long et al., arXiv 1411.4038 (bilinear).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bedstone.spec.errors import InvalidDescriptor

VARIANCES = ("FAN_IN", "FAN_OUT", "AVERAGE")


def fill(array: np.ndarray, filler: Any, rng: np.random.Generator) -> None:
    """Fill an array as a FillerParameter says; random numbers are drawn from `rng`."""
    kind = filler.type
    if kind not in _FILLERS:
        raise InvalidDescriptor("filler type", kind, " or ".join(_FILLERS))
    if filler.sparse != -1 and kind != "gaussian":
        raise InvalidDescriptor("filler sparse", filler.sparse, "-1 (none) but for gaussian")
    _FILLERS[kind](array, filler, rng)


def _draw_uniform(array: np.ndarray, low: float, high: float, rng: np.random.Generator) -> None:
    """In the array's precision and in place: networks have a hundred million parameters."""
    rng.random(dtype=array.dtype, out=array)
    array *= high - low
    array += low


def _draw_normal(array: np.ndarray, mean: float, std: float, rng: np.random.Generator) -> None:
    rng.standard_normal(dtype=array.dtype, out=array)
    array *= std
    array += mean


def _constant(array: np.ndarray, filler: Any, rng: np.random.Generator) -> None:
    array[...] = filler.value


def _uniform(array: np.ndarray, filler: Any, rng: np.random.Generator) -> None:
    if filler.min > filler.max:
        raise InvalidDescriptor("filler min, max", (filler.min, filler.max), "min <= max")
    _draw_uniform(array, filler.min, filler.max, rng)


def _gaussian(array: np.ndarray, filler: Any, rng: np.random.Generator) -> None:
    _draw_normal(array, filler.mean, filler.std, rng)
    if filler.sparse >= 0:  # about so many non-zero inputs for each output
        share = filler.sparse / array.shape[0]
        array *= rng.random(array.shape) < share


def _positive_unitball(array: np.ndarray, filler: Any, rng: np.random.Generator) -> None:
    array[...] = rng.random(array.shape)
    rows = array.reshape(len(array), -1)
    rows /= rows.sum(1, keepdims=True)


def _fan(array: np.ndarray, filler: Any) -> float:
    fan_in = array.size / max(array.shape[0], 1) if array.ndim else 1
    fan_out = array.size / max(array.shape[1], 1) if array.ndim > 1 else array.size
    return {0: fan_in, 1: fan_out, 2: (fan_in + fan_out) / 2}[filler.variance_norm]


def _xavier(array: np.ndarray, filler: Any, rng: np.random.Generator) -> None:
    bound = math.sqrt(3.0 / _fan(array, filler))
    _draw_uniform(array, -bound, bound, rng)


def _msra(array: np.ndarray, filler: Any, rng: np.random.Generator) -> None:
    _draw_normal(array, 0.0, math.sqrt(2.0 / _fan(array, filler)), rng)


def _bilinear(array: np.ndarray, filler: Any, rng: np.random.Generator) -> None:
    if array.ndim != 4 or array.shape[2] != array.shape[3]:
        raise InvalidDescriptor("bilinear filler's shape", array.shape, "(K, C, R, R)")
    size = array.shape[3]
    factor = (size + 1) // 2
    centre = (2 * factor - 1 - factor % 2) / (2.0 * factor)
    line = 1 - np.abs(np.arange(size) / factor - centre)
    array[...] = np.outer(line, line)


_FILLERS = {
    "constant": _constant, "uniform": _uniform, "gaussian": _gaussian,
    "positive_unitball": _positive_unitball, "xavier": _xavier, "msra": _msra,
    "bilinear": _bilinear,
}  # fmt: skip
