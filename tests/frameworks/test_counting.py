"""The counts of own and native calls that the frameworks' reports are made of."""

import threading

from bedstone.frameworks.counting import Counts, Row


def test_counters_count_where_own_and_native_do():
    counts = Counts("Somewhere")
    own, native = counts.counter("conv", True, "cpu:direct"), counts.counter("conv", False, "why")
    own(), own(), native()
    counts.own("conv", "cpu:direct")
    counts.native("pool", "no kernel")
    found = counts.report()
    assert found.rows == (
        Row("conv", True, "cpu:direct", 3),
        Row("conv", False, "why", 1),
        Row("pool", False, "no kernel", 1),
    )
    assert (found.own_calls, found.native_calls, found.calls("conv")) == (3, 2, 3)
    assert "3 calls on bedstone, 2 on Somewhere" in str(found)


def test_counters_go_on_after_a_reset():
    counts = Counts("Somewhere")
    count = counts.counter("conv", True, "cpu:direct")
    count()
    counts.reset()
    assert counts.report().rows == ()
    count()
    assert counts.report().calls("conv") == 1


def test_a_counter_that_was_never_called_is_no_row():
    counts = Counts("Somewhere")
    counts.counter("conv", True, "cpu:direct")
    assert counts.report().rows == ()


def test_counts_of_several_threads_add_up():
    counts, times, threads = Counts("Somewhere"), 500, 4

    def work():
        count = counts.counter("conv", True, "cpu:direct")
        for _ in range(times):
            count()
            counts.own("conv", "cpu:direct")

    several = [threading.Thread(target=work) for _ in range(threads)]
    for one in several:
        one.start()
    for one in several:
        one.join()
    assert counts.report().calls("conv") == 2 * times * threads
