"""Networks for `bedstone bench model --framework jax`: residual networks in plain JAX, with random
weights and inputs.

K. He et al., "Deep Residual Learning for Image Recognition", arXiv 1512.03385, Table 1. In training
batches are normalised by their own statistics; in inference the statistics are 0 and 1.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import bedstone
from bedstone import InvalidDescriptor
from bedstone.frameworks.jax.patch import enable
from bedstone.frameworks.jax.report import report, reset

SEED = 1410
LEARNING_RATE = 1e-3
PICTURE, CLASSES = 224, 1000
DTYPES = ("float32", "bfloat16", "float16")
STAGES = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3), "resnet50": (3, 4, 6, 3)}
WIDTHS = (64, 128, 256, 512)
EXPANSION = {"resnet50": 4}  # of a bottleneck; the others have blocks of two 3x3 convolutions
EPSILON = 1e-5
Step = Any  # a compiled program


class Model:
    """A network and a batch for it. `step()` is what is timed: an inference, or a step of training
    (forward, backward, gradient descent). Each side is a program that is compiled once."""

    def __init__(
        self, name: str, batch: int, layout: str, dtype: str, training: bool, device: str = "cpu"
    ) -> None:
        for argument, value, known in (
            ("--model", name, tuple(STAGES)), ("--layout", layout, ("nchw", "nhwc")),
            ("--dtype", dtype, DTYPES), ("--device", device, ("cpu",)),
        ):  # fmt: skip
            if value not in known:
                raise InvalidDescriptor(argument, value, f"one of {known}")
        self.training, self._current = training, "native"
        bedstone.set_num_threads(bedstone.get_num_threads())  # compiled programs read the process's
        self._network = Network(name, layout, training)
        random = np.random.default_rng(SEED)
        first = self._network.parameters(random)
        shape = (batch, 3, PICTURE, PICTURE) if layout == "nchw" else (batch, PICTURE, PICTURE, 3)
        self._images = jnp.asarray(random.standard_normal(shape, np.float32), dtype)
        self._first = jax.tree.map(lambda p: jnp.asarray(p, dtype), first)
        self._trained = dict.fromkeys(("native", "bedstone"), self._first)
        self._programs: dict[tuple[str, str], Step] = {}
        self._traced, self._steps, self._told = (0, 0), 0, ""

    @property
    def versions(self) -> dict[str, str]:
        """What else the numbers depend on."""
        return {"jax": jax.__version__, "jax threads": str(os.cpu_count())}

    def result(self) -> Any:
        """The network's result on the batch, as a float64 NumPy array."""
        return np.asarray(self._program("result")(self._first, self._images), np.float64)

    def step(self) -> None:
        """One inference or one step of training, finished when this returns."""
        program = self._program("step")
        found = program(self._trained[self._current], self._images)
        jax.block_until_ready(found)
        if self.training:
            self._trained[self._current] = found
        self._steps += self._current == "bedstone"

    def _program(self, what: str) -> Step:
        key = (self._current, what)
        if key not in self._programs:
            function = self._descend if self.training and what == "step" else self._network.scores
            reset()
            with enable() if self._current == "bedstone" else contextlib.nullcontext():
                lowered = jax.jit(function).lower(self._first, self._images)
            self._programs[key] = lowered.compile()
            if key == ("bedstone", "step"):
                found = report()
                self._traced, self._told = (found.own_calls, found.native_calls), str(found)
        return self._programs[key]

    def _descend(self, parameters: Any, images: Any) -> Any:
        def loss(parameters: Any) -> Any:
            return jnp.square(self._network.scores(parameters, images).astype(jnp.float32)).mean()

        slopes = jax.grad(loss)(parameters)
        return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, parameters, slopes)

    @contextlib.contextmanager
    def side(self, name: str) -> Iterator[None]:
        """The code inside runs the program of JAX's kernels ("native") or the one of bedstone's
        ("bedstone")."""
        before, self._current = self._current, name
        try:
            yield
        finally:
            self._current = before

    def counts(self) -> tuple[int, int]:
        """(calls on bedstone's kernels, calls of the functions that were taken over) so far: those
        that a step's program was traced with, times the steps. (Gradients are not counted.)"""
        own, native = self._traced
        return own * self._steps, (own + native) * self._steps

    def taken(self) -> str:
        """Which functions ran where in a step, and why some stayed native."""
        return self._told


