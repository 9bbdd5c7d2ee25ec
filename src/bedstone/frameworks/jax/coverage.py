"""What runs where: calls of JAX, each traced inside `enable()`, and what `report()` says of it.

    python -m bedstone.frameworks.jax.coverage

prints the table that docs/jax.md has. A gradient runs on bedstone if the program that is lowered
from it calls bedstone's kernels, and none of JAX's convolutions or windows.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bedstone.frameworks.jax.patch import enable, operators
from bedstone.frameworks.jax.report import report, reset

OURS = re.compile(r"custom_call @bedstone_(cpu|cuda)_[0-9a-f]{24}\b")
JAXS = re.compile(r"stablehlo\.(convolution|reduce_window|select_and_scatter)\b")


@dataclass(frozen=True)
class Case:
    """A call: the function, the table's words for its arguments, the shapes of its operands."""

    operator: str
    words: str
    call: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str = "float32"

    def operands(self) -> list[Any]:
        """What the call is traced with."""
        return [jax.ShapeDtypeStruct(shape, self.dtype) for shape in self.shapes]


IMAGE, FILTERS = (2, 4, 9, 8), (6, 4, 3, 3)
LAST = ("NHWC", "HWIO", "NHWC")


def _convolutions() -> Iterator[Case]:
    def case(words: str, *shapes: Any, dtype: str = "float32", **how: Any) -> Case:
        if not shapes:
            shapes = (IMAGE, FILTERS)
        how = {"window_strides": (1,) * (len(shapes[0]) - 2), "padding": "SAME", **how}
        # (looked up at the call: inside `enable()` it is another)
        return Case(
            "conv_general_dilated", words, lambda x, w: lax.conv_general_dilated(x, w, **how),
            shapes, dtype,
        )  # fmt: skip

    yield case("2 spatial axes, `padding` by name or 0 and more, `window_strides`",
               window_strides=(2, 1), padding=((1, 1), (0, 2)))  # fmt: skip
    yield case("1 spatial axis", (2, 4, 9), (6, 4, 3))
    yield case("3 spatial axes", (2, 4, 5, 6, 7), (6, 4, 3, 3, 3))
    yield case("4 spatial axes", (1, 2, 3, 3, 3, 3), (2, 2, 2, 2, 2, 2))
    yield case("`dimension_numbers`, in any order", (2, 9, 8, 4), (3, 3, 4, 6),
               dimension_numbers=LAST)  # fmt: skip
    yield case("`rhs_dilation`", rhs_dilation=(2, 1))
    yield case("`feature_group_count`", IMAGE, (6, 2, 3, 3), feature_group_count=2)
    yield case("`lhs_dilation`, no strides (`conv_transpose`)", lhs_dilation=(2, 2),
               padding=((1, 2), (1, 2)))  # fmt: skip
    yield case("`lhs_dilation` and strides", lhs_dilation=(2, 2), window_strides=(2, 2),
               padding=((1, 2), (1, 2)))  # fmt: skip
    yield case("negative padding", padding=((-1, 0), (0, 0)))
    yield case("`batch_group_count`", batch_group_count=2)
    yield case("`precision`, of `lax.Precision`", precision=lax.Precision.HIGHEST)
    yield case("`precision`, of `lax.DotAlgorithmPreset`",
               precision=lax.DotAlgorithmPreset.BF16_BF16_F32)  # fmt: skip
    yield case("`preferred_element_type` of another type", dtype="bfloat16",
               preferred_element_type="float32")  # fmt: skip
    yield from _types(case)
    yield case("an empty batch", (0, *IMAGE[1:]), FILTERS)


def _types(case: Callable[..., Case]) -> Iterator[Case]:
    for dtype in ("float64", "float16", "bfloat16", "int32", "complex64"):
        yield case(dtype, dtype=dtype)


def _windows() -> Iterator[Case]:
    def case(
        words: str, shape: Any = IMAGE, op: Any = "add", init: float = 0.0,
        window: Any = (1, 1, 3, 2), stride: Any = None, dtype: str = "float32", **how: Any,
    ) -> Case:  # fmt: skip
        operation = getattr(lax, op)
        how = {"padding": "SAME", **how}
        start = int(init) if dtype == "int32" else init

        def call(x: Any) -> Any:
            return lax.reduce_window(x, start, operation, window, stride or window, **how)

        return Case("reduce_window", words, call, (shape,), dtype)

    yield case("`lax.max` from -inf", op="max", init=-float("inf"))
    yield case("`lax.add` from 0")
    yield case("windows along 1 axis", window=(1, 1, 1, 3))
    yield case("windows along 3 axes", (2, 5, 6, 7, 3), window=(1, 2, 3, 2, 1))
    yield case("windows along 4 axes", (4, 4, 4, 4), window=(2, 2, 2, 2))
    yield case("windows along axes 1 and 3 alone", window=(1, 2, 1, 2))
    yield case("`window_dilation`", window_dilation=(1, 1, 2, 1), stride=(1, 1, 1, 1))
    yield case("`base_dilation`", base_dilation=(1, 1, 2, 1))
    yield case("negative padding", padding=((0, 0), (0, 0), (-1, 0), (0, 0)))
    yield case("another computation", op="mul", init=1.0)
    yield case("another initial value", init=1.0)
    yield from _types(case)


def _pointwise() -> Iterator[Case]:
    def case(name: str, words: str = "", function: Any = None, **how: Any) -> Case:
        def call(x: Any) -> Any:
            return getattr(jnp if name == "tanh" else jax.nn, name)(x, **how)

        return Case(name, words, function or call, ((3, 4, 5),))

    for name in ("softmax", "log_softmax"):
        yield case(name, "`axis`: one, or several next to each other", axis=(1, 2))
        yield case(name, "`axis`: several apart", axis=(0, 2))
        yield case(name, "`where`", where=jnp.ones((3, 4, 5), bool))
    for name in operators():
        if name not in ("conv_general_dilated", "reduce_window", "softmax", "log_softmax"):
            yield case(name)
    yield case("gelu", "`approximate=False`", approximate=False)
    yield case("elu", "`alpha` that is an array", lambda x: jax.nn.elu(x, x))


def cases() -> list[Case]:
    """Every row of the table."""
    return [*_convolutions(), *_windows(), *_pointwise()]


def where(case: Case) -> tuple[str, str]:
    """Where the call and its gradient run: "bedstone" or "JAX: why"."""
    with jax.enable_x64(case.dtype == "float64"), enable(only=operators()):
        reset()
        jax.eval_shape(case.call, *case.operands())
        rows = report().rows
        reset()
        ours = any(row.own for row in rows)
        call = "bedstone" if ours else f"JAX: {rows[0].what}"
        return call, _gradient(case) if ours else "JAX"


def _gradient(case: Case) -> str:
    slopes = jax.grad(lambda *x: case.call(*x).astype("float32").sum(), range(len(case.shapes)))
    text = jax.jit(slopes).lower(*case.operands()).as_text()
    reset()
    return "bedstone" if OURS.search(text) and not JAXS.search(text) else "JAX"


@functools.cache
def coverage_table() -> str:
    """The table, in Markdown."""
    rows = ["| call | with | runs on | its gradient |", "|---|---|---|---|"]
    for case in cases():
        call, gradient = where(case)
        rows.append(f"| `{case.operator}` | {case.words} | {call} | {gradient} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(coverage_table())
