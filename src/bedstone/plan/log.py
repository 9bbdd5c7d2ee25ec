"""The log: one line for each plan made, and for every fallback. Nothing is logged per call."""

from __future__ import annotations

import logging
import sys

from bedstone.plan import config

logger = logging.getLogger("bedstone")
_LEVELS = {"off": logging.CRITICAL + 1, "info": logging.INFO, "debug": logging.DEBUG}


def enabled(level: str) -> bool:
    """True if lines of that level ("info" or "debug") are wanted: by the settings in force, or by
    the level of the logger "bedstone". The root logger's alone says nothing: it is of the program,
    and some packages set it to INFO at their import."""
    if _LEVELS[level] >= _LEVELS[config.current().log]:
        return True
    return logger.level != logging.NOTSET and logger.isEnabledFor(_LEVELS[level])


def info(message: str, *values: object) -> None:
    """A plan made, a fallback taken."""
    _emit("info", message, values)


def debug(message: str, *values: object) -> None:
    """Details: reasons, compile times, cache hits."""
    _emit("debug", message, values)


def _emit(level: str, message: str, values: tuple[object, ...]) -> None:
    if not enabled(level):
        return
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("bedstone %(levelname)s %(message)s"))
        logger.addHandler(handler)
    # Past the logger's level, which belongs to the program: a block's setting ends with the block.
    line = (logger.name, _LEVELS[level], __file__, 0, message, values, None)
    logger.handle(logger.makeRecord(*line))
