"""bedstone under PyTorch's own operators: what PyTorch builds on top of them goes on as it is."""

from __future__ import annotations

import io
import subprocess
import sys
import textwrap
import threading

import pytest

torch = pytest.importorskip("torch")
bt = pytest.importorskip("bedstone.frameworks.torch")
if not hasattr(torch.library, "get_kernel"):
    pytest.skip("this PyTorch has no torch.library.get_kernel", allow_module_level=True)

import bedstone  # noqa: E402
from bedstone import BedstoneError, InvalidDescriptor  # noqa: E402
from bedstone.frameworks.torch import calls  # noqa: E402
from bedstone.frameworks.torch.recent import Recent  # noqa: E402

F = torch.nn.functional
# Own kernels wherever they can be, from the first call on.
ALWAYS = {"find": False, "compile_after": 1}


@pytest.fixture(autouse=True)
def clean():
    bt.reset()
    yield
    assert not bt.enabled()


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
        torch.nn.MaxPool2d(2), torch.nn.Conv2d(8, 8, 3, groups=8), torch.nn.GELU(),
        torch.nn.ConvTranspose2d(8, 4, 3, stride=2, output_padding=1), torch.nn.Flatten(),
        torch.nn.LazyLinear(5), torch.nn.LogSoftmax(1),
    )  # fmt: skip


def images(*more):
    torch.manual_seed(1)
    return torch.randn(2, 3, 12, 10, *more)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_results_gradients_and_strides_are_native_ones():
    for layout in (torch.contiguous_format, torch.channels_last):
        net, x = network(), images().to(memory_format=layout)
        net(x)  # the lazy layer takes its shape
        net = net.to(memory_format=layout)
        found = []
        for own in (False, True):
            bt.patch(least=0, **ALWAYS)
            if not own:
                bt.unpatch()
            leaf = x.clone().requires_grad_()
            y = net(leaf)
            y.square().sum().backward()
            gradients = [p.grad for p in net.parameters()]
            found.append([y, leaf.grad, *gradients])
            net.zero_grad(set_to_none=True)
            if own:
                bt.unpatch()
        for a, b in zip(*found):
            close(a, b)
            assert a.stride() == b.stride()
    report = bt.report()
    taken = "convolution convolution_backward native_batch_norm relu gelu max_pool2d_with_indices"
    for name in [*taken.split(), "max_pool2d_with_indices_backward", "_log_softmax"]:
        assert report.calls(name), f"{name}\n{report}"


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_gradcheck_of_first_and_second_order(axes, transposed):
    torch.manual_seed(2)
    dims = (5, 4, 3)[:axes]
    x = torch.randn(2, 2, *dims, dtype=torch.float64, requires_grad=True)
    w = torch.randn(2, 1, *(2,) * axes, dtype=torch.float64, requires_grad=True)
    b = torch.randn(2, dtype=torch.float64, requires_grad=True)
    convolve = getattr(F, f"conv{'_transpose' * transposed}{axes}d")

    def run(x, w, b):
        return convolve(x, w, b, stride=2, padding=1, groups=2)

    with bt.enable(**ALWAYS):
        assert torch.autograd.gradcheck(run, (x, w, b))
        assert torch.autograd.gradgradcheck(run, (x, w, b))
    assert bt.report().calls("convolution") and bt.report().calls("convolution_backward")


def test_forward_mode_vmap_and_gradients_of_each_sample():
    net, x = torch.nn.Conv2d(3, 4, 3), images()
    parameters = dict(net.named_parameters())

    def loss(parameters, sample):
        return torch.func.functional_call(net, parameters, (sample[None],)).square().sum()

    def each():
        return torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)

    def tangent():
        return torch.func.jvp(net, (x,), (torch.ones_like(x),))

    native = each(), tangent()
    with bt.enable(**ALWAYS):
        patched = each(), tangent()
    torch.utils._pytree.tree_map(close, patched, native)
    assert bt.report().own_calls


def test_autocast():
    net, x = torch.nn.Conv2d(3, 4, 3), images()
    with torch.autocast("cpu", torch.bfloat16):
        native = net(x)
        with bt.enable(**ALWAYS):
            patched = net(x)
    assert patched.dtype is torch.bfloat16 and bt.report().calls("convolution")
    torch.testing.assert_close(patched, native, rtol=2e-2, atol=2e-2)


def test_script_trace_and_export_keep_the_operator():
    net, x = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU()).eval(), images()
    native = net(x)
    with bt.enable(least=0, **ALWAYS), torch.no_grad():
        traced = torch.jit.trace(net, x)
        scripted = torch.jit.script(net)
        exported = torch.export.export(net, (x,))
        bt.reset()
        for made in (traced, scripted, exported.module()):
            close(made(x), native)
        assert bt.report().calls("convolution") + bt.report().calls("_convolution") >= 3
    assert "convolution" in str(traced.inlined_graph)  # no constant in its place
    other = images() + 1
    close(traced(other), net(other))
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    close(torch.jit.load(file)(other), net(other))


