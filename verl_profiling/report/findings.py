"""The findings of a report: at most five sentences on lost time, each from a rule with a threshold.

A threshold is the share of time above which a change is usually worth the effort;
``docs/report.md`` lists all thresholds.

Losses that every synchronous step has are no findings. Examples are training ranks that wait for
the rollout, and lanes without a part in a stage; the table of causes lists these losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median, median_low

import msgspec

from verl_profiling.manifest import POLLING, WAIT, WEIGHT_SYNC
from verl_profiling.numbers.anatomy import CAPTURE_CALLS, OUTSIDE_STAGES
from verl_profiling.numbers.capture_rows import slow_replica, slowest_replica
from verl_profiling.numbers.columns import BlockRow, DeviceRow, StragglerRow
from verl_profiling.numbers.lost import ROLLOUT
from verl_profiling.numbers.rollout_section import KEPT
from verl_profiling.numbers.sections import Rollout
from verl_profiling.report.model import Finding, Report
from verl_profiling.report.sentences import counted
from verl_profiling.slices.intervals import grouped
from verl_profiling.steps.records import (
    BEFORE,
    FROM_THE_ENGINE,
    LOOP_LAG,
    OWN_CODE,
    TO_THE_ENGINE,
    UNEXPLAINED,
    UNKNOWN,
)
from verl_profiling.units import duration, listed

LIMIT = 5
_LONG = 1.5
"""Ratio of a response's length to the median from which it explains
that the response was the last.
"""
_RECORD_LESS = "record less: fewer ranks, no stacks or shapes, the other mode, or the spans tool"
_MARK_MORE = "mark more of the agent loop with span(), so that this time gets a name"
_AWAIT = "await the call, or run it in a thread (asyncio.to_thread)"
_ADVICE = {
    LOOP_LAG: f"find the calls that block the event loops: {_AWAIT}",
    OWN_CODE: _MARK_MORE,
    BEFORE: "switch the watch on, which remembers open spans, or capture steps in a row",
}
"""Advice by the cause of the trajectories' time."""


_Rule = Callable[[Report], Iterable[Finding]]


def find(report: Report) -> Report:
    """Return the report with its findings, sorted by the seconds at stake.

    Exceptions to this order: In a requested capture, the rank that is last to enter the collectives
    of the stage comes first. Missing data follow, because they make all numbers partial. After a
    request of the watch, findings on its suspects alone precede others, and findings without a
    culprit come later. Findings on the cost of the capture come last, because they are not about
    the training.
    """
    first, ranked, last = (
        [
            found
            for rule in rules
            for found in rule(report)
            if found.share >= FINDINGS.get(found.rule, 0) and _is_recorded(found, report)
        ]
        for rules in (_FIRST, _RANKED, _LAST)
    )
    ranked.sort(key=lambda finding: -finding.seconds)
    ranked.sort(
        key=lambda finding: (
            _names_no_culprit(finding, report),
            not _is_of_suspects(finding, report),
        )
    )
    found = [*first, *ranked[: LIMIT - len(first) - len(last)], *last]
    return msgspec.structs.replace(report, findings=found)


def _is_recorded(finding: Finding, report: Report) -> bool:
    """Return whether a finding is about a recorded stage,
    in a capture that is limited to a stage.
    """
    return _is_of(report, _STAGES[finding.rule]) if finding.rule in _STAGES else True


def _is_of(report: Report, stage: str) -> bool:
    only = report.asked.only if report.asked else []
    return not only or stage in only


def _names_no_culprit(finding: Finding, report: Report) -> bool:
    """Return whether a finding has no culprit.

    Such a finding suggests to record more, or is about CPUs without operators.
    """
    if finding.rule == "host_bound":
        return not report.on_devices
    return finding.rule in ("unexplained", "between_stages") or finding.advice == _MARK_MORE


def _is_of_suspects(finding: Finding, report: Report) -> bool:
    """Return whether all lanes of a finding belong to suspects of the watch."""
    suspects = report.asked.suspects if report.asked and report.asked.sign else []
    return bool(finding.lanes) and all(
        any(
            lane == one or lane.startswith(f"{one} ") or one.startswith(f"{lane}_rank")
            for one in suspects
        )
        for lane in finding.lanes
    )


def _comes_last(report: Report) -> Iterator[Finding]:
    if (asked := report.asked) and asked.last:
        text = (
            f"Of the captured ranks, {asked.last} is the last to enter the collectives of "
            f"{asked.stage or 'the step'}: the others waited {duration(asked.waited_s)} for it."
        )
        yield Finding("straggler", text, "", asked.waited_s, [asked.last])


