"""The C interface as data: statuses, enumerations, structs and the parameters of every function.

The emitted entry points, the header and the tests read the same tables, so they cannot differ.
"""

from __future__ import annotations

from dataclasses import dataclass

from bedstone.spec.activation import KINDS

# name -> the sentence that bs_status_string gives; the value is the place in the table.
STATUSES = {
    "success": "no error",
    "null_pointer": "a pointer that the call needs is null",
    "bad_dtype": "the dtype is none of bs_dtype, or not that of the other tensors",
    "bad_rank": "the rank is outside what the function takes, or not that of the other tensors",
    "bad_dims": "a dimension is negative, or too large for 64-bit offsets",
    "bad_strides": "the strides are too large for 64-bit offsets, or elements of a tensor that is "
    "written share memory",
    "mismatch": "the dimensions of the tensors do not fit together",
    "bad_window": "a window, stride, dilation, padding or number of groups is out of range",
    "bad_enum": "a mode, kind, direction or algorithm is none of its enumeration",
    "bad_coefficient": "a coefficient of the activation is out of range",
    "bad_threads": "the number of threads is negative or above BS_MAX_THREADS",
    "small_workspace": "the workspace is null or smaller than the size that was asked for",
}
STATUS = {name: value for value, name in enumerate(STATUSES)}

DTYPES = ("float32", "float64")
MAX_RANK = 8
MAX_AXES = 3
MAX_THREADS = 256

ENUMS = {
    "bs_dtype": DTYPES,
    "bs_direction": ("forward", "backward_data", "backward_filter"),
    "bs_convolution_mode": ("cross_correlation", "convolution"),
    "bs_pooling_mode": ("max", "average_include_padding", "average_exclude_padding"),
    "bs_rounding": ("floor", "ceil"),
    "bs_softmax_algorithm": ("fast", "accurate", "log"),
    "bs_softmax_axes": ("channel", "instance"),
    "bs_activation_kind": tuple(KINDS),
}


@dataclass(frozen=True)
class Field:
    """A member of a struct: `count` values of a C type."""

    name: str
    ctype: str
    count: tuple[int, ...] = ()

    @property
    def values(self) -> int:
        total = 1
        for n in self.count:
            total *= n
        return total


SIZES = {"int32_t": 4, "int64_t": 8, "double": 8}

# Members of 8 bytes come first: nothing is left to alignment.
STRUCTS = {
    "bs_tensor": (
        Field("dims", "int64_t", (MAX_RANK,)),
        Field("strides", "int64_t", (MAX_RANK,)),
        Field("dtype", "int32_t"),
        Field("rank", "int32_t"),
    ),
    "bs_convolution": (
        Field("padding", "int64_t", (MAX_AXES, 2)),
        Field("stride", "int64_t", (MAX_AXES,)),
        Field("dilation", "int64_t", (MAX_AXES,)),
        Field("groups", "int64_t"),
        Field("mode", "int32_t"),
    ),
    "bs_pooling": (
        Field("window", "int64_t", (MAX_AXES,)),
        Field("padding", "int64_t", (MAX_AXES, 2)),
        Field("stride", "int64_t", (MAX_AXES,)),
        Field("dilation", "int64_t", (MAX_AXES,)),
        Field("mode", "int32_t"),
    ),
    "bs_activation": (
        Field("alpha", "double"),
        Field("beta", "double"),
        Field("kind", "int32_t"),
    ),
}


def offset_of(struct: str, field: str) -> int:
    """Bytes from the struct's start to a member."""
    at = 0
    for member in STRUCTS[struct]:
        if member.name == field:
            return at
        at += member.values * SIZES[member.ctype]
    raise KeyError(field)


def _parameters(text: str) -> tuple[tuple[str, str], ...]:
    """ "type name, type name" as (type, name) pairs."""
    words = [part.strip() for part in text.split(",")]
    return tuple((part.rpartition(" ")[0], part.rpartition(" ")[2]) for part in words)


_IN = "const bs_tensor* {0}, const void* {0}_data"
_OUT = "const bs_tensor* {0}, void* {0}_data"


def _call(first: str, inputs: str, output: str, workspace: bool = False) -> tuple:
    """[descriptor,] alpha, inputs, beta, output, [workspace,] threads."""
    parts = [first] if first else []
    parts.append("double alpha")
    parts += [word if " " in word else _IN.format(word) for word in inputs.split(";") if word]
    parts += ["double beta", _OUT.format(output)]
    if workspace:
        parts += ["void* workspace", "size_t workspace_bytes"]
    return _parameters(", ".join([*parts, "int32_t threads"]))


# name -> (result, parameters); in the header's order.
FUNCTIONS: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "bs_version": ("const char*", ()),
    "bs_status_string": ("const char*", _parameters("int32_t status")),
    "bs_set_num_threads": ("bs_status", _parameters("int32_t threads")),
    "bs_get_num_threads": ("int32_t", ()),
    "bs_tensor_init": (
        "bs_status",
        _parameters(
            "bs_tensor* tensor, int32_t dtype, int32_t rank, const int64_t* dims, "
            "const int64_t* strides"
        ),
    ),
    "bs_convolution_output_dims": (
        "bs_status",
        _parameters(
            "const bs_convolution* convolution, const bs_tensor* x, const bs_tensor* w, "
            "int64_t* dims"
        ),
    ),
    "bs_convolution_workspace_size": (
        "bs_status",
        _parameters(
            "int32_t direction, const bs_convolution* convolution, const bs_tensor* x, "
            "const bs_tensor* w, const bs_tensor* y, int32_t threads, size_t* bytes"
        ),
    ),
    "bs_convolution_forward": (
        "bs_status",
        _call("const bs_convolution* convolution", "x;w;const void* bias_data", "y", True),
    ),
    "bs_convolution_backward_data": (
        "bs_status", _call("const bs_convolution* convolution", "w;dy", "dx", True),
    ),
    "bs_convolution_backward_filter": (
        "bs_status", _call("const bs_convolution* convolution", "x;dy", "dw", True),
    ),
    "bs_convolution_backward_bias": ("bs_status", _call("", "dy", "dbias")),
    "bs_pooling_output_dims": (
        "bs_status",
        _parameters(
            "const bs_pooling* pooling, const bs_tensor* x, int32_t rounding, int64_t* dims"
        ),
    ),
    "bs_pooling_forward": ("bs_status", _call("const bs_pooling* pooling", "x", "y")),
    "bs_pooling_backward": ("bs_status", _call("const bs_pooling* pooling", "x;dy", "dx")),
    "bs_softmax_forward": ("bs_status", _call("int32_t algorithm, int32_t axes", "x", "y")),
    "bs_softmax_backward": ("bs_status", _call("int32_t algorithm, int32_t axes", "y;dy", "dx")),
    "bs_activation_forward": ("bs_status", _call("const bs_activation* activation", "x", "y")),
    "bs_activation_backward": (
        "bs_status", _call("const bs_activation* activation", "saved;dy", "dx"),
    ),
    "bs_tensor_transform": ("bs_status", _call("", "x", "y")),
    "bs_tensor_add": ("bs_status", _call("", "b", "y")),
    "bs_tensor_set": ("bs_status", _call("", "", "y")),
    "bs_tensor_scale": (
        "bs_status", _parameters("double alpha, const bs_tensor* y, void* y_data, int32_t threads"),
    ),
}  # fmt: skip
