"""Networks for `bedstone bench model --framework torch`: architectures of the transformers package,
with random weights and inputs, whole and unchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from bedstone import InvalidDescriptor, get_num_threads

SEED = 1410
LEARNING_RATE = 1e-3
PICTURE = (3, 224, 224)  # the size that these networks are published with
SAMPLES = 16000  # a second of speech

# model -> (the package's name for it, its head, settings beside the defaults)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "resnet50": ("ResNet", "ForImageClassification", {"num_labels": 1000}),
    "mobilenet_v2": ("MobileNetV2", "ForImageClassification", {"num_labels": 1000}),
    "convnext_tiny": ("ConvNext", "ForImageClassification", {"num_labels": 1000}),
    "segformer_b0": ("Segformer", "ForSemanticSegmentation", {"num_labels": 150}),
    "wav2vec2_features": ("Wav2Vec2", "Model", {}),
}
DTYPES = ("float32", "float64", "bfloat16", "float16")


class Model:
    """A network and a batch for it. `step()` is what is timed: an inference, or a step of training
    (forward, backward, gradient descent)."""

    models = tuple(MODELS)

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
        torch.set_num_threads(get_num_threads())  # both sides have the same
        torch.manual_seed(SEED)
        self._network = _network(name).train(training)
        speech = name == "wav2vec2_features"
        dims = (batch, SAMPLES) if speech else (batch, *PICTURE)
        self._input = torch.randn(dims)
        if layout == "nhwc" and not speech:
            self._network = self._network.to(memory_format=torch.channels_last)
            self._input = self._input.to(memory_format=torch.channels_last)
        where = {"device": self.device, "dtype": getattr(torch, dtype)}
        self._network, self._input = self._network.to(**where), self._input.to(**where)
        self._descent = torch.optim.SGD(self._network.parameters(), LEARNING_RATE)

    @property
    def versions(self) -> dict[str, str]:
        """What else the numbers depend on."""
        import transformers

        found = {"torch": torch.__version__, "transformers": transformers.__version__}
        return {**found, "torch threads": str(torch.get_num_threads())}

    def result(self) -> Any:
        """The network's result on the batch, as a float64 NumPy array."""
        torch.manual_seed(SEED)  # of dropout
        with torch.no_grad():
            return self._forward().double().cpu().numpy()

    def _forward(self) -> torch.Tensor:
        answer = self._network(self._input)
        return answer if isinstance(answer, torch.Tensor) else answer.logits

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
        from bedstone.frameworks.torch import enable

        with enable(compile_after=1) if name == "bedstone" else contextlib.nullcontext():
            yield

    def counts(self) -> tuple[int, int]:
        """(calls on bedstone's kernels, calls of the operators that were taken over) so far."""
        from bedstone.frameworks.torch import report

        found = report()
        return found.own_calls, found.own_calls + found.native_calls


def _network(name: str) -> Any:
    try:
        import transformers
    except ImportError:
        expected = "the package transformers: pip install transformers"
        raise InvalidDescriptor("--model", name, expected) from None
    package, head, settings = MODELS[name]
    network = getattr(transformers, f"{package}{head}")(
        getattr(transformers, f"{package}Config")(**settings)
    )
    return network.feature_extractor if name == "wav2vec2_features" else network