def _in_no_stage(report: Report) -> Iterator[Finding]:
    """Yield the loop's time in no stage, if this time is the reason for the watch's capture."""
    rows = [row for row in report.stages if row.name == OUTSIDE_STAGES]
    if (asked := report.asked) and rows and asked.sign == "slow_stage" and not asked.stage:
        text = (
            f"The loop was in no stage for {_time(rows[0].duration_us)} ({rows[0].share:.0%} "
            "of the step); "
            f"the median before was {duration(asked.median)}."
        )
        seconds = _on_all(report, rows[0].duration_us / 1e6)
        yield Finding("between_stages", text, _IDLE["between_stages"][1], seconds, ["controller"])


def _missing(report: Report) -> Iterator[Finding]:
    missing, lanes = len(report.coverage.missing), report.coverage.lanes
    if missing > len(report.coverage.unrecorded):
        text = f"The capture is not whole ({missing} missing or damaged): the numbers are partial."
        advice = "read the list of missing data below, and run `verl-profiling check`"
        yield Finding("coverage", text, advice, len(lanes) * report.span_us / 1e6, lanes)


def _unrecorded(report: Report) -> Iterator[Finding]:
    if lost := report.coverage.unrecorded:
        text = (
            f"No event of a device was recorded on {listed(lost)}, although the device was "
            "in use: the "
            "traces hold only the host, and the work of the device is unknown."
        )
        advice = (
            "another profiler or NVTX holds CUPTI: start workers with NVTX_INJECTION64_PATH "
            "set to a "
            "file that does not exist (`verl-profiling doctor` checks this), and without nsys"
        )
        yield Finding("device_unrecorded", text, advice, len(lost) * report.span_us / 1e6, lost)


def _capture(report: Report) -> Iterator[Finding]:
    """Yield the time of the calls that start and stop the capture."""
    for stage in report.stages:
        if stage.name == CAPTURE_CALLS:
            text = (
                f"Starting and stopping the capture took {_time(stage.duration_us)} of the step "
                f"({stage.share:.0%}); steps without a capture do not spend this time."
            )
            seconds = _on_all(report, stage.duration_us / 1e6)
            yield Finding("capture", text, _RECORD_LESS, seconds, _by_cost(report), stage.share)


def _pause(report: Report) -> Iterator[Finding]:
    """Yield the time that the loop waited before and after the step for the capture."""
    if report.span_us and report.pause_us:  # a step that is recorded now has no length yet
        share = report.pause_us / _span_us(report)
        text = (
            f"The loop waited {_time(report.pause_us)} before and after the step "
            f"({share:.0%} of its time) "
            "for the capture to start and stop."
        )
        seconds = _on_all(report, report.pause_us / 1e6)
        yield Finding("pause", text, _RECORD_LESS, seconds, _by_cost(report), share)


def _stragglers(report: Report) -> Iterator[Finding]:
    """Yield each worker that is the slowest of its role in a stage, with its worst stage."""
    worst: dict[str, StragglerRow] = {}
    for row in _outermost(report):
        if row.stage != ROLLOUT or report.tail is None:  # the tail says who was late in the rollout
            worst.setdefault(row.slowest, row)
    for row in worst.values():
        others_us = row.slowest_us - row.behind_us / (row.workers - 1)
        who = "the other worker" if row.workers == 2 else "the others, on average,"
        text = (
            f"{row.slowest} is slow in {row.stage}: it took {_time(row.slowest_us)} without "
            f"waits, {who} "
            f"{_time(others_us)}, which is {report.lane_seconds(row.behind_us / 1e6)} of waiting."
        )
        several = (
            f"{row.slowest}_rank",
            f"{row.slowest} ",
        )  # a replica's ranks, a process's devices
        names = [one.name for one in report.workers]
        lanes = [name for name in names if name == row.slowest or name.startswith(several)]
        share = row.behind_us / (row.workers * _span_us(report))
        yield Finding("straggler", text, "", row.behind_us / 1e6, lanes or [row.slowest], share)


def _idle_stages(report: Report) -> Iterator[Finding]:
    lanes = [row.name for row in report.workers]
    called = {span.name for span in report.gantt if span.lane != "controller"}
    for stage in [row for row in report.stages if _is_of(report, row.name)]:
        share = stage.idle_us / _span_us(report)
        text = (
            f"In {stage.name}, all recorded lanes were idle for {_time(stage.idle_us)} "
            f"({share:.0%} of the step)"
        )
        if stage.name in called:
            text += ", while the loop called workers or received results"
        lost_s = stage.idle_us / 1e6 * len(report.devices)
        yield Finding("idle_stage", f"{text}.", "", lost_s, lanes, share)


