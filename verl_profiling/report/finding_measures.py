"""The losses of time in a step: what the rules of :mod:`~verl_profiling.report.findings` measure.

Each function yields the losses of one rule, large or small, with a sentence on each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median, median_low
from typing import NamedTuple

from verl_profiling.files.step_summary import ROLLOUT
from verl_profiling.files.trajectory_log import EQUAL, NO_CPU
from verl_profiling.manifest import POLLING, WAIT
from verl_profiling.numbers.capture_rows import slowest_replica
from verl_profiling.numbers.given_work import NO_WORK
from verl_profiling.numbers.report_columns import (
    BlockRow,
    DeviceRow,
    Rollout,
    StageRow,
    StragglerRow,
    sum_of,
)
from verl_profiling.report.model import Report
from verl_profiling.report.phrases import by_reason, counted
from verl_profiling.report.summary_text import late_response
from verl_profiling.slices.intervals import grouped
from verl_profiling.steps.trajectory_columns import (
    BEFORE,
    FROM_THE_ENGINE,
    LOOP_LAG,
    OWN_CODE,
    TO_THE_ENGINE,
    UNEXPLAINED,
)
from verl_profiling.steps.trajectory_spans import UNKNOWN
from verl_profiling.units import duration, listed

MARK_MORE = "mark more of the agent loop with span(), so that this time gets a name"
AWAIT = "await the call, or run it in a thread (asyncio.to_thread)"
_ADVICE = {
    LOOP_LAG: f"find the calls that block the event loops: {AWAIT}",
    OWN_CODE: MARK_MORE,
    BEFORE: "switch the watch on, which remembers open spans, or capture steps in a row",
}
"""Advice by the cause of the trajectories' time."""
_OF_ENGINES: tuple[str, ...] = ("decode", "generate", "prefill", "first token", BEFORE, UNEXPLAINED)
"""Causes of the trajectories' time that are an engine's own work, or no cause."""


BLOCKED = 0.02
"""Blocks of event loops that cost this share of the trajectories' time explain other losses too."""
LATE_REPLICA = 0.05
"""The last replica is late if devices wait for it for this share of their observed time."""
POLLS = 0.05
"""Sleeps between polls of this share of the step explain the time after the last response."""


class Loss(NamedTuple):
    """A measured loss of time; above the threshold of its rule, it is a finding.

    Attributes:
        text: A sentence on the loss, with its number.
        seconds: Lane-seconds at stake.
        lanes: The lane at fault, if known; else the lanes that lost time, sorted by lost time.
        share: Share of time to compare with the threshold.
        advice: Advice in place of the rule's; empty for the rule's.
    """

    text: str
    seconds: float
    lanes: list[str] = []
    share: float = 1.0
    advice: str = ""


def _of_trajectories(
    losses: Callable[[Report, Rollout], Iterable[Loss]],
) -> Callable[[Report], Iterator[Loss]]:
    """Turn a function that yields losses of a rollout into the ``losses`` of a rule.

    Every device loses the time that trajectories lose, so seconds are multiplied by the devices.
    """

    def of_report(report: Report) -> Iterator[Loss]:
        if report.rollout is not None and report.rollout.seconds:
            for loss in losses(report, report.rollout):
                yield loss._replace(seconds=on_all(report, loss.seconds))

    return of_report


def stragglers(report: Report) -> Iterator[Loss]:
    """Yield each worker that is the slowest of its role in a stage, with its worst stage."""
    worst: dict[str, StragglerRow] = {}
    for row in _outermost(report):
        if row.stage != ROLLOUT or report.tail is None:  # the tail says who was late in the rollout
            worst.setdefault(row.slowest, row)
    request = report.capture_request
    if request is not None and request.is_late_start and request.last not in request.suspects:
        # the others ran the stages before it, beside its start
        worst.pop(request.last, None)
    lanes = [row.name for row in report.workers]
    for row in worst.values():
        others_us = row.slowest_us - row.behind_us / (row.workers - 1)
        who = "the others, on average,"
        if row.workers == 2:
            who = "the other worker"
        text = (
            f"{row.slowest} is slow in {row.stage}: it took {time_text(row.slowest_us)} without "
            f"waits, {who} {time_text(others_us)}, which is "
            f"{report.lane_seconds(row.behind_us / 1e6)} of waiting.{_data_or_machine(row)}"
        )
        several = f"{row.slowest}_rank", f"{row.slowest} "  # its ranks or devices
        late = [lane for lane in lanes if lane == row.slowest or lane.startswith(several)]
        share = row.behind_us / (row.workers * span_us(report))
        advice = ""
        if row.fitted == NO_WORK:
            advice = (
                "pass its work, to tell data from machine: "
                f'with stage("{row.stage}").given(lengths=lengths)'
            )
        yield Loss(text, row.behind_us / 1e6, late or [row.slowest], share, advice)


