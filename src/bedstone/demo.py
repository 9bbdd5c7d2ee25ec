"""`bedstone demo`: a network that nobody changed, natively and then on bedstone.

Each framework's folder brings its own demonstration, `frameworks/<name>/demo.py`, with a function
`main(args)` that returns 0 when both answers agree. This module only finds them.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

FOLDER = Path(__file__).parent / "frameworks"
FRAMEWORKS = tuple(sorted(path.parent.name for path in FOLDER.glob("*/demo.py")))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bedstone demo`."""
    parser.add_argument("image", nargs="?", help="onnx: a picture to read (default: a page)")
    parser.add_argument("--output", default="demo-output", metavar="DIR",
                        help="where pictures go")  # fmt: skip
    parser.add_argument("--framework", default="onnx", choices=FRAMEWORKS,
                        help="whose network: " + ", ".join(FRAMEWORKS))  # fmt: skip


def main(args: argparse.Namespace) -> int:
    """Run the demonstration of `args.framework`; 1 if the two answers differ."""
    module = importlib.import_module(f"bedstone.frameworks.{args.framework}.demo")
    return int(module.main(args))
