"""What a command of verl will capture, and which of its settings will have no effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from verl_profiling.errors import choices_hint
from verl_profiling.integrations.verl_profiler import TIMED_STAGES
from verl_profiling.integrations.verl_training_workers import WORKER_STAGES
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.settings.schedule import Action, Schedule
from verl_profiling.units import step_list

__all__ = ["captured_steps", "forecast", "without_effect"]

_TRAINING = ("actor", "ref", "critic")
_MOST_NAMED = 10
_FAR = 100_000


def without_effect(settings: ProfilingConfig, last_step: int | None) -> Iterator[str]:
    """Yield a sentence for each setting that selects what the run does not have, as far as is known.

    Args:
        settings: What to profile.
        last_step: Number of the run's last step, if the configuration says it.
    """
    chosen = {"profiling.select.stages": settings.select.stages}
    chosen |= {f"profiling.roles.{role}.stages": override.stages for role, override in settings.roles.items()}
    for key, stages in chosen.items():
        for stage in stages or ():
            if stage in TIMED_STAGES - WORKER_STAGES:
                yield f"{key}: {stage!r} is a stage of the trainer, in which workers record nothing"
            elif stage not in WORKER_STAGES:
                hint = choices_hint(stage, WORKER_STAGES)
                yield f"{key}: verl's workers have no stage {stage!r} (your own may); {hint}"
    if never := [step for step in settings.schedule.steps or () if last_step and step > last_step]:
        come = "comes" if len(never) == 1 else "come"
        yield f"profiling.schedule.steps: {step_list(never)} never {come}; {_end(last_step)}"


def forecast(settings: ProfilingConfig, roles: Sequence[str], last_step: int | None) -> str:
    """Return which steps of which roles will be captured, or that nothing will be, as a sentence.

    Args:
        settings: What to profile.
        roles: The roles that the run has and that are profiled.
        last_step: Number of the run's last step, if the configuration says it.
    """
    if not roles:
        return "nothing will be captured: no role of this run is selected"
    steps = captured_steps(settings.schedule, last_step)
    if not steps:
        return f"nothing will be captured: {settings.schedule.in_words()}; {_end(last_step)}"
    doubtful = [role for role in roles if _without_known_stage(settings, role)]
    sure = [role for role in roles if role not in doubtful]
    named = f"of {', '.join(sure)}" if sure else "of the loop alone"
    but = f"; nothing of {', '.join(doubtful)}, unless they have the stages that are selected"
    return f"will be captured: {steps} {named}{but if doubtful else ''}"


def captured_steps(schedule: Schedule, last_step: int | None) -> str:
    """Return which steps will be captured, e.g. ``steps 2, 3``; empty if none will be.

    Args:
        schedule: The schedule.
        last_step: Number of the run's last step, if it is known.
    """
    steps = list(islice(_captured(schedule, last_step), _MOST_NAMED + 1))
    more = " and more" if len(steps) > _MOST_NAMED else ""
    return f"{step_list(steps[:_MOST_NAMED])}{more}" if steps else ""


def _captured(schedule: Schedule, last_step: int | None) -> Iterator[int]:
    """Yield the steps that are captured, in order, as far as one looks."""
    last = schedule.last_step(last_step)
    numbered = range(schedule.first_step, _FAR if last is None else last + 1)
    steps = numbered if schedule.steps is None else sorted(schedule.steps)
    return (step for step in steps if step <= (last or _FAR) and schedule.action(step) is Action.RECORD)


def _without_known_stage(settings: ProfilingConfig, role: str) -> bool:
    """Return whether a training role records stages only of which verl's workers have none."""
    chosen = settings.for_role(role)
    if role not in _TRAINING or chosen.mode != "discrete" or chosen.stages is None:
        return False
    return WORKER_STAGES.isdisjoint(chosen.stages)


def _end(last_step: int | None) -> str:
    return "" if last_step is None else f"the last step is trainer.total_training_steps={last_step}"