def _data_or_machine(row: StragglerRow) -> str:
    """Return a sentence on a slow worker: how much of its extra time its data and machine cause."""
    if row.data_us is None:
        return f" Data or machine: {row.fitted}." if row.fitted not in ("", NO_WORK) else ""
    return (
        f" It is last by {time_text(row.lead_us)}: {time_text(row.data_us)} are its data "
        f"({row.tokens:.1f} times the tokens), {time_text(row.lead_us - row.data_us)} the machine, "
        f"give or take {time_text(row.error_us or 0.0)}."
    )


def idle_stages(report: Report) -> Iterator[Loss]:
    lanes = [row.name for row in report.workers]
    of_workers = {span.name for span in report.gantt if span.lane != "controller"}
    for row in report.stages:
        if not is_recorded(row.name, report):
            continue
        share = row.idle_us / span_us(report)
        text = (
            f"In {row.name}, all recorded lanes were idle for {time_text(row.idle_us)} "
            f"({share:.0%} of the step)"
        )
        if row.name in of_workers:
            text += ", while the loop called workers or received results"
        yield Loss(f"{text}.", row.idle_us / 1e6 * len(report.devices), lanes, share)


def communication(report: Report) -> Iterator[Loss]:
    """Yield the exposed communication, without the waits for stragglers."""
    busy_us = sum_of(report.devices, "busy_us")
    slow_us = sum_of(_outermost(report), "behind_us")
    exposed_us = sum_of(report.devices, "exposed_communication_us")
    waiting_us = sum_of(report.devices, "waiting_us")
    lost_us = max(exposed_us - slow_us, 0.0)
    waits = ""
    if waiting_us:
        waiting = report.lane_seconds(waiting_us / 1e6)
        waits = f" (of all communication, {waiting} are waiting for other ranks)"
    text = (
        f"{report.lane_seconds(lost_us / 1e6)} of the busy time "
        f"({lost_us / (busy_us or 1.0):.0%}) are "
        f"communication without computation at the same time{waits}."
    )
    lanes = _lanes_that_lost(report.devices, lambda row: row.exposed_communication_us)
    yield Loss(text, lost_us / 1e6, lanes, lost_us / report.observed_us)


def idle(report: Report, cause: str, text: str) -> Loss:
    """Return the loss of idle time with a cause; the sentence names the cause's largest parts."""
    advice = ""
    if _largest_part(report, cause) == LOOP_LAG and _loops_are_blocked(report):
        advice = "unblock the event loops first, which cause most of this time"
    loss = _of_cause(report, cause, text + _mostly(report, cause))
    return loss._replace(advice=advice)


def _of_cause(report: Report, cause: str, text: str) -> Loss:
    return _lost(report, report.devices, lambda row: row.lost_us.get(cause, 0.0), text)


def _lost(
    report: Report, rows: Sequence[DeviceRow], lost_us: Callable[[DeviceRow], float], text: str
) -> Loss:
    """Return the lost time of devices, in lane-seconds and as a share of their observed time."""
    total_us = sum(map(lost_us, rows))
    share = total_us / report.observed_us
    lost = f"{report.lane_seconds(total_us / 1e6)} ({share:.0%} of the observed time)"
    text = f"{report.whose.title()}s {text}: {lost}."
    return Loss(text, total_us / 1e6, _lanes_that_lost(rows, lost_us), share)


