"""The Gluon convolutions without a GPU: what is taken, how it is cut, what the compiler made."""

import itertools
import math

import pytest

pytest.importorskip("triton")

from bedstone.backends.gluon.convolution import (
    ALGORITHMS,
    filter_gradient,
    halo,
    image_split,
    patches,
    tiles,
)
from bedstone.backends.gluon.convolution import implicit_gemm_ws as ws
from bedstone.backends.gluon.convolution.side import sides
from bedstone.backends.triton import compile, launch, runtime
from bedstone.backends.triton.convolution.geometry import Axis
from bedstone.plan import config
from bedstone.spec.problem import parse_problem

pytestmark = pytest.mark.skipif(runtime.interpreting(), reason="TRITON_INTERPRET is set")

DEVICE = launch.target_device("sm_90")
BY_NAME = {algorithm.name.removeprefix("gluon:"): algorithm for algorithm in ALGORITHMS}
WGMMA, TMA = r"wgmma\.mma_async", r"cp\.async\.bulk\.tensor"
SPILL_LIMIT = 128  # bytes a thread; what there is lies outside the main loops


@pytest.fixture(autouse=True)
def no_cache():
    with config.config(cache_dir=""):
        yield


def problem(line):
    return parse_problem(f"convolution {line}")


def reports(algorithm, line):
    """(kernel name, what the assembler says) of every launch."""
    kernel = BY_NAME[algorithm].build(problem(line), DEVICE)
    return [
        (made.source.name, compile.inspect(made.source, "sm_90", made.binary))
        for made in launch.launches_of(kernel)
    ]


@pytest.mark.parametrize(
    "algorithm, line",
    [
        ("implicit_gemm_ws", "forward n64c128h28k128r3p1 bfloat16 layout=NHWC"),
        ("implicit_gemm_ws", "forward n64c128h28k128r3p1 float16 layout=NHWC bias activation=relu"),
        ("implicit_gemm_ws", "backward_data n64c128h28k128r3p1 float16 layout=NHWC"),
        ("implicit_gemm_ws", "backward_data n64c128h28k128r3p1u2 bfloat16 layout=NHWC"),
        ("implicit_gemm_ws", "backward_data n8c64h17k64r5p2u3 bfloat16 layout=NHWC"),
        ("implicit_gemm_ws", "forward n64c64h14k64r3p1l2 float16 layout=NHWC"),
        ("implicit_gemm_ws", "forward n4c64d8h9k64t3p1 float16 layout=NHWC"),
        ("implicit_gemm_ws", "forward n64c128h28k128r3p1 float32 layout=NHWC math=tf32"),
        ("implicit_gemm_ws", "backward_filter n64c128h28k128r3p1 bfloat16 layout=NHWC"),
        ("implicit_gemm_ws_split", "backward_filter n64c128h28k128r3p1 bfloat16 layout=NHWC"),
        ("implicit_gemm_halo", "backward_filter n64c128h28k128r3p1 float16 layout=NHWC"),
        ("implicit_gemm_halo", "backward_filter n64c128h7k128r3p1 bfloat16 layout=NHWC"),
        ("implicit_gemm_halo", "backward_filter n32c128h28k128r3p1g32 bfloat16 layout=NHWC"),
        ("implicit_gemm_ws_split", "backward_filter n8c64h28k64r3p1u2g8 float16 layout=NHWC"),
        ("implicit_gemm_planar", "forward n50c256h28k512r1 bfloat16 bias activation=relu"),
        ("implicit_gemm_planar", "backward_data n50c64h56k64r1 float16"),
        ("implicit_gemm_planar", "backward_filter n50c128h28k512r1 bfloat16"),
    ],
)
def test_the_main_kernel_uses_the_matrix_and_copy_units_and_does_not_spill(algorithm, line):
    main = reports(algorithm, line)[0][1]
    assert main.count(WGMMA) >= 2 and main.count(TMA) >= 2
    assert main.spilled_bytes <= SPILL_LIMIT
    assert not main.warnings  # wgmma serialised by the assembler


