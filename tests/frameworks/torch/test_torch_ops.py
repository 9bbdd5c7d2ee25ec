"""bedstone's operators in PyTorch's registry, with nothing patched: results against PyTorch's own,
derivatives against differences, and the checks that PyTorch has for operators of others."""

from __future__ import annotations

import pytest

import bedstone

torch = pytest.importorskip("torch")
ops = pytest.importorskip("bedstone.frameworks.torch.ops")
F = torch.nn.functional

TOLERANCE = {"float32": 2e-5, "float64": 1e-12, "bfloat16": 2e-2}
SEED = 1410


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(SEED)


def randn(*dims, dtype=torch.float64, grad=False):
    return torch.randn(*dims, dtype=torch.float64).to(dtype).requires_grad_(grad)


def close(got, expected):
    tolerance = TOLERANCE[str(expected.dtype).removeprefix("torch.")]
    assert got.shape == expected.shape and got.dtype == expected.dtype
    scale = max(float(expected.detach().abs().max()), 1.0) if expected.numel() else 1.0
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance * scale)


# name -> (ours, PyTorch's, dims of the inputs); each a function of its tensors.
CASES = {
    "conv1d": (lambda x, w, b: ops.convolution(x, w, b, 2, 3, 2),
               lambda x, w, b: F.conv1d(x, w, b, 2, 3, 2), [(2, 3, 9), (4, 3, 5), (4,)]),
    "conv2d": (lambda x, w, b: ops.convolution(x, w, b, (2, 1), (1, 0), 1, 2),
               lambda x, w, b: F.conv2d(x, w, b, (2, 1), (1, 0), 1, 2),
               [(2, 4, 4, 3), (6, 2, 3, 2), (6,)]),
    "conv2d no bias": (lambda x, w: ops.convolution(x, w, padding=1),
                       lambda x, w: F.conv2d(x, w, padding=1), [(2, 3, 3, 4), (2, 3, 3, 3)]),
    "conv3d": (lambda x, w, b: ops.convolution(x, w, b, padding=1),
               lambda x, w, b: F.conv3d(x, w, b, padding=1),
               [(1, 2, 2, 3, 3), (2, 2, 2, 3, 3), (2,)]),
    "transpose": (lambda x, w, b: ops.convolution_transpose(x, w, b, 2, 1, 1, 2),
                  lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1, 2),
                  [(2, 4, 2, 2), (4, 3, 3, 3), (6,)]),
    "transpose, padded by a row": (
        lambda x, w: ops.convolution_transpose(x, w, None, 1, 0, (1, 0), 1, 2),
        lambda x, w: F.conv_transpose2d(x, w, None, 1, 0, (1, 0), 1, 2),
        [(1, 2, 4, 3), (2, 2, 2, 3)]),
    "max pool": (lambda x: ops.max_pool(x, 3, 2, 1, ceil=True)[0],
                 lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True), [(2, 3, 8, 7)]),
    "max pool, dilated": (lambda x: ops.max_pool(x, (2, 3), 1, 0, 2)[0],
                          lambda x: F.max_pool2d(x, (2, 3), 1, 0, 2), [(2, 2, 7, 8)]),
    "average pool": (lambda x: ops.average_pool(x, 3, 2, 1),
                     lambda x: F.avg_pool2d(x, 3, 2, 1), [(2, 3, 7, 8)]),
    "average pool, padding out": (
        lambda x: ops.average_pool(x, 3, 2, 1, True, False),
        lambda x: F.avg_pool1d(x, 3, 2, 1, True, False), [(2, 3, 8)]),
    "average pool 3-D": (lambda x: ops.average_pool(x, (1, 2, 2)),
                         lambda x: F.avg_pool3d(x, (1, 2, 2)), [(1, 2, 3, 4, 5)]),
    "adaptive": (lambda x: ops.adaptive_average_pool(x, (3, 2)),
                 lambda x: F.adaptive_avg_pool2d(x, (3, 2)), [(2, 3, 7, 6)]),
    "global": (ops.global_average_pool, lambda x: F.adaptive_avg_pool2d(x, 1), [(2, 3, 5, 4)]),
    "softmax": (lambda x: ops.softmax(x, 1), lambda x: F.softmax(x, 1), [(3, 5, 4)]),
    "log softmax": (lambda x: ops.log_softmax(x), lambda x: F.log_softmax(x, -1), [(3, 7)]),
    "layer norm": (lambda x, w, b: ops.layer_norm(x, -2, w, b),
                   lambda x, w, b: F.layer_norm(x, (4, 3), w, b), [(3, 2, 4, 3), (4, 3), (4, 3)]),
    "layer norm, bare": (lambda x: ops.layer_norm(x, 1, epsilon=1e-3),
                         lambda x: F.layer_norm(x, (6,), eps=1e-3), [(4, 6)]),
    "group norm": (lambda x, w, b: ops.group_norm(x, 2, w, b),
                   lambda x, w, b: F.group_norm(x, 2, w, b), [(2, 4, 3, 3), (4,), (4,)]),
    "batch norm": (lambda x, w, b: ops.batch_norm(x, w, b)[0],
                   lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
                   [(3, 2, 3, 2), (2,), (2,)]),
    "batch norm, scale alone": (lambda x, w: ops.batch_norm(x, w)[0],
                                lambda x, w: F.batch_norm(x, None, None, w, None, True),
                                [(5, 3), (3,)]),
    "relu": (lambda x: ops.activation(x, "relu"), F.relu, [(3, 5)]),
    "leaky relu": (lambda x: ops.activation(x, "leaky_relu", 0.2),
                   lambda x: F.leaky_relu(x, 0.2), [(3, 5)]),
    "clip": (lambda x: ops.activation(x, "clip", -0.5, 0.7),
             lambda x: F.hardtanh(x, -0.5, 0.7), [(3, 5)]),
    "relu6": (lambda x: ops.activation(3 * x, "clipped_relu", 6.0),
              lambda x: F.relu6(3 * x), [(3, 5)]),
    "elu": (lambda x: ops.activation(x, "elu", 0.8), lambda x: F.elu(x, 0.8), [(3, 5)]),
    "sigmoid": (lambda x: ops.activation(x, "sigmoid"), torch.sigmoid, [(3, 5)]),
    "tanh": (lambda x: ops.activation(x, "tanh"), torch.tanh, [(3, 5)]),
    "hard sigmoid": (lambda x: ops.activation(2 * x, "hard_sigmoid"),
                     lambda x: torch.clamp(x / 3 + 0.5, 0, 1), [(3, 5)]),
    "hard swish": (lambda x: ops.activation(2 * x, "hard_swish"),
                   lambda x: F.hardswish(2 * x), [(3, 5)]),
    "silu": (lambda x: ops.activation(x, "silu"), F.silu, [(3, 5)]),
    "gelu": (lambda x: ops.activation(x, "gelu"), F.gelu, [(3, 5)]),
    "gelu by tanh": (lambda x: ops.activation(x, "gelu_tanh"),
                     lambda x: F.gelu(x, approximate="tanh"), [(3, 5)]),
    "softplus": (lambda x: ops.activation(x, "softplus"), F.softplus, [(3, 5)]),
}  # fmt: skip
NAMES = sorted(CASES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_results_and_gradients_as_pytorch(name, dtype):
    ours, theirs, dims = CASES[name]
    inputs = [randn(*d, dtype=getattr(torch, dtype), grad=True) for d in dims]
    wide = [t.detach().double().requires_grad_() for t in inputs]  # the judge is float64
    y, expected = ours(*inputs), theirs(*wide)
    close(y, expected.to(y.dtype))
    dy = torch.randn_like(y)
    for got, wanted in zip(
        torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, wide, dy.double())
    ):
        close(got, wanted.to(got.dtype))


