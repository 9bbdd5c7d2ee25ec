"""The Gluon backend: convolution kernels for NVIDIA Hopper (sm_90), where they beat triton's.

They drive what the portable language does not reach: tiled TMA copies, asynchronous warpgroup
matrix products (wgmma) and warps with different roles. Compilation, launch and memory are the
triton backend's; what these kernels decline (other chips, channels that 16-byte words do not
divide) goes there too, with the reason said.
"""

from __future__ import annotations

from bedstone.backends import triton

DEVICE_KINDS = ("cuda",)
ARCHITECTURE = "sm_90"  # wgmma exists on no other


def missing() -> str | None:
    """None if kernels can be compiled and run here, else why not."""
    from bedstone.backends.triton import runtime

    if runtime.interpreting():
        return "Gluon kernels do not run in Triton's interpreter"
    return triton.missing()
