"""Static graphs: what `paddle.jit.to_static(..., full_graph=False)` traces is broken at the
convolutions, which so run in Python, on bedstone, between the pieces of the graph.

At convolutions alone: they gain several times what a break costs, and the other operators do not.
A graph without breaks (`full_graph=True`, static mode) keeps the native operators. So does what was
traced before; and what was traced while broken stays so, on whatever operators are there then.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from paddle import nn
from paddle.jit import marker
from paddle.jit.sot.utils import paddle_api_config
from paddle.nn import functional as F

from bedstone.frameworks.paddle import biased

_PLANE = (nn.Conv1D, nn.Conv2D, F.conv1d, F.conv2d)
_PLANE_TRANSPOSED = (
    nn.Conv1DTranspose, nn.Conv2DTranspose, F.conv1d_transpose, F.conv2d_transpose,
)  # fmt: skip
# what is replaced -> the layers and functions that lead to it
_CALLERS: dict[str, tuple[Any, ...]] = {
    "conv2d": _PLANE,
    "depthwise_conv2d": _PLANE,
    "conv3d": (nn.Conv3D, F.conv3d),
    "conv2d_transpose": _PLANE_TRANSPOSED,
    "depthwise_conv2d_transpose": _PLANE_TRANSPOSED,
    "conv3d_transpose": (nn.Conv3DTranspose, F.conv3d_transpose),
    "_conv_nd": (biased.conv_nd,),  # (in the layers that somebody derived)
}
_marked: set[Any] = set()  # by us: the program may have marked some itself


def break_at(operators: Collection[str]) -> None:
    """From now on graphs are broken at what leads to these operators, and nowhere else for us."""
    broken = (paddle_api_config.break_graph_layer_classes, paddle_api_config.break_graph_functions)
    wanted = {caller for name in operators for caller in _CALLERS.get(name, ())}
    for caller in wanted - _marked:
        if not any(caller in known for known in broken):
            marker.force_dynamic(caller)
            _marked.add(caller)
    for caller in _marked - wanted:
        for known in broken:
            known.discard(caller)
    _marked.intersection_update(wanted)