def _communication(report: Report) -> Iterator[Finding]:
    """Yield the exposed communication, without the waits for stragglers."""
    busy = sum(row.busy_us for row in report.devices)
    slow = sum(row.behind_us for row in _outermost(report))
    exposed = max(sum(row.exposed_communication_us for row in report.devices) - slow, 0.0)
    waiting = sum(row.waiting_us for row in report.devices)
    waits = f"{report.lane_seconds(waiting / 1e6)} are waiting for other ranks"
    said = f" (of all communication, {waits})" if waiting else ""
    text = (
        f"{report.lane_seconds(exposed / 1e6)} of the busy time "
        f"({exposed / (busy or 1.0):.0%}) are "
        f"communication without computation at the same time{said}."
    )
    lanes = _lanes_that_lost(report.devices, lambda row: row.exposed_communication_us)
    observed = sum(row.span_us for row in report.devices) or 1.0
    yield Finding("exposed_communication", text, "", exposed / 1e6, lanes, exposed / observed)


def _of_cause(report: Report, cause: str, text: str, advice: str = "") -> Finding:
    """Return a finding on the idle time of devices with a cause."""
    return _lost(
        report, cause, report.devices, lambda row: row.lost_us.get(cause, 0.0), text, advice
    )


def _idle(report: Report) -> Iterator[Finding]:
    for cause, (text, advice) in _IDLE.items():
        yield _with_parts(report, cause, text, advice)


def _with_parts(report: Report, cause: str, text: str, advice: str = "") -> Finding:
    """Return a finding on a cause of idle time, with the largest parts of the cause."""
    most, rollout = next(iter(_parts(report, cause)), ""), report.rollout
    if most == LOOP_LAG and rollout is not None and _loops_are_blocked(report, rollout):
        advice = "unblock the event loops first, which cause most of this time"
    return _of_cause(report, cause, text + _mostly(report, cause), advice)


def _lost(
    report: Report,
    cause: str,
    rows: Sequence[DeviceRow],
    lost_us: Callable[[DeviceRow], float],
    text: str,
    advice: str = "",
) -> Finding:
    """Return a finding on lost time of devices,
    in lane-seconds and as a share of their observed time.
    """
    total, observed = sum(map(lost_us, rows)), sum(row.span_us for row in report.devices) or 1.0
    lost = f"{report.lane_seconds(total / 1e6)} ({total / observed:.0%} of the observed time)"
    text = f"{report.whose.title()}s {text}: {lost}."
    return Finding(
        cause, text, advice, total / 1e6, _lanes_that_lost(rows, lost_us), total / observed
    )


def _tail(report: Report) -> Iterator[Finding]:
    if tail := report.tail:
        made = {row.replica: row.decode_tokens or 0 for row in report.engines}
        own = made.get(tail.last_replica, 0) if tail.last_replica is not None else 0
        tokens = f"; with {own:,} tokens, the median is {median(made.values()):,.0f}" if own else ""
        text = (
            f"waited for the last replica of the rollout (rollout{tail.last_replica} was "
            "done after "
            f"{_time(tail.last_finish_us)}, the median is {_time(tail.median_finish_us)}{tokens}"
            f"{_last_length(report)})"
        )
        late = [row.name for row in report.workers if row.replica == tail.last_replica is not None]
        slow = slowest_replica(report.replicas)
        advice = (
            slow_replica(report.replicas) if slow and slow[0].replica == tail.last_replica else ""
        )
        found = _of_cause(report, "long_tail", text, advice)
        yield msgspec.structs.replace(found, lanes=late or found.lanes)


def _last_length(report: Report) -> str:
    """Return the length of the last response, if it is long, as a part of a sentence."""
    tail = report.tail
    usual = tail.response_tokens.p50 if tail is not None and tail.response_tokens else 0.0
    if tail is None or not tail.last_tokens > _LONG * usual > 0:
        return ""
    return f"; the last response has {tail.last_tokens:,} tokens, the median {usual:,.0f}"


