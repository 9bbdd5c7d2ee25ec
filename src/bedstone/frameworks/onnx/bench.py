"""Networks for `bedstone bench model --framework onnx`: the three that the package
rapidocr-onnxruntime brings with their weights, on onnxruntime and on bedstone with as many threads.

A batch is so many pictures one after the other, as a reader of pages meets them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from bedstone import InvalidDescriptor, get_num_threads
from bedstone.frameworks.onnx.report import report, reset
from bedstone.frameworks.onnx.session import InferenceSession

# name -> (file, the picture's dims)
MODELS = {
    "recognition": ("ch_PP-OCRv4_rec_infer.onnx", (1, 3, 48, 320)),
    "classification": ("ch_ppocr_mobile_v2.0_cls_infer.onnx", (1, 3, 48, 192)),
    "detection": ("ch_PP-OCRv4_det_infer.onnx", (1, 3, 192, 384)),
}
SEED = 1410
MARK, LINE, GAP = (
    4,
    24,
    8,
)  # pixels: a mark's edge, from a line to the next, and what is white of it
DARK = 0.4  # of a line's marks


def page(dims: tuple[int, ...], random: np.random.Generator) -> np.ndarray[Any, Any]:
    """Lines of dark marks on white, from -1 to 1: on noise the networks find nothing to read, and
    a result that is 0 but for rounding errors compares badly."""
    _, _, height, width = dims
    marks = random.random((height // MARK, width // MARK)) < DARK
    picture = 1 - 2 * np.kron(marks, np.ones((MARK, MARK)))
    picture[np.arange(height) % LINE < GAP] = 1
    return np.ascontiguousarray(np.broadcast_to(picture, dims), np.float32)


class Model:
    """A network and pictures for it; `step()` is what is timed."""

    def __init__(
        self, name: str, batch: int, layout: str, dtype: str, training: bool, device: str = "cpu"
    ) -> None:
        given = ("--layout", layout, "nchw"), ("--dtype", dtype, "float32")
        for option, value, only in (*given, ("--device", device, "cpu")):
            if value != only:
                raise InvalidDescriptor(option, value, f"{only}: the networks are so")
        if name not in MODELS or training:
            raise InvalidDescriptor("--model", name, f"one of {tuple(MODELS)}, no training")
        import onnxruntime
        import rapidocr_onnxruntime

        file, dims = MODELS[name]
        path = str(Path(rapidocr_onnxruntime.__file__).parent / "models" / file)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = get_num_threads()
        self._sessions = {
            "native": onnxruntime.InferenceSession(
                path, options, providers=["CPUExecutionProvider"]
            ),
            "bedstone": InferenceSession(path),
        }
        random = np.random.default_rng(SEED)
        self._pictures = [page(dims, random) for _ in range(batch)]
        self._now = self._sessions["native"]
        reset()

    @property
    def versions(self) -> dict[str, str]:
        """What else the numbers depend on."""
        return {"items": "images"} | {
            name: metadata.version(name) for name in ("onnxruntime", "rapidocr-onnxruntime")
        }

    def result(self) -> Any:
        """The network's first output for the first picture, as a float64 NumPy array."""
        return self._run(self._pictures[0])[0].astype(np.float64)

    def _run(self, picture: Any) -> list[Any]:
        return self._now.run(None, {self._now.get_inputs()[0].name: picture})

    def step(self) -> None:
        """Every picture once."""
        for picture in self._pictures:
            self._run(picture)

    @contextlib.contextmanager
    def side(self, name: str) -> Iterator[None]:
        """The code inside runs on onnxruntime ("native") or on bedstone ("bedstone")."""
        self._now = self._sessions[name]
        yield

    def counts(self) -> tuple[int, int]:
        """(calls on bedstone's kernels, calls of all operators) so far."""
        found = report()
        return found.own_calls, found.calls

    def taken(self) -> str:
        """Which operators ran on what."""
        return str(report())
