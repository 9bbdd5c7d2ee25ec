"""Settings: environment, blocks, threads, and the table that documents them."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
import threading

import pytest
from plan_fakes import PROBLEM, Fake

from bedstone import (
    Handle,
    InvalidDescriptor,
    config,
    get_num_threads,
    num_threads_address,
    set_default_num_threads,
    set_num_threads,
)
from bedstone.plan.config import SETTINGS, Config, current, settings_table
from bedstone.plan.registry import backends


def in_fresh_process(program, **environment):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("BEDSTONE_", "OMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**clean, **environment},
        capture_output=True,
        text=True,
    )
    return done.stdout.strip(), done.stderr.strip()


SHOW = "from bedstone.plan.config import current; print(current().{})"


@pytest.mark.parametrize(
    "name, variable, text, value",
    [
        ("log", "BEDSTONE_LOG", "debug", "debug"),
        ("backend", "BEDSTONE_BACKEND", "cpu,reference", "cpu,reference"),
        ("algorithm", "BEDSTONE_ALGORITHM", "cpu:*", "cpu:*"),
        ("cache_dir", "BEDSTONE_CACHE_DIR", "/somewhere", "/somewhere"),
        ("cache_dir", "BEDSTONE_CACHE_DIR", "", ""),
        ("cache_dir", "XDG_CACHE_HOME", "/xdg", "/xdg/bedstone"),
        ("cache_mb", "BEDSTONE_CACHE_MB", "7", "7"),
        ("num_threads", "BEDSTONE_NUM_THREADS", "3", "3"),
        ("num_threads", "OMP_NUM_THREADS", "5", "5"),
        ("num_threads", "OMP_NUM_THREADS", "6,2", "6"),
        ("cpu_target", "BEDSTONE_CPU_TARGET", "haswell", "haswell"),
    ],
)
def test_environment(name, variable, text, value):
    assert in_fresh_process(SHOW.format(name), **{variable: text})[0] == value


@pytest.mark.parametrize(
    "variable, text",
    [("BEDSTONE_LOG", "loud"), ("BEDSTONE_NUM_THREADS", "many"), ("BEDSTONE_CACHE_MB", "-1")],
)
def test_wrong_environment_names_the_variable(variable, text):
    _, error = in_fresh_process(SHOW.format("log"), **{variable: text})
    assert f"InvalidDescriptor: {variable}: got '{text}'" in error or (
        f"InvalidDescriptor: {variable}: got" in error and text in error
    )


def test_a_block_holds_inside_and_ends():
    before = current()
    with config(num_threads=1, cache_dir="/a") as outer:
        assert get_num_threads() == 1 and current() is outer
        with config(num_threads=2):
            assert (get_num_threads(), current().cache_dir) == (2, "/a")
        assert get_num_threads() == 1
    assert current() == before
    with pytest.raises(ZeroDivisionError), config(num_threads=1):
        raise ZeroDivisionError
    assert current() == before


def test_a_block_is_this_thread_s_only():
    seen = []
    with config(num_threads=7):
        thread = threading.Thread(target=lambda: seen.append(get_num_threads()))
        thread.start()
        thread.join()
        assert get_num_threads() == 7
    assert seen == [get_num_threads()]


@pytest.mark.parametrize(
    "settings, match",
    [
        ({"threads": 2}, "config: got 'threads', expected one of"),
        ({"log": "loud"}, "log: got 'loud', expected one of"),
        ({"num_threads": 0}, "num_threads: got 0, expected 1 or more"),
        ({"num_threads": -1}, "num_threads: got -1, expected 0 or more"),
        ({"num_threads": "two"}, "num_threads: got 'two', expected an integer"),
        ({"cache_mb": None}, "cache_mb: got None, expected an integer"),
    ],
)
def test_wrong_settings(settings, match):
    with pytest.raises(InvalidDescriptor, match=match), config(**settings):
        pass


def test_set_num_threads():
    before = get_num_threads()
    try:
        set_num_threads(3)
        assert get_num_threads() == 3
        with config(num_threads=1):
            assert get_num_threads() == 1
    finally:
        set_num_threads(before)
    for wrong in (0, -2, 1.5, "2", None):
        with pytest.raises(InvalidDescriptor, match="threads"):
            set_num_threads(wrong)


def test_compiled_code_reads_the_number_of_threads():
    before = get_num_threads()
    cell = ctypes.c_int64.from_address(num_threads_address())
    assert cell.value == before
    try:
        set_num_threads(before + 1)
        assert cell.value == before + 1
        with config(num_threads=before + 2):  # of this thread alone
            assert cell.value == before + 1
    finally:
        set_num_threads(before)
    assert cell.value == before


def test_the_cell_is_filled_before_it_is_asked_for():
    program = (
        "import ctypes, bedstone\n"
        "print(ctypes.c_int64.from_address(bedstone.num_threads_address()).value)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True,
        env={**os.environ, "BEDSTONE_NUM_THREADS": "7"},
    )  # fmt: skip
    assert done.stdout.strip() == "7"


@pytest.mark.parametrize(
    "chosen, environment, seen",
    [
        ("", {}, "3 2"),
        ("", {"BEDSTONE_NUM_THREADS": "5"}, "5 5"),
        ("b.set_num_threads(7)", {"BEDSTONE_NUM_THREADS": "5"}, "7 7"),
        ("b.set_num_threads(7)", {}, "7 7"),
    ],
)
def test_a_default_number_of_threads_gives_way_to_a_choice(chosen, environment, seen):
    program = f"""
