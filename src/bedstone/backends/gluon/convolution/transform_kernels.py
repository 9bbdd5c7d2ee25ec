"""Images and filters between channels-first and channels-last memory."""

import triton
import triton.language as tl

from bedstone.backends.gluon.convolution.overlap import follow


@triton.jit
def convolution_transform_kernel(
    x_ptr, y_ptr, batch, channels, pixels, x_batch, x_step, y_batch, y_step,
    TO_CHANNELS_LAST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """y[n, c, p] = x[n, c, p] for x with pixels adjacent and y with channels adjacent, or (not
    TO_CHANNELS_LAST) the other way round.

    One program moves BC channels x BP pixels. *_batch, *_step: distances in elements of images and
    of whatever is not adjacent.
    """
    follow()
    pid = tl.program_id(0)
    across = tl.cdiv(pixels, BP)
    down = tl.cdiv(channels, BC)
    p = pid % across * BP + tl.arange(0, BP)
    pid = pid // across
    c = pid % down * BC + tl.arange(0, BC)
    n = (pid // down).to(tl.int64)
    rows = c.to(tl.int64)[:, None]
    columns = p.to(tl.int64)[None, :]
    mask = (c < channels)[:, None] & (p < pixels)[None, :]
    if TO_CHANNELS_LAST:
        v = tl.load(x_ptr + n * x_batch + rows * x_step + columns, mask=mask)
        tl.store(y_ptr + n * y_batch + columns * y_step + rows, v, mask=mask)
    else:
        v = tl.load(x_ptr + n * x_batch + columns * x_step + rows, mask=mask)
        tl.store(y_ptr + n * y_batch + rows * y_step + columns, v, mask=mask)
