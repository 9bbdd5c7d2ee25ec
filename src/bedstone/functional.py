"""The plain functional level: arrays in, an array of the caller's kind out.

Each function describes its arrays, fetches the plan of that problem from the device's shared
handle and runs it. `out=`, `alpha=` and `beta=` blend into memory that the caller has already:
out = alpha * op(...) + beta * out.
"""

from __future__ import annotations

from typing import Any

from bedstone.arrays import ArrayRef, as_array_ref, as_caller_kind, empty_like_kind
from bedstone.plan.handle import default_handle
from bedstone.spec import activation as _activation
from bedstone.spec import convolution as _convolution
from bedstone.spec import pooling as _pooling
from bedstone.spec import softmax as _softmax
from bedstone.spec import tensor_ops as _tensor_ops
from bedstone.spec.errors import InvalidDescriptor
from bedstone.spec.problem import Problem
from bedstone.spec.tensor import CHANNELS_LAST, TensorDesc


def output_desc(dims: tuple[int, ...], like: TensorDesc) -> TensorDesc:
    """A packed tensor of those dims in the layout of `like`: channels last if `like` is (and is
    not NCHW too), else row-major."""
    last = CHANNELS_LAST.get(like.rank)
    if last is not None and like.layout == last and len(dims) == like.rank:
        return TensorDesc.packed(dims, like.dtype, last)
    return TensorDesc.packed(dims, like.dtype)


def run(
    problem: Problem,
    inputs: dict[str, Any],
    out: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    algorithm: str | None = None,
    prototype: Any = None,
) -> Any:
    """Run a problem of one output on the caller's arrays and return that output.

    `out` None allocates an array of the prototype's kind (default: the first input's).
    """
    (output,) = problem.outputs
    first = next(iter(inputs.values())) if prototype is None else prototype
    if out is None:
        if beta != 0.0:
            raise InvalidDescriptor("out", None, f"an array to blend with, since beta is {beta}")
        out = empty_like_kind(first, output.desc)
    ref = as_array_ref(out, "out")
    handle = default_handle(ref.device_kind if ref.device_kind == "cpu" else _device(ref))
    plan = handle.plan(problem, algorithm)
    plan.execute(**inputs, **{output.name: out}, alpha=alpha, beta=beta)
    return as_caller_kind(first, out)


def _device(ref: ArrayRef) -> str:
    return f"{ref.device_kind}:{ref.device_index}"


def _out_desc(out: Any, dims: tuple[int, ...], like: TensorDesc) -> TensorDesc:
    return as_array_ref(out, "out").desc if out is not None else output_desc(dims, like)


def convolution(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    padding: Any = 0,
    stride: Any = 1,
    dilation: Any = 1,
    groups: int = 1,
    mode: str = "cross_correlation",
    activation: str | _activation.ActivationDesc | None = None,
    math: str = "ieee",
    out: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    algorithm: str | None = None,
) -> Any:
    """y = activation(alpha * conv(x, w) + beta * out + bias).

    x        images, (N, C, [D, [H,]] W), any strides
    w        filters, (K, C/groups, [T, [R,]] S)
    bias     (K,) or None
    padding  an int, one int an axis, or one (low, high) pair an axis
    returns  (N, K, [O, [P,]] Q), P = floor((H + pads - dilation*(R-1) - 1) / stride) + 1, channels
             last if x is

    Raises InvalidDescriptor for shapes that do not fit. Source: arXiv 1410.0759, equations 1-3.

    >>> import numpy, bedstone
    >>> x = numpy.ones((1, 3, 8, 8), numpy.float32)
    >>> w = numpy.ones((4, 3, 3, 3), numpy.float32)
    >>> bedstone.convolution(x, w, padding=1)[0, 0, :2, :2].tolist()
    [[12.0, 18.0], [18.0, 27.0]]
    """
    xd, wd = as_array_ref(x, "x").desc, as_array_ref(w, "w").desc
    conv = _convolution.ConvolutionDesc.of(_axes(xd), padding, stride, dilation, groups, mode)
    dims = conv.output_dims(xd.dims, wd.dims)
    act = _activation.parse_desc(activation) if isinstance(activation, str) else activation
    problem = _convolution.ConvolutionProblem(
        "forward",
        xd,
        wd,
        _out_desc(out, dims, xd),
        conv,
        math,
        epilogue=_convolution.Epilogue(bias is not None, act),
    )
    inputs = {"x": x, "w": w} if bias is None else {"x": x, "w": w, "bias": bias}
    return run(problem, inputs, out, alpha, beta, algorithm)


