"""Findings on idle time: one rule for each cause that is worth acting on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median_low

import msgspec

from verl_profiling.manifest import POLLING
from verl_profiling.report.model import Finding, Report
from verl_profiling.report.replicas import slow_replica
from verl_profiling.report.rollout.findings import called
from verl_profiling.report.rows import DeviceRow, WorkerRow
from verl_profiling.report.thresholds import FINDINGS
from verl_profiling.units import duration

__all__ = ["idle_findings", "lanes_that_lost", "of_cause", "on_devices"]


def idle_findings(report: Report) -> Iterator[Finding]:
    """Yield what stands out of the idle time of a report's devices, by its cause."""
    yield from _tail(report)
    yield from _causes(report)
    yield from _host_bound(report)
    yield from _unexplained(report)


def _tail(report: Report) -> Iterator[Finding]:
    tail = report.tail
    if tail is None:
        return
    late = [row.name for row in report.workers if row.replica == tail.last_replica is not None]
    times = f"after {_time(tail.last_finish_us)}, the median is {_time(tail.median_finish_us)}"
    for finding in of_cause(
        report,
        "long_tail",
        f"waited for the last replica of the rollout (rollout{tail.last_replica} was done {times})",
        slow_replica(report.replicas)
        or "balance prompts by expected length, cap the response length, or carry the tail over to the next "
        "step (partial rollout)",
    ):
        yield msgspec.structs.replace(finding, lanes=late or finding.lanes)


def _causes(report: Report) -> Iterator[Finding]:
    if not _polls(report):
        yield from of_cause(
            report,
            "after_generation",
            "were idle in the rollout after the last replica was done" + _mostly(report, "after_generation"),
            "overlap what the loop does there (scoring, moving responses) with generation or training",
        )
    yield from of_cause(
        report,
        "no_requests",
        "of engines waited for requests: none was on its way" + _mostly(report, "no_requests"),
        "more trajectories at once, so that some generate while others wait for tools; or shorten what they "
        "wait for",
    )
    yield from of_cause(
        report,
        "weight_sync",
        "were idle while weights went to the engines",
        "transfer in larger buckets or over a faster path, or synchronise less often",
    )
    yield from of_cause(
        report,
        "host_blocked",
        "were idle while their hosts were inside calls that copy, allocate or wait for the device",
        "copy from pinned memory with non_blocking=True, and leave out calls that wait (.item(), .cpu())",
    )


def _polls(report: Report) -> bool:
    """Return whether another finding says already what lanes wait for after the generation."""
    parts = next((row.parts for row in report.lost if row.cause == "after_generation"), {})
    polling = report.rollout.polling if report.rollout else None
    said = polling is not None and polling.late_share >= FINDINGS["polling"]
    return said and next(iter(parts), "") == f"controller: {POLLING}"


def _mostly(report: Report, cause: str) -> str:
    """Return what most of a cause consists of, as a part of a sentence."""
    parts = next((row.parts for row in report.lost if row.cause == cause), {})
    whole = sum(parts.values())
    largest = sorted(parts.items(), key=lambda part: -part[1])
    listed = [f"{seconds / whole:.0%} {called(name)}" for name, seconds in largest[:3]] if whole else []
    return f" ({', '.join(listed)})" if listed else ""


def _host_bound(report: Report) -> Iterator[Finding]:
    """Yield what all lanes of a role have in common; what one has more of is the straggler's."""
    rows = [row for row in report.counted if row.device == on_devices(report)]
    usual = {
        roles: median_low([row.host_bound_us for row in rows if _roles(row) == roles])
        for roles in {_roles(row) for row in rows}
    }
    of_engines = _of_engines(report)
    if of_engines:
        where = "between iterations of engines that had requests"
    elif any(span.lane != "controller" and span.kind == "stage" for span in report.gantt):
        where = "inside their own stages"
    else:
        where = "between their iterations" if report.captured else "while operators ran on their hosts"
    if not on_devices(report):
        text = f"ran no operator {where}: they were in Python between operators, or waited for a core"
        larger = "more requests at once" if of_engines else "larger micro-batches, torch.compile"
        advice = f"fewer, larger operators ({larger}), no more processes than cores"
    elif any(row.graphs for row in rows):
        text = f"had nothing to run {where}: the host did not launch work in time"
        advice = "do less on the host between the launches of graphs, or put more into each of them"
    else:
        text = f"had nothing to run {where}: the host did not launch work in time"
        larger = "more requests at once" if of_engines else "larger micro-batches"
        advice = f"{larger}, graphs of kernels (CUDA graphs), torch.compile"
    yield from _above(
        report, "host_bound", lambda row: min(row.host_bound_us, usual[_roles(row)]), text, advice, rows
    )


def _of_engines(report: Report) -> bool:
    """Return whether most of what is host-bound is engines' time, of which requests were logged."""
    if not report.replicas:
        return False
    engines_us = sum(row.host_bound_us for row in report.workers if row.replica is not None)
    return engines_us > sum(row.host_bound_us for row in report.workers) / 2


def _unexplained(report: Report) -> Iterator[Finding]:
    yield from of_cause(
        report,
        "between_stages",
        "were idle while the loop was in no stage",
        "mark more of the loop with stage(), so that this time gets a name",
    )
    if report.captured:
        text, advice = "were idle for no reason that the capture shows", "look at the lanes in the timeline"
    elif on_devices(report):
        text = "were idle while nothing ran on their hosts, as far as the traces show"
        advice = "record Python stacks, which say what the hosts did (loading data, waiting for others)"
    else:
        text = "ran no operator: they were in Python, waited for data, or for a core"
        advice = "record Python stacks, which say what it was"
    yield from of_cause(report, "unexplained", text, advice)


def of_cause(report: Report, cause: str, text: str, advice: str) -> Iterator[Finding]:
    """Yield the finding of a cause of idle time, if it is large enough."""
    return _above(report, cause, lambda row: row.lost_us.get(cause, 0.0), text, advice, report.counted)


def _above(
    report: Report,
    rule: str,
    lost_us: Callable[[DeviceRow | WorkerRow], float],
    text: str,
    advice: str,
    rows: Sequence[DeviceRow | WorkerRow],
) -> Iterator[Finding]:
    """Yield a finding if devices lost more than the rule's share of the observed time of all devices."""
    total, observed = sum(map(lost_us, rows)), sum(row.span_us for row in report.counted) or 1.0
    if total / observed >= FINDINGS[rule]:
        lost = f"{report.lane_seconds(total / 1e6)} ({total / observed:.0%} of all)"
        yield Finding(
            rule=rule,
            text=f"{report.whose.title()}s {text}: {lost}.",
            advice=advice,
            seconds=total / 1e6,
            lanes=lanes_that_lost(rows, lost_us),
        )


def lanes_that_lost(
    rows: Sequence[DeviceRow | WorkerRow], lost_us: Callable[[DeviceRow | WorkerRow], float]
) -> list[str]:
    """Return the names of the lanes that lost time, those of the device that lost most first."""
    found = [row for row in sorted(rows, key=lambda row: -lost_us(row)) if lost_us(row) > 0]
    return [name for row in found for name in (row.lanes if isinstance(row, DeviceRow) else [row.name])]


def _roles(row: DeviceRow | WorkerRow) -> tuple[str, ...]:
    return tuple(row.roles) if isinstance(row, DeviceRow) else (row.role,)


def on_devices(report: Report) -> bool:
    return any(row.device for row in report.workers)


def _time(us: float) -> str:
    return duration(us / 1e6)
