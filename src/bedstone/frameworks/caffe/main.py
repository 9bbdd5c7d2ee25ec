"""The command `bedstone caffe`: train, test, time, draw and extract, with Caffe's files and log."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from bedstone.frameworks.caffe import drawing, extracting, timing, timing_device
from bedstone.frameworks.caffe.net import Net
from bedstone.frameworks.caffe.signals import EFFECTS, Signals
from bedstone.frameworks.caffe.solver import Solver, output_lines, run_test
from bedstone.frameworks.caffe.solvers_log import CLEAR, TOOL, Log, number
from bedstone.frameworks.caffe.spaces import MATHS
from bedstone.spec.errors import InvalidDescriptor

EPILOG = """\
examples:
  bedstone caffe train --solver examples/caffe/lenet_digits/solver.prototxt
  bedstone caffe train --solver F --snapshot lenet_iter_300.solverstate      go on from a snapshot
  bedstone caffe test --model F --weights lenet_iter_450.caffemodel --iterations 4
  bedstone caffe time --model examples/caffe/caffenet/train_val.prototxt --engine both
  bedstone caffe time --model F --gpu 0 --peer torch --math tf32
  bedstone caffe draw --model F --output net.png
  bedstone caffe extract --model F --weights F --blobs ip1 --output features.h5
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add(name: str, act: Callable[[argparse.Namespace], int], text: str) -> (
        argparse.ArgumentParser
    ):  # fmt: skip
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(act=act)
        return command

    train = add("train", _train, "train a network as a solver file says")
    train.add_argument("--solver", required=True, metavar="F", help="the solver's .prototxt")
    begin = train.add_mutually_exclusive_group()
    begin.add_argument("--weights", metavar="F", help="start from these .caffemodel (F,F,...)")
    begin.add_argument("--snapshot", metavar="F", help="go on from this .solverstate")
    _add_engine(train)
    _add_gpu(train)
    for name, default in (("sigint", "stop"), ("sighup", "snapshot")):
        train.add_argument(f"--{name}-effect", f"--{name}_effect", choices=EFFECTS, default=default,
                           help=f"what {name.upper()} asks for (default {default})")  # fmt: skip
    train.add_argument("--quiet", action="store_true", help="log warnings only")

    test = add("test", _test, "score a network on its test data")
    _add_net(test)
    test.add_argument("--iterations", type=int, default=50, metavar="N",
                      help="batches (default 50)")  # fmt: skip
    _add_state(test)
    _add_engine(test)
    _add_gpu(test)

    clock = add("time", _time, "time a network layer by layer, on one engine or two in turns")
    _add_net(clock, weights_required=False)
    clock.add_argument("--iterations", type=int, default=10, metavar="N", help="(default 10)")
    clock.add_argument("--engine", choices=("bedstone", "caffe", "both"), default="bedstone",
                       help="caffe: image by image and NumPy's BLAS; both: in turns")  # fmt: skip
    clock.add_argument("--batch", type=int, metavar="N", help="in place of the network's batches")
    clock.add_argument("--peer", choices=("torch",), help="with --gpu: the same network by PyTorch")
    _add_gpu(clock)
    clock.add_argument("--json", metavar="F", help="write the measurement")
    clock.add_argument("--plot", metavar="F.png", help="draw it")

    draw = add("draw", _draw, "draw a network, as a picture or as text for Graphviz")
    draw.add_argument("--model", required=True, metavar="F", help="the network's .prototxt")
    draw.add_argument("--output", required=True, metavar="F", help="a .png, .svg, .pdf or .dot")
    draw.add_argument("--phase", choices=("TRAIN", "TEST", "ALL"), default="ALL",
                      help="layers of this phase only (default all)")  # fmt: skip
    draw.add_argument("--rankdir", choices=("TB", "LR"), default="TB",
                      help="top to bottom (default) or left to right")  # fmt: skip

    extract = add("extract", _extract, "write blobs of a network over many batches")
    _add_net(extract)
    extract.add_argument("--blobs", required=True, metavar="B,B", help="names of blobs")
    extract.add_argument("--iterations", type=int, default=1, metavar="N",
                         help="batches (default 1)")  # fmt: skip
    extract.add_argument("--output", required=True, metavar="F",
                         help="F.h5, F.npz, or F_lmdb for one blob")  # fmt: skip
    extract.add_argument("--phase", choices=("TRAIN", "TEST"), default="TEST")
    _add_state(extract)
    _add_engine(extract)
    _add_gpu(extract)


