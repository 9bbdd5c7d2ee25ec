"""Against PyTorch on the same arrays: another implementation, other people's mistakes."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from bedstone.plan.handle import Handle
from bedstone.spec.activation import ActivationProblem
from bedstone.spec.convolution import BiasGradientProblem, ConvolutionProblem
from bedstone.spec.normalization import LrnProblem, NormalizationProblem
from bedstone.spec.pooling import AdaptivePoolingProblem, PoolingProblem
from bedstone.spec.softmax import SoftmaxProblem
from bedstone.testing import fills, problems

torch = pytest.importorskip("torch")
F = torch.nn.functional

DTYPES = ("float32", "float64")
TOLERANCE = {"float32": 2e-5, "float64": 1e-12}  # relative to the largest result
SMALLEST_SCALE = 1e-3  # inputs are of size 1: results far below are sums that cancel
SEED = 1410
REFERENCE_COUNT = 300  # problems drawn beside the curated ones
PLAN_COUNT = 60  # fewer, for each is compiled

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
MAX_POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
ADAPTIVE = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}
ACTIVATIONS = {
    "relu": lambda x, a, b: F.relu(x),
    "leaky_relu": lambda x, a, b: F.leaky_relu(x, a),
    "clipped_relu": lambda x, a, b: F.hardtanh(x, 0.0, a),
    "clip": lambda x, a, b: torch.clamp(x, a, b),
    "elu": lambda x, a, b: F.elu(x, a),
    "sigmoid": lambda x, a, b: torch.sigmoid(x),
    "tanh": lambda x, a, b: torch.tanh(x),
    "silu": lambda x, a, b: F.silu(x),
    "gelu": lambda x, a, b: F.gelu(x),
    "gelu_tanh": lambda x, a, b: F.gelu(x, approximate="tanh"),
    "softplus": lambda x, a, b: F.softplus(x, threshold=1e9),
    "hard_sigmoid": lambda x, a, b: torch.clamp(a * x + b, 0, 1),
    "hard_swish": lambda x, a, b: x * torch.clamp(a * x + b, 0, 1),
}


def gradients(output, dy, *inputs):
    """d(output)/d(input) . dy for each input."""
    return torch.autograd.grad(output, inputs, dy)


def pad(x, pairs):
    """F.pad wants the last axis first."""
    return F.pad(x, [p for pair in reversed(pairs) for p in pair])


def convolution(problem, given):
    conv = problem.conv
    x = given.get(
        "x", torch.zeros(problem.x.dims, dtype=given["w" if "w" in given else "dy"].dtype)
    )
    w = given.get("w", torch.zeros(problem.w.dims, dtype=x.dtype))
    x, w = x.requires_grad_(), w.requires_grad_()
    filters = w if conv.mode == "cross_correlation" else w.flip(*range(2, w.ndim))
    y = CONVOLUTIONS[conv.axes](
        pad(x, conv.padding), filters, given.get("bias"), conv.stride, 0, conv.dilation, conv.groups
    )
    if problem.direction == "forward":
        act, shift = problem.epilogue.activation, problem.epilogue.shift
        return {"y": (y if act is None else ACTIVATIONS[act.kind](y, act.alpha, act.beta)) + shift}
    dx, dw = gradients(y, given["dy"], x, w)
    return {"dx": dx} if problem.direction == "backward_data" else {"dw": dw}


def bias_gradient(problem, given):
    dy = given["dy"]
    return {"dbias": dy.sum([a for a in range(dy.ndim) if a != 1])}


def pooling(problem, given):
    pool = problem.pool
    if any(low != high or 2 * low > r for (low, high), r in zip(pool.padding, pool.window)):
        return None  # PyTorch pads both sides alike, by half a window at most
    if pool.rounding == "given" or problem.x.size == 0:
        return None
    source = given["x"] if "x" in given else torch.zeros(problem.x.dims, dtype=given["dy"].dtype)
    if problem.direction == "backward" and problem.indices is not None:
        return None
    x = source.requires_grad_()
    low = tuple(p[0] for p in pool.padding)
    ceil = pool.rounding == "ceil"
    if pool.mode == "max":
        y, where = MAX_POOLS[pool.axes](
            x, pool.window, pool.stride, low, pool.dilation, ceil, return_indices=True
        )
    elif any(d != 1 for d in pool.dilation):
        return None
    else:
        function = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}[pool.axes]
        include = pool.mode == "average_include_padding"
        y, where = function(x, pool.window, pool.stride, low, ceil, include), None
    if problem.direction == "backward":
        return {"dx": gradients(y, given["dy"], x)[0]}
    return {"y": y} if problem.indices is None else {"y": y, "indices": where}


def adaptive_pooling(problem, given):
    function, size = ADAPTIVE[problem.x.rank - 2], problem.y.dims[2:]
    if problem.direction == "adaptive_forward":
        return {"y": function(given["x"], size)}
    x = torch.zeros(problem.x.dims, dtype=given["dy"].dtype, requires_grad=True)
    return {"dx": gradients(function(x, size), given["dy"], x)[0]}


def softmax(problem, given):
    axes, rank = problem.axes, problem.x.rank
    order = [a for a in range(rank) if a not in axes] + list(axes)
    back = [order.index(a) for a in range(rank)]

    def rows(x):
        turned = x.permute(order)
        return turned.reshape(*turned.shape[: rank - len(axes)], -1), turned.shape

    function = torch.log_softmax if problem.algorithm == "log" else torch.softmax
    if problem.direction == "forward":
        x, shape = rows(given["x"])
        return {"y": function(x, -1).reshape(shape).permute(back)}
    y, shape = rows(given["y"])
    dy, _ = rows(given["dy"])
    name = "_log_softmax_backward_data" if problem.algorithm == "log" else "_softmax_backward_data"
    dx = getattr(torch, name)(dy, y, -1, y.dtype)
    return {"dx": dx.reshape(shape).permute(back)}


def activation(problem, given):
    desc = problem.activation
    function = ACTIVATIONS[desc.kind]
    if problem.direction == "forward":
        return {"y": function(given["x"], desc.alpha, desc.beta)}
    if desc.backward_from_y:
        return None  # (PyTorch's gradient is of x)
    x = given["x"].requires_grad_()
    return {"dx": gradients(function(x, desc.alpha, desc.beta), given["dy"], x)[0]}


def normalization(problem, given):
    norm, x = problem.norm, given["x"]
    if problem.direction != "training" or norm.kind == "rms" or problem.x.size == 0:
        return None
    scale, shift = given.get("scale"), given.get("shift")
    if norm.kind == "batch":
        if problem.reduction_length < 2 or problem.momentum is not None:
            return None
        return {"y": F.batch_norm(x, None, None, scale, shift, True, 0.1, norm.epsilon)}
    if norm.kind == "group":
        if problem.reduction_length < 2:
            return None
        return {"y": F.group_norm(x, norm.groups, scale, shift, norm.epsilon)}
    return {"y": F.layer_norm(x, x.shape[norm.axis :], scale, shift, norm.epsilon)}


def lrn(problem, given):
    desc = problem.lrn
    if desc.region != "across" or desc.size % 2 == 0 or problem.x.rank < 3:
        return None  # PyTorch's even windows lie one to the left
    x = given["x"].requires_grad_()
    y = F.local_response_norm(x, desc.size, desc.alpha, desc.beta, desc.k)
    if problem.direction == "lrn_forward":
        return {"y": y}
    return {"dx": gradients(y, given["dy"], x)[0]}


PEERS = {
    ConvolutionProblem: convolution,
    BiasGradientProblem: bias_gradient,
    PoolingProblem: pooling,
    AdaptivePoolingProblem: adaptive_pooling,
    SoftmaxProblem: softmax,
    ActivationProblem: activation,
    NormalizationProblem: normalization,
    LrnProblem: lrn,
}


def comparable(found):
    """The problems in the types that both compute in, without empty tensors."""
    wanted = [p for p in found if p.dtype in DTYPES and getattr(p, "math", "ieee") == "ieee"]
    return [p for p in wanted if all(o.desc.size for o in p.operands)]


def by_reference(problem, memory):
    """The outputs by the problem's own definition."""
    return problem.reference({o.name: memory[o.name] for o in problem.inputs})


