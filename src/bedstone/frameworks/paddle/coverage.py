"""The table of operators in docs/paddle.md, as `report()` tells: each is called once, with its
gradients, and what the report then says of it is what the table says."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import paddle

from bedstone.frameworks.paddle.patch import KINDS, enable
from bedstone.frameworks.paddle.report import report, reset

Dims = tuple[int, ...]
_PAIR, _PADS = [1, 1], ([1, 1], "EXPLICIT")
_POOL = ([2, 2], [2, 2], [0, 0])
_VOLUME = ([2, 2, 2], [2, 2, 2], [0, 0, 0])
_IMAGE, _SPACE = (2, 4, 6, 6), (2, 4, 3, 4, 4)
_ROWS = (3, 5, 7)
# operator -> (dims of its tensors, what follows them): a call of each
CALLS: dict[str, tuple[Sequence[Dims], tuple[Any, ...]]] = {
    "conv2d": ([_IMAGE, (3, 4, 3, 3)], (_PAIR, *_PADS, _PAIR, 1, "NCHW")),
    "depthwise_conv2d": ([_IMAGE, (4, 1, 3, 3)], (_PAIR, *_PADS, 4, _PAIR, "NCHW")),
    "conv3d": ([_SPACE, (3, 4, 2, 3, 3)],
               ([1] * 3, [1] * 3, "EXPLICIT", 1, [1] * 3, "NCDHW")),
    "conv2d_transpose": (
        [_IMAGE, (4, 3, 3, 3)], (_PAIR, [1, 1], [], None, "EXPLICIT", 1, _PAIR, "NCHW")),
    "depthwise_conv2d_transpose": (
        [_IMAGE, (4, 1, 3, 3)], (_PAIR, [1, 1], [], None, "EXPLICIT", 4, _PAIR, "NCHW")),
    "conv3d_transpose": (
        [_SPACE, (4, 3, 2, 2, 2)],
        ([1] * 3, [0] * 3, [], [], "EXPLICIT", 1, [1] * 3, "NCDHW")),
    "pool2d": ([_IMAGE], (*_POOL, False, True, "NCHW", "avg", False, False, "EXPLICIT")),
    "pool3d": ([_SPACE], (*_VOLUME, False, True, "NCDHW", "max", False, False, "EXPLICIT")),
    "max_pool2d_with_index": ([_IMAGE], (*_POOL, False, False, False)),
    "max_pool3d_with_index": ([_SPACE], (*_VOLUME, False, False, False)),
    "softmax": ([_ROWS], (-1,)), "log_softmax": ([_ROWS], (1,)),
    "relu": ([_ROWS], ()), "sigmoid": ([_ROWS], ()), "tanh": ([_ROWS], ()),
    "silu": ([_ROWS], ()), "gelu": ([_ROWS], (False,)), "leaky_relu": ([_ROWS], (0.1,)),
    "elu": ([_ROWS], (1.0,)),
    "batch_norm": ([_IMAGE, (4,), (4,), (4,), (4,)], (False, 0.9, 1e-5, "NCHW", False, False)),
    "layer_norm": ([_ROWS, (35,), (35,)], (1e-5, 1)),
    "group_norm": ([_IMAGE, (4,), (4,)], (1e-5, 2, "NCHW")),
    "instance_norm": ([_IMAGE, (4,), (4,)], (1e-5,)),
}  # fmt: skip
STATISTICS = {"batch_norm": (1, 2)}  # arguments that have no gradient: the running statistics


def directions(name: str) -> tuple[str, ...]:
    """The directions of the operator that run on bedstone's kernels, in a call of it and in all its
    gradients; "native: why" for those that do not."""
    shapes, rest = CALLS[name]
    tensors = [paddle.ones(shape) for shape in shapes]
    for i, tensor in enumerate(tensors):
        tensor.stop_gradient = i in STATISTICS.get(name, ())
    reset()
    with enable(always=True):
        y = getattr(paddle._C_ops, name)(*tensors, *rest)
        first = y[0] if isinstance(y, (tuple, list)) else y
        paddle.grad([first], [t for t in tensors if not t.stop_gradient])
    lines = report().lines
    reset()
    found = [line.direction if line.own else f"native: {line.reason}" for line in lines]
    return tuple(sorted(found, key=lambda text: (text != "forward", text)))


def coverage_table() -> str:
    """Operators, what of their arguments is understood, and where they ran."""
    rows = ["| operators of `paddle._C_ops` | what of them | on bedstone |", "|---|---|---|"]
    for kind in KINDS:
        names = ", ".join(f"`{name}`" for name in kind.names)
        text = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
        where = {directions(name) for name in kind.names}
        rows.append(
            f"| {names} | {text} | {'; '.join(sorted(', '.join(each) for each in where))} |"
        )
    return "\n".join(rows)
