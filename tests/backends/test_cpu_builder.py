"""The kernel language: loops, masks, conversions and the transcendental functions."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from bedstone.backends.cpu import vectormath
from bedstone.backends.cpu.builder import I64, KernelBuilder, itemsize
from bedstone.backends.cpu.kernel import compiled
from bedstone.backends.cpu.objects import compile_object
from bedstone.backends.cpu.target import NAMED, Target
from bedstone.plan.config import config
from bedstone.spec.dtypes import DType
from bedstone.spec.errors import InvalidDescriptor

TARGETS = ("native", "haswell", "x86-64")
RUNNABLE = Target.named("native").triple.startswith("x86_64")


@pytest.fixture(params=TARGETS)
def target(request):
    """Run the test's kernels for this target."""
    name = request.param
    if name != "native" and not RUNNABLE:
        pytest.skip("not an x86-64 machine")
    if Target.named(name).vector_bytes > Target.named("native").vector_bytes:
        pytest.skip("the machine is narrower")
    with config(cpu_target=name):
        yield name


def elementwise(name, function, source="float32", result=None):
    """A kernel y[i] = function(x[i]) over `workspace` elements, on one thread, masked tail."""
    result = result or source

    def emit(target):
        k = KernelBuilder(target)
        lanes = min(k.lanes(source), k.lanes(result))
        with k.entry("entry", pointers=2) as call:
            x, y = call.pointers
            with k.loop(0, call.workspace, lanes) as i:
                mask = k.first_lanes(call.workspace - i, lanes)
                value = function(k.load(x + i * itemsize(source), source, lanes, mask=mask))
                k.store(value, y + i * itemsize(result), result, mask=mask)
        return k

    run = compiled(f"test {name} {source} {result}", emit, 2)

    def call(x):
        y = np.full(x.size + 8, 77, DType(result).numpy)
        run([x.ctypes.data, y.ctypes.data], x.size)
        assert (y[x.size :] == np.float32(77)).all(), "wrote past the end"
        return y[: x.size]

    return call


