"""bedstone under JAX: `enable()` for functions of jax.lax and jax.nn, and the same as functions.

import bedstone.frameworks.jax as bedstone_jax

with bedstone_jax.enable():
    loss, gradients = jax.jit(jax.value_and_grad(network))(parameters, images)
print(bedstone_jax.report())
"""

from bedstone.frameworks.jax.activation import (
    elu,
    gelu,
    hard_swish,
    leaky_relu,
    relu,
    relu6,
    sigmoid,
    silu,
    tanh,
)
from bedstone.frameworks.jax.convolution import convolution
from bedstone.frameworks.jax.patch import enable, enabled, operators, patch, unpatch
from bedstone.frameworks.jax.pooling import avg_pool, max_pool
from bedstone.frameworks.jax.report import Report, report, reset
from bedstone.frameworks.jax.softmax import log_softmax, softmax
from bedstone.frameworks.jax.spatial import spatial_convolution

__all__ = [
    "Report",
    "avg_pool",
    "convolution",
    "elu",
    "enable",
    "enabled",
    "gelu",
    "hard_swish",
    "leaky_relu",
    "log_softmax",
    "max_pool",
    "operators",
    "patch",
    "relu",
    "relu6",
    "report",
    "reset",
    "sigmoid",
    "silu",
    "softmax",
    "spatial_convolution",
    "tanh",
    "unpatch",
]
