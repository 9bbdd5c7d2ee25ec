"""Backends: the built-in ones, and packages outside that join by an entry point."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from bedstone.plan import registry
from bedstone.plan.device import Device, cpu_device
from bedstone.spec.problem import PRIMITIVES

PACKAGE = {
    "outside/__init__.py": """
        DEVICE_KINDS = ("cpu",)
        def missing():
            import os
            return os.environ.get("OUTSIDE_MISSING")
    """,
    "outside/activation.py": """
        import ctypes
        from bedstone.plan.algorithm import Algorithm

        class Relu(Algorithm):
            name = "outside:relu"
            def supports(self, problem, device):
                if problem.activation.kind != "relu" or problem.direction != "forward":
                    return "relu forward only"
                x, y = problem.x, problem.y
                if x.dtype != "float32" or not x.is_packed() or not y.is_packed():
                    return "packed float32 only"
            def estimate(self, problem, device):
                return 1e-9
            def build(self, problem, device):
                count = problem.x.size
                def call(pointers, workspace, alpha, beta, stream):
                    x, y = ((ctypes.c_float * count).from_address(p) for p in pointers)
                    for i, v in enumerate(x):
                        value = alpha * (0.0 if v < 0 else v)
                        y[i] = value + beta * y[i] if beta else value
                return call

        ALGORITHMS = (Relu(),)
    """,
    "outside-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n",
    "outside-1.0.dist-info/entry_points.txt": "[bedstone.backends]\noutside = outside\n",
}


@pytest.fixture
def outside(tmp_path):
    """Runs a program in a process where the package `outside` is installed."""
    for name, text in PACKAGE.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))

    def run(program, **environment):
        search = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        everything = {**os.environ, "PYTHONPATH": search, "BEDSTONE_BACKEND": "", **environment}
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            env=everything, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


PLAN = """
    import bedstone
    for kind in ("relu", "tanh"):
        line = f"activation forward 3 float32 kind={kind}"
        with bedstone.config(backend=BACKENDS):
            plan = bedstone.Handle("cpu").plan(bedstone.parse_problem(line))
        print(plan.algorithm, plan.choice.reasons)
"""


def test_an_outside_backend_is_asked_first(outside):
    out = outside("from bedstone.plan import registry; print(registry.backends())")
    assert out.startswith("('outside', ") and "'reference')" in out


def test_an_outside_backend_is_chosen_where_it_can(outside):
    first, second = outside(PLAN.replace("BACKENDS", "'outside,reference'")).splitlines()
    assert first.startswith("outside:relu")
    assert second.startswith("reference:direct") and "'outside:relu': 'relu forward only'" in second


def test_an_outside_backend_that_is_missing_says_why(outside):
    out = outside(PLAN.replace("BACKENDS", "'outside,reference'"), OUTSIDE_MISSING="no such chip")
    assert out.splitlines()[0].startswith("reference:direct")
    assert "'outside': 'no such chip'" in out


def test_an_outside_backend_runs_the_suite(outside):
    program = """
        from bedstone.testing.conformance import run_conformance
        report = run_conformance(backend="outside")
        print(report)
        report.raise_for_failures()
    """
    out = outside(program)
    assert "problems  outside:relu" in out and "0 failures" in out


def test_built_in_backends_and_their_files():
    assert registry.BUILT_IN[-1] == "reference"
    for backend in registry.BUILT_IN:
        for primitive in PRIMITIVES:
            for algorithm in registry.algorithms_of(backend, primitive):
                assert algorithm.backend == backend


def test_the_reference_has_every_primitive():
    for primitive in PRIMITIVES:
        names = [a.name for a in registry.candidates(primitive, cpu_device())]
        assert names[-1] == "reference:direct"


def test_names_are_unique():
    for primitive in PRIMITIVES:
        names = [a.name for b in registry.BUILT_IN for a in registry.algorithms_of(b, primitive)]
        assert len(set(names)) == len(names)


def test_backends_of_other_devices_are_not_asked():
    device = Device("cuda", 0, "imaginary", "sm_90")
    for algorithm in registry.candidates("convolution", device):
        assert "cuda" in registry.device_kinds(algorithm.backend)
    for backend in registry.unavailable(cpu_device()):
        assert "cpu" in registry.device_kinds(backend)
