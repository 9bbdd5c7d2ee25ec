"""bedstone under JAX: `enable()` for jax.lax's convolutions, `convolution` as a function.

import bedstone.frameworks.jax as bedstone_jax

with bedstone_jax.enable():
    loss, gradients = jax.jit(jax.value_and_grad(network))(parameters, images)
print(bedstone_jax.report())
"""

from bedstone.frameworks.jax.convolution import convolution
from bedstone.frameworks.jax.patch import enable, enabled, patch, unpatch
from bedstone.frameworks.jax.report import Report, report, reset
from bedstone.frameworks.jax.sharding import spatial_convolution

__all__ = [
    "Report",
    "convolution",
    "enable",
    "enabled",
    "patch",
    "report",
    "reset",
    "spatial_convolution",
    "unpatch",
]
