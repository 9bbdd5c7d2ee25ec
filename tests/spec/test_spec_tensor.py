"""TensorDesc and DType against NumPy's arrays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from spec_cases import law, packed, shapes, strided

from bedstone.spec.dtypes import DATA_DTYPES, DType
from bedstone.spec.tensor import TensorDesc, memory_order


def offsets(desc):
    """The element offset of every index, by brute force."""
    return [sum(i * s for i, s in zip(at, desc.strides)) for at in np.ndindex(*desc.dims)]


@pytest.mark.parametrize(
    "layout, strides",
    [
        (None, (60, 20, 5, 1)), ("NCHW", (60, 20, 5, 1)), ("NHWC", (60, 1, 15, 3)),
        ("nhwc", (60, 1, 15, 3)), ("CHWN", (1, 40, 10, 2)), ("NWHC", (60, 1, 3, 12)),
    ],
)  # fmt: skip
def test_layouts_by_name(layout, strides):
    desc = TensorDesc.packed((2, 3, 4, 5), "float32", layout)
    assert desc.strides == strides
    assert desc.is_packed(layout) and desc.nbytes == 480
    expected = layout.upper() if layout in ("NCHW", "NHWC", "nhwc") else None
    assert desc.layout == ("NCHW" if layout is None else expected)


def test_layouts_of_other_ranks():
    assert TensorDesc.packed((2, 3, 4), layout="NWC").strides == (12, 1, 3)
    assert TensorDesc.packed((2, 3, 4, 5, 6), layout="NDHWC").strides == (360, 1, 90, 18, 3)
    assert memory_order(6, None) == (0, 1, 2, 3, 4, 5)


@law
@given(shapes(1, 8, 3), st.data())
def test_offset_range_and_overlap(dims, data):
    desc = data.draw(strided(dims, repeats=True))
    reached = offsets(desc)
    assert desc.offset_range() == (min(reached), max(reached))
    assert desc.self_overlaps() == (len(set(reached)) < len(reached))
    assert desc.size == len(reached)


@pytest.mark.parametrize(
    "dims, strides, overlaps",
    [
        ((2, 2), (1, 1), True),
        ((3, 2), (2, 3), False),  # do not nest, and yet never meet: 0 3 2 5 4 7
        ((4, 2), (2, 4), True),
        ((2, 3), (0, 1), True),
        ((1, 3), (0, 1), False),
        ((0, 3), (0, 0), False),
        ((4,), (-1,), False),
    ],
)
def test_overlap_by_hand(dims, strides, overlaps):
    assert TensorDesc(dims, strides, "float32").self_overlaps() is overlaps


@law
@given(shapes(1, 5), st.data())
def test_sub_tensor_is_a_slice(dims, data):
    array = np.arange(np.prod(dims)).reshape(dims).astype(np.float64)
    start = [data.draw(st.integers(0, d - 1)) for d in dims]
    size = [data.draw(st.integers(1, d - a)) for d, a in zip(dims, start)]
    offset, desc = TensorDesc.of(array).sub(start, size)
    box = array[tuple(slice(a, a + n) for a, n in zip(start, size))]
    assert desc == TensorDesc.of(box)
    assert box.ravel()[0] == array.ravel()[offset]


def test_of_numpy_views():
    array = np.zeros((4, 6, 8), np.float32)
    view = array[::-1, 1::2].transpose(2, 0, 1)
    desc = TensorDesc.of(view)
    assert desc.dims == (8, 4, 3) and desc.strides == (1, -48, 16)
    assert TensorDesc.of(np.broadcast_to(array[:1], array.shape)).strides == (0, 8, 1)
    assert TensorDesc.of(np.float64(3.0)[()]).dims == (1,)
    assert TensorDesc.packed((2, 3, 4)).permuted((2, 0, 1)).strides == (1, 12, 4)


def test_dtypes():
    assert DType.of("half") is DType.float16 and DType.of(np.float64) is DType.float64
    for dtype in DATA_DTYPES:
        assert DType.of(dtype.numpy) is dtype and dtype.numpy.itemsize == dtype.itemsize
        assert 1 + dtype.epsilon == np.float64(dtype.numpy.type(1 + dtype.epsilon))
        assert dtype.numpy.type(1 + dtype.epsilon / 4) == 1
    assert DType.bfloat16.accumulator is DType.float32
    assert DType.float64.accumulator is DType.float64
    torch = pytest.importorskip("torch")
    assert DType.of(torch.bfloat16) is DType.bfloat16


def test_prints():
    assert str(packed((2, 3, 4, 5), "float32")) == "2x3x4x5 NCHW float32"
    assert str(TensorDesc((2, 3), (4, 1), "float16")) == "2x3 strides 4,1 float16"
