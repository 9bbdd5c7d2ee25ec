"""The benchmark: suites can all be read, peers agree, tables, files and plots come out whole."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import bedstone
from bedstone import cli
from bedstone.bench import check, driver, machine, model, paddle_calls, peers, plot, report, suites
from bedstone.bench.operands import Operands
from bedstone.bench.timing import interleaved
from bedstone.plan.runtime import runtime_of

OTHERS = ("pool", "softmax", "activation", "transform", "bandwidth", "kernels")
CONVOLUTIONS = [n for n in suites.names() if n not in OTHERS]


@pytest.mark.parametrize("suite", suites.names())
def test_suite_names_its_source(suite: str) -> None:
    first = (suites.FOLDER / f"{suite}.txt").read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ") and len(first) > 20


@pytest.mark.parametrize("suite", CONVOLUTIONS)
def test_convolution_suites_describe_problems(suite: str) -> None:
    entries = suites.read(suite)
    found = list(suites.convolutions(entries, ["forward"], "float32", ["nchw", "nhwc"], 1))
    assert len(found) == 2 * len(entries) > 0
    assert all(problem.x.dims[0] == 1 for _, problem in found)


@pytest.mark.parametrize("suite", OTHERS)
def test_other_suites_describe_problems(suite: str) -> None:
    assert list(suites.others(suites.read(suite), "float32"))


def test_paper_suite_is_the_papers_table() -> None:
    ((_, second),) = list(
        suites.convolutions(suites.read("paper")[1:2], ["forward"], "float32", ["nchw"], None)
    )
    assert (second.x.dims, second.w.dims) == ((128, 96, 64, 64), (128, 96, 9, 9))
    assert second.flops == pytest.approx(799.1e9, rel=1e-3)


@pytest.mark.parametrize("direction", ["forward", "backward_data", "backward_filter"])
@pytest.mark.parametrize("peer", ["torch", "im2col"])
@pytest.mark.parametrize(
    "shape", ["n2c6h9w8k4r3s2p1u2g2", "n2c4h5k6r1", "n3c4h6k2r2", "n1c2h4k3r1p1"]
)
def test_peers_compute_the_same(peer: str, direction: str, shape: str) -> None:
    if peer == "torch":
        pytest.importorskip("torch")
    problem = bedstone.parse_problem(f"convolution {direction} {shape} float32")
    arrays = Operands(problem, runtime_of("cpu")).arrays()
    expected = problem.reference({k: v.copy() for k, v in arrays.items()})
    result = peers.PEERS[peer](problem, arrays, "cpu").call()
    name = problem.outputs[0].name
    result = arrays[name] if peer == "im2col" else np.asarray(result)
    np.testing.assert_allclose(result, expected[name], rtol=1e-4, atol=1e-4)


def test_rows_files_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    mine = tmp_path / "mine.txt"
    mine.write_text('# my own\nn2c4h8k4r3p1 "mine:1"\n')
    files = {kind: str(tmp_path / f"out.{kind}") for kind in ("csv", "json", "png")}
    words = ["bench", "conv", "--suite", str(mine), "--peer", "im2col", "--directions", "all",
             "--layout", "nchw", "--csv", files["csv"], "--json", files["json"],
             "--plot", files["png"]]  # fmt: skip
    assert cli.main(words) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("geomean ratio ") and last.endswith("over 3 problems, against im2col")
    head, rows = report.read_csv(files["csv"])
    assert head["bedstone"] == bedstone.__version__ and len(rows) == 3
    assert {row["direction"] for row in rows} == {"forward", "backward_data", "backward_filter"}
    assert all(float(row["ratio"]) > 0 and row["peer"] == "im2col" for row in rows)
    assert len(json.loads(Path(files["json"]).read_text())["rows"]) == 3
    for kind in ("auto", "ratio", "roofline"):
        plot.draw(files["csv"], files["png"], kind)
        assert Path(files["png"]).read_bytes().startswith(b"\x89PNG")
        Path(files["png"]).unlink()
    with pytest.raises(bedstone.InvalidDescriptor, match="LAYER@BATCH"):
        plot.draw(files["csv"], files["png"], "batch")


def test_a_prepared_filter_is_packed_before_the_calls(capsys: pytest.CaptureFixture[str]) -> None:
    problem = bedstone.parse_problem("convolution forward n1c32h8k16r3p1 float32")
    plan, operands = bedstone.Handle().plan(problem), Operands(problem, runtime_of("cpu"))
    operands.arrays()["y"][:] = np.nan
    driver.side_of(plan, [operands], 0, prepared=True).call()
    arrays = operands.arrays()
    want = bedstone.convolution(arrays["x"], arrays["w"], padding=1)
    np.testing.assert_array_equal(arrays["y"], want)
    words = ["bench", "conv", "--suite", "resnet50", "--limit", "1", "--batch", "1", "--prepared"]
    assert cli.main([*words, "--directions", "backward_filter"]) != 0
    assert "one with the filter 'w' among its inputs" in capsys.readouterr().err


def test_batches_are_drawn_and_summed_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    mine, table, picture = (tmp_path / name for name in ("mine.txt", "out.csv", "out.png"))
    mine.write_text('n1c4h8k4r3p1 "mine@1"\nn2c4h8k4r3p1 "mine@2"\n')
    words = ["bench", "conv", "--suite", str(mine), "--csv", str(table), "--plot", str(picture)]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert re.search(r"mean rate by batch, of batch 2's \d+ GFLOP/s: 1: \d+%, 2: 100%", out)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "line",
    [
        "convolution forward n5c4h6k6r3p1 float32 layout=NHWC",
        "convolution backward_data n3c6h6k4r3p1 float32",
        "convolution backward_filter n5c4h8k6r3p1 float32",
        "convolution forward n6c8h8k8r3p1g8 float32",
        "pooling forward n7c4h12r3p1u2 float32 mode=max",
        "softmax backward 64x40 float32 axes=1",
        "softmax forward 64x40 float32 axes=0",
    ],
)
def test_a_wrong_last_element_is_seen_before_timing(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = bedstone.parse_problem(line)
    monkeypatch.setattr(check, "CHECKED_FLOPS", 2e3)
    assert check.part_of(problem).flops < problem.flops or "axes=0" in line
    plan = bedstone.Handle().plan(problem, "reference:direct")
    assert check.check(problem, plan) < 1e-6
    right, desc = plan.kernel, problem.outputs[0].desc

    def wrong(pointers: Sequence[int], *rest: object) -> None:
        right(pointers, *rest)
        last = pointers[-1] + 4 * desc.offset_range()[1]
        ctypes.c_float.from_address(last).value += 1.0

    monkeypatch.setattr(plan, "kernel", wrong)
    with pytest.raises(check.WrongResult, match="reference:direct gives a wrong"):
        check.check(problem, plan)


def test_load_of_others_is_seen() -> None:
    load = machine.OtherLoad()
    if load.share() is None:
        pytest.skip("the system does not tell")
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(1.0)
        share = load.share()  # (a child that has been waited for is no other process)
    finally:
        busy.kill()
        busy.wait()
    assert share is not None and share > 0.3 / (os.cpu_count() or 1)


def test_children_that_were_waited_for_are_no_others() -> None:
    before = machine.OtherLoad._now()
    spin = "import time\nwhile time.process_time() < 1: pass"
    subprocess.run([sys.executable, "-c", spin], check=True)
    after = machine.OtherLoad._now()
    if before is None or after is None:
        pytest.skip("the system does not tell")
    assert after[2] - before[2] >= 0.9  # of the second that the child took


def test_interleaved_takes_turns() -> None:
    order: list[str] = []
    interleaved([lambda: order.append("a"), lambda: order.append("b")], 2, 0.0)
    text = "".join(order)
    assert text.count("a") == text.count("b") and "ba" in text


def test_broken_suite_line_names_file_and_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_text('# x\nn1c2h3k4r1 "unfinished\n')
    with pytest.raises(bedstone.InvalidDescriptor, match="bad.txt:2"):
        suites.read(str(bad))


def test_committed_results_can_be_read() -> None:
    for path in (Path(__file__).parents[2] / "bench" / "results").glob("cpu-*.csv"):
        head, rows = report.read_csv(str(path))
        assert head["commit"] and rows
        kinds = (model.ModelRow, paddle_calls.Row, driver.Row)
        assert any(set(kind.__dataclass_fields__) >= set(rows[0]) for kind in kinds), path
