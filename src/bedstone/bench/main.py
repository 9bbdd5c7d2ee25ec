"""`bedstone bench`: time problems against peers and the roofline, print, store and draw."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence

import bedstone
from bedstone.bench import calls, machine, model, plot, report, select_check, suites, timing
from bedstone.bench.driver import Options, Row, run
from bedstone.bench.peers import PEERS
from bedstone.spec.problem import PRIMITIVES

DIRECTIONS = ("forward", "backward_data", "backward_filter")
DTYPES = ("float32", "float64", "float16", "bfloat16")
KINDS = {
    "conv": "convolutions (default suite: paper)",
    "pool": "pooling",
    "softmax": "softmax",
    "activation": "activations",
    "transform": "tensor transforms",
    "calls": "what a call costs besides its arithmetic: planning, compiling, loading",
    "select": "how often the chosen convolution algorithm is the best",
    "model": "whole networks of a framework, on its kernels and on bedstone's",
    "plot": "draw a CSV again, measuring nothing",
}
CONVOLUTIONS = ("conv", "select")
INTERRUPTED = 130  # the exit code of a command that Ctrl-C ended
CROWDED = 0.05  # of the CPU's time taken by others: say so beside the results
EPILOG = """\
examples:
  bedstone bench conv --suite paper --peer torch --directions all
  bedstone bench conv --suite caffenet --peer im2col --batch 16 --layout nchw
  bedstone bench conv --suite small-batch --peer torch --csv F.csv --plot F.png
  bedstone bench conv --suite my-problems.txt --find --json F.json
  bedstone bench transform --peer torch
  bedstone bench calls
  bedstone bench select --suite resnet50 --batch 16
  bedstone bench model --framework torch --model resnet50 --batch 8 --layout nhwc --training
  bedstone bench plot --csv F.csv --plot roofline.png --kind roofline

