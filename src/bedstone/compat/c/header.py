"""bedstone.h: the tables of the interface, and what they mean, as C declarations."""

from __future__ import annotations

import textwrap
from types import ModuleType
from typing import Any

from bedstone.version import __version__

WIDTH = 92

OPENING = f"""\
bedstone {__version__}: open deep-learning primitives for the CPU.

Tensors are described by plain structs that the caller owns; data pointers are the addresses of
element [0, ..., 0]. Dimensions are in logical order N, C, spatial (outermost first; filters: K,
C/groups, spatial) whatever the memory order; strides count elements and may be anything: zero and
overlapping in inputs, negative, permuted (NHWC), with gaps. In an output each stride must step over
all that the smaller ones reach. All tensors of a call have one dtype.

Every operation computes y = alpha * op(x) + beta * y; with beta 0, y is not read. alpha and beta
are doubles for both dtypes. NaN and infinities pass through as IEEE says. Results do not depend
on the number of threads, and are the same bit by bit in every run.

Every function checks its arguments and returns a bs_status; when it fails it has written
nothing. The library allocates no memory but the stacks of its worker threads. `threads` is
how many threads a call may use, 0 for the number of bs_set_num_threads. Functions may be
called from several threads at once: the first takes the library's worker threads, the
others run on their own. They may be called after a fork. There is no other state.
"""

STRUCTS = {
    "bs_tensor": "A tensor: dims and strides (in elements) of its first `rank` axes.",
    "bs_convolution": (
        "A convolution. padding (low and high side, >= 0), stride (>= 1) and dilation (>= 1, 1 "
        "for none) of each spatial axis, in the tensors' order: the first rank - 2 entries are "
        "read. C and K are divisible by groups (>= 1). In mode convolution the filter is "
        "flipped."
    ),
    "bs_pooling": (
        "Pooling: window, padding (low, high), stride and dilation of each spatial axis, as in "
        "bs_convolution. An average divides by the taps that lie on the input or its padding, "
        "or, excluding it, by those on the input. A window without input gives -infinity (max) "
        "or 0."
    ),
    "bs_activation": (
        "An activation with its coefficients, which kinds without any ignore: see "
        "bs_activation_kind."
    ),
}

ENUMS = {
    "bs_dtype": "Types of elements.",
    "bs_direction": "Directions of a convolution that need a workspace.",
    "bs_convolution_mode": "Whether the filter is flipped; networks use cross_correlation.",
    "bs_pooling_mode": "What pooling takes of a window.",
    "bs_rounding": "How the number of windows is rounded.",
    "bs_softmax_algorithm": (
        "fast: exp(x) / sum, overflows where exp(x) does. accurate: scaled by the maximum. log:"
        " the logarithm of accurate."
    ),
    "bs_softmax_axes": (
        "What is normalised: channel, the C values of each position; instance, everything of an"
        " image."
    ),
    "bs_activation_kind": (
        "relu max(x, 0); leaky_relu x or alpha x; clipped_relu min(max(x, 0), alpha); clip "
        "min(max(x, alpha), beta); elu x or alpha (e^x - 1); sigmoid; tanh; hard_sigmoid "
        "min(max(alpha x + beta, 0), 1); hard_swish x hard_sigmoid(x); silu x sigmoid(x); gelu "
        "x/2 (1 + erf(x/sqrt 2)); gelu_tanh, its approximation by tanh; softplus log(1 + e^x)."
    ),
}

