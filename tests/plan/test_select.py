"""Which algorithm is taken, and what is said of the others."""

from __future__ import annotations

import dataclasses
import math

import pytest
from plan_fakes import PROBLEM, Fake

from bedstone import Handle, InvalidDescriptor, NotSupported, config
from bedstone.plan.device import cpu_device
from bedstone.plan.select import choose, survey

LOOSE = dataclasses.replace(PROBLEM, deterministic=False)


def plan(problem=PROBLEM, **options):
    return Handle("cpu").plan(problem, **options)


def test_the_least_estimate_wins(use):
    use(Fake("a:slow", 2e-3), Fake("a:quick", 1e-3), Fake("b:slower", 3e-3))
    made = plan()
    assert made.algorithm == "a:quick"
    assert made.choice.why == "the least estimated time of 3 candidates"
    assert made.choice.reasons == {
        "a:slow": "estimated 2 ms against 1",
        "b:slower": "estimated 3 ms against 1",
    }


def test_an_infinite_estimate_is_taken_by_name_alone(use):
    use(Fake("a:untried", math.inf), Fake("b:known", 1e-3))
    made = plan()
    assert made.algorithm == "b:known"
    assert "only by name or by find" in made.choice.reasons["a:untried"]
    named = plan(algorithm="a:untried")
    assert named.algorithm == "a:untried" and "estimated" not in named.explain().split("not ")[0]


def test_equal_estimates_go_by_the_order_of_the_registry(use):
    use(Fake("b:x", 1.0), Fake("a:x", 1.0))
    assert plan().algorithm == "b:x"


def test_reasons_are_kept(use):
    use(Fake("a:x", reason="odd channels"), Fake("a:y"), unavailable={"c": "not installed"})
    made = plan()
    assert made.algorithm == "a:y"
    assert made.choice.why == "the only algorithm besides the reference that takes the problem"
    assert made.choice.reasons == {"a:x": "odd channels", "c": "not installed"}


def test_the_reference_comes_last_however_quick(use):
    use(Fake("reference:direct", 1e-9), Fake("a:x", 1.0))
    made = plan()
    assert made.algorithm == "a:x"
    assert made.choice.reasons["reference:direct"] == "takes the problem, but is the last resort"
    use(Fake("a:x", reason="no"), Fake("reference:direct", 1.0))
    made = plan()
    assert made.algorithm == "reference:direct"
    assert made.choice.why == "fallback: every other algorithm declined"


def test_not_supported_lists_everyone(use):
    use(Fake("a:x", reason="odd"), Fake("b:y", workspace=9), unavailable={"c": "not installed"})
    with pytest.raises(NotSupported) as raised:
        plan()
    assert raised.value.reasons == {
        "a:x": "odd",
        "b:y": "needs 9 bytes of workspace; the limit is 0",
        "c": "not installed",
    }
    for line in (str(PROBLEM), "a:x: odd", "b:y: needs 9 bytes", "c: not installed"):
        assert line in str(raised.value)
    use()
    with pytest.raises(NotSupported, match="no algorithm is registered"):
        plan()


@pytest.mark.parametrize(
    "limit, taken", [(0, "a:none"), (99, "a:none"), (100, "a:some"), (None, "a:much")]
)
def test_workspace_limit(use, limit, taken):
    use(Fake("a:none", 3.0), Fake("a:some", 2.0, workspace=100), Fake("a:much", 1.0, workspace=900))
    made = plan(workspace_limit=limit)
    assert made.algorithm == taken
    assert made.workspace_size == {"a:none": 0, "a:some": 100, "a:much": 900}[taken]


def test_negative_limit(use):
    use(Fake("a:x"))
    with pytest.raises(InvalidDescriptor, match="workspace_limit: got -1, expected 0 or more"):
        plan(workspace_limit=-1)


def test_determinism_is_the_default(use):
    use(Fake("a:sure", 2.0), Fake("a:racy", 1.0, deterministic=False))
    made = plan()
    assert made.algorithm == "a:sure"
    assert "deterministic=False would allow it" in made.choice.reasons["a:racy"]
    assert plan(LOOSE).algorithm == "a:racy"


def test_forced_by_name_and_by_pattern(use):
    use(Fake("a:x", 2.0), Fake("a:y", 3.0), Fake("b:z", 1.0))
    made = plan(algorithm="a:y")
    assert made.algorithm == "a:y"
    assert made.choice.why == "asked for by name (a:y)"
    assert made.choice.reasons["b:z"] == "the caller asked for a:y"
    assert plan(algorithm="a:*").algorithm == "a:x"


def test_forced_algorithm_that_declines(use):
    use(Fake("a:x", reason="odd"), Fake("b:y"))
    with pytest.raises(NotSupported) as raised:
        plan(algorithm="a:x")
    assert raised.value.reasons == {"a:x": "odd", "b:y": "the caller asked for a:x"}


def test_unknown_algorithm_names_the_known(use):
    use(Fake("a:x"), Fake("b:y"))
    with pytest.raises(InvalidDescriptor, match=r"algorithm: got 'c:z', expected one of.*a:x.*b:y"):
        plan(algorithm="c:z")


def test_setting_forces_unless_the_call_does(use):
    use(Fake("a:x", 1.0), Fake("b:y", 2.0))
    handle = Handle("cpu")
    with config(algorithm="b:*"):
        assert handle.plan(PROBLEM).algorithm == "b:y"
        assert handle.plan(PROBLEM, algorithm="a:x").algorithm == "a:x"
    assert handle.plan(PROBLEM).algorithm == "a:x"


def test_measured_times_overrule_estimates(use):
    use(Fake("a:x", 1.0), Fake("b:y", 2.0), Fake("c:z", 0.5))
    choice = choose(PROBLEM, cpu_device(), measured={"a:x": 5e-3, "b:y": 4e-3})
    assert choice.algorithm.name == "b:y"
    assert choice.why == "the quickest of 2 measured"
    assert choice.reasons["a:x"] == "measured 5 ms against 4"


def test_supports_is_asked_only_of_those_in_question(use):
    class Touchy(Fake):
        def supports(self, problem, device):
            raise RuntimeError("should not have been asked")

    use(Touchy("a:x"), Fake("b:y"))
    assert [a.name for a in survey(PROBLEM, cpu_device(), 0, "b:y").accepted] == ["b:y"]


def test_explain_says_all_of_it(use):
    use(Fake("a:x", 1e-3), Fake("b:y", 2e-3), Fake("c:z", reason="odd channels"))
    text = plan().explain()
    for words in (
        str(PROBLEM), "on cpu", "runs a:x: the least estimated time of 2 candidates",
        "tiles of a:x", "workspace 0 bytes, estimated 1 ms", "not b:y: estimated 2 ms against 1",
        "not c:z: odd channels",
    ):  # fmt: skip
        assert words in text, words
    assert "a:x" in repr(plan())


def test_an_empty_result_needs_no_algorithm(use):
    use(Fake("a:x", reason="no"))
    made = plan(dataclasses.replace(PROBLEM, x=PROBLEM.x.sub((0, 0), (0, 3))[1],
                                    y=PROBLEM.y.sub((0, 0), (0, 3))[1]))  # fmt: skip
    assert made.algorithm == "plan:nothing"
    made(0, 0)
    assert "the result has no elements" in made.explain()
