"""ONNX's own backend tests, for every operator that runs on bedstone's primitives."""

from __future__ import annotations

import re
import unittest

import pytest

pytest.importorskip("onnx")
pytest.importorskip("ml_dtypes")
import onnx.backend.test

from bedstone.frameworks.onnx import backend

OPERATORS = (
    "conv", "basic_conv", "convtranspose", "maxpool", "averagepool", "globalaveragepool",
    "globalmaxpool", "softmax", "logsoftmax", "relu", "leakyrelu", "clip", "sigmoid", "hardsigmoid",
    "hardswish", "tanh", "elu", "gelu", "softplus", "batchnorm", "matmul_2d", "matmul_3d",
)  # fmt: skip
# Pattern -> why the case is left out.
EXCLUDED = {
    r"training_mode": "training is not inference",
    r"_expanded": "written as other operators: they would test those",
    r"_uint8|_int8|_qlinear|integer": "quantised types are not computed",
}
runner = onnx.backend.test.BackendTest(backend, __name__)
names = "|".join(OPERATORS)
runner.include(rf"^test_({names})(_.*)?_cpu$")
for pattern in EXCLUDED:
    runner.exclude(pattern)
CASES = [
    pytest.param(case, name, id=name.removesuffix("_cpu"))
    for case in runner.enable_report().test_cases.values()
    for name in unittest.defaultTestLoader.getTestCaseNames(case)
    if re.match(rf"^test_({names})(_.*)?_cpu$", name)
    and not any(re.search(pattern, name) for pattern in EXCLUDED)
]


def test_the_suite_is_there() -> None:
    assert len(CASES) > 90


@pytest.mark.parametrize("case, name", CASES)
def test_onnx_case(case: type[unittest.TestCase], name: str) -> None:
    result = unittest.TestResult()
    case(name).run(result)
    assert result.testsRun == 1 and not result.skipped
    for _, trace in (*result.failures, *result.errors):
        pytest.fail(trace)
