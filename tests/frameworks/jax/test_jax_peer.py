"""The peers `jax` and `jax-on-bedstone` of the benchmark compute what bedstone's plans compute."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax")

import bedstone
import bedstone.frameworks.jax as bj
from bedstone.bench import jax_peer
from bedstone.bench.operands import Operands
from bedstone.bench.peers import PEERS, Declined
from bedstone.plan.runtime import runtime_of

CORES = jax_peer.cores()


def arrays_of(problem):
    return Operands(problem, runtime_of("cpu")).arrays()


@pytest.mark.parametrize("direction", ["forward", "backward_data", "backward_filter"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("shape", ["n2c4h9w8k6r3s2p1u2g2", "n2c3h9w8k5r3l2"])
def test_both_peers_agree_with_a_plan(shape, layout, direction):
    problem = bedstone.parse_problem(f"convolution {direction} {shape} float32 layout={layout}")
    arrays = arrays_of(problem)
    operands = [arrays[operand.name] for operand in problem.operands]
    bedstone.Handle().plan(problem).execute(*operands)
    output = problem.outputs[0].name
    wanted = jax_peer.ordered(problem, output, arrays[output])
    with bedstone.config(num_threads=CORES):
        native, ours = (PEERS[p](problem, arrays, "cpu") for p in ("jax", "jax-on-bedstone"))
    for side in (native, ours):
        np.testing.assert_allclose(np.asarray(side.call()), wanted, rtol=1e-4, atol=1e-4)


def test_what_declines():
    line = "convolution forward n1c2h5k2r3 {}"
    with bedstone.config(num_threads=CORES):
        for text, device, reason in (
            (line.format("float64"), "cpu", "float32"),
            (line.format("float32 mode=convolution"), "cpu", "flipped"),
            (line.format("float32"), "cuda", "on the CPU"),
            ("pooling forward n1c2h4r2 float32 mode=max", "cpu", "convolutions"),
        ):
            problem = bedstone.parse_problem(text)
            with pytest.raises(Declined, match=reason):
                PEERS["jax"](problem, arrays_of(problem), device)
    problem = bedstone.parse_problem(line.format("float32"))
    with bedstone.config(num_threads=CORES + 1), pytest.raises(Declined, match="all cores"):
        PEERS["jax"](problem, arrays_of(problem), "cpu")


def test_one_side_calls_bedstones_kernels(monkeypatch):
    problem = bedstone.parse_problem("convolution forward n1c2h5k2r3 float32")
    called = []
    own = bj.convolution
    monkeypatch.setattr(bj, "convolution", lambda *a, **k: called.append(1) or own(*a, **k))
    with bedstone.config(num_threads=CORES):
        PEERS["jax"](problem, arrays_of(problem), "cpu").call()
        assert not called
        PEERS["jax-on-bedstone"](problem, arrays_of(problem), "cpu").call()
    assert called
