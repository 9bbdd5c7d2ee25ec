"""What runs where: calls of PyTorch, each made once inside `enable()`, and what `report()` says.

    python -m bedstone.frameworks.torch.coverage

prints the table that docs/pytorch.md has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bedstone.frameworks.torch.patch import enable
from bedstone.frameworks.torch.report import report, reset

F = torch.nn.functional
PYTORCH = "PyTorch"
IMAGE = (2, 4, 6, 6)


@dataclass(frozen=True)
class Case:
    """A call: its name, the table's words for its arguments, the shapes of its operands."""

    name: str
    words: str
    call: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...] = (IMAGE,)
    dtype: torch.dtype = torch.float32
    format: torch.memory_format = torch.contiguous_format

    def operands(self) -> list[torch.Tensor]:
        """What the call is made with, the gradient of each being wanted."""
        made = [torch.ones(shape, dtype=self.dtype) for shape in self.shapes]
        formats = [self.format if t.dim() == 4 else torch.contiguous_format for t in made]
        return [t.to(memory_format=f).requires_grad_() for t, f in zip(made, formats)]


def _convolutions() -> Iterator[Case]:
    def case(words: str, x: Any = IMAGE, w: Any = (6, 4, 3, 3), more: Any = (), **how: Any) -> Case:
        name = f"conv{'_transpose' * how.pop('transposed', False)}{len(x) - 2}d"
        made = {k: how.pop(k) for k in ("dtype", "format") if k in how}
        convolve = getattr(F, name)
        return Case(name, words, lambda *a: convolve(*a, **how), (x, w, *more), **made)

    yield case("", (2, 4, 9), (6, 4, 3))
    yield case("")
    yield case("", (1, 2, 4, 4, 4), (3, 2, 2, 2, 2))
    yield case("`bias`", more=((6,),))
    yield case("`stride`, `padding`, `dilation`", stride=(2, 1), padding=1, dilation=(1, 2))
    yield case("`padding` by name", padding="same")
    yield case("`groups`", w=(4, 1, 3, 3), groups=4)
    yield case("channels_last", format=torch.channels_last)
    yield Case("conv2d", "no batch", F.conv2d, (IMAGE[1:], (6, 4, 3, 3)))
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.complex64):
        yield case(_name(dtype), dtype=dtype)
    yield case("an empty batch", (0, *IMAGE[1:]))
    yield case("", (2, 4, 9), (4, 6, 3), transposed=True)
    yield case("`stride`, `output_padding`, `groups`", w=(4, 3, 3, 3), transposed=True, stride=2,
               output_padding=1, groups=2)  # fmt: skip
    yield case("", (1, 2, 4, 4, 4), (2, 3, 2, 2, 2), transposed=True)


def _pools() -> Iterator[Case]:
    for name in ("max_pool", "avg_pool"):
        for axes in (1, 2, 3):
            pool = functools.partial(getattr(F, f"{name}{axes}d"), kernel_size=2)
            yield Case(f"{name}{axes}d", "", pool, ((2, 4, *(6,) * axes),))
    window = {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}

    def case(name: str, words: str, **how: Any) -> Case:
        return Case(name, words, lambda x: getattr(F, name)(x, **how))

    yield case("max_pool2d", "`stride`, `padding`, `ceil_mode`, `dilation`", **window, dilation=2)
    yield Case(
        "max_pool2d", "`return_indices`", lambda x: F.max_pool2d(x, 2, return_indices=True)[0]
    )
    yield case("avg_pool2d", "`stride`, `padding`, `ceil_mode`", **window)
    yield case("avg_pool2d", "`count_include_pad=False`", **window, count_include_pad=False)
    yield case("avg_pool2d", "`divisor_override`", kernel_size=2, divisor_override=3)
    for axes in (1, 2, 3):
        pool = functools.partial(getattr(F, f"adaptive_avg_pool{axes}d"), output_size=2)
        yield Case(f"adaptive_avg_pool{axes}d", "even windows", pool, ((2, 4, *(6,) * axes),))
    yield case("adaptive_avg_pool2d", "uneven windows", output_size=4)
    yield case("adaptive_max_pool2d", "", output_size=2)


def _pointwise() -> Iterator[Case]:
    def case(name: str, words: str = "", **how: Any) -> Case:
        return Case(name, words, lambda x: getattr(F, name)(x, **how))

    for name in ("softmax", "log_softmax"):
        yield case(name, dim=1)
    for name in ("relu", "relu6", "hardtanh", "sigmoid", "tanh", "elu", "silu", "hardswish",
                 "leaky_relu"):  # fmt: skip
        yield case(name)
    yield Case("relu", "`inplace`", lambda x: F.relu(x * 1, inplace=True))
    yield case("gelu")
    yield case("gelu", '`approximate="tanh"`', approximate="tanh")
    yield Case("elu", "`inplace`", lambda x: F.elu(x * 1, inplace=True))
    for name in ("selu", "celu", "mish", "softplus", "hardsigmoid"):
        yield case(name)


def _normalizations() -> Iterator[Case]:
    affine = (IMAGE, (4,), (4,))
    mean, variance = torch.zeros(4), torch.ones(4)

    def batch(words: str, shapes: Any = affine, dtype: Any = torch.float32, **how: Any) -> Case:
        def call(x: Any, w: Any = None, b: Any = None) -> Any:
            return F.batch_norm(x, mean.clone(), variance.clone(), w, b, **how)

        return Case("batch_norm", words, call, shapes, dtype)

    yield batch("`training=True`", training=True)
    yield batch("`training=True`, no weight", (IMAGE,), training=True)
    yield batch("`training=False`")
    yield Case("layer_norm", "", lambda x, w, b: F.layer_norm(x, (6,), w, b), (IMAGE, (6,), (6,)))
    yield Case("layer_norm", "of whole images", lambda x: F.layer_norm(x, IMAGE[1:]))
    yield Case("layer_norm", "bfloat16", lambda x, w, b: F.layer_norm(x, (6,), w, b),
               (IMAGE, (6,), (6,)), torch.bfloat16)  # fmt: skip
    yield Case("group_norm", "", lambda x, w, b: F.group_norm(x, 2, w, b), affine)
    yield Case("instance_norm", "", lambda x: F.instance_norm(x))
    yield Case("rms_norm", "", lambda x: F.rms_norm(x, (6,)))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cases() -> list[Case]:
    """Every row of the table."""
    return [*_convolutions(), *_pools(), *_pointwise(), *_normalizations()]


def where(case: Case) -> tuple[str, str]:
    """Where the call and its gradient run: "bedstone", or "PyTorch" and the reason."""
    with enable(least=0, find=False, compile_after=1):
        reset()
        y = case.call(*case.operands())
        call = _side()
        reset()
        y.abs().sum().backward()
        gradient = _side()
        reset()
    return call, gradient


def _side() -> str:
    """What the report says of the calls since the last reset."""
    rows = report().rows
    if rows and all(row.own for row in rows):
        return "bedstone"
    reasons = [row.what for row in rows if not row.own]
    return f"{PYTORCH}: {reasons[0]}" if reasons else PYTORCH


@functools.cache
def coverage_table() -> str:
    """The table, in Markdown."""
    rows = ["| `torch.nn.functional` | with | runs on | its gradient |", "|---|---|---|---|"]
    for case in cases():
        call, gradient = where(case)
        rows.append(f"| `{case.name}` | {case.words} | {call} | {gradient} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(coverage_table())
