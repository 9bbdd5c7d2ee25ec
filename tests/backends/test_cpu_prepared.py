"""Prepared plans of the CPU: the very bits of the plan itself, from memory of exactly its size."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import bedstone
from bedstone.backends.cpu.convolution import ALGORITHMS
from bedstone.backends.cpu.convolution.implicit_gemm import kernel_of
from bedstone.backends.cpu.target import Target
from bedstone.plan.handle import parse_device
from bedstone.spec.convolution import ConvolutionProblem
from bedstone.testing import fills, problems
from bedstone.testing.conformance import usable
from bedstone.testing.memory import Image

GUARD, GUARD_BYTES = 0xA5, 256
# Filters that are packed in parts, in groups, in phases of a stride; and of few channels.
LARGE = (
    ("cpu:winograd_2x2_3x3", "convolution forward n1c256h8k640r3p1 float32"),
    ("cpu:winograd_2x2_3x3", "convolution backward_data n1c640h8k256r3p1 float32 layout=nhwc"),
    ("cpu:winograd_2x2_3x3", "convolution forward n1c64h8k128r3p1g2 float32"),
    ("cpu:winograd_2x2_nested", "convolution forward n2c32h14k48r7p3 float32"),
    ("cpu:implicit_gemm", "convolution forward n1c1024h6k1100r3p1 float32 layout=nhwc"),
    ("cpu:implicit_gemm", "convolution backward_data n1c1100h6k1024r3p1 float32"),
    ("cpu:implicit_gemm", "convolution backward_data n1c64h15k96r3p1u2 float32 layout=nhwc"),
    ("cpu:implicit_gemm", "convolution backward_data n2c3h33k24r7p3u2 float32 layout=nhwc"),
)


def samples() -> Iterator[tuple[str, ConvolutionProblem]]:
    """One curated problem for each algorithm, kernel, direction, dtype, kind of groups, epilogue
    and layout."""
    device, target, seen = parse_device("cpu"), Target.current(), set()
    for problem in problems.curated("convolution"):
        if getattr(problem, "direction", "") not in ("forward", "backward_data"):
            continue
        if not usable(problem) or problem.flops == 0:
            continue
        for algorithm in ALGORITHMS:
            if algorithm.supports(problem, device) is not None:
                continue
            kernel = kernel_of(problem, target)[0] if "gemm" in algorithm.name else None
            last = problem.x.strides[1] == 1 and problem.y.strides[1] == 1
            kind = (problem.direction, problem.x.dtype, problem.conv.groups > 1, last)
            key = (algorithm.name, kernel, *kind, str(problem.epilogue))
            if key not in seen:
                seen.add(key)
                yield algorithm.name, problem


def check(algorithm: str, problem: ConvolutionProblem, fill: str, beta: float) -> int:
    """Compare a prepared plan with its plan; returns the bytes that it packed."""
    plan = bedstone.Handle().plan(problem, algorithm, workspace_limit=None)
    values = {
        o.name: Image.of(o.desc, "middle", fills.operands(problem, fill, seed=7)[o.name]).elements
        for o in problem.operands
    }
    *inputs, out = problem.operands
    before = values[out.name].copy()
    workspace = np.empty(max(plan.workspace_size, 1), np.uint8)
    room = np.full(plan.prepared_size + 2 * GUARD_BYTES, GUARD, np.uint8)
    memory = room[GUARD_BYTES : GUARD_BYTES + plan.prepared_size]
    place = [o.name for o in inputs].index("w")

    def result(run: object, arrays: list[np.ndarray], space: np.ndarray) -> bytes:
        values[out.name][...] = before if beta else np.nan
        pointers = [a.__array_interface__["data"][0] for a in (*arrays, values[out.name])]
        run(*pointers, workspace=space.ctypes.data, alpha=1.5, beta=beta)  # type: ignore[operator]
        return np.ascontiguousarray(values[out.name]).tobytes()

    arrays = [values[o.name] for o in inputs]
    wanted = result(plan, arrays, workspace)
    for threads in (1, 2):
        memory[:] = GUARD
        with bedstone.config(num_threads=threads):
            prepared = plan.prepare(arrays[place], memory if plan.prepared_size else None)
            kept = room.copy()
            for _ in range(2):
                rest = arrays[:place] + arrays[place + 1 :]
                assert result(prepared, rest, workspace) == wanted
        assert np.array_equal(room, kept), "a call wrote to the packed filter"
        assert (room[:GUARD_BYTES] == GUARD).all() and (room[-GUARD_BYTES:] == GUARD).all()
    return plan.prepared_size


SAMPLES = list(samples())


@pytest.mark.parametrize(("algorithm", "problem"), SAMPLES[::4], ids=str)
def test_bits_are_those_of_the_plan(algorithm: str, problem: ConvolutionProblem) -> None:
    check(algorithm, problem, "random", 0.0)
    check(algorithm, problem, "special", 2.0)


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "problem"), SAMPLES, ids=str)
def test_bits_of_every_kind_of_problem(algorithm: str, problem: ConvolutionProblem) -> None:
    for fill, beta in (("random", 0.0), ("integers", -1.0), ("special", 2.0)):
        check(algorithm, problem, fill, beta)


@pytest.mark.parametrize(("algorithm", "line"), LARGE)
def test_filters_in_parts_groups_and_phases(algorithm: str, line: str) -> None:
    problem = bedstone.parse_problem(line)
    assert isinstance(problem, ConvolutionProblem)
    assert check(algorithm, problem, "random", 0.5) >= problem.w.nbytes


def test_every_kernel_is_among_the_samples() -> None:
    """The samples reach each kernel of each algorithm that takes forward or backward_data."""
    target = Target.current()
    kernels = {kernel_of(p, target)[0].__name__ if "gemm" in name else name for name, p in SAMPLES}
    assert kernels >= {
        "RowProduct", "ImageProduct", "DataGradient", "TapProduct", "cpu:direct_depthwise",
        "cpu:winograd_2x2_3x3", "cpu:winograd_4x4_3x3", "cpu:winograd_2x2_nested",
    }  # fmt: skip
