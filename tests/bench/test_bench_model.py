"""`bedstone bench model`: rows, files and exit codes, with a network of NumPy's in place of a
framework's; and PyTorch's own, at a small size."""

from __future__ import annotations

import contextlib
import json
import mmap
import time

import numpy as np
import pytest

from bedstone import cli
from bedstone.bench import model, report

SLOW, FAST = 0.02, 0.005  # seconds of a step


class Fake:
    """A network whose step takes SLOW natively and FAST patched."""

    wrong = 0.0
    versions = {"fake": "1"}

    def __init__(self, name, batch, layout, dtype, training, device="cpu"):
        self.current, self.own, self.steps = "native", 0, 0

    @contextlib.contextmanager
    def side(self, name):
        self.current = name
        yield
        self.current = "native"

    def result(self):
        return np.array([1.0, 2.0 + (self.wrong if self.current == "bedstone" else 0.0)])

    def step(self):
        self.steps += 1
        self.own += self.current == "bedstone"
        time.sleep(FAST if self.current == "bedstone" else SLOW)

    def counts(self):
        return self.own, self.own

    def taken(self):
        return f"{self.own} calls on bedstone"


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(model, "load", lambda framework: Fake)
    monkeypatch.setattr(model, "peak", lambda *_: 12.5)


def test_rows_and_files(fake, tmp_path, capsys):
    files = [str(tmp_path / "rows.csv"), str(tmp_path / "rows.json")]
    words = ["bench", "model", "--batch", "4", "--csv", files[0], "--json", files[1]]
    assert cli.main(words) == 0
    head, rows = report.read_csv(files[0])
    assert [(row["layout"], row["side"]) for row in rows] == [
        ("nchw", "native"),
        ("nchw", "bedstone"),
        ("nhwc", "native"),
        ("nhwc", "bedstone"),
    ]
    ratio = float(rows[1]["ratio"])
    assert 1.5 < ratio <= 1.05 * SLOW / FAST and float(rows[0]["ratio"]) == 1.0
    assert float(rows[1]["items_per_second"]) <= 4 / FAST and rows[1]["peak_mib"] == "12.5"
    assert int(rows[1]["own_calls"]) > 0 == int(rows[0]["own_calls"])
    assert head["fake"] == "1" and head["largest difference, nchw"] == "0"
    assert len(json.loads((tmp_path / "rows.json").read_text())["rows"]) == len(rows)
    assert list(rows[0]) == list(model.ModelRow.__dataclass_fields__)
    assert "calls on bedstone" in capsys.readouterr().out


def test_a_wrong_result_is_an_error(fake, monkeypatch, capsys):
    monkeypatch.setattr(Fake, "wrong", 0.1)
    assert cli.main(["bench", "model", "--layout", "nchw"]) == 1
    assert "differ by 0.05" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [["--framework", "abacus"], ["--model", "resnet51"], ["--layout", "nwhc"], ["--batch", "0"],
     ["--dtype", "int8"]],
)  # fmt: skip
def test_mistakes(words, capsys):
    pytest.importorskip("torch")
    assert cli.main(["bench", "model", *words]) == 2
    assert "expected" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_pytorchs_network(training, capsys):
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    words = ["--training"] if training else []
    assert cli.main(["bench", "model", "--model", "mobilenet_v2", "--batch", "1", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(" bedstone " in line for line in lines) >= 2


def test_the_peak_of_memory_is_seen(monkeypatch):
    class Hungry(Fake):
        def step(self):
            with mmap.mmap(-1, 64 << 20) as memory:  # fresh from the kernel, whatever malloc keeps
                memory[:: mmap.PAGESIZE] = bytes(len(memory) // mmap.PAGESIZE)

    monkeypatch.setattr(model, "load", lambda framework: Hungry)
    assert 60 < model._peak_here("any", ["m", 1, "nchw", "float32", False, "cpu"], "native") < 90
