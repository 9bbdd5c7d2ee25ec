"""What all tests share: a kernel cache inside the checkout, and what needs a GPU is skipped."""

from __future__ import annotations

import os
from pathlib import Path

# Before bedstone reads its settings. Kernels compiled by one run of the tests serve the next; the
# key of a kernel holds the sources that it was made from. BEDSTONE_BACKEND=cpu narrows the suite.
CACHE = Path(__file__).parent.parent / ".pytest_cache" / "bedstone"
os.environ.setdefault("BEDSTONE_CACHE_DIR", str(CACHE))
for variable in ("BEDSTONE_ALGORITHM", "BEDSTONE_LOG"):
    os.environ.pop(variable, None)

import pytest  # noqa: E402

from bedstone.plan.runtime import runtime_of  # noqa: E402
from bedstone.spec.errors import BedstoneError  # noqa: E402


def gpu_missing() -> str | None:
    """Why no test can run on a GPU here; None if they can."""
    try:
        runtime_of("cuda").device(0)
    except BedstoneError as error:
        return str(error)
    return None


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = gpu_missing() if marked else None
    if reason is not None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
