"""A training log in glog's form, which tools that parse Caffe's logs read, and a progress line.

A log line is `I1202 20:00:00.000000 1234 solver.cpp:239] Iteration 100, lr = 0.01`: level, month
and day, time, process, source, message. The sources are the ones that Caffe's messages carry,
because some parsers look for them. On a terminal one more line, always the last, says where the
training stands; it is rewritten in place and never reaches a file.
"""

from __future__ import annotations

import datetime
import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

SOLVER = "solver.cpp:239"
TEST = "solver.cpp:404"
RATE = "sgd_solver.cpp:106"
SNAPSHOT = "sgd_solver.cpp:273"
NET = "net.cpp:255"
TOOL = "caffe.cpp:251"
# Seconds between two drawings of the progress line: ten a second look alive and cost nothing.
REDRAW = 0.1
CLEAR = "\r\x1b[K"


class Log:
    """Log lines to a stream (standard error at the time of writing, as glog), and a progress line.

    `quiet` drops what is below a warning. `clock` gives the time of a line (for tests).
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        quiet: bool = False,
        clock: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        self._stream, self.quiet, self._clock = stream, quiet, clock
        self._shown = ""
        self._drawn = 0.0

    @property
    def stream(self) -> TextIO:
        return self._stream or sys.stderr

    def info(self, message: str, source: str = SOLVER) -> None:
        if not self.quiet:
            self._write("I", message, source)

    def warning(self, message: str, source: str = SOLVER) -> None:
        self._write("W", message, source)

    def _write(self, level: str, message: str, source: str) -> None:
        stamp = self._clock().strftime("%m%d %H:%M:%S.%f")
        head = f"{level}{stamp} {os.getpid():5d} {source}] "
        clear = CLEAR if self._shown else ""
        self.stream.write(f"{clear}{head}{message}\n{self._shown}")
        self.stream.flush()

    def progress(self, text: str) -> None:
        """Show this line under the log; nothing happens where the stream is no terminal."""
        now = time.monotonic()
        if self.quiet or now - self._drawn < REDRAW or not self.stream.isatty():
            return
        self._drawn = now
        self._shown = text[: shutil.get_terminal_size().columns - 1]
        self.stream.write(CLEAR + self._shown)
        self.stream.flush()

    def end_progress(self) -> None:
        """Take the progress line away."""
        if self._shown:
            self.stream.write(CLEAR)
            self.stream.flush()
            self._shown = ""


def number(value: float) -> str:
    """As C++ streams print a float: six significant digits, no trailing zeros."""
    return f"{value:.6g}"


def duration(seconds: float) -> str:
    """1:02:03, or 02:03 under an hour."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


class Pace:
    """Iterations a second, smoothed over the last ones, and what follows from it."""

    # The weight of the newest iteration: a change of pace shows after about ten.
    NEWEST = 0.1

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last = time.monotonic()

    def tick(self) -> None:
        now = time.monotonic()
        took, self._last = now - self._last, now
        newest = self.NEWEST if self.seconds else 1.0
        self.seconds += newest * (took - self.seconds)

    def skip(self) -> None:
        """What went by since the last tick was no training (a test, a snapshot)."""
        self._last = time.monotonic()

    def line(self, iteration: int, last: int, loss: float, rate: float, images: int) -> str:
        """`iteration 120/1000 12% loss 0.41 lr 0.01 1234 images/s 02:03 left`."""
        left = (last - iteration) * self.seconds
        per_second = images / self.seconds if self.seconds else 0.0
        share = iteration / last if last else 1.0
        return (
            f"iteration {iteration}/{last} ({share:.0%})  loss {loss:.4g}  lr {rate:.4g}  "
            f"{per_second:,.0f} images/s  {duration(left)} left"
        )