def test_relu_example(target):
    size, dtype = 1003, "float32"

    def emit(target):
        k = KernelBuilder(target)
        lanes, step = k.lanes(dtype), itemsize(dtype)
        chunk = 4 * lanes
        with k.entry("entry", pointers=2) as call:
            x, y = call.pointers
            with (
                k.parallel(tasks=-(-size // chunk), threads=call.threads) as job,
                job.each_task() as task,
            ):
                first = task * chunk
                with k.loop(first, k.min(first + chunk, size), lanes) as i:
                    mask = k.first_lanes(size - i, lanes)
                    v = k.fmax(k.load(x + i * step, dtype, lanes, mask=mask), 0.0)
                    k.store_blended(v, call.alpha, call.beta, y + i * step, dtype, mask=mask)
        return k

    run = compiled("test relu example", emit, 2)
    x = np.random.default_rng(0).integers(-99, 99, size).astype(np.float32)
    x[5] = np.nan
    y = np.full(size, np.nan, np.float32)
    run([x.ctypes.data, y.ctypes.data], alpha=2.0)
    np.testing.assert_array_equal(y, 2 * np.maximum(x, 0))
    x[5] = 1.0
    run([x.ctypes.data, y.ctypes.data], alpha=1.0, beta=0.0)
    run([x.ctypes.data, y.ctypes.data], alpha=2.0, beta=3.0)
    np.testing.assert_array_equal(y, 5 * np.maximum(x, 0))


def test_integers_fold():
    k = KernelBuilder(Target.named("native"))
    with k.entry("entry", pointers=1) as call:
        n = call.workspace
        assert k.min(3, 4) == 3 and k.max(3, 4) == 4
        assert n + 0 is n and n * 1 is n and n // 1 is n
        assert n * 0 == 0 and n % 1 == 0
        with k.loop(5, 6) as i:
            assert i == 5
        assert k.first_lanes(16, 16) is None


def test_control_flow(target):
    def emit(target):
        k = KernelBuilder(target)
        with k.function("add_square", I64, I64) as (address, n):
            k.store(k.load(address, "int64") + n * n, address, "int64")
        with k.entry("entry", pointers=1) as call:
            out = call.pointers[0]
            k.store(0 * out + k.constant(0, "int64"), out, "int64")
            with k.loop(0, call.workspace, 3) as i, k.if_else((i % 2).eq(0)) as (even, odd):
                with even:
                    k.call("add_square", out, i)
                with odd, k.if_(i > 8):
                    k.call("add_square", out, 100)
            with k.loop(call.workspace, 3):
                k.call("add_square", out, 1000000)
        return k

    out = np.full(1, 99, np.int64)
    compiled("test control flow", emit, 1)([out.ctypes.data], 20)
    assert out[0] == sum(i * i for i in range(0, 20, 6)) + 2 * 100**2


def test_gather_scatter_and_reductions(target):
    def emit(target):
        k = KernelBuilder(target)
        lanes = k.lanes("float32")
        with k.entry("entry", pointers=2) as call:
            x, y = call.pointers
            offsets = k.iota(lanes) * 12 - 24
            mask = k.iota(lanes) < lanes - 1
            v = k.gather(x, offsets, "float32", mask)
            k.scatter(v + 1.0, y, k.iota(lanes) * 8, "float32", mask)
            k.store(k.reduce(v, lambda a, b: a + b), y, "float32", offset=4)
            k.store(k.reduce(v, k.fmax), y, "float32", offset=12)
        return k

    lanes = Target.named(target).vector_bytes // 4
    x = np.arange(100, dtype=np.float32)
    y = np.zeros(2 * lanes, np.float32)
    compiled("test gather", emit, 2)([x[6:].ctypes.data, y.ctypes.data])
    picked = x[0 : 3 * (lanes - 1) : 3]
    np.testing.assert_array_equal(y[0 : 2 * (lanes - 1) : 2], picked + 1)
    assert y[2 * (lanes - 1)] == 0
    assert y[1] == picked.sum() and y[3] == picked.max()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bit_conversions_are_exact(target, dtype):
    kind = DType(dtype).numpy
    patterns = np.arange(1 << 16, dtype=np.uint16).view(kind)
    with np.errstate(all="ignore"):
        wide = patterns.astype(np.float32)
    got = elementwise("widen", lambda v: v, dtype, "float32")(patterns)
    np.testing.assert_array_equal(got, wide)
    # Every number, its neighbours, and the points half-way between two of them.
    finite = wide[np.isfinite(wide)]
    bits = finite.view(np.uint32)
    near = [
        (bits + d).view(np.float32) for d in (0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001)
    ]
    x = np.concatenate(
        [*near, np.array([np.inf, -np.inf, np.nan, 65519.9, 65520, 1e38], np.float32)]
    )
    with np.errstate(all="ignore"):
        expected = x.astype(kind)
    got = elementwise("narrow", lambda v: v, "float32", dtype)(x)
    nan = np.isnan(x)
    assert np.isnan(got[nan].astype(np.float32)).all()
    np.testing.assert_array_equal(got[~nan].view(np.uint16), expected[~nan].view(np.uint16))


SPECIAL = [
    *(0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 1e-40, -1e-40, 1e-310, 88.7, 89.0),
    *(-87.0, -103.0, -104.0, 709.7, 710.0, -745.0, -746.0, 1e30, -1e30, 1e-8, -1e-8),
]
# Largest errors seen over the ranges below are 0.9 to 2.4 units in the last place, erf 5.
MAX_ULP = {"erf": 6.0}


def sample(name, dtype, count=20000):
    rng = np.random.default_rng(1)
    tiny = rng.uniform(-3, 3, count) * 10.0 ** rng.uniform(-8, 0, count)
    x = np.concatenate([rng.uniform(-1, 1, count), rng.uniform(-100, 88, count), tiny])
    if name == "log":
        x = np.concatenate([np.exp(x), rng.uniform(0.5, 2, count)])
    if name == "log1p":
        x = np.concatenate([np.exp(x), rng.uniform(-0.99, 1, count)])
    with np.errstate(all="ignore"):
        return np.concatenate([np.array(SPECIAL), x]).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["exp", "expm1", "log", "log1p", "tanh", "sigmoid", "erf"])
def test_transcendental_accuracy(target, name, dtype):
    special = pytest.importorskip("scipy.special")
    reference = {"sigmoid": special.expit, "erf": special.erf}.get(name) or getattr(np, name)
    x = sample(name, dtype)
    y = elementwise(name, getattr(vectormath, name), dtype)(x)
    wide = np.float64 if dtype == "float32" or name in ("sigmoid", "erf") else np.longdouble
    with np.errstate(all="ignore"):
        exact = reference(x.astype(wide))
        rounded = exact.astype(dtype)
        error = np.abs(y.astype(wide) - exact) / np.abs(np.spacing(rounded)).astype(wide)
    finite = np.isfinite(rounded)
    np.testing.assert_array_equal(y[~finite], rounded[~finite])
    assert np.isfinite(y[finite]).all()
    assert error[finite].max() <= MAX_ULP.get(name, 3.0)
    zeros = finite & (x == 0) & (rounded == 0)
    np.testing.assert_array_equal(np.signbit(y[zeros]), np.signbit(rounded[zeros]))


@pytest.mark.parametrize("name", sorted(NAMED))
def test_objects_for_every_named_target(name):
    target = Target.named(name)
    k = KernelBuilder(target)
    lanes = k.lanes("float32")
    with k.entry("entry", pointers=2) as call:
        x, y = call.pointers
        mask = k.first_lanes(call.workspace, lanes)
        v = vectormath.tanh(k.load(x, "float16", lanes, mask=mask))
        k.store(v, y, "bfloat16", mask=mask)
    assert len(compile_object(k, target, jit=False)) > 500


def test_unknown_target_is_refused():
    with pytest.raises(InvalidDescriptor, match="cpu_target.*pentium.*haswell"):
        Target.named("pentium")
