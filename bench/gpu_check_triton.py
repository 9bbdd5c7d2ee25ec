"""Verify and measure the Triton backend on a CUDA device, in one go, and print compact tables.

    PYTHONPATH=src python3 bench/gpu_check_triton.py --out DIR --conformance 60 --speed --tiles

conformance  a sample of the conformance suite for that many seconds, on several processes
speed        large problems against PyTorch (cuDNN): time, ratio, error against float64
tiles        every row of the tile tables on one layer a kind and direction
host         cost of a planned call on the host; graph capture; unaligned addresses; streams
Kernels are compiled by a pool of processes first, so that the device does not wait.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import multiprocessing
import os
import random
import sys
import time
from pathlib import Path

os.environ.setdefault("BEDSTONE_CACHE_DIR", "/tmp/bedstone-cache")

ARCHITECTURE = "sm_90"
LAYERS = {
    "res56": "n128c64h56k64r3p1", "res28": "n128c128h28k128r3p1", "res14": "n128c256h14k256r3p1",
    "res7": "n128c512h7k512r3p1", "vgg28": "n32c512h28k512r3p1", "L2": "n64c64h64k128r9",
    "L5": "n128c384h13k384r3", "1x1": "n128c1024h14k256r1", "first": "n64c3h224k64r7p3u2",
    "s2": "n128c128h56k128r3p1u2", "dil2": "n64c128h28k128r3p2l2", "g32": "n64c256h28k256r3p1g32",
    "3d": "n4c64d16h28w28k64t3r3s3p1", "odd": "n64c67h29k71r3p1",
}  # fmt: skip
DIRECTIONS = ("forward", "backward_data", "backward_filter")
CONVOLUTIONS = [
    *((layer, dtype, "NHWC") for layer in LAYERS for dtype in ("bfloat16", "float32")),
    *((layer, "bfloat16", "NCHW") for layer in ("res28", "res14", "first")),
    *((layer, "float32", "NCHW") for layer in ("res28", "L5", "first", "s2")),
    *((layer, "tf32", "NHWC") for layer in ("res28", "vgg28", "L5")),
    *((layer, "float64", "NHWC") for layer in ("res28", "res14", "L5", "s2")),
    ("res28", "float64", "NCHW"), ("res28", "float16", "NHWC"),
]  # fmt: skip
DEPTHWISE = [
    (f"{shape} {dtype} layout={layout}")
    for shape in ("n256c192h28k192r3p1g192", "n64c384h14k384r7p3g384", "n128c192h56k192r3p1u2g192")
    for dtype in ("bfloat16", "float32")
    for layout in ("NHWC", "NCHW")
]
MEMORY = [
    "activation forward 128x128x64x64 bfloat16 kind=relu",
    "activation forward 64x128x64x64 float32 kind=gelu",
    "activation backward 64x128x64x64 float32 kind=tanh",
    "tensor_ops transform 128x128x64x64 bfloat16 x=NCHW y=NHWC",
    "tensor_ops transform 128x128x64x64 bfloat16 x=NHWC y=NCHW",
    "tensor_ops transform 64x128x64x64 float32 x=NCHW y=NHWC",
    "tensor_ops transform 64x128x64x64 float32 from=bfloat16",
    "tensor_ops add 64x128x64x64 float32 b=1x128x1x1",
    "tensor_ops set 64x128x64x64 float32",
    "tensor_ops scale 64x128x64x64 float32",
    "convolution backward_bias 64x128x64x64 float32",
    "convolution backward_bias 128x128x64x64 bfloat16 y=NHWC",
    "pooling forward n128c128h64r3p1u2 float32 mode=max",
    "pooling forward n128c128h64r3p1u2 bfloat16 mode=max layout=NHWC",
    "pooling forward n128c128h64r2u2 float32 mode=average_include_padding",
    "pooling forward n128c128h64r3p1u2 float32 mode=max with_indices",
    "pooling backward n128c128h64r3p1u2 float32 mode=max",
    "pooling backward n128c128h64r2u2 float32 mode=max",
    "pooling backward n128c128h64r3p1u2 float32 mode=max with_indices",
    "pooling backward n128c128h64r2u2 bfloat16 mode=average_include_padding layout=NHWC",
    "pooling forward n256c2048h7r7 float32 mode=average_include_padding",
    "softmax forward 65536x1024 float32 axes=1",
    "softmax forward 1048576x50 bfloat16 axes=1",
    "softmax backward 65536x1024 float32 axes=1",
    "softmax forward 64x1024x32x32 float32 axes=1",
    "softmax forward 256x1000000 bfloat16 axes=1 algorithm=log",
    "softmax forward 16x4000000 float32 axes=1",
]
TILE_LAYER = "n64c256h28k256r3p1"
TILE_KINDS = [
    ("half", "bfloat16", "NHWC"), ("half gathered", "bfloat16", "NCHW"),
    ("split", "float32", "NHWC"), ("split gathered", "float32", "NCHW"),
    ("bf16x6", "float32 math=bf16x6", "NHWC"), ("bf16x3", "float32 math=bf16x3", "NHWC"),
    ("tf32", "float32 math=tf32", "NHWC"), ("double", "float64", "NHWC"),
]  # fmt: skip


def convolution_line(layer: str, dtype: str, layout: str, direction: str) -> str:
    words = "float32 math=tf32" if dtype == "tf32" else dtype
    return f"convolution {direction} {LAYERS[layer]} {words} layout={layout}"


def speed_lines() -> list[str]:
    lines = [convolution_line(*row, d) for row in CONVOLUTIONS for d in DIRECTIONS]
    lines += [f"convolution {d} {line}" for line in DEPTHWISE for d in DIRECTIONS]
    return lines + MEMORY


def tile_builds():
    """(kind, direction, tile, problem, choice) of every row of the tables."""
    from dataclasses import replace

    from bedstone.backends.triton.convolution import implicit_gemm, tiles
    from bedstone.spec.problem import parse_problem

    for (kind, dtype, layout), direction in itertools.product(TILE_KINDS, DIRECTIONS):
        problem = parse_problem(f"convolution {direction} {TILE_LAYER} {dtype} layout={layout}")
        base = implicit_gemm.choose(problem, ARCHITECTURE, False)
        for tile in (*tiles.TABLES["hopper"][kind], *EXTRA_TILES.get(kind, ())):
            split = 1
            if direction == "backward_filter":
                split = implicit_gemm.split_of(base.shape, tile, ARCHITECTURE)
            yield kind, direction, tile, problem, replace(base, tile=tile, split=split)


EXTRA_TILES: dict[str, tuple] = {}


def _extra(text: str) -> None:
    """Candidates for the tables: kind:BM,BN,BK,warps,stages;..."""
    from bedstone.backends.triton.convolution import tiles

    for part in filter(None, text.split(";")):
        kind, numbers = part.split(":")
        row = tiles.Tile(*map(int, numbers.split(",")), 1.0)
        EXTRA_TILES[kind] = (*EXTRA_TILES.get(kind, ()), row)


def compile_one(job: tuple[str, object]) -> str:
    """In a worker without the device: compile into the disk cache."""
    from bedstone.backends.triton import compile, launch
    from bedstone.backends.triton.convolution import implicit_gemm
    from bedstone.plan import registry
    from bedstone.spec.problem import parse_problem

    target = launch.target_device(ARCHITECTURE)
    kind, what = job
    try:
        if kind == "tile":
            problem, choice = what
            implicit_gemm.build(problem, choice, target)
            return ""
        problem = parse_problem(what)
        for algorithm in registry.algorithms_of("triton", problem.primitive):
            if algorithm.supports(problem, target) is None:
                algorithm.build(problem, target)
    except compile.CompileError as error:
        return f"{what}: {error}"[-300:]
    return ""


def precompile(jobs: list[tuple[str, object]], processes: int) -> None:
    start = time.time()
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        failed = [text for text in pool.imap_unordered(compile_one, jobs) if text]
    print(f"compiled {len(jobs)} builds in {time.time() - start:.0f} s; failed:", *failed, sep="\n")


def conformance_worker(arguments: tuple[int, int, float]) -> tuple[int, list[str]]:
    """Every `count`-th job of the suite, for some seconds."""
    number, count, seconds = arguments
    from bedstone.plan.handle import Handle
    from bedstone.testing.conformance import jobs, run_job

    handle = Handle("cuda")
    todo = jobs("triton", handle.device)
    random.Random(7).shuffle(todo)
    wrong, done, end = [], 0, time.time() + seconds
    for job in todo[number::count]:
        if time.time() > end:
            break
        done += 1
        try:
            wrong += run_job(job, handle)[:1]
        except Exception as error:
            wrong.append(f"{job}: {error!r}"[-500:])
            if "CUDA" in repr(error) or "cu" in repr(error)[:20]:
                break
    return done, wrong


def conformance(seconds: float, processes: int, out: Path) -> None:
    jobs = [(i, processes, seconds) for i in range(processes)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        results = pool.map(conformance_worker, jobs)
    wrong = [text for _, texts in results for text in texts]
    (out / "conformance.txt").write_text("\n\n".join(wrong))
    total = sum(n for n, _ in results)
    print(f"\nconformance: {total} problems, {len(wrong)} failed")
    for text in wrong[:12]:
        print(" ", text[:330].replace("\n", "\n   "))


class Measured:
    """A problem's operands as torch tensors, our kernels' times, and a peer's."""

    def __init__(self, problem, seed: int = 0) -> None:
        import torch

        torch.manual_seed(seed)
        self.problem, self.tensors, self.pointers = problem, {}, []
        for operand in problem.operands:
            low, high = operand.desc.offset_range()
            dtype = getattr(torch, str(operand.desc.dtype))
            size = high - low + 1
            if dtype is torch.int64:
                flat = torch.zeros(size, device="cuda", dtype=dtype)
            else:
                flat = torch.randn(size, device="cuda", dtype=dtype)
            if operand.is_output and operand.role == "out" and dtype is not torch.int64:
                flat.fill_(float("nan"))
            self.tensors[operand.name] = torch.as_strided(
                flat, operand.desc.dims, operand.desc.strides
            )
            self.pointers.append(flat.data_ptr())

    def run(self, kernel, workspace: int) -> float:
        import torch

        from bedstone.backends.triton import RUNTIME

        lent = torch.empty(max(workspace, 1), device="cuda", dtype=torch.uint8)
        pointers = tuple(self.pointers)
        kernel(pointers, lent.data_ptr(), 1.0, 0.0, 0)
        torch.cuda.synchronize()
        self.result = self.tensors[self.problem.outputs[0].name].clone()
        return RUNTIME.time(lambda: kernel(pointers, lent.data_ptr(), 1.0, 0.0, 0), seconds=0.02)


