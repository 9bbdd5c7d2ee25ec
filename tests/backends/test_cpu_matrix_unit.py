"""cpu:implicit_gemm_amx: where it runs, what it falls back to, and its products."""

from __future__ import annotations

import concurrent.futures
import errno
import os

import numpy as np
import pytest

pytest.importorskip("llvmlite")
pytest.importorskip("ml_dtypes")

from bedstone.backends.cpu import target as targets
from bedstone.backends.cpu.convolution.implicit_gemm_amx import MatrixImplicitGemm
from bedstone.backends.cpu.convolution.matrix_gradient import MatrixGradient
from bedstone.backends.cpu.convolution.matrix_product import MatrixProduct
from bedstone.backends.cpu.objects import assembly
from bedstone.backends.cpu.target import Target
from bedstone.plan.config import config
from bedstone.plan.handle import Handle
from bedstone.spec.problem import parse_problem
from bedstone.testing.harness import Case, run_case

ALGORITHM = "cpu:implicit_gemm_amx"
LAST = " x=NHWC w=NHWC y=NHWC"
SHAPES = (
    "n2c5h9w11k7r3s3",
    "n3c17h10w9k33r3p1",
    "n1c20h13w12k18r3s2ph2_1pw0_3uh2uw3lh2lw1g2",  # everything different by axis
    "n1c3h31k20r7u2p3",  # every second pixel
    "n40c4h4k5r2",  # vectors over several rows and images
    "n2c300h5k9r1",
    "n2c64h9k96r3p1",
    "n2c64h15k64r3p1u2",  # backward_data in phases
    "n1c40h6k200r3p1g4",
    "n1c640h4k72r3p1",  # several chunks of the depth
    "n1c64h40k32r3p1",  # several chunks of the pixels
)
PRODUCT = "convolution forward n2c64h9k96r3p1 bfloat16"

has_unit = Target.named("native").has_matrix_unit
needs_unit = pytest.mark.skipif(not has_unit, reason=targets.matrix_unit_refusal() or "no AVX-512")


def run(line, fill="integers", beta=0.0, threads=2):
    case = Case(parse_problem(line), ALGORITHM, fill, 2.0, beta, "end", threads=threads)
    assert run_case(case, Handle("cpu")) == ALGORITHM


class Refusing:
    """A C library whose system grants nothing."""

    def syscall(self, *arguments):
        self.arguments = arguments
        targets.ctypes.set_errno(errno.ENOSPC)
        return -1


def test_a_refusal_of_the_system_is_a_reason():
    libc = Refusing()
    reason = targets.request_matrix_unit(libc)
    assert os.strerror(errno.ENOSPC) in reason and "AMX" in reason
    assert libc.arguments == (158, 0x1023, 18)


def test_what_has_no_matrix_unit_says_so(monkeypatch):
    monkeypatch.setattr(targets, "request_matrix_unit", lambda libc: "refused")
    flags = {"amx-tile": True, "amx-bf16": True, "avx512bf16": True}
    monkeypatch.setattr(targets.llvm, "get_host_cpu_features", lambda: flags)
    expected = "refused" if targets.sys.platform.startswith("linux") else "not used"
    assert expected in targets.matrix_unit_refusal.__wrapped__()
    flags["amx-bf16"] = False
    assert "this processor has no matrix unit" in targets.matrix_unit_refusal.__wrapped__()


@pytest.mark.skipif(
    not Target.named("native").triple.startswith("x86_64"), reason="not an x86-64 machine"
)
def test_narrower_targets_fall_back_and_explain_it():
    with config(cpu_target="haswell"):
        plan = Handle("cpu").plan(parse_problem(PRODUCT))
        assert plan.algorithm != ALGORITHM
        assert "AMX" in Handle("cpu").plan(parse_problem(PRODUCT)).explain()


@pytest.mark.parametrize("direction", ["forward", "backward_data", "backward_filter"])
@pytest.mark.parametrize("layout", ["", LAST])
def test_kernels_multiply_on_tiles_and_release_them(direction, layout):
    """Compiled for such a machine, whatever this one is."""
    target = Target(
        "x86_64-unknown-linux-gnu", "sapphirerapids", "", 64, 32, True, True, True,
        has_matrix_unit=True,
    )  # fmt: skip
    problem = parse_problem(PRODUCT.replace("forward", direction) + layout)
    if direction == "backward_filter":
        builder = MatrixGradient(problem, target).emit()
    else:
        builder = MatrixProduct(problem, target).emit()
    lines = assembly(builder, target)
    for instruction in ("ldtilecfg", "tdpbf16ps", "tilerelease"):
        assert instruction in lines


@needs_unit
@pytest.mark.parametrize("options", ["bfloat16", f"bfloat16{LAST}"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("direction", ["forward", "backward_data", "backward_filter"])
def test_products_of_bfloat16(direction, shape, options):
    run(f"convolution {direction} {shape} {options}")
    run(f"convolution {direction} {shape} {options}", fill="random", beta=-1.0)


@needs_unit
@pytest.mark.parametrize("math", ["bf16x3", "bf16x6"])
@pytest.mark.parametrize("layout", ["", LAST])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("direction", ["forward", "backward_data"])
def test_split_products_of_float32(direction, shape, layout, math):
    run(f"convolution {direction} {shape} float32 math={math}{layout}")
    run(f"convolution {direction} {shape} float32 math={math}{layout}", fill="random", beta=-1.0)


@needs_unit
@pytest.mark.parametrize(
    "line", [PRODUCT, "convolution forward n1c40h6k33r3p1 float32 math=bf16x6"]
)
def test_infinities_nan_and_the_largest_numbers(line):
    run(line, fill="special")
    problem = parse_problem(line.split(" n")[0] + " n1c1h1k1r1 float32 math=bf16x6")
    largest = np.finfo(np.float32).max
    x = np.array([[[[largest]]]], np.float32)
    w, y = np.full_like(x, 0.5), np.zeros_like(x)
    plan = Handle("cpu").plan(problem, ALGORITHM)
    plan(x.ctypes.data, w.ctypes.data, y.ctypes.data)
    assert y.item() == largest / 2


@needs_unit
def test_the_chosen_one_for_bfloat16():
    assert Handle("cpu").plan(parse_problem(PRODUCT)).algorithm == ALGORITHM


@needs_unit
def test_results_do_not_depend_on_the_threads():
    """Nor on who calls: tiles are configured and released by whichever thread runs a task."""
    problem = parse_problem(PRODUCT + LAST)
    random = np.random.default_rng(0)
    dtype = problem.x.dtype.numpy
    x, w = (
        random.standard_normal(d.dims[0] * d.dims[1] * d.dims[2] * d.dims[3]).astype(dtype)
        for d in (problem.x, problem.w)
    )
    plan = Handle("cpu").plan(problem, ALGORITHM)

    def call(threads):
        y = np.zeros(problem.y.size, dtype)
        with config(num_threads=threads):
            plan(x.ctypes.data, w.ctypes.data, y.ctypes.data)
        return y.tobytes()

    expected = call(1)
    assert call(2) == expected
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        assert set(pool.map(call, [2] * 12)) == {expected}


@needs_unit
def test_a_forked_child_multiplies_too():
    run(PRODUCT)
    child = os.fork()
    if not child:
        try:
            run(PRODUCT)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_other_products_are_declined():
    device = Handle("cpu").device
    algorithm = MatrixImplicitGemm()
    for options in ("float32", "float16", "float64", "float32 math=tf32"):
        problem = parse_problem(f"convolution forward n2c64h9k96r3p1 {options}")
        assert "multiplies bfloat16" in algorithm.supports(problem, device)
