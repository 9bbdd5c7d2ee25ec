"""PaddlePaddle on bedstone's primitives: its own operators replaced, models unchanged.

    import bedstone.frameworks.paddle as on_bedstone
    with on_bedstone.enable():
        loss = model(images)            # nn.Conv2D, F.max_pool2d, ... run bedstone's kernels
    print(on_bedstone.report())

`patch()` does the same without a block, `unpatch()` takes it back; `report()` says what ran where.
"""

from bedstone.frameworks.paddle.patch import enable, patch, patched, unpatch
from bedstone.frameworks.paddle.report import report, reset

__all__ = ["enable", "patch", "patched", "report", "reset", "unpatch"]
