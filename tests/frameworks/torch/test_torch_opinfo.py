"""PyTorch's own operator database, patched against native: for every operator that bedstone takes,
its sample inputs give the same results, gradients and strides, its error inputs the same errors."""

from __future__ import annotations

import contextlib
import zlib

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest", reason="PyTorch's operator database needs expecttest")
bedstone_torch = pytest.importorskip("bedstone.frameworks.torch")
if not hasattr(bedstone_torch, "enable"):
    pytest.skip("bedstone.frameworks.torch has no patch", allow_module_level=True)
try:
    from torch.testing._internal.common_methods_invocations import op_db
except ImportError as error:
    pytest.skip(f"PyTorch's operator database: {error}", allow_module_level=True)

# Own kernels wherever they can be, from the first call on.
ALWAYS = {"least": 0, "find": False, "compile_after": 1}
CONVOLUTIONS = [
    f"nn.functional.{name}{axes}d" for name in ("conv", "conv_transpose") for axes in (1, 2, 3)
]
POOLS = [
    f"nn.functional.{name}{axes}d"
    for name in ("max_pool", "avg_pool", "adaptive_avg_pool")
    for axes in (1, 2, 3)
]
ROWS = ["softmax", "log_softmax"]
ACTIVATIONS = [
    "nn.functional.relu",
    "sigmoid",
    "tanh",
    "nn.functional.elu",
    "nn.functional.hardtanh",
    "nn.functional.relu6",
    "nn.functional.gelu",
    "nn.functional.silu",
    "nn.functional.hardswish",
    "nn.functional.leaky_relu",
]
NORMALISATIONS = [
    "nn.functional.batch_norm",
    "nn.functional.layer_norm",
    "nn.functional.group_norm",
    "nn.functional.instance_norm",
]
NAMES = CONVOLUTIONS + POOLS + ROWS + ACTIVATIONS + NORMALISATIONS
# Every operator runs in float32; in the others where their kernels are others.
DTYPES = {torch.float32: NAMES, torch.float64: NAMES, torch.bfloat16: NAMES}
# Of the largest result. bfloat16: each side rounds results of its own, PyTorch some sums too.
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2}
SMALLEST_SCALE = 5e-2  # a result far below the inputs is a sum that cancelled
# Of an operator, spread over the database's.
SAMPLES = {torch.float32: 12, torch.float64: 6, torch.bfloat16: 6}
OPERATORS = {
    op.name: op for op in op_db if op.name in NAMES and op.variant_test_name in ("", "cuda")
}


def _cases():
    for dtype, names in DTYPES.items():
        for name in names:
            yield pytest.param(name, dtype, id=f"{name}-{dtype}".replace("torch.", ""))


def _spread(items, count):
    """At most `count` of the items, evenly spaced."""
    items = list(items)
    step = max(1, -(-len(items) // count))
    return items[::step]


def _tensors(value):
    """The tensors in an operator's result, in order."""
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def _run(op, sample, seed):
    """(results, gradients) of an operator on a sample."""
    torch.manual_seed(seed)
    leaves = [t for t in _tensors((sample.input, sample.args, sample.kwargs)) if t.requires_grad]
    results = _tensors(op(sample.input, *sample.args, **sample.kwargs))
    results = [sample.output_process_fn_grad(r) for r in results]
    smooth = [r for r in results if r.requires_grad]
    if not smooth or not leaves:
        return results, []
    dys = [torch.randn_like(r) for r in smooth]
    gradients = torch.autograd.grad(smooth, leaves, dys, allow_unused=True)
    return results, [g for g in gradients if g is not None]


def _close(got, wanted, tolerance, what):
    assert got.shape == wanted.shape and got.dtype is wanted.dtype, what
    assert got.stride() == wanted.stride(), f"{what}: {got.stride()} is not {wanted.stride()}"
    if not wanted.is_floating_point():
        assert torch.equal(got, wanted), what
        return
    finite = wanted.detach()[torch.isfinite(wanted)]
    scale = max(float(finite.abs().max()) if finite.numel() else 0.0, SMALLEST_SCALE)
    torch.testing.assert_close(
        got, wanted, rtol=0, atol=tolerance * scale, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )


@pytest.mark.parametrize("name, dtype", list(_cases()))
def test_samples(name, dtype):
    op, seed = OPERATORS[name], zlib.crc32(name.encode())
    if dtype not in op.supported_dtypes("cpu"):
        pytest.skip(f"PyTorch has no {name} in {dtype} on the CPU")
    torch.manual_seed(seed)
    backward = dtype in op.supported_backward_dtypes("cpu")
    samples = _spread(op.sample_inputs("cpu", dtype, requires_grad=backward), SAMPLES[dtype])
    bedstone_torch.reset()
    for i, sample in enumerate(samples):
        running = [t.clone() for t in _tensors((sample.args, sample.kwargs))]
        native = _run(op, sample, seed)
        _restore(sample, running)
        with bedstone_torch.enable(**ALWAYS):
            patched = _run(op, sample, seed)
        _restore(sample, running)
        for kind, ours, theirs in zip(("result", "gradient"), patched, native):
            assert len(ours) == len(theirs)
            for j, (got, wanted) in enumerate(zip(ours, theirs)):
                _close(got, wanted, TOLERANCE[dtype], f"sample {i}, {kind} {j}, {sample}")
    # Left to PyTorch: uneven windows, which most samples have; statistics kept in bfloat16.
    left = "adaptive" in name or (dtype is torch.bfloat16 and name in NORMALISATIONS)
    if not left:
        assert bedstone_torch.report().own_calls > 0, (
            f"no kernel of ours ran\n{bedstone_torch.report()}"
        )


IN_PLACE = [
    name
    for name in ACTIVATIONS
    if name in OPERATORS and OPERATORS[name].inplace_variant is not None
]


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(name):
    op = OPERATORS[name]
    bedstone_torch.reset()
    for sample in op.sample_inputs("cpu", torch.float32, requires_grad=True):
        found = []
        for context in (contextlib.nullcontext(), bedstone_torch.enable(**ALWAYS)):
            x = sample.input.detach().clone().requires_grad_()
            with context:
                target = x * 1
                y = op.inplace_variant(target, *sample.args, **sample.kwargs)
                assert y is target
                y.square().sum().backward()
            found.append((y.detach(), x.grad))
        for got, wanted in zip(found[1], found[0]):
            _close(got, wanted, TOLERANCE[torch.float32], f"{sample}")
    assert bedstone_torch.report().own_calls > 0


def _restore(sample, tensors):
    """Buffers that the operator updates (running statistics) as they were."""
    for tensor, kept in zip(_tensors((sample.args, sample.kwargs)), tensors):
        with torch.no_grad():
            tensor.copy_(kept)


@pytest.mark.parametrize("name", [n for n in NAMES if n in OPERATORS])
def test_errors(name):
    op = OPERATORS[name]
    if op.error_inputs_func is None:
        pytest.skip("the database has no error inputs")
    for error in op.error_inputs("cpu"):
        sample = error.sample_input
        told = [_told(op, sample)]
        with bedstone_torch.enable(**ALWAYS):
            told.append(_told(op, sample))
        assert told[0] is not None and told[0] == told[1], f"{sample}: {told}"


def _told(op, sample):
    """The error that an operator raises on a sample, by type and words; None for none."""
    try:
        op(sample.input, *sample.args, **sample.kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def test_every_operator_is_in_the_database():
    assert sorted(OPERATORS) == sorted(NAMES)
