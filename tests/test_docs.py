"""The examples in README and docs run as they stand, and the tables in them are up to date."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
EXAMPLES = [
    pytest.param(code, id=f"{page.name}-{number}")
    for page in PAGES
    for number, code in enumerate(BLOCK.findall(page.read_text(encoding="utf-8")))
]


OPTIONAL = {"torch", "jax", "paddle", "google", "triton", "onnx"}  # packages of the extras


@pytest.mark.parametrize("code", EXAMPLES)
def test_example_runs(code: str) -> None:
    try:
        exec(compile(code, "example", "exec"), {"__name__": "__main__"})
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in OPTIONAL:
            raise
        pytest.skip(f"{error.name} is not installed")


def test_generated_parts_are_up_to_date() -> None:
    pytest.importorskip("triton")  # lists the GPU backends' algorithms too
    done = subprocess.run(
        [sys.executable, "tools/update_docs.py", "--check"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"run tools/update_docs.py: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} refers to {target}"


def test_docs_build(tmp_path: Path) -> None:
    if shutil.which("mkdocs") is None and not Path(sys.executable).with_name("mkdocs").exists():
        pytest.skip("mkdocs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
