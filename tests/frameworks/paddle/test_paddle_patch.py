"""The switch: what is replaced and put back, graphs of all kinds, and a network's training."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

paddle = pytest.importorskip("paddle", reason="PaddlePaddle is not installed")

import paddle.nn.functional as F  # noqa: E402

import bedstone  # noqa: E402
import bedstone.frameworks.paddle as on_bedstone  # noqa: E402
from bedstone.frameworks.paddle.gradients import Record  # noqa: E402
from bedstone.frameworks.paddle.patch import LEFT_ALONE, OPERATORS  # noqa: E402
from bedstone.frameworks.paddle.threads import paddle_threads  # noqa: E402
from bedstone.plan.config import team_address  # noqa: E402

LOSS_TOLERANCE = 1e-6


@pytest.fixture(autouse=True)
def clean():
    on_bedstone.reset()
    yield
    assert on_bedstone.patched() == ()


def everywhere(value):
    """Every place among PaddlePaddle's Python modules that holds `value`."""
    return [
        (name, attribute)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "paddle" and module is not None
        for attribute, found in list(vars(module).items())
        if found is value
    ]


def test_every_place_is_replaced_and_put_back():
    natives = {name: getattr(paddle._C_ops, name) for name in OPERATORS}
    places = {name: everywhere(native) for name, native in natives.items()}
    # Some modules took these by name when they were imported.
    assert ("paddle.nn.functional.activation", "tanh") in places["tanh"]
    with on_bedstone.enable():
        for native in natives.values():
            left = {module for module, _ in everywhere(native)}
            assert left <= {"paddle._pir_ops", "paddle.base.libpaddle.pir.ops"}, LEFT_ALONE
        assert set(on_bedstone.patched()) == set(OPERATORS)
    assert {name: everywhere(native) for name, native in natives.items()} == places


def test_requests_add_up():
    native = paddle._C_ops.relu
    on_bedstone.patch(only=["relu", "tanh"])
    with on_bedstone.enable(except_=["tanh"]):
        on_bedstone.unpatch()
        assert paddle._C_ops.relu is not native
        assert "tanh" not in on_bedstone.patched() and "conv2d" in on_bedstone.patched()
    assert paddle._C_ops.relu is native
    with pytest.raises(RuntimeError, match="unpatch"):
        on_bedstone.unpatch()


@pytest.mark.parametrize("bad", [["conv9d"], "relu"])
def test_unknown_operators_are_refused(bad):
    with pytest.raises(bedstone.InvalidDescriptor, match="only"):
        on_bedstone.patch(only=bad)


def test_an_error_in_the_block_puts_back():
    native = paddle._C_ops.conv2d
    with pytest.raises(ZeroDivisionError), on_bedstone.enable():
        raise ZeroDivisionError
    assert paddle._C_ops.conv2d is native


