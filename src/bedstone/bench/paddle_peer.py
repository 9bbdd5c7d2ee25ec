"""The peers `paddle` and `paddle-on-bedstone`: convolutions called through PaddlePaddle, with its
own kernels and with bedstone's in their place.

Both are the same call of the framework: the operator for `forward`, `paddle.grad` over a kept graph
for the gradients, so that the ratio of the two is what a user of PaddlePaddle gets. The same
values, row-major, as many threads.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import bedstone
from bedstone.bench import timing
from bedstone.bench.operands import Arrays
from bedstone.bench.torch_peer import Declined

Call = Callable[[], Any]
# Over before the next side's turn; within one, calls follow each other much faster.
SPIN_MILLISECONDS = int(timing.SETTLE_SECONDS * 1e3) - 2


def call(problem: bedstone.Problem, arrays: Arrays, device: str, on_bedstone: bool) -> Call:
    """The call that computes the problem through PaddlePaddle and returns what that returns.

    Raises Declined.
    """
    reason = reason_against(problem, device)
    if reason is not None:
        raise Declined(reason)
    threads = bedstone.get_num_threads()
    paddle: Any = importlib.import_module("paddle")
    paddle.base.core.set_num_threads(threads)
    settings: Any = importlib.import_module("bedstone.frameworks.paddle.threads")
    settings.spin_for(SPIN_MILLISECONDS)
    conv: Any = problem.conv  # type: ignore[attr-defined]
    attributes = (
        list(conv.stride), [p for pair in conv.padding for p in pair], "EXPLICIT",
        list(conv.dilation), conv.groups, "NCHW",
    )  # fmt: skip
    forward, data = (problem.direction == of for of in ("forward", "backward_data"))
    x = paddle.to_tensor(arrays["dx" if data else "x"])
    w = paddle.to_tensor(arrays["w" if data or forward else "dw"])
    patched: Any = importlib.import_module("bedstone.frameworks.paddle")
    with patched.enable(only=["conv2d"]) if on_bedstone else contextlib.nullcontext():
        convolve = paddle._C_ops.conv2d
        if not forward:
            x.stop_gradient = w.stop_gradient = False  # as in training, where both are wanted
        y = convolve(x, w, *attributes)  # (on bedstone: a trial may find the native one quicker)
    if forward:
        return lambda: convolve(x, w, *attributes)
    dy, wanted = paddle.to_tensor(arrays["dy"]), x if data else w
    return lambda: paddle.grad([y], [wanted], [dy], retain_graph=True)[0]


def reason_against(problem: bedstone.Problem, device: str) -> str | None:
    """Why PaddlePaddle is not timed on a problem; None if it is."""
    if importlib.util.find_spec("paddle") is None:
        return "paddle is not installed"
    if device != "cpu":
        return "paddle is timed on the CPU"
    if not isinstance(problem, bedstone.ConvolutionProblem) or problem.conv.axes != 2:
        return "paddle is timed on convolutions in two dimensions"
    if problem.conv.mode != "cross_correlation" or problem.epilogue:
        return "paddle has no flipped filters, and fuses nothing"
    if str(problem.dtype) not in ("float32", "float64"):
        return "paddle computes in float32 and float64 on the CPU"
    if not all(operand.desc.layout == "NCHW" for operand in problem.operands):
        return "paddle is timed row-major (NCHW)"
    return None