FUNCTIONS = {
    "bs_version": 'The version of the library, such as "1.2.3".',
    "bs_status_string": "A sentence for a status; never null.",
    "bs_set_num_threads": (
        "How many threads a call with threads = 0 may use, 1 to BS_MAX_THREADS; 0 for as many "
        "as the process has processors. Errors: bad_threads."
    ),
    "bs_get_num_threads": "How many threads a call with threads = 0 may use.",
    "bs_tensor_init": (
        "Fill in a descriptor of `rank` (1 to BS_MAX_RANK) dims; strides in elements, or null "
        "for row-major ones. Errors: null_pointer, bad_dtype, bad_rank, bad_dims, bad_strides."
    ),
    "bs_convolution_output_dims": (
        "The dims of y for images x (N, C, spatial) and filters w (K, C/groups, spatial), 1 to "
        "3 spatial axes, written to dims[0] ... dims[rank - 1]. Spatial: (size + padding - "
        "((window - 1) * dilation + 1)) / stride + 1, rounded down. Errors: bad_window where a "
        "window is larger than the padded image, mismatch for channels that do not fit the "
        "groups, those of tensors."
    ),
    "bs_convolution_workspace_size": (
        "Bytes of workspace for a direction with so many threads. x, w and y are the image-, "
        "filter- and output-shaped tensors in every direction (dx, dw and dy where these are "
        "meant). The size holds for these very descriptors, strides included. Errors: as the "
        "direction itself, and bad_enum."
    ),
    "bs_convolution_forward": (
        "y = alpha * conv(x, w) + beta * y + bias. x (N, C, spatial), w (K, C/groups, spatial),"
        " y (N, K, spatial) with the dims of bs_convolution_output_dims; bias_data: K packed "
        "elements, or null for none. Errors: null_pointer, bad_dtype, bad_rank (3 to 5), "
        "bad_dims, bad_strides, mismatch, bad_window, bad_enum, bad_threads, small_workspace."
    ),
    "bs_convolution_backward_data": (
        "dx = alpha * (gradient of x by w and dy) + beta * dx. Shapes and errors as for "
        "forward: w as w, dy as y, dx as x."
    ),
    "bs_convolution_backward_filter": (
        "dw = alpha * (sum over images and pixels of dy * x) + beta * dw. Shapes and errors as "
        "for forward: x as x, dy as y, dw as w."
    ),
    "bs_convolution_backward_bias": (
        "dbias[k] = alpha * (sum over images and pixels of dy[n, k, ...]) + beta * dbias[k]. dy"
        " of rank 2 to 5, dbias of rank 1 with K elements. Errors: null_pointer, bad_dtype, "
        "bad_rank, bad_dims, bad_strides, mismatch, bad_threads."
    ),
    "bs_pooling_output_dims": (
        "The dims of y for images x (N, C, spatial), rounded down or up; rounded up, windows "
        "that would start beyond the input and its low padding are left out. Errors: bad_window"
        " where no window fits, bad_enum, those of tensors."
    ),
    "bs_pooling_forward": (
        "y = alpha * pool(x) + beta * y. x (N, C, spatial), y (N, C, windows): the number of "
        "windows is y's own, up to that of rounding up. A maximum of NaN is NaN. Errors: "
        "null_pointer, bad_dtype, bad_rank (3 to 5), bad_dims, bad_strides, mismatch, "
        "bad_window, bad_enum, bad_threads."
    ),
    "bs_pooling_backward": (
        "dx = alpha * (gradient of x by dy) + beta * dx. The gradient of a maximum goes to the "
        "first one in row-major order of its window, found again in x, the forward input; "
        "averages do not read x: it may be null. Shapes and errors as for forward."
    ),
    "bs_softmax_forward": (
        "y = alpha * softmax(x) + beta * y, by `algorithm` over `axes`. x and y: equal dims (N,"
        " C, ...), rank 2 or more; y may be x. Errors: null_pointer, bad_dtype, bad_rank, "
        "bad_dims, bad_strides, mismatch, bad_enum, bad_threads."
    ),
    "bs_softmax_backward": (
        "dx = alpha * (gradient by y and dy) + beta * dx; y is the forward result of the same "
        "algorithm. dx may be dy or y. Shapes and errors as for forward."
    ),
    "bs_activation_forward": (
        "y = alpha * f(x) + beta * y for tensors of equal dims, rank 1 to BS_MAX_RANK; y may be"
        " x. Errors: null_pointer, bad_dtype, bad_rank, bad_dims, bad_strides, mismatch, "
        "bad_enum, bad_coefficient, bad_threads."
    ),
    "bs_activation_backward": (
        "dx = alpha * dy * f' + beta * dx. `saved` is the forward's y; for hard_swish, silu, "
        "gelu and gelu_tanh its x. dx may be dy or saved. Errors as for forward."
    ),
    "bs_tensor_transform": (
        "y = alpha * x + beta * y for tensors of equal dims and any strides. Errors: "
        "null_pointer, bad_dtype, bad_rank, bad_dims, bad_strides, mismatch, bad_threads."
    ),
    "bs_tensor_add": (
        "y = alpha * b + beta * y, b repeated along its dims of size 1. Errors as for "
        "bs_tensor_transform."
    ),
    "bs_tensor_set": "y = alpha + beta * y. Errors as for bs_tensor_transform.",
    "bs_tensor_scale": "y = alpha * y. Errors as for bs_tensor_transform.",
}


