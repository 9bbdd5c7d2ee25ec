"""The harness can fail: algorithms with one fault each, and the fault is found."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
import sys

import numpy as np
import pytest

from bedstone.plan import registry
from bedstone.plan.algorithm import Algorithm
from bedstone.plan.handle import Handle
from bedstone.spec.problem import parse_problem
from bedstone.spec.tensor import TensorDesc
from bedstone.testing import conformance, fuzz, gaps, problems
from bedstone.testing.harness import Case, Mismatch, run_case
from bedstone.testing.memory import POISON, FencedMemory, Image

LINE = "convolution forward n2c3h6w5k4r3s2p1 float32"
NAME = "fake:faulty"


class Faulty(Algorithm):
    """The reference, with `fault(problem, pointers, run)` around each call."""

    name = NAME

    def __init__(self, fault):
        self.fault = fault

    def supports(self, problem, device):
        return None

    def estimate(self, problem, device):
        return 1.0

    def build(self, problem, device):
        reference = registry.algorithms_of("reference", problem.primitive)[0]
        kernel = reference.build(problem, device)

        def call(pointers, workspace, alpha, beta, stream):
            self.fault(problem, pointers, lambda: kernel(pointers, workspace, alpha, beta, stream))

        return call


def poke(address, value):
    ctypes.c_float.from_address(address).value = value


def peek(address):
    return ctypes.c_float.from_address(address).value


def check_of(monkeypatch, fault, line=LINE, **case):
    """The check at which a faulty algorithm fails, or None."""
    monkeypatch.setattr(registry, "candidates", lambda primitive, device: (Faulty(fault),))
    try:
        run_case(Case(parse_problem(line), NAME, **case), Handle("cpu"))
    except Mismatch as mismatch:
        return mismatch.check
    return None


def test_the_reference_passes(monkeypatch):
    assert check_of(monkeypatch, lambda problem, pointers, run: run()) is None


def test_one_wrong_element(monkeypatch):
    def fault(problem, pointers, run):
        run()
        poke(pointers[-1] + 4 * 17, peek(pointers[-1] + 4 * 17) + 1)

    assert check_of(monkeypatch, fault) == "values"
    assert check_of(monkeypatch, fault, fill="random") == "values"


@pytest.mark.parametrize("relative, check", [(1e-7, None), (1e-4, "values")])
def test_rounding_is_told_from_error(monkeypatch, relative, check):
    def fault(problem, pointers, run):
        run()
        poke(pointers[-1], peek(pointers[-1]) * (1 + relative))

    assert check_of(monkeypatch, fault, fill="random") == check


def test_integers_must_be_exact(monkeypatch):
    def fault(problem, pointers, run):
        run()
        for i in range(problem.y.size):
            poke(pointers[-1] + 4 * i, peek(pointers[-1] + 4 * i) * (1 + 2**-23))

    assert check_of(monkeypatch, fault, fill="integers") == "values"


@pytest.mark.parametrize("offset", [-1, 2 * 4 * 7 * 6])
def test_a_write_outside_the_output(monkeypatch, offset):
    def fault(problem, pointers, run):
        run()
        poke(pointers[-1] + 4 * offset, 0.0)

    assert parse_problem(LINE).y.dims == (2, 4, 6, 6)
    offset = offset if offset < 0 else parse_problem(LINE).y.size
    assert check_of(monkeypatch, fault, placement="middle") == "guards"


def test_a_write_into_a_gap(monkeypatch):
    line = "activation forward 4x3 float32 y=5,1"

    def fault(problem, pointers, run):
        run()
        poke(pointers[-1] + 4 * 3, 0.0)

    assert check_of(monkeypatch, fault, line) == "guards"


def test_a_changed_input(monkeypatch):
    def fault(problem, pointers, run):
        run()
        poke(pointers[0], 100.0)

    assert check_of(monkeypatch, fault) == "inputs"


def test_an_output_read_though_beta_is_zero(monkeypatch):
    def fault(problem, pointers, run):
        before = peek(pointers[-1])
        run()
        poke(pointers[-1], peek(pointers[-1]) + 0.0 * before)

    assert check_of(monkeypatch, fault) == "values"
    assert check_of(monkeypatch, fault, beta=1.0) is None


def test_an_input_read_beside_its_elements(monkeypatch):
    def fault(problem, pointers, run):
        run()
        poke(pointers[-1], peek(pointers[-1]) + 0.0 * peek(pointers[0] - 4))

    assert check_of(monkeypatch, fault, placement="middle") == "values"


def test_a_second_run_that_differs(monkeypatch):
    runs = itertools.count()

    def fault(problem, pointers, run):
        run()
        value = peek(pointers[-1])
        poke(pointers[-1], value * (1 + 2**-23 * next(runs)))

    assert check_of(monkeypatch, fault, fill="random") == "repeat"


def test_a_nan_that_got_lost(monkeypatch):
    def fault(problem, pointers, run):
        run()
        y = (ctypes.c_float * problem.y.size).from_address(pointers[-1])
        array = np.ctypeslib.as_array(y)
        array[np.isnan(array)] = 0.0

    assert check_of(monkeypatch, fault, fill="special") == "values"


def test_a_kernel_that_cannot_be_built(monkeypatch):
    class Broken(Faulty):
        def build(self, problem, device):
            raise ZeroDivisionError("tiles of no rows")

    monkeypatch.setattr(registry, "candidates", lambda primitive, device: (Broken(None),))
    with pytest.raises(Mismatch, match="build: ZeroDivisionError: tiles of no rows"):
        run_case(Case(parse_problem(LINE), NAME), Handle("cpu"))


def test_gaps_excuse_and_an_unexpected_pass_fails(monkeypatch):
    def wrong_on_specials(problem, pointers, run):
        run()
        if np.isnan(np.array([peek(pointers[0] + 4 * i) for i in range(problem.x.size)])).any():
            poke(pointers[-1] + 4, 12345.0)

    monkeypatch.setattr(registry, "candidates", lambda p, d: (Faulty(wrong_on_specials),))
    job = conformance.Job(NAME, parse_problem(LINE))
    assert conformance.run_job(job, Handle("cpu"))
    gap = gaps.Gap("fake:*", "loses NaN", problem="convolution forward *", fill="special")
    assert not conformance.run_job(job, Handle("cpu"), (gap,))
    too_wide = gaps.Gap("fake:*", "all of it", fill="*")
    assert "unexpected pass" in "".join(conformance.run_job(job, Handle("cpu"), (too_wide,)))


def test_gap_files_can_be_read(tmp_path):
    for backend in registry.BUILT_IN:
        for gap in gaps.load(backend):
            assert gap.algorithm.startswith(f"{backend}:") and gap.reason
    path = tmp_path / "mine.toml"
    path.write_text('[[gap]]\nalgorithm = "mine:*"\nreason = "none"\nproblme = "x"\n')
    with pytest.raises(ValueError, match="the keys of Gap"):
        gaps.load("mine", path)


def test_a_fence_stops_a_read_past_the_end():
    program = (
        "import ctypes, numpy; from bedstone.testing.memory import FencedMemory\n"
        "m = FencedMemory(); b = m.place(numpy.zeros(100, numpy.uint8), {placement!r})\n"
        "ctypes.c_char.from_address(b.ctypes.data + {offset}).value\nprint('read')"
    )
    for placement, offset, dies in (
        ("end", 99, False), ("end", 100, True), ("start", 0, False), ("start", -1, True),
    ):  # fmt: skip
        code = program.format(placement=placement, offset=offset)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert (done.returncode != 0) is dies, (placement, offset, done)


def test_images_keep_gaps_and_origin():
    desc = TensorDesc((2, 3), (-8, 2), "float32")
    image = Image.of(desc, "middle", np.arange(6.0).reshape(2, 3), shift=1)
    words = image.data.view(np.float32)
    at = image.origin // 4
    assert [words[at], words[at + 2], words[at - 8]] == [0.0, 1.0, 3.0]
    assert image.data[image.before + 4] == POISON
    assert image.guards_unchanged(image.data)
    assert FencedMemory().place(image.data, "end").tobytes() == image.data.tobytes()


@pytest.mark.parametrize("primitive", problems.primitives())
def test_lines_give_back_their_problems(primitive):
    for problem in problems.curated(primitive) + problems.draw_distinct(primitive, 500, 1):
        again = parse_problem(str(problem))
        assert str(again) == str(problem)
        for a, b in zip(again.operands, problem.operands, strict=True):
            assert (a.name, a.role, a.desc.dims) == (b.name, b.role, b.desc.dims)
            assert a.desc.dtype is b.desc.dtype


def test_every_primitive_has_problems():
    from bedstone.spec.problem import PRIMITIVES

    assert problems.primitives() == tuple(PRIMITIVES)


def test_a_line_alone_repeats_its_case():
    problem = problems.draw_distinct("convolution", 5, 3)[-1]
    assert fuzz.case_of(problem, NAME) == fuzz.case_of(parse_problem(str(problem)), NAME)


def test_failures_are_made_smaller(monkeypatch):
    def wrong_in_wide_images(problem, pointers, run):
        run()
        if problem.x.dims[3] >= 4:
            poke(pointers[-1], 12345.0)

    monkeypatch.setattr(registry, "candidates", lambda p, d: (Faulty(wrong_in_wide_images),))
    (failure,) = fuzz.check(parse_problem(LINE.replace("float32", "float32 bias")), Handle("cpu"))
    small = failure.case.problem
    assert small.x.dims == (1, 1, 1, 4) and small.w.dims == (1, 1, 1, 1) and not small.epilogue


def test_the_fuzzer_reports_a_crash(monkeypatch):
    from bedstone.testing.fuzz import Budget, fuzz

    done, failures = fuzz("cpu", ("softmax",), seed=1, budget=Budget(count=5))
    assert (done, failures) == (5, [])
    monkeypatch.setattr("bedstone.testing.fuzz._child", _dies)
    done, failures = fuzz("cpu", ("softmax",), seed=1, budget=Budget(count=2))
    assert "crash: exit code -11" in failures[0] and "softmax forward 3 float32" in failures[0]


def _dies(channel, device, primitives, seed, skip, budget, start):
    """Stands for a child whose kernel reads where nothing is."""
    import os
    import signal

    if skip >= budget.count:
        channel.send(("end", skip, ""))
        return
    channel.send(("at", skip + 1, "softmax forward 3 float32"))
    os.kill(os.getpid(), signal.SIGSEGV)
