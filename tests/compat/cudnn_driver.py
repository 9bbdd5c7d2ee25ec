"""Runs a bedstone problem through the functions of cuDNN's names, v1's or v2's, on raw pointers.

The descriptors are made from the problem's own; what the interface asks for and the computation
does not read (a pooled output, an activation's input) is memory full of NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from cudnn_cases import bound_convolution, convolution, filters, tensor

import bedstone
from bedstone.compat import cudnn_v1, cudnn_v2
from bedstone.spec.tensor_ops import ADD_MODES, add_dims

Pointers = dict[str, int]
Call = Callable[[Pointers, float, float, int], None]

ADD = {"same_hw": 0, "same_chw": 1, "same_c": 2, "full": 3}
ACTIVATIONS = {"sigmoid": 0, "relu": 1, "tanh": 2}
SOFTMAX = {"fast": 0, "accurate": 1}
POOLING = {"max": 0, "average_include_padding": 1, "average_exclude_padding": 2}
ACCUMULATE = {1.0: cudnn_v1.CUDNN_RESULT_ACCUMULATE, 0.0: cudnn_v1.CUDNN_RESULT_NO_ACCUMULATE}
# A problem for each computing function.
LINES = (
    "convolution forward n1c3h4k4r3p1 float32",
    "convolution forward n2c3h5k4r3u2 float64 layout=NHWC w=NCHW mode=convolution",
    "convolution backward_data n1c3h4k4r3p1 float32",
    "convolution backward_filter n1c3h4k4r3p1 float32",
    "convolution backward_bias 2x3x4x5 float32",
    "pooling forward n1c2h4r2u2 float32 mode=max",
    "pooling backward n1c2h5r3u2 float32 mode=max",
    "pooling backward n1c2h5r3u2 float64 mode=average_include_padding",
    "softmax forward 2x5x2x3 float32 algorithm=accurate axes=1",
    "softmax backward 2x5x2x3 float32 algorithm=fast axes=1,2,3",
    "activation forward 2x3x4x5 float32 kind=relu layout=NHWC",
    "activation backward 2x3x4x5 float64 kind=tanh",
    "tensor_ops transform 2x3x4x5 float32 y=NHWC",
    "tensor_ops add 2x3x4x5 float32 b=1x3x1x1",
    "tensor_ops set 2x3x4x5 float32",
    "tensor_ops scale 2x3x4x5 float32",
)
ONLY_V2 = ("scale",)
ENOUGH = 1 << 30  # bytes of workspace: the harness lends what the plan needs


class Through:
    """A plan's stand-in for the harness: says what the plan says, and runs the interface."""

    def __init__(self, plan: bedstone.Plan, call: Call) -> None:
        self.problem, self.choice, self.algorithm = plan.problem, plan.choice, plan.algorithm
        self.workspace_size = plan.workspace_size
        self.call = call

    def __call__(
        self, *pointers: int, workspace: int = 0, alpha: float = 1.0, beta: float = 0.0
    ) -> None:
        names = [operand.name for operand in self.problem.operands]
        self.call(dict(zip(names, pointers)), alpha, beta, workspace)


def nans(desc: bedstone.TensorDesc) -> Any:
    """Memory of a packed tensor, full of NaN (tests on a GPU put their own in its place)."""
    return np.full(desc.dims, np.nan, desc.dtype.numpy)


def unread(desc: bedstone.TensorDesc) -> tuple[int, Any]:
    """A descriptor of those dims, and NaNs for it."""
    plain = bedstone.TensorDesc.packed(desc.dims, desc.dtype)
    return tensor(plain), nans(plain)


def add_mode(problem: bedstone.TensorOpProblem) -> int:
    return next(ADD[m] for m in ADD_MODES if add_dims(m, problem.y.dims) == problem.x.dims)


def softmax_mode(problem: bedstone.SoftmaxProblem) -> int:
    return 1 if problem.axes == (1,) else 0


