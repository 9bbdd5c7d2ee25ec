"""`bedstone bench`: time problems against peers and the roofline, print, store and draw."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

import bedstone
from bedstone.bench import calls, machine, plot, report, select_check, suites
from bedstone.bench.driver import Options, Row, run
from bedstone.bench.peers import PEERS

DIRECTIONS = ("forward", "backward_data", "backward_filter")
KINDS = ("conv", "pool", "softmax", "activation", "transform", "calls", "select")
EPILOG = """\
examples:
  bedstone bench conv --suite paper --peer torch --directions all
  bedstone bench conv --suite caffenet --peer im2col --batch 16 --layout nchw
  bedstone bench conv --suite small-batch --peer torch --csv F.csv --plot F.png
  bedstone bench transform --peer torch
  bedstone bench calls
  bedstone bench select --suite resnet50 --batch 16
A ratio is the peer's time over bedstone's: above 1 bedstone is faster. `roof` is the part reached
of this machine's measured roofline; algorithms with fewer products than the definition can pass 1.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bedstone bench`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("primitive", choices=KINDS, help="what to measure")
    parser.add_argument("--suite", default="", help="suites or files, joined by commas: "
                        + ", ".join(suites.names()))  # fmt: skip
    parser.add_argument("--directions", default="forward", help="joined by commas, or all")
    parser.add_argument("--dtype", default="float32", help="float32, float64, float16, bfloat16")
    parser.add_argument("--layout", default="nchw,nhwc", help="nchw, nhwc or both (default)")
    parser.add_argument("--peer", default="", help=f"joined by commas: {', '.join(PEERS)}")
    parser.add_argument("--threads", type=int, help="CPU threads (default: the settings')")
    parser.add_argument("--algorithm", help="force one, such as cpu:implicit_gemm or 'cpu:*'")
    parser.add_argument("--math", default="ieee", help="ieee (default), fast, ...")
    parser.add_argument("--find", action="store_true", help="measure candidates, take the best")
    parser.add_argument("--workspace", type=float, default=256, metavar="MIB",
                        help="workspace granted (default 256; 0 for none)")  # fmt: skip
    parser.add_argument("--batch", type=int, help="images, in place of the suite's own number")
    parser.add_argument("--limit", type=int, help="only the first so many problems of a suite")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda or cuda:N")
    parser.add_argument("--no-check", action="store_true", help="skip the check before timing")
    parser.add_argument("--json", metavar="FILE", help="write the rows there")
    parser.add_argument("--csv", metavar="FILE", help="write the rows there")
    parser.add_argument("--plot", metavar="FILE", help="draw them there (needs --csv)")


def main(args: argparse.Namespace) -> int:
    """Run the command line's benchmark."""
    if args.plot and not args.csv:
        raise bedstone.InvalidDescriptor(
            "--plot", args.plot, "--csv FILE too: plots are drawn from it"
        )
    settings = {} if args.threads is None else {"num_threads": args.threads}
    with bedstone.config(**settings):
        if args.primitive == "calls":
            for what, value, unit in calls.table():
                print(f"{what:34} {value:10.2f} {unit}")
            return 0
        problems = list(_problems(args))
        if args.primitive == "select":
            return select_check.main(problems, _bytes(args.workspace))
        return _measure(args, problems)


def _bytes(mib: float) -> int:
    return int(mib * 2**20)


def _problems(args: argparse.Namespace) -> Iterator[tuple[str, bedstone.Problem]]:
    convolution = args.primitive in ("conv", "select")
    default = "paper" if convolution else args.primitive
    for suite in (args.suite or default).split(","):
        entries = suites.read(suite)[: args.limit]
        if not convolution:
            yield from suites.others(entries, args.dtype)
            continue
        directions = list(DIRECTIONS) if args.directions == "all" else args.directions.split(",")
        layouts = args.layout.split(",")
        yield from suites.convolutions(
            entries, directions, args.dtype, layouts, args.batch, args.math
        )


def _measure(args: argparse.Namespace, problems: list[tuple[str, bedstone.Problem]]) -> int:
    peers = tuple(peer for peer in args.peer.split(",") if peer)
    for peer in peers:
        if peer not in PEERS:
            raise bedstone.InvalidDescriptor("--peer", peer, f"one of {list(PEERS)}")
    options = Options(
        peers, args.algorithm, args.find, _bytes(args.workspace), args.device, not args.no_check
    )
    ceilings = machine.measure()
    rates = ", ".join(f"{name} {rate / 1e9:.0f} GFLOP/s" for name, rate in ceilings.flops.items())
    device = f"{bedstone.default_handle().device.name}, {bedstone.get_num_threads()} threads"
    print(f"{device}; measured peak {rates}, copy {ceilings.bandwidth / 1e9:.0f} GB/s")
    print(report.HEADER)
    rows: list[Row] = []
    start = time.monotonic()
    for done, problem in enumerate(problems):
        _progress(done, len(problems), start)
        for row in run([problem], options, ceilings):
            rows.append(row)
            print(report.line(row), flush=True)
    _progress(len(problems), len(problems), start)
    notes = sorted({row.note for row in rows if row.note})
    print(*notes, *report.summary(rows), sep="\n")
    if args.csv:
        report.write_csv(args.csv, rows)
    if args.json:
        report.write_json(args.json, rows)
    if args.plot:
        plot.draw(args.csv, args.plot)
    return 0


def _progress(done: int, total: int, start: float) -> None:
    """A bar on stderr, when somebody looks at it."""
    if not sys.stderr.isatty():
        return
    filled = 30 * done // max(total, 1)
    left = (time.monotonic() - start) / done * (total - done) if done else 0.0
    bar = "#" * filled + "." * (30 - filled)
    end = "\r" if done < total else "\n"
    print(f"[{bar}] {done}/{total}, {left:4.0f} s left", end=end, file=sys.stderr, flush=True)
