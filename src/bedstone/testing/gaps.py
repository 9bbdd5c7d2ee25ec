"""Known gaps: which cases an algorithm is known to fail, as data, with the reason.

One file a backend, `gaps/<backend>.toml`, of tables like

    [[gap]]
    algorithm = "cpu:winograd_*"          # patterns, matched as file names are
    problem = "convolution forward *"     # against the problem's line
    fill = "special"
    reason = "an infinity reaches every output of its tile"

A case that a gap covers must fail: one that passes is reported too, so that the file stays true.
"""

from __future__ import annotations

import fnmatch
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bedstone.spec.errors import InvalidDescriptor
from bedstone.testing.harness import Case

FOLDER = Path(__file__).parent / "gaps"


@dataclass(frozen=True)
class Gap:
    """Patterns of the cases that fail, and why."""

    algorithm: str
    reason: str
    problem: str = "*"
    fill: str = "*"

    def covers(self, case: Case) -> bool:
        """True if the case is expected to fail."""
        return (
            fnmatch.fnmatchcase(case.algorithm, self.algorithm)
            and fnmatch.fnmatchcase(str(case.problem), self.problem)
            and fnmatch.fnmatchcase(case.fill, self.fill)
        )


def load(backend: str, path: Path | None = None) -> tuple[Gap, ...]:
    """The gaps of a backend: of the file given, or of its file in this package; () without one."""
    file = path or FOLDER / f"{backend}.toml"
    if not file.exists():
        if path is not None:
            raise InvalidDescriptor("gaps", str(path), "a file")
        return ()
    tables = _parse(file.read_text(encoding="utf-8")).get("gap", [])
    try:
        return tuple(Gap(**table) for table in tables)
    except TypeError as error:
        raise InvalidDescriptor("gaps", str(file), f"the keys of Gap: {error}") from None


def _parse(text: str) -> dict[str, Any]:
    # tomllib is in the standard library from Python 3.11 on; pytest brings tomli before that.
    module = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return module.loads(text)  # type: ignore[no-any-return]


def gap_of(case: Case, gaps: tuple[Gap, ...]) -> Gap | None:
    """The first gap that covers the case."""
    return next((gap for gap in gaps if gap.covers(case)), None)
