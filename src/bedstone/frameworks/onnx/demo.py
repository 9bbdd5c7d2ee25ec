"""`bedstone demo`: a pretrained text reader, unmodified, on onnxruntime and then on bedstone.

The package rapidocr-onnxruntime brings three networks (detection, orientation, recognition) in
its wheel. It reads scikit-image's scanned page, or the picture given, twice with each; the texts
must be the same.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import bedstone
from bedstone.frameworks.onnx import enable, report
from bedstone.frameworks.onnx.report import Report, reset

PLANS_SHOWN = 3
NEEDS = "pip install 'bedstone[demo]'"


def main(args: argparse.Namespace) -> int:
    """Run the demonstration; 1 if the two readings differ."""
    picture = _picture(args.image)
    reader = _reader_class()
    native, native_seconds = _read("onnxruntime", reader, picture)
    with enable():
        ours, our_seconds = _read("bedstone", reader, picture)
    same = _texts(native) == _texts(ours)
    print()
    print(f"{'':14} {'seconds':>8}  lines read")
    print(f"{'onnxruntime':14} {native_seconds:8.2f}  {len(native)}")
    print(f"{'bedstone':14} {our_seconds:8.2f}  {len(ours)}")
    print()
    for line in _texts(ours):
        print(f"  {line}")
    print()
    found = report()
    print(_shares(found))
    print(_explained(our_sessions()))
    path = _draw(picture, ours, Path(args.output))
    print(f"the page with the text found: {path}")
    if same:
        print("same text on both: yes")
        return 0
    print("the texts differ:", file=sys.stderr)
    for a, b in zip(_texts(native), _texts(ours)):
        if a != b:
            print(f"  onnxruntime {a!r}\n  bedstone    {b!r}", file=sys.stderr)
    return 1


def _picture(path: str | None) -> np.ndarray[Any, Any]:
    if path is None:
        try:
            from skimage import data
        except ImportError:
            raise bedstone.InvalidDescriptor("demo", "scikit-image is missing", NEEDS) from None
        page = data.page()
        return np.ascontiguousarray(np.repeat(page[:, :, None], 3, axis=2))
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise bedstone.InvalidDescriptor("demo", "pillow is missing", NEEDS) from None
    try:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB"))[:, :, ::-1].copy()
    except UnidentifiedImageError:
        raise bedstone.InvalidDescriptor("image", path, "a picture that Pillow reads") from None


def _reader_class() -> Any:
    try:
        from rapidocr_onnxruntime import RapidOCR
    except ImportError as error:
        raise bedstone.InvalidDescriptor("demo", f"{error}", NEEDS) from None
    return RapidOCR


def _read(
    name: str, reader: Callable[[], Any], picture: np.ndarray[Any, Any]
) -> tuple[list[Any], float]:
    """(boxes, texts and scores; seconds of the second reading). The first one compiles."""
    engine = reader()
    with _Progress(name) as progress:
        progress.stage("first reading (plans and compiles)", 0.1)
        engine(picture)
        progress.stage("second reading", 0.7)
        reset()  # what is reported is the second reading: no compiling in it
        start = time.perf_counter()
        result, _ = engine(picture)
        seconds = time.perf_counter() - start
        progress.stage("done", 1.0)
    _engines.append(engine)
    return result or [], seconds


_engines: list[Any] = []


def our_sessions() -> list[Any]:
    """bedstone's sessions inside the readers made so far."""
    from bedstone.frameworks.onnx.session import InferenceSession

    found = []
    for engine in _engines:
        for part in vars(engine).values():
            for inner in (part, *vars(part).values()) if hasattr(part, "__dict__") else ():
                session = getattr(inner, "session", None)
                if isinstance(session, InferenceSession) and session not in found:
                    found.append(session)
    return found


def _texts(result: list[Any]) -> list[str]:
    return [entry[1] for entry in result]


def _shares(found: Report) -> str:
    seconds = 100 * found.own_seconds / max(found.seconds, 1e-9)
    calls = 100 * found.own_calls / max(found.calls, 1)
    lines = [
        f"bedstone's own kernels: {seconds:.0f}% of the time in the networks, {calls:.0f}% of the "
        "calls; by operator:"
    ]
    lines += ["  " + line for line in str(found).splitlines()[:12]]
    return "\n".join(lines)


def _explained(sessions: list[Any]) -> str:
    """The plans with the most arithmetic, in words."""
    plans = {str(plan.problem): plan for s in sessions for _, plan in s.plans()}
    costly = sorted(plans.values(), key=lambda plan: -plan.problem.flops)[:PLANS_SHOWN]
    texts = ["\nthe most expensive plans:"]
    texts += ["\n".join("  " + line for line in plan.explain().splitlines()) for plan in costly]
    return "\n".join(texts) + "\n"


def _draw(picture: np.ndarray[Any, Any], result: list[Any], folder: Path) -> Path:
    from PIL import Image, ImageDraw

    folder.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.ascontiguousarray(picture[:, :, ::-1])).convert("RGB")
    wide = Image.new("RGB", (2 * image.width, image.height), "white")
    wide.paste(image, (0, 0))
    draw = ImageDraw.Draw(wide)
    for box, text, _ in result:
        corners = [tuple(map(float, corner)) for corner in box]
        draw.polygon(corners, outline=(220, 60, 30))
        x, y = corners[0]
        draw.text((x + image.width, y), text, fill=(20, 20, 20))
    path = folder / "page.png"
    wide.save(path)
    return path


class _Progress:
    """A bar on stderr, where somebody looks."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> _Progress:
        return self

    def stage(self, text: str, share: float) -> None:
        """Show how far the reading is."""
        if sys.stderr.isatty():
            filled = int(30 * share)
            bar = "#" * filled + "." * (30 - filled)
            print(f"\r{self.name:12} [{bar}] {text:38}", end="", file=sys.stderr, flush=True)

    def __exit__(self, *unused: object) -> None:
        if sys.stderr.isatty():
            print(file=sys.stderr)