def _slow_replica(report: Report) -> Iterator[Finding]:
    """Yield the replica that is slow at each token, in a capture that the watch requested."""
    found = slowest_replica(report.replicas) if report.asked and report.asked.sign else None
    if found is not None and all(tail.share < FINDINGS["long_tail"] for tail in _tail(report)):
        row, usual_us = found
        own_us = row.per_token_p50_us or usual_us
        text = f"{row.worker} takes {_time(own_us)} a token, the other replicas {_time(usual_us)}."
        lanes = [one.name for one in report.workers if one.replica == row.replica] or [row.worker]
        rollout_us = sum(stage.duration_us for stage in report.stages if stage.name == ROLLOUT)
        share = 1 - usual_us / own_us
        yield Finding("slow_replica", text, "", share * rollout_us / 1e6 * len(lanes), lanes, share)


def _after_generation(report: Report) -> Iterator[Finding]:
    """Yield the time after the last replica, unless the finding ``polling`` covers this time."""
    polling = report.rollout.polling if report.rollout else None
    polls = polling is not None and polling.late_share >= FINDINGS["polling"]
    if not (
        polls and next(iter(_parts(report, "after_generation")), "") == f"controller: {POLLING}"
    ):
        text = "were idle in the rollout after the last replica was done"
        yield _with_parts(report, "after_generation", text)


def _parts(report: Report, cause: str) -> Mapping[str, float]:
    return next((row.parts for row in report.lost if row.cause == cause), {})


def _mostly(report: Report, cause: str) -> str:
    """Return the largest parts of a cause, as a part of a sentence."""
    largest = sorted(_parts(report, cause).items(), key=lambda part: -part[1])
    whole = sum(seconds for _, seconds in largest)
    listed = [f"{seconds / whole:.0%} {_called(name)}" for name, seconds in largest[:3] if whole]
    return f" ({', '.join(listed)})" if listed else ""


def _host_bound(report: Report) -> Iterator[Finding]:
    """Yield the host-bound time that all lanes of a role share;
    more of one lane belongs to a straggler.
    """
    rows = [row for row in report.devices if row.device == report.on_devices]
    by_role = grouped(rows, lambda row: tuple(row.roles))
    usual = {roles: median_low(row.host_bound_us for row in of) for roles, of in by_role.items()}
    engines_us = sum(row.host_bound_us for row in report.workers if row.replica is not None)
    engines = (
        bool(report.replicas) and engines_us > sum(row.host_bound_us for row in report.workers) / 2
    )
    where = (
        "between iterations of engines that had requests"
        if engines
        else "while their hosts were at work"
    )
    text = f"had no work {where}: the host did not launch work in time"
    if not report.on_devices:
        text = (
            f"ran no operator {where}: the time went into Python between operators, or "
            "waits for a core"
        )

    def in_common_us(row: DeviceRow) -> float:
        return min(row.host_bound_us, usual[tuple(row.roles)])

    yield _lost(report, "host_bound", rows, in_common_us, text)


def _unexplained(report: Report) -> Iterator[Finding]:
    text, advice = "were idle for unknown reasons", ""
    if not report.captured:
        text = "were idle while no operator or call ran: in Python, or waiting for data or a core"
        advice = "record Python stacks, which show the cause"
        if report.coverage.has_stacks:
            advice = "look at the Python frames of these lanes in the timeline (merge)"
    yield _of_cause(report, "unexplained", text, advice)


def _of_trajectories(report: Report) -> Iterator[Finding]:
    """Yield the findings on trajectories; every device loses the time that trajectories lose."""
    if report.rollout is not None and report.rollout.seconds:
        for rule in (_blocked, _last_trajectories, _one_cause, _for_nothing, _polling):
            for finding in rule(report, report.rollout):
                yield msgspec.structs.replace(finding, seconds=_on_all(report, finding.seconds))


def _blocked(report: Report, rollout: Rollout) -> Iterator[Finding]:
    """Yield a finding per function or span that blocked event loops, over all processes."""
    by_name = grouped(rollout.blocks, lambda row: row.what)
    for what, rows in sorted(by_name.items(), key=lambda item: -_stood_still(item[1])):
        longest = max(rows, key=lambda row: row.seconds)
        blocks, stopped = sum(row.blocks for row in rows), sum(row.trajectories for row in rows)
        lanes, name = [row.lane for row in rows], _called(what)
        who, advice = f"{name[:1].upper()}{name[1:]}", f"{_AWAIT}, so that other tasks go on"
        if what == UNKNOWN:
            who = "Something unknown"
            advice = (
                "look for a thread that holds the GIL, or too few CPUs: no sample shows "
                "a blocking task"
            )
        many = f"{' together' * (len(lanes) > 1)}, {blocks} times" if blocks > 1 else ""
        where = f" (in {longest.function})" if longest.function not in ("", what) else ""
        text = (
            f"{who} blocked the event loop{'s' * (len(lanes) > 1)} of {listed(lanes)} for "
            f"{duration(sum(row.seconds for row in rows))}{many}{where}: "
            f"{counted(stopped, 'trajectory')} "
            f"stood still, for {duration(_stood_still(rows))} in total."
        )
        seconds = min(longest.seconds, rollout.wall_s)
        share = _stood_still(rows) / rollout.seconds
        yield Finding("loop_blocked", text, advice, seconds, lanes, share)


