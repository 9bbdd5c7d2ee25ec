"""Problems as lines of text: what is printed is read back as the same problem."""

import pickle

import pytest
from hypothesis import given
from spec_cases import law, problems

from bedstone.plan.plan import same_elements
from bedstone.spec.convolution import convolution_problem
from bedstone.spec.errors import InvalidDescriptor
from bedstone.spec.problem import PRIMITIVES, parse_problem
from bedstone.spec.tensor import TensorDesc

LINES = [
    "convolution forward n128c96h64w64k128r9s9 float32",
    "convolution backward_data n2c4w8k6s3p1_2u2g2 float64",
    "convolution backward_filter n2c4d5h6w8k6t2r3s1pd1ph2pw0 float16 x=NDHWC w=NDHWC y=NDHWC",
    "convolution forward n1c8h8w8k8r3s3p1 float32 mode=convolution math=tf32 nondeterministic bias"
    " activation=clipped_relu:3.0:0.0",
    "convolution backward_bias 2x3x4x4 float32 y=NHWC",
    "pooling forward n2c3h7w7r3s3u2 float32 mode=max rounding=ceil with_indices",
    "pooling backward n2c3h7w7r2s2 float32 mode=average_exclude_padding output=7x7 y=NHWC",
    "pooling adaptive_forward n1c2h5w7 float32 output=3x3",
    "softmax forward 2x3x4 float32 algorithm=log axes=1,2",
    "softmax backward 5x7 float64 algorithm=fast axes=1 saved=1,5",
    "activation forward 10 float32 kind=leaky_relu:0.2:0.0 x=3",
    "activation backward 2x3x4x5 bfloat16 kind=gelu saved=NHWC",
    "tensor_ops transform 2x3x4x5 float16 from=float32 y=NHWC",
    "tensor_ops add 2x3x4x5 float32 b=1x3x1x1",
    "tensor_ops set 7 float64 y=-1",
    "tensor_ops scale 2x2x2x2x2x2x2x2 float32",
    "normalization training 2x6x4 float32 kind=group epsilon=1e-05 groups=3 no_statistics",
    "normalization training 2x6x4 float16 kind=batch epsilon=0.001 parameters=float16 momentum=0.1"
    " biased",
    "normalization inference 2x6x4x4 float32 kind=batch epsilon=0.001 no_shift x=NHWC y=NHWC",
    "normalization lrn_backward 1x8x3x3 float32 size=5 alpha=0.0001 beta=0.75 k=2.0 region=within",
    "dropout forward 4x5 float32 p=0.25 with_mask",
]


@pytest.mark.parametrize("line", LINES)
def test_a_printed_line_prints_itself(line):
    assert str(parse_problem(line)) == line


def test_every_primitive_has_lines():
    assert {line.split()[0] for line in LINES} == set(PRIMITIVES)


@law
@given(problems())
def test_round_trip(problem):
    again = parse_problem(str(problem))
    assert str(again) == str(problem) and type(again) is type(problem)
    assert len(again.operands) == len(problem.operands)
    for a, b in zip(again.operands, problem.operands):
        assert (a.name, a.role) == (b.name, b.role)
        assert same_elements(a.desc, b.desc), a.name
    assert again.flops == problem.flops
    assert pickle.loads(pickle.dumps(problem)) == problem
    assert hash(pickle.loads(pickle.dumps(problem))) == hash(problem)


def test_short_forms():
    """Square images and windows need one letter; a layout may be named once for all."""
    full = "convolution forward n2c4h8w8k6r3s3p1 float32"
    assert parse_problem("convolution forward n2c4h8k6r3p1") == parse_problem(full)
    nhwc = convolution_problem("forward", (2, 4, 8, 8), (6, 4, 3, 3), padding=1, layout="NHWC")
    assert parse_problem(full + " layout=nhwc") == nhwc
    assert parse_problem("pooling forward n1c2w8s2").x == TensorDesc.packed((1, 2, 8))


@pytest.mark.parametrize(
    "line",
    [
        "",
        "convolution",
        "convolute forward n1c1h1k1r1",
        "convolution sideways n1c1h1k1r1",
        "convolution forward n1c1h4k1",  # no window
        "convolution forward n1h4k1r1",  # no channels
        "convolution forward n1c1h4r1",  # no filters
        "convolution forward n1c1h4k1r1z3",
        "convolution forward n1c1h4k1r1r1",
        "convolution forward n1c1hfourk1r1",
        "convolution forward n1c1h4k1r1 int64",
        "convolution forward n1c1h4k1r1 x=NCHWX",
        "convolution forward n1c1h4k1r1 x=1,2",
        "convolution forward n1c1h4k1r1 dtype=float8",
        "convolution forward n1c1h4k1r1g0",
        "pooling forward n1c1h4 mode=max",
        "pooling forward n1c1h4r2 output=two",
        "softmax forward 2x3 axes=1,b",
        "softmax forward 2,3",
        "activation forward 4 kind=relu:x",
        "normalization training 2x3 epsilon=small",
        "normalization training 2x3 kind=layer axis=one",
        "tensor_ops shuffle 2x3",
        "dropout forward 2x3 p=2",
    ],
)
def test_bad_lines_are_refused(line):
    with pytest.raises(InvalidDescriptor):
        parse_problem(line)


@pytest.mark.parametrize("word", ["float23", "nhwc", "Bias"])
def test_an_unknown_word_is_refused(word: str) -> None:
    with pytest.raises(InvalidDescriptor, match=word):
        parse_problem(f"convolution forward n1c2h4k2r1 {word}")