@pytest.mark.parametrize("direction", ["forward", "backward_data"])
@pytest.mark.parametrize("filters, limit", [(64, 0), (128, SPILL_LIMIT)])
def test_float32_from_float16_products_keeps_its_main_loop_in_registers(direction, filters, limit):
    line = f"{direction} n64c{filters}h28k{filters}r3p1 float32 layout=NHWC"
    found = dict(reports("implicit_gemm_f16x3", line))
    fast = found["convolution_image_f16x3_kernel"]
    assert fast.count(r"wgmma\.mma_async[^\n]*f16\.f16") == 24  # 3 products x 4 x 2 consumers
    assert fast.spilled_bytes <= limit and not fast.warnings
    assert (
        "convolution_split_filter_kernel" in found and "convolution_image_careful_kernel" in found
    )


@pytest.mark.parametrize("channels", [64, 128])
def test_the_float32_gradient_by_filter_keeps_its_main_loop_in_registers(channels):
    line = f"backward_filter n64c{channels}h28k{channels}r3p1 float32 layout=NHWC"
    found = dict(reports("implicit_gemm_f16x3_split", line))
    fast = found["convolution_filter_f16x3_kernel"]
    consumers = 2 if channels == 128 else 1
    assert fast.count(r"wgmma\.mma_async[^\n]*f16\.f16") == 12 * consumers  # 3 products x 4
    assert not fast.spilled_bytes and not fast.warnings
    for name in ("channel_range", "split_image", "filter_f16x3_sum", "filter_careful"):
        assert not found[f"convolution_{name}_kernel"].spilled_bytes


