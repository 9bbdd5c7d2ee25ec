"""Depthwise convolution, channels first: images of few rows, and rows left over by whole blocks."""

from __future__ import annotations

import pytest

import bedstone
from bedstone.testing.harness import Case, run_case


@pytest.mark.parametrize("direction", ["forward", "backward_data"])
@pytest.mark.parametrize("window, stride", [(3, 1), (5, 1), (3, 2)])
@pytest.mark.parametrize("height", [1, 2, 5, 9, 17])
def test_images_of_any_height(height: int, window: int, stride: int, direction: str) -> None:
    line = f"n2c3h{height}w19k3r{window}p{window // 2}u{stride}g3 float32"
    problem = bedstone.parse_problem(f"convolution {direction} {line}")
    for placement in ("start", "end"):
        case = Case(problem, "cpu:direct_depthwise", "random", 1.5, 0.5, placement)
        run_case(case, bedstone.default_handle())
