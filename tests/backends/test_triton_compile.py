"""Every Triton kernel compiled ahead of time for the architectures claimed: the matrix instructions
meant are there, loads are wide where memory allows, and spills stay below a stated bound."""

import re

import pytest

pytest.importorskip("triton")
from bedstone import cli
from bedstone.backends.triton import (
    activation,
    compile,
    convolution,
    dropout,
    launch,
    normalization,
    pooling,
    runtime,
    softmax,
    tensor_ops,
)
from bedstone.plan.config import config
from bedstone.spec.dtypes import DType
from bedstone.spec.problem import parse_problem

pytestmark = pytest.mark.skipif(runtime.interpreting(), reason="TRITON_INTERPRET is set")

MODULES = {
    "activation": activation, "convolution": convolution, "dropout": dropout,
    "normalization": normalization, "pooling": pooling, "softmax": softmax,
    "tensor_ops": tensor_ops,
}  # fmt: skip
ARCHITECTURES = ("sm_90", "sm_80", "sm_100", "gfx942")

# Bytes a thread that the assembler may spill. Operands gathered element by element hold an address
# each; the tiles that spill a little there were the quickest when measured.
SPILL, SPILL_GATHERED, SPILL_WIDE_FILTER = 256, 1536, 512

# What the matrix instructions look like: 16-bit, float32 split (tf32 or bfloat16), float64.
MATRIX = {
    "sm_90": {"half": r"wgmma.*f16|wgmma.*bf16", "split": r"wgmma.*tf32|wgmma.*bf16",
              "double": r"mma\.sync\S*f64"},
    "sm_80": {"half": r"mma\.sync\S*\.b?f16", "split": r"mma\.sync\S*(tf32|bf16)",
              "double": r"mma\.sync\S*f64"},
    "sm_100": {"half": r"tcgen05\.mma\S*kind::f16", "split": r"tcgen05\.mma\S*kind::(tf32|f16)",
               "double": r"fma\.rn\.f64"},
    "gfx942": {"half": r"v_mfma_f32\S*_b?f16", "split": r"v_mfma_f32\S*_f32"},
}  # fmt: skip

CONVOLUTIONS = [
    ("half", "convolution forward n64c128h28k128r3p1 bfloat16 layout=NHWC"),
    ("half", "convolution backward_data n64c128h28k128r3p1u2 float16 layout=NHWC"),
    ("half", "convolution backward_filter n64c128h28k128r3p1 bfloat16 layout=NHWC"),
    ("half", "convolution forward n64c128h28k128r3p1 bfloat16"),
    ("split", "convolution forward n64c128h28k128r3p1 float32 layout=NHWC"),
    ("split", "convolution backward_data n64c128h28k128r3p1 float32 layout=NHWC"),
    ("split", "convolution forward n64c128h28k128r3p1 float32"),
    ("split", "convolution forward n64c3h224k64r7p3u2 float32 layout=NHWC bias activation=relu"),
    ("double", "convolution forward n64c128h28k128r3p1 float64 layout=NHWC"),
    ("double", "convolution backward_filter n64c128h28k128r3p1 float64 layout=NHWC"),
]
OTHERS = [
    "convolution forward n64c192h28k192r3p1g192 bfloat16 layout=NHWC",
    "convolution backward_data n64c384h14k384r7p3g384 float32",
    "convolution backward_filter n64c192h28k192r3p1g192 bfloat16 layout=NHWC",
    "convolution backward_bias 64x128x56x56 float32",
    "activation forward 64x128x56x56 bfloat16 kind=relu",
    "activation backward 64x128x56x56 float32 kind=gelu_tanh",
    "activation forward 64x128x56x56 float64 kind=softplus",
    "tensor_ops transform 64x128x56x56 bfloat16 x=NCHW y=NHWC",
    "tensor_ops add 64x128x56x56 float32 b=1x128x1x1",
    "tensor_ops set 64x128x56x56 float16",
    "pooling forward n64c128h56r3p1u2 bfloat16 mode=max layout=NHWC with_indices",
    "pooling backward n64c128h56r2u2 float32 mode=average_include_padding",
    "pooling backward n64c128h56r3p1u2 float32 mode=max",
    "pooling backward n64c128h56r3p1u2 bfloat16 mode=max layout=NHWC",
    "pooling backward n64c128h56r3p1 float32 mode=average_exclude_padding layout=NHWC",
    "pooling forward n64c128h56r56 float32 mode=average_include_padding",
    "pooling adaptive_forward n2c3h7w6 float32 output=3x4",
    "softmax forward 4096x1000 float32 axes=1",
    "softmax forward 16x1000000 float64 axes=1 algorithm=log",
    "softmax backward 4096x1000 bfloat16 axes=1",
    "normalization training 64x128x56x56 bfloat16 kind=batch momentum=0.1 layout=NHWC",
    "normalization training 4096x1024 float32 kind=layer",
    "normalization inference 64x128x56x56 float32",
    "normalization backward 64x128x56x56 float32 kind=batch",
    "normalization backward 4096x1024 bfloat16 kind=rms",
    "normalization lrn_forward 256x96x27x27 float32 size=5",
    "normalization lrn_backward 256x96x27x27 float32 size=5",
    "normalization lrn_backward 100x32x16x16 float64 size=3 region=within beta=0.6",
    "dropout forward 256x4096 float32",
    "dropout backward 256x4096 bfloat16 with_mask",
]


def slow_elsewhere(rows):
    """(architecture, row) of all, those besides sm_90 left for the slow run."""
    return [
        pytest.param(a, row, marks=() if a == "sm_90" else pytest.mark.slow)
        for row in rows
        for a in ARCHITECTURES
    ]


