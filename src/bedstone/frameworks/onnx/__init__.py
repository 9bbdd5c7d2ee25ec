"""ONNX graphs on bedstone's primitives, with onnxruntime's habits.

    from bedstone.frameworks.onnx import InferenceSession
    session = InferenceSession("model.onnx")
    outputs = session.run(None, {"x": x})

`with enable():` puts these sessions under any package that creates `onnxruntime.InferenceSession`;
`report()` says what ran where.
"""

from bedstone.frameworks.onnx.patch import enable
from bedstone.frameworks.onnx.report import report
from bedstone.frameworks.onnx.session import InferenceSession

__all__ = ["InferenceSession", "enable", "report"]
