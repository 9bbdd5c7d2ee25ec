"""Every function of v1 and v2 is there, its arguments in order, and every enumerant's value."""

from __future__ import annotations

import ctypes
import inspect
from pathlib import Path

import pytest

from bedstone.compat import cudnn_v1, cudnn_v2

TABLE = Path(__file__).with_name("cudnn_signatures.txt")
MODULES = {"v1": cudnn_v1, "v2": cudnn_v2}
COUNTS = {"v1": 35, "v2": 52}
NO_STATUS = {"cudnnGetVersion", "cudnnGetErrorString"}

# Values of the two headers' enumerations, in order from 0 (aliases joined by =).
BOTH = """
STATUS_SUCCESS STATUS_NOT_INITIALIZED STATUS_ALLOC_FAILED STATUS_BAD_PARAM STATUS_INTERNAL_ERROR
    STATUS_INVALID_VALUE STATUS_ARCH_MISMATCH STATUS_MAPPING_ERROR STATUS_EXECUTION_FAILED
    STATUS_NOT_SUPPORTED STATUS_LICENSE_ERROR
DATA_FLOAT DATA_DOUBLE
TENSOR_NCHW TENSOR_NHWC
ADD_IMAGE=ADD_SAME_HW ADD_FEATURE_MAP=ADD_SAME_CHW ADD_SAME_C ADD_FULL_TENSOR
CONVOLUTION CROSS_CORRELATION
SOFTMAX_FAST SOFTMAX_ACCURATE
SOFTMAX_MODE_INSTANCE SOFTMAX_MODE_CHANNEL
ACTIVATION_SIGMOID ACTIVATION_RELU ACTIVATION_TANH
"""
ENUMERATIONS = {
    "v1": BOTH
    + """
POOLING_MAX POOLING_AVERAGE
CONVOLUTION_FWD CONVOLUTION_WEIGHT_GRAD CONVOLUTION_DATA_GRAD
RESULT_ACCUMULATE RESULT_NO_ACCUMULATE
""",
    "v2": BOTH
    + """
POOLING_MAX POOLING_AVERAGE_COUNT_INCLUDE_PADDING POOLING_AVERAGE_COUNT_EXCLUDE_PADDING
CONVOLUTION_FWD_NO_WORKSPACE CONVOLUTION_FWD_PREFER_FASTEST
    CONVOLUTION_FWD_SPECIFY_WORKSPACE_LIMIT
CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM
    CONVOLUTION_FWD_ALGO_GEMM CONVOLUTION_FWD_ALGO_DIRECT
""",
}


def unfolded(text: str) -> list[str]:
    """Lines with their indented continuations."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(" ") and lines:
            lines[-1] += line
        elif line and not line.startswith("#"):
            lines.append(line)
    return lines


def table() -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = {}
    for line in unfolded(TABLE.read_text(encoding="utf-8")):
        if line.startswith("["):
            functions = found.setdefault(line.strip("[]"), {})
            continue
        name, _, arguments = line.partition(":")
        functions[name] = arguments.split()
    return found


FUNCTIONS = [
    pytest.param(version, name, arguments, id=f"{version}-{name}")
    for version, functions in table().items()
    for name, arguments in functions.items()
]


@pytest.mark.parametrize("version", MODULES)
def test_all_are_there_and_no_others(version):
    wanted = set(table()[version])
    public = {n for n in dir(MODULES[version]) if n.startswith("cudnn")}
    functions = {n for n in public if inspect.isfunction(getattr(MODULES[version], n))}
    assert len(wanted) == COUNTS[version]
    assert functions - {"cudnnCheckStatus"} == wanted | {
        f"{name}_status" for name in wanted - NO_STATUS
    }
    assert {n for n in dir(MODULES[version].library) if n.startswith("cudnn")} == wanted
    assert set(MODULES[version].__all__) >= functions


@pytest.mark.parametrize(("version", "name", "arguments"), FUNCTIONS)
def test_signature(version, name, arguments):
    results = tuple(a.rstrip("*") for a in arguments if a.endswith("*"))
    names = [a.rstrip("*") for a in arguments]
    function = getattr(MODULES[version], name)
    shown = inspect.signature(function).parameters.values()
    in_order = [p for p in shown if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in in_order] == names
    assert tuple(p.name for p in in_order if p.default is not p.empty) == results
    assert function.__doc__ and "bedstone: " in function.__doc__
    if name not in NO_STATUS:
        form = getattr(MODULES[version], f"{name}_status")
        assert list(inspect.signature(form).parameters)[: len(names)] == names
        assert getattr(MODULES[version].library, name) is form


@pytest.mark.parametrize(("version", "name", "arguments"), FUNCTIONS)
def test_a_wrong_number_of_arguments_is_a_type_error(version, name, arguments):
    with pytest.raises(TypeError):
        getattr(MODULES[version], name)(*[None] * (len(arguments) + 1))
    with pytest.raises(TypeError):
        getattr(MODULES[version].library, name)(*[None] * (len(arguments) + 1))


@pytest.mark.parametrize(("version", "name", "arguments"), FUNCTIONS)
def test_nothing_but_null_gives_a_status(version, name, arguments):
    """In the C convention no call raises, and NULL for everything is a bad parameter."""
    if name in NO_STATUS:
        return
    status = getattr(MODULES[version].library, name)(*[None] * len(arguments))
    assert status == MODULES[version].CUDNN_STATUS_BAD_PARAM


@pytest.mark.parametrize("version", MODULES)
def test_enumerants(version):
    module = MODULES[version]
    wanted = {}
    for line in unfolded(ENUMERATIONS[version]):
        for value, names in enumerate(line.split()):
            wanted |= {f"CUDNN_{name}": value for name in names.split("=")}
    constants = {n: v for n, v in vars(module).items() if n.startswith("CUDNN_")}
    constants.pop("CUDNN_VERSION", None)
    assert constants == wanted
    for kind in module.ENUMERATIONS:
        assert getattr(module, f"{kind.__name__}_t".replace("V1", "").replace("V2", "")) is kind


def test_enumerations_read_like_a_dictionary():
    assert cudnn_v2.cudnnDataType["CUDNN_DATA_DOUBLE"] == 1
    assert cudnn_v1.cudnnPoolingMode["CUDNN_POOLING_AVERAGE"] == 1


def test_version_and_error_strings():
    assert cudnn_v2.cudnnGetVersion() == cudnn_v2.library.cudnnGetVersion() == 2000
    assert cudnn_v2.cudnnGetErrorString(9) == "CUDNN_STATUS_NOT_SUPPORTED"
    assert cudnn_v2.cudnnGetErrorString(cudnn_v2.CUDNN_STATUS_SUCCESS) == "CUDNN_STATUS_SUCCESS"
    assert cudnn_v2.library.cudnnGetErrorString(ctypes.c_int(3)) == b"CUDNN_STATUS_BAD_PARAM"
    assert cudnn_v2.cudnnGetErrorString(99) == "unknown status"


def test_check_status():
    cudnn_v2.cudnnCheckStatus(0)
    with pytest.raises(cudnn_v2.cudnnError, match="MAPPING_ERROR") as caught:
        cudnn_v2.cudnnCheckStatus(7)
    assert caught.value.status == 7