@pytest.fixture(autouse=True)
def no_cache():
    with config(cache_dir=""):
        yield


def compiled(line, architecture, algorithm=""):
    """(launch, report) of every kernel of every algorithm that takes the problem."""
    problem, target = parse_problem(line), launch.target_device(architecture)
    for candidate in MODULES[problem.primitive].ALGORITHMS:
        if algorithm and candidate.name != algorithm or candidate.supports(problem, target):
            continue
        for made in launch.launches_of(candidate.build(problem, target)):
            yield made, compile.inspect(made.source, architecture, made.binary)


def spill_bound(line, kernel=""):
    if re.search(r"g\d{2}", line) and "depthwise" not in kernel:
        return SPILL_GATHERED  # a group of one channel is gathered in NHWC too
    if "r7p3g" in line or ("double" in line):
        return SPILL_WIDE_FILTER
    return SPILL if "NHWC" in line else SPILL_GATHERED


@pytest.mark.parametrize(("architecture", "row"), slow_elsewhere(CONVOLUTIONS))
def test_products_run_on_the_matrix_units(architecture, row):
    kind, line = row
    target = launch.target_device(architecture)
    reason = convolution.ImplicitGemm().supports(parse_problem(line), target)
    if kind == "double" and architecture == "gfx942":
        assert reason is not None and "float64" in reason
        return
    assert reason is None
    ((made, report),) = compiled(line, architecture, "triton:implicit_gemm")
    # Tiles of fewer than 64 rows are below the size of a warpgroup's instruction.
    small = made.source.constants["BM"] < 64 and architecture in ("sm_90", "sm_100")
    expected = MATRIX["sm_80" if small and kind != "double" else architecture][kind]
    assert report.count(expected) > 0
    assert report.spilled_bytes <= spill_bound(line)


@pytest.mark.parametrize(("architecture", "row"), slow_elsewhere(OTHERS))
def test_other_kernels_compile_and_do_not_spill(architecture, row):
    made = list(compiled(row, architecture))
    assert made
    for one, report in made:
        assert report.registers > 0
        assert report.spilled_bytes <= spill_bound(row, one.source.name)


@pytest.mark.parametrize(
    "line",
    [
        "activation forward 64x128x56x56 bfloat16 kind=relu",
        "activation forward 64x128x56x56 bfloat16 kind=relu layout=NHWC",
        "tensor_ops transform 64x128x56x56 float32 x=NHWC y=NCHW",
        "softmax forward 4096x1000 float32 axes=1",
        "softmax forward 64x64x56x56 float32 axes=1",
    ],
)
def test_packed_memory_moves_in_16_byte_words(line):
    ((_, report),) = compiled(line, "sm_90")
    for access in ("ld", "st"):
        assert report.count(rf"{access}\.global\S*\.(v4\.b32|v2\.b64)") > 0
        assert report.count(rf"{access}\.global\S*\.b(8|16)\b") == 0


def test_channels_last_tiles_are_copied_asynchronously():
    line = "convolution forward n64c128h28k128r3p1 bfloat16 layout=NHWC"
    ((_, report),) = compiled(line, "sm_90", "triton:implicit_gemm")
    assert report.count(r"cp\.async\.cg\.shared\.global \[[^\]]*\], \[[^\]]*\], 0x10") > 0


def test_shapes_share_a_binary():
    """Sizes are arguments: other sizes of the same kind need no other binary."""
    keys = set()
    for shape in ("n64c128h28k256r3p1", "n32c256h14k512r3p1", "n8c64h56w28k256r3p1"):
        line = f"convolution forward {shape} bfloat16 layout=NHWC"
        choice = convolution.implicit_gemm.choose(parse_problem(line), "sm_90", False)
        made = convolution.implicit_gemm.build(
            parse_problem(line), replaced(choice), launch.target_device("sm_90")
        )
        keys.add(made.source.key("sm_90"))
    assert len(keys) == 1


def replaced(choice):
    from dataclasses import replace

    from bedstone.backends.triton.convolution.tiles import Tile

    return replace(choice, tile=Tile(64, 64, 64, 4, 3, 1.0))


def test_filters_in_nchw_are_read_along_their_taps():
    line = "convolution forward n64c128h28k128r3p1 float32"
    ((made, _),) = compiled(line, "sm_90", "triton:implicit_gemm")
    constants = made.source.constants
    assert constants["FLAT"] and constants["TAPS_INNER"] and constants["W_PACKED"]


def test_accumulators_are_written_out():
    import triton.language as tl

    assert launch.accumulator(DType.bfloat16) == tl.float32
    assert launch.accumulator(DType.float64) == tl.float64
    assert re.fullmatch("fp32|fp64", launch.factors(DType.float16)["alpha"].type)


def test_compiling_ahead_fills_the_cache(tmp_path, capsys):
    suite, untaken = tmp_path / "suite.txt", tmp_path / "untaken.txt"
    suite.write_text("softmax forward 64x100 axes=1\n")
    untaken.write_text("normalization lrn_forward 2x3x2x2x2x2 region=within\n")
    compile_for = ["compile", "--architecture", "sm_90", "--suite"]
    with config(cache_dir=str(tmp_path)):
        assert cli.main([*compile_for, str(suite)]) == 0
        assert len(list((tmp_path / "triton").iterdir())) == 1
        assert "triton:online softmax_forward_kernel" in capsys.readouterr().out
        assert cli.main([*compile_for, str(suite), "--every"]) == 0
        assert "in the cache already" in capsys.readouterr().out
        assert cli.main([*compile_for, str(untaken)]) == 1
        assert "no algorithm takes it" in capsys.readouterr().out