@pytest.mark.parametrize("name", NAMES)
def test_first_and_second_derivatives(name):
    ours, _, dims = CASES[name]
    inputs = tuple(randn(*d, grad=True) for d in dims)
    assert torch.autograd.gradcheck(ours, inputs, check_forward_ad=True)
    # (along a random direction: all of them would take minutes)
    assert torch.autograd.gradgradcheck(ours, inputs, check_fwd_over_rev=True, fast_mode=True)


def every(got, wanted):
    torch.utils._pytree.tree_map(close, got, wanted)


# Transforms of a scalar, to be taken on bedstone's operator and on PyTorch's.
TRANSFORMS = {
    "grad": lambda f, inputs: torch.func.grad(f, tuple(range(len(inputs))))(*inputs),
    "vmap of grad": lambda f, inputs: torch.func.vmap(
        torch.func.grad(f, tuple(range(len(inputs)))), (0, *[None] * (len(inputs) - 1))
    )(torch.stack([inputs[0], 1.5 * inputs[0]], 0), *inputs[1:]),
    "grad of vmap": lambda f, inputs: torch.func.grad(
        lambda *given: torch.func.vmap(f)(*given).sum(), tuple(range(len(inputs)))
    )(*(torch.stack([t, 1.5 * t]) for t in inputs)),
    "grad of grad": lambda f, inputs: torch.func.grad(
        lambda *given: torch.func.grad(f)(*given).square().sum(), tuple(range(len(inputs)))
    )(*inputs),
    "tangent": lambda f, inputs: torch.func.jvp(f, inputs, tuple(t.cos() for t in inputs)),
    "tangent of grad": lambda f, inputs: torch.func.jvp(
        torch.func.grad(f), inputs, tuple(t.cos() for t in inputs)
    ),
}


