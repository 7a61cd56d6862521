"""Sentences of a report: main figures, the request of the capture, the rollout, and clocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from verl_profiling.files.watch_signs import sign_of
from verl_profiling.numbers.achieved import WHOLE_STEP
from verl_profiling.numbers.idle_causes import cause_name
from verl_profiling.numbers.report_columns import (
    OTHER_RANKS,
    AchievedRow,
    LateResponse,
    RequestedCapture,
    Rollout,
    sum_of,
)
from verl_profiling.numbers.rollout_tail import LENGTH, SPEED
from verl_profiling.report.model import Report
from verl_profiling.report.phrases import counted, sparkline, waits
from verl_profiling.slices.intervals import grouped
from verl_profiling.units import duration, listed

_MOST_BARS = 60
_WHOLE = 0.995  # is shown as 100%
_NAMED = 0.1  # share of a response's delay from which a reason is named


class Figure(NamedTuple):
    """A main figure of a step.

    Attributes:
        title: Name of the figure.
        value: The number, with its unit.
        line: Text beside the value: what it is a part of, or is made of.
        key: CSS class of the coloured square before the line; empty for none.
    """

    title: str
    value: str
    line: str
    key: str = ""


def figures(report: Report) -> Iterator[Figure]:
    """Yield the main figures: step time, tokens per second, requests a replica, busy share, lost
    lane-seconds.
    """
    title = "Recorded"
    if report.captured:
        title = "Step"
    yield Figure(title, duration(report.span_us / 1e6), _recorded(report))
    rate = report.throughput
    if rate:
        unit = report.whose
        if any(row.kind == "cuda" for row in report.devices):
            unit = "GPU"
        each = rate.tokens_per_s_per_device
        line = f"{each:,.0f} per second and {unit}; {rate.tokens:,.0f} tokens ({rate.source})"
        yield Figure("Tokens per second", f"{rate.tokens_per_s:,.0f}", line)
    if report.knee:
        yield Figure("Requests a replica", report.knee.wanted, report.knee.sentence)
    yield from _of_the_peak(report)
    working = report.working_share
    if working is None:
        return
    title = "Accelerators busy" if report.on_devices else f"{report.whose.capitalize()}s busy (CPU)"
    lanes = counted(len(report.workers), "lane")
    if report.shares_devices:
        lanes = f"{counted(len(report.devices), 'device')} ({lanes})"
    yield Figure(title, f"{working:.0%}", f"of {lanes}, {_known_waits(report)}")
    rows = {row.cause: row for row in report.lost}
    lost = sum(report.lost_s.values())
    if lost:
        row = rows[_first_cause(report)]
        whole = sum_of(report.lost, "share")
        line = f"{whole:.0%} of the observed time; {row.share:.0%} {cause_name(row.cause)}"
        if not report.findings:
            line += ", nothing unusual"
        yield Figure("Lost", report.lane_seconds(lost), line, f"k-{row.cause}")


def _of_the_peak(report: Report) -> Iterator[Figure]:
    """Yield the achieved share of the devices' peak, of the step and by stage."""
    stages = grouped(report.achieved, lambda row: row.stage)
    whole = stages.pop(WHOLE_STEP, [])
    if not whole or any(row.compute_share is None for row in whole):
        return
    parts = []
    for stage, rows in stages.items():
        parts.append(f"{stage} {_mean_share(rows, 'compute_share'):.1%}")
        if rows[0].memory_share is not None:
            parts[-1] = f"{stage} {_mean_share(rows, 'memory_share'):.1%} of the memory bandwidth"
    share = sum_of(whole, "compute_share") / len(report.devices)
    models = ", ".join(dict.fromkeys(row.device for row in whole))
    has_unknown = {row.name for row in report.workers} - {row.lane for row in whole}
    least = "at least " if report.unknown_limits or has_unknown else ""
    line = f"{', '.join(parts)} ({models}, bfloat16)"
    yield Figure("Of the peak", f"{least}{share:.1%}", line)


def _mean_share(rows: Sequence[AchievedRow], column: str) -> float:
    """Return the mean of a share over lanes, weighted by their time."""
    weighted = sum(row.duration_us * getattr(row, column) for row in rows)
    return float(weighted / (sum_of(rows, "duration_us") or 1.0))


def _first_cause(report: Report) -> str:
    """Return the cause of the first finding on lost time, else the cause of most lost time."""
    lost_s = report.lost_s
    for finding in report.findings:
        cause = finding.rule
        if finding.rule == "straggler":
            cause = OTHER_RANKS
        if lost_s.get(cause):
            return cause
    return max(lost_s, key=lost_s.__getitem__)


def _recorded(report: Report) -> str:
    """Return how much was recorded and read, as a part of a sentence."""
    traces = f"{report.coverage.read} of {report.coverage.expected} traces read"
    if report.observed_share >= _WHOLE:
        return traces
    return f"{traces}, {report.observed_share:.0%} of the {report.whose}s' time recorded"


def _known_waits(report: Report) -> str:
    """Return whether the busy share is without waits for other ranks, as a part of a sentence."""
    if not report.unmatched_us:
        return "without waits for other ranks"
    is_known = any(row.waiting_us for row in report.devices)
    if is_known:
        return "without the known waits for other ranks"
    return "waits for other ranks unknown"


