"""Transform, add, set and scale."""

import numpy as np
import pytest
from spec_cases import close, normal, packed

from bedstone.spec.tensor import TensorDesc
from bedstone.spec.tensor_ops import ADD_MODES, TensorOpProblem, add_dims

DIMS = (2, 3, 4, 5)


@pytest.mark.parametrize(
    "mode, dims",
    [("same_hw", (1, 1, 4, 5)), ("same_chw", (1, 3, 4, 5)), ("same_c", (1, 3, 1, 1)),
     ("full", DIMS)],
)  # fmt: skip
def test_the_papers_four_ways_to_add(mode, dims):
    assert add_dims(mode, DIMS) == dims
    b, y = normal(0, dims, DIMS)
    problem = TensorOpProblem("add", packed(DIMS), packed(dims))
    assert [o.name for o in problem.operands] == ["b", "y"]
    assert close(problem.reference({"b": b, "y": y}, 2.0, 1.0)["y"], y + 2 * b)
    assert close(problem.reference({"b": b})["y"], b + np.zeros(DIMS))


def test_add_modes_of_other_ranks():
    assert [add_dims(mode, (2, 3)) for mode in ADD_MODES] == [(1, 1), (1, 3), (1, 3), (2, 3)]
    assert add_dims("same_c", (2, 3, 4, 5, 6)) == (1, 3, 1, 1, 1)


def test_transform_between_layouts_and_types():
    (x,) = normal(1, DIMS)
    y_desc = TensorDesc.packed(DIMS, "float16", "NHWC")
    problem = TensorOpProblem("transform", y_desc, packed(DIMS, "float32"))
    y = np.ones(DIMS)
    assert close(problem.reference({"x": x, "y": y}, 2.0, 3.0)["y"], 2 * x + 3)
    assert problem.bytes == 120 * (2 + 4)


def test_set_and_scale():
    y = np.array([[1.0, np.nan], [3.0, 4.0]])
    assert np.all(TensorOpProblem("set", packed((2, 2))).reference({}, 7.0)["y"] == 7)
    problem = TensorOpProblem("scale", packed((2, 2)))
    got = problem.reference({"y": y}, -2.0)["y"]
    assert got[0, 0] == -2 and np.isnan(got[0, 1]) and got[1].tolist() == [-6, -8]
    assert np.array_equal(problem.reference({"y": y}, -2.0, 5.0)["y"], got, equal_nan=True)
    (operand,) = problem.operands
    assert operand.is_output and operand.role == "inout"
    assert problem.bytes == 2 * 4 * 8  # read and written
