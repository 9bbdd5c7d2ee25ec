"""The way to a GPU, without one: handlers are called with call frames made here, kernels run in
Triton's interpreter, and programs are lowered for a platform that is not there."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from jax_cases import bj, clean, normal  # noqa: E402, F401 (clean: of every test)

from bedstone.frameworks.jax import handler, interface  # noqa: E402

WORDS = 48  # 8-byte fields of the longest structure
Asked = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
ERROR, MESSAGE_AT, CODE_AT, LAST = 0xE44, 16, 24, 24


class Frame:
    """A call frame as XLA makes it, and its table of functions."""

    def __init__(self, inputs, results, stream=0x5000, device=3, refuses=None):
        self.stream, self.device, self.refuses, self.message = stream, device, refuses, None
        self.kept = []
        api = self.words()
        for place, function in (
            (interface.API_ERROR_CREATE, self.create),
            (interface.API_STREAM_GET, self.tell_stream),
            (interface.API_DEVICE_ORDINAL_GET, self.tell_device),
        ):
            made = Asked(function)
            self.kept.append(made)
            api[place // 8] = ctypes.cast(made, ctypes.c_void_p).value
        frame = self.words()
        frame[interface.FRAME_API // 8] = ctypes.addressof(api)
        frame[interface.FRAME_CONTEXT // 8] = self.context = 0xC0
        frame[interface.FRAME_ARGUMENTS // 8] = self.buffers(inputs)
        frame[interface.FRAME_RESULTS // 8] = self.buffers(results)
        self.frame = frame

    def words(self):
        made = (ctypes.c_uint64 * WORDS)()
        self.kept.append(made)
        return made

    def buffers(self, addresses):
        found = self.words()
        for i, address in enumerate(addresses):
            buffer = self.words()
            buffer[interface.BUFFER_DATA // 8] = address
            found[i] = ctypes.addressof(buffer)
        return ctypes.addressof(found)

    def told(self, at, value, kind):
        size = ctypes.c_uint64.from_address(at).value
        assert size == LAST + ctypes.sizeof(kind)
        assert ctypes.c_uint64.from_address(at + 8).value == 0  # no extension
        assert ctypes.c_uint64.from_address(at + 16).value == self.context
        kind.from_address(at + LAST).value = value
        return ERROR if kind is self.refuses else 0

    def tell_stream(self, at):
        return self.told(at, self.stream, ctypes.c_void_p)

    def tell_device(self, at):
        return self.told(at, self.device, ctypes.c_int32)

    def create(self, at):
        message = ctypes.c_void_p.from_address(at + MESSAGE_AT).value
        self.message = ctypes.string_at(message).decode()
        assert ctypes.c_int32.from_address(at + CODE_AT).value == interface.INTERNAL_ERROR
        return ERROR

    def give(self, address):
        return Asked(address)(ctypes.addressof(self.frame))


def made(launch, inputs, results, number=7):
    address = ctypes.cast(launch, ctypes.c_void_p).value
    return interface.compiled(interface.gpu_handler(inputs, results, address, number))


def test_a_frame_is_taken_apart():
    seen = []

    @interface.Launch
    def launch(number, addresses, stream, device):
        seen.append((number, list((ctypes.c_uint64 * 4).from_address(addresses)), stream, device))
        return 0

    address, engine = made(launch, 2, 2)
    assert Frame([11, 22], [33, 44]).give(address) is None
    assert seen == [(7, [11, 22, 33, 44], 0x5000, 3)]
    assert Frame([1, 2], [3, 4], stream=0, device=0).give(address) is None
    assert seen[1] == (7, [1, 2, 3, 4], None, 0)
    assert engine


def test_errors_go_back_to_xla():
    said = ctypes.create_string_buffer(b"no kernel")

    @interface.Launch
    def launch(number, addresses, stream, device):
        return ctypes.addressof(said)

    address, engine = made(launch, 1, 1)
    frame = Frame([1], [2])
    assert frame.give(address) == ERROR and frame.message == "no kernel"
    for refused in (ctypes.c_void_p, ctypes.c_int32):  # the stream, the device
        frame = Frame([1], [2], refuses=refused)
        assert frame.give(address) == ERROR and frame.message is None
    assert engine


def test_the_answer_for_metadata_says_that_calls_may_be_replayed():
    address, engine = made(interface.Launch(lambda *a: 0), 1, 1)
    metadata, extension = (ctypes.c_uint64 * 8)(), (ctypes.c_uint64 * 8)()
    extension[interface.EXTENSION_TYPE // 8] = interface.METADATA
    extension[interface.EXTENSION_METADATA // 8] = ctypes.addressof(metadata)
    frame = Frame([1], [2])
    frame.frame[interface.FRAME_EXTENSION // 8] = ctypes.addressof(extension)
    assert frame.give(address) is None
    raw = bytes(metadata)
    fields = (interface.VERSION_MAJOR, interface.VERSION_MINOR, interface.TRAITS)
    found = [int.from_bytes(raw[at : at + 4], "little") for at in fields]
    assert found == [*interface.version(), interface.REPLAYABLE]
    assert engine


INTERPRETED = """
    import ctypes, sys
    import numpy as np
    import jax
    import bedstone
    from bedstone.frameworks.jax import handler, interface
    sys.path.insert(0, sys.argv[1])
    from test_jax_gpu import ERROR, Frame

    found = []
    handler._gpu = lambda: "cuda:0"
    jax.ffi.register_ffi_target = lambda name, capsule, platform: found.append((name, platform))

    def run(text, alpha, device=0):
        problem = bedstone.parse_problem(text)
        target = handler.target(problem, "cuda", alpha)
        assert not isinstance(target, str), target
        assert found[-1] == (target.name, "CUDA") and "triton:" in target.algorithm
        random = np.random.default_rng(0)
        arrays = [random.integers(-3, 4, o.desc.dims).astype(np.float32) for o in problem.operands]
        room = np.zeros(target.workspace + 64, np.uint8)
        inputs = [a.ctypes.data for a in arrays[: len(problem.inputs)]]
        results = [a.ctypes.data for a in arrays[len(problem.inputs) :]]
        frame = Frame(inputs, results + [room.ctypes.data] * bool(target.workspace), 0, device)
        address = ctypes.cast(handler._kept[-1][1], ctypes.c_void_p).value
        return problem, arrays, frame, frame.give(address)

    for text in ("convolution forward n1c2h5k3r3p1 float32",
                 "convolution backward_filter n2c3h6k4r3p1 float32",
                 "pooling backward n1c2h4r2u2 float32 mode=max"):
        problem, arrays, frame, said = run(text, 2.0)
        assert said is None, frame.message
        wanted = np.zeros_like(arrays[-1])
        plan = bedstone.Handle().plan(problem, "reference:*", None)
        plan.execute(*arrays[:-1], wanted, alpha=2.0, workspace=np.zeros(plan.workspace_size + 1))
        assert np.array_equal(arrays[-1], wanted), text
    _, _, frame, said = run("activation forward 2x3 kind=relu float32", 1.0, device=5)
    assert said == ERROR and "cuda:5" in frame.message, frame.message
    print("equal")
