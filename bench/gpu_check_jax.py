"""Verify and measure bedstone under JAX on a CUDA device, in one go, and print compact tables.

    PYTHONPATH=src python3 bench/gpu_check_jax.py [--quick] > bench/results/h200-jax.txt

results  value and gradients of a function, jitted: the errors of bedstone and of JAX's own kernels
         against float64, in shares of the largest number; whose kernels the program calls
times    the same programs in turns: median milliseconds of many calls in a row, and the ratio
calls    one call of a few numbers, awaited: the host's cost
network  a residual network of many layers, which XLA replays as CUDA graphs
Kernels are compiled by a pool of processes first, so that the device does not wait.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import statistics
import subprocess
import sys
import time

os.environ.setdefault("BEDSTONE_CACHE_DIR", "/tmp/bedstone-cache")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")

ROUNDS, CALLS = 7, 20
WORKSPACE = 1 << 30
# (name, batch, channels, size, filters, window, stride, groups)
LAYERS = [
    ("res56 3x3", 64, 64, 56, 64, 3, 1, 1),
    ("res28 3x3", 64, 128, 28, 128, 3, 1, 1),
    ("res14 1x1", 64, 1024, 14, 256, 1, 1, 1),
    ("stride 2", 64, 128, 56, 128, 3, 2, 1),
    ("depthwise", 64, 192, 28, 192, 3, 1, 192),
]
ORDERS = {"NCHW": ("NCHW", "OIHW", "NCHW"), "NHWC": ("NHWC", "HWIO", "NHWC")}
KINDS = [("float32", "highest"), ("float32", "default"), ("bfloat16", "default")]


def compile_one(text):
    """A kernel of a problem into the cache; in a process of its own."""
    import bedstone
    from bedstone.backends.triton import ahead, driver, runtime

    device = runtime.CudaRuntime().device(0) if driver.missing() is None else None
    problem = bedstone.parse_problem(text)
    try:
        list(ahead.compile_ahead(problem, device.architecture, WORKSPACE))
    except Exception as error:
        return f"{text}: {error}"
    return None


def convolution(layer, order, dtype, precision):
    """The function and operands of a layer."""
    import jax
    import jax.numpy as jnp

    _, n, c, h, k, r, u, g = layer
    shapes = {"N": n, "C": c, "H": h, "W": h}, {"O": k, "I": c // g, "H": r, "W": r}
    numbers = ORDERS[order]
    x, w = (normal(*(size[a] for a in word), dtype=dtype, seed=i)
            for i, (size, word) in enumerate(zip(shapes, numbers)))  # fmt: skip
    w = w * jnp.asarray((c // g * r * r) ** -0.5, w.dtype)
    pads = [(r // 2, r // 2)] * 2

    def function(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (u, u), pads, dimension_numbers=numbers, feature_group_count=g,
            precision=precision,
        )  # fmt: skip

    return function, (x, w)


def normal(*shape, dtype="float32", seed=0):
    """Normal numbers on the device."""
    import jax

    return jax.random.normal(jax.random.PRNGKey(seed), shape, "float32").astype(dtype)


def others():
    """(name, function, operands) of pooling, softmax and activations."""
    import jax
    import jax.numpy as jnp

    def windows(x, op, init):
        window, stride, pads = (1, 1, 3, 3), (1, 1, 2, 2), ((0, 0), (0, 0), (1, 1), (1, 1))
        return jax.lax.reduce_window(x, init, op, window, stride, pads)

    for dtype in ("float32", "bfloat16"):
        x = normal(64, 64, 112, 112, dtype=dtype)
        yield f"max pool 3x3/2 {dtype}", lambda x: windows(x, jax.lax.max, -jnp.inf), (x,)
        yield f"sum pool 3x3/2 {dtype}", lambda x: windows(x, jax.lax.add, 0.0), (x,)
        y = normal(4096, 8192, dtype=dtype)
        yield f"softmax {dtype}", lambda x: jax.nn.softmax(x), (y,)
        yield f"log_softmax {dtype}", lambda x: jax.nn.log_softmax(x), (y,)
        for name in ("relu", "gelu", "tanh"):
            yield f"{name} {dtype}", lambda x, name=name: by_name(name)(x), (y,)


def by_name(name):
    """The function as it is now: inside `enable()` it is another."""
    import jax
    import jax.numpy as jnp

    return jnp.tanh if name == "tanh" else getattr(jax.nn, name)


def cases(quick):
    """(name, function, operands) of everything."""
    for layer in LAYERS[: 2 if quick else None]:
        for order in ORDERS:
            for dtype, precision in KINDS:
                name = f"{layer[0]} {order} {dtype}" + (" highest" * (precision == "highest"))
                yield (name, *convolution(layer, order, dtype, precision))
    yield from others()


def both_ways(function):
    """(value, gradients by every operand) of a function, of a cotangent that varies."""
    import jax

    def run(*operands):
        y, back = jax.vjp(function, *operands)
        return y, *back(jax.numpy.sin(y))

    return run


class Side:
    """Programs compiled with JAX's own kernels, or with bedstone's."""

    def __init__(self, ours):
        self.ours = ours

    def compiled(self, function, operands):
        """The program, and the names of bedstone's kernels in it."""
        import contextlib
        import re

        import jax

        import bedstone.frameworks.jax as bj

        with bj.enable(only=bj.operators()) if self.ours else contextlib.nullcontext():
            lowered = jax.jit(function).lower(*operands)
        calls = len(re.findall(r"custom_call @bedstone_cuda_\w+", lowered.as_text()))
        return lowered.compile(), calls