@pytest.mark.parametrize("transform", sorted(TRANSFORMS))
@pytest.mark.parametrize("name", NAMES)
def test_transforms_of_torch_func(name, transform):
    ours, theirs, dims = CASES[name]
    inputs = tuple(randn(*d) for d in dims)
    apply = TRANSFORMS[transform]

    def scalar(f):
        return lambda *given: (f(*given) * f(*given).cos()).sum()

    every(apply(scalar(ours), inputs), apply(scalar(theirs), inputs))


@pytest.mark.parametrize("name", ["batch norm", "conv2d", "layer norm", "max pool", "softmax"])
def test_whole_jacobians_and_hessians(name):
    ours, theirs, dims = CASES[name]
    first, *rest = (randn(*d) for d in dims)

    def taken(f):
        of_first = lambda t: f(t, *rest)  # noqa: E731
        return (
            torch.func.jacrev(of_first)(first),
            torch.func.jacfwd(of_first)(first),
            torch.func.hessian(lambda t: of_first(t).square().sum())(first),
        )

    every(taken(ours), taken(theirs))


def test_gradients_of_each_sample_in_a_network():
    net, x, wanted = _Net(), torch.randn(3, 3, 8, 8), torch.tensor([0, 2, 3])
    parameters = {name: p.detach() for name, p in net.named_parameters()}

    def losses(run):
        def loss(parameters, sample, label):
            return -run(parameters, sample[None])[0, label[None]].sum()

        return torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x, wanted)

    def native(parameters, x):
        with torch.nn.utils.stateless._reparametrize_module(net, parameters):
            return _native(net, x)

    every(losses(lambda p, x: torch.func.functional_call(net, p, (x,))), losses(native))


def test_tangents_without_transforms():
    x, w = randn(1, 2, 4, 4), randn(3, 2, 3, 3, grad=True)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x.cos())
        y = torch.autograd.forward_ad.unpack_dual(ops.convolution(dual, w))
    close(y.tangent, F.conv2d(x.cos(), w))
    assert y.primal.requires_grad and y.tangent.requires_grad


OVERLOADS = {
    "convolution": lambda: (randn(2, 4, 5, 5, grad=True), randn(6, 2, 3, 3, grad=True),
                            randn(6, grad=True), 2, 2, [2, 1], [1], [1, 1]),
    "convolution_backward_data": lambda: (
        randn(2, 6, 3, 5, grad=True), randn(6, 2, 3, 3, grad=True), 2, 2, [5, 5], [2, 1], [1], [1]),
    "convolution_backward_filter": lambda: (
        randn(2, 4, 5, 5, grad=True), randn(2, 6, 3, 5, grad=True), 2, 2, [3], [2, 1], [1], [1]),
    "convolution_backward_bias": lambda: (randn(2, 6, 3, 5, grad=True),),
    "max_pool": lambda: (randn(2, 3, 6, 7, grad=True), 2, 1, [3], [2], [1], [1]),
    "max_pool_backward": lambda: (
        randn(1, 2, 2, 2, grad=True), torch.tensor([0, 3, 9, 15] * 2).reshape(1, 2, 2, 2),
        2, 0, [4], [2], [2], [0], [1]),
    "average_pool": lambda: (randn(2, 3, 6, 7, grad=True), 2, 0, 1, [3], [2], [1]),
    "average_pool_backward": lambda: (
        randn(2, 3, 3, 4, grad=True), 2, 0, 1, [6, 7], [3], [2], [1]),
    "adaptive_average_pool": lambda: (randn(2, 3, 6, 7, grad=True), 2, [4, 3]),
    "adaptive_average_pool_backward": lambda: (randn(2, 3, 4, 3, grad=True), 2, [6, 7]),
    "activation": lambda: (randn(3, 5, grad=True), "gelu", 0.0, 0.0),
    "activation_backward": lambda: (
        randn(3, 5, grad=True), randn(3, 5, grad=True), "silu", 0.0, 0.0),
    "normalize": lambda: (randn(3, 4, 5, grad=True), randn(4, grad=True), randn(4, grad=True),
                          1, 2, "group", 1e-5),
    "normalize_backward": lambda: (
        randn(3, 4, grad=True), randn(4, grad=True), randn(4), randn(4).exp(),
        randn(3, 4, grad=True), 1, 1, "batch", 1e-5),
    "softmax": lambda: (randn(3, 5, grad=True), 1, False),
    "softmax_backward": lambda: (
        F.softmax(randn(3, 5), 1).requires_grad_(), randn(3, 5, grad=True), 1, False),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(OVERLOADS))