def peer_call(problem, t: dict, double: bool = False, magnitude: bool = False):
    """PyTorch's answer to a convolution, pooling, softmax ... as a function, or None."""
    import torch
    import torch.nn.functional as F

    def given(name):
        value = t[name].abs() if magnitude else t[name]
        return value.double() if double else value

    if problem.primitive == "convolution" and problem.direction != "backward_bias":
        conv = problem.conv
        pad, axes = [p for p, _ in conv.padding], conv.axes
        common = (list(conv.stride), pad, list(conv.dilation), False, [0] * axes, conv.groups)
        if problem.direction == "forward":
            x, w = given("x"), given("w")
            return lambda: torch.ops.aten.convolution(x, w, None, *common)
        back = torch.ops.aten.convolution_backward
        if problem.direction == "backward_data":
            dy, w = given("dy"), given("w")
            x = torch.empty_like(t["dx"], dtype=dy.dtype)
            return lambda: back(dy, x, w, None, *common, [True, False, False])[0]
        dy, x = given("dy"), given("x")
        w = torch.empty_like(t["dw"], dtype=dy.dtype)
        return lambda: back(dy, x, w, None, *common, [False, True, False])[1]
    if double or magnitude:
        return None
    if problem.primitive == "softmax" and problem.direction == "forward":
        call = torch.log_softmax if problem.algorithm == "log" else torch.softmax
        x, axis = t["x"], problem.axes[0]
        return lambda: call(x, axis)
    if problem.primitive == "pooling" and problem.direction == "forward":
        pool, x = problem.pool, t["x"]
        pad = [p for p, _ in pool.padding]
        if pool.mode == "max":
            return lambda: F.max_pool2d(x, pool.window, pool.stride, pad)
        return lambda: F.avg_pool2d(x, pool.window, pool.stride, pad)
    if problem.direction == "transform":
        x, y = t["x"], t["y"].clone()
        return lambda: y.copy_(x)
    if problem.direction == "backward_bias":
        dy = t["dy"]
        return lambda: dy.sum((0, 2, 3))
    return None


