"""How kernels here follow one another on a stream without a gap.

They are launched with `overlaps=True`: a kernel may start, and set its barriers up, while the one
before it ends, and touches memory only after `follow`. All kernels of a chain may do so: one that
has not waited cannot end, so that the wait for the kernel before covers all kernels before it.
"""

import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def follow():
    """Waits until the kernel before has ended and its stores can be seen. To be called by every
    program, before it reads or writes memory."""
    gdc_wait()


@triton.jit
def lead():
    """Lets the next kernel start once every program here has called this. Not before a kernel of
    few small programs: they would crowd on the multiprocessors that have room first (the sum of a
    filter's parts then took twice as long)."""
    gdc_launch_dependents()
