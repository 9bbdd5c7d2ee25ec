"""Settings, from the environment or a `with bedstone.config(...)` block, in one table.

A block's settings hold for the code inside it, in that thread or task only. Plans made under
other settings are other plans: the settings that steer the choice are part of a plan's key.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Hashable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace

from bedstone.spec.errors import InvalidDescriptor


@dataclass(frozen=True)
class Setting:
    """One row of the table of settings: keyword, environment variable, meaning."""

    name: str
    variable: str
    meaning: str


SETTINGS = (
    Setting("log", "BEDSTONE_LOG", "off (default); info: plans and fallbacks; debug: details"),
    Setting("backend", "BEDSTONE_BACKEND", "backends to consider, in order, joined by commas"),
    Setting("algorithm", "BEDSTONE_ALGORITHM", "the one to use: cpu:implicit_gemm, or cpu:*"),
    Setting("cache_dir", "BEDSTONE_CACHE_DIR", "compiled kernels, measurements; empty: none"),
    Setting("cache_mb", "BEDSTONE_CACHE_MB", "bound on the cache's size in MiB (default 512)"),
    Setting("num_threads", "BEDSTONE_NUM_THREADS", "CPU threads (OMP_NUM_THREADS, else cores)"),
    Setting("cpu_target", "BEDSTONE_CPU_TARGET", "CPU to compile for (native, haswell, ...)"),
)

LOG_LEVELS = ("off", "info", "debug")


@dataclass(frozen=True)
class Config:
    """The settings in force. Empty strings mean the default."""

    log: str = "off"
    backend: str = ""
    algorithm: str = ""
    cache_dir: str = ""
    cache_mb: int = 512
    num_threads: int = 0
    cpu_target: str = ""

    def __post_init__(self) -> None:
        if self.log not in LOG_LEVELS:
            raise InvalidDescriptor("log", self.log, f"one of {LOG_LEVELS}")
        for name in ("cache_mb", "num_threads"):
            value = getattr(self, name)
            try:
                number = int(value)
            except (TypeError, ValueError):
                raise InvalidDescriptor(name, value, "an integer") from None
            if number < 0:
                raise InvalidDescriptor(name, value, "0 or more")
            object.__setattr__(self, name, number)

    @property
    def choice_key(self) -> tuple[str, str, str]:
        """The settings that change which plan is made."""
        return (self.backend, self.algorithm, self.cpu_target)


def _default_threads() -> int:
    """OMP_NUM_THREADS if it is a plain number, else the cores this process may use."""
    omp = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if omp.isdigit() and int(omp) > 0:
        return int(omp)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _from_environment() -> Config:
    values: dict[str, object] = {}
    for setting in SETTINGS:
        text = os.environ.get(setting.variable)
        if text is not None:
            values[setting.name] = text or Config.__dataclass_fields__[setting.name].default
    if "cache_dir" not in values:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        values["cache_dir"] = os.path.join(home, "bedstone")
    try:
        config = Config(**values)  # type: ignore[arg-type]
    except InvalidDescriptor as error:
        variable = next(s.variable for s in SETTINGS if s.name == error.argument)
        raise InvalidDescriptor(variable, error.value, error.expected) from None
    return config


_process: Config | None = None
_chosen_threads = 0  # by BEDSTONE_NUM_THREADS or set_num_threads; 0: nobody has chosen
_process_threads = ctypes.c_int64(0)  # the process's number of threads, for compiled code
_process_team = ctypes.c_int64(0)  # whose threads they are: see set_default_num_threads
_is_forked = False
_Default = tuple[int, bool, int | None]  # threads (0: the usual number), over_choice, team
_NO_DEFAULT: _Default = (0, False, None)
_defaults: dict[Hashable, _Default] = {}  # by owner, the last one last
_lock = threading.Lock()
_current: ContextVar[Config | None] = ContextVar("bedstone_config", default=None)


def current() -> Config:
    """The settings in force here: the innermost `config(...)` block's, else the process's."""
    config = _current.get()
    return config if config is not None else _of_process()


def _of_process() -> Config:
    global _chosen_threads
    if _process is None:
        found = _from_environment()
        _chosen_threads = found.num_threads
        return _set_process(found, found.num_threads or _default_threads())
    return _process


def _set_process(config: Config, threads: int) -> Config:
    global _process
    if config is not _process or config.num_threads != threads:  # (often nothing changes)
        _process, _process_threads.value = replace(config, num_threads=threads), threads
    return _process


@contextlib.contextmanager
def config(**settings: object) -> Iterator[Config]:
    """Settings for the code inside the block: `with bedstone.config(num_threads=1): ...`.

    Keywords are those of the table of settings. Raises InvalidDescriptor for an unknown keyword
    or a value out of range.
    """
    known = [f.name for f in fields(Config)]
    for name in settings:
        if name not in known:
            raise InvalidDescriptor("config", name, f"one of {known}")
    if settings.get("num_threads") == 0:
        raise InvalidDescriptor("num_threads", 0, "1 or more")
    token = _current.set(replace(current(), **settings))  # type: ignore[arg-type]
    try:
        yield current()
    finally:
        _current.reset(token)


def set_num_threads(threads: int) -> None:
    """Number of CPU threads of every later call in this process (1 or more)."""
    global _chosen_threads
    if not isinstance(threads, int) or threads < 1:
        raise InvalidDescriptor("threads", threads, "an integer of 1 or more")
    _set_process(_of_process(), threads)
    _chosen_threads = threads


def set_default_num_threads(
    threads: int | None,
    over_choice: bool = False,
    team: int | None = None,
    owner: Hashable = None,
) -> None:
    """Number of CPU threads where nobody has chosen one, neither by `set_num_threads` nor by
    BEDSTONE_NUM_THREADS: a framework's own number, while bedstone serves it. None: what held
    before, that of another owner, or the number that was chosen, or the usual default.

    over_choice  also in place of a number that was chosen before
    team         whose threads they are. None: bedstone's own. Else the address of a function
                 `void (*)(void (*work)(void *), void *data, unsigned threads, unsigned flags)` that
                 calls `work(data)` in so many threads, itself among them, and returns when all have
                 returned: what the OpenMP runtimes of GCC, LLVM and Intel export as GOMP_parallel.
                 The threads of such a runtime spin on their cores for milliseconds after each use,
                 so that next to them bedstone's own would wait for a core. A child of a fork has
                 bedstone's own, since these runtimes do not outlive one.
    owner        who asks: what the last of several asked for holds, until that one is done
    """
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        raise InvalidDescriptor("threads", threads, "an integer of 1 or more, or None")
    if team is not None and (not isinstance(team, int) or team < 1 or threads is None):
        raise InvalidDescriptor("team", team, "None, or with `threads` a function's address")
    settings = _of_process()
    with _lock:
        _defaults.pop(owner, None)
        if threads is not None:
            _defaults[owner] = (threads, over_choice, team)
        wanted, first, lent = next(reversed(_defaults.values()), _NO_DEFAULT)
        _process_team.value = 0 if _is_forked else lent or 0
        found = wanted if first else 0
        _set_process(settings, found or _chosen_threads or wanted or _default_threads())


def get_num_threads() -> int:
    """Number of CPU threads that a call made here would use."""
    return current().num_threads


def num_threads_address() -> int:
    """The address of an int64 that is the process's number of CPU threads, now and after every
    `set_num_threads`; valid until the process ends.

    For compiled code that others call, such as the programs of a framework: it reads the number
    there at every call. (A `config(...)` block, which holds in its own Python thread, is not seen.)
    """
    _of_process()
    return ctypes.addressof(_process_threads)


def team_address() -> int:
    """The address of an int64 that holds `set_default_num_threads`'s team, or 0."""
    return ctypes.addressof(_process_team)


def _leave_team() -> None:
    """In the child of a fork, where the team's threads are gone: none, from now on."""
    global _is_forked, _lock
    _is_forked, _process_team.value, _lock = True, 0, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_team)


def settings_table() -> list[tuple[str, str, str, str]]:
    """Rows (keyword, environment variable, value in force, meaning) for docs and `info`."""
    now = current()
    return [(s.name, s.variable, str(getattr(now, s.name)), s.meaning) for s in SETTINGS]