class Network(paddle.nn.Layer):
    """Small, with every kind of layer that is replaced."""

    def __init__(self):
        super().__init__()
        nn = paddle.nn
        self.body = nn.Sequential(
            nn.Conv2D(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2D(2),
            nn.Conv2D(12, 12, 3, padding="SAME", groups=12), nn.Conv2D(12, 16, 1), nn.Tanh(),
            nn.AvgPool2D(2), nn.Conv2DTranspose(16, 8, 3, stride=2), nn.Sigmoid(),
            nn.AdaptiveAvgPool2D(1), nn.Flatten(), nn.Linear(8, 10),
        )  # fmt: skip

    def forward(self, x):
        return self.body(x)


def images():
    random = np.random.default_rng(0)
    return paddle.to_tensor(random.random((16, 1, 12, 12), np.float32)), paddle.arange(16) % 10


def losses(steps=8, wrap=lambda network: network):
    paddle.seed(5)
    network = wrap(Network())
    optimizer = paddle.optimizer.Adam(3e-3, parameters=network.parameters())
    x, labels = images()
    found = []
    for _ in range(steps):
        loss = F.cross_entropy(network(x), labels)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        found.append(float(loss))
    return found


def test_training_gives_the_native_losses():
    native = losses()
    with on_bedstone.enable(always=True):
        patched = losses()
    assert native[-1] < native[0]
    np.testing.assert_allclose(patched, native, rtol=LOSS_TOLERANCE)
    report = on_bedstone.report()
    assert report.own_calls == report.calls, str(report)
    assert report.own("conv2d", "backward_filter") == 16
    assert report.own("conv2d", "backward_data") == 8  # the images need none
    assert report.own("relu", "backward") == report.own("pool2d", "forward") / 3 == 8


def test_small_tensors_stay_native_unless_asked():
    x = paddle.ones([2, 3])
    with on_bedstone.enable():
        F.relu(x)
    assert "so small" in on_bedstone.report().reasons("relu")[0]
    with on_bedstone.enable(always=True):
        F.relu(x)
    assert on_bedstone.report().own("relu") == 1


@pytest.mark.parametrize("full_graph", [True, False])
def test_static_graphs_stay_native(full_graph):
    native = losses(3)
    wrap = lambda network: paddle.jit.to_static(network, full_graph=full_graph)  # noqa: E731
    with on_bedstone.enable(always=True):
        static = losses(3, wrap)
    np.testing.assert_allclose(static, native, rtol=1e-5)
    assert "a static graph is being built" in on_bedstone.report().reasons("conv2d")


def test_what_is_forced_dynamic_inside_a_static_graph_is_ours():
    @paddle.jit.marker.force_dynamic
    class Dynamic(paddle.nn.Conv2D):
        pass

    paddle.seed(1)
    network = paddle.nn.Sequential(Dynamic(1, 4, 3), paddle.nn.ReLU())
    x, _ = images()
    native = network(x)
    with on_bedstone.enable(always=True):
        static = paddle.jit.to_static(network, full_graph=False)(x)
    np.testing.assert_allclose(static.numpy(), native.numpy(), rtol=1e-5, atol=1e-6)
    assert on_bedstone.report().own("conv2d", "forward") == 1


def test_static_mode_programs_stay_native():
    paddle.enable_static()
    try:
        with on_bedstone.enable(), paddle.static.program_guard(paddle.static.Program()):
            x = paddle.static.data("x", [2, 3, 8, 8])
            y = F.max_pool2d(F.relu(x), 2)
            (result,) = paddle.static.Executor().run(
                feed={"x": np.ones((2, 3, 8, 8), np.float32)}, fetch_list=[y]
            )
    finally:
        paddle.disable_static()
    assert result.shape == (2, 3, 4, 4) and (result == 1).all()
    assert on_bedstone.report().own_calls == 0


def test_mixed_precision_stays_native():
    x, _ = images()
    w = paddle.ones([4, 1, 3, 3])
    with on_bedstone.enable(always=True):
        tracer = paddle.base.framework._dygraph_tracer()
        tracer._amp_dtype = "bfloat16"
        tracer._amp_level = paddle.base.core.AmpLevel.O1  # (auto_cast does not, on some CPUs)
        try:
            F.relu(x)
        finally:
            tracer._amp_level = paddle.base.core.AmpLevel.O0
            tracer._amp_dtype = "float32"
        F.conv2d(x, w)
    reasons = on_bedstone.report().reasons("relu")
    assert reasons == ["automatic mixed precision chooses the dtype"]
    assert on_bedstone.report().own("conv2d") == 1


def test_a_gradient_of_a_gradient():
    def penalty():
        paddle.seed(2)
        network = paddle.nn.Sequential(
            paddle.nn.Conv2D(1, 4, 3), paddle.nn.Sigmoid(), paddle.nn.Conv2D(4, 2, 3),
            paddle.nn.AvgPool2D(2), paddle.nn.ReLU(), paddle.nn.Conv2D(2, 1, 2),
        )  # fmt: skip
        x, _ = images()
        x.stop_gradient = False
        (slope,) = paddle.grad([network(x).sum()], [x], create_graph=True)
        ((slope**2).sum() + network(x).mean()).backward()
        return [x.grad, *(p.grad for p in network.parameters() if p.grad is not None)]

    native = penalty()
    with on_bedstone.enable(always=True):
        patched = penalty()
    assert len(native) == len(patched) > 5
    for theirs, ours in zip(native, patched):
        scale = float(theirs.abs().max())
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-4, atol=1e-5 * scale)
    reasons = on_bedstone.report().reasons("conv2d")
    assert reasons == ["a gradient that is differentiated again"]


