"""Device: where a plan runs, and the fingerprint that keys what was compiled or measured there."""

from __future__ import annotations

import functools
import platform
from dataclasses import dataclass

from bedstone.plan import config
from bedstone.spec.errors import InvalidDescriptor

DEVICE_KINDS = ("cpu", "cuda")


@dataclass(frozen=True)
class Device:
    """Kind ("cpu" or "cuda"), index among its kind, and what the hardware calls itself."""

    kind: str
    index: int = 0
    name: str = ""
    architecture: str = ""  # "x86_64", "aarch64", "sm_90", "gfx942", ...

    def __post_init__(self) -> None:
        if self.kind not in DEVICE_KINDS:
            raise InvalidDescriptor("device", self.kind, f"one of {DEVICE_KINDS}")

    @property
    def fingerprint(self) -> str:
        """Equal for devices that would be given the same kernels and show the same speeds."""
        threads = f" threads={config.get_num_threads()}" if self.kind == "cpu" else ""
        return f"{self.kind} {self.architecture} {self.name}{threads}"

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}" if self.kind != "cpu" else "cpu"


@functools.lru_cache(maxsize=1)
def cpu_device() -> Device:
    """This machine's CPU."""
    return Device("cpu", 0, _cpu_name(), platform.machine())


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.lower().startswith(("model name", "cpu part", "hardware")):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown CPU"