def _loops_are_blocked(report: Report, rollout: Rollout) -> bool:
    return any(found.share >= FINDINGS["loop_blocked"] for found in _blocked(report, rollout))


def _stood_still(rows: Sequence[BlockRow]) -> float:
    return sum(row.stood_still_s for row in rows)


def _last_trajectories(report: Report, rollout: Rollout) -> Iterator[Finding]:
    if last := rollout.last:
        most = next((part for part in last.parts if not part.cause.startswith(WAIT)), None)
        cause = most.cause if most else ""
        if cause == LOOP_LAG and _loops_are_blocked(report, rollout):
            return  # it follows from the blocks
        text = (
            f"In the last {duration(last.seconds)}, {last.share:.0%} of {rollout.of_trajectories}, "
            f"only {last.trajectories} of {last.of} trajectories still run"
            + (f": {most.share:.0%} of that is {_called(cause)}" if most else "")
            + f"{_last_length(report)}."
        )
        advice = slow_replica(report.replicas) if cause == "decode" else _ADVICE.get(cause, "")
        share = last.share - last.trajectories / last.of
        yield Finding("last_trajectories", text, advice, last.seconds, share=share)


def _one_cause(report: Report, rollout: Rollout) -> Iterator[Finding]:
    """Yield the largest cause but waits, an engine's own work,
    and lag that :func:`_blocked` reports.
    """
    left_out = ["decode", "generate", "prefill", "first token", BEFORE, UNEXPLAINED]
    if _loops_are_blocked(report, rollout):
        left_out.append(LOOP_LAG)
    for row in rollout.causes:
        if row.validate or row.cause.startswith(WAIT) or row.cause in left_out:
            continue
        each = ""
        for calls in rollout.calls:
            if calls.name == row.cause:
                each = (
                    f" ({calls.calls:,} calls, p50 {duration(calls.p50_s)}, p99 "
                    f"{duration(calls.p99_s)})"
                )
                break
        text = (
            f"{row.share:.0%} of the trajectories' time ({duration(row.seconds)}) is "
            f"{_called(row.cause)}{each}."
        )
        seconds = row.share * rollout.wall_s
        yield Finding(
            "trajectory_cause", text, _ADVICE.get(row.cause, ""), seconds, share=row.share
        )
        return


def _for_nothing(report: Report, rollout: Rollout) -> Iterator[Finding]:
    rows = [row for row in rollout.statuses if not row.validate and row.status not in KEPT]
    share = sum(row.share for row in rows)
    text = (
        f"{share:.0%} of the trajectories' time "
        f"({duration(sum(row.seconds for row in rows))}) went into "
        "unused trajectories: " + ", ".join(f"{row.trajectories} {row.status}" for row in rows[:4])
    )
    yield Finding("trajectories_for_nothing", f"{text}.", "", share * rollout.wall_s, share=share)


def _polling(report: Report, rollout: Rollout) -> Iterator[Finding]:
    if of := rollout.polling:
        text = (
            f"The trainer slept {duration(of.late_s)} ({of.late_share:.0%} of the step) after the "
            f"last response was there: it polls its replay buffer every {duration(of.interval_s)}."
        )
        advice = (
            "poll more often; with verl, set a replay buffer of your own with a smaller "
            "poll_interval in trainer.v1.sampler.custom_sampler"
        )
        yield Finding("polling", text, advice, of.late_s, share=of.late_share)


def _called(cause: str) -> str:
    """Return a cause for use in a sentence, e.g. ``tool `search``` for ``tool:search``."""
    family, _, name = cause.partition(":")
    if cause in (TO_THE_ENGINE, FROM_THE_ENGINE):
        return f"the way {cause}"
    return f"{family} `{name}`" if name and family in ("tool", "wait") else cause