def _add_net(command: argparse.ArgumentParser, weights_required: bool = True) -> None:
    command.add_argument("--model", required=True, metavar="F", help="the network's .prototxt")
    command.add_argument("--weights", required=weights_required, metavar="F",
                         help="a .caffemodel")  # fmt: skip


def _add_state(command: argparse.ArgumentParser) -> None:
    command.add_argument("--level", type=int, default=0, metavar="N", help="the net state's level")
    command.add_argument("--stage", default="", metavar="S,S", help="the net state's stages")


def _add_engine(command: argparse.ArgumentParser) -> None:
    command.add_argument("--engine", choices=tuple(timing.ENGINES),
                         help="for layers that name no engine (default bedstone)")  # fmt: skip


def _add_gpu(command: argparse.ArgumentParser) -> None:
    command.add_argument("--gpu", type=int, metavar="N", help="compute on this GPU (from 0)")
    command.add_argument("--math", choices=MATHS, default="ieee",
                         help="on a GPU: tf32 for fewer digits of products")  # fmt: skip


def main(args: argparse.Namespace) -> int:
    return args.act(args)


def _engine(args: argparse.Namespace) -> str | None:
    return timing.ENGINES[args.engine] if args.engine else None


def _train(args: argparse.Namespace) -> int:
    log = Log(quiet=args.quiet)
    solver = Solver(args.solver, engine=_engine(args), log=log, gpu=args.gpu, math=args.math)
    for path in _names(args.weights):
        solver.copy_weights(path)
    with Signals(args.sigint_effect, args.sighup_effect) as signals:
        solver.requested = signals.next_request
        log.info("Starting Optimization", TOOL)
        solver.solve(args.snapshot)
        log.info("Optimization Done.", TOOL)
    return 0


def _net(args: argparse.Namespace, phase: str) -> Net:
    return Net(args.model, phase, weights=args.weights, engine=_engine(args), level=args.level,
               stages=tuple(_names(args.stage)), gpu=args.gpu, math=args.math)  # fmt: skip


def _names(text: str | None) -> list[str]:
    return [name for name in (text or "").split(",") if name]


def _test(args: argparse.Namespace) -> int:
    if args.iterations < 1:
        raise InvalidDescriptor("iterations", args.iterations, "1 or more")
    log = Log()
    net = _net(args, "TEST")
    log.info(f"Running for {args.iterations} iterations.", TOOL)
    done = 0

    def tell() -> bool:
        nonlocal done
        log.progress(f"batch {done + 1}/{args.iterations}")
        done += 1
        return True

    means, loss = run_test(net, args.iterations, tell)
    log.end_progress()
    log.info(f"Loss: {number(loss)}", TOOL)
    for line in output_lines(net, means, "Test"):
        log.info(line.partition(": ")[2], TOOL)
    return 0


def _time(args: argparse.Namespace) -> int:
    engines = tuple(timing.ENGINES) if args.engine == "both" else (args.engine,)
    if args.gpu is None and (args.peer or args.math != "ieee"):
        raise InvalidDescriptor("gpu", None, "a GPU's number with --peer and --math")
    if args.gpu is not None and args.engine != "bedstone":
        raise InvalidDescriptor("engine", args.engine, "bedstone with --gpu (compare by --peer)")
    for path in (args.json, args.plot):  # minutes of measuring are not to end in a missing folder
        if path and not Path(path).absolute().parent.is_dir():
            raise InvalidDescriptor("output", path, "a file in a folder that exists")

    def tell(text: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(CLEAR + text)
            sys.stderr.flush()

    try:
        if args.gpu is None:
            measured = timing.measure(
                args.model, engines, args.iterations, batch=args.batch, weights=args.weights,
                tell=tell,
            )  # fmt: skip
        else:
            measured = timing_device.measure(
                args.model, args.iterations, args.gpu, peer=args.peer, math=args.math,
                batch=args.batch, weights=args.weights, tell=tell,
            )  # fmt: skip
    finally:
        tell("")
    print(timing.table(measured))
    if args.json:
        measured.write(args.json)
    if args.plot:
        timing.plot(measured, args.plot)
    return 0


def _draw(args: argparse.Namespace) -> int:
    drawing.draw(args.model, args.output, args.phase, args.rankdir)
    print(args.output)
    return 0


def _extract(args: argparse.Namespace) -> int:
    net = _net(args, args.phase)
    shapes = extracting.extract(net, _names(args.blobs), args.iterations, args.output)
    for name, shape in shapes.items():
        print(f"{args.output}: {name} {'x'.join(map(str, shape))}")
    return 0
