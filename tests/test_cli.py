"""The command line: what it prints, its exit codes, and that a mistake is one clear line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bedstone import cli


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert "BEDSTONE_NUM_THREADS" in out and "reference" in out


def test_explain_takes_a_shape_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "n1c8h8k8r3p1", "--algorithm", "cpu:implicit_gemm"]) == 0
    out = capsys.readouterr().out
    assert "runs cpu:implicit_gemm: asked for by name" in out
    assert "not reference:direct" in out


@pytest.mark.parametrize(
    "words",
    [
        ["explain", "n1c3h"],
        ["explain", "convolution sideways n1c3h4k3r1 float32"],
        ["explain", "n1c8h8k8r3p1", "--algorithm", "cpu:nothing"],
        ["explain", "n1c8h8k8r3p1", "--device", "tpu"],
        ["explain", ""],
        ["explain", "n1c8h8k8r3p1", "--workspace", "-4"],
        ["bench", "conv", "--suite", "nowhere"],
        ["bench", "conv", "--suite", "/dev/null"],
        ["bench", "conv", "--dtype", "int9", "--limit", "1"],
        ["bench", "conv", "--threads", "0", "--limit", "1"],
        ["bench", "conv", "--directions", "sideways"],
        ["bench", "conv", "--batch", "0"],
        ["bench", "conv", "--workspace", "nan"],
        ["compile"],
        ["compile", "--suite", "nowhere"],
        ["compile", "--suite", "paper", "--directions", "sideways"],
        ["compile", "--suite", "paper", "--architecture", "hopper"],
        ["compile", "--suite", "paper", "--every"],
        ["compile", "--suite", "paper", "--device", "tpu"],
        ["bench", "pool", "--batch", "3"],
        ["bench", "plot", "--csv", "nowhere.csv", "--plot", "x.png"],
        ["bench", "conv", "--peer", "nobody", "--limit", "1"],
        ["bench", "conv", "--plot", "x.png"],
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"bedstone {words[0]}: ")
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    "words", [["--help"], ["bench", "--help"], ["explain", "--help"], ["fuzz", "--help"]]
)
def test_help_shows_examples(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 0
    assert len(capsys.readouterr().out) > 300


def test_compile_fills_the_cache(tmp_path) -> None:
    suite = tmp_path / "suite.txt"
    suite.write_text('n1c8h9k8r3 "small"\nsoftmax forward 5x70 axes=1\n')
    # In processes of their own: this one has kernels that it need not compile.
    environment = {**os.environ, "BEDSTONE_CACHE_DIR": str(tmp_path / "cache")}

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    out = run("-m", "bedstone.cli", "compile", "--suite", str(suite), "--directions", "all")
    compiled = sorted((tmp_path / "cache" / "objects").iterdir())
    assert out.count("  cpu:") == 7 and "7 problems, 0 not compiled" in out[-60:]
    run(
        "-c",
        "import bedstone as b; b.Handle().plan(b.parse_problem('softmax forward 5x70 axes=1'))",
    )
    assert sorted((tmp_path / "cache" / "objects").iterdir()) == compiled


def test_fuzz_repeats_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    problem = "convolution forward n1c2h5k3r2 float32"
    assert cli.main(["fuzz", "--problem", problem, "--algorithm", "cpu:implicit_gemm"]) == 0
    assert "passes" in capsys.readouterr().out


def test_a_closed_pipe_is_no_error() -> None:
    done = subprocess.run(
        f"{sys.executable} -m bedstone.cli info | head -n 1",
        shell=True, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("bedstone ")
    assert "Traceback" not in done.stderr


def test_cache_shows_and_clears(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bedstone import config, convolution_problem
    from bedstone.plan.handle import Handle

    with config(cache_dir=str(tmp_path)):
        Handle().plan(convolution_problem("forward", (1, 2, 5, 5), (3, 2, 2, 2)))
        cli.main(["cache", "show"])
        assert ": 0 files" not in capsys.readouterr().out
        cli.main(["cache", "clear"])
        capsys.readouterr()
        cli.main(["cache"])
        assert ": 0 files" in capsys.readouterr().out