def test_opcheck(name):
    torch.library.opcheck(getattr(torch.ops.bedstone, name), OVERLOADS[name]())


@pytest.mark.parametrize("name", ["convolution", "max_pool", "average_pool", "activation"])
def test_the_fake_has_the_strides_of_a_channels_last_result(name):
    x, *rest = OVERLOADS[name]()
    if name == "activation":
        x = randn(2, 3, 4, 5)
    x = x.detach().to(memory_format=torch.channels_last)
    operator = getattr(torch.ops.bedstone, name)
    torch.library.opcheck(operator, (x, *rest), test_utils="test_faketensor")
    y = operator(x, *rest)
    y = y[0] if isinstance(y, tuple) else y
    assert y.is_contiguous(memory_format=torch.channels_last) and not y.is_contiguous()


def test_every_operator_is_checked():
    registered = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("bedstone::")
    }
    assert registered == set(OVERLOADS)


def test_views_and_empty_batches():
    x, w = randn(3, 9, 8, 2).permute(0, 3, 1, 2), randn(4, 3, 3, 2).permute(0, 3, 1, 2)
    close(ops.convolution(x[:, :, ::2], w), F.conv2d(x[:, :, ::2], w))
    empty = randn(0, 2, 5, 5, grad=True)
    w = w.detach().requires_grad_()
    y = ops.convolution(empty, w)
    assert y.shape == (0, 4, 3, 3)
    y.sum().backward()
    assert empty.grad.shape == empty.shape and not w.grad.any()
    assert ops.activation(torch.tensor(-2.0), "relu").shape == ()


def test_indices_are_pytorchs():
    x = torch.randint(0, 3, (2, 3, 7, 8)).float()  # many equal maxima
    y, indices = ops.max_pool(x, 3, 2, 1)
    expected, where = F.max_pool2d(x, 3, 2, 1, return_indices=True)
    assert torch.equal(y, expected) and torch.equal(indices, where)


# Axes of a vmap: over the images, over the filters, over both.
@pytest.mark.parametrize("axes", [(1, None, None), (None, 0, None), (0, 2, 0), (None, None, 0)])
def test_vmap_of_a_convolution(axes):
    shapes = [(2, 4, 6, 5), (6, 2, 3, 2), (6,)]
    inputs = [
        randn(*shape[: at or 0], 3, *shape[at or 0 :]) if at is not None else randn(*shape)
        for shape, at in zip(shapes, axes)
    ]
    ours = torch.vmap(lambda x, w, b: ops.convolution(x, w, b, 2, 1, 1, 2), axes)
    theirs = torch.vmap(lambda x, w, b: F.conv2d(x, w, b, 2, 1, 1, 2), axes)
    close(ours(*inputs), theirs(*inputs))


@pytest.mark.parametrize("name", NAMES)
def test_vmap_of_results_and_of_gradients(name):
    ours, theirs, dims = CASES[name]
    inputs = [randn(*d, grad=True) for d in dims]
    batched = [torch.stack([t, t + 0.5]).detach() for t in inputs]
    close(torch.vmap(ours)(*batched), torch.vmap(theirs)(*batched))
    expected = theirs(*inputs)
    dys = torch.randn(3, *expected.shape, dtype=expected.dtype)
    got = torch.autograd.grad(ours(*inputs), inputs, dys, is_grads_batched=True)
    wanted = torch.autograd.grad(expected, inputs, dys, is_grads_batched=True)
    for g, w in zip(got, wanted):
        close(g, w)


class _Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(3, 8, 3)
        self.second = torch.nn.ConvTranspose2d(8, 4, 2, 2)

    def forward(self, x):
        x = ops.convolution(x, self.first.weight, self.first.bias, padding=1)
        x = ops.max_pool(ops.activation(x, "gelu"), 2)[0]
        x = ops.convolution_transpose(x, self.second.weight, self.second.bias, 2)
        return ops.log_softmax(ops.global_average_pool(x).flatten(1))


