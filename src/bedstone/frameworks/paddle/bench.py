"""Networks for `bedstone bench model --framework paddle`: those of paddle.vision.models, whole and
unchanged, with random weights and inputs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import paddle
from paddle.vision import models

from bedstone import InvalidDescriptor, get_num_threads
from bedstone.frameworks.paddle import enable, report, reset
from bedstone.frameworks.paddle.threads import paddle_threads

SEED = 1410
LEARNING_RATE = 1e-3
PICTURE = (3, 224, 224)  # the size that these networks are published with
MODELS = (
    "alexnet", "densenet121", "inception_v3", "mobilenet_v1", "mobilenet_v2", "mobilenet_v3_small",
    "resnet18", "resnet50", "resnext50_32x4d", "shufflenet_v2_x1_0", "squeezenet1_1", "vgg11",
    "vgg16",
)  # fmt: skip
DTYPES = ("float32", "float64")
# PaddlePaddle's OpenMP threads go on spinning for 0.2 s, and would take a core from the next side.
SETTLE_SECONDS = 0.25


class Model:
    """A network and a batch for it. `step()` is what is timed: an inference, or a step of training
    (forward, backward, gradient descent)."""

    def __init__(
        self, name: str, batch: int, layout: str, dtype: str, training: bool, device: str = "cpu"
    ) -> None:
        if name not in MODELS:
            raise InvalidDescriptor("--model", name, f"one of {MODELS}")
        if layout != "nchw":
            raise InvalidDescriptor("--layout", layout, "nchw, which these networks are written in")
        if dtype not in DTYPES:
            raise InvalidDescriptor("--dtype", dtype, f"one of {DTYPES}")
        if device != "cpu":
            raise InvalidDescriptor("--device", device, "cpu")
        self.training = training
        # Both sides have the same number. (PaddlePaddle's runtime would otherwise have one.)
        paddle.base.core.set_num_threads(get_num_threads())
        paddle.seed(SEED)
        self._network = getattr(models, name)().astype(dtype)
        if training:
            self._network.train()
        else:
            self._network.eval()
        self._input = paddle.randn([batch, *PICTURE]).astype(dtype)
        learnt = self._network.parameters()
        self._descent = paddle.optimizer.SGD(LEARNING_RATE, parameters=learnt)
        self._last = ""
        reset()

    @property
    def versions(self) -> dict[str, str]:
        """What else the numbers depend on."""
        return {"paddle": paddle.__version__, "paddle threads": str(paddle_threads())}

    def result(self) -> Any:
        """The network's result on the batch, as a float64 NumPy array."""
        paddle.seed(SEED)  # of dropout
        with paddle.no_grad():
            return self._forward().astype("float64").numpy()

    def _forward(self) -> paddle.Tensor:
        return self._network(self._input)

    def step(self) -> None:
        """One inference or one step of training, finished when this returns."""
        if self.training:
            self._forward().square().mean().backward()
            self._descent.step()
            self._descent.clear_grad()
        else:
            with paddle.no_grad():
                self._forward()

    @contextlib.contextmanager
    def side(self, name: str) -> Iterator[None]:
        """The code inside runs on PaddlePaddle's kernels ("native") or on bedstone's
        ("bedstone")."""
        if name != self._last:
            time.sleep(SETTLE_SECONDS)
        self._last = name
        with enable() if name == "bedstone" else contextlib.nullcontext():
            yield

    def counts(self) -> tuple[int, int]:
        """(calls on bedstone's kernels, calls of the operators that were taken over) so far."""
        found = report()
        return found.own_calls, found.calls

    def taken(self) -> str:
        """Which operators ran where so far, and why some stayed native."""
        return str(report())
