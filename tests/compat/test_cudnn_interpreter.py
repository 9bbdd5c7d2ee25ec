"""The tests of test_cudnn_cuda.py in Triton's interpreter: the setting must be there before Triton
is imported, so they run in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_a_cuda_handle_in_the_interpreter():
    tests = Path(__file__).with_name("test_cudnn_cuda.py")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-o", "addopts=-q", "-p", "no:cacheprovider", str(tests)],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout
