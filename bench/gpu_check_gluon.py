"""Checks and times the Gluon convolutions on a Hopper GPU, against float64 and against cuDNN.

    python bench/gpu_check_gluon.py --check --measure --tiles --out DIR --budget 300
    python bench/gpu_check_gluon.py --warm             # no GPU: compile all of it into the cache

--check    every algorithm on problems of every kind: fresh random inputs, poisoned and guarded
           outputs, all elements compared with PyTorch's float64 convolution, run twice
--measure  CUDA-graph replays, interleaved with cuDNN's (benchmark mode), medians
--tiles    every row of the tile tables on a few layers, for fitting the cost model
Tables go to the terminal, numbers to DIR/*.csv with device, versions and commit.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import multiprocessing
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bedstone.backends.gluon.convolution import ALGORITHMS, halo, tiles
from bedstone.backends.gluon.convolution import filter_gradient as fg
from bedstone.backends.gluon.convolution import implicit_gemm_ws as ws
from bedstone.backends.gluon.convolution.patches import choose_patch
from bedstone.backends.triton import launch
from bedstone.backends.triton.convolution import ALGORITHMS as TRITON
from bedstone.spec.problem import parse_problem

DIRECTIONS = ("forward", "backward_data", "backward_filter")
HALVES = ("bfloat16", "float16")
# Small problems of every kind; each runs in all directions and dtypes that an algorithm takes.
CHECKS = """n16c64h14k64r3p1 layout=NHWC
n9c72h13k136r3p1 layout=NHWC
n5c96h11w15k80r3s3ph1pw2 layout=NHWC
n8c64h7k64r3p1 layout=NHWC
n17c128h7k192r3p1 layout=NHWC
n3c128h12k256r1 layout=NHWC
n4c512h7k128r1 layout=NHWC
n2c64h30k64r7p3 layout=NHWC
n2c32h20k48r5p2 layout=NHWC
n2c16h20k16r3p1 layout=NHWC
n2c8h20k24r3p1 layout=NHWC
n4c64h15k64r3p1u2 layout=NHWC
n4c64h16k128r3ph0_1pw1_0u2 layout=NHWC
n4c64h16k128r1u2 layout=NHWC
n2c64h29k32r7p3u2 layout=NHWC
n2c64h17k64r5p2u3 layout=NHWC
n2c64h16k64r3p2l2 layout=NHWC
n2c64h17k64r3p1uh2uw1 layout=NHWC
n4c128h14k128r3p1g2 layout=NHWC
n4c256h14k256r3p1g4 layout=NHWC
n3c64w100k64s3p1 layout=NHWC
n2c64d6h9w10k64t3p1 layout=NHWC
n2c64d6h9w10k64t3p1u2 layout=NHWC
n2c64h12k64r3p1 layout=NHWC mode=convolution
n2c64h9k64r9p4 layout=NHWC
n4c64h14k64r3p1g16 layout=NHWC
n9c128h13k128r3p1g32 layout=NHWC
n4c64h15k64r3p1u2g8 layout=NHWC
n3c128h16k128r3g4 layout=NHWC mode=convolution
n2c64h17k64r3p2l2g2 layout=NHWC
n2c64h20k128r1g8 layout=NHWC
n3c32h9w12k32r3s2p1g8 layout=NHWC
n2c64d3h9w10k64t1r3p1pd0g16 layout=NHWC
n16c64h14k64r3p1
n8c64h12k64r3p1g16
n3c72h12k136r1
n2c256h28k64r1
n1c64h16k24r1
n3c72h13k136r3p1
n4c64h15k64r3p1u2
n4c128h12k64r1
n2c64d6h9w10k64t3p1
"""
EPILOGUES = ("bias", "bias activation=relu", "activation=gelu")
# name, problem: what is measured
LAYERS = {
    "res56": "n256c64h56k64r3p1", "res28": "n256c128h28k128r3p1", "res14": "n256c256h14k256r3p1",
    "res7": "n256c512h7k512r3p1", "p256-64": "n256c256h56k64r1", "p64-256": "n256c64h56k256r1",
    "p1024-256": "n256c1024h14k256r1", "p512-2048": "n256c512h7k2048r1",
    "down28": "n256c256h56k512r1u2", "s2res28": "n256c128h56k128r3p1u2",
    "vgg112": "n64c128h112k128r3p1", "vgg28": "n64c512h28k512r3p1", "L2": "n128c64h64k128r9",
    "L3": "n128c128h32k128r9", "L4": "n128c128h16k128r7", "L5": "n128c384h13k384r3",
    "N1": "n1c256h14k256r3p1", "N8": "n8c128h28k128r3p1",
    "g32-56": "n32c128h56k128r3p1g32", "g32-28": "n32c256h28k256r3p1g32",
    "g32-14": "n32c512h14k512r3p1g32", "g32-7": "n32c1024h7k1024r3p1g32",
    "g32s2": "n32c256h56k256r3p1u2g32",
}  # fmt: skip
TILE_LAYERS = ("res56", "res28", "res14", "res7", "p256-64", "p1024-256", "vgg28", "L5", "N1", "N8")
# The filter gradient's bound counts the terms of a sum; float32's unit roundoff.
UNIT = 2.0**-24
LOSS = 16.0  # allowed |error| over UNIT * sum|terms|, besides the rounding of the result
GUARD = 4096  # bytes around outputs
CACHE_BYTES = 150 << 20  # inputs are rotated until they no longer fit the L2 cache
GRAPH_SECONDS = 3e-3


def problem_of(shape: str, direction: str, dtype: str, more: str = ""):
    """The problem of a shape word."""
    return parse_problem(f"convolution {direction} {shape} {dtype} {more}")


def takers(problem, device, algorithms=ALGORITHMS):
    """The algorithms that take a problem."""
    return [a for a in algorithms if a.supports(problem, device) is None]


def check_problems():
    """Every problem of --check."""
    for line in CHECKS.split("\n")[:-1]:
        for direction in DIRECTIONS:
            for dtype in (*HALVES, "float32"):
                yield problem_of(line, direction, dtype)
        for direction in DIRECTIONS:
            yield problem_of(line, direction, "float32", "math=tf32")
    for epilogue in EPILOGUES:
        for dtype in ("bfloat16", "float32"):
            yield problem_of("n9c72h13k136r3p1 layout=NHWC", "forward", dtype, epilogue)
        yield problem_of("n3c72h12k136r1", "forward", "bfloat16", epilogue)
        yield problem_of("n9c128h13k128r3p1g32 layout=NHWC", "forward", "bfloat16", epilogue)


def layer_problems(layers, layouts, dtypes):
    """(name, problem) of --measure."""
    for name in layers:
        shape = LAYERS[name]
        for layout in layouts:
            for dtype in dtypes:
                kind, more = ("float32", " math=tf32") if dtype == "tf32" else (dtype, "")
                for direction in DIRECTIONS:
                    yield name, problem_of(shape, direction, kind, f"layout={layout}{more}")


def build(device, algorithm, problem):
    """Compile one kernel into the cache."""
    algorithm.build(problem, device)


def warm(options):
    """Compile everything into the cache."""
    device = launch.target_device("sm_90")
    problems = list(check_problems()) if options.check else []
    if options.measure:
        problems += [p for _, p in layer_problems(options.layers, options.layouts, options.dtypes)]
    wanted = [
        (algorithm, problem)
        for problem in problems
        for algorithm in takers(problem, device)
        if options.algorithms in algorithm.name
    ]
    with multiprocessing.Pool(options.jobs) as pool:
        pool.starmap(build, [(device, *pair) for pair in wanted], chunksize=1)
    if options.tiles:
        for _ in tile_kernels(options, device):
            pass
    print("compiled")


class Bench:
    """Memory, references and timing through PyTorch."""

    def __init__(self, options):
        import torch

        from bedstone.backends.triton.runtime import CudaRuntime

        self.torch, self.options = torch, options
        self.device = CudaRuntime().device(0)
        torch.zeros(1, device="cuda")  # makes the context current
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        self.started = time.time()
        self.random = torch.Generator("cuda").manual_seed(time.time_ns() % 2**31)
        commit = options.commit or _commit()
        self.stamp = {
            "device": self.device.name, "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version(), "commit": commit,
        }  # fmt: skip

    def late(self):
        """True when the budget is spent."""
        return time.time() - self.started > self.options.budget

    def tensor(self, desc, fill="random"):
        """Random values in the operand's memory, as a tensor of its dims."""
        torch = self.torch
        values = torch.randn(desc.dims, device="cuda", generator=self.random)
        if callable(fill):
            values = fill(values)
        return self.place(values, desc)

    def place(self, values, desc):
        """`values` in memory of the descriptor's strides."""
        torch = self.torch
        dtype = getattr(torch, desc.dtype)
        out = torch.empty_strided(desc.dims, desc.strides, dtype=dtype, device="cuda")
        return out.copy_(values)

    def guarded(self, desc):
        """(whole buffer of bytes 0xFF, the output inside it): 0xFF.. is a NaN of every dtype."""
        torch = self.torch
        raw = torch.full((2 * GUARD + desc.nbytes,), 255, dtype=torch.uint8, device="cuda")
        inside = raw[GUARD : GUARD + desc.nbytes].view(getattr(torch, desc.dtype))
        return raw, torch.as_strided(inside, desc.dims, desc.strides)

    def call(self, kernel, problem, algorithm, arrays, alpha=1.0, beta=0.0, workspace=None):
        """Run a kernel on PyTorch's current stream."""
        if workspace is None:
            workspace = self.workspace(algorithm, problem)
        pointers = [arrays[o.name].data_ptr() for o in problem.operands]
        stream = self.torch.cuda.current_stream().cuda_stream
        kernel(pointers, workspace.data_ptr(), alpha, beta, stream)

    def workspace(self, algorithm, problem):
        """Poisoned workspace."""
        size = max(algorithm.workspace(problem, self.device), 16)
        return self.torch.full((size,), 255, dtype=self.torch.uint8, device="cuda")

    def reference(self, problem, arrays):
        """op(inputs) in float64 by PyTorch, and the same of absolute values."""
        wide = {k: v.double() for k, v in arrays.items()}
        exact = self.convolve(problem, wide)
        terms = self.convolve(problem, {k: v.abs() for k, v in wide.items()})
        return exact, terms

    def convolve(self, problem, arrays):
        """The convolution or its gradient by PyTorch, in the arrays' own dtype and layout."""
        torch, conv = self.torch, problem.conv
        flip = list(range(2, problem.w.rank)) if conv.mode == "convolution" else []
        low, high = zip(*conv.padding)
        even = low == high
        pads = [p for pair in reversed(conv.padding) for p in pair]
        pad = list(low) if even else [0] * conv.axes
        rest = (list(conv.stride), pad, list(conv.dilation), False, [0] * conv.axes, conv.groups)

        def padded(x):
            return x if even else torch.nn.functional.pad(x, pads)

        if problem.direction == "forward":
            w = arrays["w"].flip(flip) if flip else arrays["w"]
            return torch.ops.aten.convolution(padded(arrays["x"]), w, None, *rest)
        backward = torch.ops.aten.convolution_backward
        dy = arrays["dy"]
        if problem.direction == "backward_data":
            w = arrays["w"].flip(flip) if flip else arrays["w"]
            x = torch.empty_strided(
                problem.x.dims, problem.x.strides, dtype=dy.dtype, device="cuda"
            )
            dx = backward(dy, padded(x), w, None, *rest, [True, False, False])[0]
            for axis, ((a, _), size) in enumerate(zip(conv.padding, problem.x.dims[2:])):
                dx = dx if even else dx.narrow(axis + 2, a, size)
            return dx
        w = torch.empty_strided(problem.w.dims, problem.w.strides, dtype=dy.dtype, device="cuda")
        dw = backward(dy, padded(arrays["x"]), w, None, *rest, [False, True, False])[1]
        return dw.flip(flip) if flip else dw

    def inputs(self, problem, fills=None):
        """Random inputs of a problem."""
        return {o.name: self.tensor(o.desc, (fills or {}).get(o.name)) for o in problem.inputs}

    def time(self, calls):
        """Seconds of each call: graph replays in turn, medians. A call takes a set's number."""
        torch = self.torch
        stream, graphs = torch.cuda.Stream(), []
        with torch.cuda.stream(stream):
            for call, sets in calls:
                call(0)
                stream.synchronize()
                a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                a.record(stream)
                call(0)
                b.record(stream)
                stream.synchronize()
                count = max(sets, min(100, int(GRAPH_SECONDS / (a.elapsed_time(b) * 1e-3 + 1e-6))))
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    for i in range(count):
                        call(i % sets)
                graphs.append((graph, count))
            times = [[] for _ in graphs]
            for _ in range(self.options.repeats):
                for (graph, count), found in zip(graphs, times):
                    a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    a.record(stream)
                    graph.replay()
                    b.record(stream)
                    stream.synchronize()
                    found.append(a.elapsed_time(b) * 1e-3 / count)
        return [statistics.median(found[1:]) for found in times]


def _commit():
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def compare(bench, problem, got, exact, terms, alpha=1.0):
    """(worst |error| over its bound's unit, share of elements out of bounds)."""
    out = problem.outputs[0].desc
    unit = UNIT if problem.math != "tf32" or out.dtype != "float32" else 2.0**-11
    error = (got.double() - exact).abs()
    store = (out.dtype.epsilon / 2) * exact.abs() + (2.0**-24 if out.dtype == "float16" else 0)
    scaled = (error - store).clamp_min(0) / (unit * terms * abs(alpha) + 2.0**-140)
    growth = LOSS + 6 * math.sqrt(problem.reduction_length)
    bad = ~(scaled <= growth)
    return scaled.nan_to_num(nan=math.inf).max().item(), bad.double().mean().item()


def check_one(bench, problem, algorithm):
    """None if the algorithm is right on the problem, else what is wrong; and the worst error."""
    torch = bench.torch
    kernel = algorithm.build(problem, bench.device)
    arrays = bench.inputs(problem)
    exact, terms = bench.reference(problem, {k: v for k, v in arrays.items() if k != "bias"})
    name = problem.outputs[0].name
    worst = 0.0
    for alpha, beta in ((1.0, 0.0), (1.5, -0.5)):
        raw, out = bench.guarded(problem.outputs[0].desc)
        if beta:
            out.copy_(torch.randn(out.shape, device="cuda", generator=bench.random))
        want = alpha * exact + (beta * out.double() if beta else 0)
        size = alpha * terms + (abs(beta) * out.double().abs() if beta else 0)
        if problem.epilogue.bias:
            bias = arrays["bias"].double().view(1, -1, *[1] * problem.conv.axes)
            want, size = want + bias, size + bias.abs()
        act = problem.epilogue.activation
        if act is not None:
            want = {"relu": torch.relu, "gelu": torch.nn.functional.gelu}[act.kind](want)
        before = out.clone()
        bench.call(kernel, problem, algorithm, {**arrays, name: out}, alpha, beta)
        first = out.clone()
        out.copy_(before)
        bench.call(kernel, problem, algorithm, {**arrays, name: out}, alpha, beta)
        torch.cuda.synchronize()
        if not torch.equal(first.nan_to_num(), out.nan_to_num()):
            return f"beta={beta}: another result at the second run", worst
        if (raw[:GUARD] != 255).any() or (raw[-GUARD:] != 255).any():
            return f"beta={beta}: wrote outside its output", worst
        found, bad = compare(bench, problem, out, want, size, 1.0)
        worst = max(worst, found)
        if bad:
            return f"beta={beta}: {bad:.2%} of the elements wrong, worst {found:.3g}", worst
    return None, worst


RANGES = {  # how values are made from normal ones: what float16 splitting must not lose
    "relu": lambda v: v.clamp_min(0),
    "wide": lambda v: v * 2.0 ** (80 * _uniform(v) - 40),
    "rows": lambda v: v * 2.0 ** (120 * _uniform(v[:, :1]) - 60),
    "channels": lambda v: v * 2.0 ** (80 * _uniform(v[:1, :, :1, :1]) - 40),
    "sparse": lambda v: v * (_uniform(v) < 0.01),
    "huge": lambda v: v * 1e30,
    "tiny": lambda v: v * 1e-30,
    "denormal": lambda v: v * 1e-39,
    "inf": lambda v: v.masked_fill(_uniform(v) < 1e-4, math.inf),
    "nan": lambda v: v.masked_fill(_uniform(v) < 1e-4, math.nan),
}
RANGE_SHAPES = ("n4c128h14k192r3p1", "n9c64h13k64r3p1", "n4c192h15k128r3p1u2", "n4c64h14k128r3")
# Algorithms that keep float32's accuracy and range.
CAREFUL = ("f16x3", "f16x3_split", "bf16x6_split")
# Groups side by side in a tile: an infinity or NaN of one must not reach the others.
MIXED_SHAPES = ("n3c64h13k64r3g16", "n2c128h12k128r3u2g32", "n2c64h13k64r3p1g8")
EVEN_FILLS = ("huge", "tiny", "denormal", "inf", "nan")  # in one operand at a time


def _uniform(v):
    import torch

    return torch.rand(v.shape, device=v.device)


def check_ranges(bench):
    """float32's accuracy and range, whatever the data: [(case, verdict)]."""
    rows = []
    for shape, direction in itertools.product(RANGE_SHAPES, DIRECTIONS):
        problem = problem_of(shape, direction, "float32", "layout=NHWC")
        for algorithm in takers(problem, bench.device):
            if algorithm.name.endswith(CAREFUL) and bench.options.algorithms in algorithm.name:
                rows += check_range(bench, problem, algorithm, f"{algorithm.name} {shape}")
    return rows


def check_range(bench, problem, algorithm, what):
    """The same of one algorithm and problem."""
    torch, direction, rows = bench.torch, problem.direction, []
    kernel = algorithm.build(problem, bench.device)
    first, second = (o.name for o in problem.inputs)
    for fill, make in RANGES.items():
        for where in ((first,), (second,), (first, second)):
            if fill in EVEN_FILLS and len(where) > 1:
                continue
            if fill in ("inf", "nan") and not comparable(problem, where):
                continue
            arrays = bench.inputs(problem, dict.fromkeys(where, make))
            exact, terms = bench.reference(problem, arrays)
            raw, out = bench.guarded(problem.outputs[0].desc)
            name = problem.outputs[0].name
            bench.call(kernel, problem, algorithm, {**arrays, name: out})
            torch.cuda.synchronize()
            rows.append((f"{what} {direction} {fill} {'+'.join(where)}",
                         verdict(bench, problem, out, exact, terms)))  # fmt: skip
    return rows


def check_mixed(bench):
    """Infinities and NaN in the image of narrow groups: [(case, verdict)]."""
    rows = []
    for shape, direction, dtype in itertools.product(MIXED_SHAPES, DIRECTIONS, HALVES):
        problem = problem_of(shape, direction, dtype, "layout=NHWC")
        for algorithm in takers(problem, bench.device):
            if bench.options.algorithms not in algorithm.name:
                continue
            kernel = algorithm.build(problem, bench.device)
            for fill in ("inf", "nan"):
                image = next(o.name for o in problem.inputs if o.name != "w")
                arrays = bench.inputs(problem, {image: RANGES[fill]})
                exact, terms = bench.reference(problem, arrays)
                _, out = bench.guarded(problem.outputs[0].desc)
                bench.call(kernel, problem, algorithm, {**arrays, problem.outputs[0].name: out})
                finite = bench.torch.isfinite(exact)
                same = bench.torch.equal(
                    out.float()[~finite].nan_to_num(nan=1.0),
                    exact.float()[~finite].nan_to_num(nan=1.0),
                )
                keep = (out[finite], exact[finite], terms[finite])
                found = None if same else "other infinities or NaN"
                if found is None and compare(bench, problem, *keep)[1]:
                    found = "wrong beside infinities or NaN"
                rows.append((f"{algorithm.name} {shape} {direction} {dtype} {fill}", found))
    return rows


def comparable(problem, where):
    """True if the non-finite operand does not meet padding, where PyTorch may skip its terms."""
    if problem.direction == "backward_filter":
        return not any(any(pair) for pair in problem.conv.padding)
    return where != ("w",)


def verdict(bench, problem, out, exact, terms):
    """None if right: the same infinities and NaN, and finite elements within the bound."""
    torch = bench.torch
    want = exact.float()
    finite = terms < 2.0**125
    odd = ~torch.isfinite(exact)
    if not torch.equal(torch.isnan(out)[odd], torch.isnan(want)[odd]):
        return "other NaN"
    keep = odd & ~torch.isnan(want)
    if not torch.equal(out[keep], want[keep]):
        return "other infinities"
    if not torch.isfinite(out[finite & ~odd]).all():
        return f"{(~torch.isfinite(out[finite & ~odd])).double().mean().item():.2%} not finite"
    error = (out.double() - exact).abs() - 2.0**-24 * exact.abs() - 2.0**-149
    scaled = error.clamp_min(0) / (UNIT * terms).clamp_min(2.0**-149)
    worst = scaled[finite & ~odd].max().item()
    limit = LOSS + 6 * math.sqrt(problem.reduction_length)
    return None if worst <= limit else f"error {worst:.3g} units, limit {limit:.3g}"


def check(bench):
    """--check."""
    done, wrong, worst = {}, [], {}
    for problem in check_problems():
        for algorithm in takers(problem, bench.device):
            if bench.late():
                break
            if bench.options.algorithms not in algorithm.name:
                continue
            try:
                fault, error = check_one(bench, problem, algorithm)
            except Exception as failure:
                fault, error = f"{type(failure).__name__}: {str(failure)[:300]}", math.nan
            key = f"{algorithm.name} {problem.direction} {problem.x.dtype}"
            done[key] = done.get(key, 0) + 1
            worst[key] = max(worst.get(key, 0), error)
            if fault:
                wrong.append(f"{algorithm.name} {problem}: {fault}")
    for key, count in done.items():
        print(f"{count:4d} {key}: worst error {worst[key]:.3g} units")
    ranges = check_ranges(bench)
    ranges += check_mixed(bench)
    print(f"{len(ranges)} range cases, {sum(v is not None for _, v in ranges)} wrong")
    wrong += [f"range {case}: {v}" for case, v in ranges if v]
    print(f"{sum(done.values())} checks, {len(wrong)} failures in all", flush=True)
    for line in wrong[:40]:
        print("  WRONG", line)
    return not wrong


def measure(bench):
    """--measure: a line a problem, cuDNN against every algorithm."""
    rows = []
    for name, problem in layer_problems(
        bench.options.layers, bench.options.layouts, bench.options.dtypes
    ):
        if bench.late():
            print("out of time before", name, problem)
            break
        sets = max(1, min(8, math.ceil(CACHE_BYTES / max(problem.bytes, 1))))
        data = [bench.inputs(problem) for _ in range(sets)]
        outs = [bench.guarded(problem.outputs[0].desc)[1] for _ in range(sets)]
        out = problem.outputs[0].name
        tf32 = problem.math == "tf32"
        bench.torch.backends.cudnn.allow_tf32 = tf32
        calls = [(lambda i, p=problem, d=data: bench.convolve(p, d[i]), sets)]
        names = ["cudnn"]
        candidates = takers(problem, bench.device)
        if bench.options.triton:
            candidates += takers(problem, bench.device, TRITON)[:1]
        for algorithm in candidates:
            kernel = algorithm.build(problem, bench.device)
            space = bench.workspace(algorithm, problem)

            def call(i, k=kernel, s=space, p=problem, d=data, o=outs, name=out):
                bench.call(k, p, None, {**d[i], name: o[i]}, workspace=s)

            calls.append((call, sets))
            names.append(algorithm.name)
        try:
            seconds = bench.time(calls)
        except Exception as failure:
            print(name, problem, "FAILED", str(failure)[:200], flush=True)
            continue
        report(bench, rows, name, problem, names, seconds)
        del data, outs
    write(bench, "measure.csv", rows)
    summary(rows)


def report(bench, rows, name, problem, names, seconds):
    """One line of the table, one row of the CSV an algorithm."""
    layout = problem.x.layout
    ours = min(seconds[1:], default=math.inf)
    text = " ".join(
        f"{n.split(':')[1].removeprefix('implicit_gemm')[-11:]}={problem.flops / t / 1e12:.0f}"
        for n, t in zip(names[1:], seconds[1:])
    )
    print(
        f"{name:9s} {problem.direction:15s} {problem.x.dtype:8s} {layout} "
        f"cudnn {problem.flops / seconds[0] / 1e12:6.1f} ratio {seconds[0] / ours:5.2f} {text}",
        flush=True,
    )
    for algorithm, t in zip(names, seconds):
        rows.append({
            "layer": name, "direction": problem.direction,
            "dtype": "tf32" if problem.math == "tf32" else str(problem.x.dtype),
            "layout": layout, "algorithm": algorithm, "microseconds": round(t * 1e6, 2),
            "tflops": round(problem.flops / t / 1e12, 1), "ratio": round(seconds[0] / t, 3),
        })  # fmt: skip


def summary(rows):
    """Geometric means of the best ratio by direction, dtype and layout."""
    best = {}
    for row in rows:
        if row["algorithm"].startswith("gluon"):
            key = (row["layout"], row["dtype"], row["direction"], row["layer"])
            best[key] = max(best.get(key, 0), row["ratio"])
    groups = {}
    for key, ratio in best.items():
        groups.setdefault(key[:3], []).append(ratio)
    for key, found in groups.items():
        mean = math.exp(statistics.fmean(map(math.log, found)))
        print(f"{' '.join(key)}: geometric mean {mean:.2f} of {len(found)}, least {min(found):.2f}")


def tile_kernels(options, device):
    """(layer, problem, tile text, modelled seconds, kernel, workspace) of --tiles."""
    processors = ws.multiprocessors(device)
    for name in TILE_LAYERS:
        for direction in DIRECTIONS[:2]:
            problem = problem_of(LAYERS[name], direction, "bfloat16", "layout=NHWC")
            view = ws.image_view(problem)
            for tile in tiles.IMAGE_HALF:
                if tile.bc != 64 or tile.bk > 2 * view.produced:
                    continue
                patch = choose_patch(view.geo.images, view.geo.axes, tile.bm, view.backward)
                seconds = ws.image_seconds(tile, patch, view, processors)
                choice = ws.ImageChoice(tile, patch, seconds)
                kernel = ws.image_launch(problem, device, choice)
                yield name, problem, text_of(tile), seconds, kernel, 16
        problem = problem_of(LAYERS[name], "backward_filter", "bfloat16", "layout=NHWC")
        for tile in tiles.FILTER_HALF:
            choice = fg.filter_choice(problem, tile, processors, True)
            if tile.bm > 2 * problem.w.dims[0] or tile.bk > 2 * problem.w.dims[1]:
                continue
            kernel = fg.filter_launch(problem, device, choice, True)
            yield name, problem, text_of(tile), choice.work.seconds, kernel, choice.work.workspace
        if problem.w.dims[3] == 3:
            work, view = halo.halo_work(problem, processors), fg.filter_view(problem)
            total = fg.sum_launch(problem, device, work, view.geo, view.geo.taps, view.flip)
            for skip in (False, True):
                main = halo.halo_launch(problem, device, work, skip)
                kernel = launch.Chain((main, total))
                yield name, problem, f"halo{skip:d}", work.seconds, kernel, work.workspace


def text_of(tile):
    """A tile's numbers."""
    return f"{tile.bm}x{tile.bk}x{tile.bc}/{tile.stages}/{tile.consumers}"


def measure_tiles(bench):
    """--tiles."""
    rows, groups = [], {}
    for name, problem, tile, modelled, kernel, size in tile_kernels(bench.options, bench.device):
        groups.setdefault((name, problem), []).append((tile, modelled, kernel, size))
    for (name, problem), found in groups.items():
        if bench.late():
            print("out of time before tiles of", name)
            break
        data = bench.inputs(problem)
        _, out = bench.guarded(problem.outputs[0].desc)
        arrays = {**data, problem.outputs[0].name: out}
        calls = []
        for _, _, kernel, size in found:
            space = bench.torch.empty(size, dtype=bench.torch.uint8, device="cuda")

            def call(i, k=kernel, s=space, p=problem, a=arrays):
                bench.call(k, p, None, a, workspace=s)

            calls.append((call, 1))
        seconds = bench.time(calls)
        for (tile, modelled, _, _), t in zip(found, seconds):
            rows.append({
                "layer": name, "direction": problem.direction,
                "tile": tile,
                "microseconds": round(t * 1e6, 2), "modelled": round(modelled * 1e6, 2),
                "tflops": round(problem.flops / t / 1e12, 1),
            })  # fmt: skip
        order = sorted(rows[-len(found) :], key=lambda row: row["microseconds"])
        best = " ".join(f"{r['tile']}={r['tflops']:.0f}({r['modelled']/r['microseconds']:.2f})"
                        for r in order[:6])  # fmt: skip
        print(f"{name:9s} {problem.direction:15s} {best}", flush=True)
    write(bench, "tiles.csv", rows)


def write(bench, name, rows):
    """A CSV with what it was measured on in its head."""
    folder = Path(bench.options.out)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / name, "w", newline="", encoding="utf-8") as file:
        for key, value in bench.stamp.items():
            file.write(f"# {key}: {value}\n")
        if rows:
            table = csv.DictWriter(file, list(rows[0]))
            table.writeheader()
            table.writerows(rows)


def main():
    """The command line; exit status 1 when a check failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for flag in ("check", "measure", "tiles", "warm", "triton"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument(
        "--algorithms", default="", help="part of the names that --check and --warm take"
    )
    parser.add_argument("--out", default="bench-out")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds")
    parser.add_argument("--jobs", type=int, default=1, help="processes of --warm")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--layouts", nargs="*", default=["NHWC"])
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16"])
    parser.add_argument("--layers", nargs="*", default=list(LAYERS))
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    if options.warm:
        warm(options)
        return 0
    bench = Bench(options)
    right = True
    if options.check:
        right = check(bench)
    if options.measure:
        measure(bench)
    if options.tiles:
        measure_tiles(bench)
    print("seconds", round(time.time() - bench.started, 1))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