"""


def test_plans_run_from_a_frame_in_the_interpreter(tmp_path):
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(INTERPRETED), os.path.dirname(__file__)],
        env={**os.environ, "TRITON_INTERPRET": "1", "BEDSTONE_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == "equal\n", done.stderr[-3000:]


def lowered(function, *operands):
    """The text of the program for CUDA, and the problems that it asked kernels for."""
    asked = []

    def choose(problem):
        asked.append(problem)
        return ("triton:some", 64) if problem.primitive != "softmax" else "none here"

    with handler.ahead(choose), bj.enable(only=bj.operators()):
        text = jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    return text, asked


def test_programs_are_lowered_for_cuda():
    x, w = normal(2, 4, 8, 8), normal(6, 4, 3, 3)

    def function(x, w):
        return jnp.tanh(lax.conv(x, w, (1, 1), "SAME")).sum()

    text, asked = lowered(jax.grad(function, (0, 1)), x, w)
    assert text.count("custom_call @bedstone_cuda_") == 5 and "stablehlo.convolution" not in text
    assert "bedstone_cpu" not in text and "tensor<64xui8>" in text  # the workspace, a result
    assert {p.direction for p in asked} >= {"forward", "backward", "backward_data"}
    assert not isinstance(handler.target(asked[0], "cpu"), str)  # nothing is left of it here
    text, _ = lowered(jax.nn.softmax, x)
    assert "bedstone" not in text


@pytest.mark.parametrize(
    "precision, math",
    [(None, "tf32"), ("high", "tf32"), ("highest", "ieee"), ((None, "highest"), "ieee")],
)
def test_float32_on_a_gpu_is_as_precise_as_it_is_asked(precision, math):
    x, w = normal(2, 4, 8, 8), normal(6, 4, 3, 3)

    def function(x, w, precision=precision):
        return lax.conv(x, w, (1, 1), "SAME", precision=precision)

    _, asked = lowered(lambda x, w: jax.vjp(function, x, w)[1](function(x, w)), x, w)
    assert {p.math for p in asked} == {math} and len(asked) >= 3
    _, asked = lowered(function, x.astype("bfloat16"), w.astype("bfloat16"))
    assert {p.math for p in asked} == {"ieee"}
    if precision is None:
        with jax.default_matmul_precision("float32"):
            _, asked = lowered(function, x, w)
        assert {p.math for p in asked} == {"ieee"}


def test_other_platforms_are_jaxs_own(monkeypatch):
    monkeypatch.setattr(handler, "platform", lambda: "tpu")
    with bj.enable():
        lax.conv(normal(1, 2, 6, 6), normal(3, 2, 3, 3), (1, 1), "SAME")
    assert [row.what for row in bj.report().rows] == ["the platform tpu"]
    assert "platform" in handler.target(None, "tpu")


def test_the_default_device_decides():
    assert handler.platform() == "cpu"
    with jax.default_device(jax.devices("cpu")[0]):
        assert handler.platform() == "cpu"
    assert np.asarray(bj.relu(jnp.ones(3))).tolist() == [1, 1, 1]