A suite is a file of problems, one a line, such as: n128c96h64k128r9 "paper:2". Every plan is
checked against the float64 reference before it is timed. A ratio is the peer's time over
bedstone's: above 1 bedstone is faster. `roof` is the part reached of this machine's measured
roofline; algorithms that multiply less than the definition, and operands that stay in the caches,
can pass 1.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bedstone bench`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    what = "; ".join(f"{kind}: {text}" for kind, text in KINDS.items())
    parser.add_argument("what", choices=KINDS, metavar="WHAT", help=what)
    add_problem_arguments(parser)
    add = parser.add_argument
    add("--peer", default="", help=f"joined by commas: {', '.join(PEERS)}")
    add("--threads", type=int, help="CPU threads (default: the settings')")
    add("--algorithm", help="force one, such as cpu:implicit_gemm or 'cpu:*'")
    add("--find", action="store_true", help="measure the candidates, take the best")
    add("--prepared", action="store_true", help="pack the filter once, outside what is timed")
    add("--no-check", action="store_true", help="skip the check before timing")
    add("--json", metavar="FILE", help="write the rows there")
    add("--csv", metavar="FILE", help="write the rows there")
    add("--plot", metavar="FILE", help="draw the CSV there")
    add("--kind", choices=plot.KINDS, default="auto", help="of plot (default auto: by the rows)")
    model.add_arguments(parser)


def add_problem_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say which problems, and how they are planned."""
    add = parser.add_argument
    add("--suite", default="", help="joined by commas; files of your own, or of "
        + ", ".join(suites.names()))  # fmt: skip
    add("--directions", default="forward", help=f"of {', '.join(DIRECTIONS)}, or all")
    add("--dtype", default="float32", help=f"one of {', '.join(DTYPES)}")
    add("--layout", default="nchw,nhwc", help="nchw, nhwc or both (default)")
    add("--math", default="ieee", help="ieee (default), fast, tf32, bf16, bf16x6, bf16x3")
    add("--batch", type=int, help="images, in place of the suite's own number")
    add("--limit", type=int, help="only the first so many problems of a suite")
    add("--workspace", type=float, default=256.0, metavar="MIB",
        help="granted to plans (default 256, 0 for none)")  # fmt: skip
    add("--device", default="cpu", help="cpu (default), cuda or cuda:N")


def main(args: argparse.Namespace) -> int:
    """Run the command line's benchmark."""
    if args.plot and not args.csv:
        expected = "--csv FILE too: plots are drawn from it"
        raise bedstone.InvalidDescriptor("--plot", args.plot, expected)
    if args.what == "plot":
        if not args.plot:
            raise bedstone.InvalidDescriptor("--plot", None, "the picture's file")
        plot.draw(args.csv, args.plot, args.kind)
        return 0
    _check(args)
    settings = {} if args.threads is None else {"num_threads": args.threads}
    with bedstone.config(**settings):
        timing.keep_freed_memory()
        if args.what == "model":
            _words("--layout", args.layout, ("nchw", "nhwc"))
            return model.main(args)
        if args.what == "calls":
            rows = calls.table()
            for what, value, unit in rows:
                print(f"{what:44} {value:10.2f} {unit}")
            if args.csv:
                calls.write_csv(args.csv, rows)
            return 0
        by_suite = {suite: list(_problems(args, suite)) for suite in _suites(args)}
        problems = [entry for entries in by_suite.values() for entry in entries]
        if not problems:
            raise bedstone.InvalidDescriptor("--suite", args.suite, "a file with problems")
        if args.what == "select":
            return select_check.main(by_suite, args.device, workspace_bytes(args))
        return _measure(args, problems)


def _check(args: argparse.Namespace) -> None:
    """Raises InvalidDescriptor for the options that have no meaning."""
    for name in ("batch", "limit", "threads"):
        value = getattr(args, name, None)
        if value is not None and value < 1:
            raise bedstone.InvalidDescriptor(f"--{name}", value, "1 or more")
    if not 0 <= args.workspace < 2**40:
        raise bedstone.InvalidDescriptor("--workspace", args.workspace, "MiB, 0 or more")
    _words("--dtype", args.dtype, DTYPES)


def workspace_bytes(args: argparse.Namespace) -> int:
    """What `--workspace` grants."""
    return int(args.workspace * 2**20)


def problems_of(args: argparse.Namespace) -> Iterator[tuple[str, bedstone.Problem]]:
    """(name, problem) of the suites, of whatever primitive each of them is.

    Raises InvalidDescriptor for a wrong option, before the first problem.
    """
    _check(args)
    found: list[tuple[str, bedstone.Problem]] = []
    for suite in args.suite.split(","):
        for entry in suites.read(suite)[: args.limit]:
            primitive = entry.words[0] if entry.words[0] in PRIMITIVES else "convolution"
            found += _of_entries(args, [entry], primitive)
    return iter(found)


def _words(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    words = tuple(word for word in text.split(",") if word)
    for word in words:
        if word not in known:
            raise bedstone.InvalidDescriptor(option, word, f"one of {known}")
    return words


def _suites(args: argparse.Namespace) -> list[str]:
    default = "paper" if args.what in CONVOLUTIONS else args.what
    return (args.suite or default).split(",")


def _problems(args: argparse.Namespace, suite: str) -> Iterator[tuple[str, bedstone.Problem]]:
    primitive = {"pool": "pooling"}.get(args.what, args.what)
    if args.what in CONVOLUTIONS:
        primitive = "convolution"
    return _of_entries(args, suites.read(suite)[: args.limit], primitive)


def _of_entries(
    args: argparse.Namespace, entries: Sequence[suites.Entry], primitive: str
) -> Iterator[tuple[str, bedstone.Problem]]:
    """The entries as problems in the directions, layouts and dtype that were asked for."""
    layouts = _words("--layout", args.layout, ("nchw", "nhwc"))
    if primitive == "convolution":
        text = ",".join(DIRECTIONS) if args.directions == "all" else args.directions
        directions = _words("--directions", text, DIRECTIONS)
        yield from suites.convolutions(
            entries, directions, args.dtype, layouts, args.batch, args.math
        )
    elif args.batch is not None:
        raise bedstone.InvalidDescriptor("--batch", args.batch, "convolutions to apply it to")
    else:
        yield from suites.others(entries, args.dtype, layouts if primitive == "pooling" else ())


def _measure(args: argparse.Namespace, problems: list[tuple[str, bedstone.Problem]]) -> int:
    options = Options(
        _words("--peer", args.peer, tuple(PEERS)),
        args.algorithm, args.find, workspace_bytes(args), args.device, not args.no_check,
        args.prepared,
    )  # fmt: skip
    handle = bedstone.Handle(args.device)
    ceilings = machine.measure(handle.device.kind)
    threads = f", {bedstone.get_num_threads()} threads" if handle.device.kind == "cpu" else ""
    print(f"{handle.device.name}{threads}; {ceilings}")
    print(report.header(problems[0][1].primitive))
    rows: list[Row] = []
    load, code = machine.OtherLoad(), 0
    try:
        for name, problem in _with_progress(problems):
            try:
                for row in run(name, problem, handle, options, ceilings):
                    rows.append(row)
                    print(report.line(row), flush=True)
            except bedstone.NotSupported as error:
                print(f"{name[:28]:28} {problem.direction:16} {error}", flush=True)
    except KeyboardInterrupt:  # what was measured is kept
        code = INTERRUPTED
    others = load.share()
    # The ceilings are measured twice: what disturbed one measurement may have left the other alone.
    ceilings = machine.higher(ceilings, machine.measure(handle.device.kind))
    rows = [report.under(row, ceilings) for row in rows]
    head = report.environment(handle.device, ceilings)
    notes = sorted({row.note for row in rows if row.note})
    if others is not None:
        head["other load"] = f"{100 * others:.0f}% of the CPU"
        if others > CROWDED:
            notes.append(f"caution: other processes took {head['other load']} meanwhile")
    _store(args, rows, head)
    print(*notes, *report.summary(rows), sep="\n")
    return code


def _store(args: argparse.Namespace, rows: list[Row], head: dict[str, str]) -> None:
    if args.csv:
        report.write_csv(args.csv, rows, head)
    if args.json:
        report.write_json(args.json, rows, head)
    if args.plot:
        plot.draw(args.csv, args.plot, args.kind)


def _with_progress(
    problems: list[tuple[str, bedstone.Problem]],
) -> Iterator[tuple[str, bedstone.Problem]]:
    """The problems, with a bar on stderr when somebody looks at it."""
    start, total = time.monotonic(), len(problems)
    for done, problem in enumerate(problems):
        _progress(done, total, time.monotonic() - start)
        yield problem
    _progress(total, total, time.monotonic() - start)


def _progress(done: int, total: int, seconds: float) -> None:
    if not sys.stderr.isatty():
        return
    filled = 30 * done // max(total, 1)
    left = seconds / done * (total - done) if done else 0.0
    bar = "#" * filled + "." * (30 - filled)
    end = "\r" if done < total else "\n"
    print(f"[{bar}] {done}/{total}, {left:4.0f} s left", end=end, file=sys.stderr, flush=True)
