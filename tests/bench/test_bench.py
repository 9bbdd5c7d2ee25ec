"""The benchmark: suites can all be read, peers agree, tables, files and plots come out whole."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import bedstone
from bedstone import cli
from bedstone.bench import driver, peers, report, suites
from bedstone.bench.timing import interleaved
from bedstone.plan.runtime import runtime_of
from bedstone.plan.tune import Trial

CONVOLUTIONS = [
    n for n in suites.names() if n not in ("pool", "softmax", "activation", "transform")
]


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


@pytest.mark.parametrize("suite", ["pool", "softmax", "activation", "transform"])
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
def test_peers_compute_the_same(peer: str, direction: str) -> None:
    if peer == "torch":
        pytest.importorskip("torch")
    problem = bedstone.parse_problem(f"convolution {direction} n2c6h9w8k4r3s2p1u2g2 float32")
    trial = Trial(problem, runtime_of("cpu"))
    arrays = trial.arrays()
    expected = problem.reference({k: v.copy() for k, v in arrays.items()})
    result = peers.PEERS[peer](problem, arrays)()
    name = problem.outputs[0].name
    if peer == "torch":
        pick = {"forward": None, "backward_data": 0, "backward_filter": 1}[direction]
        result = np.asarray(result if pick is None else result[pick])
    else:
        result = arrays[name]
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
    assert last.startswith("im2col: geomean ratio ") and last.endswith("over 3 problems")
    head, rows = report.read_csv(files["csv"])
    assert head["bedstone"] == bedstone.__version__ and len(rows) == 3
    assert {row["direction"] for row in rows} == {"forward", "backward_data", "backward_filter"}
    assert all(float(row["ratio"]) > 0 and row["peer"] == "im2col" for row in rows)
    assert len(json.loads(Path(files["json"]).read_text())["rows"]) == 3
    assert Path(files["png"]).read_bytes().startswith(b"\x89PNG")


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = bedstone.parse_problem("convolution forward n1c2h5k3r2 float32")
    plan = bedstone.Handle().plan(problem, "reference:direct")
    monkeypatch.setattr(plan, "kernel", lambda *_: None)
    with pytest.raises(driver.WrongResult, match="reference:direct gives a wrong y"):
        driver.check(problem, plan, driver.Options())


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
        assert set(driver.Row.__dataclass_fields__) >= set(rows[0])
