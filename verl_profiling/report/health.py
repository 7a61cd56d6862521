"""Whether a run is healthy, what changed when, and what to do: from the log of its watch.

In a captured step, notices of the watch are losses: the first findings of its report. Without a
notice, a step that is far above its run's median is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Literal, NamedTuple

from verl_profiling.capture_request import Trigger
from verl_profiling.files.step_summary import StepSummary
from verl_profiling.files.watch_signs import IN_NO_STAGE, SIGNS, ran_in, sign_of, usual_of
from verl_profiling.numbers.report_columns import RequestedCapture
from verl_profiling.report.finding_measures import Loss
from verl_profiling.report.model import Report
from verl_profiling.report.phrases import counted, most_helpful, short_of_cpu
from verl_profiling.report.run_table import Trend, trend_of
from verl_profiling.report.watch_frame import (
    RunView,
    excess,
    logged_steps,
    noticed_in,
    stage_seconds,
)
from verl_profiling.units import duration, listed

_LATEST = 5  # steps whose median is the present value: one quick step is no recovery
_STILL = 1.25  # ratio to the value before from which a duration is not as before
_RECENT = 400  # steps in which a change is searched
_GROWN = 0.1  # change of a step's duration from which a run is not as usual
_LEAST_STEPS = 12  # a drift of fewer steps is chance
_MOST_OTHERS = 2  # anomalies beside the one that was captured: the page of the run has all
_FAR = 1.5  # ratio to the median step; a tool that records all makes few steps as long
_LEAST_USUAL = 5  # of fewer steps, the median is not known
_COMPARE = (
    "compare it with the capture of a usual step (`verl-profiling diff`): recording slows both"
)


class Event(NamedTuple):
    """A notice of the watch, or a hang that ended.

    Attributes:
        step: The step.
        at_ns: End of the step.
        kind: ``hang``, or the sign of the anomaly.
        what: A sentence.
        who: Names of the processes that may be the cause, else of the stage or the span.
        now: A sentence on how it is now.
        lasts: Whether it is still so; ``None`` if it is not known.
        since: The step from which on it was so without a break, as far as the log shows it.
        trigger: The anomaly; without a sign for a hang.
        why_not: Why it is not captured; empty if unknown, or for a hang.
    """

    step: int
    at_ns: int
    kind: str
    what: str
    who: str
    now: str
    lasts: bool | None
    since: int
    trigger: Trigger = Trigger()
    why_not: str = ""


class Health(NamedTuple):
    """The first screen of a run.

    Attributes:
        kind: ``bad``, ``warn``, ``calm``, or empty if it is not known.
        verdict: Whether the run is healthy.
        changed: What changed when, first what lasts, then the latest.
        advice: What to do.
    """

    kind: Literal["bad", "warn", "calm", ""]
    verdict: str
    changed: list[str]
    advice: list[str]


def events(steps: Sequence[StepSummary]) -> list[Event]:
    """Return the notices of the watch and the ended hangs, in order."""
    ends_ns = {step.step: step.end_ns for step in steps}
    found = [_hung(step) for step in steps if step.hang is not None]
    hung = [event.step for event in found]
    for trigger, why in noticed_in(steps):
        if trigger.noticed not in hung:  # it was long because it hung
            found.append(_noticed(trigger, why, steps, ends_ns))
    return sorted(found, key=lambda event: event.step)


def _hung(step: StepSummary) -> Event:
    hang = step.hang
    assert hang is not None
    what = (
        f"Step {step.step} hung: in {hang.stage or 'no stage'} nothing progressed for "
        f"{duration(hang.quiet_s)} or longer. It waited for {hang.lane}, which {hang.reason}"
    )
    now = f"It went on, and took {duration(step.seconds)}."
    return Event(step.step, step.end_ns, "hang", what, hang.lane, now, False, step.step)


def _noticed(
    trigger: Trigger, why: str, steps: Sequence[StepSummary], ends_ns: Mapping[int, int]
) -> Event:
    step = trigger.noticed or 0
    shows = [each for each in steps if not each.captured and ran_in(trigger, each)]
    now, lasts = _how_it_is(trigger, [each for each in shows if each.step > step])
    since = _since(trigger, shows)
    who = listed(trigger.suspects) or trigger.span or trigger.stage or "no process"
    what = f"{trigger.reason[:1].upper()}{trigger.reason[1:]}"
    return Event(
        step, ends_ns.get(step, 0), trigger.sign, what, who, now, lasts, since, trigger, why
    )


def _how_it_is(trigger: Trigger, later: Sequence[StepSummary]) -> tuple[str, bool | None]:
    """Return a sentence on how an anomaly is now, and whether it lasts; ``None`` if unknown.

    Args:
        trigger: The anomaly.
        later: The later steps that may show it.
    """
    sign = sign_of(trigger)
    latest = [sign.value_in(trigger, step) for step in later[-_LATEST:]]
    values = [value for value in latest if value is not None]
    if not later:
        return "Whether it lasts is not known yet.", None
    if not values:
        return f"Whether it lasts is not known: {sign.missing(trigger)}.", None
    usual, value = usual_of(trigger), median(values)
    lasts = value > least_value(trigger)
    now = f"{'Still' if lasts else 'Now'} {sign.unit.text_of(value)}"
    if usual:
        now += f", before {sign.unit.text_of(usual)}"
    return f"{now}.", lasts


def least_value(trigger: Trigger) -> float:
    """Return the value above which a step is not as before an anomaly."""
    usual = usual_of(trigger)
    least = (usual + trigger.value) / 2
    # a single extreme step is no measure of what is as before
    return min(least, _STILL * usual) if usual else least


def _since(trigger: Trigger, shows: Sequence[StepSummary]) -> int:
    """Return the step from which on an anomaly was there, which is before it was noticed: the first
    of a row above :func:`least_value`, or where the growth to it began.

    Args:
        trigger: The anomaly.
        shows: The steps that may show it. Where they do not, the begin is not known earlier than
            in the next one that does.
    """
    sign, since = sign_of(trigger), trigger.noticed or 0
    known = {
        step.step: value for step in shows if (value := sign.value_in(trigger, step)) is not None
    }
    for step in reversed(known):
        if step < since and known[step] <= least_value(trigger):
            break
        since = min(since, step)
    trend, steps = trend_of([*known.values()], 0.0), [*known]
    if trend is not None and steps[trend.last] < since <= steps[trend.first]:
        since = steps[trend.last + 1]
    return since


def health(view: RunView, found: Sequence[Event], cause: str) -> Health:
    """Return the health of a run.

    Args:
        view: The run.
        found: Its :func:`events`.
        cause: First finding of the capture of the last event that may last; empty if there is none.
    """
    lasting_last = sorted(found, key=lambda event: (_open(event), bool(event.lasts), event.step))
    changed = [f"{event.what}. {event.now}" for event in reversed(lasting_last)]
    if view.hangs:
        step = view.hangs.partition(" hangs")[0]
        return Health("bad", f"{step.capitalize()} hangs", [view.hangs, *changed], [_OF_A_HANG])
    if not view.is_well:
        end = view.state if view.death is None else view.death.sentence()
        check = f"`verl-profiling check {view.run}` lists what each process left."
        return Health("bad", "The run ended badly", [end, *changed], [check])
    if not view.watch:
        return Health("", "The watch logged no step", [], [cause or view.note])
    return _of_steps(view, found, changed, cause)


_OF_A_HANG = (
    "Read the stacks of the process that it waits for, under Hangs below. End the job if it does "
    "not go on; the stacks stay."
)


_UNKNOWN = "Not known whether it is as usual again"
_MORE_CPU = (
    "Give the processes more CPUs: the container's limit, the hypervisor or other processes of "
    "the machine take them. A notice of the watch says which."
)


def _of_steps(view: RunView, found: Sequence[Event], changed: list[str], cause: str) -> Health:
    """Return the health of a run without a problem now."""
    cpu = short_of_cpu(view.watch)
    more_cpu = _MORE_CPU if cpu else ""
    slower = _slower(view.watch)
    changed = [*slower, f"{cpu[:1].upper()}{cpu[1:]}." if cpu else "", *changed]
    changed = [*filter(None, changed)]
    lasting = [*filter(_open, found)]
    if lasting:
        who = listed(list(dict.fromkeys(event.who for event in lasting)))
        state = "Not as usual" if any(event.lasts for event in lasting) else _UNKNOWN
        verdict = f"{state} since step {min(event.since for event in lasting)}: {who}"
        latest = lasting[-1]
        not_captured = ""
        if latest.why_not:
            not_captured = f"It was not captured: {latest.why_not}."
        advice = [f"Look at {latest.who}.", cause or not_captured, "" if cause else view.note]
        return Health("warn", verdict, changed, [more_cpu, *advice])
    helps = view.watch[-1].helps
    advice = [more_cpu, f"{most_helpful(helps, view.watch[-1])}.".capitalize() if helps else ""]
    if slower:
        return Health("warn", "Slower than at its begin", changed, advice)
    if cpu:
        return Health("warn", "Short of CPU", changed, advice)
    unchanged = [f"Nothing that lasts, in {counted(len(view.watch), 'step')}."]
    verdict = "Healthy again" if found else "Healthy"
    return Health("calm", verdict, changed or unchanged, ["Nothing to mend.", *advice])


def _open(event: Event) -> bool:
    """Return whether an event may last."""
    return event.lasts is not False


def _slower(steps: Sequence[StepSummary]) -> list[str]:
    """Return a sentence if steps became slower over the run, with the stage that grew most."""
    latest = [step for step in steps[-_RECENT:] if not step.captured]
    if len(latest) < _LEAST_STEPS:
        return []
    took = [step.seconds for step in latest]
    trend = trend_of(took, _GROWN * median(took))
    if trend is None or trend.seconds < 0:
        return []
    stages = [step.exposed_s for step in latest]
    trends = [
        (name, trend.fitted([of_step.get(name, 0.0) for of_step in stages])) for name in stages[-1]
    ]
    name, grown = max(trends, key=lambda of_stage: of_stage[1].seconds)
    begin, end = latest[trend.last + 1].step, latest[trend.first].step
    how, when = "grew", f"in steps {begin} to {end}"
    if trend.kind == "jump":
        how, when = "jumped", f"in step {begin}"
    elif trend.first >= len(latest) - _LATEST:  # whether it goes on is not known before
        when = f"since step {begin}"
    most = f"most in {name or IN_NO_STAGE} ({_from_to(grown)})"
    return [f"Steps {how} {_from_to(trend)} {when}, {most}."]


def _from_to(trend: Trend) -> str:
    return f"from {duration(trend.before)} to {duration(trend.after)}"


def noticed_here(report: Report, log: Sequence[StepSummary]) -> list[Loss]:
    """Return the anomaly that a step was captured for, its hang, and other anomalies that it has;
    without any, by how much it is far above the median.

    Args:
        report: The report of the captured step.
        log: The log of the watch.
    """
    request, watched = report.capture_request, report.watched
    losses = []
    seen = set()
    if request is not None and request.sign in SIGNS:
        seen.add(_what(request))
        if not request.is_gone:
            losses.append(_requested_loss(request, watched))
    if watched is not None and watched.hang is not None:
        losses.append(_hung_here(watched))
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
    losses += others[:_MOST_OTHERS]
    return losses or [*_far_above(watched, stage_seconds(report), log)]


def _far_above(
    watched: StepSummary, stages: Mapping[str, float], log: Sequence[StepSummary]
) -> Iterator[Loss]:
    """Yield by how much a captured step is longer than the median step, and in which stage most, if
    it is far longer.

    It is compared with steps without a capture that have its stages, as a validation has one more.

    Args:
        watched: The watch's summary of the captured step.
        stages: Time of its stages without that of starting and stopping the capture (s).
        log: The log of the watch.
    """
    here_s = watched.exposed_s
    every_s = [line.exposed_s for line in logged_steps(log) if not line.captured]
    others_s = [of_step for of_step in every_s if of_step.keys() >= here_s.keys()]
    if len(others_s) < _LEAST_USUAL:
        return
    own_s = {name: min(seconds, stages.get(name, seconds)) for name, seconds in here_s.items()}
    took_s, *usual_s = (sum(of_step.values()) for of_step in (own_s, *others_s))
    most = excess([*others_s, own_s], -1)
    if most is None or not 0 < _FAR * median(usual_s) <= took_s:
        return
    stage, more_s = most
    text = (
        f"This step took {duration(took_s)}, {took_s / median(usual_s):.1f} times the median of "
        f"{len(others_s)} steps; {duration(more_s, signed=True)} are {stage or IN_NO_STAGE}"
    )
    yield Loss(text + _whose(watched, stage, more_s), more_s, advice=_COMPARE)


def _whose(watched: StepSummary, stage: str, more_s: float) -> str:
    """Return whose time in a stage it is, as the end of a sentence."""
    row = {row.name: row for row in watched.exposed}[stage]
    if not row.leader:
        return "; of which process is not known."
    if row.lead_ns and 2e-9 * row.lead_ns < more_s:  # without a lead, it is the only one
        return " of several processes."
    return f" of {row.leader}."


def _what(trigger: Trigger) -> tuple[str, str]:
    return trigger.stage, trigger.span


def _hung_here(watched: StepSummary) -> Loss:
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


def _requested_loss(request: RequestedCapture, watched: StepSummary | None) -> Loss:
    """Return the anomaly for which a step was captured, and how it is in this step."""
    why = "the step is not in the log of the watch"
    if watched is not None:
        sign = sign_of(request)
        value = sign.value_in(request, watched)
        if value is not None:
            return _lasting(request, value, watched.seconds)
        why = sign.missing(request)
    text = f"{_notice_of(request)} Whether this step has it is not known: {why}."
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
    return Loss(f"{text}. {_notice_of(trigger)}", seconds, trigger.suspects)


def _notice_of(trigger: Trigger) -> str:
    """Return the sentence of a notice."""
    reason = trigger.reason.removeprefix(f"step {trigger.noticed}: ")
    return f"Noticed in step {trigger.noticed}: {reason}."