def convolution_backward_data(
    w: Any,
    dy: Any,
    x_dims: tuple[int, ...],
    *,
    padding: Any = 0,
    stride: Any = 1,
    dilation: Any = 1,
    groups: int = 1,
    mode: str = "cross_correlation",
    math: str = "ieee",
    out: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    algorithm: str | None = None,
) -> Any:
    """dx of a convolution: alpha * (the transposed convolution of dy by w) + beta * out.

    w (K, C/groups, ...), dy (N, K, ...), x_dims the dims of x; returns dx of x_dims.
    """
    wd, dyd = as_array_ref(w, "w").desc, as_array_ref(dy, "dy").desc
    conv = _convolution.ConvolutionDesc.of(_axes(dyd), padding, stride, dilation, groups, mode)
    xd = _out_desc(out, tuple(x_dims), dyd)
    problem = _convolution.ConvolutionProblem("backward_data", xd, wd, dyd, conv, math)
    return run(problem, {"w": w, "dy": dy}, out, alpha, beta, algorithm, prototype=dy)


def convolution_backward_filter(
    x: Any,
    dy: Any,
    w_dims: tuple[int, ...],
    *,
    padding: Any = 0,
    stride: Any = 1,
    dilation: Any = 1,
    groups: int = 1,
    mode: str = "cross_correlation",
    math: str = "ieee",
    out: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    algorithm: str | None = None,
) -> Any:
    """dw of a convolution: alpha * sum over images and pixels of dy * x + beta * out.

    x (N, C, ...), dy (N, K, ...), w_dims the dims of w; returns dw of w_dims.
    """
    xd, dyd = as_array_ref(x, "x").desc, as_array_ref(dy, "dy").desc
    conv = _convolution.ConvolutionDesc.of(_axes(xd), padding, stride, dilation, groups, mode)
    wd = _out_desc(out, tuple(w_dims), xd)
    problem = _convolution.ConvolutionProblem("backward_filter", xd, wd, dyd, conv, math)
    return run(problem, {"x": x, "dy": dy}, out, alpha, beta, algorithm)


def convolution_backward_bias(
    dy: Any,
    *,
    out: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    algorithm: str | None = None,
) -> Any:
    """dbias[k] = alpha * sum of dy over everything but channels + beta * out[k]; dy (N, K, ...)."""
    dyd = as_array_ref(dy, "dy").desc
    if dyd.rank < 2:
        raise InvalidDescriptor("dy", dyd.dims, "2 or more dims: N, K, spatial")
    bias = _out_desc(out, dyd.dims[1:2], dyd)
    problem = _convolution.BiasGradientProblem(dyd, bias)
    return run(problem, {"dy": dy}, out, alpha, beta, algorithm)


def _axes(desc: TensorDesc) -> int:
    if desc.rank not in (3, 4, 5):
        raise InvalidDescriptor("x", desc.dims, "3, 4 or 5 dims: N, C and 1 to 3 spatial")
    return desc.rank - 2


def activation(
    x: Any,
    kind: str | _activation.ActivationDesc,
    *,
    out: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    algorithm: str | None = None,
) -> Any:
    """y = alpha * f(x) + beta * out, elementwise. `kind`: "relu", "sigmoid", "clipped_relu:6:0",
    an ActivationDesc, ... `out=x` works in place."""
    xd = as_array_ref(x, "x").desc
    desc = _activation.parse_desc(kind) if isinstance(kind, str) else kind
    yd = _out_desc(out, xd.dims, xd)
    problem = _activation.ActivationProblem("forward", xd, yd, desc)
    return run(problem, {"x": x}, out, alpha, beta, algorithm)


def activation_backward(
    saved: Any,
    dy: Any,
    kind: str | _activation.ActivationDesc,
    *,
    out: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    algorithm: str | None = None,
) -> Any:
    """dx = alpha * dy * f'(x) + beta * out. `saved` is y where y determines the derivative
    (`ActivationDesc.backward_from_y`), else x. `out=dy` works in place."""
    dyd, sd = as_array_ref(dy, "dy").desc, as_array_ref(saved, "saved").desc
    desc = _activation.parse_desc(kind) if isinstance(kind, str) else kind
    dxd = _out_desc(out, dyd.dims, dyd)
    problem = _activation.ActivationProblem("backward", dxd, dyd, desc, saved=sd)
    name = "y" if desc.backward_from_y else "x"
    return run(problem, {name: saved, "dy": dy}, out, alpha, beta, algorithm, prototype=dy)


def pool(
    x: Any,
    window: Any,
    mode: str = "max",
    *,
    padding: Any = 0,
    stride: Any = None,
    dilation: Any = 1,
    rounding: str = "floor",
    out: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    algorithm: str | None = None,
) -> Any:
    """y = alpha * pool(x) + beta * out over windows of x (N, C, [D, [H,]] W).

    window    a size, or one an axis; stride None is the window's size
    mode      "max", "average_include_padding" or "average_exclude_padding"
    rounding  of the output's size: "floor" or "ceil" (the last window may overrun the input)

    >>> import numpy, bedstone
    >>> bedstone.pool(numpy.arange(16.0).reshape(1, 1, 4, 4), 2).tolist()
    [[[[5.0, 7.0], [13.0, 15.0]]]]
    """
    xd = as_array_ref(x, "x").desc
    desc = _pooling.PoolingDesc.of(mode, window, _axes(xd), padding, stride, dilation, rounding)
    yd = _out_desc(out, desc.output_dims(xd.dims), xd)
    problem = _pooling.PoolingProblem("forward", xd, yd, desc)
    return run(problem, {"x": x}, out, alpha, beta, algorithm)


