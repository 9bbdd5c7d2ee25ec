"""Normalisation against statistics by hand, finite differences and PyTorch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from spec_cases import close, dot, gradient, law, normal, packed, seeds

from bedstone.spec.normalization import (
    LrnDesc,
    LrnProblem,
    NormalizationProblem,
    NormDesc,
)

DIMS = (3, 4, 2, 3)
NORMS = [
    NormDesc("batch", 1e-3),
    NormDesc("layer", 1e-3, axis=1),
    NormDesc("layer", 1e-3, axis=2),
    NormDesc("group", 1e-3, groups=2),
    NormDesc("group", 1e-3, groups=4),  # instance normalisation
    NormDesc("rms", 1e-3, axis=2),
    NormDesc("batch", 1e-3, scale=False, shift=False),
    NormDesc("layer", 1e-3, axis=3, shift=False),
    NormDesc("group", 1e-3, scale=False),
]
# Axes that share a mean, of x with the channels split into groups where there are any.
AXES = {"batch": (0, 2, 3), "group": (2, 3, 4)}


def problem_of(direction, norm, dims=DIMS, **fields):
    return NormalizationProblem(direction, packed(dims), packed(dims), norm, **fields)


def arrays_for(problem, seed):
    """Normal values for every operand."""
    names = {o.name: o.desc.dims for o in problem.operands}
    return dict(zip(names, normal(seed, *names.values())))


def training(norm, arrays):
    return problem_of("training", norm).reference(arrays)


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_result_has_mean_zero_and_variance_one(norm):
    """Scale and shift left out, and epsilon nearly."""
    bare = NormDesc(norm.kind, 1e-12, norm.axis, norm.groups, scale=False, shift=False)
    (x,) = normal(1, DIMS)
    y = training(bare, {"x": 5 * x + 3})["y"]
    if norm.kind == "group":
        y = y.reshape(3, norm.groups, 4 // norm.groups, 2, 3)
    axes = AXES.get(norm.kind, tuple(range(norm.axis, 4)))
    assert close((y**2).mean(axis=axes), np.ones(y.mean(axis=axes).shape))
    if norm.kind != "rms":
        assert close(y.mean(axis=axes), np.zeros(y.mean(axis=axes).shape))


def test_batch_by_hand():
    """Channel 0 holds 1 2 3 6: mean 3, variance 3.5."""
    x = np.array([[[1.0, 2.0]], [[3.0, 6.0]]])
    problem = problem_of("training", NormDesc("batch", 0.5), x.shape, momentum=0.25)
    assert [o.name for o in problem.operands] == [
        "x", "scale", "shift", "y", "mean", "inv_std", "running_mean", "running_var",
    ]  # fmt: skip
    arrays = {
        "x": x, "scale": np.array([4.0]), "shift": np.array([1.0]),
        "running_mean": np.array([1.0]), "running_var": np.array([2.0]),
    }  # fmt: skip
    out = problem.reference(arrays)
    assert out["mean"] == 3 and out["inv_std"] == 0.5
    assert out["y"].ravel().tolist() == [-3, -1, 1, 7]
    assert out["running_mean"] == 0.75 * 1 + 0.25 * 3
    assert close(out["running_var"], [0.75 * 2 + 0.25 * 3.5 * 4 / 3])
    biased = problem_of("training", NormDesc("batch", 0.5), x.shape, momentum=0.25, unbiased=False)
    assert close(biased.reference(arrays)["running_var"], [0.75 * 2 + 0.25 * 3.5])
    inference = problem_of("inference", NormDesc("batch", 0.5), x.shape)
    given = {**arrays, "mean": np.array([3.0]), "variance": np.array([3.5])}
    assert inference.reference(given)["y"].ravel().tolist() == [-3, -1, 1, 7]


def test_blending_leaves_statistics_alone():
    problem = problem_of("training", NORMS[0], momentum=0.1)
    arrays = arrays_for(problem, 2)
    plain, blended = problem.reference(arrays), problem.reference(arrays, 2.0, 3.0)
    assert close(blended["y"], 2 * plain["y"] + 3 * arrays["y"])
    for name in ("mean", "inv_std", "running_mean", "running_var"):
        assert np.array_equal(blended[name], plain[name])
    roles = {o.name: o.role for o in problem.operands}
    assert roles["running_var"] == "inout" and roles["mean"] == "out"


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_gradients(norm):
    """dx, dscale and dshift of <y, dy> by finite differences."""
    problem = problem_of("backward", norm)
    arrays = arrays_for(problem, 3)
    arrays["shift"] = np.zeros(problem.geometry.parameters)
    (dy,) = normal(4, DIMS)
    out = training(norm, arrays)
    saved = {k: out[k] for k in ("mean", "inv_std") if k in out}
    got = problem.reference({**arrays, **saved, "dy": dy})
    for name, wrt in (("dx", "x"), ("dscale", "scale"), ("dshift", "shift")):
        assert (name in got) == (name == "dx" or getattr(norm, wrt))
        if name in got:

            def loss(at, wrt=wrt):
                return dot(training(norm, {**arrays, wrt: at})["y"], dy)

            assert np.allclose(got[name], gradient(loss, arrays[wrt]), atol=1e-6), name


@law
@given(st.sampled_from(NORMS), seeds)
def test_equals_torch(norm, seed):
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    problem = problem_of("backward", norm)
    arrays = arrays_for(problem_of("training", norm), seed)
    tensors = {
        k: torch.tensor(arrays[k], requires_grad=True)
        for k in ("x", "scale", "shift")
        if k in arrays
    }
    tx, scale, shift = (tensors.get(k) for k in ("x", "scale", "shift"))
    shape = problem.geometry.parameters
    # PyTorch's group_norm fails for a shift without a scale.
    ones = torch.ones(shape, dtype=torch.float64) if scale is None else scale
    ty = {
        "batch": lambda: functional.batch_norm(tx, None, None, scale, shift, True, 0.1, 1e-3),
        "layer": lambda: functional.layer_norm(tx, shape, scale, shift, 1e-3),
        "group": lambda: functional.group_norm(tx, norm.groups, ones, shift, 1e-3),
        "rms": lambda: functional.rms_norm(tx, shape, scale, 1e-3),
    }[norm.kind]()
    (dy,) = normal(seed + 1, DIMS)
    ty.backward(torch.tensor(dy))
    out = training(norm, arrays)
    assert np.allclose(out["y"], ty.detach().numpy(), atol=1e-8)
    saved = {k: out[k] for k in ("mean", "inv_std") if k in out}
    got = problem.reference({**arrays, **saved, "dy": dy})
    for name, wrt in (("dx", "x"), ("dscale", "scale"), ("dshift", "shift")):
        if name in got:
            assert np.allclose(got[name], tensors[wrt].grad.numpy(), atol=1e-8)


def test_running_statistics_equal_torch():
    torch = pytest.importorskip("torch")
    problem = problem_of("training", NORMS[0], momentum=0.3)
    arrays = arrays_for(problem, 5)
    arrays["running_var"] = arrays["running_var"] ** 2
    running = [torch.tensor(arrays[k].copy()) for k in ("running_mean", "running_var")]
    torch.nn.functional.batch_norm(torch.tensor(arrays["x"]), *running, None, None, True, 0.3)
    out = problem.reference(arrays)
    assert close(out["running_mean"], running[0].numpy())
    assert close(out["running_var"], running[1].numpy())


def lrn(direction, x, desc):
    return LrnProblem(direction, packed(x.shape), packed(x.shape), desc)


def test_lrn_by_hand():
    """size 3, alpha 3, beta 1, k 1: y = x / (1 + sum of 3 squares)."""
    x = np.array([1.0, 2.0, 3.0]).reshape(1, 3, 1)
    y = lrn("lrn_forward", x, LrnDesc(3, 3.0, 1.0, 1.0)).reference({"x": x})["y"]
    assert close(y.ravel(), [1 / 6, 2 / 15, 3 / 14])
    even = lrn("lrn_forward", x, LrnDesc(2, 2.0, 1.0, 1.0)).reference({"x": x})["y"]
    assert close(even.ravel(), [1 / 6, 2 / 14, 3 / 10])  # begins at its centre


@pytest.mark.parametrize("region", ["across", "within"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_lrn_gradient(region, size):
    desc = LrnDesc(size, 0.7, 0.75, 1.5, region)
    x, dy = normal(size, (1, 4, 3, 3), (1, 4, 3, 3))
    got = lrn("lrn_backward", x, desc).reference({"x": x, "dy": dy})["dx"]
    forward = lrn("lrn_forward", x, desc)
    slope = gradient(lambda at: dot(forward.reference({"x": at})["y"], dy), x)
    assert np.allclose(got, slope, atol=1e-7)


@pytest.mark.parametrize("size", [1, 3, 5])
def test_lrn_equals_torch(size):
    torch = pytest.importorskip("torch")
    (x,) = normal(6, (2, 7, 4, 3))
    across = lrn("lrn_forward", x, LrnDesc(size, 0.5, 0.75, 2.0)).reference({"x": x})["y"]
    t = torch.tensor(x)
    expected = torch.nn.functional.local_response_norm(t, size, 0.5, 0.75, 2.0)
    assert close(across, expected.numpy())
    within = lrn("lrn_forward", x, LrnDesc(size, 0.5, 0.75, 1.0, "within")).reference({"x": x})["y"]
    squares = torch.nn.functional.avg_pool2d(t**2, size, 1, size // 2).numpy()
    assert close(within, x * (1 + 0.5 * squares) ** -0.75)