def through_v2(problem: bedstone.Problem, handle: int, algo: int = 1) -> Call:
    """The call of v2 that computes the problem."""
    return getattr(_V2, f"{problem.primitive}_{problem.direction}")(problem, handle, algo)


class _V2:
    @staticmethod
    def convolution_forward(problem, h, algo):
        x, w, y, c = tensor(problem.x), filters(*problem.w.dims, dtype=problem.w.dtype), tensor(
            problem.y), convolution(problem.conv)  # fmt: skip
        return lambda p, alpha, beta, lent: cudnn_v2.cudnnConvolutionForward(
            h, alpha, x, p["x"], w, p["w"], c, algo, lent, ENOUGH, beta, y, p["y"]
        )

    @staticmethod
    def convolution_backward_data(problem, h, _):
        x, w, y, c = tensor(problem.x), filters(*problem.w.dims, dtype=problem.w.dtype), tensor(
            problem.y), convolution(problem.conv)  # fmt: skip
        return lambda p, alpha, beta, _: cudnn_v2.cudnnConvolutionBackwardData(
            h, alpha, w, p["w"], y, p["dy"], c, beta, x, p["dx"]
        )

    @staticmethod
    def convolution_backward_filter(problem, h, _):
        x, w, y, c = tensor(problem.x), filters(*problem.w.dims, dtype=problem.w.dtype), tensor(
            problem.y), convolution(problem.conv)  # fmt: skip
        return lambda p, alpha, beta, _: cudnn_v2.cudnnConvolutionBackwardFilter(
            h, alpha, x, p["x"], y, p["dy"], c, beta, w, p["dw"]
        )

    @staticmethod
    def convolution_backward_bias(problem, h, _):
        y, b = tensor(problem.y), tensor(bias_desc(problem))
        return lambda p, alpha, beta, _: cudnn_v2.cudnnConvolutionBackwardBias(
            h, alpha, y, p["dy"], beta, b, p["dbias"]
        )

    @staticmethod
    def pooling_forward(problem, h, _):
        x, y, pool = tensor(problem.x), tensor(problem.y), cudnn_v2.cudnnCreatePoolingDescriptor()
        set_pooling(pool, problem.pool)
        return lambda p, alpha, beta, _: cudnn_v2.cudnnPoolingForward(
            h, pool, alpha, x, p["x"], beta, y, p["y"]
        )

    @staticmethod
    def pooling_backward(problem, h, _):
        x, y, saved = tensor(problem.x), tensor(problem.y), tensor(problem.saved)
        pool = cudnn_v2.cudnnCreatePoolingDescriptor()
        set_pooling(pool, problem.pool)
        pooled, nan = unread(problem.y)
        if "x" not in [o.name for o in problem.operands]:  # an average does not read its input
            saved, other = unread(problem.x)
            return lambda p, alpha, beta, _: cudnn_v2.cudnnPoolingBackward(
                h, pool, alpha, pooled, nan, y, p["dy"], saved, other, beta, x, p["dx"]
            )
        return lambda p, alpha, beta, _: cudnn_v2.cudnnPoolingBackward(
            h, pool, alpha, pooled, nan, y, p["dy"], saved, p["x"], beta, x, p["dx"]
        )

    @staticmethod
    def softmax_forward(problem, h, _):
        x, y, how = tensor(problem.x), tensor(problem.y), SOFTMAX[problem.algorithm]
        return lambda p, alpha, beta, _: cudnn_v2.cudnnSoftmaxForward(
            h, how, softmax_mode(problem), alpha, x, p["x"], beta, y, p["y"]
        )

    @staticmethod
    def softmax_backward(problem, h, _):
        y, dy, dx = tensor(problem.saved), tensor(problem.y), tensor(problem.x)
        how, mode = SOFTMAX[problem.algorithm], softmax_mode(problem)
        return lambda p, alpha, beta, _: cudnn_v2.cudnnSoftmaxBackward(
            h, how, mode, alpha, y, p["y"], dy, p["dy"], beta, dx, p["dx"]
        )

    @staticmethod
    def activation_forward(problem, h, _):
        x, y, mode = tensor(problem.x), tensor(problem.y), ACTIVATIONS[problem.activation.kind]
        return lambda p, alpha, beta, _: cudnn_v2.cudnnActivationForward(
            h, mode, alpha, x, p["x"], beta, y, p["y"]
        )

    @staticmethod
    def activation_backward(problem, h, _):
        y, dy, dx = tensor(problem.saved), tensor(problem.y), tensor(problem.x)
        mode, (x, nan) = ACTIVATIONS[problem.activation.kind], unread(problem.x)
        return lambda p, alpha, beta, _: cudnn_v2.cudnnActivationBackward(
            h, mode, alpha, y, p["y"], dy, p["dy"], x, nan, beta, dx, p["dx"]
        )

    @staticmethod
    def tensor_ops_transform(problem, h, _):
        x, y = tensor(problem.x), tensor(problem.y)
        return lambda p, alpha, beta, _: cudnn_v2.cudnnTransformTensor(
            h, alpha, x, p["x"], beta, y, p["y"]
        )

    @staticmethod
    def tensor_ops_add(problem, h, _):
        b, y, mode = tensor(problem.x), tensor(problem.y), add_mode(problem)
        return lambda p, alpha, beta, _: cudnn_v2.cudnnAddTensor(
            h, mode, alpha, b, p["b"], beta, y, p["y"]
        )

    @staticmethod
    def tensor_ops_set(problem, h, _):
        y = tensor(problem.y)
        return lambda p, alpha, beta, _: cudnn_v2.cudnnSetTensor(h, y, p["y"], alpha)

    @staticmethod
    def tensor_ops_scale(problem, h, _):
        y = tensor(problem.y)
        return lambda p, alpha, beta, _: cudnn_v2.cudnnScaleTensor(h, y, p["y"], alpha)


