"""A training step of whole networks against PyTorch: the same layers built of its functions, the
same weights, data and dropout; the loss, every gradient and the updated weights, in double."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("google.protobuf")
torch = pytest.importorskip("torch")

from bedstone.frameworks.caffe import Solver, io, schema  # noqa: E402

functional = torch.nn.functional
EXAMPLES = Path(__file__).parents[3] / "examples" / "caffe"
RATE, DECAY = 2.0**-7, 2.0**-11  # (exact in the single precision of a solver file)
TOLERANCE = 1e-9  # of an array's largest element


def solver_of(example, images, size, engine):
    """A solver of the example's training network, its data layers replaced by inputs."""
    read = io.read_net(EXAMPLES / example)
    kept = [each for each in read.layer if "label" not in each.top]
    net = schema.NetParameter(name=read.name)
    data = net.layer.add(name="data", type="Input", top=["data", "label"])
    data.input_param.shape.add(dim=(images, *size))
    data.input_param.shape.add(dim=[images])
    net.layer.extend(kept)
    settings = schema.SolverParameter(
        net_param=net, base_lr=RATE, lr_policy="fixed", momentum=0.9, weight_decay=DECAY,
        random_seed=5, snapshot_after_train=False,
    )  # fmt: skip
    return Solver(settings, engine=engine, dtype="float64")


def first(numbers, default):
    return numbers[0] if numbers else default


def pooled(x, param):
    whole = param.global_pooling
    window = tuple(x.shape[2:]) if whole else param.kernel_size
    given = (window, param.stride, param.pad)
    if schema.enum_name(param, "pool") == "MAX":
        return functional.max_pool2d(x, *given, ceil_mode=True)
    return functional.avg_pool2d(x, *given, ceil_mode=True)


def convolved(x, param, weight, bias):
    return functional.conv2d(
        x, weight, bias, first(param.stride, 1), first(param.pad, 0), 1, param.group
    )


def normalised(x, param):
    if schema.enum_name(param, "norm_region") == "ACROSS_CHANNELS":
        return functional.local_response_norm(x, param.local_size, param.alpha, param.beta, param.k)
    squares = functional.avg_pool2d(x * x, param.local_size, 1, param.local_size // 2)
    return x * (1 + param.alpha * squares) ** -param.beta


def torch_losses(layers, blobs, weights):
    """The weighted losses of the network by its layers' names; dropout as it was drawn there."""
    losses = {}
    for layer in layers:
        param = layer.param
        x = [blobs[name] for name in param.bottom]
        w = weights.get(param.name, [])
        if param.type == "Input":
            continue
        if param.type == "Split":
            blobs.update(dict.fromkeys(param.top, x[0]))
        elif param.type == "SoftmaxWithLoss":
            weight = first(param.loss_weight, 1.0)
            losses[param.name] = weight * functional.cross_entropy(x[0], x[1].long())
        elif param.type == "Dropout":
            blobs[param.top[0]] = x[0] * torch.from_numpy(layer.mask(tuple(x[0].shape)))
        elif param.type == "Convolution":
            blobs[param.top[0]] = convolved(x[0], param.convolution_param, *w)
        elif param.type == "InnerProduct":
            blobs[param.top[0]] = functional.linear(x[0].flatten(1), *w)
        elif param.type == "Pooling":
            blobs[param.top[0]] = pooled(x[0], param.pooling_param)
        elif param.type == "LRN":
            blobs[param.top[0]] = normalised(x[0], param.lrn_param)
        elif param.type == "ReLU":
            blobs[param.top[0]] = functional.relu(x[0])
        elif param.type == "Concat":
            blobs[param.top[0]] = torch.cat(x, 1)
        else:
            raise NotImplementedError(param.type)
    return losses


def close(ours, theirs):
    assert np.abs(theirs).max() > 0
    return np.abs(ours - theirs).max() <= TOLERANCE * np.abs(theirs).max()


def step_agrees(example, images, size, engine, classes, losses):
    """One step on both sides; `losses` is how many losses the network has."""
    solver = solver_of(example, images, size, engine)
    net, rng = solver.net, np.random.default_rng(7)
    net.blobs["data"].data[...] = rng.standard_normal((images, *size))
    net.blobs["label"].data[...] = rng.integers(0, classes, images)
    before = {name: [b.data.copy() for b in blobs] for name, blobs in net.params.items()}
    gradients = {}
    solver.add_callback(
        lambda: None,
        lambda: gradients.update({n: [b.diff.copy() for b in bs] for n, bs in net.params.items()}),
    )
    solver.step(1)

    weights = {
        name: [torch.from_numpy(a).clone().requires_grad_() for a in arrays]
        for name, arrays in before.items()
    }
    blobs = {name: torch.from_numpy(net.blobs[name].data.copy()) for name in ("data", "label")}
    found = torch_losses(net.layers, blobs, weights)
    assert len(found) == losses
    total = sum(found.values())
    total.backward()
    assert solver.loss == pytest.approx(total.item(), rel=TOLERANCE)
    number = 0
    for layer in net.layers:
        for i, blob in enumerate(layer.blobs):
            wanted = weights[layer.name][i].grad.numpy()
            assert close(gradients[layer.name][i], wanted), (layer.name, i)
            old = before[layer.name][i]
            slope = wanted + DECAY * net.params_weight_decay[number] * old
            new = old - RATE * net.params_lr[number] * slope
            assert close(blob.data, new), (layer.name, i)
            number += 1
    return number


@pytest.mark.parametrize("engine", ["CUDNN", "CAFFE"])
@pytest.mark.parametrize(
    "example, size, parameters",
    [("lenet_digits/train_test.prototxt", (1, 28, 28), 8),
     ("cifar10/quick_train_test.prototxt", (3, 32, 32), 10),
     ("cifar10/full_train_test.prototxt", (3, 32, 32), 8)],
)  # fmt: skip
def test_small_networks(example, size, parameters, engine):
    assert step_agrees(example, 3, size, engine, 10, 1) == parameters


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["CUDNN", "CAFFE"])
def test_googlenet_with_its_three_losses(engine):
    """57 convolutions of the inceptions, 2 of the auxiliary classifiers, 5 matrices: 128 blobs."""
    step = step_agrees("googlenet/train_val.prototxt", 2, (3, 224, 224), engine, 1000, 3)
    assert step == 128


@pytest.mark.slow
def test_caffenet():
    assert step_agrees("caffenet/train_val.prototxt", 2, (3, 227, 227), "CUDNN", 1000, 1) == 16
