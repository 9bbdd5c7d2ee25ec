"""Pooling by NumPy alone against loops over windows: ties, NaN, infinities, overrunning windows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("google.protobuf")
from caffe_cases import layer, network

from bedstone.frameworks.caffe import native_pooling
from bedstone.frameworks.caffe.layers_pooling import pooled_size


def loops(x, out, window, stride, pad):
    """(N, C, P, Q) of a list of (flat place, value) for the elements of each window, and counts."""
    h, w = x.shape[2:]
    found, counts = np.empty((*x.shape[:2], *out), object), np.empty(out, int)
    for p, q in np.ndindex(*out):
        top, left = p * stride[0] - pad[0], q * stride[1] - pad[1]
        rows, columns = range(top, top + window[0]), range(left, left + window[1])
        inside = [(r, s) for r in rows for s in columns if 0 <= r < h and 0 <= s < w]
        counts[p, q] = sum(r < h + pad[0] and s < w + pad[1] for r in rows for s in columns)
        for n, c in np.ndindex(*x.shape[:2]):
            found[n, c, p, q] = [(r * w + s, float(x[n, c, r, s])) for r, s in inside]
    return found, counts


def first_maximum(elements):
    """(place, value) of the first NaN, or else of the first of the largest."""
    nan = [e for e in elements if np.isnan(e[1])]
    return nan[0] if nan else max(elements, key=lambda e: e[1])


@st.composite
def geometries(draw):
    size = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    window = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    pad = tuple(draw(st.integers(0, r - 1)) for r in window)
    stride = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    ceil = draw(st.booleans())
    sides = zip(size, window, stride, pad)
    return size, window, stride, pad, tuple(pooled_size(*side, ceil) for side in sides)


@given(geometries(), st.integers(0, 2**20), st.sampled_from(["float32", "float64"]))
@settings(max_examples=60, deadline=None)
def test_windows_are_those_of_plain_loops(geometry, seed, dtype):
    size, window, stride, pad, out = geometry
    if min(out) < 1:
        return
    rng = np.random.default_rng(seed)
    x = rng.integers(-2, 3, (3, 2, *size)).astype(dtype)  # (ties)
    odd = rng.random(x.shape)
    x[odd < 0.1] = -np.inf
    x[odd > 0.97] = np.nan
    elements, counts = loops(x, out, window, stride, pad)
    windows = native_pooling.Windows(size, out, window, stride, pad)
    y, places = np.empty(elements.shape, dtype), np.empty(elements.shape, np.int64)
    windows.maximum(x, y, places)
    expected = [first_maximum(e) for e in elements.flat]
    np.testing.assert_array_equal(places.ravel(), [place for place, _ in expected])
    np.testing.assert_array_equal(y.ravel(), [value for _, value in expected])
    alone = np.empty_like(y)
    windows.maximum(x, alone)
    np.testing.assert_array_equal(alone, y)

    dy = rng.integers(-9, 10, y.shape).astype(dtype)
    dx, wanted = np.full_like(x, np.nan), np.zeros_like(x)
    for at in np.ndindex(*y.shape):
        wanted[at[:2]].reshape(-1)[places[at]] += dy[at]
    windows.spread_maximum(places, dy, dx)
    np.testing.assert_array_equal(dx, wanted)

    x = rng.integers(-8, 9, x.shape).astype(dtype)
    elements, _ = loops(x, out, window, stride, pad)
    sums = np.reshape([sum(v for _, v in e) for e in elements.flat], y.shape)
    windows.average(x, y)
    np.testing.assert_allclose(y, sums / counts, rtol=1e-6)
    windows.spread_average(dy, dx)
    wanted[...] = 0
    for at in np.ndindex(*y.shape):
        for place, _ in elements[at]:
            wanted[at[:2]].reshape(-1)[place] += dy[at] / counts[at[2:]]
    np.testing.assert_allclose(dx, wanted, rtol=1e-5, atol=1e-5)


def test_a_draw_is_of_the_window_where_the_last_ones_overrun():
    windows = native_pooling.Windows((5, 5), (3, 3), (2, 2), (2, 2), (0, 0))
    x = np.arange(1, 51, dtype=np.float32).reshape(1, 2, 5, 5)
    y, places = np.empty((1, 2, 3, 3), np.float32), np.empty((1, 2, 3, 3), np.int64)
    for uniform in (0.0, 0.5, np.nextafter(np.float32(1), np.float32(0))):
        windows.draw(x, y, np.full(y.shape, uniform, np.float32), places)
        at = places.reshape(2, -1)
        np.testing.assert_array_equal(
            y.reshape(2, -1), np.take_along_axis(x[0].reshape(2, -1), at, 1)
        )
        assert places[0, 0, 2, 2] == 24 and np.isin(places[0, 0, 0, 0], (0, 1, 5, 6))
    assert places[0, 0, 0, 0] == 6  # the last one at the end of the scale


def test_a_test_network_finds_its_places_when_asked_for_a_gradient():
    text = layer("Pooling", "pooling_param { kernel_size: 3 stride: 2 }")
    text += 'layer { name: "sum" type: "Reduction" bottom: "y" top: "loss" loss_weight: 1 }'
    found = []
    for phase in ("TRAIN", "TEST"):
        net = network(text, [(2, 3, 7, 7)], phase, engine="CAFFE")
        net.blobs["a"].data[...] = np.random.default_rng(4).standard_normal((2, 3, 7, 7))
        net.forward()
        net.backward()
        found.append(net.blobs["a"].diff.copy())
    np.testing.assert_array_equal(*found)
    assert found[0].sum() == 2 * 3 * 9


@pytest.mark.parametrize("images", [1, 5])
def test_blocks_of_images_are_all_covered(monkeypatch, images):
    monkeypatch.setattr(native_pooling, "BLOCK", 2 * 3 * 36)
    x = np.random.default_rng(5).standard_normal((images, 3, 6, 6)).astype(np.float32)
    windows = native_pooling.Windows((6, 6), (3, 3), (2, 2), (2, 2), (0, 0))
    y, places = np.empty((images, 3, 3, 3), np.float32), np.empty((images, 3, 3, 3), np.int64)
    windows.maximum(x, y, places)
    np.testing.assert_array_equal(y, x.reshape(images, 3, 3, 2, 3, 2).max((3, 5)))
    windows.average(x, y)
    np.testing.assert_allclose(y, x.reshape(images, 3, 3, 2, 3, 2).mean((3, 5)), rtol=1e-5)
