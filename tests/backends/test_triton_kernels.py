"""Every Triton algorithm against the float64 reference on tiny problems, on a CUDA device or in
Triton's interpreter (TRITON_INTERPRET=1; `test_triton_interpreter.py` sets it)."""

import pytest

pytest.importorskip("triton")
from bedstone.backends import triton as backend
from bedstone.plan import registry
from bedstone.plan.handle import Handle
from bedstone.spec.problem import parse_problem
from bedstone.testing.harness import Case, run_case

pytestmark = pytest.mark.skipif(
    backend.missing() is not None, reason=f"{backend.missing()}; not in the interpreter"
)

GEMM, SPLIT, DEPTHWISE = (
    f"triton:{name}" for name in ("implicit_gemm", "implicit_gemm_split", "direct_depthwise")
)
PROBLEMS = [
    (GEMM, "convolution forward n2c3h7w6k4r3s3p1 float32"),
    (GEMM, "convolution forward n1c40h5w6k5r3s2ph1_0u2 bfloat16 layout=NHWC"),
    (GEMM, "convolution forward n2c3h7w6k4r3s3p1 float32 layout=NHWC bias activation=tanh"),
    (GEMM, "convolution forward n1c6h9w8k4r2s3p1u4l2g2 float16 mode=convolution"),
    (GEMM, "convolution forward n1c4d4h5w4k6t2r3s3p1 float64 layout=NHWC"),
    (GEMM, "convolution forward n1c33h4w5k34r3s1 float32"),
    (GEMM, "convolution forward n2c4w9k6s3p1 float32"),
    (GEMM, "convolution forward n2c5h4w5k6r3s3p1 float32 x=200,40,9,1 y=300,1,70,11"),
    (GEMM, "convolution backward_data n2c5h7w6k34r3s3p1u2 float32 layout=NHWC"),
    (GEMM, "convolution backward_data n1c6h9w8k4r2s3p1u4l2g2 float64"),
    (GEMM, "convolution backward_data n1c4h2w2k6r1s1u5 float32"),
    (GEMM, "convolution backward_data n1c4d4h5w4k6t2r3s3p1u2 float32"),
    (GEMM, "convolution backward_filter n2c36h7w6k34r3s2p1u2 float32 layout=NHWC"),
    (GEMM, "convolution backward_filter n1c6h9w8k4r2s3p1u4l2g2 float64 mode=convolution"),
    (GEMM, "convolution backward_filter n0c4h5w4k6r3s3p1 float32"),
    (SPLIT, "convolution forward n1c200h3k5r3p1 float32 layout=NHWC bias activation=relu"),
    (SPLIT, "convolution backward_data n1c7h6k130r3p1u2 float32"),
    (SPLIT, "convolution backward_filter n1c4h40k5r1 float32"),
    (SPLIT, "convolution backward_filter n1c3h24k5r3p1 float32 layout=NHWC"),
    (DEPTHWISE, "convolution forward n2c5h9w7k5r3s3p1g5 float32"),
    (DEPTHWISE, "convolution forward n1c6h9w8k6r2s3ph1_0pw0_2uh2uw1lh1lw2g6 float64 layout=NHWC"),
    (DEPTHWISE, "convolution backward_data n2c3h8w9k3r3s5p2u2g3 float32 layout=NHWC"),
    (DEPTHWISE, "convolution backward_data n1c4w9k4s3p1g4 float16"),
    (DEPTHWISE, "convolution backward_filter n2c5h9w7k5r3s3p1g5 float32"),
    (DEPTHWISE, "convolution backward_filter n2c5h9w7k5r3s3p1u2g5 bfloat16 layout=NHWC"),
    (DEPTHWISE, "convolution backward_filter n3c2h7w7k2r3s3p1lh2u3g2 float64 layout=NHWC"),
    ("triton:reduce_bias", "convolution backward_bias 2x5x3x4 float32 y=NHWC"),
    ("triton:reduce_bias_split", "convolution backward_bias 2x5x80x80 float32"),
    ("triton:pointwise", "activation forward 2x3x5x7 float32 kind=gelu x=NHWC"),
    ("triton:pointwise", "activation forward 2x3x5x7 float16 kind=gelu"),
    ("triton:pointwise", "activation forward 2x3x50x7 float32 kind=tanh"),
    ("triton:pointwise", "activation backward 2x3x5x7 float64 kind=elu"),
    ("triton:pointwise", "tensor_ops transform 2x70x5x7 bfloat16 from=float32 x=NHWC y=NCHW"),
    ("triton:pointwise", "tensor_ops add 2x3x4x5 float32 b=1x3x1x1"),
    ("triton:pointwise", "tensor_ops set 2x3x4x5 float32 y=NHWC"),
    ("triton:pointwise", "tensor_ops scale 2x3x4 float64"),
    ("triton:direct", "pooling forward n2c3h7w6r3p1u2 float32 mode=max with_indices"),
    ("triton:direct", "pooling forward n1c5h5w4r3u2 float32 mode=average_include_padding "
                      "rounding=ceil layout=NHWC"),
    ("triton:direct", "pooling backward n2c3h7w6r3p1u2 float32 mode=average_exclude_padding"),
    ("triton:direct", "pooling backward n1c3h6w5r3p1u2 float32 mode=max"),
    ("triton:two_pass", "pooling backward n1c3h6w5r3p1u2 float32 mode=max layout=NHWC"),
    ("triton:direct", "pooling adaptive_backward n2c3h7w6 float32 output=3x4"),
    ("triton:patches", "pooling forward n2c3h7w6r3p1u2 float32 mode=max"),
    ("triton:patches", "pooling forward n1c5h5w4r3u2 float32 mode=average_include_padding "
                       "rounding=ceil layout=NHWC"),
    ("triton:patches", "pooling backward n2c3h7w8r3p1u2 float32 mode=max"),
    ("triton:patches", "pooling backward n1c3h6w5r2p1 bfloat16 mode=max layout=NHWC"),
    ("triton:patches", "pooling backward n2c3h5w8r3p1 float32 mode=average_exclude_padding"),
    ("triton:whole", "pooling forward n2c3h9w8r9s8 float32 mode=average_include_padding"),
    ("triton:whole", "pooling forward n2c3h9w8r9s8 float16 mode=max layout=NHWC"),
    ("triton:online", "softmax forward 3x5x4x2 float32 axes=1 layout=NHWC"),
    ("triton:online", "softmax forward 2x17000 float32 axes=1 algorithm=log"),
    ("triton:online_split", "softmax forward 2x33000 bfloat16 axes=1 algorithm=log"),
    ("triton:online", "softmax backward 2x3x4x2 float64 axes=0,2 algorithm=accurate"),
    ("triton:rows", "normalization training 3x4x5x6 float32 kind=batch momentum=0.1"),
    ("triton:rows", "normalization training 2x6x3x5 bfloat16 kind=group groups=3 layout=NHWC"),
    ("triton:rows", "normalization training 5x33 float32 kind=layer x=40,1 y=1,7"),
    ("triton:rows", "normalization training 4x3x20 float64 kind=rms axis=2 no_scale"),
    ("triton:rows", "normalization training 3x0x4 float32 kind=batch"),
    ("triton:rows", "normalization training 0x3x4 float32 kind=batch"),
    ("triton:rows", "normalization inference 2x5x4x3 float32 parameters=float64"),
    ("triton:rows", "normalization backward 3x4x5x6 float32 kind=batch layout=NHWC"),
    ("triton:rows", "normalization backward 2x6x3x5 float32 kind=group groups=2"),
    ("triton:rows", "normalization backward 7x4x9 float16 kind=layer axis=2 no_shift"),
    ("triton:rows_split", "normalization training 2x3x60x50 float32 momentum=0.2 biased"),
    ("triton:rows_split", "normalization training 3x5x40x41 float32 kind=batch layout=NHWC"),
    ("triton:rows_split", "normalization backward 3x5x40x41 float32 kind=batch layout=NHWC"),
    ("triton:rows_split", "normalization backward 300x40 float32 kind=layer"),
    ("triton:window", "normalization lrn_forward 2x7x5x3 float32 size=5"),
    ("triton:window", "normalization lrn_backward 1x9x2x4 bfloat16 size=4 alpha=0.5 beta=0.6"),
    ("triton:window", "normalization lrn_backward 2x3x4x5 float64 size=3 alpha=1.0 region=within"),
    ("triton:pointwise", "dropout forward 2x3x5x7 float32 p=0.3 x=NHWC y=NCHW"),
    ("triton:pointwise", "dropout backward 5x33 float64 p=0.5"),
    ("triton:pointwise", "dropout forward 3x5x7 float16 p=0.1 with_mask"),
    ("triton:pointwise", "dropout backward 3x5x7 bfloat16 p=0.1 with_mask"),
]  # fmt: skip
# (fill, alpha, beta, placement), as the conformance suite has them but fewer.
RUNS = [("random", -0.5, 1.0, "middle"), ("special", 1.0, 0.0, "end")]


@pytest.fixture(scope="module")
def handle():
    return Handle("cuda")


@pytest.mark.parametrize(("algorithm", "line"), PROBLEMS)
def test_equals_the_reference(handle, algorithm, line):
    problem = parse_problem(line)
    for fill, alpha, beta, placement in RUNS:
        ran = run_case(Case(problem, algorithm, fill, alpha, beta, placement), handle)
        assert ran in (algorithm, "plan:nothing")


def test_every_algorithm_is_among_them():
    named = {(algorithm, line.split()[0]) for algorithm, line in PROBLEMS}
    for primitive in {line.split()[0] for _, line in PROBLEMS}:
        for algorithm in registry.algorithms_of("triton", primitive):
            assert (algorithm.name, primitive) in named
