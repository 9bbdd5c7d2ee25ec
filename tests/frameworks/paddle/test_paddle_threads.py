"""Threads: as many as PaddlePaddle's, and the same; beside PyTorch, and in workers."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

paddle = pytest.importorskip("paddle", reason="PaddlePaddle is not installed")

import paddle.nn.functional as F  # noqa: E402

import bedstone  # noqa: E402
import bedstone.frameworks.paddle as on_bedstone  # noqa: E402
from bedstone.frameworks.paddle.threads import paddle_threads  # noqa: E402
from bedstone.plan.config import team_address  # noqa: E402

THREADS = """
import paddle, bedstone
import bedstone.frameworks.paddle as on_bedstone
def seen():
    numbers = []
    with on_bedstone.enable(always=True):
        with on_bedstone.enable():
            numbers.append(bedstone.get_num_threads())
        x = paddle.ones([4, 8])
        x.stop_gradient = False
        y = paddle.nn.functional.sigmoid(x)
    x.register_hook(lambda _: numbers.append(bedstone.get_num_threads()))
    y.sum().backward()  # after the block
    return "".join(map(str, [*numbers, bedstone.get_num_threads()]))
print(seen())
paddle.base.core.set_num_threads(3)
print(seen())
with bedstone.config(num_threads=8):
    print(seen())
with on_bedstone.enable():
    bedstone.set_num_threads(7)
print(seen())
"""


@pytest.mark.parametrize(
    "environment, seen",
    [  # PaddlePaddle's own default is 1, which it writes into OMP_NUM_THREADS
        ({}, "111 331 888 777"),
        ({"OMP_NUM_THREADS": "4"}, "444 334 888 777"),
    ],
)
def test_as_many_threads_as_paddle_unless_chosen(environment, seen, run):
    """In a block, in a gradient after it, and outside both."""
    assert run(THREADS, **environment)[0] == seen.split()


def team():
    """The address of the function that kernels' threads are asked of; 0: bedstone's own."""
    return ctypes.c_int64.from_address(team_address()).value


@pytest.fixture
def runtime():
    """The address of PaddlePaddle's OpenMP runtime's function."""
    path = Path(paddle.__file__).parent / "libs" / "libiomp5.so"
    if not path.exists():
        pytest.skip("this PaddlePaddle brings no OpenMP runtime along")
    return ctypes.cast(ctypes.CDLL(str(path)).GOMP_parallel, ctypes.c_void_p).value


def test_kernels_run_in_paddle_s_threads_in_the_block_and_in_gradients_after_it(runtime):
    seen = []
    x = paddle.ones([4, 8])
    x.stop_gradient = False
    with on_bedstone.enable(always=True):
        seen.append(team())
        y = F.sigmoid(x)
    seen.append(team())
    x.register_hook(lambda _: seen.append(team()))
    y.sum().backward()
    assert [*seen, team()] == [runtime, 0, runtime, 0]


def test_a_convolution_in_paddle_s_threads_is_the_same(runtime):
    threads = paddle_threads()
    paddle.base.core.set_num_threads(3)
    try:
        random = np.random.default_rng(3)
        x = paddle.to_tensor(random.standard_normal((4, 16, 20, 20), np.float32))
        w = paddle.to_tensor(random.standard_normal((32, 16, 3, 3), np.float32))
        native = F.conv2d(x, w, padding=1).numpy()
        with on_bedstone.enable(always=True):
            results = [F.conv2d(x, w, padding=1).numpy() for _ in range(20)]
    finally:
        paddle.base.core.set_num_threads(threads)
    assert all((result == results[0]).all() for result in results)
    np.testing.assert_allclose(results[0], native, rtol=1e-4, atol=1e-4)


# What has each take a call of any size at once.
AT_ONCE = {"torch": {"find": False, "compile_after": 1}, "paddle": {"always": True}}


def taken(rooms):
    """The frameworks whose convolutions run on bedstone now; both give the same."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    random = np.random.default_rng(3)
    x = random.standard_normal((2, 8, 20, 20), np.float32)
    w = random.standard_normal((4, 8, 3, 3), np.float32)
    for room in rooms.values():
        room.reset()
    theirs = torch.nn.functional.conv2d(torch.from_numpy(x), torch.from_numpy(w)).numpy()
    ours = F.conv2d(paddle.to_tensor(x), paddle.to_tensor(w)).numpy()
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    return {name for name, room in rooms.items() if room.report().own_calls}


@pytest.mark.parametrize("outer", ["torch", "paddle"])
@pytest.mark.parametrize("first", ["outer", "inner"])
def test_beside_another_framework_each_gets_back_what_it_had(runtime, outer, first):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    from bedstone.frameworks import torch as on_torch

    rooms = {"torch": on_torch, "paddle": on_bedstone}
    inner = "paddle" if outer == "torch" else "torch"
    released, kept = (outer, inner) if first == "outer" else (inner, outer)

    def now():
        return bedstone.get_num_threads(), team(), taken(rooms)

    before = now()
    rooms[outer].patch(**AT_ONCE[outer])
    alone = now()
    rooms[inner].patch(**AT_ONCE[inner])
    both = now()
    rooms[released].unpatch()
    between = now()
    rooms[kept].unpatch()
    assert [state[2] for state in (before, alone, both, between)] == [
        set(), {outer}, {outer, inner}, {kept},
    ]  # fmt: skip
    assert {"torch": both, "paddle": alone}[inner][1] != runtime
    assert runtime in (alone[1], both[1])
    assert between[:2] == (both if first == "outer" else alone)[:2]
    assert now() == before and team() == 0


WORKERS = """
import signal
import numpy as np, paddle
import paddle.nn.functional as F
import bedstone.frameworks.paddle as on_bedstone
paddle.base.core.set_num_threads(2)
class Pictures(paddle.io.Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, i):  # in a child of a fork, where the parent's threads are not
        x = paddle.full([1, 4, 40, 40], float(i))
        return F.conv2d(x, paddle.ones([2, 4, 3, 3])).numpy()[0]
signal.alarm(100)
with on_bedstone.enable(only=["conv2d"], always=True):
    F.conv2d(paddle.ones([1, 4, 40, 40]), paddle.ones([2, 4, 3, 3]))
    for _ in range(2):
        loader = paddle.io.DataLoader(Pictures(), batch_size=4, num_workers=2)
        found = [F.conv2d(x, paddle.ones([1, 2, 1, 1])).numpy() for x in loader]
print(sum(f.shape[0] for f in found), *sorted({float(v) for f in found for v in np.unique(f)}))
print(on_bedstone.report().own("conv2d"))
"""


def test_workers_of_a_data_loader_have_threads_of_their_own(run):
    printed, _ = run(WORKERS, OMP_NUM_THREADS="2")
    assert printed == ["12", *(str(72.0 * i) for i in range(12)), "7"]
