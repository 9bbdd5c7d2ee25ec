"""backward_filter of cpu:implicit_gemm by rows: both ways along which vectors run, every cut."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from bedstone.backends.cpu.convolution import (
    implicit_gemm,
    row_gradient,
    row_gradient_blocking,
)
from bedstone.backends.cpu.convolution.filter_gradient import FilterGradient
from bedstone.backends.cpu.convolution.row_gradient import RowGradient
from bedstone.backends.cpu.target import MIB, Target
from bedstone.plan.config import config
from bedstone.plan.handle import Handle
from bedstone.spec.problem import parse_problem
from bedstone.testing.harness import Case, run_case

ALGORITHM = "cpu:implicit_gemm"
TRIED = (
    "n2c3h13w11k21r3p1",
    "n2c1h10w33k9r3s5u2",
    "n1c5h9w12k40r3s2ph2_1pw0_3lh2",  # different by axis
    "n1c6h11w10k17r3p2l2",  # gaps between the taps
    "n3c20h7w7k33r1",  # all pixels one row
    "n3c37h8w6k70r1u2",  # every second pixel, images in one chunk
    "n2c20h9w9k30r1p2u2",  # padding and gaps around a single tap
    "n5c16h7w7k24r3p1",  # whole vectors; several images in a chunk
    "n2c4w300k12s9p4",  # one axis, cut into pieces
    "n1c3h60w28k8r7p3u2",  # several bands of rows
    "n2c24h11w13k36r3s2p1g3",  # groups
    "n3c9h20w18k50r4s1ph3",  # rows follow one another
    "n1c3h40w4k8r2p9u3",  # chunks of padding
)


def run(problem, beta=0.0, threads=2):
    case = Case(problem, ALGORITHM, "integers", 2.0, beta, "end", threads=threads)
    assert run_case(case, Handle("cpu")) == ALGORITHM


def cuts(problem, target):
    """(view, cut): either direction of vectors, with one slice of all blocks and with the most."""
    view = row_gradient_blocking.view(problem)
    lanes = target.vector_bytes // problem.x.dtype.accumulator.itemsize
    item = problem.x.dtype.accumulator.itemsize
    for by_channels in (True, False):
        found = list(row_gradient_blocking._candidates(view, by_channels, lanes, item, target))
        fewest = [plan for plan in found if plan.slices == 1]
        for plan in {fewest[0], max(found, key=lambda p: p.slices)}:
            yield view, plan


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", TRIED)
def test_every_cut(monkeypatch, shape, dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    monkeypatch.setattr(implicit_gemm, "kernel_of", lambda problem, target: (RowGradient, 1.0))
    last = "NWC" if "h" not in shape else "NHWC"
    first = last[0] + "C" + last[1:-1]
    beta = 0.0
    orders = [(last, last, last), (last, first, first), (first, last, last)]
    for x, w, y in orders if dtype == "float32" else orders[:1]:
        layouts = f"x={x} w={w} y={y}"
        problem = parse_problem(f"convolution backward_filter {shape} {dtype} {layouts}")
        for cut in cuts(problem, Target.current()):
            monkeypatch.setattr(row_gradient, "blocking_of", lambda p, target, cut=cut: cut)
            run(problem, beta)
            beta = -1.0 - beta


@pytest.mark.parametrize("name", ["native", "haswell", "x86-64"])
@pytest.mark.parametrize("shape", TRIED)
def test_every_instruction_set(monkeypatch, name, shape):
    native = Target.named("native")
    if name != "native" and not native.triple.startswith("x86_64"):
        pytest.skip("not an x86-64 machine")
    if Target.named(name).vector_bytes > native.vector_bytes:
        pytest.skip("the machine is narrower")
    monkeypatch.setattr(implicit_gemm, "kernel_of", lambda problem, target: (RowGradient, 1.0))
    layout = "NWC" if "h" not in shape else "NHWC"
    with config(cpu_target=name):
        line = f"convolution backward_filter {shape} float32 x={layout} mode=convolution"
        run(parse_problem(line), beta=1.0)


@pytest.mark.parametrize(
    "line",
    [
        "n2c8h9k16r3p1 x=HWCN",
        "n2c8h9k16r3p1 x=NHWC y=HWCN",
        "n1c8d4h4w4k16t3r3s3p1 x=NDHWC y=NDHWC",
    ],
)
def test_what_lies_otherwise_goes_elsewhere(line):
    problem = parse_problem(f"convolution backward_filter {line} float32")
    assert row_gradient_blocking.view(problem) is None
    assert implicit_gemm.kernel_of(problem, Target.named("haswell"))[0] is FilterGradient


@pytest.mark.parametrize(
    "shape",
    [
        "n16c3h224k64r7p3u2",
        "n16c256h56k64r1",
        "n16c512h7k512r3p1",
        "n16c256h14k256r3p1",
        "n16c2048h7k512r1",
        "n4c1024h16k1024r5",
        "n2c16h32k16r9",
        "n2c1h64k8r33",
    ],
)
@pytest.mark.parametrize("name", ["haswell", "x86-64", "x86-64-v4", "neoverse-n1"])
def test_scratch_and_sums_stay_small(name, shape):
    line = f"convolution backward_filter {shape} float32 x=NHWC w=NHWC y=NHWC"
    found = row_gradient_blocking.blocking_of(parse_problem(line), Target.named(name))
    assert found is not None
    view, plan = found
    assert sum(row_gradient_blocking.scratch_bytes(view, plan)) < 2 * MIB
    blocks = np.prod(row_gradient_blocking.block_counts(view, plan)) * view.groups
    assert plan.slices == 1 or plan.slices * blocks * plan.sum_bytes <= 2 * MIB


def test_infinities_and_nan_beside_padding_stay_where_they_belong(monkeypatch):
    monkeypatch.setattr(implicit_gemm, "kernel_of", lambda problem, target: (RowGradient, 1.0))
    problem = parse_problem(
        "convolution backward_filter n2c8h6k16r3p1 float32 x=NHWC w=NHWC y=NHWC"
    )
    case = Case(problem, ALGORITHM, "special", 1.0, 0.0, "end", threads=1)
    assert run_case(case, Handle("cpu")) == ALGORITHM
