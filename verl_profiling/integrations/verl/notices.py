"""Log messages of a verl run: the steps to capture, and parts that cannot be recorded."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from verl_profiling.errors import ToolUnavailableError
from verl_profiling.integrations.hooks import misfits, usable
from verl_profiling.integrations.verl import parts_of, untested
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.settings.schedule import Action, Schedule
from verl_profiling.units import step_list

logger = logging.getLogger(__name__)

_NO_HOOK = (
    "profiling: the configuration asks for it, and this trainer is not profiled: no method of it is hooked. "
    "A trainer class of your own inherits verl_profiling.integrations.verl.trainer.ProfilingTrainerMixin"
)
OFF = "profiling is switched off, training goes on: %s"
_MOST_NAMED = 10
_FAR = 100_000


def can_be_profiled(config: Any, settings: ProfilingConfig) -> bool:
    """Return whether anything of a run can be recorded; log the reason if not.

    Raises:
        ToolUnavailableError: A part cannot be recorded, and the settings are strict.
    """
    parts = parts_of(config)
    notes = _sentences(misfits(parts), strict=settings.strict)
    if not usable(parts):
        logger.error(OFF, "; ".join(notes))
        return False
    return True


def notes_on(found: Iterable[str], *, strict: bool) -> list[str]:
    """Log once which parts are not recorded in some process, and return them for the manifests.

    Args:
        found: Sentences from all processes, with repetitions.
        strict: Whether such a part ends the run.

    Raises:
        ToolUnavailableError: There is such a part, and the settings are strict.
    """
    notes = _sentences(found, strict=strict)
    let_lines_through()
    if notes:
        logger.warning("profiling: %s", "; ".join(notes))
    return notes


def let_lines_through() -> None:
    """Print this package's log lines from ``INFO`` up, unless its logger has a level of its own.

    verl sets the root logger to ``WARNING``. Importing vLLM's server sets it and its handlers to ``ERROR``.
    """
    package = logging.getLogger(__name__.partition(".")[0])
    package.setLevel(package.level or logging.INFO)
    passing = min((handler.level for handler in logging.getLogger().handlers), default=sys.maxsize)
    if passing > package.level and not package.handlers:
        handler = logging.StreamHandler()
        handler.addFilter(lambda record: record.levelno < passing)
        package.addHandler(handler)


def say_no_trainer_is_hooked(config: Any) -> None:
    """Log that a run whose configuration switches profiling on is not profiled.

    Raises:
        ToolUnavailableError: The settings are strict.
    """
    given = config.get("profiling") if isinstance(config, Mapping) else None
    settings = {"enable": True} if isinstance(given, str) else given
    if not isinstance(settings, Mapping) or not settings.get("enable"):
        return
    text = "; ".join([_NO_HOOK, *_sentences(misfits(), strict=False)])
    if settings.get("strict"):
        raise ToolUnavailableError(text)
    logger.error("%s", text)


def say_nothing_is_profiled(config: Any) -> None:
    """Log why a configuration with ``profiling`` profiles nothing, unless profiling is switched off."""
    if why := why_nothing(config):
        let_lines_through()
        logger.warning("profiling: nothing is profiled: %s", why)


def why_nothing(config: Any) -> str:
    """Return why a configuration with ``profiling`` profiles nothing; empty if it is switched off on purpose.

    Args:
        config: A whole verl configuration that yields no settings.
    """
    given = config.get("profiling")
    if isinstance(given, Mapping) and given and "enable" not in given:
        return (
            f"profiling has settings ({', '.join(map(str, given))}) and does not say enable; if a group was "
            "chosen (profiling=verl), this block replaced it. Set profiling.enable=true, or remove the block "
            "where it is defined"
        )
    if given == "verl":
        named = config.global_profiler.get("steps")
        why = "no role's profiler.enable is true" if named else "global_profiler.steps names no step"
        return f"profiling=verl takes the settings of verl's own profiler, and {why}"
    return ""


def captured_steps(schedule: Schedule, last_step: int | None) -> str:
    """Return which steps will be captured, e.g. ``steps 2, 3``, or ``no step (schedule.every=10)``.

    Args:
        schedule: The schedule.
        last_step: Number of the run's last step, if it is known.
    """
    last = schedule.last_step(last_step)
    steps = range(1, _FAR if last is None else last + 1) if schedule.steps is None else sorted(schedule.steps)
    recorded = (step for step in steps if step <= (last or _FAR) and schedule.action(step) is Action.RECORD)
    found = list(islice(recorded, _MOST_NAMED + 1))
    if not found:
        return f"no step ({schedule.in_words()})"
    return step_list(found[:_MOST_NAMED]) + " and more" * (len(found) > _MOST_NAMED)


def _sentences(found: Iterable[str], *, strict: bool) -> list[str]:
    """Return each sentence once, behind one on an untested version of verl.

    Raises:
        ToolUnavailableError: There are sentences, and the settings are strict.
    """
    notes = list(dict.fromkeys(found))
    said = [note for note in (untested(), *notes) if note is not None]
    if notes and strict:
        problem = "profiling.strict is true, and not all can be recorded"
        raise ToolUnavailableError(f"{problem}: {'; '.join(said)}")
    return said