@pytest.mark.parametrize("function", [F.softmax, F.gelu, F.log_softmax])
def test_what_paddle_differentiates_once_only_is_refused(function):
    x = paddle.ones([4, 5])
    x.stop_gradient = False
    with pytest.raises(RuntimeError, match="higher order"):
        paddle.grad([(function(x) ** 2).sum()], [x], create_graph=True)
    with on_bedstone.enable(always=True), pytest.raises(RuntimeError, match="again"):
        paddle.grad([(function(x) ** 2).sum()], [x], create_graph=True)


def convolved(w, x):
    return F.conv2d(x, w)


def test_partial_and_repeated_gradients():
    x, _ = images()
    w = paddle.ones([4, 1, 3, 3])
    x.stop_gradient = w.stop_gradient = False
    for asked in ([x], [w], [w, x]):
        with on_bedstone.enable(always=True):
            y = convolved(w, x)
        once = paddle.grad([y.sum()], asked, retain_graph=True)
        y.sum().backward(retain_graph=True)
        again = paddle.grad([y.sum()], asked)
        for a, b in zip(once, again, strict=True):
            assert (a == b).all()
        with pytest.raises(Exception, match="retain_graph"):
            y.sum().backward()
        x.clear_grad(), w.clear_grad()


def test_only_the_gradients_that_were_asked_for_are_computed():
    x, _ = images()
    w = paddle.ones([4, 1, 3, 3])
    x.stop_gradient = w.stop_gradient = False
    with on_bedstone.enable(always=True):
        y = convolved(w, x)
        for asked, direction in ((x, "backward_data"), (w, "backward_filter")):
            on_bedstone.reset()
            paddle.grad([y.sum()], [asked], retain_graph=True)
            report = on_bedstone.report()
            assert report.own("conv2d", direction) == report.calls == 1, str(report)


def test_changes_in_place_are_noticed():
    x, _ = images()
    w = paddle.ones([4, 1, 3, 3])
    w.stop_gradient = False
    with on_bedstone.enable(always=True):
        y = convolved(w, x)
        x.add_(paddle.ones_like(x))
        with pytest.raises(RuntimeError, match="in place"):
            y.sum().backward()


def test_hooks_and_kept_gradients_see_what_they_should():
    x = paddle.ones([4, 5])
    x.stop_gradient = False
    seen = []
    with on_bedstone.enable(always=True):
        y = F.sigmoid(x)
    y.register_hook(lambda gradient: seen.append(gradient.shape))
    y.retain_grads()
    y.sum().backward()
    assert seen == [[4, 5]] and y.grad.shape == [4, 5] and (y.grad == 1).all()


def records():
    gc.collect()
    return [found for found in gc.get_objects() if isinstance(found, Record)]


def test_graphs_are_freed():
    x = paddle.ones([64, 64])
    x.stop_gradient = False
    known = {id(record) for record in records()}
    before = len(known)
    with on_bedstone.enable(always=True):
        unused = [F.softmax(F.sigmoid(x * 1.0)) for _ in range(3)]
        assert len(records()) == before + 6
        del unused  # whether or not a gradient was ever asked for
        assert len(records()) == before
        losses = [F.sigmoid(x * 1.0).sum() for _ in range(3)]
        losses[0].backward(retain_graph=True)
        for loss in losses[1:]:
            loss.backward()
    # A loss that is kept, for a curve, keeps no tensors of its graph, unless that was asked for.
    mine = [record for record in records() if id(record) not in known]
    assert sorted(record.saved is not None for record in mine) == [False, False, True]
    del mine
    del losses, loss
    assert len(records()) == before