def by_plan(problem, memory):
    """The outputs by the plan that a caller would get."""
    plan = Handle("cpu").plan(problem, workspace_limit=None)
    plan.execute(**memory, workspace=np.empty(plan.workspace_size, np.uint8))
    return {o.name: memory[o.name].astype("d") for o in problem.outputs}


def difference(problem, ours):
    """None if PyTorch has no such call; else the largest difference of any output, relative to
    the largest element."""
    arrays = fills.operands(problem, "random", zlib.crc32(str(problem).encode()))
    memory = {o.name: strided(o.desc, arrays[o.name]) for o in problem.operands}
    given = {o.name: torch.from_numpy(memory[o.name].copy()) for o in problem.inputs}
    theirs = PEERS[type(problem)](problem, given)
    if theirs is None:
        return None
    results, worst = ours(problem, memory), 0.0
    for name, result in theirs.items():
        want, got = result.detach().numpy().astype("d"), results[name]
        finite = np.isfinite(want)
        if not np.array_equal(got[~finite], want[~finite], equal_nan=True):
            return float("inf")
        scale = max(float(np.abs(want[finite]).max(initial=0)), SMALLEST_SCALE)
        worst = max(worst, float(np.abs(got - want)[finite].max(initial=0)) / scale)
    return worst


def strided(desc, values):
    """The values in memory of their own with those strides."""
    low, high = desc.offset_range()
    flat = np.zeros(high - low + 1, values.dtype)
    strides = tuple(s * values.itemsize for s in desc.strides)
    view = np.lib.stride_tricks.as_strided(flat[-low:], desc.dims, strides)
    view[...] = values
    return view


def compare(found, ours):
    """(number of problems compared, lines about those that differ)."""
    compared, wrong = 0, []
    for problem in comparable(found):
        apart = difference(problem, ours)
        if apart is not None:
            compared += 1
            if not apart <= TOLERANCE[problem.dtype]:
                wrong.append(f"{apart:.3g} {problem}")
    return compared, wrong


PRIMITIVES = ("convolution", "pooling", "softmax", "activation", "normalization")


@pytest.mark.parametrize("primitive", PRIMITIVES)
def test_the_reference_agrees(primitive):
    drawn = problems.draw_distinct(primitive, REFERENCE_COUNT, SEED)
    compared, wrong = compare(problems.curated(primitive) + drawn, by_reference)
    assert not wrong, "\n".join(wrong)
    assert compared >= REFERENCE_COUNT / 4


@pytest.mark.parametrize("primitive", PRIMITIVES)
def test_plans_agree(primitive):
    compared, wrong = compare(problems.draw_distinct(primitive, PLAN_COUNT, SEED), by_plan)
    assert not wrong, "\n".join(wrong)
    assert compared >= PLAN_COUNT / 8
