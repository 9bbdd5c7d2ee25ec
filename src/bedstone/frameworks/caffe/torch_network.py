"""The peer of `bedstone caffe time --gpu`: a network's layers built of PyTorch's own functions.

Made from a `Net`, with its weights and its data; forward and backward of the whole network by
autograd, as PyTorch is used, or layer by layer. On a GPU the convolutions and matrix products are
cuDNN's and cuBLAS's, chosen by `cudnn.benchmark`; layers lie in memory as in Caffe (NCHW).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from bedstone.frameworks.caffe.net import Net
from bedstone.spec.errors import InvalidDescriptor

Function = Callable[..., Any]


class TorchNetwork:
    """A network as PyTorch runs it.

    net     whose layers, weights and data it takes; its data layers have run
    math    "ieee", or "tf32": PyTorch's switches for products in float32
    shared  a network whose parameters to use as one's own, by layer (for testing)
    """

    def __init__(self, net: Net, math: str, shared: TorchNetwork | None = None) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.net, self.math = net, math
        torch, space = self.torch, net.space
        self._on_gpu = space.device.type == "cuda"  # PyTorch's switches are left alone elsewhere
        if self._on_gpu:
            torch.backends.cudnn.benchmark = True
        self.computing = [i for i, bottom in enumerate(net.bottoms) if bottom]
        self.parameters: dict[str, list[Any]] = {}
        for layer in net.layers:
            if layer.blobs and shared is not None:
                self.parameters[layer.name] = shared.parameters[layer.name]
            elif layer.blobs:
                self.parameters[layer.name] = [
                    blob.on(space).data.clone().requires_grad_() for blob in layer.blobs
                ]
        self.data: dict[str, Any] = {}
        for i, bottom in enumerate(net.bottoms):
            if not bottom:
                for name, blob in zip(net.layers[i].param.top, net.tops[i]):
                    self.data[name] = blob.on(space).data.clone()
        for name, values in self.data.items():
            if values.ndim == 1:
                self.data[name] = values.long()
        self._functions = {i: self._function(net.layers[i]) for i in self.computing}
        self._loss: Any = None
        self._masks: dict[str, Any] | None = None
        self.forget()

    # Whole passes --------------------------------------------------------------------------------

    def forward(self, same_masks: bool = False) -> float:
        """The loss of a training pass; with `same_masks` dropout keeps what the net's has kept."""
        self._masks = self._masks_of_net() if same_masks else None
        values = dict(self.data)
        self._loss = 0.0
        for i in self.computing:
            layer = self.net.layers[i]
            results = self._call(i, [values[name] for name in layer.param.bottom])
            values.update(zip(layer.param.top, results))
            for weight, result in zip(layer.loss_weights, results):
                if weight:
                    self._loss = self._loss + weight * result.sum()
        self._masks = None
        return float(self._loss.detach())

    def backward(self) -> None:
        """Gradients of the loss of the last forward pass."""
        self._switch()
        self._loss.backward()

    def test(self) -> None:
        """A testing pass."""
        with self.torch.no_grad():
            self.forward()

    def optimizer(self, base_lr: float, momentum: float, weight_decay: float) -> Any:
        """PyTorch's stochastic gradient descent, in one kernel where it has one, with the net's
        multipliers."""
        groups = [
            {"params": [tensor], "lr": base_lr * rate, "weight_decay": weight_decay * decay}
            for tensor, rate, decay in zip(
                self._flat(), self.net.params_lr, self.net.params_weight_decay
            )
        ]
        fused = self.net.space.name.startswith("torch cuda")
        return self.torch.optim.SGD(groups, lr=base_lr, momentum=momentum, fused=fused)

    def _flat(self) -> list[Any]:
        return [tensor for tensors in self.parameters.values() for tensor in tensors]

    # Layer by layer ------------------------------------------------------------------------------

    def forget(self) -> None:
        """Drop what layers have kept, and all gradients."""
        self._kept: dict[int, tuple[list[Any], Any]] = {}
        self._values = dict(self.data)
        self._slopes: dict[str, Any] = {}
        for tensor in self._flat():
            tensor.grad = None

    def forward_layer(self, i: int) -> None:
        """Run layer i on what the layers before it gave."""
        layer = self.net.layers[i]
        inputs = [self._values[name].detach() for name in layer.param.bottom]
        for wanted, values in zip(self.net.propagate_down(i), inputs):
            values.requires_grad_(wanted)
        results = self._call(i, inputs)
        self._kept[i] = (inputs, results)
        self._values.update(zip(layer.param.top, results))

    def backward_layer(self, i: int) -> None:
        """The gradients of layer i's bottoms and parameters, from those of its tops."""
        layer = self.net.layers[i]
        inputs, results = self._kept[i]
        wanted = [x for x in inputs if x.requires_grad] + self.parameters.get(layer.name, [])
        if not wanted or not any(result.requires_grad for result in results):
            return
        slopes = [
            self.torch.full_like(result, weight) if weight else self._slopes[layer.param.top[top]]
            for top, (result, weight) in enumerate(zip(results, layer.loss_weights))
        ]
        self._switch()
        found = iter(self.torch.autograd.grad(results, wanted, slopes))
        for name, x in zip(layer.param.bottom, inputs):
            if x.requires_grad:
                self._slopes[name] = next(found)

    def same_layer(
        self, i: int, inputs: list[Any], slopes: list[Any]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """(tops, gradients of the wanted bottoms and of the parameters) of layer i from those
        bottoms and gradients of tops, with the net's dropout masks."""
        layer = self.net.layers[i]
        inputs = [x.long() if x.ndim == 1 else x for x in inputs]
        for wanted, x in zip(self.net.propagate_down(i), inputs):
            x.requires_grad_(wanted)
        self._masks = self._masks_of_net()
        results = self._call(i, inputs)
        self._masks = None
        wanted = [x for x in inputs if x.requires_grad] + self.parameters.get(layer.name, [])
        if not wanted:
            return results, ()
        tops = [
            self.torch.full_like(result, weight) if weight else slope
            for result, weight, slope in zip(results, layer.loss_weights, slopes)
        ]
        self._switch()
        return results, self.torch.autograd.grad(results, wanted, tops)

    # Functions -----------------------------------------------------------------------------------

    def _switch(self) -> None:
        if not self._on_gpu:
            return
        backends = self.torch.backends
        backends.cudnn.allow_tf32 = backends.cuda.matmul.allow_tf32 = self.math == "tf32"

    def _call(self, i: int, inputs: list[Any]) -> tuple[Any, ...]:
        self._switch()
        layer = self.net.layers[i]
        found = self._functions[i](*inputs, *self.parameters.get(layer.name, []))
        return found if isinstance(found, tuple) else (found,)

    def _function(self, layer: Any) -> Function:
        maker = getattr(self, f"_{layer.type.lower()}", None)
        if maker is None:
            expected = "layers that the peer has a function for"
            raise InvalidDescriptor(f"layer {layer.name}: type", layer.type, expected)
        return maker(layer)

    def _convolution(self, layer: Any) -> Function:
        f = self.torch.nn.functional
        conv = {1: f.conv1d, 2: f.conv2d, 3: f.conv3d}[layer.axes]
        geometry = (layer.stride, layer.pad, layer.dilation, layer.group)
        return lambda x, w, b=None: conv(x, w, b, *geometry)

    def _relu(self, layer: Any) -> Function:
        slope = layer.param.relu_param.negative_slope
        f = self.torch.nn.functional
        return (lambda x: f.leaky_relu(x, slope)) if slope else f.relu

    def _pooling(self, layer: Any) -> Function:
        f = self.torch.nn.functional
        if layer.method == "MAX":
            return lambda x: f.max_pool2d(
                x, layer.window, layer.stride, layer.pad, ceil_mode=layer.ceil
            )
        return lambda x: f.avg_pool2d(x, layer.window, layer.stride, layer.pad, layer.ceil, True)

    def _lrn(self, layer: Any) -> Function:
        lrn = layer.lrn
        if lrn.region != "across":
            raise InvalidDescriptor(f"layer {layer.name}: norm_region", lrn.region, "across")
        f = self.torch.nn.functional
        return lambda x: f.local_response_norm(x, lrn.size, lrn.alpha, lrn.beta, lrn.k)

    def _innerproduct(self, layer: Any) -> Function:
        if layer.transposed:
            raise InvalidDescriptor(f"layer {layer.name}: transpose", True, "false")
        f = self.torch.nn.functional
        return lambda x, w, b=None: f.linear(x.flatten(layer.axis), w, b)

    def _dropout(self, layer: Any) -> Function:
        f, training = self.torch.nn.functional, layer.phase == "TRAIN"

        def drop(x: Any) -> Any:
            if self._masks is not None:
                return x * self._masks[layer.name]
            return f.dropout(x, layer.ratio, training)

        return drop

    def _masks_of_net(self) -> dict[str, Any]:
        """What the net's dropout layers multiplied by in their last pass."""
        drops = [(i, layer) for i, layer in enumerate(self.net.layers) if layer.type == "Dropout"]
        return {
            layer.name: self.net.space.xp.asarray(layer.mask(self.net.tops[i][0].shape))
            for i, layer in drops
        }

    def _softmax(self, layer: Any) -> Function:
        return lambda x: self.torch.softmax(x, layer.axis)

    def _softmaxwithloss(self, layer: Any) -> Function:
        return self.torch.nn.functional.cross_entropy

    def _accuracy(self, layer: Any) -> Function:
        def accuracy(x: Any, labels: Any) -> Any:
            best = x.topk(layer.top_k, 1).indices
            return (best == labels[:, None]).any(1).float().mean()

        return accuracy

    def _split(self, layer: Any) -> Function:
        count = len(layer.param.top)
        return lambda x: tuple(x.view_as(x) for _ in range(count))

    def _concat(self, layer: Any) -> Function:
        return lambda *xs: self.torch.cat(xs, layer.axis)

    def _flatten(self, layer: Any) -> Function:
        return lambda x: x.flatten(1)
