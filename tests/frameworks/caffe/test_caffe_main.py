"""The command `bedstone caffe`: what it prints and writes, and how it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("google.protobuf")
pytest.importorskip("lmdb")
h5py = pytest.importorskip("h5py")

from bedstone import cli  # noqa: E402
from bedstone.frameworks.caffe import drawing, schema, timing  # noqa: E402
from bedstone.frameworks.caffe.lmdb_data import LmdbReader, write_lmdb  # noqa: E402

ROOT = Path(__file__).parents[3]
CAFFE_EXAMPLES = ROOT / "examples" / "caffe"

NET = """
name: "small"
layer {
  name: "data" type: "Data" top: "data" top: "label"
  transform_param { mirror: true crop_size: 8 scale: 0.0078125 mean_value: 128 }
  data_param { source: "some_lmdb" batch_size: 8 backend: LMDB rand_skip: 9 }
}
layer {
  name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } }
}
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "drop" type: "Dropout" bottom: "conv" top: "conv" }
layer {
  name: "ip" type: "InnerProduct" bottom: "conv" top: "ip"
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } }
}
layer {
  name: "accuracy" type: "Accuracy" bottom: "ip" bottom: "label" top: "accuracy"
  include { phase: TEST }
}
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
SOLVER = """
net: "net.prototxt" base_lr: 0.01 momentum: 0.9 lr_policy: "fixed" weight_decay: 0.001
display: 20 max_iter: %(last)d snapshot: 20 snapshot_prefix: "out" random_seed: 5
test_iter: 2 test_interval: 50
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a data set, a network and a solver, made the current one."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (30, 3, 10, 10), dtype=np.uint8)
    write_lmdb(tmp_path / "some_lmdb", images, rng.integers(0, 3, 30))
    (tmp_path / "net.prototxt").write_text(NET)
    (tmp_path / "solver.prototxt").write_text(SOLVER % {"last": 40})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(folder, *words):
    """`bedstone caffe ...` in a process of its own, its log in a file."""
    command = [sys.executable, "-m", "bedstone.cli", "caffe", *words]
    with (folder / "log").open("w") as log:
        return subprocess.Popen(command, cwd=folder, stderr=log, stdout=log)


def wait_for(process, path, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, "it ended before it was to be killed"
        assert time.monotonic() < deadline, f"no {path.name} after {seconds} s"
        time.sleep(0.002)


def test_train_then_test(here, capfd):
    assert cli.main(["caffe", "train", "--solver", "solver.prototxt"]) == 0
    log = capfd.readouterr().err
    assert "Solving small" in log and "] Iteration 20 (" in log and "Optimization Done." in log
    assert sorted(p.name for p in here.glob("out*")) == [
        f"out_iter_{i}.{kind}" for i in (20, 40) for kind in ("caffemodel", "solverstate")
    ]
    words = ["--model", "net.prototxt", "--weights", "out_iter_40.caffemodel"]
    assert cli.main(["caffe", "test", *words, "--iterations", "3"]) == 0
    log = capfd.readouterr().err
    assert "Running for 3 iterations." in log and "] Loss: " in log
    assert "] accuracy = 0." in log and "(* 1 = " in log


def test_killed_training_goes_on_to_the_same_weights(here):
    """SIGKILL somewhere after a snapshot; with dropout, random crops, mirrors and prefetching."""
    (here / "solver.prototxt").write_text(SOLVER % {"last": 400})
    assert start(here, "train", "--solver", "solver.prototxt").wait(120) == 0
    expected = (here / "out_iter_400.caffemodel").read_bytes()
    for path in here.glob("out*"):
        path.unlink()

    process = start(here, "train", "--solver", "solver.prototxt")
    wait_for(process, here / "out_iter_60.solverstate")
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    assert not (here / "out_iter_400.solverstate").exists()
    states = sorted(here.glob("out*.solverstate"), key=lambda p: int(p.stem.split("_")[-1]))
    words = ["train", "--solver", "solver.prototxt", "--snapshot", states[-1].name]
    assert start(here, *words).wait(120) == 0
    assert (here / "out_iter_400.caffemodel").read_bytes() == expected


def test_sigint_snapshots_and_stops_sighup_snapshots(here):
    (here / "solver.prototxt").write_text(SOLVER.replace("display: 20", "") % {"last": 1000000})
    process = start(here, "train", "--solver", "solver.prototxt")
    wait_for(process, here / "out_iter_20.solverstate")
    process.send_signal(signal.SIGHUP)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    log = (here / "log").read_text()
    assert "Optimization stopped early." in log
    names = [int(p.stem.split("_")[-1]) for p in here.glob("out*.solverstate")]
    assert max(names) < 1000000
    assert len([n for n in names if n % 20]) >= 1, "no snapshot besides the regular ones"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [(["train", "--solver", "none.prototxt"], "none.prototxt"),
     (["train", "--solver", "solver.prototxt", "--snapshot", "none"], "none"),
     (["train", "--solver", "solver.prototxt", "--weights", "none.caffemodel"], "none.caffemodel"),
     (["train", "--solver", "net.prototxt"], "net.prototxt"),
     (["test", "--model", "none.prototxt", "--weights", "w"], "none.prototxt"),
     (["test", "--model", "net.prototxt", "--weights", "w.caffemodel"], "w.caffemodel"),
     (["time", "--model", "net.prototxt", "--iterations", "0"], "iterations"),
     (["time", "--model", "net.prototxt", "--batch", "-1"], "batch"),
     (["time", "--model", "net.prototxt", "--json", "no/where.json"], "no/where.json"),
     (["draw", "--model", "none.prototxt", "--output", "a.png"], "none.prototxt"),
     (["draw", "--model", "net.prototxt", "--output", "a.xyz"], "a.xyz")],
)  # fmt: skip
def test_mistakes_are_one_line_and_code_2(here, capfd, words, complaint):
    assert cli.main(["caffe", *words]) == 2
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("bedstone caffe: ") and complaint in last


@pytest.mark.parametrize(
    "words",
    [["train"], ["train", "--solver", "a", "--weights", "b", "--snapshot", "c"], [],
     ["time", "--model", "m", "--engine", "cudnn"], ["fly"]],
)  # fmt: skip
def test_bad_options(here, capfd, words):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["caffe", *words])
    assert stopped.value.code == 2
    assert "bedstone caffe" in capfd.readouterr().err


def test_time_prints_the_table_and_writes_it(here, capfd):
    pytest.importorskip("matplotlib")
    words = ["time", "--model", "net.prototxt", "--engine", "both", "--iterations", "2",
             "--batch", "4", "--json", "t.json", "--plot", "t.png"]  # fmt: skip
    assert cli.main(["caffe", *words]) == 0
    out = capfd.readouterr().out
    for word in ("conv", "Convolution", "forward", "backward", "testing", "update", "overall",
                 "convolutions forward", "peak MiB", "ratio", "paper",
                 "1.45", "1.30", "1.49", "1.36"):  # fmt: skip
        assert word in out
    content = json.loads((here / "t.json").read_text())
    assert content["batch"] == content["test_batch"] == 4 and content["iterations"] == 2
    assert set(content["sides"]) == {"caffe", "bedstone"}
    for side in content["sides"].values():
        passes = side["passes"]
        assert passes["overall"] == pytest.approx(sum(passes[name] for name in timing.PASSES))
        assert set(side["forward"]) == set(side["backward"]) == {
            "data", "conv", "relu", "drop", "ip", "loss",
        }  # fmt: skip
        assert 10 < side["peak_memory_mib"] < 10000
    assert content["ratios"]["forward"] == pytest.approx(
        content["sides"]["caffe"]["passes"]["forward"]
        / content["sides"]["bedstone"]["passes"]["forward"]
    )
    for direction, times in content["convolutions"].items():
        assert times["caffe"] == content["sides"]["caffe"][direction]["conv"]
        assert times["ratio"] == times["caffe"] / times["bedstone"]
    assert (here / "t.png").read_bytes()[:4] == b"\x89PNG"


def test_the_convolutions_stand_alone_and_only_where_there_are_any():
    sides = {
        name: timing.Side(
            name, forward={"c": a, "p": 9.0, "d": a}, backward={"c": b, "p": 9.0, "d": 1}
        )
        for name, a, b in (("caffe", 6.0, 5.0), ("bedstone", 2.0, 1.0))
    }
    layers = [("c", "Convolution"), ("p", "Pooling"), ("d", "Deconvolution")]
    measured = timing.Timing("net", 1, 1, 1, {}, layers, sides)
    assert measured.convolutions() == {
        "forward": {"caffe": 12.0, "bedstone": 4.0},
        "backward": {"caffe": 6.0, "bedstone": 2.0},
    }
    assert timing.Timing("net", 1, 1, 1, {}, layers[1:2], sides).convolutions() == {}


def test_the_paper_s_table():
    ratios = {name: round(a / b, 2) for name, (a, b) in timing.PAPER.items()}
    assert ratios == {"forward": 1.45, "backward": 1.3, "testing": 1.49, "update": 1.0,
                      "overall": 1.36}  # fmt: skip
    for side in (0, 1):
        parts = sum(timing.PAPER[name][side] for name in timing.PASSES)
        assert parts == pytest.approx(timing.PAPER["overall"][side], rel=1e-4)


@pytest.mark.parametrize("output", ["f.h5", "f.npz"])
def test_extract(here, output, capfd):
    cli.main(["caffe", "train", "--solver", "solver.prototxt"])
    words = ["extract", "--model", "net.prototxt", "--weights", "out_iter_40.caffemodel",
             "--blobs", "ip,label", "--iterations", "3", "--output", output]  # fmt: skip
    assert cli.main(["caffe", *words]) == 0
    assert "ip 24x3" in capfd.readouterr().out
    content = h5py.File(output) if output.endswith("h5") else np.load(output)
    assert content["ip"].shape == (24, 3) and content["label"].shape == (24,)
    assert np.ptp(content["ip"][:], axis=0).min() > 0


def test_extract_to_lmdb(here):
    cli.main(["caffe", "train", "--solver", "solver.prototxt"])
    words = ["extract", "--model", "net.prototxt", "--weights", "out_iter_40.caffemodel",
             "--iterations", "2"]  # fmt: skip
    assert cli.main(["caffe", *words, "--blobs", "ip", "--output", "f_lmdb"]) == 0
    reader = LmdbReader("f_lmdb")
    assert reader.count == 16 and reader.datum(15)[0].shape == (3, 1, 1)
    refused = (("ip", "f_lmdb"), ("ip,label", "g_lmdb"), ("ip", "g.txt"), ("no", "g.h5"))
    for blobs, output in refused:
        assert cli.main(["caffe", *words, "--blobs", blobs, "--output", output]) == 2


def test_draw(here):
    pytest.importorskip("matplotlib")
    assert cli.main(["caffe", "draw", "--model", "net.prototxt", "--output", "n.png"]) == 0
    assert (here / "n.png").read_bytes()[:4] == b"\x89PNG"
    words = ["--phase", "TRAIN", "--rankdir", "LR", "--output", "n.dot"]
    assert cli.main(["caffe", "draw", "--model", "net.prototxt", *words]) == 0
    text = (here / "n.dot").read_text()
    assert text.startswith('digraph "small" {\n  rankdir=LR;') and '[label="conv"]' in text
    assert "relu (ReLU)" in text and "accuracy" not in text


def test_boxes_follow_the_blobs():
    from google.protobuf import text_format

    param = text_format.Parse(NET, schema.NetParameter())
    boxes = drawing.boxes_of(param.layer)
    assert [box.lines[0] for box in boxes] == ["data", "conv", "ip", "accuracy", "loss"]
    assert boxes[1].lines[2:] == ["relu (ReLU)", "drop (Dropout)"]
    assert boxes[4].inputs == [(2, "ip"), (0, "label")]
    spots = drawing.places(boxes)
    assert [spots[i][1] for i in range(5)] == [0, 1, 2, 3, 3]
    assert len(set(spots.values())) == 5


@pytest.mark.slow
def test_lenet_learns_digits(tmp_path):
    """The example from the documentation: at least 98% of the test digits."""
    pytest.importorskip("sklearn")
    import shutil

    shutil.copytree(CAFFE_EXAMPLES / "lenet_digits", tmp_path / "examples/caffe/lenet_digits")
    script = "examples/caffe/lenet_digits/make_data.py"
    subprocess.run([sys.executable, script], cwd=tmp_path, check=True)
    words = ["train", "--solver", "examples/caffe/lenet_digits/solver.prototxt"]
    assert start(tmp_path, *words).wait(300) == 0
    log = (tmp_path / "log").read_text()
    scores = [float(line.split()[-1]) for line in log.splitlines() if "accuracy = " in line]
    assert scores[0] < 0.5 and scores[-1] >= 0.98
    assert os.path.exists(tmp_path / "examples/caffe/lenet_digits/lenet_iter_450.caffemodel")
