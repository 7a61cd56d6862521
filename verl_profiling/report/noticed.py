"""Notices of the watch in a captured step, as losses: the first findings of its report."""

from __future__ import annotations

from collections.abc import Sequence

from verl_profiling.capture_request import Trigger
from verl_profiling.files.step_summary import StepSummary
from verl_profiling.files.watch_signs import IN_NO_STAGE, SIGNS, sign_of, usual_of
from verl_profiling.numbers.report_columns import RequestedCapture
from verl_profiling.report.finding_measures import Loss
from verl_profiling.report.health import events, least_value
from verl_profiling.report.watch_frame import logged_steps
from verl_profiling.units import duration

_MOST_OTHERS = 2  # anomalies beside the one that was captured: the page of the run has all


def noticed_here(
    request: RequestedCapture | None, watched: StepSummary | None, log: Sequence[StepSummary]
) -> list[Loss]:
    """Return the anomaly that a step was captured for, its hang, and other anomalies that it has.

    Args:
        request: The request of the capture; ``None`` if the schedule chose the step.
        watched: The watch's summary of the captured step; ``None`` if unknown.
        log: The log of the watch.
    """
    losses = []
    seen = set()
    if request is not None and request.sign in SIGNS:
        seen.add(_what(request))
        if not request.is_gone:
            losses.append(_requested(request, watched))
    if watched is not None and watched.hang is not None:
        losses.append(_hung(watched))
    if watched is None:
        return losses
    others = []
    earlier = [line for line in logged_steps(log) if line.step <= watched.step]
    for event in reversed(events(earlier)):
        trigger = event.trigger
        value = sign_of(trigger).value_in(trigger, watched)
        # A tool slows its step, so steps before the capture have to show the anomaly, too.
        lasts = event.lasts is not False and value is not None and value > least_value(trigger)
        if lasts and _what(trigger) not in seen:
            others.append(_lasting(trigger, value or 0.0, watched.seconds))
        seen.add(_what(trigger))
    return losses + others[:_MOST_OTHERS]


def _what(trigger: Trigger) -> tuple[str, str]:
    return trigger.stage, trigger.span


def _hung(watched: StepSummary) -> Loss:
    hang = watched.hang
    assert hang is not None
    usual_s = hang.usual_s or 0.0
    text = (
        f"The step hung: nothing progressed in {hang.stage or IN_NO_STAGE} for "
        f"{duration(hang.quiet_s)} or longer"
    )
    took_s = watched.exposed_s.get(hang.stage, 0.0)
    if took_s:  # else the step has not ended
        usual = f", usually {duration(usual_s)}" if usual_s else ""
        text += f", and it took {duration(took_s)}{usual}"
    text += f". It waited for {hang.lane}, which {hang.reason}."
    return Loss(text, max(took_s - usual_s, 0.0), [hang.lane])


def _requested(request: RequestedCapture, watched: StepSummary | None) -> Loss:
    """Return the anomaly for which a step was captured, and how it is in this step."""
    why = "the step is not in the log of the watch"
    if watched is not None:
        sign = sign_of(request)
        value = sign.value_in(request, watched)
        if value is not None:
            return _lasting(request, value, watched.seconds)
        why = sign.missing(request)
    text = f"{_noticed(request)} Whether this step has it is not known: {why}."
    return Loss(text, 0.0, request.suspects)


def _lasting(trigger: Trigger, value: float, step_s: float) -> Loss:
    """Return an anomaly that the step has, with its number.

    Args:
        trigger: The anomaly.
        value: The value in this step, in the unit of its sign.
        step_s: Length of the step (s).
    """
    sign, usual = sign_of(trigger), usual_of(trigger)
    subject, unit = sign.subject(trigger), sign.unit
    text = f"{subject[0].upper()}{subject[1:]} {unit.verb} {unit.text_of(value)}"
    if unit.usual:
        text += f", {unit.usual} {unit.text_of(usual)}"
    seconds = 0.0
    if unit.seconds is not None:
        seconds = max(unit.seconds(value - usual, step_s), 0.0)
    return Loss(f"{text}. {_noticed(trigger)}", seconds, trigger.suspects)


def _noticed(trigger: Trigger) -> str:
    """Return the sentence of a notice."""
    reason = trigger.reason.removeprefix(f"step {trigger.noticed}: ")
    return f"Noticed in step {trigger.noticed}: {reason}."
