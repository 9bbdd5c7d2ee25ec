"""Sharded tensors in two processes: every sharded answer and gradient is the whole one's.

The file runs itself once a rank (gloo, on this machine); each check writes what it found, and the
tests read that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest

RANKS = 2
SECONDS = 120
SEED = 1410
SKIP = "skip: "

# Per case: dims of x, dims of w, then stride, padding, dilation, groups.
SPATIAL = {
    "3x3": ([2, 3, 12, 7], [4, 3, 3, 3], 1, 1, 1, 1),
    "strided": ([1, 4, 13, 6], [6, 2, 3, 2], (2, 1), (1, 0), 1, 2),
    "dilated": ([1, 2, 16, 5], [3, 2, 3, 1], 1, (2, 0), (2, 1), 1),
    "even filter, no padding": ([1, 2, 11, 5], [3, 2, 4, 2], 1, 0, 1, 1),
    "halo wider than a share": ([1, 2, 6, 4], [2, 2, 7, 1], 1, (3, 0), 1, 1),
    "a rank without output": ([1, 2, 9, 4], [2, 2, 9, 1], 1, 0, 1, 1),
    "stride beyond the filter": ([1, 2, 14, 4], [2, 2, 2, 1], (4, 1), 0, 1, 1),
    "1-D": ([2, 3, 31], [4, 3, 5], 2, 2, 1, 1),
    "3-D": ([1, 2, 6, 4, 4], [3, 2, 3, 3, 3], 1, 1, 1, 1),
}
# What an operator does with placements: inputs' placements -> the result's.
PLACED = {
    "batch": (("S0", "R", "R"), "S0"),
    "output channels": (("R", "S0", "S0"), "S1"),
    "input channels": (("S1", "S1", "R"), "P"),
    "everywhere": (("R", "R", "R"), "R"),
}
POINTWISE = ("max_pool", "average_pool", "adaptive_average_pool", "activation", "softmax")
CHECKS = (
    *(f"spatial {name}" for name in SPATIAL),
    "spatial channels last",
    "spatial second derivative",
    "spatial on a mesh of batch and rows",
    "spatial other axis",
    "spatial refuses",
    *(f"convolution by {name}" for name in PLACED),
    *(f"{name} by batch" for name in POINTWISE),
    "transposed by batch",
    "normalised by batch",
    "normalised whole",
    "a rule is not remembered for other strides",
)


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    torch = pytest.importorskip("torch")
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this PyTorch has no gloo")
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(folder)]
    ranks = [
        subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(RANKS)
    ]
    end, errors = time.monotonic() + SECONDS, []
    try:
        for process in ranks:
            _, text = process.communicate(timeout=max(end - time.monotonic(), 1))
            errors.append(text[-2000:])
    finally:
        for process in ranks:
            process.kill()
    files = [folder / f"{rank}.json" for rank in range(RANKS)]
    if not all(path.exists() for path in files):
        pytest.fail("\n".join(errors))
    return [json.loads(path.read_text()) for path in files]


@pytest.mark.parametrize("check", CHECKS)
def test_sharded_is_whole(findings, check):
    for rank, found in enumerate(findings):
        if found.get(check, "").startswith(SKIP):
            pytest.skip(found[check].removeprefix(SKIP))
        assert found.get(check) == "", f"rank {rank}: {found.get(check, 'did not run')}"


def test_shares_are_cut_as_dtensor_cuts():
    pytest.importorskip("torch")
    from bedstone.frameworks.torch.sharding import shares

    assert shares(7, 2) == [(0, 4), (4, 7)]
    assert shares(2, 4) == [(0, 1), (1, 2), (2, 2), (2, 2)]  # the last ones are empty


def _rank(folder: Path, rank: int) -> None:
    """All checks, in order, in this process: a rank of the group."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    found = {}
    for check in CHECKS:
        torch.manual_seed(SEED)
        try:
            found[check] = _run(check) or ""
        except Exception:
            found[check] = traceback.format_exc()
            break  # the other rank may wait for a message: what follows means nothing
    (folder / f"{rank}.json").write_text(json.dumps(found))
    if found.keys() == set(CHECKS):
        dist.destroy_process_group()
    os._exit(0)  # a rank that stopped early must not wait for the other


