"""Plan.execute checks what it is given: each mistake is told, by name, value and expectation."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from plan_fakes import Fake

from bedstone import Handle, InvalidDescriptor, parse_problem
from bedstone.arrays import ArrayRef, as_array_ref
from bedstone.spec.tensor import TensorDesc

CONVOLUTION = parse_problem("convolution forward n2c3h5w5k4r3p1 float32")
RELU = parse_problem("activation forward 4x6 float32 kind=relu")


def plan(problem, **options):
    return Handle("cpu").plan(problem, **options)


@pytest.fixture
def conv():
    x, w = np.ones((2, 3, 5, 5), np.float32), np.ones((4, 3, 3, 3), np.float32)
    return plan(CONVOLUTION), x, w, np.full((2, 4, 5, 5), np.nan, np.float32)


def refused(match, call, *arrays, **named):
    with pytest.raises(InvalidDescriptor, match=match):
        call.execute(*arrays, **named)


def test_by_order_and_by_name(conv):
    made, x, w, y = conv
    made.execute(x, w, y)
    assert y[0, 0, 2, 2] == 27 and y[0, 0, 0, 0] == 12
    other = np.empty_like(y)
    made.execute(y=other, w=w, x=x, alpha=2)
    assert np.array_equal(other, 2 * y)
    made.execute(x, y=other, w=w, alpha=1, beta=1)
    assert np.array_equal(other, 3 * y)


def test_missing_unknown_and_double_operands(conv):
    made, x, w, y = conv
    refused("y: got None, expected an array for each of", made, x, w)
    refused("w: got None", made, x, None, y)
    refused("bias: got 'ndarray', expected each of .'x', 'w', 'y'. once", made, x, w, y, bias=w)
    refused("x: got 'ndarray', expected .*once", made, x, w, y, x=x)
    refused("arrays: got 4, expected 3 arrays", made, x, w, y, y)
    refused("x: got 'str', expected an array", made, "text", w, y)
    refused("x: got 'list', expected an array", made, [1.0], w, y)


def test_dims_strides_and_dtype_must_be_the_planned(conv):
    made, x, w, y = conv
    refused(r"x: got '1x3x5x5 NCHW float32', expected the planned 2x3x5x5", made, x[:1], w, y)
    refused("w: got '4x3x3x3 NCHW float64', expected the planned", made, x, w.astype("d"), y)
    refused(
        "y: got '2x4x5x5 NHWC float32'",
        made,
        x,
        w,
        np.empty((2, 5, 5, 4), "f").transpose(0, 3, 1, 2),
    )
    refused("x: got '2x3x5x5 strides", made, x[..., ::-1], w, y)
    wide = np.ones((2, 3, 5, 10), np.float32)
    refused("x: got '2x3x5x5 strides 150,50,10,2", made, wide[..., ::2], w, y)


def test_strides_of_single_elements_do_not_matter():
    made = plan(parse_problem("activation forward 1x6 float32 kind=relu"))
    x = np.lib.stride_tricks.as_strided(np.ones(6, "f"), (1, 6), (4000, 4))
    y = np.empty((1, 6), np.float32)
    made.execute(x, y)
    assert y.sum() == 6


def test_an_output_that_cannot_be_written(conv):
    made, x, w, y = conv
    x.flags.writeable = w.flags.writeable = False
    made.execute(x, w, y)
    y.flags.writeable = False
    refused("y: got 'a read-only array', expected memory that can be written", made, x, w, y)


def test_an_output_that_overlaps_an_input(conv):
    made, x, w, _ = conv
    memory = np.ones(2 * 4 * 25 + 100, np.float32)
    y = memory[:200].reshape(2, 4, 5, 5)
    for start in (0, 50):
        over = memory[start : start + 150].reshape(2, 3, 5, 5)
        refused("y: got 'memory that overlaps x'", made, over, w, y)
    made.execute(memory[150:300].copy().reshape(2, 3, 5, 5), w, y)


def test_interleaved_tensors_do_not_overlap():
    line = "activation forward 4x6 float32 kind=relu x=12,2 y=12,2"
    made = plan(parse_problem(line))
    memory = np.arange(-24, 24, dtype=np.float32).reshape(4, 12)
    expected = np.maximum(memory[:, ::2], 0)
    made.execute(memory[:, ::2], memory[:, 1::2])
    assert np.array_equal(memory[:, 1::2], expected)


def test_in_place_where_it_is_promised_and_only_exactly():
    made = plan(RELU)
    x = np.arange(-12, 12, dtype=np.float32).reshape(4, 6)
    expected = np.maximum(x, 0)
    made.execute(x, x)
    assert np.array_equal(x, expected)
    memory = np.zeros(30, np.float32)
    x, shifted = memory[:24].reshape(4, 6), memory[1:25].reshape(4, 6)
    refused("y: got 'memory that overlaps x'", made, x, shifted)
    square = np.zeros((6, 6), np.float32)
    turned = plan(parse_problem("activation forward 6x6 float32 kind=relu y=1,6"))
    refused("y: got 'memory that overlaps x'", turned, square, square.T)


def test_two_outputs_that_overlap():
    made = plan(parse_problem("pooling forward n1c1h4r2u2 float32 mode=max with_indices"))
    x, memory = np.ones((1, 1, 4, 4), np.float32), np.zeros(64, np.uint8)
    y, indices = (
        memory[8:24].view("f").reshape(1, 1, 2, 2),
        memory[:32].view("q").reshape(1, 1, 2, 2),
    )
    refused("y: got 'memory that overlaps indices'", made, x, y, indices)


def test_inputs_may_overlap_each_other():
    made = plan(parse_problem("activation backward 4x6 float32 kind=relu"))
    y, dx = np.ones((4, 6), np.float32), np.empty((4, 6), np.float32)
    made.execute(y, y, dx)
    assert dx.sum() == 24


def test_workspace(use):
    (fake,) = use(Fake("a:x", workspace=256))
    made = plan(RELU, workspace_limit=None)
    x, y = np.ones((4, 6), np.float32), np.empty((4, 6), np.float32)
    refused("workspace: got None, expected 256 bytes", made, x, y)
    refused(
        "workspace: got '255 bytes', expected 256 contiguous",
        made,
        x,
        y,
        workspace=np.empty(255, "B"),
    )
    refused("workspace: got '256 bytes'", made, x, y, workspace=np.empty(512, "B")[::2])
    fixed = np.empty(256, "B")
    fixed.flags.writeable = False
    refused("workspace: got 'cpu', expected writable", made, x, y, workspace=fixed)
    refused("workspace", made, x, y, workspace=256)
    enough = np.empty(64, np.float32)
    made.execute(x, y, workspace=enough)
    assert fake.last_workspace == enough.ctypes.data and y.sum() == 24


def test_memory_of_another_device():
    made = plan(RELU)
    x, y = np.ones((4, 6), np.float32), np.empty((4, 6), np.float32)
    there = ArrayRef(x.ctypes.data, TensorDesc.of(x), "cuda", 1)
    refused("x: got 'cuda:1', expected memory of cpu", made, there, y)


def test_raw_pointers_are_elements_0_0(conv):
    made, x, w, y = conv
    made(x.ctypes.data, w.ctypes.data, y.ctypes.data, alpha=0.5)
    assert y[0, 0, 2, 2] == 13.5
    turned = plan(parse_problem("activation forward 3 float32 kind=relu x=-1"))
    x, y = np.array([1, 2, 3], np.float32), np.empty(3, np.float32)
    turned(x.ctypes.data + 8, y.ctypes.data)
    assert y.tolist() == [3, 2, 1]
    turned.execute(x[::-1], y)
    assert y.tolist() == [3, 2, 1]


def test_array_refs_are_taken_as_they_are():
    made = plan(RELU)
    x, y = np.full((4, 6), -1.0, np.float32), np.ones((4, 6), np.float32)
    made.execute(as_array_ref(x), as_array_ref(y))
    assert y.sum() == 0


def test_nothing_runs_when_something_is_wrong(use):
    (fake,) = use(Fake("a:x"))
    made = plan(RELU)
    x = np.ones((4, 6), np.float32)
    refused("y", made, x, np.empty((4, 5), "f"))
    assert fake.calls == 0


def test_beta_zero_does_not_read_the_output():
    made = plan(RELU)
    x, y = np.ones((4, 6), np.float32), np.full((4, 6), np.nan, np.float32)
    made.execute(x, y, beta=0)
    assert y.sum() == 24
    made.execute(x, y, beta=ctypes.c_double(0.5).value)
    assert y.sum() == 36