class Network:
    """A residual network: its parameters and its function."""

    def __init__(self, name: str, layout: str, training: bool) -> None:
        self.stages, self.expansion = STAGES[name], EXPANSION.get(name, 1)
        self.last, self.training = layout == "nhwc", training
        self.numbers = ("NHWC", "HWIO", "NHWC") if self.last else ("NCHW", "OIHW", "NCHW")

    def parameters(self, random: np.random.Generator) -> dict[str, Any]:
        """Random ones: filters as He's initialisation has them, scales 1 and shifts 0."""
        made: dict[str, Any] = {"stem": self._convolution(random, 3, 64, 7), "blocks": []}
        channels = 64
        for width, count in zip(WIDTHS, self.stages):
            for number in range(count):
                out = width * self.expansion
                shapes = [(channels, width, 1), (width, width, 3), (width, out, 1)]
                if self.expansion == 1:
                    shapes = [(channels, width, 3), (width, width, 3)]
                block = {"body": [self._convolution(random, *shape) for shape in shapes]}
                if number == 0 and (width > WIDTHS[0] or channels != out):
                    block["shortcut"] = self._convolution(random, channels, out, 1)
                made["blocks"].append(block)
                channels = out
        head = random.standard_normal((channels, CLASSES), np.float32)
        made["head"] = head * np.float32(channels**-0.5)
        return made

    def _convolution(
        self, random: np.random.Generator, into: int, out: int, window: int
    ) -> dict[str, Any]:
        shape = (window, window, into, out) if self.last else (out, into, window, window)
        scale = np.float32((2 / (into * window**2)) ** 0.5)
        w = random.standard_normal(shape, np.float32) * scale
        return {"w": w, "scale": np.ones(out), "shift": np.zeros(out)}

    def scores(self, parameters: Any, x: Any) -> Any:
        """(batch, CLASSES) of images."""
        x = jax.nn.relu(self._convolve(parameters["stem"], x, 2))
        window = (1, 3, 3, 1) if self.last else (1, 1, 3, 3)
        stride = (1, 2, 2, 1) if self.last else (1, 1, 2, 2)
        pads = [(int(r > 1), int(r > 1)) for r in window]
        x = lax.reduce_window(x, np.array(-np.inf, x.dtype), lax.max, window, stride, pads)
        firsts = np.cumsum((0, *self.stages))[1:-1]
        for number, block in enumerate(parameters["blocks"]):
            x = self._block(block, x, 2 if number in firsts else 1)
        return x.mean((1, 2) if self.last else (2, 3)) @ parameters["head"]

    def _block(self, block: Any, x: Any, stride: int) -> Any:
        kept = self._convolve(block["shortcut"], x, stride) if "shortcut" in block else x
        # A bottleneck strides in its 3x3 convolution, as is usual now.
        striding = 1 if self.expansion > 1 else 0
        for number, layer in enumerate(block["body"]):
            x = jax.nn.relu(x) if number else x
            x = self._convolve(layer, x, stride if number == striding else 1)
        return jax.nn.relu(x + kept)

    def _convolve(self, layer: Any, x: Any, stride: int) -> Any:
        """Convolution and normalisation."""
        r = layer["w"].shape[0 if self.last else 2]
        pads = [(r // 2, r // 2)] * 2
        x = lax.conv_general_dilated(
            x, layer["w"], (stride, stride), pads, dimension_numbers=self.numbers
        )
        shape = (1, 1, 1, -1) if self.last else (1, -1, 1, 1)
        if self.training:
            axes = (0, 1, 2) if self.last else (0, 2, 3)
            wide = x.astype(jnp.float32)
            mean, variance = wide.mean(axes, keepdims=True), wide.var(axes, keepdims=True)
            x = ((wide - mean) * lax.rsqrt(variance + EPSILON)).astype(x.dtype)
        return x * layer["scale"].reshape(shape) + layer["shift"].reshape(shape)
