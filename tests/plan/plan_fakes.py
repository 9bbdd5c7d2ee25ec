"""Tiny algorithms for tests of planning: they compute by the reference and say as they are told."""

from __future__ import annotations

import threading
import time

from bedstone.plan import registry
from bedstone.plan.algorithm import Algorithm
from bedstone.spec.problem import parse_problem

PROBLEM = parse_problem("activation forward 2x3 float32 kind=relu")


class Fake(Algorithm):
    """Takes everything, unless told a reason; `built` counts builds, `calls` calls."""

    def __init__(self, name, seconds=1.0, reason=None, workspace=0, deterministic=True, delay=0.0):
        self.name = name
        self.seconds, self.reason, self.bytes = seconds, reason, workspace
        self.deterministic = deterministic
        self.delay = delay  # of each call, in seconds
        self.wrong = False  # whether it computes something else
        self.built = self.calls = 0
        self.lock = threading.Lock()

    def supports(self, problem, device):
        return self.reason

    def workspace(self, problem, device):
        return self.bytes

    def estimate(self, problem, device):
        return self.seconds

    def build(self, problem, device):
        with self.lock:
            self.built += 1
        time.sleep(0.01)  # long enough for another thread to come in between
        kernel = registry.algorithms_of("reference", problem.primitive)[0].build(problem, device)

        def call(pointers, workspace, alpha, beta, stream):
            self.calls += 1
            self.last_workspace = workspace
            time.sleep(self.delay)
            kernel(pointers, workspace, alpha * (2.0 if self.wrong else 1.0), beta, stream)

        call.description = f"tiles of {self.name}"
        return call