def _native(net, x):
    x = F.max_pool2d(F.gelu(F.conv2d(x, net.first.weight, net.first.bias, padding=1)), 2)
    x = F.conv_transpose2d(x, net.second.weight, net.second.bias, 2)
    return F.log_softmax(F.adaptive_avg_pool2d(x, 1).flatten(1), -1)


def test_compiled_whole_with_sizes_that_vary():
    net = _Net()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True, dynamic=True)
    for n, size in ((2, 8), (3, 10)):
        x = torch.randn(n, 3, size, size)
        y = compiled(x)
        close(y, _native(net, x))
        got = torch.autograd.grad(y[:, 0].sum(), list(net.parameters()))
        wanted = torch.autograd.grad(_native(net, x)[:, 0].sum(), list(net.parameters()))
        for g, w in zip(got, wanted):
            close(g, w)


def test_exported():
    net, x = _Net(), torch.randn(2, 3, 8, 8)
    exported = torch.export.export(net, (x,))
    names = {str(node.target) for node in exported.graph.nodes}
    assert "bedstone.convolution.default" in names and "bedstone.max_pool.default" in names
    close(exported.module()(x), _native(net, x))


BAD = {
    "rank": lambda: ops.convolution(randn(3, 4), randn(3, 4)),
    "channels": lambda: ops.convolution(randn(1, 4, 5, 5), randn(2, 3, 3, 3)),
    "groups": lambda: ops.convolution(randn(1, 4, 5, 5), randn(3, 2, 3, 3), groups=2),
    "dtypes": lambda: ops.convolution(randn(1, 4, 5, 5), randn(2, 4, 3, 3, dtype=torch.float32)),
    "integers": lambda: ops.activation(torch.arange(3), "relu"),
    "stride": lambda: ops.convolution(randn(1, 4, 5, 5), randn(2, 4, 3, 3), stride=0),
    "strides": lambda: ops.convolution(randn(1, 4, 5, 5), randn(2, 4, 3, 3), stride=(1, 1, 1)),
    "padding": lambda: ops.convolution(randn(1, 4, 5, 5), randn(2, 4, 3, 3), padding=-1),
    "window": lambda: ops.convolution(randn(1, 4, 5, 5), randn(2, 4, 7, 7)),
    "bias": lambda: ops.convolution(randn(1, 4, 5, 5), randn(2, 4, 3, 3), randn(3)),
    "output_padding": lambda: ops.convolution_transpose(
        randn(1, 4, 5, 5), randn(4, 2, 3, 3), output_padding=1),
    "pool window": lambda: ops.max_pool(randn(1, 4, 5, 5), 7),
    "pool rank": lambda: ops.max_pool(randn(5, 5), 2),
    "kind": lambda: ops.activation(randn(3), "swoosh"),
    "axis": lambda: ops.softmax(randn(3, 4), 2),
    "norm axis": lambda: ops.layer_norm(randn(3, 4), 0),
    "norm groups": lambda: ops.group_norm(randn(3, 4, 2), 3),
    "scale": lambda: ops.batch_norm(randn(3, 4, 2), randn(3)),
    "shift": lambda: ops.layer_norm(randn(3, 4), 1, None, randn(4)),
    "empty": lambda: ops.global_average_pool(randn(2, 3, 0, 4)),
    "size": lambda: ops.convolution_backward_data(randn(1, 4, 5, 5), randn(4, 2, 3, 3), 9),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(BAD))
def test_mistakes_are_told(name):
    with pytest.raises(bedstone.InvalidDescriptor, match="expected"):
        BAD[name]()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_cuda_tensors(name, dtype):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    ours, theirs, dims = CASES[name]
    wide = [randn(*d, dtype=getattr(torch, dtype)).double().requires_grad_() for d in dims]
    inputs = [t.detach().to("cuda", getattr(torch, dtype)).requires_grad_() for t in wide]
    expected = theirs(*wide)
    try:
        y = ours(*inputs)
    except bedstone.NotSupported as error:  # no kernel for GPUs: the message says so
        pytest.skip(str(error))
    close(y.cpu(), expected.to(y.dtype))
    dy = torch.randn_like(y)
    for got, wanted in zip(
        torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, wide, dy.cpu().double())
    ):
        close(got.cpu(), wanted.to(got.dtype))
