"""The benchmark's calls through PaddlePaddle compute the problem that they are timed on."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

pytest.importorskip("paddle", reason="PaddlePaddle is not installed")

import bedstone
import bedstone.frameworks.paddle as on_bedstone
from bedstone.bench.operands import Operands
from bedstone.bench.peers import PEERS, Declined
from bedstone.plan.runtime import runtime_of

SHAPE = "n2c8h20w18k6r3s2p1u2 float32"


def operands(line):
    problem = bedstone.parse_problem(line)
    return problem, Operands(problem, runtime_of("cpu")).arrays()


@pytest.mark.parametrize("peer", ["paddle", "paddle-on-bedstone"])
@pytest.mark.parametrize("direction", ["forward", "backward_data", "backward_filter"])
def test_the_peer_computes_the_problem(direction, peer):
    problem, arrays = operands(f"convolution {direction} {SHAPE}")
    (expected,) = problem.reference(arrays).values()
    ours = peer == "paddle-on-bedstone"
    # (Around the call too: without it a trial decides which side is the quicker one here.)
    with on_bedstone.enable(always=True) if ours else contextlib.nullcontext():
        call = PEERS[peer](problem, arrays, "cpu").call
        on_bedstone.reset()
        np.testing.assert_allclose(call().numpy(), expected, rtol=1e-4, atol=1e-4)
    own = on_bedstone.report().own("conv2d", direction)
    assert own == (1 if ours else 0)


@pytest.mark.parametrize(
    "line, reason",
    [
        (f"convolution forward {SHAPE} layout=NHWC", "row-major"),
        (f"convolution forward {SHAPE} mode=convolution", "flipped"),
        ("convolution forward n1c2h8k2r3 float16", "float32 and float64"),
        ("convolution forward n1c2d8h8w8k2t3r3s3 float32", "two dimensions"),
        ("softmax forward 4x5 float32", "two dimensions"),
    ],
)
def test_the_peer_declines_with_a_reason(line, reason):
    problem, arrays = operands(line)
    with pytest.raises(Declined, match=reason):
        PEERS["paddle"](problem, arrays, "cpu")
