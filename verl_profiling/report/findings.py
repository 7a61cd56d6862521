"""At most five findings: sentences about what stands out, each from a rule with a threshold.

A threshold is a share above which acting is usually worth the effort; all are listed in
``docs/report.md``. If none is exceeded, there are no findings.

What every healthy step of a synchronous loop has, is none: training ranks that wait for the rollout and
lanes that take no part in a stage are in the table of causes only.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from verl_profiling.report.anatomy import CAPTURE_CALLS
from verl_profiling.report.idle_findings import idle_findings, lanes_that_lost, of_cause, on_devices
from verl_profiling.report.lost import ROLLOUT
from verl_profiling.report.model import Finding, Report
from verl_profiling.report.rollout.findings import MARK_MORE, rollout_findings
from verl_profiling.report.rows import StragglerRow
from verl_profiling.report.thresholds import FINDINGS
from verl_profiling.units import duration

__all__ = ["LIMIT", "find"]

LIMIT = 5
_RECORD_LESS = "record less: fewer ranks, no stacks or shapes, the other mode, or the spans tool"


def find(report: Report) -> Report:
    """Return the report with its findings, those with most seconds at stake first.

    In a capture that was asked for, the rank that comes last to the collectives of its stage is the first.
    Where the watch asked, what is of its suspects alone comes before the others; what names no culprit
    comes behind what does. What is missing comes before all, because it makes them partial; what the
    capture itself cost comes last, because it is not about the training.
    """
    rules = (rollout_findings, _stragglers, _idle_stages, idle_findings, _communication)
    found = [finding for rule in rules for finding in rule(report)]
    found.sort(
        key=lambda finding: (
            _names_no_culprit(finding, report),
            not _is_of_suspects(finding, report),
            -finding.seconds,
        )
    )
    before, after = [*_comes_last(report), *_coverage(report)], [*_capture(report), *_pause(report)]
    found = [*before, *found[: LIMIT - len(before) - len(after)], *after]
    return msgspec.structs.replace(report, findings=found)


def _coverage(report: Report) -> Iterator[Finding]:
    missing, lanes, lost = len(report.coverage.missing), report.coverage.lanes, report.coverage.unrecorded
    if lost:
        yield Finding(
            rule="device_unrecorded",
            text=f"No event of a device was recorded on {_listed(lost)}, although it was in use: the traces "
            "hold the host alone, and nothing is known of what the device did.",
            advice="another profiler or NVTX holds CUPTI: start workers with NVTX_INJECTION64_PATH set to a "
            "file that does not exist (`verl-profiling doctor` looks for it), and without nsys beside",
            seconds=len(lost) * report.span_us / 1e6,
            lanes=lost,
        )
    if missing > len(lost):
        yield Finding(
            rule="coverage",
            text=f"The capture is not whole ({missing} missing or damaged): the numbers are partial.",
            advice="see what is missing below, and `verl-profiling check`",
            seconds=len(lanes) * report.span_us / 1e6,
            lanes=lanes,
        )


def _names_no_culprit(finding: Finding, report: Report) -> bool:
    """Return whether a finding asks to record more, or says of CPUs only that no operator ran."""
    vague = ("unexplained", "between_stages", *(() if on_devices(report) else ("host_bound",)))
    return finding.rule in vague or finding.advice == MARK_MORE


def _is_of_suspects(finding: Finding, report: Report) -> bool:
    """Return whether all lanes of a finding are of the suspects of the watch."""
    suspects = report.asked.suspects if report.asked and report.asked.sign else []
    return bool(finding.lanes) and all(
        any(lane == one or lane.startswith(f"{one} ") or one.startswith(f"{lane}_rank") for one in suspects)
        for lane in finding.lanes
    )


def _listed(lanes: list[str]) -> str:
    return f"{lanes[0]} and {len(lanes) - 1} more lanes" if len(lanes) > 2 else " and ".join(lanes)


def _capture(report: Report) -> Iterator[Finding]:
    costs = {row.worker: row.start_s + row.stop_s for row in report.costs}
    lanes = sorted(costs, key=lambda name: -costs[name])
    for stage in report.stages:
        if stage.name == CAPTURE_CALLS and stage.share >= FINDINGS["capture"]:
            yield Finding(
                rule="capture",
                text=f"Starting and stopping the capture took {_time(stage.duration_us)} of the step "
                f"({stage.share:.0%}), which a step that is not profiled does not spend.",
                advice=_RECORD_LESS,
                seconds=stage.duration_us / 1e6 * max(len(report.counted), 1),
                lanes=lanes,
            )
            return
    yield from of_cause(
        report, "capture", "were not recorded, while the capture started and stopped", _RECORD_LESS
    )


def _pause(report: Report) -> Iterator[Finding]:
    """Yield the time that the loop waited before and after the step for the capture."""
    if report.pause_us >= FINDINGS["pause"] * max(report.span_us, 1.0):
        pause = max((row for row in report.outside if row.is_pause), key=lambda row: row.duration_us)
        longest = next(iter(pause.parts), "")
        costs = {row.worker: row.start_s + row.stop_s for row in report.costs}
        yield Finding(
            rule="pause",
            text=f"The loop waited {_time(report.pause_us)} around the step "
            f"({report.pause_us / max(report.span_us, 1.0):.0%} of it) for the capture to start and stop"
            + (f", longest for {longest} ({duration(pause.parts[longest])})." if longest else "."),
            advice=f"{_RECORD_LESS}; of engines, fewer iterations (rollout.count)"
            if longest == ROLLOUT
            else _RECORD_LESS,
            seconds=report.pause_us / 1e6 * max(len(report.counted), 1),
            lanes=sorted(costs, key=lambda name: -costs[name]),
        )


def _comes_last(report: Report) -> Iterator[Finding]:
    """Yield the rank that comes last to the collectives of the stage that was asked for."""
    if (asked := report.asked) and asked.last:
        yield Finding(
            rule="straggler",
            text=f"Of the captured ranks, {asked.last} comes last to the collectives of "
            f"{asked.stage or 'the step'}: the others waited {duration(asked.waited_s)} for it.",
            advice="see what it does before them, and how its kernels compare with those of the others",
            seconds=asked.waited_s,
            lanes=[asked.last],
        )


def _stragglers(report: Report) -> Iterator[Finding]:
    """Yield one finding for each worker that is the slowest of its role, with the stage where it is worst."""
    worst: dict[str, StragglerRow] = {}
    for row in _outermost(report):
        if row.stage != ROLLOUT or report.tail is None:  # the tail says who was late in the rollout
            worst.setdefault(row.slowest, row)
    for row in worst.values():
        if row.behind_us >= FINDINGS["straggler"] * row.workers * max(report.span_us, 1.0):
            others_us = row.slowest_us - row.behind_us / (row.workers - 1)
            who = "the other one" if row.workers == 2 else "the others, on average,"
            yield Finding(
                rule="straggler",
                text=f"{row.slowest} is slow in {row.stage}: it worked {_time(row.slowest_us)} there, {who} "
                f"{_time(others_us)}, which is {report.lane_seconds(row.behind_us / 1e6)} of waiting.",
                advice="balance the micro-batches by tokens, and compare its host with those of the others ("
                + ("clocks of its device, other processes)" if on_devices(report) else "other processes)"),
                seconds=row.behind_us / 1e6,
                lanes=_lanes_of(row.slowest, report),
            )


def _lanes_of(worker: str, report: Report) -> list[str]:
    """Return the lanes of a worker: a replica has one for each rank, a process one for each device."""
    several = (f"{worker}_rank", f"{worker} ")
    lanes = [row.name for row in report.workers if row.name == worker or row.name.startswith(several)]
    return lanes or [worker]


def _idle_stages(report: Report) -> Iterator[Finding]:
    for stage in report.stages:
        if stage.idle_us >= FINDINGS["idle_stage"] * max(report.span_us, 1.0):
            dispatched = any(s.name == stage.name and s.lane != "controller" for s in report.gantt)
            yield Finding(
                rule="idle_stage",
                text=f"In {stage.name} no lane that was recorded did anything for {_time(stage.idle_us)} "
                f"({stage.idle_us / report.span_us:.0%} of the step)"
                + (": the loop called its workers, or took their results." if dispatched else "."),
                advice="pass less to its workers and back, or by a faster way"
                if dispatched
                else "run it beside the rollout or the training, or spread it over more processes",
                seconds=stage.idle_us / 1e6 * len(report.counted),
                lanes=[row.name for row in report.workers],
            )


def _communication(report: Report) -> Iterator[Finding]:
    """Yield the communication with nothing beside it, without what a straggler adds to it."""
    busy = sum(row.busy_us for row in report.counted)
    exposed = sum(row.exposed_communication_us for row in report.counted)
    slow = sum(row.behind_us for row in _outermost(report))
    exposed = max(exposed - slow, 0.0)
    if busy and exposed / busy >= FINDINGS["exposed_communication"]:
        waiting = sum(row.waiting_us for row in report.counted)
        waits = f"{report.lane_seconds(waiting / 1e6)} are waiting for other ranks"
        said = f" (of all communication, {waits})" if waiting else ""
        yield Finding(
            rule="exposed_communication",
            text=f"{report.lane_seconds(exposed / 1e6)} of the busy time ({exposed / busy:.0%}) are "
            f"communication with no computation beside it{said}.",
            advice="prefetch shards (FSDP), overlap gradient reduction, or use a smaller parallel group"
            if on_devices(report)
            else "fewer and larger collectives, or fewer ranks: on CPUs they take the cores that compute",
            seconds=exposed / 1e6,
            lanes=lanes_that_lost(report.counted, lambda row: row.exposed_communication_us),
        )


def _outermost(report: Report) -> list[StragglerRow]:
    """Return the rows of stages that are in no other one, those with most waiting first."""
    outermost = {(span.lane, span.name) for span in report.gantt if not span.depth}
    return [row for row in report.stragglers if (row.slowest, row.stage) in outermost]


def _time(us: float) -> str:
    return duration(us / 1e6)