def header(interface: ModuleType) -> str:
    """The text of bedstone.h for the tables of an interface."""
    parts = [_comment(OPENING, wrap=False), _GUARD, _status(interface)]
    parts += [_enum(name, names) for name, names in interface.ENUMS.items()]
    parts += [_struct(name, fields) for name, fields in interface.STRUCTS.items()]
    parts += [
        _comment(FUNCTIONS[name]) + _declaration(name, *function)
        for name, function in interface.FUNCTIONS.items()
    ]
    limits = (
        f"#define BS_MAX_RANK {interface.MAX_RANK}\n#define BS_MAX_AXES {interface.MAX_AXES}\n"
        f"#define BS_MAX_THREADS {interface.MAX_THREADS}\n"
    )
    parts.insert(2, limits)
    return "\n".join([*parts, _END])


_GUARD = """\
#ifndef BEDSTONE_H
#define BEDSTONE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
"""
_END = """\
#ifdef __cplusplus
}
#endif

#endif
"""


def _comment(text: str, wrap: bool = True) -> str:
    lines = textwrap.wrap(text, WIDTH) if wrap else text.strip().splitlines()
    return "/* " + "\n   ".join(lines).replace("\n   \n", "\n\n") + " */\n"


# Enumeration -> what the names of its values begin with.
PREFIXES = {
    "bs_dtype": "BS",
    "bs_direction": "BS",
    "bs_convolution_mode": "BS",
    "bs_pooling_mode": "BS_POOLING",
    "bs_rounding": "BS_ROUND",
    "bs_softmax_algorithm": "BS_SOFTMAX",
    "bs_softmax_axes": "BS_SOFTMAX",
    "bs_activation_kind": "BS_ACTIVATION",
}


def constant(enum: str, name: str) -> str:
    """The C name of a value of an enumeration: ("bs_dtype", "float32") -> BS_FLOAT32."""
    return f"{PREFIXES[enum]}_{name}".upper()


def status_constant(name: str) -> str:
    """The C name of a status: "bad_rank" -> BS_BAD_RANK."""
    return f"BS_{name}".upper()


def _values(lines: list[tuple[str, str]], name: str) -> str:
    rows = [
        f"    {constant} = {value}," + (f" /* {note} */" if note else "")
        for value, (constant, note) in enumerate(lines)
    ]
    return "\n".join(["typedef enum {", *rows, f"}} {name};", ""])


def _status(interface: ModuleType) -> str:
    lines = [(status_constant(name), note) for name, note in interface.STATUSES.items()]
    return _comment("What every call returns.") + _values(lines, "bs_status")


def _enum(enum: str, names: tuple[str, ...]) -> str:
    return _comment(ENUMS[enum]) + _values([(constant(enum, n), "") for n in names], enum)


def _struct(name: str, fields: tuple[Any, ...]) -> str:
    rows = [
        f"    {f.ctype} {f.name}{''.join(f'[{n}]' for n in f.count)};"
        + (" /* a bs_" + f.name + " */" if f.name == "dtype" else "")
        for f in fields
    ]
    return _comment(STRUCTS[name]) + "\n".join(["typedef struct {", *rows, f"}} {name};", ""])


def _declaration(name: str, result: str, parameters: tuple[tuple[str, str], ...]) -> str:
    words = [f"{ctype} {parameter}" for ctype, parameter in parameters] or ["void"]
    words = [word.replace("* ", " *") for word in words]
    start = f"{result} {name}(".replace("* ", " *")
    lines = [start]
    for number, word in enumerate(words):
        word += ");" if number == len(words) - 1 else ","
        if len(lines[-1]) + len(word) + 1 > WIDTH:
            lines.append("   ")
        lines[-1] += word if lines[-1].endswith("(") else f" {word}"
    return "\n".join(lines) + "\n"
