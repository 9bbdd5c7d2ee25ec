"""bedstone's operators in PyTorch's registry, under `torch.ops.bedstone`.

    from bedstone.frameworks.torch import ops
    y = ops.convolution(x, w, bias, stride=2, padding=1)

They need no patch: each has a fake for torch.compile and export, derivatives (to any order where
the derivative is an operator itself) and a rule for vmap, and runs on CPU and CUDA tensors alike.
Results are row-major, or channels last where the first tensor is.
"""

from bedstone.frameworks.torch.ops.convolution import (
    convolution,
    convolution_backward_bias,
    convolution_backward_data,
    convolution_backward_filter,
    convolution_transpose,
)
from bedstone.frameworks.torch.ops.normalization import batch_norm, group_norm, layer_norm
from bedstone.frameworks.torch.ops.pointwise import activation, log_softmax, softmax
from bedstone.frameworks.torch.ops.pooling import (
    adaptive_average_pool,
    average_pool,
    global_average_pool,
    max_pool,
)

__all__ = [
    "activation",
    "adaptive_average_pool",
    "average_pool",
    "batch_norm",
    "convolution",
    "convolution_backward_bias",
    "convolution_backward_data",
    "convolution_backward_filter",
    "convolution_transpose",
    "global_average_pool",
    "group_norm",
    "layer_norm",
    "log_softmax",
    "max_pool",
    "softmax",
]
