"""What the cost models know of each GPU architecture: two numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """Multiprocessors, and bytes/s of a device-to-device copy (read plus written)."""

    multiprocessors: int
    bandwidth: float


HOPPER = Chip(132, 4.3e12)  # measured on an H200
AMPERE = Chip(108, 1.8e12)  # these three from data sheets: A100, B200, MI300X
BLACKWELL = Chip(148, 6.5e12)
CDNA3 = Chip(304, 4.0e12)

LAUNCH_SECONDS = 3e-6  # of a kernel that does nothing
COPY_EFFICIENCY = 0.85  # of the bandwidth that a memory-bound kernel is expected to reach


def family(architecture: str) -> str:
    """ "hopper", "ampere", "blackwell" or "cdna3": whose numbers and tiles an architecture takes.
    Unknown ones, and consumer chips with their smaller shared memory, count as ampere."""
    if architecture.startswith("gfx"):
        return "cdna3"
    version = int(architecture.removeprefix("sm_"))
    if version == 90:
        return "hopper"
    return "blackwell" if 100 <= version < 120 else "ampere"


def chip_of(architecture: str) -> Chip:
    """The numbers of an architecture."""
    chips = {"hopper": HOPPER, "ampere": AMPERE, "blackwell": BLACKWELL, "cdna3": CDNA3}
    return chips[family(architecture)]


def move_seconds(nbytes: int, architecture: str, launches: int = 1) -> float:
    """Seconds in which a memory-bound kernel moves so many bytes."""
    rate = COPY_EFFICIENCY * chip_of(architecture).bandwidth
    return launches * LAUNCH_SECONDS + nbytes / rate