def tail(report: Report) -> Iterator[Loss]:
    tail = report.tail
    if tail is None:
        return
    made = {row.replica: row.decode_tokens or 0 for row in report.engines}
    tokens = ""
    if tail.last_replica is not None and made.get(tail.last_replica):
        usual = median(made.values())
        tokens = f"; with {made[tail.last_replica]:,} tokens, the median is {usual:,.0f}"
    text = (
        f"waited for the last replica of the rollout (rollout{tail.last_replica} was done after "
        f"{time_text(tail.last_finish_us)}, the median is "
        f"{time_text(tail.median_finish_us)}{tokens}{late_response(report)})"
    )
    loss = _of_cause(report, "long_tail", text)
    late = [row.name for row in report.workers if row.replica == tail.last_replica is not None]
    slow = slowest_replica(report.replicas)
    if slow and slow.row.replica == tail.last_replica:
        loss = loss._replace(advice=slow.advice)
    yield loss._replace(lanes=late or loss.lanes)


def slow_replica(report: Report) -> Iterator[Loss]:
    """Yield the replica that is slow at each token, in a capture that the watch requested."""
    slow = slowest_replica(report.replicas)
    is_late = any(loss.share >= LATE_REPLICA for loss in tail(report))
    if slow is None or is_late or not report.noticed:
        return
    row = slow.row
    token = time_text(slow.token_us)
    usual = time_text(slow.usual_us)
    text = f"{row.worker} takes {token} a token, the other replicas {usual}."
    lanes = [lane.name for lane in report.workers if lane.replica == row.replica] or [row.worker]
    share = 1 - slow.usual_us / slow.token_us
    rollout_us = sum_of(stages_of(report, ROLLOUT), "duration_us")
    yield Loss(text, share * rollout_us / 1e6 * len(lanes), lanes, share)


def after_generation(report: Report) -> Iterator[Loss]:
    """Yield the time after the last replica, unless the finding ``polling`` covers this time."""
    polling = None
    if report.rollout:
        polling = report.rollout.polling
    is_covered = (
        polling is not None
        and polling.late_share >= POLLS
        and _largest_part(report, "after_generation") == f"controller: {POLLING}"
    )
    if not is_covered:
        text = "were idle in the rollout after the last replica was done"
        yield idle(report, "after_generation", text)


def _parts(report: Report, cause: str) -> Mapping[str, float]:
    return next((row.parts for row in report.lost if row.cause == cause), {})


def _largest_part(report: Report, cause: str) -> str:
    return next(iter(_parts(report, cause)), "")


def _mostly(report: Report, cause: str) -> str:
    """Return the three largest parts of a cause, as a part of a sentence."""
    parts = _parts(report, cause)
    whole = sum(parts.values())
    if not whole:
        return ""
    largest = sorted(parts.items(), key=lambda part: -part[1])[:3]
    shares = [f"{seconds / whole:.0%} {_called(name)}" for name, seconds in largest]
    return f" ({', '.join(shares)})"


def host_bound(report: Report) -> Iterator[Loss]:
    """Yield the host-bound time, of each device at most the median of its role.

    More of one device belongs to a straggler.
    """
    rows = [row for row in report.devices if row.device == report.on_devices]
    by_role = grouped(rows, lambda row: tuple(row.roles))
    usual = {roles: median_low(row.host_bound_us for row in of) for roles, of in by_role.items()}
    all_us = sum_of(report.workers, "host_bound_us")
    engines_us = sum(row.host_bound_us for row in report.workers if row.replica is not None)
    where = "while their hosts were at work"
    if report.replicas and engines_us > all_us / 2:
        where = "between iterations of engines that had requests"
    text = f"had no work {where}: the host did not launch work in time"
    if not report.on_devices:
        text = (
            f"ran no operator {where}: the time went into Python between operators, or "
            "waits for a core"
        )

    def in_common_us(row: DeviceRow) -> float:
        return min(row.host_bound_us, usual[tuple(row.roles)])

    yield _lost(report, rows, in_common_us, text)


def unexplained(report: Report) -> Iterator[Loss]:
    if report.captured:
        yield _of_cause(report, "unexplained", "were idle for unknown reasons")
        return
    text = "were idle while no operator or call ran: in Python, or waiting for data or a core"
    advice = "record Python stacks, which show the cause"
    if report.coverage.has_stacks:
        advice = "look at the Python frames of these lanes in the timeline (merge)"
    yield _of_cause(report, "unexplained", text)._replace(advice=advice)