def _run(check: str) -> str | None:
    """Run it; answers SKIP and a reason where this PyTorch cannot."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (RANKS,))
    kind, _, name = check.partition(" ")
    if kind == "spatial" and name in SPATIAL:
        _spatial(mesh, SPATIAL[name])
    elif check == "spatial channels last":
        _spatial(mesh, SPATIAL["3x3"], memory_format=torch.channels_last)
    elif check == "spatial other axis":
        _spatial(mesh, SPATIAL["3x3"], axis=3)
    elif check == "spatial second derivative":
        if not _dtensor_differentiates_twice(mesh):
            return f"{SKIP}PyTorch {torch.__version__} has no second derivative of to_local"
        _second(mesh)
    elif check == "spatial on a mesh of batch and rows":
        _spatial(init_device_mesh("cpu", (1, RANKS)), SPATIAL["3x3"], batch=True)
    elif check == "spatial refuses":
        _refusals(mesh)
    elif kind == "convolution":
        _convolution(mesh, *PLACED[name.removeprefix("by ")])
    elif kind == "normalised":
        _normalised(mesh, name)
    elif kind == "transposed":
        _transposed(mesh)
    elif check.startswith("a rule"):
        _strides(mesh)
    else:
        _images(mesh, kind)
    return None


def _tensors(*dims):
    import torch

    return [torch.randn(*d, dtype=torch.float64).requires_grad_() for d in dims]


def _close(got, expected):
    import torch

    got = got.full_tensor() if hasattr(got, "full_tensor") else got
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)


def _spatial(mesh, case, axis=2, batch=False, memory_format=None):
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    from bedstone.frameworks.torch import ops
    from bedstone.frameworks.torch.sharding import spatial_convolution

    x_dims, w_dims, *how = case
    x, w, bias = _tensors(x_dims, w_dims, w_dims[:1])
    if memory_format is not None:
        x = x.detach().to(memory_format=memory_format).requires_grad_()
    placements = [Shard(0), Shard(axis)] if batch else [Shard(axis)]
    y = ops.convolution(x, w, bias, *how)
    dy = torch.randn_like(y)
    expected = torch.autograd.grad(y, (x, w, bias), dy)
    cut = distribute_tensor(x.detach(), mesh, placements).requires_grad_()
    w, bias = (t.detach().clone().requires_grad_() for t in (w, bias))
    result = spatial_convolution(cut, w, bias, *how)
    assert result.shape == y.shape and result.placements == tuple(placements)
    _close(result, y.detach())
    got = torch.autograd.grad(result, (cut, w, bias), distribute_tensor(dy, mesh, placements))
    assert got[0].placements == tuple(placements)
    for g, e in zip(got, expected):
        _close(g, e)


def _dtensor_differentiates_twice(mesh) -> bool:
    """False up to PyTorch 2.9: the derivative of to_local ends the graph."""
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    x = distribute_tensor(torch.ones(2), mesh, [Shard(0)]).requires_grad_()
    (dx,) = torch.autograd.grad(x.to_local().pow(3).sum(), x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.to_local().sum(), x, allow_unused=True)
    return ddx is not None


def _second(mesh):
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    from bedstone.frameworks.torch import ops
    from bedstone.frameworks.torch.sharding import spatial_convolution

    x, w = _tensors([1, 2, 8, 5], [3, 2, 3, 3])
    (dx,) = torch.autograd.grad(ops.convolution(x, w, None, 1, 1).sin().sum(), x, create_graph=True)
    expected = torch.autograd.grad(dx.square().sum(), (x, w))
    cut = distribute_tensor(x.detach(), mesh, [Shard(2)]).requires_grad_()
    w = w.detach().clone().requires_grad_()
    y = spatial_convolution(cut, w, None, 1, 1)
    (dx,) = torch.autograd.grad(y.sin().sum(), cut, create_graph=True)
    for got, e in zip(torch.autograd.grad(dx.square().sum(), (cut, w)), expected):
        _close(got, e)


def _refusals(mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    import bedstone
    from bedstone.frameworks.torch.sharding import spatial_convolution

    x, w = _tensors([2, 2, 6, 5], [3, 2, 3, 3])
    by_channel = distribute_tensor(x.detach(), mesh, [Shard(1)])
    rows = distribute_tensor(x.detach(), mesh, [Shard(2)])
    large = _tensors([3, 2, 9, 3])[0]
    for bad, filters in ((x, w), (by_channel, w), (rows, large)):
        try:
            spatial_convolution(bad, filters)
        except bedstone.InvalidDescriptor as error:
            assert "expected" in str(error)
        else:
            raise AssertionError("no error")


def _placement(text):
    from torch.distributed.tensor import Partial, Replicate, Shard

    return {"R": Replicate(), "P": Partial()}.get(text) or Shard(int(text[1:]))


def _compare(mesh, ours, inputs, placed, wanted):
    """`ours` on tensors so placed: the result is placed as wanted, and equals the whole one."""
    import torch
    from torch.distributed.tensor import distribute_tensor

    y = ours(*inputs)
    dy = torch.randn_like(y)
    expected = torch.autograd.grad(y, inputs, dy)
    cut = [
        distribute_tensor(t.detach(), mesh, [_placement(p)]).requires_grad_()
        for t, p in zip(inputs, placed)
    ]
    result = ours(*cut)
    assert result.placements == (_placement(wanted),), result.placements
    _close(result, y.detach())
    got = torch.autograd.grad(result, cut, distribute_tensor(dy, mesh, [_placement("R")]))
    for g, e in zip(got, expected):
        _close(g, e)


def _convolution(mesh, placed, wanted):
    from bedstone.frameworks.torch import ops

    inputs = _tensors([4, 4, 6, 5], [6, 4, 3, 3], [6])
    _compare(mesh, lambda x, w, b: ops.convolution(x, w, b, (2, 1), 1), inputs, placed, wanted)


def _transposed(mesh):
    from bedstone.frameworks.torch import ops

    inputs = _tensors([4, 4, 3, 3], [4, 2, 3, 3], [2])
    ours = lambda x, w, b: ops.convolution_transpose(x, w, b, 2, 1, 1)  # noqa: E731
    _compare(mesh, ours, inputs, ("S0", "R", "R"), "S0")


def _normalised(mesh, name):
    from bedstone.frameworks.torch import ops

    if name == "whole":  # a batch's statistics are of all of it: its shards are gathered
        inputs = _tensors([4, 3, 2, 2], [3], [3])
        ours = lambda x, w, b: ops.batch_norm(x, w, b)[0]  # noqa: E731
        _compare(mesh, ours, inputs, ("S0", "R", "R"), "R")
        return
    layer = lambda x, w, b: ops.layer_norm(x, 2, w, b)  # noqa: E731
    for placed in ("S0", "S1"):
        inputs = _tensors([4, 3, 5], [5], [5])
        _compare(mesh, layer, inputs, (placed, "R", "R"), placed)
    group = lambda x, w, b: ops.group_norm(x, 2, w, b)  # noqa: E731
    _compare(mesh, group, _tensors([4, 6, 5], [6], [6]), ("S0", "R", "R"), "S0")


def _images(mesh, name):
    from bedstone.frameworks.torch import ops

    functions = {
        "max_pool": lambda x: ops.max_pool(x, 3, 2, 1)[0],
        "average_pool": lambda x: ops.average_pool(x, 3, 2, 1),
        "adaptive_average_pool": lambda x: ops.adaptive_average_pool(x, (3, 2)),
        "activation": lambda x: ops.activation(x, "gelu"),
        "softmax": lambda x: ops.softmax(x, 1),
    }
    _compare(mesh, functions[name], _tensors([3, 4, 7, 6]), ("S0",), "S0")
    if name != "softmax":
        _compare(mesh, functions[name], _tensors([3, 4, 7, 6]), ("S1",), "S1")


def _strides(mesh):
    """DTensor keeps what it found for an operator: not for other strides or sizes."""
    from torch.distributed.tensor import Shard, distribute_tensor

    from bedstone.frameworks.torch import ops

    x, w = _tensors([2, 3, 9, 9], [4, 3, 3, 3])
    cut = distribute_tensor(x.detach(), mesh, [Shard(0)])
    w = distribute_tensor(w.detach(), mesh, [_placement("R")])
    shapes = [tuple(ops.convolution(cut, w, None, u, p).shape) for u, p in ((1, 0), (2, 0), (2, 1))]
    assert shapes == [(2, 4, 7, 7), (2, 4, 4, 4), (2, 4, 5, 5)]
    shapes = [tuple(ops.max_pool(cut, r)[0].shape) for r in (2, 3)]
    assert shapes == [(2, 3, 4, 4), (2, 3, 3, 3)]
    shapes = [tuple(ops.adaptive_average_pool(cut, r).shape) for r in (2, 3)]
    assert shapes == [(2, 3, 2, 2), (2, 3, 3, 3)]


if __name__ == "__main__":
    _rank(Path(sys.argv[1]), int(sys.argv[2]))
