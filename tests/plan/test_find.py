"""Find measures the candidates; the disk cache remembers, and damage to it is no error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile

import pytest
from plan_fakes import PROBLEM, Fake

from bedstone import Handle, config
from bedstone.plan import cache
from bedstone.plan.device import cpu_device


@pytest.fixture
def folder(tmp_path):
    with config(cache_dir=str(tmp_path)):
        yield tmp_path


def fakes():
    return (
        Fake("a:slow", 1e-6, delay=4e-3),
        Fake("a:quick", 1.0, delay=1e-3),
        Fake("a:big", 1e-6, workspace=1000),
        Fake("a:no", reason="odd"),
    )


def records(folder):
    return sorted((folder / "find").glob("*.json"))


def test_the_quickest_measured_is_taken(use, folder):
    slow, quick, big, _ = use(*fakes())
    handle = Handle("cpu")
    assert handle.plan(PROBLEM).algorithm == "a:slow"  # by its estimate
    found = handle.plan(PROBLEM, find=True)
    assert found.algorithm == "a:quick"
    assert found.choice.why == "the quickest of 2 measured"
    assert big.calls == 0
    rows = handle.find(PROBLEM)
    assert [r.algorithm for r in rows] == ["a:quick", "a:slow", "a:big", "a:no"]
    assert rows[0].seconds < rows[1].seconds and rows[2].seconds is None
    assert rows[2].reason == "needs 1000 bytes of workspace; the limit is 0"


def test_a_larger_limit_brings_in_more(use, folder):
    _, _, big, _ = use(*fakes())
    rows = Handle("cpu").find(PROBLEM, workspace_limit=None)
    assert rows[0].algorithm == "a:big" and rows[0].workspace == 1000
    assert big.last_workspace != 0


def test_a_wrong_result_is_struck_out(use, folder):
    right, wrong = use(Fake("a:right", delay=1e-3), Fake("a:wrong"))
    wrong.wrong = True
    rows = Handle("cpu").find(PROBLEM)
    assert [(r.algorithm, r.reason) for r in rows] == [
        ("a:right", None), ("a:wrong", "its result is wrong here"),
    ]  # fmt: skip
    assert Handle("cpu").plan(PROBLEM, find=True).algorithm == "a:right"


def test_the_record_is_read_back(use, folder):
    slow, quick, *_ = use(*fakes())
    first = Handle("cpu").find(PROBLEM)
    calls = slow.calls
    assert Handle("cpu").find(PROBLEM) == first
    assert slow.calls == calls and len(records(folder)) == 1
    Handle("cpu").find(PROBLEM, fresh=True)
    assert slow.calls > calls


def test_other_candidates_or_limits_are_other_records(use, folder):
    use(*fakes())
    Handle("cpu").find(PROBLEM)
    Handle("cpu").find(PROBLEM, workspace_limit=None)
    use(*fakes()[:2], Fake("b:new"))
    Handle("cpu").find(PROBLEM)
    assert len(records(folder)) == 3


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", "null", '{"key": "another"}', '{"key": KEY, "measurements": 3}',
     '{"key": KEY, "measurements": [[1]]}', '{"key": KEY}', "\x00\xff"],
)  # fmt: skip
def test_a_damaged_record_is_measured_again(use, folder, damage):
    slow, *_ = use(*fakes())
    Handle("cpu").find(PROBLEM)
    (path,) = records(folder)
    key = json.loads(path.read_text())["key"]
    path.write_bytes(damage.replace("KEY", json.dumps(key)).encode("latin1"))
    calls = slow.calls
    assert Handle("cpu").find(PROBLEM)[0].algorithm == "a:quick"
    assert slow.calls > calls
    assert json.loads(path.read_text())["key"] == key  # and it is whole again


def test_without_a_cache_directory(use):
    slow, *_ = use(*fakes())
    with config(cache_dir=""):
        Handle("cpu").find(PROBLEM)
        calls = slow.calls
        Handle("cpu").find(PROBLEM)
    assert slow.calls > calls


def test_a_cache_that_cannot_be_written(use, tmp_path):
    use(*fakes())
    (tmp_path / "file").write_text("in the way")
    with config(cache_dir=str(tmp_path / "file")):
        assert Handle("cpu").find(PROBLEM)[0].algorithm == "a:quick"


def test_a_read_only_cache(use, folder, monkeypatch):
    slow, *_ = use(*fakes())
    first = Handle("cpu").find(PROBLEM)

    def refuse(*arguments, **named):
        raise PermissionError("read-only")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    assert Handle("cpu").find(PROBLEM) == first
    assert Handle("cpu").find(PROBLEM, workspace_limit=7)[0].algorithm == "a:quick"
    assert len(records(folder)) == 1


PROGRAM = """
import bedstone
problem = bedstone.parse_problem("activation forward 2x3 float32 kind=tanh")
plan = bedstone.Handle("cpu").plan(problem, find=True)
print(plan.algorithm, plan.choice.why)
"""


def test_a_second_process_reads_the_first_ones_record(tmp_path):
    environment = {**os.environ, "BEDSTONE_CACHE_DIR": str(tmp_path)}

    def run():
        command = [sys.executable, "-c", PROGRAM]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)

    first = run().stdout
    (path,) = records(tmp_path)
    record = json.loads(path.read_text())
    # Other times, so that what comes back can only have been read.
    names = [row[0] for row in record["measurements"] if row[1] is not None]
    record["measurements"] = [[n, float(i + 1), 0, None] for i, n in enumerate(reversed(names))]
    path.write_text(json.dumps(record))
    second = run().stdout
    assert second.startswith(names[-1]) and f"the quickest of {len(names)} measured" in second
    assert first.split()[0] in names


def test_keys_name_problem_device_and_versions():
    key = cache.key(PROBLEM, cpu_device(), "more")
    for words in (str(PROBLEM), cpu_device().fingerprint, "bedstone ", "numpy ", "more"):
        assert words in key


def test_a_record_is_never_half_written(folder, monkeypatch):
    cache.write("find", "key", {"n": 1})

    def fail(*arguments, **named):
        raise OSError("disk full")

    monkeypatch.setattr(json, "dump", fail)
    cache.write("find", "key", {"n": 2})
    assert cache.read("find", "key")["n"] == 1
    assert not list((folder / "find").glob("*.tmp"))
