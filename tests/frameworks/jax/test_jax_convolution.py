"""bedstone under JAX: results, derivatives, batches, dimension numbers, what is left to JAX."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from jax.test_util import check_grads  # noqa: E402
from jax_cases import bj, clean, near, normal  # noqa: E402, F401 (clean: of every test)

from bedstone import BedstoneError, InvalidDescriptor  # noqa: E402
from bedstone.frameworks.jax import coverage, handler  # noqa: E402


def close(a, b, tolerance=1e-4):
    near(a, b, tolerance)


CASES = [  # x, w, stride, padding, dilation, groups
    ((2, 4, 9, 8), (6, 2, 3, 3), (2, 1), ((1, 1), (0, 2)), (1, 1), 2),
    ((1, 3, 10, 11), (4, 3, 2, 3), (1, 1), "SAME", (2, 1), 1),
    ((2, 4, 9, 8), (8, 1, 3, 3), (1, 1), "VALID", (1, 1), 4),
    ((2, 4, 6), (3, 4, 3), (2,), "SAME", (1,), 1),
    ((1, 2, 4, 5, 6), (4, 2, 2, 2, 3), (1, 1, 2), "VALID", (1, 1, 1), 1),
]
ORDERS = [None, ("NHWC", "HWIO", "NHWC"), ("NCHW", "HWIO", "NHWC"), ("CNHW", "OHWI", "HNWC")]


def arguments(case, order):
    """Arrays and keywords of a case, laid out as the dimension numbers say."""
    x, w, stride, padding, dilation, groups = case
    numbers = lax.conv_dimension_numbers(x, w, order if len(x) == 4 else None)

    def placed(shape, places):
        found = [0] * len(shape)
        for dim, place in zip(shape, places):
            found[place] = dim
        return found

    a = normal(*placed(x, numbers.lhs_spec))
    b = normal(*placed(w, numbers.rhs_spec), seed=1)
    how = {
        "window_strides": stride, "padding": padding, "rhs_dilation": dilation,
        "feature_group_count": groups, "dimension_numbers": numbers,
    }  # fmt: skip
    return a, b, how


@pytest.mark.parametrize("case, order", list(itertools.product(CASES, ORDERS)), ids=str)
def test_results_and_gradients_are_jaxs(case, order):
    x, w, how = arguments(case, order)

    def loss(x, w):
        return jnp.sin(lax.conv_general_dilated(x, w, **how)).sum()

    def run():
        y = jax.jit(lambda x, w: lax.conv_general_dilated(x, w, **how))(x, w)
        return [y, *jax.jit(jax.grad(loss, (0, 1)))(x, w)]

    native = run()
    with bj.enable():
        ours = run()
    for a, b in zip(ours, native):
        close(a, b)
    assert bj.report().own_calls >= 2, bj.report()


@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_derivatives_of_any_kind(case):
    x, w, how = arguments(case, None)

    def run(x, w):
        return bj.convolution(
            x, w, how["window_strides"], how["padding"], dilation=how["rhs_dilation"],
            groups=how["feature_group_count"],
        )  # fmt: skip

    check_grads(run, (x, w), order=2, modes=["fwd", "rev"], atol=0.1, rtol=0.1)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0), (2, 1)])
@pytest.mark.parametrize("groups", [1, 2])
def test_batches(axes, groups):
    x, w = normal(2, 4, 7, 6), normal(6, 4 // groups, 3, 3, seed=1)

    def stacked(array, at):
        return array if at is None else jnp.stack([array, 2 * array, array + 1], at)

    x, w = stacked(x, axes[0]), stacked(w, axes[1])

    def loss(x, w):
        y = lax.conv_general_dilated(x, w, (1, 2), "SAME", feature_group_count=groups)
        return jnp.cos(y).sum()

    def run():
        return jax.vmap(jax.value_and_grad(loss, (0, 1)), axes)(x, w)

    native = run()
    with bj.enable():
        ours = run()
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(native)):
        close(a, b)
    assert bj.report().own_calls


@pytest.mark.parametrize("dtype, tolerance", [("float16", 4e-3), ("bfloat16", 3e-2)])
def test_halves(dtype, tolerance):
    x, w = normal(2, 4, 8, 8).astype(dtype), normal(4, 4, 3, 3, seed=1).astype(dtype)
    y = bj.convolution(x, w, padding="SAME")
    assert y.dtype == dtype
    exact = lax.conv(x.astype(jnp.float32), w.astype(jnp.float32), (1, 1), "SAME")
    close(y, exact, tolerance)


def test_double_precision():
    with jax.enable_x64(True):
        x, w = normal(2, 4, 8, 8, dtype=jnp.float64), normal(4, 4, 3, 3, dtype=jnp.float64)
        close(bj.convolution(x, w, padding=1), lax.conv(x, w, (1, 1), "SAME"), 1e-12)


def test_what_is_built_on_it_comes_along():
    x, w = normal(1, 2, 6, 6), normal(3, 2, 3, 3)
    with bj.enable():
        lax.conv(x, w, (1, 1), "SAME")
        lax.conv_with_general_padding(x, w, (1, 1), [(1, 1), (0, 0)], None, None)
    assert bj.report().own_calls == 2


def test_what_is_left_to_jax_says_why():
    x, w = normal(2, 2, 6, 6), normal(2, 2, 3, 3)
    ones = (1, 1)
    with bj.enable():
        lax.conv_general_dilated(x, w, (2, 2), [(1, 1), (1, 1)], (2, 2))
        lax.conv_general_dilated(x, normal(2, 2, 3, 3), ones, "VALID", batch_group_count=2)
        lax.conv_general_dilated(x, w, ones, [(-1, 0), (0, 0)])
        lax.conv_general_dilated(x.astype(int), w.astype(int), ones, "VALID")
    reasons = " ".join(row.what for row in bj.report().rows)
    for words in ("dilated, and strides", "batch groups", "negative", "int32"):
        assert words in reasons, bj.report()
    assert not bj.report().own_calls


def test_any_precision_that_jax_takes():
    x, w = normal(1, 2, 6, 6), normal(3, 2, 3, 3)
    with bj.enable():
        for precision in (lax.Precision.HIGH, "highest", ("default", "float32")):
            lax.conv(x, w, (1, 1), "SAME", precision=precision)
        assert bj.report().own_calls == 3, bj.report()
        with pytest.raises(ValueError, match="Precision"):
            lax.conv(x, w, (1, 1), "SAME", precision="some")


TRANSPOSED = [  # x, w, dilation of x, padding, dilation of w, groups
    ((2, 4, 5, 6), (6, 4, 3, 3), (2, 1), ((2, 2), (1, 0)), (1, 1), 1),
    ((1, 3, 4, 5), (4, 3, 2, 3), (3, 2), ((1, 3), (2, 3)), (1, 1), 1),
    ((2, 4, 5, 4), (6, 2, 3, 2), (2, 2), ((1, 2), (1, 2)), (2, 1), 2),
]


@pytest.mark.parametrize("case, order", list(itertools.product(TRANSPOSED, ORDERS)), ids=str)
def test_transposed_convolutions(case, order):
    shapes, (steps, padding, dilation, groups) = case[:2], case[2:]
    x, w, how = arguments((*shapes, (1, 1), padding, dilation, groups), order)
    how["lhs_dilation"] = steps

    def loss(x, w):
        return jnp.sin(lax.conv_general_dilated(x, w, **how)).sum()

    def run():
        y = lax.conv_general_dilated(x, w, **how)
        curve = jax.jit(jax.grad(lambda x: jnp.square(jax.grad(loss, 1)(x, w)).sum()))(x)
        return [y, *jax.jit(jax.grad(loss, (0, 1)))(x, w), curve]

    native = run()
    with bj.enable():
        ours = run()
    for a, b in zip(ours, native):
        close(a, b)
    assert bj.report().own_calls >= 3 and not bj.report().native_calls, bj.report()


@pytest.mark.parametrize("padding", ["SAME", "VALID", [(1, 2), (0, 1)]], ids=str)
@pytest.mark.parametrize("kernel, stride", [(3, 2), (2, 2), (2, 3), (4, 1)])
def test_conv_transpose_is_ours(kernel, stride, padding):
    x, w = normal(2, 5, 6, 3), normal(kernel, kernel, 3, 4, seed=1)

    def run():
        y = lax.conv_transpose(x, w, (stride, stride), padding)
        batched = jax.vmap(lambda x, w: lax.conv_transpose(x, w, (stride, stride), padding))
        return y, batched(jnp.stack([x, x + 1]), jnp.stack([w, 2 * w]))

    native = run()
    with bj.enable():
        ours = run()
    for a, b in zip(ours, native):
        close(a, b)
    assert bj.report().own_calls == 2, bj.report()


def test_errors_are_jaxs_own():
    x, w = normal(1, 3, 5, 5), normal(2, 4, 3, 3)
    with pytest.raises(Exception) as native:
        lax.conv(x, w, (1, 1), "SAME")
    with bj.enable(), pytest.raises(type(native.value)) as patched:
        lax.conv(x, w, (1, 1), "SAME")
    assert str(patched.value).splitlines()[0] == str(native.value).splitlines()[0]


def test_compiled_functions_are_traced_anew_on_either_side():
    x, w = normal(1, 2, 6, 6), normal(3, 2, 3, 3)
    function = jax.jit(lambda x, w: lax.conv(x, w, (1, 1), "SAME"))
    function(x, w)
    with bj.enable():
        function(x, w)
        assert bj.report().own_calls == 1
        function(x, w)  # compiled: not traced again
        assert bj.report().own_calls == 1
        assert "bedstone" in function.lower(x, w).as_text()
    assert "bedstone" not in function.lower(x, w).as_text()


def test_blocks_nest():
    with bj.enable():
        with bj.enable():
            pass
        assert bj.enabled()
    with pytest.raises(BedstoneError, match="not patched"):
        bj.unpatch()


def test_bad_arguments_of_the_function():
    x, w = normal(1, 3, 5, 5), normal(2, 3, 7, 7)
    with pytest.raises(InvalidDescriptor):
        bj.convolution(x, w)
    with pytest.raises(InvalidDescriptor):
        bj.convolution(x, normal(2, 3, 3, 3), stride=0)
    with pytest.raises(NotImplementedError, match="dtype int32"):
        bj.convolution(x.astype(int), w.astype(int))


def test_several_threads_at_once():
    x, w = normal(4, 8, 20, 20), normal(16, 8, 3, 3, seed=1)
    function = jax.jit(lambda x: bj.convolution(x, w, padding=1))
    wanted, wrong = np.asarray(function(x)), []

    def work():
        for _ in range(20):
            if not np.array_equal(np.asarray(function(x)), wanted):
                wrong.append(1)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_several_threads_meet_a_new_problem_at_once():
    x, w = normal(3, 5, 13, 11), normal(7, 5, 3, 3, seed=1)
    wanted, told, start = lax.conv(x, w, (1, 1), "SAME"), [], threading.Barrier(4)

    def work():
        start.wait()
        try:
            close(bj.convolution(x, w, padding=1), wanted)
            told.append("right")
        except Exception as error:
            told.append(repr(error))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert told == ["right"] * 4


def test_a_target_is_registered_once(monkeypatch):
    x, w = normal(2, 3, 9, 7), normal(4, 3, 3, 3)
    numbers = ("NCHW", "OIHW", "NCHW")
    first = bj.convolution(x, w)
    monkeypatch.setattr(handler, "_found", {})  # forgotten: the name is registered already
    jax.clear_caches()
    close(bj.convolution(x, w, dimension_numbers=numbers), first, 0)


def test_gradients_without_a_kernel_are_jaxs(monkeypatch):
    x, w = normal(2, 4, 9, 8), normal(6, 2, 3, 3, seed=1)

    def loss(x, w):
        y = lax.conv_general_dilated(x, w, (2, 1), ((1, 1), (0, 2)), feature_group_count=2)
        return jnp.sin(y).sum()

    native = jax.grad(loss, (0, 1))(x, w)
    found = handler.target

    def only_forward(problem, where, alpha=1.0):
        return found(problem, where, alpha) if problem.direction == "forward" else "none"

    monkeypatch.setattr(handler, "target", only_forward)
    with bj.enable():
        ours = jax.grad(loss, (0, 1))(x, w)
    for a, b in zip(ours, native):
        close(a, b)


def test_the_table_of_coverage_says_where_gradients_run(monkeypatch):
    case = next(c for c in coverage.cases() if c.words == "`feature_group_count`")
    assert coverage.where(case) == ("bedstone", "bedstone")
    found = handler.target

    def only_forward(problem, where, alpha=1.0):
        return found(problem, where, alpha) if problem.direction == "forward" else "none"

    monkeypatch.setattr(handler, "target", only_forward)
    assert coverage.where(case) == ("bedstone", "JAX")


CACHED = """
    import sys, jax, jax.numpy as jnp
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    import bedstone.frameworks.jax as bj
    x, w = jnp.ones((2, 4, 8, 8)), jnp.ones((4, 4, 3, 3))
    print(float(jax.jit(lambda x, w: bj.convolution(x, w).sum())(x, w)))