def _on_all(report: Report, seconds: float) -> float:
    """Convert seconds that every device lane loses to lane-seconds."""
    return seconds * max(len(report.devices), 1)


def _lanes_that_lost(rows: Sequence[DeviceRow], lost_us: Callable[[DeviceRow], float]) -> list[str]:
    """Return the names of the lanes that lost time, largest loss of their device first."""
    return [
        name
        for row in sorted(rows, key=lambda row: -lost_us(row))
        if lost_us(row) > 0
        for name in row.lanes
    ]


def _by_cost(report: Report) -> list[str]:
    """Return the workers, sorted by the cost of the capture, largest first."""
    return [row.worker for row in sorted(report.costs, key=lambda row: -(row.start_s + row.stop_s))]


def _outermost(report: Report) -> list[StragglerRow]:
    """Return the straggler rows of outermost stages."""
    outermost = {(span.lane, span.name) for span in report.gantt if not span.depth}
    rows = [row for row in report.stragglers if _is_of(report, row.stage)]
    return [row for row in rows if (row.slowest, row.stage) in outermost]


def _span_us(report: Report) -> float:
    return max(report.span_us, 1.0)


def _time(us: float) -> str:
    return duration(us / 1e6)


_IDLE = {  # sentence and advice of causes that need no more
    "no_requests": ("of engines waited for requests, and no request was on its way", ""),
    "queued": (
        "of engines were idle while all their requests were queued: the engines were paused",
        "look for pause_generation and weight updates beside the rollout",
    ),
    "weight_sync": ("were idle while weights went to the engines", ""),
    "gc": (
        "were idle while Python's garbage collector stopped their process",
        "gc.freeze() after the first step, or gc.disable() and a gc.collect() between steps",
    ),
    "host_blocked": (
        "were idle while their hosts were inside calls that copy, allocate or wait for the device",
        "copy from pinned memory with non_blocking=True, and leave out calls that wait "
        "(.item(), .cpu())",
    ),
    "between_stages": (
        "were idle while the loop was in no stage",
        "mark more of the loop with stage(), so that this time gets a name",
    ),
}
_FIRST: tuple[_Rule, ...] = (_comes_last, _in_no_stage, _unrecorded, _missing)
_RANKED: tuple[_Rule, ...] = (
    _of_trajectories,
    _stragglers,
    _idle_stages,
    _tail,
    _slow_replica,
    _after_generation,
    _idle,
    _host_bound,
    _unexplained,
    _communication,
)
_LAST: tuple[_Rule, ...] = (_capture, _pause)

_STAGES = {
    "loop_blocked": ROLLOUT,
    "last_trajectories": ROLLOUT,
    "trajectory_cause": ROLLOUT,
    "polling": ROLLOUT,
    "trajectories_for_nothing": ROLLOUT,
    "slow_replica": ROLLOUT,
    "long_tail": ROLLOUT,
    "no_requests": ROLLOUT,
    "after_generation": ROLLOUT,
    "weight_sync": WEIGHT_SYNC,
    "between_stages": "",
}
"""The stage of findings that are about one; empty for the time outside of stages."""

OWN_COST = ("capture", "pause")
"""Rules about what the capture itself costs."""
USUAL = ("trajectory_cause",)
"""Rules about usual work, such as a tool's, which is no loss."""

FINDINGS = {
    "loop_blocked": 0.02,  # of the trajectories' time
    "last_trajectories": 0.15,  # share of the rollout minus share of the trajectories
    "trajectory_cause": 0.25,  # of the trajectories' time
    "trajectories_for_nothing": 0.10,
    "polling": 0.05,  # of the step
    "straggler": 0.05,  # of the role's time in the step
    "idle_stage": 0.10,  # of the step
    "slow_replica": 0.20,  # of the time for a token
    "long_tail": 0.05,  # of the observed time of all devices, and so on
    "after_generation": 0.05,
    "no_requests": 0.10,
    "queued": 0.05,
    "weight_sync": 0.15,
    "gc": 0.02,
    "host_blocked": 0.10,
    "between_stages": 0.20,
    "host_bound": 0.15,
    "unexplained": 0.20,
    "exposed_communication": 0.05,
    "capture": 0.05,  # of the step
    "pause": 0.25,  # of the step
}
"""Thresholds of the findings' shares by rule: above, a change is usually worth the effort."""


def calm(report: Report) -> str:
    """Return a sentence if no finding is about the run itself, else nothing."""
    found = any(one.rule not in OWN_COST for one in report.findings)
    return "" if found else "Nothing stands out: no finding is above its threshold."
