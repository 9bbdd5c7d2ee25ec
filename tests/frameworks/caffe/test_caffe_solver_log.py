"""The log's form, line by line, and the progress line that only a terminal sees."""

from __future__ import annotations

import datetime
import io
import os
import re

import pytest

from bedstone.frameworks.caffe import solvers_log
from bedstone.frameworks.caffe.solvers_log import CLEAR, Log, Pace, duration, number

# glog's prefix: level, MMDD, time with microseconds, process, file:line.
PREFIX = re.compile(
    r"(?P<level>[IWEF])(?P<date>\d{4}) (?P<time>\d\d:\d\d:\d\d\.\d{6}) +(?P<process>\d+) "
    r"(?P<file>[\w.]+):(?P<line>\d+)\] (?P<message>.*)"
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_line_is_glog_s():
    stream = io.StringIO()
    moment = datetime.datetime(2026, 1, 2, 3, 4, 5, 678)
    log = Log(stream, clock=lambda: moment)
    log.info("Iteration 100, loss = 0.5")
    log.warning("beware", solvers_log.RATE)
    first, second = stream.getvalue().splitlines()
    found = PREFIX.fullmatch(first)
    assert found["level"] == "I" and found["date"] == "0102"
    assert found["time"] == "03:04:05.000678" and int(found["process"]) == os.getpid()
    assert found["file"] == "solver.cpp" and found["message"] == "Iteration 100, loss = 0.5"
    assert PREFIX.fullmatch(second)["level"] == "W"
    # Scripts that split at blanks find the message's first word in the fifth place.
    assert first.split()[4] == "Iteration"


def test_quiet_leaves_warnings():
    stream = Terminal()
    log = Log(stream, quiet=True)
    log.info("no")
    log.progress("no")
    log.warning("yes")
    assert stream.getvalue().endswith("] yes\n") and "no" not in stream.getvalue()


def test_progress_stays_under_the_log(monkeypatch):
    monkeypatch.setattr(solvers_log, "REDRAW", 0)
    stream = Terminal()
    log = Log(stream)
    log.progress("1/2")
    log.info("message")
    log.end_progress()
    log.end_progress()
    shown = stream.getvalue()
    assert re.fullmatch(
        re.escape(CLEAR) + "1/2" + re.escape(CLEAR) + r"I.* message\n1/2" + re.escape(CLEAR), shown
    )


def test_no_progress_in_a_file():
    stream = io.StringIO()
    Log(stream).progress("1/2")
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.01, "0.01"), (2.302585093, "2.30259"), (1e-7, "1e-07"), (123456789.0, "1.23457e+08"),
     (1.0, "1"), (float("nan"), "nan")],
)  # fmt: skip
def test_numbers_as_cpp_prints_them(value, text):
    assert number(value) == text


def test_duration():
    assert duration(62.4) == "01:02" and duration(3723) == "1:02:03" and duration(-1) == "00:00"


def test_pace_line(monkeypatch):
    now = iter([0.0, 0.5, 1.0, 9.0, 9.5])
    monkeypatch.setattr(solvers_log.time, "monotonic", lambda: next(now))
    pace = Pace()
    pace.tick()
    pace.tick()
    pace.skip()  # eight seconds of testing do not count
    pace.tick()
    assert pace.seconds == pytest.approx(0.5)
    assert pace.line(25, 100, 0.4123, 0.01, 32) == (
        "iteration 25/100 (25%)  loss 0.4123  lr 0.01  64 images/s  00:38 left"
    )