def bias_desc(problem: bedstone.BiasGradientProblem) -> bedstone.TensorDesc:
    """The bias as the interface has it: (1, C, 1, ...)."""
    ones = (1,) * (problem.y.rank - 2)
    (stride,) = problem.bias.strides
    return bedstone.TensorDesc((1, *problem.bias.dims, *ones), (7, stride, *ones), problem.y.dtype)


def set_pooling(number: int, pool: bedstone.PoolingDesc) -> None:
    padding = [low for low, _ in pool.padding]
    cudnn_v2.cudnnSetPoolingNdDescriptor(
        number, POOLING[pool.mode], pool.axes, pool.window, padding, pool.stride
    )


def through_v1(problem: bedstone.Problem, handle: int) -> Call:
    """The call of v1 that computes the problem (4-d; alpha is 1, beta 0 or 1 for convolution)."""
    return getattr(_V1, f"{problem.primitive}_{problem.direction}")(problem, handle)


class _V1:
    @staticmethod
    def convolution_forward(problem, h):
        x, y = tensor(problem.x), tensor(problem.y)
        w = filters(*problem.w.dims, dtype=problem.w.dtype)
        c = bound_convolution(x, w, problem.conv)
        return lambda p, alpha, beta, _: cudnn_v1.cudnnConvolutionForward(
            h, x, p["x"], w, p["w"], c, y, p["y"], ACCUMULATE[beta]
        )

    @staticmethod
    def convolution_backward_data(problem, h):
        x, y = tensor(problem.x), tensor(problem.y)
        w = filters(*problem.w.dims, dtype=problem.w.dtype)
        c = bound_convolution(x, w, problem.conv)
        return lambda p, alpha, beta, _: cudnn_v1.cudnnConvolutionBackwardData(
            h, w, p["w"], y, p["dy"], c, x, p["dx"], ACCUMULATE[beta]
        )

    @staticmethod
    def convolution_backward_filter(problem, h):
        x, y = tensor(problem.x), tensor(problem.y)
        w = filters(*problem.w.dims, dtype=problem.w.dtype)
        c = bound_convolution(x, w, problem.conv)
        return lambda p, alpha, beta, _: cudnn_v1.cudnnConvolutionBackwardFilter(
            h, x, p["x"], y, p["dy"], c, w, p["dw"], ACCUMULATE[beta]
        )

    @staticmethod
    def convolution_backward_bias(problem, h):
        y, b = tensor(problem.y), tensor(bias_desc(problem))
        return lambda p, alpha, beta, _: cudnn_v1.cudnnConvolutionBackwardBias(
            h, y, p["dy"], b, p["dbias"], ACCUMULATE[beta]
        )

    @staticmethod
    def pooling_forward(problem, h):
        x, y, pool = tensor(problem.x), tensor(problem.y), v1_pooling(problem.pool)
        return lambda p, *_: cudnn_v1.cudnnPoolingForward(h, pool, x, p["x"], y, p["y"])

    @staticmethod
    def pooling_backward(problem, h):
        dx, dy, pool = tensor(problem.x), tensor(problem.y), v1_pooling(problem.pool)
        x, other = tensor(problem.saved), None
        pooled, nan = unread(problem.y)
        if "x" not in [o.name for o in problem.operands]:
            x, other = unread(problem.x)
        return lambda p, *_: cudnn_v1.cudnnPoolingBackward(
            h, pool, pooled, nan, dy, p["dy"], x, p["x"] if other is None else other, dx, p["dx"]
        )

    @staticmethod
    def softmax_forward(problem, h):
        x, y, how = tensor(problem.x), tensor(problem.y), SOFTMAX[problem.algorithm]
        return lambda p, *_: cudnn_v1.cudnnSoftmaxForward(
            h, how, softmax_mode(problem), x, p["x"], y, p["y"]
        )

    @staticmethod
    def softmax_backward(problem, h):
        y, dy, dx = tensor(problem.saved), tensor(problem.y), tensor(problem.x)
        how, mode = SOFTMAX[problem.algorithm], softmax_mode(problem)
        return lambda p, *_: cudnn_v1.cudnnSoftmaxBackward(
            h, how, mode, y, p["y"], dy, p["dy"], dx, p["dx"]
        )

    @staticmethod
    def activation_forward(problem, h):
        x, y, mode = tensor(problem.x), tensor(problem.y), ACTIVATIONS[problem.activation.kind]
        return lambda p, *_: cudnn_v1.cudnnActivationForward(h, mode, x, p["x"], y, p["y"])

    @staticmethod
    def activation_backward(problem, h):
        y, dy, dx = tensor(problem.saved), tensor(problem.y), tensor(problem.x)
        mode, (x, nan) = ACTIVATIONS[problem.activation.kind], unread(problem.x)
        return lambda p, *_: cudnn_v1.cudnnActivationBackward(
            h, mode, y, p["y"], dy, p["dy"], x, nan, dx, p["dx"]
        )

    @staticmethod
    def tensor_ops_transform(problem, h):
        x, y = tensor(problem.x), tensor(problem.y)
        return lambda p, *_: cudnn_v1.cudnnTransformTensor4d(h, x, p["x"], y, p["y"])

    @staticmethod
    def tensor_ops_add(problem, h):
        b, y, mode = tensor(problem.x), tensor(problem.y), add_mode(problem)
        return lambda p, alpha, beta, _: cudnn_v1.cudnnAddTensor4d(
            h, mode, alpha, b, p["b"], y, p["y"]
        )

    @staticmethod
    def tensor_ops_set(problem, h):
        y = tensor(problem.y)
        return lambda p, alpha, *_: cudnn_v1.cudnnSetTensor4d(h, y, p["y"], alpha)


def v1_pooling(pool: bedstone.PoolingDesc) -> int:
    number = cudnn_v1.cudnnCreatePoolingDescriptor()
    mode = cudnn_v1.CUDNN_POOLING_MAX if pool.mode == "max" else cudnn_v1.CUDNN_POOLING_AVERAGE
    cudnn_v1.cudnnSetPoolingDescriptor(number, mode, *pool.window, *pool.stride)
    return number