def request_sentences(request: RequestedCapture | None) -> Iterator[str]:
    """Yield the requester of a capture and the reason, and a bar chart of the anomaly's values."""
    if request is None:
        return
    by = ""
    if request.by:
        by = f" of {request.by}"
    named = ""
    if request.request:
        named = f" (request {request.request})"
    noticed = ""
    if request.sign:
        noticed = f", {request.sign} in step {request.noticed}"
    reason = request.reason.removeprefix(f"step {request.noticed}: ")
    yield f"captured {request.when} by {request.kind}{by}{named}{noticed}: {reason}"
    if request.history:
        text_of = sign_of(request).unit.text_of
        last, before = text_of(request.history[-1]), text_of(request.median)
        yield f"{sparkline(request.history, _MOST_BARS)} {last}, median before {before}"


def sentences(report: Report) -> Iterator[str]:
    """Yield sentences on facts that are in no table: end of the rollout, idle training or rollout,
    clocks, read traces.
    """
    tail = report.tail
    if tail:
        finish = duration(tail.last_finish_us / 1e6)
        if tail.replicas == 1:
            yield f"rollout: 1 replica was done after {finish}"
        else:
            yield (
                f"rollout: the last of {tail.replicas:,} replicas was done after {finish}, "
                f"{tail.ratio:.2f} times the median; {tail.tail_share:.1%} of the step lies between"
            )
        if tail.response_tokens:
            latency, tokens = tail.latency_s, tail.response_tokens
            times = "unknown, as the engine reports only the end of a batch"
            if latency:
                times = f"p50 {duration(latency.p50)}, p99 {duration(latency.p99)}"
            yield (
                f"{tail.requests:,} requests: latency {times}; response p50 {tokens.p50:.0f}, p99 "
                f"{tokens.p99:.0f} tokens"
            )
    yield from waits(report.watched, report.what_would_help)
    yield from report.unknown_limits
    for clock in report.clocks:
        drift_ns = clock.closing_offset_ns - clock.offset_ns
        by, within, drift = (
            duration(ns / 1e9) for ns in (clock.offset_ns, clock.error_ns, drift_ns)
        )
        yield f"clock of {clock.host}: corrected by {by}, accurate to {within}, drift {drift}"
    yield (
        f"{report.coverage.read} of {report.coverage.expected} traces read, "
        f"{report.coverage.events:,} events{report.of_capture}"
    )


def rollout_sentences(rollout: Rollout) -> Iterator[str]:
    """Yield sentences on the rollout as a whole."""
    also = ""
    if rollout.validation:
        also = f", {rollout.validation:,} of validation"
    took = ""
    if rollout.p50_s is not None and rollout.p99_s is not None:
        took = f": p50 {duration(rollout.p50_s)}, p99 {duration(rollout.p99_s)}"
    whole = duration(sum_of(rollout.time, "seconds"))
    yield (
        f"{counted(rollout.trajectories, 'trajectory')}{also}{took}; {rollout.explained:.1%} of "
        f"the {whole} of the rollout is attributed to a cause"
    )
    if rollout.cut:
        yield f"{counted(rollout.cut, 'trajectory')} only partly in the step or the recording"
    if (last := rollout.last) and last.parts:
        parts = ", ".join(f"{part.cause} {part.share:.0%}" for part in last.parts[:3])
        yield (
            f"last: {last.trajectories:,} of {counted(last.of, 'trajectory')} "
            f"({last.trajectories / last.of:.1%}) in {duration(last.seconds)}, {last.share:.1%} "
            f"of {rollout.of_trajectories}: {parts}"
        )
    polling = rollout.polling
    if polling:
        yield (
            f"polling the replay buffer: {polling.pauses:,} times, every "
            f"{duration(polling.interval_s)}; the trainer slept {duration(polling.late_s)} "
            f"({polling.late_share:.1%} of the step) after the last response was there"
        )
    if rollout.groups_seen:
        yield (
            f"{counted(rollout.groups_seen, 'group')}: from the first end to the last end p50 "
            f"{duration(rollout.group_spread_p50_s)}, at most "
            f"{duration(rollout.group_spread_max_s)}; "
            f"members waited {duration(rollout.group_waited_s)} for the last member"
        )
    if rollout.versioned:
        made = f"{rollout.partial:,} of {counted(rollout.versioned, 'trajectory')}"
        yield f"generated with several versions of the weights: {made}"


def late_response(report: Report) -> str:
    """Return why the last response ended later than others, as a part of a sentence."""
    tail = report.tail
    late = None if tail is None else tail.late
    if late is None or late.seconds <= 0:
        return ""
    reasons = [
        f"{duration(part.seconds)} {_reason(part.cause, late)}"
        for part in late.parts
        if part.share >= _NAMED
    ]
    others = "the other responses did on average"
    if late.one_per_replica:
        others = "the last ones of other replicas"
    late_by = f"the last response ended {duration(late.seconds)} later than {others}"
    return f"; {late_by}: {listed(reasons)}"


def _reason(cause: str, late: LateResponse) -> str:
    """Return a reason of a late response, with the numbers behind it."""
    if cause == LENGTH:
        return f"{cause} ({late.tokens:,} instead of {late.usual_tokens:,.0f})"
    if cause == SPEED and late.preemptions:
        return f"{cause} (preempted {counted(late.preemptions, 'time')})"
    if cause == "prefill" and late.cached_tokens is not None:
        return f"{cause} ({late.cached_tokens:,} of {late.prompt_tokens:,} tokens cached)"
    return cause