import bedstone as b
{chosen}
b.set_default_num_threads(3)
lent = b.get_num_threads()
b.set_default_num_threads(None)
print(lent, b.get_num_threads())
"""
    assert in_fresh_process(program, OMP_NUM_THREADS="2", **environment)[0] == seen


def test_a_default_in_place_of_a_choice_leaves_the_choice_as_it_was():
    program = """
import bedstone as b
seen = []
for _ in range(2):  # nobody has chosen; then somebody has
    b.set_default_num_threads(3, over_choice=True)
    seen.append(b.get_num_threads())
    b.set_default_num_threads(None)
    b.set_default_num_threads(4)
    seen.append(b.get_num_threads())
    b.set_num_threads(7)
print(*seen)
"""
    assert in_fresh_process(program, OMP_NUM_THREADS="2")[0] == "3 4 3 7"


@pytest.mark.parametrize("ends", ["outer inner", "inner outer"])
def test_of_several_defaults_the_last_holds_until_it_ends(ends):
    """Numbers and teams (which are never called here), whichever ends first."""
    program = f"""
import ctypes
import bedstone as b
from bedstone.plan.config import team_address
team = ctypes.c_int64.from_address(team_address())
def see():
    seen.append(f"{{b.get_num_threads()}}:{{team.value}}")
seen = []
b.set_default_num_threads(3, over_choice=True, team=30, owner="outer")
b.set_default_num_threads(4, team=40, owner="inner")
see()
for owner in "{ends}".split():
    b.set_default_num_threads(None, owner=owner)
    see()
b.set_default_num_threads(None, owner="nobody")
see()
print(*seen)
"""
    between = "4:40" if ends.startswith("outer") else "3:30"
    assert in_fresh_process(program, OMP_NUM_THREADS="2")[0] == f"4:40 {between} 2:0 2:0"


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "2"])
def test_wrong_default_number_of_threads(wrong):
    with pytest.raises(InvalidDescriptor, match="threads: got .*, expected an integer of 1 or"):
        set_default_num_threads(wrong)


def test_unknown_backend():
    with (
        config(backend="cpu,gpu"),
        pytest.raises(InvalidDescriptor, match="backend: got 'gpu', expected one of"),
    ):
        Handle("cpu").plan(PROBLEM)


def test_backends_are_narrowed_in_order():
    with config(backend=" reference , cpu"):
        assert backends() == ("reference", "cpu")
        names = [*Handle("cpu").plan(PROBLEM).choice.reasons]
    with config(backend="reference"):
        assert Handle("cpu").plan(PROBLEM).algorithm == "reference:direct"
    assert all(name.startswith("reference") for name in names)


def test_the_table_has_every_setting():
    rows = settings_table()
    assert [row[0] for row in rows] == list(Config.__dataclass_fields__)
    assert [row[1] for row in rows] == [s.variable for s in SETTINGS]
    assert all(meaning for *_, meaning in rows)


def test_the_log_tells_of_plans_and_fallbacks(use, caplog):
    use(Fake("a:x", reason="odd"), Fake("reference:direct"))
    with caplog.at_level(logging.INFO, logger="bedstone"):
        Handle("cpu").plan(PROBLEM)
    (record,) = caplog.records
    assert "fallback to reference:direct" in record.getMessage() and "odd" in record.getMessage()
    caplog.clear()
    use(Fake("a:x"))
    with config(log="info"):
        Handle("cpu").plan(PROBLEM)
    assert "a:x for activation forward" in caplog.text
    caplog.clear()
    Handle("cpu").plan(PROBLEM)  # the setting, and with it the log, ended with its block
    assert not caplog.records


def test_the_log_is_off_by_default(use, caplog, capsys):
    use(Fake("a:x"))
    logging.getLogger("bedstone").setLevel(logging.WARNING)
    Handle("cpu").plan(PROBLEM)
    assert not caplog.records and capsys.readouterr().err == ""


def test_other_people_s_root_logger_turns_nothing_on(use, caplog):
    use(Fake("a:x"))
    logger = logging.getLogger("bedstone")
    level = logger.level
    logger.setLevel(logging.NOTSET)
    try:
        with caplog.at_level(logging.DEBUG):  # of the root
            Handle("cpu").plan(PROBLEM)
    finally:
        logger.setLevel(level)
    assert not caplog.records


def test_a_log_to_stderr_in_a_plain_program():
    program = (
        "import bedstone; p = bedstone.parse_problem('activation forward 3 float32 kind=relu');"
        "bedstone.Handle('cpu').plan(p)"
    )
    out, error = in_fresh_process(program, BEDSTONE_LOG="info", BEDSTONE_BACKEND="reference")
    assert "fallback to reference:direct for activation forward 3 float32" in error
    out, error = in_fresh_process(program, BEDSTONE_BACKEND="reference")
    assert error == ""
