"""bedstone under PyTorch: `enable()` for its own operators, `ops` for ours.

import bedstone.frameworks.torch as bedstone_torch

with bedstone_torch.enable():
    y = model(x)
print(bedstone_torch.report())
"""

from bedstone.frameworks.torch.explain import explain
from bedstone.frameworks.torch.patch import enable, enabled, operators, patch, unpatch
from bedstone.frameworks.torch.report import Report, report, reset

__all__ = [
    "Report",
    "enable",
    "enabled",
    "explain",
    "operators",
    "patch",
    "report",
    "reset",
    "unpatch",
]
