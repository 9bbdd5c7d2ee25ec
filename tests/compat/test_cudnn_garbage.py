"""Whatever one argument of a sound call is replaced by, the C convention answers with a status."""

from __future__ import annotations

import ctypes
import math

import cudnn_driver
import numpy as np
import pytest
from cudnn_cases import FLOAT, convolution, filters, packed
from cudnn_driver import LINES, ONLY_V2, through_v1, through_v2

import bedstone
from bedstone.compat import cudnn_v1, cudnn_v2

ARRAY = np.zeros(3, "f")
# (Not among it: an aligned number or ctypes pointer where data is wanted, which would be believed.)
GARBAGE = (
    None, True, -1, 3, 2**31 + 1, 2**70, -(2**70), 1.5, math.nan, "text", b"bytes", [], [1, 2], {},
    object(), ARRAY, ARRAY[::-1], np.array(["a"]), np.float64(2), 1j, ctypes.c_int(3),
    ctypes.c_void_p(), ctypes.byref(ctypes.c_float(2)), FLOAT, int,
)  # fmt: skip
# Fine for the computing functions: each may also be right where it stands.
ALLOWED = set(cudnn_v2.cudnnStatus) - {cudnn_v2.CUDNN_STATUS_INTERNAL_ERROR}


def sound_call(monkeypatch, module, through, line):
    """The function and arguments by which the problem of that line is computed."""
    problem = bedstone.parse_problem(line)
    monkeypatch.setattr(cudnn_driver, "ENOUGH", 0)
    call = through(problem, module.cudnnCreate())
    data = {o.name: np.zeros(o.desc.size, o.desc.dtype.numpy) for o in problem.operands}
    found = []
    for name in module.FUNCTIONS:
        if hasattr(getattr(module, name), "c_names"):
            monkeypatch.setattr(
                module, name, lambda *args, n=name: found.append((n, args)), raising=True
            )
    call(data, 1.0, 0.0, 0)
    return found[0]


def replaced(function, arguments):
    """The statuses of all calls in which one argument is something else; none raises."""
    assert function(*arguments) == 0
    seen = {}
    for place in range(len(arguments)):
        for thing in GARBAGE:
            status = function(*arguments[:place], thing, *arguments[place + 1 :])
            seen.setdefault(status, []).append((place, thing))
    assert set(seen) <= ALLOWED, seen[cudnn_v2.CUDNN_STATUS_INTERNAL_ERROR]
    assert cudnn_v2.CUDNN_STATUS_BAD_PARAM in seen


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_computing_functions(monkeypatch, version, line):
    if version == "v1" and line.split()[1] in ONLY_V2:
        pytest.skip("v1 cannot scale")
    module, through = (cudnn_v1, through_v1) if version == "v1" else (cudnn_v2, through_v2)
    with bedstone.config(backend="reference"):
        name, arguments = sound_call(monkeypatch, module, through, line)
        replaced(getattr(module.library, name), arguments)


def test_descriptor_functions():
    one, many = [ctypes.byref(ctypes.c_int()) for _ in range(9)], (ctypes.c_int * 8)()
    d, f = packed(1, 2, 8, 8), filters(2, 2, 3, 3)
    c, pool = convolution(bedstone.ConvolutionDesc.of(2)), cudnn_v2.cudnnCreatePoolingDescriptor()
    bound = cudnn_v1.cudnnCreateConvolutionDescriptor()
    handle = cudnn_v2.cudnnCreate()
    pair = (1, 1)
    calls = {
        "SetStream": (handle, 5),
        "GetStream": (handle, ctypes.byref(ctypes.c_void_p())),
        "SetTensor4dDescriptor": (packed(1, 1), 0, 0, 1, 2, 3, 4),
        "SetTensor4dDescriptorEx": (packed(1, 1), 0, 1, 2, 3, 4, 24, 12, 4, 1),
        "GetTensor4dDescriptor": (d, *one),
        "SetTensorNdDescriptor": (packed(1, 1), 0, 2, [3, 4], [4, 1]),
        "GetTensorNdDescriptor": (d, 4, *one[:2], many, many),
        "SetFilter4dDescriptor": (filters(1, 1, 1), 0, 1, 2, 3, 4),
        "GetFilter4dDescriptor": (f, *one[:5]),
        "SetFilterNdDescriptor": (filters(1, 1, 1), 0, 4, [1, 2, 3, 4]),
        "GetFilterNdDescriptor": (f, 4, *one[:2], many),
        "SetConvolution2dDescriptor": (cudnn_v2.cudnnCreateConvolutionDescriptor(), *[1] * 7),
        "GetConvolution2dDescriptor": (c, *one[:7]),
        "GetConvolution2dForwardOutputDim": (c, d, f, *one[:4]),
        "SetConvolutionNdDescriptor": (
            cudnn_v2.cudnnCreateConvolutionDescriptor(), 2, pair, pair, pair, 1,
        ),
        "GetConvolutionNdDescriptor": (c, 2, one[0], many, many, many, one[1]),
        "GetConvolutionNdForwardOutputDim": (c, d, f, 4, many),
        "SetPooling2dDescriptor": (pool, 0, 2, 2, 0, 0, 2, 2),
        "GetPooling2dDescriptor": (pool, *one[:7]),
        "SetPoolingNdDescriptor": (
            cudnn_v2.cudnnCreatePoolingDescriptor(), 0, 2, pair, pair, pair,
        ),
        "GetPoolingNdDescriptor": (pool, 2, *one[:2], many, many, many),
        "GetPooling2dForwardOutputDim": (pool, d, *one[:4]),
        "GetPoolingNdForwardOutputDim": (pool, d, 4, many),
        "GetConvolutionForwardAlgorithm": (handle, d, f, c, packed(1, 2, 6, 6), 0, 0, one[0]),
        "GetConvolutionForwardWorkspaceSize": (handle, d, f, c, packed(1, 2, 6, 6), 0, one[0]),
    }  # fmt: skip
    for name, arguments in calls.items():
        if name == "GetPooling2dDescriptor":  # a sound call had its mode replaced before
            cudnn_v2.cudnnSetPooling2dDescriptor(pool, 0, 2, 2, 0, 0, 2, 2)
        replaced(getattr(cudnn_v2.library, f"cudnn{name}"), arguments)
    calls = {
        "SetConvolutionDescriptor": (bound, d, f, *[1] * 7),
        "SetConvolutionDescriptorEx": (bound, 1, 2, 8, 8, 2, 3, 3, *[1] * 7),
        "SetFilterDescriptor": (filters(1, 1, 1), 0, 1, 2, 3, 4),
        "GetFilterDescriptor": (f, *one[:5]),
        "GetOutputTensor4dDim": (bound, 0, *one[:4]),
        "SetPoolingDescriptor": (pool, 0, 2, 2, 2, 2),
        "GetPoolingDescriptor": (pool, *one[:5]),
    }
    for name, arguments in calls.items():
        replaced(getattr(cudnn_v1.library, f"cudnn{name}"), arguments)
