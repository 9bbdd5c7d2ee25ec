"""Whole models of others, unchanged: patched and native give the same results and gradients.

Two come with trained weights in their packages, a pitch tracker and a speech detector; the
architectures of the transformers package have random weights, small by default and at full size
among the slow tests. The judge is the same model in float64, by PyTorch alone.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import math
import sys
import types

import pytest

torch = pytest.importorskip("torch")
bedstone_torch = pytest.importorskip("bedstone.frameworks.torch")
if not hasattr(bedstone_torch, "enable"):
    pytest.skip("bedstone.frameworks.torch has no patch", allow_module_level=True)

# Own kernels wherever they can be, from the first call on.
ALWAYS = {"least": 0, "find": False, "compile_after": 1}
SEED = 1410
# How far from float64, in shares of the largest element, is still float32's own rounding: several
# times what PyTorch itself shows, for sums in another order; and what is small in any case.
SLACK, NEGLIGIBLE = 4.0, 2e-6
RATE = 16000  # samples a second
TONE = 220.0  # Hz

SMALL = {
    "ResNet": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 2]},
    "MobileNetV2": {"depth_multiplier": 0.35, "image_size": 64},
    "ConvNext": {"hidden_sizes": [16, 32], "depths": [1, 2], "num_stages": 2, "image_size": 64},
    "Segformer": {
        "depths": [1, 1, 1, 1],
        "hidden_sizes": [8, 16, 24, 32],
        "num_attention_heads": [1, 2, 3, 4],
        "decoder_hidden_size": 32,
    },
}
HEADS = {"Segformer": "ForSemanticSegmentation"}
NAMES = sorted(SMALL)
# ResNet's default configuration is ResNet-50; the others' are the published base sizes.
FULL_SIZE = 224


def slow(name):
    return pytest.param(name, marks=pytest.mark.slow)


def transformers_model(name, **settings):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(SEED)
    config = getattr(transformers, f"{name}Config")(**settings)
    head = HEADS.get(name, "ForImageClassification")
    return getattr(transformers, f"{name}{head}")(config)


def logits(model, x):
    return model(x).logits


def run(model, call, x, patched=False):
    """(results, gradients of the parameters and of x, the report) of a model on x."""
    x = x.clone().requires_grad_()
    context = bedstone_torch.enable(**ALWAYS) if patched else contextlib.nullcontext()
    bedstone_torch.reset()
    torch.manual_seed(SEED)
    parameters = [p for p in model.parameters() if p.requires_grad]
    with context:
        y = call(model, x)
        dy = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).reshape(y.shape).to(y.dtype)
        gradients = torch.autograd.grad(y, [x, *parameters], dy, allow_unused=True)
    return [y.detach()], [g for g in gradients if g is not None], bedstone_torch.report()


def distance(got, exact):
    """The largest difference, in shares of the largest element."""
    assert got.shape == exact.shape
    return float((got.double() - exact).abs().max()) / max(float(exact.abs().max()), 1e-30)


def check(model, call, x, kernels=1):
    """Patched is as near to float64 as native is; at least so many calls ran on our kernels."""
    exact = run(copy.deepcopy(model).double(), call, x.double())
    native = run(copy.deepcopy(model), call, x)
    ours = run(copy.deepcopy(model), call, x, patched=True)
    assert ours[2].own_calls >= kernels, f"\n{ours[2]}"
    for kind in (0, 1):
        assert len(ours[kind]) == len(exact[kind])
        # A gradient that cancels to nothing is judged beside the others, by the worst of them.
        worst = max(distance(n, e) for n, e in zip(native[kind], exact[kind]))
        for got, theirs, truth in zip(ours[kind], native[kind], exact[kind]):
            assert got.stride() == theirs.stride()
            assert distance(got, truth) <= max(SLACK * worst, NEGLIGIBLE)


@pytest.mark.parametrize("name", NAMES)
def test_vision(name):
    model = transformers_model(name, num_labels=10, **SMALL[name]).eval()
    check(model, logits, torch.randn(4, 3, 64, 64), kernels=10)


# By the batch's own statistics, and with dropout; the others' layers differ little from inference.
@pytest.mark.parametrize("name", ["ResNet", *(slow(n) for n in NAMES if n != "ResNet")])
def test_vision_in_training(name):
    model = transformers_model(name, num_labels=10, **SMALL[name]).train()
    check(model, logits, torch.randn(4, 3, 64, 64), kernels=10)


@pytest.mark.parametrize("name", ["ResNet", *(slow(n) for n in NAMES if n != "ResNet")])
def test_vision_channels_last(name):
    model = transformers_model(name, num_labels=10, **SMALL[name]).eval()
    model = model.to(memory_format=torch.channels_last)
    check(model, logits, torch.randn(2, 3, 64, 64).to(memory_format=torch.channels_last), 10)


def test_speech_features():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(SEED)
    config = transformers.Wav2Vec2Config(
        conv_dim=[32] * 7,
        hidden_size=32,
        num_attention_heads=2,
        num_hidden_layers=1,
        intermediate_size=64,
    )
    model = transformers.Wav2Vec2Model(config).feature_extractor.eval()
    check(model, lambda model, x: model(x), torch.randn(2, 4000), kernels=10)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_vision_full_size(name):
    model = transformers_model(name).eval()
    check(model, logits, torch.randn(2, 3, FULL_SIZE, FULL_SIZE), kernels=50)


@pytest.mark.slow
def test_speech_features_full_size():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(SEED)
    model = transformers.Wav2Vec2Model(transformers.Wav2Vec2Config()).feature_extractor.eval()
    check(model, lambda model, x: model(x), torch.randn(1, RATE), kernels=10)


def tone(seconds):
    """A sung note: a few harmonics of TONE."""
    t = torch.arange(int(seconds * RATE)) / RATE
    return sum(torch.sin(2 * math.pi * TONE * k * t) / k for k in (1, 2, 3))[None] * 0.3


@pytest.fixture
def torchcrepe(monkeypatch):
    """The package; it imports torchaudio, only to read files, and may do without."""
    pytest.importorskip("librosa", reason="torchcrepe needs librosa")
    pytest.importorskip("resampy", reason="torchcrepe needs resampy")
    try:
        importlib.import_module("torchaudio")
    except (ImportError, OSError):
        monkeypatch.setitem(sys.modules, "torchaudio", types.ModuleType("torchaudio"))
    return pytest.importorskip("torchcrepe")


def test_pitch_tracker(torchcrepe):
    def track():
        return torchcrepe.predict(
            tone(0.4), RATE, hop_length=RATE // 50, model="tiny", batch_size=8,
            decoder=torchcrepe.decode.weighted_argmax, return_periodicity=True,
        )  # fmt: skip

    native = track()
    bedstone_torch.reset()
    with bedstone_torch.enable(**ALWAYS):
        patched = track()
    assert bedstone_torch.report().own_calls >= 6, f"\n{bedstone_torch.report()}"
    for ours, theirs in zip(patched, native):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert abs(float(patched[0].median()) - TONE) < 2


def test_pitch_network_and_its_gradients(torchcrepe):
    torchcrepe.load.model("cpu", "tiny")
    frames = tone(0.2).unfold(1, 1024, 512)[0]
    check(torchcrepe.infer.model, lambda model, x: model(x), frames / frames.std(), kernels=10)


def test_speech_detector():
    silero = pytest.importorskip("silero_vad")
    threads = torch.get_num_threads()
    model = silero.load_silero_vad()  # a TorchScript archive
    torch.set_num_threads(threads)  # (the package sets 1 for the whole process)
    sound = torch.cat([torch.zeros(1, 2048), tone(0.3), 0.1 * torch.randn(1, 2048)], 1)

    def detect():
        model.reset_states()
        with torch.no_grad():
            return torch.stack([model(piece, RATE) for piece in sound.unfold(1, 512, 512)[0]])

    native = detect()
    bedstone_torch.reset()
    with bedstone_torch.enable(**ALWAYS):
        patched = detect()
    assert bedstone_torch.report().own_calls > 0, f"\n{bedstone_torch.report()}"
    torch.testing.assert_close(patched, native, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(detect(), native, rtol=0, atol=0)  # the patch is off again