@_of_trajectories
def blocked(report: Report, rollout: Rollout) -> Iterator[Loss]:
    """Yield a loss per function or span that blocked event loops, over all processes."""
    by_name = grouped(rollout.blocks, lambda row: row.what)
    for what, rows in sorted(by_name.items(), key=lambda item: -_stood_still(item[1])):
        longest = max(rows, key=lambda row: row.seconds)
        stopped = counted(sum(row.trajectories for row in rows), "trajectory")
        took = duration(sum_of(rows, "seconds"))
        loops = f"the event loop{'s' if rows[1:] else ''} of {listed([row.lane for row in rows])}"
        text = (
            f"{_blocker(what)} blocked {loops} for {took}{_many(rows)}{_innermost(longest)}: "
            f"{stopped} stood still, for {duration(_stood_still(rows))} in total."
        )
        advice = ""
        if what == UNKNOWN:
            advice = (
                "look for a thread that holds the GIL, or too few CPUs: no sample shows "
                "a blocking task"
            )
        if what == NO_CPU:
            advice = "give this host more CPUs, or run fewer processes and threads on it"
        seconds = min(longest.seconds, rollout.wall_s)
        share = _stood_still(rows) / rollout.seconds
        yield Loss(text, seconds, [row.lane for row in rows], share, advice)


def _blocker(what: str) -> str:
    """Return what blocked, as the begin of a sentence."""
    if what == UNKNOWN:
        return "Something unknown"
    name = _called(what)
    return f"{name[:1].upper()}{name[1:]}"


def _many(rows: Sequence[BlockRow]) -> str:
    """Return the number of blocks, if there are several, as a part of a sentence."""
    blocks = sum(row.blocks for row in rows)
    if blocks == 1:
        return ""
    return f"{' together' if rows[1:] else ''}, {blocks} times"


def _innermost(row: BlockRow) -> str:
    """Return the blocking function, if it is not the blocking span, as a part of a sentence."""
    if row.function in ("", row.what):
        return ""
    return f" (in {row.function})"


def _loops_are_blocked(report: Report) -> bool:
    return any(loss.share >= BLOCKED for loss in blocked(report))


def _stood_still(rows: Sequence[BlockRow]) -> float:
    return sum_of(rows, "stood_still_s")


@_of_trajectories
def last_trajectories(report: Report, rollout: Rollout) -> Iterator[Loss]:
    last = rollout.last
    if last is None:
        return
    most = next((part for part in last.parts if not part.cause.startswith(WAIT)), None)
    cause = mostly = ""
    if most:
        cause = most.cause
        mostly = f": {most.share:.0%} of that is {_called(cause)}"
    if cause == LOOP_LAG and _loops_are_blocked(report):
        return  # the finding on blocked loops covers it
    when = "last" if last.is_over else "last recorded"
    text = (
        f"In the {when} {duration(last.seconds)}, {last.share:.0%} of {rollout.of_trajectories}, "
        f"only {last.trajectories} of {last.of} trajectories still run"
        f"{mostly}{late_response(report)}."
    )
    if not last.is_over:
        text += " The recording ends before they do."
    advice = _ADVICE.get(cause, "")
    slow = slowest_replica(report.replicas)
    if cause == "decode" and slow:
        advice = slow.advice
    yield Loss(text, last.seconds, [], last.share - last.trajectories / last.of, advice)


@_of_trajectories
def one_cause(report: Report, rollout: Rollout) -> Iterator[Loss]:
    """Yield the largest cause of trajectories' time, or the one that the watch suspects; without
    waits, an engine's own work, and lag that :func:`blocked` reports.
    """
    explained = _OF_ENGINES
    if _loops_are_blocked(report):
        explained = (*_OF_ENGINES, LOOP_LAG)
    for row in sorted(rollout.causes, key=lambda row: row.cause != report.suspected_cause):
        if row.validate or row.cause.startswith(WAIT) or row.cause in explained:
            continue
        text = (
            f"{row.share:.0%} of the trajectories' time ({duration(row.seconds)}) is "
            f"{_called(row.cause)}{_calls(rollout, row.cause)}."
        )
        yield Loss(text, row.share * rollout.wall_s, [], row.share, _ADVICE.get(row.cause, ""))
        return