def problems_of(rows):
    """Every problem that the programs of these rows ask for, as text."""
    import jax

    import bedstone.frameworks.jax as bj
    from bedstone.backends.triton import ahead, runtime
    from bedstone.frameworks.jax import handler

    found = {}
    architecture = runtime.CudaRuntime().device(0).architecture

    def choose(problem):
        every = ahead.candidates_ahead(problem, architecture, WORKSPACE)
        if not every:
            return "none"
        found[str(problem)] = None
        device = ahead.launch.target_device(architecture)
        return every[0].name, every[0].workspace(problem, device)

    with handler.ahead(choose), bj.enable(only=bj.operators()):
        for _, function, operands in rows:
            jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",))
    bj.reset()
    return list(found)


def error(found, exact):
    """The largest difference, in shares of the largest number."""
    import numpy as np

    found, exact = (np.asarray(a, np.float64) for a in (found, exact))
    return float(np.abs(found - exact).max() / np.abs(exact).max())


def seconds(programs, operands):
    """Median seconds of a call of each, in turns."""
    import jax

    times = [[] for _ in programs]
    for program in programs:
        jax.block_until_ready(program(*operands))
    for _ in range(ROUNDS):
        for program, found in zip(programs, times):
            start = time.perf_counter()
            for _ in range(CALLS):
                last = program(*operands)
            jax.block_until_ready(last)
            found.append((time.perf_counter() - start) / CALLS)
    return [statistics.median(found) for found in times]


def row(name, function, operands):
    """Errors and times of one function, forward and both ways."""
    import jax

    exact = None
    for label, run in (("forward", lambda *a: (function(*a),)), ("both", both_ways(function))):
        native, _ = Side(False).compiled(run, operands)
        ours, calls = Side(True).compiled(run, operands)
        if label == "both":
            with jax.enable_x64(True):
                wide = [a.astype("float64") for a in operands]
                exact = jax.jit(run)(*wide)
            found = [max(error(a, e) for a, e in zip(p(*operands), exact)) for p in (ours, native)]
            errors = f"{found[0]:9.1e} {found[1]:9.1e}"
        else:
            errors = " " * 19
        theirs, mine = seconds((native, ours), operands)
        print(f"{name:36} {label:8} {calls:5d} {errors} {1e3 * mine:9.3f} {1e3 * theirs:9.3f} "
              f"{theirs / mine:6.2f}", flush=True)  # fmt: skip