@pytest.mark.parametrize(
    "algorithm, products, more",
    [("implicit_gemm_bf16x6_split", 6, ""), ("implicit_gemm_bf16x3_split", 3, " math=tf32")],
)
@pytest.mark.parametrize("filters", [64, 128])
def test_bfloat16_parts_are_made_on_the_way_to_the_matrix_units(algorithm, products, more, filters):
    line = f"backward_filter n50c256h28k{filters}r1 float32 layout=NHWC{more}"
    found = dict(reports(algorithm, line))
    main = found["convolution_filter_parts_kernel"]
    steps = 2  # of 16 pixels
    assert main.count(r"wgmma\.mma_async[^\n]*bf16\.bf16") == products * steps * (filters // 64)
    assert main.spilled_bytes <= SPILL_LIMIT and not main.warnings
    assert list(found) == ["convolution_filter_parts_kernel", "convolution_filter_sum_kernel"]


@pytest.mark.parametrize(
    "line",
    [
        "forward n32c128h56k128r3p1g32 bfloat16 layout=NHWC",
        "backward_data n32c256h56k256r3p1u2g32 float16 layout=NHWC",
        "forward n32c128h56k128r3p1g32 float32 layout=NHWC math=tf32",
        "backward_data n8c64d8h9k64t3p1g16 float32 layout=NHWC math=tf32",
    ],
)
def test_narrow_groups_lie_side_by_side(line):
    ((_, main),) = reports("implicit_gemm_grouped", line)
    assert main.count(WGMMA) == 8  # 128 bytes of channels, two consumers
    assert main.shared <= tiles.SHARED_BYTES and not main.warnings
    assert main.spilled_bytes <= 3 * SPILL_LIMIT  # where a tile is computed again
    assert BY_NAME["implicit_gemm_grouped"].workspace(problem(line), DEVICE) == 0


@pytest.mark.parametrize(
    "line, side",
    [
        ("n1c128h9k128r3g32", 16), ("n1c256h9k256r3g32", 8), ("n1c1024h9k1024r3g32", 2),
        ("n1c2048h9k2048r3g32", 1), ("n1c24h9k24r3g3", 3), ("n1c64h9k64r3", 1),
        ("n1c40h9k80r3g5", 5), ("n1c144h9k144r3g3", 1),
    ],
)  # fmt: skip
def test_groups_side_by_side_fill_a_tile(line, side):
    assert sides(problem(f"backward_filter {line} float16")) == side


@pytest.mark.parametrize(
    "line, untried",
    [
        ("forward n32c128h56k128r3p1g32 bfloat16 layout=NHWC", {"grouped"}),
        ("backward_data n50c64h56k64r1 float16", {"planar"}),
        ("backward_filter n50c128h28k512r1 bfloat16", {"planar"}),
        ("backward_filter n32c128h28k128r3p1g32 bfloat16 layout=NHWC", {"ws_split", "halo"}),
        ("backward_filter n50c256h28k64r1 float32 layout=NHWC", {"bf16x6_split"}),
        ("backward_filter n64c128h28k128r3p1 bfloat16 layout=NHWC", set()),
    ],
)
def test_what_no_device_has_run_is_taken_by_name_alone(line, untried):
    takers = [a for a in ALGORITHMS if a.supports(problem(line), DEVICE) is None]
    endless = {a.name for a in takers if math.isinf(a.estimate(problem(line), DEVICE))}
    assert endless == {f"gluon:implicit_gemm_{name}" for name in untried}


@pytest.mark.parametrize("direction", ["forward", "backward_data", "backward_filter"])
def test_tf32_is_one_product_of_scaled_float16(direction):
    algorithm = "implicit_gemm_f16" + ("_split" if direction == "backward_filter" else "")
    line = f"{direction} n64c128h28k128r3p1 float32 layout=NHWC math=tf32"
    found = {n: r for n, r in reports(algorithm, line) if n.endswith("f16x3_kernel")}
    (fast,) = found.values()
    assert fast.count(r"wgmma\.mma_async[^\n]*f16\.f16") == 8  # 4 x 2 consumers
    assert fast.spilled_bytes <= SPILL_LIMIT and not fast.warnings


def test_channels_first_goes_by_way_of_copies():
    names = [
        n for n, _ in reports("implicit_gemm_transformed", "forward n64c128h28k128r3p1 float16")
    ]
    assert names.count("convolution_transform_kernel") == 4  # x, w, y in for beta, y out
    assert "convolution_image_ws_kernel" in names


def test_one_binary_serves_patches_of_every_shape():
    sources = set()
    for line in ("n64c128h28k128r3p1", "n256c128h7k128r3p1"):
        found = problem(f"forward {line} bfloat16 layout=NHWC")
        tile = tiles.IMAGE_HALF[0]
        view = ws.image_view(found)
        patch = patches.choose_patch(view.geo.images, view.geo.axes, tile.bm, False)
        kernel = ws.image_launch(found, DEVICE, ws.ImageChoice(tile, patch, 0.0))
        sources.add((patch.box, launch.launches_of(kernel)[0].source.key("sm_90")))
    assert len({box for box, _ in sources}) == 2 and len({key for _, key in sources}) == 1


@pytest.mark.parametrize(
    "algorithm, line, reason",
    [
        ("implicit_gemm_ws", "forward n1c3h9k8r3 float16 layout=NHWC", "multiple of 8"),
        ("implicit_gemm_ws", "forward n1c64h9k64r3 float16", "TMA wants them adjacent"),
        ("implicit_gemm_ws", "forward n1c64h9k64r3 float32 layout=NHWC", "tf32"),
        ("implicit_gemm_ws", "backward_data n1c64h9k64r3u2l2 float16 layout=NHWC", "dilation"),
        ("implicit_gemm_ws", "forward n1c64h9k64r1g8 float16 layout=NHWC", "too narrow"),
        ("implicit_gemm_ws", "forward n1c64h9k64r3 float64 layout=NHWC", "float64"),
        ("implicit_gemm_ws", "forward n0c64h9k64r3 float16 layout=NHWC", "size 0"),
        ("implicit_gemm_ws", "backward_filter n2c72h9k72r3p1g72 float16 layout=NHWC", "of a group"),
        ("implicit_gemm_halo", "backward_filter n8c64h9k64r5 float16 layout=NHWC", "3 wide"),
        (
            "implicit_gemm_halo",
            "backward_filter n8c64h9k64r3u2 float16 layout=NHWC",
            "unit strides",
        ),
        ("implicit_gemm_f16x3", "forward n1c64h9k64r3 float32 layout=NHWC math=tf32", "ieee"),
        ("implicit_gemm_f16x3", "forward n1c6h9k64r3 float32 layout=NHWC", "multiple of 4"),
        (
            "implicit_gemm_f16x3_split",
            "backward_filter n1c64h9k64r3 float32 layout=NHWC math=tf32",
            "ieee",
        ),
        ("implicit_gemm_f16x3_split", "forward n1c64h9k64r3 float32 layout=NHWC", "filter"),
        ("implicit_gemm_transformed", "forward n1c64h9k64r3 float16 layout=NHWC", "already"),
        ("implicit_gemm_planar", "forward n1c64h8k64r1 float16 layout=NHWC", "not adjacent"),
        ("implicit_gemm_planar", "forward n1c64h7k64r1 float16", "multiples of 8"),
        ("implicit_gemm_planar", "backward_filter n1c64h8k64r1u2 float16", "unit strides"),
        ("implicit_gemm_grouped", "forward n1c64h8k64r3g1 float16 layout=NHWC", "two groups"),
        ("implicit_gemm_grouped", "forward n1c64h8k128r3g8 float16 layout=NHWC", None),
        ("implicit_gemm_grouped", "backward_data n1c64h8k128r3g8 float16 layout=NHWC", "side by"),
        ("implicit_gemm_grouped", "forward n1c64h9k64r7g8 float16 layout=NHWC", "49 taps"),
        ("implicit_gemm_grouped", "forward n1c64h9k64r3g8 float32 layout=NHWC", "tf32"),
        (
            "implicit_gemm_bf16x3_split",
            "backward_filter n1c64h9k64r1 float32 layout=NHWC",
            "tf32",
        ),
    ],
)
def test_refusals_say_why(algorithm, line, reason):
    found = BY_NAME[algorithm].supports(problem(line), DEVICE)
    assert found is None if reason is None else reason in found


def test_other_chips_are_refused():
    found = problem("forward n1c64h9k64r3 float16 layout=NHWC")
    for algorithm in ALGORITHMS:
        assert "sm_90" in algorithm.supports(found, launch.target_device("sm_80"))


def naive_taps(axis, span, backward):
    """Taps of all tiles that meet the tensor, one pixel and tap at a time."""
    total, u = 0, axis.u
    length = -(-axis.size // u) if backward else axis.out
    for rho in range(u if backward else 1):
        for o in range(0, -(-length // span) * span, span):
            for r in range(axis.taps):
                hit = False
                for i in range(o, o + span):
                    if backward:
                        at = i * u + rho + axis.pad - r * axis.dil
                        hit |= at % u == 0 and 0 <= at // u < axis.out
                    else:
                        hit |= 0 <= i * u + r * axis.dil - axis.pad < axis.size
                total += hit
    return total


@pytest.mark.parametrize("backward", [False, True])
def test_taps_counted_are_those_that_meet_the_tensor(backward):
    for size, taps, pad, u, dil in itertools.product(
        (5, 8, 13), (1, 3, 5), (0, 1, 2), (1, 2, 3), (1, 2)
    ):
        out = (size + 2 * pad - (taps - 1) * dil - 1) // u + 1
        if out < 1 or (backward and u > 1 and dil > 1):
            continue
        axis = Axis(size, taps, out, pad, u, dil)
        for span in (1, 2, 8):
            counted, naive = (
                patches.count_taps(axis, span, backward)[1],
                naive_taps(axis, span, backward),
            )
            # A span may hold tensor rows between those that a stride or dilation steps on.
            assert counted >= naive if u > 1 and not backward else counted == naive, axis


@pytest.mark.parametrize("size", [7, 14, 28, 56, 13])
def test_a_patch_has_the_tile_s_pixels_and_covers_the_output(size):
    for bm in (64, 128, 256):
        axes = (Axis(), Axis(size, 3, size, 1), Axis(size, 3, size, 1))
        found = patches.choose_patch(32, axes, bm, False)
        n, d, h, w = found.box
        assert n * d * h * w == bm
        assert all(b * t >= o for b, t, o in zip(found.box, found.tiles, (32, 1, size, size)))


def test_equal_cuts_are_preferred_where_they_nearly_fill_the_chip():
    assert filter_gradient.runs_for(9, 1000, 132) == 126
    assert filter_gradient.runs_for(72, 1000, 132) == 132
    assert filter_gradient.runs_for(4, 3, 132) == 12


def test_a_division_by_a_fixed_number_is_a_multiplication():
    edges = [2**k + d for k in range(31) for d in (-1, 0, 1)]
    for divisor in (1, 2, 3, 5, 7, 8, 56, 641, 2**20 + 7, 2**30, 2**31 - 1):
        multiplier, shift = ws.inverse_of(divisor)
        assert multiplier < 2**32 and shift < 64
        near = [divisor * q + d for q in (1, 2, 1000) for d in (-1, 0, 1)]
        for n in (n for n in (*edges, *near, 2**31 - 1) if 0 <= n < 2**31):
            assert n * multiplier >> shift == n // divisor


def test_a_filter_s_parts_are_added_by_enough_programs():
    few = halo.halo_work(problem("backward_filter n50c64h56k64r3p1 bfloat16 layout=NHWC"), 132)
    many = halo.halo_work(problem("backward_filter n64c512h14k512r3p1 bfloat16 layout=NHWC"), 132)
    for work in (few, many):
        shape = filter_gradient.sum_shape(work)
        programs = work.tiles * work.parts * work.rows * work.columns // shape["BLOCK"]
        assert programs >= 4 * 132
        assert shape["BLOCK"] * shape["SLOTS"] <= filter_gradient.SUM_LOADS


def test_parts_end_where_the_next_begin():
    cut = filter_gradient.FilterWork(9, 100, 7, 64, 64, 1, 0.0).cut.values
    starts = [p * cut[0] + p * cut[1] // 7 for p in range(8)]
    assert starts == [p * 900 // 7 for p in range(8)]


@pytest.mark.parametrize("out, width", [(28, 14), (7, 8), (12, 12), (11, 12), (56, 14)])
def test_halo_widths(out, width):
    assert halo.choose_width(out) == width


def test_workspace_is_asked_for_only_where_it_is_used():
    found = problem("backward_filter n64c128h28k128r3p1 bfloat16 layout=NHWC")
    assert BY_NAME["implicit_gemm_ws"].workspace(found, DEVICE) == 0
    work = filter_gradient.FilterSplit().work(found, DEVICE)
    assert work.workspace == (work.programs + work.tiles) * work.rows * work.columns * 4
    assert BY_NAME["implicit_gemm_ws_split"].workspace(found, DEVICE) == work.workspace


@pytest.mark.parametrize("tile", tiles.IMAGE_TF32, ids=str)
def test_every_tf32_tile_fits_shared_memory_and_does_not_spill(tile):
    found = problem("forward n64c256h28k256r3p1 float32 layout=NHWC math=tf32")
    view = ws.image_view(found)
    patch = patches.choose_patch(view.geo.images, view.geo.axes, tile.bm, False)
    (made,) = launch.launches_of(ws.image_launch(found, DEVICE, ws.ImageChoice(tile, patch, 0.0)))
    report = compile.inspect(made.source, "sm_90", made.binary)
    assert report.shared <= tiles.SHARED_BYTES
    assert report.spilled_bytes <= SPILL_LIMIT and not report.warnings
    assert report.count(WGMMA + r"[^\n]*tf32") >= 2 * tile.consumers


def test_the_tf32_gradient_by_data_reads_a_turned_filter():
    line = "backward_data n64c128h28k128r3p1 float32 layout=NHWC math=tf32"
    found = dict(reports("implicit_gemm_ws", line))
    assert list(found) == ["convolution_transform_kernel", "convolution_image_ws_kernel"]
    assert found["convolution_image_ws_kernel"].count(WGMMA + r"[^\n]*tf32") >= 2
    assert BY_NAME["implicit_gemm_ws"].workspace(problem(line), DEVICE) == problem(line).w.nbytes


@pytest.mark.parametrize("direction", ["forward", "backward_data"])
def test_few_tiles_share_their_steps_among_programs(direction):
    line = f"{direction} n8c512h7k512r3p1 bfloat16 layout=NHWC"
    found = dict(reports("implicit_gemm_ws_split", line))
    assert list(found) == ["convolution_image_ws_kernel", "convolution_image_sum_kernel"]
    assert not any(report.spilled_bytes or report.warnings for report in found.values())
    choice = image_split.choose_split(problem(line), tiles.IMAGE_HALF, tiles.MULTIPROCESSORS)
    assert choice.parts > 1 and choice.count < tiles.MULTIPROCESSORS
    workspace = BY_NAME["implicit_gemm_ws_split"].workspace(problem(line), DEVICE)
    assert workspace == choice.nbytes


def test_a_float32_image_that_is_written_may_stay_channels_first():
    line = "forward n8c128h28k128r3p1 float32"
    names = [n for n, _ in reports("implicit_gemm_transformed_input", line)]
    assert names.count("convolution_transform_kernel") == 2  # x and w
    for other, reason in (
        ("forward n8c128h28k128r3p1 float16", "float32"),
        ("backward_data n8c128h28k128r3p1u2 float32", "strided"),
        ("forward n64c128h112k128r3p1 float32", "at most"),
        ("backward_filter n8c128h28k128r3p1 float32", "writes none"),
    ):
        assert reason in BY_NAME["implicit_gemm_transformed_input"].supports(problem(other), DEVICE)