def _calls(rollout: Rollout, name: str) -> str:
    """Return number and duration of the calls of spans, as a part of a sentence."""
    row = next((row for row in rollout.calls if row.name == name), None)
    if row is None:
        return ""
    return f" ({row.calls:,} calls, p50 {duration(row.p50_s)}, p99 {duration(row.p99_s)})"


@_of_trajectories
def for_nothing(report: Report, rollout: Rollout) -> Iterator[Loss]:
    """Yield the time of trajectories that taught nothing."""
    share = sum_of(rollout.nothing, "share")
    took = duration(sum_of(rollout.nothing, "seconds"))
    text = (
        f"{share:.0%} of the trajectories' time ({took}) taught nothing: "
        f"{by_reason(rollout.nothing)}."
    )
    advice = ""
    if rollout.nothing and rollout.nothing[0].cause == EQUAL:
        advice = "draw other prompts, or stop a group once its first samples agree"
        if not report.useless_training:
            advice += (
                "; pass what training learns from: "
                'with stage("update_actor").given(lengths=lengths, advantages=advantages)'
            )
    yield Loss(text, share * rollout.wall_s, [], share, advice)


def useless_training(report: Report) -> Iterator[Loss]:
    """Yield each stage's training on sequences that taught nothing."""
    for stage, rows in grouped(report.useless_training, lambda row: row.stage).items():
        share, seconds = sum_of(rows, "share"), sum_of(rows, "seconds")
        text = (
            f"{share:.0%} of {stage} ({report.lane_seconds(seconds)}) taught nothing: "
            f"{by_reason(rows)}."
        )
        yield Loss(text, seconds, [], share, "leave these sequences out of the batch")


@_of_trajectories
def polling(report: Report, rollout: Rollout) -> Iterator[Loss]:
    row = rollout.polling
    if row:
        text = (
            f"The trainer slept {duration(row.late_s)} ({row.late_share:.0%} of the step) after "
            "the "
            f"last response was there: it polls its replay buffer every {duration(row.interval_s)}."
        )
        yield Loss(text, row.late_s, [], row.late_share)


def _called(cause: str) -> str:
    """Return a cause for use in a sentence, e.g. ``tool `search``` for ``tool:search``."""
    family, _, name = cause.partition(":")
    if cause in (TO_THE_ENGINE, FROM_THE_ENGINE):
        return f"the way {cause}"
    if name and family in ("tool", "wait"):
        return f"{family} `{name}`"
    return cause


def on_all(report: Report, seconds: float) -> float:
    """Convert seconds that every device lane loses to lane-seconds."""
    return seconds * max(len(report.devices), 1)


def _lanes_that_lost(rows: Sequence[DeviceRow], lost_us: Callable[[DeviceRow], float]) -> list[str]:
    """Return the names of the lanes that lost time, largest loss of their device first."""
    names: list[str] = []
    for row in sorted(rows, key=lambda row: -lost_us(row)):
        if lost_us(row) > 0:
            names += row.lanes
    return names


def _outermost(report: Report) -> list[StragglerRow]:
    """Return the straggler rows of outermost stages."""
    outermost = {(span.lane, span.name) for span in report.gantt if not span.depth}
    rows = [row for row in report.stragglers if is_recorded(row.stage, report)]
    return [row for row in rows if (row.slowest, row.stage) in outermost]


def stages_of(report: Report, name: str) -> list[StageRow]:
    """Return the rows of a stage of the loop, at most one per depth."""
    return [row for row in report.stages if row.name == name]


def span_us(report: Report) -> float:
    return max(report.span_us, 1.0)


def time_text(us: float) -> str:
    return duration(us / 1e6)


def is_recorded(stage: str, report: Report) -> bool:
    """Return whether the capture recorded a stage; it may be limited to other stages."""
    request = report.capture_request
    return request is None or not request.only or stage in request.only