@pytest.mark.slow
def test_compile_forward_and_backward():
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 3))
    x = images()

    def run(f):
        net.zero_grad(set_to_none=True)
        y = f(x)
        y.square().sum().backward()
        return [y.detach(), *(p.grad.clone() for p in net.parameters())]

    native = run(net)
    with bt.enable(**ALWAYS):
        patched = run(torch.compile(net))
    for a, b in zip(patched, native):
        close(a, b)
    assert bt.report().calls("convolution") and bt.report().calls("convolution_backward")


def test_only_except_and_layers():
    net, x = network(), images()
    native = net(x)
    with bt.enable(only=["convolution"], least=0, **ALWAYS):
        net(x)
    assert {row.operator for row in bt.report().rows} == {"convolution"}
    bt.reset()
    with bt.enable(except_=["convolution", "_convolution"], least=0, **ALWAYS):
        net(x)
    assert not bt.report().calls("convolution") and bt.report().own_calls
    bt.reset()
    with bt.enable(layers=[net[0]], least=0, **ALWAYS):
        net(x).sum().backward()
    report = bt.report()
    assert report.calls("convolution") == 1 and report.calls("convolution_backward") == 1
    assert any("layers named" in row.what for row in report.rows if not row.own), report
    bt.reset()
    close(net(x), native)  # (training mode: the batch's own statistics)
    assert not bt.report().rows


def test_blocks_nest_and_patches_count():
    conv, x = torch.nn.Conv2d(3, 4, 3), images()
    threads = bedstone.get_num_threads()
    bedstone.set_num_threads(torch.get_num_threads() + 1)
    with bt.enable(**ALWAYS):
        assert bedstone.get_num_threads() == torch.get_num_threads()
    assert bedstone.get_num_threads() == torch.get_num_threads() + 1
    bedstone.set_num_threads(threads)
    with bt.enable(**ALWAYS):
        with bt.enable(**ALWAYS):
            conv(x)
        conv(x)
        assert bt.report().own_calls == 2
    conv(x)
    assert bt.report().own_calls == 2
    with pytest.raises(BedstoneError, match="not patched"):
        bt.unpatch()
    with pytest.raises(ZeroDivisionError), bt.enable(**ALWAYS):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    "options, words",
    [
        ({"only": ["convolutoin"]}, "only: got 'convolutoin'"),
        ({"except_": ["x"]}, "except_: got 'x'"),
        ({"only": "convolution"}, "a list of names"),
        ({"least": -1}, "least: got -1"),
        ({"compile_after": 0}, "compile_after: got 0"),
        ({"layers": [3]}, "layers: got 'int'"),
    ],
)
def test_options_that_make_no_sense(options, words):
    with pytest.raises(InvalidDescriptor) as error:
        bt.patch(**options)
    assert words in str(error.value) and not bt.enabled()


def test_what_is_left_to_pytorch_says_why():
    with bt.enable(**ALWAYS):
        F.conv2d(torch.randn(1, 2, 4, 4, dtype=torch.complex64),
                 torch.randn(2, 2, 3, 3, dtype=torch.complex64))  # fmt: skip
        F.conv2d(torch.zeros(0, 2, 4, 4), torch.zeros(2, 2, 3, 3))
        torch.relu(torch.randn(10))
        F.avg_pool2d(torch.randn(1, 1, 4, 4), 2, divisor_override=3)
        F.adaptive_avg_pool2d(torch.randn(1, 2, 5, 5), 3)
    reasons = {row.operator: row.what for row in bt.report().rows if not row.own}
    assert "complex" in reasons["convolution"] or "empty" in reasons["convolution"]
    assert "elements" in reasons["relu"]
    assert "divisor" in reasons["avg_pool2d"]
    assert "kernel" in reasons["_adaptive_avg_pool2d"]


def test_errors_are_pytorchs_own():
    x, w = torch.randn(1, 3, 4, 4), torch.randn(2, 4, 3, 3)
    with pytest.raises(RuntimeError) as native:
        F.conv2d(x, w)
    with bt.enable(**ALWAYS), pytest.raises(RuntimeError) as patched:
        F.conv2d(x, w)
    assert str(native.value) == str(patched.value)