def pool_backward(
    dy: Any,
    window: Any,
    mode: str = "max",
    *,
    x: Any = None,
    x_dims: tuple[int, ...] | None = None,
    padding: Any = 0,
    stride: Any = None,
    dilation: Any = 1,
    rounding: str = "floor",
    out: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    algorithm: str | None = None,
) -> Any:
    """dx of `pool`: max finds its maxima again in `x`; an average needs only `x_dims`."""
    dyd = as_array_ref(dy, "dy").desc
    saved = None if x is None else as_array_ref(x, "x").desc
    if mode == "max" and saved is None:
        raise InvalidDescriptor("x", None, "the forward input, in which the maxima are found again")
    dims = saved.dims if saved is not None else x_dims
    if dims is None:
        raise InvalidDescriptor("x_dims", None, "the dims of the forward input")
    desc = _pooling.PoolingDesc.of(mode, window, _axes(dyd), padding, stride, dilation, rounding)
    dxd = _out_desc(out, tuple(dims), dyd)
    inputs = {"x": x, "dy": dy} if mode == "max" else {"dy": dy}
    more = {"saved": saved} if mode == "max" else {}
    problem = _pooling.PoolingProblem("backward", dxd, dyd, desc, **more)  # type: ignore[arg-type]
    return run(problem, inputs, out, alpha, beta, algorithm, prototype=dy)


def softmax(
    x: Any,
    axes: int | tuple[int, ...] = 1,
    *,
    kind: str = "accurate",
    out: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    algorithm: str | None = None,
) -> Any:
    """y = alpha * softmax(x) + beta * out over `axes` (default: channels).

    kind  "accurate" (scaled by the maximum), "fast" (not scaled) or "log"
    """
    xd = as_array_ref(x, "x").desc
    over = (axes,) if isinstance(axes, int) else tuple(axes)
    yd = _out_desc(out, xd.dims, xd)
    problem = _softmax.SoftmaxProblem("forward", xd, yd, kind, over)
    return run(problem, {"x": x}, out, alpha, beta, algorithm)


def softmax_backward(
    y: Any,
    dy: Any,
    axes: int | tuple[int, ...] = 1,
    *,
    kind: str = "accurate",
    out: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    algorithm: str | None = None,
) -> Any:
    """dx of `softmax` from its result y: alpha * y * (dy - sum(y * dy)) + beta * out (not log)."""
    yd, dyd = as_array_ref(y, "y").desc, as_array_ref(dy, "dy").desc
    over = (axes,) if isinstance(axes, int) else tuple(axes)
    dxd = _out_desc(out, dyd.dims, dyd)
    problem = _softmax.SoftmaxProblem("backward", dxd, dyd, kind, over, saved=yd)
    return run(problem, {"y": y, "dy": dy}, out, alpha, beta, algorithm, prototype=dy)


def transform(
    x: Any,
    *,
    layout: str | None = None,
    dtype: Any = None,
    out: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    algorithm: str | None = None,
) -> Any:
    """A copy of x in another layout ("NHWC", ...) or floating dtype: alpha * x + beta * out.

    >>> import numpy, bedstone
    >>> bedstone.transform(numpy.ones((1, 2, 3, 4)), layout="NHWC").strides
    (192, 8, 64, 16)
    """
    xd = as_array_ref(x, "x").desc
    yd = TensorDesc.packed(xd.dims, dtype or xd.dtype, layout)
    if out is not None:
        yd = as_array_ref(out, "out").desc
    problem = _tensor_ops.TensorOpProblem("transform", yd, xd)
    return run(problem, {"x": x}, out, alpha, beta, algorithm)


def add(
    b: Any, out: Any, *, alpha: float = 1.0, beta: float = 1.0, algorithm: str | None = None
) -> Any:
    """out = alpha * b + beta * out; dims of b that are 1 are repeated (the paper's four modes)."""
    bd, yd = as_array_ref(b, "b").desc, as_array_ref(out, "out").desc
    problem = _tensor_ops.TensorOpProblem("add", yd, bd)
    return run(problem, {"b": b}, out, alpha, beta, algorithm, prototype=out)


def set_to(out: Any, value: float, *, algorithm: str | None = None) -> Any:
    """Every element of out becomes `value`."""
    problem = _tensor_ops.TensorOpProblem("set", as_array_ref(out, "out").desc)
    return run(problem, {}, out, value, 0.0, algorithm, prototype=out)


def scale(out: Any, factor: float, *, algorithm: str | None = None) -> Any:
    """Every element of out is multiplied by `factor`."""
    problem = _tensor_ops.TensorOpProblem("scale", as_array_ref(out, "out").desc)
    return run(problem, {}, out, factor, 0.0, algorithm, prototype=out)