"""


def test_the_persistent_cache_holds_no_addresses(tmp_path):
    told = [
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(CACHED), str(tmp_path)],
            capture_output=True, text=True, timeout=120, check=True,
        ).stdout
        for _ in range(2)
    ]  # fmt: skip
    assert told[0] == told[1] == f"{2 * 4 * 36 * 36.0}\n"
    assert list(tmp_path.iterdir())


THREADS = """
    import os, time, jax, jax.numpy as jnp, bedstone
    import bedstone.frameworks.jax as bj

    def tasks():
        return set(os.listdir("/proc/self/task"))

    def nanoseconds(tasks):
        time.sleep(0.05)  # workers spin a little before they sleep
        return sum(int(open(f"/proc/self/task/{t}/schedstat").read().split()[0]) for t in tasks)

    bedstone.set_num_threads(1)
    x, w = jnp.ones((8, 16, 32, 32)), jnp.ones((16, 16, 3, 3))
    function = jax.jit(lambda x, w: bj.convolution(x, w, padding=1))
    function(x, w).block_until_ready()
    before = tasks()
    function(x, w).block_until_ready()
    assert tasks() == before
    bedstone.set_num_threads(3)
    function(x, w).block_until_ready()
    workers = tasks() - before
    assert len(workers) == 2, workers
    for threads, worked in ((3, True), (1, False), (3, True)):
        bedstone.set_num_threads(threads)
        start = nanoseconds(workers)
        for _ in range(20):
            function(x, w).block_until_ready()
        assert (nanoseconds(workers) > start) is worked, threads
    print("seen")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_number_of_threads_is_read_at_every_call_of_a_compiled_function():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(THREADS)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout == "seen\n", done.stderr[-3000:]
