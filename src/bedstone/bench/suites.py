"""Problem files: one problem a line, its name in quotes at the end.

A convolution needs only its shape word (`n128c96h64k128r9 "paper:2"`): direction, dtype and layout
come from the command line. Other primitives write `PRIMITIVE DIRECTION SHAPE [key=value ...]`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import bedstone

FOLDER = Path(__file__).parent / "suites"


@dataclass(frozen=True)
class Entry:
    """One line: its words, and its name (the words where it has none)."""

    words: tuple[str, ...]
    name: str


def names() -> list[str]:
    """The suites that bedstone brings."""
    return sorted(path.stem for path in FOLDER.glob("*.txt"))


def read(suite: str) -> list[Entry]:
    """The entries of a suite, or of a file of one's own where `suite` is a path.

    Raises InvalidDescriptor for an unknown suite or a line that cannot be read.
    """
    path = FOLDER / f"{suite}.txt"
    if not path.is_file():
        path = Path(suite)
    if not path.is_file():
        raise bedstone.InvalidDescriptor("suite", suite, f"a file, or one of {names()}")
    entries = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            *words, last = shlex.split(line)
        except ValueError as error:
            raise bedstone.InvalidDescriptor(f"{path}:{number}", line, str(error)) from None
        named = '"' in line and bool(words)
        entries.append(Entry(tuple(words) if named else (*words, last), last))
    return entries


def convolutions(
    entries: Sequence[Entry],
    directions: Sequence[str],
    dtype: str,
    layouts: Sequence[str],
    batch: int | None = None,
    math: str = "ieee",
) -> Iterator[tuple[str, bedstone.ConvolutionProblem]]:
    """(name, problem) of every entry in every direction and layout."""
    for entry in entries:
        for direction in directions:
            for layout in layouts:
                line = f"convolution {direction} {' '.join(entry.words)} {dtype} layout={layout}"
                problem = bedstone.parse_problem(line + ("" if math == "ieee" else f" math={math}"))
                if not isinstance(problem, bedstone.ConvolutionProblem):
                    raise bedstone.InvalidDescriptor("suite", entry.name, "a convolution")
                yield entry.name, problem if batch is None else with_batch(problem, batch)


def with_batch(problem: bedstone.ConvolutionProblem, batch: int) -> bedstone.ConvolutionProblem:
    """The same problem over `batch` images (packed tensors keep their layout)."""
    x = (batch, *problem.x.dims[1:])
    conv = problem.conv
    return bedstone.convolution_problem(
        problem.direction, x, problem.w.dims, dtype=problem.x.dtype, layout=problem.y.layout,
        padding=conv.padding, stride=conv.stride, dilation=conv.dilation, groups=conv.groups,
        mode=conv.mode, math=problem.math,
    )  # fmt: skip


def others(
    entries: Sequence[Entry], dtype: str, layouts: Sequence[str] = ()
) -> Iterator[tuple[str, bedstone.Problem]]:
    """(name, problem) of entries that name their primitive; `layouts` are the memory orders of the
    tensors that do not name their own (NCHW without)."""
    for entry in entries:
        for layout in layouts or ("nchw",):
            line = " ".join((*entry.words, dtype, f"layout={layout}"))
            yield entry.name, bedstone.parse_problem(line)