def host_cost():
    """Microseconds of an awaited call of a few numbers."""
    import jax

    x, w = normal(1, 8, 8, 8), normal(8, 8, 3, 3)

    def function(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME")

    programs = [Side(ours).compiled(function, (x, w))[0] for ours in (False, True)]
    times = [[], []]
    for _ in range(300):
        for program, found in zip(programs, times):
            start = time.perf_counter()
            program(x, w).block_until_ready()
            found.append(time.perf_counter() - start)
    native, ours = (1e6 * statistics.median(found) for found in times)
    print(f"a call of a few numbers, awaited: bedstone {ours:.1f} us, JAX {native:.1f} us")


def network_rows():
    """(name, function, operands) of residual networks."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from bedstone.frameworks.jax.bench import Network

    for order, dtype in (("nhwc", "bfloat16"), ("nchw", "float32")):
        network = Network("resnet18", order, False)
        first = jax.tree.map(
            lambda p, dtype=dtype: jnp.asarray(p, dtype),
            network.parameters(np.random.default_rng(0)),
        )
        shape = (64, 3, 224, 224) if order == "nchw" else (64, 224, 224, 3)
        yield (
            f"resnet18, batch 64, {order} {dtype}",
            network.scores,
            (first, normal(*shape, dtype=dtype)),
        )


def network(name, function, operands):
    """The same network on both kernels: agreement and times, with and without gradients."""
    import jax
    import jax.numpy as jnp

    def slopes(parameters, x):
        return jax.grad(lambda p: jnp.square(function(p, x).astype("float32")).mean())(parameters)

    for label, run in (("forward", function), ("gradients", slopes)):
        native, _ = Side(False).compiled(run, operands)
        ours, calls = Side(True).compiled(run, operands)
        a, b = (jax.tree.leaves(p(*operands)) for p in (ours, native))
        apart = max(error(x, y) for x, y in zip(a, b))
        theirs, mine = seconds((native, ours), operands)
        print(f"{name:36} {label:9} {calls:4d} calls, apart {apart:.1e}; bedstone "
              f"{1e3 * mine:.3f} ms, JAX {1e3 * theirs:.3f} ms, ratio {theirs / mine:.2f}",
              flush=True)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few layers")
    parser.add_argument("--commit", default="")
    parser.add_argument("--limit", type=float, default=400, help="seconds; start no more rows then")
    args = parser.parse_args()
    begun = time.perf_counter()
    import jax

    import bedstone

    commit = (
        args.commit
        or subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
    )
    print(f"# device: {jax.devices()[0].device_kind}; python {sys.version.split()[0]}; "
          f"jax {jax.__version__}; bedstone {bedstone.__version__}; commit {commit}")  # fmt: skip
    rows = list(cases(args.quick))
    networks = [] if args.quick else list(network_rows())
    texts = problems_of([(n, both_ways(f), a) for n, f, a in rows] + [
        (n, lambda p, x, f=f: jax.vjp(lambda p: f(p, x), p)[1](f(p, x)), a) for n, f, a in networks
    ])  # fmt: skip
    with multiprocessing.get_context("spawn").Pool(max(1, (os.cpu_count() or 2) - 2)) as pool:
        for message in filter(None, pool.imap_unordered(compile_one, texts)):
            print(f"# {message}")
    print(f"# {len(texts)} problems compiled ahead, {time.perf_counter() - begun:.0f} s")
    print(f"{'':36} {'':8} calls {'bedstone':>9} {'JAX':>9} {'ms':>9} {'JAX ms':>9}  ratio")
    jobs = [functools.partial(network, *given) for given in networks]
    jobs = [host_cost, *jobs, *(functools.partial(row, *given) for given in rows)]
    for job in jobs:
        if time.perf_counter() - begun > args.limit:
            print("# out of time: the rest was not run")
            break
        try:
            job()
        except Exception as failure:
            print(f"FAILED {job}: {failure!r}"[:600], flush=True)
    print(f"# {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
