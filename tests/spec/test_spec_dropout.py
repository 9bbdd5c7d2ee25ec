"""Dropout: the generator's known answers, its statistics, and what backward does with it."""

import numpy as np
import pytest
from spec_cases import normal, packed

from bedstone.spec.dropout import DropoutProblem, keep_mask, philox

STATE = np.array([123456789012345678, 42])


def test_philox_known_answers():
    """The line of Random123's kat_vectors for philox4x32-10 with counter and key zero."""
    zero = philox(np.array([0]), 0)[0]
    assert [hex(w) for w in zero] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]


def test_philox_carries_into_the_high_word():
    low, high = philox(np.array([0, 2**32], np.uint64), 7)
    assert not np.array_equal(low, high)
    assert np.array_equal(philox(np.array([5]), -1), philox(np.array([5]), 2**64 - 1))


def test_forward_scales_what_it_keeps():
    (x,) = normal(0, (4, 5, 6))
    problem = DropoutProblem("forward", packed(x.shape), packed(x.shape), 0.25,
                             packed(x.shape, "uint8"))  # fmt: skip
    out = problem.reference({"x": x, "state": STATE})
    kept = out["mask"] == 1
    assert 0 < kept.sum() < x.size
    assert np.array_equal(out["y"], np.where(kept, x * (1 / 0.75), 0))


def test_backward_draws_the_same_mask_or_takes_it():
    desc, mask = packed((7, 9)), packed((7, 9), "uint8")
    ones = np.ones((7, 9))
    out = DropoutProblem("forward", desc, desc, 0.5, mask).reference({"x": ones, "state": STATE})
    again = DropoutProblem("backward", desc, desc).reference({"dy": ones, "state": STATE})
    taken = DropoutProblem("backward", desc, desc, 0.5, mask)
    given = taken.reference({"dy": ones, "mask": out["mask"]})
    assert np.array_equal(out["y"], again["dx"]) and np.array_equal(out["y"], given["dx"])
    assert [o.name for o in taken.operands] == ["mask", "dy", "dx"]


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_share_of_dropped_elements(probability):
    n = 100_000
    share = 1 - keep_mask((n,), probability, 1, 0).mean()
    assert abs(share - probability) < 5 * np.sqrt(probability * (1 - probability) / n)


def test_extremes():
    desc, x = packed((3, 3)), np.full((3, 3), np.nan)
    for probability, check in ((0.0, np.isnan), (1.0, lambda y: y == 0)):
        problem = DropoutProblem("forward", desc, desc, probability)
        assert check(problem.reference({"x": x, "state": STATE})["y"]).all()


def test_offset_continues_the_stream():
    """A call over 12 elements uses 3 counters; the next begins where it ended."""
    both = keep_mask((24,), 0.5, 9, 100)
    first, second = keep_mask((3, 4), 0.5, 9, 100), keep_mask((12,), 0.5, 9, 103)
    assert np.array_equal(both, np.concatenate([first.ravel(), second]))
