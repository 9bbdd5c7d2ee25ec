"""cpu:implicit_gemm: both ways to backward_data, narrower vectors, thread counts, the tiles."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from bedstone.backends.cpu.builder import KernelBuilder
from bedstone.backends.cpu.convolution import implicit_gemm, row_blocking, tap_product
from bedstone.backends.cpu.convolution.data_gradient import DataGradient
from bedstone.backends.cpu.convolution.filter_gradient import FilterGradient
from bedstone.backends.cpu.convolution.image_product import ImageProduct
from bedstone.backends.cpu.convolution.row_gradient import RowGradient
from bedstone.backends.cpu.convolution.row_product import RowProduct
from bedstone.backends.cpu.convolution.tap_product import TapProduct
from bedstone.backends.cpu.kernel import ENTRY, compiled
from bedstone.backends.cpu.microkernels import SHAPES, TILE, Tile, emit_tile
from bedstone.backends.cpu.target import Target
from bedstone.plan.config import config
from bedstone.plan.handle import Handle
from bedstone.spec.problem import parse_problem
from bedstone.testing.harness import Case, run_case

ALGORITHM = "cpu:implicit_gemm"
TARGETS = ("native", "haswell", "x86-64")
SHAPES_TRIED = (
    "n2c5h9w11k7r3s3",
    "n3c17h10w9k33r3p1",
    "n1c20h13w12k18r3s2ph2_1pw0_3uh2uw3lh2lw1g2",  # everything different by axis
    "n1c3h31k20r7u2p3",  # every second pixel
    "n40c4h4k5r2",  # vectors over several rows and images
    "n2c300h5k9r1",  # several chunks of depth
    "n1c2d5h6w7k20t3r2s3p1uh2",
    "n1c20h3k30r3",  # one pixel
)


@pytest.fixture(params=TARGETS)
def target(request):
    """Compile for this target."""
    if request.param != "native" and not Target.named("native").triple.startswith("x86_64"):
        pytest.skip("not an x86-64 machine")
    if Target.named(request.param).vector_bytes > Target.named("native").vector_bytes:
        pytest.skip("the machine is narrower")
    with config(cpu_target=request.param):
        yield request.param


def run(line, beta=0.0, threads=2):
    case = Case(parse_problem(line), ALGORITHM, "integers", 2.0, beta, "end", threads=threads)
    assert run_case(case, Handle("cpu")) == ALGORITHM


@pytest.mark.parametrize("options", ["float32", "float64 x=NHWC w=NHWC y=NHWC", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES_TRIED)
@pytest.mark.parametrize("direction", ["forward", "backward_data", "backward_filter"])
def test_every_instruction_set(target, direction, shape, options):
    if "NHWC" in options and "d" in shape:
        options = options.replace("NHWC", "NDHWC")
    if "bfloat16" in options:
        pytest.importorskip("ml_dtypes")
    run(f"convolution {direction} {shape} {options}")
    run(f"convolution {direction} {shape} {options}", beta=-1.0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "line, in_place",
    [
        ("n1c300h4w5k47r1", True),  # the last panel of outer channels starts early
        ("n2c40h6w7k48r3s2p1g2", True),  # a row is (channel, tap); groups
        ("n1c70h7k24r3p1 w=NHWC", True),  # a row is (tap, channel)
        ("n1c70h7k24r3p1 mode=convolution", True),
        ("n1c40h7k1r3", False),  # fewer outer channels than a tile's rows
        ("n1c40h7k24r3 w=NCWH", True),  # taps are taken in the order they lie in
        ("n1c40h7k24r3 w=1,216,72,24", False),
    ],
)
def test_a_filter_whose_rows_lie_in_memory_is_read_in_place(line, in_place, dtype):
    run(f"convolution forward {line} {dtype}")
    run(f"convolution forward {line} {dtype} bias act=relu", beta=-1.0)
    with config(algorithm=ALGORITHM):
        told = Handle("cpu").plan(parse_problem(f"convolution forward {line} {dtype}")).explain()
    assert ("reads the filter in place" in told) == in_place
    assert ("packs the filter" in told) != in_place


@pytest.mark.parametrize("emitter", [ImageProduct, DataGradient])
@pytest.mark.parametrize("layout", ["", "x=NHWC w=NHWC y=NHWC", "x=NHWC", "y=NHWC"])
@pytest.mark.parametrize("shape", [s for s in SHAPES_TRIED if "d" not in s])
def test_both_ways_of_backward_data(monkeypatch, emitter, layout, shape):
    monkeypatch.setattr(implicit_gemm, "kernel_of", lambda problem, target: (emitter, 1.0))
    run(f"convolution backward_data {shape} float32 {layout}", beta=1.0)


ROWS_TRIED = (
    "n2c3h13w11k21r3p1",  # one run of taps and channels
    "n2c1h10w33k9r3s5u2",  # one channel; every second pixel, rows read in place
    "n1c5h9w12k40r3s2ph2_1pw0_3lh2",  # different by axis
    "n1c6h11w10k17r3p2l2",  # gaps between the taps
    "n3c20h7w7k33r1",  # all pixels one row
    "n2c9h8w9k16r1u2",
    "n1c90h6w7k20r3p1",  # runs longer than a chunk
    "n1c300h5w4k9r1",
    "n2c4w70k12s9p4",  # one axis
    "n1c40h9w8k16r5p2",  # many chunks of several runs
    "n1c3h40w4k8r2p9u3",  # whole tiles of padding
    "n2c8h5w11k16r2u4l3",  # phases that no tap reaches, gaps between those of others
)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "direction, shape",
    [(direction, shape) for direction in ("forward", "backward_data") for shape in ROWS_TRIED],
)
def test_rows(monkeypatch, direction, shape, dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    monkeypatch.setattr(implicit_gemm, "kernel_of", lambda problem, target: (RowProduct, 1.0))
    layout = "NWC" if "h" not in shape else "NHWC"
    for filter_layout in (layout, layout[0] + "C" + layout[1:-1]):
        layouts = f"x={layout} w={filter_layout} y={layout}"
        run(f"convolution {direction} {shape} {dtype} {layouts}")
        run(f"convolution {direction} {shape} {dtype} {layouts} mode=convolution", beta=-1.0)


@pytest.mark.parametrize("shape", ROWS_TRIED[:6])
def test_rows_on_every_instruction_set(monkeypatch, target, shape):
    monkeypatch.setattr(implicit_gemm, "kernel_of", lambda problem, target: (RowProduct, 1.0))
    run(f"convolution forward {shape} float32 x=NHWC w=NHWC y=NHWC", beta=1.0)


TAPS_TRIED = (
    "n2c3h13w11k21r3p1",
    "n1c3h30w33k9r7s5u2p3",  # a tap at the end of a panel; several bands
    "n1c1h9w40k300r3s2ph2_1pw0_3lh2",  # one channel, chunks of the depth, different by axis
    "n2c4h11w10k17r2p2u3",  # pixels that no tap reaches
    "n1c2h40w4k8r2p9u3",  # tiles of padding
    "n3c2w70k12s9p4",  # one axis
)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", TAPS_TRIED)
def test_taps(monkeypatch, shape, dtype):
    monkeypatch.setattr(implicit_gemm, "kernel_of", lambda problem, target: (TapProduct, 1.0))
    layout = "NWC" if "h" not in shape else "NHWC"
    for layouts in (f"x={layout} w={layout} y={layout}", f"x={layout} y={layout}"):
        problem = f"convolution backward_data {shape} {dtype} {layouts}"
        assert tap_product.fits(parse_problem(problem), Target.current())
        run(problem)
        run(f"{problem} mode=convolution", beta=-1.0)


@pytest.mark.parametrize("shape", TAPS_TRIED[:3])
def test_taps_on_every_instruction_set(monkeypatch, target, shape):
    monkeypatch.setattr(implicit_gemm, "kernel_of", lambda problem, target: (TapProduct, 1.0))
    run(f"convolution backward_data {shape} float32 x=NHWC w=NHWC y=NHWC", beta=1.0)


@pytest.mark.parametrize(
    "line",
    [
        "forward n1c8h9k16r3p1 y=NHWC",
        "forward n1c8h9k16r3p1 x=NHWC",
        "forward n1c8h9k16r3p1g2 x=NHWC y=NHWC",
        "forward n1c8d4h4w4k16t3r3s3p1 x=NDHWC y=NDHWC",
        "backward_data n1c8h9k16r3p1u2 x=NHWC",
    ],
)
def test_rows_that_lie_otherwise_go_elsewhere(line):
    problem = parse_problem(f"convolution {line} float32")
    assert not row_blocking.views(problem)
    assert implicit_gemm.kernel_of(problem, Target.named("haswell"))[0] is not RowProduct


@pytest.mark.parametrize(
    "line, emitter",
    [
        ("forward n1c8h9k16r3p1", ImageProduct),
        ("forward n1c8h9k16r3p1 x=NHWC y=NHWC", RowProduct),
        ("forward n1c3h40k16r7u2p3 x=NHWC y=NHWC", RowProduct),
        ("backward_data n1c64h28k64r1 x=NHWC y=NHWC", RowProduct),
        ("backward_data n4c64h14k64r3p1", ImageProduct),
        ("backward_data n16c128h16k128r7", DataGradient),  # the image shrinks from 16 to 10
        ("backward_data n2c3h64k64r7u2p3", DataGradient),  # three channels
        ("backward_data n2c3h64k64r7u2p3 x=NHWC y=NHWC", TapProduct),
        ("backward_data n2c64h28k64r3u2p1 x=NHWC y=NHWC", RowProduct),  # phases
        ("backward_data n1c1h2000k16r3", ImageProduct),  # too large an image to own
        ("backward_filter n1c8h9k16r3p1", FilterGradient),
    ],
)
def test_choice_of_kernel(line, emitter):
    problem = parse_problem(f"convolution {line} float32")
    assert implicit_gemm.kernel_of(problem, Target.named("haswell"))[0] is emitter


@pytest.mark.parametrize(
    "line",
    [
        "forward n2c40h20k40r3p1",
        "backward_data n4c40h20k40r5",
        "backward_filter n9c6h30k20r3p1",  # slices of the pixels
        "backward_filter n2c64h12k64r3p1",
        *(
            f"backward_filter {shape} x=NHWC w=NHWC y=NHWC"
            for shape in ("n9c6h30k20r3p1", "n2c64h12k64r3p1", "n4c32h28k48r1")
        ),
    ],
)
def test_threads_do_not_change_the_result(line):
    problem = parse_problem(f"convolution {line} float32")
    if "NHWC" in line:
        assert implicit_gemm.kernel_of(problem, Target.current())[0] is RowGradient
    random = np.random.default_rng(0)
    arrays = [random.standard_normal(o.desc.dims).astype(np.float32) for o in problem.operands]
    plan = Handle("cpu").plan(problem, ALGORITHM)
    results = []
    for threads in (1, 2, 5, 2):
        with config(num_threads=threads):
            arrays[-1][...] = np.nan
            plan(*(a.ctypes.data for a in arrays))
        results.append(arrays[-1].copy())
    assert np.isfinite(results[0]).all()
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_tiles_of_every_shape(target, dtype):
    lanes = Target.named(target).vector_bytes // np.dtype(dtype).itemsize
    random = np.random.default_rng(0)
    for rows, vectors in SHAPES[Target.named(target).vector_registers]:
        tile = Tile(rows, vectors, lanes, 13, dtype)

        def emit(target, tile=tile):
            k = KernelBuilder(target)
            emit_tile(k, tile)
            with k.entry(ENTRY, pointers=3) as call:
                k.call(TILE, *call.pointers, call.workspace, 0)
                k.call(TILE, *call.pointers, 1, 1)
            return k

        a = random.integers(-3, 4, (rows, tile.row_bytes // tile.item)).astype(dtype)
        b = random.integers(-3, 4, (13, tile.columns)).astype(dtype)
        c = np.full((rows, tile.columns), np.nan, dtype)
        for depth in (0, 1, 4, 13):
            kernel = compiled(f"test tile {tile}", emit, 3)
            kernel([a.ctypes.data, b.ctypes.data, c.ctypes.data], depth)
            np.testing.assert_array_equal(c, a[:, :depth] @ b[:depth] + a[:, :1] @ b[:1])


def test_description_names_the_way():
    plan = Handle("cpu").plan(parse_problem("convolution forward n1c8h9k16r3p1"), ALGORITHM)
    assert "gathers patches" in plan.explain()
