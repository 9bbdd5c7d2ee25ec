"""Plans are made once and kept, also when many threads ask at the same time."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from plan_fakes import PROBLEM, Fake

from bedstone import Handle, InvalidDescriptor, config, default_handle
from bedstone.plan import handle as handle_module
from bedstone.spec.problem import parse_problem


def problem(width):
    return parse_problem(f"activation forward 2x{width} float32 kind=relu")


def test_the_second_request_is_the_same_plan(use):
    (fake,) = use(Fake("a:x"))
    handle = Handle("cpu")
    assert handle.plan(PROBLEM) is handle.plan(parse_problem(str(PROBLEM)))
    assert handle.plan(problem(4)) is not handle.plan(PROBLEM)
    assert fake.built == 2
    assert Handle("cpu").plan(PROBLEM) is not handle.plan(PROBLEM)


def test_other_settings_make_another_plan(use):
    use(Fake("a:x"), Fake("b:y", 2.0))
    handle = Handle("cpu")
    first = handle.plan(PROBLEM)
    with config(algorithm="b:y"):
        assert handle.plan(PROBLEM).algorithm == "b:y"
    with config(cpu_target="haswell"):
        assert handle.plan(PROBLEM) is not first
    assert handle.plan(PROBLEM) is first
    assert handle.plan(PROBLEM, workspace_limit=None) is not first


def test_many_threads_build_once(use):
    (fake,) = use(Fake("a:x"))
    handle = Handle("cpu")
    barrier, plans = threading.Barrier(16), []

    def ask():
        barrier.wait()
        for width in range(1, 5):
            plans.append(handle.plan(problem(width)))

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fake.built == 4
    assert len({id(p) for p in plans}) == 4 and len(plans) == 64


def test_many_threads_run_one_plan():
    plan = Handle("cpu").plan(PROBLEM)
    wrong = []

    def work(seed):
        for i in range(50):
            x = np.full((2, 3), seed * 100.0 + i, np.float32)
            y = np.empty_like(x)
            plan.execute(x, y)
            if not np.array_equal(x, y):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_failed_build_leaves_nothing_behind(use):
    class Flaky(Fake):
        def build(self, problem, device):
            if self.built == 0:
                self.built = 1
                raise MemoryError("try again")
            return super().build(problem, device)

    use(Flaky("a:x"))
    handle = Handle("cpu")
    with pytest.raises(MemoryError):
        handle.plan(PROBLEM)
    assert handle.plan(PROBLEM).algorithm == "a:x"


def test_plans_kept_are_bounded(use, monkeypatch):
    (fake,) = use(Fake("a:x"))
    monkeypatch.setattr(handle_module, "PLAN_LIMIT", 3)
    handle = Handle("cpu")
    kept = [handle.plan(problem(width)) for width in range(1, 6)]
    assert handle.plan(problem(5)) is kept[4]
    built = fake.built
    handle.plan(problem(1))
    assert fake.built == built + 1
    assert len(handle._plans) == 3


def test_devices():
    assert str(Handle("cpu").device) == "cpu"
    assert default_handle("cpu") is default_handle("cpu")
    for text in ("tpu", "cuda:x", "cpu:1", ""):
        with pytest.raises(InvalidDescriptor, match="device"):
            Handle(text)


def test_a_forced_setting_steers_only_primitives_that_have_it() -> None:
    import bedstone

    convolution = bedstone.parse_problem("convolution forward n1c2h4k2r1 float32")
    softmax = bedstone.parse_problem("softmax forward 2x3 float32 axes=1")
    handle = bedstone.Handle()
    with bedstone.config(algorithm="cpu:implicit_gemm"):
        assert handle.plan(convolution).algorithm == "cpu:implicit_gemm"
        assert handle.plan(softmax).algorithm != "cpu:implicit_gemm"
    with (
        bedstone.config(algorithm="cpu:nonsense"),
        pytest.raises(bedstone.InvalidDescriptor, match="cpu:nonsense"),
    ):
        handle.plan(softmax)
