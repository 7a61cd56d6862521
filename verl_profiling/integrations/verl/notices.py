"""Log messages of a verl run: the steps to capture, and parts that cannot be recorded."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from verl_profiling.errors import ToolUnavailableError
from verl_profiling.integrations.hooks import misfits, usable
from verl_profiling.integrations.verl import untested
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.settings.schedule import Action, Schedule
from verl_profiling.units import step_list

logger = logging.getLogger(__name__)

_NO_HOOK = (
    "profiling: the configuration asks for it, and this trainer is not profiled: no method of it is hooked. "
    "A trainer class of your own inherits verl_profiling.integrations.verl.trainer.ProfilingTrainerMixin"
)
_MOST_NAMED = 10
_FAR = 100_000

_decided = False


def can_be_profiled(config: Any, settings: ProfilingConfig) -> bool:
    """Return whether anything of a run can be recorded; log the reason if not.

    Raises:
        ToolUnavailableError: A part cannot be recorded, and the settings are strict.
    """
    global _decided
    _decided = True
    found = misfits(config)
    _refuse(found, strict=settings.strict)
    if usable(config):
        return True
    give_up("; ".join(_with_version(found)), strict=settings.strict)
    return False


def give_up(why: str, *, strict: bool) -> None:
    """Log that nothing is recorded from now on.

    Raises:
        ToolUnavailableError: The settings are strict.
    """
    if strict:
        raise ToolUnavailableError(f"profiling.strict is true, and nothing can be recorded: {why}")
    logger.error("profiling is switched off, training goes on: %s", why)


def notes_on(found: Iterable[str], *, strict: bool) -> list[str]:
    """Log once which parts are not recorded in some process, and return them for the manifests.

    Args:
        found: Sentences from all processes, with repetitions.
        strict: Whether such a part ends the run.

    Raises:
        ToolUnavailableError: There is such a part, and the settings are strict.
    """
    notes = list(dict.fromkeys(found))
    _refuse(notes, strict=strict)
    notes = _with_version(notes)
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


def remember_request(init: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap the constructor of ``Tracking``, to keep the ``profiling`` of the trainer's configuration."""
    init(self, *args, **kwargs)
    self._verl_profiling_asked = _asked(kwargs.get("config", args[3] if len(args) > 3 else None))


def check_request(tracking: Any) -> None:
    """Log once if the configuration requests profiling and no trainer of this process is hooked.

    Raises:
        ToolUnavailableError: No trainer is hooked, and the settings are strict.
    """
    global _decided
    asked = getattr(tracking, "_verl_profiling_asked", None)
    if _decided or asked is None:
        return
    _decided = True
    text = "; ".join([_NO_HOOK, *_with_version(misfits())])
    if asked.get("strict"):
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
    """Return which steps will be captured, e.g. ``steps 2, 3``; empty if none will be.

    Args:
        schedule: The schedule.
        last_step: Number of the run's last step, if it is known.
    """
    last = schedule.last_step(last_step)
    numbered = range(1, _FAR if last is None else last + 1)
    steps = numbered if schedule.steps is None else sorted(schedule.steps)
    recorded = (step for step in steps if step <= (last or _FAR) and schedule.action(step) is Action.RECORD)
    found = list(islice(recorded, _MOST_NAMED + 1))
    more = " and more" if len(found) > _MOST_NAMED else ""
    return f"{step_list(found[:_MOST_NAMED])}{more}" if found else ""


def _asked(config: Any) -> Mapping[str, Any] | None:
    """Return the ``profiling`` of a configuration if it switches profiling on."""
    given = config.get("profiling") if isinstance(config, Mapping) else None
    if isinstance(given, str):
        return {}
    return given if isinstance(given, Mapping) and given.get("enable", False) else None


def _refuse(found: list[str], *, strict: bool) -> None:
    if found and strict:
        said = "; ".join(_with_version(found))
        raise ToolUnavailableError(f"profiling.strict is true, and not all can be recorded: {said}")


def _with_version(found: list[str]) -> list[str]:
    version = untested()
    return found if version is None else [version, *found]