def test_reasons_are_logged_where_that_is_asked(caplog):
    reason = "paddle relu forward stays native"
    with caplog.at_level(logging.INFO), on_bedstone.enable():  # of the root: as PaddlePaddle sets
        F.relu(paddle.ones([2]))
        assert reason not in caplog.text
        on_bedstone.reset()
        with bedstone.config(log="info"):
            F.relu(paddle.ones([2]))
        assert caplog.text.count(reason) == 1
        on_bedstone.reset()
        with caplog.at_level(logging.INFO, "bedstone"):
            F.relu(paddle.ones([2]))
    assert caplog.text.count(reason) == 2


def run(program, **environment):
    """What a new process prints, and its errors."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("BEDSTONE_", "OMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**kept, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), done.stderr


def test_the_process_s_logging_is_left_as_it_is():
    program = """
import logging, paddle
levels = lambda: {n: logging.getLogger(n).level for n in ("", *logging.root.manager.loggerDict)}
before = levels()
import bedstone.frameworks.paddle as on_bedstone
with on_bedstone.enable(always=True):
    paddle.nn.functional.relu(paddle.ones([64]))
    paddle.nn.functional.relu(paddle.ones([0]))  # (native, with a reason)
after = levels()
print(on_bedstone.report().own_calls)
assert {n: after[n] for n in before} == before, (before, after)
assert not any(level for name, level in after.items() if name.startswith("bedstone")), after
"""
    printed, errors = run(program)
    assert printed == ["1"]
    assert "bedstone" not in errors


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
def test_as_many_threads_as_paddle_unless_chosen(environment, seen):
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
        with on_bedstone.enable():
            results = [F.conv2d(x, w, padding=1).numpy() for _ in range(20)]
    finally:
        paddle.base.core.set_num_threads(threads)
    assert all((result == results[0]).all() for result in results)
    np.testing.assert_allclose(results[0], native, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("outer", ["torch", "paddle"])
@pytest.mark.parametrize("first", ["outer", "inner"])
def test_beside_another_framework_each_gets_back_what_it_had(runtime, outer, first):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    from bedstone.frameworks import torch as on_torch

    rooms = {"torch": on_torch, "paddle": on_bedstone}
    inner = "paddle" if outer == "torch" else "torch"
    rooms[outer].patch()
    alone = (bedstone.get_num_threads(), team())
    rooms[inner].patch()
    both = (bedstone.get_num_threads(), team())
    rooms[outer if first == "outer" else inner].unpatch()
    between = (bedstone.get_num_threads(), team())
    rooms[inner if first == "outer" else outer].unpatch()
    assert {"torch": both, "paddle": alone}[inner][1] != runtime
    assert runtime in (alone[1], both[1])
    assert between == (both if first == "outer" else alone)
    assert team() == 0


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
with on_bedstone.enable(only=["conv2d"]):
    F.conv2d(paddle.ones([1, 4, 40, 40]), paddle.ones([2, 4, 3, 3]))
    for _ in range(2):
        loader = paddle.io.DataLoader(Pictures(), batch_size=4, num_workers=2)
        found = [F.conv2d(x, paddle.ones([1, 2, 1, 1])).numpy() for x in loader]
print(sum(f.shape[0] for f in found), *sorted({float(v) for f in found for v in np.unique(f)}))
print(on_bedstone.report().own("conv2d"))
"""


def test_workers_of_a_data_loader_have_threads_of_their_own():
    printed, _ = run(WORKERS, OMP_NUM_THREADS="2")
    assert printed == ["12", *(str(72.0 * i) for i in range(12)), "7"]
