"""The command `bedstone`: look at the machine, explain a choice, measure, demonstrate, fuzz.

Subcommands live with what they call; each is imported only when it runs. A caller's mistake is one
line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import bedstone
from bedstone.plan import cache, registry
from bedstone.plan.config import current, settings_table
from bedstone.plan.device import cpu_device
from bedstone.spec.problem import PRIMITIVES

EXAMPLES = """\
examples:
  bedstone info                                         this machine, backends, settings
  bedstone explain "n16c64h56k64r3p1"                   which algorithm a convolution takes, and why
  bedstone explain "pooling forward n1c64h112r3p1u2 float32 mode=max"
  bedstone compile --suite resnet50 --architecture sm_90   kernels for a GPU, without it
  bedstone bench conv --suite paper --peer torch        time a suite against PyTorch
  bedstone demo                                         a pretrained network on these kernels
  bedstone fuzz --seconds 30                            random problems against the reference
"""

# Subcommand -> (module with add_arguments(parser) and main(args), one line of help).
ELSEWHERE = {
    "bench": ("bedstone.bench.main", "time primitives against peers and the machine's roofline"),
    "compile": ("bedstone.bench.compile", "fill the disk cache with the kernels of suites"),
    "demo": ("bedstone.demo", "an unmodified network, natively and on bedstone"),
    "caffe": ("bedstone.frameworks.caffe.main", "train, test and time Caffe networks"),
    "build-c": ("bedstone.compat.c.build", "write the C library for a CPU"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code (2 for a caller's mistake)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser(words[0] if words else "")
    if words[:1] == ["fuzz"]:  # it has a parser, and a help, of its own
        args = argparse.Namespace(command="fuzz", run=_fuzz, rest=words[1:])
    else:
        args = parser.parse_args(words)
    try:
        return int(args.run(args))
    except (bedstone.BedstoneError, FileNotFoundError) as error:
        print(f"bedstone {args.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"bedstone {args.command}: interrupted", file=sys.stderr)
        return 130


def _parser(wanted: str) -> argparse.ArgumentParser:
    """The parser; of the subcommands that live elsewhere only `wanted` is imported."""
    parser = argparse.ArgumentParser(
        prog="bedstone",
        description=(bedstone.__doc__ or "").split("\n\n")[0],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"bedstone {bedstone.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, run: Callable[[argparse.Namespace], int], epilog: str = "") -> (
        argparse.ArgumentParser
    ):  # fmt: skip
        raw = argparse.RawDescriptionHelpFormatter
        command = commands.add_parser(
            name, help=text, description=text, epilog=epilog, formatter_class=raw
        )
        command.set_defaults(run=run)
        return command

    info = add("info", "this machine, its backends and the settings in force", _info)
    info.add_argument("--markdown", action="store_true", help="the support table, for documents")
    explain = add("explain", "which algorithm a problem takes, and why not the others", _explain,
                  _GRAMMAR)  # fmt: skip
    explain.add_argument("problem", nargs="+", help="a problem line, or a convolution's shape word")
    explain.add_argument("--workspace", type=int, default=0, metavar="BYTES",
                         help="workspace to grant (default 0)")  # fmt: skip
    explain.add_argument("--algorithm", help="force this one, such as cpu:implicit_gemm")
    explain.add_argument("--find", action="store_true", help="measure instead of estimating")
    explain.add_argument("--device", default="cpu", help="cpu (default), cuda or cuda:N")
    add("fuzz", "random problems against the float64 reference", _fuzz)
    store = add("cache", "show or clear compiled kernels and measurements", _cache)
    store.add_argument("action", choices=("show", "clear"), nargs="?", default="show")
    for name, (module, text) in ELSEWHERE.items():
        if _exists(module):
            command = add(name, text, _run_elsewhere)
            if name == wanted:
                importlib.import_module(module).add_arguments(command)
    return parser


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _run_elsewhere(args: argparse.Namespace) -> int:
    module = importlib.import_module(ELSEWHERE[args.command][0])
    return int(module.main(args) or 0)


_GRAMMAR = """\
A problem line is PRIMITIVE DIRECTION SHAPE [dtype] [key=value ...], as plans print themselves. The
letters of a shape: n images, c channels, d h w input, k filters, t r s window, p padding, u stride,
l dilation (pd ph pw, ... for one axis; p1_2 for low and high side), g groups. h alone means h = w.
"""


def _explain(args: argparse.Namespace) -> int:
    line = " ".join(args.problem)
    if not line.startswith(tuple(f"{name} " for name in PRIMITIVES)):
        line = f"convolution forward {line}"
    problem = bedstone.parse_problem(line)
    plan = bedstone.Handle(args.device).plan(problem, args.algorithm, args.workspace, args.find)
    print(plan.explain())
    return 0


def _info(args: argparse.Namespace) -> int:
    if args.markdown:
        print(support_table())
        return 0
    device = cpu_device()
    print(f"bedstone {bedstone.__version__}, Python {sys.version.split()[0]}")
    print(f"device   {device.name} ({device.architecture}), {bedstone.get_num_threads()} threads")
    if registry.backend_missing("cpu") is None:
        print(f"target   {registry.backend_attribute('cpu', 'describe')()}")  # type: ignore[operator]
    print("\nbackends, in the order in which they are asked")
    for name in bedstone.backend_names():
        reason = registry.backend_missing(name)
        kinds = ", ".join(registry.device_kinds(name))
        print(f"  {name:10} {kinds:5} " + (f"not here: {reason}" if reason else "ready"))
    folder, files, size = _cache_state()
    print(f"\ncache    {folder}: {files} files, {size / 2**20:.1f} MiB")
    print("\nsettings (keyword of bedstone.config, environment variable, value)")
    for name, variable, value, meaning in settings_table():
        print(f"  {name:12} {variable:22} {value or '-':24} {meaning}")
    return 0


def support_table() -> str:
    """A Markdown table: the algorithms of every primitive, backend by backend."""
    names = ("cpu", "triton", "gluon", "reference")
    lines = ["| primitive | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for primitive in PRIMITIVES:
        cells = []
        for backend in names:
            algorithms = registry.every_algorithm(backend, primitive)
            short = [re.sub(r"^[^:]*:", "", a.name) for a in algorithms]
            cells.append("<br>".join(f"`{a}`" for a in short) or "-")
        lines.append(f"| {primitive} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cache_state() -> tuple[str, int, int]:
    root = current().cache_dir
    if not root:
        return "off", 0, 0
    files = [path for path in Path(root).rglob("*") if path.is_file()]
    return root, len(files), sum(path.stat().st_size for path in files)


def _cache(args: argparse.Namespace) -> int:
    folder, files, size = _cache_state()
    if args.action == "clear":
        for kind in ("objects", "find", "cubins"):
            path = cache.directory(kind)
            if path is not None:
                shutil.rmtree(path, ignore_errors=True)
        print(f"{folder}: {files} files, {size / 2**20:.1f} MiB removed")
    else:
        print(f"{folder}: {files} files, {size / 2**20:.1f} MiB")
    return 0


def _fuzz(args: argparse.Namespace) -> int:
    from bedstone.testing import fuzz

    return int(fuzz.main(args.rest) or 0)


if __name__ == "__main__":
    sys.exit(main())
