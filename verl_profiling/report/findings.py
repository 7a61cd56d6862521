"""The findings of a report: at most five sentences on lost time, each from a rule with a threshold.

Each rule is a row of a table below: its name, its threshold, what measures the loss, and advice.
``docs/report.md`` lists all thresholds.

Losses that every synchronous step has are no findings. Examples are training ranks that wait for
the rollout, and lanes without a part in a stage; the table of causes lists these losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from verl_profiling.files.step_summary import ROLLOUT
from verl_profiling.files.watch_signs import sign_of
from verl_profiling.manifest import WEIGHT_SYNC
from verl_profiling.numbers.stage_rows import CAPTURE_CALLS, OUTSIDE_STAGES
from verl_profiling.report import finding_measures, slow_links
from verl_profiling.report.engine_calls import sleep_and_wake
from verl_profiling.report.finding_measures import (
    AWAIT,
    MARK_MORE,
    Loss,
    is_recorded,
    on_all,
    span_us,
    stages_of,
    time_text,
)
from verl_profiling.report.model import Finding, Report
from verl_profiling.units import duration, listed

LIMIT = 5
_RECORD_LESS = "record less: fewer ranks, no stacks or shapes, the other mode, or the spans tool"
_MARK_STAGES = "mark more of the loop with stage(), so that this time gets a name"


class Rule(NamedTuple):
    """A rule for findings: a row of the table.

    Attributes:
        name: Name of the rule; also the cause of idle time, if ``losses`` is a sentence.
        threshold: Share of time above which a change is usually worth the effort.
        losses: Function that yields the measured losses; or a sentence on devices idle for one
            cause.
        advice: Suggested remedy; empty if there is none, or if predictions show it.
        stage: Stage that the rule is about: ``""`` for the time in no stage, ``None`` for any.
    """

    name: str
    threshold: float
    losses: Callable[[Report], Iterable[Loss]] | str
    advice: str = ""
    stage: str | None = None


def find(report: Report, noticed: Sequence[Loss] = ()) -> Report:
    """Return the report with its findings, sorted by the seconds at stake.

    Exceptions to this order: The notices of the watch come first, unless a finding names who is at
    fault. In a requested capture, what it shows of the fault follows: that
    the fault is gone, or which rank is last to enter the collectives of the stage. Missing data
    follow, because they make all numbers partial. After a request of the watch, findings on its
    suspects alone precede others, and findings without a culprit come later. Findings on the cost
    of the capture come last, because they are not about the training.

    Args:
        report: The report of a step.
        noticed: The notices of the watch that the step has.
    """
    first, last = (list(_above(_findings(report, rules))) for rules in (_FIRST, _LAST))
    measured = list(_findings(report, _RANKED))
    ranked = list(_above(measured))
    largest = max((finding.seconds for finding in ranked if finding.rule in _OF_DEVICES), default=0)
    for _, finding in measured:  # no smaller loss is named in the place of a larger one
        is_larger = finding.rule in _COMMON and finding.seconds > largest > 0
        if is_larger and finding not in ranked and not _names_no_culprit(finding, report):
            ranked.append(finding)
    ranked.sort(
        key=lambda finding: (
            _names_no_culprit(finding, report),
            not _is_of_suspects(finding, report),
            -finding.seconds,
        )
    )
    first = [*_unexplained(noticed, [*first, *ranked], report), *first]
    findings = [*first, *ranked[: LIMIT - len(first) - len(last)], *last]
    return msgspec.structs.replace(report, findings=findings)


def _unexplained(
    noticed: Iterable[Loss], findings: Sequence[Finding], report: Report
) -> Iterator[Finding]:
    """Yield the notices of the watch about which no finding says who is at fault."""
    for loss in noticed:
        if not any(_explains(finding, loss, report) for finding in findings):
            seconds = on_all(report, loss.seconds)
            yield Finding(NOTICED, loss.text, loss.advice, seconds, loss.lanes, loss.share)


def _explains(finding: Finding, noticed: Loss, report: Report) -> bool:
    if finding.rule == "trajectory_cause":
        return bool(report.suspected_cause)
    request = report.capture_request
    is_of_request = request is not None and request.sign and noticed.lanes == request.suspects
    if request is not None and is_of_request and finding.rule in _WHO:
        return (request.stage or "the step") in finding.text  # also where it is another rank
    return finding.rule not in OWN_COST and _are_of(finding.lanes, noticed.lanes)


def _above(measured: Iterable[tuple[Rule, Finding]]) -> Iterator[Finding]:
    """Yield the losses that reach the thresholds of their rules."""
    for rule, finding in measured:
        if finding.share >= rule.threshold:
            yield finding


def _findings(report: Report, rules: Iterable[Rule]) -> Iterator[tuple[Rule, Finding]]:
    """Yield the losses of each rule, large or small."""
    for rule in rules:
        if rule.stage is not None and not is_recorded(rule.stage, report):
            continue
        if isinstance(rule.losses, str):
            measured: Iterable[Loss] = [finding_measures.idle(report, rule.name, rule.losses)]
        else:
            measured = rule.losses(report)
        for loss in measured:
            advice = loss.advice or rule.advice
            yield rule, Finding(rule.name, loss.text, advice, loss.seconds, loss.lanes, loss.share)


def _names_no_culprit(finding: Finding, report: Report) -> bool:
    """Return whether a finding names nobody to look at.

    Such a finding suggests to record more, or is about CPUs without operators.
    """
    if finding.rule == "host_bound":
        return not report.on_devices
    return finding.rule in ("unexplained", "between_stages") or finding.advice == MARK_MORE


def _is_of_suspects(finding: Finding, report: Report) -> bool:
    """Return whether all lanes of a finding belong to suspects of the watch, or its cause is the
    suspect.
    """
    request = report.capture_request
    if finding.rule == "trajectory_cause":
        return bool(report.suspected_cause)
    if request is None or not request.sign:
        return False
    return _are_of(finding.lanes, request.suspects)


def _are_of(lanes: Sequence[str], suspects: Sequence[str]) -> bool:
    """Return whether there are lanes, and all of them belong to suspects."""
    if not lanes:
        return False
    return all(any(_belongs(lane, name) for name in suspects) for lane in lanes)


def _belongs(lane: str, suspect: str) -> bool:
    """Return whether a lane is a suspect, one of its devices, or the replica of a rank."""
    return lane == suspect or lane.startswith(f"{suspect} ") or suspect.startswith(f"{lane}_rank")


def _comes_last(report: Report) -> Iterator[Loss]:
    """Yield the rank for which the others waited, if this may be the fault."""
    request = report.capture_request
    if request is None or not request.last or request.is_late_start:
        return
    if not request.is_gone or request.last in request.suspects:
        text = (
            f"Of the captured ranks, {request.last} is the last to enter the collectives of "
            f"{request.stage or 'the step'}: the others waited {duration(request.waited_s)} for it."
        )
        yield Loss(text, request.waited_s, [request.last])


def _starts_last(report: Report) -> Iterator[Loss]:
    """Yield the rank for which the others waited because its recording started later."""
    request = report.capture_request
    if request is not None and request.is_late_start:
        text = (
            f"{request.last} still started to record while the others worked "
            f"({duration(request.late_start_s)}). So the {duration(request.waited_s)} for which "
            f"they waited for it in {request.stage or 'the step'} are of the capture."
        )
        yield Loss(text, request.waited_s)


def _is_gone(report: Report) -> Iterator[Loss]:
    """Yield that the step is not slow in the way that the watch noticed."""
    request = report.capture_request
    if request is not None and request.is_gone:
        sign, then, here = sign_of(request), request.noticed_s or 0.0, request.seen_s or 0.0
        text = (
            f"{sign.subject(request)} {sign.unit.verb} {duration(here)} here, {duration(then)} then"
        )
        if request.usual_s:
            text += f", and {duration(request.usual_s)} before that"
        text = f"What was noticed in step {request.noticed} is not in this step: {text}."
        yield Loss(text, 0.0)


def _slow_suspect(report: Report) -> Iterator[Loss]:
    """Yield the suspect that is as slow here as it was, where waits for it do not show this."""
    request = report.capture_request
    if request is None or request.seen_s is None or request.is_gone or not request.is_late_start:
        return
    for row in report.suspects:
        if (row.kind, row.name, row.difference) == ("stage", request.stage, request.seen_s):
            text = (
                f"{row.suspect} is slow in {row.name}, as noticed: it took {duration(row.value)} "
                f"without waits, {row.peers} {duration(row.peer_value or 0.0)}."
            )
            yield Loss(text, request.seen_s, [row.suspect])


def _in_no_stage(report: Report) -> Iterator[Loss]:
    """Yield the loop's time in no stage, if this time is the reason for the watch's capture."""
    request = report.capture_request
    if request is None or request.stage or not sign_of(request).of_stage:
        return
    for row in stages_of(report, OUTSIDE_STAGES):
        text = (
            f"The loop was in no stage for {time_text(row.duration_us)} ({row.share:.0%} of the "
            f"step); the median before was {duration(request.median)}."
        )
        yield Loss(text, on_all(report, row.duration_us / 1e6), ["controller"])


def _missing(report: Report) -> Iterator[Loss]:
    missing = len(report.coverage.missing)
    lanes = report.coverage.lanes
    if missing > len(report.coverage.unrecorded):
        text = f"The capture is not whole ({missing} missing or damaged): the numbers are partial."
        if not report.coverage.expected:
            text = f"No trace is there: {report.coverage.missing[0]}."
        yield Loss(text, len(lanes) * report.span_us / 1e6, lanes)


def _unrecorded(report: Report) -> Iterator[Loss]:
    lanes = report.coverage.unrecorded
    if lanes:
        text = (
            f"No event of a device was recorded on {listed(lanes)}, although the device was in "
            "use: the traces hold only the host, and the work of the device is unknown."
        )
        yield Loss(text, len(lanes) * report.span_us / 1e6, lanes)


def _capture(report: Report) -> Iterator[Loss]:
    """Yield the time of the calls that start and stop the capture."""
    for row in stages_of(report, CAPTURE_CALLS):
        text = (
            f"Starting and stopping the capture took {time_text(row.duration_us)} of the step "
            f"({row.share:.0%}); steps without a capture do not spend this time."
        )
        seconds = on_all(report, row.duration_us / 1e6)
        yield Loss(text, seconds, _by_cost(report), row.share)


def _pause(report: Report) -> Iterator[Loss]:
    """Yield the time that the loop waited before and after the step for the capture."""
    if report.span_us and report.pause_us:  # a step that is recorded now has no length yet
        share = report.pause_us / span_us(report)
        text = (
            f"The loop waited {time_text(report.pause_us)} before and after the step ({share:.0%} "
            "of its time) for the capture to start and stop."
        )
        yield Loss(text, on_all(report, report.pause_us / 1e6), _by_cost(report), share)


def _by_cost(report: Report) -> list[str]:
    """Return the workers, sorted by the cost of the capture, largest first."""
    return [row.worker for row in sorted(report.costs, key=lambda row: -(row.start_s + row.stop_s))]


_FIRST = (
    Rule(
        "fault_gone",
        0.0,
        _is_gone,
        "capture again while it lasts: `verl-profiling trigger RUN`",
    ),
    Rule("straggler", 0.0, _slow_suspect),
    Rule("straggler", 0.0, _comes_last),
    Rule("late_start", 0.0, _starts_last),
    Rule("between_stages", 0.0, _in_no_stage, _MARK_STAGES, ""),
    Rule(
        "device_unrecorded",
        0.0,
        _unrecorded,
        "another profiler or NVTX holds CUPTI: start workers with NVTX_INJECTION64_PATH set to a "
        "file that does not exist (`verl-profiling doctor` checks this), and without nsys",
    ),
    Rule(
        "coverage",
        0.0,
        _missing,
        "read the list of missing data below, and run `verl-profiling check`",
    ),
)
_RANKED = (
    Rule(  # the threshold is a share of the trajectories' time
        "loop_blocked",
        finding_measures.BLOCKED,
        finding_measures.blocked,
        f"{AWAIT}, so that other tasks go on",
        ROLLOUT,
    ),
    # share of the rollout minus share of the trajectories
    Rule("last_trajectories", 0.15, finding_measures.last_trajectories, stage=ROLLOUT),
    # of the trajectories' time
    Rule("trajectory_cause", 0.25, finding_measures.one_cause, stage=ROLLOUT),
    Rule("trajectories_for_nothing", 0.10, finding_measures.for_nothing, stage=ROLLOUT),
    # of the stage's runs with known advantages or masks
    Rule("training_for_nothing", 0.10, finding_measures.useless_training),
    Rule(  # of the step
        "polling",
        finding_measures.POLLS,
        finding_measures.polling,
        "poll more often; with verl, set a replay buffer of your own with a smaller "
        "poll_interval in trainer.v1.sampler.custom_sampler",
        ROLLOUT,
    ),
    Rule("straggler", 0.05, finding_measures.stragglers),  # of the role's time in the step
    Rule("idle_stage", 0.10, finding_measures.idle_stages),  # of the step
    # of the observed time of all devices, unless a comment says otherwise
    Rule("long_tail", finding_measures.LATE_REPLICA, finding_measures.tail, stage=ROLLOUT),
    Rule(
        "slow_replica", 0.20, finding_measures.slow_replica, stage=ROLLOUT
    ),  # of the time for a token
    Rule("after_generation", 0.05, finding_measures.after_generation, stage=ROLLOUT),
    Rule(
        "no_requests",
        0.10,
        "of engines waited for requests, and no request was on its way",
        stage=ROLLOUT,
    ),
    Rule(
        "queued",
        0.05,
        "of engines were idle while all their requests were queued: the engines were paused",
        "look for pause_generation and weight updates during the rollout",
    ),
    Rule("sleep_and_wake", 0.10, sleep_and_wake),  # of the step
    Rule("weight_sync", 0.15, slow_links.weight_sync, stage=WEIGHT_SYNC),
    Rule(
        "gc",
        0.02,
        "were idle while Python's garbage collector stopped their process",
        "gc.freeze() after the first step, or gc.disable() and a gc.collect() between steps",
    ),
    Rule(
        "host_blocked",
        0.10,
        "were idle while their hosts were inside calls that copy, allocate or wait for the device",
        "copy from pinned memory with non_blocking=True, and leave out calls that wait "
        "(.item(), .cpu())",
    ),
    Rule("between_stages", 0.20, "were idle while the loop was in no stage", _MARK_STAGES, ""),
    Rule("host_bound", 0.15, finding_measures.host_bound),
    Rule("unexplained", 0.20, finding_measures.unexplained),
    Rule("exposed_communication", 0.05, slow_links.communication),
    Rule("slow_link", 0.05, slow_links.slow_links, "measure this link alone, e.g. with nccl-tests"),
)
_LAST = (
    Rule("capture", 0.05, _capture, _RECORD_LESS),  # of the step
    Rule("pause", 0.25, _pause, _RECORD_LESS),  # of the step
)

_COMMON = ("no_requests", "weight_sync", "host_blocked", "host_bound")
"""Rules with a high threshold, as every step has some of this time."""
_OF_DEVICES = (*_COMMON, "long_tail", "after_generation", "queued", "gc", "exposed_communication")
"""Rules about the same time: that of all devices."""

_WHO = ("straggler", "late_start", "between_stages")
"""Rules that say, in a requested capture, who or what makes its stage slow."""
NOTICED = "noticed"
"""Rule of what the watch noticed in the step."""
OWN_COST = ("fault_gone", "late_start", *(rule.name for rule in _LAST))
"""Rules about the capture itself, such as its cost."""
USUAL = ("trajectory_cause",)
"""Rules about usual work, such as a tool's, which is no loss."""
FINDINGS = {rule.name: rule.threshold for rule in (*_RANKED, *_LAST)}
"""Thresholds of the findings' shares by rule: above, a change is usually worth the effort."""


def calm(report: Report) -> str:
    """Return a sentence if no finding is about the run itself, else nothing."""
    if any(finding.rule not in OWN_COST for finding in report.findings):
        return ""
    return "Nothing stands out: no finding is above its threshold."
