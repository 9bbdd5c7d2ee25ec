"""The programs of examples/cudnn run, and compute the right thing."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np

import bedstone

EXAMPLES = Path(__file__).parents[2] / "examples" / "cudnn"


def test_a_network_trained_through_a_wrapper_module():
    run = runpy.run_path(str(EXAMPLES / "wrapper_style.py"))
    assert run["main"]() > 0.95  # of four classes


def test_a_program_that_loads_the_library_itself():
    y, x, w = runpy.run_path(str(EXAMPLES / "bare_library.py"))["main"]()
    wanted = bedstone.convolution(x, w, padding=2, stride=2, groups=2)
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4)
