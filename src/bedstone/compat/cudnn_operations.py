"""Tensor operations, softmax, pooling and activation behind the names of both versions.

Each function takes the handle's Context, the descriptors' States with the caller's data, and
factors that are numbers already; v1 and v2 differ only in how they come by these.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bedstone.compat.cudnn_calls import Context, Prepared, checked
from bedstone.compat.cudnn_descriptors import State
from bedstone.compat.cudnn_enums import (
    cudnnActivationMode,
    cudnnAddMode,
    cudnnSoftmaxAlgorithm,
    cudnnSoftmaxMode,
)
from bedstone.compat.cudnn_memory import Place
from bedstone.spec.activation import ActivationDesc, ActivationProblem
from bedstone.spec.errors import InvalidDescriptor
from bedstone.spec.pooling import PoolingDesc, PoolingProblem
from bedstone.spec.softmax import SoftmaxProblem, channel_axes, instance_axes
from bedstone.spec.tensor import TensorDesc
from bedstone.spec.tensor_ops import TensorOpProblem, add_dims

ADD_MODES = {
    cudnnAddMode.CUDNN_ADD_SAME_HW: "same_hw",
    cudnnAddMode.CUDNN_ADD_SAME_CHW: "same_chw",
    cudnnAddMode.CUDNN_ADD_SAME_C: "same_c",
    cudnnAddMode.CUDNN_ADD_FULL_TENSOR: "full",
}
SOFTMAX_ALGORITHMS = {
    cudnnSoftmaxAlgorithm.CUDNN_SOFTMAX_FAST: "fast",
    cudnnSoftmaxAlgorithm.CUDNN_SOFTMAX_ACCURATE: "accurate",
}
SOFTMAX_AXES = {
    cudnnSoftmaxMode.CUDNN_SOFTMAX_MODE_INSTANCE: instance_axes,
    cudnnSoftmaxMode.CUDNN_SOFTMAX_MODE_CHANNEL: channel_axes,
}
ACTIVATIONS = {
    cudnnActivationMode.CUDNN_ACTIVATION_SIGMOID: ActivationDesc("sigmoid"),
    cudnnActivationMode.CUDNN_ACTIVATION_RELU: ActivationDesc("relu"),
    cudnnActivationMode.CUDNN_ACTIVATION_TANH: ActivationDesc("tanh"),
}
FORWARD = {"x": "src", "y": "dest"}
# Backward functions call the forward result src, its gradient srcDiff, the input dest and its
# gradient destDiff.
BACKWARD = {"saved": "src", "y": "srcDiff", "dy": "srcDiff", "x": "destDiff", "dx": "destDiff"}


def check_alike(first: str, a: TensorDesc, second: str, b: TensorDesc) -> None:
    """Raises InvalidDescriptor unless two tensors have the same dims and data type."""
    if a.dims != b.dims or a.dtype is not b.dtype:
        raise InvalidDescriptor(second, str(b), f"the dims and data type of {first}, {a}")


def transform(
    context: Context, x: State, x_data: Any, y: State, y_data: Any, alpha: float, beta: float
) -> None:
    """y = alpha * x + beta * y, between any strides."""

    def build() -> Prepared:
        check_alike("srcDesc", x.value, "destDesc", y.value)
        problem = checked(TensorOpProblem, FORWARD, "transform", y.value, x.value)
        return Prepared(context.handle.plan(problem), FORWARD)

    call = context.prepared(("transform", x.version, y.version), build)
    call.run(context, (x_data, y_data), alpha, beta)


def add(
    context: Context,
    mode: cudnnAddMode,
    b: State,
    b_data: Any,
    y: State,
    y_data: Any,
    alpha: float,
    beta: float,
) -> None:
    """y = alpha * b + beta * y; b has exactly the dims that the mode asks for."""

    def build() -> Prepared:
        stems = {"b": "bias", "y": "srcDest"}
        expected = checked(add_dims, stems, ADD_MODES[mode], y.value.dims)
        if b.value.dims != expected:
            raise InvalidDescriptor("biasDesc", b.value.dims, f"dims {expected} for {mode.name}")
        problem = checked(TensorOpProblem, stems, "add", y.value, b.value)
        return Prepared(context.handle.plan(problem), stems)

    call = context.prepared(("add", mode, b.version, y.version), build)
    call.run(context, (b_data, y_data), alpha, beta)


def fill_or_scale(
    context: Context, operation: str, stem: str, y: State, y_data: Any, number: float
) -> None:
    """y = number ("set"), or y = number * y ("scale")."""

    def build() -> Prepared:
        problem = checked(TensorOpProblem, {"y": stem}, operation, y.value)
        return Prepared(context.handle.plan(problem), {"y": stem})

    context.prepared((operation, stem, y.version), build).run(context, (y_data,), number)


def softmax_forward(
    context: Context,
    algorithm: cudnnSoftmaxAlgorithm,
    mode: cudnnSoftmaxMode,
    x: State,
    x_data: Any,
    y: State,
    y_data: Any,
    alpha: float,
    beta: float,
) -> None:
    """y = alpha * softmax(x) + beta * y; y may be the memory of x."""

    def build() -> Prepared:
        name, axes = SOFTMAX_ALGORITHMS[algorithm], SOFTMAX_AXES[mode](x.value.rank)
        problem = checked(SoftmaxProblem, FORWARD, "forward", x.value, y.value, name, axes)
        return Prepared(context.handle.plan(problem), FORWARD)

    call = context.prepared(("softmax", algorithm, mode, x.version, y.version), build)
    call.run(context, (x_data, y_data), alpha, beta)


def softmax_backward(
    context: Context,
    algorithm: cudnnSoftmaxAlgorithm,
    mode: cudnnSoftmaxMode,
    y: State,
    y_data: Any,
    dy: State,
    dy_data: Any,
    dx: State,
    dx_data: Any,
    alpha: float,
    beta: float,
) -> None:
    """dx = alpha * y * (dy - sum(y * dy)) + beta * dx; dx may be the memory of dy or of y."""

    def build() -> Prepared:
        name, axes = SOFTMAX_ALGORITHMS[algorithm], SOFTMAX_AXES[mode](y.value.rank)
        check_alike("srcDesc", y.value, "srcDiffDesc", dy.value)
        check_alike("srcDesc", y.value, "destDiffDesc", dx.value)
        problem = checked(
            SoftmaxProblem, BACKWARD, "backward", dx.value, dy.value, name, axes, y.value
        )
        return Prepared(context.handle.plan(problem), {**BACKWARD, "y": "src"})

    key = ("softmax backward", algorithm, mode, y.version, dy.version, dx.version)
    context.prepared(key, build).run(context, (y_data, dy_data, dx_data), alpha, beta)


def fitted(pool: PoolingDesc, x: TensorDesc, y: TensorDesc) -> PoolingDesc:
    """The pooling with the output size that y has: the floor formula's, or another one that the
    caller chose (as Caffe rounds up), as long as every window starts on the input."""
    sizes = zip(x.dims[2:], pool.padding, pool.extent, pool.stride)
    plain = tuple((h + sum(pad) - extent) // u + 1 for h, pad, extent, u in sizes)
    return pool if y.dims[2:] == plain else replace(pool, rounding="given")


def pooling_forward(
    context: Context,
    pool: State,
    x: State,
    x_data: Any,
    y: State,
    y_data: Any,
    alpha: float,
    beta: float,
) -> None:
    """y = alpha * pool(x) + beta * y."""

    def build() -> Prepared:
        fit = fitted(pool.value, x.value, y.value)
        problem = checked(PoolingProblem, FORWARD, "forward", x.value, y.value, fit)
        return Prepared(context.handle.plan(problem), FORWARD)

    call = context.prepared(("pooling", pool.version, x.version, y.version), build)
    call.run(context, (x_data, y_data), alpha, beta)


def pooling_backward(
    context: Context,
    pool: State,
    y: State,
    y_data: Any,
    dy: State,
    dy_data: Any,
    x: State,
    x_data: Any,
    dx: State,
    dx_data: Any,
    alpha: float,
    beta: float,
) -> None:
    """dx = alpha * (dy sent back through the windows) + beta * dx. Maxima are found again in x."""

    def build() -> Prepared:
        check_alike("srcDesc", y.value, "srcDiffDesc", dy.value)
        check_alike("destDesc", x.value, "destDiffDesc", dx.value)
        stems = {**BACKWARD, "saved": "dest"}
        fit = fitted(pool.value, dx.value, dy.value)
        problem = checked(PoolingProblem, stems, "backward", dx.value, dy.value, fit, None, x.value)
        unread = [Place("srcData", y.value)]
        if not problem.finds_maxima:
            unread.append(Place("destData", x.value))
        return Prepared(context.handle.plan(problem), {**stems, "x": "dest"}, unread)

    key = ("pooling backward", pool.version, y.version, dy.version, x.version, dx.version)
    call = context.prepared(key, build)
    if call.count == 3:
        call.run(context, (x_data, dy_data, dx_data, y_data), alpha, beta)
    else:
        call.run(context, (dy_data, dx_data, y_data, x_data), alpha, beta)


def activation_forward(
    context: Context,
    mode: cudnnActivationMode,
    x: State,
    x_data: Any,
    y: State,
    y_data: Any,
    alpha: float,
    beta: float,
) -> None:
    """y = alpha * f(x) + beta * y; y may be the memory of x."""

    def build() -> Prepared:
        problem = checked(
            ActivationProblem, FORWARD, "forward", x.value, y.value, ACTIVATIONS[mode]
        )
        return Prepared(context.handle.plan(problem), FORWARD)

    call = context.prepared(("activation", mode, x.version, y.version), build)
    call.run(context, (x_data, y_data), alpha, beta)


def activation_backward(
    context: Context,
    mode: cudnnActivationMode,
    y: State,
    y_data: Any,
    dy: State,
    dy_data: Any,
    x: State,
    x_data: Any,
    dx: State,
    dx_data: Any,
    alpha: float,
    beta: float,
) -> None:
    """dx = alpha * dy * f'(x) + beta * dx, from y alone: x may have been overwritten by y, and dx
    may be the memory of dy or of y."""

    def build() -> Prepared:
        check_alike("srcDesc", y.value, "srcDiffDesc", dy.value)
        check_alike("srcDesc", y.value, "destDesc", x.value)
        check_alike("srcDesc", y.value, "destDiffDesc", dx.value)
        problem = checked(
            ActivationProblem, BACKWARD, "backward", dx.value, dy.value, ACTIVATIONS[mode], y.value
        )
        plan, stems = context.handle.plan(problem), {**BACKWARD, "y": "src"}
        return Prepared(plan, stems, [Place("destData", x.value)])

    key = ("activation backward", mode, y.version, dy.version, x.version, dx.version)
    call = context.prepared(key, build)
    call.run(context, (y_data, dy_data, dx_data, x_data), alpha, beta)