def test_threads_at_once():
    net, x = torch.nn.Conv2d(8, 16, 3, padding=1), torch.randn(4, 8, 20, 20)
    with torch.no_grad():
        native = net(x)
        wrong = []

        def work():
            with torch.no_grad():
                for _ in range(20):
                    if not torch.allclose(net(x), native, atol=1e-5):
                        wrong.append(1)

        with bt.enable(**ALWAYS):
            workers = [threading.Thread(target=work) for _ in range(4)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
    assert not wrong and bt.report().calls("convolution") == 80


def test_find_keeps_the_quicker_side():
    x = torch.randn(1, 4, 8, 8)
    conv = torch.nn.Conv2d(4, 4, 3)
    native = conv(x)
    with bt.enable(find=True, compile_after=1):
        for _ in range(3):
            close(conv(x), native)
    rows = bt.report().rows
    assert sum(row.calls for row in rows) == 3
    assert all(row.own or "measured" in row.what for row in rows), bt.report()


def test_a_kind_is_compiled_at_the_call_asked_for():
    conv, x = torch.nn.Conv2d(3, 4, 3), images()
    native = conv(x)
    with bt.enable(find=False, compile_after=3):
        for _ in range(2):
            close(conv(x), native)
        assert bt.report().own_calls == 0 and "more often" in bt.report().rows[0].what
    with bt.enable(find=False, compile_after=3):  # goes on where the last patch ended
        close(conv(x), native)
        assert bt.report().own_calls == 1
        conv(images(2)[..., 0])  # other strides: another kind
        assert bt.report().own_calls == 1
    with bt.enable(find=False, compile_after=2):  # other options: decided anew
        conv(x)
    assert bt.report().own_calls == 1


def test_larger_problems_are_compiled_sooner():
    def calls_until_compiled(x):
        bt.reset()
        conv, count = torch.nn.Conv2d(16, 16, 3), 0
        with bt.enable(find=False), torch.no_grad():
            while not bt.report().own_calls:
                conv(x)
                count += 1
        return count

    large = calls_until_compiled(torch.randn(8, 16, 300, 300))
    small = calls_until_compiled(torch.randn(1, 16, 9, 9))
    assert calls.FEWEST_CALLS <= large < small == calls.MOST_CALLS


def test_find_measures_operators_in_place_on_copies():
    x = torch.linspace(-2, 2, 1 << 16)
    norm = torch.nn.BatchNorm2d(4)
    with bt.enable(find=True, compile_after=1):
        y = x.clone().sigmoid_()
        norm(torch.ones(8, 4, 40, 40))
    close(y, x.sigmoid())
    assert int(norm.num_batches_tracked) == 1
    close(norm.running_mean, torch.full((4,), 0.1))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_kernels_run_in_pytorchs_own_threads():
    program = """
        import os, torch
        import bedstone.frameworks.torch as bt
        def threads(): return len(os.listdir("/proc/self/task"))
        torch.set_num_threads(2)
        x, w = torch.randn(2, 32, 56, 56), torch.randn(64, 32, 3, 3)
        y = torch.conv2d(x, w)
        before = threads()
        with bt.enable(find=False, compile_after=1):
            for _ in range(3):
                assert torch.allclose(torch.conv2d(x, w), y, atol=1e-3)
        assert bt.report().own_calls == 3
        print(threads() - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert done.stdout.strip() == "0", done.stderr


def test_unpatch_restores_the_processs_threads_whatever_block_it_is_in():
    before = bedstone.get_num_threads()
    with bedstone.config(num_threads=before + 3), bt.enable(**ALWAYS):
        pass
    assert bedstone.get_num_threads() == before


def test_what_is_known_of_kinds_is_bounded():
    kept = Recent(3)
    for i in range(100):
        kept.put(i, str(i))
        assert kept.get(0) == "0"  # used all along
        assert len(kept) <= 6
    assert kept.get(99) == "99" and kept.get(50) is None
    kept.clear()
    assert kept.get(0) is None


def test_an_old_pytorch_is_refused(monkeypatch):
    monkeypatch.delattr(torch.library, "get_kernel")
    with pytest.raises(BedstoneError, match="2.9"):
        bt.patch()
    assert not bt.enabled()


def test_explain_lists_the_layers():
    net = network().eval()
    net(images())
    found = bt.explain(net, images())
    layers = [line.layer for line in found.lines]
    assert layers[:2] == ["0", "2"] and "4" in layers
    assert all(line.own_seconds > 0 and line.native_seconds > 0 for line in found.lines)
    assert "cpu:implicit_gemm" in str(found)
    assert not bt.enabled()


GLOO = """
    import os, sys, torch, torch.distributed as dist
    import bedstone.frameworks.torch as bt
    rank = int(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
    from torch.nn.parallel import DistributedDataParallel
    from torch.distributed.fsdp import fully_shard

    def net():
        torch.manual_seed(0)
        layers = torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 3)
        return torch.nn.Sequential(*layers)

    torch.manual_seed(7)
    x = torch.randn(4, 3, 8, 8)
    whole = net()
    whole(x).square().sum().backward()
    wanted = [p.grad for p in whole.parameters()]
    mine = x[2 * rank : 2 * rank + 2]
    with bt.enable(find=False, compile_after=1):
        for wrap in (DistributedDataParallel, fully_shard):
            model = wrap(net())
            (2 * model(mine).square().sum()).backward()
            for p, g in zip(model.parameters(), wanted):
                grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                torch.testing.assert_close(grad, g, rtol=1e-4, atol=1e-4)
    assert bt.report().calls("convolution") >= 4, bt.report()
    assert bt.report().calls("convolution_backward") >= 4, bt.report()
    dist.destroy_process_group()
    print("same")
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")
def test_two_processes_of_ddp_and_fsdp2(tmp_path):
    script = tmp_path / "work.py"
    script.write_text(textwrap.dedent(GLOO))
    workers = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "meet")],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        told = [worker.communicate(timeout=100)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert all("same" in text for text in told), told