def error_of(problem, got, tensors) -> str:
    """Largest error of a convolution, in units of 2^-24 (2^-53) times the sum of magnitudes of
    each element's terms; of the stored type's own epsilon for 16-bit results."""
    import torch

    call = peer_call(problem, tensors, double=True)
    if call is None:
        return ""
    with torch.backends.cudnn.flags(enabled=problem.x.dtype != "float64"):
        want = call()
        size = peer_call(problem, tensors, double=True, magnitude=True)()
    unit = {"float64": 2.0**-53, "float32": 2.0**-24}.get(str(problem.dtype))
    if unit is None:
        unit = problem.dtype.epsilon
    error = ((got.double() - want).abs() / (size * unit + 1e-300)).max().item()
    norm = ((got.double() - want).norm() / want.norm()).item()
    return f"{error:.2g}u {norm:.1e}"


def speed(out: Path, seconds: float, only: str) -> None:
    import torch
    from triton.testing import do_bench_cudagraph

    from bedstone.plan import registry
    from bedstone.plan.runtime import runtime_of
    from bedstone.spec.problem import parse_problem

    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = False
    device = runtime_of("cuda").device(0)
    rows, end = [], time.time() + seconds
    for line in speed_lines():
        if only and only not in line:
            continue
        if time.time() > end:
            print("speed: out of time before", line)
            break
        problem = parse_problem(line)
        measured = Measured(problem)
        torch.backends.cudnn.allow_tf32 = "tf32" in line
        call = peer_call(problem, measured.tensors)
        try:
            peer = do_bench_cudagraph(call, rep=15) * 1e-3 if call else math.nan
        except Exception:
            peer = math.nan
        bound = problem.primitive == "convolution" and "g192" not in line and "g384" not in line
        rate = problem.flops / 1e12 if bound and "bias" not in line else problem.bytes / 1e9
        cells = []
        for algorithm in registry.algorithms_of("triton", problem.primitive):
            if algorithm.supports(problem, device) is not None:
                continue
            if algorithm.name == "triton:implicit_gemm" and not bound:
                continue
            kernel = algorithm.build(problem, device)
            workspace = algorithm.workspace(problem, device)
            taken = measured.run(kernel, workspace)
            error = error_of(problem, measured.result, measured.tensors) if bound else ""
            bad = "" if torch.isfinite(measured.result).all() else " NAN"
            estimate = algorithm.estimate(problem, device)
            rows.append([line, algorithm.name, taken, rate / taken, peer, peer / taken, estimate,
                         error + bad])  # fmt: skip
            cells.append(
                f"{algorithm.name[7:]} {taken * 1e6:.0f}us {rate / taken:.0f} x{peer / taken:.2f} "
                f"e{estimate / taken:.1f} {error}{bad}"
            )
        print(f"{line[:74]:74s} {peer * 1e6:6.0f}us | " + " | ".join(cells), flush=True)
        del measured
    with open(out / "speed.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["problem", "algorithm", "seconds", "TFLOP/s or GB/s", "peer seconds",
                         "peer/ours", "estimate", "error"])  # fmt: skip
        writer.writerows(rows)


def tile_table(out: Path) -> None:
    import torch

    from bedstone.backends.triton.convolution import implicit_gemm
    from bedstone.plan.runtime import runtime_of

    device = runtime_of("cuda").device(0)
    rates: dict[tuple, dict[str, float]] = {}
    rows = []
    kept = (None, None)
    for kind, direction, tile, problem, choice in tile_builds():
        if kept[0] != problem:
            kept = (problem, Measured(problem))
        try:
            kernel = implicit_gemm.build(problem, choice, device)
            parts = choice.split * problem.outputs[0].desc.size
            taken = kept[1].run(kernel, 8 * parts)
        except Exception as error:
            print(kind, direction, tile, repr(error)[:200])
            continue
        good = torch.isfinite(kept[1].result).all().item()
        rate = problem.flops / taken / 1e12 if good else -1.0
        key = (kind, tile.bm, tile.bn, tile.bk, tile.warps, tile.stages)
        rates.setdefault(key, {})[direction] = rate
        rows.append([*key, direction, rate])
    print("\ntiles: TFLOP/s forward, backward_data, backward_filter")
    for key, found in rates.items():
        print(*key, *(f"{found.get(d, math.nan):.1f}" for d in DIRECTIONS))
    with open(out / "tiles.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)


def host() -> None:
    """Cost of a call on the host, and the ways of calling."""
    import torch

    from bedstone.plan.handle import Handle
    from bedstone.spec.problem import parse_problem

    handle = Handle("cuda")
    problem = parse_problem("convolution forward n8c128h28k128r3p1 bfloat16 layout=NHWC")
    plan = handle.plan(problem, "triton:implicit_gemm")
    measured = Measured(problem)
    p = measured.pointers
    plan(*p)
    want = measured.tensors["y"].clone()
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            plan(*p)
        times.append((time.perf_counter() - start) / 100)
    print(f"\nhost: {sorted(times)[3] * 1e6:.2f} us a planned call")
    y = measured.tensors["y"]
    y.fill_(float("nan"))
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        plan(*p, stream=torch.cuda.current_stream().cuda_stream)
    graph.replay()
    torch.cuda.synchronize()
    print("graph capture:", torch.equal(y, want))
    with torch.cuda.stream(side):
        y.fill_(float("nan"))
        plan(*p, stream=side.cuda_stream)
    side.synchronize()
    print("stream:", torch.equal(y, want))
    x = torch.empty(measured.tensors["x"].numel() + 8, device="cuda", dtype=torch.bfloat16)
    shifted = x[1 : 1 + measured.tensors["x"].numel()]
    shifted.copy_(torch.as_strided(measured.tensors["x"], shifted.shape, (1,)))
    y.fill_(float("nan"))
    plan(shifted.data_ptr(), *p[1:])
    torch.cuda.synchronize()
    print("unaligned:", torch.equal(y, want))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--conformance", type=float, default=0.0)
    parser.add_argument("--speed", type=float, default=0.0, help="seconds at most")
    parser.add_argument("--only", default="", help="speed: problems with this text")
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--extra", default="", help="more tiles: kind:BM,BN,BK,warps,stages;...")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--processes", type=int, default=16)
    options = parser.parse_args()
    _extra(options.extra)
    jobs: list[tuple[str, object]] = []
    if options.speed:
        jobs += [("line", line) for line in speed_lines() if options.only in line]
    if options.tiles:
        jobs += [("tile", (problem, choice)) for *_, problem, choice in tile_builds()]
    if jobs:
        precompile(jobs, options.processes)
    if options.host:
        host()
    if options.tiles:
        tile_table(options.out)
    if options.speed:
        speed(options.out, options.speed, options.only)
    if options.conformance:
        conformance(options.conformance, options.processes // 2, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
